"""The policy, in one process or spread over several."""

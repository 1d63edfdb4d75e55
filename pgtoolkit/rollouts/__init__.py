"""The documents of a run: sampled from the policy, or recorded before."""

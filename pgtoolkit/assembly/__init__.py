"""From a configuration to the parts of a run, and one run from its start to its last checkpoint."""

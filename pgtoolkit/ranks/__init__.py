"""Several processes: which one this is, and what they exchange."""

"""From the command line to processes."""

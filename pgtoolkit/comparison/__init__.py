"""Finished runs side by side, and one run looked at."""

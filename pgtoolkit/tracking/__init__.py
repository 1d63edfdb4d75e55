"""What is shown and kept of a run while it trains."""

"""Shows and keeps the records of a run while it trains."""

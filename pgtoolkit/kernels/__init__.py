"""Everything of the size tokens x vocabulary."""

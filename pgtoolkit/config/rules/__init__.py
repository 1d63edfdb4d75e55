"""Rules between keys: what cannot be right together."""

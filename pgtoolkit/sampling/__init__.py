"""Completions, by the model in training, copies of it, or servers."""

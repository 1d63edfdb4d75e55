"""The prompts of a task, and the scores of their completions."""

"""The loss of a step, on vectors of one number per token."""

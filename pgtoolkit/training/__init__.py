"""A step: the loss of its micro-batches, gradients, updates, checkpoints and evaluations."""

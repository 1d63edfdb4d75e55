"""The losses inside other trainers."""

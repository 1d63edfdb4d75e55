"""Rollouts of other trainers: converted into recorded rollouts, and examined."""

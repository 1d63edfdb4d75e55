"""DAPO's soft punishment of long completions (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations


def overlong_penalty(length: int, longest: int, buffer: int, most: float) -> float:
    """What is added to the reward of a completion of `length` tokens, its end included: 0, or less.

    0 up to longest - buffer tokens, from there on in equal steps, down to -most at `longest`.
    """
    beyond = max(0, min(length, longest) - (longest - buffer))
    return -most * beyond / buffer if beyond else 0.0

"""The specification of the penalties against a reference, as plain as `reference.py`.

Of a token: (value, its derivative by p) of log-probs p (new), o (old) and f (of the reference). Of a whole row of the
vocabulary: (value, its derivatives by the log-probs' logits) of log-probs p_v and f_v.
"""

from __future__ import annotations

import math


def _k1(p, o, f):
    return p - f, 1.0


def _k2(p, o, f):
    return (p - f) ** 2 / 2, p - f


def k3(p, o, f):
    x = min(20.0, max(-20.0, f - p))
    return math.exp(x) - x - 1, 1 - math.exp(x) if x == f - p else 0.0


def _k3_ratio(p, o, f):
    (value, slope), x = k3(p, o, f), min(20.0, max(-20.0, p - o))
    return value * math.exp(x), math.exp(x) * (slope + (value if x == p - o else 0.0))


OF_TOKEN = {"k1": _k1, "k2": _k2, "k3": k3, "k3_ratio": _k3_ratio}


def _full_reverse(p, f):
    value = math.fsum(math.exp(x) * (x - y) for x, y in zip(p, f, strict=True) if x > -math.inf)
    return value, [math.exp(x) * (x - y - value) if x > -math.inf else 0.0 for x, y in zip(p, f, strict=True)]


def _full_forward(p, f):
    value = math.fsum(math.exp(y) * (y - x) for x, y in zip(p, f, strict=True) if y > -math.inf)
    return value, [math.exp(x) - math.exp(y) for x, y in zip(p, f, strict=True)]


OF_ROW = {"full_reverse": _full_reverse, "full_forward": _full_forward}


def log_softmax(row: list[float]) -> list[float]:
    largest = max(row)
    log_z = largest + math.log(math.fsum(math.exp(x - largest) for x in row))
    return [x - log_z for x in row]

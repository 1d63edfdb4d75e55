"""Truncated importance sampling: REINFORCE with the token's ratio to the sampler, at most `cap`.

    pgtk loss=tis.tis rollout.old_log_probs=training

typed where this file lies.
"""


def tis(log_probs, old_log_probs, advantages, ratio, sampling_log_probs=None, *, cap=2.0):
    """-min(exp(p - b), cap) A p, no gradient through the ratio"""
    sampled = old_log_probs if sampling_log_probs is None else sampling_log_probs
    return -ratio(log_probs - sampled).clamp(max=cap).detach() * advantages * log_probs

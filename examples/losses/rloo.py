"""The loss of TRL's RLOOTrainer: the ratio of a whole completion is clipped, which is the product
of those of its tokens.

    pgtk loss=rloo.rloo aggregation=sample_mean advantage=rloo

typed where this file lies.
"""

import torch


def rloo(log_ratio, advantages, ratio, documents, *, epsilon_low=0.2, epsilon_high=0.2):
    """-min(R_d A_d, clip(R_d, 1 - epsilon_low, 1 + epsilon_high) A_d), R_d the product of r_t"""
    bounds = 1 - epsilon_low, 1 + epsilon_high
    r = ratio(documents.sum(log_ratio))
    advantage = documents.mean(advantages)
    return -torch.minimum(r * advantage, r.clamp(*bounds) * advantage), {"bounds": bounds}

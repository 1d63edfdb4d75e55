"""GAPO (arXiv 2609.00444): the fewer completions of a prompt are right, the wider its upper clip.

    pgtk loss=gapo.gapo advantage=dr_grpo

typed where this file lies. With ratios by document the paper has low 3e-3 and high 5e-3.
"""

import torch


def gapo(
    log_ratio, advantages, rewards, ratio, documents, groups, *, low=0.2, high=0.28, right=1.0
):
    """-min(r A, clip(r, 1 - low, 1 + high_g) A), high_g = low + (high - low) wrong / (k - 1)"""
    is_wrong = (documents.first(rewards) < right).to(advantages)
    others = groups.sum(torch.ones_like(is_wrong)) - 1
    high_of_group = low + (high - low) * groups.sum(is_wrong) / others.clamp(min=1)
    upper = 1 + documents.spread(groups.spread(high_of_group))
    r = ratio(log_ratio)
    return -torch.where(advantages > 0, torch.minimum(r, upper), r.clamp(min=1 - low)) * advantages

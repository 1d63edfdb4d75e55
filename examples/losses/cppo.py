"""CPPO (arXiv 2606.10968): a token that moves on keeps its gradient while the document's earlier
tokens have left it a budget of divergence.

    pgtk loss=cppo.cppo rollout.old_log_probs=training

typed where this file lies.
"""


def cppo(
    log_probs,
    old_log_probs,
    advantages,
    lengths,
    position,
    ratio,
    documents,
    sampling_log_probs=None,
    *,
    budget=0.15,
    budget_per_token=0.015,
    last_weight=0.8,
):
    """-r A where A (r - 1) <= 0 or z_t <= min(budget, budget + sum of its shares - sum of z)"""
    sampled = old_log_probs if sampling_log_probs is None else sampling_log_probs
    r = ratio(log_probs - sampled)
    weight = 1 - (1 - last_weight) * position / (lengths - 1).clamp(min=1)
    moved = weight * (log_probs.detach().exp() - sampled.exp()).abs()
    left = budget + budget_per_token * documents.before(weight) - documents.before(moved)
    is_kept = (advantages * (r.detach() - 1) <= 0) | (moved <= left.clamp(max=budget))
    return -r * advantages * is_kept

"""Metrics of a step's documents that need no model: rewards, lengths, groups without a signal."""

from __future__ import annotations

from pgtoolkit.document import Document, trajectories_of
from pgtoolkit.rollouts.settings import (
    OldLogProbs,
    PolicyRolloutSettings,
    RecordedRolloutSettings,
    Truncated,
)
from pgtoolkit.rollouts.source import Outline

LARGE_DIFFERENCE = 0.05
"""A larger mean difference of log-probs is noted. Rounding stays far below it (bfloat16 logits move
a document of 16 tokens by 0.004), and so do a few updates of age; another model, or log-probs one
token off, go to 1 and beyond."""

_LARGE_SHARE = 0.1
"""Where the difference between sampler and trainer would alone take more of the ratios out of the
clip, it is noted."""


def data_metrics(
    documents: list[Document], num_updates: int, masks_truncated: bool = False
) -> dict[str, float]:
    """Return means over the documents of one step; a metric that the data does not know is left
    out.

    So is failed_score_fraction where it is 0. Metrics of an attempt count a trajectory once, by its
    first document. staleness is the number of optimizer updates between the policy that generated a
    document and the one in training.
    masks_truncated: whether documents that were cut off have weight 0.
    """
    attempts = _attempts(documents)
    columns = {
        "reward": [document.reward for document in attempts],
        "overlong_penalty": [_overlong_penalty(document) for document in attempts],
        "kl_reward": [document.kl_reward for document in attempts],
        "dropped_prompt_fraction": [document.dropped_prompt_fraction for document in attempts],
        "dropped_group_fraction": [document.dropped_group_fraction for document in attempts],
        "retired_prompts": [document.retired_prompts for document in attempts],
        "exact_match": [document.exact_match for document in attempts],
        "truncated_fraction": [document.truncated for document in documents],
        "kept_set_overflow_fraction": [
            None if document.sampling_kept_ids is None else document.kept_set_overflows
            for document in documents
        ],
        # Subtracted as integers: counters near 2**24 would not survive a cast to float32 first.
        "staleness": [
            None if document.model_version is None else num_updates - document.model_version
            for document in documents
        ],
        "completion_length": [document.num_trained for document in documents],
        "zero_advantage_group_fraction": _groups_without_signal(documents, masks_truncated),
    }
    if any(document.score_failed for document in attempts):
        columns["failed_score_fraction"] = [document.score_failed for document in attempts]
    for name in dict.fromkeys(name for document in attempts for name in document.measures):
        columns[name] = [document.measures.get(name) for document in attempts]
    known = {
        name: [float(value) for value in values if value is not None]
        for name, values in columns.items()
    }
    return {name: sum(values) / len(values) for name, values in known.items() if values}


def _attempts(documents: list[Document]) -> list[Document]:
    """Return the first document of each trajectory, in the order of their last ones."""
    first_of = dict(zip(reversed(trajectories_of(documents)), reversed(documents), strict=True))
    return list(first_of.values())[::-1]


def _overlong_penalty(document: Document) -> float | None:
    if document.task_reward is None or document.reward is None:
        return None
    return document.reward - document.task_reward


def mismatch_note(
    documents: list[Document],
    metrics: dict[str, float],
    settings: PolicyRolloutSettings | RecordedRolloutSettings,
) -> str:
    """Return why the documents of a run's first step do not seem to come from its policy; "" if
    they do.

    metrics: of that step, before any update. new_logprobs, in which a document without a trained
        token or of weight 0 counts as 0, is compared with the mean of the old log-probs; the mean
        ratio would tell little, for over tokens of any other policy it is expected to be 1 as well.
        Without old log-probs there is nothing to compare, nor where a reducer decides which
        documents have a weight.
    """
    masks_truncated = settings.truncated == Truncated.mask
    means = []
    for document in documents:
        if document.old_log_probs is None:
            return ""
        if not _has_weight(document, masks_truncated):
            continue
        if isinstance(document, Outline) and document.num_trained:
            means.append(document.old_log_prob)
        elif document.num_trained:
            means.append(float(document.old_log_probs.double().mean()))
    if not means or len(means) != metrics["num_documents"] - metrics["num_empty_documents"]:
        return ""
    difference = (metrics["new_logprobs"] * len(documents) - sum(means)) / len(means)
    if abs(difference) <= LARGE_DIFFERENCE:
        return ""
    causes = {
        "recorded": "the rollouts may be of another model, of another temperature than "
        f"rollout.temperature={settings.temperature}, or have old_log_probs that are one token "
        "off: see docs/data.md",
        "policy": (
            "sampling and training compute different log-probs; "
            "rollout.old_log_probs=training takes the latter"
        ),
    }
    return (
        "before its first update the policy's log-probs differ from the old ones by "
        f"{difference:+.3g} a token, where 0 is expected (a ratio of 1): {causes[settings.name]}."
    )


def sampling_note(
    metrics: dict[str, float], rollout: PolicyRolloutSettings | RecordedRolloutSettings, loss: str
) -> str:
    """Return why the clip cannot tell an update from the gap between sampler and trainer; "" if it
    can.

    metrics: of a step. loss: its name.
    """
    # Both metrics count a document without a trained token as 0.
    documents = metrics.get("num_documents", 0.0)
    trained = documents - metrics.get("num_empty_documents", 0.0)
    times = documents / trained if trained else 1.0
    share = times * metrics.get("clipped_sampling_fraction", 0.0)
    # Proximal log-probs differ from the sampler's by the updates of the lag as well.
    is_proximal = (
        isinstance(rollout, PolicyRolloutSettings) and rollout.old_log_probs == OldLogProbs.proximal
    )
    if not share > _LARGE_SHARE or is_proximal:
        return ""
    top_p = getattr(rollout, "top_p", None)
    cause = "A correction weighs each token by it (docs/losses.md)"
    if top_p is not None and "kept_set_overflow_fraction" not in metrics:
        cause = (
            f"rollout.top_p={top_p} renormalises the sampler's log-probs over the tokens that it "
            "keeps"
        )
    return (
        "the sampler's log-probs differ from the trainer's by "
        f"{times * metrics['difference_old_sampling']:.2g} a token. This gap alone would take "
        f"{share:.0%} of the ratios out of the clip of loss={loss}, more than an update may. "
        f"{cause}. This note is given once; the metrics difference_old_sampling and "
        "clipped_sampling_fraction follow the gap."
    )


def overflow_note(metrics: dict[str, float]) -> str:
    """Return what to do where many documents are not trained, since sampling kept more tokens than
    are recorded; "" elsewhere. metrics: of a step."""
    share = metrics.get("kept_set_overflow_fraction", 0.0)
    if not share > _LARGE_SHARE:
        return ""
    return (
        f"{share:.0%} of the documents are not trained: somewhere in them rollout.top_p or "
        "rollout.top_k kept more tokens than sampler.keep_top. Use more of these, or "
        "rollout.top_k=32 beside top_p. A server that gives log-probs from before truncation looks "
        "the same: start it with --logprobs-mode processed_logprobs. This note is given once; the "
        "metric kept_set_overflow_fraction follows the share."
    )


def _groups_without_signal(documents: list[Document], masks_truncated: bool) -> list[bool]:
    """Return, for each group, whether all advantages of its documents that have a weight are 0."""
    signals: dict[int, bool] = {}
    for document in documents:
        has_signal = _has_signal(document) and _has_weight(document, masks_truncated)
        signals[document.group] = signals.get(document.group, False) or has_signal
    return [not has_signal for has_signal in signals.values()]


def _has_weight(document: Document, masks_truncated: bool) -> bool:
    """Return False for a document that has weight 0 whatever the aggregation says."""
    is_masked = masks_truncated and bool(document.truncated)
    return not (document.is_excluded or document.kept_set_overflows or is_masked)


def _has_signal(document: Document) -> bool:
    if isinstance(document, Outline):
        return document.has_signal
    return bool((document.advantages != 0).any())

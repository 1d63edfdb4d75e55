"""What the documents of a step tell without the model: rewards, lengths, groups without a
signal."""

from __future__ import annotations

from pgtoolkit.batch import Document, trajectories_of
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import OldLogProbs, PolicyRolloutConfig, RecordedRolloutConfig
from pgtoolkit.rollouts.steps import Outline

LARGE_DIFFERENCE = 0.05
"""A larger mean difference of log-probs is noted. Rounding stays far below it (bfloat16 logits move
a document of 16 tokens by 0.004), and so do a few updates of age; another model, or log-probs one
token off, go to 1 and beyond."""

_LARGE_SHARE = 0.1
"""Where the difference between sampler and trainer would alone take more of the ratios out of the
clip, it is noted."""


def data_metrics(documents: list[Document], num_updates: int) -> dict[str, float]:
    """Means over the documents of one step; a metric that the data does not know is left out.

    So is failed_score_fraction where it is 0. What an attempt has counts a trajectory once, by its
    first document. staleness is the number of optimizer updates between the policy that generated a
    document and the one in training.
    """
    attempts = [
        *dict(zip(reversed(trajectories_of(documents)), reversed(documents), strict=True)).values()
    ][::-1]
    columns = {
        "reward": [d.reward for d in attempts],
        "overlong_penalty": [
            None if d.task_reward is None or d.reward is None else d.reward - d.task_reward
            for d in attempts
        ],
        "kl_reward": [d.kl_reward for d in attempts],
        "dropped_prompt_fraction": [d.dropped_prompt_fraction for d in attempts],
        "dropped_group_fraction": [d.dropped_group_fraction for d in attempts],
        "retired_prompts": [d.retired_prompts for d in attempts],
        "exact_match": [d.exact_match for d in attempts],
        "truncated_fraction": [d.truncated for d in documents],
        # Subtracted as integers: counters near 2**24 would not survive a cast to float32 first.
        "staleness": [
            None if d.model_version is None else num_updates - d.model_version for d in documents
        ],
        "completion_length": [d.num_trained for d in documents],
        "zero_advantage_group_fraction": _groups_without_signal(documents),
    }
    if any(document.score_failed for document in attempts):
        columns["failed_score_fraction"] = [document.score_failed for document in attempts]
    for name in dict.fromkeys(name for d in attempts for name in d.measures):
        columns[name] = [d.measures.get(name) for d in attempts]
    known = {
        name: [float(value) for value in values if value is not None]
        for name, values in columns.items()
    }
    return {name: sum(values) / len(values) for name, values in known.items() if values}


def mismatch_note(
    documents: list[Document],
    new_logprobs: float,
    config: PolicyRolloutConfig | RecordedRolloutConfig,
) -> str:
    """Why the documents of a run's first step do not seem to come from its policy; nothing if they
    fit.

    new_logprobs: the metric, before any update. It is compared with the mean of the old log-probs,
        for the mean of the
    ratio itself says little: over tokens that any other policy sampled it is expected to be 1, too.
        Without old
    log-probs there is nothing to compare.
    """
    means = []
    for document in documents:
        if document.old_log_probs is None:
            return ""
        if isinstance(document, Outline) and document.num_trained:
            means.append(document.old_log_prob)
        elif document.num_trained:
            means.append(float(document.old_log_probs.double().mean()))
    difference = new_logprobs - sum(means) / len(documents)
    if abs(difference) <= LARGE_DIFFERENCE:
        return ""
    causes = {
        "recorded": "the rollouts may be of another model, of another temperature than "
        f"rollout.temperature={config.temperature}, or have old_log_probs that are one token off: "
        "docs/data.md",
        "policy": (
            "sampling and training compute different log-probs; "
            "rollout.old_log_probs=training takes the latter"
        ),
    }
    return (
        "before its first update the policy's log-probs differ from the old ones by "
        f"{difference:+.3g} a token, where 0 is expected (a ratio of 1): {causes[config.name]}."
    )


def sampling_note(metrics: dict[str, float], config: Config) -> str:
    """Why the clip cannot tell an update from what sampler and trainer differ by; nothing if it
    can.

    metrics: of a step.
    """
    share, rollout = metrics.get("clipped_sampling_fraction", 0.0), config.rollout
    is_proximal = (
        isinstance(rollout, PolicyRolloutConfig) and rollout.old_log_probs == OldLogProbs.proximal
    )
    if not share > _LARGE_SHARE or is_proximal:  # of which the updates of a lag are part
        return ""
    loss, top_p = config.loss.name, getattr(rollout, "top_p", None)
    cause = "A correction weighs each token by it (docs/losses.md)"
    if top_p is not None and top_p < 1:
        cause = f"rollout.top_p={top_p} renormalises the sampler's over the tokens that it keeps"
    return (
        "the sampler's log-probs differ from the trainer's by "
        f"{metrics['difference_old_sampling']:.2g} a token, which alone would take {share:.0%} of "
        f"the ratios out of the clip of loss={loss}: more than an update may. {cause}. Said once; "
        "the metrics difference_old_sampling and clipped_sampling_fraction tell more."
    )


def _groups_without_signal(documents: list[Document]) -> list[bool]:
    has_signal: dict[int, bool] = {}
    for document in documents:
        signal = (
            document.has_signal
            if isinstance(document, Outline)
            else bool((document.advantages != 0).any())
        )
        signal = signal and not document.is_excluded
        has_signal[document.group] = has_signal.get(document.group, False) or signal
    return [not signal for signal in has_signal.values()]

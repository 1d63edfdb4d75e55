"""The recorded rollouts and the estimator of advantages that a configuration describes."""

from __future__ import annotations

from pathlib import Path

from pgtoolkit.config.schema import Config
from pgtoolkit.document import TOP_VECTORS
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.objective import Loss
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.conversations import LoadTokenizer
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.settings import (
    AdvantageEstimator,
    AdvantageSettings,
    RecordedRolloutSettings,
    RolloutSettings,
)
from pgtoolkit.tasks.settings import TaskSettings
from pgtoolkit.training.whole_step import of_whole_step


def estimator_of(
    advantage: AdvantageSettings, rollout: RolloutSettings, task: TaskSettings
) -> Estimator:
    """Return the estimator of advantages.

    Raises ConfigError for a function that cannot be imported, or that fails on a few numbers.
    """
    return Estimator.of(advantage, rollout, getattr(task, "verifiers", {}))


def recorded_rollouts(
    config: Config,
    loss: Loss,
    vocabulary_size: int | None,
    max_tokens: int | None,
    first: int | None = None,
    layout: Layout = ONE_PROCESS,
    run_dir: Path | None = None,
    tokenizer: LoadTokenizer | None = None,
) -> RecordedRollouts:
    """Return the recorded rollouts of a configuration, with the fields that its loss needs.

    Raises DataError where they lack these. See `RecordedRollouts` for the parameters.
    """
    is_needed = {
        "group_id": AGGREGATIONS[config.aggregation.mode].needs_groups,
        "sampling_log_probs": loss.needs_sampling_log_probs,
        "ref_log_probs": config.kl.reference == "recorded",
        "truncated": loss.masks_truncated,
        **dict.fromkeys(TOP_VECTORS, loss.family.score_centering),
    }
    assert isinstance(config.rollout, RecordedRolloutSettings)
    instead_of_parts = None
    if of_whole_step(loss):
        has_none = config.advantage.estimator == AdvantageEstimator.none
        instead_of_parts = "loss=grpo advantage=dr_grpo" if has_none else "loss=grpo"
    elif loss.aggregation.by_sign:
        instead_of_parts = "aggregation=prompt_mean"
    return RecordedRollouts(
        config.rollout,
        estimator_of(config.advantage, config.rollout, config.task),
        vocabulary_size,
        seed=config.seed,
        needs=tuple(name for name, needed in is_needed.items() if needed),
        max_tokens=max_tokens,
        reads_old_log_probs=loss.reads_old_log_probs,
        first=first,
        layout=layout,
        run_dir=run_dir,
        tokenizer=tokenizer,
        one_advantage=loss.aggregation.by_sign,
        instead_of_parts=instead_of_parts,
        without_old_log_probs=_without_old_log_probs(loss),
    )


def _without_old_log_probs(loss: Loss) -> str:
    """Return the choices that train on rows without old log-probs, beside those of a loss."""
    choices = ["loss=reinforce"]
    if loss.correction is not None:
        choices.append("correction=none")
    if loss.kl is not None and loss.kl.reads_old_log_probs:
        choices.append("kl=k3")
    if loss.family.score_centering:
        choices.append("loss.score_centering=false")
    return " ".join(choices)

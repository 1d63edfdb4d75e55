"""Checks that a module and the steps that it is to be trained on fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.function import FunctionFamily, reads_rewards
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.trial import trains_on_advantages_alone
from pgtoolkit.model.lora import rank_of
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.environment import AXES
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.rules import OWN_AT_ONCE, OWN_LATER, OWN_OF_GROUPS, OWN_WITHOUT_REWARDS
from pgtoolkit.rollouts.rules_in_python import misfit
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import RolloutSettings, Truncated
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.rollouts.whole_steps import misfits_of_groups
from pgtoolkit.system.declared import Needed
from pgtoolkit.training.critic import Critic
from pgtoolkit.training.whole_step import needs_first_pass


class ModuleOfParts(Protocol):
    """The interface of a module as it is read here. `training.module.PolicyGradientModule`, which
    calls `check_parts`, is one."""

    policy: Policy
    loss: Loss
    layout: Layout
    reference: Policy | None
    reference_every: int | None
    critic: Critic | None
    adaptive_kl: AdaptiveKL | None
    shape: Shape


def check_parts(module: ModuleOfParts, loader: StepLoader) -> None:
    """Raise ConfigError where the numbers of a step would not be those that the parts name: where
    they do not meet a rule, or where two of them say something else of the same."""
    source = loader.source
    loss = module.loss
    sampled = isinstance(source, SampledRollouts)
    if isinstance(source, SampledRollouts | RecordedRollouts):
        _check_completions(loss, source.settings if sampled else source.config)
    penalty = source.penalty if isinstance(source, SampledRollouts) else None
    values = source.values_by_key | _values_of(module, penalty)
    values |= {f"accumulation.{name}": value for name, value in vars(loader.accumulation).items()}
    values["model.share_prompts"] = loader.share_prompts
    if module.reference is None:
        values["kl.reference"] = None if sampled else "recorded"
    problem = misfit(values, _rows_for_own(loss, values.get("advantage")))
    if problem is not None:
        raise ConfigError(problem)
    _check_groups(loss, loader)
    if isinstance(source, SampledRollouts | RecordedRollouts):
        _check_shape(module, source.estimator.shape)
    if isinstance(source, SampledRollouts):
        _check_sampled(module, source, loader)


def _refuse(setting: str, got: object, reason: str, use: str) -> None:
    raise ConfigError(f"{setting} (got {got}). {reason} Use {use}.")


def _values_of(module: ModuleOfParts, penalty: KL | None) -> dict[str, object]:
    """Return what the rules between parts compare, by the names of keys. penalty: on rewards."""
    loss = module.loss
    kl = loss.kl or penalty
    kind = "none" if kl is None else kl.kind
    adaptive = None if kl is None else module.adaptive_kl
    return {
        "loss": loss.family.name if _is_ours(loss) else "custom",
        "loss.score_centering": loss.family.score_centering,
        "aggregation": loss.aggregation.name,
        "correction": "none" if loss.correction is None else loss.correction.name,
        "entropy.coefficient": loss.entropy_coefficient,
        "entropy.top_fraction": loss.entropy_top_fraction,
        "metrics": loss.metrics,
        "kl": kind,
        "kl.kind": kind,
        "kl.place": "loss" if kl is loss.kl else "reward",
        "kl.reference": "of the module",
        "kl.target": None if adaptive is None else adaptive.target,
        "kl.update_every": module.reference_every,
        "model.lora_rank": rank_of(module.policy.model),
        "model.dtype": str(module.policy.compute_dtype).removeprefix("torch."),
        **{f"parallelism.{axis}": module.layout.size(axis) for axis in AXES},
    }


def _is_ours(loss: Loss) -> bool:
    return FAMILIES.get(loss.family.name) is type(loss.family)


def _rows_for_own(loss: Loss, estimator: object) -> Iterator[Needed]:
    """Yield the rules on losses of ours that hold for one of the user's own, too."""
    if _is_ours(loss):
        return
    asked = loss.family.asked if isinstance(loss.family, FunctionFamily) else frozenset()
    if asked & {"groups", "group_rewards"}:
        yield from OWN_OF_GROUPS
    if not reads_rewards(loss.family):
        yield from OWN_WITHOUT_REWARDS
    if estimator != "none":
        return
    if trains_on_advantages_alone(loss.family, spread=0):
        yield from OWN_AT_ONCE
    if trains_on_advantages_alone(loss.family, spread=0.05):
        yield from OWN_LATER


def _check_groups(loss: Loss, loader: StepLoader) -> None:
    """Refuse steps that do not hold what the loss compares."""
    compares = f"Loss with family {loss.family.name!r}"
    if loss.aggregation.needs_groups:
        compares = f"aggregation {loss.aggregation.name!r}"
    docs_per_step = loader.accumulation.docs_per_step
    if loss.needs_whole_groups and not loader.close_on_groups:
        _refuse(
            f"{compares} needs StepLoader(..., close_on_groups=True)",
            loader.close_on_groups,
            "Else a step may hold a part of a prompt's completions.",
            "close_on_groups=True",
        )
    source = loader.source
    if loss.needs_whole_groups and isinstance(source, RecordedRollouts) and not source.has_groups:
        _refuse(
            f"{compares} needs RecordedRollouts whose rows have a group_id",
            "rows without",
            "Each document would be a group of its own.",
            "rows with group_id, or RecordedRolloutSettings(group_size=8) where those of a prompt "
            "follow each other",
        )
    if docs_per_step == 0 and (loss.needs_whole_groups or needs_first_pass(loss)):
        _refuse(
            f"{compares} needs AccumulationSettings(docs_per_step=...) above 0",
            0,
            "A fixed number of micro-batches holds other documents from step to step.",
            "AccumulationSettings(docs_per_step=64)",
        )
    if loader.close_on_groups and isinstance(loader.source, SampledRollouts):
        problems = misfits_of_groups(
            "StepLoader(..., close_on_groups=True)",
            docs_per_step,
            loader.source.settings.group_size,
            "A step ends where a group ends, and has other documents otherwise.",
        )
        if problems:
            raise ConfigError(problems[0])


def _check_completions(loss: Loss, settings: RolloutSettings) -> None:
    """Refuse a loss at another temperature than that of the completions, and one that does not
    mask what is to be masked."""
    if loss.temperature != settings.temperature:
        _refuse(
            f"Loss needs temperature={settings.temperature}, that of the rollouts",
            loss.temperature,
            "Its log-probs would not be those of the policy that wrote the completions.",
            f"Loss(..., temperature={settings.temperature})",
        )
    masks = settings.truncated == Truncated.mask
    if loss.masks_truncated != masks:
        _refuse(
            f"truncated={settings.truncated.value!r} of the rollouts needs "
            f"Loss(..., masks_truncated={masks})",
            loss.masks_truncated,
            "The loss is what leaves out completions that were cut off.",
            f"masks_truncated={masks}",
        )


def _check_shape(module: ModuleOfParts, shape: Shape) -> None:
    """Refuse a loss that would get other rewards than the estimator. shape: of the estimator."""
    if module.shape == shape or (module.shape == Shape() and not reads_rewards(module.loss.family)):
        return
    _refuse(
        "PolicyGradientModule needs as its shape that of the rollouts' estimator",
        f"{module.shape} and {shape}",
        "A loss that reads rewards gets them by the first, and an estimator by the second.",
        "module.shape = rollouts.estimator.shape",
    )


def _check_sampled(module: ModuleOfParts, source: SampledRollouts, loader: StepLoader) -> None:
    """Refuse rollouts of another module, or of steps of another size, and parts of the module that
    they give nothing."""
    if source.trained is not module:
        _refuse(
            "SampledRollouts needs trained=, the module that fit trains",
            "another module",
            "Its completions would be those of another policy, by whose versions they are counted.",
            "SampledRollouts(task, sampler, module, ...)",
        )
    if source.accumulation != loader.accumulation:
        _refuse(
            "StepLoader and SampledRollouts need the same AccumulationSettings",
            f"{loader.accumulation} and {source.accumulation}",
            "Rollouts count by them the steps of a batch.",
            "one object for both",
        )
    if source.correction != module.loss.correction:
        _refuse(
            "SampledRollouts needs correction=, that of the loss",
            source.correction,
            "By it they keep log-probs of the sampler.",
            "SampledRollouts(..., correction=module.loss.correction)",
        )
    if (module.critic is None) != (source.estimator.gae is None):
        _refuse(
            "a critic and Estimator('gae') need each other",
            f"critic={module.critic and '...'} and Estimator({source.estimator.name!r})",
            "The critic learns what that estimator makes, by the critic's values.",
            "module.add_critic(with_value_head(...), ...) with Estimator('gae'), or none of them",
        )
    if module.reference is not None and module.loss.kl is None and source.penalty is None:
        _refuse(
            "reference= of a module needs a penalty, which is the distance from it",
            None,
            "Nothing would read it.",
            "Loss(..., kl=KL('k3', coefficient=...)), SampledRollouts(..., penalty=...), or "
            "reference=None",
        )
    adaptive = module.adaptive_kl
    if adaptive is None and source.adaptive_kl is not None:
        _refuse(
            "SampledRollouts(adaptive_kl=...) needs to be that of the module",
            None,
            "Else its coefficient is in no metrics and in no checkpoint.",
            "module.adaptive_kl = rollouts.adaptive_kl",
        )
    if adaptive is None:
        return
    try:
        adaptive.check_batch(source.batch_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if module.loss.kl is not None and source.adaptive_kl is adaptive:
        _refuse(
            "adaptive_kl of a module with a penalty in its loss needs another one in the rollouts",
            "one AdaptiveKL for both",
            "Each batch would move it twice.",
            "SampledRollouts(..., adaptive_kl=AdaptiveKL(...)) of its own, or one penalty",
        )
    if module.loss.kl is None and source.adaptive_kl is not adaptive:
        _refuse(
            "adaptive_kl of a module needs a penalty, whose coefficient it is",
            "no penalty in the loss, and another AdaptiveKL of the rollouts"
            if source.adaptive_kl
            else None,
            "Nothing would have that coefficient.",
            "Loss(..., kl=KL('k3', coefficient=...)), or SampledRollouts(..., penalty=..., "
            "adaptive_kl=module.adaptive_kl)",
        )

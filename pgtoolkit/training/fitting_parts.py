"""Checks that a module and the steps that it is to be trained on fit each other."""

from __future__ import annotations

from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.group_families import Lpo
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.batch_counts import samples_ahead
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import LastStep, OldLogProbs, RolloutSettings, Truncated
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.whole_step import needs_first_pass


def check_parts(module: PolicyGradientModule, loader: StepLoader) -> None:
    """Raise ConfigError where the numbers of a step would not be those that the parts name."""
    source = loader.source
    _check_steps(module.loss, loader)
    if isinstance(source, RecordedRollouts):
        _check_completions(module.loss, source.config)
    if isinstance(source, SampledRollouts):
        _check_completions(module.loss, source.settings)
        _check_sampled(module, source, loader)
        _check_old_log_probs(module.loss, source)
        _check_advantages(module.loss, source)


def _refuse(setting: str, got: object, reason: str, use: str) -> None:
    raise ConfigError(f"{setting} (got {got}). {reason} Use {use}.")


def _check_steps(loss: Loss, loader: StepLoader) -> None:
    """Refuse steps that do not hold what the loss compares."""
    if loss.needs_whole_groups and not loader.close_on_groups:
        _refuse(
            f"{_what_needs_groups(loss)} needs StepLoader(..., close_on_groups=True)",
            loader.close_on_groups,
            "Else a step may hold a part of a prompt's completions.",
            "close_on_groups=True",
        )
    if loader.accumulation.docs_per_step == 0 and (
        loss.needs_whole_groups or needs_first_pass(loss)
    ):
        what = _what_needs_groups(loss)
        if loss.entropy_top_fraction is not None:
            what = f"entropy_top_fraction={loss.entropy_top_fraction}"
        _refuse(
            f"{what} needs AccumulationSettings with docs_per_step above 0",
            0,
            "A fixed number of micro-batches holds other documents from step to step.",
            "docs_per_step=64",
        )


def _what_needs_groups(loss: Loss) -> str:
    if loss.aggregation.needs_groups:
        return f"aggregation {loss.aggregation.name!r}"
    return f"loss {loss.family.name!r}"


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


def _check_sampled(
    module: PolicyGradientModule, source: SampledRollouts, loader: StepLoader
) -> None:
    """Refuse rollouts of another module, or of steps of another size, and coefficients of a penalty
    that nothing has."""
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
    adaptive = module.adaptive_kl
    if adaptive is None:
        return
    if module.loss.kl is None and source.adaptive_kl is not adaptive:
        _refuse(
            "adaptive_kl of a module needs a penalty, whose coefficient it is",
            None,
            "Nothing would have that coefficient.",
            "Loss(..., kl=KL('k3', coefficient=...)), or penalty= and adaptive_kl= of "
            "SampledRollouts",
        )
    if module.loss.kl is not None and loader.accumulation.last_step == LastStep.carry:
        _refuse(
            "adaptive_kl needs AccumulationSettings with another last_step",
            "'carry'",
            "A step with documents of two batches would have a coefficient of each.",
            "last_step='short'",
        )


def _check_old_log_probs(loss: Loss, source: SampledRollouts) -> None:
    """Refuse rollouts whose old log-probs are not those that the loss needs."""
    settings = source.settings
    of_sampler = settings.old_log_probs == OldLogProbs.sampling
    if loss.needs_sampling_log_probs:
        assert loss.correction is not None
        name = type(loss.correction).__name__
        if of_sampler:
            _refuse(
                f"{name} needs PolicyRolloutSettings with other old_log_probs",
                "'sampling'",
                "The old log-probs are then the sampler's own, and the factor is 1 everywhere.",
                "old_log_probs='training', or a Loss without the correction",
            )
        if source.correction != loss.correction:
            _refuse(
                f"{name} needs SampledRollouts(..., correction=...), too",
                source.correction,
                "Else no log-probs of the sampler are kept.",
                "correction=module.loss.correction",
            )
    if loss.family.score_centering:
        if not of_sampler:
            _refuse(
                "score_centering=True needs PolicyRolloutSettings with old_log_probs='sampling'",
                repr(settings.old_log_probs.value),
                "Its centre is that of the sampler, which has to be the policy that ratios are "
                "anchored at.",
                "old_log_probs='sampling'",
            )
        sampler = source.sampler
        if isinstance(sampler, TransformersSampler) and sampler.sampling.keep_top == 0:
            _refuse(
                "score_centering=True needs a sampler with keep_top above 0",
                0,
                "It needs the likeliest tokens of the sampler at each position.",
                "dataclasses.replace(settings.sampling, keep_top=32)",
            )
        if settings.sampling.is_truncated:
            _refuse(
                "score_centering=True needs PolicyRolloutSettings without top_p and top_k",
                f"top_p={settings.top_p}, top_k={settings.top_k}",
                "The tail beyond the likeliest tokens is modelled, and truncated sampling has "
                "none.",
                "top_p=None and top_k=None",
            )
    is_proximal = settings.old_log_probs == OldLogProbs.proximal
    if isinstance(loss.family, Lpo) and samples_ahead(settings) and not is_proximal:
        _refuse(
            "loss 'lpo' with lag or max_staleness needs old_log_probs='proximal'",
            repr(settings.old_log_probs.value),
            "Its target is anchored at the policy that training on the batch begins with.",
            "PolicyRolloutSettings(..., old_log_probs='proximal')",
        )


def _check_advantages(loss: Loss, source: SampledRollouts) -> None:
    """Refuse completions that the loss cannot learn from."""
    name = source.estimator.name
    family = loss.family
    asked = family.asked if isinstance(family, FunctionFamily) else frozenset()
    if asked & {"groups", "group_rewards"} and source.settings.group_size == 1:
        _refuse(
            f"loss {family.name!r} needs PolicyRolloutSettings with group_size above 1",
            1,
            "It compares the completions of a prompt, and a single one has none beside it.",
            "group_size=8",
        )
    if loss.aggregation.by_sign and name in ("none", "gae"):
        _refuse(
            f"aggregation {loss.aggregation.name!r} needs an estimator that gives each completion "
            "one advantage",
            repr(name),
            "It weighs completions by the sign of their advantage.",
            "Estimator('dr_grpo')",
        )
    has_penalty = loss.kl is not None and loss.kl.kind != "k1"
    trains = bool(asked) or has_penalty or loss.entropy_coefficient != 0
    if name == "none" and not trains:
        _refuse(
            f"loss {family.name!r} needs an estimator other than 'none'",
            repr(name),
            "Advantages of 0 teach nothing.",
            "Estimator('dr_grpo'), or Loss(..., kl=KL('k3', coefficient=...)) with a reference",
        )

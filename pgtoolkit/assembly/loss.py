"""The loss that a configuration describes, with the families and reducers of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.config.own_code import typed_key
from pgtoolkit.config.rules.loss_terms import without_advantages, without_others
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.aggregation import (
    AGGREGATIONS,
    REDUCER_KEYWORDS,
    Aggregation,
    Custom,
    Reducer,
    aggregation_of,
    asked_by,
)
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Family
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.function import NEW, FunctionFamily, FunctionLoss, reads_rewards
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.slopes import check_family
from pgtoolkit.losses.trial import (
    check_function,
    check_reducer,
    measured_by,
    trains_on_advantages_alone,
)
from pgtoolkit.rollouts.settings import AdvantageEstimator, Truncated
from pgtoolkit.rollouts.whole_steps import misfits_of_function
from pgtoolkit.runs.declared_metrics import metric_named
from pgtoolkit.system.functions import blaming, import_function, place_of
from pgtoolkit.system.process_state import ProcessState
from pgtoolkit.system.report import nearest, refusal, text
from pgtoolkit.system.safe_text import shortened
from pgtoolkit.training.loss_settings import (
    AggregationSettings,
    CustomLossSettings,
    KLKind,
    KLPlace,
    KLSettings,
)


def loss_of(config: Config) -> Loss:
    """Return the loss with its aggregation, correction, penalties and metrics.

    Imports a family or a reducer of the user's own. Raises ConfigError where that fails.
    """
    reducer_key = typed_key("aggregation.reducer", config)
    aggregation = _aggregation(config.aggregation, reducer_key)
    loss = config.loss
    if isinstance(loss, CustomLossSettings):
        family = own_family(loss.path, dict(loss.options), loss.num_splits)
        if isinstance(family, FunctionFamily):
            misfits = misfits_of_function(
                f"loss={loss.path}",
                family,
                config.accumulation.docs_per_step,
                config.rollout.group_size or 1,
                config.correction.name,
            )
            if family.asked & {"groups", "group_rewards"}:
                misfits += without_others(config)
            if misfits:
                raise ConfigError("\n".join(misfits))
        if config.advantage.estimator == AdvantageEstimator.none:
            misfits = without_advantages(
                config,
                reads_rewards=reads_rewards(family),
                learns_at_once=not trains_on_advantages_alone(family, spread=0),
                learns_later=not trains_on_advantages_alone(family, spread=0.05),
            )
            if misfits:
                raise ConfigError("\n".join(misfits))
    else:
        family = configured(loss, FAMILIES)
        assert family is not None  # every option of loss has a family
    return Loss(
        family=family,
        aggregation=aggregation,
        temperature=config.rollout.temperature,
        metrics=config.metrics.level.value,
        correction=configured(config.correction, CORRECTIONS),
        entropy_coefficient=config.entropy.coefficient,
        kl=_penalty(config.kl, KLPlace.loss),
        masks_truncated=config.rollout.truncated == Truncated.mask,
        entropy_top_fraction=config.entropy.top_fraction,
    )


def _aggregation(settings: AggregationSettings, reducer_key: str) -> Aggregation:
    """Return the aggregation; a reducer of the user's own replaces the weights of the mode, whose
    groups stay whole. reducer_key: the key that the user has typed for it."""
    mode = settings.mode.value
    if not settings.reducer:
        return aggregation_of(mode, settings.divisor)
    reducer = _imported_reducer(reducer_key, settings.reducer)
    return Custom(reducer, needs_groups=AGGREGATIONS[mode].needs_groups)


def note_on_advantages(loss: Loss, path: str, estimator: str) -> str | None:
    """Return a note where advantages are made that neither the user's function nor the aggregation
    reads. path: of the function. estimator: of the advantages."""
    weights = loss.aggregation
    is_weighed_by_them = isinstance(weights, Custom) and "advantages" in weights.asked
    is_read = not isinstance(loss.family, FunctionFamily) or "advantages" in loss.family.asked
    if estimator == "none" or is_read or is_weighed_by_them or weights.by_sign:
        return None
    return (
        f"loss={path} reads no advantages: advantage={estimator} decides only "
        "metrics, and which prompts count as uninformative. Use advantage=none."
    )


def penalty_on_rewards(settings: KLSettings) -> KL | None:
    """Return the penalty that is subtracted from rewards; None if there is none."""
    return _penalty(settings, KLPlace.reward)


def _penalty(settings: KLSettings, place: KLPlace) -> KL | None:
    if settings.kind == KLKind.none or settings.place != place:
        return None
    assert settings.coefficient is not None
    return KL(settings.kind.value, settings.coefficient, settings.beta_of_kind)


def own_family(path: str, options: dict[str, object], num_splits: int) -> Family:
    """Return a loss of the user's own: of a function, or a family of which the methods are checked
    at each call.

    path: of the function or the class. options: values of its parameters. Raises ConfigError for
    one that cannot be imported or made, for a function whose numbers depend on the cut of a step,
    and for a family whose slope is not the derivative of its loss.
    """
    function = import_function("loss", path, None, (), [*FAMILIES], reads=NEW)
    if not isinstance(function, type):
        return _of_function(path, function, options, num_splits)
    setting = f"loss={path}"
    family_class = import_function("loss", path, (), [*options], [*FAMILIES])
    for name, value in options.items():
        _refuse_other_type(path, name, getattr(function, name, None), value)
    state = ProcessState()
    try:
        family = family_class(**options)
        if not isinstance(family, Family):
            raise ValueError(f"{type(family).__name__} does not inherit from Family")
        check_family(family)
        if family.by_document and num_splits != 1:
            raise ValueError(
                f"loss.num_splits={num_splits} would cut documents, which this family needs whole"
            )
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{setting} needs a loss family whose slope is the derivative of its loss (got: "
            f"{shortened(_said(error), 2000)}). Its class inherits from pgtoolkit.families.Family; "
            "docs/losses.md shows an example."
        ) from error
    finally:
        state.restore(setting)
    for name in ("token", "surrogate", "cuts", "outside"):
        # Its class may be a frozen dataclass, which refuses a plain assignment.
        object.__setattr__(family, name, _checked(getattr(family, name), setting))
    return family


def _of_function(
    path: str, function: Callable, options: dict[str, object], num_splits: int
) -> FunctionLoss:
    """Return the loss of a function of the user's own, which is tried. Raises ConfigError."""
    setting = f"loss={path}"
    state = ProcessState()
    try:
        family = FunctionLoss(function)
        _refuse_other_options(path, family.defaults, options)
        family = replace(family, options=options)
        check_function(family)
        taken = [name for name in measured_by(family)[1] if metric_named(name) is not None]
        if taken:
            raise ValueError(
                f"{family.name} returns a metric named {', '.join(taken)}, which each run has"
            )
        if family.by_document and num_splits != 1:
            raise ValueError(
                f"loss.num_splits={num_splits} would cut documents, which this function needs whole"
            )
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{setting} needs a function of log_probs or log_ratio that returns a loss of each "
            f"token, document or group (got: {shortened(_said(error), 2000)}). docs/losses.md "
            "shows an example."
        ) from error
    finally:
        state.restore(setting)
    return replace(family, function=_blamed(function, setting))


def _refuse_other_options(
    path: str, defaults: dict[str, object], options: dict[str, object]
) -> None:
    """Raise ConfigError for a value of a parameter that a function does not have, and for one of
    another type than its default."""
    for name, value in options.items():
        if name not in defaults:
            near = nearest(name, defaults)
            raise ConfigError(
                refusal(
                    setting=f"loss.{name}={text(value)}",
                    needs=f"a parameter of {path} with a default",
                    got="no such parameter",
                    reason=f"Its own are {', '.join(defaults) or 'none'}.",
                    use=f"loss.{near}={text(value)}" if near else f"{path} without it",
                )
            )
        _refuse_other_type(path, name, defaults[name], value)


_TYPES = {bool: "true or false", int: "a whole number", float: "a number"}
"""What a value has to be where the default is of a type, in words."""


def _refuse_other_type(path: str, name: str, default: object, value: object) -> None:
    """Raise ConfigError for the value of a parameter whose default is of another type."""
    kind = type(default)
    is_fitting = type(value) is kind or (kind is float and type(value) is int)
    if kind in _TYPES and value is not None and not is_fitting:
        raise ConfigError(
            refusal(
                setting=f"loss.{name}={text(value)}",
                needs=_TYPES[kind],
                got=value,
                reason=f"By default {path} has {text(default)} there.",
                use=f"loss.{name}={text(default)}",
            )
        )


def _said(error: BaseException) -> str:
    """Return what an error says; one that the user's own code raised begins with its type, and ends
    with its place."""
    message = str(error).removesuffix(".")
    if type(error) is not ValueError:
        message = f"{type(error).__name__}: {message}"
    return message + place_of(error)


def _blamed(function: Callable, setting: str) -> Callable:
    """Wrap a loss function so that what it raises in a run is told as the user's."""

    @functools.wraps(function)
    def wrapped(**arguments: object) -> object:
        with blaming(setting, ConfigError, "a part of a step"):
            return function(**arguments)

    return wrapped


def _checked(function: Callable, setting: str) -> Callable:
    """Wrap a method of a family of the user's own.

    The wrapped method raises ConfigError where the user's raises, or does not return one number per
    token.
    """

    def method(log_ratio: Tensor, *arguments: Tensor) -> tuple[Tensor | None, ...]:
        with blaming(setting, ConfigError, f"a micro-batch of {len(log_ratio)} tokens"):
            results = function(log_ratio, *arguments)
            for result in results:
                if result is not None and result.shape != log_ratio.shape:
                    raise ValueError(
                        f"{tuple(result.shape)} is not one number per token, "
                        f"{tuple(log_ratio.shape)}"
                    )
        return results

    return method


def _imported_reducer(key: str, path: str) -> Reducer:
    """Return the function at a dotted path, wrapped so that its weights are checked at each call.

    key: the configuration key that holds the path. Raises ConfigError for a function that cannot be
    imported. So does the wrapped function where it does not return one finite weight per token.
    """
    setting = f"{key}={path}"
    asked = asked_by(import_function(key, path, None, (), [*AGGREGATIONS]))
    function = import_function(key, path, ("totals",), (*REDUCER_KEYWORDS, *asked))

    @functools.wraps(function)
    def reducer(totals: StepTotals, *, mask: Tensor, **indices: Tensor) -> Tensor:
        with blaming(setting, ConfigError, f"a micro-batch of {len(mask)} tokens"):
            weights = function(totals, mask=mask, **indices)
        needs = f"shape {tuple(mask.shape)} on {mask.device}"
        got = type(weights).__name__
        if isinstance(weights, Tensor):
            got = f"shape {tuple(weights.shape)} on {weights.device}"
        if got == needs:
            if torch.isfinite(weights[mask]).all():
                return weights
            got = "NaN or infinity"
        raise ConfigError(
            f"{setting} needs to return one finite weight per token, {needs} (got {got}). The "
            "step's loss is the sum of its tokens' losses times these weights."
        )

    try:
        _try_reducer(reducer)
        check_reducer(Custom(reducer))
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}.") from error
    except ConfigError as error:
        if error.__cause__ is None:
            raise
        raise ConfigError(
            f"{setting} needs a function that returns a weight of each token (got: "
            f"{shortened(_said(error.__cause__), 2000)}). docs/losses.md shows an example."
        ) from error
    return reducer


def _try_reducer(reducer: Reducer) -> None:
    """Call a reducer as a step does, and raise ConfigError where that fails.

    The micro-batch has documents 1 and 3 of a step of four. They have three and two trained tokens,
    each after one token of the prompt.
    """
    totals = StepTotals(4, 9, 0, num_groups=2, tokens_per_group=torch.tensor([4, 5]))
    on_request = {
        "advantages": torch.tensor([0.0, -0.5, -0.5, -0.5, 0.0, 1.0, 1.0]),
        "completions_by_sign": torch.tensor([[1, 0, 1], [0, 1, 1]]),
        "tokens_by_sign": torch.tensor([[3, 0, 1], [0, 3, 2]]),
    }
    reducer(
        totals,
        mask=torch.tensor([False, True, True, True, False, True, True]),
        document_index=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        tokens_per_document=torch.tensor([3, 2]),
        group_index=torch.tensor([0, 1]),
        **{name: on_request[name] for name in asked_by(reducer)},
    )

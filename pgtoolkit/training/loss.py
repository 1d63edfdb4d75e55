"""The loss that a configuration describes, with the families and reducers of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.config.own_code import typed_key
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import CustomLossConfig, KLKind, KLPlace
from pgtoolkit.config.schema_rollouts import Truncated
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.aggregation import AGGREGATIONS, Reducer, aggregation_of
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Family
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.slopes import check_family
from pgtoolkit.system.functions import REDUCER_KEYWORDS, blaming, import_function
from pgtoolkit.system.legible import shortened
from pgtoolkit.system.process_state import ProcessState


def loss_of(config: Config) -> Loss:
    """Family, aggregation, correction, penalties and what is measured; imports what is the user's
    own."""
    reducer = None
    if config.aggregation.reducer:
        reducer = _imported_reducer(
            typed_key("aggregation.reducer", config), config.aggregation.reducer
        )
    aggregation = aggregation_of(config.aggregation.mode.value, config.aggregation.divisor, reducer)
    loss = config.loss
    if isinstance(loss, CustomLossConfig):
        family = own_family(loss.path, dict(loss.options), loss.num_splits)
    else:
        family = configured(loss, FAMILIES)
    correction = configured(config.correction, CORRECTIONS)
    penalty = None
    if config.kl.kind != KLKind.none and config.kl.place == KLPlace.loss:
        assert config.kl.coefficient is not None
        penalty = KL(config.kl.kind.value, config.kl.coefficient)
    temperature, level = config.rollout.temperature, config.metrics.level.value
    terms = correction, config.entropy.coefficient, penalty
    return Loss(
        family, aggregation, temperature, level, *terms, config.rollout.truncated == Truncated.mask
    )


def own_family(path: str, options: dict[str, Any], num_splits: int) -> Family:
    """A family of the user's own; ConfigError for one that cannot be made, or whose slopes are not
    its own."""
    setting, made = f"loss={path}", import_function("loss", path, (), [*options], [*FAMILIES])
    state = ProcessState()
    try:
        family = made(**options)
        if not isinstance(family, Family):
            raise TypeError(f"{type(family).__name__} is no Family")
        check_family(family)
        if family.by_document and num_splits != 1:
            raise ValueError(f"loss.num_splits={num_splits} cuts the documents that it needs whole")
    except Exception as error:  # whatever the user's code raises
        reason = "It inherits from pgtoolkit.families.Family, and docs/losses.md shows one."
        got = shortened(str(error), 2000)
        raise ConfigError(
            f"{setting} needs a family that agrees with itself (got: {got}). {reason}"
        ) from error
    finally:
        state.restore(setting)
    for name in ("token", "surrogate", "cuts"):
        # dataclasses may be frozen
        object.__setattr__(family, name, _checked(getattr(family, name), setting))
    return family


def _checked(function: Callable, setting: str) -> Callable:
    """A method of the user's own family; ConfigError where it raises, or does not return one number
    per token."""

    def method(log_ratio: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        with blaming(setting, ConfigError, f"a micro-batch of {len(log_ratio)} tokens"):
            results = function(log_ratio, *others)
            for result in results:
                if result is not None and result.shape != log_ratio.shape:
                    raise ValueError(
                        f"{tuple(result.shape)} is not one number per token, "
                        f"{tuple(log_ratio.shape)}"
                    )
        return results

    return method


def _imported_reducer(key: str, path: str) -> Reducer:
    """Return the function at a dotted path, which must return finite weights for tokens.

    key: that has the path. Raises ConfigError, also where the returned function is called, for
        anything else.
    """
    setting = f"{key}={path}"
    function = import_function(key, path, ("totals",), REDUCER_KEYWORDS, [*AGGREGATIONS])

    def reducer(totals: StepTotals, *, mask: Tensor, **others) -> Tensor:
        with blaming(setting, ConfigError, f"a micro-batch of {len(mask)} tokens"):
            weights = function(totals, mask=mask, **others)
        got, needs = type(weights).__name__, f"shape {tuple(mask.shape)} on {mask.device}"
        if isinstance(weights, Tensor):
            got = f"shape {tuple(weights.shape)} on {weights.device}"
        if got == needs and torch.isfinite(weights[mask]).all():
            return weights
        raise ConfigError(
            f"{setting} needs to return one finite weight per token, {needs} (got "
            f"{'NaN or infinity' if got == needs else got}). The weights of the step's tokens make "
            "its loss."
        )

    _try_reducer(reducer)
    return reducer


def _try_reducer(reducer: Reducer) -> None:
    """Call a reducer as a step does, on the micro-batch of two of its four documents; raises
    ConfigError.

    They are documents 1 and 3, of three and two trained tokens, each behind a token of its prompt.
    """
    totals = StepTotals(4, 9, 0, num_groups=2, tokens_per_group=torch.tensor([4, 5]))
    reducer(
        totals,
        mask=torch.tensor([False, True, True, True, False, True, True]),
        document_index=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        tokens_per_document=torch.tensor([3, 2]),
        group_index=torch.tensor([0, 1]),
    )

"""The loss that a configuration describes, with the families and reducers of the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.config.schema import Config, KLKind
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.aggregation import Reducer, aggregation_of
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Family
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.slopes import check_family
from pgtoolkit.system.functions import REDUCER_KEYWORDS, blaming, import_function


def loss_of(config: Config) -> Loss:
    """Family, aggregation, correction, penalties and what is measured; imports what is the user's own."""
    reducer = _imported_reducer(path) if (path := config.aggregation.reducer) else None
    aggregation = aggregation_of(config.aggregation.mode.value, config.aggregation.divisor, reducer)
    loss = config.loss
    is_own = loss.name == "custom"
    family = own_family(loss.path, dict(loss.options), loss.num_splits) if is_own else configured(loss, FAMILIES)
    correction = configured(config.correction, CORRECTIONS)
    penalty = None if config.kl.kind == KLKind.none else KL(config.kl.kind.value, config.kl.coefficient)
    temperature, level = config.rollout.temperature, config.metrics.level.value
    return Loss(family, aggregation, temperature, level, correction, config.entropy.coefficient, penalty)


def own_family(path: str, options: dict[str, Any], num_splits: int) -> Family:
    """A family of the user's own; ConfigError for one that cannot be made, or whose slopes are not its own."""
    made = import_function("loss.path", path, (), [*options])
    try:
        family = made(**options)
        if not isinstance(family, Family):
            raise TypeError(f"{type(family).__name__} is no Family")
        check_family(family)
        if family.by_document and num_splits != 1:
            raise ValueError(f"loss.num_splits={num_splits} cuts the documents that it needs whole")
    except Exception as error:  # whatever the user's code raises
        reason = "It inherits from pgtoolkit.families.Family, and docs/losses.md shows one."
        raise ConfigError(
            f"loss.path={path} needs a family that agrees with itself (got: {error}). {reason}"
        ) from error
    return family


def _imported_reducer(path: str) -> Reducer:
    """The function at a dotted path, which must return finite weights for tokens; ConfigError for what it does else."""
    function = import_function("aggregation.reducer", path, ("totals",), REDUCER_KEYWORDS)

    def reducer(totals: StepTotals, *, mask: Tensor, **others) -> Tensor:
        with blaming(f"aggregation.reducer={path}", ConfigError, f"a micro-batch of {len(mask)} tokens"):
            weights = function(totals, mask=mask, **others)
            if not torch.isfinite(weights[mask]).all():
                raise ValueError("the weight of a trained token is NaN or infinite")
        return weights

    return reducer

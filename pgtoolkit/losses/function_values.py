"""Evaluates a loss that is a function: its losses, and the coefficients c_t by autograd."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.losses.checks import shown
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.family import LOG_RATIO_LIMIT, clamped, numbers_of_bounds
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.views import DocumentView, GroupView, Ratio, StepView


@dataclass(frozen=True)
class Evaluated:
    """The results of a function for T tokens, (T,) each.

    losses: l_t.
    coefficients: c_t, the derivative of the sum of w_t l_t by each log-prob; it includes the
        weights.
    log_ratio: s_t, whose exp is the ratio of the metrics: the argument of the first call of
        `ratio`, or the token's own log-ratio.
    clamped: bool, True where the clamp of a `ratio` acted.
    metrics: the function's own, by name.
    bounds: those of the ratio, or None.
    units: whether the function gave a number per "token", "document" or "group", by "loss", "ratio"
        and the names of `metrics` after "metric "; those of each call of `ratio`, in their order.
    """

    losses: Tensor
    coefficients: Tensor
    log_ratio: Tensor
    clamped: Tensor
    metrics: dict[str, Tensor]
    bounds: tuple[float, float] | None
    units: dict[str, list[str]]

    @property
    def ratio_by_document(self) -> bool:
        """Return True if the ratio is that of a document, or of a group."""
        return self.units.get("ratio", ["token"])[0] != "token"

    def at(self, rows: Tensor, length: int) -> Evaluated:
        """Return the results at the positions `rows` of (length,), 0 elsewhere."""

        def placed(vector: Tensor) -> Tensor:
            return vector.new_zeros(length).index_copy(0, rows, vector)

        return replace(
            self,
            losses=placed(self.losses),
            coefficients=placed(self.coefficients),
            log_ratio=placed(self.log_ratio),
            clamped=placed(self.clamped),
            metrics={name: placed(vector) for name, vector in self.metrics.items()},
        )


def evaluate(
    family: FunctionFamily,
    log_probs: Tensor,
    weights: Tensor,
    vectors: Mapping[str, Tensor],
    documents: DocumentView | None = None,
    groups: GroupView | None = None,
    step: StepView | None = None,
) -> Evaluated:
    """Return the function's results for T trained tokens.

    log_probs: (T,), the new ones.
    weights: (T,), w_t times the factors of a correction.
    vectors: (T,) each, by names of OF_DATA and KNOWN_BEFORE.
    documents, groups, step: what the function asks for. At the level of tokens there is none of
        them.
    Raises ValueError for a vector that the function needs and the data do not have, and for a
    result of another shape or without a gradient.
    """
    ratio = Ratio()
    spread = _Spread(family, log_probs, vectors.keys(), documents, groups)
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        known: dict[str, object] = {"log_probs": leaf, **vectors}
        if "old_log_probs" in vectors:
            known["log_ratio"] = leaf - vectors["old_log_probs"]
        known |= {"ratio": ratio, "documents": documents, "groups": groups, "step": step}
        losses, further = _call(family, known)
        losses = spread("loss", losses)
        coefficients = torch.zeros_like(log_probs)
        if losses.requires_grad:
            (coefficients,) = torch.autograd.grad((weights * losses).sum(), leaf)
        elif not torch.is_inference_mode_enabled():  # in it nothing has a gradient
            raise without_gradient(family.name)
    # The function may have hidden a number that is not finite, as by a clip.
    read = {"old_log_probs" if name == "log_ratio" else name for name in family.asked}
    finite = torch.isfinite(leaf.detach())
    for name in read & vectors.keys():
        finite = finite & torch.isfinite(vectors[name])
    arguments = [spread("ratio", values) for values in ratio.arguments]
    was_clamped = torch.zeros_like(log_probs, dtype=torch.bool)
    for values in arguments:
        was_clamped = was_clamped | (values.abs() > LOG_RATIO_LIMIT)
    log_ratio = torch.zeros_like(log_probs)
    if arguments:
        log_ratio = arguments[0]
    elif "old_log_probs" in vectors:
        log_ratio = log_probs.detach() - vectors["old_log_probs"]
    return Evaluated(
        losses=torch.where(finite, losses.detach(), torch.nan),
        coefficients=coefficients,
        log_ratio=torch.where(finite, clamped(log_ratio), torch.nan),
        clamped=was_clamped,
        bounds=numbers_of_bounds(family.name, further.pop("bounds", None)),
        metrics={
            name: spread(f"metric {name}", values).detach().to(log_probs)
            for name, values in further.items()
        },
        units=spread.units,
    )


def tried(family: FunctionFamily, names: Collection[str], like: Tensor) -> Evaluated:
    """Return the function's results for three made-up tokens in two documents of one group, where
    the length of a result says what it is a number of.

    names: of OF_DATA and KNOWN_BEFORE, the vectors that it is given. like: of the dtype and on the
        device that they get.
    """
    log_probs = like.detach().new_tensor([-1.0, -0.5, -2.0])
    of_tokens = {
        "lengths": log_probs.new_tensor([2.0, 2.0, 1.0]),
        "position": log_probs.new_tensor([0.0, 1.0, 0.0]),
    }
    index = torch.tensor([0, 0, 1], device=like.device)
    return evaluate(
        family,
        log_probs,
        torch.ones_like(log_probs),
        {name: of_tokens.get(name, log_probs) for name in names},
        DocumentView(DocumentSums.of_tokens(index, index >= 0, 2)),
        GroupView(index.new_zeros(2), 1),
        StepView(3, 2, 1),
    )


def without_gradient(name: str) -> ValueError:
    """Return the error for a loss function that trains nothing."""
    return ValueError(
        f"the loss function {name} has a gradient of 0 for every token, so it trains nothing: no "
        "gradient passes detach(), comparisons, rounding, or NumPy"
    )


def check_results(
    name: str,
    losses: Tensor,
    slopes: Tensor,
    log_ratio: Tensor,
    document_index: Tensor | None = None,
) -> None:
    """Raise ValueError where a function gives a token a loss or a slope that is not finite.

    losses, slopes, log_ratio: (N,), of trained tokens; slopes are the derivatives by log-probs.
    document_index: (N,), to name the document; None where it says nothing.
    """
    wrong = ~torch.isfinite(losses) | ~torch.isfinite(slopes)
    if not wrong.any():
        return
    at = int(wrong.nonzero()[0])
    place = f"of log-ratio {log_ratio[at].item():g}"
    if document_index is not None:
        place += f" in document {int(document_index[at])}"
    if torch.isfinite(losses[at]):
        raise ValueError(
            f"the loss function {name} has a slope (gradient) that is not finite for a token "
            f"{place} (got {slopes[at].item():g}, where the loss is {losses[at].item():g}). "
            "torch.where around the result does not mend it; its argument needs to stay off that "
            "point, as in sqrt(x.clamp(min=1e-8))"
        )
    raise ValueError(
        f"the loss function {name} returns a number that is not finite for a token {place} (got "
        f"{losses[at].item():g}). `ratio(x)` is exp(x) without an overflow"
    )


def _call(family: FunctionFamily, known: Mapping[str, object]) -> tuple[Tensor, dict]:
    """Call the function with its arguments; return its loss, and its dictionary or {}.

    Raises ValueError for a vector that the data do not have.
    """
    arguments = {name: known[name] for name in family.asked if known.get(name) is not None}
    missing = sorted(family.asked - arguments.keys() - family.may_lack)
    if missing:
        raise ValueError(
            f"the loss function {family.name} asks for {', '.join(missing)}, which these "
            "documents do not have"
        )
    try:
        returned = family.function(**arguments, **family.options)
    except RuntimeError as error:
        if "Can't call numpy()" in str(error):
            raise ValueError(
                f"the loss function {family.name} hands log-probs to NumPy, through which no "
                "gradient passes. Use torch's functions, such as torch.exp"
            ) from error
        advice = _advice_on_sizes(str(error), known)
        if advice:
            error.args = (f"{error}. {advice}",)
        raise
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2 or not isinstance(returned[1], dict):
        raise ValueError(
            f"the loss function {family.name} needs to return its loss, or its loss and a "
            f"dictionary of metrics (got a tuple of {len(returned)})"
        )
    return returned[0], dict(returned[1])


def _advice_on_sizes(message: str, known: Mapping[str, object]) -> str:
    """Return what to type where a function combines numbers of tokens, documents and groups; "" for
    another error.

    message: torch's. known: what the function may ask for.
    """
    sizes = re.search(
        r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", message
    )
    if sizes is None:
        return ""
    views = {name: known[name] for name in ("documents", "groups") if known[name] is not None}
    named = {name: len(view) for name, view in views.items() if isinstance(view, Sized)}
    lengths = {int(size) for size in sizes.groups()}
    tokens = known["log_probs"]
    assert isinstance(tokens, Tensor)
    if lengths == {named.get("documents"), len(tokens)}:
        return (
            "One has a number per document, the other per token. Use documents.spread(x) for the x "
            "of documents, or documents.mean(y) or documents.first(y) for the y of tokens"
        )
    if lengths == {named.get("groups"), named.get("documents")}:
        return (
            "One has a number per group, the other per document. Use groups.spread(x) for the x of "
            "groups, or groups.mean(y) for the y of documents"
        )
    if lengths == {named.get("groups"), len(tokens)}:
        return (
            "One has a number per group, the other per token. Use "
            "documents.spread(groups.spread(x)) for the x of groups"
        )
    return ""


class _Spread:
    """Makes (T,) of one number per token, document or group.

    units: what the numbers were of, by place, in the order of the calls.
    """

    def __init__(
        self,
        family: FunctionFamily,
        log_probs: Tensor,
        names: Collection[str],
        documents: DocumentView | None,
        groups: GroupView | None,
    ):
        self._family = family
        self._log_probs = log_probs
        self._names = names
        self._documents = documents
        self._groups = groups
        self._sizes = {"token": len(log_probs)}
        if documents is not None:
            self._sizes["document"] = len(documents)
        if groups is not None:
            self._sizes["group"] = len(groups)
        self.units: dict[str, list[str]] = {}

    def __call__(self, place: str, values: object) -> Tensor:
        """Return the values at each token.

        place: a key of `Evaluated.units`. Raises ValueError for another shape.
        """
        sizes = self._sizes
        if not isinstance(values, Tensor) or values.dim() != 1 or len(values) not in sizes.values():
            needed = " or ".join(f"per {unit}, {(size,)}" for unit, size in sizes.items())
            got = shown(values)
            if not isinstance(values, Tensor):
                got = f"a {type(values).__name__}: {got}"
            owner = {"loss": f"the loss function {self._family.name}", "ratio": "ratio"}
            name = owner.get(place, f"the {place} of {self._family.name}")
            raise ValueError(
                f"{name} needs to return a tensor with one number {needed} (got {got})"
            )
        unit = self._unit(place, len(values))
        self.units.setdefault(place, []).append(unit)
        if unit == "group":
            assert self._groups is not None
            values = self._groups.spread(values)
        if unit != "token":
            assert self._documents is not None
            values = self._documents.spread(values)
        return values

    def _unit(self, place: str, length: int) -> str:
        """Return the unit of a vector: "token", "document" or "group".

        Where there are as many documents as tokens, or as groups, its length does not say it. A
        trial with made-up tokens then does.
        """
        units = [unit for unit, size in self._sizes.items() if size == length]
        if len(units) == 1:
            return units[0]
        number = len(self.units.get(place, []))
        of_place = tried(self._family, self._names, self._log_probs).units.get(place, [])
        of_trial = of_place[number : number + 1]
        return of_trial[0] if of_trial and of_trial[0] in units else units[0]

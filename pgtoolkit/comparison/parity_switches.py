"""The options of which `pgtk parity` tries which one makes two sides equal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial

from torch import Tensor

from pgtoolkit.comparison.parity_ours import OurSide
from pgtoolkit.comparison.parity_step import MAY_BE_UNKNOWN, QUANTITIES, Numbers, RecordedStep
from pgtoolkit.comparison.parity_theirs import Convention, Fields, their_numbers
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import PgtoolkitError
from pgtoolkit.system.report import text

_SECTIONS = ("advantage", "loss", "correction", "kl", "aggregation", "entropy")
OF_ROLLOUT = ("temperature", "truncated", "uninformative", "max_sampling_rounds")
_OPTIONS = {"advantage": "estimator", "loss": "name", "correction": "name"}
_OPTIONS |= {"kl": "kind", "aggregation": "mode"}
"""Group -> the key that holds its option, which is typed as loss=grpo."""

_OURS: Fields = {
    "deviation_epsilon": 1e-6,
    "bessel": True,
    "alone_compared": True,
    "mask_shift": 0,
    "log_ratio_cap": 20.0,
    "kl_clamp": None,
    "kl_gradient": None,
    "kl_ratio": "token",
    "ratio_cap": None,
    "truncated_counted": True,
    "mean_of": "step",
    "entropy_weights": "loss",
}
"""The fields of a convention that no key of ours says, with their values, which are fixed here."""

_MEANT = {
    "deviation": "the rewards whose deviation divides the advantage are those of the",
    "deviation_epsilon": "what is added to the deviation is",
    "bessel": "whether the deviation is a sample's, with n - 1, is",
    "baseline": "the baseline is",
    "alone_compared": "whether a group of one has its reward as baseline is",
    "drops_equal": "whether groups of equal rewards are left out is",
    "level": "the ratio is that of the",
    "low": "the lower clip is",
    "high": "the upper clip is",
    "dual_clip": "the bound of the ratio where A < 0 is",
    "ratio_cap": "the bound of every ratio is",
    "log_ratio_cap": "the log-ratio is capped at",
    "kl": "the KL is",
    "kl_coefficient": "the coefficient of the KL is",
    "kl_clamp": "the value of the KL is clamped to",
    "kl_gradient": "the KL has the gradient of",
    "kl_ratio": "the factor of the KL is the ratio of the",
    "kl_place": "the KL is in the",
    "entropy_coefficient": "the coefficient of the entropy bonus is",
    "entropy_weights": "the entropy bonus has the weights of the",
    "mean": "the loss is the mean over the",
    "mean_of": "tokens and documents are counted over the",
    "scale": "every weight is multiplied by",
    "masks_truncated": "whether completions that were cut off are left out is",
    "truncated_counted": "whether the tokens of completions that mask_truncated_completions leaves "
    "out (`rollout.truncated=mask`) are counted is",
    "mask_shift": "the mask is shifted, in tokens, by",
    "temperature": "log-probs are at the temperature",
}
"""Field of a convention -> the beginning of a sentence whose end is its value."""

_TRIED: Mapping[str, tuple] = {
    "deviation_epsilon": (0.0, 1e-8, 1e-6, 1e-5, 1e-4),
    "bessel": (False, True),
    "deviation": ("group", "batch", "none"),
    "baseline": ("mean", "others", "by_length"),
    "alone_compared": (True, False),
    "drops_equal": (True, False),
    "mask_shift": (1, -1),
    "dual_clip": (None, 3.0),
    "ratio_cap": (None,),
    "low": (0.2, 0.1),
    "high": (0.2, 0.28, 0.1),
    "level": ("token", "document"),
    "log_ratio_cap": (10.0, 20.0),
    "kl": ("k1", "k2", "k3", "k3_ratio", "abs"),
    "kl_clamp": (None, 10.0),
    "kl_gradient": (None, "k2"),
    "kl_ratio": ("token", "document"),
    "kl_coefficient": (0.0,),
    "entropy_coefficient": (0.0,),
    "entropy_weights": ("loss", "micro_batch"),
    "correction": (None,),
    "mean": ("token", "document"),
    "mean_of": ("step", "micro_batch"),
    "truncated_counted": (True, False),
    "masks_truncated": (True, False),
}
"""What is tried where their own functions give other numbers than our reading of them."""


@dataclass(frozen=True)
class TheirSide:
    """A configuration of TRL or verl.

    trainer: with its version.
    typed: the overrides that it is here, and as_ours the configuration that they make.
    keys: our key -> the key of theirs that it follows from. values: all of theirs by name.
    notes: sentences on what a step does not show.
    ran: the quantities that their own functions gave, in the place of our reading.
    """

    convention: Convention
    trainer: str
    name: str
    typed: Sequence[str]
    as_ours: Config
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    ran: Numbers = field(default_factory=dict)

    def numbers(self, step: RecordedStep) -> Numbers:
        return their_numbers(step, self.convention) | self.ran


Side = OurSide | TheirSide


@dataclass(frozen=True)
class Switch:
    """An option that is tried. sides: which of both it changes, and to what.

    reason: the sentence. typed: what makes the sides equal, "" where nothing can be typed.
    """

    reason: str
    typed: str
    place: int
    values: Mapping[str, object]

    def on(self, sides: tuple[Side, Side]) -> tuple[Side, Side]:
        side = sides[self.place]
        if isinstance(side, OurSide):
            changed: Side = side.with_values(dict(self.values))
        else:
            changed = replace(side, convention=replace(side.convention, **self.values), ran={})
        return (changed, sides[1]) if self.place == 0 else (sides[0], changed)


@dataclass(frozen=True)
class Explanation:
    """Why a quantity differs first. relative: by how much. typed: what makes it equal, or ""."""

    quantity: str
    relative: float
    reason: str
    typed: str = ""

    @property
    def sentence(self) -> str:
        use = f"; type {self.typed}" if self.typed else ""
        return f"{self.quantity}: {self.reason} ({self.relative:.2g} of the largest){use}"


def differences(first: Numbers, second: Numbers) -> dict[str, tuple[float, float]]:
    """Return (largest difference, the same relative to the largest number) of each quantity.

    That of the loss is relative to the sum of the sizes of its terms, which may cancel.
    """
    largest_by_name = {}
    for name in QUANTITIES:
        a = first[name]
        b = second[name]
        if name in MAY_BE_UNKNOWN:
            known = ~(a.isnan() | b.isnan())
            a = a[known]
            b = b[known]
        if not len(a):
            largest_by_name[name] = (math.nan, 0.0)
            continue
        if not (a.isfinite().all() and b.isfinite().all()):
            largest_by_name[name] = (math.inf, math.inf)
            continue
        largest = float((a - b).abs().max())
        size = max(float(a.abs().max()), float(b.abs().max()))
        if name == "loss":
            size = max(size, _size_of_terms(first), _size_of_terms(second))
        largest_by_name[name] = (largest, largest / max(size, 1e-6))
    return largest_by_name


def _size_of_terms(numbers: Numbers) -> float:
    of_tokens = numbers["correction"] * numbers["surrogate"] + numbers["kl"]
    return float((numbers["weights"] * of_tokens).abs().sum())


@dataclass(frozen=True)
class Explained:
    """Why two sides differ: in the order of the quantities, and where a reading of ours is not what
    their functions gave."""

    sides: list[Explanation]
    readings: list[Explanation]


def explain(step: RecordedStep, sides: tuple[Side, Side], tolerance: float) -> Explained:
    """Return why the sides differ, found by trying.

    Once a quantity is explained, what explained it is left switched, and the next is looked at. The
    last explanation may be that none of the options explains it.
    """
    shown = _relative([side.numbers(step) for side in sides], QUANTITIES)
    readings = []
    as_read = list(sides)
    for place, side in enumerate(sides):
        if isinstance(side, TheirSide) and side.ran:
            names = [name for name in QUANTITIES if name in side.ran]
            pair = (replace(side, ran={}), side)
            explanations, (as_read[place], _) = _explained(step, pair, _tried, names, tolerance)
            readings += explanations
    switches = partial(_switches, before=sides)
    explanations, _ = _explained(step, (as_read[0], as_read[1]), switches, QUANTITIES, tolerance)
    first = _first(shown, tolerance)
    if first < len(QUANTITIES) and not explanations:  # by their functions alone
        explanations.append(Explanation(QUANTITIES[first], shown[first], _NOT_EXPLAINED))
    return Explained(explanations, readings)


_NOT_EXPLAINED = "not explained by an option that is known here"

Sides = tuple[Side, Side]


def _explained(
    step: RecordedStep,
    sides: Sides,
    switches_of: Callable[[RecordedStep, Sides], Iterable[Switch]],
    names: Sequence[str],
    tolerance: float,
) -> tuple[list[Explanation], Sides]:
    """Return why these quantities differ, and the sides with the explaining switches applied."""
    explanations: list[Explanation] = []
    while True:
        numbers = [side.numbers(step) for side in sides]
        relative = _relative(numbers, names)
        first = _first(relative, tolerance)
        if first == len(names):
            return explanations, sides

        reached = partial(_reached, step, sides, numbers, names, tolerance)
        switches = _best(sides, [*switches_of(step, sides)], reached, first)
        sentence = " and ".join(switch.reason for switch in switches) or _NOT_EXPLAINED
        typed = " ".join(switch.typed for switch in switches if switch.typed)
        explanations.append(Explanation(names[first], relative[first], sentence, typed))
        if not switches:
            return explanations, sides
        for switch in switches:
            sides = switch.on(sides)


def _reached(
    step: RecordedStep,
    before: Sides,
    numbers: Sequence[Numbers],
    names: Sequence[str],
    tolerance: float,
    after: Sides,
) -> int:
    """Return the place of the first quantity that differs after a switch.

    numbers: of the sides before it.
    """
    made = [
        known if new is old else new.numbers(step)
        for new, old, known in zip(after, before, numbers, strict=True)
    ]
    return _first(_relative(made, names), tolerance)


def _relative(numbers: Sequence[Numbers], names: Sequence[str]) -> list[float]:
    apart = differences(*numbers)
    return [apart[name][1] for name in names]


def _first(relative: Sequence[float], tolerance: float) -> int:
    """Return the place of the first quantity that differs; the number of all for none."""
    differing = (place for place, number in enumerate(relative) if not number <= tolerance)
    return next(differing, len(relative))


def _best(
    sides: Sides, switches: Sequence[Switch], reached: Callable[[Sides], int], first: int
) -> tuple[Switch, ...]:
    """Return the one or two switches that make the quantity at this place, and those before it,
    equal; of several, those after which the sides agree longest.

    reached: returns the place of the first quantity that differs.
    """
    for count in (1, 2):
        by_place: dict[int, tuple[Switch, ...]] = {}
        for tried in itertools.combinations(switches, count):
            after = sides
            try:
                for switch in tried:
                    after = switch.on(after)
                by_place.setdefault(reached(after), tried)
            except (PgtoolkitError, ValueError, TypeError, AssertionError):
                continue  # values that do not go together
        if by_place and max(by_place) > first:
            return by_place[max(by_place)]
    return ()


def _tried(step: RecordedStep, sides: Sides) -> Iterator[Switch]:
    """Yield what their own functions may do otherwise than our reading of them, the first side."""
    read, ran = sides
    assert isinstance(read, TheirSide)
    candidates = {**_TRIED} | {"temperature": tuple(step.new)}
    factor = _factor(read.numbers(step)["gradient"], ran.numbers(step)["gradient"])
    if factor is not None:
        candidates["scale"] = (factor * read.convention.scale,)
    changes = [(name, value) for name, values in candidates.items() for value in values]
    for name, value in changes:
        as_read = getattr(read.convention, name)
        if value != as_read:
            sentence = _said(
                name, [value, as_read], [f"{read.trainer} as it ran", "our reading of it"]
            )
            yield Switch(sentence, "", 0, {name: value})


def _factor(read: Tensor, ran: Tensor) -> float | None:
    """Return the number by which one gradient is the other at every token; None for no such one."""
    largest = int(read.abs().argmax())
    factor = float(f"{float(ran[largest] / read[largest]):.9g}")
    is_of_all = (ran - factor * read).abs().max() <= 1e-7 * ran.abs().max()
    return factor if is_of_all and factor != 1 else None


def _switches(_: RecordedStep, sides: Sides, before: Sides) -> Iterator[Switch]:
    """Yield what may be switched: our keys to what the other has, and what no key says.

    before: the sides as they were read, before what their own functions do otherwise.
    """
    first, second = sides
    if isinstance(first, TheirSide) and isinstance(second, TheirSide):
        named = [side.trainer for side in (first, second)]
        for name, *values in _differing_fields(first, second):
            yield Switch(_said(name, values, named), "", 0, {name: values[1]})
        return
    for place, (side, other) in enumerate(((first, second), (second, first))):
        if isinstance(side, OurSide) and isinstance(other, TheirSide):
            switches = {switch.typed: switch for switch in _keys(side, other, place)}
            for switch in _by_convention(side, other, place):
                switches.setdefault(switch.typed, switch)
            yield from switches.values()
        elif isinstance(side, OurSide) and place == 0:
            yield from {switch.typed: switch for switch in _keys(side, other, place)}.values()
    for place, side in enumerate(sides):  # after what can be typed
        if isinstance(side, TheirSide):
            yield from _code(side, place)
            as_read = before[place]
            assert isinstance(as_read, TheirSide)
            for name, ran, read in _differing_fields(side, as_read):
                named = [f"{side.trainer} as it ran", "our reading of it"]
                yield Switch(_said(name, [ran, read], named), "", place, {name: read})


def _differing_fields(first: TheirSide, second: TheirSide) -> Iterator[tuple[str, object, object]]:
    """Yield (name, its value in the first, and in the second) of a convention's fields."""
    for item in fields(Convention):
        values = [getattr(side.convention, item.name) for side in (first, second)]
        if values[0] != values[1]:
            yield (item.name, *values)


def _code(side: TheirSide, place: int) -> Iterator[Switch]:
    """Yield a switch for each field of their convention that no key of ours says."""
    convention = side.convention
    for name, ours in _OURS.items():
        theirs = getattr(convention, name)
        if theirs != ours:
            values = {name: ours}
            if name == "kl_gradient":  # ours of that gradient has its value as well
                values["kl"] = theirs
            yield Switch(_said(name, [theirs, ours], [side.trainer, "ours"]), "", place, values)


def _said(name: str, values: list, named: list[str]) -> str:
    meant = _MEANT.get(name, f"{name.replace('_', ' ')} is")
    return f"{meant} {text(values[0])} in {named[0]} and {text(values[1])} in {named[1]}"


def _keys(side: OurSide, other: Side, place: int) -> Iterator[Switch]:
    """Yield a switch for each of our keys that the other has another value of, then for each group
    with all of its keys, which may be typed as one of them."""
    ours = side.config
    theirs = other.config if isinstance(other, OurSide) else other.as_ours
    for name in OF_ROLLOUT:
        before = getattr(ours.rollout, name, None)
        value = getattr(theirs.rollout, name, before)
        if value != before and hasattr(ours.rollout, name):
            yield _switch(side, {f"rollout.{name}": value}, place, other)
    for section in _SECTIONS:
        before = getattr(ours, section)
        after = getattr(theirs, section)
        changes = {
            f"{section}.{item.name}": getattr(after, item.name)
            for item in fields(after)
            if getattr(after, item.name) != getattr(before, item.name, item.default)
        }
        if type(before) is type(after):
            yield from (_switch(side, {key: value}, place, other) for key, value in changes.items())
        option = f"{section}.{_OPTIONS.get(section)}"
        if option in changes:  # which sets the keys beside it to their defaults
            defaults = {f"{section}.{item.name}": item.default for item in fields(after)}
            changes = {
                key: value
                for key, value in changes.items()
                if key == option or value != defaults[key]
            }
        if len(changes) > 1 or option in changes:
            yield replace(_switch(side, changes, place, other), values={section: after})


_BY_FIELD = {
    "dual_clip": "loss.dual_clip",
    "ratio_cap": "loss.dual_clip",
    "low": "loss.epsilon_low",
    "high": "loss.epsilon_high",
    "temperature": "rollout.temperature",
    "kl": "kl.kind",
    "kl_coefficient": "kl.coefficient",
    "entropy_coefficient": "entropy.coefficient",
    "mean": "aggregation.mode",
    "drops_equal": "rollout.uninformative",
}
"""Field of a convention -> our key that says the same."""

_BY_VALUE = {"token": "token_mean", "document": "sample_mean", True: "drop", False: "train"}


def _by_convention(side: OurSide, other: TheirSide, place: int) -> Iterator[Switch]:
    """Yield a switch for each of our keys that says something else than their convention, also
    where no key of theirs says it."""
    for name, key in _BY_FIELD.items():
        value = getattr(other.convention, name)
        before = _value(side, key)
        if isinstance(before, StrEnum):
            value = _BY_VALUE.get(value, value)
            value = type(before)(value) if value in {*type(before)} else before
        if value != before:
            yield _switch(side, {key: value}, place, other)


def _switch(side: OurSide, changes: dict[str, object], place: int, other: Side) -> Switch:
    """Return the switch of some keys of ours to the values of the other."""
    origins: Mapping[str, str] = {}
    name = other.name
    ours = side.name
    if isinstance(other, TheirSide):
        origins = other.keys
        name = other.trainer
        ours = "ours"
    clauses = []
    for key, value in changes.items():
        short = _short(key)
        origin = f" ({origins[short]})" if short in origins else ""
        before = text(_value(side, key))
        clauses.append(f"{short} is {text(value)} in {name}{origin} and {before} in {ours}")
    typed = " ".join(f"{_short(key)}={text(value)}" for key, value in changes.items())
    return Switch(", ".join(clauses), typed, place, changes)


def _value(side: OurSide, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(side.config, section), name, None)


def _short(key: str) -> str:
    """Return a key as a user types it: loss for loss.name."""
    section, _, name = key.partition(".")
    return section if _OPTIONS.get(section) == name else key

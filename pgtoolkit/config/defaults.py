"""Defaults that are computed from other keys."""

from __future__ import annotations

from dataclasses import dataclass

from pgtoolkit.system.conditions import holds, value_of
from pgtoolkit.tasks.settings import VERIFIERS


@dataclass(frozen=True)
class ByWeights:
    """A default that depends on the weights a run starts from.

    random: for weights that are drawn at random. trained: for a pretrained model, all of whose
    weights are trained. adapters: for LoRA; None for the same as `trained`.
    """

    random: float
    trained: float
    adapters: float | None = None

    def resolve(self, config: object) -> float:
        """Return the value in a configuration, see `value_of`."""
        is_pretrained = value_of(config, "model.name") == "huggingface"
        if not is_pretrained or value_of(config, "model.random_weights"):
            return self.random
        if self.adapters is not None and value_of(config, "model.lora_rank") is not None:
            return self.adapters
        return self.trained

    def __str__(self) -> str:
        words = f"{number(self.random)}, with model=huggingface {number(self.trained)}"
        return words if self.adapters is None else f"{words} and with LoRA {number(self.adapters)}"

    @property
    def interpolation(self) -> str:
        """The default as it stands in conf/, for OmegaConf's resolver `pgtk.by_weights`."""
        values = [self.random, self.trained]
        if self.adapters is not None:
            values.append(self.adapters)
        return f"${{pgtk.by_weights:{','.join(map(number, values))}}}"


@dataclass(frozen=True)
class ByCondition:
    """A default by the first condition that holds, see `holds`, and `otherwise` elsewhere.

    cases: (condition, value); the value None is a number that must be given.
    """

    cases: tuple[tuple[str, float | str | None], ...]
    otherwise: float | str

    def resolve(self, config: object) -> float | str | None:
        """Return the value in a configuration, see `value_of`."""
        for condition, value in self.cases:
            if holds(condition, config):
                return value
        return self.otherwise

    def __str__(self) -> str:
        cases = [
            f"with {condition} " + ("to be given" if value is None else number(value))
            for condition, value in self.cases
        ]
        return ", ".join([number(self.otherwise), *cases])

    @property
    def interpolation(self) -> str:
        """The default as it stands in conf/, for OmegaConf's resolver `pgtk.if`."""
        cases = [
            f"'{condition}',{'null' if value is None else number(value)}"
            for condition, value in self.cases
        ]
        return f"${{pgtk.if:{','.join(cases)},{number(self.otherwise)}}}"


@dataclass(frozen=True)
class SameAs:
    """A default that is the value of another key."""

    key: str

    def resolve(self, config: object) -> object:
        """Return the value in a configuration, see `value_of`."""
        return value_of(config, self.key)

    def __str__(self) -> str:
        return self.key

    @property
    def interpolation(self) -> str:
        """The default as it stands in conf/."""
        return f"${{{self.key}}}"


@dataclass(frozen=True)
class ByScores:
    """The number of an evaluation that says how good a policy is: the share of right answers, or
    the mean score where code of the user's own gives the scores, see `scores_by_own_code`."""

    def resolve(self, config: object) -> str:
        """Return the value for the first evaluation set of a configuration, see `value_of`."""
        task = value_of(config, "task")
        settings = next(iter((value_of(config, "evaluation.sets") or {}).values()), None)
        if any(value_of(settings, name) for name in ("task", "verifier", "verifiers")):
            kind = value_of(settings, "task") or value_of(task, "name")
            names = ("verifier", "verifiers")
            task = {"name": kind, **{name: value_of(settings, name) for name in names}}
        return "avg" if scores_by_own_code(task) else "pass@1"

    def __str__(self) -> str:
        return "pass@1, with a verifier or an environment of your own avg"

    @property
    def interpolation(self) -> str:
        """The default as it stands in conf/, for OmegaConf's resolver `pgtk.by_scores`."""
        return "${pgtk.by_scores:}"


def scores_by_own_code(task: object) -> bool:
    """Return whether code of the user's own decides what is right: a score of 1 or more, whatever
    that means there.

    task: its keys, see `value_of`. The first of several verifiers decides.
    """
    if value_of(task, "name") != "prompts":
        return value_of(task, "name") == "conversation"
    verifier = value_of(task, "verifier")
    for entry in (value_of(task, "verifiers") or {}).values():
        verifier = entry if isinstance(entry, str) else value_of(entry, "verifier")
        break
    return verifier not in (None, *VERIFIERS)


Computed = ByWeights | ByCondition | ByScores | SameAs


def number(value: float | str) -> str:
    """Return a number as one types it in YAML: 7, 1.0, 0.28, 3e-4; a name unchanged."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) and 0 < abs(value) <= 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return repr(value)

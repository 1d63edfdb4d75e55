"""The rules between the parts of a training as they hold for parts that are made in Python, with
refusals in the words of Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.rollouts.rules import ONLY_IF, ROWS
from pgtoolkit.rollouts.settings import PolicyRolloutSettings, RecordedRolloutSettings
from pgtoolkit.system.conditions import holds, joined_singles, parts, singles
from pgtoolkit.system.declared import Needed, python_value
from pgtoolkit.system.report import text

Values = Mapping[str, object]
"""What parts hold, by the names of keys; a group has the name of its option."""


def misfit(values: Values, of_own_loss: Iterable[Needed] = ()) -> str | None:
    """Return the refusals of parts that do not meet all rules, a line each; None where they do.

    A rule on keys that are not among the values is passed over.
    of_own_loss: rules that hold for a loss of the user's own.
    """
    refusals = []
    for row in (*ROWS, *of_own_loss, *_rows_of_keys()):
        named = {parts(single)[0] for single in (*singles(row.when), *singles(row.needs))}
        if named <= values.keys() and holds(row.when, values) and not holds(row.needs, values):
            refusals.append(_refusal(row, values))
    return "\n".join(dict.fromkeys(refusals)) or None


def _rows_of_keys() -> Iterator[Needed]:
    """Yield a row for each part of the condition without which a key has no effect."""
    for key, declared in ONLY_IF.items():
        default = None
        for kind in (PolicyRolloutSettings, RecordedRolloutSettings):
            default = getattr(kind, key.rpartition(".")[2], default)
        condition = declared.get("only_if", "")
        uses = declared.get("use", condition).split(" and ")
        because = declared.get("why", "It has no effect otherwise.")
        for needs, use in zip(condition.split(" and "), uses, strict=True):
            yield Needed(f"{key}!={text(default)}", needs, because, use)


def _refusal(row: Needed, values: Values) -> str:
    setting = parts(singles(row.when)[0])[0]
    failing = parts(next(single for single in singles(row.needs) if not holds(single, values)))[0]
    uses = [_typed(use) for use in (row.use or row.needs).split(" or ")]
    if values.get("kl.place") == "reward":
        uses = [use.replace(_OF_VALUES["kl=none"], "SampledRollouts(penalty=None)") for use in uses]
    return (
        f"{_given(setting, values[setting])} needs {_condition(row.needs)} (got "
        f"{_given(failing, values[failing])}). {row.because} Use {', or '.join(uses)}."
    )


def _condition(condition: str) -> str:
    """Return a condition in the words of Python."""
    words = ""
    before = ""
    for joiner, single in joined_singles(condition):
        name, operator, value = parts(single)
        name = _OPTION_KEYS.get(name, name)
        place = _place(name).format("...").replace("..., ...", "...")
        if operator == "=":
            phrase = _given(name, value)
        elif value == "null":
            phrase = place
        elif operator == ">":
            phrase = f"{place} above {value}"
        elif (name, joiner) == (before, " and "):
            phrase = _value(name, value)
        else:
            phrase = f"{place} other than {_value(name, value)}"
        words += joiner + phrase
        before = name if operator == "!=" else ""
    return words


def _typed(use: str) -> str:
    """Return overrides in the words of Python."""
    overrides = [parts(override) for override in use.split()]
    typed = [_given(name, value) for name, _, value in overrides if (name, value) != _BY_DEFAULT]
    return " and ".join(dict.fromkeys(typed))


def _given(name: str, value: object) -> str:
    """Return what has been given, or is to be typed, for a key or for the option of a group."""
    name = _OPTION_KEYS.get(name, name)
    typed = text(value)
    return _OF_VALUES.get(f"{name}={typed}") or _place(name).format(_value(name, typed))


_OPTION_KEYS = {"rollout.name": "rollout", "advantage.estimator": "advantage", "kl.kind": "kl"}

_BY_DEFAULT = ("accumulation.micro_batches_per_step", "null")
"""What an override takes back, and is left out in Python."""

_OF_VALUES = {
    "accumulation=dynamic": "AccumulationSettings(docs_per_step=64)",
    "rollout=policy": "SampledRollouts",
    "rollout=recorded": "RecordedRollouts",
    "kl=none": "Loss(kl=None)",
    "loss=custom": "a loss of your own",
    "kl.place=loss": "Loss(kl=...)",
    "kl.place=reward": "SampledRollouts(penalty=...)",
}
_PLACES = {
    "advantage": "Estimator({})",
    "aggregation": "aggregation_of({})",
    "correction": "Loss(correction={})",
    "entropy.coefficient": "Loss(entropy_coefficient={})",
    "entropy.top_fraction": "Loss(entropy_top_fraction={})",
    "kl": "KL({}, ...)",
    "kl.reference": "PolicyGradientModule(reference={})",
    "kl.reference_prompt": "TokenizedTask(reference_prompt={})",
    "kl.target": "AdaptiveKL(target={})",
    "kl.update_every": "PolicyGradientModule(reference_every={})",
    "loss": "Loss({}, ...)",
    "loss.score_centering": "score_centering={}",
    "metrics": "Loss(metrics={})",
    "model.share_prompts": "StepLoader(share_prompts={})",
    "parallelism": "a layout with data_parallel alone ({})",
    "rollout.group_size": "group_size={}",
    "rollout.too_long": "RecordedRolloutSettings(too_long={})",
    "advantage.": "AdvantageSettings({}={{}})",
    "accumulation.": "AccumulationSettings({}={{}})",
    "model.": "HuggingFaceModelSettings({}={{}})",
    "parallelism.": "Layout.of_world({}={{}})",
    "rollout.": "PolicyRolloutSettings({}={{}})",
    "sampler.": "SamplingSettings({}={{}})",
}
"""Key or group, or the beginning of keys -> where its value stands in Python."""


def _place(name: str) -> str:
    group, _, leaf = name.partition(".")
    return _PLACES[name] if name in _PLACES else _PLACES[f"{group}."].format(leaf)


def _value(name: str, typed: str) -> str:
    """Return a value in the words of Python. typed: as in an override."""
    options = {"loss": FAMILIES, "correction": CORRECTIONS}.get(name, {})
    if typed in options:
        return f"{options[typed].__name__}()"
    if name in ("kl.reference", "kl.reference_prompt") and typed != "null":
        return "..."
    return "None" if (name, typed) == ("correction", "none") else python_value(typed)

"""What was predicted of planned contrasts: a file that `pgtk plan` writes, and the user fills in before the runs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pgtoolkit.comparison.compared import Compared
from pgtoolkit.comparison.statistics import Comparison
from pgtoolkit.comparison.terminal import planned, verdict
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import is_number, refusal, text
from pgtoolkit.system.yaml_text import plain_yaml

_OPTIONS = ("metric", "against", "margin", "over", "best_of", "reach")
"""What the file says of the comparison: the options of `pgtk compare`, which it takes the place of."""

_WORDS = ("better", "worse", "equal")


def template(options: dict[str, str], contrasts: list[str]) -> str:
    """The file before it is filled in; contrasts: what is compared with the base."""
    lines = ["# Predictions, to be filled in and kept before the runs; then `pgtk compare ... --predictions FILE`."]
    lines += [f"{name}: {value}" for name, value in options.items()]
    lines += ["# Of each: better, worse, equal (within the margin), or the difference itself, such as 0.03."]
    return "\n".join([*lines, "expected:", *(f"  {name!r}: null" for name in contrasts)]) + "\n"


def take(file: Path, args: Namespace) -> dict[str, str | float]:
    """What the file expects of each contrast; its options go into args. Raises ConfigError for what it cannot mean."""

    def refused(what: object, needs: str, reason: str) -> ConfigError:
        return ConfigError(refusal(f"--predictions={file}", needs, what, reason, "the form that pgtk plan writes"))

    try:
        content = plain_yaml(file.read_bytes())
        expected = {text(name): value for name, value in content.pop("expected").items()}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        got = error.strerror if isinstance(error, OSError) else "something else"
        raise refused(got, "YAML with the key expected", "It has what was expected before the runs.") from error
    if "against" not in content:
        raise refused("none", "the key against", "A contrast is predicted with its base.")
    if typed := [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(args, name) is not None]:
        reason = "What was planned is compared as it was planned."
        raise ConfigError(refusal(typed[0], "to be left out", f"it beside {file}", reason, "what the file says"))
    for name, value in content.items():
        if name not in _OPTIONS:
            raise refused(name, f"no other keys than {', '.join(_OPTIONS)}", "They are options of pgtk compare.")
        setattr(args, name, text(value))
    for contrast, value in expected.items():
        if value not in _WORDS and not is_number(value):
            needs = "better, worse, equal or a difference"
            raise refused(f"{contrast}: {text(value)}", needs, "It is compared with that.")
    return expected


def judged(compared: Compared, expected: dict[str, str | float]) -> list[str]:
    """A line for each contrast that something was expected of. ConfigError where none of them was compared."""
    pairs = {compared.arm(compared.groups[pair.second]): pair for pairs in planned(compared) for pair in pairs}
    names = "; ".join(pairs) or "none"
    if expected and not expected.keys() & pairs:
        raise ConfigError(f"predictions need runs of {', '.join(expected)} (got contrasts {names}). Name their runs.")
    answers = {name: _judgement(compared, pairs[name], value) for name, value in expected.items() if name in pairs}
    none = f"undecided (no runs of it; there are {names})"
    return [f"Predicted: {name} {text(value)}: {answers.get(name, none)}" for name, value in expected.items()]


def _judgement(compared: Compared, pair: Comparison, value: str | float) -> str:
    """right, wrong or undecided, with the answer. Of a size: whether the interval of the difference has it."""
    answer = verdict(pair, compared.sign, compared.comparisons.margin)
    if isinstance(value, str):
        is_right = answer.startswith(value)
        undecided = pair.p is None or answer == "unknown"
    else:
        is_right = pair.interval is not None and pair.interval[0] <= value <= pair.interval[1]
        undecided = pair.interval is None or (is_right and pair.interval[0] < 0 < pair.interval[1])
    return f"{'undecided' if undecided else 'right' if is_right else 'wrong'} ({answer})"

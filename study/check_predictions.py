"""Compare what was predicted of planned contrasts, before the runs, with the answers.

    python -m study.check_predictions study/predictions/study_loss.yaml study_loss

It compares the runs of a sweep as `pgtk compare` does, with the options that the file names, and
says of each prediction whether it was right, wrong, or is undecided. The file has `metric`,
`against`, `margin` and other options of `pgtk compare`, and `expected`: of each contrast better,
worse, equal (within the margin), or the difference itself, such as 0.03. A predicted size is right
if the interval has it, and undecided as long as the interval has 0, too.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import needed_for, parse_metric
from pgtoolkit.comparison.statistics import Comparison
from pgtoolkit.comparison.text_report import planned, render_comparison, verdict
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.runs.find import find_runs
from pgtoolkit.system.report import is_number, refusal, text
from pgtoolkit.system.yaml_text import plain_yaml

_OPTIONS = ("metric", "against", "margin", "over", "best_of", "reach")
"""What the file says of the comparison, which is not said again."""

_WORDS = ("better", "worse", "equal")


def take(file: Path, args: Namespace) -> dict[str, str | float]:
    """Return what the file expects of each contrast, and put its options into args.

    Raises ConfigError for content that has no meaning.
    """

    def refused(got: object, needs: str, reason: str) -> ConfigError:
        return ConfigError(
            refusal(f"predictions={file}", needs, got, reason, "the form of study/predictions")
        )

    try:
        content = plain_yaml(file.read_bytes())
        expected = {text(name): value for name, value in content.pop("expected").items()}
    except (OSError, ValueError, AttributeError, KeyError) as error:
        got = error.strerror if isinstance(error, OSError) else "something else"
        raise refused(
            got, "YAML with the key expected", "It has what was expected before the runs."
        ) from error
    if "against" not in content:
        raise refused("none", "the key against", "A contrast is predicted with its base.")
    typed = [f"--{name.replace('_', '-')}" for name in _OPTIONS if getattr(args, name) is not None]
    if typed:
        reason = "What was planned is compared as it was planned."
        raise ConfigError(
            refusal(typed[0], "to be left out", f"it beside {file}", reason, "what the file says")
        )
    for name, value in content.items():
        if name not in _OPTIONS:
            raise refused(
                name,
                f"no other keys than {', '.join(_OPTIONS)}",
                "They are options of pgtk compare.",
            )
        setattr(args, name, text(value))
    for contrast, value in expected.items():
        if value not in _WORDS and not is_number(value):
            needs = "better, worse, equal or a difference"
            raise refused(f"{contrast}: {text(value)}", needs, "It is compared with that.")
    return expected


def judged(compared: Compared, expected: dict[str, str | float]) -> list[str]:
    """Return a line for each contrast of which something was expected.

    Raises ConfigError where none of them was compared.
    """
    pairs = {
        compared.arm(compared.groups[pair.second]): pair
        for pairs in planned(compared)
        for pair in pairs
    }
    names = "; ".join(pairs) or "none"
    if expected and not expected.keys() & pairs:
        raise ConfigError(
            f"predictions need runs of {', '.join(expected)} (got contrasts {names}). Name their "
            "runs."
        )
    answers = {
        name: _judgement(compared, pairs[name], value)
        for name, value in expected.items()
        if name in pairs
    }
    none = f"undecided (no runs of it; there are {names})"
    return [
        f"Predicted: {name} {text(value)}: {answers.get(name, none)}"
        for name, value in expected.items()
    ]


def _judgement(compared: Compared, pair: Comparison, value: str | float) -> str:
    """Return right, wrong or undecided, with the answer.

    A predicted size is right if the interval of the difference has it.
    """
    answer = verdict(pair, compared.sign, compared.comparisons.margin)
    if isinstance(value, str):
        is_right = answer.startswith(value)
        undecided = pair.p is None or answer == "unknown"
    else:
        is_right = pair.interval is not None and pair.interval[0] <= value <= pair.interval[1]
        undecided = pair.interval is None or (is_right and pair.interval[0] < 0 < pair.interval[1])
    if undecided:
        return f"undecided ({answer})"
    return f"{'right' if is_right else 'wrong'} ({answer})"


def main(file: Path, names: list[str]) -> None:
    """Print the comparison of these runs, and what became of each prediction."""
    args = Namespace(**dict.fromkeys(_OPTIONS))
    expected = take(file, args)
    metric = parse_metric(args.metric)[1] if args.metric else (args.reach or "").rpartition("=")[0]
    runs = find_runs(names, needed_for(metric))
    compared = compare(
        runs, args.metric, args.best_of, args.reach, args.over, args.against, args.margin
    )
    print(render_comparison(compared))
    for line in judged(compared, expected):
        print(line)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except PgtoolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error

"""The metric by which runs are compared where the user names none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pgtoolkit.comparison.common_measure import (
    evaluated_alike,
    is_scored_by_own_code,
    measure_of,
    set_of,
)
from pgtoolkit.comparison.measures import is_share
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.series import mean

_HARDLY = 0.005
"""A note is made on a share of right answers whose mean over each run is below this."""

Groups = Sequence[Sequence[Run]]
"""The runs of each configuration."""


def chosen_metric(groups: Groups, ignore_code: bool = False) -> tuple[str, list[str]]:
    """Return (the metric to compare if the user names none, notes).

    A number of held-out prompts comes before one of training, unless fewer pairs of configurations
    have it in common. A share of right answers comes before a mean score, but where code of the
    user's own gives the scores: then nobody knows which score means right. A number that is 0 in
    all runs cannot tell them apart.
    """
    done = [[run for run in group if run.state == "done"] for group in groups]
    done = [group for group in done if group] or groups
    runs = [run for group in done for run in group]
    known = [metric for metric in in_order(runs) if any(run.values(metric) for run in runs)]
    not_zero = [metric for metric in known if any(any(run.values(metric)) for run in runs)]
    if not not_zero:
        return next(iter(known), "reward"), []
    pairs = {metric: _num_pairs(done, metric, ignore_code) for metric in not_zero}
    metric = max(not_zero, key=lambda name: pairs[name])  # the first of equal ones
    notes = []
    before = known[: known.index(metric)]
    skipped = [name for name in before if name not in not_zero]
    if skipped:
        count = sum(any(run.values(name) for name in skipped) for run in runs)
        of_runs = "in every run" if count == len(runs) else f"in {_having(count, len(runs))}"
        verb = "is" if len(skipped) == 1 else "are"
        notes.append(
            f"{' and '.join(skipped)} {verb} 0 {of_runs}: the runs are compared by {metric}"
        )
    held_out = [name for name in before if name.startswith(HELD_OUT) and name in not_zero]
    if held_out and not metric.startswith(HELD_OUT):
        count = sum(bool(run.values(held_out[0])) for run in runs)
        notes.append(
            f"{count} of {len(runs)} finished runs have {held_out[0]}, measured on held-out "
            f"prompts. By {metric} more of them can be compared; --metric={held_out[0]} compares "
            "those that have it"
        )
    return metric, notes + _hardly_ever_right(runs, metric, not_zero)


def _hardly_ever_right(runs: Sequence[Run], metric: str, not_zero: list[str]) -> list[str]:
    """Return a note on a share that is almost 0 in every run, with the mean score in its place."""
    scores = [name for name in not_zero if not is_share(name)]
    if not is_share(metric) or not scores:
        return []
    highest = max(mean(run.values(metric)) for run in runs if run.values(metric))
    if highest >= _HARDLY:
        return []
    return [
        f"{metric} is almost 0 in every run (a mean of at most {highest:.2g}), so it hardly tells "
        f"them apart: --metric={scores[0]} compares the mean score"
    ]


def _having(count: int, num_runs: int) -> str:
    verb = "has" if count == 1 else "have"
    return f"the {count} of {num_runs} runs that {verb} a value"


def in_order(runs: Sequence[Run]) -> list[str]:
    """Return the metrics that may be compared, the best first."""
    names = dict.fromkeys(name for run in runs for name in run.columns if name.startswith(HELD_OUT))
    metrics: list[str] = []
    for name in dict.fromkeys(map(set_of, names)):
        numbers = [f"{HELD_OUT}{name}/pass@1", f"{HELD_OUT}{name}/avg"]
        metrics += _by_meaning(runs, numbers)
    return [*metrics, *_by_meaning(runs, ["exact_match", "reward"])]


def _by_meaning(runs: Sequence[Run], numbers: list[str]) -> list[str]:
    """Return (share of right answers, mean score) in the order in which they mean something."""
    has_own_code = any(is_scored_by_own_code(run, numbers[0]) for run in runs)
    return sorted(numbers, key=is_share, reverse=not has_own_code)


def _num_pairs(groups: Groups, metric: str, ignore_code: bool) -> tuple[int, int]:
    """Return (pairs of configurations that have the metric in common, configurations that have it).

    A configuration has it if half of its runs do.
    """
    measured = []
    alike = evaluated_alike([run for group in groups for run in group])
    for group in groups:
        having = [run for run in group if run.values(metric)]
        if 2 * len(having) >= len(group):
            of_group = [measure_of([run], metric, ignore_code, alike) for run in having]
            measured += dict.fromkeys(of_group)
    counts = Counter(text for text in measured if text is not None)
    return sum(count * (count - 1) // 2 for count in counts.values()), len(measured)

"""Why there is no verdict on two configurations, and what to run for one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pgtoolkit.comparison.common_measure import (
    Difference,
    evaluated_alike,
    measure_of,
    nested,
    why_unlike,
)
from pgtoolkit.comparison.compared_runs import Compared, RunGroup
from pgtoolkit.comparison.headline import in_order
from pgtoolkit.comparison.pairs import without_common_block
from pgtoolkit.comparison.statistics import Comparison
from pgtoolkit.runs.find import Run
from pgtoolkit.system.report import identity, shell_path


def without_verdict(compared: Compared, pairs: list[Comparison]) -> list[str]:
    """Return sentences on pairs that have no measure in common: why, and what to do.

    Pairs of one reason have one sentence.
    """
    sentences: dict[tuple[str, ...], str] = {}
    seen: set[tuple[object, object]] = set()
    samples = compared.comparisons.samples
    for pair in pairs:
        measured = (samples[pair.first].measure, samples[pair.second].measure)
        if pair.is_common or pair.identical or measured in seen:
            continue
        seen.add(measured)
        first, second = (compared.groups[place] for place in (pair.first, pair.second))
        reasons = why_unlike(
            first.counted, second.counted, compared.metric, compared.ignore_code, compared.over
        )
        names = tuple(why.name for why in reasons)
        if names in sentences:
            continue
        trained = [key for key in compared.keys if key not in compared.asked]
        are_trained_alike = all(
            identity(first.values[key]) == identity(second.values[key]) for key in trained
        )
        other = "" if are_trained_alike else _common_metric(compared, first, second)
        one_of_each = [first.counted[0], second.counted[0]]
        use = f"Use --metric={other}." if other else what_to_run(one_of_each, reasons)
        why = (
            f"{compared.metric} would differ for one and the same policy, since "
            f"{' and '.join(map(str, reasons))}."
        )
        if measured[0] == measured[1]:
            use = f"{without_common_block(compared, first, second)}."
            why = why if reasons else f"{compared.metric} is compared within a block, and"
        sentences[names] = f"no common measure: {why} {use}"
    return [*sentences.values()]


def _common_metric(compared: Compared, first: RunGroup, second: RunGroup) -> str:
    """Return a metric that means the same in all runs of two groups; "" if they have none."""
    runs = [*first.counted, *second.counted]
    without = [*compared.over, *evaluated_alike(runs)]
    for metric in in_order(runs):
        measured = [
            measure_of(group.counted, metric, compared.ignore_code, without)
            for group in (first, second)
        ]
        is_common = measured[0] is not None and measured[0] == measured[1]
        if is_common and all(run.values(metric) for run in runs):
            return metric
    return ""


def what_to_run(runs: Sequence[Run], reasons: Sequence[Difference]) -> str:
    """Return sentences on how to measure runs alike, on held-out prompts.

    runs: one of each configuration.
    """
    run = runs[0]
    left = [why.name for why in reasons if why.use is None]
    if left:
        scored = ""
        if any(name.startswith("code of ") for name in left):
            scored = " task.verifier=VERIFIER, one for all"
        paths = [shell_path(str(each.path)) for each in runs]
        return (
            f"Measure them on the same prompts: pgtk evaluate {' '.join(paths)} --on FILE{scored}. "
            f"Or train all with the same {' and '.join(left)}."
        )
    words = ["pgtk evaluate", shell_path(str(run.path)), *(why.use for why in reasons if why.use)]
    if _reads_prompts_without_sets(run):
        path = str(run.config["task.path"])
        words += ["--training-prompts", "--on", shlex.quote(path)]
    train = overrides_for_all(run, reasons)
    or_train = f", or train with {train}" if train else ""
    return f"Measure each of the runs alike, such as by {' '.join(words)}{or_train}."


def overrides_for_all(run: Run, reasons: Sequence[Difference]) -> str:
    """Return the overrides with which runs that differ in these keys are measured alike, on
    held-out prompts; "" where no overrides do that.

    run: one of them.
    """
    if any(why.use is None for why in reasons):
        return ""
    # The task of training does not change, and a set of its own has the common values.
    words = [why.use.replace("task.", "evaluation.sets.test.", 1) for why in reasons if why.use]
    if not run.config.get("evaluation.every"):
        words.insert(0, "evaluation.every=20")
    if _reads_prompts_without_sets(run):
        words.append("evaluation.sets.test.path=FILE")
    return " ".join(words)


def _reads_prompts_without_sets(run: Run) -> bool:
    has_sets = bool(nested(run.config, "evaluation.sets."))
    return run.config.get("task.path") is not None and not has_sets

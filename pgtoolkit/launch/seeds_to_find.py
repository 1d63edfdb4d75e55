"""Counts the seeds that a sweep needs to find a difference, from its runs or those of the study."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.system.report import plural, refusal, shell_path

if TYPE_CHECKING:
    from pgtoolkit.comparison.seed_noise import SeedNoise

STUDY = {"arithmetic": 0.014, "lists": 0.035}
"""Task of docs/study.md -> the standard deviation over seeds of the final held-out pass@1 of
`grpo`, with SmolLM2-135M."""


def size_of_difference(text: str) -> float:
    """Return the X of `--find X`; raises ConfigError for what is no positive number."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise ConfigError(
            refusal(
                setting=f"--find {text}",
                needs="a number above 0",
                got=text,
                reason="It is the difference to be found, of shares of right answers or rewards.",
                use="--find 0.02",
            )
        )
    return size


def lines_on_seeds(checked: PlannedRun | Sweep, size: float) -> list[str]:
    """Return how many seeds of each configuration find a difference of this size, the runs that
    this is known from, and how many seeds the sweep has."""
    from pgtoolkit.comparison.measures import is_share
    from pgtoolkit.comparison.seed_noise import number_of_seeds, seeds_of_each
    from pgtoolkit.comparison.statistics import LEVEL, POWER, seeds_needed

    noise, metric = _noise_of_finished_runs(checked)
    if size > 1 and (noise is None or is_share(metric)):
        return [f"Shares of right answers differ by at most 1, and never by {size:g}."]
    if noise is not None:
        assert isinstance(checked, Sweep)
        lines = [
            f"{seeds_of_each(noise, [size])}.",
            f"from the finished runs in {shell_path(checked.folder)}: final {metric} spreads by "
            f"{noise.spread:.2g} over seeds",
        ]
    else:
        lowest, highest = (seeds_needed(size, [spread**2] * 2) for spread in STUDY.values())
        spreads = " and ".join(f"{spread:g} ({task})" for task, spread in STUDY.items())
        lines = [
            f"To find a difference of {size:g}, each configuration needs {lowest} or "
            f"{number_of_seeds(highest)} (t-test, level {LEVEL}, power {POWER}, one pair alone).",
            f"from the spreads over seeds of another model: {spreads}, final held-out pass@1 of "
            "grpo with SmolLM2-135M in docs/study.md. Yours may be several times as large: check "
            "anew once two seeds of a configuration have finished.",
        ]
    if isinstance(checked, Sweep):
        seeds = {run.config.seed for run in checked.runs if run.composed.config is not None}
        lines.append(f"this sweep has {plural(len(seeds), 'seed')} of each")
    return lines


def _noise_of_finished_runs(checked: PlannedRun | Sweep) -> tuple[SeedNoise | None, str]:
    """Return (the noise in what a sweep's runs have recorded, the metric)."""
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import runs_with
    from pgtoolkit.comparison.seed_noise import noise_of

    if not isinstance(checked, Sweep) or not checked.has_folder or not checked.folder.is_dir():
        return None, ""
    try:
        compared = compare(runs_with(None, None, [str(checked.folder)]))
    except ConfigError:  # none has been begun
        return None, ""
    return noise_of(compared), compared.metric

"""Counts the seeds that a sweep needs to find a difference, from its runs or those of the study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.config.names import digest, plain_config
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

    noise, metric, folder = _noise_of_finished_runs(checked)
    if size > 1 and (noise is None or is_share(metric)):
        return [f"Shares of right answers differ by at most 1, and never by {size:g}."]
    if noise is not None:
        lines = [
            f"{seeds_of_each(noise, [size])}.",
            f"from the finished runs in {shell_path(folder)}: final {metric} spreads by "
            f"{noise.spread:.2g} over seeds",
        ]
        if isinstance(checked, Sweep) and folder != checked.folder:
            lines.append(
                f"hydra.sweep.dir={shell_path(folder)} trains beside these, and keeps what is done"
            )
    else:
        lowest, highest = (seeds_needed(size, [spread**2] * 2) for spread in STUDY.values())
        anew = "check anew once two seeds of a configuration have finished"
        if metric:
            anew = f"those in {shell_path(folder)} end alike with every seed, with one {metric}"
        spreads = " and ".join(f"{spread:g} ({task})" for task, spread in STUDY.items())
        lines = [
            f"To find a difference of {size:g}, each configuration needs {lowest} or "
            f"{number_of_seeds(highest)} (t-test, level {LEVEL}, power {POWER}, one pair alone).",
            f"from the spreads over seeds of another model: {spreads}, final held-out pass@1 of "
            "grpo with SmolLM2-135M in docs/study.md. Yours may be several times as large: "
            f"{anew}.",
        ]
    if isinstance(checked, Sweep):
        seeds = {run.config.seed for run in checked.runs if run.composed.config is not None}
        lines.append(f"this sweep has {plural(len(seeds), 'seed')} of each")
    return lines


def _noise_of_finished_runs(checked: PlannedRun | Sweep) -> tuple[SeedNoise | None, str, Path]:
    """Return (the noise in what a sweep's runs have recorded, the metric, the folder of the runs);
    without a noise the folder of runs that end alike with every seed, and no metric where there are
    no two seeds.

    They are those in the sweep's folder or, where there is no noise in it, those of its
    configurations that a sweep beside it has trained, as of `seed=0..4` for a sweep over two seeds.
    """
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import runs_with
    from pgtoolkit.comparison.seed_noise import noise_of

    if not isinstance(checked, Sweep) or not checked.has_folder:
        return None, "", Path()
    places = {checked.folder: [str(checked.folder)]} if checked.folder.is_dir() else {}
    alike: tuple[SeedNoise | None, str, Path] = (None, "", Path())
    for folder, paths in (places | _trained_elsewhere(checked)).items():
        try:
            compared = compare(runs_with(None, None, paths))
        except ConfigError:  # none has been begun
            continue
        noise = noise_of(compared)
        if noise is not None:
            return noise, compared.metric, folder
        if not alike[1] and any(len(group.counted) > 1 for group in compared.groups):
            alike = (None, compared.metric, folder)
    return alike


def _trained_elsewhere(sweep: Sweep) -> dict[Path, list[str]]:
    """Return the run directories of the sweep's configurations in folders of other sweeps beside
    its own, by folder: that with the most of them first."""
    digests = {
        digest(plain_config(run.config)) for run in sweep.runs if run.composed.config is not None
    }
    directories: dict[Path, list[str]] = {}
    for directory in sorted(sweep.folder.parent.glob("*/*-????????")):
        folder = directory.parent
        is_other = folder != sweep.folder and (folder / "sweep.json").is_file()
        if is_other and directory.name[-8:] in digests:
            directories.setdefault(folder, []).append(str(directory))
    return dict(sorted(directories.items(), key=lambda item: -len(item[1])))

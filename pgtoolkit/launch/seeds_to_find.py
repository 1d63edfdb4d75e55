"""Counts the seeds that a sweep needs to find a difference, from its runs or those of the study."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.config.keys import changes_learning
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.launch.sweep import PlannedRun, Sweep
from pgtoolkit.runs.history import is_of_several, trained_with
from pgtoolkit.runs.records import known_provenance, leaves, read_leaves, read_status
from pgtoolkit.system.report import identity, plural, refusal, shell_path

if TYPE_CHECKING:
    from pgtoolkit.comparison.seed_noise import SeedNoise
    from pgtoolkit.runs.find import Run

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

    noise, metric, folder, runs = _noise_of_finished_runs(checked)
    if size > 1 and (noise is None or is_share(metric)):
        return [f"Shares of right answers differ by at most 1, and never by {size:g}."]
    if noise is not None:
        lines = [
            f"{seeds_of_each(noise, [size])}.",
            f"from {runs} in {shell_path(folder)}: final {metric} spreads by {noise.spread:.2g} "
            "over seeds",
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


def _noise_of_finished_runs(
    checked: PlannedRun | Sweep,
) -> tuple[SeedNoise | None, str, Path, str]:
    """Return (the noise in what runs of a sweep's configurations have recorded, the metric, the
    folder of these runs, their number in words); without a noise the folder of runs that end alike
    with every seed, and no metric where there are no two seeds.

    They have any seeds, and lie in the sweep's folder or, where there is no noise in it, in that of
    a sweep beside it.
    """
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import runs_with
    from pgtoolkit.comparison.seed_noise import noise_of

    alike: tuple[SeedNoise | None, str, Path, str] = (None, "", Path(), "")
    if not isinstance(checked, Sweep) or not checked.has_folder:
        return alike
    planned = {_configuration(run) for run in _planned(checked)}
    for folder, paths in _trained(checked, planned).items():
        try:
            compared = compare(runs_with(None, None, paths))
        except ConfigError:  # none has been begun
            continue
        noise = noise_of(compared)
        several = [len(group.counted) for group in compared.groups if len(group.counted) > 1]
        if noise is not None:
            words = plural(sum(several), "finished run")
            if checked.config.search is None and len(several) < len(planned):
                words += f" of {len(several)} of its {len(planned)} configurations"
            return noise, compared.metric, folder, words
        if not alike[1] and several:
            alike = (None, compared.metric, folder, "")
    return alike


def _planned(sweep: Sweep) -> list[Run]:
    """Return the sweep's runs as their directories will have them."""
    from pgtoolkit.runs.find import Run

    configs = [run.named_config for run in sweep.runs if run.composed.config is not None]
    values = [with_defaults(dict(leaves(plain_config(each)))) for each in configs]
    return [Run("", "", "pending", config=of_run) for of_run in values]


def _trained(sweep: Sweep, planned: Collection[str]) -> dict[Path, list[str]]:
    """Return the directories of the runs of these configurations in the sweep's folder and in those
    of other sweeps beside it, by folder: its own first, then that with the most of them.

    A search chooses its configurations as it runs: all runs in its folder are of them.
    """
    directories: dict[Path, list[str]] = {sweep.folder: []}
    for directory in sorted(path.parent for path in sweep.folder.parent.glob("*/*/config.yaml")):
        folder = directory.parent
        if folder != sweep.folder and not (folder / "sweep.json").is_file():
            continue
        is_searched = sweep.config.search is not None and folder == sweep.folder
        with contextlib.suppress(PgtoolkitError, OSError):  # a damaged run is none that counts
            if is_searched or _configuration(_as_trained(directory)) in planned:
                directories.setdefault(folder, []).append(str(directory))
    of_sweep = directories.pop(sweep.folder)
    others = dict(sorted(directories.items(), key=lambda item: -len(item[1])))
    return ({sweep.folder: of_sweep} if of_sweep else {}) | others


def _as_trained(directory: Path) -> Run:
    """Return the run of a directory without what it has measured."""
    from pgtoolkit.runs.find import Run

    step = read_status(directory).get("step", 0)
    history = trained_with(directory, known_provenance(directory), step)
    return Run(directory, "", "", config=read_leaves(directory), trained_with=history)


def _configuration(run: Run) -> str:
    """Return a text that runs have in common which were trained alike but for their seed and the
    contents of modules and data; "" for a run in which these changed on its way."""
    from pgtoolkit.comparison.compared_runs import learned
    from pgtoolkit.comparison.groups import as_typed
    from pgtoolkit.comparison.notes import is_not_configured

    typed = as_typed(run)
    values = {name: learned(typed, name) for name in {*typed.config, *typed.trained_with}}
    files = [name for name in values if is_not_configured(name)]
    if any(is_of_several(str(values[name])) for name in files):
        return ""
    names = [name for name in {*values} - {*files} if changes_learning(name, typed.config)]
    return identity([[name, values[name]] for name in sorted(names) if name != "seed"])

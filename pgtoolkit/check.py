"""Checks every run that a command line describes before any of them starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from pgtoolkit.compose import compose, jobs, name_of
from pgtoolkit.plan import describe
from pgtoolkit.rules.report import Report
from pgtoolkit.validate import resolve, validate


@dataclass
class Run:
    """One run: config is None if nothing could be composed."""

    overrides: list[str]
    config: DictConfig | None
    report: Report = field(default_factory=Report)


def check(overrides: list[str], multirun: bool = False, config_dir: str | None = None, rules: bool = True) -> list[Run]:
    """Compose and validate each run; several with `multirun` or where the configuration itself asks for a sweep.

    rules: False looks only at whether it can be composed.
    """
    folder = Path(config_dir) if config_dir else None
    if not multirun:
        first = _check_one(overrides, folder, rules)
        if first.config is None or first.config.hydra.mode != RunMode.MULTIRUN:
            return [first]
        params = first.config.hydra.sweeper.get("params") or {}
        overrides = [*overrides, *(f"{key}={value}" for key, value in params.items())]
    return [_check_one(job, folder, rules) for job in jobs(overrides)]


def _check_one(overrides: list[str], config_dir: Path | None, rules: bool) -> Run:
    composed = compose(overrides, config_dir)
    run = Run(overrides, composed.config)
    if rules and composed.config is not None:
        run.report = validate(composed.config)
    run.report.problems[:0] = composed.problems
    return run


def problems(runs: list[Run]) -> list[str]:
    """Each problem once; in a sweep with the overrides of the first run that has it, unless all have it."""
    return _once(runs, "problems")


def notes(runs: list[Run]) -> list[str]:
    """The same for notes."""
    return _once(runs, "notes")


def _once(runs: list[Run], which: str) -> list[str]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        for sentence in dict.fromkeys(getattr(run.report, which)):
            found.setdefault(sentence, []).append(run)
    return [
        sentence if len(having) == len(runs) else f"{' '.join(having[0].overrides)}: {sentence}"
        for sentence, having in found.items()
    ]


def page(runs: list[Run]) -> str:
    """What `pgtk check` prints: the plan of the (first) run, then notes and problems of all."""
    sections = []
    first = runs[0]
    if len(runs) > 1:
        names = [f"{number}  {' '.join(run.overrides)}" for number, run in enumerate(runs)]
        sections.append((f"Sweep of {len(runs)} runs; the plan is that of the first", names))
    if first.config is not None:
        sections += describe(_plain(first.config), _plain(compose([]).config))
        sections.append(("Run name", [name_of(first.config.tracking.run_name, first.overrides)]))
    sections.append(("Notes", notes(runs)))
    found = problems(runs)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return "\n\n".join(title + "\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if lines)


def _plain(config: DictConfig) -> Any:
    return resolve(config, Report())

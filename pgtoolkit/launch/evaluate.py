"""`pgtk evaluate`: finds the model and the prompts that a command line names, checks them, shows what is measured."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation import are_training_prompts, held_out_sets, how_sampled
from pgtoolkit.config.keys import ignored
from pgtoolkit.config.names import name_from
from pgtoolkit.config.paths import make_absolute
from pgtoolkit.config.rules import run
from pgtoolkit.config.rules.prompts import evaluated
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.launch.start import refused
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import key_of, refusal, say, shell_path
from pgtoolkit.training.machine import check_machine

FOLDER = Path("outputs/evaluations")
"""Where the results are, below the directory that the command was typed in."""


def evaluate(source: Path | None, step: int | None, best: bool, overrides: list[str]) -> str:
    """Evaluate, write the results into a folder of their own, and give what to print. Raises PgtoolkitError.

    source: a run or a model's folder; None: the model that a configuration begins with. step, best: which checkpoint
    of a run, if not the newest. overrides: what was typed.
    """
    from pgtoolkit.runs.find import is_run

    of_run = source is not None and is_run(source)
    if not of_run and (step is not None or best):
        flag = "--best" if best else f"--step={step}"
        raise ConfigError(refusal(flag, "a run directory", source, "A run has several checkpoints.", f"no {flag}"))
    command = "pgtk evaluate" + ("" if source is None else f" {source}")
    config = _configuration(command, source, of_run, overrides)
    for note in _check(config):
        say(f"note: {note}")
    trained = OmegaConf.to_object(saved_config(source)) if of_run else None
    chosen: Config = OmegaConf.to_object(config)
    for one in held_out_sets(chosen):
        if trained is not None and (reason := are_training_prompts(trained, one)):
            say(f"note: set {one.name} holds prompts of the run's training. {reason}")

    from pgtoolkit.training.evaluations import evaluate as measured
    from pgtoolkit.training.export import saved_state
    from pgtoolkit.training.train import quieten

    quieten()
    state = saved_state(source, command, step, best) if of_run else None
    folder = _folder(name_from(overrides, {}) if source is None else source.resolve().name)
    write_atomically(folder / "evaluation.yaml", redact(OmegaConf.to_yaml(config)))
    try:
        rows = measured(chosen, folder, trained, state)
    except (ConfigError, DataError):
        shutil.rmtree(folder)
        raise
    write_atomically(folder / "evaluations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    model = f"the initial model of model={chosen.model.name}, seed {chosen.seed}"
    if source is not None:
        model = shell_path(source) + ("" if state is None else f", step {state['step']}")
    return render_evaluation(rows, chosen, model, folder)


def _configuration(command: str, source: Path | None, of_run: bool, typed: list[str]) -> DictConfig:
    """The configuration, of which nothing says how to train any more. Raises ConfigError with all problems."""
    overrides = typed
    if source is not None and not of_run:
        if not (source / "config.json").is_file():
            from pgtoolkit.runs.find import not_a_run

            raise not_a_run(command, source, "a run directory, or a model's Hugging Face folder")
        overrides = ["model=huggingface", f"model.path={json.dumps(str(source))}", *overrides]
    kind, run_dir = ("run", source) if of_run else ("model", None)
    composed = compose(overrides, run_dir=run_dir, typed=typed, evaluate=kind)
    if composed.problems:
        raise refused(composed.problems)
    config, keys = composed.config, {key_of(override) for override in typed}
    with open_dict(config):
        config.pop("hydra", None)
    own_task = any(key.partition(".")[0] == "task" for key in keys)
    if own_task and not any(key.startswith("evaluation.sets") for key in keys):
        config.evaluation.sets = {}
    make_absolute(config)
    config.evaluation.every, config.evaluation.best, config.trainer.stop_at = 1, None, None
    if of_run and not own_task and getattr(config.task, "path", None) and not config.evaluation.sets:
        reason = "The run has no held-out prompts of its own."
        use = "task.path=test.jsonl or evaluation.sets.test.path=test.jsonl"
        raise ConfigError(refusal(command, "prompts to evaluate on", "none", reason, use))
    return config


def _check(config: DictConfig) -> list[str]:
    """The notes on a configuration; raises ConfigError or DataError with all problems."""
    plain, report = resolve_and_validate(config, rules=(ignored, run.model, evaluated, run.sampler))
    plain.rollout.name = "none"  # no rule on what is trained is to look at the prompts of the task
    plain.tracking.name = "none"  # nothing is tracked
    check_machine(plain, report)
    if report.problems:
        raise refused(list(dict.fromkeys(report.problems)))
    return report.notes


def _folder(name: str) -> Path:
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{name}"
    for number in itertools.count(1):
        folder = FOLDER / (name if number == 1 else f"{name}~{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def render_evaluation(rows: list[dict[str, Any]], config: Config, model: str, folder: Path) -> str:
    """The numbers of each set in a column, and where everything lies."""
    names = [name for name in rows[0] if name not in ("step", "time", "documents", "set") and "_error" not in name]
    table = [["", *(row["set"] for row in rows)], *([name, *(_cell(row, name) for row in rows)] for name in names)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    sets = {one.name: one.source for one in held_out_sets(config)}
    entries = [
        ("model", model),
        *sets.items(),
        ("sampled", f"{how_sampled(config)}, by sampler={config.sampler.name}"),
        ("results", shell_path(folder / "evaluations.jsonl")),
        ("completions", shell_path(folder / "completions")),
    ]
    return "\n".join([*lines, "", *(f"{label:<12} {value}" for label, value in entries)])


def _cell(row: dict[str, Any], name: str) -> str:
    value, error = row.get(name), row.get(f"{name}_error")
    if value is None or isinstance(value, int):
        return "" if value is None else str(value)
    return f"{value:.4g}" if error is None else f"{value:.4f} ± {error:.4f}"

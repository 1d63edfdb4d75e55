"""Evaluations of a run: when they are made, the best checkpoint, the goal; and of a policy that is
not trained."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch

from pgtoolkit.config.evaluation_sets import watched
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_run import TinyModelConfig
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import best_checkpoint, best_of, read_evaluations
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tracking.progress import evaluation_line
from pgtoolkit.training.build import accelerator, begin, policy_of
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.sources import evaluator_of
from pgtoolkit.training.state import load_weights

log = logging.getLogger("pgtoolkit")


class Evaluations:
    """Those of one run; every rank has one, and rank 0 writes them to the run directory.

    run: None on other ranks. module: with its evaluator.
    An evaluation leaves the training as it is, to the last bit.
    """

    def __init__(self, run: RunDirectory | None, module: Any):
        self._run, self._module = run, module
        self._config, self._watched = module.config, watched(module.config)
        rows: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        with failing_together(module.layout):
            if run is not None:
                rows, best = read_evaluations(run.path), best_checkpoint(run.path, self._watched)
        rows, best = gather_objects((rows, best), module.layout.world_group)[0]
        self._rows: list[dict[str, Any]] = rows
        self._best: dict[str, Any] | None = best

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; that of the latest evaluation has to be saved yet where
        it is the best."""
        return None if self._best is None else self._best["step"]

    def is_due(self, step: int) -> bool:
        """Whether the run is evaluated after this step, and has not been."""
        is_planned = (
            step % self._config.evaluation.every == 0 or step == self._config.trainer.max_steps
        )
        return is_planned and not self.has(step)

    def has(self, step: int) -> bool:
        return any(row["step"] == step for row in self._rows)

    def make(self, step: int) -> None:
        """Evaluate the weights after this step on every set. Called by every rank."""
        rows, layout = measure(self._module, step), self._module.layout
        if self._module.device.type == "cuda":
            # what follows is the next step's
            torch.cuda.reset_peak_memory_stats(self._module.device)
        with failing_together(layout):
            if self._run is not None:
                self._run.append_evaluations(rows)
        self._rows += rows
        # no checkpoint is of the weights before the first step
        if step > 0 and self._watched is not None:
            candidates = [*([self._best] if self._best else []), *rows]
            self._best = best_of(candidates, self._watched, {step, self.best_step})
        for row in rows:
            log.info(
                evaluation_line(row, self._config.trainer.max_steps, is_best=row is self._best)
            )

    def reached(self, step: int) -> str | None:
        """In words that trainer.stop_at was reached at this step; None if it was not."""
        goal = self._config.trainer.stop_at
        if goal is None or step == 0:
            return None
        assert self._watched is not None  # trainer.stop_at needs evaluation.best
        row = best_of(self._rows, self._watched, {step})
        name, number = self._watched
        if row is None or row[number] < goal:
            return None
        return f"trainer.stop_at={goal:g} was reached: {name}/{number} is {row[number]:.4g}"


def measure(module: Any, step: int) -> list[dict[str, Any]]:
    """The rows of evaluations.jsonl of a module's evaluator, for its weights after this step;
    called by every rank."""
    rows = []
    for one in module.evaluator.sets:
        numbers = module.evaluator.evaluate(one, step)
        rows.append(
            {
                "step": step,
                "time": round(time.time(), 3),
                "documents": module.documents_seen,
                **numbers,
            }
        )
    return rows


def evaluate_policy(
    config: Config, folder: Path, trained: Config | None = None, state: dict | None = None
) -> list[dict[str, Any]]:
    """The rows, as of evaluations.jsonl, of the sets of a configuration; completions go to
    `folder`.

    trained: the configuration of the run that a checkpoint is of. state: of the checkpoint; None
        for the weights that
    the configuration begins with. The numbers are those that the run itself has measured with these
    weights, where the prompts and the machine are the same.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    begin(config)
    origin, alphabet = trained or config, None
    if isinstance(config.model, TinyModelConfig):  # whose vocabulary is that of the prompts
        alphabet = make_task(origin.task, origin.seed).alphabet
    policy = policy_of(config, alphabet, ONE_PROCESS, trained)
    module = PolicyGradientModule(config, policy, ONE_PROCESS)
    if state is not None:
        try:
            load_weights(policy, state)
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"the checkpoint does not fit the configured model: {first_line(error)}"
            ) from error
        module.num_updates, module.documents_seen = state["num_updates"], state["documents_seen"]
    module.to("cuda" if accelerator(config) == "gpu" else "cpu")
    module.evaluator = evaluator_of(config, None, module, None, folder)
    with contextlib.closing(module.evaluator):
        return measure(module, 0 if state is None else state["step"])

"""Evaluations of a run, its best checkpoint and its goal."""

from __future__ import annotations

import logging
import time

import torch

from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import best_checkpoint, best_of, read_evaluations
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.tracking.progress import evaluation_line
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import TrainerSettings

log = logging.getLogger("pgtoolkit")


class Evaluations:
    """The evaluations of one run, which every rank makes and rank 0 writes.

    run: the run directory; None on ranks other than 0. module: with its evaluator.
    An evaluation leaves the training unchanged, to the last bit.
    """

    def __init__(
        self, run: RunDirectory | None, module: PolicyGradientModule, settings: TrainerSettings
    ):
        assert module.evaluator is not None
        self._run = run
        self._module = module
        self._every = module.evaluator.every
        self._watched = module.evaluator.watched
        self._settings = settings
        rows: list[JsonObject] = []
        best: JsonObject | None = None
        with failing_together(module.layout):
            if run is not None:
                rows = read_evaluations(run.path)
                best = best_checkpoint(run.path, self._watched)
        rows, best = gather_objects((rows, best), module.layout.world_group)[0]
        self._rows: list[JsonObject] = rows
        self._best: JsonObject | None = best

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; its checkpoint may still have to be saved."""
        return None if self._best is None else self._best["step"]

    def is_due(self, step: int) -> bool:
        """Return whether the run has to be evaluated after this step, and has not been yet."""
        is_planned = step % self._every == 0 or step == self._settings.max_steps
        return is_planned and not self.has(step)

    def has(self, step: int) -> bool:
        return any(row["step"] == step for row in self._rows)

    def make(self, step: int) -> None:
        """Evaluate the weights after this step on every set. Called by every rank."""
        rows = evaluate_module(self._module, step)
        if self._module.device.type == "cuda":
            # The next step's peak memory is without that of the evaluation.
            torch.cuda.reset_peak_memory_stats(self._module.device)
        with failing_together(self._module.layout):
            if self._run is not None:
                self._run.append_evaluations(rows)
        self._rows += rows
        # The weights before the first step are in no checkpoint.
        if step > 0 and self._watched is not None:
            candidates = rows if self._best is None else [self._best, *rows]
            self._best = best_of(candidates, self._watched, {step, self.best_step})
        max_steps = self._settings.max_steps
        for row in rows:
            log.info(evaluation_line(row, max_steps, is_best=row is self._best))

    def reached(self, step: int) -> str | None:
        """Return a sentence that trainer.stop_at was reached at this step; None if it was not."""
        goal = self._settings.stop_at
        if goal is None or step == 0:
            return None
        assert self._watched is not None  # trainer.stop_at needs evaluation.best
        row = best_of(self._rows, self._watched, {step})
        name, number = self._watched
        if row is None or row[number] < goal:
            return None
        return f"trainer.stop_at={goal:g} was reached: {name}/{number} is {row[number]:.4g}"


def evaluate_module(module: PolicyGradientModule, step: int) -> list[JsonObject]:
    """Evaluate a module on every set of its evaluator, and return the rows of evaluations.jsonl.

    step: after which the weights are. Called by every rank.
    """
    assert module.evaluator is not None
    rows = []
    for prompt_set in module.evaluator.sets:
        numbers = module.evaluator.evaluate(prompt_set, step)
        row = {
            "step": step,
            "time": round(time.time(), 3),
            "documents": module.documents_seen,
            **numbers,
        }
        rows.append(row)
    return rows

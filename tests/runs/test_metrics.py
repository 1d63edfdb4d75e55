"""Each metric that a run writes is declared, and each declared one is written by some part."""

import ast
import re
from pathlib import Path

from builders.runs import metrics_of, run

from pgtoolkit.losses.metrics import _KINDS
from pgtoolkit.runs.declared_metrics import METRICS, TABLES, metric_named
from pgtoolkit.runs.records import read_evaluations

PACKAGE = Path(__file__).parents[2] / "pgtoolkit"
WRITING_ROOMS = ("losses", "ranks", "runs", "tasks", "rollouts", "training", "tracking")


def texts_of_code() -> set[str]:
    """Return the texts in the rooms that write metrics, as patterns where a part varies."""
    patterns = set()
    for room in WRITING_ROOMS:
        for file in (PACKAGE / room).glob("*.py"):
            if room == "runs" and file.stem.endswith(("metric", "metrics")):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    patterns.add("".join(map(_pattern, node.values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    patterns.add(_pattern(node))
    # One that is hardly more than a part that varies says nothing.
    return {pattern for pattern in patterns if re.search("[a-z]{3}", pattern.replace(r"\w+", ""))}


def _pattern(part: ast.expr) -> str:
    if not isinstance(part, ast.Constant):
        return r"\w+"
    end = r"\w+" if part.value.endswith("/") else ""
    return re.escape(part.value).replace(r"\{\}", r"\w+") + end


def test_each_declared_metric_is_written():
    written = re.compile("|".join(texts_of_code()))
    names = [metric.name for metrics in TABLES.values() for metric in metrics]
    assert len(names) > 90
    assert [name for name in names if not written.fullmatch(name.replace("@k", "@1"))] == []


def test_each_metric_that_a_run_writes_is_declared(tmp_path):
    for kind in _KINDS.values():
        names = (*kind.means, *kind.maxima, *kind.minima, *kind.sums)
        assert {*names, kind.sample_size or "loss"} <= METRICS.keys()
    overrides = (
        "metrics=with_entropy",
        "advantage=gae",
        "evaluation.every=6",
        "evaluation.prompts_per_set=4",
        "trainer.max_steps=2",
    )
    folder = run(tmp_path / "run", *overrides)
    assert len(metrics_of(folder)[0]) == 46
    rows = read_evaluations(folder)
    assert [
        name for row in rows for name in row if metric_named(f"evaluation/SET/{name}") is None
    ] == []
    assert metric_named("rewards") is None
    assert metric_named("evaluation/held_out/reward/format").name == "reward/NAME"

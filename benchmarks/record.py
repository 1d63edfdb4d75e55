"""Measure whole runs of `experiment=sums` on one GPU, from the command to its end.

    python benchmarks/record.py FOLDER MODEL [--jobs 8] [OVERRIDE...]

MODEL: a folder of SmolLM2-135M-Instruct, see docs/data.md. Trains one run after the other: as the
experiment stands, and without the groups that teach nothing. With `--jobs` then so many seeds at
the same time, which wants MPS to be running (`nvidia-cuda-mps-control -d`). OVERRIDE goes to every
run, as `trainer.max_steps=2 rollout.prompts_per_batch=2 evaluation.prompts_per_set=4` on a CPU.
Prints minutes, tokens a second, memory, and held-out accuracy over minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from pgtoolkit import experiment

RUNS = ([], ["rollout.uninformative=drop"])
"""Overrides of the runs that have the GPU alone."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--jobs", type=int, default=0)
    args, overrides = parser.parse_known_args()
    words = ["experiment=sums", f"model.path={args.model.resolve()}", "tracking=none", *overrides]
    for number, chosen in enumerate(RUNS):
        directory = args.folder / f"run-{number}"
        seconds = _seconds([f"hydra.run.dir={directory}", *words, *chosen])
        if seconds is not None:
            _show(" ".join(["experiment=sums", *chosen]), [experiment.load(directory)], seconds)
    if args.jobs:
        directory = args.folder / "sweep"
        at_once = [f"seed=range({args.jobs})", f"hydra.launcher.jobs_per_gpu={args.jobs}"]
        seconds = _seconds(["-m", f"hydra.sweep.dir={directory}", *words, *at_once])
        if seconds is not None:
            _show(f"{args.jobs} seeds at the same time", [*experiment.load(directory)], seconds)


def _seconds(words: list[str]) -> float | None:
    """Return what a command of pgtk took, its start included; None, and its end, if it failed."""
    began = time.time()
    ended = subprocess.run(["pgtk", *words], capture_output=True, text=True)
    if ended.returncode != 0:
        print(f"pgtk {' '.join(words)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        return None
    return time.time() - began


def _show(name: str, runs: list[experiment.Run], seconds: float) -> None:
    """Print the figures of runs that were trained at the same time."""
    tokens = sum(run.metrics.num_tokens.sum() for run in runs)
    steps = sum(len(run.metrics) for run in runs)
    text = f"{name}: {seconds / 60:.2f} min, {steps} updates, "
    text += f"{tokens / seconds:,.0f} trained tokens a second"
    if "peak_memory_gb" in runs[0].metrics:  # on a GPU
        text += f", {sum(run.metrics.peak_memory_gb.max() for run in runs):.1f} GB"
    print(text, flush=True)
    for run in runs:
        # The first evaluation comes before the first update.
        began = run.evaluations.time.min() - run.evaluations.seconds.iloc[0]
        curve = [
            f"{(row.time - began) / 60:.2f} min {row.avg:.3f}"
            for row in run.evaluations.itertuples()
        ]
        print(f"  held-out: {', '.join(curve)}", flush=True)


if __name__ == "__main__":
    main()

"""Steps of runs by their place in a batch of rollouts: the raw data behind "Healthy numbers" in
docs/metrics.md.

    python benchmarks/batch_steps.py FILE.csv RUN...

Writes a row per step of each run: its loss family, its place in the batch (from 1), and the metrics
    of the table.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from pgtoolkit.runs.find import find_runs

METRICS = (
    "clipped_ratio_fraction",
    "clipped_low_fraction",
    "clipped_high_fraction",
    "kl_new_old",
    "effective_sample_size",
)


def main(file: str, *directories: str) -> None:
    """Read the runs and write their steps, four significant digits each."""
    with Path(file).open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["loss", "step", "place", *METRICS])
        for run in find_runs(directories):
            documents = run.config["rollout.prompts_per_batch"] * run.config["rollout.group_size"]
            steps = documents // run.config["accumulation.docs_per_step"]
            for step, *row in zip(
                *(run.columns[name].tolist() for name in ("step", *METRICS)), strict=True
            ):
                values = [f"{value:.4g}" for value in row]
                writer.writerow(
                    [run.config["loss.name"], int(step), int(step - 1) % steps + 1, *values]
                )


if __name__ == "__main__":
    main(*sys.argv[1:])

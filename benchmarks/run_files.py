"""Run directories that have grown: seconds and memory of resuming, comparing and delivering them.

    python -m benchmarks.run_files [FOLDER] [--rows 500000] [--runs 5000]

Makes runs below FOLDER (default: a temporary one) whose metrics.jsonl has 44 columns, as those of
the default experiment have: two of `--rows` rows, and `--runs` of 200 rows, five seeds to a
    configuration. Prints the
seconds and the peak memory of a process for each of: what a resume reads and takes away, the
    summary and curves at the
end of a run, `pgtk compare` of one and of both long runs, and of all the short ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pgtoolkit.runs.directory import RunDirectory

_COLUMNS = 38
"""Metrics of a row beside those that a comparison reads."""

_CONFIG = {f"group_{i}": {f"key_{j}": i + j / 8 for j in range(8)} for i in range(10)}
"""Keys that all runs share."""

_RESUME = """
import sys
from pathlib import Path
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.series import rows_until
path, step = Path(sys.argv[1]), int(sys.argv[2])
with RunDirectory(path) as run:
    rows, kept = rows_until(run.metrics_path, step)
    assert rows == step
    run.drop_metrics_after(step, kept)
    run.append_metrics(step + 1, {"reward": 0.5})
"""
_END = """
import sys
from pathlib import Path
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.tracking.curves import plot_curves
from pgtoolkit.assembly.summary import run_summary
path = Path(sys.argv[1])
recorded = read_metrics(path / "metrics.jsonl")
plot_curves(recorded, path / "curves.png", "run")
run_summary(recorded, path)
"""


def main(argv: list[str] | None = None) -> None:
    """Make the runs, and print a line for each measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--runs", type=int, default=5000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        top = args.folder or Path(temporary)
        long = [top / "long" / name for name in ("a", "b")]
        for seed, path in enumerate(long):
            make(path, "grpo", 1e-3, seed, args.rows)
        for number in range(args.runs):
            configuration, seed = divmod(number, 5)
            loss = ("grpo", "gspo")[configuration % 2]
            rate = 1e-6 * (1 + configuration // 2)
            make(top / "short" / f"{number:05d}", loss, rate, seed, 200)
        bytes_of_one = (long[0] / "metrics.jsonl").stat().st_size
        print(f"{args.rows} rows, {bytes_of_one / 1e6:.0f} MB a run; {args.runs} runs of 200 rows")
        compare = ["-m", "pgtoolkit.cli", "compare"]
        measure("resume", ["-c", _RESUME, str(long[1]), str(args.rows - 7)])
        measure("end of a run", ["-c", _END, str(long[0])])
        measure("compare, one long run", [*compare, str(long[0])])
        measure("compare, two long runs", [*compare, *map(str, long)])
        measure(f"compare, {args.runs} runs", [*compare, str(top / "short")])


def make(folder: Path, loss: str, rate: float, seed: int, rows: int) -> None:
    """A run whose reward rises to 0.9, if it is not there yet."""
    if (folder / "status.json").exists():
        return
    draw = random.Random(f"{loss} {rate} {seed}")
    others = [{f"metric_{i}": draw.random() for i in range(_COLUMNS)} for _ in range(100)]
    with RunDirectory(folder) as run:
        config = {"seed": seed, "loss": {"name": loss}, "optimizer": {"learning_rate": rate}}
        run.write_config(config | {"trainer": {"max_steps": rows}} | _CONFIG, [])
        with run.metrics_path.open("w") as file:
            for step in range(1, rows + 1):
                reward = min(0.9, step / rows) * draw.uniform(0.8, 1.1)
                row = {
                    "step": step,
                    "time": 1.7e9 + step / 8,
                    "reward": reward,
                    "exact_match": 0.9 * reward,
                }
                row |= {
                    "documents_seen": 64 * step,
                    "num_tokens": draw.randrange(300, 500),
                    "grad_norm": draw.random(),
                }
                file.write(json.dumps(row | others[step % 100]) + "\n")
        run.set_status("done", rows)


def measure(name: str, arguments: list[str]) -> None:
    """Run this Python in a process of its own.

    Prints its seconds, its seconds of CPU time and its peak memory.
    """
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{name} failed")
    spent = time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000
    print("{:<24}{:7.1f} s{:8.1f} s of CPU{:8.0f} MB".format(name, *spent), flush=True)


if __name__ == "__main__":
    main()

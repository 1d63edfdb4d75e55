"""Write the runs of a sweep as a compact table with the CPU time of each, for published tables.

    python benchmarks/sweep_runs.py FILE.csv SWEEP [OVERRIDE...]

Runs `pgtk sweep SWEEP OVERRIDE...`, or goes on with it, one job at a time, and writes a row per
run: the keys that the sweep varies, the seed, and what `_reached` returns. Linux only: the CPU time
of a job is read from /proc.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import AXES, DOCUMENTS, Goal, reached
from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.series import best, final
from pgtoolkit.system.report import text

_ENDED = re.compile(r"\[ *\d+/\d+\] \w+ +\d+ s ([^:\s]+)")
_FOLDER = re.compile(r"sweep .* jobs, .*, in (\S+)$")


def main(file: str, *sweep: str) -> None:
    """Run the sweep and write its table; SystemExit with its status if it does not end well."""
    folder, seconds = _run(["pgtk", "sweep", *sweep, "hydra.launcher.n_jobs=1"])
    write(Path(file), find_runs([folder]), seconds)
    print(f"CPU time of the runs together: {sum(seconds.values()):.0f} s")


def write(file: Path, runs: list[Run], seconds: dict[str, float]) -> None:
    """Write a row for each run.

    seconds: CPU time by the name of the run's directory, without runs that were done before.
    """
    compared = compare(runs, reach="exact_match=0.9")
    if compared.left_out:
        raise SystemExit(
            f"not every run counts: {compared.left_out[0][0].name}: {compared.left_out[0][1]}"
        )
    rows = [
        {key: text(value) for key, value in group.values.items()}
        | {"seed": run.config["seed"]}
        | _reached(run, compared.goal)
        | {"cpu_seconds": f"{seconds[run.name]:.1f}" if run.name in seconds else ""}
        for group in compared.groups
        for run in sorted(group.runs, key=lambda run: run.config["seed"])
    ]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _reached(run: Run, goal: Goal) -> dict[str, object]:
    """Return finals and bests, and numbers of the curves.

    documents_to_reward_0.9, {documents, tokens, seconds}_to_exact_match_0.9 and mean_exact_match:
        as `pgtk compare` takes them; empty where the run never is there.
    clipped_ratio_fraction: the mean over all steps.
    """
    reward = run.values("reward")
    clipped = run.values("clipped_ratio_fraction")
    progress = reached(run, goal)
    by_reward = reached(run, replace(goal, metric="reward"))
    return {
        "final_reward": f"{final(reward):.6f}",
        "best_reward": f"{best(reward):.6f}",
        "final_exact_match": f"{final(run.values('exact_match')):.6f}",
        "documents_to_reward_0.9": by_reward.to.get(DOCUMENTS, ""),
        **{
            f"{name}_to_exact_match_0.9": round(progress.to[axis], 3) if progress.to else ""
            for axis, name in AXES.items()
        },
        "mean_exact_match": f"{progress.mean:.6f}",
        "clipped_ratio_fraction": f"{statistics.fmean(clipped):.4f}" if clipped else "",
        **{axis: round(progress.seen[axis], 3) for axis in AXES},
    }


def _run(command: list[str]) -> tuple[str | None, dict[str, float]]:
    """Return the sweep's folder and the CPU seconds of each job that has ended, by its name."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = None
    before = 0.0
    seconds: dict[str, float] = defaultdict(float)
    for line in process.stdout:
        print(line, end="", flush=True)
        named = _FOLDER.match(line)
        if named:
            folder = named[1]
        ended = _ENDED.match(line)
        if ended:
            now = _seconds_of_children(process.pid)
            seconds[ended[1]] += now - before
            before = now
    if process.wait() != 0:
        raise SystemExit(process.returncode)
    return folder, seconds


def _seconds_of_children(pid: int) -> float:
    """Return CPU seconds, user and system, of the ended children of a process and of theirs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])

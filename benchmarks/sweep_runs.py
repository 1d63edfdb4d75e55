"""The runs of a sweep as a compact table, with the CPU time of each: the raw data behind published
tables.

    python benchmarks/sweep_runs.py FILE.csv SWEEP [OVERRIDE...]

Runs `pgtk sweep SWEEP OVERRIDE...`, or goes on with it, one job at a time, and writes a row per
run: the keys that the
sweep varies, the seed, and what `_reached` says. Linux only: the CPU time of a job is read from
    /proc.
"""

from __future__ import annotations

import csv
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import AXES, Goal, reached
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
    """A row per run. seconds: CPU time by the name of the run's directory; empty for a run that was
    done before."""
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
    """Finals and bests, and what the curves say.

    {documents, tokens, seconds}_to_exact_match_0.9 and mean_exact_match: as `pgtk compare` takes
    them.
    documents_to_reward_0.9: those seen when the mean reward of a batch of rollouts first is 0.9,
        empty if it never is.
    clipped_ratio_fraction: the mean over all steps.
    """
    reward, clipped = run.values("reward"), run.values("clipped_ratio_fraction")
    one = reached(run, goal)
    batch = run.config["rollout.prompts_per_batch"] * run.config["rollout.group_size"]
    steps = batch // run.config["accumulation.docs_per_step"]
    batches = [
        statistics.fmean(reward[first : first + steps]) for first in range(0, len(reward), steps)
    ]
    return {
        "final_reward": f"{final(reward):.6f}",
        "best_reward": f"{best(reward):.6f}",
        "final_exact_match": f"{final(run.values('exact_match')):.6f}",
        "documents_to_reward_0.9": next(
            (batch * n for n, mean in enumerate(batches, start=1) if mean >= 0.9), ""
        ),
        **{
            f"{name}_to_exact_match_0.9": round(one.to[axis], 3) if one.to else ""
            for axis, name in AXES.items()
        },
        "mean_exact_match": f"{one.mean:.6f}",
        "clipped_ratio_fraction": f"{statistics.fmean(clipped):.4f}" if clipped else "",
        **{axis: round(one.seen[axis], 3) for axis in AXES},
    }


def _run(command):
    """(folder of the sweep, CPU seconds of each job that ended meanwhile, by its name)."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    folder, before, seconds = None, 0.0, defaultdict(float)
    for line in process.stdout:
        print(line, end="", flush=True)
        folder = found[1] if (found := _FOLDER.match(line)) else folder
        if ended := _ENDED.match(line):
            now = _seconds_of_children(process.pid)
            seconds[ended[1]] += now - before
            before = now
    if process.wait() != 0:
        raise SystemExit(process.returncode)
    return folder, seconds


def _seconds_of_children(pid):
    """CPU seconds, user and system, of the ended children of a process and of theirs."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])

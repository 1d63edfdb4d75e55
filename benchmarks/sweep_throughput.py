"""Measure what a sweep costs beside its training: starts, jobs an hour, and checks of many jobs.

    # starts, and jobs an hour
    python benchmarks/sweep_throughput.py [--jobs 8] [OVERRIDE...]
    # checks of 10,000 jobs, of which none starts
    python benchmarks/sweep_throughput.py --plan 10000
    # runs an hour on GPUs
    python benchmarks/sweep_throughput.py --gpu [--jobs 16] hydra.launcher.jobs_per_gpu=8
    # the same in small, anywhere
    python benchmarks/sweep_throughput.py --gpu --jobs 2 trainer.max_steps=8 \\
        rollout.prompts_per_batch=8 ...

A start is what a further job of one step costs, its model, evaluation, curves and step included:
the CPU time of a sweep of N + 1 jobs less that of one job, divided by N. OVERRIDE: such as
hydra.launcher.n_jobs=2 or tracking=none; with trainer.max_steps=1000 the jobs an hour are those of
a real sweep. A run of --gpu trains 6.3 million parameters on 250 batches of 1024 completions of 40
tokens, four updates each; each OVERRIDE replaces one of GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import subprocess
import tempfile
import time

GPU = {
    "model.num_layers": 8,
    "model.hidden_size": 256,
    "model.num_heads": 8,
    "rollout.prompts_per_batch": 128,
    "rollout.group_size": 8,
    "rollout.max_completion_length": 40,
    "accumulation.docs_per_step": 256,
    "accumulation.max_tokens": 16384,
    "trainer.max_steps": 1000,
    "tracking": "none",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--plan", type=int, metavar="N")
    parser.add_argument("--gpu", action="store_true")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if args.plan:
            plan(args.plan, overrides)
        elif args.gpu:
            runs(args.jobs, overrides)
        else:
            starts(args.jobs, overrides)


def starts(jobs: int, overrides: list[str]) -> None:
    """Print what further jobs of a sweep cost."""
    short = (
        [] if any("max_steps" in override for override in overrides) else ["trainer.max_steps=1"]
    )
    words = [*short, "optimizer.warmup_steps=0", *overrides]
    first, _ = _seconds(["seed=0", "hydra.sweep.dir=first", *words])
    all_of_them, clock = _seconds([f"seed=range({jobs + 1})", "hydra.sweep.dir=all", *words])
    print(
        f"CPU seconds of a sweep of one job: {first:.1f}, of each further job: "
        f"{(all_of_them - first) / jobs:.2f}"
    )
    print(
        f"{jobs + 1} jobs in {clock:.0f} s, the checks included: {3600 * (jobs + 1) / clock:.0f} "
        "jobs an hour"
    )


def runs(jobs: int, overrides: list[str]) -> None:
    """Print how many runs of a small model an hour has."""
    words = GPU | dict(override.split("=", 1) for override in overrides)
    settings = [f"{key}={value}" for key, value in words.items()]
    cpu, clock = _seconds([f"seed=range({jobs})", "hydra.sweep.dir=all", *settings])
    print(
        f"{jobs} runs of {words['trainer.max_steps']} steps in {clock:.0f} s, {cpu / jobs:.1f} CPU "
        "seconds each"
    )
    print(f"{3600 * jobs / clock:.0f} runs an hour")


def plan(jobs: int, overrides: list[str]) -> None:
    """Print what `pgtk check` takes for many jobs, which differ in groups, numbers and seeds."""
    from pgtoolkit.launch.check import check_sweep, problems

    rates = ",".join(f"{rate}e-4" for rate in range(1, 6))
    axes = [
        "loss=grpo,gspo",
        f"optimizer.learning_rate={rates}",
        f"seed=range({jobs // 10})",
        *overrides,
    ]
    began = time.monotonic()
    began_cpu = time.process_time()
    sweep = check_sweep(axes)
    clock = time.monotonic() - began
    cpu = time.process_time() - began_cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert not problems(sweep)
    print(
        f"{len(sweep.jobs)} jobs planned in {clock:.1f} s ({cpu:.1f} s of CPU time), "
        f"{memory:.0f} MB"
    )


def _seconds(words: list[str]) -> tuple[float, float]:
    """Return the CPU seconds of a sweep with all that it has started, and seconds of the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run(["pgtk", "-m", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return cpu, time.monotonic() - began


if __name__ == "__main__":
    main()

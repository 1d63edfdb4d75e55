"""pgtk plan: how many seeds of a sweep fit a budget, what difference they can show, and a file for the predictions."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np

from pgtoolkit.config.evaluation import held_out_sets, is_on
from pgtoolkit.config.names import plain_values
from pgtoolkit.config.plan import documents_per_batch
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.launch.check import Checked, check, problems
from pgtoolkit.launch.multirun import run_sweep
from pgtoolkit.launch.start import refused
from pgtoolkit.launch.sweep import LOCAL
from pgtoolkit.runs.find import HELD_OUT, Run, find_runs
from pgtoolkit.runs.records import leaves, read_evaluations
from pgtoolkit.system.plain_files import write_atomically
from pgtoolkit.system.report import key_of, plural, refusal, shell_path
from pgtoolkit.training.machine import visible_gpus

_UNITS = {"s": 1, "m": 60, "h": 3600}


def plan(file: Path, overrides: list[str], args: Namespace) -> list[str]:
    """Sentences on what the budget can show, after a short run; writes the file for predictions.

    args: those of `pgtk plan`. Raises PgtoolkitError.
    """
    from pgtoolkit.comparison import predictions
    from pgtoolkit.comparison import statistics as power

    found = re.fullmatch(r"(\d+\.?\d*)([smh])", args.budget)
    if not found or not float(found[1]):
        raise ConfigError(refusal("--budget", "a time such as 60m", args.budget, "It is for all runs.", "--budget=60m"))
    checked = check(overrides, True, None, file, ["pgtk", "plan"])
    if wrong := problems(checked):
        raise refused(wrong)
    launcher = checked.master.hydra.launcher
    if launcher._target_ != LOCAL or checked.searches:
        reason, use = "Runs are timed on this machine, and all are known before.", "hydra/launcher=local"
        raise ConfigError(refusal("pgtk plan", "a grid of runs on this machine", "another sweep", reason, use))
    if args.predictions.exists():
        reason = "Predictions are never written over."
        raise ConfigError(refusal("--predictions", "a new file", args.predictions, reason, "another"))
    values = checked.runs[0].values
    default = f"final:{HELD_OUT}{held_out_sets(values)[0].name}/pass@1" if is_on(values) else "final:reward"
    args.metric = args.metric or default
    contrasts = _contrasts(checked, args)
    deviation, margin = _deviation_and_margin(args)
    jobs = len(visible_gpus()) * launcher.jobs_per_gpu if launcher.jobs_per_gpu else launcher.n_jobs
    said, seconds = _timed(checked, file, overrides, jobs)
    configurations = len(checked.runs) // len(checked.varying.get("seed", [None]))
    count = int(float(found[1]) * _UNITS[found[2]] // seconds) * jobs
    seeds = count // configurations
    pairs = seeds * int(np.prod([len(checked.varying.get(key, "1")) for key in (args.over or "").split(",")]))
    each = f"{plural(seeds, 'seed')} of each of {configurations} configurations"
    said.append(f"{args.budget}: {plural(count, 'run')}, {each}.")
    if pairs > 1:
        size = power.smallest_difference(pairs)
        known = "" if deviation is None else f", which is {size * deviation:.3g}"
        said.append(
            f"{pairs} pairs show a difference of {size:.2g} standard deviations of the paired differences{known} "
            f"(power {power.POWER}, without Holm's adjustment)."
        )
    if deviation is not None and margin is not None:
        needed = power.seeds_needed(margin, [deviation**2]), power.seeds_to_call_equal(margin / deviation)
        find, equal = (f"more than {power.MOST_SEEDS}" if pairs > power.MOST_SEEDS else pairs for pairs in needed)
        said.append(f"Margin {margin:g}: {find} pairs find such a difference, {equal} pairs call equal what is.")
    if contrasts:
        options = {name: getattr(args, name) for name in ("metric", "against", "margin", "over", "best_of")}
        content = predictions.template({name: value for name, value in options.items() if value}, contrasts)
        write_atomically(args.predictions, content)
        said.append(f"{shell_path(args.predictions)}: fill in, before they run, {'; '.join(contrasts)}.")
    return said


def _contrasts(checked: Checked, args: Namespace) -> list[str]:
    """What is compared with the base, as `pgtk compare` will name it; nothing without a base."""
    from pgtoolkit.comparison import predictions
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import parse_metric

    name, runs = parse_metric(args.metric)[1], []
    for run in checked.runs:
        columns = {key: np.array([1.0]) for key in ("step", "documents_seen", name)}
        runs.append(Run("", "", "done", config=dict(leaves(plain_values(run.values))), columns=columns))
    compared = compare(runs, args.metric, args.best_of, over=args.over, against=args.against)
    pairs = [pair for pairs in predictions.planned(compared) for pair in pairs] if args.against else []
    return sorted({compared.arm(compared.groups[pair.second]) for pair in pairs})


def _deviation_and_margin(args: Namespace) -> tuple[float | None, float | None]:
    """Of the paired differences: given, or of earlier runs, pooled; and the margin, for a share that of their mean."""
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import margin_of, needed_for, parse_metric

    margin = margin_of(args.margin) if args.margin else None
    if args.sd is not None and not 0 < args.sd < np.inf:
        raise ConfigError(refusal("--sd", "a number > 0", args.sd, "It is a standard deviation.", "--sd=0.03"))
    if args.earlier is None:
        if margin and args.margin.endswith("%"):
            reason, use = "A share is one of what earlier runs have reached.", "--from or --margin=0.02"
            raise ConfigError(refusal(f"--margin={args.margin}", "--from=RUN", "none", reason, use))
        return args.sd, margin
    runs = find_runs([args.earlier], needed_for(parse_metric(args.metric)[1]))
    samples = [one for one in compare(runs, args.metric, over=args.over).comparisons.samples if len(one.values) > 1]
    same = [(a, b) for i, a in enumerate(samples) for b in samples[i + 1 :] if a.values.keys() == b.values.keys()]
    if not same:
        reason = "The deviation is that of differences between runs of one seed."
        raise ConfigError(refusal("--from", "configurations with the same seeds", args.earlier, reason, "--sd=0.03"))
    variances = [np.var([b.values[block] - a.values[block] for block in a.values], ddof=1) for a, b in same]
    mean = np.mean([value for one in samples for value in one.values.values()])
    return float(np.mean(variances)) ** 0.5, margin and margin_of(args.margin, float(mean))


def _timed(checked: Checked, file: Path, overrides: list[str], jobs: int) -> tuple[list[str], float]:
    """(sentences, seconds of a whole run), from a short run of the first configuration with as many beside it."""
    first = checked.runs[0].values
    batch, docs = documents_per_batch(first.rollout) or 0, first.accumulation.docs_per_step
    steps = min(first.trainer.max_steps, 2 * max(1, -(-batch // docs) if docs else 4) + 1)  # whole batches lie between
    with tempfile.TemporaryDirectory() as folder:
        short = {key: values[0] for key, values in checked.varying.items()} | {"seed": ",".join(map(str, range(jobs)))}
        short |= {"trainer.max_steps": steps, "hydra.sweep.dir": folder, "tracking": "none"}
        typed = [override for override in overrides if key_of(override) not in short]
        typed += [f"{key}={value}" for key, value in short.items()]
        timed = check(typed, True, None, file, ["pgtk", "plan"])
        if wrong := problems(timed):
            raise refused(wrong)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            failed = run_sweep(timed)
        if failed:
            raise PgtoolkitError(f"the short run that was to be timed has failed:\n{output.getvalue()}")
        stepping, evaluating, starting = [], [], []
        for run, job in zip(find_runs([folder], {"reward"}), timed.sweep.jobs.values(), strict=True):
            spent = [row["seconds"] for row in read_evaluations(run.path)]
            stepping.append(run.last("seconds") / max(1, steps - 1))
            evaluating.append(sum(spent) / max(1, len({row["step"] for row in read_evaluations(run.path)})))
            starting.append(job.seconds - run.last("seconds") - sum(spent))
    start, step, evaluation = map(float, map(np.mean, (starting, stepping, evaluating)))
    steps, every = first.trainer.max_steps, first.evaluation.every
    times = 1 + -(-steps // every) if every else 0
    seconds = start + steps * step + times * evaluation
    return [
        f"A run: {start:.1f} s to start + {steps} steps x {step:.3f} s + {times} evaluations x {evaluation:.1f} s = "
        f"{seconds:.0f} s, timed with {plural(jobs, 'job')} at a time on the first configuration."
    ], seconds

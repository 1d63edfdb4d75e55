"""pgtk doctor: which known failures a run shows, since which step, and what to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pgtoolkit.comparison.text_report import folded
from pgtoolkit.runs.find import HELD_OUT, Run, read_run, run_directories
from pgtoolkit.runs.series import smooth
from pgtoolkit.system.report import shell_path

FEWEST_STEPS = 10
"""A shorter run tells nothing."""

SOLVED = 0.8
"""Where so many completions are right, groups without signal and a policy that is certain are what
was wanted."""

HELD_OUT_FALL = 0.05
"""By how much a share of held-out prompts has to fall to be noticed, beside three standard errors
of it."""

_CLIPPED_BY_DOCUMENT = ("gspo", "gmpo")
"""Families whose bounds are narrow, or of many tokens at once, so that most of a healthy batch lies
outside."""

REWARD_RISE = 0.02
"""By how much training's reward has to rise at the same time."""


@dataclass(frozen=True)
class Found:
    """step: since which a rule's failure is there. seen: the numbers that show it, in words."""

    step: int
    seen: str


@dataclass(frozen=True)
class Rule:
    """A known failure.

    name: what is wrong. metrics: the columns without which nothing can be said. measured_by: how to
        get them.
    healthy: what they are in a run without it, as docs/metrics.md has it.
    find: what a run shows of it.
    meaning: why it matters.
    change: what to try, the likeliest first.
    """

    name: str
    metrics: tuple[str, ...]
    healthy: str
    find: Callable[[Run], Found | None]
    meaning: str
    change: str
    measured_by: str = ""


@dataclass(frozen=True)
class Examined:
    """A run with what was found, by rule, and the rules whose metrics it has not measured."""

    run: Run
    found: list[tuple[Rule, Found]]
    not_measured: list[Rule]


def examine(run: Run) -> Examined:
    """Apply every rule to a run of at least FEWEST_STEPS steps; to a shorter one none."""
    measured = {name for name in run.columns if run.values(name)}
    measured |= {"evaluation"} if any(name.startswith(HELD_OUT) for name in measured) else set()
    rules = RULES if len(run.columns.get("step", ())) >= FEWEST_STEPS else ()
    able = [rule for rule in rules if measured.issuperset(rule.metrics)]
    found = [(rule, seen) for rule in able if (seen := rule.find(run))]
    return Examined(run, found, [rule for rule in rules if rule not in able])


def diagnose(paths: Sequence[str], as_json: bool = False) -> str:
    """Return the page on the runs that are or lie below these folders. Raises ConfigError for a
    folder without any."""
    examined = [examine(read_run(path, None)) for path in run_directories("pgtk doctor", paths)]
    if as_json:
        return json.dumps([_as_values(one) for one in examined], indent=1, ensure_ascii=False)
    return "\n\n".join(_page(one) for one in examined)


def _page(examined: Examined) -> str:
    run = examined.run
    state = run.why_not_counted() if run.state != "done" else f"done, {run.step} steps"
    lines = folded(f"{shell_path(run.path)}: {state}")
    if len(run.columns.get("step", ())) < FEWEST_STEPS:
        return "\n".join([*lines, f"  Nothing can be said of fewer than {FEWEST_STEPS} steps."])
    for rule, found in examined.found:
        lines += ["", f"  {rule.name}, since step {found.step}"]
        lines += folded(f"{found.seen}. Healthy: {rule.healthy}. {rule.meaning}", "    ", "    ")
        lines += folded(f"Change: {rule.change}.", "    ", "      ")
    if not examined.found:
        looked_at = len(RULES) - len(examined.not_measured)
        lines.append(f"  None of the {looked_at} known failures that were looked for.")
    if examined.not_measured:
        names = "; ".join(
            f"{rule.name} ({rule.measured_by or ', '.join(rule.metrics)})"
            for rule in examined.not_measured
        )
        lines += ["", *folded(f"Not looked for, since it was not measured: {names}.", "  ", "    ")]
    return "\n".join(lines)


def _as_values(examined: Examined) -> dict[str, object]:
    found = [
        {
            "failure": rule.name,
            "since": seen.step,
            "seen": seen.seen,
            "healthy": rule.healthy,
            "change": rule.change,
        }
        for rule, seen in examined.found
    ]
    not_measured = [rule.name for rule in examined.not_measured]
    run = examined.run
    return {
        "run": str(run.path),
        "state": run.state,
        "step": run.step,
        "found": found,
        "not_measured": not_measured,
    }


def _points(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric where the run has it."""
    steps, values = run.points("step", name)
    return steps, values


def _smoothed(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The same with the mean over about a twentieth of the steps."""
    steps, values = _points(run, name)
    return steps, smooth(values, len(values) // 40)


def _since(steps: np.ndarray, is_bad: np.ndarray) -> int | None:
    """Return the first step from which on all is bad, if that is at least the last tenth; else
    None."""
    good = np.flatnonzero(~is_bad)
    first = int(good[-1]) + 1 if good.size else 0
    return int(steps[first]) if first <= len(steps) - max(2, len(steps) // 10) else None


def _at_the_end(values: np.ndarray) -> float:
    return float(values[-max(1, len(values) // 10) :].mean())


def _is_solved(run: Run) -> bool:
    right = run.values("exact_match")
    return bool(right) and _at_the_end(np.array(right)) >= SOLVED


def _lasting(
    name: str, bound: float, below: bool = False, unless_solved: bool = False
) -> Callable[[Run], Found | None]:
    """Return a rule's function for a metric that stays above (or below) a bound to the end."""

    def find(run: Run) -> Found | None:
        if unless_solved and _is_solved(run):
            return None
        steps, values = _smoothed(run, name)
        step = _since(steps, values < bound if below else values > bound)
        return (
            None
            if step is None
            else Found(step, f"{name} is {_at_the_end(_points(run, name)[1]):.3g} at the end")
        )

    return find


def _now_and_then(
    names: Sequence[str], bound: float, share: float, below: bool = False
) -> Callable[[Run], Found | None]:
    """Return a rule's function for metrics one of which is above (or below) a bound in more than a
    share of steps."""

    def find(run: Run) -> Found | None:
        for name in names:
            steps, values = _points(run, name)
            is_bad = values < bound if below else values > bound
            if is_bad.sum() > share * len(run.columns["step"]):
                side, end, worst = (
                    ("below", "least", values.min()) if below else ("above", "most", values.max())
                )
                seen = (
                    f"{name} is {side} {bound:g} in {is_bad.sum()} steps, and at {end} {worst:.3g}"
                )
                return Found(int(steps[is_bad][0]), seen)
        return None

    return find


def _ratios_at_first_update(run: Run) -> Found | None:
    """Steps of which all documents were sampled by the weights that are trained: their ratios are
    1."""
    steps, staleness, ratios, distances = (
        run.columns[name] for name in ("step", "staleness", "ratio_new_old", "kl_new_old")
    )
    is_first = staleness == 0
    is_bad = is_first & ((abs(ratios - 1) > 0.02) | (distances > 1e-3))
    if is_bad.sum() < 2 or is_bad.sum() < 0.5 * is_first.sum():
        return None
    seen = (
        f"in {is_bad.sum()} of {is_first.sum()} first updates of a batch ratio_new_old is up to "
        f"{abs(ratios[is_bad] - 1).max():.3g} away from 1, kl_new_old up to "
        f"{distances[is_bad].max():.3g}"
    )
    return Found(int(steps[is_bad][0]), seen)


def _clipped(run: Run) -> Found | None:
    """Half of the ratios outside of the bounds, at updates after the first of a batch, which clips
    nothing.

    Of families whose bounds are narrow nine tenths, and with a gradient that is cut.
    """
    outside = run.columns["clipped_ratio_fraction"]
    is_narrow = run.config.get("loss.name") in _CLIPPED_BY_DOCUMENT
    if is_narrow:
        outside = run.columns["clipped_low_fraction"] + run.columns["clipped_high_fraction"]
    counts = ~np.isnan(outside)
    if "staleness" in run.columns:
        counts &= run.columns["staleness"] != 0
    clipped = outside[counts]
    if not clipped.size:
        return None
    step = _since(
        run.columns["step"][counts],
        smooth(clipped, len(clipped) // 20) > (0.9 if is_narrow else 0.5),
    )
    return (
        None if step is None else Found(step, f"{_at_the_end(clipped):.0%} is clipped at the end")
    )


def _spikes(run: Run) -> Found | None:
    """Steps whose gradient is ten times the median of the fifty before them, zeros left out: three,
    and 0.5 %."""
    steps, norms = _points(run, "grad_norm")
    steps, norms = steps[norms > 0], norms[norms > 0]
    medians = np.array(
        [np.median(norms[max(0, place - 50) : place]) for place in range(FEWEST_STEPS, len(norms))]
    )
    times = norms[FEWEST_STEPS:] / medians if medians.size else medians
    is_spike = times > 10
    if is_spike.sum() < max(3, 0.005 * len(norms)):
        return None
    seen = (
        f"grad_norm is more than 10 times the median before it in {is_spike.sum()} steps, up to "
        f"{times.max():.3g} times"
    )
    return Found(int(steps[FEWEST_STEPS:][is_spike][0]), seen)


def _reward_lost(run: Run) -> Found | None:
    """The best tenth against the end, of rewards that have been positive."""
    steps, rewards = _smoothed(run, "reward")
    best = float(rewards.max())
    if best <= 0.05:
        return None
    step = _since(steps, rewards < 0.3 * best)
    return (
        None
        if step is None
        else Found(step, f"reward was {best:.3g} and is {_at_the_end(rewards):.3g} at the end")
    )


def _held_out_falls(run: Run) -> Found | None:
    """The last evaluation against the best one, where training's reward has not fallen since
    that."""
    for name in sorted(run.columns):
        if not (name.startswith(HELD_OUT) and name.endswith("/pass@1")):
            continue
        steps, shares = _points(run, name)
        if len(shares) < 3:
            continue
        best = int(shares.argmax())
        errors = run.values(f"{name}_error")
        fall = float(shares[best] - shares[-1])
        reward_steps, rewards = _smoothed(run, "reward")
        then = float(np.interp(steps[best], reward_steps, rewards))
        if (
            fall > max(HELD_OUT_FALL, 3 * max(errors, default=0.0))
            and rewards[-1] > then + REWARD_RISE
        ):
            seen = f"{name} was {shares[best]:.3g} and is {shares[-1]:.3g}; "
            return Found(
                int(steps[best]), f"{seen}reward rose from {then:.3g} to {rewards[-1]:.3g}"
            )
    return None


def _skipped(run: Run) -> Found | None:
    """num_skipped_steps is a running sum."""
    steps, sums = _points(run, "num_skipped_steps")
    if sums[-1] <= 0.01 * len(steps):
        return None
    return Found(
        int(steps[int((sums > 0).argmax())]), f"{sums[-1]:.0f} of {len(steps)} steps made no update"
    )


RULES = (
    Rule(
        name="ratios away from 1 at a batch's first update",
        metrics=("staleness", "ratio_new_old", "kl_new_old"),
        healthy="ratio_new_old 1 and kl_new_old 0 where staleness is 0",
        find=_ratios_at_first_update,
        meaning="The weights have not changed since they sampled, so old and new log-probs should "
        "be the same numbers.",
        change="rollout.old_log_probs=training, which computes the old ones as the new ones are; a "
        "model folder whose attention or dropout differs between the two; the sampler's "
        "temperature and chat template",
    ),
    Rule(
        name="sampler and trainer apart",
        metrics=("kl_old_sampling",),
        healthy="kl_old_sampling below 1e-3, clipped_sampling_fraction 0",
        find=_lasting("kl_old_sampling", 0.01),
        meaning="The engine samples from another distribution than the trainer computes "
        "gradients of.",
        change="the sampler's number type and quantization; model.fp32_lm_head=true; "
        "correction=token_truncate or sequence_mask; less rollout.lag",
        measured_by="a sampler whose log-probs are known",
    ),
    Rule(
        name="groups without signal",
        metrics=("zero_advantage_group_fraction",),
        healthy="below 0.9 until the task is solved",
        find=_lasting("zero_advantage_group_fraction", 0.9, unless_solved=True),
        meaning="All completions of a prompt get one reward, so that nothing is learned from it.",
        change="prompts that are sometimes solved, a supervised start (experiment=sft), or a "
        "reward with parts; rollout.max_sampling_rounds=4, which samples others in their place; "
        "more completions, rollout.group_size",
    ),
    Rule(
        name="completions cut off",
        metrics=("truncated_fraction",),
        healthy="below 0.1 in the end",
        find=_lasting("truncated_fraction", 0.8),
        meaning="What is cut off seldom has an answer, and never learns to end.",
        change="rollout.max_completion_length, longer; task.chat and rollout.stop, where "
        "completions do not end; rollout.overlong_buffer, which makes length cost something",
    ),
    Rule(
        name="everything clipped",
        metrics=("clipped_ratio_fraction", "clipped_low_fraction", "clipped_high_fraction"),
        healthy="0 at a batch's first update, then a few percent; with gspo, whose bounds are "
        "narrow, most",
        find=_clipped,
        meaning="The gradient of what is clipped is 0: most of a batch teaches nothing.",
        change="loss.epsilon_low and loss.epsilon_high, wider (0.2 for grpo, 3e-4 for gspo); "
        "optimizer.learning_rate, lower; fewer updates of a batch: accumulation.docs_per_step, "
        "larger",
    ),
    Rule(
        name="log-ratios clamped",
        metrics=("clamped_log_ratio_fraction",),
        healthy="clamped_log_ratio_fraction 0, always",
        find=_now_and_then(("clamped_log_ratio_fraction",), 0.0, 0.01),
        meaning="Probabilities have changed by a factor of e^20: the old log-probs belong to other "
        "weights or tokens.",
        change="the recorded log-probs, which may be one place off; optimizer.learning_rate, "
        "lower; less rollout.lag",
    ),
    Rule(
        name="effective sample size low",
        metrics=("effective_sample_size",),
        healthy="1 on-policy, above 0.9 afterwards",
        find=_now_and_then(("effective_sample_size",), 0.5, 0.2, below=True),
        meaning="A few tokens with large ratios stand for the whole step.",
        change="optimizer.learning_rate, lower; fewer updates of a batch; less rollout.lag; a "
        "family whose ratio is clipped (loss=grpo)",
    ),
    Rule(
        name="entropy gone",
        metrics=("entropy",),
        healthy="falls slowly, not to 0 before the task is solved",
        find=_lasting("entropy", 0.01, below=True, unless_solved=True),
        meaning="The policy writes one completion for each prompt, and finds no others.",
        change="optimizer.learning_rate, lower; loss.epsilon_high, above loss.epsilon_low (0.28); "
        "entropy.coefficient=1e-3; kl=k3, which holds it near to where it began",
        measured_by="metrics=with_entropy",
    ),
    Rule(
        name="gradient spikes",
        metrics=("grad_norm",),
        healthy="within a few times its median",
        find=_spikes,
        meaning="Single steps are far larger than others; they often come before a collapse.",
        change="optimizer.learning_rate, lower; optimizer.max_grad_norm=0.2; less rollout.lag; a "
        "clip, where the family has none",
    ),
    Rule(
        name="steps without an update",
        metrics=("num_skipped_steps",),
        healthy="num_skipped_steps 0",
        find=_skipped,
        meaning="There was nothing to train on, or a number was not finite.",
        change="what run.log says of them; optimizer.learning_rate, lower; model.dtype=float32",
    ),
    Rule(
        name="verifiers failing",
        metrics=("reward",),
        healthy="failed_score_fraction missing or 0",
        find=_now_and_then(
            (
                "failed_score_fraction",
                "verifier_timeout_fraction",
                "verifier_crash_fraction",
                "environment_crash_fraction",
            ),
            0.02,
            0.05,
        ),
        meaning="Completions that nobody could score are left out, or punished for it: the policy "
        "may learn to break its verifier.",
        change="the verifier on the completions that run.log names; task.verifier_seconds, longer; "
        "task.verifier_processes, so that a crash ends no run",
    ),
    Rule(
        name="reward lost",
        metrics=("reward",),
        healthy="rises, and stays",
        find=_reward_lost,
        meaning="The policy was better before.",
        change="optimizer.learning_rate, lower (a quarter); an earlier checkpoint: pgtk resume RUN "
        "--step N, or pgtk export --best; kl=k3",
    ),
    Rule(
        name="reward up while held-out falls",
        metrics=("reward", "evaluation"),
        healthy="both rise",
        find=_held_out_falls,
        meaning="The policy learns the training prompts, or its verifier's weakness, and not the "
        "task.",
        change="pgtk samples RUN, which shows what earns the reward; more prompts; pgtk export RUN "
        "DIR --best, which takes the best checkpoint",
        measured_by="evaluation.every",
    ),
)
"""Every failure that is known, in the order in which they are looked for."""

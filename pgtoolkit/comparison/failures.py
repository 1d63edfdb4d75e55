"""The known failures of a run: how each is recognized, where its number means something else, and
what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgtoolkit.comparison.common_measure import is_scored_by_own_code
from pgtoolkit.runs.declared_metrics import METRICS, metric_named
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.loss_metrics import OVER_ALL_DOCUMENTS
from pgtoolkit.runs.series import smooth
from pgtoolkit.system.conditions import holds

FEWEST_STEPS = 10
"""Nothing can be said of a shorter run."""

SOLVED = 0.8
"""Share of right completions from which on the task counts as solved.

Groups without signal and a certain policy are no failures then.
"""

HELD_OUT_FALL = 0.05
"""A larger fall of a held-out share, or of a mean score by this part of its best, is a failure, if
it is three standard errors as well."""

STEPS_OF_NOISE = 10
"""How many times its typical difference from step to step a reward must fall to be lost.

So the rule depends neither on the scale of the rewards nor on where their 0 is.
"""

HELD_OUT_SHARE = f"{HELD_OUT}SET/pass@1"
"""Stands for the share of right completions of any set of held-out prompts."""

_CLIPPED_BY_DOCUMENT = ("gspo", "gmpo")
"""Families with narrow bounds, or bounds on many tokens at once.

Most ratios of a healthy batch lie outside of them.
"""


@dataclass(frozen=True)
class Finding:
    """A failure that a run shows.

    step: the first step that shows it.
    seen: the numbers that show it, in words.
    """

    step: int
    seen: str


@dataclass(frozen=True)
class Elsewhere:
    """Configurations in which a metric means something else than a rule takes it for.

    condition: as `holds` reads it. setting: the same as the user types it. reason: a sentence.
    """

    condition: str
    setting: str
    reason: str


@dataclass(frozen=True)
class Change:
    """Something to try.

    text: in words. only_if: the condition, as `holds` reads it, in which a run can try it and does
    not do so already.
    """

    text: str
    only_if: str


@dataclass(frozen=True)
class Rule:
    """A known failure.

    name: the failure in words.
    metrics: the columns without which it cannot be looked for.
    find: looks for the failure in a run.
    meaning: why it matters.
    changes: what to try, the likeliest first.
    shown_by: further metrics that show it, which a run without the failure may lack.
    measured_by: what makes a run measure the metrics, if it may not.
    elsewhere: where the metrics mean something else, and the rule is silent.
    """

    name: str
    metrics: tuple[str, ...]
    find: Callable[[Run], Finding | None]
    meaning: str
    changes: tuple[str | Change, ...]
    shown_by: tuple[str, ...] = ()
    measured_by: str = ""
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def healthy(self) -> str:
        """The values of its metrics in a run without the failure."""
        metrics = [(name, metric_named(name)) for name in self.shown_by or self.metrics]
        known = [(name, metric.healthy) for name, metric in metrics if metric and metric.healthy]
        return "; ".join(f"{name} {healthy}" for name, healthy in known).replace("`", "")

    def change_in(self, run: Run) -> str:
        """Return what to try in a run, in words."""
        return "; ".join(
            change if isinstance(change, str) else change.text
            for change in self.changes
            if isinstance(change, str) or holds(change.only_if, run.config)
        )

    def elsewhere_in(self, run: Run) -> Elsewhere | None:
        """Return why the metrics of this run mean something else, or None."""
        return next((other for other in self.elsewhere if holds(other.condition, run.config)), None)


def of_trained_documents(run: Run) -> Run:
    """Return the run with means over documents that leave out those without a trained token, as the
    healthy values of metrics are meant; in `columns` these documents count as 0.

    A step that trains no document has no such mean, NaN.
    """
    empty = run.columns.get("num_empty_documents")
    if empty is None or not (empty > 0).any():
        return run
    counted = run.columns["num_documents"]
    trained = np.where(counted > empty, counted - empty, np.nan)
    means = {
        name: values * counted / trained
        for name, values in run.columns.items()
        if name in OVER_ALL_DOCUMENTS
    }
    return replace(run, columns=run.columns | means)


def _points(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of a metric, at the steps that have it."""
    steps, values = run.points("step", name)
    return steps, values


def _smoothed(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as running means over about a twentieth of the steps."""
    steps, values = _points(run, name)
    return steps, smooth(values, len(values) // 40)


def _since(steps: np.ndarray, is_bad: np.ndarray) -> int | None:
    """Return the first step from which on all are bad, if it is a tenth of the steps; else None."""
    good = np.flatnonzero(~is_bad)
    first = int(good[-1]) + 1 if good.size else 0
    return int(steps[first]) if first <= len(steps) - max(2, len(steps) // 10) else None


def _at_the_end(values: np.ndarray) -> float:
    """Return the mean over the last tenth."""
    return float(values[-max(1, len(values) // 10) :].mean())


def _is_solved(run: Run) -> bool:
    """Return whether most completions are right in the end or, where code of the user's own gives
    scores between 0 and 1, of which none may count as right, whether their mean is as high."""
    right = run.values("exact_match")
    rewards = run.values("reward")
    if rewards and is_scored_by_own_code(run) and min(rewards) >= 0 and max(rewards) <= 1:
        right = rewards
    return bool(right) and _at_the_end(np.array(right)) >= SOLVED


def _is_failing(name: str, values: np.ndarray) -> np.ndarray:
    """Return which values of a metric are beyond those that it is declared to have."""
    metric = METRICS[name]
    least = -np.inf if metric.least is None else metric.least
    largest = np.inf if metric.most is None else metric.most
    return (values < least) | (values > largest)


def _lasting(name: str, unless_solved: bool = False) -> Callable[[Run], Finding | None]:
    """Return a rule's function for a metric that fails to the end."""

    def find(run: Run) -> Finding | None:
        if unless_solved and _is_solved(run):
            return None
        steps, values = _smoothed(run, name)
        step = _since(steps, _is_failing(name, values))
        if step is None:
            return None
        _, measured = _points(run, name)
        return Finding(step, f"{name} is {_at_the_end(measured):.3g} at the end")

    return find


def _now_and_then(names: Sequence[str], share: float) -> Callable[[Run], Finding | None]:
    """Return a rule's function for several metrics.

    It finds the first of them that fails in more than a share of the steps.
    """

    def find(run: Run) -> Finding | None:
        for name in names:
            steps, values = _points(run, name)
            is_bad = _is_failing(name, values)
            if is_bad.sum() <= share * len(run.columns["step"]):
                continue
            least = METRICS[name].least
            if least is None:
                seen = f"above {METRICS[name].most:g} in {is_bad.sum()} steps, and at most "
                worst = values.max()
            else:
                seen = f"below {least:g} in {is_bad.sum()} steps, and at least "
                worst = values.min()
            return Finding(int(steps[is_bad][0]), f"{name} is {seen}{worst:.3g}")
        return None

    return find


def _ratios_at_first_update(run: Run) -> Finding | None:
    """Find ratios other than 1 at steps that the weights in training have sampled."""
    steps = run.columns["step"]
    ratios = run.columns["ratio_new_old"]
    distances = run.columns["kl_new_old"]
    is_first = run.columns["staleness"] == 0
    is_bad = is_first & (
        _is_failing("ratio_new_old", ratios) | _is_failing("kl_new_old", distances)
    )
    if is_bad.sum() < 2 or is_bad.sum() < 0.5 * is_first.sum():
        return None
    seen = (
        f"in {is_bad.sum()} of {is_first.sum()} first updates of a batch ratio_new_old is up to "
        f"{abs(ratios[is_bad] - 1).max():.3g} away from 1, kl_new_old up to "
        f"{distances[is_bad].max():.3g}"
    )
    return Finding(int(steps[is_bad][0]), seen)


def _clipped(run: Run) -> Finding | None:
    """Find updates where more than half of the ratios lie outside of the bounds.

    The first update of a batch clips nothing, and is left out. For a family with narrow bounds nine
    tenths of the gradients must be cut.
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
    smoothed = smooth(clipped, len(clipped) // 20)
    is_bad = smoothed > 0.9 if is_narrow else _is_failing("clipped_ratio_fraction", smoothed)
    step = _since(run.columns["step"][counts], is_bad)
    if step is None:
        return None
    return Finding(step, f"{_at_the_end(clipped):.0%} is clipped at the end")


def _spikes(run: Run) -> Finding | None:
    """Find three steps, and 0.5 % of all, whose gradient is ten times the median before them.

    The median is over fifty steps. Gradients of 0 are left out, and so are those of steps where
    most groups have no signal, or are dropped for it: each is that of a few documents.
    """
    steps = run.columns["step"]
    norms = run.columns["grad_norm"]
    counts = norms > 0
    dropped = ["dropped_group_fraction"]
    if not holds(_NO_ADVANTAGE.condition, run.config):
        dropped.append("zero_advantage_group_fraction")
    for name in dropped:
        if name in run.columns:
            counts &= ~(run.columns[name] > 0.5)
    steps = steps[counts]
    norms = norms[counts]
    medians = np.array(
        [np.median(norms[max(0, index - 50) : index]) for index in range(FEWEST_STEPS, len(norms))]
    )
    times = norms[FEWEST_STEPS:] / medians if medians.size else medians
    is_spike = times > 10
    if is_spike.sum() < max(3, 0.005 * len(norms)):
        return None
    seen = (
        f"grad_norm is more than 10 times the median before it in {is_spike.sum()} steps, up to "
        f"{times.max():.3g} times"
    )
    return Finding(int(steps[FEWEST_STEPS:][is_spike][0]), seen)


def _noise(run: Run, name: str) -> float:
    """Return the typical difference of a metric of documents from its value before.

    Steps that train documents again are left out: they repeat the value.
    """
    values = run.columns[name]
    counts = ~np.isnan(values)
    if "documents_seen" in run.columns:
        counts &= np.diff(run.columns["documents_seen"], prepend=-1.0) > 0
    return float(np.median(abs(np.diff(values[counts]))))


def _reward_lost(run: Run) -> Finding | None:
    """Find a reward that has lost most of its best value, or of its gain.

    A reward that is never negative is lost below 0.3 of its best value. Any reward is lost where it
    has fallen by 0.7 of its rise to the best value, if that is STEPS_OF_NOISE as well.
    """
    steps, rewards = _smoothed(run, "reward")
    _, measured = _points(run, "reward")
    noise = _noise(run, "reward")
    place = int(rewards.argmax())
    best = float(rewards[place])
    rise = best - float(rewards[: place + 1].min())
    rounding = 1e-6 * float(abs(measured).max())
    fallen = best - rewards
    is_lost = fallen > max(0.7 * rise, STEPS_OF_NOISE * noise, rounding)
    if measured.min() >= 0 and best > 2 * noise:
        is_lost |= rewards < 0.3 * best
    step = _since(steps, is_lost)
    if step is None:
        return None
    seen = f"reward was {best:.3g} and is {_at_the_end(rewards):.3g} at the end"
    return Finding(step, seen)


def _held_out_falls(run: Run) -> Finding | None:
    """Find a last evaluation below the best one, though training's reward has risen since then."""
    for name in sorted(run.columns):
        number = "avg" if is_scored_by_own_code(run, name) else "pass@1"
        if not (name.startswith(HELD_OUT) and name.endswith(f"/{number}")):
            continue
        steps, shares = _points(run, name)
        if len(shares) < 3:
            continue
        best = int(shares.argmax())
        errors = run.values(f"{name}_error")
        fall = float(shares[best] - shares[-1])
        reward_steps, rewards = _smoothed(run, "reward")
        reward_then = float(np.interp(steps[best], reward_steps, rewards))
        scale = 1 if number == "pass@1" else abs(float(shares[best]))
        has_fallen = fall > max(HELD_OUT_FALL * scale, 3 * max(errors, default=0.0))
        if has_fallen and rewards[-1] > reward_then + _noise(run, "reward"):
            seen = (
                f"{name} was {shares[best]:.3g} and is {shares[-1]:.3g}; reward rose from "
                f"{reward_then:.3g} to {rewards[-1]:.3g}"
            )
            return Finding(int(steps[best]), seen)
    return None


def _skipped(run: Run) -> Finding | None:
    """Find more than 1 % of steps without an update; num_skipped_steps is a running sum."""
    steps, sums = _points(run, "num_skipped_steps")
    if sums[-1] <= 0.01 * len(steps):
        return None
    first = int((sums > 0).argmax())
    return Finding(int(steps[first]), f"{sums[-1]:.0f} of {len(steps)} steps made no update")


_RECORDED = Elsewhere(
    "rollout.name=recorded",
    "rollout=recorded",
    "The number is that of the recorded completions, and of the policy that wrote them.",
)
_NO_ADVANTAGE = Elsewhere(
    "advantage.estimator=none",
    "advantage=none",
    "Every advantage is 0, whatever the rewards are.",
)
_ONLY_PENALTIES = Elsewhere(
    "advantage.estimator=none and loss.name!=tpo and loss.name!=lpo and loss.name!=custom",
    "advantage=none, and a loss that reads no rewards",
    "A penalty alone trains, such as that of a teacher; rewards are only measured.",
)
_OTHER_PROMPTS = (
    Elsewhere(
        "rollout.retire_at!=null",
        "rollout.retire_at",
        "Solved prompts are not asked again, so the number is that of ever harder prompts.",
    ),
    Elsewhere(
        "rollout.max_sampling_rounds>1 or rollout.uninformative=drop",
        "rollout.max_sampling_rounds or rollout.uninformative=drop",
        "The number is that of the prompts alone whose completions score differently.",
    ),
)
_PASS_AT_K = Elsewhere(
    "advantage.estimator=pass_at_k",
    "advantage=pass_at_k",
    "The best completion of a group is trained and not their mean, and two best ones give no "
    "advantage.",
)
_NOT_BY_GROUPS = (
    Elsewhere(
        "advantage.estimator=gae or advantage.estimator=reinforce_plus_plus",
        "advantage=gae or reinforce_plus_plus",
        "The advantages are not made within a group.",
    ),
    Elsewhere(
        "advantage.estimator=given",
        "advantage=given",
        "The advantages are those of the file, whatever the rewards are.",
    ),
    Elsewhere(
        "kl.place=reward",
        "kl.place=reward",
        "The distance from the reference gives completions of one reward other advantages.",
    ),
)
_PROXIMAL = Elsewhere(
    "rollout.old_log_probs=proximal and rollout.lag>0 or "
    "rollout.old_log_probs=proximal and rollout.max_staleness!=null",
    "rollout.old_log_probs=proximal under a lag",
    "The updates between sampling and training are a part of the number.",
)
_TRUNCATED = Elsewhere(
    "rollout.top_p!=null and rollout.top_p!=1 and sampler.keep_top=0 or "
    "rollout.top_k!=null and sampler.keep_top=0",
    "rollout.top_p or rollout.top_k, with sampler.keep_top=0",
    "The sampler's log-probs are those among the tokens that sampling keeps, and the trainer's are "
    "not.",
)
_WEIGHT_CLIPPED = Elsewhere(
    "loss.name=cispo",
    "loss=cispo",
    "Its clip bounds the weight of a token, and cuts no gradient.",
)
_OWN_FAMILY = Elsewhere(
    "loss.name=custom",
    "a loss of your own",
    "What its ratio weighs and its bounds cut is its own.",
)
_NO_RATIO = Elsewhere(
    "loss.name=reinforce or loss.name=kimi",
    "loss=reinforce or kimi",
    "The loss has no ratio, so no token weighs more by it.",
)
_BOUNDED_WEIGHT = Elsewhere(
    "loss.name=cispo or loss.name=sapo or loss.name=gmpo or loss.name=vespo",
    "loss=cispo, sapo, gmpo or vespo",
    "The weight of a token is bounded, however large its ratio is.",
)
_RECORDED_LOG_PROBS = Elsewhere(
    "rollout.name=recorded and loss.name=reinforce or rollout.name=recorded and loss.name=kimi",
    "rollout=recorded and loss=reinforce or kimi",
    "The loss has no ratio, and the recorded log-probs may be those of any policy.",
)

_LOWER_RATE = "optimizer.learning_rate, lower"
_FEWER_UPDATES = (
    Change(
        "fewer updates of a batch: accumulation.docs_per_step, larger",
        "rollout.name=policy and accumulation.docs_per_step>0",
    ),
    Change("fewer rollout.passes over a batch", "rollout.passes>1"),
)
_LESS_LAG = Change("less rollout.lag", "rollout.lag>0")
_NEAR_TO_BEGIN = Change("kl=k3, which holds it near to where it began", "kl.kind=none")

_FAILING_SCORES = (
    "failed_score_fraction",
    "verifier_timeout_fraction",
    "verifier_crash_fraction",
    "environment_timeout_fraction",
    "environment_crash_fraction",
)

RULES = (
    Rule(
        name="ratios away from 1 at a batch's first update",
        metrics=("staleness", "ratio_new_old", "kl_new_old"),
        find=_ratios_at_first_update,
        meaning="The weights have not changed since they sampled, so old and new log-probs should "
        "be the same numbers.",
        changes=(
            Change(
                "rollout.old_log_probs=training, which computes the old ones as the new ones are",
                "rollout.old_log_probs!=training",
            ),
            Change(
                "a model folder whose attention or dropout differs between the two",
                "model.name=huggingface",
            ),
            "the sampler's temperature and chat template",
        ),
        elsewhere=(_RECORDED,),
    ),
    Rule(
        name="sampler and trainer apart",
        metrics=("kl_old_sampling",),
        find=_lasting("kl_old_sampling"),
        meaning="The engine samples from another distribution than the trainer computes "
        "gradients of.",
        changes=(
            "the sampler's number type and quantization",
            Change(
                "model.fp32_lm_head=true",
                "model.name=huggingface and model.fp32_lm_head=false",
            ),
            Change("correction=token_truncate or sequence_mask", "correction.name=none"),
        ),
        measured_by="a sampler whose log-probs are known",
        elsewhere=(_RECORDED, _PROXIMAL, _TRUNCATED),
    ),
    Rule(
        name="groups without signal",
        metrics=("zero_advantage_group_fraction",),
        find=_lasting("zero_advantage_group_fraction", unless_solved=True),
        meaning="Every advantage of these groups is 0, mostly since all completions of a prompt "
        "get one reward: nothing is learned from them.",
        changes=(
            "prompts that are sometimes solved",
            Change("a supervised start (experiment=sft)", "rollout.name=policy"),
            "a reward with parts",
            Change(
                "rollout.max_sampling_rounds=4, which samples others in their place",
                "rollout.name=policy",
            ),
            Change("more completions, rollout.group_size", "rollout.name=policy"),
        ),
        elsewhere=(_NO_ADVANTAGE, *_OTHER_PROMPTS, _PASS_AT_K, *_NOT_BY_GROUPS),
    ),
    Rule(
        name="completions cut off",
        metrics=("truncated_fraction",),
        find=_lasting("truncated_fraction", unless_solved=True),
        meaning="A completion that is cut off seldom has an answer, and never learns to end.",
        changes=(
            "rollout.max_completion_length, longer",
            Change(
                "task.chat, where completions do not end",
                "model.name=huggingface and task.chat!=null",
            ),
            Change("rollout.stop, where completions do not end", "rollout.stop=[]"),
            Change(
                "rollout.overlong_buffer, which makes length cost something",
                "rollout.overlong_buffer=null and advantage.estimator!=max_rl",
            ),
        ),
        elsewhere=(_RECORDED, _ONLY_PENALTIES),
    ),
    Rule(
        name="everything clipped",
        metrics=("clipped_ratio_fraction", "clipped_low_fraction", "clipped_high_fraction"),
        find=_clipped,
        meaning="A clipped token has no gradient: most of a batch teaches nothing.",
        changes=(
            Change("loss.epsilon_low and loss.epsilon_high, wider (0.2)", "loss.name=grpo"),
            Change("loss.epsilon_low and loss.epsilon_high, wider (3e-4)", "loss.name=gspo"),
            Change(
                "the bounds of the loss, wider",
                "loss.name!=grpo and loss.name!=gspo",
            ),
            _LOWER_RATE,
            *_FEWER_UPDATES,
        ),
        elsewhere=(_ONLY_PENALTIES, _WEIGHT_CLIPPED, _OWN_FAMILY),
    ),
    Rule(
        name="log-ratios clamped",
        metrics=("clamped_log_ratio_fraction",),
        find=_now_and_then(("clamped_log_ratio_fraction",), 0.01),
        meaning="Probabilities have changed by a factor of e^20: the old log-probs belong to other "
        "weights or tokens.",
        changes=(
            Change("the recorded log-probs, which may be one place off", "rollout.name=recorded"),
            _LOWER_RATE,
            _LESS_LAG,
        ),
        elsewhere=(_RECORDED_LOG_PROBS,),
    ),
    Rule(
        name="effective sample size low",
        metrics=("effective_sample_size",),
        find=_now_and_then(("effective_sample_size",), 0.2),
        meaning="A few tokens with large ratios stand for the whole step.",
        changes=(
            _LOWER_RATE,
            *_FEWER_UPDATES,
            _LESS_LAG,
            Change(
                "a loss whose ratio is clipped (loss=grpo)",
                "loss.name!=grpo and loss.name!=gspo",
            ),
        ),
        elsewhere=(_NO_RATIO, _BOUNDED_WEIGHT, _OWN_FAMILY),
    ),
    Rule(
        name="entropy gone",
        metrics=("entropy",),
        find=_lasting("entropy", unless_solved=True),
        meaning="The policy writes one completion for each prompt, and finds no others.",
        changes=(
            _LOWER_RATE,
            Change("loss.epsilon_high, above loss.epsilon_low (0.28)", "loss.name=grpo"),
            Change("entropy.coefficient=1e-3", "entropy.coefficient=0"),
            _NEAR_TO_BEGIN,
        ),
        measured_by="metrics=with_entropy",
        elsewhere=(_RECORDED, _ONLY_PENALTIES),
    ),
    Rule(
        name="gradient spikes",
        metrics=("grad_norm",),
        find=_spikes,
        meaning="Single steps are far larger than others; they often come before a collapse.",
        changes=(
            _LOWER_RATE,
            Change(
                "optimizer.max_grad_norm=0.2",
                "optimizer.max_grad_norm=null or optimizer.max_grad_norm>0.2",
            ),
            _LESS_LAG,
            Change(
                "a loss that clips (loss=grpo)",
                "rollout.name=policy and loss.name=reinforce or "
                "rollout.name=policy and loss.name=kimi",
            ),
        ),
    ),
    Rule(
        name="steps without an update",
        metrics=("num_skipped_steps",),
        find=_skipped,
        meaning="There was nothing to train on, or a number was not finite.",
        changes=(
            "its cause, in run.log",
            _LOWER_RATE,
            Change(
                "model.dtype=float32",
                "model.name=huggingface and model.dtype!=float32",
            ),
        ),
    ),
    Rule(
        name="verifiers failing",
        metrics=("reward",),
        shown_by=_FAILING_SCORES,
        find=_now_and_then(_FAILING_SCORES, 0.05),
        meaning="Completions that nobody could score are left out, or punished for it: the policy "
        "may learn to break its verifier.",
        changes=(
            Change(
                "the environment on the completions that run.log names", "task.name=conversation"
            ),
            Change("the verifier on the completions that run.log names", "task.name!=conversation"),
            Change(
                "task.verifier_retries, task.verifier_retry_seconds or the timeout of the "
                "verifier's client, larger, where run.log says that it does not reach its server",
                "task.name=prompts",
            ),
            # Without processes of its own a crash ends the run, and is no failed score.
            Change("task.verifier_seconds, longer", "task.verifier_processes>0"),
            Change("task.environment_seconds, longer", "task.environment_processes>0"),
        ),
    ),
    Rule(
        name="reward lost",
        metrics=("reward",),
        find=_reward_lost,
        meaning="The policy was better before.",
        changes=(
            f"{_LOWER_RATE} (a quarter)",
            "an earlier checkpoint: pgtk resume RUN --step N hydra.run.dir=NEW",
            Change("the best one: pgtk export RUN DIR --best", "evaluation.every>0"),
            _NEAR_TO_BEGIN,
        ),
        elsewhere=(_RECORDED, _ONLY_PENALTIES, *_OTHER_PROMPTS, _PASS_AT_K),
    ),
    Rule(
        name="reward up while held-out falls",
        metrics=("reward", HELD_OUT_SHARE),
        find=_held_out_falls,
        meaning="The policy learns the training prompts, or its verifier's weakness, and not the "
        "task.",
        changes=(
            "pgtk samples RUN, which shows what earns the reward",
            "more prompts",
            "pgtk export RUN DIR --best, which takes the best checkpoint",
        ),
        measured_by="evaluation.every",
        elsewhere=(_RECORDED, *_OTHER_PROMPTS),
    ),
)
"""All known failures, in the order in which they are looked for."""

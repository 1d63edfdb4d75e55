"""The rules on the loss: its family, weights, corrections, advantages and penalties."""

from __future__ import annotations

import string

from pgtoolkit.config.keys import ignored, keys_of
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.own_code import chosen, family_of_config
from pgtoolkit.config.rules import table
from pgtoolkit.config.rules.named import existing, importable
from pgtoolkit.config.rules.run import note_rounded_logits
from pgtoolkit.config.rules.step import notes_on_ratios
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.adaptive_kl import TO_0, is_long_enough
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.rollouts.batch_counts import samples_ahead
from pgtoolkit.system.conditions import holds, with_values
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import Report, is_number, is_whole, refusal, text
from pgtoolkit.tasks.settings import VERIFIERS, VerifierFailure
from pgtoolkit.training.loss_settings import CustomLossSettings


def loss(c: Config, report: Report) -> Config:
    """Refuse parameters that do not fit each other.

    Returns the configuration for the rules that follow, with a number in place of one that lacks.
    """
    for name in ("delta_low", "delta_high"):
        if getattr(c.loss, name, 0) is None:
            default = report.default_of(f"loss.{name}") or 0.2
            report.refuse(
                setting=f"loss={c.loss.name}",
                needs=f"loss.{name}, a number",
                got=None,
                reason="It bounds a probability's move; for squared_log_ratio none is usual.",
                use=f"loss.{name}={default}",
            )
            c = with_values(c, {f"loss.{name}": default})
    splits = c.loss.num_splits
    family = family_of_config(c)
    if isinstance(c.loss, CustomLossSettings) and c.loss.path is not None:
        importable(report, "loss.path", str(c.loss.path), "It is imported when the run starts.")
    if family is None:
        return c
    report.notes += family.notes()
    if family.by_document and splits != 1:
        report.refuse(
            setting=f"loss={c.loss.name}",
            needs="loss.num_splits=1",
            got=splits,
            reason="The sequence ratio is exp of a mean over the whole document, and pieces do not "
            "recombine.",
            use="loss.num_splits=1",
        )
    _note_kept_units(c, family, report)
    return c


def notes_of_own_family(c: Config, family: Family, report: Report) -> None:
    """Add the notes on a loss of the user's own, now that it is imported, that the other rules give
    on those of ours."""
    report.notes += family.notes()
    _note_kept_units(c, family, report)
    _note_lengths_as_weights(c, family, report)
    if c.advantage.estimator == "gae":
        _note_mean_advantages(c, family, report)
    notes_on_ratios(c, family, report)
    _note_anchor(c, family, report)
    note_rounded_logits(c, family, report)


def without_advantages(
    c: Config, *, reads_rewards: bool, learns_at_once: bool, learns_later: bool
) -> list[str]:
    """Return the problems of a loss of the user's own under advantage=none, now that it is
    imported, by the rows on those of ours that are like it.

    learns_at_once: it has a gradient without advantages where the policy is the one that sampled;
        learns_later: where it has moved.
    """
    report = Report()
    rows = [
        *(() if learns_at_once else table.OWN_AT_ONCE),
        *(() if learns_later else table.OWN_LATER),
        *(() if reads_rewards else table.OWN_WITHOUT_REWARDS),
    ]
    for row in rows:
        row(c, report)
    return report.problems


def without_others(c: Config) -> list[str]:
    """Return the problems of a loss of the user's own that reads what other completions of a prompt
    have, now that it is imported, by the row on those of ours that are like it."""
    report = Report()
    for row in table.OWN_OF_GROUPS:
        row(c, report)
    return report.problems


def _note_kept_units(c: Config, family: Family, report: Report) -> None:
    """Note where leaving out the terms of tokens does not leave out the tokens."""
    if c.entropy.top_fraction is None:
        return
    of_group = isinstance(family, FunctionFamily) and family.level == "step"
    # Where the slope is by a token's own log-prob the document decides its size alone.
    shares_ratio = family.by_document and family.slope_of != "log_prob"
    if of_group or shares_ratio:
        unit = "group" if of_group else "document"
        report.note(
            f"entropy.top_fraction with loss={chosen(c, 'loss')}: a {unit} has one loss, whose "
            "weight is its share of tokens that are kept, and all of its tokens are trained."
        )


def aggregation(c: Config, report: Report) -> None:
    mode = c.aggregation.mode
    divisor = c.aggregation.divisor
    reducer = c.aggregation.reducer
    if mode == "constant" and divisor is None:
        report.refuse_value(
            key="aggregation.divisor",
            value=divisor,
            needs="a number",
            reason="aggregation=constant divides by it; it must not depend on the data.",
            better=c.rollout.max_completion_length or "LONGEST_COMPLETION",
        )
    if reducer is not None:
        reason = "It is imported when the run starts."
        importable(report, "aggregation.reducer", str(reducer), reason)
    family = family_of_config(c)
    if family is not None:
        _note_lengths_as_weights(c, family, report)


def _note_lengths_as_weights(c: Config, family: Family, report: Report) -> None:
    """Note a loss by document that is not averaged by document."""
    mode = c.aggregation.mode
    if family.by_document and mode != "sample_mean" and c.aggregation.reducer is None:
        settings = f"loss={chosen(c, 'loss')} with aggregation={mode}"
        report.note(f"{settings} weights a document by its number of trained tokens.")


def correction(c: Config, report: Report) -> Config:
    """Refuse bounds out of order, and a factor that a mean does not have.

    Returns the configuration for the rules that follow, without what is refused.
    """
    ignored(c, report, "correction")
    unused = [
        key.name
        for key in keys_of(c)
        if key.group == "correction" and key.only_if and not holds(key.only_if, c)
    ]
    c = with_values(c, {name: report.default_of(name) for name in unused})
    low = getattr(c.correction, "low", None)
    high = getattr(c.correction, "high", None)
    if low == 0:
        report.note("correction.low=0 bounds nothing, as null: no factor is smaller.")
    elif low is not None and low > high:
        report.refuse_value(
            key="correction.low",
            value=low,
            needs=f"at most correction.high={text(high)}",
            reason="It is the lower of two bounds.",
            better=high,
        )
        c = with_values(c, {"correction.low": None})
    mean = getattr(c.correction, "mean", None)
    factor = getattr(c.correction, "factor", None)
    measure = getattr(c.correction, "measure", "ratio")
    if measure != "ratio" and factor not in (None, "one"):
        report.refuse(
            setting=f"correction.measure={measure}",
            needs="correction.factor=one",
            got=str(factor),
            reason="A distance is no weight: what stays keeps its loss.",
            use="correction.factor=one",
        )
        c = with_values(c, {"correction.factor": "one"})
    elif mean == "worst" and factor == "document":
        report.refuse(
            setting="correction.mean=worst",
            needs="correction.factor=one or token",
            got="document",
            reason="The worst token gives no ratio of the document, by which its tokens could be "
            "multiplied.",
            use="correction.factor=one",
        )
        c = with_values(c, {"correction.factor": "one"})
    if measure != "ratio" and getattr(c.correction, "threshold", None) is None:
        report.refuse(
            setting=f"correction.measure={measure}",
            needs="correction.threshold, a number",
            got=None,
            reason="How far apart the two may be depends on the engine; no number is usual.",
            use="correction.threshold=0.1",
        )
        c = with_values(c, {"correction.threshold": 0.1})
    return c


def advantage(c: Config, report: Report) -> None:
    estimator = c.advantage.estimator
    surrogate = (
        "kimi",
        "custom",
        "reinforce",
        "tpo",
        "lpo",
    )  # those that advantages of 0 do not make 0
    if estimator == "none" and c.loss.name not in surrogate:
        effect = f"loss={c.loss.name} is 0 and trains nothing; penalties alone do"
        report.note(f"advantage=none: {effect}.")
    _note_on_shape(c, report)
    if estimator == "custom" and c.advantage.path is not None:
        reason = "It is imported when the run starts."
        importable(report, "advantage.path", str(c.advantage.path), reason)
    if estimator == "gae":
        _critic(c, report)
    if estimator == "max_rl":
        _rewards_below_0(c, report)
    num_verifiers = len(getattr(c.task, "verifiers", {}))
    if estimator == "gdpo" and c.rollout.name == "policy" and num_verifiers < 2:
        report.refuse(
            setting="advantage=gdpo",
            needs="two or more task.verifiers to sample with",
            got=f"task={c.task.name} with {num_verifiers} of them",
            reason="It normalises the score of each in its group, before it adds them up.",
            use="advantage=grpo",
        )


def _note_on_shape(c: Config, report: Report) -> None:
    """Note a shift or scale of rewards that the estimator takes out again."""
    if c.advantage.reward_clip is not None:
        return
    estimator = c.advantage.estimator
    if c.advantage.reward_shift and estimator not in ("gae", "custom", "none"):
        report.note(
            f"advantage.reward_shift={text(c.advantage.reward_shift)} changes nothing without "
            f"advantage.reward_clip: advantage={estimator} subtracts a mean of the rewards."
        )
    divides = ("grpo", "batch_std", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    whitens = estimator == "gae" and c.advantage.whiten
    if c.advantage.reward_scale != 1 and (estimator in divides or estimator == "max_rl" or whitens):
        report.note(
            f"advantage.reward_scale={text(c.advantage.reward_scale)} changes next to nothing "
            f"without advantage.reward_clip: advantage={estimator} divides by a number that "
            "the scale changes, too."
        )


def _critic(c: Config, report: Report) -> None:
    """Check what the critic starts from, and for how long it is trained alone."""
    if c.critic.steps_before_policy >= c.trainer.max_steps:
        report.refuse_value(
            key="critic.steps_before_policy",
            value=c.critic.steps_before_policy,
            needs=f"fewer than trainer.max_steps={c.trainer.max_steps}",
            reason="The policy would never be trained.",
            better=0,
        )
    if c.model.name == "huggingface":
        existing(report, "critic.path", c.critic.path, hub=True)
    family = family_of_config(c)
    if family is not None:
        _note_mean_advantages(c, family, report)


def _note_mean_advantages(c: Config, family: Family, report: Report) -> None:
    """Note a family that is given the mean of the advantages that a critic tells apart."""
    if family.by_document and not isinstance(family, FunctionFamily):
        report.note(
            f"loss={chosen(c, 'loss')} takes the mean of the advantages of a document's tokens, "
            "which advantage=gae tells apart: loss=grpo, PPO's, takes each."
        )


def penalties(c: Config, report: Report) -> Config:
    """Refuse a penalty without a coefficient, and a reference that does not fit.

    Returns the configuration for the rules that follow, in which other values replace refused ones.
    """
    kind = c.kl.kind
    if kind == "none":
        return c
    if c.kl.coefficient is None:
        report.refuse(
            setting=f"kl={kind}",
            needs="kl.coefficient, a number",
            got=None,
            reason="The penalty is multiplied by it.",
            use="kl.coefficient=0.04",
        )
        c = with_values(c, {"kl.coefficient": 0.04})
    if kind == "full_jsd" and c.kl.beta in (0, 1):
        limit = "full_forward" if c.kl.beta == 0 else "full_reverse"
        report.refuse_value(
            key="kl.beta",
            value=c.kl.beta,
            needs="a number above 0 and below 1",
            reason=f"The divergence is 0 there, and at full size in its limit it is kl={limit}.",
            better=0.5,
        )
        c = with_values(c, {"kl.beta": 0.5})
    _horizon(c, report)
    template = c.kl.reference_prompt
    if template is not None and not _takes_reference_prompt(template, report):
        c = with_values(c, {"kl.reference_prompt": None})
    _model_of_reference(c, report)
    return c


def _horizon(c: Config, report: Report) -> None:
    """Refuse a horizon with which one batch could take the coefficient to 0 or below."""
    if c.kl.target is None or c.rollout.name != "policy":
        return
    documents = c.rollout.prompts_per_batch * c.rollout.group_size
    if not is_long_enough(c.kl.horizon, documents):
        report.refuse_value(
            key="kl.horizon",
            value=c.kl.horizon,
            needs=f"more than {documents // 5}, a fifth of the {documents} documents of a batch",
            reason=TO_0,
            better=documents,
        )


def _model_of_reference(c: Config, report: Report) -> None:
    """Refuse a reference that does not exist, or has another vocabulary."""
    reference = c.kl.reference
    existing(report, "kl.reference", reference, hub=True)
    size = vocabulary_size(c.model, c.task)
    size_of_reference = model_settings(reference).get("vocab_size")
    if is_whole(size) and is_whole(size_of_reference) and size != size_of_reference:
        needs = f"a vocabulary of {size} entries"
        report.problems.append(other_vocabulary(c, needs, size_of_reference))


def _rewards_below_0(c: Config, report: Report) -> None:
    """Refuse scores and weights that make rewards by whose mean max_rl cannot divide.

    What functions of the user's return is not known here.
    """
    entries = {
        name: entry
        for name, entry in getattr(c.task, "verifiers", {}).items()
        if isinstance(entry, dict) and is_number(entry.get("weight", 1))
    }
    weights = {name: entry.get("weight", 1) for name, entry in entries.items()}
    failure_score = getattr(c.task, "failure_score", 0)
    gets_score = getattr(c.task, "verifier_failure", None) == VerifierFailure.score
    reason = "max_rl divides by the mean reward of a prompt, and a negative one turns its signs."
    if gets_score and any(weight * failure_score < 0 for weight in weights.values() or [1]):
        report.refuse(
            setting=f"task.failure_score={failure_score:g}",
            needs="an advantage that takes rewards below 0",
            got="advantage=max_rl",
            reason=reason,
            use="task.failure_score=0 or advantage=dr_grpo",
        )
    are_known = all(entry.get("verifier") in VERIFIERS for entry in entries.values())
    for name, weight in weights.items():
        if are_known and weight < 0:
            report.refuse(
                setting=f"task.verifiers.{name}.weight={weight:g}",
                needs="an advantage that takes rewards below 0",
                got="advantage=max_rl",
                reason=reason,
                use=f"task.verifiers.{name}.weight=1 or advantage=dr_grpo",
            )


def needs_teacher(c: Config) -> bool:
    """Return whether only the distance from a reference trains, which reads the same prompt."""
    has_advantage = c.advantage.estimator != "none"
    has_entropy = c.entropy.coefficient != 0
    has_own_prompt = c.kl.reference_prompt is not None
    reads_rewards = c.loss.name in ("tpo", "lpo")
    return not (has_advantage or reads_rewards or has_entropy or has_own_prompt)


def other_vocabulary(c: Config, needs: str, got: object) -> str:
    """Return the refusal of a reference whose tokens are not the policy's."""
    use = "a model of the same family"
    if not needs_teacher(c):
        use += ", or kl.reference=initial"
    return refusal(
        setting=f"kl.reference={c.kl.reference}",
        needs=needs,
        got=got,
        reason="Its log-probs would be those of other tokens.",
        use=use,
    )


def other_vocabulary_of_critic(path: str | None, needs: str, got: object) -> str:
    """Return the refusal of a critic whose tokens are not the policy's."""
    return refusal(
        setting=f"critic.path={path}",
        needs=needs,
        got=got,
        reason="It reads the policy's tokens.",
        use="a model of the same family, or critic.path=null",
    )


def _takes_reference_prompt(template: str, report: Report) -> bool:
    """Refuse a template that lacks {prompt} or {answer}, or has other fields or formats."""
    key = "kl.reference_prompt"
    try:
        fields = {field[1:] for field in string.Formatter().parse(template) if field[1] is not None}
    except ValueError:  # a brace without another
        fields = set()
    if fields and fields <= {("prompt", "", None), ("answer", "", None)}:
        return True
    report.refuse(
        setting=f"{key}={template}",
        needs="a template of {prompt} and {answer}",
        got=template,
        reason="Each prompt fills it in, and other braces are doubled.",
        use=f"\"{key}='{{prompt}} ({{answer}})'\"",
    )
    return False


def anchor(c: Config, report: Report) -> None:
    family = family_of_config(c)
    if family is not None:
        _note_anchor(c, family, report)


def _note_anchor(c: Config, family: Family, report: Report) -> None:
    """Note at which weights ratios are anchored, if these are not the weights that sampled."""
    rollout = c.rollout
    correction = c.correction.name
    if rollout.name != "policy" or not family.reads_old_log_probs:
        return
    setting = f"rollout.old_log_probs={rollout.old_log_probs}"
    is_proximal = rollout.old_log_probs == "proximal"
    if not samples_ahead(rollout):
        if is_proximal:
            effect = "a batch is trained at once by the weights that sampled"
            report.note(f"{setting} without a lag is training: {effect}.")
        return
    if not is_proximal:
        effect = "ratios are to the weights that sampled, all updates since then included"
        report.note(f"{setting} under a lag: {effect}.")
        return
    sentence = f"{setting} under a lag: ratios are to the weights with which training on a batch "
    sentence += "begins"
    updates = "the updates between those and the weights that sampled"
    if correction != "none":
        sentence += f", and correction={correction} corrects for {updates}"
    elif not (isinstance(family, FunctionFamily) and "sampling_log_probs" in family.asked):
        sentence += f", and nothing corrects for {updates}"
    report.note(f"{sentence}.")

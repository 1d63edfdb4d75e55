"""The rules on the loss: its family, weights, corrections, advantages and penalties."""

from __future__ import annotations

import string

from pgtoolkit.config.counts import samples_ahead
from pgtoolkit.config.key import with_values
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.own_code import family_of_config
from pgtoolkit.config.rules.named import existing, importable
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import CustomLossConfig
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import FULL_KINDS, REWARD_KINDS
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import Report, is_whole, refusal, text


def loss(c: Config, report: Report) -> None:
    splits = c.loss.num_splits
    family = family_of_config(c)
    if isinstance(c.loss, CustomLossConfig) and c.loss.path is not None:
        importable(report, "loss.path", str(c.loss.path), "It is imported when the run starts.")
    for note in family.notes() if family is not None else ():
        report.note(note)
    if family is not None and family.by_document and splits != 1:
        report.refuse(
            setting=f"loss={c.loss.name}",
            needs="loss.num_splits=1",
            got=splits,
            reason="The sequence ratio is exp of a mean over the whole document, and pieces do not "
            "recombine.",
            use="loss.num_splits=1",
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
    if family is not None and family.by_document and mode != "sample_mean" and reducer is None:
        settings = f"loss={c.loss.name} with aggregation={mode}"
        report.note(f"{settings} weights a document by its number of trained tokens.")


def correction(c: Config, report: Report) -> Config:
    """Refuse bounds out of order, a factor that a mean does not have, and a factor that is always
    1.

    Returns the configuration for the rules that follow, without what is refused.
    """
    c = _bounds_and_factor(c, report)
    chosen = configured(c.correction, CORRECTIONS)
    setting = f"correction={c.correction.name}"
    if chosen is None:
        return c
    if chosen.of_policy and c.loss.num_splits != 1:
        report.refuse(
            setting=setting,
            needs="loss.num_splits=1",
            got=c.loss.num_splits,
            reason="It masks whole documents, by all their new log-probs.",
            use="loss.num_splits=1",
        )
    rollout = c.rollout
    if not isinstance(rollout, PolicyRolloutConfig):
        return c
    if rollout.old_log_probs == "sampling":
        if not chosen.of_policy:
            use = "rollout.old_log_probs=training"
            report.refuse(
                setting=setting,
                needs=use,
                got="sampling",
                reason="The old log-probs are then the sampler's own, and the factor is 1 "
                "everywhere.",
                use=f"{use} or correction=none",
            )
    elif rollout.top_p is not None and rollout.top_p < 1:
        report.refuse(
            setting=setting,
            needs="rollout.top_p=null",
            got=rollout.top_p,
            reason="Sampling log-probs are renormalised over the tokens that top_p keeps, and each "
            "ratio would contain their share.",
            use="rollout.top_p=null or correction=none",
        )
    return c


def _bounds_and_factor(c: Config, report: Report) -> Config:
    """Check the keys of a correction against each other, and return the configuration without those
    that are refused."""
    low = getattr(c.correction, "low", None)
    high = getattr(c.correction, "high", None)
    if low is not None and low > high:
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
    if mean == "worst" and factor == "document":
        report.refuse(
            setting="correction.mean=worst",
            needs="correction.factor=one or token",
            got="document",
            reason="The worst token gives no ratio of the document, by which its tokens could be "
            "multiplied.",
            use="correction.factor=one",
        )
        c = with_values(c, {"correction.factor": "one"})
    return c


def advantage(c: Config, report: Report) -> None:
    estimator = c.advantage.estimator
    size = c.rollout.group_size
    if estimator == "given" and c.rollout.name == "policy":
        report.refuse(
            setting="advantage=given",
            needs="rollout=recorded",
            got="rollout=policy",
            reason="Advantages can only be given with recorded rollouts.",
            use="advantage=dr_grpo",
        )
    _penalty_to_train(c, report)
    if estimator == "none":
        _surrogate_of_zero(c, report)
    if estimator == "custom":
        _own_advantage(c, report)
    if estimator == "gae":
        _critic(c, report)
    num_verifiers = len(getattr(c.task, "verifiers", {}))
    if estimator == "gdpo" and (c.rollout.name != "policy" or num_verifiers < 2):
        report.refuse(
            setting="advantage=gdpo",
            needs="two or more task.verifiers to sample with",
            got=f"rollout={c.rollout.name} task={c.task.name} with {num_verifiers} of them",
            reason="It normalises the score of each in its group, before it adds them up.",
            use="advantage=grpo",
        )
    buffer = getattr(c.rollout, "overlong_buffer", None)
    if estimator in ("none", "gdpo") and buffer is not None:
        report.refuse(
            setting=f"advantage={estimator}",
            needs="rollout.overlong_buffer=null",
            got=buffer,
            reason="Its penalty is taken off the reward, which no advantage reads.",
            use="rollout.overlong_buffer=null or advantage=dr_grpo",
        )
    if estimator not in ("none", "given", "custom", "reinforce_plus_plus", "gae") and size == 1:
        report.refuse(
            setting=f"advantage={estimator}",
            needs="rollout.group_size >= 2",
            got=size,
            reason="With one completion there is nothing to compare it with: the advantage is 0 or "
            "undefined.",
            use="rollout.group_size=8",
        )


def _penalty_to_train(c: Config, report: Report) -> None:
    """Refuse advantages of 0 without a penalty that trains."""
    has_penalty = c.kl.kind not in ("none", "k1") or c.entropy.coefficient != 0
    if c.advantage.estimator == "none" and not has_penalty and c.loss.name != "custom":
        report.refuse(
            setting="advantage=none",
            needs="kl other than none and k1, or entropy.coefficient > 0",
            got=f"kl={c.kl.kind}",
            reason="Advantages of 0 teach nothing, nor does k1, whose gradient is free of the "
            "reference.",
            use="kl=k3_ratio with kl.coefficient and kl.reference",
        )
    elif needs_teacher(c) and c.kl.reference == "initial":
        report.refuse(
            setting="advantage=none",
            needs="kl.reference to be a teacher",
            got="initial",
            reason="The policy begins there, where the distance from it is least, and would stay.",
            use="kl.reference=FOLDER",
        )


def _surrogate_of_zero(c: Config, report: Report) -> None:
    """Note a surrogate that advantages of 0 make 0, and refuse a correction of it."""
    if c.loss.name in ("kimi", "custom"):
        return
    if c.loss.name != "reinforce":
        effect = f"loss={c.loss.name} is 0 and trains nothing; penalties alone do"
        report.note(f"advantage=none: {effect}.")
    if c.correction.name != "none":
        report.refuse(
            setting="advantage=none",
            needs="correction=none",
            got=c.correction.name,
            reason="It multiplies the surrogate, which is 0, and no penalty.",
            use="correction=none or advantage=dr_grpo",
        )


def _own_advantage(c: Config, report: Report) -> None:
    if c.advantage.path is None:
        report.refuse(
            setting="advantage=custom",
            needs="the path of a function",
            got=None,
            reason="It makes advantages of rewards.",
            use="advantage=my_module.my_advantages",
        )
    else:
        reason = "It is imported when the run starts."
        importable(report, "advantage.path", str(c.advantage.path), reason)


def _critic(c: Config, report: Report) -> None:
    """Refuse what a critic cannot be trained with, such as recorded rollouts, adapters, and a model
    that ranks share."""
    setting = "advantage=gae"
    if c.rollout.name != "policy":
        report.refuse(
            setting=setting,
            needs="rollout=policy",
            got=f"rollout={c.rollout.name}",
            reason="The critic learns from completions as they are sampled and scored.",
            use="advantage=dr_grpo",
        )
    if c.model.lora_rank is not None:
        report.refuse(
            setting=setting,
            needs="model.lora_rank=null",
            got=c.model.lora_rank,
            reason="All weights of the critic are trained, which takes the memory that adapters "
            "save.",
            use="model.lora_rank=null or advantage=dr_grpo",
        )
    if c.model.dtype == "float16":
        report.refuse(
            setting=setting,
            needs="model.dtype other than float16",
            got="float16",
            reason="The loss of the critic is not scaled: its small gradients would become 0.",
            use="model.dtype=bfloat16",
        )
    for name in ("tensor_parallel", "pipeline_parallel", "sequence_data_parallel"):
        size = getattr(c.parallelism, name)
        if size > 1:
            report.refuse(
                setting=setting,
                needs=f"parallelism.{name}=1",
                got=size,
                reason="The critic's head gives one value, which ranks cannot share.",
                use="parallelism=ddp or parallelism=fsdp",
            )
    _start_of_critic(c, report)
    family = family_of_config(c)
    if family is not None and family.by_document:
        report.note(
            f"loss={c.loss.name} takes the mean of the advantages of a document's tokens, which "
            "advantage=gae tells apart: loss=grpo, PPO's, takes each."
        )


def _start_of_critic(c: Config, report: Report) -> None:
    """Check what the critic starts from, and for how long it is trained alone."""
    if c.critic.steps_before_policy >= c.trainer.max_steps:
        report.refuse_value(
            key="critic.steps_before_policy",
            value=c.critic.steps_before_policy,
            needs=f"fewer than trainer.max_steps={c.trainer.max_steps}",
            reason="The policy would never be trained.",
            better=0,
        )
    if c.critic.path is not None and c.model.name != "huggingface":
        report.refuse(
            setting=f"critic.path={c.critic.path}",
            needs="model=huggingface",
            got=f"model={c.model.name}",
            reason="No folder holds a model with the tokens of the tiny one.",
            use="critic.path=null",
        )
    else:
        existing(report, "critic.path", c.critic.path, hub=True)


def penalties(c: Config, report: Report) -> Config:
    """Refuse a penalty without a coefficient, or with a reference that does not fit.

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
    _reference(c, report)
    if c.kl.place == "reward":
        _kl_in_reward(c, report)
    template = c.kl.reference_prompt
    if template is not None and not _takes_reference_prompt(template, report):
        c = with_values(c, {"kl.reference_prompt": None})
    if c.kl.update_every is not None and c.model.lora_rank is not None:
        report.refuse(
            setting=f"kl.update_every={c.kl.update_every}",
            needs="model.lora_rank=null",
            got=c.model.lora_rank,
            reason="The reference is the model without its adapters, and nothing of that is "
            "trained.",
            use="kl.update_every=null or model.lora_rank=null",
        )
    _model_of_reference(c, report)
    return c


def _reference(c: Config, report: Report) -> None:
    """Refuse a penalty without a reference, and recorded log-probs where they cannot serve."""
    kind = c.kl.kind
    reference = c.kl.reference
    if needs_teacher(c):
        proposed = "kl.reference=FOLDER"
        use = f"{proposed} of a teacher"
    else:
        proposed = "kl.reference=initial"
        use = f"{proposed} for the run's first weights, or kl=none"
    if reference is None:
        report.refuse(
            setting=f"kl={kind}",
            needs="kl.reference",
            got=None,
            reason="A penalty is the distance from a reference.",
            use=use,
        )
    if reference == "recorded" and c.rollout.name != "recorded":
        report.refuse(
            setting="kl.reference=recorded",
            needs="rollout=recorded",
            got="rollout=policy",
            reason="No file has the reference's log-probs of completions that are still to be "
            "sampled.",
            use=proposed,
        )
    elif reference == "recorded" and kind in FULL_KINDS:
        report.refuse(
            setting=f"kl={kind}",
            needs="kl.reference to be a model",
            got="recorded",
            reason="Rollouts record the reference's log-prob of one token, and not of the whole "
            "vocabulary.",
            use="kl=k3_ratio",
        )


def _model_of_reference(c: Config, report: Report) -> None:
    """Refuse a reference that does not exist, has another vocabulary, or meets pipeline stages."""
    reference = c.kl.reference
    existing(report, "kl.reference", reference, hub=True)
    size = vocabulary_size(c.model, c.task)
    size_of_reference = model_settings(reference).get("vocab_size")
    if is_whole(size) and is_whole(size_of_reference) and size != size_of_reference:
        needs = f"a vocabulary of {size} entries"
        report.problems.append(other_vocabulary(c, needs, size_of_reference))
    if c.kl.needs_model and c.parallelism.pipeline_parallel > 1:
        report.refuse(
            setting=f"kl={c.kl.kind}",
            needs="parallelism.pipeline_parallel=1",
            got=c.parallelism.pipeline_parallel,
            reason="The stages hand on the hidden states of the policy alone.",
            use="kl.reference=recorded, or parallelism.pipeline_parallel=1",
        )


def _kl_in_reward(c: Config, report: Report) -> None:
    """Refuse a penalty in the reward if samples lack it or the advantages would lose it."""
    estimator = c.advantage.estimator
    if c.kl.kind not in REWARD_KINDS:
        report.refuse(
            setting="kl.place=reward",
            needs="kl=k1, k2 or k3",
            got=f"kl={c.kl.kind}",
            reason="A reward is made of the log-probs of the tokens that were sampled, before any "
            "update.",
            use="kl=k1 or kl.place=loss",
        )
    if estimator in ("none", "gdpo"):
        report.refuse(
            setting="kl.place=reward",
            needs="an advantage that reads the reward",
            got=f"advantage={estimator}",
            reason="The penalty is taken off the reward.",
            use="advantage=dr_grpo or kl.place=loss",
        )
    if estimator == "max_rl":
        report.refuse(
            setting="kl.place=reward",
            needs="an advantage that takes rewards below 0",
            got="advantage=max_rl",
            reason="A reward of 0 is below 0 once the penalty is taken off.",
            use="advantage=dr_grpo or kl.place=loss",
        )


def needs_teacher(c: Config) -> bool:
    """Return whether only the distance from a reference trains, which reads the same prompt."""
    has_advantage = c.advantage.estimator != "none"
    has_entropy = c.entropy.coefficient != 0
    has_own_prompt = c.kl.reference_prompt is not None
    return not (has_advantage or has_entropy or has_own_prompt)


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
    """Note at which weights ratios are anchored, if these are not the weights that sampled."""
    rollout = c.rollout
    family = family_of_config(c)
    correction = c.correction.name
    if rollout.name != "policy" or (family is not None and not family.reads_old_log_probs):
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
    corrects = "nothing corrects for"
    if correction != "none":
        corrects = f"correction={correction} corrects for"
    report.note(
        f"{setting} under a lag: ratios are to the weights with which training on a batch begins, "
        f"and {corrects} the updates between those and the weights that sampled."
    )

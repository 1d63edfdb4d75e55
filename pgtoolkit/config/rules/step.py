"""The rules on what a step computes, and how it is spread over processes."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from pgtoolkit.config.counts import documents_per_batch, tokens_at_least
from pgtoolkit.config.key import with_values
from pgtoolkit.config.models import MODEL_TYPES, shape, vocabulary_size
from pgtoolkit.config.own_code import family_of_config
from pgtoolkit.config.rules.run import existing, importable
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import CustomLossConfig
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig, RolloutConfig
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import FULL_KINDS, REWARD_KINDS
from pgtoolkit.ranks.environment import AXES, joined, world_size
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
            reason="The worst token is no ratio of the document, by which its tokens could be "
            "multiplied.",
            use="correction.factor=one",
        )
        c = with_values(c, {"correction.factor": "one"})
    chosen = configured(c.correction, CORRECTIONS)
    setting = f"correction={c.correction.name}"
    rollout = c.rollout
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
    if rollout.name == "policy" and rollout.old_log_probs == "sampling":
        if chosen.of_policy:
            return c
        use = "rollout.old_log_probs=training"
        report.refuse(
            setting=setting,
            needs=use,
            got="sampling",
            reason="The old log-probs are then the sampler's own, and the factor is 1 everywhere.",
            use=f"{use} or correction=none",
        )
    elif rollout.name == "policy" and rollout.top_p is not None and rollout.top_p < 1:
        report.refuse(
            setting=setting,
            needs="rollout.top_p=null",
            got=rollout.top_p,
            reason="Sampling log-probs are renormalised over what top_p keeps, so each ratio would "
            "hold that share.",
            use="rollout.top_p=null or correction=none",
        )
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
    has_penalty = c.kl.kind not in ("none", "k1") or c.entropy.coefficient != 0
    if estimator == "none" and not has_penalty and c.loss.name != "custom":
        report.refuse(
            setting="advantage=none",
            needs="kl other than none and k1, or entropy.coefficient > 0",
            got=f"kl={c.kl.kind}",
            reason="Advantages of 0 teach nothing, nor does k1, whose gradient does not know the "
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
    if estimator == "none" and c.loss.name not in ("kimi", "custom"):
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
    if estimator == "custom" and c.advantage.path is None:
        report.refuse(
            setting="advantage=custom",
            needs="the path of a function",
            got=None,
            reason="It makes advantages of rewards.",
            use="advantage=my_module.my_advantages",
        )
    elif estimator == "custom":
        reason = "It is imported when the run starts."
        importable(report, "advantage.path", str(c.advantage.path), reason)
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
            reason="It takes off the reward, which no advantage reads.",
            use="rollout.overlong_buffer=null or advantage=dr_grpo",
        )
    if estimator == "gae":
        _critic(c, report)
    if estimator not in ("none", "given", "custom", "reinforce_plus_plus", "gae") and size == 1:
        report.refuse(
            setting=f"advantage={estimator}",
            needs="rollout.group_size >= 2",
            got=size,
            reason="With one completion there is nothing to compare it with: the advantage is 0 or "
            "undefined.",
            use="rollout.group_size=8",
        )


def _critic(c: Config, report: Report) -> None:
    """Refuse recorded rollouts, adapters, a model that ranks share, and too few steps for a
    critic."""
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
            reason="The loss of the critic is not scaled, so that its small gradients would "
            "become 0.",
            use="model.dtype=bfloat16",
        )
    for name in ("tensor_parallel", "pipeline_parallel", "sequence_data_parallel"):
        size = getattr(c.parallelism, name)
        if size > 1:
            report.refuse(
                setting=setting,
                needs=f"parallelism.{name}=1",
                got=size,
                reason="The critic's head gives one value, and no row of it can be shared.",
                use="parallelism=ddp or parallelism=fsdp",
            )
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
    family = family_of_config(c)
    if family is not None and family.by_document:
        report.note(
            f"loss={c.loss.name} takes the mean of the advantages of a document's tokens, which "
            "advantage=gae tells apart: loss=grpo, PPO's, takes each."
        )


def penalties(c: Config, report: Report) -> Config:
    """Refuse a penalty without a coefficient, or with a reference that does not fit.

    Returns the configuration for the rules that follow, in which other values replace refused ones.
    """
    kind = c.kl.kind
    reference = c.kl.reference
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
            reason="The reference's log-probs of completions that are still to be sampled are in "
            "no file.",
            use=proposed,
        )
    elif reference == "recorded" and kind in FULL_KINDS:
        report.refuse(
            setting=f"kl={kind}",
            needs="kl.reference to be a model",
            got="recorded",
            reason="Rollouts record the reference's log-prob of one token, and not of all that "
            "could stand there.",
            use="kl=k3_ratio",
        )
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
    existing(report, "kl.reference", reference, hub=True)
    size = vocabulary_size(c.model, c.task)
    size_of_reference = model_settings(reference).get("vocab_size")
    if is_whole(size) and is_whole(size_of_reference) and size != size_of_reference:
        needs = f"a vocabulary of {size} entries"
        report.problems.append(other_vocabulary(c, needs, size_of_reference))
    if c.kl.needs_model and c.parallelism.pipeline_parallel > 1:
        report.refuse(
            setting=f"kl={kind}",
            needs="parallelism.pipeline_parallel=1",
            got=c.parallelism.pipeline_parallel,
            reason="The stages hand on the training policy's hidden states, and no others.",
            use="kl.reference=recorded, or parallelism.pipeline_parallel=1",
        )
    return c


def _kl_in_reward(c: Config, report: Report) -> None:
    """Refuse a penalty in the reward that samples do not have, or that the advantages would
    lose."""
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
    """Return whether nothing trains but the distance from a reference that reads the same
    prompt."""
    has_advantage = c.advantage.estimator != "none"
    has_entropy = c.entropy.coefficient != 0
    has_own_prompt = c.kl.reference_prompt is not None
    return not (has_advantage or has_entropy or has_own_prompt)


def other_vocabulary(c: Config, needs: str, got: Any) -> str:
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
    """Refuse a template without {prompt} and {answer}, or with other fields, attributes or
    widths."""
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


def _is_late(rollout: RolloutConfig) -> bool:
    """Return whether completions are sampled before earlier updates are made."""
    return bool(isinstance(rollout, PolicyRolloutConfig) and (rollout.lag or rollout.max_staleness))


def anchor(c: Config, report: Report) -> None:
    """Note at which weights ratios are anchored, if these are not the weights that sampled."""
    rollout = c.rollout
    family = family_of_config(c)
    correction = c.correction.name
    if rollout.name != "policy" or (family is not None and not family.reads_old_log_probs):
        return
    setting = f"rollout.old_log_probs={rollout.old_log_probs}"
    is_proximal = rollout.old_log_probs == "proximal"
    if not _is_late(rollout):
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


def accumulation(c: Config, report: Report) -> None:
    docs = c.accumulation.docs_per_step
    fixed = c.accumulation.micro_batches_per_step
    if docs == 0 and fixed is None:
        report.refuse(
            setting="accumulation.docs_per_step=0",
            needs="accumulation.micro_batches_per_step >= 1",
            got=fixed,
            reason="With docs_per_step=0 a step is a fixed number of micro-batches.",
            use="accumulation=fixed",
        )
    default_fixed = report.usual("accumulation.micro_batches_per_step")
    if docs and fixed and fixed == default_fixed:  # any other value is refused as ignored
        report.refuse(
            setting="accumulation=fixed",
            needs="accumulation.docs_per_step=0",
            got=docs,
            reason="A step then has that many documents.",
            use="accumulation=dynamic or accumulation.docs_per_step=0",
        )
    longest = tokens_at_least(c)
    if longest > c.accumulation.max_tokens:
        report.refuse_value(
            key="accumulation.max_tokens",
            value=c.accumulation.max_tokens,
            needs=f"at least the longest document, {longest} tokens",
            reason="A document is never split over micro-batches, so the longest must fit into "
            "one.",
            better=longest,
        )
    setting = f"aggregation={c.aggregation.mode}"
    needs_groups = AGGREGATIONS[c.aggregation.mode].needs_groups
    size = c.rollout.group_size or 1
    reason = "A prompt's mean needs all its completions in one step."
    if needs_groups and docs == 0:
        report.refuse(
            setting=setting,
            needs="accumulation.docs_per_step > 0",
            got=docs,
            reason=reason,
            use="accumulation=dynamic",
        )
    elif needs_groups and docs % size:
        report.refuse(
            setting=setting,
            needs=f"accumulation.docs_per_step to be a multiple of the group size {size}",
            got=docs,
            reason=reason,
            use=f"accumulation.docs_per_step={max(1, round(docs / size)) * size}",
        )
    batch = documents_per_batch(c.rollout)
    if batch is not None and docs > 0:
        _steps_per_batch(c, batch, docs, c.accumulation.last_step, report)
        family = family_of_config(c)
        has_no_ratio = family is not None and not family.reads_old_log_probs
        is_off_policy = docs < batch or _is_late(c.rollout)
        if has_no_ratio and is_off_policy and c.advantage.estimator != "none":
            report.note(
                f"loss={c.loss.name} has no ratio: where updates lie between sampling and a step, "
                "nothing corrects for them. One step per batch of rollouts and no rollout.lag is "
                "what it is made for."
            )


def _steps_per_batch(c: Config, batch: int, docs: int, last: str, report: Report) -> None:
    if docs > batch and last == "drop":
        report.refuse(
            setting="accumulation.last_step=drop",
            needs=f"accumulation.docs_per_step <= {batch}, the documents of a batch",
            got=docs,
            reason="No batch of rollouts fills a step, so every one would be dropped.",
            use=f"accumulation.docs_per_step={batch}",
        )
    elif docs > batch and last == "short":
        effect = f"is never reached: a batch of rollouts has {batch} documents"
        report.note(f"accumulation.docs_per_step={docs} {effect}.")
    elif batch % docs:
        effects = {
            "short": f"the last step of every batch has only {batch % docs}",
            "drop": f"the last {batch % docs} documents of every batch are not trained on",
            "carry": "some steps mix documents of two batches, sampled by different policies",
        }
        reason = f"does not divide the {batch} documents of a batch"
        report.note(f"accumulation.docs_per_step={docs} {reason}: {effects[last]}.")
    elif docs == batch and not _is_late(c.rollout):
        report.note(
            "one optimizer step per batch of rollouts: every ratio is 1, nothing is clipped, and "
            "the losses differ only in their weights."
        )


def parallelism(c: Config, report: Report) -> None:
    """Check the sizes of parallelism against each other, a launcher's processes, and the model."""
    p = c.parallelism
    rank = joined()
    product = world_size(c.parallelism)
    sizes = {name: getattr(p, name) for name in AXES}
    report.problems += misfits(sizes, p.shard, shape(c.model), vocabulary_size(c.model, c.task))
    if rank is not None and rank.world_size != product:
        factors = " x ".join(f"{name}={getattr(p, name)}" for name in AXES)
        report.refuse(
            setting=f"WORLD_SIZE={rank.world_size}",
            needs=f"the product of the parallel sizes, {product} = {factors}",
            got=rank.world_size,
            reason="Every process has one place in the layout.",
            use=f"as many processes, or without a launcher such as torchrun pgtk starts {product} "
            "itself",
        )
    if p.sequence_parallel and p.tensor_parallel == 1:
        report.refuse(
            setting="parallelism.sequence_parallel=true",
            needs="parallelism.tensor_parallel > 1",
            got=p.tensor_parallel,
            reason="The activations are sharded over the same ranks as the matrices.",
            use="parallelism.tensor_parallel=2, or parallelism.sequence_parallel=false",
        )
    if p.shard and p.data_parallel * p.sequence_data_parallel == 1:
        report.refuse(
            setting="parallelism.shard=true",
            needs="parallelism.data_parallel > 1",
            got=p.data_parallel,
            reason="The weights are divided over the ranks that see different tokens.",
            use="parallelism.data_parallel=2, or parallelism.shard=false",
        )
    if p.pipeline_parallel == 1:
        return
    needs = "parallelism.pipeline_parallel=1"
    got = p.pipeline_parallel
    if c.metrics.level != "none":
        report.refuse(
            setting=f"metrics={c.metrics.level}",
            needs=needs,
            got=got,
            reason="Stages without the loss have no advantage extrema to give.",
            use=f"metrics=none or {needs}",
        )
    for name, off in (("sequence_data_parallel", 1), ("sequence_parallel", False)):
        value = getattr(p, name)
        if value != off:
            report.refuse(
                setting=f"parallelism.{name}={text(value)}",
                needs=needs,
                got=got,
                reason="Stages hand over whole micro-batches.",
                use=f"parallelism.{name}={text(off)}",
            )


def misfits(
    sizes: Mapping[str, int],
    shard: bool,
    known: dict[str, Any],
    vocabulary: int | None,
) -> list[str]:
    """Return the problems with spreading a model over these sizes.

    sizes: of AXES. shard: whether FSDP2 divides it. known: type, attention heads, key-value heads,
    layers, tied, as far as `check` knows them or as the model is loaded; the others are missing or
    None.
    """
    problems = []
    tensor = sizes["tensor_parallel"]
    stages = sizes["pipeline_parallel"]
    axes = [name for name in AXES if name != "data_parallel" and sizes[name] > 1]
    spread = [f"{name}={sizes[name]}" for name in axes]
    if shard:
        spread.append("shard=true")
    if spread and known.get("type") not in (None, *MODEL_TYPES):
        problems.append(
            refusal(
                setting=f"parallelism.{spread[0]}",
                needs=f"a model of type {', '.join(MODEL_TYPES)}",
                got=known["type"],
                reason="Only models of these types can be spread.",
                use="parallelism=ddp",
            )
        )
    setting = f"parallelism.tensor_parallel={tensor}"
    heads = {kind: known.get(kind) for kind in ("attention heads", "key-value heads")}
    heads = {kind: count for kind, count in heads.items() if is_whole(count) and count >= 1}
    uneven = [kind for kind, count in heads.items() if count % tensor]
    if uneven:
        counts = heads.values()
        fitting = max(
            size for size in range(1, tensor) if not any(count % size for count in counts)
        )
        problems.append(
            refusal(
                setting=setting,
                needs=f"a divisor of the model's {heads[uneven[0]]} {uneven[0]}",
                got=tensor,
                reason="Attention heads are dealt out whole.",
                use=f"parallelism.tensor_parallel={fitting}",
            )
        )
    if vocabulary is not None and -(-vocabulary // tensor) * (tensor - 1) >= vocabulary:
        problems.append(
            refusal(
                setting=setting,
                needs=f"fewer shards of {vocabulary} tokens",
                got=tensor,
                reason="One rank would hold none of the vocabulary.",
                use="parallelism.tensor_parallel=1",
            )
        )
    setting = f"parallelism.pipeline_parallel={stages}"
    layers = known.get("layers")
    if known.get("tied") and stages > 1:
        problems.append(
            refusal(
                setting=setting,
                needs="a model whose embedding and LM head are two matrices",
                got="one for both",
                reason="They lie on different stages.",
                use="parallelism=fsdp",
            )
        )
    if is_whole(layers) and 1 <= layers < stages:
        problems.append(
            refusal(
                setting=setting,
                needs=f"at most the model's {layers} layers",
                got=stages,
                reason="A stage holds whole layers, at least one.",
                use=f"parallelism.pipeline_parallel={layers}",
            )
        )
    return problems

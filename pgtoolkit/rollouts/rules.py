"""The rules between the parts of a training that compare settings alone, each as a row.

They hold for a configuration, whose table in docs/keys.md is written from them, and for parts that
are made in Python, where `rules_in_python` tries them. No torch is imported here, since `pgtk
check` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pgtoolkit.losses.kl import REWARD_KINDS
from pgtoolkit.rollouts.settings import (
    ADVANTAGE_PATH,
    MICRO_BATCHES,
    SHIFT_OF_MAX_RL,
    WITHOUT_OTHERS,
)
from pgtoolkit.system.declared import Declared, Needed

_READS_NO_REWARDS = "loss!=custom and loss!=tpo and loss!=lpo"
"""Holds for losses of ours that are 0 where advantages are. What one of the user's own reads is
known once it is imported: the rows below `_for_own` are tried then."""

_ONLY_DISTANCE = (
    "advantage=none and loss!=tpo and loss!=lpo and entropy.coefficient=0 and "
    "kl.reference_prompt=null"
)
"""Only the distance from a reference trains, which reads the same prompt."""

_NOT_RECORDED_YET = (
    "No file has the reference's log-probs of completions that are still to be sampled."
)
_PENALTY_OFF_REWARD = "The penalty is taken off the reward."
_NO_REWARD_READ = "Its penalty is taken off the reward, which this advantage does not read."
_COMPARED_WITH_OTHERS = (
    "A reward is compared with those of other prompts, or with the critic's value, so that a "
    "prompt whose completions all score the same teaches, too."
)
_PENALTIES_ALONE = (
    "Without advantages no prompt is told to have no signal: every one trains, however its "
    "completions score."
)
_ONE_COMPLETION = "A single completion scores like itself: every prompt would be taken out."
_REPEATED = "The old log-probs are then the sampler's own, and the factor is 1 everywhere."
_ONE_VALUE = "The critic's head gives one value, which ranks cannot share."
_ONE_TOKEN_RECORDED = (
    "Rollouts record the reference's log-prob of one token, and not of the whole vocabulary."
)


def _more_than_distance(condition: str) -> str:
    """Return a condition under which something else trains, too, than the distance from a
    reference."""
    others = (
        "advantage!=none",
        "loss=tpo",
        "loss=lpo",
        "entropy.coefficient!=0",
        "kl.reference_prompt!=null",
    )
    return " or ".join(f"{condition} and {other}" for other in others)


_KEPT_SHARE = (
    "The sampler's log-probs are renormalised over the tokens that sampling keeps, and each ratio "
    "would contain their share, unless the kept tokens are recorded."
)


def _with_truncation(condition: str) -> str:
    """Return a condition together with sampling that is truncated by top_p or top_k."""
    return (
        f"{condition} and rollout.top_p!=null and rollout.top_p!=1 or "
        f"{condition} and rollout.top_k!=null"
    )


CORRECTION = (
    Needed(
        "correction=off_policy_mask",
        needs="loss.num_splits=1",
        because="It masks whole documents, by all their new log-probs.",
    ),
    Needed(
        "correction!=none and correction!=off_policy_mask and rollout=policy",
        needs="rollout.old_log_probs!=sampling",
        because=_REPEATED,
        use="rollout.old_log_probs=training or correction=none",
    ),
    Needed(
        _with_truncation("correction!=none and rollout.old_log_probs!=sampling"),
        needs="sampler.keep_top>0",
        because=_KEPT_SHARE,
        use="sampler.keep_top=32 or correction=none",
    ),
)

TRUNCATED = (
    Needed(
        _with_truncation("rollout.old_log_probs=sampling"),
        needs="sampler.keep_top>0",
        because=_KEPT_SHARE,
        use="sampler.keep_top=32 or rollout.old_log_probs=training",
    ),
)

BALANCED = (
    Needed(
        "aggregation=balanced",
        needs="loss!=tpo and loss!=lpo",
        because="It weighs completions by the sign of their advantage, and this loss reads rewards "
        "alone.",
        use="aggregation=prompt_mean",
    ),
    Needed(
        "aggregation=balanced and loss!=tpo and loss!=lpo",
        needs="advantage!=none",
        because="It weighs completions by the sign of their advantage, and has none here.",
        use="advantage=dr_grpo or aggregation=prompt_mean",
    ),
    Needed(
        "aggregation=balanced",
        needs="advantage!=gae",
        because="It weighs completions by the sign of their advantage, and here each token has its "
        "own.",
        use="advantage=dr_grpo or aggregation=prompt_mean",
    ),
)

BY_DOCUMENTS = (
    "accumulation=dynamic accumulation.docs_per_step=64 accumulation.micro_batches_per_step=null"
)
"""What to type for steps of documents, also where accumulation.docs_per_step=0 was typed."""

_TOP_ENTROPY_OF_NOTHING = Needed(
    f"entropy.top_fraction!=null and advantage=none and loss!=kimi and {_READS_NO_REWARDS}",
    needs="entropy.top_fraction=null",
    because="It chooses tokens of the policy term, which is 0 without advantages; penalties "
    "keep every token.",
    use="entropy.top_fraction=null",
)

TOP_ENTROPY = (
    Needed(
        "entropy.top_fraction!=null",
        needs="accumulation.docs_per_step>0",
        because="The quantile is that of a step, and a fixed number of micro-batches holds other "
        "documents from step to step.",
        use=BY_DOCUMENTS,
    ),
    _TOP_ENTROPY_OF_NOTHING,
)

_OF_THE_SAMPLER = (
    "Its centre is that of the sampler, which has to be the policy that ratios are anchored at."
)
_WHOLE_SOFTMAX = (
    "The tail beyond the likeliest tokens is modelled, and truncated sampling has none: its kept "
    "tokens are recorded in their place."
)

CENTERING = (
    Needed(
        "loss.score_centering=true",
        needs="correction=none",
        because="The factor of the loss itself corrects for the sampler, as far as the loss has "
        "one.",
    ),
    Needed(
        "loss.score_centering=true and rollout=policy",
        needs="rollout.old_log_probs=sampling",
        because=_OF_THE_SAMPLER,
    ),
    Needed(
        "loss.score_centering=true and rollout=policy",
        needs="sampler.keep_top>0",
        because="It needs the likeliest tokens of the sampler at each position.",
        use="sampler.keep_top=32",
    ),
    Needed(
        "sampler.keep_top>0 and evaluation.every>0",
        needs="rollout=policy",
        because="Recorded rollouts have columns of the likeliest tokens, or not.",
        use="sampler.keep_top=0",
    ),
    Needed(
        "loss.score_centering=true and rollout=policy",
        needs="rollout.top_p=null or rollout.top_p=1",
        because=_WHOLE_SOFTMAX,
        use="rollout.top_p=null",
    ),
    Needed(
        "loss.score_centering=true and rollout=policy",
        needs="rollout.top_k=null",
        because=_WHOLE_SOFTMAX,
    ),
)

_GROUP_OF_ONE = Needed(
    "loss=tpo or loss=lpo",
    needs="rollout.group_size!=1",
    because="It compares the completions of a prompt, and a single one has none beside it.",
    use="rollout.group_size=8",
)

GROUP_LOSS = (
    Needed(
        "loss=tpo or loss=lpo",
        needs="advantage=none",
        because="It compares the rewards of a prompt's completions itself, and reads no "
        "advantages.",
    ),
    _GROUP_OF_ONE,
    Needed(
        "loss=lpo and rollout.max_staleness>0 or loss=lpo and rollout.lag>0",
        needs="rollout.old_log_probs=proximal",
        because="Its target is anchored at the policy that training on the batch begins with.",
    ),
)

_NOTHING_TO_LEARN = Needed(
    f"advantage=none and {_READS_NO_REWARDS}",
    needs="kl!=none and kl!=k1 or entropy.coefficient!=0",
    because="Advantages of 0 teach nothing, nor does k1, whose gradient is free of the reference.",
    use="advantage=dr_grpo or kl=k3_ratio kl.reference=FOLDER",
)

_TEACHES_ITSELF = Needed(
    f"{_ONLY_DISTANCE} and loss!=custom and kl!=none and kl!=k1",
    needs="kl.reference!=initial",
    because="The policy begins there, where the distance from it is least, and would stay.",
    use="kl.reference=FOLDER",
)

_CORRECTS_NOTHING = Needed(
    f"advantage=none and loss!=kimi and {_READS_NO_REWARDS}",
    needs="correction=none",
    because="It multiplies the surrogate, which is 0, and no penalty.",
    use="correction=none or advantage=dr_grpo",
)

_LENGTH_WITHOUT_REWARD = Needed(
    f"advantage=none and {_READS_NO_REWARDS}",
    needs="rollout.overlong_buffer=null",
    because=_NO_REWARD_READ,
    use="rollout.overlong_buffer=null or advantage=dr_grpo",
)

ADVANTAGE = (
    Needed(
        "advantage=given",
        needs="rollout=recorded",
        because="Advantages can only be given with recorded rollouts.",
        use="advantage=dr_grpo",
    ),
    _NOTHING_TO_LEARN,
    _TEACHES_ITSELF,
    _CORRECTS_NOTHING,
    ADVANTAGE_PATH,
    Needed(
        "advantage=gdpo",
        needs="rollout=policy",
        because="It normalises the score of each verifier in its group, before it adds them up.",
        use="advantage=grpo",
    ),
    _LENGTH_WITHOUT_REWARD,
    Needed(
        "advantage=gdpo",
        needs="rollout.overlong_buffer=null",
        because=_NO_REWARD_READ,
        use="rollout.overlong_buffer=null or advantage=dr_grpo",
    ),
    Needed(
        " and ".join(f"advantage!={name}" for name in WITHOUT_OTHERS),
        needs="rollout.group_size!=1",
        because="With one completion there is nothing to compare it with: the advantage is 0 or "
        "undefined.",
        use="rollout.group_size=8",
    ),
)

_SHAPE_WITHOUT_REWARDS = tuple(
    Needed(
        f"advantage=none and {_READS_NO_REWARDS}",
        needs=off,
        because="Neither this advantage nor this loss reads rewards.",
        use=f"{off} or advantage=dr_grpo",
    )
    for off in (
        "advantage.reward_shift=0",
        "advantage.reward_scale=1",
        "advantage.reward_clip=null",
    )
)

SHAPE = (
    SHIFT_OF_MAX_RL,
    *_SHAPE_WITHOUT_REWARDS,
    *(
        Needed(
            "advantage=none",
            needs=off,
            because="Every advantage is 0, within all bounds.",
            use=f"{off} or advantage=dr_grpo",
        )
        for off in ("advantage.clip_low=null", "advantage.clip_high=null")
    ),
)

_SIGNAL_WITHOUT_REWARDS = (
    Needed(
        f"rollout.max_sampling_rounds>1 and {_READS_NO_REWARDS}",
        needs="advantage!=none",
        because=_PENALTIES_ALONE,
        use="rollout.max_sampling_rounds=1 or advantage=dr_grpo",
    ),
    Needed(
        f"rollout.uninformative=drop and {_READS_NO_REWARDS}",
        needs="advantage!=none",
        because=_PENALTIES_ALONE,
        use="rollout.uninformative=train or advantage=dr_grpo",
    ),
    Needed(
        f"rollout.retire_at!=null and {_READS_NO_REWARDS}",
        needs="advantage!=none",
        because=_PENALTIES_ALONE,
        use="rollout.retire_at=null or advantage=dr_grpo",
    ),
)

SIGNAL = (
    Needed(
        "rollout.max_sampling_rounds>1",
        needs="advantage!=gae and advantage!=reinforce_plus_plus",
        because=_COMPARED_WITH_OTHERS,
        use="rollout.max_sampling_rounds=1 or advantage=dr_grpo",
    ),
    Needed(
        "rollout.uninformative=drop",
        needs="advantage!=gae and advantage!=reinforce_plus_plus",
        because=_COMPARED_WITH_OTHERS,
        use="rollout.uninformative=train or advantage=dr_grpo",
    ),
    *_SIGNAL_WITHOUT_REWARDS,
    Needed(
        "rollout.max_sampling_rounds>1 and advantage=custom",
        needs="rollout.group_size!=1",
        because=_ONE_COMPLETION,
        use="rollout.max_sampling_rounds=1 or rollout.group_size=8",
    ),
    Needed(
        "rollout.uninformative=drop and advantage=custom",
        needs="rollout.group_size!=1",
        because=_ONE_COMPLETION,
        use="rollout.uninformative=train or rollout.group_size=8",
    ),
)

CRITIC = (
    Needed(
        "advantage=gae",
        needs="rollout=policy",
        because="The critic learns from completions as they are sampled and scored.",
        use="advantage=dr_grpo",
    ),
    Needed(
        "advantage=gae",
        needs="model.lora_rank=null",
        because="All weights of the critic are trained, which takes the memory that adapters save.",
        use="model.lora_rank=null or advantage=dr_grpo",
    ),
    Needed(
        "advantage=gae",
        needs="model.dtype!=float16",
        because="The loss of the critic is not scaled: its small gradients would become 0.",
        use="model.dtype=bfloat16",
    ),
    Needed(
        "advantage=gae",
        needs="parallelism.tensor_parallel=1",
        because=_ONE_VALUE,
        use="parallelism=ddp or parallelism=fsdp",
    ),
    Needed(
        "advantage=gae",
        needs="parallelism.pipeline_parallel=1",
        because=_ONE_VALUE,
        use="parallelism=ddp or parallelism=fsdp",
    ),
    Needed(
        "advantage=gae",
        needs="parallelism.sequence_data_parallel=1",
        because=_ONE_VALUE,
        use="parallelism=ddp or parallelism=fsdp",
    ),
    Needed(
        "critic.path!=null",
        needs="model=huggingface",
        because="No folder holds a model with the tokens of the tiny one.",
        use="critic.path=null",
    ),
)

KL = (
    Needed(
        _more_than_distance("kl!=none"),
        needs="kl.reference!=null",
        because="A penalty is the distance from a reference.",
        use="kl.reference=initial or kl=none",
    ),
    Needed(
        f"kl!=none and {_ONLY_DISTANCE}",
        needs="kl.reference!=null",
        because="A penalty is the distance from a reference, here a teacher.",
        use="kl.reference=FOLDER",
    ),
    Needed(
        _more_than_distance("kl.reference=recorded"),
        needs="rollout=recorded",
        because=_NOT_RECORDED_YET,
        use="kl.reference=initial",
    ),
    Needed(
        f"kl.reference=recorded and {_ONLY_DISTANCE}",
        needs="rollout=recorded",
        because=_NOT_RECORDED_YET,
        use="kl.reference=FOLDER",
    ),
    Needed(
        "kl=full_reverse and rollout=recorded",
        needs="kl.reference!=recorded",
        because=_ONE_TOKEN_RECORDED,
        use="kl=k3_ratio",
    ),
    Needed(
        "kl=full_forward and rollout=recorded",
        needs="kl.reference!=recorded",
        because=_ONE_TOKEN_RECORDED,
        use="kl=k3_ratio",
    ),
    Needed(
        "kl=full_jsd and rollout=recorded",
        needs="kl.reference!=recorded",
        because=_ONE_TOKEN_RECORDED,
        use="kl=k3_ratio",
    ),
    Needed(
        "kl.place=reward and kl!=none",
        needs=" or ".join(f"kl={kind}" for kind in REWARD_KINDS),
        because="A reward is made of the log-probs of the tokens that were sampled, before any "
        "update.",
        use="kl=k1 or kl.place=loss",
    ),
    Needed(
        "kl.place=reward and kl!=none",
        needs="advantage!=none and advantage!=gdpo",
        because=_PENALTY_OFF_REWARD,
        use="advantage=dr_grpo or kl.place=loss",
    ),
    Needed(
        "kl.place=reward and kl!=none",
        needs="advantage!=max_rl",
        because="A reward of 0 is below 0 once the penalty is taken off.",
        use="advantage=dr_grpo or kl.place=loss",
    ),
    Needed(
        "kl.target!=null and kl!=none",
        needs=" or ".join(f"kl={kind}" for kind in REWARD_KINDS),
        because="The target is compared with the term of single tokens, without a ratio.",
        use="kl=k3 or kl.target=null",
    ),
    Needed(
        "kl.target!=null and kl!=none and kl.place=loss",
        needs="metrics!=none",
        because="The KL is measured with the metrics of the loss.",
        use="metrics=basic or kl.place=reward",
    ),
    Needed(
        "kl.target!=null and kl!=none and kl.place=loss",
        needs="accumulation.last_step!=carry",
        because="A step with documents of two batches would have a coefficient of each.",
        use="accumulation.last_step=short or kl.place=reward",
    ),
    Needed(
        "kl.update_every!=null",
        needs="model.lora_rank=null",
        because="The reference is the model without its adapters, and nothing of that is trained.",
        use="kl.update_every=null or model.lora_rank=null",
    ),
    Needed(
        "kl!=none and kl.reference!=recorded and kl.reference!=null",
        needs="parallelism.pipeline_parallel=1",
        because="The stages hand on the hidden states of the policy alone.",
        use="kl.reference=recorded or parallelism.pipeline_parallel=1",
    ),
)

ACCUMULATION = (
    MICRO_BATCHES,
    Needed(
        "aggregation=prompt_mean or aggregation=balanced",
        needs="accumulation.docs_per_step>0",
        because="A prompt's mean needs all its completions in one step.",
        use=BY_DOCUMENTS,
    ),
    Needed(
        "rollout.pass_order=shuffled",
        needs="accumulation.last_step!=drop",
        because="Each pass would leave out other documents, so that some are trained more often "
        "than others.",
        use="accumulation.last_step=short or rollout.pass_order=same",
    ),
)


SHARING = (
    *(
        Needed(
            "model.share_prompts=true",
            needs=f"parallelism.{axis}=1",
            because="Completions share their prompt on ranks that hold whole documents and layers.",
            use=f"parallelism.{axis}=1 or model.share_prompts=auto",
        )
        for axis in ("tensor_parallel", "sequence_data_parallel", "pipeline_parallel")
    ),
    Needed(
        "model.share_prompts=true",
        needs="accumulation.docs_per_step>0",
        because="More documents would fit the micro-batches of a step, which would be another.",
        use=f"{BY_DOCUMENTS} or model.share_prompts=auto",
    ),
    Needed(
        "model.share_prompts=true and rollout=recorded",
        needs="parallelism.data_parallel=1",
        because="A rank reads its own recorded documents alone, and does not know which of the "
        "others begin alike.",
        use="parallelism.data_parallel=1 or model.share_prompts=auto",
    ),
)

ROWS = (
    *CORRECTION,
    *TRUNCATED,
    *BALANCED,
    *TOP_ENTROPY,
    *CENTERING,
    *GROUP_LOSS,
    *ADVANTAGE,
    *SHAPE,
    *SIGNAL,
    *CRITIC,
    *KL,
    *ACCUMULATION,
    *SHARING,
)
"""All rows but those for a loss of the user's own."""


def _for_own(*rows: Needed) -> tuple[Needed, ...]:
    """Return rows on losses of ours as they hold for one of the user's own, too."""
    return tuple(replace(row, when=row.when.replace("loss!=custom and ", "")) for row in rows)


OWN_AT_ONCE = _for_own(_NOTHING_TO_LEARN, _TEACHES_ITSELF)
"""Rows for an own loss that has no gradient without advantages where the policy is the one that
sampled."""

OWN_LATER = _for_own(_TOP_ENTROPY_OF_NOTHING, _CORRECTS_NOTHING)
"""Rows for an own loss that has none where the policy has moved, either."""

OWN_WITHOUT_REWARDS = _for_own(
    _LENGTH_WITHOUT_REWARD, *_SHAPE_WITHOUT_REWARDS, *_SIGNAL_WITHOUT_REWARDS
)
"""Rows for an own loss that is not given the rewards."""

OWN_OF_GROUPS = (replace(_GROUP_OF_ONE, when="loss=custom"),)
"""Rows for an own loss that reads what other completions of a prompt have."""

ONLY_IF: Mapping[str, Declared] = {
    "rollout.overlong_buffer": {
        "only_if": "advantage.estimator!=max_rl",
        "use": "advantage=grpo",
        "why": "Rewards become negative, by whose mean max_rl would divide.",
    },
    "rollout.uninformative": {
        "only_if": "rollout.lag=0 and rollout.max_staleness=null and rollout.max_sampling_rounds=1 "
        "and accumulation.last_step!=drop",
        "use": "rollout.lag=0 and rollout.max_staleness=null and rollout.max_sampling_rounds=1 and "
        "accumulation.last_step=short",
        "why": "How many documents a batch has is known only once it is scored, and further rounds "
        "replace them.",
    },
    "rollout.passes": {
        "only_if": "accumulation.last_step!=carry",
        "use": "accumulation.last_step=short",
        "why": "A step with documents of two batches would belong to a pass over each.",
    },
    "rollout.lag": {
        "only_if": "rollout.max_staleness=null and accumulation.docs_per_step!=0",
        "use": "rollout.max_staleness=null and accumulation=dynamic",
    },
    "rollout.max_staleness": {
        "only_if": "accumulation.docs_per_step!=0 and rollout.old_log_probs!=training and "
        "accumulation.last_step!=carry",
        "use": "accumulation=dynamic and rollout.old_log_probs=sampling and "
        "accumulation.last_step=short",
        "why": "A batch is sampled while the one before is trained: then the weights that wrote it "
        "are gone.",
    },
    "rollout.too_long": {
        "only_if": "advantage.estimator=given",
        "why": "The advantages of a group change if one of its completions is left out.",
    },
    "kl.reference_prompt": {
        "only_if": "kl.kind!=none and kl.reference!=recorded and rollout.name=policy and "
        "parallelism.sequence_data_parallel=1",
        "use": "kl=k3 and kl.reference=initial and rollout=policy and "
        "parallelism.sequence_data_parallel=1",
        "why": "A second model reads it in front of sampled completions, on ranks that hold whole "
        "documents.",
    },
    "kl.target": {
        "only_if": "kl.kind!=none and rollout.name=policy",
        "use": "kl=k3 and rollout=policy",
        "why": "It is compared with the KL of a batch of rollouts.",
    },
}
"""Key -> the condition on keys of other groups without which it has no effect; see `Key`."""

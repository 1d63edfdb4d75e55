"""Conditions and defaults of keys that depend on keys of other groups.

A part's settings declare what holds within their own group. A row here adds what depends on others.
"""

from __future__ import annotations

from collections.abc import Mapping

from pgtoolkit.config.defaults import ByCondition, ByScores, ByWeights, Computed, SameAs
from pgtoolkit.rollouts.rules import ONLY_IF
from pgtoolkit.system.declared import Declared

ASKED = "rollout.name=policy or evaluation.every>0"
"""The condition under which a run asks the prompts of its task."""

_ONLY_ASKED: Declared = {"only_if": ASKED}
_NEEDS_TEMPLATE: Declared = {
    "only_if": "model.name=huggingface and task.chat!=never",
    "use": "model=huggingface and task.chat=auto",
}
_NEEDS_TOKENIZER: Declared = {
    "only_if": "model.name=huggingface",
    "why": "The tiny model has no chat template.",
}
_TRUNCATED = "rollout.top_p!=null and rollout.top_p!=1 or rollout.top_k!=null"
_SAMPLES_AHEAD: Declared = {"fixed_if": "rollout.lag>0 or rollout.max_staleness>0"}

CONDITIONS: Mapping[str, Declared] = {
    **ONLY_IF,
    "loss.num_splits": {
        "only_if": "kernel.implementation!=fused_linear",
        "use": "kernel=torch",
        "why": "The fused head makes its own pieces.",
    },
    "kl.place": {
        "only_if": "kl.kind!=none and rollout.name=policy",
        "use": "kl=k1 and rollout=policy",
        "why": "The penalty is subtracted from the rewards as they are made.",
    },
    "kernel.logits_memory_mb": {
        "only_if": "kernel.implementation=auto and loss.num_splits=1 or "
        "kernel.implementation=fused_linear",
    },
    "accumulation.docs_per_step": _SAMPLES_AHEAD,
    "accumulation.last_step": _SAMPLES_AHEAD,
    "model.lora_rank": {
        "only_if": "model.random_weights=false and parallelism.tensor_parallel=1 and "
        "parallelism.pipeline_parallel=1",
        "why": "LoRA adds adapters to the undivided matrices of a pretrained model, and stores the "
        "adapters alone.",
    },
    "task/reverse.num_digits": _ONLY_ASKED,
    "task/sums.num_terms": _ONLY_ASKED,
    "task/sums.num_digits": _ONLY_ASKED,
    "task/guess.numbers": _ONLY_ASKED,
    "task/guess.max_turns": _ONLY_ASKED,
    "task.system_prompt": _NEEDS_TEMPLATE,
    "task.chat_arguments": _NEEDS_TEMPLATE,
    "rollout.retire_at": {
        "only_if": "task.path!=null or task.name=reasoning_gym",
        "use": "task=prompts",
        "why": "Prompts of a generator never come back.",
    },
    "sampler.keep_top": {"learns": f"loss.score_centering=true or {_TRUNCATED}"},
    "rollout.chat": _NEEDS_TOKENIZER,
    "rollout.trained_turns": _NEEDS_TOKENIZER,
    # A pass that ends the run makes a short step of documents that the next pass would get.
    "rollout/recorded.epochs": {
        "last_counts": "accumulation.docs_per_step>0 and accumulation.last_step!=carry"
    },
    "trainer.max_steps": {"last_counts": "optimizer.schedule=constant"},
    "trainer.stop_at": {
        "only_if": "evaluation.every>0 and evaluation.best!=null",
        "use": "evaluation.every=20 and evaluation.best=pass@1",
    },
}
"""Key, or key of an option, -> what holds for it by keys of other groups; see `Key`."""

DEFAULTS: Mapping[str, Computed] = {
    "optimizer.learning_rate": ByWeights(random=1e-3, trained=1e-6, adapters=1e-5),
    "critic.learning_rate": ByWeights(random=1e-3, trained=1e-5),
    "accumulation.max_tokens": ByWeights(random=512, trained=4096),
    "rollout/policy.max_completion_length": ByWeights(random=7, trained=256),
    "sampler.keep_top": ByCondition(
        (
            ("loss.score_centering=true and rollout.name=policy", 32),
            ("rollout.top_p!=null and rollout.top_p!=1", 32),
            ("rollout.top_k!=null", 32),
        ),
        0,
    ),
    "sampler.answer_seconds": SameAs("parallelism.timeout_seconds"),
    "evaluation.best": ByScores(),
}
"""Key, or key of an option, -> its default, which follows other groups. In Python such a key has to
be given, or has the default that holds without the other groups."""

CHANGES: Mapping[str, Mapping[str, Computed]] = {
    "aggregation/constant": {"divisor": SameAs("rollout.max_completion_length")},
}
"""Option -> the values that it changes, which follow other groups."""

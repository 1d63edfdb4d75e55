"""Counts that follow from a configuration: tokens of a document, documents of a step, steps of a
batch, how early a batch is sampled, and by how many processes."""

from __future__ import annotations

from typing import NamedTuple

from pgtoolkit.config.schema import Config
from pgtoolkit.rollouts.batch_counts import documents_per_batch, steps_of
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.tasks.settings import GeneratedTaskSettings

POSITIONS = {
    "tiny": "model.max_positions=",
    "huggingface": "a model.path with max_position_embeddings >= ",
}
"""Option of the group `model` -> what gives it positions for longer documents, see
`limits_of_documents`."""


class ReadPrompts(NamedTuple):
    """What the prompts of a run have told that were read before it.

    longest: tokens of the longest one. num_prompts: how many were read. are_all: whether the run
    has no others. vocabulary: the number of tokens of the tokenizer.
    """

    longest: int
    num_prompts: int
    are_all: bool
    vocabulary: int


class ReadDocuments(NamedTuple):
    """What recorded documents have told that were read before a run.

    longest: tokens of the longest one. num_documents: how many were read. are_all: whether the
    files have no others.
    """

    longest: int
    num_documents: int
    are_all: bool


ReadData = ReadPrompts | ReadDocuments


def longest_document(config: Config) -> tuple[int | None, int | None]:
    """Return the tokens (of the prompt, of the completion) of the longest document.

    Each is None where only the data knows it.
    """
    completion = config.rollout.max_completion_length
    if config.rollout.name != "policy":
        return None, completion
    if not isinstance(config.task, GeneratedTaskSettings):
        return getattr(config.task, "max_prompt_length", None), completion
    if config.model.name != "tiny":
        return None, completion
    prompt, answer = config.task.longest
    template = config.kl.reference_prompt
    if template is not None:
        # The tiny model has a token per character; `answer` counts the end of the sequence too.
        reference_prompt = template.format(prompt=" " * prompt, answer=" " * (answer - 1))
        prompt = max(prompt, len(reference_prompt))
    return prompt, completion


def tokens_at_least(config: Config) -> int:
    """Return the fewest tokens that the longest document can have.

    Where the limit of completions cuts off the longest answer, which is refused, the answer counts.
    """
    prompt, completion = longest_document(config)
    counts_characters = config.model.name == "tiny" and config.rollout.name == "policy"
    if counts_characters and isinstance(config.task, GeneratedTaskSettings):
        completion = max(completion or 1, config.task.longest[1])
    return (prompt or 1) + (completion or 1)


def limits_of_documents(
    config: Config, positions: int | None, is_trained: bool = True
) -> dict[str, int]:
    """Return what bounds the tokens of a document, in words that a number completes to what raises
    it -> its tokens.

    positions: those of the model; None where it does not say. is_trained: or only sampled.
    """
    limits = {}
    if positions is not None:
        limits[POSITIONS[config.model.name]] = positions
    if is_trained or positions is None or config.sampler.name == "vllm":
        limits["accumulation.max_tokens="] = config.accumulation.max_tokens
    return limits


def documents_per_step(config: Config) -> int:
    """Return the most documents of a step; 0 where a step is a number of micro-batches."""
    docs_per_step = config.accumulation.docs_per_step
    batch_size = documents_per_batch(config.rollout)
    if batch_size is None or config.accumulation.last_step == "carry":
        return docs_per_step
    return min(docs_per_step, batch_size)


def documents_sampled(config: Config) -> int:
    """Return the most documents that the steps of a run train for the first time; 0 where a step is
    a number of micro-batches."""
    documents = documents_per_step(config)
    steps = config.trainer.max_steps
    rollout = config.rollout
    accumulation = config.accumulation
    if not documents or accumulation.last_step == "carry":
        return steps * documents
    if not isinstance(rollout, PolicyRolloutSettings):
        return steps * documents
    of_batch = rollout.prompts_per_batch * rollout.group_size
    per_pass = steps_of(of_batch, accumulation)
    of_pass = min(of_batch, per_pass * documents)
    # With last_step=drop a batch below docs_per_step makes no step, which is refused elsewhere.
    batches, rest = divmod(steps, max(1, rollout.passes * per_pass))
    return batches * of_pass + min(rest * documents, of_pass)


def samples_async(config: Config) -> bool:
    """Return whether the process that makes the updates samples completions during them."""
    is_ahead = getattr(config.rollout, "max_staleness", None) is not None
    return config.sampler.name == "transformers" and is_ahead and not copies_of(config)


def copies_of(config: Config) -> list[int]:
    """Return the GPU of each process that samples from a copy of the weights, or its number on the
    CPU; empty without such processes."""
    sampler = config.sampler
    return sampler.copies if isinstance(sampler, TransformersSamplerSettings) else []

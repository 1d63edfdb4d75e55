"""Decides whether a run compiles parts of its model: only if it is long enough to pay for that."""

from __future__ import annotations

from pgtoolkit.config.counts import documents_per_step, longest_document
from pgtoolkit.config.models import sizes
from pgtoolkit.config.schema import Config
from pgtoolkit.ranks.environment import world_size

_OPERATIONS_PER_SECOND = 3e14
"""Of an update, as measured on an H200, with 8 operations for each weight and token."""

_SAVED_SHARE = 0.2
"""The share of the updates' time that compiled code saves at least."""

_SECONDS_TO_COMPILE = 10
"""What compiling takes where nothing is cached."""


def compilation(config: Config, on_gpu: bool) -> tuple[bool, str]:
    """Return whether the model is compiled, and the reason in words."""
    if config.model.compile != "auto":
        return config.model.compile, "as configured"
    if not on_gpu:
        return False, "since only a GPU gains by it"
    model_sizes = sizes(config.model)
    if model_sizes is None:
        return False, "since this is no model whose type and sizes are known from a folder"
    tokens = _tokens_per_step(config)
    operations = 8 * model_sizes.weights * tokens * config.trainer.max_steps
    seconds = operations / _OPERATIONS_PER_SECOND / world_size(config.parallelism)
    pays = _SAVED_SHARE * seconds > _SECONDS_TO_COMPILE
    return pays, (
        f"since {100 * _SAVED_SHARE:.0f} % of about {seconds:.3g} s of updates, each of up to "
        f"{tokens} tokens, is {'more' if pays else 'less'} than the {_SECONDS_TO_COMPILE} s that "
        "compiling may take"
    )


def _tokens_per_step(config: Config) -> int:
    """Return the most tokens of a step. A document of unknown length fills a micro-batch."""
    max_tokens = config.accumulation.max_tokens
    document = sum(tokens or 0 for tokens in longest_document(config)) or max_tokens
    documents = documents_per_step(config)
    if documents:
        return documents * min(max_tokens, document)
    micro_batches = config.accumulation.micro_batches_per_step
    assert micro_batches is not None  # `validate` refuses a step without a size
    return micro_batches * max_tokens

"""Whether the body of the model is compiled: what model.compile=auto chooses, and why."""

from __future__ import annotations

from pgtoolkit.config.models import MODEL_TYPES, sizes
from pgtoolkit.config.plan import documents_per_step, longest_document
from pgtoolkit.config.schema import Config, ModelConfig
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.report import Report

_RATE = 3e14
"""Operations a second of an update, as measured on an H200: 8 a weight and token."""

_SAVED, _COST = 0.2, 10
"""Which part of the updates' time is saved at least; the seconds that compiling takes where nothing is cached."""


def compilation(c: Config, on_gpu: bool) -> tuple[bool, str]:
    """Whether it is compiled, and the reason in words."""
    if c.model.compile != "auto":
        return c.model.compile, "as configured"
    if not on_gpu:
        return False, "since it pays on a GPU alone"
    if (shape := sizes(c.model)) is None:
        return False, "since this is no model whose type and sizes are known from a folder"
    room = c.accumulation.max_tokens
    tokens = documents_per_step(c) * min(room, sum(x or 0 for x in longest_document(c)) or room)
    tokens = tokens or c.accumulation.micro_batches_per_step * room
    seconds = 8 * shape.weights * tokens * c.trainer.max_steps / _RATE / world_size(c.parallelism)
    compares = "more" if (pays := _SAVED * seconds > _COST) else "less"
    return pays, (
        f"since {100 * _SAVED:.0f} % of about {seconds:.3g} s of updates, each of up to {tokens} tokens, is {compares} "
        f"than the {_COST} s that compiling may take"
    )


def refuse_unknown(model: ModelConfig, kind: str | None, report: Report) -> None:
    """A model that is to be compiled and whose parts are not known; kind: its type, None if that is not known yet."""
    if model.compile is True and kind not in (None, *MODEL_TYPES):
        needs, reason = f"a model of type {', '.join(MODEL_TYPES)}", "The parts of other models are not known."
        report.refuse("model.compile=true", needs, kind, reason, "model.compile=auto")

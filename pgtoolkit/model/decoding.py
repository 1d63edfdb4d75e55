"""Completions token by token over a cache of fixed size; on a GPU each token is a replay of one
CUDA graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from pgtoolkit.model.architectures import Layer, is_known
from pgtoolkit.model.compiled import turned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pgtoolkit_decoding"
"""What transformers calls `attention`, while a model decodes."""

_PROMPT_TOKENS = 65536
"""Padded tokens of prompts that pass the model at once: bounds the memory of its activations."""

_CHECK_EVERY = 32
"""Tokens between two looks, for which the host waits, at how many rows are still unfinished."""

_GRAPH_PAYS = 16
"""Tokens from which on capturing a graph takes less time than it saves."""


def can_decode(model: PreTrainedModel) -> bool:
    """Whether `Decoding` computes what this transformers model does.

    Its attention must be known to be ordinary, and its rotary positions may not depend on the
    length so far.
    """
    rotary = getattr(model.config, "rope_parameters", None) or {}
    return is_known(model) and rotary.get("rope_type", "default") not in ("dynamic", "longrope")


@contextlib.contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """The model's attention is that of this file meanwhile."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before or "sdpa")


class Cache:
    """Keys and values of each layer for B rows of at most `room` tokens; a token's place is its
    position.

    positions: (B,) int64, of the tokens that pass the model next. reading: while prompts are read,
        the rows that have
    one of them, and which of them each has, both (R,) int64; None once each row goes on by a token
    at a time.
    """

    def __init__(self, positions: Tensor, room: int):
        self.positions = positions
        self.reading: tuple[Tensor, Tensor] | None = None
        self._room = room
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, key-value heads, room, width)."""
        return self._kept[layer]

    def read(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep key and value, (prompts, heads, P, width), from the first token on, for each row of
        a prompt."""
        if layer not in self._kept:
            shape = (len(self.positions), key.shape[1], self._room, key.shape[3])
            self._kept[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        assert self.reading is not None
        rows, prompt_of = self.reading
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[rows, :, : new.shape[2]] = new[prompt_of]

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all but these rows, (fewer,) int64."""
        self.positions = self.positions[rows]
        for layer, kept in self._kept.items():
            keys, values = kept
            self._kept[layer] = (keys[rows], values[rows])


def attention(
    module: Layer, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options
) -> tuple[Tensor, None]:
    """(B, S, heads, width) from query (B, heads, S, width), key and value (B, key-value heads, S,
    width).

    transformers calls this in each layer. options: `decoder_cache`, and its own `scaling` and
        `sliding_window` (how
    many keys a query sees at most, itself among them); of a `MergedBody` also `turns`, the cosines
    and sines, (B, S, width) each, by which query and key are still to be turned.
    """
    cache: Cache = options["decoder_cache"]
    turns = options.get("turns")
    rows, heads, length, width = query.shape
    scaling, window = options.get("scaling") or width**-0.5, options.get("sliding_window")
    if turns is not None and (cache.reading is not None or not query.is_cuda):
        query, key = turned(query, key, *turns)
        turns = None
    if cache.reading is not None:
        # Prompts are padded on the right: causality alone keeps the padding out of sight.
        cache.read(module.layer_idx, key, value)
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        causal = window is None or window >= length
        mask = None if causal else _seen(torch.arange(length, device=query.device), length, window)
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
    keys, values = cache.of(module.layer_idx)
    given = (query, key, value, keys, values, cache.positions, scaling, window)
    if query.is_cuda:
        from pgtoolkit.kernels.triton_attention import attend

        out = attend(*given, turns)
    else:
        out = _attend(*given)
    return out.reshape(rows, 1, heads, width), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
) -> Tensor:
    """What `triton_attention.attend` does, in PyTorch; waits for the device."""
    rows, length = torch.arange(len(positions), device=positions.device), int(positions.max()) + 1
    keys[rows, :, positions], values[rows, :, positions] = key[:, :, 0], value[:, :, 0]
    # The queries that share a key stand side by side as if they were tokens: no copy of a key for
    # each.
    grouped = query.reshape(len(rows), keys.shape[1], -1, query.shape[3])
    keys, values = keys[:, :, :length], values[:, :, :length]
    mask = _seen(positions, length, window)[:, None, None]
    return functional.scaled_dot_product_attention(
        grouped, keys, values, mask, scale=scaling
    ).reshape(query.shape)


def _seen(positions: Tensor, length: int, window: int | None) -> Tensor:
    """(queries, length) bool: which places a query at each of these positions sees."""
    places = torch.arange(length, device=positions.device)
    seen = places <= positions[:, None]
    return seen if window is None else seen & (places > positions[:, None] - window)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all graphs: cuBLAS keeps a workspace for each stream that it has seen.
    return torch.cuda.Stream(device)


def _captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """As `torch.cuda.graph` does, but that the allocator keeps its free memory, which is needed
    again at once."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(_capture_stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
    return graph


@dataclass
class Decoding:
    """One completion of each prompt by a model that `decoding` has prepared.

    model: its body gives hidden states, unless `body` does, given tokens, positions and the cache
        (`MergedBody`).
    logits: of hidden states (B, H). draw: tokens (B,) int64 and their log-probs,
    (B,) float32, of logits and numbers (B,) of `uniform`, for which on a GPU it may not wait; or
    the temperature by
    which the Triton kernel draws. uniform: (prompts, max_tokens), for each token that may be drawn.
        check: may raise
    between tokens. ends: (E,) int64, the tokens that end a completion. stopped: which rows have
        ended otherwise, (B,)
    bool, given the tokens of all rows so far, (B, C), and how many of them are new since it was
    last asked. Rows that
    have ended are computed on until half of all have: then they are dropped.

    Equal prompts pass the model once. A row's keys, values and first logits are those of its
    prompt, so that equal prompts differ by what is drawn for them alone; which others are read or
    go on beside a row changes its rounding.
    """

    model: PreTrainedModel
    logits: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | float
    uniform: Tensor
    check: Callable[[], None]
    ends: list[int]
    stopped: Callable[[Tensor, int], Tensor] | None = None
    body: Callable[[Tensor, Tensor, Cache], Tensor] | None = None

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], max_tokens: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs, (B, max_tokens); what follows a completion's end, or 0, is to be
        left out."""
        self._begin(prompts, max_tokens)
        while self._done < max_tokens and len(self._rows):
            self._go_on(max_tokens)
        return self.tokens, self.log_probs

    def _begin(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Reads each prompt once, and draws the first token of each completion."""
        device, longest = self.model.device, max(map(len, prompts))
        numbers: dict[tuple[int, ...], int] = {}
        prompt_of = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in numbers])
        ends = torch.tensor([len(prompt) - 1 for prompt in numbers], device=device)
        prompt_of = torch.tensor(prompt_of, device=device)
        self._cache = Cache(ends[prompt_of], longest + max_tokens)
        size, last = max(1, _PROMPT_TOKENS // longest), []
        for start in range(0, len(numbers), size):
            tokens = padded[start : start + size].to(device)
            rows = ((prompt_of >= start) & (prompt_of < start + size)).nonzero()[:, 0]
            self._cache.reading = (rows, prompt_of[rows] - start)
            hidden = self._hidden(tokens, torch.arange(longest, device=device).expand_as(tokens))
            last.append(
                hidden[torch.arange(len(tokens), device=device), ends[start : start + size]]
            )
        self._cache.reading = None
        self.tokens = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(prompts), max_tokens, device=device)
        self._rows = torch.arange(len(prompts), device=device)
        self._offsets = self._rows * max_tokens - self._cache.positions
        self._next = torch.zeros_like(prompt_of)
        self._finished = torch.zeros_like(prompt_of, dtype=torch.bool)
        self._done = self._asked = 0
        self._take(self.logits(torch.cat(last))[prompt_of])
        self._done = 1

    def _go_on(self, max_tokens: int) -> None:
        """Further tokens: all, or until half of the rows have ended, which are then dropped."""
        step, graph = self._step, None
        if self.model.device.type == "cuda" and max_tokens - self._done >= _GRAPH_PAYS:
            self._step()  # as the first use of a kernel may not be captured
            self._done += 1
            graph = _captured(self._step, self.model.device)
            step = graph.replay
        while self._done < max_tokens:
            self.check()
            count = min(_CHECK_EVERY, max_tokens - self._done)
            for _ in range(count):
                step()
            self._done += count
            going = (~self._have_ended()).nonzero()[:, 0]
            if 2 * len(going) <= len(self._rows):
                self._cache.keep_rows(going)
                self._rows, self._offsets = self._rows[going], self._offsets[going]
                self._next, self._finished = self._next[going], self._finished[going]
                break
        if graph is not None:
            graph.reset()

    def _have_ended(self) -> Tensor:
        """(rows,) bool, by the tokens since it was last asked, too."""
        written, new = self.tokens[self._rows, : self._done], self._done - self._asked
        ends = torch.tensor(self.ends, dtype=torch.int64, device=written.device)
        self._finished |= torch.isin(written[:, self._asked :], ends).any(-1)
        if self.stopped is not None:
            self._finished |= self.stopped(written, new)
        self._asked = self._done
        return self._finished

    def _step(self) -> None:
        """One token of each row: what the graph holds, so that nothing in it waits for the
        device."""
        self._take(
            self.logits(self._hidden(self._next[:, None], self._cache.positions[:, None])[:, 0])
        )

    def _take(self, logits: Tensor) -> None:
        """Draw a token of each row, by one kernel where that can be."""
        positions = self._cache.positions
        if isinstance(self.draw, float):
            from pgtoolkit.kernels.triton_draw import draw_next

            written = self.tokens, self.log_probs, self._offsets, positions, self._next
            draw_next(logits, self.uniform.view(-1), self.draw, *written)
            return
        assert not isinstance(self.draw, int)
        at = self._offsets + positions
        tokens, log_probs = self.draw(logits, self.uniform.view(-1)[at])
        self.tokens.view(-1).index_copy_(0, at, tokens)
        self.log_probs.view(-1).index_copy_(0, at, log_probs)
        self._next.copy_(tokens)
        positions += 1

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.body is not None:
            return self.body(tokens, positions, self._cache)
        # transformers hands an argument that it does not know on to `attention`; its own `cache` it
        # would update.
        outputs = self.model.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, decoder_cache=self._cache
        )
        return outputs.last_hidden_state

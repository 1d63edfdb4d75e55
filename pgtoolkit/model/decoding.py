"""Completions token by token over a cache of fixed size; on a GPU each token is a replay of one
CUDA graph.

Axes: B rows (completions), S tokens that pass the model at once, C tokens of a completion so far, H
hidden size.
"""

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
"""The name of `attention` in transformers, while a model decodes."""

_PROMPT_TOKENS = 65536
"""Most padded tokens of prompts that pass the model at once, which bounds the memory of its
activations."""

_CHECK_EVERY = 32
"""Tokens between two counts of the unfinished rows, for which the host waits."""

_GRAPH_PAYS = 16
"""Tokens from which on a graph saves more time than its capture takes."""


def can_decode(model: PreTrainedModel) -> bool:
    """Return whether `Decoding` computes the same as this transformers model.

    Its attention must be known to be ordinary, and its rotary positions may not depend on the
    length so far.
    """
    rotary = getattr(model.config, "rope_parameters", None) or {}
    return is_known(model) and rotary.get("rope_type", "default") not in ("dynamic", "longrope")


@contextlib.contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, the model's attention is that of this file."""
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

    positions: (B,) int64, of the tokens that pass the model next.
    reading: while prompts are read, the rows that have one of these prompts, and the number of the
        prompt of each, both (R,) int64; None while each row goes on by a token at a time.
    """

    def __init__(self, positions: Tensor, room: int):
        self.positions = positions
        self.reading: tuple[Tensor, Tensor] | None = None
        self._room = room
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, (B, key-value heads, room, width) each."""
        return self._kept[layer]

    def read(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values of prompts' tokens for each row that has one of the prompts.

        key, value: (prompts, key-value heads, P, width).
        """
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
    """Return attention's output (B, S, heads, width).

    query: (B, heads, S, width). key, value: (B, key-value heads, S, width).
    options: `decoder_cache`, and transformers' `scaling` and `sliding_window` (the number of keys
        that a query sees at most, its own among them). From a `MergedBody` also `turns`, cosines
        and sines, (B, S, width) each, by which query and key are still to be turned.
    transformers calls this in each layer.
    """
    cache: Cache = options["decoder_cache"]
    turns = options.get("turns")
    rows, heads, length, width = query.shape
    scaling = options.get("scaling") or width**-0.5
    window = options.get("sliding_window")
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
    arguments = (query, key, value, keys, values, cache.positions, scaling, window)
    if query.is_cuda:
        from pgtoolkit.kernels.triton_attention import attend

        out = attend(*arguments, turns)
    else:
        out = _attend(*arguments)
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
    """Do the same as `triton_attention.attend` in PyTorch; waits for the device."""
    rows = torch.arange(len(positions), device=positions.device)
    length = int(positions.max()) + 1
    keys[rows, :, positions] = key[:, :, 0]
    values[rows, :, positions] = value[:, :, 0]
    # Queries that share a key are laid side by side like tokens, so that no key is copied.
    grouped = query.reshape(len(rows), keys.shape[1], -1, query.shape[3])
    keys = keys[:, :, :length]
    values = values[:, :, :length]
    mask = _seen(positions, length, window)[:, None, None]
    return functional.scaled_dot_product_attention(
        grouped, keys, values, mask, scale=scaling
    ).reshape(query.shape)


def _seen(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return (queries, length) bool: whether a query at each of these positions sees a place."""
    places = torch.arange(length, device=positions.device)
    seen = places <= positions[:, None]
    return seen if window is None else seen & (places > positions[:, None] - window)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # All graphs share a stream: cuBLAS keeps a workspace for each stream that it has seen.
    return torch.cuda.Stream(device)


def _captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture a step as `torch.cuda.graph` does, except that the allocator keeps its free memory,
    which is needed again at once."""
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
    """Samples a completion of each prompt by a model that `decoding` has prepared.

    model: gives hidden states, unless `body` does.
    logits: returns the logits of hidden states (B, H).
    draw: returns tokens (B,) int64 and their log-probs (B,) float32, given logits and numbers (B,)
        of `uniform`; on a GPU it may not wait for the device. Or the temperature by which the
        Triton kernel draws.
    uniform: (prompts, max_tokens), a number for each token that may be drawn.
    check: may raise an error between tokens.
    ends: token ids that end a completion.
    stopped: returns which rows have ended otherwise, (B,) bool, given the tokens of all rows so
        far, (B, C), and the number of those that are new since the last call.
    body: returns hidden states, given tokens, positions and the cache (`MergedBody`).

    Rows that have ended are still computed until half of all rows have; then they are dropped.
    Equal prompts pass the model once, and a row's keys, values and first logits are those of its
    prompt. So rows of equal prompts differ only by their random numbers. The other rows that are
    computed with a row change its rounding.
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
        """Return tokens and log-probs, (B, max_tokens) each; those behind the end of a completion
        are to be left out."""
        self._read_prompts(prompts, max_tokens)
        while self._done < max_tokens and len(self._rows):
            self._continue(max_tokens)
        return self.tokens, self.log_probs

    def _read_prompts(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Read each distinct prompt once, and draw the first token of each completion."""
        device = self.model.device
        longest = max(map(len, prompts))
        numbers: dict[tuple[int, ...], int] = {}
        prompt_of = [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts]
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in numbers])
        ends = torch.tensor([len(prompt) - 1 for prompt in numbers], device=device)
        prompt_of = torch.tensor(prompt_of, device=device)
        self._cache = Cache(ends[prompt_of], longest + max_tokens)
        size = max(1, _PROMPT_TOKENS // longest)
        last: list[Tensor] = []
        for start in range(0, len(numbers), size):
            tokens = padded[start : start + size].to(device)
            rows = ((prompt_of >= start) & (prompt_of < start + size)).nonzero()[:, 0]
            self._cache.reading = (rows, prompt_of[rows] - start)
            hidden = self._hidden(tokens, torch.arange(longest, device=device).expand_as(tokens))
            prompt_ends = ends[start : start + size]
            last.append(hidden[torch.arange(len(tokens), device=device), prompt_ends])
        self._cache.reading = None
        self.tokens = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(prompts), max_tokens, device=device)
        self._rows = torch.arange(len(prompts), device=device)
        self._offsets = self._rows * max_tokens - self._cache.positions
        self._next = torch.zeros_like(prompt_of)
        self._finished = torch.zeros_like(prompt_of, dtype=torch.bool)
        self._done = 0  # tokens of each completion so far
        self._checked = 0  # those of them that `_have_ended` has seen
        self._draw_tokens(self.logits(torch.cat(last))[prompt_of])
        self._done = 1

    def _continue(self, max_tokens: int) -> None:
        """Sample further tokens, until half of the rows have ended; then drop these rows."""
        step = self._step
        graph = None
        if self.model.device.type == "cuda" and max_tokens - self._done >= _GRAPH_PAYS:
            self._step()  # the first use of a kernel may not be captured
            self._done += 1
            graph = _captured(self._step, self.model.device)
            step = graph.replay
        while self._done < max_tokens:
            self.check()
            count = min(_CHECK_EVERY, max_tokens - self._done)
            for _ in range(count):
                step()
            self._done += count
            unfinished = (~self._have_ended()).nonzero()[:, 0]
            if 2 * len(unfinished) <= len(self._rows):
                self._cache.keep_rows(unfinished)
                self._rows = self._rows[unfinished]
                self._offsets = self._offsets[unfinished]
                self._next = self._next[unfinished]
                self._finished = self._finished[unfinished]
                break
        if graph is not None:
            graph.reset()

    def _have_ended(self) -> Tensor:
        """Return (rows,) bool: whether a row has ended, by its tokens up to now."""
        written = self.tokens[self._rows, : self._done]
        new = self._done - self._checked
        ends = torch.tensor(self.ends, dtype=torch.int64, device=written.device)
        self._finished |= torch.isin(written[:, self._checked :], ends).any(-1)
        if self.stopped is not None:
            self._finished |= self.stopped(written, new)
        self._checked = self._done
        return self._finished

    def _step(self) -> None:
        """Sample a token of each row. The graph captures this, so nothing in it waits for the
        device."""
        hidden = self._hidden(self._next[:, None], self._cache.positions[:, None])
        self._draw_tokens(self.logits(hidden[:, 0]))

    def _draw_tokens(self, logits: Tensor) -> None:
        """Draw a token of each row, by one kernel where `draw` is a temperature."""
        positions = self._cache.positions
        if isinstance(self.draw, float):
            from pgtoolkit.kernels.triton_draw import draw_next

            written = self.tokens, self.log_probs, self._offsets, positions, self._next
            draw_next(logits, self.uniform.view(-1), self.draw, *written)
            return
        assert not isinstance(self.draw, int)
        places = self._offsets + positions
        tokens, log_probs = self.draw(logits, self.uniform.view(-1)[places])
        self.tokens.view(-1).index_copy_(0, places, tokens)
        self.log_probs.view(-1).index_copy_(0, places, log_probs)
        self._next.copy_(tokens)
        positions += 1

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.body is not None:
            return self.body(tokens, positions, self._cache)
        # transformers hands arguments that it does not know, such as decoder_cache, on to
        # `attention`. It would update one that it knows as a cache.
        outputs = self.model.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, decoder_cache=self._cache
        )
        return outputs.last_hidden_state

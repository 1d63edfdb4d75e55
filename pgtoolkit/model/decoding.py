"""Completions token by token over a cache of fixed size; on a GPU each token is a replay of one CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pgtoolkit.model.architectures import is_known

NAME = "pgtoolkit_decoding"
"""What transformers calls `attention`, while a model decodes."""

_PROMPT_TOKENS = 65536
"""Padded tokens of prompts that pass the model at once: bounds the memory of its activations."""

_FIRST_SEGMENT = 256
"""Tokens before the attention looks at twice as many places: each time a new graph is captured."""

_CHECK_EVERY = 32
"""Tokens between two looks, for which the host waits, at how many rows are still unfinished."""

_GRAPH_PAYS = 16
"""Tokens from which on capturing a graph takes less time than it saves."""


def can_decode(model: nn.Module) -> bool:
    """Whether `Decoding` computes what this transformers model does.

    Its attention must be known to be ordinary, and its rotary positions may not depend on the length so far.
    """
    rotary = getattr(model.config, "rope_parameters", None) or {}
    return is_known(model) and rotary.get("rope_type", "default") not in ("dynamic", "longrope")


@contextlib.contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """The model's attention is that of this file meanwhile."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Cache:
    """Keys and values of each layer for B rows of at most `room` tokens; a token's place is its position.

    rows: those whose prompts are read now; None once each row goes on by a token at a time. positions: (B,) int64, of
    these tokens. limit: places that attention looks at, of which those up to a row's own position count.
    """

    def __init__(self, size: int, room: int):
        self.rows: slice | None = None
        self.limit = room
        self._size, self._room = size, room
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._bias: Tensor | None = None

    def read(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep key and value, (rows, heads, P, width), of prompts from their first token on."""
        if layer not in self._kept:
            shape = (self._size, key.shape[1], self._room, key.shape[3])
            self._kept[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[self.rows, :, : new.shape[2]] = new

    def go_on(self, positions: Tensor) -> None:
        """Before a token of each row passes the model: its place counts from now on."""
        if self._bias is None:  # 0 where a key counts, in the type that attention computes in
            places = torch.arange(self._room, device=positions.device)
            bias = torch.where(places < positions[:, None], 0.0, -torch.inf)
            self._bias = bias.to(self._kept[0][0].dtype)[:, None, None]
            self._every_row = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._bias.scatter_(3, positions[:, None, None, None], 0.0)

    def add(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep key and value, (B, heads, 1, width), of the token; returns all, (B, heads, limit, width)."""
        for kept, new in zip(self._kept[layer], (key, value), strict=True):
            kept[self._every_row, :, self._positions] = new[:, :, 0]
        return tuple(kept[:, :, : self.limit] for kept in self._kept[layer])

    def bias(self, window: int | None) -> Tensor:
        """(B, 1, 1, limit), to be added to the products with the keys. window: see `attention`."""
        bias = self._bias[..., : self.limit]
        if window is None:
            return bias
        places = torch.arange(self.limit, device=bias.device)
        return bias.masked_fill(places <= self._positions[:, None, None, None] - window, -torch.inf)

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all but these rows, (fewer,) int64."""
        for layer, kept in self._kept.items():
            self._kept[layer] = tuple(values[rows] for values in kept)
        self._bias, self._every_row = self._bias[rows], self._every_row[: len(rows)]


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options
) -> tuple[Tensor, None]:
    """(B, S, heads, width) from query (B, heads, S, width), key and value (B, key-value heads, S, width).

    transformers calls this in each layer. options: `cache`, and its own `scaling` and `sliding_window` (how many keys a
    query sees at most, itself among them).
    """
    cache: Cache = options["cache"]
    scaling, window = options.get("scaling"), options.get("sliding_window")
    rows, heads, length, width = query.shape
    if cache.rows is not None:
        # Prompts are padded on the right: causality alone keeps the padding out of sight.
        cache.read(module.layer_idx, key, value)
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        mask = None if window is None or window >= length else _in_window(length, window, query.device)
        causal = mask is None
        out = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scaling)
    else:
        keys, values = cache.add(module.layer_idx, key, value)
        # The queries that share a key stand side by side as if they were tokens: no copy of a key for each.
        grouped = query.reshape(rows, keys.shape[1], -1, width)
        out = functional.scaled_dot_product_attention(grouped, keys, values, cache.bias(window), scale=scaling)
    return out.reshape(rows, heads, length, width).transpose(1, 2).contiguous(), None


def _in_window(length: int, window: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    return (places <= places[:, None]) & (places > places[:, None] - window)


@dataclass
class Decoding:
    """One completion of each prompt by a model that `decoding` has prepared.

    model: its body gives hidden states. logits: of hidden states (B, H). draw: tokens (B,) int64 and their log-probs,
    (B,) float32, of logits and numbers (B,) of `uniform`; on a GPU it may not wait for the device. uniform: (prompts,
    max_tokens), for each token that may be drawn. check: may raise between tokens. ends: (E,) int64, the tokens that
    end a completion. stopped: which rows have ended otherwise, (B,) bool, given the tokens of all rows so far, (B, C),
    and how many of them are new since it was last asked. Rows that have ended are computed on until half of all have:
    then they are dropped.
    """

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    uniform: Tensor
    check: Callable[[], None]
    ends: list[int]
    stopped: Callable[[Tensor, int], Tensor] | None = None

    def __post_init__(self):
        self._device = self.model.device
        self._ends = torch.tensor(self.ends, dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], max_tokens: int) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs, (B, max_tokens); what follows a completion's end, or 0, is to be left out."""
        self._begin(prompts, max_tokens)
        segment = done = 1
        self._asked = 0
        while done < max_tokens and len(self._rows):
            if done == segment:  # attention looks at places that are twice as many
                segment = min(max(_FIRST_SEGMENT, 2 * segment), max_tokens)
                self._cache.limit = min(_rounded(self._longest + segment), self._room)
            done += self._go_on(segment - done)
        return self.tokens, self.log_probs

    def _begin(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Reads the prompts and draws the first token of each completion."""
        count, self._longest = len(prompts), max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        padded = torch.tensor([prompt + [0] * (self._longest - len(prompt)) for prompt in prompts])
        self.tokens = torch.zeros(count, max_tokens, dtype=torch.int64, device=self._device)
        self.log_probs = torch.zeros(count, max_tokens, device=self._device)
        self._rows = torch.arange(count, device=self._device)
        self._place = torch.zeros((), dtype=torch.int64, device=self._device)
        self._positions = lengths - 1
        self._next = torch.zeros_like(lengths)
        self._finished = torch.zeros_like(lengths, dtype=torch.bool)
        self._room = _rounded(self._longest + max_tokens)
        self._cache = Cache(count, self._room)
        size, last = max(1, _PROMPT_TOKENS // self._longest), []
        for start in range(0, count, size):
            self._cache.rows = slice(start, min(start + size, count))
            tokens = padded[self._cache.rows].to(self._device)
            hidden = self._hidden(tokens, torch.arange(self._longest, device=self._device).expand_as(tokens))
            ends = self._positions[self._cache.rows]
            last.append(hidden[torch.arange(len(ends), device=self._device), ends])
        self._cache.rows = None
        self._take(torch.cat(last))

    def _go_on(self, most: int) -> int:
        """Up to `most` further tokens, fewer once half of the rows have ended; returns how many."""
        step, graph, done = self._step, None, 0
        if self._device.type == "cuda" and most >= _GRAPH_PAYS:
            self._step()  # as the first use of a kernel may not be captured
            done, graph = 1, torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
            step = graph.replay
        while done < most:
            self.check()
            count = min(_CHECK_EVERY, most - done)
            for _ in range(count):
                step()
            done += count
            if self.stopped is not None:
                so_far = int(self._place)
                self._finished |= self.stopped(self.tokens[self._rows, :so_far], so_far - self._asked)
                self._asked = so_far
            going = (~self._finished).nonzero()[:, 0]
            if 2 * len(going) <= len(self._rows):
                self._cache.keep_rows(going)
                self._rows, self._positions = self._rows[going], self._positions[going]
                self._next, self._finished = self._next[going], self._finished[going]
                break
        if graph is not None:
            graph.reset()
        return done

    def _step(self) -> None:
        """One token of each row: what the graph holds, so that nothing in it waits for the device."""
        self._cache.go_on(self._positions)
        self._take(self._hidden(self._next[:, None], self._positions[:, None])[:, 0])

    def _take(self, hidden: Tensor) -> None:
        where = (self._rows, self._place.expand_as(self._rows))
        tokens, log_probs = self.draw(self.logits(hidden), self.uniform[where])
        self.tokens.index_put_(where, tokens)
        self.log_probs.index_put_(where, log_probs)
        self._finished |= (tokens[:, None] == self._ends).any(-1)
        self._next.copy_(tokens)
        self._positions += 1
        self._place += 1

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        body = self.model.base_model
        return body(input_ids=tokens, position_ids=positions, use_cache=False, cache=self._cache).last_hidden_state


def _rounded(length: int) -> int:
    """To a multiple of 64, as attention's kernels read their bias."""
    return -(-length // 64) * 64

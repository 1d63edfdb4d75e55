"""Samples completions token by token, with a cache of fixed size for keys and values.

On a GPU the step that samples a token of each row is captured as a CUDA graph and replayed.

Axes: B rows (completions), S tokens of a row that pass the model at once, P tokens of the longest
prompt, C tokens of a completion so far, H hidden size.
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

from pgtoolkit.model.architectures import Layer, is_known, rotary_settings
from pgtoolkit.model.compiled import turned
from pgtoolkit.model.mixture import routers, told_of_choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "pgtoolkit_decoding"
"""The name by which transformers knows `attention`."""

_PROMPT_TOKENS = 65536
"""The most tokens of padded prompts that pass the model at once, which bounds the memory of the
model's activations."""

_CHECK_EVERY = 32
"""Tokens between two checks of which rows have ended. The host waits for each check."""

_MIN_TOKENS_FOR_GRAPH = 16
"""The fewest tokens for which a graph saves more time than its capture takes."""


def can_decode(model: PreTrainedModel) -> bool:
    """Return whether `Decoding` computes the same as this transformers model.

    Its architecture must be a known one, and its rotary positions may not depend on the length of
    the text so far.
    """
    kinds = {rotary.get("rope_type") for rotary in rotary_settings(model.config)}
    return is_known(model) and kinds.isdisjoint(("dynamic", "longrope"))


@contextlib.contextmanager
def decoding(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, the model computes its attention by `attention` of this file."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before or "sdpa")


class Cache:
    """Keys and values of each layer for B rows of at most `room` tokens.

    The keys and values of a token lie at the token's position.
    positions: (B,) int64, the position of each row's token that passes the model next.
    prompts: for each row the first row with the same prompt, and the prompt's length, (B,) int64
        each. Both rows have the prompt's keys and values.
    reading: (rows, prompt_of) while some prompts pass the model, (R,) int64 each: the R rows that
        have one of these prompts, and which of the prompts each row has. None while each row goes
        on by a token at a time.
    turns: of a `MergedBody`, for each layer the cosines and sines of all positions, (room, width)
        each.
    """

    _keys_and_values: Tensor
    """(layers, 2, B, key-value heads, room, width), from the first `read` on. In one piece, since
    the driver takes its time for each piece of memory."""

    def __init__(self, prompt_of: Tensor, prompt_lengths: Tensor, room: int, layers: int):
        """Make a cache without keys and values.

        prompt_of: (B,) int64, equal numbers for rows with the same prompt.
        prompt_lengths: (B,) int64.
        layers: the number of layers.
        """
        self.positions = prompt_lengths - 1
        self.reading: tuple[Tensor, Tensor] | None = None
        self.turns: list[tuple[Tensor, Tensor]] | None = None
        self.room = room
        self._layers = layers
        self.prompts = _first_rows(prompt_of, len(prompt_of)), prompt_lengths

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, (B, key-value heads, room, width) each."""
        keys, values = self._keys_and_values[layer]
        return keys, values

    def read(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of prompts in each row that has one of the prompts.

        key, value: (prompts, key-value heads, P, width).
        """
        if not hasattr(self, "_keys_and_values"):
            shape = (len(self.positions), key.shape[1], self.room, key.shape[3])
            self._keys_and_values = key.new_zeros(self._layers, 2, *shape)
        assert self.reading is not None
        rows, prompt_of = self.reading
        for kept, new in zip(self.of(layer), (key, value), strict=True):
            kept[rows, :, : new.shape[2]] = new[prompt_of]

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but these, (fewer,) int64 in ascending order."""
        self.positions = self.positions[rows]
        prompt_rows, prompt_lengths = (x[rows] for x in self.prompts)
        self.prompts = _first_rows(prompt_rows, self._keys_and_values.shape[2]), prompt_lengths
        for part in self._keys_and_values.flatten(end_dim=1):
            part[: len(rows)] = part[rows]
        self._keys_and_values = self._keys_and_values[:, :, : len(rows)]


class Routing:
    """The experts of the tokens of the first completions of a batch, as they were sampled.

    It belongs to one call of `Decoding`.
    chosen: (routers, num_rows + 1, places, k) int64, by the token's position. The last row is that
        of all other completions, and has no meaning.
    """

    chosen: Tensor

    def __init__(self, model: PreTrainedModel, num_rows: int):
        self._model = model
        self._num_rows = num_rows

    def begin(self, cache: Cache) -> None:
        """Begin with the rows of a cache without keys and values."""
        self._cache = cache
        rows = torch.arange(len(cache.positions), device=cache.positions.device)
        self._rows = rows.clamp(max=self._num_rows)
        of_model = routers(self._model)
        shape = (len(of_model), self._num_rows + 1, cache.room, of_model[0].top_k)
        self.chosen = torch.zeros(shape, dtype=torch.int64, device=rows.device)

    def keep_rows(self, rows: Tensor) -> None:
        self._rows = self._rows[rows]

    def tell(self, number: int, chosen: Tensor) -> None:
        """Keep a router's choice for tokens that pass the model. A graph may capture this."""
        cache = self._cache
        by_row = self.chosen[number]
        if cache.reading is None:
            places = self._rows * cache.room + cache.positions
            by_row.flatten(end_dim=1).index_copy_(0, places, chosen)
            return
        rows, prompt_of = cache.reading
        of_prompts = chosen.view(int(prompt_of.max()) + 1, -1, chosen.shape[1])
        by_row[self._rows[rows], : of_prompts.shape[1]] = of_prompts[prompt_of]


def _first_rows(prompt_of: Tensor, count: int) -> Tensor:
    """Return for each row the first row with the same number, (B,) int64.

    prompt_of: (B,) int64, below `count`.
    """
    rows = torch.arange(len(prompt_of), device=prompt_of.device)
    first = rows.new_full((count,), len(rows)).scatter_reduce(0, prompt_of, rows, "amin")
    return first[prompt_of]


def attention(
    module: Layer, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options
) -> tuple[Tensor, None]:
    """Return (attention's output (B, S, heads, width), None). transformers calls it in each layer.

    While prompts are read, B counts prompts and S is P. Otherwise B counts rows and S is 1.
    query: (B, heads, S, width).
    key, value: (B, key-value heads, S, width).
    options: `decoder_cache`, a Cache, to which key and value are added; transformers' `scaling`
        and `sliding_window`, the number of keys that a query sees at most, its own among them.
    """
    cache: Cache = options["decoder_cache"]
    rows, heads, _, width = query.shape
    scaling = options.get("scaling") or width**-0.5
    window = options.get("sliding_window")
    turns = None if cache.turns is None else cache.turns[module.layer_idx]
    if cache.reading is not None:
        if turns is not None:
            query, key = turned(query, key, *(x[None, : query.shape[2]] for x in turns))
        cache.read(module.layer_idx, key, value)
        out = _attend_within_prompts(query, key, value, scaling, window)
        return out.transpose(1, 2).contiguous(), None
    attend = _attend
    if query.is_cuda:
        from pgtoolkit.kernels.triton_attention import attend
    keys, values = cache.of(module.layer_idx)
    out = attend(
        query,
        key,
        value,
        keys,
        values,
        cache.positions,
        scaling,
        window,
        turns=turns,
        prompts=cache.prompts,
    )
    return out.reshape(rows, 1, heads, width), None


def _attend_within_prompts(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Return (prompts, heads, P, width), the attention of the tokens of padded prompts.

    Prompts are padded on the right: causality alone keeps the padding out of sight.
    """
    heads, length = query.shape[1:3]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    causal = window is None or window >= length
    mask = None
    if not causal:
        mask = _visible(torch.arange(length, device=query.device), length, window)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scaling
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None,
    turns: tuple[Tensor, Tensor] | None = None,
    prompts: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Do the same as `triton_attention.attend`, in PyTorch: add a token of each row to the cache,
    and return the attention of these tokens, in the shape of query.

    It waits for the device.
    """
    if turns is not None:
        query, key = turned(query, key, *(x[positions][:, None] for x in turns))
    rows = torch.arange(len(positions), device=positions.device)
    length = int(positions.max()) + 1
    keys[rows, :, positions] = key[:, :, 0]
    values[rows, :, positions] = value[:, :, 0]
    # Queries that share a key are laid side by side like tokens, so that no key is copied.
    grouped = query.reshape(len(rows), keys.shape[1], -1, query.shape[3])
    keys = keys[:, :, :length]
    values = values[:, :, :length]
    mask = _visible(positions, length, window)[:, None, None]
    return functional.scaled_dot_product_attention(
        grouped, keys, values, mask, scale=scaling
    ).reshape(query.shape)


def _visible(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return (queries, length) bool, True where a query sees the key at a place of the cache.

    positions: (queries,) int64, the position of each query.
    length: the number of places, from the first one on.
    """
    places = torch.arange(length, device=positions.device)
    visible = places <= positions[:, None]
    return visible if window is None else visible & (places > positions[:, None] - window)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    # All graphs share a stream: cuBLAS keeps a workspace for each stream that it has seen.
    return torch.cuda.Stream(device)


def _captured(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture a step as a CUDA graph, and return the graph.

    `torch.cuda.graph` would also make the allocator give back its free memory, which is needed
    again at once.
    """
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
    """Samples a completion of each prompt, inside a block of `decoding`.

    model: computes hidden states, unless `body` does.
    logits: returns the logits of hidden states (B, H).
    draw: a function that returns tokens (B,) int64 and their log-probs (B,) float32, given logits
        and numbers (B,) of `uniform`; on a GPU it may not wait for the device. Or a float, the
        temperature at which a Triton kernel draws.
    uniform: (all rows, max_tokens), a random number for each token that may be drawn.
    check: called between tokens; it may raise an error, which ends the sampling.
    ends: token ids that end a completion.
    stopped: returns which rows have ended for another reason, (B,) bool, given the tokens of the
        rows so far, (B, C), and how many of the C tokens are new since the last call.
    body: returns hidden states (B, S, H), given tokens (B, S) and the cache; see `MergedBody`.
    top: returns the likeliest tokens and their log-probs, (B, k) each, given logits, as
        `Completion` has them; it may not wait for the device either. None: they are not asked for.
    routing: is told which experts of a mixture are chosen; None: nobody asks.
    head: the weight of the LM head (V, H), if a kernel may draw from hidden states by it, as it
        would from float32 `logits`.

    Equal prompts pass the model once, and a row's keys, values and first logits are those of its
    prompt. So rows of equal prompts differ only by their random numbers.
    Rows that have ended are still computed until at least half of the rows have ended; then they
    are dropped. B is the number of rows that are left. Which other rows are computed beside a row
    can change its rounding.
    """

    model: PreTrainedModel
    logits: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | float
    uniform: Tensor
    check: Callable[[], None]
    ends: list[int]
    stopped: Callable[[Tensor, int], Tensor] | None = None
    body: Callable[[Tensor, Cache], Tensor] | None = None
    head: Tensor | None = None
    top: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    routing: Routing | None = None

    @torch.no_grad()
    def complete(self, prompts: list[list[int]], max_tokens: int) -> tuple[Tensor, ...]:
        """Return tokens and log-probs, (rows, max_tokens) each, with a row for each prompt.

        With `top` the likeliest tokens and their log-probs follow, (rows, max_tokens, k) each.

        What follows the end of a completion has no meaning.
        """
        listening = contextlib.nullcontext()
        if self.routing is not None:
            listening = told_of_choices(self.model, self.routing.tell)
        with listening:
            self._start(prompts, max_tokens)
            while self._num_drawn < max_tokens and len(self._rows):
                self._continue(max_tokens)
        return self.tokens, self.log_probs, *self._top

    def _start(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Read the prompts, and draw the first token of each completion."""
        logits = self._read_prompts(prompts, max_tokens)
        device = self.model.device
        self.tokens = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(len(prompts), max_tokens, device=device)
        self._top: tuple[Tensor, ...] = ()
        if self.top is not None:
            self._top = tuple(
                x.new_zeros(len(prompts), max_tokens, x.shape[1]) for x in self.top(logits[:1])
            )
        # The rows that are left, by their number in self.tokens.
        self._rows = torch.arange(len(prompts), device=device)
        # With its position so far, where a row's next token belongs in the flat self.tokens.
        self._offsets = self._rows * max_tokens - self._cache.positions
        self._next = torch.zeros_like(self._rows)  # the tokens that pass the model next
        self._finished = torch.zeros_like(self._rows, dtype=torch.bool)
        self._num_drawn = 0  # tokens of each completion so far
        self._num_checked = 0  # those of them that `_have_ended` has seen
        self._draw_tokens(logits)
        self._num_drawn = 1

    def _read_prompts(self, prompts: list[list[int]], max_tokens: int) -> Tensor:
        """Fill a new cache, for which each distinct prompt passes the model once.

        Return the logits after the prompt of each row.
        """
        device = self.model.device
        longest = max(map(len, prompts))
        numbers: dict[tuple[int, ...], int] = {}
        prompt_of = torch.tensor(
            [numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts], device=device
        )
        padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in numbers])
        lengths = torch.tensor([len(prompt) for prompt in numbers], device=device)
        layers = self.model.config.num_hidden_layers
        self._cache = Cache(prompt_of, lengths[prompt_of], longest + max_tokens, layers)
        if self.routing is not None:
            self.routing.begin(self._cache)
        size = max(1, _PROMPT_TOKENS // longest)
        last_hidden: list[Tensor] = []
        for start in range(0, len(numbers), size):
            tokens = padded[start : start + size].to(device)
            rows = ((prompt_of >= start) & (prompt_of < start + size)).nonzero()[:, 0]
            self._cache.reading = (rows, prompt_of[rows] - start)
            hidden = self._hidden(tokens, torch.arange(longest, device=device).expand_as(tokens))
            last = lengths[start : start + size] - 1
            last_hidden.append(hidden[torch.arange(len(tokens), device=device), last])
        self._cache.reading = None
        return self.logits(torch.cat(last_hidden))[prompt_of]

    def _continue(self, max_tokens: int) -> None:
        """Sample further tokens until at least half of the rows have ended; drop the ended ones."""
        step = self._step
        graph = None
        if (
            self.model.device.type == "cuda"
            and max_tokens - self._num_drawn >= _MIN_TOKENS_FOR_GRAPH
        ):
            self._step()  # the first use of a kernel may not be captured
            self._num_drawn += 1
            graph = _captured(self._step, self.model.device)
            step = graph.replay
        while self._num_drawn < max_tokens:
            self.check()
            count = min(_CHECK_EVERY, max_tokens - self._num_drawn)
            for _ in range(count):
                step()
            self._num_drawn += count
            unfinished = (~self._have_ended()).nonzero()[:, 0]
            if 2 * len(unfinished) <= len(self._rows):
                self._keep_rows(unfinished)
                break
        if graph is not None:
            graph.reset()

    def _keep_rows(self, kept: Tensor) -> None:
        """Drop all rows but these, (fewer,) int64."""
        self._cache.keep_rows(kept)
        if self.routing is not None:
            self.routing.keep_rows(kept)
        self._rows = self._rows[kept]
        self._offsets = self._offsets[kept]
        self._next = self._next[kept]
        self._finished = self._finished[kept]

    def _have_ended(self) -> Tensor:
        """Return (B,) bool, True for the rows whose tokens so far contain an end."""
        written = self.tokens[self._rows, : self._num_drawn]
        num_new = self._num_drawn - self._num_checked
        ends = torch.tensor(self.ends, dtype=torch.int64, device=written.device)
        self._finished |= torch.isin(written[:, self._num_checked :], ends).any(-1)
        if self.stopped is not None:
            self._finished |= self.stopped(written, num_new)
        self._num_checked = self._num_drawn
        return self._finished

    def _step(self) -> None:
        """Sample a token of each row.

        The graph captures this call, so it must not wait for the device, and it changes the state
        of the rows in place.
        """
        hidden = self._hidden(self._next[:, None], self._cache.positions[:, None])[:, 0]
        if self.head is not None and isinstance(self.draw, float) and self.top is None:
            from pgtoolkit.kernels.triton_draw import draw_next_of_hidden

            draw_next_of_hidden(hidden, self.head, self.uniform, self.draw, *self._state())
            return
        self._draw_tokens(self.logits(hidden))

    def _draw_tokens(self, logits: Tensor) -> None:
        """Draw a token of each row, store it with its log-prob, and advance the positions."""
        if self.top is not None:
            places = self._offsets + self._cache.positions
            for kept, new in zip(self._top, self.top(logits), strict=True):
                kept.flatten(end_dim=1).index_copy_(0, places, new)
        if isinstance(self.draw, float):
            from pgtoolkit.kernels.triton_draw import draw_next

            draw_next(logits, self.uniform, self.draw, *self._state())
            return
        positions = self._cache.positions
        assert not isinstance(self.draw, int)  # for type checkers, where a float may be an int
        places = self._offsets + positions
        tokens, log_probs = self.draw(logits, self.uniform.view(-1)[places])
        self.tokens.view(-1).index_copy_(0, places, tokens)
        self.log_probs.view(-1).index_copy_(0, places, log_probs)
        self._next.copy_(tokens)
        positions += 1

    def _state(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what a kernel that draws tokens writes, and where."""
        return self.tokens, self.log_probs, self._offsets, self._cache.positions, self._next

    def _hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the hidden states (B, S, H) of tokens at positions, (B, S) each."""
        if self.body is not None:
            return self.body(tokens, self._cache)
        # transformers hands arguments that it does not know, such as decoder_cache, on to
        # `attention`. A cache under a name that it knows it would update itself.
        outputs = self.model.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, decoder_cache=self._cache
        )
        return outputs.last_hidden_state

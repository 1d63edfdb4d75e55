"""The interface of a sampler, and sampling from a transformers model in this process."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pgtoolkit.batch import pack_sampled
from pgtoolkit.completion import Completion, Request
from pgtoolkit.document import SampledDocument
from pgtoolkit.errors import ConfigError, DataError, NumericalError
from pgtoolkit.model.architectures import MODEL_TYPES
from pgtoolkit.model.decoding import Routing
from pgtoolkit.model.generate import generate
from pgtoolkit.model.mixture import choices, num_others, routers
from pgtoolkit.model.policy import Policy, check_policy, torch_type
from pgtoolkit.sampling.draw import draw, likeliest_tokens, uniform_numbers
from pgtoolkit.sampling.generation_settings import generation_settings, processors
from pgtoolkit.sampling.settings import SamplingSettings, TransformersSamplerSettings
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.stops import StopStrings

log = logging.getLogger("pgtoolkit")

_ROUTED = 8
"""Completions of a run's first batch whose experts in sampling and training are compared."""

_MANY_OTHERS = 0.1
"""Share of choices of experts from which on a run warns; Qwen3-30B-A3B had it, sampled by SGLang
and trained by Megatron (arXiv 2510.11370)."""


class Sampler(Protocol):
    """Writes completions with the weights that were published last.

    tolerance: mean absolute difference from the trainer's log-probs that is allowed; None: no limit
        is needed.
    """

    @property
    def tolerance(self) -> float | None: ...

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on.

        weights: returns the weights by their names in the model's Hugging Face folder; called only
            by a sampler that keeps a copy.
        version: number of the updates that the weights have had.
        """
        ...

    def complete(self, requests: list[Request], *, more: bool = False) -> list[Completion]:
        """Return the completions of the first request, then those of the second, and so on.

        more: whether further calls for the same weights follow, so that the sampler keeps its
            memory.
        Raises NumericalError where the weights give probabilities that are not finite.
        """
        ...

    def close(self) -> None:
        """End what the sampler started. Called once, at the end of the run, however it ends."""
        ...


class ManyWays(Protocol):
    """A sampler that can sample in several ways, such as temperatures, from the same weights."""

    @property
    def tolerance(self) -> float | None: ...

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None: ...

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """Return completions as `Sampler.complete` does.

        way: the number of the way; 0 is that of training.
        """
        ...


class SameProcesses(Sampler):
    """Samples in another way by the processes of another sampler, which starts and ends them.

    settle: waits for the completions that are being sampled for training, since the processes have
        one version of the weights at a time.
    """

    def __init__(self, owner: ManyWays, way: int, settle: Callable[[], object]):
        self._owner = owner
        self._way = way
        self._settle = settle

    @property
    def tolerance(self) -> float | None:
        return self._owner.tolerance

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        self._settle()
        self._owner.publish(weights, version)

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        return self._owner.complete_in(self._way, requests, more)

    def close(self) -> None:
        """End nothing: the processes are those of the other sampler."""


def check_sampled(policy: Policy, chosen: TransformersSamplerSettings) -> None:
    """Raise ConfigError for a model whose steps with a cache are not its forward pass.

    The same for sampler.static_cache=true with a model that it is not known to work for.
    """
    if policy.not_sampled is not None:
        raise ConfigError(
            refusal(
                setting="sampler=transformers",
                needs="a model that computes token by token, with a cache, the same as in one "
                "forward pass",
                got=policy.not_sampled,
                reason="Completions would come from another distribution than the one that is "
                "trained.",
                use="a server of vLLM (sampler=vllm) or recorded rollouts (rollout=recorded)",
            )
        )
    if not policy.mixes_lengths:
        log.warning(
            f"note: {policy.model.config.model_type} computes other numbers where a prompt is "
            "padded, so that only prompts of equal length are sampled in one batch."
        )
    if chosen.static_cache and not policy.can_decode:
        raise ConfigError(
            f"sampler.static_cache=true needs a model of type {', '.join(MODEL_TYPES)} with "
            f"ordinary rotary positions (got {policy.model.config.model_type}). For other models "
            "the result is not known to be right. Use sampler.static_cache=null, in Python "
            "static_cache=None."
        )


class _Row(NamedTuple):
    """A completion to be sampled. number: among all. place: among those of its request."""

    number: int
    request: Request
    place: int


class TransformersSampler:
    """Samples from the model in training, many prompts in one batch with a KV cache.

    The model itself is sampled from where it is whole on this rank, and computes in float32 as its
    weights are stored and sampler.dtype says. Else a whole copy in the type of sampler.dtype is
    made for each call, by every rank at the same time. With rollout.max_staleness completions are
    asked for in a thread while the model is trained, and come from a copy of the weights that were
    published last.

    is_async: whether completions are asked for in a thread while the model is trained
        (rollout.max_staleness).
    The attribute `live` is the policy, and `sampling` how it is sampled from; `settings` is the
    same for transformers, and takes of the model's generation_config.json only the end-of-sequence
    tokens.
    is_copy: whether `policy` is a copy already, which nobody trains, and which its owner fills
        before `publish`.
    """

    tolerance = None

    def __init__(
        self,
        policy: Policy,
        sampling: SamplingSettings,
        settings: TransformersSamplerSettings,
        is_async: bool = False,
        is_copy: bool = False,
    ):
        check_policy("policy", policy)
        self._static_cache = settings.static_cache
        self.sampling = sampling
        self.settings = generation_settings(policy, sampling)
        self.live = policy
        self._version = 0
        self._is_copy = is_copy
        self._closed = False
        self.is_async = is_async and not is_copy
        # While the model is trained, or where it is elsewhere, its experts cannot be asked for.
        self._compares_routing = policy.is_whole and not (is_async or is_copy)
        self._routing: Routing | None = None
        self._dtype = torch_type(settings.dtype, policy.compute_dtype)
        is_float32 = policy.compute_dtype == self._dtype == torch.float32
        is_ready = is_copy or (policy.is_whole and is_float32 and not self.is_async)
        self._ready: Policy | None = policy if is_ready else None
        self._keeps_copy = False  # the copy's weights are those of the model, from the call before
        self._stream: torch.cuda.Stream | None = None  # of asynchronous sampling on a GPU
        self._fp32_lm_head = policy.fp32_lm_head
        self._max_sequences = settings.max_sequences
        self._stops = StopStrings(sampling.stop, policy.tokenizer)
        self._keep_top = sampling.likeliest
        self._is_truncated = sampling.is_truncated

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        self._version = version
        self._keeps_copy = False
        if self.is_async:
            self._load(weights())

    def _load(self, weights: dict[str, Tensor]) -> None:
        # The copy is made here and not earlier: only now is the model on the device that it is
        # trained on.
        self._ready = self._ready or self.live.copied(self._dtype)
        self._ready.load(weights)

    @property
    def _policy(self) -> Policy:
        """The policy to sample from, once weights were published or completions are asked for."""
        assert self._ready is not None
        return self._ready

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        """Return the completions of the requests, drawn by the seed of each.

        They are the same whatever else is sampled, by whichever process. One log-prob per token is
        kept, however large the vocabulary is.
        """
        for request in requests:
            self._check(request)
        uses_copy = not self.is_async and self._ready is not self.live
        if uses_copy and not self._keeps_copy:
            self._load(self.live.weights())
        self._keeps_copy = uses_copy and more
        pairs = [(request, place) for request in requests for place in range(request.completions)]
        rows = [_Row(number, request, place) for number, (request, place) in enumerate(pairs)]
        completions: dict[int, Completion] = {}
        with self._separate_stream() if self.is_async else contextlib.nullcontext():
            for batch in self._batches(rows):
                numbers = [row.number for row in batch]
                completions |= zip(numbers, self._complete(batch), strict=True)
        if uses_copy and not more:
            self._policy.unload()
        shares_gpu = self.live.model.device.type == "cuda" and not self._is_copy
        if shares_gpu and not self.is_async and not more:
            torch.cuda.empty_cache()  # else nothing but graphs could use the memory that they had
        return [completions[number] for number in range(len(rows))]

    def _check(self, request: Request) -> None:
        """Raise DataError for a request that the model has no tokens or no positions for."""
        tokens = request.tokens
        name = "a request" if request.prompt is None else f"the prompt at {request.prompt.place}"
        if not isinstance(tokens, list) or not tokens:
            got = f"a {type(tokens).__name__}" if len(tokens) else "none"
            raise DataError(
                f"{name} needs a list of at least one token (got {got}). The prompt predicts the "
                "first token of a completion. Use Request(tokens.tolist(), ...), or a text that "
                "the tokenizer makes tokens of."
            )
        vocabulary = self.live.vocabulary_size
        wrong = [token for token in (min(tokens), max(tokens)) if not 0 <= token < vocabulary]
        if wrong:
            raise DataError(
                f"{name} needs tokens from 0 to {vocabulary - 1}, of which the model has weights "
                f"(got {wrong[0]}). Use those of policy.tokenizer."
            )
        longest = min(self.settings.max_new_tokens, request.max_tokens or sys.maxsize)
        if len(tokens) + longest > self.live.max_positions:
            raise DataError(
                f"{name} has {len(tokens)} tokens, and a completion up to {longest}: more than the "
                f"{self.live.max_positions} positions of the model. Use shorter prompts, a "
                "smaller max_completion_length, or a model of more positions."
            )

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Yield the rows that are sampled at once, the one with the longest completion first.

        All rows of a batch are sampled until the longest completion is done. So a row may share a
        batch only as far as the model has positions for a completion of that length, and these do
        not rescale the positions of the other rows.
        """
        batch: list[_Row] = []
        mixes_lengths = self.live.mixes_lengths
        most_positions = min(self.live.max_positions, self.live.unscaled_positions)

        def prompt_length(row: _Row) -> int:
            return len(row.request.tokens)

        def order(row: _Row) -> tuple[int, int]:
            return 0 if mixes_lengths else prompt_length(row), -self._max_tokens(row)

        for row in sorted(rows, key=order):
            if batch:
                last_position = prompt_length(row) + self._max_tokens(batch[0])
                is_too_long = last_position > most_positions
                is_padded = not mixes_lengths and prompt_length(row) != prompt_length(batch[0])
                if is_too_long or is_padded or len(batch) == self._max_sequences:
                    yield batch
                    batch = []
            batch.append(row)
        if batch:
            yield batch

    def _max_tokens(self, row: _Row) -> int:
        """Return the most tokens that the row's completion may have."""
        limit = self.settings.max_new_tokens
        return min(limit, row.request.max_tokens or limit)

    def close(self) -> None:
        """Make a thread that is sampling end after its next token."""
        self._closed = True

    @contextlib.contextmanager
    def _separate_stream(self) -> Iterator[None]:
        """Inside the block, a GPU works in another stream than that of training."""
        device = self._policy.model.device
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        # The default stream has filled the copy.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            yield

    def _complete(self, rows: list[_Row]) -> list[Completion]:
        """Sample a completion of each row at once; the first row's may become the longest."""
        device = self._policy.model.device
        prompts = [row.request.tokens for row in rows]
        limits = [self._max_tokens(row) for row in rows]
        seeds = [(row.request.seed, row.place) for row in rows]
        uniform = uniform_numbers(seeds, limits[0]).to(device)
        static = device.type == "cuda" if self._static_cache is None else self._static_cache
        sample = self._decoded if static and self._policy.can_decode else self._generated
        compares = static and self._compares_routing and bool(routers(self.live.model))
        self._routing = Routing(self._policy.model, _ROUTED) if compares else None
        tokens, log_probs, *top = (sampled.cpu() for sampled in sample(prompts, uniform))
        if not log_probs.isfinite().all():
            raise NumericalError(
                "the policy's probabilities are not finite, so no completion can be sampled. An "
                "update has driven its weights out of range: resume from the last checkpoint with "
                "a smaller optimizer.learning_rate."
            )
        is_end = torch.isin(tokens, torch.tensor(self._ends(), dtype=torch.int64))
        first_end = torch.where(is_end.any(-1), is_end.int().argmax(-1), tokens.shape[1])
        up_to_end = (first_end + 1).tolist()
        if top:
            top_ids, top_log_probs = top
            # The same number, rounded in the same way, as the token's own.
            is_drawn = top_ids == tokens.unsqueeze(-1)
            top = top_ids, torch.where(is_drawn, log_probs.unsqueeze(-1), top_log_probs)
        completions = list(map(self._completion, tokens, log_probs, limits, up_to_end, *top))
        if self._routing is not None:
            self._compares_routing = False
            self._compare_routing(prompts, completions, self._routing)
        return completions

    @torch.no_grad()
    def _compare_routing(
        self, prompts: list[list[int]], completions: list[Completion], routing: Routing
    ) -> None:
        """Log how many choices of experts for the first completions are others in training."""
        num_others_in_training = 0
        num_all = 0
        pairs = zip(prompts[:_ROUTED], completions[:_ROUTED], strict=True)
        for row, (prompt, completion) in enumerate(pairs):
            # Nothing was computed for the last token.
            tokens = torch.tensor([*prompt, *completion.tokens.tolist()][:-1])
            mask = torch.zeros(len(tokens), dtype=torch.bool)
            document = SampledDocument(tokens=tokens, loss_mask=mask, group=0, name="a completion")
            micro_batch = pack_sampled([document]).to(self.live.model.device)
            compute = functools.partial(self.live.hidden_states, micro_batch)
            sampled = routing.chosen[:, row, : len(tokens)]
            num_others_in_training += num_others(sampled, choices(self.live.model, compute))
            num_all += sampled.shape[:2].numel()
        share = num_others_in_training / num_all
        log.info(
            f"routing      {share:.2%} of the choices of experts are others in training than in "
            f"sampling ({num_others_in_training} of {num_all}, in the first completions)"
        )
        if share >= _MANY_OTHERS:
            log.warning(
                "note: a tenth or more of the choices of experts are others in training, as where "
                "it became unstable in arXiv 2510.11370. Use correction=token_truncate, in "
                "Python Loss(..., correction=TokenTruncate()), unless there is a correction "
                "already: it weighs tokens by how their log-probs differ."
            )

    @property
    def _drawn_by_kernel(self) -> bool:
        on_gpu = self._policy.model.device.type == "cuda"
        return on_gpu and not self._is_truncated and self.settings.temperature > 0

    def _draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a token of each row of logits, (B, V) in any type, as `draw` does.

        Temperature, top_k and top_p are applied first. uniform: (B,) float64 from [0, 1).
        """
        if self._drawn_by_kernel:
            from pgtoolkit.kernels.triton_draw import draw_tokens

            return draw_tokens(logits, uniform, self.settings.temperature)
        return draw(self._scores(logits), uniform)

    def _scores(self, logits: Tensor) -> Tensor:
        """Return scores, (B, V) float32, whose softmax tokens are drawn from."""
        scores = logits.float()
        for process in processors(self.settings):
            scores = process(None, scores)
        return scores

    def _top(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of each row of logits, as `likeliest_tokens` does.

        Where sampling is truncated they are among the tokens that it keeps.
        """
        if not self._is_truncated:
            return likeliest_tokens(logits.float() / self.settings.temperature, self._keep_top)
        ids, log_probs = likeliest_tokens(self._scores(logits), self._keep_top)
        return torch.where(log_probs == -torch.inf, -1, ids), log_probs

    def _decoded(self, prompts: list[list[int]], uniform: Tensor) -> tuple[Tensor, ...]:
        """Return tokens and log-probs, (B, C) each, by a cache of fixed size.

        With `keep_top` the likeliest tokens and their log-probs follow, (B, C, k) each.
        uniform: (B, C), a number for each token.
        """
        return self._policy.decode(
            prompts,
            max_tokens=uniform.shape[1],
            fp32_lm_head=self._fp32_lm_head,
            draw=self.settings.temperature if self._drawn_by_kernel else self._draw,
            uniform=uniform,
            check=self._check_open,
            ends=self._ends(),
            stopped=self._stopped if self._stops else None,
            top=self._top if self._keep_top else None,
            routing=self._routing,
        )

    def _generated(self, prompts: list[list[int]], uniform: Tensor) -> tuple[Tensor, ...]:
        """Return the same as `_decoded` by transformers' `generate`, for any of its models."""
        log_probs: list[Tensor] = []
        top: list[tuple[Tensor, Tensor]] = []

        def choose(logits: Tensor) -> Tensor:
            self._check_open()
            tokens, token_log_probs = self._draw(logits, uniform[:, len(log_probs)])
            log_probs.append(token_log_probs)
            if self._keep_top:
                top.append(self._top(logits))
            return tokens

        settings = copy.deepcopy(self.settings)
        settings.max_new_tokens = uniform.shape[1]
        stopped = self._stopped if self._stops else None
        tokens = generate(self._policy, prompts, settings, choose, self._fp32_lm_head, stopped)
        of_top = [torch.stack(parts, dim=1) for parts in zip(*top, strict=True)]
        return tokens, torch.stack(log_probs, dim=-1), *of_top

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler was closed")

    def _ends(self) -> list[int]:
        """Return the token ids that end a completion."""
        ends = self.settings.eos_token_id
        if ends is None:
            return []
        return [ends] if isinstance(ends, int) else ends

    def _stopped(self, written: Tensor, new: int) -> Tensor:
        """Return (B,) bool: whether one of a row's last `new` tokens has completed a stop string.

        written: (B, C), all tokens of the rows so far.
        """
        last = written[:, -(self._stops.window + new) :].tolist()
        stopped = [
            may_have_stopped and self._stops.end(written[row].tolist()) is not None
            for row, may_have_stopped in enumerate(self._stops.seem_to_end(last))
        ]
        return torch.tensor(stopped, device=written.device)

    def _completion(
        self,
        tokens: Tensor,
        log_probs: Tensor,
        limit: int,
        up_to_end: int,
        top_ids: Tensor | None = None,
        top_log_probs: Tensor | None = None,
    ) -> Completion:
        """Return a completion up to its first end-of-sequence token or stop string.

        tokens, log_probs: (C,), of all that was sampled; the other two (C, k).
        limit: the most tokens that it may have.
        up_to_end: the number of tokens up to and with the first end-of-sequence token; more than C
            where there is none.
        """
        length = min(up_to_end, limit)
        stopped = self._stops.end(tokens[:length].tolist()) if self._stops else None
        reason = "stop" if up_to_end <= limit or stopped is not None else "length"
        length = stopped or length
        return Completion(
            tokens[:length].clone(),
            log_probs[:length].clone(),
            reason,
            self._version,
            top_ids=None if top_ids is None else top_ids[:length].clone(),
            top_log_probs=None if top_log_probs is None else top_log_probs[:length].clone(),
        )

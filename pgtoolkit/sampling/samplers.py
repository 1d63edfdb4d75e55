"""Who writes completions: what rollouts ask of a sampler, and sampling from a transformers model in
this process."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.models import MODEL_TYPES
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig
from pgtoolkit.errors import ConfigError, NumericalError
from pgtoolkit.model.generate import generate
from pgtoolkit.model.policy import Policy, torch_type
from pgtoolkit.sampling.draw import draw, uniform_numbers
from pgtoolkit.sampling.sampling_settings import sampling_settings, temperature_and_top_p
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.stops import StopStrings

log = logging.getLogger("pgtoolkit")


class Sampler(Protocol):
    """Writes completions with the weights that were published last.

    tolerance: mean absolute difference from the trainer's that its log-probs may have; None: no
        limit is needed.
    """

    @property
    def tolerance(self) -> float | None: ...

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on.

        weights: gives each weight, whole, by its name in the model's Hugging Face folder; called
            only by a sampler that keeps a copy. version: number of the updates that they have had.
        """
        ...

    def complete(self, requests: list[Request], *, more: bool = False) -> list[Completion]:
        """The completions of the first request, then those of the second, and so on.

        more: whether further calls for the same weights follow, before which nothing needs to be
            given back.
        Raises NumericalError where the weights give no finite probabilities.
        """
        ...

    def close(self) -> None:
        """End what the sampler started. Called once, at the end of the run, however it ends."""
        ...


class ManyWays(Protocol):
    """A sampler that can sample in several ways with the same weights."""

    @property
    def tolerance(self) -> float | None: ...

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None: ...

    def complete_in(self, way: int, requests: list[Request], more: bool) -> list[Completion]:
        """As `complete` of a `Sampler`; way: 0 is that of training."""
        ...


class SameProcesses(Sampler):
    """A sampler by the processes of another one, which starts and ends them, in another way.

    settle: waits for what training is having sampled, since these processes have one version of the
        weights at a time.
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
        """What it uses is the other's."""


def check_sampled(policy: Policy, chosen: TransformersSamplerConfig) -> None:
    """Raise ConfigError for a model whose steps with a cache are not its forward pass.

    The same for sampler.static_cache=true with a model that it is not known to work for.
    """
    if policy.not_sampled is not None:
        needs = "a model that computes token by token, with a cache, what a forward pass computes"
        reason = "Completions would come from another distribution than the one that is trained."
        use = "sampler=vllm or rollout=recorded"
        raise ConfigError(refusal("sampler=transformers", needs, policy.not_sampled, reason, use))
    if not policy.mixes_lengths:
        log.warning(
            f"note: {policy.model.config.model_type} computes other numbers where a prompt is "
            "padded, so that only prompts of equal length are sampled in one batch."
        )
    if chosen.static_cache and not policy.can_decode:
        raise ConfigError(
            f"sampler.static_cache=true needs a model of type {', '.join(MODEL_TYPES)} with "
            f"ordinary rotary positions (got {policy.model.config.model_type}). It is not known to "
            "be computed rightly otherwise. Use sampler.static_cache=null."
        )


_Row = tuple[int, Request, int]
"""A completion to be sampled: its number among all, its request, and which of that it is."""


class TransformersSampler:
    """Samples from the model in training, many prompts in one batch with a KV cache.

    policy: a `Policy`, sampled from as it is; where it computes in another type than its weights
        have, sampler.dtype is another, or it is spread over ranks, from a whole copy of them in
        that type, made for each call, by every rank at the same time. With rollout.max_staleness
        completions are asked for in a thread while it is trained, and come from a copy of the
        weights that were published last.
    settings: how completions are sampled; of the model's own generation_config.json only the ends
        are taken.
    is_copy: whether `policy` is such a copy already, which nobody trains, and which its owner fills
        before `publish`.
    """

    tolerance = None

    def __init__(self, policy: Policy, config: Config, is_copy: bool = False):
        rollout, chosen = config.rollout, config.sampler
        assert isinstance(rollout, PolicyRolloutConfig)
        assert isinstance(chosen, TransformersSamplerConfig)
        self._static_cache = chosen.static_cache
        self.settings = sampling_settings(policy, rollout)
        self._live, self._version = policy, 0
        self._is_copy, self._closed = is_copy, False
        self._beside_training = rollout.max_staleness is not None and not is_copy
        self._dtype = torch_type(chosen.dtype, policy.compute_dtype)
        is_float32 = policy.compute_dtype == self._dtype == torch.float32
        is_ready = is_copy or (policy.is_whole and is_float32 and not self._beside_training)
        self._ready: Policy | None = policy if is_ready else None
        self._borrowed = False
        self._stream = None  # on a GPU beside training, its own
        self._fp32_lm_head = config.model.fp32_lm_head
        self._max_sequences = chosen.max_sequences
        self._stops = StopStrings(rollout.stop, policy.tokenizer)

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        self._version, self._borrowed = version, False
        if self._beside_training:
            self._load(weights())

    def _load(self, weights: dict[str, Tensor]) -> None:
        # Not before: only now is the model on the device that it is trained on.
        self._ready = self._ready or self._live.copied(self._dtype)
        self._ready.load(weights)

    @property
    def _policy(self) -> Policy:
        """What is sampled from, once weights were published or completions are asked for."""
        assert self._ready is not None
        return self._ready

    def complete(self, requests: list[Request], more: bool = False) -> list[Completion]:
        """Draws by the seed of each request: the same, whatever else is sampled, by whichever
        process.

        Keeps one log-prob per token, however large the vocabulary.
        """
        borrows = not self._beside_training and self._ready is not self._live
        if borrows and not self._borrowed:
            self._load(self._live.weights())
        self._borrowed = borrows and more
        rows = [(one, place) for one in requests for place in range(one.completions)]
        completions: dict[int, Completion] = {}
        with self._aside() if self._beside_training else contextlib.nullcontext():
            for batch in self._batches([(number, *row) for number, row in enumerate(rows)]):
                completions |= zip(
                    (number for number, *_ in batch), self._complete(batch), strict=True
                )
        if borrows and not more:
            self._policy.unload()
        shares_gpu = self._live.model.device.type == "cuda" and not self._is_copy
        if shares_gpu and not self._beside_training and not more:
            torch.cuda.empty_cache()  # what the graphs had is of use to nothing else before
        return [completions[number] for number in range(len(rows))]

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Yield what is sampled at once.

        A row whose completion must end early goes on beside longer ones, so far as the model has
        positions for it that leave those of the others as they are.
        """
        batch: list[_Row] = []
        mixes = self._live.mixes_lengths
        longest = min(self._live.max_positions, self._live.unscaled_positions)

        def length(row: _Row) -> int:
            return len(row[1].tokens)

        # The first of a batch has the longest completion.
        for row in sorted(rows, key=lambda row: (0 if mixes else length(row), -self._most(row))):
            beyond = batch and length(row) + self._most(batch[0]) > longest
            padded = batch and not mixes and length(row) != length(batch[0])
            if beyond or padded or len(batch) == self._max_sequences:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _most(self, row: _Row) -> int:
        """Tokens of its completion."""
        return min(self.settings.max_new_tokens, row[1].max_tokens or self.settings.max_new_tokens)

    def close(self) -> None:
        """Makes a thread that is sampling end after its next token."""
        self._closed = True

    @contextlib.contextmanager
    def _aside(self):
        """In a thread beside training: on a GPU in a stream of its own."""
        device = self._policy.model.device
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.default_stream(device))  # which has filled the copy
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            yield

    def _complete(self, rows: list[_Row]) -> list[Completion]:
        """A completion for each, of which the first may become the longest; all sampled at once."""
        device, prompts = self._policy.model.device, [request.tokens for _, request, _ in rows]
        uniform = uniform_numbers(
            [(request.seed, place) for _, request, place in rows], self._most(rows[0])
        ).to(device)
        static = device.type == "cuda" if self._static_cache is None else self._static_cache
        sample = self._decoded if static and self._policy.can_decode else self._generated
        tokens, log_probs = (sampled.cpu() for sampled in sample(prompts, uniform))
        if not log_probs.isfinite().all():
            raise NumericalError(
                "the policy's probabilities are not finite, so no completion can be sampled. An "
                "update has driven its weights out of range: resume from the last checkpoint with "
                "a smaller optimizer.learning_rate."
            )
        is_end = torch.isin(tokens, torch.tensor(self._ends(), dtype=torch.int64))
        up_to_end = torch.where(is_end.any(-1), is_end.int().argmax(-1), tokens.shape[1]) + 1
        return [
            self._completion(tokens[place, :most], log_probs[place, :most], up_to)
            for place, (most, up_to) in enumerate(
                zip(map(self._most, rows), up_to_end.tolist(), strict=True)
            )
        ]

    @property
    def _drawn_by_kernel(self) -> bool:
        on_gpu = self._policy.model.device.type == "cuda"
        return on_gpu and self.settings.top_p == 1 and self.settings.temperature > 0

    def _draw(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """As `draw`, of logits (B, V) in any type, by temperature and top_p."""
        if self._drawn_by_kernel:
            from pgtoolkit.kernels.triton_draw import draw_tokens

            return draw_tokens(logits, uniform, self.settings.temperature)
        scores = logits.float()
        for process in temperature_and_top_p(self.settings):
            scores = process(None, scores)
        return draw(scores, uniform)

    def _decoded(self, prompts: list[list[int]], uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probs, (B, C), by a cache of fixed size. uniform: (B, C), for each
        token."""
        draws = self.settings.temperature if self._drawn_by_kernel else self._draw
        how = {"draw": draws, "uniform": uniform, "check": self._check_open, "ends": self._ends()}
        how |= {"stopped": self._stopped} if self._stops else {}
        return self._policy.decode(prompts, uniform.shape[1], self._fp32_lm_head, **how)

    def _generated(self, prompts: list[list[int]], uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The same by transformers, for any of its models."""
        log_probs: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor:
            self._check_open()
            tokens, of_tokens = self._draw(logits, uniform[:, len(log_probs)])
            log_probs.append(of_tokens)
            return tokens

        settings = copy.deepcopy(self.settings)
        settings.max_new_tokens = uniform.shape[1]
        stopped = self._stopped if self._stops else None
        tokens = generate(self._policy, prompts, settings, choose, self._fp32_lm_head, stopped)
        return tokens, torch.stack(log_probs, dim=-1)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sampler was closed")

    def _ends(self) -> list[int]:
        ends = self.settings.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else ends

    def _stopped(self, written: Tensor, new: int) -> Tensor:
        """(B,) bool: in which rows of tokens, (B, C), one of the last `new` has completed a stop
        string."""
        last = written[:, -(self._stops.window + new) :].tolist()
        found = [
            seems and self._stops.end(written[row].tolist()) is not None
            for row, seems in enumerate(self._stops.seem_to_end(last))
        ]
        return torch.tensor(found, device=written.device)

    def _completion(self, tokens: Tensor, log_probs: Tensor, up_to_end: int) -> Completion:
        """Without what follows the first end-of-sequence token or stop string.

        up_to_end: how many tokens there are up to and with the first such token; more than there
            are for none.
        """
        length = min(up_to_end, len(tokens))
        stopped = self._stops.end(tokens[:length].tolist()) if self._stops else None
        reason = "stop" if up_to_end <= len(tokens) or stopped is not None else "length"
        length = stopped or length
        return Completion(
            tokens[:length].clone(), log_probs[:length].clone(), reason, self._version
        )

"""Who writes completions: what rollouts ask of a sampler, and sampling from a transformers model in this process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from pgtoolkit.config.schema import Config
from pgtoolkit.errors import NumericalError
from pgtoolkit.rollouts.stops import StopStrings
from pgtoolkit.system.model_folder import end_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True)
class Request:
    """One prompt to be completed.

    tokens: the prompt's token ids. completions: how many completions of it are wanted.
    seed: of this prompt in this run, below 2^32, for samplers that take a seed with each request.
    """

    tokens: list[int]
    completions: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """What a sampler wrote after one prompt.

    tokens: (C,) int64, up to the end-of-sequence token or the one that completes a stop string (`StopStrings`),
        whichever comes first, and with it.
    log_probs: (C,) float32, of each token under the distribution it was sampled from: tempered, and renormalised if
        top_p cuts it.
    finish_reason: "stop" after an end-of-sequence token or a stop string, else "length", at the longest allowed.
    model_version: of the weights that wrote it, as `publish` was told.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    model_version: int


class Sampler(Protocol):
    """Writes completions with the weights that were published last."""

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Sample from these weights from now on.

        weights: gives each weight, whole, by its name in the model's Hugging Face folder; called only by a sampler
            that keeps a copy. version: number of the updates that they have had.
        """
        ...

    def complete(self, requests: list[Request]) -> list[Completion]:
        """The completions of the first request, then those of the second, and so on.

        Raises NumericalError where the weights give no finite probabilities.
        """
        ...

    def close(self) -> None:
        """End what the sampler started. Called once, at the end of the run, however it ends."""
        ...


class TransformersSampler:
    """Samples from the model in training itself, many prompts in one batch with a KV cache.

    policy: a `Policy`.
    settings: how completions are sampled; of the model's own generation_config.json only the ends are taken.
    """

    def __init__(self, policy: Any, config: Config):
        rollout = config.rollout
        sizes = rollout.temperature, rollout.top_p, rollout.max_completion_length
        self.settings = sampling_settings(policy.model, policy.tokenizer, *sizes)
        self._policy, self._version = policy, 0
        self._fp32_lm_head = config.model.fp32_lm_head
        self._max_sequences = config.sampler.max_sequences
        self._stops = StopStrings(rollout.stop, policy.tokenizer)

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        """Keeps no copy: updates of the policy show at once."""
        self._version = version

    def complete(self, requests: list[Request]) -> list[Completion]:
        """Draws from torch's global random state. Keeps one log-prob per token, however large the vocabulary."""
        prompts = [request.tokens for request in requests for _ in range(request.completions)]
        size = self._max_sequences or len(prompts)
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return [completion for batch in batches for completion in self._complete(batch)]

    def close(self) -> None:
        """Nothing was started."""

    @torch.no_grad()
    def _complete(self, prompts: list[list[int]]) -> list[Completion]:
        """One completion of each prompt, all sampled at once."""
        from transformers.generation import LogitsProcessorList

        model, padding = self._policy.model, self.settings.pad_token_id
        longest = max(map(len, prompts))
        tokens = torch.tensor([[padding] * (longest - len(p)) + p for p in prompts], device=model.device)
        attention_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        # Temperature and top_p are ours here: those of `generate` would come after every processor that it is given.
        log_probs = _LogProbs()
        processors = LogitsProcessorList([*_temperature_and_top_p(self.settings), log_probs])
        settings = copy.deepcopy(self.settings)
        settings.update(temperature=1.0, top_p=1.0)
        with self._policy.generating(self._fp32_lm_head), _finite_probabilities(), _without_own_settings(model):
            whole = model.generate(
                input_ids=tokens,
                attention_mask=attention_mask,
                generation_config=settings,
                logits_processor=processors,
                stopping_criteria=[functools.partial(self._stopped, longest)] if self._stops else [],
            )
        sampled, found = whole[:, longest:].cpu(), log_probs.of(whole[:, longest:]).cpu()
        return [self._completion(*row) for row in zip(sampled, found, strict=True)]

    def _stopped(self, prompt_length: int, tokens: Tensor, scores: Tensor, **_) -> Tensor:
        """(B,) bool, a stopping criterion of transformers: which rows have written a stop string.

        Not its own StopStringCriteria, which would count a string that the prompt begins, or a special token's name.
        """
        last = tokens[:, max(prompt_length, tokens.shape[1] - self._stops.window) :].tolist()
        found = [
            seems and self._stops.end(tokens[row, prompt_length:].tolist()) is not None
            for row, seems in enumerate(self._stops.seem_to_end(last))
        ]
        return torch.tensor(found, device=tokens.device)

    def _completion(self, tokens: Tensor, log_probs: Tensor) -> Completion:
        """Without what follows the first end-of-sequence token or stop string."""
        ends = torch.tensor([] if self.settings.eos_token_id is None else self.settings.eos_token_id).view(-1)
        places = torch.isin(tokens, ends).nonzero()
        length = int(places[0]) + 1 if len(places) else len(tokens)
        stopped = self._stops.end(tokens[:length].tolist())
        reason = "stop" if len(places) or stopped is not None else "length"
        length = stopped or length
        return Completion(tokens[:length].clone(), log_probs[:length].clone(), reason, self._version)

    def ignored_settings(self) -> dict[str, Any]:
        """What of the model's own settings, from its generation_config.json, would sample differently."""
        own = self._policy.model.generation_config.to_dict()
        found = {key: own.get(key) for key in _NEUTRAL}
        return {
            key: value
            for key, value in found.items()
            if value not in (None, [], _NEUTRAL[key]) and value != getattr(self.settings, key, None)
        }


def sampling_settings(
    model, tokenizer, temperature: float, top_p: float | None = None, max_completion_length: int | None = None
) -> GenerationConfig:
    """How completions are sampled, for transformers; of the model's own settings only the ends are taken."""
    from transformers import GenerationConfig

    ends = end_tokens(model.generation_config, tokenizer)
    return GenerationConfig(
        max_new_tokens=max_completion_length,
        do_sample=True,
        temperature=float(temperature),
        top_p=1.0 if top_p is None else top_p,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id or 0,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
    )


_NEUTRAL = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "guidance_scale", "num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing", "use_mtp"), False),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "force_words_ids"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "constraints", "top_h"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "stop_strings", "max_time"), None),
    **dict.fromkeys(("prompt_lookup_num_tokens", "dola_layers", "assistant_early_exit", "speculation_type"), None),
}
"""Settings of a GenerationConfig that change what is sampled, with the values that change nothing (or None)."""


def _temperature_and_top_p(settings: GenerationConfig) -> list:
    from transformers.generation import TemperatureLogitsWarper, TopPLogitsWarper

    temperature = [TemperatureLogitsWarper(settings.temperature)] if settings.temperature != 1 else []
    return temperature + ([TopPLogitsWarper(settings.top_p)] if settings.top_p < 1 else [])


class _LogProbs:
    """The last logits processor: keeps the log-prob of each sampled token, and the scores of one step at a time."""

    def __init__(self):
        self._scores: Tensor | None = None
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._scores is not None:
            self._keep(input_ids[:, -1:])
        self._scores = scores
        return scores

    def _keep(self, tokens: Tensor) -> None:
        self._log_probs.append(self._scores.float().log_softmax(-1).gather(-1, tokens))

    def of(self, sampled: Tensor) -> Tensor:
        """(B, C) float32, of all sampled tokens, (B, C): the last of them no later call has shown."""
        if len(self._log_probs) < sampled.shape[1]:
            self._keep(sampled[:, -1:])
        return torch.cat(self._log_probs[: sampled.shape[1]], dim=-1)


@contextlib.contextmanager
def _without_own_settings(model):
    """transformers fills what its caller leaves open from the model's settings: a repetition penalty, for one."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextlib.contextmanager
def _finite_probabilities():
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise NumericalError(
            "the policy's probabilities are not finite, so no completion can be sampled. An update has driven its "
            "weights out of range: resume from the last checkpoint with a smaller optimizer.learning_rate."
        ) from error

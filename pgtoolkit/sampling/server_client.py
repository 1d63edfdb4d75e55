"""The client of one server of completions: its calls over HTTP, and a sentence on each fault of an
answer."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Literal

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import SamplerLost, first_line
from pgtoolkit.sampling.server_api import LOST, Call, Choice, Json, ServerSampling
from pgtoolkit.sampling.server_process import ServerProcess
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.background import in_background

_PATIENCE_SECONDS = 30
"""For this long a call is made again that gets no connection, or finds a busy server (503)."""
_PAUSE = 0.5
"""Seconds between two such attempts."""
_MAX_BYTES = 2**20
"""Most bytes of an answer without tokens."""
_BYTES_PER_TOKEN = 2**10
"""Further bytes that are allowed for each token that was sent or asked for."""
_BYTES_PER_TOP_TOKEN = 2**6
"""Further bytes for each of the likeliest tokens that are asked for beside a token."""
_BY_CHANCE = -30.0
"""Log-probability below which completions of a prompt are not the same by chance."""
_CONNECTIONS = 1024
_FORM = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError)
"""Errors that reading an answer raises where its JSON has another form."""


class Server:
    """A server at `url`, spoken to in the words of `api`.

    answer_seconds: sampler.answer_seconds, for messages. process: its process, if it was started
        here. key: the key that it asks for; None for none.
    Each call has a deadline by time.monotonic(). It raises SamplerLost then, or earlier for any
    other fault.
    """

    def __init__(
        self,
        api: Vllm,
        url: str,
        answer_seconds: int,
        process: ServerProcess | None = None,
        key: str | None = None,
    ):
        self.url = url.rstrip("/")
        self._api = api
        self._answer_seconds = answer_seconds
        self._process = process
        self._health = "Nothing listens there, or a firewall is in between."
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy of the environment leads to a server near us
        self._session.headers["Accept-Encoding"] = "identity"
        if key is not None:
            self._session.headers["Authorization"] = f"Bearer {key}"
        adapter = HTTPAdapter(pool_maxsize=_CONNECTIONS)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)

    def close(self) -> None:
        self._session.close()

    def is_up(self) -> bool:
        """Return whether it answers by now.

        Raises SamplerLost if it was started here and has ended.
        """
        self._check_process()
        with contextlib.suppress(requests.RequestException, TimeoutError):
            status = self._answer("GET", self._api.HEALTH, None, 5, _MAX_BYTES)[0].status_code
            self._health = f"It answers {self._api.HEALTH} with {status}."
            return status == 200
        return False

    def last_words(self) -> str:
        """Return sentences about a server that is not up."""
        return f"{self._health} {LOST}" if self._process is None else self._words()

    def complete(
        self, request: Request, sampling: ServerSampling, salt: str, version: int, deadline: float
    ) -> list[Completion]:
        """Return the completions of one request, checked for faults that the proof of their
        log-probs cannot see.

        version: of the weights.
        """
        if request.max_tokens is not None:
            sampling = replace(sampling, max_tokens=request.max_tokens)
        tokens = request.completions * (len(request.tokens) + sampling.max_tokens)
        top_tokens = request.completions * sampling.max_tokens * (sampling.keep_top + 1)
        max_bytes = _MAX_BYTES + _BYTES_PER_TOKEN * tokens + _BYTES_PER_TOP_TOKEN * top_tokens
        answer = self.post(self._api.completions(request, sampling, salt), deadline, max_bytes)
        try:
            choices = self._api.choices(answer)
            tensors = [_tensors(choice) for choice in choices]
            least = self._api.LEAST_LOG_PROB if sampling.names_kept else -math.inf
            tops = [_top(choice, sampling.keep_top, least) for choice in choices]
        except _FORM as error:
            form = f"the form of {self._api.NAME}'s"
            raise self._fault(
                f"its completions do not have {form} ({first_line(error)})"
            ) from error
        if len(choices) != request.completions:
            raise self._fault(
                f"it gave {len(choices)} completions instead of {request.completions}"
            )
        completions = [
            self._completion(choice, *tensors_of_choice, top, sampling, version)
            for choice, tensors_of_choice, top in zip(choices, tensors, tops, strict=True)
        ]
        if sampling.temperature > 0:
            self._check_drawn(completions)
        return completions

    def score(self, tokens: list[int], salt: str, deadline: float) -> Tensor:
        """Return the (S - 1,) float32 log-probs of a text's tokens from the second on, before
        temperature and top_p."""
        max_bytes = _MAX_BYTES + _BYTES_PER_TOKEN * len(tokens)
        answer = self.post(self._api.scores(tokens, salt), deadline, max_bytes)
        try:
            return torch.tensor(self._api.log_probs(answer, tokens), dtype=torch.float32)
        except _FORM:
            raise self._fault("it did not give a log-prob for each token of a prompt") from None

    def _completion(
        self,
        choice: Choice,
        tokens: Tensor,
        log_probs: Tensor,
        top: tuple[Tensor, Tensor] | None,
        sampling: ServerSampling,
        version: int,
    ) -> Completion:
        top_ids, top_log_probs = (None, None) if top is None else top
        named = tokens if top_ids is None else torch.cat([tokens, top_ids[top_ids >= 0].long()])
        foreign = named[(named < 0) | (named >= sampling.vocabulary_size)]
        if len(foreign):
            raise self._fault(
                f"it sampled token {foreign[0]}, and the trainer's vocabulary has "
                f"{sampling.vocabulary_size} entries. It serves another model"
            )
        if sampling.names_kept and top_ids is not None:
            lacks_drawn = ~((top_ids == tokens[:, None]).any(-1) | (top_ids[:, -1] >= 0))
            if lacks_drawn.any():
                raise self._fault(
                    f"it drew token {tokens[lacks_drawn][0]}, which top_p and top_k "
                    "do not keep. Start it with --logprobs-mode processed_logprobs"
                )
        # A server decodes token by token, and may notice a stop string later than it is complete in
        # the text.
        stopped = sampling.stops.end(tokens.tolist())
        reason = "stop" if stopped else self._finish(tokens.tolist(), choice, sampling)
        return Completion(
            tokens[:stopped],
            log_probs[:stopped],
            reason,
            version,
            top_ids=None if top_ids is None else top_ids[:stopped],
            top_log_probs=None if top_log_probs is None else top_log_probs[:stopped],
        )

    def _finish(
        self, tokens: list[int], choice: Choice, sampling: ServerSampling
    ) -> Literal["stop", "length"]:
        """Return the reason why a completion ended.

        Raises SamplerLost if it does not agree with the completion's tokens.
        """
        *inside, is_end = (token in sampling.ends for token in tokens)
        goes_beyond_end = any(inside)
        is_stopped = is_end or choice.stop_text in sampling.stops.strings
        if not goes_beyond_end:
            if choice.finish_reason == "stop" and is_stopped and len(tokens) <= sampling.max_tokens:
                return "stop"
            is_longest = len(tokens) == sampling.max_tokens
            if choice.finish_reason == "length" and is_longest and not is_end:
                return "length"
        beyond = ", beyond an end-of-sequence token" if goes_beyond_end else ""
        raise self._fault(
            f"a completion ends with token {tokens[-1]} after {len(tokens)} of at most "
            f"{sampling.max_tokens} tokens{beyond}, for the reason {choice.finish_reason}"
        )

    def _check_drawn(self, completions: list[Completion]) -> None:
        """Raise SamplerLost where too many completions of a prompt are the same.

        A completion of probability p occurs k times in n draws with a probability of at most
        C(n, k) p^(k - 1).
        """
        counts = Counter(tuple(completion.tokens.tolist()) for completion in completions)
        for completion in completions:
            same = counts[tuple(completion.tokens.tolist())]
            log_prob = completion.log_probs.double().sum().item()
            if (same - 1) * log_prob + math.log(math.comb(len(completions), same)) < _BY_CHANCE:
                raise self._fault(
                    f"{same} of {len(completions)} completions of a prompt are the same, whose "
                    f"log-prob is {log_prob:.0f}: it did not draw each of them"
                )

    def post(self, call: Call, deadline: float, max_bytes: int = _MAX_BYTES) -> Json:
        """Return the JSON of the answer, of at most max_bytes; None where it is empty."""
        path, body = call
        patient_until = min(deadline, time.monotonic() + _PATIENCE_SECONDS)
        while True:
            self._check_process()
            seconds_left = max(0.1, deadline - time.monotonic())
            is_last_attempt = time.monotonic() + _PAUSE > patient_until
            try:
                answer, content = self._answer("POST", path, body, seconds_left, max_bytes)
                if answer.status_code != 503 or is_last_attempt:
                    return self._content(path, answer, content)
            except (requests.ReadTimeout, TimeoutError) as error:
                raise SamplerLost(
                    f"the sampling server {self.url} did not answer {path} within "
                    f"sampler.answer_seconds={self._answer_seconds}. It hangs, is paused (POST "
                    f"{self.url}{self._api.RESUME} lets it go on), or needs more time. "
                    f"{self._words()}"
                ) from error
            except requests.RequestException as error:
                self._check_process()
                if is_last_attempt:
                    raise SamplerLost(
                        f"the sampling server {self.url} cannot be reached, or breaks off its "
                        f"answers: {first_line(error)[:300]}. Start it again. {self._words()}"
                    ) from error
            time.sleep(_PAUSE)

    def _answer(
        self, method: str, path: str, body: dict | None, seconds: float, max_bytes: int
    ) -> tuple[requests.Response, bytes]:
        """Return a response with its content, of at most max_bytes.

        Raises TimeoutError unless it is complete within `seconds`: requests itself would count anew
        from each byte that arrives. Does not follow redirections, which make a GET of a POST.
        """
        read = partial(self._read, method, path, body, seconds, max_bytes)
        return in_background(read).result(seconds)

    def _read(
        self, method: str, path: str, body: dict | None, seconds: float, max_bytes: int
    ) -> tuple[requests.Response, bytes]:
        end = time.monotonic() + seconds
        content = bytearray()
        timeouts = (min(seconds / 2, 10), seconds)  # to connect, and between two bytes
        with self._session.request(
            method, self.url + path, json=body, timeout=timeouts, allow_redirects=False, stream=True
        ) as answer:
            for part in answer.iter_content(2**16):
                content += part
                if len(content) > max_bytes:
                    raise self._fault(
                        f"its answer to {path} has more than the {max_bytes} bytes that such an "
                        "answer may have"
                    )
                if time.monotonic() > end:  # `_answer` no longer waits
                    raise TimeoutError
        return answer, bytes(content)

    def _content(self, path: str, answer: requests.Response, content: bytes) -> Json:
        """Return the JSON of an answer; None where it is empty.

        Raises SamplerLost for any other answer.
        """
        text = " ".join(content[:600].decode(errors="replace").split()) or answer.reason
        if answer.status_code >= 300:  # redirections among them, which are not followed
            remedies = {
                401: f"Set the same {self._api.KEY} in the environment here.",
                404: f"Start it with {self._api.START_WITH}.",
                503: f"It is paused (POST {self.url}{self._api.RESUME} lets it go on), or its "
                "engine is dead.",
            }
            remedy = remedies.get(answer.status_code, "")
            if "max allowed" in text and "logprobs" in text:
                remedy = "Start it with that --max-logprobs, or use a smaller sampler.keep_top."
            if path == self._api.LOAD and not remedy:
                remedy = (
                    "Does it see that folder? sampler.weights_folder=FOLDER names one that all "
                    "servers see."
                )
            raise SamplerLost(
                f"the sampling server {self.url} answered {path} with {answer.status_code}: "
                f"{text}. {remedy} {self._words()}"
            )
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise self._fault(f"its answer to {path} is not JSON: {text[:100]}") from None

    def _check_process(self) -> None:
        """Raise SamplerLost where the server was started here and has ended."""
        status = None if self._process is None else self._process.status
        if status is not None:
            words = self._words()
            raise SamplerLost(
                f"the sampling server {self.url} ended with status {status}. "
                f"{words}{self._api.advice(words)}"
            )

    def _words(self) -> str:
        return LOST if self._process is None else f"{self._process.last_words()} {LOST}"

    def _fault(self, fault: str) -> SamplerLost:
        return SamplerLost(
            f"the sampling server {self.url} does not answer as asked: {fault}. {LOST}"
        )


def _tensors(choice: Choice) -> tuple[Tensor, Tensor]:
    """Return tokens (N,) int64 and their log-probs (N,) float32; raise one of _FORM where they are
    something else."""
    tokens = torch.tensor(choice.tokens, dtype=torch.int64)
    log_probs = torch.tensor(choice.log_probs, dtype=torch.float32)
    if tokens.ndim != 1 or not len(tokens) or tokens.shape != log_probs.shape:
        raise ValueError("a completion has no log-prob for each of its tokens")
    return tokens, log_probs


def _top(choice: Choice, count: int, least: float) -> tuple[Tensor, Tensor] | None:
    """Return the `count` likeliest tokens beside each token, as a `Completion` has them.

    Of equal log-probs the smaller ids come first, among the tokens that the server gave. count 0:
    None. least: a token of at most this log-prob is left out. Raises one of _FORM where they are
    something else.
    """
    if not count:
        return None
    ids = torch.full((len(choice.tokens), count), -1, dtype=torch.int32)
    log_probs = torch.full((len(choice.tokens), count), -torch.inf)
    for place, pairs in enumerate(choice.top):
        likely = [pair for pair in pairs if pair[1] > least] if least > -math.inf else pairs
        kept = sorted(likely, key=lambda pair: (-pair[1], pair[0]))[:count]
        if not kept:
            raise ValueError("a completion has no likeliest tokens beside one of its tokens")
        ids[place, : len(kept)] = torch.tensor([token for token, _ in kept], dtype=torch.int32)
        log_probs[place, : len(kept)] = torch.tensor([log_prob for _, log_prob in kept])
    return ids, log_probs

"""The client of one server of completions: its calls over HTTP, and what is wrong with an answer,
in a sentence."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import requests
import torch
from requests.adapters import HTTPAdapter
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import SamplerLost, first_line
from pgtoolkit.sampling.server_api import LOST, Call, Choice, Sampling
from pgtoolkit.sampling.server_process import ServerProcess
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.background import in_background

_PATIENCE_SECONDS, _PAUSE = 30, 0.5
"""For how long a call that finds no connection, or a busy server (503), is made again, and after
how long each time."""
_MOST_BYTES, _BYTES_PER_TOKEN = 2**20, 2**10
"""Most bytes of an answer, and how many more for each token that was asked for or is sent back."""
_BY_CHANCE = -30.0
"""Log-probability below which it is no chance that completions of a prompt are the same."""
_CONNECTIONS = 1024
_FORM = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RuntimeError)
"""What reading an answer raises that is some other JSON."""


class Server:
    """A server at `url`, spoken to in the words of `api`.

    answer_seconds: the longest that a call may take. process: its process, if it was started here.
        key: what it lets
    requests in with; None where it wants none. Each call raises SamplerLost at its deadline, as of
    time.monotonic(), or before, for whatever is not as it should.
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
        self._api, self._answer_seconds, self._process = api, answer_seconds, process
        self._health = "Nothing listens there, or the way is closed."
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy is not the way to a server beside us
        self._session.headers["Accept-Encoding"] = "identity"
        if key is not None:
            self._session.headers["Authorization"] = f"Bearer {key}"
        adapter = HTTPAdapter(pool_maxsize=_CONNECTIONS)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)

    def close(self) -> None:
        self._session.close()

    def is_up(self) -> bool:
        """Whether it answers by now; SamplerLost if it was started here and has ended."""
        self._check_process()
        with contextlib.suppress(requests.RequestException, TimeoutError):
            status = self._answer("GET", self._api.HEALTH, None, 5, _MOST_BYTES)[0].status_code
            self._health = f"It answers {self._api.HEALTH} with {status}."
            return status == 200
        return False

    def last_words(self) -> str:
        """What is known of it while it is not up."""
        return f"{self._health} {LOST}" if self._process is None else self._words()

    def complete(
        self, request: Request, sampling: Sampling, salt: str, version: int, deadline: float
    ) -> list[Completion]:
        """Return the completions of one request, checked for what the proof of their log-probs
        cannot see.

        version: of the weights.
        """
        if request.max_tokens is not None:
            sampling = replace(sampling, max_tokens=request.max_tokens)
        tokens = request.completions * (len(request.tokens) + sampling.max_tokens)
        answer = self.post(self._api.completions(request, sampling, salt), deadline, tokens)
        try:
            choices = self._api.choices(answer)
            tensors = [_tensors(choice) for choice in choices]
        except _FORM as error:
            form = f"the form of {self._api.NAME}'s"
            raise self._odd(f"its completions are not of {form} ({first_line(error)})") from error
        if len(choices) != request.completions:
            raise self._odd(f"it gave {len(choices)} completions instead of {request.completions}")
        completions = [
            self._completion(choice, *tensors_of_choice, sampling, version)
            for choice, tensors_of_choice in zip(choices, tensors, strict=True)
        ]
        if sampling.temperature > 0:
            self._check_drawn(completions)
        return completions

    def score(self, tokens: list[int], salt: str, deadline: float) -> Tensor:
        """(S - 1,) float32, the log-probs of a text's tokens from the second on, before temperature
        and cuts."""
        answer = self.post(self._api.scores(tokens, salt), deadline, len(tokens))
        try:
            return torch.tensor(self._api.log_probs(answer, tokens), dtype=torch.float32)
        except _FORM:
            raise self._odd("it gave no log-prob for each token of a prompt") from None

    def _completion(
        self, choice: Choice, tokens: Tensor, log_probs: Tensor, sampling: Sampling, version: int
    ) -> Completion:
        foreign = tokens[(tokens < 0) | (tokens >= sampling.vocabulary_size)]
        if len(foreign):
            raise self._odd(
                f"it sampled token {foreign[0]}, and the trainer's vocabulary has "
                f"{sampling.vocabulary_size} entries. It serves another model"
            )
        # A server decodes token by token, and may see a stop string later than it stands in the
        # whole text.
        stopped = sampling.stops.end(tokens.tolist())
        reason = "stop" if stopped else self._finish(tokens.tolist(), choice, sampling)
        return Completion(tokens[:stopped], log_probs[:stopped], reason, version)

    def _finish(
        self, tokens: list[int], choice: Choice, sampling: Sampling
    ) -> Literal["stop", "length"]:
        by_text = choice.stop_text in sampling.stops.strings
        *inside, last = (token in sampling.ends for token in tokens)
        fits = len(tokens) <= sampling.max_tokens
        if choice.finish_reason == "stop" and (last or by_text) and not any(inside) and fits:
            return "stop"
        if (
            choice.finish_reason == "length"
            and len(tokens) == sampling.max_tokens
            and not (last or any(inside))
        ):
            return "length"
        where = (
            f"with token {tokens[-1]} after {len(tokens)} of at most {sampling.max_tokens} tokens"
        )
        beyond = ", beyond an end-of-sequence token" if any(inside) else ""
        raise self._odd(f"a completion ends {where}{beyond}, for the reason {choice.finish_reason}")

    def _check_drawn(self, completions: list[Completion]) -> None:
        """Any k of n draws are the same with a chance of at most C(n, k) p^(k - 1) where that one
        has chance p."""
        counts = Counter(tuple(completion.tokens.tolist()) for completion in completions)
        for completion in completions:
            same, log_prob = (
                counts[tuple(completion.tokens.tolist())],
                completion.log_probs.double().sum().item(),
            )
            if (same - 1) * log_prob + math.log(math.comb(len(completions), same)) < _BY_CHANCE:
                raise self._odd(
                    f"{same} of {len(completions)} completions of a prompt are the same, whose "
                    f"log-prob is {log_prob:.0f}: it did not draw each of them"
                )

    def post(self, call: Call, deadline: float, tokens: int = 0) -> Any:
        """The JSON of the answer, None where it is empty; tokens: most that it tells of."""
        (path, body), patience = call, min(deadline, time.monotonic() + _PATIENCE_SECONDS)
        while True:
            self._check_process()
            left, over = max(0.1, deadline - time.monotonic()), time.monotonic() + _PAUSE > patience
            try:
                answer, content = self._answer(
                    "POST", path, body, left, _MOST_BYTES + _BYTES_PER_TOKEN * tokens
                )
                if answer.status_code != 503 or over:
                    return self._content(path, answer, content)
            except (requests.ReadTimeout, TimeoutError) as error:
                raise SamplerLost(
                    f"the sampling server {self.url} did not answer {path} within "
                    f"sampler.answer_seconds={self._answer_seconds}. It hangs, is paused (POST "
                    f"{self.url}{self._api.RESUME}), or has more to do than that allows. "
                    f"{self._words()}"
                ) from error
            except requests.RequestException as error:
                self._check_process()
                if over:
                    raise SamplerLost(
                        f"the sampling server {self.url} cannot be reached, or breaks off its "
                        f"answers: {first_line(error)[:300]}. Start it again. {self._words()}"
                    ) from error
            time.sleep(_PAUSE)

    def _answer(
        self, method: str, path: str, body: dict | None, seconds: float, most: int
    ) -> tuple[requests.Response, bytes]:
        """The whole answer, of at most so many bytes; TimeoutError where it is not there within so
        many seconds.

        requests counts its own from the last byte that came. Where it is sent on, a POST would
        become a GET.
        """
        return in_background(partial(self._read, method, path, body, seconds, most)).result(seconds)

    def _read(
        self, method: str, path: str, body: dict | None, seconds: float, most: int
    ) -> tuple[requests.Response, bytes]:
        end, content, timeouts = (
            time.monotonic() + seconds,
            bytearray(),
            (min(seconds / 2, 10), seconds),
        )
        with self._session.request(
            method, self.url + path, json=body, timeout=timeouts, allow_redirects=False, stream=True
        ) as answer:
            for part in answer.iter_content(2**16):
                content += part
                if len(content) > most:
                    raise self._odd(
                        f"its answer to {path} has more than the {most} bytes that were asked for"
                    )
                if time.monotonic() > end:  # whoever waited has given up
                    raise TimeoutError
        return answer, bytes(content)

    def _content(self, path: str, answer: requests.Response, content: bytes) -> Any:
        said = " ".join(content[:600].decode(errors="replace").split()) or answer.reason
        if answer.status_code >= 300:  # sent on among them: a POST would become a GET
            uses = {
                401: f"Give pgtk the same {self._api.KEY} in its environment.",
                404: f"Start it with {self._api.START_WITH}.",
                503: f"It is paused (POST {self.url}{self._api.RESUME}), or its engine is dead.",
            }
            use = uses.get(answer.status_code, "")
            if path == self._api.LOAD and not use:
                use = (
                    "Does it see that folder? sampler.weights_folder=FOLDER names one that all "
                    "servers do."
                )
            raise SamplerLost(
                f"the sampling server {self.url} answered {path} with {answer.status_code}: "
                f"{said}. {use} {self._words()}"
            )
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise self._odd(f"{path} answered what is no JSON: {said[:100]}") from None

    def _check_process(self) -> None:
        if self._process is not None and (status := self._process.status) is not None:
            words = self._words()
            raise SamplerLost(
                f"the sampling server {self.url} ended with status {status}. "
                f"{words}{self._api.advice(words)}"
            )

    def _words(self) -> str:
        return LOST if self._process is None else f"{self._process.last_words()} {LOST}"

    def _odd(self, fault: str) -> SamplerLost:
        return SamplerLost(
            f"the sampling server {self.url} does not answer as asked: {fault}. {LOST}"
        )


def _tensors(choice: Choice) -> tuple[Tensor, Tensor]:
    """Return tokens (N,) int64 and their log-probs (N,) float32; raises one of _FORM where they are
    something else."""
    tokens = torch.tensor(choice.tokens, dtype=torch.int64)
    log_probs = torch.tensor(choice.log_probs, dtype=torch.float32)
    if tokens.ndim != 1 or not len(tokens) or tokens.shape != log_probs.shape:
        raise ValueError("a completion has no log-prob for each of its tokens")
    return tokens, log_probs

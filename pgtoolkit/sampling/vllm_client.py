"""The client of one vLLM server: its calls over HTTP, and what is wrong with an answer, each in one sentence."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
import urllib3
from torch import Tensor

from pgtoolkit.errors import SamplerLost, first_line
from pgtoolkit.sampling.server_process import ServerProcess
from pgtoolkit.system.background import in_background
from pgtoolkit.tasks.completion import Completion, Request
from pgtoolkit.tasks.stops import StopStrings

_ATTEMPTS = 4
"""Of a call that found no connection; each waits longer than the one before."""
_BUSY_SECONDS, _BUSY_PAUSE = 30, 0.5
"""For how long a server may answer 503, as it does while it is paused, and after how long it is asked again."""
_MOST_BYTES, _BYTES_PER_TOKEN = 2**20, 2**10
"""Most bytes of an answer, and how many more for each token that was asked for or is sent back."""
_BY_CHANCE = -30.0
"""Log-probability below which it is no chance that completions of a prompt are the same."""
LOST = "Nothing that was trained is lost."
_CONNECTIONS = 1024
_NO_NUMBERS = "Its weights give numbers that are none"
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that says which of its two parts that run the model vLLM uses."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled.

    ends: token ids that end a completion; stops: texts that do. vocabulary_size: entries of the trainer's.
    seeded: whether each request passes on its seed.
    """

    temperature: float
    top_p: float
    max_tokens: int
    ends: list[int]
    stops: StopStrings
    vocabulary_size: int
    seeded: bool

    def body(self, request: Request, salt: str) -> dict[str, Any]:
        """Of a call for completions: every setting that would otherwise be the server's or its model's own.

        salt: what the server may have cached of another salt's prompts is of other weights, and is not used.
        """
        seed = {"seed": request.seed} if self.seeded else {}
        stops = {"stop": self.stops.strings} if self.stops else {}
        return (
            seed
            | stops
            | {
                "prompt": request.tokens,
                "n": request.completions,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": self.ends,
                "ignore_eos": True,  # the ends are those above and no others
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,  # what is no text needs no decoding
                "cache_salt": salt,
            }
        )


@dataclass(frozen=True)
class _Answer:
    status: int
    reason: str
    content: bytes


class Server:
    """A server at `url`; answer_seconds: the longest that a call may take; process: its process, if it is ours.

    key: what it lets requests in with; None where it wants none.
    Each call raises SamplerLost at its deadline, as of time.monotonic(), or before, for whatever is not as it should.
    """

    def __init__(self, url: str, answer_seconds: int, process: ServerProcess | None = None, key: str | None = None):
        self.url = url.rstrip("/")
        self._answer_seconds = answer_seconds
        self._process = process
        self._health = "Nothing listens there, or the way is closed."
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy is not the way to a server beside us
        self._session.headers["Accept-Encoding"] = "identity"  # a packed answer is larger than it looks
        if key is not None:
            self._session.headers["Authorization"] = f"Bearer {key}"
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS)
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, adapter)

    def close(self) -> None:
        self._session.close()
        if self._process is not None:
            self._process.end()

    def is_up(self) -> bool:
        """Whether it answers by now; SamplerLost if it is ours and has ended."""
        self._check_process()
        with contextlib.suppress(requests.RequestException, TimeoutError):
            status = self._answer("GET", "/health", None, 5, _MOST_BYTES).status
            self._health = f"It answers /health with {status}."
            return status == 200
        return False

    def last_words(self) -> str:
        """What is known of it while it is not up."""
        return f"{self._health} {LOST}" if self._process is None else self._words()

    def check_folder(self, folder: Path, deadline: float) -> None:
        """Raises SamplerLost where what answers is not the server that was started from this folder."""
        found = self._call("GET", "/v1/models", None, deadline)
        models = found.get("data") if isinstance(found, dict) else None
        roots = [model.get("root") for model in models or [] if isinstance(model, dict)]
        if str(folder) not in roots:
            raise self._odd(f"it serves {roots or 'no model'} and not {folder}: another program has taken its port")

    def reload(self, folder: Path, deadline: float) -> None:
        """Load the weights in a folder that the server sees."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", body, deadline)

    def post(self, path: str, deadline: float) -> None:
        self._call("POST", path, None, deadline)

    def complete(
        self, request: Request, sampling: Sampling, salt: str, version: int, deadline: float
    ) -> list[Completion]:
        """The completions of one request, each checked to be what was asked for; version: of the weights."""
        tokens = request.completions * (len(request.tokens) + sampling.max_tokens)
        found = self._call("POST", "/v1/completions", sampling.body(request, salt), deadline, tokens)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != request.completions:
            count = len(choices) if isinstance(choices, list) else "no"
            raise self._odd(f"it gave {count} completions instead of {request.completions}")
        try:
            if any(choice.get("prompt_token_ids") != request.tokens for choice in choices):
                raise self._odd("it completed another prompt than it was given, or does not say which")
            completions = [self._completion(choice, sampling, version) for choice in choices]
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # of any JSON at all
            raise self._odd(f"a completion is not of the form of vLLM's ({first_line(error)})") from error
        if sampling.temperature > 0:
            self._check_distinct(completions)
        return completions

    def _check_distinct(self, completions: list[Completion]) -> None:
        """Any k of n draws are the same with a chance of at most C(n, k) p^(k - 1) where that one has chance p."""
        counts = Counter(tuple(completion.tokens.tolist()) for completion in completions)
        for completion in completions:
            same, log_prob = counts[tuple(completion.tokens.tolist())], completion.log_probs.double().sum().item()
            if (same - 1) * log_prob + math.log(math.comb(len(completions), same)) < _BY_CHANCE:
                raise self._odd(
                    f"{same} of {len(completions)} completions of a prompt are the same, whose log-prob is "
                    f"{log_prob:.0f}: it did not draw each of them"
                )

    def score(self, tokens: list[int], salt: str, deadline: float) -> Tensor:
        """(S - 1,) float32, the log-probs of a text's tokens from the second on, before temperature and cuts."""
        body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt, "return_token_ids": True}
        found = self._call("POST", "/v1/completions", body, deadline, len(tokens))
        try:
            entries = found["choices"][0]["prompt_logprobs"]
            values = [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)]
            scores = torch.tensor(values, dtype=torch.float32)
        except (TypeError, LookupError, ValueError, OverflowError, RuntimeError):
            raise self._odd("it gave no prompt_logprobs for each token of a prompt") from None
        if len(odd := (~scores.isfinite()).nonzero()):
            raise self._odd(f"the log-prob of a prompt's token is {scores[odd[0]].item()}. {_NO_NUMBERS}")
        return scores

    def _completion(self, choice: dict, sampling: Sampling, version: int) -> Completion:
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list) or not tokens:
            raise self._odd("a completion has no token_ids. vLLM gives them since 0.10.2")
        if odd := [token for token in tokens if type(token) is not int]:  # True is an instance of int
            raise self._odd(f"its token_ids are no whole numbers: {odd[:5]}")
        numbers = torch.tensor(tokens)
        if len(odd := numbers[(numbers < 0) | (numbers >= sampling.vocabulary_size)]):
            raise self._odd(
                f"it sampled token {odd[0]}, and the trainer's vocabulary has {sampling.vocabulary_size} entries. It "
                "serves another model"
            )
        if len(tokens) > sampling.max_tokens:
            raise self._odd(f"a completion has {len(tokens)} tokens, and {sampling.max_tokens} is the most allowed")
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(log_probs, list) or len(log_probs) != len(tokens):
            raise self._odd("a completion has no log-prob for each of its tokens")
        # vLLM writes null for NaN, and -9999 for minus infinity.
        values = torch.tensor(
            [one if type(one) in (int, float) else math.nan for one in log_probs], dtype=torch.float64
        )
        if len(odd := (~((values > -9999) & (values <= 1e-4))).nonzero()):
            raise self._odd(
                f"the log-prob of a sampled token is {log_probs[odd[0]]}. {_NO_NUMBERS}, or it was started without "
                "--logprobs-mode processed_logprobs"
            )
        # A server decodes token by token, and may see a stop string later than it stands in the whole text.
        stopped = sampling.stops.end(tokens)
        reason = "stop" if stopped else self._finish(numbers, choice, sampling)
        return Completion(numbers[:stopped], values[:stopped].float(), reason, version)

    def _finish(self, tokens: Tensor, choice: dict, sampling: Sampling) -> str:
        reason = choice.get("finish_reason")
        *inside, last = torch.isin(tokens, torch.tensor(sampling.ends, dtype=torch.int64)).tolist()
        of_text = choice.get("stop_reason") in sampling.stops.strings
        if reason == "stop" and (last or of_text) and not any(inside):
            return reason
        if reason == "length" and len(tokens) == sampling.max_tokens and not last and not any(inside):
            return reason
        where = f"with token {tokens[-1]} after {len(tokens)} of at most {sampling.max_tokens} tokens"
        beyond = ", beyond an end-of-sequence token" if any(inside) else ""
        raise self._odd(f"a completion ends {where}{beyond}, for the reason {reason}")

    def _call(self, method: str, path: str, body: dict | None, deadline: float, tokens: int = 0) -> Any:
        """The JSON of the answer, None where it is empty; tokens: most that it tells of."""
        begin, attempt = time.monotonic(), 0
        most = _MOST_BYTES + _BYTES_PER_TOKEN * tokens
        while True:
            self._check_process()
            left = max(0.1, deadline - time.monotonic())
            try:
                answer = self._answer(method, path, body, left, most)
            except (requests.RequestException, urllib3.exceptions.HTTPError, TimeoutError) as error:
                self._check_process()
                over = time.monotonic() >= deadline
                if over and not isinstance(error, requests.ConnectTimeout):
                    raise SamplerLost(
                        f"the sampling server {self.url} did not answer {path} within "
                        f"sampler.answer_seconds={self._answer_seconds}. It hangs, is paused (POST {self.url}/resume), "
                        f"or has more to do than that allows. {self._words()}"
                    ) from error
                attempt += 1
                if attempt < _ATTEMPTS and not over:
                    time.sleep(0.2 * 2**attempt)
                    continue
                raise SamplerLost(
                    f"the sampling server {self.url} cannot be reached, or breaks off its answers: "
                    f"{first_line(error)[:300]}. Start it again. {self._words()}"
                ) from error
            if answer.status == 503 and time.monotonic() + _BUSY_PAUSE < min(deadline, begin + _BUSY_SECONDS):
                time.sleep(_BUSY_PAUSE)
                continue
            return self._content(path, answer, time.monotonic() - begin)

    def _answer(self, method: str, path: str, body: dict | None, seconds: float, most: int) -> _Answer:
        """The whole answer, within so many seconds; TimeoutError where it is not there by then.

        requests counts its own from the last byte that came. Where it is sent on, a POST would become a GET.
        most: bytes of it; SamplerLost where there are more.
        """
        return in_background(partial(self._read, method, path, body, seconds, most)).result(seconds)

    def _read(self, method: str, path: str, body: dict | None, seconds: float, most: int) -> _Answer:
        end, content = time.monotonic() + seconds, bytearray()
        how = {"json": body, "timeout": (min(seconds, 10), seconds), "allow_redirects": False, "stream": True}
        with self._session.request(method, self.url + path, **how) as answer:
            for part in answer.raw.stream(2**16, decode_content=False):
                content += part
                if len(content) > most:
                    raise self._odd(f"its answer to {path} has more than the {most} bytes that were asked for")
                if time.monotonic() > end:  # whoever waited has given up
                    raise TimeoutError
            if (packed := answer.headers.get("Content-Encoding", "identity")) != "identity":
                raise self._odd(f"its answer to {path} is packed ({packed:.20}), which was not asked for")
            return _Answer(answer.status_code, answer.reason, bytes(content))

    def _content(self, path: str, answer: _Answer, seconds: float) -> Any:
        """seconds: since it was asked for the first time."""
        said = " ".join(answer.content[:600].decode(errors="replace").split()) or answer.reason
        if answer.status == 503:
            raise SamplerLost(
                f"the sampling server {self.url} still answers {path} with 503 after {seconds:.0f} s ({said}). It is "
                f"paused, or its engine is dead. POST {self.url}/resume, or start it again. {self._words()}"
            )
        if answer.status in (404, 405):
            raise SamplerLost(
                f"the sampling server {self.url} has no {path}. Start it with VLLM_SERVER_DEV_MODE=1 and "
                f"--enable-sleep-mode. {LOST}"
            )
        if answer.status >= 300:  # sent on among them
            use = ""
            if answer.status == 401:
                use = "It wants a key: give pgtk the same VLLM_API_KEY in its environment. "
            elif path == "/collective_rpc":
                use = "Does it see that folder? sampler.weights_folder=FOLDER names one that all servers do. "
            raise SamplerLost(
                f"the sampling server {self.url} answered {path} with {answer.status}: {said}. {use}{self._words()}"
            )
        try:
            return json.loads(answer.content) if answer.content else None
        except (ValueError, RecursionError):
            raise self._odd(f"{path} answered what is no JSON: {said[:100]}") from None

    def _check_process(self) -> None:
        if self._process is not None and (status := self._process.status) is not None:
            words = self._words()
            use = f" Set {V2_RUNNER}=0 in the environment." if "Model Runner V2" in words else ""
            raise SamplerLost(f"the sampling server {self.url} ended with status {status}. {words}{use}")

    def _words(self) -> str:
        return LOST if self._process is None else f"{self._process.last_words()} {LOST}"

    def _odd(self, what: str) -> SamplerLost:
        return SamplerLost(f"the sampling server {self.url} does not answer as asked: {what}. {LOST}")

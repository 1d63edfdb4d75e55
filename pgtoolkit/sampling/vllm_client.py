"""The client of one vLLM server: its calls over HTTP, and what is wrong with an answer, each in one sentence."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
from torch import Tensor

from pgtoolkit.errors import SamplerLost, first_line
from pgtoolkit.sampling.server_process import ServerProcess
from pgtoolkit.system.background import in_background
from pgtoolkit.tasks.completion import Completion, Request
from pgtoolkit.tasks.stops import StopStrings

_ATTEMPTS = 4
"""Of a call that found no connection; each waits longer than the one before."""
_BUSY_SECONDS = 30
"""For how long a server may answer 503, as it does while it is paused."""
LOST = "Nothing that was trained is lost."
_CONNECTIONS = 1024
_NO_NUMBERS = "Its weights give log-probs that are NaN"
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


class Server:
    """A server at `url`; answer_seconds: the longest that a call may take; process: its process, if it is ours.

    Each call raises SamplerLost at its deadline, as of time.monotonic(), or before, for whatever is not as it should.
    """

    def __init__(self, url: str, answer_seconds: int, process: ServerProcess | None = None):
        self.url = url.rstrip("/")
        self._answer_seconds = answer_seconds
        self._process = process
        self._health = "Nothing listens there, or the way is closed."
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy is not the way to a server beside us
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
            status = self._answer("GET", "/health", None, 5).status_code
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
        found = self._call("POST", "/v1/completions", sampling.body(request, salt), deadline)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != request.completions:
            count = len(choices) if isinstance(choices, list) else "no"
            raise self._odd(f"it gave {count} completions instead of {request.completions}")
        try:
            return [self._completion(choice, sampling, version) for choice in choices]
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:  # of any JSON at all
            raise self._odd(f"a completion is not of the form of vLLM's ({first_line(error)})") from error

    def score(self, tokens: list[int], salt: str, deadline: float) -> Tensor:
        """(S - 1,) float32, the log-probs of a text's tokens from the second on, before temperature and cuts."""
        body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt, "return_token_ids": True}
        found = self._call("POST", "/v1/completions", body, deadline)
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
        numbers = torch.tensor(tokens)
        if numbers.dtype != torch.int64:
            raise self._odd(f"its token_ids are no whole numbers: {tokens[:5]}")
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
            [one if isinstance(one, int | float) else math.nan for one in log_probs], dtype=torch.float64
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

    def _call(self, method: str, path: str, body: dict | None, deadline: float) -> Any:
        """The JSON of the answer, None where it is empty."""
        begin, attempt = time.monotonic(), 0
        while True:
            self._check_process()
            left = max(0.1, deadline - time.monotonic())
            try:
                answer = self._answer(method, path, body, left)
            except (requests.RequestException, TimeoutError) as error:
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
            if answer.status_code == 503 and time.monotonic() < min(deadline, begin + _BUSY_SECONDS):
                time.sleep(0.5)
                continue
            return self._content(path, answer)

    def _answer(self, method: str, path: str, body: dict | None, seconds: float) -> requests.Response:
        """The whole answer, within so many seconds; TimeoutError where it is not there by then.

        requests counts its own from the last byte that came. Where it is sent on, a POST would become a GET.
        """
        how = {"json": body, "timeout": (min(seconds, 10), seconds), "allow_redirects": False}
        return in_background(partial(self._session.request, method, self.url + path, **how)).result(seconds)

    def _content(self, path: str, answer: requests.Response) -> Any:
        said = " ".join(answer.content[:600].decode(errors="replace").split()) or answer.reason
        if answer.status_code == 503:
            raise SamplerLost(
                f"the sampling server {self.url} answers 503 for more than {_BUSY_SECONDS} seconds ({said}). It is "
                f"paused, or its engine is dead. POST {self.url}/resume, or start it again. {self._words()}"
            )
        if answer.status_code in (404, 405):
            raise SamplerLost(
                f"the sampling server {self.url} has no {path}. Start it with VLLM_SERVER_DEV_MODE=1 and "
                f"--enable-sleep-mode. {LOST}"
            )
        if answer.status_code >= 300:  # sent on among them
            use = ""
            if answer.status_code == 401:
                use = "pgtk has no key for it: start it without --api-key and VLLM_API_KEY. "
            elif path == "/collective_rpc":
                use = "Does it see that folder? sampler.weights_folder=FOLDER names one that all servers do. "
            raise SamplerLost(
                f"the sampling server {self.url} answered {path} with {answer.status_code}: {said}. {use}"
                f"{self._words()}"
            )
        try:
            return answer.json() if answer.content else None
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

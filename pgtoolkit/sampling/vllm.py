"""The words of vLLM: the command that starts its server, its calls and its answers."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import ClassVar

from pgtoolkit.completion import Request
from pgtoolkit.sampling.server_api import Call, Choice, Json, ServerPlan, ServerSampling
from pgtoolkit.sampling.settings import VllmSamplerSettings

_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that chooses between vLLM's two model runners."""
_EXTENSION = "--worker-extension-cls"
_FRONT_ENDS = 4
"""Processes for each GPU that take requests and write answers, beside the one that computes."""


class Vllm:
    """The words of vLLM 0.24; another kind of server needs a class with the same names.

    LEAST_LOG_PROB: the number that stands for -inf, of a token that truncated sampling leaves out.

    Methods that read an answer may raise any error that unexpected JSON leads to.
    """

    NAME = "vLLM"
    HEALTH = "/health"  # answers 200 once the server is up
    LOAD = "/collective_rpc"  # the path of calls that load weights
    RESUME = "/resume"  # makes a paused server go on
    KEY = "VLLM_API_KEY"  # the environment variable with the key that the server asks for
    LEAST_LOG_PROB = -9999.0
    START_WITH = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"  # the server lacks paths without
    # The folder of modules that run inside a server, on its PYTHONPATH.
    MODULES = Path(__file__).with_name("vllm_worker")
    FIXED_MEMORY = "--kv-cache-memory-bytes"  # without it the server measures how much is free
    # The server's environment variables; one that this process has keeps its value.
    VARIABLES: ClassVar[dict[str, str]] = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it the server cannot be given other weights
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile itself at the start
        "VLLM_NO_USAGE_STATS": "1",
        _V2_RUNNER: "1",  # draws tokens with seeds as fast as without
    }

    def command(
        self,
        settings: VllmSamplerSettings,
        seed: int,
        has_stops: bool,
        folder: Path,
        plan: ServerPlan,
        host: str,
        port: int,
    ) -> list[str]:
        """Return the command that starts a server on the weights in a folder.

        has_stops: whether texts end completions.
        """
        options = {
            "host": host,
            "port": port,
            "dtype": plan.number_type,
            "logprobs-mode": "processed_logprobs",
            "max-model-len": plan.room,
            "max-num-seqs": settings.max_sequences,
            "gpu-memory-utilization": settings.gpu_memory_share / settings.servers_per_gpu,
            "tensor-parallel-size": settings.tensor_parallel,
            "generation-config": "vllm",
            "seed": seed,
        }
        program = [
            # A path of the program's own would hide our module.
            f"{word}{os.pathsep}{self.MODULES}" if word.startswith("PYTHONPATH=") else word
            for word in shlex.split(settings.executable)
        ]
        return [
            *(*program, "serve", str(folder)),
            *(text for name, value in options.items() for text in (f"--{name}", str(value))),
            f"--api-server-count={max(1, _FRONT_ENDS // settings.servers_per_gpu)}",
            f"{_EXTENSION}=pgtk_vllm_worker.FromMemory",
            # Nothing but stop strings needs the text of tokens.
            *([] if has_stops else ["--skip-tokenizer-init"]),
            # Without it the server gives 20 at most.
            *([f"--max-logprobs={settings.keep_top + 1}"] if settings.keep_top else []),
            "--disable-uvicorn-access-log",
            "--disable-log-stats",
            *(["--enable-sleep-mode"] if plan.sleeps else []),
            *settings.arguments,
        ]

    def completions(self, request: Request, sampling: ServerSampling, salt: str) -> Call:
        """Return the call that completes a request.

        It names every setting for which the server or its model could have another default.
        salt: the server uses what it has cached of prompts only for the same salt.
        """
        body = {
            "prompt": request.tokens,
            "n": request.completions,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sampling.ends,
            "ignore_eos": True,  # the ends are those above and no others
            "logprobs": min(sampling.keep_top, sampling.vocabulary_size),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # saves decoding tokens for the log-probs
            "cache_salt": salt,
        }
        seed = {"seed": request.seed} if sampling.seeded else {}
        stops = {"stop": sampling.stops.strings} if sampling.stops else {}
        return "/v1/completions", body | seed | stops

    def choices(self, answer: Json) -> list[Choice]:
        """Return the completions of an answer, unchecked."""
        return [
            Choice(
                tokens=choice.get("token_ids"),
                log_probs=(choice.get("logprobs") or {}).get("token_logprobs"),
                top=self._top((choice.get("logprobs") or {}).get("top_logprobs")),
                finish_reason=choice.get("finish_reason"),
                stop_text=choice.get("stop_reason"),
            )
            for choice in answer["choices"]
        ]

    def _top(self, top: Json) -> Json:
        """Return the likeliest tokens as a `Choice` has them: vLLM names a token "token_id:7"."""
        if top is None:
            return None
        return [
            [(int(name.removeprefix("token_id:")), log_prob) for name, log_prob in of_token.items()]
            for of_token in top
        ]

    def scores(self, tokens: list[int], salt: str) -> Call:
        """Return the call for the log-probs of a text's tokens."""
        body = {
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "cache_salt": salt,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    def log_probs(self, answer: Json, tokens: list[int]) -> list[float]:
        """Return the log-probs of a text's tokens from the second on.

        They are those before temperature and top_p.
        """
        entries = answer["choices"][0]["prompt_logprobs"]
        return [
            entry[str(token)]["logprob"]
            for token, entry in zip(tokens[1:], entries[1:], strict=True)
        ]

    def load(self, folder: Path, settings: VllmSamplerSettings) -> Call:
        """Return the call that loads the weights in a folder; servers that were started here load
        by our module inside them."""
        if settings.urls or any(argument.startswith(_EXTENSION) for argument in settings.arguments):
            return self.LOAD, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return self.LOAD, {"method": "load_from_memory", "args": [str(folder)]}

    def forget(self) -> Call:
        """Return the call that drops what is cached of prompts."""
        return "/reset_prefix_cache", None

    def sleep(self) -> Call:
        """Return the call that gives the GPU's memory back, that of the weights too."""
        return "/sleep?level=2", None

    def wake(self, part: str) -> Call:
        """Return the call that takes a part of the memory back.

        part: "weights", whose numbers are then to be loaded, or "cache" once they are.
        """
        return f"/wake_up?tags={'kv_cache' if part == 'cache' else part}", None

    def advice(self, last_words: str) -> str:
        """Return what to do about a server that ended with these words; "" if that is not known."""
        if "pgtk_vllm_worker" in last_words:
            return (
                " It did not find our module that loads its weights: let the program of "
                f"sampler.executable pass PYTHONPATH on, or use sampler.arguments=[{_EXTENSION}=]."
            )
        return f" Set {_V2_RUNNER}=0 in the environment." if "Model Runner V2" in last_words else ""

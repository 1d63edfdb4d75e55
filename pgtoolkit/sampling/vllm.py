"""The words of vLLM: how its server is started, and what its calls and answers look like."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from pgtoolkit.config.schema import Config
from pgtoolkit.sampling.server_api import Call, Choice, Plan, Sampling
from pgtoolkit.tasks.completion import Request

_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that says which of its two parts that run the model vLLM uses."""
_FRONT_ENDS = 4
"""Processes of the servers on a GPU that take requests and write answers, while one computes."""


_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it there is no way to give it other weights
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which would compile itself at the start
    "VLLM_NO_USAGE_STATS": "1",
    _V2_RUNNER: "1",  # draws tokens with seeds as fast as without
}


class Vllm:
    """The `ServerApi` of vLLM 0.24."""

    NAME = "vLLM"
    HEALTH, RESUME = "/health", "/resume"
    KEY = "VLLM_API_KEY"
    START_WITH = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
    PROCESSED = "--logprobs-mode processed_logprobs"
    VARIABLES = _VARIABLES
    FIXED_MEMORY = "--kv-cache-memory-bytes"

    def command(self, config: Config, folder: Path, plan: Plan, host: str, port: int) -> list[str]:
        chosen = config.sampler
        options = {
            "host": host,
            "port": port,
            "dtype": plan.number_type,
            "logprobs-mode": "processed_logprobs",
            "max-model-len": plan.room,
            "max-num-seqs": chosen.max_sequences,
            "gpu-memory-utilization": chosen.gpu_memory_share / chosen.servers_per_gpu,
            "tensor-parallel-size": chosen.tensor_parallel,
            "generation-config": "vllm",
            "seed": config.seed,
        }
        return [
            *(*shlex.split(chosen.executable), "serve", str(folder)),
            *(text for name, value in options.items() for text in (f"--{name}", str(value))),
            f"--api-server-count={max(1, _FRONT_ENDS // chosen.servers_per_gpu)}",
            *([] if config.rollout.stop else ["--skip-tokenizer-init"]),  # text alone needs one
            "--disable-uvicorn-access-log",
            "--disable-log-stats",
            *(["--enable-sleep-mode"] if plan.sleeps else []),
            *chosen.arguments,
        ]

    def completions(self, request: Request, sampling: Sampling, salt: str) -> Call:
        body = {
            "prompt": request.tokens,
            "n": request.completions,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sampling.ends,
            "ignore_eos": True,  # the ends are those above and no others
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # what is no text needs no decoding
            "cache_salt": salt,
        }
        seed = {"seed": request.seed} if sampling.seeded else {}
        stops = {"stop": sampling.stops.strings} if sampling.stops else {}
        return "/v1/completions", body | seed | stops

    def choices(self, answer: Any) -> list[Choice]:
        return [
            Choice(
                prompt_tokens=choice.get("prompt_token_ids"),
                tokens=choice.get("token_ids"),
                log_probs=(choice.get("logprobs") or {}).get("token_logprobs"),
                finish_reason=choice.get("finish_reason"),
                stop_text=choice.get("stop_reason"),
            )
            for choice in answer["choices"]
        ]

    def scores(self, tokens: list[int], salt: str) -> Call:
        body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt, "return_token_ids": True}
        return "/v1/completions", body

    def log_probs(self, answer: Any, tokens: list[int]) -> list[float]:
        entries = answer["choices"][0]["prompt_logprobs"]
        return [entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)]

    def load(self, folder: Path) -> Call:
        return "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

    def forget(self) -> Call:
        return "/reset_prefix_cache", None

    def sleep(self) -> Call:
        return "/sleep?level=1", None

    def wake(self, part: str) -> Call:
        return f"/wake_up?tags={'kv_cache' if part == 'cache' else part}", None

    def advice(self, last_words: str) -> str:
        return f" Set {_V2_RUNNER}=0 in the environment." if "Model Runner V2" in last_words else ""

"""The words of vLLM: how its server is started, and what its calls and answers look like."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, ClassVar

from pgtoolkit.completion import Request
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_samplers import VllmSamplerConfig
from pgtoolkit.sampling.server_api import Call, Choice, Plan, Sampling

_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that says which of its two parts that run the model vLLM uses."""
_EXTENSION = "--worker-extension-cls"
_FRONT_ENDS = 4
"""Processes of the servers on a GPU that take requests and write answers, while one computes."""


class Vllm:
    """The words of vLLM 0.24; for another kind of server, a class with the same names says all that
    is to be said.

    What reads an answer may raise whatever JSON makes it raise.
    """

    NAME = "vLLM"
    HEALTH = "/health"  # answers 200 once the server is up
    LOAD = "/collective_rpc"  # where it is told to load weights
    RESUME = "/resume"  # by which a paused server goes on
    KEY = "VLLM_API_KEY"  # the environment variable with the key that it lets requests in with
    START_WITH = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"  # so that it has all paths
    # on its PYTHONPATH: what runs inside a server that is started
    MODULES = Path(__file__).with_name("vllm_worker")
    FIXED_MEMORY = "--kv-cache-memory-bytes"  # without which it measures how much memory is free
    # of its environment, where this process has none of that name
    VARIABLES: ClassVar[dict[str, str]] = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it there is no way to give it other weights
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which would compile itself at the start
        "VLLM_NO_USAGE_STATS": "1",
        _V2_RUNNER: "1",  # draws tokens with seeds as fast as without
    }

    def command(self, config: Config, folder: Path, plan: Plan, host: str, port: int) -> list[str]:
        """Starts it on the weights in a folder."""
        chosen = config.sampler
        assert isinstance(chosen, VllmSamplerConfig)
        assert isinstance(config.rollout, PolicyRolloutConfig)
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
            f"{_EXTENSION}=pgtk_vllm_worker.FromMemory",
            *([] if config.rollout.stop else ["--skip-tokenizer-init"]),  # text alone needs one
            "--disable-uvicorn-access-log",
            "--disable-log-stats",
            *(["--enable-sleep-mode"] if plan.sleeps else []),
            *chosen.arguments,
        ]

    def completions(self, request: Request, sampling: Sampling, salt: str) -> Call:
        """Every setting that would otherwise be the server's or its model's own is said.

        salt: what the server may have cached of another salt's prompts is of other weights, and is
            not used.
        """
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
                tokens=choice.get("token_ids"),
                log_probs=(choice.get("logprobs") or {}).get("token_logprobs"),
                finish_reason=choice.get("finish_reason"),
                stop_text=choice.get("stop_reason"),
            )
            for choice in answer["choices"]
        ]

    def scores(self, tokens: list[int], salt: str) -> Call:
        body = {
            "prompt": tokens,
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "cache_salt": salt,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    def log_probs(self, answer: Any, tokens: list[int]) -> list[float]:
        """Of a text's tokens from the second on, before temperature and cuts."""
        entries = answer["choices"][0]["prompt_logprobs"]
        return [
            entry[str(token)]["logprob"]
            for token, entry in zip(tokens[1:], entries[1:], strict=True)
        ]

    def load(self, folder: Path, config: Config) -> Call:
        """Take the weights that lie in a folder: by what runs inside, where it was started with
        that."""
        chosen = config.sampler
        assert isinstance(chosen, VllmSamplerConfig)
        if chosen.urls or any(argument.startswith(_EXTENSION) for argument in chosen.arguments):
            return self.LOAD, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return self.LOAD, {"method": "load_from_memory", "args": [str(folder)]}

    def forget(self) -> Call:
        """Drop what was cached of prompts."""
        return "/reset_prefix_cache", None

    def sleep(self) -> Call:
        """Give the GPU's memory back, the weights with it."""
        return "/sleep?level=2", None

    def wake(self, part: str) -> Call:
        """Take it again. part: "weights", whose numbers are then to be loaded, or "cache" once they
        are."""
        return f"/wake_up?tags={'kv_cache' if part == 'cache' else part}", None

    def advice(self, last_words: str) -> str:
        """What to do about a server that ended with these words, if that is known."""
        if "pgtk_vllm_worker" in last_words:
            return (
                " What loads its weights was not found: let the program of sampler.executable pass "
                f"PYTHONPATH on, or use sampler.arguments=[{_EXTENSION}=]."
            )
        return f" Set {_V2_RUNNER}=0 in the environment." if "Model Runner V2" in last_words else ""

"""The settings of samplers: who writes completions, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pgtoolkit.model.architectures import TYPES_IN_WORDS
from pgtoolkit.model.settings import NumberType
from pgtoolkit.system.declared import (
    Alters,
    Declared,
    Needs,
    Option,
    Settings,
    chosen,
    key,
)

_STARTS_SERVERS: Needs = {"only_if": "sampler.urls=[]"}
_HAS_OWN_GPUS: Needs = {
    "only_if": "sampler.urls=[] and sampler.gpus!=null",
    "use": "sampler.urls=[] and sampler.gpus=[1..VALUE]",
}
_SAMPLER_TYPE: Declared = {"alters": Alters.nothing, "learns": "sampler.dtype!=auto", "added": True}
_SERVERS_TYPE: Declared = {**_SAMPLER_TYPE, **_STARTS_SERVERS}


@dataclass(frozen=True, kw_only=True)
class SamplerSettings(Settings):
    name: str = key(option=True)
    max_sequences: int | None = key()
    dtype: NumberType = key()
    keep_top: int = key(
        default=0,
        help="Likeliest tokens of the sampler that are kept with each token, with their log-probs "
        "(0 to 1024), which take 8 bytes each: score centering needs them, and "
        "rollout.save_path records them. With rollout.top_p or rollout.top_k: most tokens of a set "
        "that sampling keeps, over which log-probs are then taken in training (4 bytes each); a "
        "document with a larger set is not trained. 0: none.",
        least=0,
        most=1024,
        added=True,
        alters=Alters.nothing,
    )


@dataclass(frozen=True, kw_only=True)
class TransformersSamplerSettings(SamplerSettings):
    name: Literal["transformers"] = chosen("transformers", alters=Alters.nothing)
    max_sequences: int | None = key(
        default=None,
        help="Most completions that are sampled at once, which limits memory (>= 1); null: all of "
        "a batch of rollouts.",
        least=1,
        most=10**6,
        alters=Alters.nothing,
    )
    dtype: NumberType = key(
        default=NumberType.auto,
        help="Number type in which completions are sampled, from a copy of the weights: auto (that "
        "of training), float32, bfloat16 or float16.",
        **_SAMPLER_TYPE,
    )
    static_cache: bool | None = key(
        default=None,
        help="Whether memory for keys and values is reserved at the start and, on a GPU, each "
        "token is one CUDA graph, which is several times as fast; null: on a GPU, for models of "
        f"type {TYPES_IN_WORDS}.",
        alters=Alters.nothing,
    )
    gpus: list[int] | None = key(
        default=None,
        help="Numbers of GPUs, beyond those of training, on each of which a process samples from a "
        "copy of the weights; null: the processes that train sample themselves. See "
        "docs/rollouts.md.",
        learns=False,
        added=True,
        alters=Alters.nothing,
    )
    processes: int = key(
        default=0,
        help="Processes on the CPU, each of which samples from a copy of the weights (>= 0), where "
        "there is no GPU; 0: the processes that train sample themselves.",
        least=0,
        most=1024,
        learns=False,
        added=True,
        alters=Alters.nothing,
    )

    @property
    def copies(self) -> list[int]:
        """The GPU of each process that samples from a copy of the weights, or its number on the
        CPU; empty without such processes."""
        return list(range(self.processes)) if self.gpus is None else self.gpus


@dataclass(frozen=True, kw_only=True)
class VllmSamplerSettings(SamplerSettings):
    name: Literal["vllm"] = chosen("vllm", alters=Alters.nothing)
    max_sequences: int = key(
        default=256,
        help="Most completions that a server samples at once (>= 1).",
        least=1,
        most=10**6,
        alters=Alters.nothing,
        **_STARTS_SERVERS,
    )
    dtype: NumberType = key(
        default=NumberType.auto,
        help="Number type of the servers' model, and of the weights that they get: auto (that of "
        "training), float32, bfloat16 or float16.",
        **_SERVERS_TYPE,
    )
    urls: list[str] = key(
        default=[],
        help="Addresses of running servers to join, such as [http://node7:8000]; []: pgtk starts "
        "its own.",
        learns=False,
        alters=Alters.nothing,
    )
    executable: str = key(
        default="vllm",
        help="The command that starts vLLM: a name, the path of vllm in another environment, or a "
        "command with arguments.",
        code="command",
        learns=False,
        alters=Alters.nothing,
        **_STARTS_SERVERS,
    )
    arguments: list[str] = key(
        default=[],
        help='Further arguments of vllm serve, such as ["--kv-cache-dtype=fp8"].',
        code="command",
        alters=Alters.sampling,
        **_STARTS_SERVERS,
    )
    gpus: list[int] | None = key(
        default=None,
        help="Numbers of GPUs for the servers, beyond those of training; null: the server shares "
        "the training GPU, and gives most of its memory back during updates.",
        learns=False,
        alters=Alters.nothing,
        **_STARTS_SERVERS,
    )
    tensor_parallel: int = key(
        default=1,
        help="GPUs over which each server spreads the model (>= 1); with more sampler.gpus, "
        "several servers are started.",
        least=1,
        most=1024,
        alters=Alters.nothing,
        **_HAS_OWN_GPUS,
    )
    servers_per_gpu: int = key(
        default=1,
        help="Servers on each GPU, or on each group of tensor_parallel GPUs (>= 1), which share "
        "the prompts and gpu_memory_share. Two are faster for a small model, for which a server's "
        "own work is the limit.",
        least=1,
        most=64,
        learns=False,
        alters=Alters.nothing,
        **_STARTS_SERVERS,
    )
    gpu_memory_share: float = key(
        default=0.4,
        help="Share of a GPU's memory that its servers take (0.01 to 1). On a GPU without "
        "training, 0.9 leaves more room for completions.",
        least=0.01,
        most=1,
        learns=False,
        alters=Alters.nothing,
        **_STARTS_SERVERS,
    )
    seeded: bool = key(
        default=True,
        help="Whether each prompt has its own seed; without seeds, no two runs sample the same.",
        alters=Alters.nothing,
    )
    weights_folder: str | None = key(
        default=None,
        help="Folder through which the weights are handed over, which all servers must see; null: "
        "shared memory, or the run directory.",
        writes=True,
        learns=False,
        alters=Alters.nothing,
    )
    tolerance: float | None = key(
        default=None,
        help="Mean difference between a server's and the trainer's log-probs that stops the run. "
        "It is measured on a few tokens after each new version of the weights, and on each batch "
        "before it is trained. null: 0.01 in float32, 0.03 in float16, 0.1 in bfloat16, by the "
        "coarser number type of the two.",
        least=1e-9,
        most=100,
        learns=False,
        alters=Alters.nothing,
    )
    start_seconds: int = key(
        default=600,
        help="Seconds in which a server must start (>= 1).",
        least=1,
        most=604800,
        learns=False,
        alters=Alters.nothing,
    )
    answer_seconds: int = key(
        help="Seconds in which a server must answer a batch of rollouts, or take new weights (>= "
        "1).",
        least=1,
        most=604800,
        learns=False,
        alters=Alters.nothing,
    )


_KEPT = 32
"""Tokens of a set that truncated sampling keeps, as in a configuration."""


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """Holds how completions are sampled, by any sampler.

    max_completion_length: most tokens of a completion, its end included; None only where nothing is
        sampled.
    top_p, top_k: see `PolicyRolloutSettings`; None for all tokens.
    stop: texts that end a completion.
    keep_top: likeliest tokens that are kept with each token, or most tokens of a set that top_p or
        top_k keeps. None: 32, or top_k where that is more, with top_p or top_k, and 0 otherwise.
    """

    max_completion_length: int | None = key(least=1, most=10**6)
    temperature: float = key(default=1.0, least=0, most=100)
    top_p: float | None = key(default=None, least=1e-6, most=1)
    stop: Sequence[str] = key(default=())
    keep_top: int | None = key(default=None, least=0, most=1024)
    top_k: int | None = key(default=None, least=1, most=10**6)

    def __post_init__(self) -> None:
        """Raise ValueError as other settings do, and for sets of kept tokens that have no room."""
        super().__post_init__()
        if self.top_k is not None and 0 < self.kept < self.top_k:
            raise ValueError(
                f"SamplingSettings(keep_top={self.keep_top}) needs at least top_k={self.top_k}, or "
                f"0 (got {self.keep_top}). A document with more kept tokens than are recorded is "
                f"not trained. Use keep_top={self.top_k}."
            )

    @property
    def is_truncated(self) -> bool:
        """Return True if some tokens are never drawn."""
        return self.top_p not in (None, 1) or self.top_k is not None

    @property
    def kept(self) -> int:
        """Return how many likeliest tokens are kept with each token: `keep_top`, or its default."""
        if self.keep_top is not None:
            return self.keep_top
        return max(_KEPT, self.top_k or 0) if self.is_truncated else 0

    @property
    def likeliest(self) -> int:
        """Return how many likeliest tokens a sampler gives beside each token.

        They are one more than `kept` where sampling is truncated, so that a larger set of kept
        tokens is noticed.
        """
        return self.kept + (self.kept > 0 and self.is_truncated)


OPTIONS = {
    "sampler": {
        "transformers": Option(
            TransformersSamplerSettings,
            help="The model in training writes the completions itself, with the transformers "
            "library: any machine, nothing to start.",
        ),
        "vllm": Option(
            VllmSamplerSettings,
            help="A server of vLLM writes the completions: pgtk starts it, or joins one that "
            "runs. See docs/rollouts.md.",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""

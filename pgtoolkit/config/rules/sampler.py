"""The rules on who writes the completions."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from pgtoolkit.config.evaluation import samples
from pgtoolkit.config.rules.parallelism import world_size
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, is_whole, text

_OF_STARTED = ("executable", "arguments", "gpus", "tensor_parallel", "gpu_memory_share", "max_sequences")
"""Keys of sampler=vllm that say how servers are started."""
_SET = {
    "--dtype": "model.dtype",
    "--generation-config": None,
    "--gpu-memory-utilization": "sampler.gpu_memory_share",
    "--host": None,
    "--logprobs-mode": None,
    "--max-model-len": "accumulation.max_tokens",
    "--max-num-seqs": "sampler.max_sequences",
    "--port": None,
    "--seed": "seed",
    "--tensor-parallel-size": "sampler.tensor_parallel",
}
"""Options of vLLM that pgtk gives it, and the keys that they come from."""


def sampler(c: Any, typed: list[str], usual: Callable[[str], Any], report: Report) -> None:
    """typed: the overrides that were typed, as far as they are known. usual: a key's default."""
    if not samples(c):
        if own := [override for override in typed if override.partition("=")[0].partition(".")[0] == "sampler"]:
            reason, needs = "It would be ignored: nothing is sampled.", "rollout=policy or evaluation.every > 0"
            report.refuse(
                " ".join(own),
                needs,
                "rollout=recorded",
                reason,
                "rollout=policy or evaluation.every=20, or leave it out",
            )
    elif c.sampler.name == "vllm":
        _vllm(c, usual, report)


def _vllm(c: Any, usual: Callable[[str], Any], report: Report) -> None:
    own, world = c.sampler, world_size(c.parallelism)
    for name in ("urls", "arguments", "gpus"):
        if not isinstance(getattr(own, name), list | None):  # as an interpolation may give
            use = f"sampler.{name}={text(usual(f'sampler.{name}'))}"
            report.refuse(f"sampler.{name}", "a list", "something else", "It has any number of entries.", use)
            return
    if own.urls:
        _urls(own.urls, report)
        for name in _OF_STARTED:
            value = getattr(own, name)
            if value != usual(f"sampler.{name}"):
                reason = "It says how servers are started, and would be ignored by those that run already."
                setting = f"sampler.{name}={text(value)}"
                report.refuse(setting, "sampler.urls=[]", text(own.urls), reason, "sampler.urls=[], or leave it out")
    else:
        _started(c, world, report)
    if world > 1 and own.answer_seconds > (most := c.parallelism.timeout_seconds):
        setting, reason = f"sampler.answer_seconds={own.answer_seconds}", "Other ranks would give up before."
        needs = f"at most parallelism.timeout_seconds={most}"
        report.refuse(setting, needs, own.answer_seconds, reason, f"parallelism.timeout_seconds={own.answer_seconds}")


def _urls(urls: list[str], report: Report) -> None:
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        except ValueError:  # such as a bracket that is not closed
            good = False
        if not good or redact(url) != url:
            reason, use = "It is the address of a server of vLLM.", "sampler.urls=[http://127.0.0.1:8000]"
            report.refuse(f"sampler.urls={text(urls)}", "http(s)://HOST:PORT for each", redact(url), reason, use)
    if len({*urls}) < len(urls):
        reason, use = "Each server gets its share of the requests.", f"sampler.urls={text([*dict.fromkeys(urls)])}"
        report.refuse(f"sampler.urls={text(urls)}", "each server once", text(urls), reason, use)


def _started(c: Any, world: int, report: Report) -> None:
    own = c.sampler
    try:
        command = shlex.split(own.executable)
    except ValueError:  # a quotation mark that is not closed
        command = []
    if not command:
        reason, use = "It is how vLLM is called.", "sampler.executable=vllm"
        report.refuse(f"sampler.executable={own.executable}", "a command", own.executable, reason, use)
    for argument in own.arguments:
        option = argument.partition("=")[0]
        if option in _SET:
            use = f"{_SET[option]}=VALUE" if _SET[option] else "sampler.arguments without it"
            reason, got = "pgtk sets this option, and relies on it.", text(own.arguments)
            report.refuse(f"sampler.arguments={got}", f"no {option}", argument, reason, use)
    if own.gpus is None:
        if own.tensor_parallel > 1:
            setting, reason = (
                f"sampler.tensor_parallel={own.tensor_parallel}",
                "A server on the training GPU has that one.",
            )
            report.refuse(setting, "sampler.gpus", "null", reason, "sampler.gpus=[1,2] or sampler.tensor_parallel=1")
        return
    gpus, setting, size = own.gpus, f"sampler.gpus={text(own.gpus)}", own.tensor_parallel
    first = 0 if c.trainer.device == "cpu" else world
    use = f"sampler.gpus={text([first + i for i in range(size)])}"
    if not gpus or len({*gpus}) < len(gpus) or not all(is_whole(gpu) and gpu >= 0 for gpu in gpus):
        report.refuse(setting, "numbers of GPUs from 0 on, each once", text(gpus), "Servers run on them.", use)
    elif len(gpus) % size:
        needs, reason = f"a multiple of sampler.tensor_parallel={size} GPUs", "Each server takes so many."
        report.refuse(setting, needs, len(gpus), reason, use)
    elif min(gpus) < first:
        needs, reason = f"numbers from {first} on", f"Training takes GPU 0{f' to {first - 1}' if first > 1 else ''}."
        report.refuse(setting, needs, min(gpus), reason, f"{use}, or sampler.gpus=null to share it")

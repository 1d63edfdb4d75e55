"""The rules on who writes the completions, and when: the sampler, rollout.lag and rollout.max_staleness."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from pgtoolkit.config.evaluation import samples
from pgtoolkit.config.plan import documents_per_batch
from pgtoolkit.config.schedule import steps_of
from pgtoolkit.config.schema import Config, PolicyRolloutConfig, VllmSamplerConfig
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, is_whole, text

_SET = (
    *("--dtype", "--generation-config", "--gpu-memory-utilization", "--host", "--logprobs-mode", "--max-model-len"),
    *("--max-num-seqs", "--port", "--seed", "--tensor-parallel-size"),
)
"""Options of vLLM that pgtk gives it."""


def sampler(c: Config, report: Report) -> None:
    if not samples(c):
        if typed := report.typed_of("sampler"):
            reason, needs = "It would be ignored: nothing is sampled.", "rollout=policy or evaluation.every > 0"
            use = "rollout=policy or evaluation.every=20, or leave it out"
            report.refuse(" ".join(typed), needs, "rollout=recorded", reason, use)
    elif isinstance(c.sampler, VllmSamplerConfig):
        world, seconds, most = world_size(c.parallelism), c.sampler.answer_seconds, c.parallelism.timeout_seconds
        if c.sampler.urls:
            _urls(c.sampler.urls, report)
        else:
            _started(c, c.sampler, world, report)
        if world > 1 and seconds > most:
            setting, reason = f"sampler.answer_seconds={seconds}", "The other ranks would not wait so long."
            needs = f"at most parallelism.timeout_seconds={most}"
            report.refuse(setting, needs, seconds, reason, f"parallelism.timeout_seconds={seconds}")


def _urls(urls: list[str], report: Report) -> None:
    plain = [url.rstrip("/") for url in urls]
    if not all(map(_is_address, plain)) or len({*plain}) < len(urls):
        needs = "http(s)://HOST:PORT of each server, once"
        reason, use = "Each server of vLLM gets its share of the requests.", "sampler.urls=[http://127.0.0.1:8000]"
        report.refuse(f"sampler.urls={redact(text(urls))}", needs, redact(text(urls)), reason, use)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_whole_url = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        # /v1 is for clients of OpenAI's.
        return bool(is_whole_url and parts.port != 0 and not parts.path.endswith("/v1") and redact(url) == url)
    except ValueError:  # such as a bracket that is not closed, or a port above 65535
        return False


def _started(c: Config, sampler: VllmSamplerConfig, world: int, report: Report) -> None:
    try:
        command = shlex.split(sampler.executable)
    except ValueError:  # a quotation mark that is not closed
        command = []
    if not command:
        report.refuse_value("sampler.executable", sampler.executable, "a command", "It is how vLLM is called.", "vllm")
    for argument in sampler.arguments:
        if (option := argument.partition("=")[0]) in _SET:
            setting, use = f"sampler.arguments={text(sampler.arguments)}", "the keys of pgtk that stand for it"
            report.refuse(setting, f"no {option}", argument, "pgtk sets this option, and relies on it.", use)
    if sampler.gpus is None:
        return
    gpus, setting, size = sampler.gpus, f"sampler.gpus={text(sampler.gpus)}", sampler.tensor_parallel
    first = 0 if c.trainer.device == "cpu" else world
    use = f"sampler.gpus={text([first + i for i in range(size)])}"
    if not gpus or len({*gpus}) < len(gpus) or not all(is_whole(gpu) and gpu >= 0 for gpu in gpus):
        reason = "Servers run on them, on each as many as sampler.servers_per_gpu."
        report.refuse(setting, "numbers of GPUs from 0 on, each once", text(gpus), reason, use)
    elif len(gpus) % size:
        needs, reason = f"a multiple of sampler.tensor_parallel={size} GPUs", "Each server takes that many."
        report.refuse(setting, needs, len(gpus), reason, use)
    elif min(gpus) < first:
        needs, reason = f"numbers from {first} on", f"Training takes GPU 0{f' to {first - 1}' if first > 1 else ''}."
        report.refuse(setting, needs, min(gpus), reason, f"{use}, or sampler.gpus=null to share it")


def schedule(c: Config, report: Report) -> None:
    """Training and sampling at the same time."""
    if not isinstance(c.rollout, PolicyRolloutConfig) or c.rollout.max_staleness is None:
        return
    if c.accumulation.docs_per_step == 0 or c.accumulation.last_step == "carry":
        return  # which the key refuses
    most, steps = c.rollout.max_staleness, steps_of(documents_per_batch(c.rollout), c.accumulation)
    setting, longest = f"rollout.max_staleness={most}", 2 * steps - 1
    if most < steps:
        needs, reason = f"at least the {steps} steps of a batch", "Below it, there is nothing to train meanwhile."
        report.refuse(setting, needs, most, reason, f"rollout.max_staleness={longest}")
    elif most > longest:
        report.note(
            f"{setting}: no document is trained more than {longest} updates after the weights that wrote it, since "
            f"one batch is sampled while the one before, of {steps} steps, is trained."
        )

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
    if samples(c):
        if isinstance(c.sampler, VllmSamplerConfig):
            _vllm(c, c.sampler, report)
    elif typed := report.typed_of("sampler"):
        reason, needs = "It would be ignored: nothing is sampled.", "rollout=policy or evaluation.every > 0"
        use = "rollout=policy or evaluation.every=20, or leave it out"
        report.refuse(" ".join(typed), needs, "rollout=recorded", reason, use)


def _vllm(c: Config, sampler: VllmSamplerConfig, report: Report) -> None:
    world = world_size(c.parallelism)
    if sampler.urls:
        _urls(sampler.urls, report)
    else:
        _started(c, sampler, world, report)
    if world > 1 and sampler.answer_seconds > (most := c.parallelism.timeout_seconds):
        setting, reason = f"sampler.answer_seconds={sampler.answer_seconds}", "The other ranks would not wait so long."
        needs = f"at most parallelism.timeout_seconds={most}"
        report.refuse(
            setting, needs, sampler.answer_seconds, reason, f"parallelism.timeout_seconds={sampler.answer_seconds}"
        )


def _urls(urls: list[str], report: Report) -> None:
    plain = [url.rstrip("/") for url in urls]
    for url in plain:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
            good = good and parts.port != 0 and not parts.path.endswith("/v1")  # that is for clients of OpenAI's
        except ValueError:  # such as a bracket that is not closed, or a port above 65535
            good = False
        if not good or redact(url) != url:
            reason, use = "It is the address of a server of vLLM.", "sampler.urls=[http://127.0.0.1:8000]"
            report.refuse(f"sampler.urls={text(urls)}", "http(s)://HOST:PORT for each", redact(url), reason, use)
    if len({*plain}) < len(urls):
        reason, use = "Each server gets its share of the requests.", f"sampler.urls={text([*dict.fromkeys(plain)])}"
        report.refuse(f"sampler.urls={text(urls)}", "each server once", text(urls), reason, use)


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

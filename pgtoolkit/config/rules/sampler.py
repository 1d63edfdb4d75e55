"""The rules on who writes completions: the processes and GPUs that sample, and servers."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit

from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.schema import Config
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.rollouts.batch_counts import steps_of_batch
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.sampling.settings import TransformersSamplerSettings, VllmSamplerSettings
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, is_whole, text

_BYTES_OF_TOP = 8
"""Bytes of a token's id and log-prob."""
_BYTES_OF_ID = 4
_MOST_KEPT = 1024
"""The highest sampler.keep_top."""


def sampler(c: Config, report: Report) -> None:
    if not needs_sampler(c):
        return
    if isinstance(c.rollout, PolicyRolloutSettings) and c.rollout.sampling.is_truncated:
        _kept_sets(c, c.rollout, report)
    else:
        _note_likeliest(c, report)
    world = world_size(c.parallelism)
    if isinstance(c.sampler, TransformersSamplerSettings):
        _copies(c, c.sampler, world, report)
    else:
        _servers(c, c.sampler, world, report)


def _note_likeliest(c: Config, report: Report) -> None:
    """Say what the likeliest tokens of the sampler cost, and what a server needs for them."""
    count = c.sampler.keep_top
    if not count:
        return
    report.note(
        f"sampler.keep_top={count}: each sampled token takes {_BYTES_OF_TOP * count} bytes more, "
        f"in memory, checkpoints and rollouts that are recorded.{_needed_of_servers(c, count)}"
    )


def _kept_sets(c: Config, rollout: PolicyRolloutSettings, report: Report) -> None:
    """Check how many of the tokens that truncated sampling keeps are recorded, and say what follows
    from it."""
    count = c.sampler.keep_top
    cut = "rollout.top_p" if rollout.top_k is None else "rollout.top_k"
    setting = f"{cut}={rollout.top_p if rollout.top_k is None else rollout.top_k}"
    if not count:
        report.note(
            f"{setting} with sampler.keep_top=0: log-probs in training are over the whole "
            "vocabulary, so that ratios do not correct for the tokens that sampling left out."
        )
        return
    if rollout.top_k is not None and count < rollout.top_k:
        report.refuse(
            setting=f"sampler.keep_top={count}",
            needs=f"at least rollout.top_k={rollout.top_k}, or 0",
            got=count,
            reason="Log-probs in training are over the tokens that sampling keeps, and a document "
            "with more of them than are recorded is not trained.",
            use=f"sampler.keep_top={rollout.top_k}"
            if rollout.top_k <= _MOST_KEPT
            else f"rollout.top_k={_MOST_KEPT} sampler.keep_top={_MOST_KEPT}",
        )
        return
    overflow = ""
    if rollout.top_k is None:
        overflow = (
            " A document with more of them at some token is not trained; see "
            "kept_set_overflow_fraction."
        )
    report.note(
        f"{setting}: log-probs in training are over the tokens that sampling keeps, of which up to "
        f"sampler.keep_top={count} are recorded ({_BYTES_OF_ID * count} bytes a token)."
        f"{overflow}{_needed_of_servers(c, count + 1)}"
    )


def _needed_of_servers(c: Config, count: int) -> str:
    """Return a sentence on what joined servers need to give `count` likeliest tokens."""
    if not isinstance(c.sampler, VllmSamplerSettings) or not c.sampler.urls:
        return ""
    processed = ""
    if isinstance(c.rollout, PolicyRolloutSettings) and c.rollout.sampling.is_truncated:
        processed = " and --logprobs-mode processed_logprobs"
    return f" The servers need --max-logprobs={count} or more{processed}; vLLM's own number is 20."


def _copies(c: Config, sampler: TransformersSamplerSettings, world: int, report: Report) -> None:
    """Check the processes that sample from copies of the weights, which the ranks share."""
    setting = f"sampler.processes={sampler.processes}"
    use = f"sampler.processes={world}"
    if sampler.gpus is not None:
        setting = f"sampler.gpus={text(sampler.gpus)}"
        use = f"sampler.gpus={text(_first_free(c, world, world))}"
        if not _are_gpus_for_copies(c, sampler.gpus, world, report):
            return
    count = len(copies_of(c))
    if count % world:
        report.refuse(
            setting=setting,
            needs=f"a multiple of the {world} processes that train",
            got=count,
            reason="Each of these has others complete its prompts.",
            use=use,
        )
    elif count and isinstance(c.rollout, PolicyRolloutSettings) and c.rollout.max_staleness is None:
        advice = "rollout.max_staleness, which needs accumulation.docs_per_step > 0, lets"
        if c.accumulation.docs_per_step > 0:
            staleness = 2 * steps_of_batch(c.rollout, c.accumulation) - 1
            advice = f"rollout.max_staleness={staleness} rollout.old_log_probs=sampling lets"
            if c.rollout.lag:
                advice = f"rollout.lag=0 {advice}"
        report.note(
            f"{setting} without rollout.max_staleness: training waits while a batch is sampled. "
            f"{advice} both go on."
        )


def _are_gpus_for_copies(c: Config, gpus: list[int], world: int, report: Report) -> bool:
    """Return whether copies can sample on these GPUs, and refuse those that they cannot use."""
    if c.trainer.device == "cpu":
        report.refuse(
            setting=f"sampler.gpus={text(gpus)}",
            needs="trainer.device other than cpu",
            got="cpu",
            reason="Copies of the weights compute on the same kind of device as training.",
            use=f"sampler.processes={world}",
        )
        return False
    use = f"sampler.gpus={text(_first_free(c, world, world))}"
    return _are_free(c, gpus, world, "A process samples on each of them.", use, report)


def _servers(c: Config, sampler: VllmSamplerSettings, world: int, report: Report) -> None:
    urls = sampler.urls
    addresses = [url.rstrip("/") for url in urls]
    if not urls:
        _started(c, sampler, world, report)
    elif not all(map(_is_address, addresses)) or len(set(addresses)) < len(addresses):
        report.refuse(
            setting=f"sampler.urls={redact(text(urls))}",
            needs="http(s)://HOST:PORT of each server, once",
            got=redact(text(urls)),
            reason="Each server of vLLM gets its share of the requests.",
            use="sampler.urls=[http://127.0.0.1:8000]",
        )
    seconds = sampler.answer_seconds
    timeout = c.parallelism.timeout_seconds
    if world > 1 and seconds > timeout:
        report.refuse(
            setting=f"sampler.answer_seconds={seconds}",
            needs=f"at most parallelism.timeout_seconds={timeout}",
            got=seconds,
            reason="The other ranks do not wait longer.",
            use=f"parallelism.timeout_seconds={seconds}",
        )


_SET_BY_PGTK = (
    "--dtype",
    "--generation-config",
    "--gpu-memory-utilization",
    "--host",
    "--logprobs-mode",
    "--max-model-len",
    "--max-num-seqs",
    "--port",
    "--seed",
    "--tensor-parallel-size",
)
"""Options of vLLM that pgtk sets itself."""


def _started(c: Config, sampler: VllmSamplerSettings, world: int, report: Report) -> None:
    try:
        command = shlex.split(sampler.executable)
    except ValueError:  # a quotation mark that is not closed
        command = []
    if not command:
        report.refuse_value(
            key="sampler.executable",
            value=sampler.executable,
            needs="a command",
            reason="It starts vLLM.",
            better="vllm",
        )
    for argument in sampler.arguments:
        option = argument.partition("=")[0]
        if option in _SET_BY_PGTK:
            report.refuse(
                setting=f"sampler.arguments={text(sampler.arguments)}",
                needs=f"no {option}",
                got=argument,
                reason="pgtk sets this option, and relies on it.",
                use="the keys of pgtk that stand for it",
            )
    if sampler.gpus is None:
        return
    size = sampler.tensor_parallel
    use = f"sampler.gpus={text(_first_free(c, world, size))}"
    reason = "Servers run on them, on each as many as sampler.servers_per_gpu."
    if _are_free(c, sampler.gpus, world, reason, use, report) and len(sampler.gpus) % size:
        report.refuse(
            setting=f"sampler.gpus={text(sampler.gpus)}",
            needs=f"a multiple of sampler.tensor_parallel={size} GPUs",
            got=len(sampler.gpus),
            reason="Each server takes that many.",
            use=use,
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https")
        is_server_only = not (parts.query or parts.fragment)
        is_for_openai = parts.path.endswith("/v1")  # the address that clients of OpenAI's take
        has_secret = redact(url) != url
        return bool(
            is_http
            and parts.hostname
            and parts.port != 0
            and is_server_only
            and not is_for_openai
            and not has_secret
        )
    except ValueError:  # such as a bracket that is not closed, or a port above 65535
        return False


def _first_free(c: Config, world: int, count: int) -> list[int]:
    """Return this many GPUs, the first ones that training leaves free."""
    first = 0 if c.trainer.device == "cpu" else world
    return list(range(first, first + count))


def _are_free(
    c: Config,
    gpus: list[int],
    world: int,
    reason: str,
    use: str,
    report: Report,
) -> bool:
    """Return whether these are numbers of GPUs that training leaves free; refuse others."""
    setting = f"sampler.gpus={text(gpus)}"
    first = _first_free(c, world, 1)[0]
    are_numbers = all(is_whole(gpu) and gpu >= 0 for gpu in gpus)
    if not gpus or len(set(gpus)) < len(gpus) or not are_numbers:
        report.refuse(
            setting=setting,
            needs="numbers of GPUs from 0 on, each once",
            got=text(gpus),
            reason=reason,
            use=use,
        )
        return False
    if min(gpus) < first:
        report.refuse(
            setting=setting,
            needs=f"numbers from {first} on",
            got=min(gpus),
            reason=f"Training takes GPU 0{f' to {first - 1}' if first > 1 else ''}.",
            use=f"{use}, or sampler.gpus=null to share it",
        )
        return False
    return True

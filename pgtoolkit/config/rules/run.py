"""The rules on rollouts, model, kernels, optimizer, tracking, samplers, and a sweep's launcher."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
from typing import Any
from urllib.parse import urlsplit

from pgtoolkit.config.counts import copies_of, samples_async, steps_of, tokens_at_least
from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.launchers import SEARCH, Launcher
from pgtoolkit.config.models import MODEL_TYPES, shape
from pgtoolkit.config.own_code import family_of_config
from pgtoolkit.config.paths import batches_in
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_run import ModelConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig, VllmSamplerConfig
from pgtoolkit.config.schema_tasks import GeneratedTaskConfig
from pgtoolkit.ranks.environment import world_size
from pgtoolkit.system.functions import is_dotted_path, kind_of
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, is_whole, plural, refusal, text


def rollout(c: Config, report: Report) -> None:
    rollout = c.rollout
    if rollout.name == "recorded":
        existing(report, "rollout.path", rollout.path)
        return
    if rollout.save_path is not None and batches_in(rollout.save_path) is None:
        report.refuse(
            setting=f"rollout.save_path={rollout.save_path}",
            needs="a new or empty folder, or one of rollouts to resume",
            got="other files at that place",
            reason="It becomes a folder with one file per batch.",
            use="rollout.save_path=recorded_rollouts",
        )
    batch = rollout.prompts_per_batch * rollout.group_size
    if batch > 10**6:  # the highest accumulation.docs_per_step
        report.refuse(
            setting=f"rollout.prompts_per_batch={rollout.prompts_per_batch}",
            needs="at most 1000000 documents a batch",
            got=batch,
            reason="A batch is kept in memory until it is trained on.",
            use=f"rollout.prompts_per_batch={10**6 // rollout.group_size}",
        )
    top_p = rollout.top_p
    length = rollout.max_completion_length
    if top_p is not None and top_p < 1:
        effect = "ratios do not correct for the tokens that sampling left out"
        if rollout.old_log_probs == "sampling":
            effect = (
                "old log-probs are renormalised, so that ratios start below 1, where GSPO clips"
            )
        settings = f"rollout.top_p={top_p} with rollout.old_log_probs={rollout.old_log_probs}"
        report.note(f"{settings}: {effect}.")
    if rollout.overlong_buffer is not None and rollout.overlong_buffer > length:
        report.refuse_value(
            key="rollout.overlong_buffer",
            value=rollout.overlong_buffer,
            needs=f"at most rollout.max_completion_length={length}",
            reason="It is the last part of a completion.",
            better=max(1, length // 5),
        )
    if "" in rollout.stop:
        report.refuse(
            setting=f"rollout.stop={rollout.stop}",
            needs="texts that are not empty",
            got="''",
            reason="Every completion contains it.",
            use="rollout.stop=[]",
        )
    if re.search(r"\\[nt]", "".join(rollout.stop)):
        report.note(
            "rollout.stop holds a backslash and a letter; for a line break type "
            "$'rollout.stop=[\"\\n\"]'."
        )
    is_counted = c.accumulation.docs_per_step > 0 and c.accumulation.last_step != "carry"
    steps = steps_of(batch, c.accumulation) if is_counted else 0
    if rollout.lag > max(_LONGEST_LAG, c.trainer.max_steps):
        report.refuse_value(
            key="rollout.lag",
            value=rollout.lag,
            needs=f"at most {_LONGEST_LAG}, or trainer.max_steps",
            reason="The batches of so many steps are sampled, and kept, before the first step.",
            better=16,
        )
    if rollout.max_staleness is not None and rollout.max_staleness < steps:
        report.refuse_value(
            key="rollout.max_staleness",
            value=rollout.max_staleness,
            needs=f"at least the {steps} steps of a batch",
            reason="Below it, there is nothing to train meanwhile.",
            better=2 * steps - 1,
        )
    if c.trainer.deterministic is True and samples_async(c):
        report.refuse(
            setting="trainer.deterministic=true",
            needs="completions from another process",
            got="rollout.max_staleness with sampler.gpus=null",
            reason="PyTorch has one setting for a process, and what samples beside training must "
            "not have it.",
            use="trainer.deterministic=auto",
        )
    if isinstance(c.task, GeneratedTaskConfig):
        room_for_answer(c.task, "rollout.max_completion_length", length, report)
    elif length < 16:
        tokens = plural(length, "token")
        report.note(f"rollout.max_completion_length={length}: {tokens} is short for this task.")


_LONGEST_LAG = 1000


def room_for_answer(task: GeneratedTaskConfig, key: str, length: int, report: Report) -> None:
    """Check that the longest reference answer fits a completion. key: of the longest completion."""
    needed = task.longest[1]
    if length < needed:
        report.refuse(
            setting=f"task.{task.size}={getattr(task, task.size)}",
            needs=f"{key} >= {needed}",
            got=length,
            reason="The longest reference answer has that many tokens with its end; cut off, it "
            "would score 0.",
            use=f"{key}={needed}",
        )


def model(c: Config, report: Report) -> None:
    model = c.model
    if model.name == "tiny":
        width = model.hidden_size
        heads = model.num_heads
        if width % heads:
            report.refuse_value(
                key="model.hidden_size",
                value=width,
                needs=f"a multiple of model.num_heads={heads}",
                reason="Every head takes an equal share of the width.",
                better=width + -width % heads,
            )
        room_for(c, tokens_at_least(c), "the longest document", report)
    else:
        existing(report, "model.path", model.path, hub=True)
        if model.lora_rank is not None:
            installed(report, f"model.lora_rank={model.lora_rank}", "peft", "lora")
        targets = model.lora_targets
        are_repeated = len(set(targets)) < len(targets)
        are_more_than_all = "all-linear" in targets and len(targets) > 1
        if not targets or are_repeated or are_more_than_all:
            report.refuse_value(
                key="model.lora_targets",
                value=targets,
                needs="names, each of them once, or all-linear by itself",
                reason="They say which layers get adapters.",
                better=["all-linear"],
            )
    problem = unknown_parts(model, shape(model).get("type"))
    if problem:
        report.problems.append(problem)
    rounds_logits = (
        model.name == "huggingface" and model.dtype != "float32" and not model.fp32_lm_head
    )
    family = family_of_config(c)
    if rounds_logits and family is not None and family.by_document and family.bounds[0] > 1 - 1e-3:
        half = "float16" if model.dtype == "float16" else "bfloat16"
        report.note(
            f"model.dtype={model.dtype} without model.fp32_lm_head: logits are rounded to {half}, "
            f"which moves a document's ratio by about epsilon {1 - family.bounds[0]:g} wherever "
            "its old and new log-probs are not of the same computation: after every update, and "
            "with rollout.old_log_probs=sampling from the start. The clip then acts on documents "
            "for their rounding."
        )


def unknown_parts(model: ModelConfig, kind: str | None) -> str | None:
    """Return the problem with a model that is to be compiled and whose parts are not known.

    kind: its type; None if that is not known yet.
    """
    if model.compile is not True or kind in (None, *MODEL_TYPES):
        return None
    return refusal(
        setting="model.compile=true",
        needs=f"a model of type {', '.join(MODEL_TYPES)}",
        got=kind,
        reason="The parts of other models are not known.",
        use="model.compile=auto",
    )


def room_for(c: Config, tokens: int, of: str, report: Report) -> None:
    """Check that the tiny model has positions for a document of this many tokens."""
    if c.model.name == "tiny" and tokens > c.model.max_positions:
        report.refuse_value(
            key="model.max_positions",
            value=c.model.max_positions,
            needs=f"{of}, {tokens} tokens",
            reason="The model has a position for every token of a document.",
            better=tokens,
        )


def kernel(c: Config, report: Report) -> None:
    if c.kernel.needs_gpu and c.trainer.device == "cpu":
        report.problems.append(no_triton("trainer.device=cpu"))


def no_triton(got: str) -> str:
    """Return the refusal of kernel=triton. got: the device that there is in the place of a GPU."""
    return refusal(
        setting="kernel=triton",
        needs="a GPU",
        got=got,
        reason="Triton compiles for GPUs; TRITON_INTERPRET=1 runs its kernels slowly on a CPU.",
        use="kernel=torch",
    )


def optimizer(c: Config, report: Report) -> None:
    usual_rate = report.usual("optimizer.learning_rate")  # for models of this kind
    rate = c.optimizer.learning_rate
    warmup = c.optimizer.warmup_steps
    steps = c.trainer.max_steps
    if warmup >= steps:
        settings = f"optimizer.warmup_steps={warmup} with trainer.max_steps={steps}"
        report.note(f"{settings}: the run ends during warm-up.")
    if usual_rate is not None and rate >= 100 * usual_rate:
        report.note(
            f"optimizer.learning_rate={text(rate)} is {rate / usual_rate:,.0f} times the "
            f"{text(usual_rate)} that models such as this one usually take: the policy may leave "
            "its clip, or break, within a few steps."
        )


def tracking(c: Config, report: Report) -> None:
    t = c.tracking
    if t.run_name is not None and not re.fullmatch(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", str(t.run_name)
    ):
        report.refuse_value(
            key="tracking.run_name",
            value=t.run_name,
            needs="1 to 80 letters, digits, '.', '_' or '-', a letter or digit first",
            reason="It is also the name of the run directory.",
            better=re.sub(r"[^A-Za-z0-9._-]+", "-", str(t.run_name)).strip("-._")[:80] or "run",
        )
    if t.name == "mlflow" and not t.experiment:
        report.refuse(
            setting="tracking=mlflow",
            needs="tracking.experiment",
            got=t.experiment,
            reason="MLflow keeps runs in experiments.",
            use="tracking.experiment=pgtoolkit",
        )
    if "wandb" in (t.name, *t.also) and not t.experiment:
        report.refuse(
            setting="wandb",
            needs="tracking.experiment",
            got=t.experiment,
            reason="Weights & Biases keeps runs in projects.",
            use="tracking.experiment=pgtoolkit",
        )
    for name in t.also:
        if name not in _FURTHER:
            report.refuse(
                setting=f"tracking.also={text(t.also)}",
                needs="wandb or tensorboard",
                got=name,
                reason="Other trackers are not known; MLflow goes first: tracking=mlflow.",
                use="tracking.also=[tensorboard]",
            )
    if len({t.name, *t.also}) <= len(t.also):
        report.refuse(
            setting=f"tracking.also={text(t.also)}",
            needs="each tracker once",
            got=f"tracking={t.name}",
            reason="A run has one record with each tracker.",
            use="another",
        )
    for name in _FURTHER:
        if name == t.name:
            installed(report, f"tracking={name}", name, name)
        elif name in t.also:
            installed(report, f"tracking.also={text(t.also)}", name, name)
    if t.name == "mlflow" and t.uri is not None:
        _uri(str(t.uri), report)


_FURTHER = ("wandb", "tensorboard")
"""Trackers that tracking.also may name; each is called like its package and the extra with it."""


def _uri(uri: str, report: Report) -> None:
    try:
        scheme = urlsplit(uri).scheme.partition("+")[0]
    except ValueError:  # such as a bracket that is not closed
        scheme = None
    default_uri = "sqlite:///outputs/mlflow.db"
    if scheme not in ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks"):
        report.refuse_value(
            key="tracking.uri",
            value=uri,
            needs="sqlite:///FILE, http(s)://HOST:PORT or a database",
            reason="MLflow refuses plain files as a store.",
            better=default_uri,
        )
    elif scheme == "sqlite" and os.path.isdir(uri.partition(":///")[2] or "."):
        report.refuse_value(
            key="tracking.uri",
            value=uri,
            needs="a file, not a folder",
            reason="SQLite keeps a store in one file.",
            better=default_uri,
        )


def existing(report: Report, path: str, value: Any, hub: bool = False) -> None:
    """Refuse the value of the key `path` where there is no such file, folder or glob.

    hub: a name on the hub is allowed too, and is not looked up.
    """
    if value is None or (hub and value and not value.startswith((".", "/", "~"))):
        return
    place = os.path.expanduser(value)  # as the functions of os.path, at home with any text
    if value == "" or (not os.path.exists(place) and not glob.glob(place, recursive=True)):
        report.refuse_value(
            key=path,
            value=value,
            needs="an existing file, folder or glob",
            reason="There is nothing at that path, seen from the current directory.",
            better="PATH",
        )


def importable(report: Report, key: str, path: str, reason: str, alternatives: str = "") -> None:
    """Refuse a text that is not a dotted path; importing it is tried before the start."""
    if not is_dotted_path(path):
        report.refuse(
            setting=f"{key}={path}",
            needs=f"{alternatives}a dotted path to a {kind_of(key)}",
            got=path,
            reason=reason,
            use=f"{key}=package.module.{kind_of(key)}",
        )


def launcher(launcher: Launcher, sweeper: str, report: Report) -> None:
    """Refuse launchers and sweepers that are not ours or not installed, and impossible numbers of
    jobs."""
    if launcher.kind is None:
        report.refuse_value(
            key="hydra/launcher",
            value=launcher.choice,
            needs="one of local, slurm and ray_cluster",
            reason="Other launchers of Hydra run jobs that pgtk could not stop, continue or leave "
            "out.",
            better="local",
        )
    kinds = {
        f"hydra/launcher={launcher.choice}": launcher.kind,
        f"hydra/sweeper={sweeper}": sweeper,
    }
    for setting, kind in kinds.items():
        if kind in _EXTRAS:
            installed(report, setting, *_EXTRAS[kind])
    n_jobs = launcher.settings.get("n_jobs")
    jobs_per_gpu = launcher.settings.get("jobs_per_gpu")
    if n_jobs is not None and n_jobs < 1:
        report.refuse_value(
            key="hydra.launcher.n_jobs",
            value=n_jobs,
            needs="a whole number >= 1",
            reason="It counts jobs at a time.",
            better=1,
        )
    if jobs_per_gpu is not None and jobs_per_gpu < 1:
        report.refuse_value(
            key="hydra.launcher.jobs_per_gpu",
            value=jobs_per_gpu,
            needs="a whole number >= 1",
            reason="It counts jobs at a time on each GPU.",
            better=1,
        )
    if n_jobs is not None and jobs_per_gpu is not None and n_jobs != 1:
        needs = "hydra.launcher.n_jobs=1"
        report.refuse(
            setting=f"hydra.launcher.jobs_per_gpu={jobs_per_gpu}",
            needs=needs,
            got=n_jobs,
            reason="It says by itself how many jobs run at a time.",
            use=needs,
        )


_EXTRAS = {
    "slurm": ("submitit", "submitit"),
    "ray_cluster": ("ray", "ray"),
    SEARCH: ("optuna", "optuna"),
}
"""Kind of launcher or sweeper -> the package that it needs, and the extra of pgtk that installs
it."""


def installed(report: Report, setting: str, module: str, extra: str) -> None:
    """Refuse a setting whose package, an extra of pgtk, is missing."""
    if not _is_installed(module):
        report.refuse(
            setting=setting,
            needs=f"the package {module.rpartition('.')[2]}",
            got="not installed",
            reason="The package is an extra, not installed by default.",
            use=f'pip install "pgtk[{extra}]"',
        )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


_SET = (
    *(
        "--dtype",
        "--generation-config",
        "--gpu-memory-utilization",
        "--host",
        "--logprobs-mode",
        "--max-model-len",
    ),
    *("--max-num-seqs", "--port", "--seed", "--tensor-parallel-size"),
)
"""Options of vLLM that pgtk sets itself."""


def sampler(c: Config, report: Report) -> None:
    if needs_sampler(c) and isinstance(c.sampler, TransformersSamplerConfig):
        _copies(c, c.sampler, world_size(c.parallelism), report)
    if needs_sampler(c) and isinstance(c.sampler, VllmSamplerConfig):
        world = world_size(c.parallelism)
        seconds = c.sampler.answer_seconds
        timeout = c.parallelism.timeout_seconds
        urls = c.sampler.urls
        addresses = [url.rstrip("/") for url in urls]
        if not urls:
            _started(c, c.sampler, world, report)
        elif not all(map(_is_address, addresses)) or len(set(addresses)) < len(addresses):
            report.refuse(
                setting=f"sampler.urls={redact(text(urls))}",
                needs="http(s)://HOST:PORT of each server, once",
                got=redact(text(urls)),
                reason="Each server of vLLM gets its share of the requests.",
                use="sampler.urls=[http://127.0.0.1:8000]",
            )
        if world > 1 and seconds > timeout:
            report.refuse(
                setting=f"sampler.answer_seconds={seconds}",
                needs=f"at most parallelism.timeout_seconds={timeout}",
                got=seconds,
                reason="The other ranks would not wait so long.",
                use=f"parallelism.timeout_seconds={seconds}",
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


def _started(c: Config, sampler: VllmSamplerConfig, world: int, report: Report) -> None:
    try:
        command = shlex.split(sampler.executable)
    except ValueError:  # a quotation mark that is not closed
        command = []
    if not command:
        report.refuse_value(
            key="sampler.executable",
            value=sampler.executable,
            needs="a command",
            reason="It is how vLLM is called.",
            better="vllm",
        )
    for argument in sampler.arguments:
        option = argument.partition("=")[0]
        if option in _SET:
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


def _copies(c: Config, sampler: TransformersSamplerConfig, world: int, report: Report) -> None:
    """Check the processes that sample from copies of the weights and are divided among the
    ranks."""
    count = len(copies_of(c))
    setting = f"sampler.processes={sampler.processes}"
    use = f"sampler.processes={world}"
    if sampler.gpus is not None:
        if sampler.processes:
            report.refuse(
                setting=setting,
                needs="sampler.gpus=null",
                got=text(sampler.gpus),
                reason="On each GPU one process samples.",
                use="sampler.processes=0",
            )
        setting = f"sampler.gpus={text(sampler.gpus)}"
        if c.trainer.device == "cpu":
            report.refuse(
                setting=setting,
                needs="trainer.device other than cpu",
                got="cpu",
                reason="What samples computes on what trains does.",
                use=use,
            )
            return
        use = f"sampler.gpus={text(_first_free(c, world, world))}"
        reason = "On each of them a process samples."
        if not _are_free(c, sampler.gpus, world, reason, use, report):
            return
    if count % world:
        report.refuse(
            setting=setting,
            needs=f"a multiple of the {world} processes that train",
            got=count,
            reason="Each has others complete its prompts.",
            use=use,
        )
    elif count and c.rollout.name == "policy" and c.rollout.max_staleness is None:
        report.note(
            f"{setting} without rollout.max_staleness: training waits while a batch is sampled. "
            "rollout.max_staleness=1 rollout.old_log_probs=sampling lets both go on, where a batch "
            "is one step."
        )


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

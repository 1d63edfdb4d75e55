"""The rules on what a run runs on: rollouts, model, LoRA, kernels, optimizer, trainer, tracking, a sweep's launcher."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from typing import Any
from urllib.parse import urlsplit

from pgtoolkit.config.paths import batches_in, is_local_path
from pgtoolkit.config.plan import family_of_config, tokens_at_least
from pgtoolkit.config.schema import Config, HuggingFaceModelConfig
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, is_whole, text

MOST_DOCUMENTS = 10**6
"""Of a batch of rollouts: as many as accumulation.docs_per_step may be."""


def rollout(c: Config, report: Report) -> None:
    rollout = c.rollout
    if rollout.name == "recorded":
        existing(report, "rollout.path", rollout.path)
        return
    if rollout.save_path is not None and batches_in(rollout.save_path) is None:
        setting, reason = f"rollout.save_path={rollout.save_path}", "It becomes a folder with one file per batch."
        needs, use = "a new or empty folder, or one of rollouts to resume", "rollout.save_path=recorded_rollouts"
        report.refuse(setting, needs, "other files at that place", reason, use)
    if (batch := rollout.prompts_per_batch * rollout.group_size) > MOST_DOCUMENTS:
        setting = f"rollout.prompts_per_batch={rollout.prompts_per_batch}"
        needs, got = f"at most {MOST_DOCUMENTS} documents a batch", f"{batch}, with {rollout.group_size} of each prompt"
        use = f"rollout.prompts_per_batch={max(1, MOST_DOCUMENTS // rollout.group_size)}"
        report.refuse(setting, needs, got, "A batch is kept in memory until it is trained on.", use)
    top_p = rollout.top_p
    if top_p is not None and top_p < 1:
        effect = {
            "training": "the ratio does not correct for the tokens that sampling left out",
            "sampling": "old log-probs are renormalised over them, so that ratios start below 1, where GSPO clips",
        }
        old = rollout.old_log_probs
        report.note(f"rollout.top_p={top_p} with rollout.old_log_probs={old}: {effect.get(old, 'ratios are off')}.")
    length = rollout.max_completion_length
    _overlong(c, length, report)
    if c.task.name == "reverse":
        room_for_answer(c.task.num_digits, "rollout.max_completion_length", length, report)
    elif length < 16:
        what = f"rollout.max_completion_length={length}"
        report.note(f"{what} is made for task=reverse; other tasks usually need longer answers.")


def room_for_answer(digits: int, key: str, length: int, report: Report) -> None:
    """Room for the right answer of task=reverse; key: of the longest completion."""
    if length <= digits:
        reason = "The answer is the digits and the end of the sequence; a shorter completion is never right."
        report.refuse(f"task.num_digits={digits}", f"{key} >= {digits + 1}", length, reason, f"{key}={digits + 1}")


def _overlong(c: Config, length: int, report: Report) -> None:
    """What DAPO adds to rollouts fits together, and the rest."""
    buffer = c.rollout.overlong_buffer
    if c.rollout.max_sampling_rounds > 1 and c.rollout.max_staleness is not None:
        setting, reason = f"rollout.max_sampling_rounds={c.rollout.max_sampling_rounds}", "Further rounds would be "
        reason += "sampled by the weights of another moment, which depends on when checkpoints are made."
        use = "rollout.lag or rollout.max_sampling_rounds=1"
        report.refuse(setting, "rollout.max_staleness=null", c.rollout.max_staleness, reason, use)
    if buffer is None:
        return
    if buffer > length:
        needs, reason = (
            f"at most rollout.max_completion_length={length}",
            "It is the last part of the longest completion.",
        )
        report.refuse_value("rollout.overlong_buffer", buffer, needs, reason, max(1, length // 5))
    setting = f"rollout.overlong_buffer={buffer}"
    if c.advantage.estimator == "max_rl":
        needs, reason = "another advantage than max_rl", "It makes rewards negative, by whose mean max_rl would divide."
        report.refuse(setting, needs, "advantage=max_rl", reason, "advantage=grpo")
    if c.task.name == "reverse" and buffer <= length < c.task.num_digits + 1 + buffer:
        right = f"the right answer, of {c.task.num_digits + 1} tokens"
        report.note(f"{setting} with rollout.max_completion_length={length} punishes {right}, for its length.")


def model(c: Config, report: Report) -> None:
    model = c.model
    if model.name == "tiny":
        width, heads = model.hidden_size, model.num_heads
        if width % heads:
            needs, reason = f"a multiple of model.num_heads={heads}", "Every head takes an equal share of the width."
            report.refuse_value("model.hidden_size", width, needs, reason, width + -width % heads)
        room_for(c, tokens_at_least(c), "the longest document", report)
    elif is_local_path(model.path):
        existing(report, "model.path", model.path)
    coarse = model.name == "huggingface" and model.dtype != "float32" and not model.fp32_lm_head
    family = family_of_config(c)
    if coarse and family is not None and family.by_document and family.bounds[0] > 1 - 1e-3:
        report.note(
            f"model.dtype={model.dtype} without model.fp32_lm_head: logits are rounded to bfloat16, which moves a "
            f"document's ratio by about epsilon {1 - family.bounds[0]:g} wherever its old and new log-probs are not of "
            "the same computation: after every update, and with rollout.old_log_probs=sampling from the start. The "
            "clip then acts on documents for their rounding."
        )


def lora(c: Config, report: Report) -> None:
    """What LoRA's keys need of the model, of the processes and of one another."""
    model = c.model
    if not isinstance(model, HuggingFaceModelConfig) or model.lora_rank is None:
        return
    setting = f"model.lora_rank={model.lora_rank}"
    installed(report, setting, "peft", "lora")
    if model.random_weights:
        reason = "Nearly all weights would stay random, and a checkpoint holds the adapters alone."
        use = "model.lora_rank=null or model.random_weights=false"
        report.refuse(setting, "a model that was trained", "model.random_weights=true", reason, use)
    for axis in ("tensor_parallel", "pipeline_parallel"):
        if (size := getattr(c.parallelism, axis)) > 1:
            got, reason = f"parallelism.{axis}={size}", "Adapters stand beside whole matrices, and are stored together."
            use = f"parallelism=ddp or parallelism=fsdp, with parallelism.{axis}=1"
            report.refuse(setting, f"parallelism.{axis}=1", got, reason, use)
    targets, needs = model.lora_targets, None
    reason = "They say which layers get adapters."
    if any(not isinstance(one, str) for one in targets):
        needs = "names"
    elif not targets or "" in targets or len(set(targets)) < len(targets):
        needs = "names, each of them once"
    elif "all-linear" in targets and len(targets) > 1:
        needs = "all-linear by itself or names alone"
        reason = "All linear layers but the head get adapters then; the other names would be ignored."
    if needs:
        report.refuse_value("model.lora_targets", targets, needs, reason, ["all-linear"])


def room_for(c: Config, tokens: int, of: str, report: Report) -> None:
    """The tiny model's positions for a document of so many tokens."""
    if c.model.name == "tiny" and tokens > c.model.max_positions:
        needs, reason = f"{of}, {tokens} tokens", "The model has a position for every token of a document."
        report.refuse_value("model.max_positions", c.model.max_positions, needs, reason, tokens)


def kernel(c: Config, report: Report) -> None:
    memory, chosen = c.kernel.logits_memory_mb, c.kernel.implementation
    if chosen == "auto" and c.loss.num_splits != 1 and memory is not None:
        reason = "It has no effect on logits that are materialised."
        use = "loss.num_splits=1 or kernel.logits_memory_mb=null"
        report.refuse(f"kernel.logits_memory_mb={memory}", "loss.num_splits=1", c.loss.num_splits, reason, use)
    if c.kernel.needs_gpu and c.trainer.device == "cpu":
        refuse_triton("trainer.device=cpu", report)


def refuse_triton(got: str, report: Report) -> None:
    reason = "Triton compiles for GPUs; TRITON_INTERPRET=1 runs its kernels slowly on a CPU."
    report.refuse("kernel=triton", "a GPU", got, reason, "kernel=torch")


def optimizer(c: Config, report: Report) -> None:
    usual_rate = report.usual("optimizer.learning_rate")  # for models of this kind
    warmup, steps, rate = c.optimizer.warmup_steps, c.trainer.max_steps, c.optimizer.learning_rate
    if warmup >= steps:
        settings = f"optimizer.warmup_steps={warmup} with trainer.max_steps={steps}"
        report.note(f"{settings}: the learning rate never reaches its value.")
    if usual_rate is not None and rate >= 100 * usual_rate:
        report.note(
            f"optimizer.learning_rate={text(rate)} is {rate / usual_rate:.3g} times the {text(usual_rate)} that models "
            "such as this one usually take: the policy may leave its clip, or break, within a few steps."
        )


def trainer(c: Config, report: Report) -> None:
    if (device := str(c.trainer.device)) not in ("auto", "cpu", "cuda"):
        report.refuse_value("trainer.device", device, "auto, cpu or cuda", "auto takes a GPU if there is one.", "auto")


def tracking(c: Config, report: Report) -> None:
    t = c.tracking
    if t.run_name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", str(t.run_name)):
        needs = "1 to 80 letters, digits, '.', '_' or '-', a letter or digit first"
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", str(t.run_name)).strip("-._")[:80] or "run"
        report.refuse_value("tracking.run_name", t.run_name, needs, "It is also the name of the run directory.", safe)
    if t.name == "mlflow" and not t.experiment:
        reason = "MLflow keeps runs in experiments."
        report.refuse("tracking=mlflow", "tracking.experiment", t.experiment, reason, "tracking.experiment=pgtoolkit")
    if t.name == "mlflow" and t.uri is not None:
        _uri(str(t.uri), report)


def _uri(uri: str, report: Report) -> None:
    try:
        scheme = urlsplit(uri).scheme.partition("+")[0]
    except ValueError:  # such as a bracket that is not closed
        scheme = None
    if (hidden := redact(uri)) != uri:
        reason = "It would be written to the run directory and to MLflow."
        server = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        use = f"{server}, in the environment, or for a database PGUSER and its password file"
        report.refuse(f"tracking.uri={hidden}", "an address without user, password or key", "one with", reason, use)
    elif scheme not in ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks"):
        needs, reason = "sqlite:///FILE, http(s)://HOST:PORT or a database", "MLflow refuses plain files as a store."
        report.refuse_value("tracking.uri", uri, needs, reason, "sqlite:///outputs/mlflow.db")
    elif scheme == "sqlite" and os.path.isdir(uri.partition(":///")[2] or "."):
        reason, use = "SQLite keeps a store in one file.", "tracking.uri=sqlite:///outputs/mlflow.db"
        report.refuse(f"tracking.uri={uri}", "sqlite:///FILE", "a folder", reason, use)


def existing(report: Report, path: str, value: Any) -> None:
    """Refuse the value of the key `path` where there is no such file, folder or glob."""
    if value is None:
        return
    place = os.path.expanduser(value)  # as the functions of os.path, at home with any text
    if value == "" or (not os.path.exists(place) and not glob.glob(place, recursive=True)):
        reason = "There is nothing at that path, seen from the current directory."
        report.refuse_value(path, value, "an existing file, folder or glob", reason, "PATH")


def launcher(hydra: Any, report: Report) -> None:
    """The plug-ins that run a sweep are ours and there, and the local one has sensible settings; hydra: its node."""
    for kind in ("launcher", "sweeper"):
        target = str(hydra[kind].get("_target_"))
        setting = f"hydra/{kind}={hydra.runtime.choices.get(f'hydra/{kind}')}"
        if target in _EXTRAS:
            installed(report, setting, *_EXTRAS[target])
        elif kind == "launcher" and not target.startswith(_LAUNCHERS):
            reason = "Other launchers of Hydra run jobs that pgtk could not stop, continue or leave out."
            use = "hydra/launcher=local"
            report.refuse(setting, "one of local, slurm and ray_cluster", setting.partition("=")[2], reason, use)
    if "n_jobs" in hydra.launcher:
        n_jobs = hydra.launcher.n_jobs
        if not (is_whole(n_jobs) and n_jobs >= 1):
            report.refuse_value("hydra.launcher.n_jobs", n_jobs, "a whole number >= 1", "It counts jobs at a time.", 1)


_LAUNCHERS = "hydra_plugins.pgtk_launcher."
_EXTRAS = {
    f"{_LAUNCHERS}SlurmLauncher": ("submitit", "submitit"),
    f"{_LAUNCHERS}RayLauncher": ("ray", "ray"),
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper": ("hydra_plugins.hydra_optuna_sweeper", "optuna"),
}
"""Plug-in of Hydra -> the package that it needs, and the extra of pgtoolkit that installs it."""


def installed(report: Report, setting: str, module: str, extra: str) -> None:
    """Refuse a setting whose package, an extra of pgtoolkit, is missing."""
    if not _is_installed(module):
        needs, reason = f"the package {module.rpartition('.')[2]}", "The package is an extra, not installed by default."
        report.refuse(setting, needs, "not installed", reason, f"pip install 'pgtoolkit[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False

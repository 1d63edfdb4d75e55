"""What a configuration needs of this machine, tried before anything is made: GPUs, models,
functions, prompts.

Large libraries are imported only where the configuration needs what they alone know.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgtoolkit.config import memory
from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.evaluation_sets import held_out_sets, is_on, needs_sampler
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.paths import NO_FOLDER, absolute_uri, cannot_hold_files, sqlite_path
from pgtoolkit.config.rules.run import no_triton
from pgtoolkit.config.schema import Config, Model
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig
from pgtoolkit.config.schema_run import HuggingFaceModelConfig, TinyModelConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig, VllmSamplerConfig
from pgtoolkit.config.schema_tasks import ConversationTaskConfig, PromptsTaskConfig, TaskConfig
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.ranks.environment import AXES, joined, visible, world_size
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.system import model_folder
from pgtoolkit.system.report import Report, is_whole, refusal, text
from pgtoolkit.tracking.store_file import problem_of_store

if TYPE_CHECKING:
    from pgtoolkit.losses.objective import Loss

_PROCESSES_PER_CORE = 16
"""More are a mistake in writing, and would take the machine's memory before anybody could say
so."""


class DataProblem(str):
    """A problem with data, whose exit status is another than that of a wrong configuration."""


def check_machine(c: Config, report: Report) -> None:
    """Add what is missing to the problems of the resolved configuration `c`.

    Nothing is tried of a configuration that the rules refuse: that may import what nobody has
        typed.
    """
    if report.problems:
        return
    report.problems += lacking_devices(c)
    _compiler(c, report)
    _processes(c, report)
    _places(c, report)
    _servers(c, report)
    _models(c, report)
    _prompts(c, report)
    _tokens(c, report)
    if c.advantage.path is not None:
        from pgtoolkit.rollouts.advantages import Estimator

        with _added_to(report):
            Estimator.of(c)
    if c.aggregation.reducer is not None or c.loss.name == "custom" or c.rollout.name == "recorded":
        from pgtoolkit.training.loss import loss_of

        with _added_to(report):
            loss = loss_of(c)
            if c.rollout.name == "recorded":
                _recorded(c, loss, report)
                _epochs(c, report)


def lacking_devices(c: Config) -> list[str]:
    """Return the problems of a configuration that asks for a GPU where there is none."""
    if not (c.trainer.device == "cuda" or c.kernel.needs_gpu):
        return []
    import torch

    if torch.cuda.is_available():
        return []
    problems = []
    if c.trainer.device == "cuda":
        problems.append(
            refusal(
                setting="trainer.device=cuda",
                needs="a GPU that torch can use",
                got="none",
                reason="Its driver or torch's CUDA build is missing.",
                use="trainer.device=auto",
            )
        )
    if c.kernel.needs_gpu and c.trainer.device != "cpu":  # which the rule on kernels has refused
        problems.append(no_triton("none"))
    return problems


def _compiler(c: Config, report: Report) -> None:
    """A C++ compiler where torch.compile is to write programs for a CPU; for a GPU it writes them
    as Triton's."""
    if c.model.compile is not True:
        return
    import torch

    compiler = os.environ.get("CXX", "g++")
    if (c.trainer.device == "cpu" or not torch.cuda.is_available()) and shutil.which(
        compiler
    ) is None:
        report.refuse(
            setting="model.compile=true",
            needs="a C++ compiler on a CPU",
            got=f"no {compiler}",
            reason="torch.compile writes C++ there.",
            use="model.compile=auto",
        )


def _processes(c: Config, report: Report) -> None:
    """As many processes as this machine has room for, where pgtk starts them itself."""
    cores = os.cpu_count() or 1
    size = world_size(c.parallelism)
    if joined() is None and size > (most := _PROCESSES_PER_CORE * cores):
        sizes = " ".join(f"parallelism.{axis}={getattr(c.parallelism, axis)}" for axis in AXES)
        report.refuse(
            setting=next(
                size_of_axis for size_of_axis in sizes.split() if not size_of_axis.endswith("=1")
            ),
            needs=f"at most {most} processes on this machine",
            got=f"{size} of them",
            reason=f"pgtk starts all of them here, and this machine has {cores} CPU cores.",
            use="torchrun or srun over several machines, or smaller sizes",
        )


def _places(c: Config, report: Report) -> None:
    """Folders, an MLflow store and a server of Weights & Biases that a run can write to."""
    save_path = getattr(c.rollout, "save_path", None)
    if save_path and (why := cannot_hold_files(Path(save_path).expanduser())):
        report.refuse(
            setting=f"rollout.save_path={save_path}",
            needs="a place where folders can be made",
            got=why,
            reason="It becomes a folder with one file per batch.",
            use="rollout.save_path=recorded_rollouts",
        )
    if "wandb" in (c.tracking.name, *c.tracking.also):
        _wandb(report)
    if c.tracking.name != "mlflow":
        return
    assert c.tracking.experiment is not None
    store = sqlite_path(absolute_uri(c.tracking.uri))
    if store and (problem := problem_of_store(store, c.tracking.experiment)):
        report.problems.append(problem)


def _wandb(report: Report) -> None:
    """A mode in which wandb records, and a key for the server; wandb itself would ask for one on
    the terminal."""
    import wandb  # pyright: ignore[reportMissingImports]  (an extra)
    from requests.utils import get_netrc_auth

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode == "disabled":
        report.refuse(
            setting="wandb",
            needs="WANDB_MODE online or offline",
            got="disabled",
            reason="It would record nothing.",
            use="WANDB_MODE=offline, or tracking=none",
        )
    known = (
        any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        or settings.api_key
    )
    if settings.mode == "online" and not known and get_netrc_auth(settings.base_url) is None:
        report.refuse(
            setting="wandb",
            needs="an API key",
            got="none",
            reason=f"The run is sent to {settings.base_url}.",
            use="`wandb login`, or WANDB_MODE=offline to keep the record in the run directory",
        )


def _servers(c: Config, report: Report) -> None:
    """The program that is to sample, and the GPUs that it alone is to use."""
    sampler = c.sampler
    if not needs_sampler(c) or getattr(sampler, "urls", None):
        return
    if (
        isinstance(sampler, TransformersSamplerConfig)
        and sampler.processes
        and c.trainer.device != "cpu"
        and gpu_memory()
    ):
        report.refuse(
            setting=f"sampler.processes={sampler.processes}",
            needs="a machine without a GPU",
            got="one with a GPU",
            reason="They sample on the CPU, what trains computes on a GPU.",
            use="sampler.gpus=[1]",
        )
    if (
        isinstance(sampler, VllmSamplerConfig)
        and shutil.which(shlex.split(sampler.executable)[0]) is None
    ):
        report.refuse(
            setting=f"sampler.executable={sampler.executable}",
            needs="a program that is there",
            got="none",
            reason="vLLM needs other versions of libraries, so it has an environment of its own.",
            use="sampler.executable=ENVIRONMENT/bin/vllm, or sampler.urls=[http://HOST:PORT]",
        )
    if sampler.gpus:
        count = len(visible_gpus())
        if max(sampler.gpus) >= count:
            report.refuse(
                setting=f"sampler.gpus={text(sampler.gpus)}",
                needs="GPUs of this machine",
                got=f"{count} of them",
                reason="They are numbered from 0, as torch sees them.",
                use="others" if count or sampler.name == "vllm" else "sampler.processes=1",
            )


def jobs_on_gpus(c: Config, jobs_per_gpu: int, report: Report) -> None:
    """Whether so many jobs at a time of this configuration have room on each GPU, by the estimate
    of `pgtk check`."""
    if report.problems:
        return
    setting = f"hydra.launcher.jobs_per_gpu={jobs_per_gpu}"
    if c.trainer.device == "cpu" or not visible_gpus():
        report.refuse(
            setting=setting,
            needs="a GPU",
            got="trainer.device=cpu" if c.trainer.device == "cpu" else "none",
            reason="It counts jobs on each GPU of this machine.",
            use=f"hydra.launcher.n_jobs={jobs_per_gpu}",
        )
    elif (size := _processes_of(c)) > 1 or (needs_sampler(c) and c.sampler.name == "vllm"):
        report.refuse(
            setting=setting,
            needs="jobs of one process, which samples by itself",
            got=f"{size} processes" if size > 1 else "sampler=vllm",
            reason="Each job sees one GPU, and shares it.",
            use="hydra.launcher.jobs_per_gpu=null",
        )
    elif (gpu := gpu_memory()) and jobs_per_gpu > (
        most := max(1, int(gpu / (each := memory.bytes_of_process(c, gpu))))
    ):
        use = f"hydra.launcher.jobs_per_gpu={most}"
        if tokens := memory.max_tokens_for(c, gpu / jobs_per_gpu, gpu):
            use += f", or accumulation.max_tokens={tokens}"
        report.refuse(
            setting=setting,
            needs=f"{jobs_per_gpu} times {each / 1e9:.3g} GB of each GPU",
            got=f"{gpu / 1e9:.3g}",
            reason="That is what a job takes at most.",
            use=use,
        )


def _processes_of(c: Config) -> int:
    """Those that train, and those that sample for them."""
    return world_size(c.parallelism) + (len(copies_of(c)) if needs_sampler(c) else 0)


@functools.cache
def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each GPU that torch sees."""
    import torch

    return [visible([number]) for number in range(torch.cuda.device_count())]


def _models(c: Config, report: Report) -> None:
    """Models whose small files transformers can load; of one on the hub, its config.json."""
    paths = {"model.path": c.model.path} if isinstance(c.model, HuggingFaceModelConfig) else {}
    if c.kl.needs_model and c.kl.reference is not None and c.kl.reference not in NO_FOLDER:
        paths["kl.reference"] = c.kl.reference
    if c.critic.path is not None:
        paths["critic.path"] = c.critic.path
    for key, path in paths.items():
        if error := _error_of_model(os.getcwd(), path):
            report.problems.append(error.replace("model.path=", f"{key}="))
    positions = _positions(c) if not report.problems else None
    length = c.rollout.max_completion_length
    if (
        c.rollout.name == "policy"
        and positions is not None
        and length is not None
        and length >= positions
    ):
        report.refuse_value(
            key="rollout.max_completion_length",
            value=length,
            needs=f"a number < {positions}",
            reason="Prompt and completion share the model's positions.",
            better=max(1, positions // 2),
        )


def _positions(c: Config) -> int | None:
    """How many tokens of a document the model has positions for, if it says so."""
    if isinstance(c.model, TinyModelConfig):
        return c.model.max_positions
    positions = model_folder.model_settings(c.model.path).get("max_position_embeddings")
    return positions if is_whole(positions) else None


@functools.cache  # the jobs of a sweep share it
def _error_of_model(_directory: str, path: str) -> str | None:
    try:
        model_folder.load_config(path)
        if Path(path).expanduser().is_dir():
            model_folder.load_tokenizer(path)
    except PgtoolkitError as error:
        return str(error)
    return None


def _prompts(c: Config, report: Report) -> None:
    """Prompts that can be read, and their verifiers, of what is sampled to train on or to
    evaluate."""
    tasks = {"task": c.task} if c.rollout.name == "policy" else {}
    if is_on(c):
        tasks |= {
            f"evaluation.sets.{one.name}" if c.evaluation.sets else "task": one.task
            for one in held_out_sets(c)
        }
    for place, task in tasks.items():
        if not isinstance(task, PromptsTaskConfig | ConversationTaskConfig):
            continue
        no_template = (
            "model=tiny"
            if c.model.name == "tiny"
            else "task.chat=never"
            if task.chat == "never"
            else ""
        )
        tried = _tried_task(
            os.getcwd(), pickle.dumps(task), no_template, getattr(c.model, "path", None)
        )
        report.problems += [
            type(problem)(problem.replace("task.", f"{place}.")) for problem in tried.problems
        ]
        report.notes += [note.replace("task.", f"{place}.") for note in tried.notes]


@functools.cache  # the jobs of a sweep share it
def _tried_task(_directory: str, pickled: bytes, no_template: str, model: str | None) -> Report:
    """Make a task and look at its prompts; report what is wrong with them, and what may surprise.

    no_template: the setting that leaves chat messages without a template, if any. model: its
        folder, or its name.
    """
    from pgtoolkit.tasks.accepted import notes_on_answers
    from pgtoolkit.tasks.from_config import make_task
    from pgtoolkit.tasks.prompt_rows import notes_on_columns
    from pgtoolkit.tasks.tasks import PromptsTask

    config = pickle.loads(pickled)
    report = Report()
    with _added_to(report):
        task = make_task(config, 0)
        with contextlib.closing(task):
            task.prompt(0)
            if config.path is not None:
                name = getattr(config, "config", None)
                report.notes += notes_on_columns(
                    config.path, config.split, name, config.answer_field
                )
            if isinstance(task, PromptsTask):
                asks_for_messages = any(
                    signature and signature.is_batch for signature in task.signatures
                )
                has_template = (
                    asks_for_messages
                    and model is not None
                    and not no_template
                    and _has_template(model)
                )
                report.notes += notes_on_answers(task, has_template)
        if (
            no_template
            and isinstance(task, PromptsTask)
            and any(prompt.messages is not None for prompt in task.rows())
        ):
            raise ConfigError(
                refusal(
                    setting="task.prompt_field",
                    needs="texts",
                    got=f"chat messages with {no_template}",
                    reason="Messages become tokens by the model's chat template.",
                    use="model=huggingface with task.chat=auto",
                )
            )
    return report


def _has_template(model: str) -> bool:
    """Return whether a model has a chat template; of a model on the hub, of which nothing is loaded
    yet, True."""
    if not Path(model).expanduser().is_dir():
        return True
    return bool(model_folder.load_tokenizer(model).chat_template)


def _recorded(c: Config, loss: Loss, report: Report) -> None:
    """Recorded rollouts whose first rows this configuration can train on; notes on how texts become
    tokens."""
    from pgtoolkit.rollouts.recorded import recorded_rollouts

    room = min(c.accumulation.max_tokens, _positions(c) or c.accumulation.max_tokens)
    vocabulary = vocabulary_size(c.model, c.task) or 2**31
    rollouts = recorded_rollouts(
        c,
        loss,
        vocabulary,
        room,
        first=100,
        tokenizer=functools.partial(_tokenizer, c.model, c.task, c.seed),
    )
    report.notes += rollouts.notes_on_texts()


def _tokenizer(model: Model, task: TaskConfig, seed: int) -> tuple[Any, list[int]]:
    """Return the model's tokenizer, and its end-of-sequence tokens; task, seed: of the run."""
    if isinstance(model, TinyModelConfig):
        from pgtoolkit.model.setup import character_tokenizer
        from pgtoolkit.tasks.from_config import make_task

        tokenizer: Any = character_tokenizer(make_task(task, seed).alphabet)
        return tokenizer, [tokenizer.eos_token_id]
    tokenizer = model_folder.load_tokenizer(model.path)
    return tokenizer, model_folder.end_tokens(
        model_folder.load_generation_config(model.path), tokenizer
    )


def _tokens(c: Config, report: Report) -> None:
    """Stop strings, a reference's template and other prompts than those of training, as the
    tokenizer sees them.

    Of a model on the hub only its config.json is looked at, so nothing is said of its tokens.
    """
    is_tiny = isinstance(c.model, TinyModelConfig)
    if report.problems or not (
        isinstance(c.model, TinyModelConfig) or Path(c.model.path).expanduser().is_dir()
    ):
        return
    stop = list(getattr(c.rollout, "stop", []))
    template = c.kl.reference_prompt
    tasks: list[tuple[str, str, TaskConfig, int, str | None]] = []
    if c.rollout.name == "policy" and (stop or template):
        tasks.append(("task", "", c.task, c.seed, template))
    for held_out in held_out_sets(c) if is_on(c) else ():
        # of the tiny model, whose tokens are the task's characters
        if stop or (is_tiny and held_out.task != c.task):
            place = f"evaluation.sets.{held_out.name}" if c.evaluation.sets else "task"
            tasks.append(
                (place, f"evaluation set {held_out.name}: ", held_out.task, held_out.seed, None)
            )
    for place, prefix, task, seed, its_template in tasks:
        described = pickle.dumps(
            (c.model, c.task, c.seed, task, seed, stop, its_template, bool(prefix))
        )
        if problem := _error_of_tokens(os.getcwd(), described):
            report.problems.append(type(problem)(prefix + problem.replace("task.", f"{place}.")))


_PROMPTS_TRIED = 1000
"""Prompts of a task that are made tokens before a run; the run itself does so with all of them."""


@functools.cache  # the jobs of a sweep share it
def _error_of_tokens(_directory: str, pickled: bytes) -> str | None:
    from pgtoolkit.tasks.chat_template import chat_of
    from pgtoolkit.tasks.from_config import make_task
    from pgtoolkit.tasks.prompts import TokenizedTask, scored_by_nobody

    model, trained, trained_seed, chosen, seed, stop, template, is_held_out = pickle.loads(pickled)
    report = Report()
    with _added_to(report):
        tokenizer, ends = _tokenizer(model, trained, trained_seed)
        with contextlib.closing(
            make_task(scored_by_nobody(chosen), seed, held_out=is_held_out)
        ) as task:
            chat = chat_of(chosen, tokenizer)
            tokenized = TokenizedTask(task, tokenizer, ends, chat, stop, None, template)
            prompts = list(itertools.islice(task.rows(), _PROMPTS_TRIED))
            tokenized.encode(prompts)
            if template is not None:
                tokenized.encode_for_reference(prompts)
    return next(iter(report.problems), None)


def _epochs(c: Config, report: Report) -> None:
    """Refuse recorded rollouts that are too few for a step; note where they end before the last
    one."""
    from pgtoolkit.tasks.row_files import count_rows

    assert isinstance(c.rollout, RecordedRolloutConfig)
    size, steps = c.accumulation.docs_per_step, c.trainer.max_steps
    documents = count_rows(c.rollout.path, "rollout.path")
    if c.accumulation.last_step == "drop" and documents and documents < size:
        from pgtoolkit.rollouts.steps import nothing_to_train

        report.problems.append(DataProblem(nothing_to_train(documents)))
    elif size and documents and (last := -(-documents * c.rollout.epochs // size)) < steps:
        report.note(
            f"rollout.epochs={c.rollout.epochs} of {documents} documents ends after at most "
            f"{last} of trainer.max_steps={steps} steps. To make them all, use "
            f"rollout.epochs={-(-steps * size // documents)}."
        )


@contextlib.contextmanager
def _added_to(report: Report) -> Iterator[None]:
    """A refusal in the block becomes a problem of the report."""
    try:
        yield
    except PgtoolkitError as error:
        report.problems.append(DataProblem(error) if isinstance(error, DataError) else str(error))

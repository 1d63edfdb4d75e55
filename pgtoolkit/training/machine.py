"""What a configuration needs of this machine: a GPU, functions, a model, prompts, a free folder, a place for the store.

Checked before anything is made. Large libraries are imported only where the configuration needs what they alone know.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pgtoolkit.config.evaluation import held_out_sets, is_on, samples
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.paths import NO_FOLDER, absolute_uri, occupied_by_rollouts, sqlite_path
from pgtoolkit.config.plan import family_of_config
from pgtoolkit.config.rules.run import refuse_triton
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses.corrections import configured as configured_correction
from pgtoolkit.ranks.environment import AXES, joined, world_size
from pgtoolkit.system import model_folder
from pgtoolkit.system.functions import REDUCER_KEYWORDS, import_function
from pgtoolkit.system.report import Report, is_whole, refusal, text

_PROCESSES_PER_CORE = 16
"""Many more than compute well; far less than fill the memory."""


def check_machine(c: Config, report: Report, typed: bool = True, begins: bool = True) -> None:
    """Add what is missing to the problems of the resolved configuration `c`.

    typed: False for that of a saved run, whose functions are not imported. begins: False for what may have begun
    before, such as the job of a sweep.
    """
    devices(c, report)
    _processes(c, report)
    _model(c, report)
    _server(c, report)
    if typed:
        _functions(c, report)
        _prompts(c, report)
        _recorded(c, report)
    _chat(c, report)
    _store(c, report)
    _epochs(c, report)
    if begins and c.rollout.name == "policy" and (problem := occupied_by_rollouts(c.rollout.save_path)):
        report.problems.append(problem)


def devices(c: Config, report: Report) -> None:
    """A GPU where one is asked for."""
    if not (c.trainer.device == "cuda" or c.kernel.needs_gpu):
        return
    import torch

    if torch.cuda.is_available():
        return
    if c.trainer.device == "cuda":
        reason = "Its driver or torch's CUDA build is missing."
        report.refuse("trainer.device=cuda", "a GPU that torch can use", "none", reason, "trainer.device=auto")
    if c.kernel.needs_gpu and c.trainer.device != "cpu":  # which the rule on kernels has refused
        refuse_triton("none", report)


def _processes(c: Config, report: Report) -> None:
    """As many processes as this machine has room for, where pgtk starts them itself."""
    cores = os.cpu_count() or 1
    size = world_size(c.parallelism)
    if joined() is None and size > (most := _PROCESSES_PER_CORE * cores):
        sizes = " ".join(f"parallelism.{axis}={getattr(c.parallelism, axis)}" for axis in AXES)
        setting = next(one for one in sizes.split() if not one.endswith("=1"))
        reason = f"pgtk starts all of them here, and this machine has {cores} CPU cores."
        use = "torchrun or srun over several machines, or smaller sizes"
        report.refuse(setting, f"at most {most} processes on this machine", f"{size} of them", reason, use)


def _server(c: Config, report: Report) -> None:
    """The program that is to sample, and the GPUs that it alone is to use."""
    sampler = c.sampler
    if not samples(c) or sampler.name != "vllm" or sampler.urls or _has_problem("sampler.", report):
        return
    program = shlex.split(sampler.executable)[0]
    if shutil.which(program) is None:
        reason = "vLLM needs other versions of libraries, so it has an environment of its own."
        use = "sampler.executable=ENVIRONMENT/bin/vllm, or sampler.urls=[http://HOST:PORT]"
        report.refuse(f"sampler.executable={sampler.executable}", "a program that is there", "none", reason, use)
    if sampler.gpus:
        import torch

        setting, reason = f"sampler.gpus={text(sampler.gpus)}", "They are numbered from 0, as torch sees them."
        if max(sampler.gpus) >= (count := torch.cuda.device_count()):
            report.refuse(setting, "GPUs of this machine", f"{count} of them", reason, "others")


def _functions(c: Config, report: Report) -> None:
    """The functions that were typed can be imported and called."""
    wanted = []
    for place, task in _tasks(c):
        named = getattr(task, "verifiers", None)
        several = [
            (f"{place}.verifiers.{name}.", one["verifier"])
            for name, one in (named if isinstance(named, dict) else {}).items()
            if isinstance(one, dict) and "verifier" in one
        ]
        for prefix, path in several or [(f"{place}.", getattr(task, "verifier", None))]:
            if "." in str(path):
                wanted.append((f"{prefix}verifier", path, ("completion", "answer"), ()))
    if c.aggregation.reducer is not None:
        wanted.append(("aggregation.reducer", c.aggregation.reducer, ("totals",), REDUCER_KEYWORDS))
    for key, path, arguments, keywords in wanted:
        if not _has_problem(f"{key}=", report):
            with _added_to(report):
                import_function(key, str(path), arguments, keywords)
    if c.loss.name == "custom" and not _has_problem("loss.", report):
        from pgtoolkit.training.loss import own_family

        with _added_to(report):
            own_family(c.loss.path, c.loss.options, c.loss.num_splits)


def _chat(c: Config, report: Report) -> None:
    """A system message that the chat template of a local model has a place for."""
    system = getattr(c.task, "system_prompt", None)
    if c.rollout.name != "policy" or system is None or c.model.name != "huggingface" or not c.model.path:
        return
    if os.path.isdir(Path(c.model.path).expanduser()) and not report.problems:
        from pgtoolkit.tasks.chat import chat_of

        with _added_to(report):
            chat_of(c.task, model_folder.load_tokenizer(c.model.path))


def _store(c: Config, report: Report) -> None:
    """A place where MLflow's database is, or can be made, if it is a file."""
    uri = absolute_uri(c.tracking.uri)
    if c.tracking.name != "mlflow" or (path := sqlite_path(uri)) is None or _has_problem("tracking.uri", report):
        return
    nearest = next(str(one) for one in (path, *path.parents) if os.path.exists(one))
    if nearest != str(path) and not os.path.isdir(nearest):
        got = f"a place below the file {nearest}"
    elif not os.access(nearest, os.R_OK | os.W_OK):
        got = f"{nearest}, which cannot be written"
    elif nearest == str(path) and not _is_database(path):
        got = "a file of another kind"
    else:
        return
    needs, use = "an SQLite file, or a place for one", "tracking.uri=sqlite:///FILE with another, or tracking=none"
    report.refuse(f"tracking.uri={uri}", needs, got, "MLflow keeps the run there.", use)


def _epochs(c: Config, report: Report) -> None:
    """A note where recorded rollouts end before the last step."""
    documents_per_step, steps = c.accumulation.docs_per_step, c.trainer.max_steps
    if c.rollout.name != "recorded" or not documents_per_step or report.problems:
        return
    from pgtoolkit.tasks.row_files import count_rows

    documents = count_rows(c.rollout.path, "rollout.path")
    if documents is not None and (last := -(-documents * c.rollout.epochs // documents_per_step)) < steps:
        report.note(
            f"rollout.epochs={c.rollout.epochs} of {documents} documents ends after at most {last} of "
            f"trainer.max_steps={steps} steps. To make them all, use "
            f"rollout.epochs={-(-steps * documents_per_step // documents)}."
        )


def _is_database(path: Path) -> bool:
    """Whether it is an SQLite file, or an empty one, of which SQLite makes one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(16) in (b"", b"SQLite format 3\0")


def _has_problem(beginning: str, report: Report) -> bool:
    return any(problem.startswith(beginning) for problem in report.problems)


@contextlib.contextmanager
def _added_to(report: Report) -> Iterator[None]:
    """A ConfigError of the block becomes one problem of the report."""
    try:
        yield
    except ConfigError as error:
        report.problems.append(str(error))


def _prompts(c: Config, report: Report) -> None:
    """The prompts can be read, and there is one."""
    for place, task in _tasks(c):
        if task.name != "prompts" or task.path is None or _has_problem(f"{place}.path", report):
            continue
        where = task.path, task.split, task.prompt_field, task.answer_field
        no_template = "model=tiny" if c.model.name == "tiny" else "task.chat=never" if task.chat == "never" else None
        if problem := _unreadable_prompts(os.getcwd(), no_template, *where):
            report.problems.append(type(problem)(problem.replace("task.", f"{place}.")))


def _recorded(c: Config, report: Report) -> None:
    """Recorded rollouts whose first rows this configuration can train on."""
    if c.rollout.name != "recorded" or c.rollout.path is None or _has_problem("rollout.path", report):
        return
    from pgtoolkit.rollouts.recorded import check_first_rows, needed_fields

    family = family_of_config(c)
    correction = configured_correction(c.correction)
    # Whether a family of the user's own reads them is known once it is imported.
    reads_old = correction is not None or c.kl.kind == "k3_ratio" or (family is not None and family.reads_old_log_probs)
    positions = c.model.max_positions if c.model.name == "tiny" else None
    if c.model.name == "huggingface":
        positions = model_folder.model_settings(c.model.path).get("max_position_embeddings")
    room = min(c.accumulation.max_tokens, positions) if is_whole(positions) else c.accumulation.max_tokens
    try:
        needs = needed_fields(c, correction)
        check_first_rows(c, reads_old, needs, vocabulary_size(c.model, c.task) or 2**31, room)
    except DataError as error:
        report.problems.append(DataProblem(error))


def _tasks(c: Config) -> Iterator[tuple[str, Any]]:
    """(where its keys are, the task) of what is sampled, to train on or to evaluate."""
    if c.rollout.name == "policy":
        yield "task", c.task
    if is_on(c):
        for one in held_out_sets(c):
            yield f"evaluation.sets.{one.name}" if c.evaluation.sets else "task", one.task


@functools.cache  # the jobs of a sweep share them
def _unreadable_prompts(_directory: str, no_template: str | None, *where: str | None) -> str | None:
    """no_template: the setting that leaves chat messages without a template."""
    from pgtoolkit.tasks.prompt_rows import read_prompts

    try:
        if any(prompt.messages is not None for prompt in read_prompts(*where)) and no_template:
            reason = "Messages become tokens by the model's chat template."
            use = "model=huggingface with task.chat=auto"
            setting = f"task.prompt_field={where[2]}"
            return refusal(setting, "texts", f"chat messages with {no_template}", reason, use)
    except ConfigError as error:
        return str(error)
    except DataError as error:
        return DataProblem(error)
    return None


class DataProblem(str):
    """A problem with data, whose exit status is another than that of a wrong configuration."""


def _model(c: Config, report: Report) -> None:
    if c.model.name == "huggingface" and c.model.path:
        report.problems += _unusable(os.getcwd(), c.model.path, bool(c.model.random_weights))
        if os.path.isdir(Path(c.model.path).expanduser()):
            _positions(c, report)
    if c.kl.needs_model and c.kl.reference and c.kl.reference not in NO_FOLDER:
        problems = _unusable(os.getcwd(), c.kl.reference, False)
        report.problems += [problem.replace("model.path=", "kl.reference=") for problem in problems]


def _positions(c: Config, report: Report) -> None:
    """Room for a prompt beside the longest completion."""
    positions = model_folder.model_settings(c.model.path).get("max_position_embeddings")
    if c.rollout.name != "policy" or not is_whole(positions) or c.rollout.max_completion_length < positions:
        return
    length, reason = c.rollout.max_completion_length, "Prompt and completion share the model's positions."
    use = f"rollout.max_completion_length={max(1, positions // 2)}"
    report.refuse(f"rollout.max_completion_length={length}", f"a number < {positions}", length, reason, use)


@functools.cache  # the jobs of a sweep share it
def _unusable(_directory: str, path: str, random_weights: bool) -> list[str]:
    """The problems of a model's folder, or of its name on the hub, as those of model.path: by loading what is small."""
    folder, report = Path(path).expanduser(), Report()
    exists, is_folder = os.path.exists(folder), os.path.isdir(folder)  # also of a name that no path can have
    if exists and not is_folder:
        reason = "A model is made of several files: config.json, its tokenizer, its weights."
        return [refusal(f"model.path={path}", "a folder", "a file", reason, "model.path=FOLDER")]
    if not exists and path.startswith((".", "/", "~")):
        return []  # which the rule on existing paths has refused
    with _added_to(report):
        model_folder.load_config(path)
        if is_folder:
            model_folder.load_tokenizer(path)
            if not random_weights:
                model_folder.check_weights(path)
    return report.problems

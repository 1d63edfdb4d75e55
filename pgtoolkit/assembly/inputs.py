"""Tries the models, prompts and recorded rollouts of a configuration before a run reads them.

Large libraries are imported only where the configuration needs what they alone know.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

from pgtoolkit.config.counts import ReadDocuments, ReadPrompts, limits_of_documents
from pgtoolkit.config.evaluation_sets import (
    HeldOut,
    held_out_sets,
    is_on,
    place_of_set,
    sampling,
    with_keys_of_set,
)
from pgtoolkit.config.models import has_tokenizer, measures_prompts, vocabulary_size
from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.rules.loss_terms import other_vocabulary, other_vocabulary_of_critic
from pgtoolkit.config.schema import Config, Model
from pgtoolkit.errors import ConfigError, DataError, PgtoolkitError
from pgtoolkit.model.settings import HuggingFaceModelSettings, TinyModelSettings
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    AdvantageEstimator,
    AdvantageSettings,
    PolicyRolloutSettings,
    RecordedRolloutSettings,
)
from pgtoolkit.system import model_folder
from pgtoolkit.system.report import Report, is_whole, refusal
from pgtoolkit.tasks.settings import (
    ConversationTaskSettings,
    PromptsTaskSettings,
    TaskSettings,
    TooLong,
)
from pgtoolkit.training.settings import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pgtoolkit.losses.objective import Loss
    from pgtoolkit.rollouts.recorded import RecordedRollouts


class DataProblem(str):
    """A problem with data, which has another exit status than that of a wrong configuration."""


@contextlib.contextmanager
def errors_added_to(report: Report) -> Iterator[None]:
    """Add an error that is raised in the block to the problems of a report."""
    try:
        yield
    except PgtoolkitError as error:
        report.problems.append(DataProblem(error) if isinstance(error, DataError) else str(error))


_KEYS_OF_ROWS = (
    "task=",
    "task.path",
    "task.split",
    "task.config",
    "task.prompt_field",
    "task.answer_field",
    "task.answer_pattern",
)
"""Which rows a task of files reads, and how."""


def check_inputs(config: Config, report: Report, may_import: bool) -> None:
    """Add what is wrong with prompts and with the texts that become tokens to a report.

    may_import: whether code of the user's may be imported. Without it, or where another key of the
        task is refused, prompts are read alone.
    """
    if report.concerns("Unknown key 'task", *_KEYS_OF_ROWS):
        return
    tasks: dict[str, TaskSettings] = {}
    if config.rollout.name == "policy" and not report.concerns("rollout="):
        tasks["task"] = config.task
    is_evaluated = is_on(config) and not report.concerns("evaluation")
    for held_out in held_out_sets(config) if is_evaluated else ():
        tasks[place_of_set(config, held_out)] = held_out.task
    only_rows = not may_import or report.concerns("task")
    _check_prompts(tasks, config.model, only_rows, report)
    if not only_rows:
        _check_texts(config, report)


def check_recorded_rollouts(config: Config, loss: Loss, report: Report) -> None:
    """Read recorded rollouts, of many the first rows, and add what is wrong to a report.

    Raises ConfigError or DataError for rows that the configuration cannot train on.
    """
    from pgtoolkit.assembly.recorded_rollouts import recorded_rollouts

    assert isinstance(config.rollout, RecordedRolloutSettings)
    run = (config.model, config.task, config.seed)
    first = _rows_tried(config.rollout)
    rollouts = recorded_rollouts(
        config,
        loss,
        _tokens_of_model(*run),
        _most_tokens(config.model, config.accumulation.max_tokens),
        first=first,
        tokenizer=functools.partial(tokenizer_and_ends_of, *run),
    )
    report.notes += rollouts.notes()
    if first == _ROWS_TRIED:
        report.note(
            f"only the first {first} rows of each file of rollout.path={config.rollout.path} were "
            "checked. A run checks all of them before its first step."
        )
    schedule = config.optimizer.schedule
    _check_number_of_rows(
        config.rollout, config.accumulation, schedule, config.trainer.max_steps, report
    )
    if is_on(config) and has_tokenizer(config.model) and not report.concerns("task", "evaluation"):
        _note_shared_prompts(held_out_sets(config), run, rollouts, report)


def _note_shared_prompts(
    sets: list[HeldOut],
    run: tuple[Model, TaskSettings, int],
    rollouts: RecordedRollouts,
    report: Report,
) -> None:
    """Add a note on each evaluation set with prompts of recorded rollouts, of which the first rows
    were read. run: the arguments of `tokenizer_and_ends_of`."""
    from pgtoolkit.assembly.preview import shared_with_rows
    from pgtoolkit.tasks.row_files import count_rows
    from pgtoolkit.tasks.shared_prompts import note_on_number

    num_rows = count_rows(rollouts.config.path, "rollout.path")
    is_cut = num_rows is None or num_rows > rollouts.batch_size
    recorded = rollouts.index.prompts.tolist()
    with contextlib.suppress(PgtoolkitError):  # `_check_texts` says which prompts cannot be read
        tokenizer_and_ends = tokenizer_and_ends_of(*run)
        for held_out in sets:
            num_shared, count = shared_with_rows(held_out, recorded, *tokenizer_and_ends)
            note = note_on_number(held_out.name, num_shared, count, at_least=is_cut)
            report.notes += [] if note is None else [note]


def _tokens_of_model(model: Model, task: TaskSettings, seed: int) -> int | None:
    """Return the entries of the vocabulary of a run's model; None where only loading it tells."""
    size = vocabulary_size(model, task)
    if size is not None:
        return size
    if isinstance(model, TinyModelSettings):
        return len(tokenizer_and_ends_of(model, task, seed)[0])
    text_config = model_folder.load_config(model.path).get_text_config()
    return getattr(text_config, "vocab_size", None)


def _rows_tried(rollout: RecordedRolloutSettings) -> int:
    """Return how many rows of each file are read before a run: all, unless they are many."""
    from pgtoolkit.tasks.row_files import count_rows, find_files

    files = find_files(rollout.path, "rollout.path")
    if sum(file.stat().st_size for file in files) > _FEW_BYTES:
        return _ROWS_TRIED
    count = count_rows(rollout.path, "rollout.path")
    return _ROWS_TRIED if count is None or count > _FEW_ROWS else _FEW_ROWS


def _most_tokens(model: Model, max_tokens: int) -> int:
    """Return the tokens that a recorded document may have. max_tokens: of a micro-batch."""
    return min(max_tokens, _positions(model) or max_tokens)


def try_recorded(
    rollout: RecordedRolloutSettings, model: Model, task: TaskSettings, seed: int, max_tokens: int
) -> ReadDocuments | None:
    """Return what the first rows of recorded rollouts tell; None where they cannot be read.

    task, seed: of the run. max_tokens: of a micro-batch.
    """
    arguments = (rollout, model, task, seed, _most_tokens(model, max_tokens))
    return _read_recorded(os.getcwd(), pickle.dumps(arguments))


@functools.cache  # the jobs of a sweep share it
def _read_recorded(_directory: str, pickled_arguments: bytes) -> ReadDocuments | None:
    """Do the work of `try_recorded`, whose arguments are pickled to be a cache's key.

    No field is required here: which of them a loss needs is checked elsewhere.
    """
    from pgtoolkit.assembly.recorded_rollouts import estimator_of
    from pgtoolkit.rollouts.recorded import RecordedRollouts
    from pgtoolkit.tasks.row_files import count_rows

    rollout, model, task, seed, max_tokens = pickle.loads(pickled_arguments)
    try:
        rollouts = RecordedRollouts(
            rollout,
            estimator_of(AdvantageSettings(estimator=AdvantageEstimator.none), rollout, task),
            _tokens_of_model(model, task, seed),
            max_tokens=max_tokens,
            reads_old_log_probs=False,
            first=_rows_tried(rollout),
            tokenizer=functools.partial(tokenizer_and_ends_of, model, task, seed),
        )
    except PgtoolkitError:
        return None
    num_documents = rollouts.batch_size
    are_all = count_rows(rollout.path, "rollout.path") == num_documents
    return ReadDocuments(rollouts.longest, num_documents, are_all)


def _check_number_of_rows(
    rollout: RecordedRolloutSettings,
    accumulation: AccumulationSettings,
    schedule: Schedule,
    max_steps: int,
    report: Report,
) -> None:
    """Refuse recorded rollouts that do not fill a step; note where they end before max_steps, to
    which a schedule decays."""
    from pgtoolkit.tasks.row_files import count_rows

    size = accumulation.docs_per_step
    documents = count_rows(rollout.path, "rollout.path")
    if not size or not documents:
        return
    if accumulation.last_step == "drop" and documents < size:
        from pgtoolkit.rollouts.step_loader import nothing_to_train

        report.problems.append(DataProblem(nothing_to_train(documents)))
        return
    last_step = -(-documents * rollout.epochs // size)
    if last_step < max_steps:
        decays = schedule != Schedule.constant
        before = f", before optimizer.schedule={schedule} comes to its end" if decays else ""
        instead = f", or trainer.max_steps={last_step} for a schedule that ends there"
        report.note(
            f"rollout.epochs={rollout.epochs} of {documents} documents ends after at most "
            f"{last_step} of trainer.max_steps={max_steps} steps{before}. To make them all, use "
            f"rollout.epochs={-(-max_steps * size // documents)}{instead if decays else ''}."
        )


def check_models(config: Config, report: Report, may_import: bool, is_clear: bool) -> None:
    """Add what is wrong with models to a report.

    Each is opened as the run does, but for its weights; of one on the hub, its config.json.
    may_import: whether the code of the task, which the tokens may come from, may be imported.
    is_clear: whether no problem is with a word that may mean any key.
    """
    is_random = isinstance(config.model, HuggingFaceModelSettings) and config.model.random_weights
    paths = {}
    if isinstance(config.model, HuggingFaceModelSettings):
        paths["model.path"] = config.model.path
    further = {}
    reference = config.kl.reference
    if config.kl.needs_model and reference is not None and reference not in NO_FOLDER:
        further["kl.reference"] = reference
    if config.critic.path is not None:
        further["critic.path"] = config.critic.path
    for key, path in (paths | further).items():
        if report.concerns(key):
            continue
        problem = _problem_of_model(os.getcwd(), path, is_random and key == "model.path")
        if problem:
            report.problems.append(problem.replace("model.path=", f"{key}="))
    if not is_clear or report.concerns("model"):
        return
    if config.rollout.name == "policy" and not measures_prompts(config):
        _check_positions(config.model, config.rollout, report)
    if not may_import or report.concerns("kl", "critic", "task"):
        return
    for key, path in further.items():
        refused = functools.partial(other_vocabulary_of_critic, path)
        if key == "kl.reference":
            refused = functools.partial(other_vocabulary, config)
        difference = _other_vocabulary(config.model, config.task, config.seed, path)
        if difference is not None:
            report.problems.append(refused(*difference))


def _check_positions(model: Model, rollout: PolicyRolloutSettings, report: Report) -> None:
    """Refuse completions that alone fill the model's positions."""
    if report.concerns("rollout"):
        return
    positions = _positions(model)
    length = rollout.max_completion_length
    if positions is not None and length is not None and length >= positions:
        report.refuse_value(
            key="rollout.max_completion_length",
            value=length,
            needs=f"a number < {positions}",
            reason="Prompt and completion share the model's positions.",
            better=max(1, positions // 2),
        )


def _other_vocabulary(
    model: Model, task: TaskSettings, seed: int, path: str
) -> tuple[str, object] | None:
    """Return what a further model needs and has, if it does not read the policy's tokens; None if
    it does, or where one of the two is not here.

    task, seed: of the run.
    """
    from pgtoolkit.model.weight_files import vocabularies_differ

    if not (has_tokenizer(model) and model_folder.local_folder(path)):
        return None
    tokenizer, _ = tokenizer_and_ends_of(model, task, seed)
    rows = vocabulary_size(model, task) or len(tokenizer)
    other_rows = model_folder.model_settings(model_folder.local_folder(path)).get("vocab_size")
    other_tokenizer = model_folder.load_tokenizer(path)
    return vocabularies_differ(
        rows, tokenizer, other_rows if is_whole(other_rows) else rows, other_tokenizer
    )


def _positions(model: Model) -> int | None:
    """Return how many tokens of a document the model has positions for, if it says so."""
    if isinstance(model, TinyModelSettings):
        return model.max_positions
    positions = model_folder.model_settings(model.path).get("max_position_embeddings")
    return positions if is_whole(positions) else None


@functools.cache  # the jobs of a sweep share it
def _problem_of_model(_directory: str, path: str, random_weights: bool) -> str | None:
    """Return what is wrong with a model; _directory: to which its path may be relative."""
    from pgtoolkit.model.weight_files import open_model, refuse_unsuitable

    try:
        model_config = model_folder.load_config(path)
        if model_folder.local_folder(path) is None:
            refuse_unsuitable(path, model_config)
        else:
            open_model(path, random_weights)
    except PgtoolkitError as error:
        return str(error)
    return None


def _check_prompts(
    tasks: Mapping[str, TaskSettings], model: Model, only_rows: bool, report: Report
) -> None:
    """Read the prompts of training and evaluation, and make their verifiers.

    tasks: by the keys below which they are set. only_rows: no verifier is made.
    """
    for place, task in tasks.items():
        if not isinstance(task, PromptsTaskSettings | ConversationTaskSettings):
            continue
        no_template = ""
        if report.concerns("model"):
            pass  # another one may be meant
        elif model.name == "tiny":
            no_template = "model=tiny"
        elif task.chat == "never":
            no_template = "task.chat=never"
        model_path = getattr(model, "path", None)
        is_trained = place == "task"
        pickled_task = pickle.dumps(task)
        if only_rows:
            task_report = _report_on_rows(os.getcwd(), pickled_task)
        else:
            task_report = _report_on_task(
                os.getcwd(), pickled_task, no_template, model_path, is_trained
            )
        for problem in task_report.problems:
            if _failing(problem) not in map(_failing, report.problems):
                report.problems.append(type(problem)(with_keys_of_set(problem, place)))
        report.notes += [with_keys_of_set(note, place) for note in task_report.notes]


def _failing(problem: str) -> str:
    """Return the verifier that fails on an answer, without that answer: a set has its own prompts,
    and most often the verifier of training. Another problem is returned unchanged."""
    return problem.partition(" must score every text, ")[0]


@functools.cache  # the jobs of a sweep share it
def _report_on_rows(_directory: str, pickled_task: bytes) -> Report:
    """Read the prompts of a task that is pickled to be a cache's key; report what is wrong."""
    from pgtoolkit.tasks.prompt_tasks import PromptRows

    task = pickle.loads(pickled_task)
    report = Report()
    if task.path is not None:
        with errors_added_to(report):
            PromptRows(task, 0, once=lambda read: read())
    return report


@functools.cache  # the jobs of a sweep share it
def _report_on_task(
    _directory: str, pickled_task: bytes, no_template: str, model: str | None, is_trained: bool
) -> Report:
    """Make a task and look at its prompts; report what is wrong, and what may surprise.

    _directory: to which paths may be relative. pickled_task: its configuration, as a cache's key.
    no_template: the setting that leaves chat messages without a template, if there is one.
    model: its folder, or its name. is_trained: whether it is no set, whose repeated prompts are
        noted with its name.
    """
    from pgtoolkit.assembly.make_task import make_task
    from pgtoolkit.tasks.answer_checks import notes_on_answers, notes_on_rows
    from pgtoolkit.tasks.environments import Environments
    from pgtoolkit.tasks.prompt_rows import notes_on_columns
    from pgtoolkit.tasks.prompt_tasks import PromptsTask
    from pgtoolkit.tasks.shared_prompts import note_on_repeated

    task_config = pickle.loads(pickled_task)
    report = Report()
    with errors_added_to(report):
        task = make_task(task_config, 0)
        with contextlib.closing(task):
            task.prompt(0)
            signatures = getattr(task, "signatures", ())
            reads_columns_of_verl = any(signature and signature.is_verl for signature in signatures)
            if task_config.path is not None and not reads_columns_of_verl:
                report.notes += notes_on_columns(
                    task_config.path,
                    task_config.split,
                    getattr(task_config, "config", None),
                    task_config.answer_field,
                )
            if isinstance(task, PromptsTask):
                # Only functions that score batches, in TRL's form, get messages.
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
                answer_field = task_config.answer_field
                is_prompt = answer_field == task_config.prompt_field
                is_prompt = is_prompt and task_config.answer_pattern is None
                report.notes += notes_on_rows(task, answer_field, is_prompt)
                if is_trained:
                    name = f"task.path={task_config.path}"
                    means = "training asks it more often than others"
                    repeated = note_on_repeated(name, task, task.num_prompts, means)
                    report.notes += [] if repeated is None else [repeated]
        has_messages = isinstance(task, PromptsTask) and any(
            prompt.messages is not None for prompt in task.rows()
        )
        if no_template and has_messages:
            raise ConfigError(
                refusal(
                    setting="task.prompt_field",
                    needs="texts",
                    got=f"chat messages with {no_template}",
                    reason="Messages become tokens by the model's chat template.",
                    use="model=huggingface with task.chat=auto",
                )
            )
    if report.problems:  # perhaps with a verifier, which is made before the rows are read
        of_rows = _report_on_rows(_directory, pickled_task).problems
        report.problems += [problem for problem in of_rows if problem not in report.problems]
        if of_rows and isinstance(task_config, ConversationTaskSettings):
            # Its environment is made after the rows are read.
            with errors_added_to(report):
                Environments(task_config.environment, task_config.options)
    return report


def _has_template(model: str) -> bool:
    """Return whether a model has a chat template.

    True for a model on the hub, of which nothing is loaded yet.
    """
    if model_folder.local_folder(model) is None:
        return True
    return bool(model_folder.load_tokenizer(model).chat_template)


def tokenizer_and_ends_of(
    model: Model, task: TaskSettings, seed: int
) -> tuple[PreTrainedTokenizerBase, list[int]]:
    """Return the model's tokenizer, of transformers, and its end-of-sequence tokens.

    task, seed: of the run.
    """
    if isinstance(model, TinyModelSettings):
        from pgtoolkit.assembly.make_task import make_task
        from pgtoolkit.model.setup import character_tokenizer

        tokenizer = character_tokenizer(make_task(task, seed).alphabet)
        return tokenizer, [cast("int", tokenizer.eos_token_id)]
    tokenizer = model_folder.load_tokenizer(model.path)
    generation_config = model_folder.load_generation_config(model.path)
    return tokenizer, model_folder.end_tokens(generation_config, tokenizer)


def _check_texts(config: Config, report: Report) -> None:
    """Turn stop strings, a reference's template and prompts into tokens, and measure the prompts.

    Of a model on the hub there is only config.json yet, so nothing is said of its tokens.
    """
    groups = ("model", "kl", "task", "rollout", "accumulation")
    if report.concerns(*groups) or not has_tokenizer(config.model):
        return
    run = (config.model, config.task, config.seed)
    trained = try_prompts(config)
    if trained.problem:
        report.problems.append(trained.problem)
    is_tiny = isinstance(config.model, TinyModelSettings)
    stop = list(getattr(config.rollout, "stop", []))
    positions = _positions(config.model)
    is_evaluated = is_on(config) and not report.concerns("evaluation")
    for held_out in held_out_sets(config) if is_evaluated else ():
        # The tiny model's tokens are the characters of the task that it is trained on.
        if is_tiny and not stop and held_out.task == config.task:
            continue
        longest = sampling(config).max_completion_length
        assert longest is not None
        limits = limits_of_documents(config, positions, is_trained=False)
        room = _Room(limits, longest, is_held_out=True)
        problem = _try_task(*run, held_out.task, held_out.seed, stop, None, room).problem
        if problem and problem == _problem_of_tokens(os.getcwd(), pickle.dumps(run)):
            report.problems.append(problem)  # of the task of the run, whatever the set is
        elif problem:
            message = with_keys_of_set(problem, place_of_set(config, held_out))
            if message in report.problems:
                continue  # its prompts cannot be read
            report.problems.append(type(problem)(f"evaluation set {held_out.name}: {message}"))


@functools.cache  # the jobs of a sweep share it
def _problem_of_tokens(_directory: str, pickled_run: bytes) -> str | None:
    """Return why the tokens of a run cannot be known, if they cannot.

    pickled_run: the arguments of `tokenizer_and_ends_of`, as a cache's key.
    """
    report = Report()
    with errors_added_to(report):
        tokenizer_and_ends_of(*pickle.loads(pickled_run))
    return next(iter(report.problems), None)


def try_prompts(config: Config) -> _Tried:
    """Turn the prompts of training into tokens, where a run reads them or their tokens matter."""
    stop = list(getattr(config.rollout, "stop", []))
    template = config.kl.reference_prompt
    # The tokens of generated problems are characters that the tiny model has.
    is_generated = isinstance(config.model, TinyModelSettings) and not isinstance(
        config.task, PromptsTaskSettings
    )
    is_read = not is_generated or stop or template
    if config.rollout.name != "policy" or not is_read or not has_tokenizer(config.model):
        return _Tried(problem=None, prompts=None)
    assert config.rollout.max_completion_length is not None
    limits = limits_of_documents(config, _positions(config.model))
    room = _Room(limits, config.rollout.max_completion_length)
    run = (config.model, config.task, config.seed)
    return _try_task(*run, config.task, config.seed, stop, template, room)


class _Tried(NamedTuple):
    """What is wrong with the prompts of a task, or else what they tell, where they were read."""

    problem: str | None
    prompts: ReadPrompts | None


@dataclass(frozen=True)
class _Room:
    """The tokens that there is room for.

    document: what bounds it, see `limits_of_documents`. completion: of the document's tokens.
    is_held_out: whether prompts are those of an evaluation.
    """

    document: dict[str, int]
    completion: int
    is_held_out: bool = False


def _try_task(
    model: Model,
    run_task: TaskSettings,
    run_seed: int,
    task: TaskSettings,
    seed: int,
    stop: list[str],
    template: str | None,
    room: _Room,
) -> _Tried:
    """Turn the first prompts of a task into tokens.

    run_task, run_seed: of the run. template: of the prompts that the reference reads, if they are
        other ones.
    """
    if isinstance(task, PromptsTaskSettings):
        seed = 0  # Its rows are tried in the order of the files.
    if isinstance(run_task, PromptsTaskSettings) or not isinstance(model, TinyModelSettings):
        run_seed = 0  # The tokenizer is that of the model's folder, or has the files' characters.
    arguments = (model, run_task, run_seed, task, seed, stop, template, room)
    return _try_tokens(os.getcwd(), pickle.dumps(arguments))


_ROWS_TRIED = 100
"""Rows of each file of recorded rollouts that are read before a run, which reads all of them."""

_FEW_ROWS = 2000
_FEW_BYTES = 2**23
"""Recorded rollouts of no more rows and bytes are read whole before a run."""

_PROMPTS_TRIED = 1000
"""Prompts of a task that are turned into tokens before a run, which does so with all of them."""


@functools.cache  # the jobs of a sweep share it
def _try_tokens(_directory: str, pickled_arguments: bytes) -> _Tried:
    """Do the work of `_try_task`, whose arguments are pickled to be a cache's key."""
    from pgtoolkit.assembly.make_task import make_task
    from pgtoolkit.tasks.chat_template import chat_of
    from pgtoolkit.tasks.prompts import TokenizedTask, check_turns, scored_by_nobody

    model, run_task, run_seed, task_config, seed, stop, template, room = pickle.loads(
        pickled_arguments
    )
    report = Report()
    prompts = None
    with errors_added_to(report):
        tokenizer, ends = tokenizer_and_ends_of(model, run_task, run_seed)
        task = make_task(scored_by_nobody(task_config), seed, held_out=room.is_held_out)
        with contextlib.closing(task):
            chat = chat_of(task_config, tokenizer)
            rows = vocabulary_size(model, run_task)
            tokenized = TokenizedTask(task, tokenizer, ends, chat, stop, rows, template)
            lengths = tokenized.check_lengths(
                room.document,
                room.completion,
                longest_prompt=getattr(task_config, "max_prompt_length", None),
                skip=getattr(task_config, "too_long", None) == TooLong.skip,
                first=_PROMPTS_TRIED,
            )
            check_turns(tokenized, task_config, model.name)
            are_all = lengths.num_prompts == task.num_prompts
            prompts = ReadPrompts(lengths.longest, lengths.num_prompts, are_all, len(tokenizer))
    return _Tried(report.problems[0] if report.problems else None, prompts)

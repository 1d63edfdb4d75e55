"""`pgtk evaluate`: finds the model and the prompts of a command line, checks them, and shows the
numbers."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.assembly.machine import check_machine
from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation_sets import (
    are_training_prompts,
    held_out_sets,
    key_of_seed,
    sampling_in_words,
    sets_beside_training,
)
from pgtoolkit.config.keys import changes_learning, plain_value
from pgtoolkit.config.names import name_from, plain_config
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.rules.executed import announce
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import RULES_OF_EVALUATION, validate
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.launch.start import refused
from pgtoolkit.rollouts.settings import PolicyRolloutSettings, RecordedRolloutSettings
from pgtoolkit.runs.completion_files import TRAINING, read_completions
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.model_folder import ADAPTER_SETTINGS
from pgtoolkit.system.plain_files import JsonObject, json_object, write_atomically
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import (
    is_whole,
    key_of,
    plural,
    refusal,
    say,
    shell_path,
    without_ending,
)
from pgtoolkit.system.yaml_text import to_yaml

FOLDER = Path("outputs/evaluations")
"""Results lie here, below the directory that the command was typed in."""


class Evaluation(NamedTuple):
    """What `pgtk evaluate` has measured of one model.

    text: to print. folder: of its results. rows: of evaluations.jsonl.
    """

    text: str
    folder: Path
    rows: list[JsonObject]


def evaluate_command(
    sources: Sequence[Path],
    step: int | None,
    best: bool,
    overrides: list[str],
    training_prompts: bool = False,
    on: Sequence[str] = (),
) -> str:
    """Evaluate, write the results into folders of their own, and return the text to print.

    sources: runs and models' folders, of which several are measured alike, and compared with the
        first; none: the model that a configuration begins with.
    The others are those of `_evaluate`. Raises PgtoolkitError.
    """
    if len(sources) < 2:
        source = sources[0] if sources else None
        return _evaluate(source, step, best, overrides, training_prompts, on).text
    _refuse_unlike(sources, overrides, on)
    measured = [
        _evaluate(source, step, best, overrides, training_prompts, on) for source in sources
    ]
    names = [shell_path(source) for source in sources]
    return "\n\n".join([*(each.text for each in measured), differences(measured, names)])


def differences(measured: Sequence[Evaluation], names: Sequence[str]) -> str:
    """Return a line for each set and each model but the first: the mean differences of pass@1 and
    avg from the first, over the prompts of which both have one, with their standard errors."""
    from pgtoolkit.rollouts.evaluator import mean_and_error

    lines = []
    first, *others = measured
    for row in first.rows:
        of_first = _means_of_prompts(first, row)
        for other, name in zip(others, names[1:], strict=True):
            of_other = _means_of_prompts(other, row)
            words = []
            counts = []
            for number, before in of_first.items():
                after = of_other[number]
                pairs = [after[prompt] - before[prompt] for prompt in before if prompt in after]
                if pairs:
                    mean, error = mean_and_error(pairs)
                    plus_minus = "" if error is None else f" ± {error:.4f}"
                    words.append(f"{number} {mean:+z.4f}{plus_minus}")
                    counts.append(plural(len(pairs), "prompt"))
            heading = f"{name} less {names[0]} on {row['set']}"
            if len({*counts}) == 1:
                heading += f", {counts[0]}"
            else:
                words = [f"{text} ({count})" for text, count in zip(words, counts, strict=True)]
            lines.append(f"{heading}: {', '.join(words)}")
    return "\n".join(f"{'difference':<12} {line}" for line in lines)


def _means_of_prompts(evaluation: Evaluation, row: JsonObject) -> dict[str, dict[str, float]]:
    """Return the mean of each prompt's completions by the prompt's name: whether they are right as
    pass@1, and their reward as avg. row: of evaluations.jsonl.

    As in the numbers of a set, a completion that nobody could score is not right, and has no part
    in avg.
    """
    files = [*evaluation.folder.glob(f"completions/evaluation_{row['set']}_[0-9]*.parquet")]
    means: dict[str, dict[str, float]] = {}
    for number, column in (("pass@1", "exact_match"), ("avg", "reward")):
        values: dict[str, list[float]] = {}
        for completion in itertools.chain.from_iterable(map(read_completions, files)):
            value = getattr(completion, column)
            if value is None and column == "exact_match" and completion.score_failed:
                value = False
            if value is not None:
                values.setdefault(completion.name, []).append(float(value))
        means[number] = {name: math.fsum(some) / len(some) for name, some in values.items()}
    return means


def _refuse_unlike(sources: Sequence[Path], overrides: list[str], on: Sequence[str]) -> None:
    """Raise ConfigError where several models would not be measured on the same prompts alike."""
    measured = []
    for source in sources:
        trained = saved_config(source) if is_run(source) else None
        if trained is None:
            _refuse_no_model("pgtk evaluate", source)
        config, problems = _configuration(source, trained, overrides, on)
        if problems:
            raise refused(problems)
        sets = {
            held_out.name: {
                leaf: value
                for leaf, value in vars(held_out.task).items()
                if changes_learning(f"task.{leaf}", config)
            }
            | {"seed": held_out.seed, "prompts": held_out.prompts}
            for held_out in held_out_sets(config)
        }
        measured.append((sets, sampling_in_words(config)))
    for source, (sets, sampling) in zip(sources[1:], measured[1:], strict=True):
        first_sets, first_sampling = measured[0]
        if (sets, sampling) == (first_sets, first_sampling):
            continue
        got = f"{sampling}, and of the first {first_sampling}"
        use = "evaluation.temperature=1 evaluation.max_completion_length=N for all"
        if sets.keys() != first_sets.keys():
            got = "other sets"
            use = "--on FILE, which names the sets of all"
        elif sets != first_sets:
            keys = sorted(
                {
                    leaf
                    for name, keys in sets.items()
                    for leaf in keys | first_sets[name]
                    if keys.get(leaf) != first_sets[name].get(leaf)
                }
            )
            got = f"other values of {', '.join(keys)}"
            use = " and ".join(f"task.{leaf}=VALUE" for leaf in keys) + " for all, beside --on FILE"
        raise ConfigError(
            refusal(
                setting=f"pgtk evaluate {shell_path(sources[0])} {shell_path(source)}",
                needs="models that are measured alike",
                got=got,
                reason="The difference is taken prompt by prompt.",
                use=use,
            )
        )


def _evaluate(
    source: Path | None,
    step: int | None,
    best: bool,
    overrides: list[str],
    training_prompts: bool,
    on: Sequence[str],
) -> Evaluation:
    """Evaluate one model, and write the results into a folder of their own.

    source: a run or a model's folder; None: the model that a configuration begins with.
    step, best: which checkpoint of a run, if not the newest. overrides: what was typed.
    training_prompts: allow sets that hold the prompts that the run was trained on.
    on: files, folders, globs or names of data sets, each a set, in the place of those of the run.
    Raises PgtoolkitError.
    """
    run_dir = source if source is not None and is_run(source) else None
    command = "pgtk evaluate" + ("" if source is None else f" {source}")
    trained = None if run_dir is None else saved_config(run_dir)
    flags: list[str] = []
    if run_dir is None:
        if source is not None:
            _refuse_no_model(command, source)
        flags = _problems_of_flags(source, step, best, training_prompts)
    elif step is not None and not (run_dir / f"checkpoints/step-{step:06d}").is_dir():
        flags = _lacks_checkpoint(run_dir, command, step)
    try:
        chosen, problems = _configuration(source, trained, overrides, on)
    except ConfigError as error:
        raise ConfigError("\n".join([*flags, str(error)])) from error
    try:
        notes = _check(chosen, [*flags, *problems])
    except (ConfigError, DataError) as error:
        raise type(error)(_as_typed(str(error), on)) from error
    for note in notes:
        say(f"note: {_as_typed(note, on)}")
    reasons = {}
    has_rows = trained is not None and isinstance(trained.rollout, RecordedRolloutSettings)
    if run_dir is not None and trained is not None and has_rows:
        reasons = _asked_by_rows(run_dir, trained, chosen)
    elif trained is not None:
        descriptions = {x.name: are_training_prompts(trained, x) for x in held_out_sets(chosen)}
        reasons = {name: reason for name, reason in descriptions.items() if reason}
    if reasons and not training_prompts:
        raise refused(_asked_in_training(command, chosen, reasons, on))
    if reasons:
        say(f"Warning: evaluated on training prompts ({', '.join(reasons)}).")

    from pgtoolkit.assembly.evaluated_policy import evaluate_policy
    from pgtoolkit.assembly.export import saved_state
    from pgtoolkit.training.run_log import quieten

    quieten()
    state = None if run_dir is None else saved_state(run_dir, command, step, best)
    if trained is not None and isinstance(trained.rollout, PolicyRolloutSettings):
        num_documents = 0 if state is None else state["documents_seen"]
        num_asked = math.ceil(num_documents / trained.rollout.group_size)
        _note_shared_prompts(trained, chosen, num_asked)
    folder = _folder(name_from(overrides, {}) if source is None else source.resolve().name)
    write_atomically(folder / "evaluation.yaml", redact(to_yaml(plain_config(chosen))))
    try:
        rows = evaluate_policy(chosen, folder, trained, state)
    except (ConfigError, DataError) as error:
        shutil.rmtree(folder)
        raise type(error)(_as_typed(str(error), on)) from error
    write_atomically(folder / "evaluations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    model = f"the initial model of model={chosen.model.name}, seed {chosen.seed}"
    if source is not None:
        model = shell_path(source) + ("" if state is None else f", step {state['step']}")
    return Evaluation(render_evaluation(rows, chosen, model, folder), folder, rows)


def _as_typed(message: str, on: Sequence[str]) -> str:
    """Return a message about sets with what can be typed: beside `on`, which makes the sets, it
    and the keys of the task."""
    if not on:
        return message
    message = re.sub(r"evaluation\.sets\.\w+\.path=", "--on ", message)
    return re.sub(r"evaluation\.sets\.\w+\.", "task.", message)


def _lacks_checkpoint(run_dir: Path, command: str, step: int) -> list[str]:
    """Return the problem with a run that has no checkpoint of this step."""
    from pgtoolkit.assembly.export import lacks_checkpoint

    problem = lacks_checkpoint(run_dir, command, step)
    return [] if problem is None else [problem]


def _problems_of_flags(
    source: Path | None, step: int | None, best: bool, training_prompts: bool
) -> list[str]:
    """Return a problem for each flag that only a run has a meaning for."""
    flags = {
        f"--step={step}": (step is not None, "A run has several checkpoints."),
        "--best": (best, "A run has several checkpoints."),
        "--training-prompts": (training_prompts, "A run says which prompts it was trained on."),
    }
    return [
        refusal(flag, "a run directory", source or "none", reason, f"no {flag}")
        for flag, (is_set, reason) in flags.items()
        if is_set
    ]


def _configuration(
    source: Path | None,
    trained: Config | None,
    typed: list[str],
    on: Sequence[str],
) -> tuple[Config, list[str]]:
    """Return the configuration of an evaluation, without the keys of training, and the problems of
    its overrides.

    trained: the configuration of the run that is evaluated; None where it is a model.
    on: as for `evaluate_command`.
    Raises ConfigError where nothing can be composed.
    """
    overrides = _on_prompts(typed, trained, on) if on else typed
    if trained is not None:
        composed = compose(overrides, run_dir=source, evaluate="run")
    else:
        if source is not None:
            overrides = [*_model_overrides(source, typed), *overrides]
        composed = compose(overrides, evaluate="model")
    problems = composed.problems
    if composed.config is None:
        raise refused(problems)
    if trained is not None and not on:
        problems = problems + _in_no_set(composed.config, trained, typed)
    measured_once: dict[str, object] = {
        "evaluation.every": 1,
        "evaluation.best": None,
        "trainer.stop_at": None,
    }
    if on:
        measured_once["evaluation.sets"] = _sets_on(on, composed.config, trained, typed)
        if trained is not None:  # the tiny model's tokens are the characters of this task
            measured_once["task"] = trained.task
    return absolute_paths(with_values(composed.config, measured_once)), problems


def _refuse_no_model(command: str, folder: Path) -> None:
    """Raise PgtoolkitError for what is no Hugging Face folder."""
    needs = "a run directory, or a model's Hugging Face folder"
    if (folder / ADAPTER_SETTINGS).is_file():
        reason = "Adapters are part of another model, into which pgtk export merges them."
        use = f"pgtk export {shell_path(folder)} MERGED and pgtk evaluate MERGED"
        raise ConfigError(refusal(command, needs, f"adapters, {ADAPTER_SETTINGS}", reason, use))
    if not (folder / "config.json").is_file():
        raise not_a_run(command, folder, needs)


def _model_overrides(folder: Path, typed: list[str]) -> list[str]:
    """Return the overrides for a Hugging Face folder.

    Its completions are as long as its generation_config.json says, where nothing else is typed; a
    note says so.
    """
    overrides = ["model=huggingface", f"model.path={json.dumps(str(folder))}"]
    key = "evaluation.max_completion_length"
    if key not in map(key_of, typed):
        with contextlib.suppress(OSError, ValueError, RecursionError):  # loading it tells
            longest = json_object(folder / "generation_config.json").get("max_new_tokens")
            if is_whole(longest):
                overrides.append(f"{key}={longest}")
                say(
                    f"note: completions have up to {plural(longest, 'token')}, as max_new_tokens "
                    f"in {shell_path(folder)}/generation_config.json says. {key}=N sets another "
                    "length."
                )
    return overrides


def _on_prompts(typed: list[str], trained: Config | None, on: Sequence[str]) -> list[str]:
    """Return the overrides with a task that reads the prompts of `on`.

    It is the run's task if that reads files, or else task=prompts.
    Raises ConfigError for an override that names other prompts.
    """
    for override in typed:
        if key_of(override) == "task.path" or key_of(override).startswith("evaluation.sets"):
            raise ConfigError(
                refusal(
                    setting=f"--on {on[0]}",
                    needs="no other prompts",
                    got=override,
                    reason="Its files are the sets, in the place of all others.",
                    use="one of the two",
                )
            )
    overrides = [*typed, f"task.path={json.dumps(on[0])}"]
    is_chosen = any(key_of(override) == "task" for override in typed)
    reads_files = trained is not None and hasattr(trained.task, "path")
    return overrides if is_chosen or reads_files else ["task=prompts", *overrides]


def _sets_on(
    on: Sequence[str],
    config: Config,
    trained: Config | None,
    typed: list[str],
) -> dict[str, dict[str, object]]:
    """Return an evaluation set for each path, named after its file or data set.

    Each has the keys of the task that are typed.
    config: has their values.
    trained: the configuration of a run, whose task a set has unless it names another.
    """
    typed_keys = dict.fromkeys(
        key_of(override).split(".")[1] for override in typed if override.startswith("task.")
    )
    shared = {leaf: plain_value(config, f"task.{leaf}") for leaf in typed_keys}
    if trained is None or trained.task.name != config.task.name:
        shared = {"task": config.task.name, **shared}
    sets: dict[str, dict[str, object]] = {}
    for path in on:
        stem = re.sub(r"[^A-Za-z0-9_]+", "_", without_ending(Path(path)).name).strip("_")[:30]
        stem = stem if stem[:1].isalpha() else f"set_{stem}"
        names = [stem, *(f"{stem}_{number}" for number in range(2, len(on) + 1))]
        name = next(name for name in names if name not in sets and name != TRAINING)
        sets[name] = {**shared, "path": path}
    return sets


def _in_no_set(config: Config, saved: Config, typed: list[str]) -> list[str]:
    """Return the problems with typed keys of the task that no set of the run takes from it."""
    sets = {
        name: settings
        for name, settings in config.evaluation.sets.items()
        if isinstance(settings, dict)
    }
    if not sets:
        return []  # the only set is the task, with the evaluation's seed
    names = ", ".join(sets)
    problems = []
    for override in typed:
        key = key_of(override)
        if key == "task" and config.task.name != saved.task.name:
            problems.append(
                refusal(
                    setting=override,
                    needs=f"the task of the run, {saved.task.name}",
                    got=config.task.name,
                    reason=f"The run has the sets {names}, and typing a task does not change them.",
                    use=f"'evaluation.sets.NAME={{task: {config.task.name}, ...}}'",
                )
            )
        if not key.startswith("task.") or plain_value(config, key) == plain_value(saved, key):
            continue
        leaf = key.split(".")[1]
        if all("task" in settings or leaf in _decided_by(settings) for settings in sets.values()):
            problems.append(
                refusal(
                    setting=override,
                    needs="a set that takes it",
                    got="none",
                    reason=f"It would be ignored: the sets {names} have their own.",
                    use=f"evaluation.sets.NAME.{leaf}=VALUE, for one of them or for a new set",
                )
            )
    return problems


def _decided_by(settings: dict[str, object]) -> set[str]:
    """Return the keys that a set of these settings does not take from its task.

    `held_out_sets` makes the sets by the same rule.
    """
    keys = {*settings}
    if "path" in settings:
        keys |= {"config", "split"}
    if "verifier" in settings or "verifiers" in settings:
        keys |= {"verifier", "pattern", "verifiers"}
    return keys


def _asked_by_rows(run_dir: Path, trained: Config, chosen: Config) -> dict[str, str]:
    """Return why it is refused, by name, for each set of which recorded rollouts of a run hold all
    prompts. Print a note on each of which they hold some."""
    from pgtoolkit.assembly.inputs import tokenizer_and_ends_of
    from pgtoolkit.assembly.preview import shared_with_rows
    from pgtoolkit.rollouts.recorded_index import FILE_NAME, read_index
    from pgtoolkit.tasks.shared_prompts import note_on_number

    index = read_index(run_dir)
    if index is None:
        say(
            "note: whether these prompts are in the recorded rollouts that the run was trained on "
            f"is not known: {shell_path(run_dir / FILE_NAME)} is missing, or of another version."
        )
        return {}
    recorded = index.prompts.tolist()
    reasons = {}
    try:
        tokenizer_and_ends = tokenizer_and_ends_of(chosen.model, trained.task, trained.seed)
        for held_out in held_out_sets(chosen):
            num_shared, count = shared_with_rows(held_out, recorded, *tokenizer_and_ends)
            if num_shared == count:
                reasons[held_out.name] = "They are prompts of the rows of rollout.path."
            else:
                note = note_on_number(held_out.name, num_shared, count)
                if note is not None:
                    say(f"note: {note}")
    except (ConfigError, DataError):  # the evaluation, which reads the same, says it
        return {}
    return reasons


def _asked_in_training(
    command: str, chosen: Config, reasons: Mapping[str, str], on: Sequence[str]
) -> list[str]:
    """Return a problem for each set with prompts that the run was trained on.

    reasons: how that is known, by the names of these sets. on: as for `evaluate_command`.
    """
    problems = []
    for held_out in held_out_sets(chosen):
        if held_out.name not in reasons:
            continue
        use = "evaluation.sets.NAME.path=FILE with other prompts"
        if on:
            use = "--on FILE with other prompts"
        elif held_out.files is None:
            use = f"another {key_of_seed(chosen, held_out)}"
        problems.append(
            refusal(
                setting=command,
                needs="prompts that training did not ask",
                got=f"set {held_out.name}: {held_out.source}",
                reason=reasons[held_out.name],
                use=f"{use}, or --training-prompts to evaluate on these",
            )
        )
    return problems


def _note_shared_prompts(trained: Config, chosen: Config, num_asked: int) -> None:
    """Print a note on each set with prompts that the run was trained on, but for sets that are
    known to have only such ones, of which it is said elsewhere.

    num_asked: how many prompts training has asked, where they never end.
    """
    from pgtoolkit.assembly.make_task import held_out_numbers
    from pgtoolkit.assembly.preview import notes_on_shared_prompts

    never = held_out_numbers(trained.task, sets_beside_training(trained))
    sets = [x for x in held_out_sets(chosen) if not are_training_prompts(trained, x)]
    try:
        for note in notes_on_shared_prompts(trained.task, trained.seed, sets, num_asked, never):
            say(f"note: {note}")
    except (ConfigError, DataError) as error:
        say(
            "note: whether training asked some of these prompts is not known, since its own "
            f"cannot be read: {first_line(error)}"
        )


def _check(config: Config, problems: list[str]) -> list[str]:
    """Return the notes on a configuration; raises ConfigError or DataError with all problems.

    problems: those that are known already.
    """
    _, report = validate(config, rules=RULES_OF_EVALUATION)
    report.problems[:0] = problems
    # The rules of training must not look at the prompts of the task, and nothing is tracked.
    untrained = with_values(config, {"rollout.name": "none", "tracking.name": "none"})
    if not report.is_refused:
        announce(untrained)
    check_machine(untrained, report)
    if report.problems:
        raise refused(list(dict.fromkeys(report.problems)))
    return report.notes


def _folder(name: str) -> Path:
    """Make and return a new folder, named after the time and the model."""
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{name}"
    number = 1
    while True:
        folder = FOLDER / (name if number == 1 else f"{name}~{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def render_evaluation(rows: list[JsonObject], config: Config, model: str, folder: Path) -> str:
    """Return a table with a column of numbers for each set, and the paths of all results."""
    names = [
        name
        for name in rows[0]
        if name not in ("step", "time", "documents", "set") and "_error" not in name
    ]
    table = [
        ["", *(row["set"] for row in rows)],
        *([name, *(_cell(row, name) for row in rows)] for name in names),
    ]
    sets = {held_out.name: held_out.source for held_out in held_out_sets(config)}
    entries = [
        ("model", model),
        *sets.items(),
        ("sampled", f"{sampling_in_words(config)}, by sampler={config.sampler.name}"),
        ("results", shell_path(folder / "evaluations.jsonl")),
        ("completions", shell_path(folder / "completions")),
    ]
    return "\n".join([*aligned(table), "", *(f"{label:<12} {value}" for label, value in entries)])


def _cell(row: JsonObject, name: str) -> str:
    value = row.get(name)
    error = row.get(f"{name}_error")
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if error is None else f"{value:z.4f} ± {error:.4f}"

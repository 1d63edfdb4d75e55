"""Experiments from Python, as in a notebook: what the command `pgtk` does, by functions.

    from pgtoolkit import experiment

    config = experiment.compose("loss=gspo", "aggregation=constant")
    run = experiment.train(config)
    run.metrics  # a frame of pandas
    runs = experiment.sweep({"loss": ["grpo", "gspo"], "seed": [0, 1, 2]})
    experiment.compare(runs)

What the functions return shows itself in a notebook. What the command refuses is an exception here,
with the same message. Training, checks and sweeps run in processes of their own, and change
nothing in this one; importing this module loads no torch.

For programs that compose by Hydra: this module registers the types and resolvers of conf/, which
lies in CONFIG_DIRECTORY, so that `hydra.compose` works on it.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import ParamSpec, TypeVar

from pgtoolkit.comparison.results import (
    Comparison,
    Run,
    Runs,
    Values,
    run_in,
    runs_below,
    shown_values,
)
from pgtoolkit.config import compose as composing
from pgtoolkit.config.files import config_directory, sweep_file
from pgtoolkit.config.hydra_files import forget_files, register
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import with_defaults
from pgtoolkit.config.plan import plan_sections
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.errors import ConfigError, PgtoolkitError, as_storage_error
from pgtoolkit.launch import check as checking
from pgtoolkit.launch.apart import call_apart
from pgtoolkit.launch.in_python import before_the_call, in_python
from pgtoolkit.launch.start import in_directory, refused, start, start_or_continue
from pgtoolkit.runs import find
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.functions import is_of_session, not_in_file
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import in_override, in_words, key_of, refusal, text
from pgtoolkit.system.safe_text import escaped, legible

__all__ = [
    "CONFIG_DIRECTORY",
    "Checked",
    "Comparison",
    "Configuration",
    "Run",
    "Runs",
    "check",
    "compare",
    "compose",
    "load",
    "sweep",
    "train",
]

CONFIG_DIRECTORY = str(config_directory())
"""The folder conf/, for `hydra.initialize_config_dir`."""

register()

Grid = Mapping[str, object]
Sections = list[tuple[str, list[str]]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _refusing_as_the_command(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a notebook show an error of the function as the command does, without a traceback."""

    @functools.wraps(function)
    def called(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        try:
            return function(*arguments, **keywords)
        except OSError as error:
            raise _shown_alone(as_storage_error(error)) from error
        except PgtoolkitError as error:
            error.args = (in_python(str(error)),)
            _shown_alone(error)
            raise

    return called


def _shown_alone(error: PgtoolkitError) -> PgtoolkitError:
    """Return the error, of which IPython now shows the message alone."""
    vars(error)["_render_traceback_"] = lambda: [legible(redact(in_words(error)))]
    return error


_OPTIONS = "metric|best-of|reach|over|against|margin"


def _keywords(message: str) -> str:
    """Return a message of `pgtk compare` with its options as the keywords of `compare`."""

    def keyword(match: re.Match[str]) -> str:
        return f"{match[1].replace('-', '_')}={json.dumps(match[2])}"

    message = re.sub(rf"--({_OPTIONS})=(\S+?)(?=[.,;)]*(?:\s|$))", keyword, message)
    message = re.sub(r"--label (\S+=\S+?)(?=[.,;)]*(?:\s|$))", r'labels=["\1"]', message)
    bare = rf"--({_OPTIONS})\b(?!=| in a shell| \S+ in a shell)"
    message = re.sub(bare, lambda match: match[1].replace("-", "_"), message)
    return message.replace("leave --label out", "leave labels out")


@dataclass(frozen=True, eq=False)
class Configuration(Mapping[str, object]):
    """The configuration of a run: the value of each key, by its name in docs/keys.md.

    overrides: what it was composed of.
    by_key: name of a key -> its value; the option of a group by the group's name.
    sections: the plan of the loss and what differs from the defaults, as `pgtk check` shows them.
    """

    overrides: tuple[str, ...]
    by_key: Values
    sections: Sections

    def __getitem__(self, key: str) -> object:
        return self.by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.overrides))})"

    def _repr_html_(self) -> str:
        return _sections_as_html(self.sections)


@_refusing_as_the_command
def compose(*overrides: str) -> Configuration:
    """Return the configuration of a run, by overrides as `pgtk` takes them: `"loss=gspo"`.

    Raises ConfigError with all problems for overrides that make none.
    """
    _refuse_no_texts(
        "compose", overrides, 'compose("loss=gspo", "seed=1"), or compose(*overrides) for a list'
    )
    forget_files()
    run = checking.check_run(composing.compose([*overrides]), [*overrides])
    if run.report.problems:
        raise refused(run.report.problems)
    defaults = composing.compose([]).config
    assert defaults is not None
    sections = plan_sections(run.config, defaults, [*overrides])
    values = with_defaults(dict(leaves(plain_config(run.config))))
    return Configuration(overrides, shown_values(values), sections)


def _refuse_no_texts(name: str, overrides: Sequence[object], use: str) -> None:
    """Raise ConfigError for overrides that are no texts, and for flags of the command. name: of the
    function that got them."""
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(
                refusal(
                    setting=name,
                    needs="overrides, each a text",
                    got=repr(override),
                    reason="An override is what stands behind pgtk in a shell.",
                    use=use,
                )
            )
        if override.startswith("-"):
            flag, _, value = override.partition("=")
            raise ConfigError(
                refusal(
                    setting=name,
                    needs="overrides without flags",
                    got=repr(override),
                    reason="Flags are those of the command.",
                    use=before_the_call(value or "FOLDER") if flag == "--config-dir" else use,
                )
            )


def _refuse_no_path(name: str, path: object, use: str) -> None:
    """Raise ConfigError for what is no path. name: of the function or the keyword that got it."""
    if not isinstance(path, str | Path) or path == "":
        raise ConfigError(
            refusal(
                setting=name,
                needs="a path, as a text or a pathlib.Path",
                got=repr(path),
                reason="It leads to what lies on the disk.",
                use=use,
            )
        )


@dataclass(frozen=True, repr=False)
class Checked:
    """The page of `pgtk check`.

    sections: titles with their lines. problems: nothing trains while there are some. notes: what
    may surprise.
    """

    sections: Sections
    problems: list[str]
    notes: list[str]

    def __str__(self) -> str:
        return "\n\n".join(
            title + "\n" + "\n".join(f"  {line}" for line in lines)
            for title, lines in self.sections
            if lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _sections_as_html(self.sections)


@_refusing_as_the_command
def check(config: Configuration | Grid | str | Path, *overrides: str) -> Checked:
    """Check a configuration, or what `sweep` takes, also for this machine; train nothing."""
    if isinstance(config, Configuration):
        _refuse_no_texts("check", overrides, 'check(config, "trainer.max_steps=100")')
        words = [*config.overrides, *overrides]
        return call_apart(_checked, (words, False, None), ["pgtk", "check", *words])
    words, file, command = _sweep_words("check", config, overrides)
    return call_apart(_checked, (words, True, file), ["pgtk", "check", *command[1:]])


def _checked(overrides: list[str], multirun: bool, file: Path | None) -> Checked:
    checked = checking.check(overrides, multirun, file)
    problems = [*map(in_python, checking.problems(checked))]
    sections = [
        (title, [*map(in_python, lines)]) for title, lines in checking.page_sections(checked)
    ]
    return Checked(sections, problems, [*map(in_python, checking.notes(checked))])


@_refusing_as_the_command
def train(config: Configuration, directory: str | Path | None = None) -> Run:
    """Train, and return the run.

    directory: of the run. A run of this configuration that has begun there goes on, and one that is
        done is left alone, as by `pgtk continue`. None for a new one below outputs/.

    Interrupting it, as by the kernel's button, finishes the step, saves a checkpoint and raises
    Interrupted; the same call with this directory goes on from there.
    Raises PgtoolkitError.
    """
    if not isinstance(config, Configuration):
        raise ConfigError(
            refusal(
                setting="train",
                needs="a configuration",
                got=repr(config),
                reason="All problems with it are found before.",
                use='train(compose("loss=gspo"))',
            )
        )
    words = [*config.overrides]
    if directory is not None:
        _refuse_no_path("directory", directory, 'train(config, "outputs/first")')
        folder = Path(os.path.abspath(directory))
        call_apart(start_or_continue, (folder, words), ["pgtk", "continue", str(folder), *words])
        return run_in(folder)
    composed = composing.compose(words)
    if composed.directory is None:
        raise refused(composed.problems_of_directory)
    folder = Path(os.path.abspath(composed.directory))
    typed = [] if "hydra.run.dir" in map(key_of, words) else [in_directory(folder)]
    command = ["pgtk", *words]
    call_apart(start, ([*words, *typed], None, command), command)
    return run_in(folder)


@_refusing_as_the_command
def sweep(grid: Grid | str | Path, *overrides: str) -> Runs:
    """Train the runs of a sweep that are not done yet, and return all of its folder.

    grid: keys with their values, as in `{"loss": ["grpo", "gspo"], "seed": [0, 1, 2]}`, of which
        every combination is trained; or the name or the file of a sweep, as of `pgtk sweep`.
    overrides: more keys for all of its runs.

    Runs that failed are among them: `run.status` says so, and `run.reason` why.
    Raises PgtoolkitError.
    """
    forget_files()
    words, file, command = _sweep_words("sweep", grid, overrides)
    folder = compose_sweep(words, file).folder
    call_apart(start, (["--multirun", *words], file, command), command)
    assert folder is not None  # without it nothing would have begun
    return runs_below(str(folder))


def _sweep_words(
    name: str, grid: Grid | str | Path, overrides: Sequence[str]
) -> tuple[list[str], Path | None, list[str]]:
    """Return the overrides of a sweep, its file if it has one, and the command that is the same.

    name: of the function that got them.
    """
    _refuse_no_texts(name, overrides, f'{name}(grid, "trainer.max_steps=100")')
    if isinstance(grid, Configuration) or not isinstance(grid, Mapping | str | Path):
        raise ConfigError(
            refusal(
                setting=name,
                needs="keys with their values, or the name or the file of a sweep",
                got=repr(grid),
                reason="A sweep trains every combination of the values.",
                use=f'{name}({{"loss": ["grpo", "gspo"]}}); for one configuration, train(config)',
            )
        )
    if isinstance(grid, Mapping):
        _refuse_no_texts(name, [*grid], f'{name}({{"seed": [0, 1, 2]}})')
        if not grid:
            raise ConfigError(
                refusal(
                    setting=name,
                    needs="keys with their values",
                    got=repr(grid),
                    reason="A sweep trains every combination of their values.",
                    use=f'{name}({{"seed": [0, 1, 2]}}); for one run, train(compose())',
                )
            )
        words = [f"{key}={_values(str(key), values)}" for key, values in grid.items()]
        words += overrides
        return words, None, ["pgtk", "-m", *words]
    if "=" in str(grid) and not Path(grid).is_file():
        typed = [*str(grid).split(), *overrides]
        train_or_check = "train" if name == "sweep" else name
        single = f"{train_or_check}(compose({', '.join(map(json.dumps, typed))}))"
        several = in_python(f"Use pgtk -m {' '.join(typed)}.")[len("Use ") : -1]
        raise ConfigError(
            refusal(
                setting=name,
                needs="keys with their values, or the name or the file of a sweep",
                got=repr(str(grid)),
                reason="An override is no sweep.",
                use=several.replace("sweep(", f"{name}(", 1) if "," in str(grid) else single,
            )
        )
    try:
        file = sweep_file(str(grid))
    except ConfigError as error:
        message = in_python(str(error)).removeprefix("sweep")
        error.args = (f"{name}{message.replace('Use sweep(', f'Use {name}(')}",)
        raise
    return [*overrides], file, ["pgtk", "sweep", str(grid), *overrides]


def _values(key: str, values: object) -> str:
    """Return the values of a key as they stand in an override. Raises ConfigError for a value that
    no override has."""
    is_number = getattr(values, "shape", None) == ()  # as a tensor may be
    if isinstance(values, str | Set | Mapping) or not isinstance(values, Iterable) or is_number:
        return _value(key, values)
    words = [_value(key, value) for value in values]
    if not words:
        raise ConfigError(
            refusal(
                setting=key,
                needs="one value or more",
                got=values,
                reason="A sweep trains every combination of the values.",
                use=f'{{"{key}": [VALUE]}}',
            )
        )
    return ",".join(words)


def _value(key: str, value: object) -> str:
    if isinstance(value, Path):
        return in_override(str(value))
    if value is None or isinstance(value, str | Real):
        return text(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(_value(key, part) for part in value)}]"
    use = f'{{"{key}": [VALUE]}} with its number or text'
    if callable(value) and hasattr(value, "__qualname__"):
        path = f"{value.__module__}.{value.__qualname__}"
        if is_of_session(path):
            raise ConfigError(not_in_file(key, path))
        use = f'{{"{key}": ["{path}"]}}'
    raise ConfigError(
        refusal(
            setting=key,
            needs="values that are texts, numbers, paths, True, False, None or lists of these",
            got=f"{value!r} of type {type(value).__name__}",
            reason="They become overrides, as they stand behind pgtk in a shell.",
            use=use,
        )
    )


@_refusing_as_the_command
def load(path: str | Path) -> Run | Runs:
    """Return the run of a directory, or the runs in and below a folder, or of a sweep's name.

    Other files in the folder are passed over. Raises ConfigError where there is no run.
    """
    _refuse_no_path("load", path, 'load("outputs"), or load(run.path)')
    return run_in(Path(path)) if find.is_run(Path(path)) else runs_below(str(path))


@_refusing_as_the_command
def compare(
    *runs: Run | Iterable[Run] | str | Path,
    metric: str | None = None,
    best_of: str | None = None,
    reach: str | None = None,
    over: str | None = None,
    against: str | None = None,
    margin: str | float | None = None,
    ignore_code: bool = False,
    labels: Sequence[str] = (),
) -> Comparison:
    """Compare runs, or those in folders and of sweeps.

    The keywords are the options of `pgtk compare`: `against="loss=grpo"` is `--against loss=grpo`.
    ignore_code: `--ignore code`. labels: `--label`, each.

    Raises ConfigError if no run can be read or has the metric, and for an option that does not fit
    the runs.
    """
    from pgtoolkit.comparison import groups
    from pgtoolkit.comparison.bases import refuse_other_measures
    from pgtoolkit.comparison.measures import runs_with

    margin = None if margin is None else text(margin)
    texts = {"metric": metric, "best_of": best_of, "reach": reach, "over": over}
    _refuse_other_values(texts | {"against": against}, labels, ignore_code)
    paths = [*_paths(runs)]
    if not paths:
        raise ConfigError(
            refusal(
                setting="compare",
                needs="runs",
                got="none",
                reason="It compares what they reached.",
                use='compare(runs), or compare("outputs/sweeps/NAME")',
            )
        )
    try:
        compared = groups.compare(
            runs_with(metric, reach, paths),
            metric,
            best_of,
            reach,
            over,
            against,
            margin,
            ignore_code,
            labels,
        )
        refuse_other_measures(compared)
    except ConfigError as error:
        error.args = (_keywords(str(error)),)
        raise
    return Comparison(compared)


def _refuse_other_values(texts: Mapping[str, object], labels: object, ignore_code: object) -> None:
    """Raise ConfigError for keywords of `compare` that are no texts, labels that are no list of
    texts, and an `ignore_code` that is neither True nor False."""
    examples = {"metric": "final:reward", "reach": "exact_match=0.5", "against": "loss=grpo"}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                refusal(
                    setting=name,
                    needs="a text",
                    got=repr(value),
                    reason=f"It is what stands behind --{name.replace('_', '-')} in a shell.",
                    use=f'{name}="{examples.get(name, "model.path")}"',
                )
            )
    are_texts = isinstance(labels, Sequence) and all(isinstance(label, str) for label in labels)
    if isinstance(labels, str) or not are_texts:
        raise ConfigError(
            refusal(
                setting="labels",
                needs="a list of texts",
                got=repr(labels),
                reason="Each names a value.",
                use='labels=["loss=grpo=GRPO"]',
            )
        )
    if not isinstance(ignore_code, bool):
        raise ConfigError(
            refusal(
                setting="ignore_code",
                needs="True or False",
                got=repr(ignore_code),
                reason="True is --ignore code in a shell.",
                use="ignore_code=True",
            )
        )


def _paths(runs: Iterable[Run | Iterable[Run] | str | Path]) -> Iterator[str]:
    for run in runs:
        if isinstance(run, Run):
            yield str(run.path)
        elif isinstance(run, str | Path):
            yield str(run)
        elif isinstance(run, Mapping | bytes) or not isinstance(run, Iterable):
            raise ConfigError(
                refusal(
                    setting="compare",
                    needs="runs",
                    got=repr(run),
                    reason="They are those of train, sweep and load, or folders.",
                    use='compare(runs), or compare("outputs/sweeps/NAME")',
                )
            )
        else:
            yield from _paths(run)


def _sections_as_html(sections: Sections) -> str:
    return "\n".join(
        f"<details open><summary><b>{escaped(title)}</b></summary>"
        f"<pre>{_lines(lines)}</pre></details>"
        for title, lines in sections
        if lines
    )


def _lines(lines: list[str]) -> str:
    return escaped("\n".join(lines))

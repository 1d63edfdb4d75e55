"""The sub-commands that train nothing: their arguments, and the page or file that each writes."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import NoReturn

from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.system.output_files import refuse_unwritable
from pgtoolkit.system.plain_files import plain_run, write_atomically
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, refusal, say, shell_path
from pgtoolkit.tracking.store_address import STORE_VARIABLE


class _Parser(argparse.ArgumentParser):
    """Reads the words of a sub-command; a mistake is a ConfigError.

    command: the line as it was typed, for the pages that the sub-command writes.
    words: what stands after the name, as `pgtk --help` shows it.
    """

    def __init__(self, name: str, argv: list[str]):
        super().__init__(f"pgtk {name}", description=REPORTS[name][1].partition("; --")[0])
        self.command = redact(shlex.join(["pgtk", name, *argv]))
        self.words = REPORTS[name][0]

    def error(self, message: str) -> NoReturn:
        usage = f"{self.prog} {self.words}".rstrip()
        raise ConfigError(
            f"{self.prog}: {message}. Use {usage}; {self.prog} --help lists the options."
        )


def report(name: str, argv: list[str]) -> int:
    """Run the sub-command with the words after its name; return the exit status."""
    command = REPORTS[name][2]
    return command(_Parser(name, argv), argv) or 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


_COMPARISON_FILES = {
    "html": "report in one page",
    "csv": "row for each configuration: mean, interval, n, verdict",
    "runs_csv": "row for each run",
    "latex": "table for a paper, by booktabs",
    "png": "picture of the curves, and of the means with their intervals (.png .jpg .pdf .svg)",
    "svg": "picture of the curves, and of the means with their intervals (.png .jpg .pdf .svg)",
    "pdf": "picture of the curves, and of the means with their intervals (.png .jpg .pdf .svg)",
}
"""Kind of file that a comparison can be written as -> its content in words."""


def _compare(parser: _Parser, argv: list[str]) -> None:
    _add_arguments_of_compare(parser)
    args = parser.parse_args(argv)

    files = {kind: getattr(args, kind) for kind in _COMPARISON_FILES if getattr(args, kind)}
    refuse_unwritable(
        {f"--{kind.replace('_', '-')}": path for kind, path in files.items()},
        pictures=("--png", "--svg", "--pdf"),
    )

    from pgtoolkit.comparison.groups import compare, refuse_other_measures
    from pgtoolkit.comparison.measures import needed_for, parse_metric
    from pgtoolkit.comparison.reports import as_json, write
    from pgtoolkit.comparison.text_report import render_comparison
    from pgtoolkit.runs.find import find_runs

    _refuse_overrides(args.runs)
    metric = parse_metric(args.metric)[1] if args.metric else (args.reach or "").rpartition("=")[0]
    runs = find_runs(args.runs, needed_for(metric))
    is_pair = len(args.runs) == len(runs) == 2 and all(run.state != "unreadable" for run in runs)
    if is_pair and not args.json:
        from pgtoolkit.comparison.diff import render_diff

        first, second = (Path(run.path) for run in runs)
        say(render_diff(first, second) + "\n")
    compared = compare(
        runs,
        args.metric,
        args.best_of,
        args.reach,
        args.over,
        args.against,
        args.margin,
        ignore_code=args.ignore == "code",
        labels=args.label,
    )
    refuse_other_measures(compared)
    say(as_json(compared) if args.json else render_comparison(compared))
    for kind, path in files.items():
        problem = write(compared, kind, path, parser.command)
        if problem:
            say(f"note: {problem}", error=True)
        if not problem or kind == "html":
            say(f"{kind:<8} {shell_path(path)}", error=args.json)


def _add_arguments_of_compare(parser: _Parser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, folder with runs, or a sweep's name"
    )
    measure = parser.add_mutually_exclusive_group()
    measure.add_argument(
        "--metric", metavar="NAME", help="also area:NAME, final:NAME (default: what runs have)"
    )
    measure.add_argument(
        "--reach",
        metavar="METRIC=X",
        help="compare the documents it takes until METRIC is X or more",
    )
    parser.add_argument(
        "--best-of", metavar="KEY", help="of runs that differ in this key alone, keep the best"
    )
    parser.add_argument(
        "--over", metavar="KEYS", help="such as model.path: part of a block, as the seed is"
    )
    parser.add_argument(
        "--against",
        nargs="?",
        const="",
        metavar="KEY=VALUE",
        help="the base of the planned contrasts; KEY or nothing: the first of the sweep's values",
    )
    parser.add_argument(
        "--margin", metavar="X", help="differences within it are equal: 0.02, or 3%% of the base"
    )
    parser.add_argument(
        "--ignore",
        choices=("code",),
        help="code: runs that differ only in the user's own modules count as seeds of one",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE=NAME",
        help="a value's name in tables and pictures, such as loss=mine.Squared=ours; repeatable",
    )
    for kind, content in _COMPARISON_FILES.items():
        parser.add_argument(
            f"--{kind.replace('_', '-')}", type=Path, metavar="FILE", help=f"write a {content}"
        )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")


def _refuse_overrides(words: list[str]) -> None:
    """Raise ConfigError for overrides, with the folder of the sweep that they probably mean."""
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    if not overrides:
        return
    from pgtoolkit.config.names import name_from
    from pgtoolkit.config.overrides import is_swept

    overrides.sort(key=lambda word: not is_swept(word))  # as in the name of the folder
    sweep = [word for word in words if word not in overrides]
    folder = "_".join([*sweep, name_from(overrides, {})])
    raise ConfigError(
        refusal(
            setting="pgtk compare",
            needs="runs, folders or sweeps",
            got=" ".join(overrides),
            reason="A sweep with overrides has a folder of its own, named after them.",
            use=f"pgtk compare {folder}",
        )
    )


def _samples(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument("run", metavar="RUN", type=plain_run, help="run directory")
    parser.add_argument(
        "--set",
        metavar="NAME",
        help="training, or an evaluation set (default: an evaluation set)",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="completions of this step (default: the last; with --html all)",
    )
    parser.add_argument(
        "--since", type=int, metavar="N", help="changes since this step (default: the first)"
    )
    parser.add_argument(
        "--count", type=_positive, default=3, metavar="N", help="completions of a kind (default: 3)"
    )
    parser.add_argument(
        "--lines", type=_positive, default=8, metavar="N", help="lines of each text (default: 8)"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page to search and sort all completions"
    )
    args = parser.parse_args(argv)
    if args.html:
        refuse_unwritable({"--html": args.html})

    from pgtoolkit.comparison.samples import chosen_set, html, kept_by, render_samples, samples

    kept = kept_by(args.run)
    chosen = samples(chosen_set(kept, args.set), args.step, args.since, args.count)
    say(render_samples(chosen, kept, shell_path(args.run), args.count, args.lines))
    if args.html:
        sets = [kept[args.set]] if args.set else [*kept.values()]
        args.html.write_text(
            html(sets, args.step, shell_path(args.run), parser.command), encoding="utf-8"
        )
        say(f"\nhtml  {shell_path(args.html)}")


def _ui(parser: _Parser, argv: list[str]) -> int:
    parser.add_argument(
        "--port",
        type=_positive,
        default=5000,
        metavar="N",
        help="port on 127.0.0.1 (default: 5000)",
    )
    parser.add_argument(
        "--uri",
        metavar="URI",
        help="another store (default: MLFLOW_TRACKING_URI, else sqlite:///outputs/mlflow.db)",
    )
    args = parser.parse_args(argv)
    _check_store(args.uri)

    from pgtoolkit.comparison.ui import show_store

    return show_store(args.uri, args.port)


def _check_store(uri: str | None) -> None:
    """Raise ConfigError for a --uri that is no address of an MLflow store."""
    from pgtoolkit.config.rules.tracking import address_of_store

    problems = Report()
    of_environment = os.environ.get(STORE_VARIABLE)
    if uri is not None:
        address_of_store("--uri", uri, problems)
    elif of_environment:
        address_of_store(STORE_VARIABLE, of_environment, problems)
    if problems.problems:
        raise ConfigError(problems.problems[0])


def _sync(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directory, or a folder with runs such as a sweep",
    )
    parser.add_argument("--uri", metavar="URI", help="another store than the run's own")
    parser.add_argument(
        "--experiment", metavar="NAME", help="another experiment than the run's own"
    )
    args = parser.parse_args(argv)
    _check_store(args.uri)

    from pgtoolkit.assembly.sync import sync
    from pgtoolkit.runs.find import run_directories

    errors = []
    for directory in run_directories("pgtk sync", args.runs):
        try:
            say(sync(directory, args.uri, args.experiment))
        except PgtoolkitError as error:
            # A run may be damaged, or still going on. The others are delivered all the same.
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_status)
        raise type(worst)("\n".join(dict.fromkeys(map(str, errors)))) from worst


def _export(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument("run", metavar="RUN", type=plain_run, help="run directory")
    parser.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder")
    parser.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint with the highest evaluation.best instead",
    )
    args = parser.parse_args(argv)

    from pgtoolkit.assembly.export import export

    step = export(args.run, args.folder, args.best)
    say(
        f"step {step} of {shell_path(args.run)} is in {shell_path(args.folder)}; its README.md "
        "says how to load it"
    )


def _solutions(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="a new .jsonl file")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="the task, with its keys, and the seed"
    )
    parser.add_argument(
        "--count", type=_positive, default=10_000, metavar="N", help="rows (default: 10000)"
    )
    args = parser.parse_intermixed_args(argv)

    from pgtoolkit.launch.solutions import write_solutions

    say(write_solutions(args.out, args.overrides, args.count))


def _evaluate(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[RUN_OR_FOLDER] [OVERRIDES]",
        help="run, or Hugging Face folder",
    )
    checkpoint = parser.add_mutually_exclusive_group()
    checkpoint.add_argument(
        "--step", type=_positive, metavar="N", help="of a run, the checkpoint of this step"
    )
    checkpoint.add_argument(
        "--best", action="store_true", help="of a run, its best checkpoint instead of the newest"
    )
    parser.add_argument(
        "--training-prompts",
        action="store_true",
        help="allow prompts that the run was trained on",
    )
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="PATH",
        help="prompts to evaluate on instead of the run's: a file, a folder, or OWNER/NAME on the "
        "hub; repeatable",
    )
    args = parser.parse_intermixed_args(argv)
    named = [word for word in args.words if "=" not in word or Path(word).exists()]
    if len(named) > 1:
        parser.error(f"one model is evaluated at a time (got {' '.join(named)})")

    from pgtoolkit.launch.evaluate import evaluate_command

    overrides = [word for word in args.words if word not in named]
    source = plain_run(named[0]) if named else None
    say(evaluate_command(source, args.step, args.best, overrides, args.training_prompts, args.on))


def _tokens(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, or recorded rollouts")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="loss=grpo,cispo stand side by side"
    )
    parser.add_argument(
        "--step",
        type=_positive,
        metavar="N",
        help="default: the last step on its batch of rollouts, soon after a checkpoint",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="the page (default: tokens-RUN-N.html)"
    )
    args = parser.parse_intermixed_args(argv)

    refuse_unwritable({"--html": args.html or Path(f"tokens-{Path(args.run).name}.html")})

    from pgtoolkit.comparison.tokens import inspect, tokens_summary
    from pgtoolkit.comparison.tokens_page import html

    inspected = inspect(str(plain_run(args.run)), args.overrides, args.step)
    page = args.html or Path(f"tokens-{inspected.name}-{inspected.number}.html")
    write_atomically(page, html(inspected, parser.command))
    say(tokens_summary(inspected, page))


def _explain(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="or a sentence of pgtk's, whose words are explained",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)

    from pgtoolkit.config.explain import explain, explain_as_json

    words = " ".join(args.words)
    say(explain_as_json(words) if args.json else explain(words))


def _doctor(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, folder with runs, or a sweep's name"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(argv)

    from pgtoolkit.comparison.doctor import diagnose

    say(diagnose(args.runs, args.json))


def _translate(parser: _Parser, argv: list[str]) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="YAML, JSON, a shell script or a program of TRL's GRPOTrainer or of verl",
    )
    parser.add_argument(
        "--processes",
        type=_positive,
        metavar="N",
        help="processes that TRL trains on, where its file does not say so (default: 1)",
    )
    args = parser.parse_args(argv)

    from pgtoolkit.config.translate import translate

    say(translate(args.file, args.processes))


REPORTS = {
    "compare": (
        "RUN_DIR...",
        "what runs reached over seeds, and whether it differs; --html FILE",
        _compare,
    ),
    "doctor": (
        "RUN_DIR...",
        "which known failure a run shows, since when, what to change",
        _doctor,
    ),
    "evaluate": (
        "[RUN] [OVERRIDES]",
        "avg and pass@k of a run, a folder or an initial model",
        _evaluate,
    ),
    "explain": ("WORD", "what a key, group, option, metric or exit status means", _explain),
    "export": (
        "RUN_DIR DIR",
        "the newest checkpoint, or --best, as a Hugging Face folder",
        _export,
    ),
    "samples": (
        "RUN_DIR",
        "what the model wrote: best, worst, what changed; --html FILE",
        _samples,
    ),
    "solutions": (
        "OUT [OVERRIDES]",
        "a task's prompts with their answers, for experiment=sft",
        _solutions,
    ),
    "sync": (
        "RUN_DIR...",
        "deliver to MLflow what it lacks of runs, such as after an outage",
        _sync,
    ),
    "tokens": (
        "RUN_DIR [loss=a,b]",
        "what losses do to each token of a step, side by side, as a page",
        _tokens,
    ),
    "translate": ("FILE", "a configuration of TRL or verl as a command here", _translate),
    "ui": ("", "MLflow's pages of the runs tracked from this directory; --port N", _ui),
}
"""Name -> its words, its purpose, and its function.

The function takes a parser and the words after the name, and returns an exit status other than 0
or nothing.
"""

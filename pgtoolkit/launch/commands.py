"""The sub-commands that train nothing, with the page or file that each writes. Their arguments are
in `command_arguments.py`."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import NoReturn

from pgtoolkit.errors import ConfigError, ExitStatus, PgtoolkitError, kept, refuse_all
from pgtoolkit.launch.command_arguments import ARGUMENTS, COMPARISON_FILES
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
    parser = _Parser(name, argv)
    ARGUMENTS[name](parser)
    args, flags = parser.parse_known_intermixed_args(argv)
    if name == "explain":
        args.words += flags  # of other commands
    elif flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        return REPORTS[name][2](args, parser) or 0
    except ConfigError as error:
        start = _where_code_may_be(str(error), argv, parser.command)
        raise ConfigError(f"{error}{start}") from error


def _where_code_may_be(problem: str, argv: list[str], command: str) -> str:
    """Return, for a module that is not found here, where the run that the words name was started;
    "" for another problem."""
    from pgtoolkit.runs.records import known_provenance

    for word in argv if "ModuleNotFoundError" in problem else ():
        if (Path(word) / "config.yaml").is_file():
            directory = known_provenance(Path(word)).get("directory")
            if directory not in (None, str(Path.cwd())):
                return (
                    f" The run was started in {directory}, where its code may be: "
                    f"PYTHONPATH={shlex.quote(directory)} {command}"
                )
    return ""


def _compare(args: argparse.Namespace, parser: _Parser) -> None:
    files = {kind: getattr(args, kind) for kind in COMPARISON_FILES if getattr(args, kind)}
    problems: list[str] = []
    with kept(problems):
        refuse_unwritable(
            {f"--{kind.replace('_', '-')}": path for kind, path in files.items()},
            pictures=("--figure",),
        )

    from pgtoolkit.comparison.bases import refuse_other_measures
    from pgtoolkit.comparison.figure import panels_named
    from pgtoolkit.comparison.groups import compare
    from pgtoolkit.comparison.measures import margin_of, parse_metric, parse_reach, runs_with
    from pgtoolkit.comparison.reports import as_json, write
    from pgtoolkit.comparison.text_report import render_comparison

    # All flags are looked at before the work.
    with kept(problems):
        _refuse_overrides(args.runs)
    with kept(problems):
        panels_named(args.panels, args.best_of)
    if args.panels and not (args.figure or args.html):
        problems.append(
            refusal(
                setting=f"--panels={args.panels}",
                needs="--figure or --html",
                got="neither",
                reason="It names the panels of their picture.",
                use=f"--figure=compare.pdf --panels={args.panels}",
            )
        )
    for read, value in (
        (parse_metric, args.metric),
        (parse_reach, args.reach),
        (margin_of, args.margin),
    ):
        if value is not None:
            with kept(problems):
                read(value)
    refuse_all(problems)
    runs = runs_with(args.metric, args.reach, args.runs)
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
    say(as_json(compared) if args.json else render_comparison(compared, keys_are_shown=is_pair))
    for kind, path in files.items():
        problem = write(compared, kind, path, parser.command, args.panels)
        if problem:
            say(f"note: {problem}", error=True)
        if not problem or kind == "html":
            say(f"{kind:<8} {shell_path(path)}", error=args.json)


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


def _samples(args: argparse.Namespace, parser: _Parser) -> None:
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


def _ui(args: argparse.Namespace, parser: _Parser) -> int:
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


def _sync(args: argparse.Namespace, parser: _Parser) -> None:
    _check_store(args.uri)

    from pgtoolkit.assembly.sync import sync
    from pgtoolkit.launch.sync_sweeps import sweeps_of, sync_sweep
    from pgtoolkit.runs.find import run_directories

    errors = []
    delivered = []
    for directory in run_directories("pgtk sync", args.runs):
        try:
            say(sync(directory, args.uri, args.experiment))
            delivered.append(directory)
        except PgtoolkitError as error:
            # A run may be damaged, or still going on. The others are delivered all the same.
            errors.append(error)
    for folder, job in sweeps_of(delivered).items():
        try:
            say(sync_sweep(folder, job, args.uri, args.experiment))
        except PgtoolkitError as error:
            errors.append(error)
    if errors:
        worst = max(errors, key=lambda error: error.exit_status)
        raise type(worst)("\n".join(dict.fromkeys(map(str, errors)))) from worst


def _export(args: argparse.Namespace, parser: _Parser) -> None:
    from pgtoolkit.assembly.export import export

    step = export(args.run, args.folder, args.best)
    if step is None:
        say(f"the adapters are merged: model.path={shell_path(args.folder)} is the whole model")
        return
    say(
        f"step {step} of {shell_path(args.run)} is in {shell_path(args.folder)}; its README.md "
        "says how to load it"
    )


def _solutions(args: argparse.Namespace, parser: _Parser) -> None:
    from pgtoolkit.launch.solutions import write_solutions

    say(write_solutions(args.out, args.overrides, args.count))


def _evaluate(args: argparse.Namespace, parser: _Parser) -> None:
    named = [word for word in args.words if "=" not in word or Path(word).exists()]
    from pgtoolkit.launch.evaluate import evaluate_command

    overrides = [word for word in args.words if word not in named]
    sources = [plain_run(name) for name in named]
    say(evaluate_command(sources, args.step, args.best, overrides, args.training_prompts, args.on))


def _tokens(args: argparse.Namespace, parser: _Parser) -> None:
    refuse_unwritable({"--html": args.html or Path(f"tokens-{Path(args.run).name}.html")})

    from pgtoolkit.comparison.tokens import inspect, tokens_summary
    from pgtoolkit.comparison.tokens_page import html

    inspected = inspect(str(plain_run(args.run)), args.overrides, args.step)
    page = args.html or Path(f"tokens-{inspected.name}-{inspected.number}.html")
    write_atomically(page, html(inspected, parser.command))
    say(tokens_summary(inspected, page))


def _parity(args: argparse.Namespace, parser: _Parser) -> int:
    from pgtoolkit.comparison.parity import as_json, parity, render

    compared = parity(args.words, args.step, args.tolerance, args.python)
    say(as_json(compared) if args.json else render(compared))
    return ExitStatus.done if compared.agree else ExitStatus.differs


def _explain(args: argparse.Namespace, parser: _Parser) -> None:
    from pgtoolkit.config.explain import explain, explain_as_json
    from pgtoolkit.launch.command_pages import pages_on_commands

    if not args.words:
        parser.error("the following arguments are required: WORD")
    words = " ".join(args.words)
    commands = pages_on_commands(REPORTS)
    say(explain_as_json(words, commands) if args.json else explain(words, commands))


def _doctor(args: argparse.Namespace, parser: _Parser) -> None:
    if args.step is not None and not args.sampler:
        parser.error("--step belongs to --sampler")
    if args.sampler:
        if len(args.runs) > 1:
            parser.error(f"--sampler takes one run (got {' '.join(args.runs)})")
        from pgtoolkit.comparison.mismatch import as_json, mismatch, render

        report = mismatch(plain_run(args.runs[0]), args.step)
        say(as_json(report) if args.json else render(report))
        return
    from pgtoolkit.comparison.doctor import diagnose

    say(diagnose(args.runs, args.json))


def _translate(args: argparse.Namespace, parser: _Parser) -> None:
    from pgtoolkit.config.translate_page import translate

    say(translate(args.file, args.processes), is_redacted=True)


REPORTS = {
    "compare": (
        "RUN...",
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
    "explain": (
        "WORD",
        "what a key, option, metric, command or other word means",
        _explain,
    ),
    "export": (
        "RUN_DIR DIR",
        "newest or --best checkpoint as a Hugging Face folder, LoRA merged",
        _export,
    ),
    "parity": (
        "THEIRS... RUN",
        "the first number of a step in which TRL, verl and we differ",
        _parity,
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
    "translate": (
        "FILE",
        "a configuration of TRL or verl as a command here",
        _translate,
    ),
    "ui": (
        "",
        "MLflow's pages of the runs tracked from this directory; --port N",
        _ui,
    ),
}
"""Name -> its words, its purpose, and its function.

The function takes the arguments and their parser, and returns an exit status other than 0 or
nothing.
"""

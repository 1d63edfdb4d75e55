"""The arguments of the sub-commands that train nothing."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path

from pgtoolkit.system.plain_files import plain_run


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number >= 1")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return number


COMPARISON_FILES = {
    "html": "report in one page",
    "csv": "row for each configuration: mean, interval, n, verdict",
    "runs_csv": "row for each run",
    "latex": "table for a paper, by booktabs",
    "figure": "picture for a page: curves, and means with their intervals (.png .jpg .pdf .svg)",
}
"""Kind of file that a comparison can be written as -> its content in words."""


def _compare(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, folder with runs, or a sweep's name"
    )
    measure = parser.add_mutually_exclusive_group()
    measure.add_argument(
        "--metric",
        metavar="NAME",
        help="what is compared: documents until NAME is at a threshold, or without one its end; "
        "final:NAME its end, area:NAME the area under its curve (default: held-out, else training)",
    )
    measure.add_argument(
        "--reach",
        metavar="METRIC=X",
        help="compare the documents it takes until METRIC is X or more",
    )
    parser.add_argument(
        "--best-of",
        metavar="KEY",
        help="of configurations that differ in this key alone, keep the best",
    )
    parser.add_argument(
        "--over",
        metavar="KEYS",
        help="keys that make a block with the seed, such as model.path: runs are paired by block",
    )
    parser.add_argument(
        "--against",
        nargs="?",
        const="",
        metavar="KEY=VALUE",
        help="the base of the planned pairs: each configuration is compared with the one that "
        "differs in KEY alone and has VALUE; KEY alone: the first of the sweep's values; nothing: "
        "its first configuration",
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        help="differences within it are equal: 0.02, or 3%% of the base",
    )
    parser.add_argument(
        "--ignore",
        choices=("code",),
        help="code: runs that differ only in your own modules count as seeds of one configuration",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="KEY=VALUE=NAME",
        help="a value's name in tables and pictures, such as loss=mine.Squared=ours; repeatable",
    )
    for kind, content in COMPARISON_FILES.items():
        parser.add_argument(
            f"--{kind.replace('_', '-')}", type=Path, metavar="FILE", help=f"write a {content}"
        )
    parser.add_argument(
        "--panels",
        metavar="NAMES",
        help="of the picture: documents, steps, seconds (curves), means, tried (with --best-of); "
        "one is a column wide, 3.3 in, several 6.9 in (default: documents,seconds,means)",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")


def _samples(parser: ArgumentParser) -> None:
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


def _ui(parser: ArgumentParser) -> None:
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


def _sync(parser: ArgumentParser) -> None:
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


def _export(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        type=plain_run,
        help="run directory, or a folder of LoRA's adapters that TRL or peft saved",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="new or empty folder")
    parser.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint with the highest evaluation.best instead",
    )


def _solutions(parser: ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="a new .jsonl file")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="the task, with its keys, and the seed"
    )
    parser.add_argument(
        "--count", type=_positive, default=10_000, metavar="N", help="rows (default: 10000)"
    )


def _evaluate(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[RUN_OR_FOLDER...] [OVERRIDES]",
        help="run, or Hugging Face folder; several are measured on the same prompts, and compared "
        "with the first",
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


def _tokens(parser: ArgumentParser) -> None:
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


def _parity(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="THEIRS... RUN",
        help="a file of TRL or verl, another run, or overrides of the run; two files are compared "
        "with each other; then a run directory, or recorded rollouts",
    )
    parser.add_argument(
        "--step", type=_positive, metavar="N", help="default: that of pgtk tokens RUN"
    )
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=1e-6,
        metavar="X",
        help="share of the largest number up to which two are equal (default: 1e-6)",
    )
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="Python of an environment with TRL or verl, whose own functions are called there; "
        "twice: one for each of two files",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _explain(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="or a sentence of pgtk's, whose words are explained",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _doctor(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory, folder with runs, or a sweep's name"
    )
    parser.add_argument(
        "--sampler",
        action="store_true",
        help="of one run: how far trainer and sampler are apart on a step, made again",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with --sampler (default: the newest that begins a batch)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _translate(parser: ArgumentParser) -> None:
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


ARGUMENTS = {
    "compare": _compare,
    "doctor": _doctor,
    "evaluate": _evaluate,
    "explain": _explain,
    "export": _export,
    "parity": _parity,
    "samples": _samples,
    "solutions": _solutions,
    "sync": _sync,
    "tokens": _tokens,
    "translate": _translate,
    "ui": _ui,
}
"""Name of a command -> the function that declares its arguments."""

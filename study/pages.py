"""Make every table and picture of the study's pages from packed runs, by pgtk's own comparison.

    python -m study.pages

It unpacks all packed runs into a temporary folder and fills each of PAGES. Between a line such as
`<!-- compare study_loss --metric=final:evaluation/held_out/pass@1
--figure=study/images/loss.png -->` and `<!-- end -->` come the tables of `pgtk compare`. After
`<!-- runs -->` comes what was run, from the runs' own files; after `<!-- repeats SWEEP -->` the
evaluations of its runs; after `<!-- curves SWEEP... -->` their means; after
`<!-- warning SWEEP... -->` what the effective sample size said before they collapsed
(warning.py); after `<!-- summary -->`, `<!-- brief -->`, `<!-- old -->`, `<!-- passes -->`,
`<!-- lora -->`, `<!-- rates -->` and `<!-- power -->` the planned contrasts (summary.py).
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import numpy as np

from pgtoolkit.comparison import text_report
from pgtoolkit.comparison.compared_runs import Compared
from pgtoolkit.comparison.groups import _ranked, compare
from pgtoolkit.comparison.measures import needed_for, parse_metric
from pgtoolkit.comparison.reports import write
from pgtoolkit.comparison.statistics import Comparisons, Sample
from pgtoolkit.runs.find import Run, find_runs
from pgtoolkit.runs.records import TIME, known_provenance, read_evaluations
from pgtoolkit.system.report import text
from study import check_predictions, summary, warning

STUDY = Path(__file__).parent
ROOT = STUDY.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "study.md"
FROM_SCRATCH = STUDY / "from_scratch.md"
PRETRAINED = STUDY / "pretrained.md"
PAGES = (README, PAGE, FROM_SCRATCH, PRETRAINED)

DATA = (STUDY / "data" / "from_scratch", STUDY / "data" / "pretrained")
"""Folders of packed runs."""

PICTURE = ROOT / "docs" / "images" / "study.png"
"""The picture of all parts of the study."""

SWEEPS = (
    "study_controls",
    "study_loss_rates",
    "study_loss",
    "study_starts",
    "study_starts_controls",
    "study_repeats",
    "study_lag",
    "study_aggregation",
    "study_anchor",
)
_PART = re.compile(
    r"(?s)(<!-- (compare|runs|repeats|curves|warning|summary|brief|old|passes|lora|rates|power)"
    r"([^>]*) -->\n).*?(<!-- end -->)"
)
_NOT_RUN = "Not run.\n\n"


def unpack(folder: Path) -> Path:
    """Unpack all packed runs below `folder`; return the folder of the sweeps' folders."""
    for data in DATA:
        for file in sorted(data.glob("*.tar.xz")):
            with tarfile.open(file) as packed:
                packed.extractall(folder, filter="data")
    return folder / "outputs" / "sweeps"


def filled(page: Path, sweeps: Path, draw: bool = True) -> str:
    """Return the page with all its tables; draw: whether to write its pictures, too."""

    def part(match: re.Match) -> str:
        kind = match[2]
        words = match[3].split()
        if kind == "compare":
            content = _compared(page, sweeps, words, draw)
        elif kind == "repeats":
            content = _repeated(sweeps / words[0])
        elif kind == "curves":
            content = _curves([sweeps / word for word in words])
        elif kind == "warning":
            content = _table(warning.table_rows([sweeps / word for word in words]))
        elif kind == "runs":
            content = _ran(sweeps)
        else:
            content = _summarised(sweeps, kind, draw)
        return f"{match[1]}{content}{match[4]}"

    return _PART.sub(part, page.read_text())


_OF_SWEEPS = {
    "old": summary.old_rows,
    "passes": summary.passes_rows,
    "lora": summary.lora_rows,
    "rates": summary.rate_rows,
}
"""Tables that summary.py makes of the sweeps of one question."""


def _summarised(sweeps: Path, kind: str, draw: bool) -> str:
    """Return a table of planned contrasts.

    kind: one of _OF_SWEEPS, or summary, brief, or power for the differences that could have been
    seen, of all parts.
    """
    if kind in _OF_SWEEPS:
        return _table(_OF_SWEEPS[kind](sweeps))
    parts = {part.name: summary.contrasts(part, sweeps) for part in summary.PARTS}
    if kind == "power":
        return _table(summary.power_rows(parts))
    if kind == "brief":
        return _table(summary.brief_rows(parts))
    if draw:
        summary.draw(parts, PICTURE)
    return _table(summary.table_rows(parts))


def _compared(page: Path, sweeps: Path, words: list[str], draw: bool) -> str:
    """Return the tables of `pgtk compare`.

    words: names of sweeps, and options as --NAME=VALUE, or --by=KEY for a row of each value.
    """
    names = [word for word in words if not word.startswith("--")]
    options = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[name.replace("-", "_")] = value
    picture = options.pop("figure", None)
    file = options.pop("predictions", None)
    by = options.pop("by", None)
    args = Namespace(
        **dict.fromkeys(("metric", "best_of", "reach", "over", "against", "margin")) | options
    )
    args.best_of = by or args.best_of
    expected = check_predictions.take(ROOT / file, args) if file else {}
    if not all((sweeps / name).exists() for name in names):
        return _NOT_RUN + "".join(
            f"* Predicted: {name} {text(value)}\n" for name, value in expected.items()
        )
    metric = parse_metric(args.metric)[1] if args.metric else args.reach.rpartition("=")[0]
    runs = find_runs([str(sweeps / name) for name in names], needed_for(metric))
    compared = compare(
        runs, args.metric, args.best_of, args.reach, args.over, args.against, args.margin
    )
    if args.against is None:
        _sort_by_rank(compared)
    if by:
        tried = text_report.tried_rows(compared)
        if tried[0][0] not in compared.keys:
            # No other key varies, so no column names the values of one.
            tried = [["", *tried[0]], ["mean", *tried[1]]]
        header, *rows = zip(*tried, strict=True)
        rows = [
            (Path(name).name, *values)
            for name, *values in sorted(rows, key=lambda row: row[1], reverse=True)
        ]
        table = _table([(by, *header[1:]), *rows])
        return f"{compared.measured}, mean over {compared.blocks}s:\n\n{table}"
    if picture and draw:
        write(compared, "figure", ROOT / picture, "")
    shown = ""
    if picture:
        shown = f"\n![{compared.measured}]({os.path.relpath(ROOT / picture, page.parent)})\n"
    return "\n".join(_parts(compared, expected)) + shown


def _sort_by_rank(compared: Compared) -> None:
    """Put the best configuration first: of a sweep that tunes, none is a base."""
    samples = {
        id(group): sample
        for group, sample in zip(compared.groups, compared.comparisons.samples, strict=True)
    }
    compared.groups = _ranked(compared)
    compared.comparisons = Comparisons(
        [samples[id(group)] for group in compared.groups], compared.comparisons.margin
    )


def _parts(compared: Compared, expected: dict) -> list[str]:
    """Return tables and sentences, each a paragraph."""
    parts = [_table(text_report.group_rows(compared))]
    sentences = check_predictions.judged(compared, expected)
    rows = text_report.tried_rows(compared)
    if rows:
        rows[1:] = sorted(rows[1:], key=_natural)
        parts += [
            f"{compared.measured} by {compared.best_of}, mean over {compared.blocks}s:\n",
            _table(rows),
        ]
    comparisons = compared.comparisons
    # Tuning runs have no primary comparison, and nothing of them is tested.
    if comparisons.primary:
        for pairs in text_report.planned(compared):
            base = compared.groups[pairs[0].first]
            table = _table(text_report.difference_rows(compared, pairs))
            parts += [f"Against {base.label}:\n", table]
    has_seeds = any(
        values.size > 1 for sample in comparisons.samples for values in sample.strata.values()
    )
    if compared.over and comparisons.primary and has_seeds:
        starts = [
            Sample({(*name, 0): seeds.mean() for name, seeds in sample.strata.items()})
            for sample in comparisons.samples
        ]
        compared.comparisons = Comparisons(starts, comparisons.margin, comparisons.primary)
        for pairs in text_report.planned(compared):
            table = _table(text_report.difference_rows(compared, pairs))
            parts += ["The same with one value for each start, the mean of its seeds:\n", table]
    sentences += [f"Not counted: {line}" for line in text_report.left_out(compared)]
    sentences += [f"Note: {note}." for note in compared.notes]
    if sentences:
        parts.append("".join(f"* {line}\n" for line in sentences))
    return parts


def _repeated(sweep: Path) -> str:
    """Return the table of held-out pass@1 of each run at each evaluation."""
    runs = [
        [row for row in read_evaluations(run) if row["set"] == "held_out"]
        for run in sorted(sweep.iterdir())
    ]
    rows = [
        [str(place), *(f"{row['pass@1']:.4f}" for row in evaluations)]
        for place, evaluations in enumerate(runs, 1)
    ]
    return _table([["run", *(f"step {row['step']}" for row in runs[0])], *rows])


def _curves(sweeps: list[Path]) -> str:
    """Return held-out pass@1 at each evaluation, mean over the runs of each sweep."""
    table = []
    for sweep in sweeps:
        at_steps: dict[int, list[float]] = {}
        for run in sorted(sweep.iterdir()):
            for row in read_evaluations(run):
                at_steps.setdefault(row["step"], []).append(row["pass@1"])
        if not table:
            table.append(["", *(f"step {step}" for step in at_steps)])
        means = [f"{np.mean(values):.3f}" for values in at_steps.values()]
        table.append([f"`{sweep.name.removeprefix('pretrained_loss_')}`", *means])
    return _table(table)


def _ran(sweeps: Path) -> str:
    """Return a row for each sweep, from configurations, evaluations and times of its runs."""
    rows = [["sweep", "runs", "minutes", *_FACTS]]
    for name in SWEEPS:
        if not (sweeps / name).exists():
            rows.append([f"`{name}`", "not run", *[""] * (len(rows[0]) - 2)])
            continue
        runs = find_runs([str(sweeps / name)], {"reward"})
        runs.sort(key=lambda run: _natural([run.config["model.path"], str(run.config["seed"])]))
        facts = [
            ", ".join(dict.fromkeys(map(str, values)))
            for values in zip(*map(_facts, runs), strict=True)
        ]
        rows.append([f"`{name}`", str(len(runs)), f"{_minutes(runs):.1f}", *facts])
    present = [str(sweeps / name) for name in SWEEPS if (sweeps / name).exists()]
    if present:
        runs = find_runs(present, {"reward"})
        count = len({run.name for run in runs})
        rows.append(["all", str(count), f"{_minutes(runs):.1f}", *[""] * len(_FACTS)])
    return _table(rows)


_FACTS = (
    "starts",
    "pass@1 before",
    "seeds",
    "batches",
    "completions each",
    "steps",
    "held out",
    "with",
)


def _facts(run: Run) -> list[object]:
    """Return what the table has of a run, by _FACTS."""
    config = run.config
    provenance = known_provenance(run.path)
    batch = config["rollout.prompts_per_batch"] * config["rollout.group_size"]
    steps = config["trainer.max_steps"]
    before = [f"{row['pass@1']:.3f}" for row in read_evaluations(run.path) if row["step"] == 0]
    prompts = config["evaluation.prompts_per_set"]
    held_out = f"{prompts} x {config['evaluation.completions_per_prompt']}"
    machine = [gpu["name"] for gpu in provenance.get("gpus", [])] or ["CPU"]
    batches = steps * config["accumulation.docs_per_step"] // batch
    return [
        Path(config["model.path"]).name,
        *before[:1],
        config["seed"],
        batches,
        batch,
        steps,
        held_out,
        machine[0],
    ]


def _minutes(runs: list[Run]) -> float:
    """Return the minutes of the clock in which any of the runs was going on.

    It was from one start or step to the next if they are less than a minute apart.
    """
    times = [time for run in runs for time in run.columns["time"] if time == time]
    for run in runs:
        provenance = known_provenance(run.path)
        times += [
            datetime.strptime(start["time"], TIME).timestamp()
            for start in (provenance, *provenance.get("resumed", ()))
            if start
        ]
    gaps = np.diff(np.sort(times))
    return float(gaps[gaps < 60].sum()) / 60


def _natural(words: list[str]) -> list[list]:
    """Return a key that sorts small-2 before small-10, and 8 before 32."""
    return [
        [(0, int(x), "") if x.isdigit() else (1, 0, x) for x in re.split(r"(\d+)", word) if x]
        for word in words
    ]


def _table(rows: list[list[str]]) -> str:
    """Return the rows in Markdown; the first is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as unpacked:
        all_sweeps = unpack(Path(unpacked))
        for path in PAGES:
            path.write_text(filled(path, all_sweeps))

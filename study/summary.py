"""The planned contrasts of all parts of the study, side by side: what docs/study.md and the README
show of them."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.statistics import LEVEL, POWER, Comparison
from pgtoolkit.comparison.text_report import difference_and_interval, planned, verdict
from pgtoolkit.runs.find import Run, find_runs
from study import check_predictions

PREDICTIONS = Path(__file__).parent / "predictions"

NAMES = {
    "half_shuffled": "half of the advantages shuffled: the control",
    "right_alone": "own right answers alone, without a baseline",
    "gspo": "`gspo`",
    "cispo": "`cispo`",
    "reinforce": "`reinforce`",
}
"""The arms that all parts have, in the order in which they are shown."""


@dataclass(frozen=True)
class Part:
    """A part of the study: its name, what a pair is, and for each file of predictions the sweeps
    that it is of."""

    name: str
    pairs: str
    sweeps: dict[str, tuple[str, ...]]


PARTS = (
    Part(
        "SmolLM2-135M, arithmetic",
        "seeds",
        {
            "pretrained_controls": (
                "pretrained_loss_grpo",
                "pretrained_loss_right_alone",
                "pretrained_loss_half_shuffled",
            ),
            "pretrained_loss": (
                "pretrained_loss_grpo",
                "pretrained_loss_gspo",
                "pretrained_loss_cispo",
                "pretrained_loss_reinforce",
            ),
        },
    ),
    Part(
        "SmolLM2-135M, lists",
        "seeds",
        {
            "pretrained_lists_controls": (
                "pretrained_loss_lists_grpo",
                "pretrained_loss_lists_right_alone",
                "pretrained_loss_lists_half_shuffled",
            ),
            "pretrained_lists": (
                "pretrained_loss_lists_grpo",
                "pretrained_loss_lists_gspo",
                "pretrained_loss_lists_cispo",
                "pretrained_loss_lists_reinforce",
            ),
        },
    ),
    Part(
        "0.8 million weights, from scratch",
        "starts",
        {"study_controls": ("study_starts_controls",), "study_starts": ("study_starts",)},
    ),
)


OLD_ARMS = {
    "cispo, 1, 32": ("weights up to 2, scores centered", "tis_centered"),
    "cispo, 4, 0": ("`cispo`: weights up to 5", "cispo"),
    "cispo, 1, 0": ("weights up to 2", "tis"),
    "icepop, null, 0": ("`icepop`", "icepop"),
    "dppo, null, 0": ("loss of `experiment=ipo`", "ipo"),
    "reinforce, null, 32": ("`reinforce`, scores centered", "reinforce_centered"),
    "half_shuffled": ("`grpo`, half of the advantages shuffled: the control", "half_shuffled"),
}
"""What the arms on old documents are, and their sweeps behind pretrained_loss_old_."""

OLD = Part(
    "SmolLM2-135M, arithmetic, documents of 16 batches before",
    "seeds",
    {
        "pretrained_old_control": (
            "pretrained_loss_old_grpo",
            "pretrained_loss_old_half_shuffled",
        ),
        "pretrained_old": (
            "pretrained_loss_old_grpo",
            "pretrained_loss_old_cispo",
            "pretrained_loss_old_tis",
            "pretrained_loss_old_icepop",
            "pretrained_loss_old_reinforce_centered",
            "pretrained_loss_old_ipo",
            "pretrained_loss_old_tis_centered",
        ),
    },
)


@dataclass(frozen=True)
class Contrast:
    """An arm against grpo: the planned test, its verdict, what was predicted, the means of grpo
    and of the arm, and the pairs' standard deviation."""

    pair: Comparison
    verdict: str
    predicted: str
    means: tuple[float, float]
    spread: float

    @property
    def smallest(self) -> float:
        """The difference that this many pairs of this spread show with POWER, if tested alone."""
        pairs = self.pair.counts[0]
        return self.spread / math.sqrt(pairs) * shift_found(pairs - 1)


def contrasts(part: Part, sweeps: Path) -> dict[str, Contrast]:
    """Return the planned contrasts of a part by the arm's name.

    sweeps: the folder of the unpacked sweeps.
    """
    by_arm = {}
    for file, names in part.sweeps.items():
        options = Namespace(
            **dict.fromkeys(("metric", "best_of", "reach", "over", "against", "margin"))
        )
        expected = check_predictions.take(PREDICTIONS / f"{file}.yaml", options)
        metric = options.metric.partition(":")[2]
        runs = find_runs([str(sweeps / name) for name in names], {metric})
        compared = compare(
            runs,
            options.metric,
            options.best_of,
            options.reach,
            options.over,
            options.against,
            options.margin,
        )
        for pairs in planned(compared):
            for pair in pairs:
                arm = compared.arm(compared.groups[pair.second])
                first = compared.comparisons.samples[pair.first].values
                second = compared.comparisons.samples[pair.second].values
                differences = [second[block] - first[block] for block in first]
                means = float(np.mean([*first.values()])), float(np.mean([*second.values()]))
                by_arm[arm.rpartition(".")[2]] = Contrast(
                    pair,
                    verdict(pair, compared.sign, compared.comparisons.margin),
                    str(expected[arm]),
                    means,
                    float(np.std(differences, ddof=1)),
                )
    return by_arm


def shift_found(freedom: int) -> float:
    """Return how many standard errors a paired t-test at LEVEL finds with POWER."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    critical = t.isf(LEVEL / 2, freedom)
    return float(brentq(lambda shift: nct.sf(critical, freedom, shift) - POWER, 0.1, 40.0))


def table_rows(parts: dict[str, dict[str, Contrast]]) -> list[list[str]]:
    """Return the differences from grpo and their verdicts, a row for each arm; parts: the contrasts
    by name of part."""
    head = ["against `grpo`"]
    for part in PARTS:
        head += [
            f"{part.name}: {_number_of_pairs(parts[part.name])} {part.pairs}",
            "verdict (predicted)",
        ]
    rows = [head]
    for arm, name in NAMES.items():
        row = [name]
        for part in PARTS:
            row += _cells(parts[part.name][arm])
        rows.append(row)
    return rows


def _cells(contrast: Contrast) -> list[str]:
    """Return the difference with its interval, and the verdict with what was predicted."""
    difference, interval = difference_and_interval(contrast.pair, "{:z.3f}".format)
    is_certain = contrast.verdict != "unknown"
    found = f"**{contrast.verdict}**" if is_certain else "unknown"
    return [
        f"{difference} {interval}",
        f"{found} ({contrast.predicted})",
    ]


def brief_rows(parts: dict[str, dict[str, Contrast]]) -> list[list[str]]:
    """Return each arm's difference from grpo with its verdict, for a table that fits a screen."""
    head = ["against `grpo`"]
    head += [f"{part.name} ({_number_of_pairs(parts[part.name])} {part.pairs})" for part in PARTS]
    rows = [head]
    for arm, name in NAMES.items():
        contrasts_of_arm = [parts[part.name][arm] for part in PARTS]
        rows.append(
            [name, *(f"{one.pair.difference:+.3f} {one.verdict}" for one in contrasts_of_arm)]
        )
    return rows


def old_rows(sweeps: Path) -> list[list[str]]:
    """Return a row of each arm on old documents: rate, final value, difference from grpo, and means
    over its runs of the effective sample size and of k3 to the sampler."""
    by_arm = contrasts(OLD, sweeps)
    rows = [
        [
            "each at its best rate",
            "rate",
            "pass@1",
            "less that of `grpo`",
            "verdict (predicted)",
            "effective sample size",
            "k3 to the sampler",
        ]
    ]
    base = by_arm["cispo, 4, 0"].means[0]
    rate, *drift = _of_runs(sweeps / "pretrained_loss_old_grpo")
    rows.append(["`grpo`", rate, f"{base:.3f}", "", "", *drift])
    for arm, (name, sweep) in OLD_ARMS.items():
        contrast = by_arm[arm]
        rate, *drift = _of_runs(sweeps / f"pretrained_loss_old_{sweep}")
        rows.append([name, rate, f"{contrast.means[1]:.3f}", *_cells(contrast), *drift])
    return rows


PASSES = {"grpo": "`grpo`", "cispo": "`cispo`", "reinforce": "`reinforce`", "ppo": "PPO"}
"""The losses that were trained with several passes over a batch, by the ends of their sweeps."""


def passes_rows(sweeps: Path) -> list[list[str]]:
    """Return a row of each loss: its rates and final values with one, two and four passes over each
    batch, and what two and four are against one."""
    rows = [
        [
            "each at its best rate",
            "one pass",
            "two",
            "less one",
            "verdict (predicted)",
            "four",
            "less one",
            "verdict (predicted)",
        ]
    ]
    for loss, name in PASSES.items():
        one = f"pretrained_loss_{loss}"
        several = {number: f"pretrained_loss_passes_{number}_{loss}" for number in ("2", "4")}
        by_number = _planned("pretrained_passes", [one, *several.values()], sweeps)
        row = [name, _final(one, by_number["2"].means[0], sweeps)]
        for number, folder in several.items():
            contrast = by_number[number]
            row += [_final(folder, contrast.means[1], sweeps), *_cells(contrast)]
        rows.append(row)
    return rows


def lora_rows(sweeps: Path) -> list[list[str]]:
    """Return a row of each loss with LoRA: rate and final value, and what it is against `grpo` with
    LoRA and against itself with all weights."""
    rows = [
        [
            "LoRA of rank 32",
            "its rate and pass@1",
            "less `grpo`",
            "verdict (predicted)",
            "less all weights",
            "verdict (predicted)",
        ]
    ]
    losses = ("grpo", "cispo", "reinforce")
    folders = {loss: f"pretrained_loss_lora_low_{loss}" for loss in losses}
    by_loss = _planned("pretrained_lora_low", [*folders.values()], sweeps)
    for loss, folder in folders.items():
        names = [f"pretrained_loss_{loss}", folder]
        [against_all] = _planned("pretrained_lora_low_all", names, sweeps).values()
        against_grpo = _cells(by_loss[loss]) if loss != "grpo" else ["", ""]
        final = _final(folder, against_all.means[1], sweeps)
        rows.append([f"`{loss}`", final, *against_grpo, *_cells(against_all)])
    return rows


def rate_rows(sweeps: Path) -> list[list[str]]:
    """Return a row of each loss at the rate that TRL and verl take where none is named: what it is
    against its own rate, and against `grpo` at the same rate."""
    rows = [
        [
            "",
            "own rate and pass@1",
            "1e-6",
            "less own rate",
            "verdict (predicted)",
            "less `grpo` at 1e-6",
            "verdict (predicted)",
        ]
    ]
    losses = ("grpo", "gspo", "cispo", "reinforce")
    folders = {loss: f"pretrained_loss_rate_1e-6_{loss}" for loss in losses}
    by_loss = _planned("pretrained_rate_common", [*folders.values()], sweeps)
    for loss, folder in folders.items():
        own = f"pretrained_loss_{loss}"
        file, names = "pretrained_rate", [own, folder]
        if loss == "gspo":
            file, names = "pretrained_rate_gspo", [*names, "pretrained_loss_rate_1e-5_gspo"]
        against_own = _planned(file, names, sweeps)["1e-06"]
        against_grpo = _cells(by_loss[loss]) if loss != "grpo" else ["", ""]
        before, after = against_own.means
        finals = [_final(own, before, sweeps), f"{after:.3f}"]
        rows.append([f"`{loss}`", *finals, *_cells(against_own), *against_grpo])
    return rows


def _planned(file: str, names: list[str], sweeps: Path) -> dict[str, Contrast]:
    """Return the contrasts of a file of predictions for these sweeps."""
    return contrasts(Part("", "seeds", {file: tuple(names)}), sweeps)


def _final(folder: str, value: float, sweeps: Path) -> str:
    """Return the learning rate of a sweep's runs, with their final value."""
    return f"{_rate_of(find_runs([str(sweeps / folder)], set()))}: {value:.3f}"


def _of_runs(sweep: Path) -> tuple[str, str, str]:
    """Return the learning rate of a sweep's runs, and means of their metrics over all steps."""
    runs = find_runs([str(sweep)], {"effective_sample_size", "kl_new_old"})
    means = [
        np.mean([np.mean(run.values(name)) for run in runs])
        for name in ("effective_sample_size", "kl_new_old")
    ]
    return _rate_of(runs), f"{means[0]:.2f}", f"{means[1]:.3f}"


def _rate_of(runs: list[Run]) -> str:
    [rate] = {float(str(run.config["optimizer.learning_rate"])) for run in runs}
    return f"{rate:.0e}".replace("e-0", "e-")


def power_rows(parts: dict[str, dict[str, Contrast]]) -> list[list[str]]:
    """Return the adjusted p, the pairs' standard deviation and the smallest difference that would
    have been found."""
    head = [""]
    for part in PARTS:
        head += [
            f"{part.name.rpartition(', ')[2]}: adjusted p",
            "spread",
            f"found with power {POWER:g}",
        ]
    rows = [head]
    for arm in NAMES:
        row = [f"`{arm}`"]
        for part in PARTS:
            contrast = parts[part.name][arm]
            p = contrast.pair.adjusted_p or 0.0
            row += [
                "<0.001" if p < 0.001 else f"{p:.3f}",
                f"{contrast.spread:.3f}",
                f"{contrast.smallest:.3f}",
            ]
        rows.append(row)
    return rows


def draw(parts: dict[str, dict[str, Contrast]], path_png: Path) -> None:
    """Draw the differences with their intervals, a panel for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.9), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(PARTS), sharey=True)
    places = range(len(NAMES), 0, -1)
    for panel, part in zip(axes, PARTS, strict=True):
        panel.axvspan(-0.02, 0.02, color="0.92", label="margin of equality")
        panel.axvline(0, color="0.4", linewidth=0.8)
        for place, arm in zip(places, NAMES, strict=True):
            contrast = parts[part.name][arm]
            color = {"better": "#1b7837", "worse": "#b2182b"}.get(contrast.verdict, "0.35")
            panel.plot(contrast.pair.interval, (place, place), color=color, linewidth=2)
            panel.plot(contrast.pair.difference, place, "o", color=color)
        panel.set_yticks(list(places), list(NAMES))
        panel.set_title(
            f"{part.name}: {_number_of_pairs(parts[part.name])} {part.pairs}", fontsize=10
        )
        panel.set_xlabel("final held-out pass@1, less that of grpo", fontsize=9)
        panel.tick_params(labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path_png, format="png")


def _number_of_pairs(by_arm: dict[str, Contrast]) -> int:
    [number] = {contrast.pair.counts[0] for contrast in by_arm.values()}
    return number

"""What the README tells to type: each trainer's GRPO, and the demo without make."""

import re
from pathlib import Path

import pytest
from builders.parity_steps import theirs

from benchmarks.drift import PAGE, page, row_of
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TABLE = re.search(r"<!-- which GRPO -->\n.*\n.*\n((?s:.*?))<!-- end -->", README)
AGGREGATIONS = {"mean of the tokens": "token_mean", "each document's mean": "sample_mean"}


def numbers(cell: str) -> list[float]:
    return [
        float(number)
        for number in re.findall(r"\d\.?\d*", cell.replace("k3", "").replace("k1", ""))
    ]


@pytest.mark.parametrize("row", TABLE[1].splitlines(), ids=lambda row: row.split()[1])
def test_the_command_of_each_grpo_is_accepted_and_has_the_four_numbers_of_its_row(row):
    _, divided, aggregation, clip, kl, command = [cell.strip() for cell in row.split("|")[1:-1]]
    config, report = validated(compose(command.strip("`").split()[1:]))
    assert report.problems == []
    assert config.advantage.estimator == ("dr_grpo" if divided == "nothing" else "grpo")
    assert config.aggregation.mode == AGGREGATIONS[aggregation]
    loss = config.loss
    if clip.startswith("none"):
        assert (loss.name, loss.sides) == ("dppo", "both")
        assert [loss.delta_low] == [loss.delta_high] == numbers(clip)
    else:
        bounds = [
            loss.epsilon_low,
            loss.epsilon_high,
            *([loss.dual_clip] if loss.dual_clip else []),
        ]
        assert bounds == numbers(clip.partition("where")[0])
    assert ([config.kl.coefficient] if config.kl.coefficient else []) == numbers(kl)
    # What OpenRLHF takes off the reward is left to a note; its penalty in the loss is k3.
    kind = "k3_ratio" if "ratio" in kl else "none" if kl == "none" else "k3"
    assert config.kl.kind == kind


def test_the_numbers_of_trl_and_verl_are_those_that_make_drift_has_checked(tmp_path):
    written = PAGE.read_text()
    checked = re.findall(r"^\| (TRL|verl) \S+ \| (s .*) \|$", written, re.MULTILINE)
    assert [trainer for trainer, _ in checked] == ["TRL", "verl"]
    counts = re.findall(r"^\| (?:TRL|verl) (\S+) \| (\d+) \| \d+ \|$", written, re.MULTILINE)
    rows = {
        trainer: (version, int(keys), cells.split(" | "))
        for (trainer, cells), (version, keys) in zip(checked, counts, strict=True)
    }
    assert page(rows) == written
    for trainer, cells in checked:
        (row,) = [row for row in TABLE[1].splitlines() if row.startswith(f"| {trainer} ")]
        assert [cell.strip() for cell in row.split("|")[2:6]] == cells.split(" | ")
        assert row_of(theirs(tmp_path, trainer).convention) == cells.split(" | ")


def test_the_demo_without_make_is_what_make_does():
    makefile = (ROOT / "Makefile").read_text().replace("$(PYTHON)", "python3")
    lines = re.search(r"Without make .*?```\n(.*?)```", README, re.S)[1].splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line in makefile


def test_no_notebook_trains_in_a_folder_that_the_readme_names():
    """Whoever does one after the other would be refused, or go on with the other's run."""
    named = set(re.findall(r"outputs/\w+", README))
    assert "outputs/first" in named
    trained = [
        folder
        for notebook in sorted((ROOT / "examples").glob("*.ipynb"))
        for folder in re.findall(r'train\([^()]*\\"(outputs/\w+)', notebook.read_text())
    ]
    assert len(set(trained)) == len(trained) > 1
    assert not named & {*trained}

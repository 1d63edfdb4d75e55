"""`pgtk doctor RUN --sampler` finds differences of trainer and sampler where they were planted."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders.refusals import refusal
from builders.rollout_rows import write_parquet
from builders.runs import SHORT, run

from pgtoolkit.cli import main

END = 1
"""The tiny model's token of the end."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The first batch of a run, whose old log-probs are those of the weights that it began with."""
    folder = tmp_path_factory.mktemp("first")
    run(folder / "run", *SHORT, "trainer.max_steps=1", f"rollout.save_path={folder / 'rollouts'}")
    (file,) = (folder / "rollouts").glob("*.parquet")
    return pq.read_table(file).to_pylist()[:8]


def trained(row: dict) -> np.ndarray:
    return np.flatnonzero(row["loss_mask"])


def planted(row: dict, end_token: int) -> np.ndarray:
    """Return what the trainer is to be above the sampler on each token of a row."""
    tokens = np.array(row["token_ids"])
    mask = np.array(row["loss_mask"], bool)
    above = np.where(tokens == end_token, 1.5, 0.004)
    above[trained(row)[0]] = 2.5
    return above * mask


def test_planted_differences_are_found_by_size_place_and_treatment(rows, tmp_path, capsys):
    kept = ("token_ids", "loss_mask", "old_log_probs", "reward", "group_id")
    recorded = []
    expected = []
    for row in rows:
        above = planted(row, END)
        at = trained(row)
        expected.append(above[at])
        old = np.array(row["old_log_probs"])
        full = old if len(old) == len(above) else np.zeros(len(above))
        if len(old) != len(above):
            full[at] = old
        recorded.append(
            {name: row[name] for name in kept}
            | {"old_log_probs": full.tolist(), "sampling_log_probs": (full - above).tolist()}
        )
    path = write_parquet(tmp_path / "rollouts.parquet", recorded)
    short = [item for item in SHORT if not item.startswith(("rollout.", "task.", "trainer.max"))]
    overrides = ("rollout=recorded", f"rollout.path={path}", "aggregation.divisor=4")
    folder = f"hydra.run.dir={tmp_path / 'run'}"
    assert main([*short, *overrides, folder]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "run"), "--sampler", "--step", "1", "--json"]) == 0
    shown = capsys.readouterr().out

    found = json.loads(shown)
    everything = np.concatenate(expected)
    first = np.concatenate([np.arange(len(part)) == 0 for part in expected])
    assert found["mean"] == pytest.approx(abs(everything).mean(), rel=1e-4)
    assert found["largest"] == pytest.approx(2.5, rel=1e-5)
    counts = {name: part["count"] for name, part in found["by_size"].items()}
    assert counts == {
        "0.001 to 0.01": int((everything == 0.004).sum()),
        "1 and more": int((abs(everything) > 1).sum()),
    }
    assert found["by_kind"]["first of a completion"]["count"] == first.sum() == len(expected)
    assert found["by_kind"]["first of a completion"]["mean"] == pytest.approx(2.5, rel=1e-5)
    of_lengths = {name: part for name, part in found["by_kind"].items() if " trained tok" in name}
    lengths = [len(part) for part in expected]
    for name, part in of_lengths.items():
        bounds = [int(bound) for bound in re.findall(r"\d+", name)]
        of_part = [length for length in lengths if bounds[0] <= length <= bounds[-1]]
        assert part["count"] == sum(of_part), name
    assert sum(part["count"] for part in of_lengths.values()) == len(everything)
    ratios = np.exp(everything)
    of_documents = np.exp([part.sum() for part in expected])
    treatments = found["treatments"]
    for name, count in (
        ("correction=token_truncate (above 2)", (ratios > 2).sum()),
        ("correction=token_mask (outside 0.5 to 5)", ((ratios < 0.5) | (ratios > 5)).sum()),
        ("loss=icepop (outside 0.2 to 5)", ((ratios < 0.2) | (ratios > 5)).sum()),
        ("correction=sequence_mask (product above 3)", (of_documents > 3).sum()),
    ):
        assert treatments[name].startswith(f"{count} "), name
    assert (ratios > 2).any()
    assert "nothing: the trainer's head gives float32" in treatments["model.fp32_lm_head=true"]
    assert main(["doctor", str(tmp_path / "run"), "--sampler"]) == 0
    page = capsys.readouterr().out
    assert "The trainer's weights are 0 updates newer" in " ".join(page.split())
    assert "correction=token_mask (outside 0.5 to 5)" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sampler",), "needs a run directory (got"),
        (("--step", "3"), "--step belongs to --sampler"),
        (("other", "--sampler"), "--sampler takes one run"),
    ],
)
def test_what_is_no_run_is_refused(arguments, words, tmp_path, capsys):
    assert words in refusal(capsys, "doctor", tmp_path, *arguments)

"""Checks of recorded rows against one another: log-probs one place off, groups of several prompts,
and repeated rows, in rollouts of a small model."""

import copy
import math
from pathlib import Path

import pytest
import torch
from builders.models import small_llama
from builders.rollout_rows import recorded_rollouts, write_jsonl, write_parquet

from pgtoolkit.errors import DataError

GROUP = 4


@pytest.fixture(scope="module")
def sampled() -> list[dict]:
    """Return 64 rows with completions of one to six tokens: old log-probs are the model's own, and
    the sampler's lie up to 0.02 below them."""
    model = small_llama(0, initializer_range=0.6)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(64):
        group = number // GROUP
        prompt = [group // 10, group % 10, 10]
        completion = []
        log_probs = []
        while len(completion) < 6 and 11 not in completion:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + completion])).logits[0, -1].double()
            token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            completion.append(token)
            log_probs.append(float(logits.log_softmax(0)[token]))
        sampling = [value - 0.01 * ((place + number) % 3) for place, value in enumerate(log_probs)]
        rows.append(
            {
                "token_ids": prompt + completion,
                "loss_mask": [False] * 3 + [True] * len(completion),
                "old_log_probs": [0.0] * 3 + log_probs,
                "sampling_log_probs": [0.0] * 3 + sampling,
                "reward": float(number % 2),
                "group_id": group,
            }
        )
    return rows


@pytest.fixture
def rows(sampled: list[dict]) -> list[dict]:
    """Return copies of the rows, which a test may change."""
    return copy.deepcopy(sampled)


def notes(rows: list[dict], folder: Path) -> list[str]:
    """Return the notes of the index of these rows, which are the same for JSONL and Parquet."""
    jsonl = recorded_rollouts(write_jsonl(folder / "r.jsonl", rows)).index.notes
    parquet = recorded_rollouts(write_parquet(folder / "r.parquet", rows)).index.notes
    assert jsonl == parquet
    return jsonl


def test_good_rollouts_give_no_note(rows, tmp_path):
    assert notes(rows, tmp_path) == []


@pytest.mark.parametrize(
    ("place", "problem", "evidence"),
    [
        (1, "of the next token", ", 1.000)"),
        (-1, "of the token before", "are 1.000,"),
    ],
)
def test_log_probs_one_place_off_are_refused(rows, tmp_path, place, problem, evidence):
    for row in rows:
        log_probs = row["old_log_probs"]
        row["sampling_log_probs"] = [*log_probs[1:], 0.0] if place == 1 else [0.0, *log_probs[:-1]]
    with pytest.raises(
        DataError, match=rf"needs the log-prob of each token itself \(got that {problem}"
    ) as refusal:
        notes(rows, tmp_path)
    assert evidence in str(refusal.value)


def test_fewer_than_64_trained_tokens_prove_nothing_about_their_places(rows, tmp_path):
    few = rows[:8]
    assert sum(sum(row["loss_mask"]) for row in few) < 64
    for row in few:
        row["sampling_log_probs"] = [*row["old_log_probs"][1:], 0.0]
    assert notes(few, tmp_path) == []


def test_group_ids_that_begin_anew_give_a_note(rows, tmp_path):
    for number, row in enumerate(rows):
        row["group_id"] = number // GROUP % 8
    (note,) = notes(rows, tmp_path)
    assert note.startswith("8 of 8 groups hold different prompts")


def test_a_mask_that_begins_too_late_gives_a_note(rows, tmp_path):
    for row in rows:
        row["loss_mask"][3] = len(row["token_ids"]) == 4
    assert any("groups hold different prompts" in note for note in notes(rows, tmp_path))


def test_a_later_document_of_a_trajectory_may_have_another_context(rows, tmp_path):
    for row in rows[:2]:
        row["trajectory"] = "a"
        row["reward"] = 0.0
    rows[1]["token_ids"][0] = 7
    (note,) = notes(rows, tmp_path)
    assert "documents are 63 trajectories" in note


def test_repeated_rows_give_a_note(rows, tmp_path):
    different = len({str(row["token_ids"]) for row in rows})
    (note,) = notes(rows + rows[:12], tmp_path)
    assert note.startswith(f"{76 - different} rows repeat another one: ")


def test_repeated_rows_without_log_probs_give_no_note(rows, tmp_path):
    """Without log-probs it is unknown how many rows are equal by chance."""
    for row in rows:
        del row["old_log_probs"]
        del row["sampling_log_probs"]
    path = write_jsonl(tmp_path / "r.jsonl", rows * 2)
    assert recorded_rollouts(path, "none", reads_old_log_probs=False).index.notes == []


@pytest.mark.parametrize("probability", [0.9, 0.01])
def test_equal_completions_give_a_note_only_if_they_are_improbable(rows, tmp_path, probability):
    pairs = 16 * GROUP * (GROUP - 1) // 2
    for row in rows:
        row["token_ids"][3:] = [5, 11]
        row["loss_mask"][3:] = [True, True]
        for name in ("old_log_probs", "sampling_log_probs"):
            row[name] = [0.0] * 3 + [math.log(probability), 0.0]
    messages = notes(rows, tmp_path)
    if probability == 0.9:
        assert messages == []
    else:
        (message,) = messages
        counts = f"{pairs} pairs are equal, where 0.96 are expected by the recorded log-probs"
        assert counts in message

"""What recorded rows say about one another: log-probs one place off, groups of several prompts,
rows twice."""

import math

import pytest
import torch
from builders.models import small_llama
from builders.rollout_rows import recorded_rollouts, write_jsonl, write_parquet

from pgtoolkit.errors import DataError

GROUP = 4


@pytest.fixture(scope="module")
def sampled():
    """64 completions of one to six tokens, with their log-probs by the model; the sampler's differ
    by up to 0.02."""
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
        sampler = [value - 0.01 * ((place + number) % 3) for place, value in enumerate(log_probs)]
        rows.append(
            {
                "token_ids": prompt + completion,
                "loss_mask": [False] * 3 + [True] * len(completion),
                "old_log_probs": [0.0] * 3 + log_probs,
                "sampling_log_probs": [0.0] * 3 + sampler,
                "reward": float(number % 2),
                "group_id": group,
            }
        )
    return rows


@pytest.fixture
def rows(sampled):
    """Copies for every test, which may change them."""
    return [
        {name: list(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in sampled
    ]


def notes(rows, folder):
    """What the index says of them, the same from either kind of file."""
    first, second = (
        recorded_rollouts(write(folder / name, rows)).index.notes
        for write, name in ((write_jsonl, "r.jsonl"), (write_parquet, "r.parquet"))
    )
    assert first == second
    return first


def test_good_rollouts_give_no_note(rows, tmp_path):
    assert notes(rows, tmp_path) == []


@pytest.mark.parametrize(
    ("place", "whose"), [(1, "of the next token"), (-1, "of the token before")]
)
def test_log_probs_one_place_off_are_refused(rows, tmp_path, place, whose):
    for row in rows:
        log_probs = row["old_log_probs"]
        row["sampling_log_probs"] = [*log_probs[1:], 0.0] if place == 1 else [0.0, *log_probs[:-1]]
    with pytest.raises(
        DataError, match=rf"needs the log-prob of each token itself \(got that {whose}"
    ) as refused:
        notes(rows, tmp_path)
    assert ", 1.000)" in str(refused.value) if place == 1 else "are 1.000," in str(refused.value)


def test_few_tokens_say_nothing_about_their_places(rows, tmp_path):
    few = rows[:8]
    assert sum(map(sum, (row["loss_mask"] for row in few))) < 64
    for row in few:
        row["sampling_log_probs"] = [*row["old_log_probs"][1:], 0.0]
    assert notes(few, tmp_path) == []


def test_groups_whose_numbers_begin_anew(rows, tmp_path):
    for number, row in enumerate(rows):
        row["group_id"] = number // GROUP % 8
    (note,) = notes(rows, tmp_path)
    assert note.startswith("8 of 8 groups hold different prompts")


def test_a_mask_that_begins_too_late(rows, tmp_path):
    for row in rows:
        row["loss_mask"][3] = len(row["token_ids"]) == 4
    assert any("groups hold different prompts" in note for note in notes(rows, tmp_path))


def test_a_later_part_of_an_attempt_may_have_another_context(rows, tmp_path):
    for row in rows[:2]:
        row["trajectory"] = "a"
        row["reward"] = 0.0
    rows[1]["token_ids"][0] = 7
    (note,) = notes(rows, tmp_path)
    assert "documents are 63 trajectories" in note


def test_rows_that_are_there_twice(rows, tmp_path):
    different = len({str(row["token_ids"]) for row in rows})
    (note,) = notes(rows + rows[:12], tmp_path)
    assert note.startswith(f"{76 - different} rows repeat another one: ")
    for row in rows:
        del row["old_log_probs"], row["sampling_log_probs"]
    examples = recorded_rollouts(
        write_jsonl(tmp_path / "e.jsonl", rows * 2), "none", reads_old_log_probs=False
    )
    assert examples.index.notes == []  # without log-probs nobody knows how many are equal by chance


def test_equal_completions_of_a_certain_policy_are_no_copies(rows, tmp_path):
    """Completions of probability 0.9 are expected to be equal, those of probability 0.01 are
    not."""
    pairs = 16 * GROUP * (GROUP - 1) // 2
    for probability, is_noted in ((0.9, False), (0.01, True)):
        for row in rows:
            row["token_ids"][3:] = [5, 11]
            row["loss_mask"][3:] = [True, True]
            for name in ("old_log_probs", "sampling_log_probs"):
                row[name] = [0.0] * 3 + [math.log(probability), 0.0]
        found = notes(rows, tmp_path)
        assert len(found) == is_noted
        if is_noted:
            assert (
                f"{pairs} pairs are equal, where 0.96 are expected by the recorded log-probs"
                in found[0]
            )

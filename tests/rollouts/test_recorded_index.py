"""The index of recorded rollouts: the same for JSONL and Parquet, kept in a run directory, and
enough for the outlines of documents."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from builders.processes import layout, world
from builders.rollout_rows import good_row, recorded_rollouts, write_jsonl, write_parquet

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.data_metrics import data_metrics, mismatch_note
from pgtoolkit.rollouts.recorded_index import FILE_NAME
from pgtoolkit.rollouts.settings import AccumulationSettings
from pgtoolkit.rollouts.step_loader import StepLoader

LOG_PROBS = [0.0, 0.0, -1.0, -2.0, -0.5]


def various_rows() -> list[dict]:
    """Return rows in which every optional field stands somewhere, and is missing somewhere."""
    rows = [
        good_row(number, f"g{number // 4}", length=5, model_version=number, id=f"row {number}")
        for number in range(8)
    ]
    rows[1] |= {"sampling_log_probs": LOG_PROBS, "truncated": True, "exact_match": False}
    rows[2] |= {"ref_log_probs": LOG_PROBS, "truncated": False, "id": None}
    rows[3] |= {"loss_mask": [False] * 5, "model_version": None}
    rows[4] |= {"trajectory": 7}
    rows[6] |= {"trajectory": 7, "reward": 1.0}
    return rows


def complete_rows() -> list[dict]:
    """Return rows whose lists have no nulls, with all lists but sampling_log_probs."""
    rows = []
    for row in various_rows():
        row.pop("sampling_log_probs", None)
        rows.append(row | {"ref_log_probs": LOG_PROBS, "advantage": [0, 0, 1, 0, 2]})
    return rows


@pytest.mark.parametrize(
    ("rows", "estimator"),
    [(complete_rows(), "dr_grpo"), (complete_rows(), "given"), (various_rows(), "grpo")],
    ids=["complete", "given advantages", "with nulls"],
)
def test_the_index_of_a_parquet_file_is_that_of_the_same_rows_in_jsonl(tmp_path, rows, estimator):
    """Parquet's lists without nulls are checked together, those with nulls and JSONL's rows one by
    one."""
    without_nulls = [
        {name: value for name, value in row.items() if value is not None} for row in rows
    ]
    jsonl = write_jsonl(tmp_path / "r.jsonl", without_nulls)
    parquet = write_parquet(tmp_path / "r.parquet", rows, row_group_size=3)
    of_jsonl = recorded_rollouts(jsonl, estimator).index
    of_parquet = recorded_rollouts(parquet, estimator).index
    for name in of_jsonl.rows.dtype.names:
        if name != "place":
            np.testing.assert_array_equal(of_jsonl.rows[name], of_parquet.rows[name], err_msg=name)
    assert of_jsonl.rows["tokens"].tolist() == [5] * 8
    assert of_jsonl.rows["trained"].tolist() == [3, 3, 3, 0, 3, 3, 3, 3]
    for index, file in ((of_jsonl, jsonl), (of_parquet, parquet)):
        data = file.read_bytes()
        digest = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert index.digests() == {file.name: digest}


def test_rows_of_tokens_and_masks_alone_can_be_trained_on(tmp_path):
    rows = [{"token_ids": [1, 2, 3], "loss_mask": [False, True, number > 2]} for number in range(5)]
    path = write_parquet(tmp_path / "r.parquet", rows)
    rollouts = recorded_rollouts(path, "given", reads_old_log_probs=False)
    trained = [rollouts.document(position).num_trained for position in range(5)]
    assert trained == [1, 1, 1, 2, 2]
    assert rollouts.document(4).advantages.tolist() == [1, 1]


def change_reward(path: Path, row: int) -> None:
    """Write another reward into a row; the size and the time of the last change stay."""
    before = path.stat()
    lines = path.read_text().splitlines()
    lines[row] = lines[row].replace('"reward": 0.', '"reward": 1.')
    path.write_text("\n".join(lines) + "\n")
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_kept_index_is_used_while_size_and_time_of_the_files_are_the_same(tmp_path):
    """A row that has changed nevertheless is refused when it is read."""
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(i, i // 2) for i in range(4)])
    made = recorded_rollouts(path, run_dir=tmp_path)
    change_reward(path, 1)
    kept = recorded_rollouts(path, run_dir=tmp_path)
    assert kept.index.rows.tobytes() == made.index.rows.tobytes()
    assert kept.document(0).reward == 0.0
    with pytest.raises(DataError, match=r"r\.jsonl was changed while it was in use"):
        kept.document(1)
    assert recorded_rollouts(path).document(1).reward == 1.25


def test_a_kept_index_is_made_anew_for_other_rules_other_files_and_when_it_is_damaged(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(i, i // 2) for i in range(4)])
    recorded_rollouts(path, run_dir=tmp_path)
    with pytest.raises(DataError, match=r"r\.jsonl:1:token_ids: has 5 tokens and at most 4 fit"):
        recorded_rollouts(path, run_dir=tmp_path, max_tokens=4)
    write_jsonl(path, [good_row(i, i // 2) for i in range(6)])
    assert recorded_rollouts(path, run_dir=tmp_path).num_documents == 6
    index = tmp_path / FILE_NAME
    index.write_bytes(index.read_bytes()[:-100])
    assert recorded_rollouts(path, run_dir=tmp_path).num_documents == 6


def test_an_outline_gives_the_metrics_of_a_document_without_reading_it(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", various_rows())
    rollouts = recorded_rollouts(path, shuffle=True, epochs=2)
    documents = [rollouts.document(position) for position in range(16)]
    outlines = [rollouts.outline(position) for position in range(16)]
    assert data_metrics(outlines, 9) == data_metrics(documents, 9)
    of_step = {"new_logprobs": 3.0, "num_documents": 16}
    of_step["num_empty_documents"] = sum(not document.num_trained for document in documents)
    note = mismatch_note(documents, of_step, rollouts.config)
    assert note != ""
    assert mismatch_note(outlines, of_step, rollouts.config) == note
    for outline, document in zip(outlines, documents, strict=True):
        for name in (
            "num_tokens",
            "num_trained",
            "group",
            "trajectory",
            "reward",
            "truncated",
            "exact_match",
        ):
            assert getattr(outline, name) == getattr(document, name)
        for name in ("old_log_probs", "sampling_log_probs", "ref_log_probs"):
            assert (getattr(outline, name) is None) == (getattr(document, name) is None)


def read_on_a_rank(path: Path, changed_row: int | None) -> list[str] | str:
    """Return the names of this rank's documents, or the error if there is one.

    changed_row: written over by the second rank, once the rows are indexed.
    """
    ranks = layout(data_parallel=2)
    rollouts = recorded_rollouts(path, layout=ranks)
    if changed_row is not None and ranks.rank == 1:
        change_reward(path, changed_row)
    accumulation = AccumulationSettings(docs_per_step=4, max_tokens=8)
    loader = StepLoader(rollouts, accumulation, False, 1, ranks)
    try:
        (step,) = loader
    except DataError as error:
        return str(error)
    return [name for batch in step.micro_batches for name in batch.names]


@pytest.mark.slow  # ranks are processes
def test_a_rank_reads_only_its_own_documents_and_all_fail_if_one_has_changed(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(i, i // 2) for i in range(4)])
    first, second = world(2).run(read_on_a_rank, path, None)
    assert sorted([*first, *second]) == [f"r.jsonl:{line}" for line in range(1, 5)]
    row_of_second = int(second[0].partition(":")[2]) - 1
    for message in world(2).run(read_on_a_rank, path, row_of_second):
        assert message.startswith("rank 1: r.jsonl was changed while it was in use")


@pytest.mark.parametrize(
    ("reward", "old", "noted"), [(1.0, False, 1), (None, False, 0), (1.0, True, 0)]
)
def test_a_note_says_that_recorded_advantages_weight_what_a_loss_could_imitate(
    tmp_path, reward, old, noted
):
    rows = [row | {"reward": reward} for row in complete_rows()]
    rollouts = recorded_rollouts(
        write_jsonl(tmp_path / "r.jsonl", rows), "given", reads_old_log_probs=old
    )
    notes = [note for note in rollouts.notes() if "weighted by its advantage" in note]
    assert len(notes) == noted
    assert [note for note in rollouts.index.notes if "weighted" in note] == notes

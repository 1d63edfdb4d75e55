"""The index of recorded rollouts: the same from every kind of file, kept beside a run, read by all
ranks."""

import dataclasses
import hashlib
import os

import numpy as np
import pytest
from builders.processes import layout, world
from builders.rollout_rows import good_row, recorded_rollouts, write_jsonl, write_parquet

from pgtoolkit.config.schema_step import AccumulationConfig, LastStep
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.data_metrics import data_metrics, mismatch_note
from pgtoolkit.rollouts.recorded_index import FILE_NAME
from pgtoolkit.rollouts.step_loader import StepLoader

LOG_PROBS = [0.0, 0.0, -1.0, -2.0, -0.5]


def rows():
    """Of all fields, each missing somewhere where it may be."""
    some = [good_row(i, f"g{i // 4}", length=5, model_version=i, id=f"row {i}") for i in range(8)]
    some[1] |= {"sampling_log_probs": LOG_PROBS, "truncated": True, "exact_match": False}
    some[2] |= {"ref_log_probs": LOG_PROBS, "truncated": False, "id": None}
    some[3] |= {"loss_mask": [False] * 5, "model_version": None}
    some[4] |= {"trajectory": 7}
    some[6] |= {"trajectory": 7, "reward": 1.0}
    return some


@pytest.mark.parametrize("complete", [True, False])
def test_many_rows_at_once_are_checked_as_each_alone(tmp_path, complete):
    """In Parquet lists without nulls are checked together; in JSONL each row is."""
    chosen = (
        [row | {"ref_log_probs": LOG_PROBS, "advantage": [0, 0, 1, 0, 2]} for row in rows()]
        if complete
        else rows()
    )
    chosen = [
        {name: x for name, x in row.items() if complete <= (name != "sampling_log_probs")}
        for row in chosen
    ]
    files = [
        write_jsonl(
            tmp_path / "r.jsonl",
            [{k: x for k, x in row.items() if x is not None} for row in chosen],
        )
    ]
    files += [write_parquet(tmp_path / "r.parquet", chosen, row_group_size=3)]
    for estimator in ("dr_grpo", "given") if complete else ("grpo",):
        first, second = (recorded_rollouts(file, estimator).index for file in files)
        for name in first.rows.dtype.names:
            if name != "place":
                np.testing.assert_array_equal(first.rows[name], second.rows[name], err_msg=name)
        assert first.rows["tokens"].tolist() == [5] * 8
        assert first.rows["trained"].tolist() == [3, 3, 3, 0, 3, 3, 3, 3]
        for index, file in zip((first, second), files, strict=True):
            whole = file.read_bytes()
            assert index.digests() == {
                file.name: {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
            }


def test_rows_of_lists_alone_can_be_trained_on(tmp_path):
    plain = [{"token_ids": [1, 2, 3], "loss_mask": [False, True, i > 2]} for i in range(5)]
    rollouts = recorded_rollouts(
        write_parquet(tmp_path / "r.parquet", plain), "given", reads_old_log_probs=False
    )
    assert [rollouts.document(i).num_trained for i in range(5)] == [1, 1, 1, 2, 2]
    assert rollouts.document(4).advantages.tolist() == [1, 1]


def written_over(path, number):
    """Another reward in the row, the same size and time of the last change."""
    before = path.stat()
    text = path.read_text().splitlines()
    text[number] = text[number].replace('"reward": 0.', '"reward": 1.')
    path.write_text("\n".join(text) + "\n")
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_kept_index_is_used_while_the_files_are_the_same(tmp_path):
    """And a row that is another one all the same is refused when it is read."""
    path, run = (
        write_jsonl(tmp_path / "r.jsonl", [good_row(i, i // 2) for i in range(4)]),
        tmp_path / "run",
    )
    run.mkdir()
    made = recorded_rollouts(path, run_dir=run)
    written_over(path, 1)
    kept = recorded_rollouts(path, run_dir=run)
    assert kept.index.rows.tobytes() == made.index.rows.tobytes()
    assert kept.document(0).reward == 0.0
    with pytest.raises(DataError, match=r"r\.jsonl was changed while it was in use"):
        kept.document(1)
    assert recorded_rollouts(path).document(1).reward == 1.25
    with pytest.raises(DataError, match=r"r\.jsonl:1:token_ids: has 5 tokens and at most 4 fit"):
        recorded_rollouts(path, run_dir=run, max_tokens=4)  # other rules
    write_jsonl(path, [good_row(i, i // 2) for i in range(6)])
    assert recorded_rollouts(path, run_dir=run).num_documents == 6
    (run / FILE_NAME).write_bytes((run / FILE_NAME).read_bytes()[:-100])  # as no kill leaves it
    assert recorded_rollouts(path, run_dir=run).num_documents == 6


def test_an_outline_tells_all_that_is_known_without_reading(tmp_path):
    rollouts = recorded_rollouts(write_jsonl(tmp_path / "r.jsonl", rows()), shuffle=True, epochs=2)
    whole = [rollouts.document(i) for i in range(16)]
    known = [rollouts.outline(i) for i in range(16)]
    assert data_metrics(known, 9) == data_metrics(whole, 9)
    for name in (
        "num_tokens",
        "num_trained",
        "group",
        "trajectory",
        "reward",
        "truncated",
        "exact_match",
    ):
        assert [getattr(d, name) for d in known] == [getattr(d, name) for d in whole]
    for name in ("old_log_probs", "sampling_log_probs", "ref_log_probs"):
        assert [getattr(d, name) is None for d in known] == [
            getattr(d, name) is None for d in whole
        ]
    settings = dataclasses.replace(rollouts.config)
    assert mismatch_note(known, 3.0, settings) == mismatch_note(whole, 3.0, settings) != ""


def read_on_a_rank(path, bad):
    """The rewards of this rank's documents, or the error, where a row was changed once it was
    indexed."""
    ranks = layout(data_parallel=2)
    rollouts = recorded_rollouts(path, layout=ranks)
    if bad is not None and ranks.rank == 1:
        written_over(path, bad)
    loader = StepLoader(rollouts, AccumulationConfig(4, 8, None, LastStep.short), False, 1, ranks)
    try:
        (step,) = loader
    except DataError as error:
        return str(error)
    return [name for batch in step.micro_batches for name in batch.names]


@pytest.mark.slow  # ranks are processes
def test_a_rank_reads_only_what_it_trains_on(tmp_path):
    path = write_jsonl(tmp_path / "r.jsonl", [good_row(i, i // 2) for i in range(4)])
    first, second = world(2).run(read_on_a_rank, path, None)
    assert sorted([*first, *second]) == [f"r.jsonl:{i}" for i in range(1, 5)]
    mine = int(second[0].partition(":")[2]) - 1
    for message in world(2).run(read_on_a_rank, path, mine):
        assert message.startswith("rank 1: r.jsonl was changed while it was in use")

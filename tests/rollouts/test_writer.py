"""Recording rollouts: what is written reads back equal, whole, and never silently different."""

import os
import resource
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from builders.rollout_rows import (
    VOCABULARY_SIZE,
    all_documents,
    assert_documents_equal,
    recorded_rollouts,
)

from pgtoolkit.batch import Document
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.rollouts.recording import recording_folder, write_batch


def some_documents(seed=0, count=12, sampled=False):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for i in range(count):
        length = int(torch.randint(2, 9, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        mask &= i > 0
        result.append(
            Document(
                tokens=torch.randint(0, VOCABULARY_SIZE, (length,), generator=generator),
                loss_mask=mask,
                old_log_probs=-torch.rand(length, generator=generator)[mask],
                advantages=torch.randn(length, generator=generator)[mask],
                group=i // 4,
                name=f"prompt {i // 4}, completion {i % 4}",
                reward=[None, 0.1, 1 / 3][i % 3],
                exact_match=[None, True, False][i % 3],
                truncated=[False, None, True][i % 3],
                model_version=[None, 0, 2**40][i % 3],
                sampling_log_probs=-torch.rand(length, generator=generator)[mask]
                if sampled
                else None,
                trajectory=i if i in (5, 9) else None,
            )
        )
    return result


@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_written_reads_back_equal(tmp_path, sampled):
    folder, written = recording_folder(tmp_path / "saved"), some_documents(sampled=sampled)
    paths = [write_batch(folder, 0, written[:8]), write_batch(folder, 1, written[8:])]
    assert [path.name for path in paths] == ["batch-000000.parquet", "batch-000001.parquet"]
    for first, second in zip(
        written, all_documents(recorded_rollouts(folder, "given", needs=("group_id",))), strict=True
    ):
        assert_documents_equal(first, second)


def test_measures_are_columns_beside_the_fields(tmp_path):
    """Which no training reads; a document that lacks one has none."""
    measured = [{"reward/a": 0.25, "verifier_crash_fraction": 1.0}, {"reward/a": 0.5}]
    written = [
        replace(one, measures=had)
        for one, had in zip(some_documents(count=2), measured, strict=True)
    ]
    rows = pq.read_table(write_batch(tmp_path, 0, written)).to_pylist()
    assert [(row["reward/a"], row["verifier_crash_fraction"]) for row in rows] == [
        (0.25, 1.0),
        (0.5, None),
    ]
    assert [one.measures for one in all_documents(recorded_rollouts(tmp_path, "given"))] == [{}, {}]


def test_a_resumed_writer_neither_loses_nor_doubles(tmp_path):
    folder = recording_folder(tmp_path / "saved")
    for number in range(3):
        write_batch(folder, number, some_documents(number, 4))
    with pytest.raises(ConfigError, match=r"needs a new or empty folder \(got one with 3 batches"):
        recording_folder(folder)
    for number in (1, 2, 3):  # from the checkpoint after batch 0 on
        write_batch(recording_folder(folder, resume=True), number, some_documents(number, 4))
    assert sorted(os.listdir(folder)) == [f"batch-{n:06d}.parquet" for n in range(4)]
    for number in range(4):
        read = all_documents(recorded_rollouts(folder / f"batch-{number:06d}.parquet", "given"))
        for first, second in zip(some_documents(number, 4), read, strict=True):
            assert_documents_equal(first, second)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    write_batch(tmp_path, 0, some_documents(0))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal and raises OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for number in (0, 1):
            with pytest.raises(StorageError, match=f"batch-00000{number}.*: File too large"):
                write_batch(tmp_path, number, some_documents(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in tmp_path.glob("batch-*")} == before
    assert recorded_rollouts(tmp_path, "given").num_documents == 12

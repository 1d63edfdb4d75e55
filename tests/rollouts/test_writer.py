"""Recording rollouts: they are read back equal, also after a resume and on a full disk."""

import os
import resource
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from builders.documents import document_of
from builders.rollout_rows import (
    VOCABULARY_SIZE,
    all_documents,
    assert_documents_equal,
    recorded_rollouts,
)

from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.rollouts.recording import recording_folder, write_batch


def various_documents(seed: int = 0, count: int = 12, sampled: bool = False) -> list[Document]:
    """Return documents in which every optional field is missing somewhere; the first has no trained
    token. sampled: whether they have log-probs of the sampler."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        length = int(torch.randint(2, 9, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        mask &= number > 0
        document = document_of(
            torch.randint(0, VOCABULARY_SIZE, (length,), generator=generator),
            mask,
            old_log_probs=-torch.rand(length, generator=generator)[mask],
            advantages=torch.randn(length, generator=generator)[mask],
            group=number // 4,
            name=f"prompt {number // 4}, completion {number % 4}",
            reward=[None, 0.1, 1 / 3][number % 3],
            exact_match=[None, True, False][number % 3],
            truncated=[False, None, True][number % 3],
            model_version=[None, 0, 2**40][number % 3],
            trajectory=number if number in (5, 9) else None,
        )
        if sampled:
            log_probs = -torch.rand(length, generator=generator)[mask]
            document = replace(document, sampling_log_probs=log_probs)
        documents.append(document)
    return documents


@pytest.mark.parametrize("sampled", [False, True])
def test_recorded_documents_are_read_back_equal(tmp_path, sampled):
    folder = recording_folder(tmp_path / "saved")
    written = various_documents(sampled=sampled)
    paths = [write_batch(folder, 0, written[:8]), write_batch(folder, 1, written[8:])]
    assert [path.name for path in paths] == ["batch-000000.parquet", "batch-000001.parquet"]
    read = all_documents(recorded_rollouts(folder, "given", needs=("group_id",)))
    for document, expected in zip(read, written, strict=True):
        assert_documents_equal(expected, document)


def test_measures_are_written_as_columns_that_training_does_not_read(tmp_path):
    first, second = various_documents(count=2)
    first = replace(first, measures={"reward/a": 0.25, "verifier_crash_fraction": 1.0})
    second = replace(second, measures={"reward/a": 0.5})
    rows = pq.read_table(write_batch(tmp_path, 0, [first, second])).to_pylist()
    assert [row["reward/a"] for row in rows] == [0.25, 0.5]
    assert [row["verifier_crash_fraction"] for row in rows] == [1.0, None]
    read = all_documents(recorded_rollouts(tmp_path, "given"))
    assert [document.measures for document in read] == [{}, {}]


def test_a_resumed_run_neither_loses_nor_repeats_recorded_batches(tmp_path):
    folder = recording_folder(tmp_path / "saved")
    for number in range(3):
        write_batch(folder, number, various_documents(number, 4))
    (tmp_path / "saved-2").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"needs a new or empty folder \(got one with 3 batches.* Use rollout.save_path="
        rf"{tmp_path}/saved-3\.$",
    ):
        recording_folder(folder)
    for number in (1, 2, 3):  # from the checkpoint after batch 0 on
        write_batch(recording_folder(folder, resume=True), number, various_documents(number, 4))
    assert sorted(os.listdir(folder)) == [f"batch-{number:06d}.parquet" for number in range(4)]
    for number in range(4):
        path = folder / f"batch-{number:06d}.parquet"
        read = all_documents(recorded_rollouts(path, "given"))
        for document, expected in zip(read, various_documents(number, 4), strict=True):
            assert_documents_equal(expected, document)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path):
    write_batch(tmp_path, 0, various_documents(0))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores the signal of this limit, and raises OSError.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for number in (0, 1):
            with pytest.raises(StorageError, match=f"batch-00000{number}.*: File too large"):
                write_batch(tmp_path, number, various_documents(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in tmp_path.glob("batch-*")} == before
    assert recorded_rollouts(tmp_path, "given").num_documents == 12

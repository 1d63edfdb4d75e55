"""Recording rollouts: what is written reads back equal, whole, and never silently different."""

import json
import os
import resource
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from builders.rollout_rows import VOCABULARY_SIZE, assert_same, documents, source

from pgtoolkit.batch import Document
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.rollouts.rows import RolloutWriter


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
                sampling_log_probs=-torch.rand(length, generator=generator)[mask] if sampled else None,
            )
        )
    return result


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_what_is_written_reads_back_equal(tmp_path, suffix, sampled):
    folder = tmp_path / f"saved{suffix}"
    written = some_documents(sampled=sampled)
    writer = RolloutWriter(folder)
    paths = [writer.write(0, written[:8]), writer.write(1, written[8:])]
    assert [path.name for path in paths] == [f"batch-{n:06d}{suffix or '.parquet'}" for n in (0, 1)]
    for first, second in zip(written, documents(source(folder, "given", needs=("group_id",))), strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_measures_are_columns_beside_the_fields(tmp_path, suffix):
    """Which no training reads; a document that lacks one has none."""
    measured = [{"reward/a": 0.25, "verifier_crash_fraction": 1.0}, {"reward/a": 0.5}]
    written = [replace(one, measures=had) for one, had in zip(some_documents(count=2), measured, strict=True)]
    (file,) = [RolloutWriter(tmp_path / f"saved{suffix}").write(0, written)]
    rows = [json.loads(line) for line in file.read_text().splitlines()] if suffix else pq.read_table(file).to_pylist()
    assert [(row["reward/a"], row.get("verifier_crash_fraction")) for row in rows] == [(0.25, 1.0), (0.5, None)]
    assert [one.measures for one in documents(source(tmp_path / f"saved{suffix}", "given"))] == [{}, {}]


def test_a_resumed_writer_neither_loses_nor_doubles(tmp_path):
    writer = RolloutWriter(tmp_path / "saved")
    for number in range(3):
        writer.write(number, some_documents(number, 4))
    with pytest.raises(ConfigError, match=r"needs a new or empty folder \(got one with 3 batches"):
        RolloutWriter(tmp_path / "saved")
    for number in (1, 2, 3):  # from the checkpoint after batch 0 on
        RolloutWriter(tmp_path / "saved", resume=True).write(number, some_documents(number, 4))
    assert sorted(os.listdir(tmp_path / "saved")) == [f"batch-{n:06d}.parquet" for n in range(4)]
    for number in range(4):
        read = documents(source(tmp_path / "saved" / f"batch-{number:06d}.parquet", "given"))
        for first, second in zip(some_documents(number, 4), read, strict=True):
            assert_same(first, second)


@pytest.mark.parametrize("suffix", ["", ".jsonl"])
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, suffix):
    folder = tmp_path / f"saved{suffix}"
    RolloutWriter(folder).write(0, some_documents(0))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores the signal and raises OSError
    try:
        for number in (0, 1):
            with pytest.raises(StorageError, match=f"batch-00000{number}.*: File too large"):
                RolloutWriter(folder, resume=True).write(number, some_documents(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in folder.glob("batch-*")} == before
    assert source(folder, "given").num_documents == 12

"""Benchmarks on a CPU: they run, the errors of the kernels are small, and what is written says what
was printed."""

import csv
import re

import pytest
import torch

from benchmarks import recorded_index
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.workloads import document_lengths, make_workload
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.measure import sum_metrics


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes on a GPU")
def test_the_benchmark_of_kernels_writes_the_numbers_that_it_prints(tmp_path, capsys):
    assert main(["--quick", "--repetitions", "1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert {row["section"] for row in rows} == {"logits", "head", "families"}
    assert {row["loss"] for row in rows if row["section"] != "families"} == {"grpo", "gspo"}
    of_families = [row for row in rows if row["section"] == "families"]
    of_pieces = {
        name for name, family in FAMILIES.items() if not issubclass(family, FunctionFamily)
    }
    assert {row["loss"] for row in of_families} == of_pieces
    assert len(of_families) == 2 * (len(of_pieces) + 1)  # grpo's dual clip has a row of its own
    for row in of_families:
        of_logits = row["name"] != "fused_linear"
        beside = "gspo" if of_logits and row["loss"] in ("gspo", "gmpo", "vespo") else "grpo"
        [base] = [
            float(other["milliseconds"])
            for other in of_families
            if (other["name"], other["loss"], other["case"]) == (row["name"], beside, "defaults")
        ]
        assert float(row["share"]) == pytest.approx(float(row["milliseconds"]) / base)
    assert [row["loss"] for row in rows if row["case"] == "default, 512 MiB"] == ["grpo", "gspo"]
    for row in rows:
        assert f"{float(row['milliseconds']):.3f}" in printed
    errors = [
        (float(row["loss_error"]), float(row["gradient_error"]))
        for row in rows
        if row["loss_error"]
    ]
    assert len(errors) == 6
    assert max(max(pair) for pair in errors) < 1e-5


def test_workloads_clip_the_fraction_that_they_name():
    """5 % of GRPO's tokens, none of GSPO's documents; half of the tokens untrained or of zero
    advantage."""
    lengths = document_lengths(4096, 64, 512)
    assert sum(lengths) == 4096
    for loss, share in (("grpo", 0.05), ("gspo", 0.0)):
        workload = make_workload(
            loss, lambda labels: torch.full((len(labels),), -8.0), 100, lengths, "cpu"
        )
        objective = workload.objective()
        log_probs = torch.full((4096,), -8.0)
        sums = sum_metrics(objective, "basic", log_probs, None)
        clipped = float(sums.finalize(objective.totals)["clipped_ratio_fraction"])
        assert clipped == pytest.approx(share, abs=0.02)
        assert int((workload.half_untrained().labels >= 0).sum()) == 2048
        zero = float((workload.half_zero_advantage().advantages == 0).float().mean())
        assert 0.45 < zero <= 0.5


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_recorded_rollouts_are_indexed_and_found(tmp_path, capsys, suffix):
    recorded_index.write(tmp_path / f"rows.{suffix}", 16, 8, 4)
    recorded_index.index(tmp_path / f"rows.{suffix}")
    assert re.findall(r"(\w+) 16 rows in", capsys.readouterr().out) == ["indexed", "found"]

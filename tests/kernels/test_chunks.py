"""Which rows the fused LM head multiplies together."""

from types import SimpleNamespace

import pytest
import torch

from pgtoolkit.kernels.chunks import _cuts, balanced_bins, default_logits_memory_mb, rows_within


def test_bins():
    """Every document once, none over the capacity but alone, and nearly equal."""
    generator = torch.Generator().manual_seed(0)
    for count, capacity in ((0, 10), (1, 10), (200, 2048), (50, 100)):
        lengths = torch.randint(
            1, 2049 if capacity > 100 else 130, (count,), generator=generator
        ).tolist()
        bins = balanced_bins(lengths, capacity)
        assert sorted(item for items in bins for item in items) == list(range(count))
        loads = [sum(lengths[item] for item in items) for items in bins]
        assert all(
            load <= capacity or len(items) == 1 for load, items in zip(loads, bins, strict=True)
        )
        assert len(bins) <= 1.2 * sum(lengths) / capacity + 1 + sum(
            length > capacity for length in lengths
        )
    assert balanced_bins([5, 5, 4, 6], 10) in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])


def test_cuts():
    """Full pieces and the rest; equal ones where they are whole tiles, or where the rest would be a
    scrap."""
    assert _cuts(0, 8192, 1760) == [
        (0, 1760),
        (1760, 3520),
        (3520, 5280),
        (5280, 7040),
        (7040, 8192),
    ]
    assert _cuts(8, 8200, 2208) == [(8, 2056), (2056, 4104), (4104, 6152), (6152, 8200)]
    assert _cuts(0, 3700, 1760) == [(0, 1248), (1248, 2496), (2496, 3700)]
    for total in (0, 1, 31, 33, 100):
        for most in (1, 7, 40, 1000):
            cuts = _cuts(5, 5 + total, most)
            assert [row for low, high in cuts for row in range(low, high)] == list(
                range(5, 5 + total)
            )
            assert all(0 < high - low <= most for low, high in cuts)
            assert len(cuts) == -(-total // most)


@pytest.mark.parametrize(
    ("gibibytes", "expected"), [(8, 512), (24, 512), (40, 640), (79.25, 1268), (139.8, 2236)]
)
def test_room_for_the_logits_by_the_gpus_memory(gibibytes, expected, monkeypatch):
    memory = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert default_logits_memory_mb(torch.device("cuda", 0)) == expected
    assert default_logits_memory_mb(torch.device("cpu")) == 512


def test_rows_within():
    assert rows_within(512, 151936, torch.bfloat16) == 1760  # of 1766 that would fit
    assert rows_within(1, 151936, torch.float32) == 1
    assert rows_within(1, 10**9, torch.float32) == 1
    assert rows_within(4, 40000, torch.float32) == 26

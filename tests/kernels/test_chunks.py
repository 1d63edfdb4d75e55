"""The rows that the fused LM head multiplies together fit into its memory and are nearly equal
parts."""

import math
from types import SimpleNamespace

import pytest
import torch

from pgtoolkit.kernels.chunks import _cuts, balanced_bins, default_logits_memory_mb, rows_within


def test_few_bins_hold_every_document_once_and_exceed_the_capacity_only_with_a_single_one():
    generator = torch.Generator().manual_seed(0)
    for count, capacity, longest in ((0, 10, 129), (1, 10, 129), (200, 2048, 2048), (50, 100, 129)):
        lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        bins = balanced_bins(lengths, capacity)
        assert sorted(item for items in bins for item in items) == list(range(count))
        for items in bins:
            assert len(items) == 1 or sum(lengths[item] for item in items) <= capacity
        num_too_long = sum(length > capacity for length in lengths)
        assert len(bins) <= 1.2 * sum(lengths) / capacity + 1 + num_too_long
    assert balanced_bins([5, 5, 4, 6], 10) in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])


def test_rows_are_cut_into_full_pieces_and_a_rest_or_into_equal_pieces():
    """Equal pieces are taken where they are multiples of a tile, or where the rest would be
    small."""
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
        for longest in (1, 7, 40, 1000):
            cuts = _cuts(5, 5 + total, longest)
            assert [row for low, high in cuts for row in range(low, high)] == list(
                range(5, 5 + total)
            )
            assert all(0 < high - low <= longest for low, high in cuts)
            assert len(cuts) == math.ceil(total / longest)


@pytest.mark.parametrize(
    ("gibibytes", "expected"), [(8, 512), (24, 512), (40, 640), (79.25, 1268), (139.8, 2236)]
)
def test_the_default_memory_for_logits_grows_with_the_gpus(gibibytes, expected, monkeypatch):
    memory = SimpleNamespace(total_memory=int(gibibytes * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert default_logits_memory_mb(torch.device("cuda", 0)) == expected
    assert default_logits_memory_mb(torch.device("cpu")) == 512


def test_as_many_rows_as_fit_are_rounded_down_to_full_tiles_and_are_at_least_one():
    assert rows_within(512, 151936, torch.bfloat16) == 1760  # 1766 would fit
    assert rows_within(1, 151936, torch.float32) == 1
    assert rows_within(1, 10**9, torch.float32) == 1
    assert rows_within(4, 40000, torch.float32) == 26

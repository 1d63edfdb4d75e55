"""The promise over ranks that are processes, with gloo between them; also with Triton's kernels, which need them."""

import pytest
import torch
from cuts import CUTS, assert_same, axis_groups, evaluate, expected, make_head_case
from steps import LOSSES
from worlds import world

KINDS = ["data 2", "sequence 2", "sequence 4", "vocabulary 2", "data x vocabulary", "data x sequence"]
TRITON = ["vocabulary 2", "sequence 2", "sequence x vocabulary"]


def on_this_rank(cut, head_case, fused, loss, options):
    return evaluate(axis_groups(cut.sizes), cut, head_case, fused, loss, "prompt_mean", "with_entropy", **options)


def check(cut, head_case, fused, loss, tolerance, **options):
    wanted = expected(head_case, fused, loss, "prompt_mean", "with_entropy")
    results = world(cut.world_size).run(on_this_rank, cut, head_case, fused, loss, options)
    assert_same(results, cut, wanted, fused, tolerance)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cut", KINDS)
def test_in_processes(cut, loss, fused):
    check(CUTS[cut], make_head_case(), fused, loss, 1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("cut", TRITON)
def test_triton(cut, loss, fused):
    head_case = make_head_case(dtype=torch.float32)
    # The fused head takes Triton by itself on a GPU only; here the head's logits are cut or materialised.
    options = {"impl": "triton"} | ({"num_splits": 2} if fused and loss == "grpo" else {})
    check(CUTS[cut], head_case, fused, loss, 1e-5, **options)

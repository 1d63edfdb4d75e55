"""The promise over ranks that are processes, with gloo between them; also with Triton's kernels, which need them."""

import pytest
import torch
from builders.cuts import CUTS, assert_same, axis_groups, evaluate
from builders.losses import Choice, make_head_case
from builders.processes import world

from pgtoolkit.kernels import losses

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads

KINDS = ["data 2", "sequence 2", "sequence 4", "vocabulary 2", "data x vocabulary", "data x sequence"]
TRITON = ["vocabulary 2", "sequence 2", "data x vocabulary", "sequence x vocabulary"]


def paired(cuts):
    """Each cut with each of two families, by turns with given logits and with the fused head."""
    return [(cut, loss, (loss == "gspo") is (i % 2 == 0)) for i, cut in enumerate(cuts) for loss in ("grpo", "gspo")]


def on_this_rank(cut, problem, choice, fused, triton):
    """With triton, the fused head computes as on a GPU, in chunks of four rows."""
    options = {"impl": "triton"} if triton and not fused else {}
    choose = losses.choose_implementation
    with pytest.MonkeyPatch.context() as patch:
        if triton and fused:
            patch.setattr(losses, "choose_implementation", lambda _, *given: choose("triton", *given))
            patch.setattr(losses, "rows_within", lambda *_: 4)
        return evaluate(axis_groups(cut.sizes), cut, problem, choice, fused, **options)


def check(cut, problem, loss, fused, tolerance, triton=False, correction=None):
    cut, choice = CUTS[cut], Choice(loss, correction, aggregation="prompt_mean")
    results = world(cut.world_size).run(on_this_rank, cut, problem, choice, fused, triton)
    assert_same(results, cut, problem.specified(choice, fused), fused, tolerance)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(KINDS))
def test_in_processes(cut, loss, fused):
    check(cut, make_head_case(), loss, fused, 1e-12)


@pytest.mark.parametrize("correction", ["token masked", "product masked, V", "off policy"])
@pytest.mark.parametrize(("cut", "loss", "fused"), paired(["sequence 2"]))
def test_corrections_in_processes(cut, loss, fused, correction):
    check(cut, make_head_case(), loss, fused, 1e-12, correction=correction)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(TRITON))
def test_triton(cut, loss, fused):
    check(cut, make_head_case(dtype=torch.float32), loss, fused, 1e-5, triton=True)

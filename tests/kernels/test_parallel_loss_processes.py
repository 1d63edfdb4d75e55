"""The promise over ranks that are processes, with gloo between them; also with Triton's kernels, which need them."""

import pytest
import torch
from builders.cuts import CUTS, assert_same, axis_groups, evaluate, expected
from builders.losses import SMOOTH, make_head_case
from builders.processes import world

from pgtoolkit.kernels import losses

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads

KINDS = ["data 2", "sequence 2", "sequence 4", "vocabulary 2", "data x vocabulary", "data x sequence"]
TRITON = ["vocabulary 2", "sequence 2", "data x vocabulary", "sequence x vocabulary"]


def paired(cuts):
    """Each cut with each family, by turns with given logits and with the fused head."""
    return [(cut, loss, (loss == "gspo") is (i % 2 == 0)) for i, cut in enumerate(cuts) for loss in SMOOTH]


def on_this_rank(cut, head_case, fused, loss, triton, correction):
    """With triton, the fused head computes as on a GPU, in chunks of four rows."""
    options = {"correction": correction} | ({"impl": "triton"} if triton and not fused else {})
    choose = losses.choose_implementation
    with pytest.MonkeyPatch.context() as patch:
        if triton and fused:
            patch.setattr(losses, "choose_implementation", lambda _, *given: choose("triton", *given))
            patch.setattr(losses, "rows_within", lambda *_: 4)
        groups = axis_groups(cut.sizes)
        return evaluate(groups, cut, head_case, fused, loss, "prompt_mean", "with_entropy", **options)


def check(cut, head_case, fused, loss, tolerance, triton=False, correction=None):
    wanted = expected(head_case, fused, loss, "prompt_mean", "with_entropy", correction)
    results = world(cut.world_size).run(on_this_rank, cut, head_case, fused, loss, triton, correction)
    assert_same(results, cut, wanted, fused, tolerance)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(KINDS))
def test_in_processes(cut, loss, fused):
    check(CUTS[cut], make_head_case(), fused, loss, 1e-12)


@pytest.mark.parametrize("correction", ["token masked", "product masked, V", "off policy"])
@pytest.mark.parametrize(("cut", "loss", "fused"), paired(["data 2", "sequence 2"]))
def test_corrections_in_processes(cut, loss, fused, correction):
    check(CUTS[cut], make_head_case(), fused, loss, 1e-12, correction=correction)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(TRITON))
def test_triton(cut, loss, fused):
    check(CUTS[cut], make_head_case(dtype=torch.float32), fused, loss, 1e-5, triton=True)

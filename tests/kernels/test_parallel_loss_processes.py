"""The promise over ranks with Triton's kernels, whose interpreter needs processes: gloo is between them."""

import pytest
import torch
from builders.cuts import CUTS, assert_same, axis_groups, evaluate
from builders.losses import Choice, make_head_case
from builders.processes import world

from pgtoolkit.kernels import losses

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads
TRITON = ["vocabulary 2", "sequence 2", "data x vocabulary", "sequence x vocabulary"]


def paired(cuts):
    """Each cut with each of two families, by turns with given logits and with the fused head."""
    return [(cut, loss, (loss == "gspo") is (i % 2 == 0)) for i, cut in enumerate(cuts) for loss in ("grpo", "gspo")]


def on_this_rank(cut, problem, choice, fused):
    """The fused head computes as on a GPU, in chunks of four rows."""
    choose = losses.choose_implementation
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(losses, "choose_implementation", lambda _, *given: choose("triton", *given))
            patch.setattr(losses, "rows_within", lambda *_: 4)
        options = {} if fused else {"impl": "triton"}
        return evaluate(axis_groups(cut.sizes), cut, problem, choice, fused, **options)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(TRITON))
def test_triton(cut, loss, fused):
    cut, choice, problem = CUTS[cut], Choice(loss, aggregation="prompt_mean"), make_head_case(dtype=torch.float32)
    results = world(cut.world_size).run(on_this_rank, cut, problem, choice, fused)
    assert_same(results, cut, problem.specified(choice, fused), fused, 1e-5)

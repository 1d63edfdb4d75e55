"""The promise over ranks with Triton's kernels, whose interpreter needs processes: gloo is between
them."""

import pytest
import torch
import torch.distributed as dist
from builders.cuts import CUTS, assert_ranks_match, axis_groups, evaluate_on_rank
from builders.losses import TEMPERATURE, Choice, count_totals, make_head_case
from builders.processes import world
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.kernels import losses

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads
TRITON = ["vocabulary 2", "sequence 2", "data x vocabulary", "sequence x vocabulary"]


def paired(cuts):
    """Each cut with each of two families, by turns with given logits and with the fused head."""
    return [
        (cut, loss, (loss == "gspo") is (i % 2 == 0))
        for i, cut in enumerate(cuts)
        for loss in ("grpo", "gspo")
    ]


def on_this_rank(cut, problem, choice, fused):
    """The fused head computes as on a GPU, in chunks of four rows."""
    choose = losses.choose_implementation
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(
                losses, "choose_implementation", lambda _, *given: choose("triton", *given)
            )
            patch.setattr(losses, "rows_within", lambda *_: 4)
        options = {} if fused else {"impl": "triton"}
        return evaluate_on_rank(axis_groups(cut.sizes), cut, problem, choice, fused, **options)


@pytest.mark.parametrize(("cut", "loss", "fused"), paired(TRITON))
def test_triton(cut, loss, fused):
    cut, choice, problem = (
        CUTS[cut],
        Choice(loss, aggregation="prompt_mean"),
        make_head_case(dtype=torch.float32),
    )
    results = world(cut.world_size).run(on_this_rank, cut, problem, choice, fused)
    assert_ranks_match(results, cut, problem.by_reference(choice, fused), fused, 1e-5)


class SmallModel(nn.Module):
    """A body of one layer, and a head whose logits are those of the case before any update."""

    def __init__(self, problem, returns_logits):
        super().__init__()
        self.body = nn.Linear(
            problem.hidden.shape[1], problem.hidden.shape[1], bias=False, dtype=torch.float64
        )
        self.head = nn.Linear(*problem.weight.shape[::-1], dtype=torch.float64)
        self.returns_logits = returns_logits
        with torch.no_grad():
            self.body.weight.copy_(torch.eye(len(self.body.weight)))
            self.head.weight.copy_(problem.weight)
            self.head.bias.copy_(problem.bias)

    def forward(self, hidden):
        states = self.body(hidden)
        return self.head(states) if self.returns_logits else states


def gradients_on_two_ranks(problem, documents, loss, fused, counted):
    """Return the gradients that the lines in docs/losses.md leave, of each rank's documents.

    counted: with the step's totals, else by data_group.
    """
    model = SmallModel(problem, returns_logits=not fused)
    wrapped = DistributedDataParallel(model)
    mine = documents[dist.get_rank()]
    loss_of_step(
        problem, mine, loss, fused, model, wrapped, counted, dist.group.WORLD, dist.get_world_size()
    )
    return [parameter.grad for parameter in model.parameters()]


def loss_of_step(problem, documents, loss, fused, model, called, counted, group, factor):
    case = problem.case
    rows = torch.isin(case.document_index, torch.tensor(documents))
    numbers = torch.searchsorted(torch.tensor(documents), case.document_index[rows])
    vectors = case.labels[rows], case.old_log_probs[rows], case.advantages[rows], numbers
    options = {"loss": loss, "temperature": TEMPERATURE, "num_documents": len(documents)}
    options |= {"totals": count_totals(case)} if counted else {"data_group": group}
    output = called(problem.hidden[rows])
    if fused:
        out = linear_policy_loss(
            output, model.head.weight, *vectors, bias=model.head.bias, **options
        )
    else:
        out = policy_loss(output, *vectors, **options)
    (out.loss * factor).backward()


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(("loss", "fused"), [("grpo", False), ("gspo", True)])
def test_under_distributed_data_parallel_the_loss_is_multiplied_by_the_number_of_ranks(
    loss, fused, counted
):
    """As docs/losses.md says: the mean over two ranks is then the gradient of one process with all
    documents."""
    problem, documents = make_head_case(), ((0, 3, 4), (1, 2, 5))
    alone = SmallModel(problem, returns_logits=not fused)
    loss_of_step(problem, tuple(range(6)), loss, fused, alone, alone, False, None, 1)
    expected = [parameter.grad for parameter in alone.parameters()]
    assert all(gradient.norm() > 1e-3 for gradient in expected)
    for gradients in world(2).run(gradients_on_two_ranks, problem, documents, loss, fused, counted):
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-12)

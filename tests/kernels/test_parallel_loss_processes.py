"""Ranks that share a step match the reference as processes, over gloo: with Triton's kernels, whose
interpreter cannot run in threads, and under DistributedDataParallel."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from builders.cuts import CUTS, Cut, assert_ranks_match, axis_groups, evaluate_on_rank
from builders.losses import TEMPERATURE, Choice, HeadCase, count_totals, make_head_case
from builders.processes import world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

from pgtoolkit import linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.kernels import losses

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads
TRITON = [
    ("vocabulary 2", "grpo", False),
    ("vocabulary 2", "gspo", True),
    ("sequence x vocabulary", "gspo", False),
    ("sequence 2", "grpo", True),
]
"""Cuts that the kernels see, a family, and whether the head is fused. They see no data ranks: each
has documents of its own."""


def result_on_rank(cut: Cut, problem: HeadCase, choice: Choice, fused: bool) -> tuple:
    """Return what this rank computes; the fused head computes as on a GPU, in chunks of four
    rows."""
    choose = losses.choose_implementation
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr(
                losses, "choose_implementation", lambda _, *others: choose("triton", *others)
            )
            patch.setattr(losses, "rows_within", lambda *_: 4)
        options = {} if fused else {"impl": "triton"}
        return evaluate_on_rank(axis_groups(cut.sizes), cut, problem, choice, fused, **options)


@pytest.mark.parametrize(("cut", "loss", "fused"), TRITON)
def test_processes_with_tritons_kernels_match_the_reference(cut, loss, fused):
    cut = CUTS[cut]
    choice = Choice(loss, aggregation="prompt_mean")
    problem = make_head_case(dtype=torch.float32)
    results = world(cut.world_size).run(result_on_rank, cut, problem, choice, fused)
    assert_ranks_match(results, cut, problem.by_reference(choice, fused), fused, 1e-5)


class SmallModel(nn.Module):
    """A body of one layer, and a head whose logits are those of the case before any update."""

    def __init__(self, problem: HeadCase, returns_logits: bool):
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

    def forward(self, hidden: Tensor) -> Tensor:
        states = self.body(hidden)
        return self.head(states) if self.returns_logits else states


@dataclass(frozen=True)
class Ddp:
    """One call of the loss as docs/losses.md writes it for DistributedDataParallel.

    with_totals: with the step's totals, else by data_group.
    """

    problem: HeadCase
    loss: str
    fused: bool
    with_totals: bool

    def model(self) -> SmallModel:
        return SmallModel(self.problem, returns_logits=not self.fused)


def gradients_on_rank(call: Ddp, documents_of_ranks: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Return the gradients that DistributedDataParallel leaves."""
    model = call.model()
    wrapped = DistributedDataParallel(model)
    documents = documents_of_ranks[dist.get_rank()]
    loss = loss_of_step(call, documents, model, wrapped, dist.group.WORLD)
    (loss * dist.get_world_size()).backward()
    return [parameter.grad for parameter in model.parameters()]


def loss_of_step(
    call: Ddp,
    documents: tuple[int, ...],
    model: SmallModel,
    forward: nn.Module,
    data_group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the loss of these documents. forward: the model, or what wraps it."""
    problem = call.problem
    case = problem.case
    rows = torch.isin(case.document_index, torch.tensor(documents))
    numbers = torch.searchsorted(torch.tensor(documents), case.document_index[rows])
    vectors = case.labels[rows], case.old_log_probs[rows], case.advantages[rows], numbers
    options = {"loss": call.loss, "temperature": TEMPERATURE, "num_documents": len(documents)}
    options |= {"totals": count_totals(case)} if call.with_totals else {"data_group": data_group}
    output = forward(problem.hidden[rows])
    if call.fused:
        head = model.head
        return linear_policy_loss(output, head.weight, *vectors, bias=head.bias, **options).loss
    return policy_loss(output, *vectors, **options).loss


@pytest.mark.parametrize("with_totals", [False, True])
@pytest.mark.parametrize(("loss", "fused"), [("grpo", False), ("gspo", True)])
def test_under_distributed_data_parallel_the_loss_is_multiplied_by_the_number_of_ranks(
    loss, fused, with_totals
):
    """As docs/losses.md says: the mean over two ranks is then the gradient of one process with all
    documents."""
    problem = make_head_case()
    alone = Ddp(problem, loss, fused, with_totals=False)
    model = alone.model()
    loss_of_step(alone, tuple(range(6)), model, model, None).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.norm() > 1e-3 for gradient in expected)
    call = Ddp(problem, loss, fused, with_totals)
    for gradients in world(2).run(gradients_on_rank, call, ((0, 3, 4), (1, 2, 5))):
        for gradient, expected_gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


class Head(nn.Module):
    """The weight and the bias that a call of the loss takes."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        vars(self).update(weight=weight, bias=bias)


def gradients_under_fsdp(call: Ddp, documents_of_ranks: tuple[tuple[int, ...], ...]) -> tuple:
    """Return the refusals of a sharded head, and the gradients with the lines that they give."""
    model = call.model()
    sharded = model.head
    fully_shard(sharded, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model.body, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    documents = documents_of_ranks[dist.get_rank()]
    refusals = []
    head = {"lm_head_weight": sharded.weight, "bias": sharded.bias}
    for name in head:
        model.head = Head(head["lm_head_weight"], head["bias"])
        try:
            loss_of_step(call, documents, model, model, dist.group.WORLD)
        except ValueError as refused:
            refusals.append(str(refused))
            lines = str(refused).partition("Use\n")[2]
            scope = {"torch": torch, name: head[name]}
            exec(lines, scope)
            head[name] = scope[name]
    model.head = Head(head["lm_head_weight"], head["bias"])
    loss = loss_of_step(call, documents, model, model, dist.group.WORLD)
    (loss * dist.get_world_size()).backward()
    parameters = [*model.body.parameters(), *sharded.parameters()]
    return refusals, [parameter.grad.full_tensor() for parameter in parameters]


def test_a_head_that_fsdp_shards_is_refused_with_the_lines_that_are_right():
    problem = make_head_case()
    alone = Ddp(problem, "gspo", fused=True, with_totals=False)
    model = alone.model()
    loss_of_step(alone, tuple(range(6)), model, model, None).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for refusals, gradients in world(2).run(gradients_under_fsdp, alone, ((0, 3, 4), (1, 2, 5))):
        start = " needs a tensor of this rank (got a DTensor"
        names = [refusal.partition(start)[0] for refusal in refusals]
        assert names == ["lm_head_weight", "bias"]
        for gradient, expected_gradient in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


FUNCTIONS = {
    "logits": policy_loss,
    "lm_head_weight": linear_policy_loss,
    "log_probs": log_prob_loss,
}
"""Keyword of a tensor that ranks may share -> a function that takes it."""


def loss_as_told(key: str, full: Tensor, others: dict, placement: Placement) -> tuple:
    """Return the refusal of a DTensor, the loss with what it says to give in its place, and the
    gradient of the DTensor.

    key: logits, lm_head_weight or log_probs. others: the arguments beside it.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = distribute_tensor(full, mesh, [Replicate() if placement.is_partial() else placement])
    if placement.is_partial():
        parts = DTensor.from_local(spread.to_local() / 2, mesh, [placement])
        spread = parts.detach()
    spread.requires_grad_()
    function = FUNCTIONS[key]
    try:
        function(**{key: spread}, **others)
    except ValueError as refused:
        refusal = str(refused)
    use = refusal.partition("Use")[2].strip()
    group = {}
    if "vocabulary_group=group" in use:
        group = {"vocabulary_group": spread.device_mesh.get_group(0)}
    scope = {"torch": torch, key: spread}
    if "full_tensor(grad_placements" in use:
        exec(use, scope)
        given = scope[key]
    else:
        given = eval(f"{key}.{'to_local' if 'to_local' in use else 'full_tensor'}()", scope)
    loss = function(**{key: given}, **others, **group).loss
    loss.backward()
    return refusal, loss.detach(), spread.grad.full_tensor()


@dataclass(frozen=True)
class Spread:
    """A DTensor that a call gets, and a part of the refusal that it has."""

    key: str
    placement: Placement
    told: str


SPREAD = [
    Spread("logits", Shard(1), "policy_loss(logits.to_local(), ..., vocabulary_group=group)"),
    Spread("logits", Shard(0), "Use logits.full_tensor() on every rank"),
    Spread("logits", Replicate(), "Use logits.to_local(), and no group"),
    Spread("logits", Partial(), "Use logits.full_tensor() on every rank"),
    Spread("lm_head_weight", Shard(0), "lm_head_weight.full_tensor(grad_placements=average)"),
    Spread("lm_head_weight", Shard(1), "lm_head_weight.full_tensor(grad_placements=average)"),
    Spread("lm_head_weight", Replicate(), "lm_head_weight.full_tensor(grad_placements=average)"),
    Spread("log_probs", Shard(0), "Use log_probs.full_tensor() on every rank"),
    Spread("log_probs", Replicate(), "Use log_probs.to_local(), and no group"),
]


def arguments_beside(key: str, problem: HeadCase) -> tuple[Tensor, dict]:
    """Return the full tensor of a keyword, and the other arguments of its function."""
    case = problem.case
    others = {
        "old_log_probs": case.old_log_probs,
        "advantages": case.advantages,
        "document_index": case.document_index,
        "loss": "gspo",
    }
    if key == "lm_head_weight":
        return problem.weight, {**others, "hidden": problem.hidden, "labels": case.labels}
    if key == "log_probs":
        return case.old_log_probs - 0.1, {**others, "mask": case.labels >= 0}
    return problem.hidden @ problem.weight.T, {**others, "labels": case.labels}


def losses_as_told(problem: HeadCase) -> list[tuple]:
    """Return what `loss_as_told` does of each, and of logits with an odd number of columns."""
    results = []
    for spread in SPREAD:
        full, others = arguments_beside(spread.key, problem)
        results.append(loss_as_told(spread.key, full, others, spread.placement))
    full, others = arguments_beside("logits", problem)
    results.append(loss_as_told("logits", odd(full), others, Shard(1)))
    return results


def odd(logits: Tensor) -> Tensor:
    """Return the logits with an odd number of columns, which two ranks cannot share equally."""
    return logits if logits.shape[1] % 2 else torch.cat([logits, logits[:, :1]], dim=1)


def test_a_tensor_that_ranks_share_is_refused_with_what_is_right_for_its_placement():
    problem = make_head_case()
    cases = [*SPREAD, Spread("logits", Shard(1), "Use logits.full_tensor() on every rank")]
    for results in world(2).run(losses_as_told, problem):
        for number, (spread, result) in enumerate(zip(cases, results, strict=True)):
            full, others = arguments_beside(spread.key, problem)
            full = odd(full) if number == len(SPREAD) else full
            full = full.detach().requires_grad_()
            expected = FUNCTIONS[spread.key](**{spread.key: full}, **others).loss
            expected.backward()
            refusal, loss, gradient = result
            assert spread.told in refusal
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradient, full.grad, rtol=1e-10, atol=1e-12)

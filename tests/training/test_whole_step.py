"""A loss over groups in two passes: value, gradient and metrics of a step do not depend on its cut
into micro-batches and ranks, and are those of plain loops over its groups in float64."""

import math

import pytest
import torch
from builders.documents import document_of
from builders.processes import layout, world
from torch import nn

from pgtoolkit.document import Document
from pgtoolkit.kernels.losses import Computation, loss_of_logits
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.whole_step import with_coefficients, with_rewards

VOCABULARY = 7
LENGTHS = (9, 2, 12, 5, 7, 1, 3, 8, 11)
LEFT_OUT = 4
"""A document that no verifier could score."""


def towards_rewards(log_probs, old_log_probs, rewards, group_rewards, documents, groups):
    better = documents.mean(rewards - group_rewards)
    target = groups.softmax(documents.sum(old_log_probs) + better)
    new = documents.sum(log_probs)
    losses = -groups.sum(target * (new - groups.spread(groups.logsumexp(new))))
    return losses, {"largest_target": target}


def documents(is_on_policy: bool) -> list[Document]:
    """Return three groups of three documents, of which one has no trained token."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(LENGTHS):
        mask = torch.arange(length) >= max(1, length // 3)
        old_log_probs = (-2.0 + 0.3 * torch.randn(length, generator=draw))[mask]
        made.append(
            document_of(
                torch.randint(0, VOCABULARY, (length,), generator=draw),
                mask,
                advantages=0.5,
                old_log_probs=None if is_on_policy else old_log_probs,
                on_policy=is_on_policy,
                group=number // 3,
                name=f"document {number}",
                reward=None if number == LEFT_OUT else float(number % 4),
                score_failed=number == LEFT_OUT,
            )
        )
    return made


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)).double()


def old_sum(document: Document) -> torch.Tensor:
    assert document.old_log_probs is not None
    return document.old_log_probs.double().sum()


def by_loops(is_on_policy: bool) -> tuple:
    """Return (loss, gradients, the mean of the metric) of the whole step."""
    net = model()
    step = documents(is_on_policy)
    loss = torch.zeros((), dtype=torch.float64)
    mean_target = 0.0
    for first in (0, 3, 6):
        members = [
            number
            for number in range(first, first + 3)
            if number != LEFT_OUT and step[number].num_trained
        ]
        new = []
        for number in members:
            document = step[number]
            logits = net(document.tokens).log_softmax(-1)
            chosen = [
                logits[place - 1, document.tokens[place]]
                for place in range(len(document.tokens))
                if document.loss_mask[place]
            ]
            new.append(sum(chosen))
        old = [
            float(new[i].detach()) if is_on_policy else float(old_sum(step[number]))
            for i, number in enumerate(members)
        ]
        rewards = [float(step[number].reward or 0.0) for number in members]
        mean = sum(rewards) / len(rewards)
        powers = [math.exp(o + r - mean) for o, r in zip(old, rewards, strict=True)]
        targets = [power / sum(powers) for power in powers]
        norm = torch.logsumexp(torch.stack(new), 0)
        of_group = -sum(target * (s - norm) for target, s in zip(targets, new, strict=True))
        # The tokens of a document that is left out keep their place in the denominator.
        trained = [step[number].num_trained for number in range(first, first + 3)]
        share = sum(step[number].num_trained for number in members) / sum(trained)
        loss = loss + of_group * share / 3
        mean_target += sum(targets) / len(step)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return float(loss.detach()), list(gradients), mean_target


def take_step(ranks: Layout, max_tokens: int, is_on_policy: bool) -> tuple:
    """Return (loss, gradients over all ranks, the mean of the metric) by the two passes."""
    net = model()
    loss = Loss(FunctionLoss(towards_rewards), aggregation_of("prompt_mean"), metrics="basic")
    rank = ranks.rank_in("data_parallel")
    step = make_step(documents(is_on_policy), max_tokens, None, rank, ranks.size("data_parallel"))
    step = with_rewards(step, loss, ranks)

    @torch.no_grad()
    def log_probs_of(micro_batch):
        rows = net(micro_batch.tokens).log_softmax(-1)
        return rows.gather(1, micro_batch.labels.clamp(min=0)[:, None])[:, 0]

    step, first = with_coefficients(step, loss, log_probs_of, ranks)
    group = ranks.group("sequence_data_parallel")
    for micro_batch in step.micro_batches:
        piece = local_tokens(micro_batch, ranks)
        out = loss_of_logits(
            net(piece.tokens),
            piece,
            step.totals,
            loss,
            Ranks(sequence=group),
            Computation("torch", check_finite=False),
        )
        assert float(out.loss.detach()) == 0  # the value is the first pass's
        out.loss.backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    for gradient in gradients:
        if ranks.loss_group is not None:
            torch.distributed.all_reduce(gradient, group=ranks.loss_group)
    return float(first.loss), gradients, float(first.metrics["largest_target"])


def take_step_on_rank(sizes: dict[str, int], max_tokens: int, is_on_policy: bool):
    return take_step(layout(**sizes), max_tokens, is_on_policy)


def assert_as_by_loops(taken, is_on_policy):
    loss, gradients, metric = taken
    expected_loss, expected, expected_metric = by_loops(is_on_policy)
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert metric == pytest.approx(expected_metric, rel=1e-9)
    for gradient, of_loops in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, of_loops, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("max_tokens", [1000, 24, 12])
def test_a_step_is_that_of_plain_loops_however_it_is_cut(max_tokens, is_on_policy):
    assert_as_by_loops(take_step(ONE_PROCESS, max_tokens, is_on_policy), is_on_policy)


@pytest.mark.parametrize(
    "sizes", [{"data_parallel": 2}, {"sequence_data_parallel": 2}, {"data_parallel": 4}]
)
def test_groups_over_several_ranks_are_those_of_one_process(sizes):
    num_ranks = math.prod(sizes.values())
    for taken in world(num_ranks).run(take_step_on_rank, sizes, 12, False):
        assert_as_by_loops(taken, False)

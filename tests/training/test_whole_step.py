"""Losses in two passes: value, gradient and metrics of a step do not depend on its cut into
micro-batches and ranks, and are those of plain loops over its documents in float64."""

import math
from dataclasses import replace

import pytest
import torch
from builders.documents import document_of
from builders.parts import LOSS, short_module
from builders.processes import layout, world
from torch import nn

from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.losses import Computation, loss_of_logits
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.group_families import Tpo
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.whole_step import after_first_pass, with_rewards, with_signs

VOCABULARY = 7
LENGTHS = (9, 2, 12, 5, 7, 1, 3, 8, 11)
LEFT_OUT = 4
"""A document that no verifier could score."""
TOP = 0.3
BONUS = 0.07
ADVANTAGES = (0.5, -0.375, 0.25, 0.0, 0.25, 0.875, 0.75, -0.75, -0.125)


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
                advantages=ADVANTAGES[number],
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
        # The document that nobody could score has weight 0, and counts as 0 in the mean.
        mean_target += sum(targets) / len(step)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return float(loss.detach()), list(gradients), mean_target


def by_loops_of_top(kind: str, is_on_policy: bool) -> tuple:
    """Return (loss, gradients, threshold) where the most uncertain tokens alone count.

    The entropy bonus, a document's ratio and all denominators keep every token.
    """
    net = model()
    step = documents(is_on_policy)
    members = [
        number for number in range(len(step)) if number != LEFT_OUT and step[number].num_trained
    ]
    rows = {number: net(step[number].tokens).log_softmax(-1) for number in members}
    places = {
        number: [t for t in range(len(step[number].tokens)) if step[number].loss_mask[t]]
        for number in members
    }
    entropy = {
        (number, t): -(rows[number][t - 1].exp() * rows[number][t - 1]).sum()
        for number in members
        for t in places[number]
    }
    ordered = sorted(float(value.detach()) for value in entropy.values())
    place = (1 - TOP) * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = low + (place - math.floor(place)) * (high - low)
    loss = torch.zeros((), dtype=torch.float64)
    for number in members:
        document = step[number]
        new = [rows[number][t - 1, document.tokens[t]] for t in places[number]]
        if is_on_policy:
            old = [float(p.detach()) for p in new]
        else:
            assert document.old_log_probs is not None
            old = document.old_log_probs.tolist()
        n = len(new)
        mean = sum(p - o for p, o in zip(new, old, strict=True)) / n
        for p, o, t in zip(new, old, places[number], strict=True):
            weight = penalty_weight = 1 / (len(step) * n)
            if kind == "balanced":
                weight, penalty_weight = balanced_weights(step, number)
            ratio = (mean if kind == "gspo" else p - o).exp()
            A = ADVANTAGES[number]
            surrogate = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
            # The same token before has the same entropy, but for rounding: there are many ties.
            if float(entropy[number, t].detach()) >= threshold - 1e-6:
                loss = loss + weight * surrogate
            loss = loss - BONUS * penalty_weight * entropy[number, t]
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    return float(loss.detach()), list(gradients), threshold


def balanced_weights(step: list[Document], number: int) -> tuple[float, float]:
    """Return w_t of the surrogate and of the bonus in a document; one without a trained token has
    no sign."""

    def sign(other: int) -> int:
        has_tokens = step[other].num_trained > 0
        return has_tokens * ((ADVANTAGES[other] > 0) - (ADVANTAGES[other] < 0))

    group = range(number // 3 * 3, number // 3 * 3 + 3)
    same = [other for other in group if sign(other) == sign(number)]
    of_group = 1 / (3 * sum(step[other].num_trained for other in group))
    if sign(number) == 0:
        return 0.0, of_group
    return len(same) / 3 / (3 * sum(step[other].num_trained for other in same)), of_group


def loss_of(kind: str) -> Loss:
    if kind == "groups":
        return Loss(FunctionLoss(towards_rewards), aggregation_of("prompt_mean"), metrics="basic")
    return Loss(
        family_of("grpo" if kind == "balanced" else kind, epsilon_low=0.2, epsilon_high=0.2),
        aggregation_of("balanced" if kind == "balanced" else "sample_mean"),
        metrics="basic",
        entropy_coefficient=BONUS,
        entropy_top_fraction=TOP,
    )


def take_step(ranks: Layout, max_tokens: int, is_on_policy: bool, kind: str) -> tuple:
    """Return (loss, gradients over all ranks, a metric) by the two passes."""
    net = model()
    loss = loss_of(kind)
    rank = ranks.rank_in("data_parallel")
    step = make_step(documents(is_on_policy), max_tokens, None, rank, ranks.size("data_parallel"))
    step = with_signs(with_rewards(step, loss, ranks), loss, ranks)

    @torch.no_grad()
    def forward(micro_batch, with_entropy):
        rows = net(micro_batch.tokens).log_softmax(-1)
        log_probs = rows.gather(1, micro_batch.labels.clamp(min=0)[:, None])[:, 0]
        return log_probs, -(rows.exp() * rows).sum(-1) if with_entropy else None

    passes = [forward(each, kind != "groups") for each in step.micro_batches]
    step, first = after_first_pass(step, loss, passes, ranks)
    group = ranks.group("sequence_data_parallel")
    values = torch.zeros((), dtype=torch.float64)
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
        values += out.loss.detach()
        out.loss.backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    for summed in [values, *gradients]:
        if ranks.loss_group is not None:
            torch.distributed.all_reduce(summed, group=ranks.loss_group)
    value, metrics = first.measured()
    if value is not None:
        assert float(values) == 0  # the value is the first pass's
        return value, gradients, metrics["largest_target"]
    return float(values), gradients, metrics["entropy_threshold"]


def take_step_on_rank(sizes: dict[str, int], *others):
    return take_step(layout(**sizes), *others)


def assert_as_by_loops(taken, is_on_policy, kind):
    loss, gradients, metric = taken
    loops = by_loops(is_on_policy) if kind == "groups" else by_loops_of_top(kind, is_on_policy)
    expected_loss, expected, expected_metric = loops
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert metric == pytest.approx(expected_metric, rel=1e-9)
    for gradient, of_loops in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, of_loops, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("kind", ["groups", "grpo", "gspo", "balanced"])
@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("max_tokens", [1000, 24, 12])
def test_a_step_is_that_of_plain_loops_however_it_is_cut(max_tokens, is_on_policy, kind):
    taken = take_step(ONE_PROCESS, max_tokens, is_on_policy, kind)
    assert_as_by_loops(taken, is_on_policy, kind)


@pytest.mark.parametrize("kind", ["groups", "grpo", "gspo", "balanced"])
@pytest.mark.parametrize(
    "sizes", [{"data_parallel": 2}, {"sequence_data_parallel": 2}, {"data_parallel": 4}]
)
def test_a_step_over_several_ranks_is_that_of_one_process(sizes, kind):
    num_ranks = math.prod(sizes.values())
    for taken in world(num_ranks).run(take_step_on_rank, sizes, 12, False, kind):
        assert_as_by_loops(taken, False, kind)


def test_the_second_pass_begins_with_the_states_that_the_first_one_ended_with():
    module = short_module(replace(LOSS, family=Tpo()))
    standing = torch.optim.SGD(module.parameters(), lr=0.0)
    module.optimizers = lambda use_pl_optimizer=True: standing
    with_graph = []
    module.model.base_model.register_forward_pre_hook(
        lambda *_: with_graph.append(torch.is_grad_enabled())
    )
    step = make_step(documents(is_on_policy=False), 12)
    module.training_step(step, 0)
    num = len(step.micro_batches)
    assert num > 2
    assert with_graph == [False] * (num - 1) + [True] * num


def test_a_groups_mean_reward_is_the_baseline_of_its_advantages():
    """Also completions that are cut off and masked, and those without a trained token, count in it;
    an attempt of two documents counts once, and one without a score not at all."""
    step = documents(is_on_policy=False)
    rewards = [1.0, 4.0, 0.0, 2.0, None, 5.0, 3.0, 3.0, 0.0]
    step = [
        replace(
            document,
            reward=reward,
            truncated=number in (1, 3),
            trajectory=0 if number in (6, 7) else None,
        )
        for number, (document, reward) in enumerate(zip(step, rewards, strict=True))
    ]
    assert not step[5].num_trained
    loss = replace(loss_of("groups"), masks_truncated=True)
    made = with_rewards(make_step(step, 24, None, 0, 1), loss, ONE_PROCESS)
    found = {}
    for micro_batch in made.micro_batches:
        assert micro_batch.group_rewards is not None
        found |= dict(zip(micro_batch.step_places, micro_batch.group_rewards.tolist(), strict=True))
    expected = 3 * [5 / 3] + 3 * [3.5] + 3 * [1.5]
    assert [found[place] for place in range(9)] == pytest.approx(expected)


def test_documents_without_one_sign_are_named():
    loss = loss_of("balanced")
    made = documents(is_on_policy=False)
    by_token = replace(made[2], advantages=torch.linspace(-1, 1, made[2].num_trained))
    part = replace(made[3], trajectory=7)
    for number, document, problem in (
        (2, by_token, r"one advantage for all tokens of a document \(got several in document 2\)"),
        (3, part, r"attempts of one document each \(got a trajectory in document 3\)"),
    ):
        step = make_step([*made[:number], document, *made[number + 1 :]], 24)
        with pytest.raises(DataError, match=problem):
            with_signs(step, loss, ONE_PROCESS)

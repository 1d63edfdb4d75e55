"""aggregation=balanced, which weighs a completion by the sign of its advantage: a worked example,
the reference under every family and way of computing, pieces of a step, reducers that ask for the
same numbers, and refused data."""

from dataclasses import replace

import pytest
import torch
from builders.losses import (
    EVERY_LOSS,
    FAMILIES,
    TEMPERATURE,
    Case,
    Choice,
    HeadCase,
    Result,
    as_floats,
    assert_results_close,
    count_totals,
    make_case,
    make_head_case,
    result_of,
)

from pgtoolkit import log_prob_loss, policy_loss
from pgtoolkit.losses.aggregation import aggregation_of


def case_with_a_zero(seed: int = 12, lengths: tuple[int, ...] = (7, 1, 5, 12, 3, 4, 6)) -> Case:
    """Return a case with one advantage a document, of which the third one's is 0."""
    case = make_case(seed=seed, lengths=lengths, temperature=TEMPERATURE)
    draws = torch.tensor([0.9, -0.6, 0.0, 0.4, -1.2, 0.7, 1.1], dtype=torch.float64)
    return replace(case, advantages=draws[case.document_index])


def test_a_worked_example():
    """A prompt with documents of 2, 6 (A > 0) and 4 tokens (A < 0), and one with 3 (A > 0) and 5
    (A = 0)."""
    lengths = torch.tensor([2, 6, 4, 3, 5])
    index = torch.arange(5).repeat_interleave(lengths)
    of_documents = torch.tensor([1.0, 0.5, -2.0, 3.0, 0.0], dtype=torch.float64)
    log_probs = torch.full((20,), -1.0, dtype=torch.float64, requires_grad=True)
    out = log_prob_loss(
        log_probs,
        log_probs.detach(),
        of_documents[index],
        index,
        torch.ones(20, dtype=torch.bool),
        loss="reinforce",
        aggregation="balanced",
        group_index=torch.tensor([0, 0, 0, 1, 1]),
    )
    out.loss.backward()
    weights = (2 / 3 / (8 * 2), 2 / 3 / (8 * 2), 1 / 3 / (4 * 2), 1 / 2 / (3 * 2), 0.0)
    expected = [-weights[d] * float(of_documents[d]) for d in index]
    assert log_probs.grad.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_every_family_matches_the_reference(loss):
    """From logits, from log-probs, by the fused head, and in two pieces with the totals of the
    step; penalties and bonus have the weights of prompt_mean."""
    case = case_with_a_zero()
    for choice in (
        Choice(loss, None, "k3", "balanced", "basic", 0.3),
        Choice(loss, "token truncated", None, "balanced", "basic"),
    ):
        by_reference = choice.by_reference(case)
        expected = Result(by_reference.loss, by_reference.metrics, [by_reference.gradient])
        for impl in ("torch", "reference"):
            logits = case.logits.clone().requires_grad_()
            out = policy_loss(
                logits, *case.tensors[1:], impl=impl, temperature=TEMPERATURE, **choice.step(case)
            )
            assert_results_close(result_of(out, [logits]), expected, 1e-11)
        assert_results_close(in_two_pieces(case, choice), expected, 1e-11)
        problem = make_head_case(6)
        signs = torch.tensor([0.9, -0.6, 0.0, 0.4, -1.2, 0.7], dtype=torch.float64)
        fixed = replace(problem.case, advantages=signs[problem.case.document_index])
        problem = HeadCase(fixed, problem.hidden, problem.weight, problem.bias, problem.dtype)
        assert_results_close(problem.by_fused_head(choice), problem.by_reference(choice), 1e-11)


def in_two_pieces(case: Case, choice: Choice) -> Result:
    """Return the step of the case, whose even and odd documents are trained in two calls."""
    signs = [0] * case.num_documents
    counts = [0] * case.num_documents
    for t, label in enumerate(case.labels.tolist()):
        if label >= 0:
            document = int(case.document_index[t])
            counts[document] += 1
            signs[document] = int(case.advantages[t].sign())
    by_sign = [[[0, 0, 0] for _ in range(3)] for _ in range(2)]
    for document, group in enumerate(case.group_index.tolist()):
        by_sign[0][group][signs[document] + 1] += 1
        by_sign[1][group][signs[document] + 1] += counts[document]
    completions, tokens = map(torch.tensor, by_sign)
    totals = replace(count_totals(case), completions_by_sign=completions, tokens_by_sign=tokens)
    logits = case.logits.clone().requires_grad_()
    outs = []
    for parity in (0, 1):
        labels = torch.where(case.document_index % 2 == parity, case.labels, -1)
        options = {"impl": "torch", "temperature": TEMPERATURE, "totals": totals}
        outs.append(policy_loss(logits, labels, *case.tensors[2:], **options, **choice.step(case)))
    sums = outs[0].metric_sums.merge(outs[1].metric_sums)
    loss = outs[0].loss + outs[1].loss
    loss.backward()
    return Result(loss.item(), as_floats(sums.finalize(totals)), [logits.grad])


def test_a_reducer_gets_advantages_and_totals_by_sign_if_it_names_them():
    case = case_with_a_zero()

    def as_balanced(
        totals,
        *,
        advantages,
        completions_by_sign,
        tokens_by_sign,
        mask,
        document_index,
        group_index,
        **others,
    ):
        group = torch.cat([group_index, group_index.new_zeros(1)])[document_index]
        sign = advantages.sign().long() + 1
        share = completions_by_sign[group, sign].double() / completions_by_sign.sum(1)[group]
        weights = share / tokens_by_sign[group, sign].clamp(min=1) / totals.num_groups
        return weights.where(mask & (sign != 1), 0.0)

    losses = [
        policy_loss(
            *case.tensors,
            loss=FAMILIES["grpo"],
            group_index=case.group_index,
            num_documents=case.num_documents,
            **options,
        ).loss.item()
        for options in ({"aggregation": "balanced"}, {"reducer": as_balanced})
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert aggregation_of("sample_mean", None, lambda totals, **others: None).asked == []


def test_data_without_signs_are_refused():
    case = case_with_a_zero()
    options = {
        "aggregation": "balanced",
        "loss": "grpo",
        "num_documents": case.num_documents,
        "group_index": case.group_index,
    }
    with pytest.raises(ValueError, match="aggregation='balanced' needs group_index"):
        policy_loss(*case.tensors, **options | {"group_index": None})
    with pytest.raises(ValueError, match="does not know trajectories"):
        policy_loss(*case.tensors, **options, trajectory_index=case.group_index)
    with pytest.raises(ValueError, match="needs totals with completions_by_sign"):
        policy_loss(*case.tensors, **options, totals=count_totals(case))
    by_token = replace(case, advantages=case.advantages + torch.linspace(0, 1, len(case.labels)))
    with pytest.raises(ValueError, match="whose tokens have different advantages"):
        policy_loss(*by_token.tensors, **options)
    assert policy_loss(*by_token.tensors, **options, check_finite=False).loss.isnan()

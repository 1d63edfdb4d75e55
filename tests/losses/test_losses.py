"""The loss against its specification, the worked example, and the ways in which others were
wrong."""

import math
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from builders.losses import (
    AGGREGATIONS,
    CHOICES,
    CORRECTIONS,
    EVERY_LOSS,
    FAMILIES,
    PARAMETERS,
    TEMPERATURE,
    Choice,
    Result,
    as_floats,
    assert_results_close,
    count_totals,
    make_case,
    make_head_case,
    result_of,
)
from builders.runs import assert_equal

from pgtoolkit import log_prob_loss, policy_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.kl import FULL_KINDS


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_matches_reference(choice):
    """From logits, and where nothing is asked of the entropy from log-probs; padding of the latter
    holds NaN."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    found = choice.by_reference(case)
    expected = Result(found.loss, found.metrics, [found.gradient])
    for impl in ("torch", "reference"):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(
            logits, *case.tensors[1:], impl=impl, temperature=TEMPERATURE, **choice.step(case)
        )
        assert_results_close(result_of(out, [logits], 3.0), expected, 1e-11)
        assert out.log_probs.tolist() == pytest.approx(found.log_probs, rel=1e-12)
    if choice.entropy or choice.metrics == "with_entropy" or choice.kl in FULL_KINDS:
        return
    logits, mask = case.logits.clone().requires_grad_(), case.labels >= 0
    rows = (logits / TEMPERATURE).log_softmax(-1)
    new = torch.where(mask, rows.gather(-1, case.labels.clamp(min=0)[:, None])[:, 0], torch.nan)
    out = log_prob_loss(new, *case.tensors[2:], mask, **choice.step(case))
    (3 * out.loss).backward()
    by_log_probs = torch.where(mask[:, None], logits.grad, 0.0) / 3
    assert_results_close(
        Result(out.loss.item(), as_floats(out.metrics), [by_log_probs]), expected, 1e-11
    )


@pytest.mark.parametrize(
    ("choice", "rows"), [*zip(CHOICES, cycle((1, 4, 1000)), strict=False)], ids=str
)
def test_the_fused_head_matches_the_reference(choice, rows, monkeypatch):
    """In chunks shorter than most documents, and longer; also where nobody looks for numbers that
    are not finite."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
    problem = make_head_case(6 if rows == 4 else 11)
    assert_results_close(
        problem.by_fused_head(choice, 3.0, check_finite=rows == 4),
        problem.by_reference(choice),
        1e-11,
    )


def test_the_cases_clip_on_both_sides_but_not_mostly():
    """Guards the other tests: without clipped tokens they would not see the clip at all."""
    steps = [make_case(seed=12), *(make_head_case(seed).case for seed in (6, 11))]
    for name, family in FAMILIES.items():
        if name.split(",")[0] in ("grpo", "gspo", "cispo", "gmpo", "dppo"):  # with bounds
            found = [
                policy_loss(*case.tensors, loss=family, metrics="basic").metrics for case in steps
            ]
            low, high = (
                max(x[f"clipped_{side}_fraction"] for x in found) for side in ("low", "high")
            )
            assert (low > 0) == (name != "cispo, no lower bound")
            assert high > 0
            assert min(x["clipped_ratio_fraction"] for x in found) < 0.8


@pytest.mark.parametrize(
    ("aggregation", "trajectories", "expected"),
    [
        *(("sample_mean", None, 0.875), ("prompt_mean", None, 1.3125)),
        *(("token_mean", None, 13 / 12), ("constant", None, 0.40625)),
        *(("sample_mean", (0, 0, 1, 2), 0.875), ("sample_mean", (0, 1, 2, 2), 7 / 6)),
        *(("prompt_mean", (0, 1, 2, 2), 1.3125), ("token_mean", (0, 1, 2, 2), 13 / 12)),
        *(("constant", (0, 0, 1, 2), 13 / 24), ("constant", (5, 5, 3, 3), 13 / 16)),
    ],
)
def test_worked_example(aggregation, trajectories, expected):
    """a: 2 tokens of loss 1, b: 6 of 0.5 (prompt 1); c: 4 of 2, d: 6 masked (prompt 2); L = 8. On
    policy, so l = -A."""
    document_index = torch.repeat_interleave(torch.arange(4), torch.tensor([2, 6, 4, 6]))
    advantages = -torch.tensor([1.0, 0.5, 2.0, 123.0], dtype=torch.float64)[document_index]
    labels = torch.where(document_index < 3, 1, -1)
    old = torch.full((18,), -math.log(4), dtype=torch.float64)
    tensors = torch.zeros(18, 4, dtype=torch.float64), labels, old, advantages, document_index
    options = {"aggregation": aggregation, "divisor": 8.0 if aggregation == "constant" else None}
    options |= {} if trajectories is None else {"trajectory_index": torch.tensor(trajectories)}
    # Some surrogates are -A times the log-prob, here log(1/4), sapo's is -2 A / tau; the others' -A
    # times the ratio, 1.
    factor = {"sapo": 2 / 1.05} | dict.fromkeys(
        ("cispo", "dppo", "vespo", "kimi", "reinforce"), math.log(1 / 4)
    )
    for loss in EVERY_LOSS:
        out = policy_loss(*tensors, loss=loss, group_index=torch.tensor([1, 1, 2, 2]), **options)
        assert float(out.loss) == pytest.approx(expected * factor.get(loss, 1), rel=1e-14)


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_masked_positions_may_hold_anything(loss, correction):
    case = make_case(seed=12)
    masked, results = case.labels < 0, []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        tensors = [x.clone() for x in (*case.tensors, case.sampling_log_probs)]
        for x, sign in ((tensors[0], 1), (tensors[2], 1), (tensors[3], -1), (tensors[5], -1)):
            x[masked] = sign * poison
        logits = tensors[0].requires_grad_()
        given = {
            "correction": CORRECTIONS.get(correction),
            "sampling_log_probs": tensors[5],
            "num_documents": 6,
        }
        out = policy_loss(logits, *tensors[1:5], loss=loss, metrics="with_entropy", **given)
        out.loss.backward()
        assert (logits.grad[masked] == 0).all()
        results.append([out.loss.detach(), logits.grad, as_floats(out.metrics)])
    assert torch.isfinite(results[0][1]).all()
    assert_equal(results, results[:1] * 4)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_padding_may_carry_any_document_number(loss):
    case = make_case()
    expected = policy_loss(*case.tensors, loss=loss)
    for number in (case.num_documents, 10**9, -1):
        padded = [torch.cat([x, x[:3]]) for x in case.tensors[:4]]
        padded[1][-3:] = -1
        index = torch.cat([case.document_index, torch.full((3,), number)])
        out = policy_loss(*padded, index, loss=loss, num_documents=case.num_documents)
        assert float(out.loss) == float(expected.loss)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_masked_document_counts_as_a_document_and_adds_no_phantom_token(aggregation):
    case, choice = make_case(), Choice("gspo", aggregation=aggregation, metrics="basic")
    with_it = policy_loss(*case.tensors, **choice.step(case))
    keep, fewer = (
        case.document_index < 5,
        {"group_index": case.group_index[:-1], "num_documents": 5},
    )
    without = policy_loss(*[x[keep] for x in case.tensors], **choice.step(case) | fewer)
    assert (
        int(with_it.metrics["num_tokens"])
        == int(without.metrics["num_tokens"])
        == int((case.labels >= 0).sum())
    )
    assert int(with_it.metrics["num_empty_documents"]) == 1
    share = {"sample_mean": 5 / 6, "constant": 5 / 6, "token_mean": 1.0, "prompt_mean": 1.0}[
        aggregation
    ]
    assert float(with_it.loss) == pytest.approx(share * float(without.loss), rel=1e-14)


def test_a_step_without_trained_tokens_is_zero():
    case = make_case()
    for loss, aggregation in product(EVERY_LOSS, AGGREGATIONS):
        logits = case.logits.clone().requires_grad_()
        options = Choice(loss, aggregation=aggregation, metrics="none").step(case)
        out = policy_loss(logits, torch.full_like(case.labels, -1), *case.tensors[2:], **options)
        out.loss.backward()
        assert float(out.loss.detach()) == 0
        assert (logits.grad == 0).all()


def test_groups_may_have_any_numbers():
    case = make_case()
    plain, renamed = (
        policy_loss(*case.tensors, aggregation="prompt_mean", group_index=groups)
        for groups in (case.group_index, case.group_index * 10**12 - 7)
    )
    assert float(renamed.loss) == float(plain.loss)


@pytest.mark.parametrize("field", [0, 2, 3])
def test_non_finite_data_names_the_document(field):
    tensors = [x.clone() for x in make_case().tensors]
    tensors[field][int((tensors[4] == 3).nonzero()[2])] = math.nan
    with pytest.raises(DataError, match="document 3"):
        policy_loss(*tensors)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_a_reducers_weights_outside_of_the_mask_are_dropped(loss):
    """Whatever it returns there: loss, gradient and metrics to the last bit those of a reducer that
    returns 0."""
    case = make_case(seed=12)
    results = []
    for filler in (0.0, 7.0, math.nan, math.inf):
        logits = case.logits.clone().requires_grad_()

        def reducer(totals, *, mask, filler=filler, **_):
            return torch.where(
                mask,
                torch.linspace(0.5, 1, len(mask), dtype=torch.float64) / totals.num_tokens,
                filler,
            )

        out = policy_loss(
            logits,
            *case.tensors[1:],
            loss=loss,
            reducer=reducer,
            metrics="basic",
            **PARAMETERS[loss],
        )
        out.loss.backward()
        results.append([out.loss.detach(), logits.grad, out.metric_sums.sums])
    assert results[0][0] != 0
    assert_equal(results, results[:1] * 4)


def test_custom_reducer_takes_precedence():
    case = make_case()

    def one_over_all_positions(totals: StepTotals, *, mask, **_):
        return torch.full(mask.shape, 1 / len(mask))

    out = policy_loss(
        *case.tensors, loss="grpo", aggregation="token_mean", reducer=one_over_all_positions
    )
    token_mean = policy_loss(*case.tensors, loss="grpo", aggregation="token_mean")
    share = int((case.labels >= 0).sum()) / len(case.labels)
    assert float(out.loss) == pytest.approx(share * float(token_mean.loss), rel=1e-6)
    with pytest.raises(ValueError, match="weight of a trained token is not finite"):
        policy_loss(
            *case.tensors, reducer=lambda totals, *, mask, **_: torch.full(mask.shape, torch.nan)
        )
    with pytest.raises(ValueError, match="one weight per token"):
        policy_loss(*case.tensors, reducer=lambda totals, *, mask, **_: torch.ones(3))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("position", [-1, 5, 99])
def test_a_trained_token_of_no_document_is_refused(aggregation, position):
    """Document 4 is trained; with another number, or one document fewer, its tokens would vanish
    from the step."""
    case = make_case()
    index = torch.where(case.document_index == 4, position, case.document_index)
    fewer = {"group_index": case.group_index[:5], "num_documents": 5}
    options = Choice("gspo", aggregation=aggregation).step(case) | fewer
    with pytest.raises(ValueError, match="num_documents=5"):
        policy_loss(*case.tensors[:4], index, **options)
    assert math.isnan(policy_loss(*case.tensors[:4], index, check_finite=False, **options).loss)


def test_each_family_has_the_clip_of_its_paper():
    case = make_case(seed=12)
    for loss, (low, high) in {
        "grpo": (0.2, 0.2),
        "gspo": (3e-4, 4e-4),
        "cispo": (None, 4.0),
    }.items():
        given = policy_loss(*case.tensors, loss=loss, epsilon_low=low, epsilon_high=high)
        assert float(policy_loss(*case.tensors, loss=loss).loss) == float(given.loss)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_sum_of_the_weights_is_known_before_the_step(aggregation):
    """By formula, as by adding them up: of six documents in three groups, one document without a
    trained token."""
    case = make_case()
    totals, mask = count_totals(case), case.labels >= 0
    chosen = aggregation_of(aggregation, 5.0 if aggregation == "constant" else None)
    documents = DocumentSums.of_tokens(case.document_index, mask, case.num_documents, None)
    weights = chosen.weights(totals, documents, mask, case.group_index, None)
    assert chosen.weight_sum(totals) == pytest.approx(float(weights.abs().sum()), rel=1e-12)
    expected = {
        "sample_mean": 5 / 6,
        "prompt_mean": 1,
        "token_mean": 1,
        "constant": totals.num_tokens / 30,
    }
    assert chosen.weight_sum(totals) == pytest.approx(expected[aggregation])
    # Five trajectories of six documents, one without a trained token, which is of two documents.
    counts = torch.tensor([3, 0, totals.num_tokens - 9, 2, 4])
    by_trajectory = chosen.weight_sum(
        replace(totals, num_empty_documents=2, tokens_per_trajectory=counts)
    )
    expected = {
        "sample_mean": 4 / 5,
        "prompt_mean": 1,
        "token_mean": 1,
        "constant": totals.num_tokens / 25,
    }
    assert by_trajectory == pytest.approx(expected[aggregation])
    # Of four groups one has no trained token: its share is 0, as that of an empty document is.
    if aggregation == "prompt_mean":
        totals = StepTotals(
            6, totals.num_tokens, 1, 4, torch.tensor([3, 0, totals.num_tokens - 5, 2])
        )
        assert chosen.weight_sum(totals) == pytest.approx(0.75)


def test_a_reducer_is_given_the_trajectories_where_there_are_any():
    """With them it can be sample_mean; one that cannot take them is no loss of theirs."""
    case, given = make_case(), []

    def reducer(
        totals, *, mask, document_index, tokens_per_document, group_index, trajectory_index
    ):
        given.append(trajectory_index.tolist())
        counts = totals.tokens_per_trajectory[trajectory_index] * totals.num_trajectories
        return (1 / torch.cat([counts, counts.new_ones(1)]))[document_index]

    options = {"trajectory_index": case.trajectory_index, "num_documents": 6, "loss": "grpo"}
    own = policy_loss(*case.tensors, reducer=reducer, **options)
    assert given == [[0, 1, 0, 2, 1, 3]]
    assert float(own.loss) == pytest.approx(
        float(policy_loss(*case.tensors, **options).loss), rel=1e-6
    )

    def another(totals, *, mask, document_index, tokens_per_document, group_index):
        return mask

    with pytest.raises(TypeError, match="trajectory_index"):
        policy_loss(*case.tensors, reducer=another, **options)


@pytest.mark.parametrize(
    ("index", "totals", "message"),
    [
        ([0, 1, 0, -1, 1, 3], None, "numbers from 0 on"),
        ([0, 1, 0], None, "one entry per document, 6"),
        (None, True, "need each other"),
        ([0, 1, 0, 2, 1, 3], False, "need each other"),
        ([0, 1, 0, 2, 1, 9], True, "places in totals.tokens_per_trajectory"),
    ],
)
def test_trajectories_that_cannot_be_those_of_the_documents_are_refused(index, totals, message):
    case = make_case()
    given = {} if totals is None else {"totals": count_totals(case, totals)}
    given |= {} if index is None else {"trajectory_index": torch.tensor(index)}
    with pytest.raises(ValueError, match=message):
        policy_loss(*case.tensors, num_documents=6, **given)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_a_trajectory_each_is_the_loss_without_any_to_the_last_bit(loss, aggregation):
    case, choice = make_case(seed=12), Choice(loss, aggregation=aggregation, metrics="basic")
    found = []
    for given in ({}, {"trajectory_index": torch.tensor([3, 0, 5, 1, 4, 2])}):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(logits, *case.tensors[1:], **choice.step(case) | given)
        out.loss.backward()
        found.append([out.loss.detach(), logits.grad, out.metric_sums.sums])
    assert_equal(*found)
    assert int(out.metrics["num_trajectories"]) == int(out.metrics["num_documents"]) == 6

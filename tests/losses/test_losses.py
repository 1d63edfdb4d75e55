"""The losses against the reference and a worked example, and at masked tokens, empty documents,
reducers and trajectories."""

import math
import re
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
from torch import Tensor

from pgtoolkit import log_prob_loss, policy_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.kl import FULL_KINDS


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_loss_matches_the_reference(choice):
    """Compare it from logits, and from log-probs, which are NaN where masked, if they suffice."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    by_reference = choice.by_reference(case)
    expected = Result(by_reference.loss, by_reference.metrics, [by_reference.gradient])
    for impl in ("torch", "reference"):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(
            logits, *case.tensors[1:], impl=impl, temperature=TEMPERATURE, **choice.step(case)
        )
        assert_results_close(result_of(out, [logits], 3.0), expected, 1e-11)
        assert out.log_probs.tolist() == pytest.approx(by_reference.log_probs, rel=1e-12)
    if choice.entropy or choice.metrics == "with_entropy" or choice.kl in FULL_KINDS:
        return
    logits = case.logits.clone().requires_grad_()
    mask = case.labels >= 0
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
    """In chunks shorter than most documents, and longer; with the check for finite numbers and
    without."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
    problem = make_head_case(6 if rows == 4 else 11)
    assert_results_close(
        problem.by_fused_head(choice, 3.0, check_finite=rows == 4),
        problem.by_reference(choice),
        1e-11,
    )


def test_the_cases_clip_on_both_sides_but_keep_many_tokens():
    """The other tests would not notice a wrong clip without clipped tokens."""
    cases = [make_case(seed=12), make_head_case(6).case, make_head_case(11).case]
    for name, family in FAMILIES.items():
        if name.split(",")[0] not in ("grpo", "gspo", "cispo", "gmpo", "dppo", "icepop"):
            continue  # has no bounds
        metrics = [
            policy_loss(*case.tensors, loss=family, metrics="basic").metrics for case in cases
        ]
        low = max(values["clipped_low_fraction"] for values in metrics)
        high = max(values["clipped_high_fraction"] for values in metrics)
        assert (low > 0) == (name != "cispo, no lower bound")
        assert high > 0
        assert min(values["clipped_ratio_fraction"] for values in metrics) < 0.8


@pytest.mark.parametrize(
    ("aggregation", "trajectories", "expected"),
    [
        ("sample_mean", None, 0.875),
        ("prompt_mean", None, 1.3125),
        ("token_mean", None, 13 / 12),
        ("constant", None, 0.40625),
        ("sample_mean", (0, 0, 1, 2), 0.875),
        ("sample_mean", (0, 1, 2, 2), 7 / 6),
        ("prompt_mean", (0, 1, 2, 2), 1.3125),
        ("token_mean", (0, 1, 2, 2), 13 / 12),
        ("constant", (0, 0, 1, 2), 13 / 24),
        ("constant", (5, 5, 3, 3), 13 / 16),
    ],
)
def test_every_family_has_the_values_of_the_worked_example(aggregation, trajectories, expected):
    """Compare with sums by hand; on policy the loss of a token is -A, and L = 8.

    Prompt 1 has the documents a, of 2 tokens with loss 1, and b, of 6 tokens with loss 0.5.
    Prompt 2 has c, of 4 tokens with loss 2, and d, of 6 masked tokens.
    """
    document_index = torch.repeat_interleave(torch.arange(4), torch.tensor([2, 6, 4, 6]))
    advantages = -torch.tensor([1.0, 0.5, 2.0, 123.0], dtype=torch.float64)[document_index]
    labels = torch.where(document_index < 3, 1, -1)
    old = torch.full((18,), -math.log(4), dtype=torch.float64)
    tensors = torch.zeros(18, 4, dtype=torch.float64), labels, old, advantages, document_index
    options = {"aggregation": aggregation, "divisor": 8.0 if aggregation == "constant" else None}
    options |= {} if trajectories is None else {"trajectory_index": torch.tensor(trajectories)}
    # Surrogates on policy: -2 A / tau of sapo, -A log(1/4) of those that use the log-prob, and -A
    # of the others.
    factors = {"sapo": 2 / 1.05}
    by_log_prob = ("cispo", "dppo", "icepop", "vespo", "kimi", "reinforce")
    factors |= dict.fromkeys(by_log_prob, math.log(1 / 4))
    for loss in EVERY_LOSS:
        out = policy_loss(*tensors, loss=loss, group_index=torch.tensor([1, 1, 2, 2]), **options)
        assert float(out.loss) == pytest.approx(expected * factors.get(loss, 1), rel=1e-14)


@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_masked_positions_may_hold_anything(loss, correction):
    case = make_case(seed=12)
    masked = case.labels < 0
    results = []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        tensors = [x.clone() for x in (*case.tensors, case.sampling_log_probs)]
        for x, sign in ((tensors[0], 1), (tensors[2], 1), (tensors[3], -1), (tensors[5], -1)):
            x[masked] = sign * poison
        logits = tensors[0].requires_grad_()
        keywords = {
            "correction": CORRECTIONS.get(correction),
            "sampling_log_probs": tensors[5],
            "num_documents": 6,
        }
        out = policy_loss(logits, *tensors[1:5], loss=loss, metrics="with_entropy", **keywords)
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
    case = make_case()
    choice = Choice("gspo", aggregation=aggregation, metrics="basic")
    with_it = policy_loss(*case.tensors, **choice.step(case))
    keep = case.document_index < 5
    changes = {"group_index": case.group_index[:-1], "num_documents": 5}
    without = policy_loss(*[x[keep] for x in case.tensors], **choice.step(case) | changes)
    num_trained = int((case.labels >= 0).sum())
    assert int(with_it.metrics["num_tokens"]) == num_trained
    assert int(without.metrics["num_tokens"]) == num_trained
    assert int(with_it.metrics["num_empty_documents"]) == 1
    shares = {"sample_mean": 5 / 6, "constant": 5 / 6, "token_mean": 1.0, "prompt_mean": 1.0}
    expected = shares[aggregation] * float(without.loss)
    assert float(with_it.loss) == pytest.approx(expected, rel=1e-14)


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
        for groups in (case.group_index, case.group_index * 10**12 + 7)
    )
    assert float(renamed.loss) == float(plain.loss)


@pytest.mark.parametrize("field", [0, 2, 3])
def test_the_error_of_non_finite_data_names_the_document(field):
    tensors = [x.clone() for x in make_case().tensors]
    row = int((tensors[4] == 3).nonzero()[2])
    tensors[field][row] = math.nan
    name = ("logits", "labels", "old_log_probs", "advantages")[field]
    sentence = f"{name} needs finite numbers at trained positions (got nan in document 3). "
    with pytest.raises(DataError, match=f"^{re.escape(sentence)}Mask"):
        policy_loss(*tensors)
    # A fault beside it has a sentence of its own.
    vocabulary = tensors[0].shape[1]
    first = int((tensors[4] == 0).nonzero()[0])
    tensors[1][first] = vocabulary + 4
    of_label = (
        f"labels needs tokens of the vocabulary, which are 0 to {vocabulary - 1} (got "
        f"{vocabulary + 4} in document 0). "
    )
    both = [of_label, sentence] if name == "logits" else [sentence, of_label]
    with pytest.raises(DataError, match=f"^{re.escape(''.join(both))}Mask"):
        policy_loss(*tensors)


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_a_reducers_weights_of_masked_tokens_have_no_effect(loss):
    """Loss, gradient and metrics have the bits of a reducer that returns 0 there."""
    case = make_case(seed=12)
    results = []
    for filler in (0.0, 7.0, math.nan, math.inf):
        logits = case.logits.clone().requires_grad_()

        def reducer(
            totals: StepTotals, *, mask: Tensor, filler: float = filler, **_: object
        ) -> Tensor:
            weights = torch.linspace(0.5, 1, len(mask), dtype=torch.float64) / totals.num_tokens
            return torch.where(mask, weights, filler)

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


def test_a_reducer_replaces_the_aggregation():
    case = make_case()

    def one_over_all_positions(totals: StepTotals, *, mask: Tensor, **_: object) -> Tensor:
        return torch.full(mask.shape, 1 / len(mask))

    out = policy_loss(*case.tensors, loss="grpo", reducer=one_over_all_positions)
    token_mean = policy_loss(*case.tensors, loss="grpo", aggregation="token_mean")
    share = int((case.labels >= 0).sum()) / len(case.labels)
    assert float(out.loss) == pytest.approx(share * float(token_mean.loss), rel=1e-6)
    with pytest.raises(ValueError, match="weight of a trained token is not finite"):
        policy_loss(
            *case.tensors, reducer=lambda totals, *, mask, **_: torch.full(mask.shape, torch.nan)
        )
    with pytest.raises(ValueError, match="one weight per token"):
        policy_loss(*case.tensors, reducer=lambda totals, *, mask, **_: torch.ones(3))
    with pytest.raises(ValueError, match=r"\(got a ndarray: .*Use torch.as_tensor\(weights\), on"):
        policy_loss(*case.tensors, reducer=lambda totals, *, mask, **_: mask.numpy() / 8.0)
    with pytest.raises(ValueError, match=r"^reducer needs .* \(got <lambda>\(totals, mask\)\): "):
        policy_loss(*case.tensors, reducer=lambda totals, mask: mask / 8)


def test_beside_a_reducer_prompt_mean_says_that_steps_hold_whole_groups_and_other_modes_nothing():
    case = make_case()

    def half(totals: StepTotals, *, mask: Tensor, **_: object) -> Tensor:
        return torch.full(mask.shape, 0.5)

    alone = policy_loss(*case.tensors, loss="grpo", reducer=half)
    beside = {"loss": "grpo", "aggregation": "prompt_mean", "reducer": half}
    in_groups = policy_loss(*case.tensors, **beside, group_index=case.group_index)
    assert in_groups.loss == alone.loss
    with pytest.raises(ValueError, match=r"^reducer= beside .* needs group_index"):
        policy_loss(*case.tensors, **beside)
    for mode in ("token_mean", "balanced", "constant"):
        with pytest.raises(ValueError, match=f"^aggregation='{mode}' has no effect beside reduc"):
            policy_loss(*case.tensors, loss="grpo", aggregation=mode, reducer=half)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("position", [-1, 5, 99])
def test_a_trained_token_of_no_document_is_refused(aggregation, position):
    """Document 4 is trained: with a number beyond the documents its tokens would be lost."""
    case = make_case()
    index = torch.where(case.document_index == 4, position, case.document_index)
    fewer = {"group_index": case.group_index[:5], "num_documents": 5}
    options = Choice("gspo", aggregation=aggregation).step(case) | fewer
    with pytest.raises(ValueError, match="num_documents=5"):
        policy_loss(*case.tensors[:4], index, **options)
    assert math.isnan(policy_loss(*case.tensors[:4], index, check_finite=False, **options).loss)


def test_default_bounds_are_those_of_the_papers():
    case = make_case(seed=12)
    bounds = {"grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (None, 4.0)}
    for loss, (low, high) in bounds.items():
        explicit = policy_loss(*case.tensors, loss=loss, epsilon_low=low, epsilon_high=high)
        assert float(policy_loss(*case.tensors, loss=loss).loss) == float(explicit.loss)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weight_sum_equals_the_sum_of_the_weights(aggregation):
    """Six documents in three groups; one document has no trained token."""
    case = make_case()
    totals = count_totals(case)
    mask = case.labels >= 0
    chosen = aggregation_of(aggregation, 5.0 if aggregation == "constant" else None)
    documents = DocumentSums.of_tokens(case.document_index, mask, case.num_documents, None)
    weights = chosen.weights(totals, documents, mask, case.group_index, None, case.advantages)
    assert chosen.weight_sum(totals) == pytest.approx(float(weights.abs().sum()), rel=1e-12)
    expected = {
        "sample_mean": 5 / 6,
        "prompt_mean": 1,
        "token_mean": 1,
        "constant": totals.num_tokens / 30,
    }
    assert chosen.weight_sum(totals) == pytest.approx(expected[aggregation])
    # Five trajectories of six documents: one of two documents has no trained token.
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
    # One of four groups has no trained token: its share is 0, like that of an empty document.
    if aggregation == "prompt_mean":
        totals = StepTotals(
            6, totals.num_tokens, 1, 4, torch.tensor([3, 0, totals.num_tokens - 5, 2])
        )
        assert chosen.weight_sum(totals) == pytest.approx(0.75)


def test_a_reducer_gets_the_trajectories_of_a_step_that_has_them():
    """A reducer without a parameter for them is refused, since it would ignore them."""
    case = make_case()
    received = []

    def sample_mean(
        totals: StepTotals,
        *,
        mask: Tensor,
        document_index: Tensor,
        tokens_per_document: Tensor,
        group_index: Tensor | None,
        trajectory_index: Tensor,
    ) -> Tensor:
        received.append(trajectory_index.tolist())
        counts = totals.tokens_per_trajectory[trajectory_index] * totals.num_trajectories
        return (1 / torch.cat([counts, counts.new_ones(1)]))[document_index]

    options = {"trajectory_index": case.trajectory_index, "num_documents": 6, "loss": "grpo"}
    out = policy_loss(*case.tensors, reducer=sample_mean, **options)
    expected = policy_loss(*case.tensors, **options)
    assert received == [[0, 1, 0, 2, 1, 3]]
    assert float(out.loss) == pytest.approx(float(expected.loss), rel=1e-6)

    def without_trajectories(
        totals: StepTotals,
        *,
        mask: Tensor,
        document_index: Tensor,
        tokens_per_document: Tensor,
        group_index: Tensor | None,
    ) -> Tensor:
        return mask

    with pytest.raises(ValueError, match=r"^reducer needs .*group_index, trajectory_index\) \(got"):
        policy_loss(*case.tensors, reducer=without_trajectories, **options)


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
def test_trajectories_that_do_not_fit_the_documents_are_refused(index, totals, message):
    case = make_case()
    keywords = {}
    if totals is not None:
        keywords["totals"] = count_totals(case, trajectories=totals)
    if index is not None:
        keywords["trajectory_index"] = torch.tensor(index)
    with pytest.raises(ValueError, match=message):
        policy_loss(*case.tensors, num_documents=6, **keywords)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_one_trajectory_for_each_document_changes_no_bit(loss, aggregation):
    case = make_case(seed=12)
    choice = Choice(loss, aggregation=aggregation, metrics="basic")
    results = []
    for trajectories in ({}, {"trajectory_index": torch.tensor([3, 0, 5, 1, 4, 2])}):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(logits, *case.tensors[1:], **choice.step(case) | trajectories)
        out.loss.backward()
        results.append([out.loss.detach(), logits.grad, out.metric_sums.sums])
    assert_equal(*results)
    assert int(out.metrics["num_trajectories"]) == int(out.metrics["num_documents"]) == 6

"""Log-probs over the tokens that truncated sampling has kept: from given logits, by the fused head
and by Triton, and under every cut of a step, against the reference."""

import re
from dataclasses import replace

import pytest
import torch
from builders.cuts import CUTS, assert_matches_reference
from builders.losses import (
    AGGREGATIONS,
    DEVICE,
    LEVELS,
    PENALTIES,
    TEMPERATURE,
    TYPICAL_LOSSES,
    Choice,
    assert_results_close,
    covering,
    make_case,
    make_head_case,
    on_device,
    relative_error,
    result_of,
)

from pgtoolkit import policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.families import Reinforce
from pgtoolkit.kernels import losses

TYPICAL = ("token truncated", "product masked, V", "off policy")
CHOICES = [
    Choice(family, correction, kl, aggregation, level, entropy, kept=True)
    for family, correction, kl, aggregation, level, entropy in covering(
        (*TYPICAL_LOSSES, "gmpo"), (None, *TYPICAL), PENALTIES, AGGREGATIONS, LEVELS, (0.0, 0.3)
    )
]
INPUTS = ("given", "overwritten", "fused")
BY_TRITON = covering(
    ("grpo", "gspo", "reinforce"), INPUTS, (None, "k3", "full_reverse", "full_jsd"), (0.0, 0.3)
)
SPREAD = covering([*CUTS], ("grpo", "gspo"), (None, 3, 100), (0.0, 0.3), ("none", "with_entropy"))


def kept_head_case(seed: int = 6, **options):
    problem = make_head_case(seed, **options)
    return replace(problem, case=problem.case.over_kept())


def test_the_reference_agrees_with_automatic_differentiation():
    """log_softmax of the kept logits alone, position by position, and nothing flows elsewhere."""
    case = make_case(seed=12, temperature=TEMPERATURE).over_kept()
    logits = case.logits.clone().requires_grad_()
    terms = []
    for t in (case.labels >= 0).nonzero()[:, 0].tolist():
        kept = [v for v in case.sampling_kept_ids[t].tolist() if v >= 0]
        kept = kept or list(range(case.logits.shape[1]))
        over_kept = (logits[t, kept] / TEMPERATURE).log_softmax(-1)
        p = over_kept[kept.index(int(case.labels[t]))]
        ratio = (p - case.old_log_probs[t]).exp()
        clipped = ratio.clamp(0.8, 1.25)
        terms.append(-torch.minimum(ratio * case.advantages[t], clipped * case.advantages[t]))
    loss = torch.stack(terms).mean()
    loss.backward()
    by_reference = Choice("grpo", aggregation="token_mean", kept=True).by_reference(case)
    assert abs(by_reference.loss - loss.item()) < 1e-14
    assert relative_error(by_reference.gradient, logits.grad) < 1e-14
    fewer = (case.sampling_kept_ids >= 0).sum(-1) == 3
    assert ((logits.grad[fewer] != 0).sum(-1) <= 3).all()


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("rows", [None, 4, 1000])
def test_it_matches_the_reference(choice, rows, monkeypatch):
    """With every penalty, from given logits and by the fused head in chunks."""
    problem = kept_head_case(6 if rows == 4 else 11)
    if rows is not None:
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
        result = problem.by_fused_head(choice, 3.0, check_finite=rows == 4)
        assert_results_close(result, problem.by_reference(choice), 1e-11)
        return
    case = problem.case
    expected = problem.by_reference(choice, fused=False)
    for impl in ("torch", "reference"):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(
            logits, *case.tensors[1:], impl=impl, temperature=TEMPERATURE, **choice.step(case)
        )
        assert_results_close(result_of(out, [logits], 3.0), expected, 1e-11)


@pytest.mark.parametrize(("family", "inputs", "kl", "entropy"), BY_TRITON, ids=str)
def test_triton_matches_the_reference(family, inputs, kl, entropy, monkeypatch):
    problem = kept_head_case(11, dtype=torch.float32)
    case = problem.case
    choice = Choice(family, None, kl, "token_mean", "with_entropy", entropy, kept=True)
    expected = problem.by_reference(choice, inputs == "fused")
    if inputs == "fused":
        choose = losses.choose_implementation
        monkeypatch.setattr(
            losses, "choose_implementation", lambda _, *others: choose("triton", *others)
        )
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 7)
        result = problem.by_fused_head(choice, 3.0)
    else:
        leaf = case.logits.to(DEVICE, torch.float32).requires_grad_()
        out = policy_loss(
            leaf * 1,
            *[on_device(x, torch.float32) for x in case.tensors[1:]],
            impl="triton",
            temperature=TEMPERATURE,
            overwrite_logits=inputs == "overwritten",
            **choice.step(case, torch.float32, device=DEVICE),
        )
        result = result_of(out, [leaf], 3.0)
    assert_results_close(result, expected, 2e-4, gradient_tolerance=2e-5)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_keeps_small_gradients(dtype, tolerance, impl, monkeypatch):
    problem = kept_head_case(11, dtype=dtype)
    choose = losses.choose_implementation
    monkeypatch.setattr(losses, "choose_implementation", lambda _, *others: choose(impl, *others))
    choice = Choice("grpo", None, None, "token_mean", "basic", kept=True)
    result = problem.by_fused_head(choice, 1.0, fp32_logits=True)
    assert_results_close(result, problem.by_reference(choice), 1e-3, gradient_tolerance=tolerance)


@pytest.mark.parametrize(
    ("cut", "family", "rows", "entropy", "level"),
    SPREAD,
    ids=[", ".join(map(str, row)) for row in SPREAD],
)
def test_it_does_not_depend_on_the_cut_of_a_step(cut, family, rows, entropy, level, monkeypatch):
    """Micro-batches, their order and padding, and ranks that share data, sequence, vocabulary."""
    if rows is not None:
        monkeypatch.setattr(
            losses, "rows_within", lambda memory, columns, dtype: min(rows, columns)
        )
    choice = Choice(family, None, None, "prompt_mean", level, entropy, kept=True)
    assert_matches_reference(CUTS[cut], kept_head_case(), choice, rows is not None)


def test_a_single_kept_token_has_log_prob_zero():
    case = make_case(seed=12, temperature=TEMPERATURE)
    kept = case.labels[:, None].clone()
    for dtype in (torch.float64, torch.float32):
        out = policy_loss(
            case.logits.to(dtype).requires_grad_(),
            case.labels,
            torch.zeros_like(case.old_log_probs),
            *case.tensors[3:],
            sampling_kept_ids=kept,
            loss="grpo",
            metrics="basic",
        )
        out.loss.backward()
        assert (out.log_probs == 0).all()
        assert out.metrics["max_ratio_new_old"] == out.metrics["min_ratio_new_old"] == 1


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ([[1, 0], [-1, 1], [0, 1]], "the label, and each token once (not so in document 0)."),
        ([[0, 0], [1, -1], [2, -1]], "the label, and each token once (not so in document 0)."),
        (
            [[0, 9], [1, -1], [2, -1]],
            "tokens of the vocabulary, which are 0 to 3 (got 9 in document 0).",
        ),
    ],
    ids=["no label", "a token twice", "outside the vocabulary"],
)
def test_what_cannot_be_the_kept_tokens_is_refused(ids, fault):
    keywords = {
        "labels": torch.tensor([0, 1, 2]),
        "old_log_probs": torch.zeros(3),
        "advantages": torch.ones(3),
        "document_index": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(DataError, match=f"^sampling_kept_ids needs {re.escape(fault)}"):
        policy_loss(torch.randn(3, 4), sampling_kept_ids=torch.tensor(ids), **keywords)
    for value, message in (
        (torch.tensor(ids)[:2], "one row of k >= 1 entries per row of logits, 3"),
        (torch.tensor(ids).double(), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(torch.randn(3, 4), sampling_kept_ids=value, **keywords)
    with pytest.raises(ValueError, match="beside sampling_kept_ids"):
        policy_loss(
            torch.randn(3, 4),
            sampling_kept_ids=torch.tensor(ids),
            sampling_top_ids=torch.tensor(ids),
            sampling_top_log_probs=torch.zeros(3, 2),
            loss=Reinforce(score_centering=True),
            **keywords,
        )

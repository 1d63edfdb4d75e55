"""Corrections against worked examples, at their bounds, and refused ones.

test_losses.py compares them with the reference.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.losses import (
    CORRECTIONS,
    Choice,
    count_totals,
    make_case,
    relative_error,
)
from keys.step import sampled_documents
from losses.formulas import of_log_probs as of_family

from pgtoolkit import corrections, kl, linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.config.compose import compose
from pgtoolkit.config.plan import equation
from pgtoolkit.errors import DataError
from pgtoolkit.families import Reinforce
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import CORRECTIONS as KINDS
from pgtoolkit.losses.corrections import Correction, Factors
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.whole_step import with_mean_factor

OF_SAMPLING = [name for name in CORRECTIONS if name != "off policy"]


# A step of three documents with the ratios v = (0.4, 1, 3), (2, 2, 2) and (1, 0.9), whose products
# are 1.2, 8 and 0.9.
V = torch.tensor([0.4, 1.0, 3.0, 2.0, 2.0, 2.0, 1.0, 0.9], dtype=torch.float64)
LOG_V = V.log()
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5, 2.0, 2.0], dtype=torch.float64)
WORKED = [
    (corrections.TokenTruncate(), [0.4, 1, 2, 2, 2, 2, 1, 0.9]),
    (corrections.TokenTruncate(low=0.5, high=1.5), [0.5, 1, 1.5, 1.5, 1.5, 1.5, 1, 0.9]),
    (corrections.TokenMask(), [0, 1, 3, 2, 2, 2, 1, 0.9]),
    (corrections.TokenMask(low=None, high=2.5), [0.4, 1, 0, 2, 2, 2, 1, 0.9]),
    (corrections.SequenceTruncate(), [1.2, 1.2, 1.2, 3, 3, 3, 0.9, 0.9]),
    (
        corrections.SequenceTruncate(mean="geometric", low=1.0, high=1.5),
        [1.2 ** (1 / 3)] * 3 + [1.5] * 3 + [1.0] * 2,
    ),
    (corrections.SequenceMask(), [1.2, 1.2, 1.2, 0, 0, 0, 0.9, 0.9]),
    (corrections.SequenceMask(low=1.0, factor="token"), [0.4, 1, 3, 0, 0, 0, 0, 0]),
    (corrections.SequenceMask(low=1.0, high=9, factor="one"), [1, 1, 1, 1, 1, 1, 0, 0]),
    (
        corrections.SequenceMask(mean="geometric", high=1.9),
        [1.2 ** (1 / 3)] * 3 + [0] * 3 + [0.9**0.5] * 2,
    ),
    (
        corrections.SequenceMask(mean="worst", low=0.4 - 1e-9, high=2.5, factor="one"),
        [0, 0, 0, 1, 1, 1, 1, 1],
    ),
    (
        corrections.SequenceMask(mean="worst", low=0.95, high=3 + 1e-9, factor="token"),
        [0, 0, 0, 2, 2, 2, 0, 0],
    ),
    # k3 is 0.316, 0 and 0.901; 0.307 three times; 0 and 0.005. Its sums are 1.218, 0.921 and 0.005.
    (corrections.TokenMask(measure="k3", threshold=0.31), [0, 1, 0, 1, 1, 1, 1, 1]),
    (corrections.SequenceMask(measure="k3", threshold=0.93), [0, 0, 0, 1, 1, 1, 1, 1]),
    # k2 is 0.42, 0 and 0.603; 0.24 three times; 0 and 0.006. Its means are 0.341, 0.24 and 0.003.
    (
        corrections.SequenceMask(mean="geometric", measure="k2", threshold=0.23),
        [0, 0, 0, 0, 0, 0, 1, 1],
    ),
    (
        corrections.SequenceMask(mean="worst", measure="k2", threshold=0.5),
        [0, 0, 0, 1, 1, 1, 1, 1],
    ),
    # The mean over tokens is 11.3 / 8, that over documents 5.1 / 3.
    (
        corrections.TokenTruncate(normalize="step"),
        [x * 8 / 11.3 for x in (0.4, 1, 2, 2, 2, 2, 1, 0.9)],
    ),
    (
        corrections.SequenceTruncate(normalize="step"),
        [x * 3 / 5.1 for x in (1.2, 1.2, 1.2, 3, 3, 3, 0.9, 0.9)],
    ),
    (
        corrections.SequenceMask(normalize="step"),
        [x * 3 / 2.1 for x in (1.2, 1.2, 1.2, 0, 0, 0, 0.9, 0.9)],
    ),
    (corrections.TokenMask(low=10, high=20, normalize="step"), [0] * 8),
    # The mean of old - new log-prob over the document of negative advantage is -0.07 / 3.
    (corrections.OffPolicyMask(threshold=0.0), [1] * 8),
]
NAMES = [f"{correction.name} {number}" for number, (correction, _) in enumerate(WORKED)]


def of_log_probs(
    correction: Correction,
    family: str = "reinforce",
    v: torch.Tensor | None = LOG_V,
    advantages: torch.Tensor = ADVANTAGES,
    **options: object,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return (loss, gradient by log-probs, metrics) with a correction.

    v: (T,) the old log-probs minus those of the sampler.
    """
    return of_family(family, advantages=advantages, sampling=v, correction=correction, **options)


@pytest.mark.parametrize(("correction", "rho"), WORKED, ids=NAMES)
def test_factors_and_metrics_match_the_worked_examples(correction, rho):
    """With reinforce the derivative is -w_t rho_t A_t, and w_t is 1/8 whatever is masked."""
    _, gradient, metrics = of_log_probs(correction)
    expected = torch.tensor(rho, dtype=torch.float64)
    torch.testing.assert_close(gradient, -expected * ADVANTAGES / 8, rtol=1e-12, atol=1e-15)
    by_document = [sum(rho[:3]) / 3, sum(rho[3:6]) / 3, sum(rho[6:]) / 2]
    assert metrics["correction_factor"] == pytest.approx(sum(by_document) / 3)
    assert metrics["min_correction_factor"] == pytest.approx(min(rho))
    assert metrics["max_correction_factor"] == pytest.approx(max(rho))
    size = sum(rho) ** 2 / (8 * sum(x * x for x in rho)) if sum(rho) else None
    if size is not None:
        assert metrics["correction_effective_sample_size"] == pytest.approx(size)


def test_off_policy_mask_drops_documents_of_negative_advantage_beyond_the_threshold():
    behind = torch.tensor([0.1, 0.6, 0.3, 0.4, 0.5, 0.6, 0.7, 0.5], dtype=torch.float64)
    for threshold, kept in ((0.5, True), (0.4999, False), (0.6, True), (0.0, False)):
        mask = corrections.OffPolicyMask(threshold=threshold)
        # The mean over the second document is 0.5, up to the last bits.
        _, gradient, metrics = of_log_probs(mask, log_ratio=-behind * (1 - 1e-12), v=None)
        rho = torch.tensor([1.0, 1, 1, kept, kept, kept, 1, 1], dtype=torch.float64)
        torch.testing.assert_close(gradient, -rho * ADVANTAGES / 8, rtol=1e-12, atol=1e-15)
        assert metrics["correction_outside_fraction"] == pytest.approx((not kept) / 3)


def test_off_policy_mask_reads_no_old_log_probs_beside_those_of_the_sampler():
    sampled = torch.full((8,), -1.0, dtype=torch.float64)
    behind = torch.tensor([0.1, 0.6, 0.3, 0.4, 0.5, 0.7, 0.7, 0.5], dtype=torch.float64)
    for threshold, kept in ((0.6, 1), (0.5, 0)):
        new = (sampled - behind).requires_grad_()
        log_prob_loss(
            new,
            None,
            ADVANTAGES,
            torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]),
            torch.ones(8),
            loss="reinforce",
            aggregation="token_mean",
            correction=corrections.OffPolicyMask(threshold=threshold),
            sampling_log_probs=sampled,
        ).loss.backward()
        rho = torch.tensor([1, 1, 1, kept, kept, kept, 1, 1])
        torch.testing.assert_close(new.grad, -rho * ADVANTAGES / 8)


@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_a_ratio_equal_to_a_bound_is_within_the_bounds(kind):
    """e^0 is exactly 1, and e^log 2 is made to be exactly 2."""
    x = math.log(2)
    near = torch.tensor([x, math.nextafter(x, 9), math.nextafter(x, 0)], dtype=torch.float64)
    exact = float(near[near.exp() == 2][0])
    for low, high, log_ratio, inside in (
        (1.0, 2.0, 0.0, True),
        (1.0, 2.0, exact, True),
        (1.0, 2.0, -1e-9, False),
        (1.0, 2.0, exact + 1e-9, False),
    ):
        correction = KINDS[kind](low=low, high=high)
        both = torch.full((1,), log_ratio, dtype=torch.float64)
        factors, outside = correction.factors(both, both, both)
        assert bool(outside) is not inside
        if kind.endswith("mask"):
            assert (float(factors) != 0) is inside


@pytest.mark.parametrize("name", ["token_mask", "sequence_mask"])
def test_a_distance_equal_to_its_threshold_stays(name):
    half = torch.full((1,), 0.5, dtype=torch.float64)
    documents = DocumentSums.of_tokens(torch.zeros(1, dtype=torch.int64), half > 0, 1)
    for threshold, stays in ((0.125, 1.0), (0.125 - 1e-15, 0.0)):
        mask = KINDS[name](measure="k2", threshold=threshold)
        for sign in (1, -1):
            assert Factors.of(mask, sign * half, half, documents).values.item() == stays


def test_factors_over_their_mean_do_not_depend_on_how_a_step_was_cut():
    """Through the totals that a run makes, of documents on two ranks, in micro-batches of any
    order; without them a piece is refused."""
    documents = sampled_documents()
    correction = corrections.TokenMask(low=0.75, high=1.3, normalize="step")
    loss = Loss(Reinforce(), aggregation_of("token_mean"), correction=correction)
    old = torch.cat([document.old_log_probs for document in documents]).double()
    sampling = torch.cat([document.sampling_log_probs for document in documents]).double()
    ratio = (old - sampling).exp()
    rho = torch.where((ratio < 0.75) | (ratio > 1.3), 0.0, ratio)
    for order, max_tokens in (([0, 1, 2, 3, 4, 5], 1000), ([3, 0, 5, 4, 1, 2], 20)):
        step = make_step([documents[place] for place in order], max_tokens)
        assert step.totals.mean_factor is None
        totals = with_mean_factor(step, loss.correction, ONE_PROCESS).totals
        assert totals.mean_factor == pytest.approx(float(rho.mean()), rel=1e-12)
    micro_batch = step.micro_batches[0]
    with pytest.raises(ValueError, match=r"needs totals\.mean_factor in a piece of a step"):
        make_objective(micro_batch, step.totals, loss, torch.float64, Ranks())
    with_none = [replace(micro_batch, sampling_log_probs=None)]
    with pytest.raises(DataError, match=r"correction=token_mask needs old_log_probs and sampling_"):
        with_mean_factor(replace(step, micro_batches=with_none), loss.correction, ONE_PROCESS)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_differences_beyond_20_are_clamped_and_counted(correction):
    """A product of many factors is clamped, not each factor."""
    for difference in (-700.0, -25.0, 25.0, 700.0):
        huge = torch.full((8,), difference, dtype=torch.float64)
        changes = {"v": None, "log_ratio": -huge} if correction == "off policy" else {"v": huge}
        loss, gradient, metrics = of_log_probs(CORRECTIONS[correction], **changes)
        assert math.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert metrics["correction_clamped_fraction"] == 1
        assert metrics["max_correction_factor"] <= math.exp(20) * (1 + 1e-12)
        if correction != "off policy":
            limit = math.copysign(20, difference)
            assert metrics["kl_old_sampling"] == pytest.approx(
                math.exp(limit) - limit - 1, rel=1e-9
            )
            assert metrics["max_difference_old_sampling"] == pytest.approx(abs(difference))


@pytest.mark.parametrize("loss", ["grpo", "gspo", "vespo"])
def test_factors_from_a_trainer_act_like_the_same_correction(loss):
    case = make_case(seed=12)
    options = Choice(loss, metrics="none").step(case)
    mask = case.labels >= 0
    log_probs = policy_loss(*case.tensors, **options).log_probs
    v = torch.where(mask, (case.old_log_probs - case.sampling_log_probs).exp(), math.nan)
    by_correction = {
        "correction": corrections.TokenTruncate(high=1e9),
        "sampling_log_probs": case.sampling_log_probs,
    }
    by_factors = {"factors": v}
    without = {"factors": torch.where(mask, 1.0, v)}
    penalty = {"kl": kl.KL("k3", 0.5), "ref_log_probs": case.old_log_probs - 0.1}
    results = []
    for keywords in (by_correction, by_factors, without):
        leaf = log_probs.clone().requires_grad_()
        vectors = leaf, case.old_log_probs, case.advantages, case.document_index, mask
        out = log_prob_loss(*vectors, **options | penalty | keywords)
        out.loss.backward()
        results.append([out.loss.detach(), leaf.grad])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)
    assert relative_error(results[2][1], results[0][1]) > 0.01
    with pytest.raises(DataError, match=r"^factors needs finite numbers .* \(got nan in document"):
        log_prob_loss(*vectors, **options, factors=torch.where(mask, v.roll(1), v))


@pytest.mark.parametrize("correction", [None, *OF_SAMPLING])
@pytest.mark.parametrize("impl", ["torch", "fused_linear"])
def test_the_error_of_a_non_finite_sampling_log_prob_names_the_document(impl, correction):
    for poison in (math.nan, math.inf, -math.inf):
        case = make_case(seed=12)
        sampling = case.sampling_log_probs
        sampling[int((case.document_index == 3).nonzero()[2])] = poison
        inputs = (
            (case.logits,) if impl == "torch" else (case.logits, torch.eye(13, dtype=torch.float64))
        )
        function = policy_loss if impl == "torch" else linear_policy_loss
        keywords = {
            "correction": CORRECTIONS.get(correction),
            "sampling_log_probs": sampling,
            "num_documents": 6,
            "metrics": "basic",
        }
        with pytest.raises(
            DataError,
            match=r"^sampling_log_probs needs finite .* \(got (nan|-?inf) in document 3\)\. Mask",
        ):
            function(*inputs, *case.tensors[1:], loss="grpo", **keywords)
        out = function(*inputs, *case.tensors[1:], loss="grpo", check_finite=False, **keywords)
        assert math.isnan(out.loss)  # as by the reference, also where they are only measured
        measured = out.metrics["kl_old_sampling"], out.metrics["max_difference_old_sampling"]
        assert not all(map(math.isfinite, measured))


def test_merging_pieces_with_different_metrics_is_refused():
    case = make_case()
    keywords = {"totals": count_totals(case), "num_documents": 6, "metrics": "basic"}
    first = policy_loss(*case.tensors, **keywords)
    second = policy_loss(*case.tensors, sampling_log_probs=case.sampling_log_probs, **keywords)
    with pytest.raises(ValueError, match="pieces of one step need the same metrics"):
        first.metric_sums.merge(second.metric_sums)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: corrections.TokenTruncate(high=0), "high needs a number from 1e-06 to"),
        (lambda: corrections.TokenMask(low=6), "low needs a number that is not above high=5"),
        (
            lambda: corrections.SequenceMask(factor="two"),
            "factor='two' is unknown; choose one of document, token, one",
        ),
        (
            lambda: corrections.OffPolicyMask(threshold=math.nan),
            "threshold needs a number from 0 to 20",
        ),
        (lambda: corrections.TokenMask(measure="k3"), "measure='k3' needs threshold, a number"),
        (lambda: corrections.TokenMask(threshold=1), "threshold needs measure='k2' or 'k3'"),
        (
            lambda: corrections.TokenMask(measure="k2", threshold=1, low=0.1),
            "low needs measure='ratio'",
        ),
        (
            lambda: corrections.SequenceMask(measure="k2", threshold=1, factor="token"),
            "measure='k2' needs factor='one'",
        ),
        (
            lambda: corrections.SequenceMask(factor="one", normalize="step"),
            "normalize='step' needs factors that weigh",
        ),
        (
            lambda: policy_loss(*make_case().tensors, correction="token_mask"),
            "needs sampling_log_probs",
        ),
    ],
)
def test_impossible_corrections_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_off_policy_mask_refuses_num_splits_which_other_corrections_allow():
    """It masks complete documents, of which a split holds a part."""
    case = make_case()
    identity = torch.eye(13, dtype=torch.float64)

    def loss(correction: Correction | str, num_splits: int) -> float:
        out = linear_policy_loss(
            case.logits,
            identity,
            *case.tensors[1:],
            loss="grpo",
            impl="torch",
            correction=correction,
            sampling_log_probs=None if correction == "off_policy_mask" else sampling,
            num_splits=num_splits,
            num_documents=6,
        )
        return out.loss.item()

    sampling = case.sampling_log_probs
    with pytest.raises(
        ValueError, match=r"num_splits=2 needs another .* .got 'off_policy_mask'.: it masks"
    ):
        loss("off_policy_mask", num_splits=2)
    masked = CORRECTIONS["product masked, V"]
    assert loss(masked, num_splits=2) == pytest.approx(loss(masked, num_splits=1), rel=1e-12)


def test_check_says_that_a_correction_leaves_penalties_as_they_are():
    """As the reference has it: test_losses.py compares losses that have both."""
    both = ("correction=token_truncate", "entropy.coefficient=0.1", "kl=k3", "kl.coefficient=0.05")
    lines = equation(compose([*both]).config)
    assert lines[0].endswith(": sum over trained tokens of w_t (rho_t l_t + penalties)")
    assert lines[2].startswith("penalties = 0.05 (exp(f_t - p_t) - (f_t - p_t) - 1),  f_t = ")
    assert lines[3].startswith("      - 0.1 H_t,  ")
    [first, *_] = equation(compose(["correction=token_truncate"]).config)
    assert first.endswith(": sum over trained tokens of w_t rho_t l_t")

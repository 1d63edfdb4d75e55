"""The numbers that `pgtk tokens` shows of a token are those of the float64 reference's loops."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from builders.documents import document_of
from builders.losses import CORRECTIONS, EVERY_LOSS, PARAMETERS
from losses import group_formulas
from torch import Tensor

from pgtoolkit.assembly.loss import loss_of
from pgtoolkit.comparison.tokens import _columns
from pgtoolkit.comparison.tokens_losses import CLIPS, loss_on_step
from pgtoolkit.comparison.tokens_step import MadeStep, MeasuredMicroBatch
from pgtoolkit.config.compose import compose
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses import reference, reference_families
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import Correction
from pgtoolkit.losses.families import Reinforce, family_of
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.reference_terms import correction_names
from pgtoolkit.rollouts.steps import make_step

VOCABULARY = 7
LENGTHS = (6, 3, 9, 4)
GROUPS = (0, 0, 1, 1)
CLIPS_OF_LOSS = {
    "grpo": {
        "inside",
        "below, cut",
        "above, cut",
        "above, unchanged",
        "below, unchanged",
        "clamped",
    },
    "gspo": {"inside", "above, cut"},
    "cispo": {"inside", "below, capped", "above, capped"},
    "dppo": {"inside", "above, cut"},
}
"""Kinds of clip that the documents below are known to have under a loss."""
AGGREGATIONS = (
    ("sample_mean", None),
    ("prompt_mean", None),
    ("token_mean", None),
    ("constant", 6.0),
)


@pytest.fixture(scope="module")
def logits() -> list[Tensor]:
    """Return the logits of each document: (tokens, VOCABULARY), float64."""
    return draw_documents()[1]


@pytest.fixture(scope="module")
def made(logits: list[Tensor]) -> MadeStep:
    """Return a step of documents of two prompts, in two micro-batches."""
    step = make_step(draw_documents()[0], max_tokens=14)
    assert len(step.micro_batches) == 2
    sizes = [len(micro_batch.tokens) for micro_batch in step.micro_batches]
    pieces = []
    for micro_batch, rows in zip(step.micro_batches, torch.cat(logits).split(sizes), strict=True):
        log_probs = rows.log_softmax(-1)
        is_trained = micro_batch.labels >= 0
        of_labels = log_probs.gather(1, micro_batch.labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        pieces.append(
            MeasuredMicroBatch(
                micro_batch, of_labels.where(is_trained, 0.0), entropy.where(is_trained, 0.0)
            )
        )
    return MadeStep(step, pieces, {}, True, "", None)


def draw_documents() -> tuple[list[Document], list[Tensor]]:
    """Return documents with the logits of each.

    Their old log-probs are near those of the logits, but for the last document: there a log-ratio
    is clamped.
    """
    draw = torch.Generator().manual_seed(4)
    documents = []
    logits = []
    for number, (length, drift, advantage) in enumerate(
        zip(LENGTHS, (0.02, -0.03, 0.3, 21.0), (0.7, -0.4, -1.1, 0.9), strict=True)
    ):
        tokens = torch.randint(0, VOCABULARY, (length,), generator=draw)
        logits.append(1.5 * torch.randn(length, VOCABULARY, generator=draw, dtype=torch.float64))
        new = logits[number].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        old = (new + drift * torch.randn(length - 1, generator=draw)).float()
        documents.append(
            document_of(
                tokens,
                old_log_probs=old,
                advantages=advantage,
                group=GROUPS[number],
                name=f"{number}",
                sampling_log_probs=old + 0.3 * torch.randn(length - 1, generator=draw),
            )
        )
    return documents, logits


@dataclass
class ByLoops:
    """The reference's result for a step.

    labels, old_log_probs, advantages: of every position. document: index of the document of every
    position. places: the positions of trained tokens.
    """

    result: reference.Reference
    labels: list[int]
    old_log_probs: list[float]
    advantages: list[float]
    document: list[int]
    places: list[int]

    def tokens_beside(self, place: int) -> list[int]:
        """Return the places of the trained tokens of the same document."""
        return [other for other in self.places if self.document[other] == self.document[place]]


def by_loops(
    made: MadeStep,
    logits: list[Tensor],
    family: Family,
    mode: str,
    divisor: float | None = None,
    correction: Correction | None = None,
    **more: object,
) -> ByLoops:
    """Compute the loss of the whole step by the reference. more: further arguments of it."""
    micro_batches = [piece.micro_batch for piece in made.pieces]
    index = []
    num_documents = 0
    for micro_batch in micro_batches:
        index.append(micro_batch.document_index + num_documents)
        num_documents += micro_batch.num_documents

    def column(name: str) -> Tensor:
        return torch.cat([getattr(micro_batch, name) for micro_batch in micro_batches])

    labels = column("labels")
    old_log_probs = column("old_log_probs")
    advantages = column("advantages")
    result = reference.policy_loss(
        torch.cat(logits),
        labels,
        old_log_probs,
        advantages,
        torch.cat(index),
        loss=family.name,
        aggregation=mode,
        divisor=divisor,
        sampling_log_probs=column("sampling_log_probs"),
        group_index=torch.tensor(GROUPS),
        **vars(family),
        **correction_names(correction),
        **more,
    )
    return ByLoops(
        result,
        labels.tolist(),
        old_log_probs.tolist(),
        advantages.tolist(),
        torch.cat(index).tolist(),
        (labels >= 0).nonzero()[:, 0].tolist(),
    )


def family_and_aggregation(loss: str) -> tuple[Family, str, float | None]:
    """Return a family with bounds that some tokens cross, and the mode and divisor of an
    aggregation; each mode has some of the losses."""
    dual_clip = {"dual_clip": 1.7} if loss == "grpo" else {}
    mode, divisor = AGGREGATIONS[EVERY_LOSS.index(loss) % len(AGGREGATIONS)]
    return family_of(loss, **PARAMETERS[loss], **dual_clip), mode, divisor


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("correction", [None, "token masked", "off policy"])
def test_total_coefficient_and_weight_are_those_of_the_reference(made, logits, loss, correction):
    top = {"entropy_top_fraction": 0.4 if correction == "token masked" else None}
    correction = correction and CORRECTIONS[correction]
    family, mode, divisor = family_and_aggregation(loss)
    own = Loss(family, aggregation_of(mode, divisor), correction=correction, **top)
    shown = loss_on_step(made, own)
    expected = by_loops(made, logits, family, mode, divisor, correction, **top)
    assert shown.total == pytest.approx(expected.result.loss, rel=1e-5, abs=1e-7)
    group_of = [GROUPS[document] for document in expected.document]
    for row, t in enumerate(expected.places):
        # The reference's gradient is c_t times the derivative of the log-prob by its own logit.
        label = expected.labels[t]
        slope = 1 - float(torch.cat(logits)[t].softmax(-1)[label])
        assert float(shown.vectors["coefficient"][row]) * slope == pytest.approx(
            float(expected.result.gradient[t, label]), rel=1e-5, abs=1e-9
        )
        tokens_of_group = sum(group_of[other] == group_of[t] for other in expected.places)
        denominator = {
            "sample_mean": len(LENGTHS) * len(expected.tokens_beside(t)),
            "prompt_mean": len(set(GROUPS)) * tokens_of_group,
            "token_mean": len(expected.places),
            "constant": len(LENGTHS) * (divisor or math.nan),
        }[mode]
        assert float(shown.vectors["weight"][row]) == pytest.approx(1 / denominator)


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("correction", [None, "token masked", "off policy"])
def test_ratio_and_clip_are_those_of_the_reference_whatever_the_correction(
    made, logits, loss, correction
):
    correction = correction and CORRECTIONS[correction]
    family, mode, divisor = family_and_aggregation(loss)
    shown = loss_on_step(made, Loss(family, aggregation_of(mode, divisor), correction=correction))
    expected = by_loops(made, logits, family, mode, divisor)
    clips = set()
    for row, t in enumerate(expected.places):
        log_ratio, advantage = log_ratio_and_advantage(family, expected, t)
        ratio = math.exp(min(20, max(-20, log_ratio)))
        assert float(shown.vectors["ratio"][row]) == pytest.approx(ratio, rel=1e-5)
        clip = CLIPS[shown.vectors["clip"][row]]
        clips.add(clip)
        if abs(log_ratio) > 20 and loss != "reinforce":
            assert clip == "clamped"
            continue
        log_prob = expected.result.log_probs[t]
        token_log_ratio = log_prob - expected.old_log_probs[t]
        is_outside, low, high = reference_families.clips_of(
            loss, ratio, log_prob, token_log_ratio, advantage, vars(family)
        )
        side = "inside"
        if is_outside or high:
            is_below = token_log_ratio < 0 if loss in ("gmpo", "dppo") else ratio < 1
            side = "below" if is_below else "above"
        effect = "unchanged" if is_outside else ""
        if low or high:
            gradient = float(expected.result.gradient[t, expected.labels[t]])
            effect = "cut" if gradient == 0 else "capped"
        assert clip == (f"{side}, {effect}" if effect else side)
    assert clips >= CLIPS_OF_LOSS.get(loss, {"inside"})


def leaky(log_ratio, advantages, ratio):
    r = ratio(log_ratio)
    beyond = r.clamp(0.9, 1.1) + 0.1 * (r - r.clamp(0.9, 1.1))
    return -torch.minimum(r * advantages, beyond * advantages), {"bounds": (0.9, 1.1)}


@pytest.mark.parametrize(
    ("family", "effect"),
    [(family_of("grpo", epsilon_high=0.1), "cut"), (FunctionLoss(leaky), "capped")],
)
def test_a_token_of_weight_0_is_not_counted_as_cut_or_capped(made, family, effect):
    left_out = 2
    pieces = []
    is_left_out = []
    for piece in made.pieces:
        tokens = piece.micro_batch
        excluded = torch.tensor([name == f"{left_out}" for name in tokens.names])
        pieces.append(replace(piece, micro_batch=replace(tokens, excluded=excluded)))
        is_left_out += excluded[tokens.document_index[tokens.labels >= 0]].tolist()
    before, after = (
        [
            CLIPS[clip]
            for clip in loss_on_step(step, Loss(family, aggregation_of("token_mean"))).vectors[
                "clip"
            ]
        ]
        for step in (made, replace(made, pieces=pieces))
    )
    expected = [
        clip.replace(effect, "unchanged") if excluded else clip
        for clip, excluded in zip(before, is_left_out, strict=True)
    ]
    assert before != expected
    assert after == expected


def log_ratio_and_advantage(family: Family, expected: ByLoops, place: int) -> tuple[float, float]:
    """Return the log-ratio before its clamp and the advantage that a family compares for a token,
    by plain loops."""
    tokens = expected.tokens_beside(place)
    log_ratios = {t: expected.result.log_probs[t] - expected.old_log_probs[t] for t in tokens}
    if family.scope == "token":
        return log_ratios[place], expected.advantages[place]
    advantage = math.fsum(expected.advantages[t] for t in tokens) / len(tokens)
    if family.name == "gmpo":
        log_ratios = reference_families.token_terms("gmpo", log_ratios, advantage, vars(family))
    total = math.fsum(log_ratios.values())
    return (total if family.scope == "document_sum" else total / len(tokens)), advantage


def test_penalty_and_bonus_are_part_of_a_token_s_share(made, logits):
    pieces = []
    for piece in made.pieces:
        ref = piece.micro_batch.old_log_probs - 0.25
        pieces.append(replace(piece, micro_batch=replace(piece.micro_batch, ref_log_probs=ref)))
    with_reference = MadeStep(made.step, pieces, {}, True, "", None)
    family = family_of("cispo")
    aggregation = aggregation_of("token_mean")
    shown = loss_on_step(
        with_reference, Loss(family, aggregation, kl=KL("k2", 0.3), entropy_coefficient=0.2)
    )
    expected = by_loops(
        with_reference,
        logits,
        family,
        "token_mean",
        kl="k2",
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
        ref_log_probs=torch.cat([piece.micro_batch.ref_log_probs for piece in pieces]),
    )
    assert shown.total == pytest.approx(expected.result.loss, rel=1e-6)
    without_terms = loss_on_step(made, Loss(family, aggregation))
    assert not np.allclose(without_terms.vectors["share"], shown.vectors["share"])


REWARDS = (1.0, 0.0, 0.5, 2.0)


def with_rewards_of(made: MadeStep) -> MadeStep:
    documents = [
        replace(document, reward=reward)
        for document, reward in zip(made.step.documents, REWARDS, strict=True)
    ]
    return replace(made, step=replace(made.step, documents=documents))


def above_median(log_ratio, advantages, step, *, share=0.5):
    """-A lambda of the tokens above the step's quantile"""
    return -advantages * log_ratio * (log_ratio.detach() > step.quantile(log_ratio, share))


def of_groups(new, old, sampled):
    """Return the loss of a step under TPO and prompt_mean, by plain loops."""
    losses = []
    for group in sorted(set(GROUPS)):
        members = [number for number, other in enumerate(GROUPS) if other == group]
        vectors = [[part[number] for number in members] for part in (new, old, sampled)]
        losses.append(group_formulas.tpo(*vectors, [REWARDS[number] for number in members]))
    return sum(losses) / len(losses)


def of_step(new, old, sampled):
    """Return the loss of a step under `above_median` and prompt_mean, by plain loops."""
    ratios = torch.cat(new) - torch.cat(old)
    ordered = sorted(ratios.tolist())
    place = 0.5 * (len(ordered) - 1)
    low = ordered[int(place)]
    median = low + (place - int(place)) * (ordered[min(int(place) + 1, len(ordered) - 1)] - low)
    advantages = (0.7, -0.4, -1.1, 0.9)
    total = 0.0
    for document, (tokens, anchors) in enumerate(zip(new, old, strict=True)):
        beside = [len(new[other]) for other in range(4) if GROUPS[other] == GROUPS[document]]
        for token, anchor in zip(tokens, anchors, strict=True):
            if float(token.detach() - anchor) > median:
                total -= advantages[document] * (token - anchor) / (sum(beside) * len(set(GROUPS)))
    return total


@pytest.mark.parametrize(
    ("loss", "loops"),
    [(family_of("tpo"), of_groups), (FunctionLoss(above_median), of_step)],
    ids=["tpo", "function"],
)
def test_a_loss_of_the_whole_step_has_the_coefficients_of_its_two_passes(made, loss, loops):
    shown = loss_on_step(with_rewards_of(made), Loss(loss, aggregation_of("prompt_mean")))
    parts = {"new": [], "old": [], "sampled": []}
    for piece in made.pieces:
        tokens = piece.micro_batch
        columns = piece.log_probs, tokens.old_log_probs, tokens.sampling_log_probs
        for name, column in zip(parts, columns, strict=True):
            for number in range(tokens.num_documents):
                rows = (tokens.labels >= 0) & (tokens.document_index == number)
                parts[name].append(column[rows].double())
    new = [part.requires_grad_() for part in parts.pop("new")]
    expected = loops(new, **parts)
    gradients = torch.autograd.grad(expected, new, materialize_grads=True)
    coefficients = torch.cat(gradients)
    assert shown.total == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(shown.vectors["coefficient"], coefficients, rtol=1e-6, atol=1e-9)
    assert int((coefficients != 0).sum()) > 5


def test_weights_by_the_sign_of_the_advantage_are_those_of_the_whole_step(made):
    """-A p over tokens, whose coefficient is -w A, with w by plain loops."""
    shown = loss_on_step(made, Loss(family_of("reinforce"), aggregation_of("balanced")))
    documents = []
    for piece in made.pieces:
        tokens = piece.micro_batch
        for number in range(tokens.num_documents):
            rows = (tokens.labels >= 0) & (tokens.document_index == number)
            advantages = tokens.advantages[rows].tolist()
            documents.append((int(tokens.group_index[number]), advantages))
    expected = []
    num_groups = len({group for group, _ in documents})
    for group, advantages in documents:
        beside = [others for number, others in documents if number == group]
        for advantage in advantages:
            same = [others for others in beside if others and others[0] * advantage > 0]
            shares = len(same) / len(beside) / sum(map(len, same)) if same else 0.0
            expected.append(-advantage * shares / num_groups)
    np.testing.assert_allclose(shown.vectors["coefficient"], expected, rtol=1e-5, atol=1e-9)


def test_a_loss_whose_data_the_step_lacks_is_refused(made):
    tpo = Loss(family_of("tpo"), aggregation_of("token_mean"))
    with pytest.raises(ConfigError, match=r"needs rewards of every document .* Use loss=grpo\.$"):
        loss_on_step(made, tpo)
    with pytest.raises(ConfigError, match=r"needs group_id of every document .* Use loss=grpo\.$"):
        loss_on_step(replace(with_rewards_of(made), has_groups=False), tpo)
    family = family_of("cispo")
    with pytest.raises(ConfigError, match="needs group_id"):
        loss_on_step(replace(made, has_groups=False), Loss(family, aggregation_of("prompt_mean")))
    with pytest.raises(ConfigError, match=r"needs ref_log_probs .* Use kl=none\.$"):
        loss_on_step(made, Loss(family, aggregation_of("token_mean"), kl=KL("k2", 0.3)))


def test_score_centering_is_left_out_and_said_to_be(made):
    """Its part of the loss is no number of one token's log-prob."""
    config = compose(["loss=cispo", "loss.score_centering=true"]).config
    [shown] = _columns(made, [([], config)])
    plain = loss_on_step(made, replace(loss_of(config), family=family_of("cispo")))
    assert shown.total == plain.total
    assert "score centering" in shown.lines[-1]


def test_documents_without_old_log_probs_have_no_ratio_and_suit_reinforce_alone(made):
    documents = [replace(document, old_log_probs=None) for document in made.step.documents]
    step = make_step(documents, max_tokens=14)
    pieces = [
        MeasuredMicroBatch(micro_batch, piece.log_probs - 30, piece.entropy)
        for micro_batch, piece in zip(step.micro_batches, made.pieces, strict=True)
    ]
    without_old = MadeStep(step, pieces, {}, True, "", None)
    aggregation = aggregation_of("token_mean")
    shown = loss_on_step(without_old, Loss(Reinforce(), aggregation))
    assert "ratio" not in shown.vectors
    assert shown.count("inside") == step.totals.num_tokens
    with pytest.raises(
        ConfigError, match=r"needs old_log_probs .*=reinforce correction=none kl=none\.$"
    ):
        loss_on_step(without_old, Loss(family_of("grpo"), aggregation))
    with pytest.raises(ConfigError, match="needs old_log_probs"):
        loss_on_step(
            without_old, Loss(Reinforce(), aggregation, correction=CORRECTIONS["token masked"])
        )

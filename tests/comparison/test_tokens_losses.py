"""What the page shows of a token is what the reference's loops give."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.losses import CORRECTIONS, EVERY_LOSS, PARAMETERS

from pgtoolkit.batch import Document
from pgtoolkit.comparison.tokens_losses import CLIPS, loss_on_step
from pgtoolkit.comparison.tokens_step import MadeStep, Piece
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import Reinforce, family_of
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.reference_terms import correction_names
from pgtoolkit.rollouts.steps import make_step

VOCABULARY, LENGTHS, GROUPS = 7, (6, 3, 9, 4), (0, 0, 1, 1)
SEEN = {
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
"""What the documents below are known to have of each kind of clip."""
AGGREGATIONS = (
    ("sample_mean", None),
    ("prompt_mean", None),
    ("token_mean", None),
    ("constant", 6.0),
)


@pytest.fixture(scope="module")
def step():
    """(the step in two micro-batches of documents of two prompts, the logits of every position of
    it)."""
    draw = torch.Generator().manual_seed(4)
    documents, logits = [], []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(0, VOCABULARY, (length,), generator=draw)
        own = 1.5 * torch.randn(length, VOCABULARY, generator=draw, dtype=torch.float64)
        new = own.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        # The last document has drifted so far that a log-ratio is clamped.
        drift = torch.tensor([0.02, -0.03, 0.3, 21.0][number])
        old = (new + drift * torch.randn(length - 1, generator=draw)).float()
        advantages = torch.full((length - 1,), (0.7, -0.4, -1.1, 0.9)[number])
        mask, noise = torch.arange(length) > 0, 0.3 * torch.randn(length - 1, generator=draw)
        documents.append(
            Document(
                tokens,
                mask,
                old,
                advantages,
                GROUPS[number],
                f"{number}",
                sampling_log_probs=old + noise,
            )
        )
        logits.append(own)
    made = make_step(documents, max_tokens=14)
    assert len(made.micro_batches) == 2
    by_piece, pieces = torch.cat(logits).split([len(one.tokens) for one in made.micro_batches]), []
    for micro_batch, values in zip(made.micro_batches, by_piece, strict=True):
        spread, trained = values.log_softmax(-1), micro_batch.labels >= 0
        chosen = spread.gather(1, micro_batch.labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(spread.exp() * spread).sum(-1)
        pieces.append(
            Piece(
                micro_batch, torch.where(trained, chosen, 0.0), torch.where(trained, entropy, 0.0)
            )
        )
    return MadeStep(made, pieces, {}, True, "", None), torch.cat(logits)


def by_loops(step, family, mode, divisor, correction=None, **more):
    """The reference of the whole step, and the positions of its trained tokens."""
    made, logits = step
    tokens = [piece.micro_batch for piece in made.pieces]
    first = [0, tokens[0].num_documents]
    index = torch.cat(
        [one.document_index + start for one, start in zip(tokens, first, strict=True)]
    )
    columns = [
        torch.cat([getattr(one, name) for one in tokens])
        for name in ("labels", "old_log_probs", "advantages")
    ]
    sampling = torch.cat([one.sampling_log_probs for one in tokens])
    names = {"loss": family.name, "aggregation": mode, "divisor": divisor, **vars(family)}
    names |= correction_names(correction) | {
        "sampling_log_probs": sampling,
        "group_index": torch.tensor(GROUPS),
    }
    found = reference.policy_loss(logits, *columns, index, **names, **more)
    return found, (columns[0] >= 0).nonzero()[:, 0].tolist(), columns, index.tolist()


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("correction", [None, "token masked", "off policy"])
def test_every_number_is_the_reference_s(step, loss, correction):
    parameters = PARAMETERS[loss] | ({"dual_clip": 1.7} if loss == "grpo" else {})
    correction = correction and CORRECTIONS[correction]
    family, (mode, divisor) = (
        family_of(loss, **parameters),
        AGGREGATIONS[EVERY_LOSS.index(loss) % 4],
    )
    judged = loss_on_step(
        step[0], Loss(family, aggregation_of(mode, divisor), correction=correction)
    )
    found, places, (labels, old, advantages), document = by_loops(
        step, family, mode, divisor, correction
    )
    assert judged.total == pytest.approx(found.loss, rel=1e-5, abs=1e-7)
    uncorrected = by_loops(step, family, mode, divisor)[0].gradient
    seen = set()
    for row, t in enumerate(places):
        vectors = {name: float(values[row]) for name, values in judged.vectors.items()}
        own, y = [u for u in places if document[u] == document[t]], int(labels[t])
        # c_t times the derivative of the log-prob by its own logit is what the reference gives.
        slope = 1 - float(step[1][t].softmax(-1)[y])
        assert vectors["coefficient"] * slope == pytest.approx(
            float(found.gradient[t, y]), rel=1e-5, abs=1e-9
        )
        in_group = sum(GROUPS[document[u]] == GROUPS[document[t]] for u in places)
        denominator = {
            "sample_mean": len(LENGTHS) * len(own),
            "prompt_mean": len(set(GROUPS)) * in_group,
            "token_mean": len(places),
            "constant": len(LENGTHS) * (divisor or math.nan),
        }[mode]
        assert vectors["weight"] == pytest.approx(1 / denominator)
        log_ratio, advantage = over_scope(
            family, own, t, found.log_probs, old.tolist(), advantages.tolist()
        )
        ratio = math.exp(min(20, max(-20, log_ratio)))
        assert vectors["ratio"] == pytest.approx(ratio, rel=1e-5)
        apart, clip = found.log_probs[t] - float(old[t]), CLIPS[judged.vectors["clip"][row]]
        outside, low, high = reference._clips(
            loss, ratio, found.log_probs[t], apart, advantage, **vars(family)
        )
        seen.add(clip)
        if abs(log_ratio) > 20 and loss != "reinforce":
            assert clip == "clamped"
            continue
        side, _, effect = clip.partition(", ")
        below = apart < 0 if loss in ("gmpo", "dppo") else ratio < 1
        assert side == (("below" if below else "above") if outside or high else "inside")
        expected = "unchanged" if outside else ""
        if low or high:
            expected = "cut" if float(uncorrected[t, y]) == 0 else "capped"
        assert effect == expected
    assert seen >= SEEN.get(loss, {"inside"})


def over_scope(family, own, t, new, old, advantages):
    """(log-ratio before the clamp, advantage) that the family looks at, in loops."""
    apart = {u: new[u] - old[u] for u in own}
    mean = math.fsum(advantages[u] for u in own) / len(own)
    if family.scope == "token":
        return apart[t], advantages[t]
    if family.name == "gmpo":
        apart = reference._terms("gmpo", apart, mean, vars(family))
    total = math.fsum(apart.values())
    return (total if family.scope == "document_sum" else total / len(own)), mean


def test_penalty_and_bonus_are_part_of_a_token_s_share(step):
    made, logits = step
    pieces = []
    for piece in made.pieces:
        ref = piece.micro_batch.old_log_probs - 0.25
        pieces.append(replace(piece, micro_batch=replace(piece.micro_batch, ref_log_probs=ref)))
    with_reference = MadeStep(made.step, pieces, {}, True, "", None)
    family, kl = family_of("cispo"), KL("k2", 0.3)
    judged = loss_on_step(
        with_reference, Loss(family, aggregation_of("token_mean"), kl=kl, entropy_coefficient=0.2)
    )
    refs = torch.cat([piece.micro_batch.ref_log_probs for piece in pieces])
    more = {"kl": "k2", "kl_coefficient": 0.3, "entropy_coefficient": 0.2, "ref_log_probs": refs}
    found, *_ = by_loops((with_reference, logits), family, "token_mean", None, **more)
    assert judged.total == pytest.approx(found.loss, rel=1e-6)
    plain = loss_on_step(made, Loss(family, aggregation_of("token_mean")))
    assert not np.allclose(plain.vectors["share"], judged.vectors["share"])
    with pytest.raises(ConfigError, match="needs group_id"):
        loss_on_step(replace(made, has_groups=False), Loss(family, aggregation_of("prompt_mean")))
    with pytest.raises(ConfigError, match=r"needs ref_log_probs .* Use kl=none\.$"):
        loss_on_step(made, Loss(family, aggregation_of("token_mean"), kl=kl))


def test_documents_without_old_log_probs_have_no_ratio(step):
    made, _ = step
    documents = [
        Document(d.tokens, d.loss_mask, None, d.advantages, d.group, d.name)
        for d in made.step.documents
    ]
    bare = make_step(documents, max_tokens=14)
    pieces = [
        Piece(micro_batch, piece.log_probs - 30, piece.entropy)
        for micro_batch, piece in zip(bare.micro_batches, made.pieces, strict=True)
    ]
    made = MadeStep(bare, pieces, {}, True, "", None)
    judged = loss_on_step(made, Loss(Reinforce(), aggregation_of("token_mean")))
    assert "ratio" not in judged.vectors
    assert judged.count("inside") == bare.totals.num_tokens
    with pytest.raises(
        ConfigError, match=r"needs old_log_probs .*=reinforce correction=none kl=none\.$"
    ):
        loss_on_step(made, Loss(family_of("grpo"), aggregation_of("token_mean")))
    with pytest.raises(ConfigError, match="needs old_log_probs"):
        loss_on_step(
            made,
            Loss(Reinforce(), aggregation_of("token_mean"), correction=CORRECTIONS["token masked"]),
        )

"""Data are constants of the loss: no gradient flows into them, and none through them."""

import pytest
import torch
from builders.losses import Case, make_case
from torch import Tensor

from pgtoolkit import from_padded, linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.batch import StepTotals, pack
from pgtoolkit.corrections import TokenTruncate
from pgtoolkit.document import Document
from pgtoolkit.families import Family, Reinforce
from pgtoolkit.kl import KL

CASE = make_case(seed=12)
TRAINED = CASE.labels >= 0
FIRST = {"labels": CASE.labels, "document_index": CASE.document_index}
KEPT = CASE.labels.clamp(min=0)[:, None].expand(-1, 2) - torch.tensor([0, 1])
KEPT = torch.where(KEPT < 0, 12, KEPT)
TOP = {
    "sampling_top_ids": CASE.labels[:, None],
    "sampling_top_log_probs": CASE.old_log_probs[:, None],
}
"""The sampler's likeliest token is the one that it drew."""


def weigh(totals, *, mask, advantages, **_):
    return advantages.abs() / totals.num_tokens


def of_rewards(log_probs, advantages, rewards, group_rewards, sampling_log_probs):
    return -log_probs * (advantages + rewards - group_rewards) * sampling_log_probs.exp()


def of_step(log_probs, advantages, step):
    return -log_probs * (advantages - step.mean(advantages))


class Scaled(Reinforce):
    """A family of one's own that holds a tensor with a gradient."""

    scale: Tensor

    def surrogate(self, log_ratio, advantages, log_probs):
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        return self.scale * losses, self.scale * slope


def family_with(scale: Tensor) -> Family:
    family = Scaled()
    object.__setattr__(family, "scale", scale)
    return family


def ways(case: Case) -> dict:
    """Return the entries: name -> a function of the data that returns (leaf, result)."""
    log_probs = torch.where(TRAINED, case.logits.log_softmax(-1).gather(-1, KEPT)[:, 0], 0.0)
    eye = torch.eye(13, dtype=torch.float64)

    def of_log_probs(**data):
        leaf = log_probs.clone().requires_grad_()
        data.pop("labels")
        return leaf, log_prob_loss(leaf, mask=TRAINED, **data)

    def of_logits(impl):
        def call(**data):
            leaf = case.logits.clone().requires_grad_()
            return leaf, policy_loss(leaf, impl=impl, **data)

        return call

    def of_hidden(impl):
        def call(**data):
            leaf = case.logits.clone().requires_grad_()
            return leaf, linear_policy_loss(leaf, eye, impl=impl, **data)

        return call

    return {
        "log_probs": of_log_probs,
        "logits": of_logits("torch"),
        "reference": of_logits("reference"),
        "fused_linear": of_hidden("fused_linear"),
        "linear": of_hidden("torch"),
    }


PIECE = StepTotals(9, 200, 0, mean_factor=torch.tensor(0.9, dtype=torch.float64))
CHOICES = {
    "clipped, corrected and with penalties": {
        "loss": "grpo",
        "correction": "sequence_truncate",
        "kl": KL("k3", coefficient=0.3),
    },
    "of a document": {"loss": "gspo", "correction": "off_policy_mask"},
    "a mean factor": {
        "loss": "kimi",
        "correction": TokenTruncate(normalize="step"),
        "totals": PIECE,
    },
    "factors and weights of a reducer": {
        "loss": "cispo",
        "reducer": weigh,
        "factors": torch.full((len(TRAINED),), 0.5, dtype=torch.float64),
    },
    "a function": {
        "loss": of_rewards,
        "rewards": torch.arange(float(CASE.num_documents)).double(),
        "group_index": CASE.group_index,
    },
    "coefficients": {
        "loss": of_step,
        "coefficients": torch.linspace(-1, 1, len(TRAINED), dtype=torch.float64),
    },
    "a family of one's own": {"loss": family_with(torch.tensor(2.0, dtype=torch.float64))},
    "score centering": {"loss": Reinforce(score_centering=True), **TOP},
    "kept sets": {"loss": "grpo", "sampling_kept_ids": KEPT},
}
OF_LOGITS = {"score centering", "kept sets"}
COMPLETE = {"clipped, corrected and with penalties", "of a document", "kept sets"}


def data_of(choice: dict, theta: Tensor | None) -> dict:
    """Return the keywords of a call; theta: 1, with a gradient, that all data are multiplied by."""
    data = {
        **FIRST,
        "old_log_probs": CASE.old_log_probs,
        "advantages": CASE.advantages,
        "metrics": "basic",
        **choice,
    }
    names = {*choice}
    if "kl" in choice:
        data["ref_log_probs"] = CASE.ref_log_probs
    if names & {"correction", "rewards", "coefficients"}:
        data["sampling_log_probs"] = CASE.sampling_log_probs
    if theta is None:
        return data
    for name, value in data.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            data[name] = value * theta
    if "totals" in data:
        data["totals"] = StepTotals(9, 200, 0, mean_factor=PIECE.mean_factor * theta)
    if isinstance(data["loss"], Scaled):
        data["loss"] = family_with(data["loss"].scale * theta)
    return data


@pytest.mark.parametrize("name", CHOICES)
def test_data_with_a_gradient_count_as_constants(name):
    for way, call in ways(CASE).items():
        if (way == "log_probs" and name in OF_LOGITS) or (
            way == "reference" and name not in COMPLETE
        ):
            continue
        expected, out = call(**data_of(CHOICES[name], None))
        out.loss.backward()
        theta = torch.ones((), dtype=torch.float64, requires_grad=True)
        leaf, out = call(**data_of(CHOICES[name], theta))
        out.loss.backward()
        assert theta.grad is None, way
        assert torch.equal(leaf.grad, expected.grad), way
        assert expected.grad.abs().sum() > 0, way
        # Metrics that a caller keeps would keep the graph.
        kept = [*out.metrics.values(), out.log_probs, out.metric_sums.sums]
        assert not any(numbers.requires_grad for numbers in kept), way


def test_log_probs_as_their_own_old_ones_train_as_on_policy():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -1.0]], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0], requires_grad=True)
    ones = torch.ones(2, 3)
    arguments = from_padded(
        log_probs=log_probs, old_log_probs=log_probs, advantages=advantages, mask=ones
    )
    log_prob_loss(**arguments, loss="grpo", aggregation="token_mean").loss.backward()
    # Every ratio is 1, and its slope is -A; a mean over 6 tokens.
    assert log_probs.grad.tolist() == [pytest.approx([-1 / 6] * 3), pytest.approx([2 / 6] * 3)]
    assert advantages.grad is None


def test_a_micro_batch_has_no_graph_of_its_documents():
    theta = torch.ones(3, requires_grad=True)
    numbers = dict.fromkeys(
        ("advantages", "old_log_probs", "ref_log_probs", "values", "returns"), -theta
    )
    document = Document(
        tokens=torch.arange(4),
        loss_mask=torch.tensor([False, True, True, True]),
        group=0,
        name="d",
        sampling_top_ids=torch.zeros(3, 1, dtype=torch.int64),
        sampling_top_log_probs=-theta[:, None],
        **numbers,
    )
    micro_batch = pack([document])
    vectors = {name: value for name, value in vars(micro_batch).items() if name in numbers}
    vectors["sampling_top_log_probs"] = micro_batch.sampling_top_log_probs
    assert len(vectors) == 6
    assert [name for name, vector in vectors.items() if vector.requires_grad] == []

"""Each family over groups against plain loops over documents, differentiated by autograd."""

import pytest
import torch
from losses import group_formulas

from pgtoolkit import step_coefficients
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.trial import check_function

LENGTHS = (4, 1, 9, 6, 2, 7, 3)
GROUPS = (0, 1, 0, 2, 1, 0, 2)
SIGNAL = (1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 0.1)
ALIKE = (0.1, 0.3, 0.1, 0.7, 0.3, 0.1, 0.7)
"""Rewards whose means are not exact in floating point."""

CASES = [
    ("tpo", {}),
    ("tpo", {"temperature": 0.3}),
    ("tpo", {"log_prob": "mean"}),
    ("lpo", {}),
    ("lpo", {"divergence": "reverse"}),
    ("lpo", {"scale": "mean"}),
    ("lpo", {"scale": "none", "divergence": "reverse"}),
    ("lpo", {"temperature": 0.4}),
]


def vectors():
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def noise(scale):
        return scale * torch.randn(len(index), generator=generator, dtype=torch.float64)

    old = (-1.5 + noise(0.7)).clamp(max=-1e-3)
    return {
        "log_probs": (old + noise(0.3)).clamp(max=-1e-3),
        "old_log_probs": old,
        "sampling_log_probs": (old + noise(0.2)).clamp(max=-1e-3),
        "document_index": index,
    }


@pytest.mark.parametrize("rewards", [SIGNAL, ALIKE, [-reward for reward in SIGNAL]])
@pytest.mark.parametrize("knows_sampler", [False, True])
@pytest.mark.parametrize(("name", "parameters"), CASES)
def test_value_and_coefficients_are_those_of_loops(name, parameters, knows_sampler, rewards):
    given = vectors()
    index = given["document_index"]
    loss, coefficients, metrics = step_coefficients(
        given["log_probs"],
        given["old_log_probs"],
        torch.zeros_like(given["log_probs"]),
        index,
        torch.ones_like(index, dtype=torch.bool),
        loss=family_of(name, **parameters),
        aggregation="prompt_mean",
        group_index=torch.tensor(GROUPS),
        sampling_log_probs=given["sampling_log_probs"] if knows_sampler else None,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        metrics="basic",
    )
    leaf = given["log_probs"].clone().requires_grad_()
    sampled = given["sampling_log_probs" if knows_sampler else "old_log_probs"]
    expected = 0.0
    for group in range(3):
        members = [document for document in range(len(GROUPS)) if GROUPS[document] == group]
        of_group = getattr(group_formulas, name)(
            [leaf[index == document] for document in members],
            [given["old_log_probs"][index == document] for document in members],
            [sampled[index == document] for document in members],
            [rewards[document] for document in members],
            **parameters,
        )
        expected = expected + of_group / 3
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-10, abs=1e-13)
    torch.testing.assert_close(coefficients, gradient, rtol=1e-9, atol=1e-12)
    assert 1 / 3 < float(metrics["largest_group_probability"]) < 1
    assert "clipped_ratio_fraction" not in metrics


def test_numbers_of_other_sizes_stay_finite():
    """Sums of log-probs of long documents are thousands apart."""
    given = vectors()
    far = given["log_probs"] * 1000
    for name in ("tpo", "lpo"):
        loss, coefficients, _ = step_coefficients(
            far,
            far - 700,
            torch.zeros_like(far),
            given["document_index"],
            torch.ones_like(far, dtype=torch.bool),
            loss=name,
            group_index=torch.tensor(GROUPS),
            rewards=torch.tensor(SIGNAL, dtype=torch.float64),
        )
        assert torch.isfinite(loss)
        assert torch.isfinite(coefficients).all()


@pytest.mark.parametrize("name", ["tpo", "lpo"])
def test_the_trial_passes(name):
    check_function(family_of(name))

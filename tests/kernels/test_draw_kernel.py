"""The Triton kernel that draws tokens, against cumulative probabilities in float64.

Without a GPU it runs under Triton's interpreter.
"""

import math

import pytest
import torch
from builders.losses import DEVICE

from pgtoolkit.kernels.triton_draw import draw_next, draw_tokens


@pytest.mark.parametrize(
    ("vocabulary", "scale", "temperature", "dtype"),
    [
        (12, 2.0, 1.0, torch.float32),
        (8192, 3.0, 0.5, torch.bfloat16),
        (8193, 3.0, 1.0, torch.float16),
        (50_257, 3.0, 0.7, torch.float32),
        (151_936, 3.0, 1.0, torch.bfloat16),
        (151_936, 12.0, 1.5, torch.float32),
    ],
)
def test_the_kernel_draws_where_the_cumulative_probability_exceeds(
    vocabulary, scale, temperature, dtype
):
    """But within rounding of a bound; with the log-prob of the softmax. Rows lie further apart than
    they are long, and the numbers are a column of several."""
    wide = scale * torch.randn(24, vocabulary + 3, generator=torch.Generator().manual_seed(3))
    logits, uniform = (
        wide.to(DEVICE, dtype)[:, :vocabulary],
        ((torch.arange(24).double() * 0.618) % 1).to(DEVICE),
    )
    tokens, log_probs = draw_tokens(
        logits, torch.stack([uniform, 1 - uniform], -1)[:, 0], temperature
    )
    exact = (logits.double() / temperature).log_softmax(-1)
    cumulative = exact.exp().cumsum(-1)
    expected = torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0]
    bounds = cumulative.gather(-1, torch.stack([tokens, expected], -1).amin(-1, keepdim=True))[:, 0]
    assert ((tokens == expected) | ((bounds - uniform).abs() < 1e-6)).all()
    assert (tokens == expected).double().mean() > 0.9
    drawn = exact.gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), drawn, rtol=0, atol=1e-5)


def test_the_kernel_notes_what_it_draws():
    """Three rows that go on of five, at different places; other places stay as they are."""
    generator = torch.Generator().manual_seed(4)
    logits, uniform = (
        torch.randn(3, 40, generator=generator).to(DEVICE),
        torch.rand(5, 6, generator=generator).double(),
    )
    uniform, rows, places = uniform.to(DEVICE), [0, 2, 4], [5, 0, 3]
    positions = torch.tensor([17, 4, 9], device=DEVICE)
    offsets = (
        torch.tensor(
            [6 * row + place for row, place in zip(rows, places, strict=True)], device=DEVICE
        )
        - positions
    )
    tokens, log_probs = (
        torch.full((5, 6), -1, device=DEVICE),
        torch.full((5, 6), 2.0, device=DEVICE),
    )
    following = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    draw_next(logits, uniform, 0.7, tokens, log_probs, offsets, positions, following)
    drawn, of_drawn = draw_tokens(logits, uniform[rows, places], 0.7)
    assert torch.equal(following, drawn)
    assert torch.equal(tokens[rows, places], drawn)
    assert torch.equal(log_probs[rows, places], of_drawn)
    assert positions.tolist() == [18, 5, 10]
    assert (tokens == -1).sum() == (log_probs == 2.0).sum() == 27


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_kernel_draws_no_token_of_probability_zero(uniform):
    """At either end of a block and of the vocabulary, where whole blocks have none, and where they
    vanish."""
    logits = torch.full((4, 20_000), -torch.inf, device=DEVICE)
    logits[0, 100], logits[0, 18_000] = 1.0, 2.0
    logits[1, 9000] = -1e20
    logits[2, 8192:8300], logits[2, 9000] = -150.0, 0.0
    logits[3, 8191], logits[3, 8192] = 0.0, 0.0
    tokens, log_probs = draw_tokens(
        logits, torch.full((4,), uniform, dtype=torch.float64, device=DEVICE), 1.0
    )
    assert tokens.tolist() == [[100, 9000, 9000, 8191], [18_000, 9000, 9000, 8192]][uniform > 0]
    assert log_probs.isfinite().all()


# NaN as an integer, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_kernel_shows_probabilities_that_are_not_finite(value):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[1, 8500] = value
    tokens, log_probs = draw_tokens(
        logits, torch.tensor([0.3, 0.9], dtype=torch.float64, device=DEVICE), 1.0
    )
    assert log_probs.isfinite().tolist() == [True, False]
    assert 0 <= tokens.min() <= tokens.max() < 9000

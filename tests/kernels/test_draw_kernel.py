"""The Triton kernel that draws tokens, against cumulative probabilities in float64.

Without a GPU it runs under Triton's interpreter.
"""

import math

import pytest
import torch
from builders.losses import DEVICE

from pgtoolkit.kernels import triton_draw
from pgtoolkit.kernels.triton_draw import draw_next, draw_next_of_hidden, draw_tokens


@pytest.mark.slow
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
def test_the_first_token_whose_cumulative_probability_exceeds_the_number_is_drawn(
    vocabulary, scale, temperature, dtype
):
    """Within rounding of a bound its neighbour is right too. The log-prob is that of the softmax.

    Both inputs have a stride: rows of logits lie further apart than they are long, and the numbers
    are a column of two.
    """
    wide = scale * torch.randn(24, vocabulary + 3, generator=torch.Generator().manual_seed(3))
    logits = wide.to(DEVICE, dtype)[:, :vocabulary]
    uniform = ((torch.arange(24).double() * 0.618) % 1).to(DEVICE)
    strided_uniform = torch.stack([uniform, 1 - uniform], -1)[:, 0]
    tokens, log_probs = draw_tokens(logits, strided_uniform, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    cumulative = exact.exp().cumsum(-1)
    expected = torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0]
    bounds = cumulative.gather(-1, torch.stack([tokens, expected], -1).amin(-1, keepdim=True))[:, 0]
    assert ((tokens == expected) | ((bounds - uniform).abs() < 1e-6)).all()
    assert (tokens == expected).double().mean() > 0.9
    exact_of_drawn = exact.gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact_of_drawn, rtol=0, atol=1e-5)


def test_draw_next_writes_tokens_and_log_probs_to_their_places_and_advances_the_positions():
    """Three of five rows still draw, each at another place; all other places stay unchanged."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 40, generator=generator).to(DEVICE)
    uniform = torch.rand(5, 6, generator=generator).double().to(DEVICE)
    rows = [0, 2, 4]
    places = [5, 0, 3]
    positions = torch.tensor([17, 4, 9], device=DEVICE)
    flat_places = [6 * row + place for row, place in zip(rows, places, strict=True)]
    offsets = torch.tensor(flat_places, device=DEVICE) - positions
    tokens = torch.full((5, 6), -1, device=DEVICE)
    log_probs = torch.full((5, 6), 2.0, device=DEVICE)
    following = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    draw_next(logits, uniform, 0.7, tokens, log_probs, offsets, positions, following)
    expected_tokens, expected_log_probs = draw_tokens(logits, uniform[rows, places], 0.7)
    assert torch.equal(following, expected_tokens)
    assert torch.equal(tokens[rows, places], expected_tokens)
    assert torch.equal(log_probs[rows, places], expected_log_probs)
    assert positions.tolist() == [18, 5, 10]
    assert (tokens == -1).sum() == (log_probs == 2.0).sum() == 27


def made_for_hidden(monkeypatch, rows: int, vocabulary: int, width: int) -> tuple:
    """Return hidden states, an LM head's weight, random numbers, and a function that makes what
    `draw_next` writes.

    The interpreter multiplies float32, and takes its time for large tiles.
    """
    dtype = torch.bfloat16
    if DEVICE == "cpu":
        dtype = torch.float32
        monkeypatch.setattr(triton_draw, "_TILE", (16, 128, 32))
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(rows, width, generator=generator).to(DEVICE, dtype)
    weight = (0.3 * torch.randn(vocabulary, width, generator=generator)).to(DEVICE, dtype)
    uniform = torch.rand(rows, 4, generator=generator).double().to(DEVICE)

    def state() -> tuple:
        return (
            torch.full((rows, 4), -1, device=DEVICE),
            torch.zeros(rows, 4, device=DEVICE),
            4 * torch.arange(rows, device=DEVICE) - 1,
            torch.full((rows,), 3, device=DEVICE),
            torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        )

    return hidden, weight, uniform, state


@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(1, 64, 32), (20, 1000, 72), (33, 128, 136)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_drawn_from_hidden_states_as_from_their_logits(
    monkeypatch, rows, vocabulary, width, temperature
):
    hidden, weight, uniform, state = made_for_hidden(monkeypatch, rows, vocabulary, width)
    expected = state()
    draw_next(hidden.float() @ weight.float().T, uniform, temperature, *expected)
    drawn = state()
    draw_next_of_hidden(hidden, weight, uniform, temperature, *drawn)
    for actual, right in zip(drawn, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=0, atol=2e-5)
    assert len(drawn[4].unique()) > rows / 2


def test_a_row_of_hidden_states_that_are_not_finite_has_a_log_prob_that_is_not(monkeypatch):
    hidden, weight, uniform, state = made_for_hidden(monkeypatch, 3, 300, 32)
    hidden[1, 5] = math.nan
    _, log_probs, *_, following = drawn = state()
    draw_next_of_hidden(hidden, weight, uniform, 1.0, *drawn)
    assert log_probs[:, 2].isfinite().tolist() == [True, False, True]
    assert 0 <= following.min() <= following.max() < 300


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    """The kernel reads blocks of 8192 tokens. Row 0 has likely tokens in the first block and in the
    last, row 1 a single possible one, row 2 tokens whose probability rounds to 0 before the likely
    one, row 3 two on either side of a block's end."""
    logits = torch.full((4, 20_000), -torch.inf, device=DEVICE)
    logits[0, 100] = 1.0
    logits[0, 18_000] = 2.0
    logits[1, 9000] = -1e20
    logits[2, 8192:8300] = -150.0
    logits[2, 9000] = 0.0
    logits[3, 8191] = 0.0
    logits[3, 8192] = 0.0
    numbers = torch.full((4,), uniform, dtype=torch.float64, device=DEVICE)
    tokens, log_probs = draw_tokens(logits, numbers, 1.0)
    expected = [18_000, 9000, 9000, 8192] if uniform > 0 else [100, 9000, 9000, 8191]
    assert tokens.tolist() == expected
    assert log_probs.isfinite().all()


# NaN as an integer, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_a_logit_that_is_not_finite_has_a_log_prob_that_is_not(value):
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[1, 8500] = value
    uniform = torch.tensor([0.3, 0.9], dtype=torch.float64, device=DEVICE)
    tokens, log_probs = draw_tokens(logits, uniform, 1.0)
    assert log_probs.isfinite().tolist() == [True, False]
    assert 0 <= tokens.min() <= tokens.max() < 9000

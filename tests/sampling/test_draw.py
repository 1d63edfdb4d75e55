"""The draw of a token: its random numbers against SplitMix64 as published, its tokens against a
draw in float64."""

import math

import pytest
import torch
from torch import Tensor

from pgtoolkit.sampling.draw import draw, uniform_numbers

WORD = 2**64


def splitmix64(state: int, count: int) -> list[int]:
    """Return the first outputs of SplitMix64, as its authors define it."""
    words = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % WORD
        words.append(mixed(state))
    return words


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def test_random_numbers_are_those_of_splitmix64():
    # Published outputs of the seed 0.
    assert splitmix64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    rows = [(0, 0), (0, 1), (7, 0), (7, 5), (2**32 - 1, 999)]
    uniform = uniform_numbers(rows, 40)
    assert uniform.dtype == torch.float64
    for (seed, completion), numbers in zip(rows, uniform.tolist(), strict=True):
        start = (mixed(seed) + completion) % WORD
        assert numbers == [(word >> 11) / 2**53 for word in splitmix64(mixed(start), 40)]
    assert uniform_numbers([], 3).shape == (0, 3)


def test_random_numbers_of_a_row_do_not_depend_on_the_other_rows():
    uniform = uniform_numbers([(0, 0), (0, 1), (7, 0), (7, 5)], 40)
    assert torch.equal(uniform_numbers([(7, 0), (7, 5)], 9), uniform[2:, :9])


def draw_in_float64(scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (B,) int64 tokens, and the cumulative probabilities that give them, (B, V)."""
    cumulative = scores.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniform[:, None], right=True)[:, 0], cumulative


@pytest.mark.parametrize(
    ("vocabulary", "scale"), [(12, 2.0), (1000, 3.0), (151_936, 3.0), (151_936, 12.0)]
)
def test_tokens_and_log_probs_are_those_of_a_draw_in_float64(vocabulary, scale):
    """A token may be another one where the random number is within rounding of its bound."""
    logits = scale * torch.randn(60, vocabulary, generator=torch.Generator().manual_seed(3))
    uniform = uniform_numbers([(seed, 0) for seed in range(60)], 1)[:, 0]
    tokens, log_probs = draw(logits, uniform)
    expected, cumulative = draw_in_float64(logits, uniform)
    lower = torch.minimum(tokens, expected)
    bounds = cumulative.gather(-1, lower[:, None])[:, 0]
    is_near_bound = (bounds - uniform).abs() < 1e-6
    assert ((tokens == expected) | is_near_bound).all()
    assert (tokens == expected).double().mean() > 0.9
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=2e-6)


def test_tokens_are_drawn_as_often_as_their_probabilities_say():
    """Chi-squared over the rows of a batch, and over the tokens of a row, is at most four standard
    deviations (6.2) above its 19 degrees of freedom."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    logits = torch.linspace(-3, 1.5, 20)[order]
    probabilities = logits.double().softmax(0)
    count = 100_000
    of_rows = uniform_numbers([(i // 8, i % 8) for i in range(count)], 3)[:, 2]
    of_tokens = uniform_numbers([(5, 1)], count)[0]
    for uniform in (of_rows, of_tokens):
        tokens, _ = draw(logits.expand(count, 20), uniform)
        counts = torch.bincount(tokens, minlength=20).double()
        chi_squared = ((counts - count * probabilities) ** 2 / (count * probabilities)).sum()
        assert chi_squared < 19 + 4 * math.sqrt(38)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_token_of_probability_zero_is_drawn(uniform):
    """Neither at the ends of the vocabulary nor among probabilities too small for a float."""
    logits = torch.full((3, 5000), -torch.inf)
    logits[0, [7, 4000]] = torch.tensor([1.0, 2.0])
    logits[1, 2500] = -1e30
    logits[2, [100, 3000]] = 0.0
    logits[2, 200:300] = -150.0
    tokens, log_probs = draw(logits, torch.full((3,), uniform, dtype=torch.float64))
    expected = [7, 2500, 100] if uniform == 0.0 else [4000, 2500, 3000]
    assert tokens.tolist() == expected
    assert log_probs.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_give_a_log_prob_that_is_not(value):
    logits = torch.zeros(2, 30)
    logits[1, 4] = value
    tokens, log_probs = draw(logits, torch.tensor([0.3, 0.999], dtype=torch.float64))
    assert log_probs.isfinite().tolist() == [True, False]
    assert 0 <= tokens.min() <= tokens.max() < 30
    _, log_probs = draw(torch.full((1, 3), -torch.inf), torch.zeros(1).double())
    assert not log_probs.isfinite().any()

"""verl's own advantages are ours where documents have equal lengths, and differ elsewhere only for
what is whitened over tokens (docs/losses.md has the table)."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pgtoolkit.rollouts.advantages import gdpo, group_advantages, over_batch

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="the extra verl")

NUM_GROUPS = 5
GROUP_SIZE = 4
WIDTH = 12
PROMPT_LENGTH = 3
WEIGHTS = (2.0, -0.5)
EQUAL_LENGTHS_FACTOR = math.sqrt(20 / 19 * (20 * 7 - 1) / (20 * 7))
"""The variance that verl divides by is over n tokens, with n - 1; ours is over n documents, with
n - 1."""


def ours(
    name: str,
    rewards: Sequence[list[float]],
    scores: Sequence[list[float]],
    lengths: Sequence[list[int]],
) -> Tensor:
    """Return our advantages. Each sequence has a list for each group."""
    if name == "gdpo":
        groups = [gdpo(both, WEIGHTS) for both in zip(rewards, scores, strict=True)]
    else:
        groups = [
            group_advantages(name, of_group, group_lengths)
            for of_group, group_lengths in zip(rewards, lengths, strict=True)
        ]
    return torch.tensor(over_batch(name, groups, rewards), dtype=torch.float64).flatten()


@pytest.mark.parametrize(
    "name", ["opo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("equal_lengths", [True, False])
def test_verls_advantages_are_ours_but_for_whitening_over_tokens(name, equal_lengths):
    """opo whitens nothing, so it is the same for all lengths."""
    count = NUM_GROUPS * GROUP_SIZE
    generator = torch.Generator().manual_seed(3)
    rewards, scores = torch.rand(2, count, generator=generator, dtype=torch.float64)
    if equal_lengths:
        lengths = torch.full((count,), 7)
    else:
        lengths = torch.randint(1, WIDTH, (count,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).double()
    token_rewards = torch.zeros(count, WIDTH, dtype=torch.float64)
    token_rewards[torch.arange(count), lengths - 1] = rewards
    options = {
        "index": np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE),
        "config": SimpleNamespace(gamma=1.0),
    }
    if name == "gdpo":
        attention_mask = torch.cat([torch.ones(count, PROMPT_LENGTH), mask], 1).long()
        options["config"] = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [*WEIGHTS]}
        options["non_tensor_batch"] = {"a": rewards.numpy(), "b": scores.numpy()}
        options["batch"] = {
            "prompts": torch.zeros(count, PROMPT_LENGTH),
            "attention_mask": attention_mask,
        }
    function = getattr(verl, f"compute_{name}_outcome_advantage")
    by_token, _ = function(token_rewards, response_mask=mask, **options)
    theirs = (by_token * mask).sum(1) / lengths
    grouped = [
        values.view(NUM_GROUPS, GROUP_SIZE).tolist() for values in (rewards, scores, lengths)
    ]
    expected = ours(name, *grouped)
    if name == "opo" or equal_lengths:
        factor = 1.0 if name == "opo" else EQUAL_LENGTHS_FACTOR
        torch.testing.assert_close(theirs, factor * expected, rtol=1e-5, atol=1e-5)
    else:
        assert (theirs - expected).abs().max() > 0.02

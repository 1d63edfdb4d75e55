"""verl's own advantages against ours, of documents of one length and of several (docs/losses.md has
the table)."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pgtoolkit.rollouts.advantages import gdpo, group_advantages, over_batch

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="the extra verl")

GROUPS, SIZE, WIDTH, PROMPT, WEIGHTS = 5, 4, 12, 3, (2.0, -0.5)
OF_EQUAL_LENGTHS = math.sqrt(20 / 19 * (20 * 7 - 1) / (20 * 7))
"""verl takes n - 1 of the n tokens, we of the documents."""


def ours(name, rewards, scores, lengths):
    parts = (
        [group_advantages(name, *both) for both in zip(rewards, lengths, strict=True)]
        if name != "gdpo"
        else []
    )
    parts = parts or [gdpo(both, WEIGHTS) for both in zip(rewards, scores, strict=True)]
    return torch.tensor(over_batch(name, parts, rewards), dtype=torch.float64).flatten()


@pytest.mark.parametrize(
    "name", ["opo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("equal", [True, False])
def test_verl_has_the_same_but_for_what_it_whitens_over(name, equal):
    draw, count = torch.Generator().manual_seed(3), GROUPS * SIZE
    rewards, scores = torch.rand(2, count, generator=draw, dtype=torch.float64)
    lengths = (
        torch.full((count,), 7) if equal else torch.randint(1, WIDTH, (count,), generator=draw)
    )
    mask = (torch.arange(WIDTH) < lengths[:, None]).double()
    of_last = torch.zeros(count, WIDTH, dtype=torch.float64)
    of_last[torch.arange(count), lengths - 1] = rewards
    more = {"index": np.repeat(np.arange(GROUPS), SIZE), "config": SimpleNamespace(gamma=1.0)}
    if name == "gdpo":
        seen = torch.cat([torch.ones(count, PROMPT), mask], 1).long()
        more["config"] = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [*WEIGHTS]}
        more["non_tensor_batch"] = {"a": rewards.numpy(), "b": scores.numpy()}
        more["batch"] = {"prompts": torch.zeros(count, PROMPT), "attention_mask": seen}
    function = getattr(verl, f"compute_{name}_outcome_advantage")
    theirs = (function(of_last, response_mask=mask, **more)[0] * mask).sum(1) / lengths
    grouped = (values.view(GROUPS, SIZE).tolist() for values in (rewards, scores, lengths))
    expected = ours(name, *grouped)
    if name == "opo" or equal:
        factor = 1.0 if name == "opo" else OF_EQUAL_LENGTHS
        torch.testing.assert_close(theirs, factor * expected, rtol=1e-5, atol=1e-5)
    else:
        assert (theirs - expected).abs().max() > 0.02

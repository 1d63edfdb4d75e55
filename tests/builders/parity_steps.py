"""Steps and configurations for tests of `pgtk parity`, without a run."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from torch import Tensor

from pgtoolkit.comparison.parity import side_of
from pgtoolkit.comparison.parity_step import RecordedStep
from pgtoolkit.comparison.parity_switches import Explanation, TheirSide
from pgtoolkit.rollouts.estimator import Attempt

REWARDS = (0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.3, 0.2, 0.9, 1.0)
"""Of three groups of four, of which the second has no signal."""


_SIDES: dict[str, TheirSide] = {}


def recorded(seed: int = 0) -> RecordedStep:
    """Return a step of random log-probs, far enough from the old ones that every clip acts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (2 + torch.randint(6, (len(REWARDS),), generator=generator)).tolist()

    def noise(size: float) -> Tensor:
        drawn = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
        return size * drawn

    old = -2 + noise(0.5)
    new = old + noise(0.7)
    return RecordedStep(
        attempts=[Attempt(*pair) for pair in zip(REWARDS, lengths, strict=True)],
        groups=[place // 4 for place in range(len(REWARDS))],
        truncated=[place == 2 for place in range(len(REWARDS))],
        advantages=torch.zeros(sum(lengths), dtype=torch.float64),
        new={1.0: new, 0.7: new - 0.1 + noise(0.1)},
        old=old,
        sampling=old + noise(0.3),
        ref=new + noise(0.3),
        entropy=1 + noise(0.1).abs(),
    )


def theirs(folder: Path, trainer: str, **values: object) -> TheirSide:
    """Return the side of a file of TRL or verl. values: by full name, with __ for a dot; of verl
    without `actor_rollout_ref.` for actor and rollout."""
    common: dict[str, object] = {"num_generations": 4, "per_device_train_batch_size": 3}
    common |= {"gradient_accumulation_steps": 2, "num_processes": 2, "max_completion_length": 8}
    if trainer == "verl":
        common = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}
        common |= {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3}
        common |= {"trainer.n_gpus_per_node": 2}
    for name, value in values.items():
        dotted = name.replace("__", ".")
        if trainer == "verl" and dotted.partition(".")[0] in ("actor", "rollout"):
            dotted = f"actor_rollout_ref.{dotted}"
        common[dotted] = value
    path = folder / f"{trainer}.yaml"
    content = yaml.safe_dump(common)
    path.write_text(content)
    if content not in _SIDES:  # translating takes a third of a second
        side = side_of(path)
        assert isinstance(side, TheirSide)
        _SIDES[content] = side
    return _SIDES[content]


def sentences(found: list[Explanation]) -> list[str]:
    return [explanation.sentence for explanation in found]

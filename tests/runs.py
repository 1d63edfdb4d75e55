"""Short real runs for the tests: composed, validated and trained in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validate
from pgtoolkit.rollouts.samplers import TransformersSampler
from pgtoolkit.rollouts.steps import StepLoader
from pgtoolkit.training.build import build
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.train import train

SHORT = (
    "tracking=none",
    "aggregation=constant",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_length=4",
    "task.num_digits=3",
    "model.hidden_size=32",
    "accumulation.docs_per_step=8",
    "accumulation.max_tokens=24",
    "trainer.max_steps=6",
    "trainer.checkpoint_every=1",
    "trainer.keep_checkpoints=99",
)
"""Two steps per batch of rollouts, three micro-batches per step, a checkpoint at each."""

CLOCK = ("time", "tokens_per_second")


def once(*overrides: str) -> list[str]:
    """Of overrides of one key the last, since the command line takes none twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def config_of(*overrides: str) -> DictConfig:
    composed = compose(once(*overrides))
    assert composed.problems == []
    with open_dict(composed.config):
        composed.config.pop("hydra", None)
    return composed.config


def run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    """Train in `folder` with the short settings, `overrides` on top."""
    config = config_of(*SHORT, *overrides)
    assert validate(config).problems == []
    train(config, folder, resume=resume, overrides=list(overrides))
    return folder


def built(*overrides: str) -> tuple[PolicyGradientModule, StepLoader]:
    """A module in float64 with its optimizer, without Lightning's trainer, and its steps."""
    module, loader = build(OmegaConf.to_object(config_of(*overrides)))
    module.double()
    optimizer = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    return module, loader


def sampler_of(loader: StepLoader) -> TransformersSampler:
    """Who writes the completions of these steps."""
    return loader._source._sampler


def metrics_of(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def checkpoint_of(folder: Path, step: int) -> dict:
    return torch.load(folder / "checkpoints" / f"step-{step:06d}.ckpt", weights_only=True)


def state(step, **more):
    """What a checkpoint of that step holds beside weights, with `more`."""
    counts = dict.fromkeys(("num_updates", "num_skipped_steps", "documents_seen"), step)
    return {"format": 1, "step": step, **counts, "data": {}, "random": {}, **more}


def copy_as_of(folder: Path, step: int, to: Path) -> Path:
    """A copy of a run directory as a kill after `step` (and before the next checkpoint) would leave it."""
    shutil.copytree(folder, to)
    for path in (to / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}.ckpt":
            path.unlink()
    return to


def assert_equal(found, expected, where: str = "") -> None:
    """Bitwise equality of nested containers of tensors and plain values."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_equal(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert found == expected, where

"""Short real runs for the tests: composed, validated and trained in this process."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from pgtoolkit.batch import Document
from pgtoolkit.config.compose import compose
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validate
from pgtoolkit.rollouts.steps import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.build import build
from pgtoolkit.training.checkpoint import (
    ADAPTERS,
    CRITIC,
    CRITIC_MOMENTS,
    MOMENTS,
    WEIGHTS,
    list_checkpoints,
    open_tensors,
    read_checkpoint,
    save_checkpoint,
)
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

CLOCK_COLUMNS = (
    *("time", "tokens_per_second", "peak_memory_gb"),
    *("seconds_sampling", "seconds_scoring", "seconds_old_log_probs", "seconds_update"),
)
"""What two runs of the same seeds differ in."""


def last_of_each_key(*overrides: str) -> list[str]:
    """Of overrides of one key the last, since the command line takes none twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def with_model(folder: Path, *overrides: str, of: Sequence[str] = SHORT) -> list[str]:
    """The settings with the model of a Hugging Face folder in the place of the tiny one."""
    kept = [setting for setting in of if not setting.startswith("model.")]
    return [*kept, "model=huggingface", f"model.path={folder}", *overrides]


def config_of(*overrides: str) -> Config:
    composed = compose(last_of_each_key(*overrides))
    assert composed.problems == []
    return composed.config


def run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    """Train in `folder` with the short settings, `overrides` on top."""
    config = config_of(*SHORT, *overrides)
    assert validate(config)[1].problems == []
    train(config, folder, resume=resume, overrides=list(overrides))
    return folder


def module_and_loader(
    *overrides: str, dtype: torch.dtype | None = torch.float64
) -> tuple[PolicyGradientModule, StepLoader]:
    """A module in float64 (None: in its own types) with its optimizer, without Lightning's trainer,
    and its steps."""
    module, loader = build(config_of(*overrides))
    if dtype is not None:
        module.to(dtype)
    optimizer = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    return module, loader


def some_documents(seed=0, lengths=(9, 5, 12, 7, 2, 6, 8)):
    """Documents of the tiny model's vocabulary; the last is all masked, the fifth has a single
    trained token."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i, length in enumerate(lengths):
        mask = torch.arange(length) >= max(1, length // 2)
        if i == len(lengths) - 1:
            mask[:] = False
        documents.append(
            Document(
                tokens=torch.randint(0, 11, (length,), generator=generator),
                loss_mask=mask,
                old_log_probs=(-2.5 + 0.2 * torch.randn(length, generator=generator))[mask],
                advantages=torch.randn(1, generator=generator).expand(int(mask.sum())),
                group=[3, 3, 8, 8, 8, 5, 5][i],
                name=f"document {i}",
            )
        )
    return documents


def sampler_of(loader: StepLoader) -> TransformersSampler:
    """Who writes the completions of these steps."""
    return loader.source.sampler


def metrics_of(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in CLOCK_COLUMNS} for row in rows
    ]


def checkpoint_of(folder: Path, step: int) -> dict:
    return contents_of(folder / "checkpoints" / f"step-{step:06d}")


def contents_of(path: Path) -> dict:
    """All that a checkpoint holds.

    Weights or adapters, and moments, are by name under `model` and `optimizer`; both of a critic
    under `critic`.
    """
    state = read_checkpoint(path) | {"model": {}, "optimizer": {}, "critic": {}}
    del state["path"], state["config"]  # evaluations, for one, are in the latter
    of_critic = ("critic", CRITIC), ("critic", CRITIC_MOMENTS)
    for key, kind in (("model", WEIGHTS), ("model", ADAPTERS), ("optimizer", MOMENTS), *of_critic):
        with open_tensors(path, kind) as files:
            state[key] |= {name: file.get_tensor(name).clone() for name, file in files.items()}
    return state


def checkpoint_state(step, **more):
    """What a checkpoint of that step holds beside weights and moments, with `more`."""
    counts = dict.fromkeys(("num_updates", "num_skipped_steps", "documents_seen"), step)
    data = {"position": 0, "num_steps": step, "source": {}}
    return {"step": step, **counts, "data": data, "config": "{}", **more}


def save_state(folder: Path, state: dict, keep: int = 99, weights: dict | None = None) -> Path:
    """A checkpoint without a model's configuration."""
    return save_checkpoint(folder, state, {WEIGHTS: weights or {}}, lambda folder: None, keep)


def replace_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file of a checkpoint, with a manifest that fits them."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def replace_rows(folder: Path, name: str, rows: list[dict]) -> None:
    """Put other rows into a file of a run, with checkpoints that were saved after them."""
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / name).write_text("".join(lines))
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        step = int(checkpoint.name.removeprefix("step-"))
        until = "".join(
            line for row, line in zip(rows, lines, strict=True) if row["step"] <= step
        ).encode()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["rows"][name] = {"bytes": len(until), "crc32": zlib.crc32(until)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def change_state(checkpoint: Path, **changes) -> None:
    """Other values in a checkpoint's state; a manifest that fits them."""
    found = json.loads((checkpoint / "training" / "state.json").read_text())
    replace_file(checkpoint, "training/state.json", json.dumps(found | changes).encode())


def copy_as_of(folder: Path, step: int, to: Path) -> Path:
    """A copy of a run directory as a kill after `step` (and before the next checkpoint) would leave
    it."""
    shutil.copytree(folder, to)
    for path in list_checkpoints(to / "checkpoints"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    status = json.loads((to / "status.json").read_text())
    (to / "status.json").write_text(
        json.dumps(status | {"state": "running", "step": step, "saved": step})
    )
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

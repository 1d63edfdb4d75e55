"""Short real runs for the tests: composed, validated and trained in this process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from builders.documents import document_of
from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.config.compose import compose
from pgtoolkit.config.schema import Config
from pgtoolkit.config.validate import validate
from pgtoolkit.document import Document
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.runs.declared_metrics import metric_named
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.sampling.samplers import TransformersSampler
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
"""Settings of a short run: two steps for each batch of rollouts, three micro-batches for each step,
a checkpoint after each step."""

CLOCK_COLUMNS = (
    "time",
    "tokens_per_second",
    "peak_memory_gb",
    "seconds_sampling",
    "seconds_scoring",
    "seconds_old_log_probs",
    "seconds_update",
)
"""The metrics in which two runs with the same seeds differ."""


def last_of_each_key(*overrides: str) -> list[str]:
    """Return the last override of each key, since the command line refuses a key given twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def with_model(folder: Path, *overrides: str, of: Sequence[str] = SHORT) -> list[str]:
    """Return the settings with the model of a Hugging Face folder in place of the tiny one."""
    kept = [setting for setting in of if not setting.startswith("model.")]
    return [*kept, "model=huggingface", f"model.path={folder}", *overrides]


def config_of(*overrides: str) -> Config:
    return _composed(os.getcwd(), *last_of_each_key(*overrides))


@functools.cache
def _composed(_: str, *overrides: str) -> Config:
    """Compose a configuration once for each current directory, from which it sees files."""
    composed = compose(list(overrides))
    assert composed.problems == []
    return composed.config


def run(folder: Path, *overrides: str, resume: bool = False) -> Path:
    """Train in `folder` with the settings SHORT and the overrides; return the folder."""
    config = config_of(*SHORT, *overrides)
    assert validate(config)[1].problems == []
    train(config, folder, resume=resume, overrides=list(overrides))
    return folder


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Let the runs of this process call a function after they have recorded a step."""
    append_metrics = RunDirectory.append_metrics

    def append(directory: RunDirectory, number: int, metrics: dict[str, float]) -> None:
        append_metrics(directory, number, metrics)
        if number == step:
            action()

    patch.setattr(RunDirectory, "append_metrics", append)


def module_and_loader(
    *overrides: str, dtype: torch.dtype | None = torch.float64
) -> tuple[PolicyGradientModule, StepLoader]:
    """Return a training module with its optimizer, without Lightning's trainer, and its steps.

    dtype: of the module's weights; None keeps those of the configuration.
    """
    module, loader = build(config_of(*overrides))
    if dtype is not None:
        module.to(dtype)
    (optimizer,), _ = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    return module, loader


def some_documents(
    seed: int = 0, lengths: Sequence[int] = (9, 5, 12, 7, 2, 6, 8)
) -> list[Document]:
    """Return random documents of the tiny model's vocabulary.

    All tokens of the last document are masked; the fifth has a single trained token.
    """
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for i, length in enumerate(lengths):
        mask = torch.arange(length) >= max(1, length // 2)
        if i == len(lengths) - 1:
            mask[:] = False
        documents.append(
            document_of(
                torch.randint(0, 11, (length,), generator=generator),
                mask,
                old_log_probs=(-2.5 + 0.2 * torch.randn(length, generator=generator))[mask],
                advantages=float(torch.randn(1, generator=generator)),
                group=[3, 3, 8, 8, 8, 5, 5][i],
                name=f"document {i}",
            )
        )
    return documents


def sampler_of(loader: StepLoader) -> TransformersSampler:
    """Return the sampler of the completions of these steps."""
    return loader.source.sampler


def metrics_of(folder: Path) -> list[dict]:
    """Return the rows of metrics.jsonl without CLOCK_COLUMNS; every metric must be declared."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [name for row in rows for name in row if metric_named(name) is None] == []
    return [
        {name: value for name, value in row.items() if name not in CLOCK_COLUMNS} for row in rows
    ]


def checkpoint_of(folder: Path, step: int) -> dict:
    return contents_of(folder / "checkpoints" / f"step-{step:06d}")


def contents_of(path: Path) -> dict:
    """Return everything in a checkpoint but its path and its configuration.

    Weights or adapters are under `model`, moments under `optimizer`, both of a critic under
    `critic`, each by the name of the parameter.
    """
    state = read_checkpoint(path) | {"model": {}, "optimizer": {}, "critic": {}}
    del state["path"]
    del state["config"]
    kinds = (
        ("model", WEIGHTS),
        ("model", ADAPTERS),
        ("optimizer", MOMENTS),
        ("critic", CRITIC),
        ("critic", CRITIC_MOMENTS),
    )
    for key, kind in kinds:
        with open_tensors(path, kind) as files:
            state[key] |= {name: file.get_tensor(name).clone() for name, file in files.items()}
    return state


def checkpoint_state(step: int, **more: object) -> dict:
    """Return the state of a checkpoint after a step, without weights and moments, with `more`."""
    counts = dict.fromkeys(("num_updates", "num_skipped_steps", "documents_seen"), step)
    data = {"position": 0, "num_steps": step, "source": {}}
    return {"step": step, **counts, "data": data, "config": "{}", **more}


def save_state(folder: Path, state: dict, keep: int = 99, weights: dict | None = None) -> Path:
    """Save a checkpoint without a model's configuration; return its path."""
    return save_checkpoint(folder, state, {WEIGHTS: weights or {}}, lambda folder: None, keep)


def replace_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace the bytes of a file in a checkpoint, and its entry in the manifest."""
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def replace_rows(folder: Path, name: str, rows: list[dict]) -> None:
    """Replace the rows of a file of a run, and the entries in the manifests of its checkpoints."""
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / name).write_text("".join(lines))
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        step = int(checkpoint.name.removeprefix("step-"))
        until_step = [line for row, line in zip(rows, lines, strict=True) if row["step"] <= step]
        data = "".join(until_step).encode()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        manifest["rows"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def change_state(checkpoint: Path, **changes) -> None:
    """Replace values in a checkpoint's state, and the state's entry in the manifest."""
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    replace_file(checkpoint, "training/state.json", json.dumps(state | changes).encode())


def copy_as_of(folder: Path, step: int, to: Path) -> Path:
    """Copy a run directory as a kill would leave it that came after the checkpoint of `step`."""
    shutil.copytree(folder, to)
    for path in list_checkpoints(to / "checkpoints"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    status = json.loads((to / "status.json").read_text())
    (to / "status.json").write_text(
        json.dumps(status | {"state": "running", "step": step, "saved": step})
    )
    return to


def assert_equal(value: object, expected: object, path: str = "") -> None:
    """Check nested containers of tensors and plain values for equality, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(value, expected), path
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys(), path
        for key in expected:
            assert_equal(value[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected), path
        for number, (item, expected_item) in enumerate(zip(value, expected, strict=True)):
            assert_equal(item, expected_item, f"{path}[{number}]")
    else:
        assert value == expected, path

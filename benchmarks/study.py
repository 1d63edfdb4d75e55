"""What the study needs beside pgtk's own commands: starts that travel, runs in little space, and
controls.

    python benchmarks/study.py start CHECKPOINT FOLDER  # rounded to bfloat16, for model.path
    python benchmarks/study.py pack FILE.tar.xz SWEEP...  # what pgtk compare reads of finished runs

An unpacked sweep is compared as before, and `pgtk sweep` goes on with what it lacks. The controls
are functions for `advantage=benchmarks.study.half_shuffled`.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import statistics
import sys
import tarfile
from pathlib import Path

KEPT = (
    "step",
    "time",
    "documents_seen",
    "num_tokens",
    "reward",
    "exact_match",
    "entropy",
    "grad_norm",
    "kl_new_old",
    "effective_sample_size",
    "explained_variance",
)
"""Columns of metrics.jsonl."""

_LIBRARIES = ("torch", "triton", "transformers", "lightning", "numpy")
"""Packages whose versions are kept."""


def half_shuffled(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """GRPO's advantages, of half of the groups in another order: a control that a comparison has to
    find."""
    found = [_grpo(group) for group in rewards]
    for group, draw in zip(found, _draws(rewards, lengths), strict=True):
        if draw.random() < 0.5:
            draw.shuffle(group)
    return found


def random_reward(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """GRPO's advantages of coins that were tossed: a control from which nothing can be learned."""
    pairs = zip(rewards, _draws(rewards, lengths), strict=True)
    return [_grpo([float(draw.random() < 0.5) for _ in group]) for group, draw in pairs]


def right_alone(rewards: list[list[float]], **_) -> list[list[float]]:
    """1 for the policy's own right answers, 0 for wrong ones: supervised training on the former,
    without a baseline."""
    return rewards


def _draws(rewards: list[list[float]], lengths: list[list[int]]) -> list[random.Random]:
    """A generator for each group, by what it holds: advantages may not depend on where in the batch
    it stands."""
    return [random.Random(repr(pair)) for pair in zip(rewards, lengths, strict=True)]


def _grpo(group: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(group), statistics.stdev(group)
    return [(reward - mean) / (deviation + 1e-6) for reward in group]


def start(checkpoint: Path, folder: Path) -> None:
    """A Hugging Face folder with half of the bytes; every run begins with these rounded weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def pack(file: Path, sweeps: list[Path]) -> None:
    """Of every run that is done, or that numbers which were not finite have ended: its
    configuration, where it ran, status, evaluations, and a few columns of its metrics. Paths are
    relative to the current directory, which is where an unpacked sweep goes on. The same runs make
    the same file."""
    with tarfile.open(file, "w:xz" if file.suffix == ".xz" else "w:gz") as packed:
        for status in sorted(status for sweep in sweeps for status in sweep.rglob("status.json")):
            run, said = status.parent, json.loads(status.read_text())
            if said["state"] != "done" and not str(said.get("reason")).startswith("NumericalError"):
                continue
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            short = [{name: _short(row[name]) for name in KEPT if name in row} for row in rows]
            content = {"metrics.jsonl": "".join(json.dumps(row) + "\n" for row in short)}
            if (run / "provenance.json").exists():
                content["provenance.json"] = json.dumps(
                    _machine(json.loads((run / "provenance.json").read_text()))
                )
            content["status.json"] = json.dumps(
                {name: said[name] for name in said if name not in ("host", "pid")}
            )
            for name in ("config.yaml", "overrides.yaml", "evaluations.jsonl"):
                content[name] = (run / name).read_text().replace(f"{Path.cwd()}/", "")
            for name, text in sorted(content.items()):
                entry = tarfile.TarInfo(str(run / name))
                entry.size = len(data := text.encode())
                packed.addfile(entry, io.BytesIO(data))


def _machine(start: dict) -> dict:
    """Of a run's provenance what tells its numbers apart: code, GPU, versions, and when it was
    resumed."""
    kept = {name: start[name] for name in ("time", "python", "gpus") if name in start}
    kept["packages"] = {
        name: start["packages"][name] for name in _LIBRARIES if name in start.get("packages", {})
    }
    kept["git"] = [
        {"commit": one.get("commit"), "diff": _digest(one["diff"])} for one in start.get("git", [])
    ]
    return kept | (
        {"resumed": [_machine(one) for one in start["resumed"]]} if "resumed" in start else {}
    )


def _digest(diff: str) -> str:
    return diff if len(diff) <= 8 else hashlib.sha256(diff.encode()).hexdigest()[:8]


def _short(value: float) -> float:
    return (
        value
        if isinstance(value, int)
        else round(value, 1)
        if value > 1e6
        else float(f"{value:.4g}")
    )


if __name__ == "__main__":
    command, first, *rest = sys.argv[1:]
    if command == "start":
        start(Path(first), Path(rest[0]))
    else:
        pack(Path(first), [Path(one) for one in rest])

"""Do for the study what pgtk's own commands do not: small starts, small archives, and controls.

    python benchmarks/study.py start CHECKPOINT FOLDER  # rounded to bfloat16, for model.path
    python benchmarks/study.py pack FILE.tar.xz SWEEP...  # what pgtk compare reads of finished runs

An unpacked sweep is compared as before, and `pgtk sweep` runs the jobs that it lacks. The controls
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
"""Columns of metrics.jsonl that an archive keeps."""

_PRIVATE = ("host", "pid")
"""Entries of a status that an archive leaves out."""

_LIBRARIES = ("torch", "triton", "transformers", "lightning", "numpy")
"""Packages whose versions are kept."""


def half_shuffled(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """Return GRPO's advantages, in half of the groups in another order.

    It is a control: a comparison has to find the difference.
    """
    advantages = [_grpo(group) for group in rewards]
    for group, draw in zip(advantages, _draws(rewards, lengths), strict=True):
        if draw.random() < 0.5:
            draw.shuffle(group)
    return advantages


def random_reward(
    rewards: list[list[float]], *, lengths: list[list[int]], **_
) -> list[list[float]]:
    """Return GRPO's advantages of tossed coins: a control from which nothing can be learned."""
    pairs = zip(rewards, _draws(rewards, lengths), strict=True)
    return [_grpo([float(draw.random() < 0.5) for _ in group]) for group, draw in pairs]


def right_alone(rewards: list[list[float]], **_) -> list[list[float]]:
    """Return 1 for a right answer and 0 for a wrong one.

    That is supervised training on the policy's own right answers, without a baseline.
    """
    return rewards


def _draws(rewards: list[list[float]], lengths: list[list[int]]) -> list[random.Random]:
    """Return a generator for each group, seeded by its content.

    So its advantages do not depend on where in the batch it stands.
    """
    return [random.Random(repr(pair)) for pair in zip(rewards, lengths, strict=True)]


def _grpo(group: list[float]) -> list[float]:
    mean = statistics.fmean(group)
    deviation = statistics.stdev(group)
    return [(reward - mean) / (deviation + 1e-6) for reward in group]


def start(checkpoint: Path, folder: Path) -> None:
    """Write a Hugging Face folder of weights rounded to bfloat16, with which every run begins."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def pack(file: Path, sweeps: list[Path]) -> None:
    """Write an archive of the sweeps' runs that are done.

    A run that was ended by numbers that were not finite counts, too. Of each run it has the
    configuration, where it ran, status, evaluations, and a few columns of its metrics. Paths are
    relative to the current directory, which is where an unpacked sweep goes on. The same runs make
    the same file.
    """
    with tarfile.open(file, "w:xz" if file.suffix == ".xz" else "w:gz") as packed:
        for path in sorted(path for sweep in sweeps for path in sweep.rglob("status.json")):
            status = json.loads(path.read_text())
            ended_by_numbers = str(status.get("reason")).startswith("NumericalError")
            if status["state"] != "done" and not ended_by_numbers:
                continue
            for name, text in sorted(_content(path.parent, status).items()):
                data = text.encode()
                entry = tarfile.TarInfo(str(path.parent / name))
                entry.size = len(data)
                packed.addfile(entry, io.BytesIO(data))


def _content(run: Path, status: dict) -> dict[str, str]:
    """Return the files that an archive has of a run, by name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    short = [{name: _short(row[name]) for name in KEPT if name in row} for row in rows]
    content = {
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in short),
        "status.json": json.dumps({name: status[name] for name in status if name not in _PRIVATE}),
    }
    provenance = run / "provenance.json"
    if provenance.exists():
        content[provenance.name] = json.dumps(_machine(json.loads(provenance.read_text())))
    for name in ("config.yaml", "overrides.yaml", "evaluations.jsonl"):
        content[name] = (run / name).read_text().replace(f"{Path.cwd()}/", "")
    return content


def _machine(start: dict) -> dict:
    """Return of a run's provenance what tells its numbers apart.

    That is code, GPU, versions, and when it was resumed.
    """
    kept = {name: start[name] for name in ("time", "python", "gpus") if name in start}
    kept["packages"] = {
        name: start["packages"][name] for name in _LIBRARIES if name in start.get("packages", {})
    }
    kept["git"] = [
        {"commit": checkout.get("commit"), "diff": _digest(checkout["diff"])}
        for checkout in start.get("git", [])
    ]
    if "resumed" in start:
        kept["resumed"] = [_machine(resumed) for resumed in start["resumed"]]
    return kept


def _digest(diff: str) -> str:
    return diff if len(diff) <= 8 else hashlib.sha256(diff.encode()).hexdigest()[:8]


def _short(value: float) -> float:
    """Return a number with as many digits as a comparison needs."""
    if isinstance(value, int):
        return value
    return round(value, 1) if value > 1e6 else float(f"{value:.4g}")


if __name__ == "__main__":
    command, first, *rest = sys.argv[1:]
    if command == "start":
        start(Path(first), Path(rest[0]))
    else:
        pack(Path(first), [Path(sweep) for sweep in rest])

"""Make small starts, and small archives of finished runs.

    python -m study.archive start CHECKPOINT FOLDER  # rounded to bfloat16, for model.path
    python -m study.archive pack FILE.tar.xz SWEEP...  # what pgtk compare reads of finished runs

An unpacked sweep is compared as before, and `pgtk sweep` runs the jobs that it lacks.
"""

from __future__ import annotations

import hashlib
import io
import json
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
    "clipped_ratio_fraction",
    "effective_sample_size",
    "explained_variance",
)
"""Columns of metrics.jsonl that an archive keeps."""

KEPT_OF_TUNING = ("step", "time", "documents_seen", "num_tokens", "reward", "grad_norm")
"""Those of runs in a folder with `rates` in its name, which chose a learning rate and no more."""

_PRIVATE = ("host", "pid")
"""Entries of a status that an archive leaves out."""

_LIBRARIES = ("torch", "triton", "transformers", "lightning", "numpy")
"""Packages whose versions are kept."""


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
    part = file.with_suffix(".part")
    with tarfile.open(part, "w:xz" if file.suffix == ".xz" else "w:gz") as packed:
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
    part.replace(file)


def _content(run: Path, status: dict) -> dict[str, str]:
    """Return the files that an archive has of a run, by name."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = KEPT_OF_TUNING if "rates" in run.parent.name else KEPT
    short = [{name: _short(row[name]) for name in kept if name in row} for row in rows]
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

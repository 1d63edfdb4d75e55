"""A working copy with its environment, whose commands are run and whose run directories are
recorded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLOCK = {
    "time",
    "tokens_per_second",
    "peak_memory_gb",
    "seconds",
    "seconds_sampling",
    "seconds_scoring",
    "seconds_old_log_probs",
    "seconds_update",
}
"""Metrics in which two runs of the same seeds differ."""


class Tree:
    """A working copy with its environment in .venv, and a folder to run its commands in."""

    def __init__(self, path: Path, work: Path):
        self.path = path.resolve()
        self.work = work
        self.python = self.path / ".venv/bin/python"
        self.pgtk = self.path / ".venv/bin/pgtk"
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(work),
            "PYTHONHASHSEED": "0",
        }

    def plain(self, text: str) -> str:
        """The text without what differs from place to place and from time to time."""
        text = (
            text.replace(str(self.work), "$WORK")
            .replace(str(self.pgtk), "pgtk")
            .replace(str(self.path), "$TREE")
        )
        text = re.sub(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}", "DATE/TIME", text)
        return text

    def run(self, *words: str, folder: Path | None = None, expect: int | None = 0) -> dict:
        """Run `pgtk` as a process."""
        done = subprocess.run(
            [self.pgtk, *words],
            cwd=folder or self.work,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        result = {
            "status": done.returncode,
            "out": self.plain(done.stdout),
            "err": self.plain(done.stderr),
        }
        if expect is not None and done.returncode != expect:
            print(
                (
                    f"  ! pgtk {' '.join(words)[:150]}: exit status {done.returncode}: "
                    f"{done.stderr[-300:]}"
                ),
                flush=True,
            )
        return result

    def calls(self, commands: dict[str, list[str]]) -> dict[str, dict]:
        """Run many short commands in forks of one process."""
        source = self.work / "calls.in.json"
        target = self.work / "calls.out.json"
        source.write_text(
            json.dumps([{"name": name, "words": words} for name, words in commands.items()])
        )
        subprocess.run(
            [self.python, HERE / "calls.py", source, target],
            cwd=self.work,
            env=self.environment,
            check=True,
        )
        results = json.loads(target.read_text())
        return {
            name: {
                key: self.plain(text) if isinstance(text, str) else text
                for key, text in result.items()
            }
            for name, result in results.items()
        }

    def read(self, kind: str, input: object = None) -> dict:
        """Return the result of `read.py KIND`, which gets the input as JSON."""
        done = subprocess.run(
            [self.python, HERE / "read.py", kind],
            cwd=self.work,
            env=self.environment,
            input=json.dumps(input),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"read.py {kind}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    # What is recorded of a run directory

    def run_record(self, folder: Path) -> dict:
        """Metrics and evaluations without the clock, digests of the weights of every checkpoint,
        names of files."""
        record: dict = {}
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            if (folder / file).exists():
                rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
                record[file] = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows]
        tensors = sorted(folder.glob("checkpoints/*/**/*.safetensors"))
        record["tensors"] = {str(path.relative_to(folder)): digest_of(path) for path in tensors}
        status = json.loads((folder / "status.json").read_text())
        record["status"] = {key: status.get(key) for key in ("state", "step", "saved")}
        return record


def digest_of(path: Path) -> str:
    """Return a digest of the tensors of a safetensors file, with their names.

    Those of a checkpoint's state are numbered as they come, so that their names mean nothing.
    """
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    kinds = {
        "F64": "float64",
        "F32": "float32",
        "BF16": "bfloat16",
        "F16": "float16",
        "I64": "int64",
        "I32": "int32",
        "U8": "uint8",
        "BOOL": "bool",
    }
    contents = []
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        kind = kinds.get(tensor["dtype"], tensor["dtype"])
        label = "" if path.name == "state.safetensors" else name
        described = f"{label} torch.{kind} {tuple(tensor['shape'])} ".encode()
        contents.append(described + data[8 + size + begin : 8 + size + end])
    if path.name == "state.safetensors":
        contents.sort()
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

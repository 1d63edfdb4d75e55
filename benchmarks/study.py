"""What the study needs beside pgtk's own commands: worked solutions, starts that travel, and runs in little space.

    python benchmarks/study.py solutions FILE SEED COUNT    # rows for pgtk experiment=sft, of training's problems
    python benchmarks/study.py start CHECKPOINT FOLDER      # its weights rounded to bfloat16, for model.path
    python benchmarks/study.py pack FILE.tar.gz SWEEP...    # what pgtk compare reads of the finished runs

An unpacked sweep is compared as before, and `pgtk sweep` goes on with what it lacks.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

KEPT = ("step", "time", "documents_seen", "num_tokens", "reward", "exact_match", "entropy", "grad_norm", "kl_new_old")
"""Columns of metrics.jsonl."""


def solutions(file: Path, seed: int, count: int) -> None:
    """A row per problem: prompt, worked answer and end as tokens of the tiny model, trained from the answer on."""
    from pgtoolkit.config.schema import ChainSumTaskConfig
    from pgtoolkit.model.build import character_tokenizer
    from pgtoolkit.tasks.tasks import make_task

    task = make_task(ChainSumTaskConfig("chain_sum", 3, 8), seed)
    tokenizer = character_tokenizer(task.alphabet)
    with file.open("w", encoding="utf-8") as rows:
        for index in range(count):
            prompt = task.prompt(index)
            asked, answered = tokenizer.encode(prompt.text), tokenizer.encode(prompt.answer)
            tokens, trained = [*asked, *answered, tokenizer.eos_token_id], len(answered) + 1
            rows.write(json.dumps({"token_ids": tokens, "loss_mask": [0] * len(asked) + [1] * trained}) + "\n")


def start(checkpoint: Path, folder: Path) -> None:
    """A Hugging Face folder with half of the bytes; every run begins with these rounded weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)


def pack(file: Path, sweeps: list[Path]) -> None:
    """Of every run that is done: configuration, status, evaluations, and a few columns of its metrics."""
    with tarfile.open(file, "w:gz") as packed:
        for status in sorted(status for sweep in sweeps for status in sweep.rglob("status.json")):
            if json.loads(status.read_text())["state"] != "done":
                continue
            run = status.parent
            for name in ("config.yaml", "overrides.yaml", "status.json", "evaluations.jsonl"):
                packed.add(run / name)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            short = [{name: _short(row[name]) for name in KEPT if name in row} for row in rows]
            data = "".join(json.dumps(row) + "\n" for row in short).encode()
            entry = tarfile.TarInfo(str(run / "metrics.jsonl"))
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))


def _short(value: float) -> float:
    return value if isinstance(value, int) or value > 1e6 else float(f"{value:.4g}")


if __name__ == "__main__":
    command, first, *rest = sys.argv[1:]
    if command == "solutions":
        solutions(Path(first), *map(int, rest))
    elif command == "start":
        start(Path(first), Path(rest[0]))
    else:
        pack(Path(first), [Path(one) for one in rest])

"""The problems of the study from scratch: sums modulo 100 with a line of partial sums.

    python -m study.chains outputs/study/chains
    python -m study.chains outputs/study/chains-1 1001   # of another seed, for a start

It writes train.jsonl and held_out.jsonl: the prompt `57+68+21=` with its worked answer
`57+68=25;25+21=46;46`, of which `same_sum` compares what stands after the last semicolon.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

from pgtoolkit.tasks.generated import is_held_out

FEWEST_TERMS = 3
MOST_TERMS = 8
NUM_TRAINING = 100_000
NUM_HELD_OUT = 1024


def same_sum(completion: str, answer: str) -> float:
    """Return 1 for a completion that ends in the sum of the worked answer, else 0."""
    return float(completion.rpartition(";")[2] == answer.rpartition(";")[2])


def write_problems(folder: Path, seed: int = 0) -> None:
    """Write the problems of a seed; a hash of the problem holds out one of eight."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    rows: dict[bool, list[str]] = {False: [], True: []}
    while len(rows[False]) < NUM_TRAINING or len(rows[True]) < NUM_HELD_OUT:
        terms = [draw.randint(10, 99) for _ in range(draw.randint(FEWEST_TERMS, MOST_TERMS))]
        prompt = "+".join(map(str, terms)) + "="
        row = {"prompt": prompt, "answer": worked(terms)}
        rows[is_held_out(prompt)].append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(rows[False][:NUM_TRAINING]))
    (folder / "held_out.jsonl").write_text("".join(rows[True][:NUM_HELD_OUT]))


def worked(terms: list[int]) -> str:
    """Return the partial sums and the sum of the terms, each of two digits."""
    sums = [total % 100 for total in itertools.accumulate(terms)]
    steps = zip(sums, terms[1:], sums[1:], strict=False)
    lines = [f"{before:02}+{term}={total:02};" for before, term, total in steps]
    return f"{''.join(lines)}{sums[-1]:02}"


if __name__ == "__main__":
    write_problems(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)

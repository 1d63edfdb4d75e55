"""What users type who mean something else: each answer ends in what to type, and that is accepted.

typed_words.txt has a line for each: the words after `pgtk check`, and what the answer tells to
type. Words in brackets belong to the command, and are typed with both.
"""

import functools
import re
import shlex
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama

from pgtoolkit.cli import main
from pgtoolkit.config.hydra_command import hydra_arguments
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch import start
from pgtoolkit.launch.check import check, problems


def rows() -> list[tuple[str, str]]:
    """Return (what is typed, what the answer tells to type) for each line."""
    lines = Path(__file__).with_name("typed_words.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" -> ") for line in lines if line and not line.startswith("# ")]
    return [(typed, use) for typed, use in pairs]


CODE = """
def helper(x):
    return x

def squared(log_ratio, advantages):
    return log_ratio * advantages

def weights(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask.double() / totals.num_tokens

def score(completion, answer):
    return 1.0
"""
"""A module of the user's, whose functions are for different keys."""


@pytest.fixture(scope="module")
def named_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the lines name."""
    folder = tmp_path_factory.mktemp("named")
    for name in ("prompts.jsonl", "p=1.jsonl"):
        (folder / name).write_text('{"prompt": "12=", "answer": "21"}\n')
    (folder / "mine.yaml").write_text("defaults: [config, _self_]\nseed: 3\n")
    (folder / "own/experiment").mkdir(parents=True)
    (folder / "named_code.py").write_text(CODE)
    save_with_tokenizer(small_llama(max_position_embeddings=300), folder / "llama")
    accepted.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def current_directory(named_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the files are; nothing is trained there, and nothing sent."""
    monkeypatch.chdir(named_files)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(start, "run_sweep", lambda checked: 0)
    monkeypatch.setattr(start, "_run", lambda run: None)


def problems_of(words: list[str]) -> list[str]:
    """Return the problems that `pgtk check` finds in these words."""
    try:
        args = hydra_arguments(words)
    except ConfigError as error:
        return [str(error)]
    return problems(check(args.overrides, args.multirun))


def to_type(problem: str) -> str:
    """Return what a problem tells to type, the first of several, without the remarks on it."""
    use = problem.rpartition(" Use ")[2].removesuffix(".")
    return re.split(r", or | or |, which | for ", use)[0]


@functools.cache
def accepted(use: str, others: tuple[str, ...]) -> str:
    """Return why what an answer tells to type is refused; empty where it is accepted.

    others: the words of the command that were not refused.
    """
    words = shlex.split(use)
    if words[:2] == ["pgtk", "-m"]:
        others = tuple(word for word in others if word != "-m")
        words = words[1:]
    elif words[0] == "pgtk" or words[0].startswith("--"):
        try:
            return "" if main(words[words[0] == "pgtk" :]) == 0 else f"status of {use}"
        except SystemExit as end:  # of `--help`
            return str(end.code or "")
    return "; ".join(problems_of([*others, *words]))


def wrong_in(table: list[tuple[str, str]]) -> list[str]:
    """Return what is wrong with the answers to the lines of a table."""
    wrong = []
    for typed, expected in table:
        in_brackets, _, refused = typed.rpartition("] ")
        others = shlex.split(in_brackets.lstrip("["))
        found = problems_of([*others, *shlex.split(refused)])
        if not found or to_type(found[0]) != expected:
            wrong.append(f"{typed} -> {expected}: {found}")
            continue
        refusal = accepted(expected, tuple(others))
        if refusal:
            wrong.append(f"{typed} -> {expected} is refused: {refusal}")
    return wrong


def test_each_answer_to_what_is_no_override_tells_what_to_type_and_that_is_accepted():
    table = rows()
    assert len({typed for typed, _ in table}) == len(table) > 400
    assert wrong_in(table[::10]) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 10))
def test_so_do_all_others(part):
    assert wrong_in(rows()[part::10]) == []

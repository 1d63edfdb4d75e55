"""Verifiers: what they accept, what they refuse to be made of."""

import math

import pytest

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks.verifiers import make_verifier


def test_exact_match_ignores_white_space_around():
    verify = make_verifier("exact_match")
    assert verify(" 42\n", "42") == 1.0
    assert verify("4 2", "42") == 0.0
    assert verify("the answer is 42", "42") == 0.0


def test_regular_expression_compares_what_it_captured_last():
    verify = make_verifier("regular_expression", r"answer is (-?\d+)")
    assert verify("the answer is 7, no: the answer is 42.", "42") == 1.0
    assert verify("the answer is 42, no: the answer is 7.", "42") == 0.0
    assert verify("42", "42") == 0.0
    optional = make_verifier("regular_expression", r"x(\d)?")
    assert optional("x", "None") == 0.0


@pytest.mark.parametrize("name", ["no_such_name", "math.no_such_function", "math.pi"])
def test_what_cannot_be_a_verifier(name):
    with pytest.raises(ConfigError, match=f"task.verifier={name} needs a function "):
        make_verifier(name)


def test_a_function_of_yours(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def same_length(completion, answer):\n    return len(completion) == len(answer)\n"
        "def partial(completion, answer):\n    return 0.25\n"
        "def broken(completion, answer):\n    return float('nan') if completion else 10**400\n"
        "def text(completion, answer):\n    return '1.0'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_verifier("my_rewards.same_length")("ab", "cd") == 1.0
    assert make_verifier("my_rewards.same_length")("ab", "cde") == 0.0
    assert make_verifier("my_rewards.partial")("", "") == 0.25
    with pytest.raises(DataError, match="returned nan"):
        make_verifier("my_rewards.broken")("a", "b")
    with pytest.raises(DataError, match="returned 1000"):
        make_verifier("my_rewards.broken")("", "b")
    with pytest.raises(DataError, match=r"returned '1.0'; a verifier returns a bool or a finite number"):
        make_verifier("my_rewards.text")("a", "b")


def test_math_verify():
    pytest.importorskip("math_verify")
    verify = make_verifier("math_verify")
    assert verify("So the result is $\\frac{1}{2}$", "0.5") == 1.0
    assert verify("So the result is $\\frac{1}{3}$", "0.5") == 0.0
    assert math.isfinite(verify("no number at all", "0.5"))

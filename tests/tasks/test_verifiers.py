"""Verifiers: the completions that they accept, and names and results that are refused."""

import math

import pytest

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.tasks.process_pool import NOTHING, Failure
from pgtoolkit.tasks.verifiers import make_verifier


def test_exact_match_ignores_white_space_around_the_answer():
    verify = make_verifier("exact_match")
    assert verify(" 42\n", "42") == 1.0
    assert verify("4 2", "42") == 0.0
    assert verify("the answer is 42", "42") == 0.0


def test_regular_expression_compares_its_last_match():
    verify = make_verifier("regular_expression", r"answer is (-?\d+)")
    assert verify("the answer is 7, no: the answer is 42.", "42") == 1.0
    assert verify("the answer is 42, no: the answer is 7.", "42") == 0.0
    assert verify("42", "42") == 0.0
    optional = make_verifier("regular_expression", r"x(\d)?")
    assert optional("x", "None") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("First 17, then 42.", "42", 1),
        ("It is 42, not 17.", "42", 0),
        ("So $1,234.50.", "1234.5", 1),
        ("1234", "1,234", 1),
        ("1,2", "12", 0),
        ("1,2", "2", 1),
        ("It is -7", "-7", 1),
        ("It is \u22127.", "-7", 1),
        ("9-7", "-7", 0),
        ("9 - 7", "7", 1),
        ("x-7", "7", 1),
        ("(3)-7", "7", 1),
        ("42%", "42 apples", 1),
        ("0.50", ".5", 0),
        ("0.50", "0.5", 1),
        ("1e5", "5", 1),
        ("none", "42", 0),
        ("none", "none", 0),
    ],
)
def test_last_number_compares_the_last_number_of_the_completion(completion, answer, expected):
    assert make_verifier("last_number")(completion, answer) == expected


@pytest.mark.parametrize("name", ["no_such_name", "math.no_such_function", "math.pi"])
def test_a_name_that_is_not_a_function_is_refused(name):
    with pytest.raises(ConfigError, match=f"task.verifier={name} needs a function "):
        make_verifier(name)


def test_a_users_function_gives_scores_and_bad_results_are_refused(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def same_length(completion, answer):\n    return len(completion) == len(answer)\n"
        "def partial(completion, answer):\n    return 0.25\n"
        "def broken(completion, answer):\n    return float('nan') if completion else 10**400\n"
        "def silent(completion, answer):\n    return None\n"
        "def text(completion, answer):\n    return '1.0'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_verifier("my_rewards.same_length")("ab", "cd") == 1.0
    assert make_verifier("my_rewards.same_length")("ab", "cde") == 0.0
    assert make_verifier("my_rewards.partial")("", "") == 0.25
    assert make_verifier("my_rewards.broken")("a", "b") == Failure(NOTHING, "returned nan")
    assert make_verifier("my_rewards.silent")("a", "b") == Failure(NOTHING, "returned None")
    with pytest.raises(DataError, match="returned 1000"):
        make_verifier("my_rewards.broken")("", "b")
    with pytest.raises(
        DataError, match=r"returned '1.0'; a verifier returns a bool or a finite number"
    ):
        make_verifier("my_rewards.text")("a", "b")


def test_math_verify_accepts_an_equal_number():
    pytest.importorskip("math_verify")
    verify = make_verifier("math_verify")
    assert verify("So the result is $\\frac{1}{2}$", "0.5") == 1.0
    assert verify("So the result is $\\frac{1}{3}$", "0.5") == 0.0
    assert math.isfinite(verify("no number at all", "0.5"))


# Answers of every kind in data sets of mathematics, each with a wrong one.
BARE = [
    (r"\frac{14}{3}", r"\frac{3}{14}"),
    (r"-\frac{35}{9}", r"\frac{35}{9}"),
    (r"\dfrac{9}{7}", "9"),
    (r"\tfrac12", "2"),
    (r"\frac 59", "59"),
    ("3/56", "3"),
    (r"2\frac{1}{2}", r"\frac12"),
    (r"\frac{\sqrt{3}}{2}", "3"),
    (r"\frac{x+2}{7}", "7"),
    (r"3\sqrt{2}", "3"),
    (r"\sqrt{51}", "51"),
    (r"\sqrt[3]{2}", r"\sqrt{2}"),
    (r"11\sqrt2", "11"),
    (r"2\sqrt{5}+1", "2"),
    (r"\pi", r"2\pi"),
    (r"\frac{\pi}{6}", "6"),
    ("3.5", "3"),
    (".0000672", "672"),
    ("-7", "7"),
    ("10,080", "10"),
    (r"10,\!080", "80"),
    (r"11,\! 111,\! 111,\! 100", "11"),
    ("1{,}234", "234"),
    (r"\$32,348", "32"),
    (r"\$18.90", "18"),
    ("$36", "35"),
    (r"50\%", "5"),
    ("12.5%", "12"),
    (r"90^\circ", "45"),
    (r"10\text{ cm}", "11"),
    (r"15\mbox{ cm}^2", "2"),
    (r"6 \mathrm{~miles}", "5"),
    ("18 dollars", "81"),
    ("(3,4)", "(4,3)"),
    (r"\left( 3, \frac{\pi}{2} \right)", "3"),
    ("(6,31,-1)", "(6,31,1)"),
    ("(1,2),(3,4)", "(1,2)"),
    ("1,-2", "1"),
    ("-2,1", "-2.1"),
    ("3, 5, 7", "7"),
    (r"\{1, 2\}", "2"),
    ("[-2,7]", "(-2,7)"),
    (r"(-\infty, 0] \cup [2,\infty)", "0"),
    (r"\left[ -2, 5\right)", "5"),
    (r"-5 < x < 3", "3"),
    (r"x \in (-1,2]", "2"),
    (r"1 \pm \sqrt{19}", "1"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "4"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", "5/3"),
    (r"\text{Evelyn}", r"\text{Carla}"),
    (r"\text{(C)}", r"\text{(D)}"),
    (r"\text{June 20}", "20"),
    ("A", "B"),
    ("p - q", "q - p"),
    ("x^2+7x+10", "10"),
    ("6r^2-4r-24", "6"),
    ("y = 2x + 3", "3"),
    ("x=5", "6"),
    ("4x - 3y + 5 = 0", "5"),
    ("2516_8", "2517_8"),
    ("6 - 5i", "5"),
    (r"e^{i\pi/4}", "4"),
    ("2^{10}", "2"),
    (r"1.5 \times 10^8", "10^8"),
    (r"\log_2 3", "3"),
    ("n!", "n"),
    (r"\binom{10}{3}", "3"),
    (r"\infty", r"-\infty"),
    (r"\emptyset", "0"),
    ("3:2", "3"),
    (r"0.\overline{3}", "0"),
    (r"5:30 \text{ p.m.}", "5"),
]


@pytest.mark.parametrize(("answer", "wrong"), BARE, ids=[answer for answer, _ in BARE])
def test_math_verify_reads_answers_without_delimiters(answer, wrong):
    pytest.importorskip("math_verify")
    verify = make_verifier("math_verify")
    assert (
        verify(f"First I tried 17, then 23. So the answer is $\\boxed{{{answer}}}$.", answer) == 1.0
    )
    assert verify(f"As 2 and 3 are known, the answer is \\boxed{{{answer}}}", answer) == 1.0
    assert verify(f"The answer is $\\boxed{{{wrong}}}$.", answer) == 0.0
    assert verify("The answer is $\\boxed{123457}$.", answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", "So it is 3."),
        (r"50\%", r"\boxed{50}", r"\boxed{5}"),
        ("50%", r"So \boxed{50\%}", r"\boxed{50x}"),
        ("50%", r"\boxed{50.0 \%}", r"\boxed{5000\%}"),
        ("12.5%", r"\boxed{12.50\%}", r"\boxed{12.6\%}"),
        ("50", r"so $\boxed{50\%}$ of them", r"\boxed{51\%}"),
        (r"\frac{1}{2}", r"\boxed{50\%}", r"\boxed{5\%}"),
        ("1250%", r"\boxed{1,250\%}", r"\boxed{250\%}"),
        (r"\emptyset", r"\boxed{\varnothing}", r"\boxed{0}"),
        ("18 dollars", r"\boxed{18}", r"\boxed{1}"),
        ("18 dollars an hour", r"\boxed{\$18}", r"\boxed{8}"),
        ("1/2 hour", r"\boxed{\frac12}", r"\boxed{2}"),
        ("5 or 7", r"\boxed{5, 7}", r"\boxed{7}"),
        ("x=5 or x=7", r"\boxed{5, 7}", r"\boxed{7}"),
        (r"$\frac12$", r"\boxed{0.5}", r"\boxed{2}"),
        (r"\(x+1\)", r"$1+x$", r"$1-x$"),
        (r"so \boxed{7}", "7", "8"),
        ("The sum is 40 + 2 = 42.\n#### 42", r"\boxed{42}", r"\boxed{40}"),
    ],
)
def test_math_verify_accepts_other_forms_of_an_answer(answer, right, wrong):
    pytest.importorskip("math_verify")
    verify = make_verifier("math_verify")
    assert verify(right, answer) == 1.0
    assert verify(wrong, answer) == 0.0


DECIDED = [
    # Numbers that differ below the sixth decimal.
    (r"9.1\times 10^{-31}", r"6.63 \times 10^{-34}", 0),
    (r"6.63 \cdot 10^{-34}", r"6.63 \times 10^{-34}", 1),
    ("0.0000001", "0.0000002", 0),
    (r"2\times10^{-7}", "0.0000002", 1),
    ("10^{-20}", "0", 0),
    ("0.000333", r"\frac{1}{3000}", 1),
    ("e^{-50}", "e^{-51}", 0),
    (r"x=2\times10^{-7}", r"x=3\times10^{-7}", 0),
    # Units and bases.
    (r"18 \text{ cents}", "18 dollars", 0),
    (r"1800 \text{ cents}", "18 dollars", 1),
    ("18", "18 dollars", 1),
    (r"50\,\mathrm{mm}", r"5\text{ cm}", 1),
    (r"5\text{ m}", "5 cm", 0),
    (r"6 \text{ grams}", "6 meters", 0),
    (r"2 \text{ hours}", "120 minutes", 1),
    ("101_3", "101_2", 0),
    ("5_{10}", "101_2", 1),
    ("101", "101_2", 1),
    (r"\frac{\pi}{2}", r"90^\circ", 1),
    (r"\frac{\pi}{3}", "90 degrees", 0),
]


@pytest.mark.parametrize(("boxed", "answer", "expected"), DECIDED)
def test_math_verify_compares_small_numbers_units_bases_and_angles(boxed, answer, expected):
    pytest.importorskip("math_verify")
    assert make_verifier("math_verify")(f"It is \\boxed{{{boxed}}}.", answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("First \\boxed{3}\nthen \\boxed{5}", "5", 1),
        ("First \\boxed{3}\nthen \\boxed{5}", "3, 5", 0),
        ("$\\boxed{3}$,\n$\\boxed{5}$", "3, 5", 0),
        ("$\\boxed{3}$ and $\\boxed{5}$", "3, 5", 1),
        ("<think>so \\boxed{3}</think>\\boxed{5}", "5", 1),
        ("<think>so \\boxed{3}</think>\\boxed{5}", "3, 5", 0),
        ("<think>\\boxed{3}</think>The answer is 5", "5", 1),
        ("<think>\\boxed{5}</think>", "5", 0),
        ("<think>\\boxed{5}", "5", 1),
        ("\\boxed{1}\n$$\nx=\\boxed{7}\n$$", "7", 1),
        ("\\boxed{1}\n\\[ \\boxed{ \\{1, 2\\} } \\]", "\\{1,2\\}", 1),
        ("a \\boxed{1}\n\\boxed{\\frac{1}\n{2}}", "0.5", 1),
    ],
)
def test_math_verify_reads_the_last_line_with_boxes_after_the_thoughts(
    completion, answer, expected
):
    pytest.importorskip("math_verify")
    assert make_verifier("math_verify")(completion, answer) == expected

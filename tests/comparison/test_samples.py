"""`pgtk samples`: what it shows of a run's completions, on the terminal and as a page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pgtoolkit.cli import main
from pgtoolkit.comparison import samples as inspected
from pgtoolkit.comparison.samples import (
    best_and_worst,
    chosen_set,
    html,
    kept_by,
    render_samples,
    samples,
)
from pgtoolkit.runs.completion_files import FOLDER, CompletionRow, write_completions
from pgtoolkit.system.legible import legible, lines_of, shortened

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07</script><script>document.title='owned'</script>"
    "\u202eevil\u2028\x9b31m\r\u200b\ufeff"
)


def row(step, name, reward, completion="", **more):
    return CompletionRow(step, name, f"{name}?", completion or f"{name} at {step}", reward, **more)


def write(folder: Path, **sets) -> Path:
    """A run directory with these rows; of an evaluation by step, with `training` the hundred steps
    they lie in."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    for name, rows in sets.items():
        for step in dict.fromkeys(one.step for one in rows):
            file = "steps_000001-000100" if name == "training" else f"evaluation_{name}_{step:06d}"
            own = rows if name == "training" else [one for one in rows if one.step == step]
            write_completions(folder / FOLDER / f"{file}.parquet", own)
    return folder


EVALUATED = [
    *(row(0, name, 0.0) for name in ("a", "a", "b", "b", "c", "c", "d", "d")),
    *(row(50, name, 0.75) for name in ("a", "a", "b", "b", "c", "c", "d", "d")),
    *(row(100, "a", reward) for reward in (1.0, 0.0)),
    *(row(100, "b", reward, f"b with {reward}") for reward in (1.0, 0.75)),
    *(row(100, "c", 0.0, "c still") for _ in range(2)),
    *(row(100, "d", reward, f"d with {reward}") for reward in (0.25, 1.0)),
    row(100, "e", 1.0),
]
TRAINED = [
    row(3, "a", 0.5, version=2, advantage=-0.5, tokens=1),
    row(7, "b", 1.0),
    row(9, "a", 0.25, finish_reason="length"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("run") / "run", held_out=EVALUATED, training=TRAINED)


def test_what_changed_is_told_by_the_mean_reward_of_each_prompt(folder):
    kept = kept_by(folder)
    assert {name: one.steps for name, one in kept.items()} == {
        "held_out": [0, 50, 100],
        "training": [3, 7, 9],
    }
    found = samples(chosen_set(kept, None), count=2)
    assert (found.set, found.step, found.since, found.counts) == ("held_out", 100, 0, (3, 0, 1))
    assert found.rows == EVALUATED[16:]
    assert [(one.after.name, one.means) for one in found.changes] == [
        ("b", (0.0, 0.875)),
        ("d", (0.0, 0.625)),
    ]
    # Of two completions as near to the mean the first.
    assert [(one.before.completion, one.after.completion) for one in found.changes] == [
        ("b at 0", "b with 1.0"),
        ("d at 0", "d with 0.25"),
    ]
    since = samples(chosen_set(kept, "held_out"), 100, 50)
    assert since.counts == (1, 3, 0)
    assert [one.after.name for one in since.changes] == ["c", "a", "b"]
    assert samples(chosen_set(kept, "held_out"), 0).counts == (0, 0, 0)


def test_in_training_a_prompt_that_came_again_changed(folder):
    kept = chosen_set(kept_by(folder), "training")
    found = samples(kept)
    assert (found.step, found.rows, found.counts) == (9, [TRAINED[2]], (0, 1, 0))
    assert (found.changes[0].before, found.changes[0].after) == (TRAINED[0], TRAINED[2])
    assert samples(kept, 7).counts == (0, 0, 0)


@pytest.mark.parametrize(
    ("chosen", "best", "worst"),
    [
        ([1.0, 0.5, 0.0], [1.0], [0.0]),
        ([0.5, 0.5], [0.5], []),
        ([1.0, 0.0, 0.0, 0.0], [1.0], [0.0]),
    ],
)
def test_best_and_worst_are_not_the_same(chosen, best, worst):
    rows = [row(1, f"p{i}", reward) for i, reward in enumerate(chosen)]
    assert [[one.reward for one in part] for part in best_and_worst(rows, 1)] == [best, worst]
    assert all(one.reward < max(chosen) for one in best_and_worst(rows, 9)[1])


def test_the_terminal_shows_the_best_and_the_worst(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert main(["samples", "run", "--count", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "run: held_out, step 100: 9 completions kept of 5 prompts, mean reward of these 0.556"
    )
    assert lines[1] == "Other sets: training (steps 3, 7, 9)"
    assert lines[3:7] == [
        "Best",
        "  1.000  a: 0 tokens, ended by itself, weights of update 0",
        "    prompt      a?",
        "    completion  a at 100",
    ]
    assert lines[9] == "  0.000  a: 0 tokens, ended by itself, weights of update 0"
    assert lines[13:] == [
        (
            "Changed since step 0: 3 prompts better, 0 worse, 1 the same (by mean reward of what "
            "was kept)"
        ),
        "  0.000 -> 0.875  b",
        "    prompt      b?",
        "    step 0      b at 0",
        "    step 100    b with 1.0",
    ]
    assert max(map(len, lines)) <= 100
    assert main(["samples", "run", "--set", "training", "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert (
        "All have reward 0.500; some of them\n  0.500  a: advantage -0.500, 1 token, ended by "
        "itself"
    ) in out
    assert "Changed since step 3: unknown, no prompt was asked twice" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--step", "99"], "--step=99 needs one of steps 0, 50, 100 of held_out (got 99)."),
        (["--since", "100"], "--since=100 needs one of steps 0, 50 of held_out (got 100)."),
        (
            ["--since", "5", "--step", "0"],
            "--since=5 needs a step before 0, which is the first of held_out (got 5).",
        ),
        (["--set", "other"], "--set=other needs one of held_out, training (got other)."),
        (["--count", "0"], "argument --count: '0' is no whole number >= 1"),
    ],
)
def test_what_there_is_not_is_said(folder, capsys, arguments, problem):
    assert main(["samples", str(folder), *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_nothing_that_a_model_wrote_acts_on_the_terminal(tmp_path):
    rows = [row(1, f"{HOSTILE}.jsonl:1", 1.0, HOSTILE, answer=HOSTILE, rewards={HOSTILE: 1.0})]
    rows += [replace(rows[0], step=2, reward=0.0)]
    kept = kept_by(write(tmp_path / "run", training=rows))
    shown = render_samples(samples(kept["training"]), kept, "run", 3, 8)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u202e\ufeff]", shown)
    assert "<U+001B>[2J<U+001B>]0;owned<U+0007></script>" in shown
    assert "evil<U+2028><U+009B>31m<U+000D><U+200B><U+FEFF>" in shown


def test_signs_of_every_script_stay_as_they_are():
    text = "שלום ٣ नमस्ते 漢字 é e\u0301 👩\u200d🔬 a\u00a0b \\n <b>\n\tx"
    assert legible(text) == text


def test_long_texts_are_cut_in_their_middle():
    assert lines_of("ab\ncdefg\n", 4, 9) == ["ab", "cdef", "g", ""]
    assert lines_of("\n".join(map(str, range(100))), 20, 6) == [
        "0",
        "1",
        "2",
        "… 95 more lines …",
        "98",
        "99",
    ]
    assert lines_of("漢字x" * 2, 5, 9) == ["漢字x", "漢字x"]
    assert lines_of("a\tb", 9, 9) == ["a   b"]
    assert shortened("abcdefghi", 6) == "abcd\n… 3 more characters …\nhi"
    assert shortened("abcdef", 6) == "abcdef"


def test_what_nobody_could_score_is_said_to_be_not_scored(tmp_path):
    lost = [row(1, "a", None, "lost"), row(2, "b", None, "lost, too")]
    kept = kept_by(write(tmp_path / "run", training=[*lost, row(2, "a", 0.5), row(2, "c", -1.0)]))
    page = render_samples(samples(kept["training"], since=1), kept, "run", 3, 8)
    assert "1 of these not scored, mean reward of the others -0.250" in page.replace("\n", " ")
    assert re.search(r"Not scored, since scoring failed\n +- +b: ", page)
    assert re.search(r"Best\n  0\.500  a.*Worst\n  -1\.000  c", page, re.DOTALL)
    alone = render_samples(samples(kept["training"], step=1), kept, "run", 3, 8)
    assert "none of these was scored" in alone
    assert [one["reward"] for one in data_of(html([*kept.values()], None, "run", ""))["rows"]] == [
        None,
        None,
        0.5,
        -1,
    ]


def test_equal_completions_of_a_prompt_are_one_on_the_page(tmp_path):
    """At one step and with one reward; texts that are equal but for what is cut out of the middle
    are not."""
    long = ["a" * 5000 + middle + "b" * 5000 for middle in "xyy"]
    rows = [row(1, "p", 1.0, "same")] * 6 + [
        row(1, "p", 0.5, "same"),
        row(2, "p", 1.0, "same"),
        row(1, "q", 1.0, "same"),
    ]
    rows += [row(1, "p", 0.0, text) for text in long]
    kept = kept_by(write(tmp_path / "run", training=rows))
    found = data_of(html([*kept.values()], None, "run", ""))
    assert sorted(one["times"] for one in found["rows"]) == [1, 1, 1, 1, 2, 6]
    assert found["about"] == "run: 12 completions"


def data_of(written):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.S)[1]
    )


def test_the_page_holds_what_was_kept_and_nothing_that_acts(tmp_path, folder, monkeypatch):
    kept = kept_by(folder)
    found = data_of(html([*kept.values()], None, "run", "pgtk samples"))
    every = [one for one in found["rows"] for _ in range(one["times"])]
    assert [(one["set"], one["step"], one["name"], one["reward"]) for one in every] == [
        *(("held_out", one.step, one.name, one.reward) for one in EVALUATED),
        *(("training", one.step, one.name, one.reward) for one in TRAINED),
    ]
    assert found["about"] == "run: 28 completions"
    assert {one["step"] for one in data_of(html([kept["held_out"]], 50, "run", ""))["rows"]} == {50}

    monkeypatch.setattr(inspected, "MOST_COMPLETIONS", 14)
    found = data_of(html([*kept.values()], None, "run", ""))
    assert found["about"] == "run: 10 of 28 completions: all of some prompts, spread evenly"
    assert {one["name"] for one in found["rows"] if one["set"] == "held_out"} == {"a", "e"}

    hostile = [row(1, HOSTILE, float("inf"), HOSTILE + "x" * 9000, answer="@DATA@")]
    written = html(
        [kept_by(write(tmp_path / "run", training=hostile))["training"]],
        None,
        HOSTILE,
        f"{HOSTILE} @DATA@",
    )
    assert written.count("<script") == 2
    assert written.count("</script>") == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u202e\ufeff]", written)
    (only,) = data_of(written)["rows"]
    assert only["reward"] is None
    assert only["answer"] == "@DATA@"
    assert len(only["completion"]) < 8100
    assert "more characters" in only["completion"]

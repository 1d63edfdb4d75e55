"""`pgtk samples` of completions written by hand: which it shows, how rewards changed between two
steps, and that no text of a model acts on the terminal or on the page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.comparison import samples as samples_module
from pgtoolkit.comparison.samples import (
    best_and_worst,
    chosen_set,
    html,
    kept_by,
    render_samples,
    samples,
)
from pgtoolkit.runs.completion_files import FOLDER, CompletionRow, write_completions
from pgtoolkit.system.safe_text import legible, lines_of, shortened

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07</script><script>document.title='owned'</script>"
    "\u202eevil\u2028\x9b31m\r\u200b\ufeff"
)


def row(step: int, name: str, reward: float, completion: str = "", **more: object) -> CompletionRow:
    """Return a completion of the prompt `name`."""
    return CompletionRow(step, name, f"{name}?", completion or f"{name} at {step}", reward, **more)


def write(folder: Path, **sets: list[CompletionRow]) -> Path:
    """Write a run directory with the completions of these sets.

    Those of an evaluation have a file for each step, those of `training` one for all steps.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    for name, rows in sets.items():
        if name == "training":
            write_completions(folder / FOLDER / "steps_000001-000100.parquet", rows)
            continue
        for step in {row.step for row in rows}:
            file = folder / FOLDER / f"evaluation_{name}_{step:06d}.parquet"
            write_completions(file, [row for row in rows if row.step == step])
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run directory with EVALUATED and TRAINED."""
    return write(tmp_path_factory.mktemp("run") / "run", held_out=EVALUATED, training=TRAINED)


def test_a_run_s_sets_have_the_steps_of_their_completions(folder):
    assert {name: kept.steps for name, kept in kept_by(folder).items()} == {
        "held_out": [0, 50, 100],
        "training": [3, 7, 9],
    }


def test_last_step_of_held_out_is_shown_with_the_changes_since_its_first(folder):
    shown = samples(chosen_set(kept_by(folder), None), count=2)
    assert (shown.set, shown.step, shown.since, shown.counts) == ("held_out", 100, 0, (3, 0, 1))
    assert shown.rows == EVALUATED[16:]
    assert [(change.after.name, change.means) for change in shown.changes] == [
        ("b", (0.0, 0.875)),
        ("d", (0.0, 0.625)),
    ]
    # The worst before and the best after, where a prompt got better.
    assert [(change.before.completion, change.after.completion) for change in shown.changes] == [
        ("b at 0", "b with 1.0"),
        ("d at 0", "d with 1.0"),
    ]


def test_changes_between_two_steps_are_counted_by_the_mean_reward_of_each_prompt(folder):
    held_out = chosen_set(kept_by(folder), "held_out")
    shown = samples(held_out, 100, 50)
    assert shown.counts == (1, 3, 0)
    assert [change.after.name for change in shown.changes] == ["c", "a", "b"]
    assert samples(held_out, 0).counts == (0, 0, 0)


def test_in_training_a_prompt_that_was_sampled_again_has_a_change(folder):
    kept = chosen_set(kept_by(folder), "training")
    shown = samples(kept)
    assert (shown.step, shown.rows, shown.counts) == (9, [TRAINED[2]], (0, 1, 0))
    assert (shown.changes[0].before, shown.changes[0].after) == (TRAINED[0], TRAINED[2])
    assert samples(kept, 7).counts == (0, 0, 0)


@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [
        ([1.0, 0.5, 0.0], [1.0], [0.0]),
        ([0.5, 0.5], [0.5], []),
        ([1.0, 0.0, 0.0, 0.0], [1.0], [0.0]),
    ],
)
def test_the_worst_completions_have_lower_rewards_than_the_best(rewards, best, worst):
    rows = [row(1, f"p{i}", reward) for i, reward in enumerate(rewards)]
    best_rows, worst_rows = best_and_worst(rows, 1)
    assert [row.reward for row in best_rows] == best
    assert [row.reward for row in worst_rows] == worst
    _, worst_rows = best_and_worst(rows, 9)
    assert all(row.reward < max(rewards) for row in worst_rows)


def test_terminal_shows_best_worst_and_changed_completions(folder, capsys, monkeypatch):
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
            "Changed since step 0: 3 prompts better, 0 worse, 1 the same (by mean reward of the "
            "kept completions)"
        ),
        "  0.000 -> 0.875  b: mean rewards; these two have 0.000 and 1.000",
        "    prompt      b?",
        "    step 0      b at 0",
        "    step 100    b with 1.0",
    ]
    assert max(map(len, lines)) <= 100


def test_terminal_has_no_changes_of_a_step_without_a_repeated_prompt(folder, capsys):
    assert main(["samples", str(folder), "--set", "training", "--step", "3"]) == 0
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
def test_a_step_a_set_or_a_count_that_does_not_exist_is_refused(folder, capsys, arguments, problem):
    assert problem in refusal(capsys, "samples", folder, *arguments)


def test_control_characters_of_a_completion_are_spelled_out_on_the_terminal(tmp_path):
    rows = [row(1, f"{HOSTILE}.jsonl:1", 1.0, HOSTILE, answer=HOSTILE, rewards={HOSTILE: 1.0})]
    rows += [replace(rows[0], step=2, reward=0.0)]
    kept = kept_by(write(tmp_path / "run", training=rows))
    shown = render_samples(samples(kept["training"]), kept, "run", 3, 8)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u202e\ufeff]", shown)
    assert "<U+001B>[2J<U+001B>]0;owned<U+0007></script>" in shown
    assert "evil<U+2028><U+009B>31m<U+000D><U+200B><U+FEFF>" in shown


def test_letters_of_every_script_are_shown_unchanged():
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


def test_completions_that_could_not_be_scored_are_neither_best_nor_worst(tmp_path):
    failed = [row(1, "a", None, "lost"), row(2, "b", None, "lost, too")]
    rows = [*failed, row(2, "a", 0.5), row(2, "c", -1.0)]
    kept = kept_by(write(tmp_path / "run", training=rows))
    shown = render_samples(samples(kept["training"], since=1), kept, "run", 3, 8)
    assert "1 of these not scored, mean reward of the others -0.250" in shown.replace("\n", " ")
    assert re.search(r"Not scored, since scoring failed\n +- +b: ", shown)
    assert re.search(r"Best\n  0\.500  a.*Worst\n  -1\.000  c", shown, re.DOTALL)
    first_step = render_samples(samples(kept["training"], step=1), kept, "run", 3, 8)
    assert "none of these was scored" in first_step
    page = html([*kept.values()], None, "run", "")
    assert [row["reward"] for row in data_of(page)["rows"]] == [None, None, 0.5, -1]


def test_equal_completions_of_a_prompt_with_one_step_and_reward_are_one_row_of_the_page(tmp_path):
    # The page cuts long texts in their middle: those that differ there alone are two rows.
    long = ["a" * 5000 + middle + "b" * 5000 for middle in "xyy"]
    rows = [row(1, "p", 1.0, "same")] * 6 + [
        row(1, "p", 0.5, "same"),
        row(2, "p", 1.0, "same"),
        row(1, "q", 1.0, "same"),
    ]
    rows += [row(1, "p", 0.0, text) for text in long]
    kept = kept_by(write(tmp_path / "run", training=rows))
    data = data_of(html([*kept.values()], None, "run", ""))
    assert sorted(row["times"] for row in data["rows"]) == [1, 1, 1, 1, 2, 6]
    assert data["about"] == "run: 12 completions"


def data_of(page: str) -> dict:
    """Return the data that a page holds."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )


def test_page_holds_every_completion_that_was_kept(folder):
    kept = kept_by(folder)
    data = data_of(html([*kept.values()], None, "run", "pgtk samples"))
    rows = [row for row in data["rows"] for _ in range(row["times"])]
    assert [(row["set"], row["step"], row["name"], row["reward"]) for row in rows] == [
        *(("held_out", row.step, row.name, row.reward) for row in EVALUATED),
        *(("training", row.step, row.name, row.reward) for row in TRAINED),
    ]
    assert data["about"] == "run: 28 completions"
    of_step = data_of(html([kept["held_out"]], 50, "run", ""))
    assert {row["step"] for row in of_step["rows"]} == {50}


def test_of_too_many_completions_the_page_holds_all_of_some_prompts(folder, monkeypatch):
    monkeypatch.setattr(samples_module, "MOST_COMPLETIONS", 14)
    data = data_of(html([*kept_by(folder).values()], None, "run", ""))
    assert data["about"] == "run: 10 of 28 completions: all of some prompts, spread evenly"
    assert {row["name"] for row in data["rows"] if row["set"] == "held_out"} == {"a", "e"}


def test_no_text_of_a_completion_becomes_a_script_or_a_placeholder_of_the_page(tmp_path):
    hostile = [row(1, HOSTILE, float("inf"), HOSTILE + "x" * 9000, answer="@DATA@")]
    kept = kept_by(write(tmp_path / "run", training=hostile))
    page = html([kept["training"]], None, HOSTILE, f"{HOSTILE} @DATA@")
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u2028\u202e\ufeff]", page)
    (only_row,) = data_of(page)["rows"]
    assert only_row["reward"] is None
    assert only_row["answer"] == "@DATA@"
    assert len(only_row["completion"]) < 8100
    assert "more characters" in only_row["completion"]


def test_prompts_that_are_compared_between_the_steps_of_the_heading_are_counted(tmp_path):
    """Of a, b, c and d, a alone has rewards at both steps."""
    lost = [row(0, "b", None), row(0, "c", None), row(9, "d", None)]
    rows = [row(0, "a", 0.0), row(9, "a", 1.0), *(row(4, name, 0.5) for name in "bcd"), *lost]
    rows += [row(9, "b", 1.0), row(9, "c", 0.0), row(0, "d", 1.0)]
    kept = kept_by(write(tmp_path / "run", held_out=rows))
    shown = render_samples(samples(kept["held_out"]), kept, "run", 3, 8)
    assert (
        "Changed since step 0: 2 prompts better, 2 worse, 0 the same (by mean reward of the kept "
        "completions). 3 of these 4 have no reward at step 0 or 9, and are compared at the first "
        "and the last step between them that has some"
    ) in " ".join(shown.split())
    first = samples(kept["held_out"], step=4, since=0)
    assert (first.counts, first.num_between) == ((0, 1, 0), 0)

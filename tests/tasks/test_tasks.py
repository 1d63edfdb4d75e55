"""Tasks: their prompts depend only on seed and index, their scores, and the lengths of prompts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.runs import config_of

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Prompt
from pgtoolkit.config.keys import option_values
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import (
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    ReverseTaskSettings,
)
from pgtoolkit.tasks.tasks import Task


def prompts_config(path: Path, **changes: object) -> PromptsTaskSettings:
    values = option_values("task", "prompts") | {"path": str(path)}
    return PromptsTaskSettings(**(values | changes))


def reverse(seed: int = 0, num_digits: int = 6) -> Task:
    return make_task(ReverseTaskSettings(name="reverse", num_digits=num_digits), seed)


def test_prompts_of_reverse_depend_only_on_seed_and_index():
    task = reverse()
    for index in (0, 1, 10**12):
        prompt = task.prompt(index)
        assert prompt.text[-1] == "="
        assert prompt.answer == prompt.text[:-1][::-1]
        assert len(prompt.answer) == 6
        assert set(prompt.text) <= set(task.alphabet)
        assert prompt == reverse().prompt(index)
    assert len({task.prompt(index).text for index in range(100)}) > 95
    assert reverse(seed=1).prompt(0) != task.prompt(0)
    # Every machine and version makes the same prompts: recorded runs can be repeated.
    assert task.prompt(0).text == "896334="
    digits = "".join(task.prompt(index).answer for index in range(500))
    assert all(250 < digits.count(digit) < 350 for digit in "0123456789")


def test_reverse_draws_another_number_in_place_of_one_that_is_held_out():
    """Of the 1,000 numbers of 3 digits training would ask most of 128 that are held out."""
    settings = ("evaluation.every=5", "evaluation.sets={a: {prompts: 99}, b: {seed: 7}}")
    _, loader = build(config_of("task.num_digits=3", "seed=1", "trainer.device=cpu", *settings))
    task = loader.source.task
    without = reverse(1, 3)
    sets = [reverse(10**9, 3).prompt(number).text for number in range(99)]
    held_out = {*sets, *(reverse(7, 3).prompt(number).text for number in range(128))}
    asked = [without.prompt(index) for index in range(2000)]
    assert sum(prompt.text in held_out for prompt in asked) > 300
    for prompt in asked:
        again = task.prompt(prompt.index)
        assert again.text not in held_out
        assert again == prompt or prompt.text in held_out
    assert len({task.prompt(index).text for index in range(6000)}) == 1000 - len(held_out)


@pytest.mark.parametrize(
    ("completion", "finished", "right", "exact"),
    [
        ("319284", True, 7, True),
        ("31928", True, 5, False),
        ("", False, 0, False),
        ("3192840", True, 6, False),
        ("019284", True, 6, False),
        ("482913", True, 1, False),
    ],
)
def test_reverse_scores_the_share_of_right_digits(completion, finished, right, exact):
    score = reverse().score(Prompt("482913=", "319284", 0, "prompt 0"), completion, finished)
    assert score.reward == right / 7
    assert score.exact_match is exact


def test_prompts_of_a_file_come_in_another_order_in_every_pass(tmp_path):
    rows = [{"question": f"{i}+1=", "solution": i + 1} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"question": ["é="], "solution": ["x"]}), tmp_path / "b.parquet")
    config = prompts_config(tmp_path, prompt_field="question", answer_field="solution")
    task = make_task(config, seed=3)
    assert task.num_prompts == 21
    assert task.alphabet == "".join(sorted("0123456789+=éx"))
    passes = [[task.prompt(21 * p + i) for i in range(21)] for p in range(3)]
    texts = [[prompt.text for prompt in prompts] for prompts in passes]
    all_texts = sorted([f"{i}+1=" for i in range(20)] + ["é="])
    assert [sorted(texts_of_pass) for texts_of_pass in texts] == [all_texts] * 3
    assert texts[0] != texts[1] != texts[2]
    assert make_task(config, seed=3).prompt(30) == task.prompt(30)
    assert [make_task(config, seed=4).prompt(i).text for i in range(21)] != texts[0]
    for prompt in passes[1]:
        assert task.score(prompt, prompt.answer, finished=True).exact_match
        wrong = task.score(prompt, prompt.answer + "0", finished=True)
        assert wrong.reward == 0.0
        assert not wrong.exact_match


def test_bad_prompts_are_listed_together(tmp_path):
    lines = [
        '{"prompt": "a", "answer": "b"}',
        '{"prompt": "a"}',
        '{"prompt": ["a"], "answer": null}',
        "{",
        '{"prompt": "", "answer": NaN}',
        '{"prompt": "a", "prompt": "b", "answer": "c"}',
        '{"answer": "b"',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        make_task(prompts_config(tmp_path / "p.jsonl"), 0)
    message = str(error.value)
    for part in (
        "8 problems",
        "p.jsonl:2:answer: is missing; the row has prompt\n",
        "p.jsonl:3:prompt: needs a text or a list of chat messages (got ['a'])",
        "p.jsonl:3:answer: is null; the row has prompt, answer",
        "p.jsonl:4: not JSON",
        "p.jsonl:5:prompt: needs a text or a list of chat messages (got '')",
        "p.jsonl:5:answer: needs a text (got nan)",
        "p.jsonl:6: not JSON: the key 'prompt' appears twice",
        "p.jsonl:7: the file ends within this row",
    ):
        assert part in message


def gym_config(dataset: str = "chain_sum", **options: object) -> ReasoningGymTaskSettings:
    values = option_values("task", "reasoning_gym") | {"dataset": dataset, "options": options}
    return ReasoningGymTaskSettings(**values)


def test_reasoning_gym_makes_prompts_by_seed_and_scores_them():
    pytest.importorskip("reasoning_gym")
    task = make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=5)
    assert task.num_prompts == 50
    prompt = task.prompt(7)
    again = make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=5)
    assert prompt == again.prompt(7)
    other_seed = make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=6)
    assert prompt.text != other_seed.prompt(7).text
    assert task.prompt(57).text == prompt.text
    assert task.score(prompt, f" {prompt.answer}\n", finished=True).exact_match
    wrong = task.score(prompt, "no idea", finished=True)
    assert wrong.reward == 0.0
    assert not wrong.exact_match
    for config in (gym_config("chain_sun"), gym_config(no_such_option=1), gym_config(seed=1)):
        with pytest.raises(
            ConfigError, match="needs a data set of reasoning-gym, and options that it has"
        ):
            make_task(config, 0)


def check_lengths(
    task: Task,
    max_tokens: int,
    max_completion_length: int,
    skip: bool,
    longest_prompt: int | None = None,
    first: int | None = None,
) -> None:
    """Check lengths with one token for each character, and one for the beginning."""

    def tokenize(texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[99, *map(ord, text)] for text in texts]}

    TokenizedTask(task, tokenize, ends=[]).check_lengths(
        {"model.max_positions=": max_tokens, "accumulation.max_tokens=": 20},
        max_completion_length,
        skip,
        longest_prompt,
        first=first,
    )


def task_of_lengths(path: Path, lengths: Sequence[int]) -> Task:
    """Return the task of a file whose prompts have these numbers of characters."""
    rows = [
        {"prompt": chr(97 + i % 26) * length, "answer": "x"} for i, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task(prompts_config(path), seed=0)


def test_prompts_that_are_too_long_are_refused_before_sampling(tmp_path):
    task = task_of_lengths(tmp_path / "p.jsonl", [3] * 1500 + [9, 3, 12, 3, 8])
    check_lengths(task, 20, 7, skip=False)  # The longest has 13 tokens with that of the beginning.
    with pytest.raises(DataError) as error:
        check_lengths(task, 17, 8, skip=False)
    assert str(error.value) == (
        "2 of 1505 prompts do not fit into 9 tokens: p.jsonl:1501 has 10, p.jsonl:1503 has 13. A "
        "document of at most 17 tokens holds a prompt and a completion of up to "
        "rollout.max_completion_length=8. Use task.too_long=skip, or "
        "rollout.max_completion_length=4, or model.max_positions=21 and "
        "accumulation.max_tokens=21, or other prompts."
    )
    # What check tries first is enough to see it; what is proposed fits all.
    task = task_of_lengths(tmp_path / "p.jsonl", [3, 9, 12])
    with pytest.raises(DataError) as error:
        check_lengths(task, 19, 7, skip=False, longest_prompt=5, first=2)
    assert str(error.value) == (
        "2 of 3 prompts do not fit into 5 tokens: p.jsonl:2 has 10, p.jsonl:3 has 13. A document "
        "of at most 19 tokens holds a prompt and a completion of up to "
        "rollout.max_completion_length=7. "
        "Use task.too_long=skip, or task.max_prompt_length=13 and rollout.max_completion_length=6, "
        "or task.max_prompt_length=13 and model.max_positions=20, or other prompts."
    )
    in_words = "Use task.too_long=skip, or task.max_prompt_length=13, or other prompts"
    with pytest.raises(DataError, match=in_words):
        check_lengths(task, 20, 7, skip=False, longest_prompt=5)


def test_prompts_that_are_too_long_are_skipped_with_their_count(tmp_path, caplog):
    lengths = [3, 9, 4, 9, 5, 9, 9, 9, 9, 6]
    task = task_of_lengths(tmp_path / "p.jsonl", lengths)
    check_lengths(task, 17, 8, skip=True)
    assert caplog.messages == [
        "note: task.too_long=skip leaves out 6 of 10 prompts, which do not fit into 9 tokens: "
        "p.jsonl:2 has 10, p.jsonl:4 has 10, p.jsonl:6 has 10, p.jsonl:7 has 10, p.jsonl:8 has 10 "
        "and 1 more."
    ]
    assert task.num_prompts == 4
    for number in range(3):
        prompts = [task.prompt(4 * number + i) for i in range(4)]
        assert sorted((len(prompt.text), prompt.place) for prompt in prompts) == [
            (3, "p.jsonl:1"),
            (4, "p.jsonl:3"),
            (5, "p.jsonl:5"),
            (6, "p.jsonl:10"),
        ]
    room = (
        r"4 of 4 prompts do not fit into 1 token: .* Use rollout.max_completion_length=2, or "
        r"model.max_positions=15, or other prompts.$"
    )
    with pytest.raises(DataError, match=room):
        check_lengths(task, 9, 8, skip=True)
    with pytest.raises(
        DataError, match=r"4 prompts do not fit beside a completion: .* Use rollout.max_co"
    ):
        check_lengths(task, 9, 9, skip=True)


def test_the_length_of_generated_prompts_is_checked_by_the_longest():
    check_lengths(reverse(num_digits=6), 16, 8, skip=False)
    with pytest.raises(
        DataError, match=r"64 of the longest 64 prompts do not fit into 7 tokens: prompt 0 has 8"
    ) as error:
        check_lengths(reverse(num_digits=6), 15, 8, skip=False)
    assert "too_long" not in str(error.value)


def encoded(
    prompts: Sequence[Prompt], encode: Callable[[str], list[int]], ends: Sequence[int] = ()
) -> list[list[int]]:
    """Return the tokens of prompts by a tokenizer whose encoding of a text is `encode`."""

    def tokenize(texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encode(text) for text in texts]}

    return TokenizedTask(None, tokenize, ends).encode(prompts)


def test_an_end_of_sequence_token_that_the_tokenizer_adds_to_prompts_is_removed():
    prompts = [Prompt(text, "", 0, "p") for text in ("a", "ab")]
    added = encoded(prompts, lambda text: [1, *map(ord, text), 2], ends=[2, 3])
    assert added == [[1, 97], [1, 97, 98]]


def test_the_error_of_a_prompt_that_cannot_be_encoded_names_it(tmp_path):
    prompts = [Prompt("a", "", 0, "p.jsonl:1"), Prompt("é", "", 1, "p.jsonl:2")]
    with pytest.raises(
        DataError, match=r"the prompt 'é' at p\.jsonl:2 cannot be encoded .*: 'ascii' codec"
    ):
        encoded(prompts, lambda text: list(text.encode("ascii")))


def test_the_error_of_the_tiny_model_names_characters_without_a_token():
    tokenized = TokenizedTask(None, character_tokenizer("0123="))
    assert tokenized.encode([Prompt("123=", "", 0, "p.jsonl:1")]) != []
    with pytest.raises(
        DataError, match=r"'194=' at p\.jsonl:2 .*: it has no token for '4', '9', which prompts"
    ):
        tokenized.encode([Prompt("123=", "", 0, "p.jsonl:1"), Prompt("194=", "", 1, "p.jsonl:2")])


def test_the_error_of_a_token_without_weights_names_the_prompt():
    prompts = [Prompt("ab", "", 0, "p.jsonl:1"), Prompt("ac", "", 1, "p.jsonl:2")]
    tokenized = TokenizedTask(
        None, lambda texts: {"input_ids": [[*map(ord, x)] for x in texts]}, vocabulary=ord("c")
    )
    assert tokenized.encode(prompts[:1]) == [[97, 98]]
    with pytest.raises(
        DataError, match=r"'ac' at p\.jsonl:2 .*: it gives token 99, .* has weights of 99 tokens"
    ):
        tokenized.encode(prompts)

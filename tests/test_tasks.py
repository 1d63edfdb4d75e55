"""Tasks: prompts are a function of seed and index, scores are right."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgtoolkit.config import PromptsTaskConfig, ReasoningGymTaskConfig, ReverseTaskConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.tasks import Prompt, make_task


def prompts_config(path, **changes):
    values = {"prompt_field": "prompt", "answer_field": "answer", "verifier": "exact_match", "pattern": None}
    return PromptsTaskConfig(name="prompts", path=str(path), **(values | changes))


def reverse(seed=0, num_digits=6):
    return make_task(ReverseTaskConfig(name="reverse", num_digits=num_digits), seed)


def test_reverse_prompts():
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
    # The same numbers on every machine and in every version: recorded runs can be repeated.
    assert task.prompt(0).text == "896334="
    digits = "".join(task.prompt(index).answer for index in range(500))
    assert all(250 < digits.count(digit) < 350 for digit in "0123456789")


@pytest.mark.parametrize(
    ("completion", "finished", "right", "exact"),
    [
        ("319284", True, 7, True),
        ("319284", False, 6, False),
        ("31928", True, 5, False),
        ("", True, 0, False),
        ("", False, 0, False),
        ("3192840", True, 6, False),
        ("019284", True, 6, False),
        ("482913", True, 1, False),
        ("399999", True, 3, False),
    ],
)
def test_reverse_scores(completion, finished, right, exact):
    score = reverse().score(Prompt("482913=", "319284", 0), completion, finished)
    assert score.reward == right / 7
    assert score.exact_match is exact


def test_prompts_come_in_another_order_every_pass(tmp_path):
    rows = [{"question": f"{i}+1=", "solution": i + 1} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"question": ["é="], "solution": ["x"]}), tmp_path / "b.parquet")
    config = prompts_config(tmp_path, prompt_field="question", answer_field="solution")
    task = make_task(config, seed=3)
    assert task.num_prompts == 21
    assert task.alphabet == "".join(sorted("0123456789+=éx"))
    passes = [[task.prompt(21 * p + i) for i in range(21)] for p in range(3)]
    texts = [[prompt.text for prompt in one] for one in passes]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(texts[2]) == sorted([f"{i}+1=" for i in range(20)] + ["é="])
    assert texts[0] != texts[1] != texts[2]
    assert make_task(config, seed=3).prompt(30) == task.prompt(30)
    assert [make_task(config, seed=4).prompt(i).text for i in range(21)] != texts[0]
    for prompt in passes[1]:
        assert task.score(prompt, prompt.answer, finished=True).exact_match
        wrong = task.score(prompt, prompt.answer + "0", finished=True)
        assert (wrong.reward, wrong.exact_match) == (0.0, False)


def test_bad_prompts_are_listed_together(tmp_path):
    lines = ['{"prompt": "a", "answer": "b"}', '{"prompt": "a"}', '{"prompt": ["a"], "answer": "b"}', "{"]
    lines += ['{"prompt": "", "answer": NaN}', '{"prompt": "a", "prompt": "b", "answer": "c"}', '{"answer": "b"']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as error:
        make_task(prompts_config(tmp_path / "p.jsonl"), 0)
    message = str(error.value)
    for part in (
        "7 problems",
        "p.jsonl:2:answer: is missing; the row has prompt",
        "p.jsonl:3:prompt: needs a text (got ['a'])",
        "p.jsonl:4: not JSON",
        "p.jsonl:5:prompt: needs a text (got '')",
        "p.jsonl:5:answer: needs a text (got nan)",
        "p.jsonl:6: not JSON: the key 'prompt' appears twice",
        "p.jsonl:7: the file ends within this row",
    ):
        assert part in message
    (tmp_path / "many.jsonl").write_text("{}\n" * 50)
    with pytest.raises(DataError, match="10 problems or more") as error:
        make_task(prompts_config(tmp_path / "many.jsonl"), 0)
    assert str(error.value).count("\n") == 10


def test_missing_prompts(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"task\.path=.*no such file.*notes\.txt"):
        make_task(prompts_config(tmp_path / "prompts.jsonl"), 0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="at least one prompt"):
        make_task(prompts_config(tmp_path / "empty.jsonl"), 0)
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet:1:prompt: is missing; the row has question"):
        make_task(prompts_config(tmp_path / "p.parquet"), 0)


def gym_config(dataset="chain_sum", **options):
    return ReasoningGymTaskConfig(name="reasoning_gym", dataset=dataset, options=options)


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    task = make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=5)
    assert task.num_prompts == 50
    prompt = task.prompt(7)
    assert prompt == make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=5).prompt(7)
    assert prompt.text != make_task(gym_config(min_terms=2, max_terms=3, size=50), seed=6).prompt(7).text
    assert task.prompt(57).text == prompt.text
    assert task.score(prompt, f" {prompt.answer}\n", finished=True).exact_match
    wrong = task.score(prompt, "no idea", finished=True)
    assert (wrong.reward, wrong.exact_match) == (0.0, False)
    with pytest.raises(ConfigError, match=r"task\.dataset=chain_sum"):
        make_task(gym_config("chain_sun"), 0)
    with pytest.raises(ConfigError, match="no_such_option"):
        make_task(gym_config(no_such_option=1), 0)
    with pytest.raises(ConfigError, match="seed"):
        make_task(gym_config(seed=1), 0)


def test_reasoning_gym_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install .*reasoning-gym"):
        make_task(gym_config(), 0)

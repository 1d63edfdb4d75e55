"""The override that a refusal suggests is accepted when it is typed unchanged."""

import json
import re
import shlex
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.launch.check import check

MODULE = """
from dataclasses import dataclass
from pgtoolkit.losses.families import Reinforce

@dataclass(frozen=True)
class Mine(Reinforce):
    tau: float = 1.0
    scale: float = 2.0

def score(completion, answer):
    return 1.0

def strange(other):
    return 1.0

def weights(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask.double() / totals.num_tokens

def of_totals(totals):
    return 1.0
"""
PROMPTS = "task=prompts task.path=prompts.jsonl"


@pytest.fixture(autouse=True)
def current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a current directory with a module of the user and prompts."""
    (tmp_path / "my_verifier.py").write_text(MODULE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12=", "answer": "21"}\n')
    chat = {"messages": [{"role": "user", "content": "12="}], "answer": "21"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def problems(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return the problems on the page of `pgtk check`."""
    main(["check", *overrides])
    return capsys.readouterr().out.partition("\nProblems")[2].partition("\n")[2].strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "before", "use"),
    [
        ("loss=ppo", "", "loss=grpo"),
        ("loss=dapo", "", "experiment=dapo"),
        ("aggregation=rloo", "", "experiment=rloo"),
        ("rollout.stop=</answer>", "", "'rollout.stop=[\"</answer>\"]'"),
        ("rollout.stop=[</answer>]", "", "'rollout.stop=[\"</answer>\"]'"),
        ("rollout.stop='</answer>'", "", "'rollout.stop=[\"</answer>\"]'"),
        ("rollout.stop=END", "", "'rollout.stop=[\"END\"]'"),
        ("task.verifier=my_verifier.scor", PROMPTS, "task.verifier=my_verifier.score"),
        ("task.verifier=last", PROMPTS, "task.verifier=last_number"),
        (
            "task.verifiers={answer: exact_match}",
            PROMPTS,
            "'task.verifiers={answer: {verifier: exact_match}, number: {verifier: last_number, "
            "weight: 0.1}}'",
        ),
        (
            "task.verifiers=exact_match",
            PROMPTS,
            "'task.verifiers={answer: {verifier: exact_match}}'",
        ),
        ("aggregation=my_verifier.weight", "", "aggregation=my_verifier.weights"),
        (
            "rollout.prompts_per_batch=1000000",
            "rollout.group_size=7",
            "rollout.prompts_per_batch=142857",
        ),
        ("loss=grpo,", "", "loss=grpo"),
        ("num_generations=4", "", "rollout.group_size=4"),
        ("actor_rollout_ref.rollout.n=4", "", "rollout.group_size=4"),
        ("loss.epsilon=0.1", "loss=grpo", "loss.epsilon_low=0.1 loss.epsilon_high=0.1"),
        ("algorithm.clip_ratio_high=0.3", "loss=grpo", "loss.epsilon_high=0.3"),
        ("optimizer.beta=0.8", "", "optimizer.beta1=0.8"),
        ("task=prompts.jsonl", "", "task=prompts task.path=prompts.jsonl"),
        ("rollout.save_path=out~/b", "", "\"rollout.save_path='out~/b'\""),
        ("kl.coefficient=null", "kl=k3 kl.reference=initial", "kl.coefficient=0.04"),
        ("hydra.run.dir=/proc/foo", "", "hydra.run.dir=outputs/FOLDER"),
        ("hydra.run.dir=prompts.jsonl/run", "", "hydra.run.dir=outputs/FOLDER"),
        (f"hydra.run.dir={'x' * 256}", "", "hydra.run.dir=outputs/FOLDER"),
    ],
)
def test_the_override_that_a_refusal_suggests_is_accepted(capsys, typed, before, use):
    problem = problems(capsys, *before.split(), typed)
    assert re.search(r"Use (.*?)\.?$", problem, re.DOTALL)[1] == use
    assert problems(capsys, *before.split(), *shlex.split(use)) == "none"


@pytest.mark.parametrize(
    "typed",
    [
        "accumulation=fixed accumulation.micro_batches_per_step=null",
        "accumulation=fixed accumulation.docs_per_step=64 accumulation.micro_batches_per_step=4",
        "accumulation=fixed accumulation.docs_per_step=8 aggregation=prompt_mean",
        "accumulation=fixed accumulation.docs_per_step=0 aggregation=prompt_mean",
        "accumulation=fixed accumulation.docs_per_step=0 loss=tpo aggregation=prompt_mean",
        "accumulation.docs_per_step=0 accumulation.micro_batches_per_step=3 "
        "entropy.top_fraction=0.2",
        "accumulation.docs_per_step=0",
    ],
)
def test_what_is_proposed_about_steps_of_micro_batches_is_accepted_one_after_the_other(typed):
    """Each way that any message proposes is followed to its end, and none proposes what was
    refused before."""
    ways = [(typed.split(), ())]
    while ways:
        words, refused = ways.pop()
        for problem in validated(compose(words))[1].problems:
            ((_, use),) = re.findall(r"(\. |^)Use (.*)\.$", problem)
            for way in use.split(" or "):
                keys = {override.partition("=")[0] for override in way.split()}
                others = [word for word in words if word.partition("=")[0] not in keys]
                of_words = {word for word in words if word not in others}
                assert not {*way.split()} & {*refused, *of_words}, (words, problem)
                ways.append(([*others, *way.split()], (*refused, *of_words)))


@pytest.mark.parametrize(
    ("typed", "before", "message", "function", "good"),
    [
        (
            "task.verifier=my_verifier.{}",
            PROMPTS,
            "with parameters among completion, answer, prompt, row, or with completions for a "
            "whole batch (got strange(other))",
            "strange",
            "score",
        ),
        (
            "aggregation.reducer=my_verifier.{}",
            "",
            "that can be called as of_totals(totals, *, mask, document_index, tokens_per_document, "
            "group_index) (got of_totals(totals))",
            "of_totals",
            "weights",
        ),
    ],
)
def test_a_function_with_other_parameters_is_refused_with_those_that_it_needs(
    capsys, typed, before, message, function, good
):
    problem = problems(capsys, *before.split(), typed.format(function))
    assert f"needs a function {message}" in problem
    assert problems(capsys, *before.split(), typed.format(good)) == "none"


@pytest.mark.parametrize(
    ("typed", "use"),
    [
        ("model=Qwen/Qwen2.5-0.5B", "model=huggingface model.path=Qwen/Qwen2.5-0.5B"),
        ("model=gpt2", "model=huggingface model.path=gpt2"),
        ("model=tinny", "model=tiny"),
        ("model.path=~/m", "model=huggingface model.path=$HOME/m"),
        (
            "model.path=a,b",
            "pgtk -m model=huggingface model.path=a,b, or model=huggingface "
            "\"model.path='a,b'\" for one value",
        ),
        ("trainer.max_steps=3,4", "pgtk -m trainer.max_steps=3,4"),
        (
            "task.path=my_verifier.py,prompts.jsonl",
            "pgtk -m task=prompts task.path=my_verifier.py,prompts.jsonl",
        ),
        ("loss=glob(g*)", "pgtk -m loss=gmpo,grpo,gspo"),
        ("loss=glob(x*)", "loss=gspo"),
        ("loss.path=my_verifier.Mine", "loss=my_verifier.Mine"),
        ("rollout.chat=true", "rollout=recorded rollout.path=rollouts.parquet rollout.chat=auto"),
        ("task.verifier=score", "task=prompts task.path=prompts.jsonl task.verifier=score."),
        ("rollout.epochs=2", "rollout=recorded rollout.path=rollouts.parquet rollout.epochs=2"),
        ("epsilon=0.1", "loss.epsilon_low=0.1 loss.epsilon_high=0.1"),
        ("ppo_mini_batch_size=3", "pgtk explain ppo_mini_batch_size"),
    ],
)
def test_a_spelling_of_another_kind_is_answered_with_ours(typed, use):
    (problem, *_) = compose([typed]).problems
    assert f"Use {use}" in problem


def test_a_verifier_of_an_unknown_name_is_answered_with_ours_or_the_path_of_a_function(capsys):
    Path("my_module.py").write_text(MODULE)
    assert problems(capsys, *PROMPTS.split(), "task.verifier=score").endswith(
        "Use task.verifier=exact_match, or task.verifier=my_module.score for a function score in "
        "my_module.py."
    )
    for use in ("exact_match", "my_module.score"):
        assert compose([*PROMPTS.split(), f"task.verifier={use}"]).problems == []


def test_a_path_with_a_comma_is_answered_with_quotes(tmp_path):
    (tmp_path / "a,b").mkdir()
    assert (
        compose(["model.path=a,b"])
        .problems[0]
        .endswith("Use model=huggingface \"model.path='a,b'\".")
    )


def test_a_word_without_a_value_is_answered_with_an_example_and_no_quotes(capsys):
    assert problems(capsys, "aggregation").endswith("Use aggregation=sample_mean.")


@pytest.mark.parametrize("typed", [[], ["kl.reference=recorded"]])
def test_the_policy_is_not_suggested_as_a_missing_teacher(capsys, typed):
    problem = problems(capsys, "experiment=distillation", *typed)
    assert "Use kl.reference=FOLDER" in problem
    assert "initial" not in problem


def test_misspelt_words_are_answered_with_what_is_meant(capsys):
    assert "Use trainer.checkpoint_every=5." in problems(capsys, "checkpoint.every=5")
    verifiers = "task.verifiers={right: {verifier: exact_match, weigth: 2}}"
    on_sets = ("evaluation.every=1", "evaluation.sets.dev.path=chats.jsonl")
    refused = problems(capsys, "task=prompts", "task.path=chats.jsonl", verifiers, *on_sets)
    assert refused.count("Use weight in place of weigth.") == 1


def test_rows_of_messages_are_answered_with_their_field_and_then_with_a_chat_template(capsys):
    chats = ("task=prompts", "task.path=chats.jsonl")
    refused = problems(capsys, *chats)
    assert "chats.jsonl:1:prompt: is missing; the row has messages, answer\n" in refused
    assert "1 of the 1 row read lacks prompt. Use task.prompt_field=messages." in refused
    problem = problems(capsys, *chats, "task.prompt_field=messages")
    assert "task.prompt_field needs texts (got chat messages with model=tiny)" in problem


def test_the_defaults_list_that_a_refusal_of_a_sweep_file_suggests_is_accepted(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nloss: cispo\naggregation: token_mean\n"
    )
    message = refusal(capsys, "sweep", "mine.yaml", "seed=1,2")
    assert "loss: cispo in mine.yaml needs to stand in the list `defaults:` (got a key)" in message
    lines = "\n  ".join(re.findall(r"Use (.*)\.", message))
    (tmp_path / "second.yaml").write_text(f"defaults:\n  - config\n  {lines}\n  - _self_\n")
    (run, _) = check(["seed=1,2"], True, sweep_file=tmp_path / "second.yaml").runs
    assert (run.config.loss.name, run.config.aggregation.mode) == ("cispo", "token_mean")


def test_compare_with_overrides_of_a_sweep_is_answered_with_the_name_of_its_folder(capsys):
    words = ("clip_range", "trainer.max_steps=2", "seed=0,1")
    message = refusal(capsys, "compare", *words)
    assert message.endswith("Use pgtk compare clip_range_seed-0-1_max-steps-2.\n")
    main(["check", "sweep", *words])
    assert "folder: outputs/sweeps/clip_range_seed-0-1_max-steps-2\n" in capsys.readouterr().out


def test_an_epsilon_that_looks_like_a_bound_of_the_ratio_is_noted(capsys):
    main(["check", "loss=grpo", "loss.epsilon_high=1.28"])
    assert (
        "  loss.epsilon_high=1.28 clips above a ratio of 1 + 1.28 = 2.28; DAPO's is 0.28"
        in capsys.readouterr().out
    )
    main(["check", "loss=grpo", "loss.epsilon_high=0.28"])
    assert "clips above a ratio of" not in capsys.readouterr().out

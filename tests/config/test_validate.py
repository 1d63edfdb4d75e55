"""Each rule of `validate`: one refusal, and a neighbour that is allowed."""

import json
import subprocess
import sys

import pytest
from builders.rules import RULES
from omegaconf import OmegaConf

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validate


def problems(overrides, file="FILE"):
    composed = compose([part.replace("FILE", str(file)) for part in overrides.split()])
    return composed.problems + validate(composed.config).problems


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "there.jsonl"
    path.touch()
    return path


@pytest.mark.parametrize(("refused", "shows", "allowed"), RULES, ids=lambda value: str(value)[:60])
def test_rule(refused, shows, allowed, file):
    found = problems(refused, file)
    if shows is not None:
        assert any(shows in problem for problem in found), found
        for problem in found:
            assert " needs " in problem
            assert "(got " in problem
            assert " Use " in problem
            assert "\n" not in problem
    assert problems(allowed, file) == []


@pytest.mark.parametrize("divisor", ["0", "-1", "nan", "inf", "-inf", "null", "true", "abc"])
def test_divisor_is_refused(divisor):
    found = problems(f"aggregation=constant aggregation.divisor={divisor}")
    assert len(found) == 1
    assert found[0].startswith(f"aggregation.divisor={divisor} needs ")


@pytest.mark.parametrize("divisor", ["1", "0.5", "1e-3", "4096"])
def test_divisor_is_allowed(divisor):
    assert problems(f"aggregation=constant aggregation.divisor={divisor}") == []


@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf"), True, "abc", None])
def test_divisor_is_refused_without_the_types_of_the_schema(divisor):
    config = compose(["aggregation=constant"]).config
    config = OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True) | {"hydra": None})
    config.aggregation.divisor = divisor
    assert [problem for problem in validate(config).problems if problem.startswith("aggregation.divisor")]


def test_pipeline_stages_have_a_rule_of_their_own_for_metrics():
    recorded = "rollout=recorded rollout.path=pyproject.toml parallelism=pipeline"
    assert [problem.partition(" needs ")[0] for problem in problems(recorded)] == ["metrics=basic"]
    assert problems(f"{recorded} metrics=none") == []
    for other in (
        "parallelism.sequence_data_parallel=2",
        "parallelism.tensor_parallel=2 parallelism.sequence_parallel=true",
    ):
        assert "whole micro-batches" in problems(f"{recorded} metrics=none {other}")[0]
    assert problems(f"{recorded} metrics=none parallelism.tensor_parallel=2 parallelism.data_parallel=2") == []


def test_the_sizes_multiply_to_the_processes_that_a_launcher_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    found = problems("parallelism=ddp")
    assert "2 = pipeline_parallel=1 x data_parallel=2 x sequence_data_parallel=1 x tensor_parallel=1" in found[0]
    assert problems("parallelism=ddp parallelism.data_parallel=4") == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert problems("parallelism=ddp") == []


def test_the_sizes_fit_a_model_whose_shape_is_on_the_disk(tmp_path):
    shape = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100}))
    model = f"model=huggingface model.path={tmp_path} rollout=recorded rollout.path=pyproject.toml metrics=none"
    assert "a divisor of the model's 2 key-value heads" in problems(f"{model} parallelism.tensor_parallel=4")[0]
    assert "Use parallelism.pipeline_parallel=3" in problems(f"{model} parallelism.pipeline_parallel=4")[0]
    assert problems(f"{model} parallelism.tensor_parallel=2 parallelism.pipeline_parallel=3") == []
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "tie_word_embeddings": True}))
    assert "two matrices" in problems(f"{model} parallelism.pipeline_parallel=2")[0]
    assert problems(f"{model} parallelism.tensor_parallel=2") == []
    gpt2 = {"model_type": "gpt2", "n_head": 8, "n_layer": 3, "vocab_size": 100}  # whose matrices are one unless it says
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert "two matrices" in problems(f"{model} parallelism.pipeline_parallel=2")[0]
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | {"tie_word_embeddings": False}))
    assert problems(f"{model} parallelism.pipeline_parallel=2") == []
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "model_type": "bloom"}))
    assert "a model of type gpt2, llama" in problems(f"{model} parallelism.tensor_parallel=2")[0]
    assert problems(f"{model} parallelism=ddp") == []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9}))
    assert "One rank would hold none of the vocabulary" in problems(f"{model} parallelism.tensor_parallel=4")[0]
    assert problems(f"{model} parallelism.tensor_parallel=3") == []


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "kernel=triton needs a GPU" in problems("kernel=triton trainer.device=cpu")[0]
    assert problems("kernel=triton") == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("kernel=triton trainer.device=cpu") == []


def test_code_is_never_named_by_a_configuration():
    found = problems("task=reasoning_gym task.dataset=x task.options={_target_:os.system}")
    assert any("_target_" in problem for problem in found)
    found = problems("task=reasoning_gym task.dataset=x task.options.a=[{_target_:os.system}]")
    assert any("_target_" in problem for problem in found)


def test_a_password_is_not_repeated():
    assert not any("secret" in problem for problem in problems("tracking.uri=postgresql://me:secret@host/db"))


def test_all_problems_at_once():
    found = problems(
        "loss.num_splits=2 aggregation.divisor=3 rollout.temperature=0 trainer.max_steps=0 seed=x lss=grpo"
    )
    assert len(found) == 6


NOTES = [
    ("aggregation=constant", "weights a document by its number of trained tokens", "loss=grpo aggregation=constant"),
    ("loss.epsilon_high=0.05", "almost never acts", "loss.epsilon_high=0.04"),
    ("loss.epsilon_low=0.05", "almost never acts", "loss=grpo"),
    (
        "model=huggingface model.path=x/y model.dtype=bfloat16 model.fp32_lm_head=false",
        "after every update, and with rollout.old_log_probs=sampling from the start",
        "model=huggingface model.path=x/y model.dtype=bfloat16 model.fp32_lm_head=true",
    ),
    (
        "correction=sequence_mask correction.mean=geometric correction.low=0.5",
        "almost never act (others use 0.999 and 1.001)",
        "correction=sequence_mask correction.mean=geometric correction.low=0.99 correction.high=1.01",
    ),
    ("accumulation.docs_per_step=60", "last step of every batch has only 16", "accumulation.docs_per_step=32"),
    ("accumulation.docs_per_step=60 accumulation.last_step=drop", "16 documents", "accumulation.docs_per_step=128"),
    ("accumulation.docs_per_step=60 accumulation.last_step=carry", "mix documents", "accumulation.docs_per_step=64"),
    ("accumulation.docs_per_step=300", "never reached", "accumulation.docs_per_step=64"),
    ("accumulation.docs_per_step=256", "every ratio is 1", "accumulation.docs_per_step=128"),
    ("loss=reinforce", "loss=reinforce has no ratio", "experiment=reinforce"),
    ("experiment=reinforce rollout.lag=2", "loss=reinforce has no ratio", "loss=kimi"),
    ("rollout.top_p=0.9", "left out", "rollout.top_p=1"),
    (
        r"rollout.stop=['\n']",
        "holds a backslash and a letter, as typed",
        "rollout.stop=[n]",
    ),
    ("rollout.top_p=0.9 rollout.old_log_probs=sampling", "renormalised", "rollout.old_log_probs=sampling"),
    ("trainer.max_steps=10", "never reaches", "trainer.max_steps=11"),
    ("optimizer.learning_rate=0.1", "is 100 times the 0.001 that models such as", "optimizer.learning_rate=0.09"),
    (
        "model=huggingface model.path=x/y optimizer.learning_rate=1e-3",
        "optimizer.learning_rate=0.001 is 1e+03 times the 1e-06 that models such as this one usually take",
        "model=huggingface model.path=x/y optimizer.learning_rate=9e-5",
    ),
    (
        "model=huggingface model.path=x/y model.random_weights=true optimizer.learning_rate=1",
        "1e+03 times the 0.001",
        "model=huggingface model.path=x/y model.random_weights=true optimizer.learning_rate=1e-3",
    ),
    ("aggregation.reducer=json.dumps", "takes the place", ""),
    ("task=reasoning_gym task.dataset=x", "longer answers", "task=reverse"),
    (
        "rollout=recorded rollout.path=x task.num_digits=3",
        "task.num_digits=3 only gives model=tiny its characters: with rollout=recorded prompts and rewards come from",
        "rollout=recorded rollout.path=x",
    ),
    (
        "rollout=recorded rollout.path=x task.num_digits=3 model=huggingface model.path=x/y",
        "task.num_digits=3 changes nothing: with rollout=recorded",
        "task.num_digits=3",
    ),
]


@pytest.mark.parametrize(("noted", "shows", "silent"), NOTES, ids=lambda value: str(value)[:60])
def test_note(noted, shows, silent):
    assert any(shows in note for note in validate(compose(noted.split()).config).notes)
    assert not any(shows in note for note in validate(compose(silent.split()).config).notes)


def test_checking_imports_no_torch():
    code = (
        "import sys; from pgtoolkit.launch.check import check, page; page(check(['experiment=dapo']));"
        "print(sorted({'torch', 'lightning', 'mlflow', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

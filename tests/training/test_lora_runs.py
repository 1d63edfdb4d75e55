"""Runs under LoRA: resumed, spread over ranks, exported; what their checkpoints hold, and who can
load them."""

import shutil

import pytest
import torch
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, load_and_save, run_on_ranks
from builders.processes import world
from builders.runs import assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, with_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pgtoolkit.cli import main
from pgtoolkit.config.schema_run import NumberType
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.setup import build_policy
from pgtoolkit.training.build import build
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.state import load_weights
from pgtoolkit.training.train import train

TOKENS = torch.tensor([[1, 2, 3, 10, 3, 2, 1, 11]])
LORA = ("model.lora_rank=2", "model.lora_alpha=6", "optimizer.learning_rate=0.05")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, tie_word_embeddings=True).bfloat16()
    return save_with_tokenizer(model, tmp_path_factory.mktemp("base"))


def settings(base, *overrides):
    return with_model(base, *LORA, "trainer.max_steps=4", *overrides)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(config_of(*settings(base)), folder)
    return folder


def newest(run):
    return run / "checkpoints" / "step-000004"


@torch.no_grad()
def logits(model):
    return model(input_ids=TOKENS).logits


@torch.no_grad()
def logits_in_training(base, run):
    """By the code that trains, with the adapters of the newest checkpoint."""
    policy = build_policy(model_config(base, lora_rank=2, lora_alpha=6.0), None, False)
    load_weights(policy, load_newest(run / "checkpoints"))
    return logits(policy.model)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        pytest.param(
            ("model.dtype=bfloat16", "model.gradient_checkpointing=true", "rollout.lag=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resumed_it_is_bit_equal(base, tmp_path, changes):
    config = config_of(*settings(base, *changes))
    train(config, tmp_path / "whole")
    rows = metrics_of(tmp_path / "whole")
    assert rows[0]["ratio_new_old"] == pytest.approx(1, abs=1e-6 if changes == () else 1e-3)
    assert sum(row["grad_norm"] > 1e-6 for row in rows) >= 2
    for step in (1, 3):
        resumed = copy_as_of(tmp_path / "whole", step, tmp_path / f"after {step}")
        train(config, resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 4), checkpoint_of(tmp_path / "whole", 4))
    before, after = (checkpoint_of(tmp_path / "whole", step)["model"] for step in (1, 4))
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before)


def test_a_checkpoint_holds_the_adapters_alone(trained):
    path = newest(trained)
    assert {file.name for file in path.iterdir() if file.is_file()} == {
        *(
            "adapter_config.json",
            "adapter_model.safetensors",
            "generation_config.json",
            "manifest.json",
        ),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    found, weights = checkpoint_of(trained, 4), load_file(path / "adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    # 2 x (16 + 16) and 2 x (16 + 32) of them
    said = "LoRA: adapters at 14 layers; 1,088 of 6,480 weights are trained"
    assert (trained / "run.log").read_text().count(said) == 1
    fields = ("exp_avg", "exp_avg_sq", "step")
    assert found["optimizer"].keys() == {f"{name}.{field}" for name in weights for field in fields}
    assert sum(file.stat().st_size for file in path.glob("*.safetensors")) < 4 * (
        2 * 2 * 272 + 1500
    )


def test_the_reference_is_the_model_without_its_adapters(base, tmp_path, capsys):
    """The numbers of a copy of the base model, without one; also where a run goes on with adapters
    that have moved."""
    own = settings(base, "kl=k3", "metrics=with_entropy")
    for name, reference in {"within": "initial", "beside": str(base)}.items():
        train(config_of(*own, f"kl.reference={reference}"), tmp_path / name)
    found = metrics_of(tmp_path / "within")
    assert [row["kl_ref"] > 1e-6 for row in found] == [False, True, True, True]
    assert found == metrics_of(tmp_path / "beside")
    assert_equal(checkpoint_of(tmp_path / "within", 4), checkpoint_of(tmp_path / "beside", 4))
    resumed = copy_as_of(tmp_path / "within", 2, tmp_path / "resumed")
    train(config_of(*own), resumed, resume=True)
    assert metrics_of(resumed) == found
    module, _ = build(config_of(*own))
    assert module.reference is module.policy
    assert sum(weight.numel() for weight in module.parameters()) == 6480
    chosen = (
        "model=huggingface",
        f"model.path={base}",
        *LORA,
        "kl=k3",
        "rollout.max_completion_length=16",
    )
    assert main(["check", *chosen, "trainer.device=cpu"]) == 0
    assert (
        "memory: none, since it is the model in training without its adapters"
        in capsys.readouterr().out
    )


def test_transformers_and_peft_load_a_checkpoint_as_it_lies(base, trained):
    path, expected = newest(trained), logits_in_training(base, trained)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(plain) - expected).abs().max() > 0.02
    by_peft = PeftModel.from_pretrained(plain, path)
    by_transformers = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for model in (by_peft, by_transformers):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_an_export_is_the_whole_model_in_its_own_number_type(base, trained, tmp_path, capsys):
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    output = capsys.readouterr()
    assert "step 4 of" in output.out
    assert output.err == ""
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "config.json" in names
    assert not any("adapter" in name for name in names)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (base, tmp_path / "model")
    )
    assert after.keys() == before.keys()
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    adapters = checkpoint_of(trained, 4)["model"]
    for name, weight in before.items():
        a, b = (
            adapters.get(f"base_model.model.{name.replace('.weight', f'.lora_{part}.weight')}")
            for part in "AB"
        )
        expected = weight if a is None else (weight.float() + 6 / 2 * b @ a).bfloat16()
        assert torch.equal(after[name], expected), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits_in_training(base, trained), rtol=0, atol=0.02)


def test_adapters_beside_other_weights_are_refused(base, trained, tmp_path, capsys):
    """One number of the base model is another; the run says where it was."""
    shutil.copytree(base, tmp_path / "base")
    train(config_of(*settings(tmp_path / "base", "trainer.max_steps=1")), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 0.5
    model.save_pretrained(tmp_path / "base")
    says = (
        "does not fit the configured model: its adapters were trained on other weights than "
        "model.path has now"
    )
    # other files may hold the same weights
    accepted = ["trainer.max_steps=2", "trainer.accept_changed_data=true"]
    for command in (
        ["resume", tmp_path / "run", *accepted],
        ["export", tmp_path / "run", tmp_path / "m"],
    ):
        assert main([str(word) for word in command]) == 2
        assert says in capsys.readouterr().err
    shutil.rmtree(tmp_path / "base")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "m")]) == 2
    assert f"model.path={tmp_path / 'base'} needs " in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_the_base_is_known_again_in_another_number_type(base, trained):
    for dtype in (NumberType.float32, NumberType.bfloat16):
        policy = build_policy(
            model_config(base, dtype=dtype, lora_rank=2, lora_alpha=6.0), None, False
        )
        load_weights(policy, load_newest(trained / "checkpoints"))
        assert {weight.dtype for weight in policy.model.parameters()} == {
            torch.float32,
            getattr(torch, dtype),
        }
    for rank, says in (
        (None, "it holds LoRA's adapters alone"),
        (3, "lora_A.weight is of .2, 16, torch.float32., not"),
    ):
        policy = build_policy(model_config(base, lora_rank=rank), None, False)
        with pytest.raises((ConfigError, ValueError), match=says):
            load_weights(policy, load_newest(trained / "checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"data_parallel": 2}, []),
        ({"data_parallel": 2}, ["parallelism.shard=true", "model.dtype=bfloat16"]),
        ({"sequence_data_parallel": 2}, ["parallelism.shard=true"]),
    ],
    ids=["ddp", "fsdp in bfloat16", "sequence data and fsdp"],
)
def test_ranks_train_as_one_process_does_and_continue(base, recorded, tmp_path, sizes, changes):
    """From recorded rollouts: three steps at once, and the last two from the checkpoint of one
    process."""
    typed = with_model(
        base, "aggregation=constant", "aggregation.divisor=4", *LORA, *changes, of=recorded
    )
    one = run_on_ranks(tmp_path / "one", [one for one in typed if "shard" not in one])
    assert [row["grad_norm"] > 1e-4 for row in metrics_of(one)] == [True] * 3
    tolerance = 0.03 if "model.dtype=bfloat16" in changes else 1e-4
    assert_runs_close(run_on_ranks(tmp_path / "ranks", typed, **sizes), one, tolerance)
    again = copy_as_of(one, 1, tmp_path / "again")
    run_on_ranks(again, typed, resume=True, **sizes)
    assert_runs_close(again, one, tolerance)
    before = checkpoint_of(again, 3)
    config = config_of(*typed, *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))
    world(2).run(load_and_save, config, again, sizes)
    saved_anew = checkpoint_of(again, 3)
    assert_equal(
        [saved_anew["model"], saved_anew["optimizer"]], [before["model"], before["optimizer"]]
    )
    assert len(list((again / "checkpoints" / "step-000003").glob("*.safetensors"))) == 1
    one_more = copy_as_of(again, 3, tmp_path / "one more")
    run_on_ranks(one_more, [s for s in typed if "shard" not in s], resume=True)
    assert_equal(checkpoint_of(one_more, 3)["model"], saved_anew["model"])

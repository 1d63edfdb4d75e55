"""Runs under LoRA: resumed, over ranks, exported, and their checkpoints as peft loads them.

References are uninterrupted runs, runs of one process, a copy of the base model, and W + s B A.
"""

import shutil
from pathlib import Path

import pytest
import torch
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, load_and_save, run_on_ranks
from builders.processes import world
from builders.refusals import refusal
from builders.runs import assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, with_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.settings import NumberType
from pgtoolkit.model.setup import build_policy
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.state import load_weights

TOKENS = torch.tensor([[1, 2, 3, 10, 3, 2, 1, 11]])
LORA = ("model.lora_rank=2", "model.lora_alpha=6", "optimizer.learning_rate=0.05")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    model = small_llama(3, num_hidden_layers=2, tie_word_embeddings=True).bfloat16()
    return save_with_tokenizer(model, tmp_path_factory.mktemp("base"))


def settings_of(base: Path, *overrides: str) -> list[str]:
    return with_model(base, *LORA, "trainer.max_steps=4", *overrides)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(config_of(*settings_of(base)), folder)
    return folder


def newest_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-000004"


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


@torch.no_grad()
def logits_in_training(base: Path, run: Path) -> torch.Tensor:
    """Return the logits of the code that trains, with the adapters of the newest checkpoint."""
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
def test_a_resume_under_lora_is_bit_equal(base, tmp_path, changes):
    config = config_of(*settings_of(base, *changes))
    uninterrupted = tmp_path / "uninterrupted"
    train(config, uninterrupted)
    rows = metrics_of(uninterrupted)
    assert rows[0]["ratio_new_old"] == pytest.approx(1, abs=1e-6 if changes == () else 1e-3)
    assert sum(row["grad_norm"] > 1e-6 for row in rows) >= 2
    for step in (1, 3):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"after {step}")
        train(config, resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 4), checkpoint_of(uninterrupted, 4))
    before, after = (checkpoint_of(uninterrupted, step)["model"] for step in (1, 4))
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before)


def test_a_checkpoint_holds_the_adapters_and_their_moments_alone(trained):
    path = newest_checkpoint(trained)
    assert {file.name for file in path.iterdir() if file.is_file()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    weights = load_file(path / "adapter_model.safetensors")
    assert len(weights) == 2 * 2 * 7
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    # Adapters of rank 2 have 2 x (16 + 16) or 2 x (16 + 32) weights.
    line = "LoRA: adapters at 14 layers; 1,088 of 6,480 weights are trained"
    assert (trained / "run.log").read_text().count(line) == 1
    fields = ("exp_avg", "exp_avg_sq", "step")
    moments = checkpoint_of(trained, 4)["optimizer"]
    assert moments.keys() == {f"{name}.{field}" for name in weights for field in fields}
    assert sum(file.stat().st_size for file in path.glob("*.safetensors")) < 4 * (
        2 * 2 * 272 + 1500
    )


@pytest.mark.slow
def test_a_run_whose_reference_is_its_model_without_adapters_equals_one_with_a_copy(base, tmp_path):
    """Also where it is resumed with adapters that have moved."""
    settings = settings_of(base, "kl=k3", "metrics=with_entropy")
    without_copy = tmp_path / "without copy"
    with_copy = tmp_path / "with copy"
    train(config_of(*settings, "kl.reference=initial"), without_copy)
    train(config_of(*settings, f"kl.reference={base}"), with_copy)
    rows = metrics_of(without_copy)
    assert [row["kl_ref"] > 1e-6 for row in rows] == [False, True, True, True]
    assert rows == metrics_of(with_copy)
    assert_equal(checkpoint_of(without_copy, 4), checkpoint_of(with_copy, 4))
    resumed = copy_as_of(without_copy, 2, tmp_path / "resumed")
    train(config_of(*settings), resumed, resume=True)
    assert metrics_of(resumed) == rows


def test_the_reference_under_lora_takes_no_memory(base, capsys):
    module, _ = build(config_of(*settings_of(base, "kl=k3")))
    assert module.reference is module.policy
    assert sum(weight.numel() for weight in module.parameters()) == 6480
    overrides = (
        "model=huggingface",
        f"model.path={base}",
        *LORA,
        "kl=k3",
        "rollout.max_completion_length=16",
        "trainer.device=cpu",
    )
    assert main(["check", *overrides]) == 0
    line = "memory: none, since it is the model in training without its adapters"
    assert line in capsys.readouterr().out


def test_transformers_and_peft_load_a_checkpoint(base, trained):
    path = newest_checkpoint(trained)
    expected = logits_in_training(base, trained)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert (logits(plain) - expected).abs().max() > 0.02
    by_peft = PeftModel.from_pretrained(plain, path)
    by_transformers = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for model in (by_peft, by_transformers):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_an_export_is_the_model_with_its_adapters_merged_in_its_number_type(
    base, trained, tmp_path, capsys
):
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


def test_adapters_are_refused_where_the_base_model_has_changed_or_is_gone(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "base")
    train(config_of(*settings_of(tmp_path / "base", "trainer.max_steps=1")), tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] += 0.5
    model.save_pretrained(tmp_path / "base")
    message = (
        "does not fit the configured model: its adapters were trained on other weights than "
        "model.path has now"
    )
    # Other files may hold the same weights, so that accepting them is not enough.
    accepted = ["trainer.max_steps=2", "trainer.accept_changed_data=true"]
    for command in (
        ["resume", tmp_path / "run", *accepted],
        ["export", tmp_path / "run", tmp_path / "m"],
    ):
        assert message in refusal(capsys, *command)
    shutil.rmtree(tmp_path / "base")
    assert f"model.path={tmp_path / 'base'} needs " in refusal(
        capsys, "export", tmp_path / "run", tmp_path / "m"
    )
    assert not (tmp_path / "m").exists()


def test_adapters_fit_the_base_model_in_any_number_type(base, trained):
    for dtype in (NumberType.float32, NumberType.bfloat16):
        policy = build_policy(
            model_config(base, dtype=dtype, lora_rank=2, lora_alpha=6.0), None, False
        )
        load_weights(policy, load_newest(trained / "checkpoints"))
        assert {weight.dtype for weight in policy.model.parameters()} == {
            torch.float32,
            getattr(torch, dtype),
        }


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (None, "it holds LoRA's adapters alone"),
        (3, "lora_A.weight is of .2, 16, torch.float32., not"),
    ],
)
def test_adapters_of_another_rank_and_adapters_without_lora_are_refused(
    base, trained, rank, message
):
    policy = build_policy(model_config(base, lora_rank=rank), None, False)
    with pytest.raises((ConfigError, ValueError), match=message):
        load_weights(policy, load_newest(trained / "checkpoints"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"data_parallel": 2}, ["model.dtype=bfloat16"]),
        ({"sequence_data_parallel": 2}, ["parallelism.shard=true"]),
    ],
    ids=["ddp in bfloat16", "sequence data and fsdp"],
)
def test_ranks_train_adapters_as_one_process_does_and_continue_its_run(
    base, recorded, tmp_path, sizes, changes
):
    """Three steps on recorded rollouts, and the last two of them from the checkpoint of one
    process."""
    settings = with_model(
        base,
        "aggregation=constant",
        "aggregation.divisor=4",
        "trainer.checkpoint_every=1",
        *LORA,
        *changes,
        of=recorded,
    )
    of_one_process = [setting for setting in settings if "shard" not in setting]
    in_one_process = run_on_ranks(tmp_path / "one", of_one_process)
    assert [row["grad_norm"] > 1e-4 for row in metrics_of(in_one_process)] == [True] * 3
    tolerance = 0.03 if "model.dtype=bfloat16" in changes else 1e-4
    ends = "trainer.checkpoint_every=3"
    on_ranks = run_on_ranks(tmp_path / "ranks", [*settings, ends], **sizes)
    assert_runs_close(on_ranks, in_one_process, tolerance)
    resumed = copy_as_of(in_one_process, 1, tmp_path / "resumed")
    run_on_ranks(resumed, [*settings, ends], resume=True, **sizes)
    assert_runs_close(resumed, in_one_process, tolerance)

    before = checkpoint_of(resumed, 3)
    config = config_of(*settings, *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))
    world(2).run(load_and_save, config, resumed, sizes)
    after = checkpoint_of(resumed, 3)
    assert_equal(after["model"], before["model"])
    assert_equal(after["optimizer"], before["optimizer"])
    assert len(list((resumed / "checkpoints" / "step-000003").glob("*.safetensors"))) == 1
    loaded = copy_as_of(resumed, 3, tmp_path / "loaded")
    run_on_ranks(loaded, of_one_process, resume=True)
    assert_equal(checkpoint_of(loaded, 3)["model"], after["model"])

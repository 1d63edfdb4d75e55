"""The reference model of a penalty: its weights, how it moves, over ranks, and recorded instead.

Distances are compared with those of the models' own logits, and with runs of one process.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.rollout_rows import write_jsonl
from builders.runs import SHORT, config_of, metrics_of, module_and_loader, run, with_model

from pgtoolkit.assembly.build import reference_of
from pgtoolkit.assembly.train import train
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import ConfigError, DataError

PENALTIES = ("kl=k3", "kl.coefficient=0.3", "entropy.coefficient=0.02")
MOVING = (
    "kl=k3",
    "kl.coefficient=0.3",
    "kl.update_every=2",
    "kl.update_rate=0.25",
    "optimizer.learning_rate=0.02",
)
"""After every other update the reference goes a quarter of the way to the policy."""
FULL_KL_OF_ADAPTERS = (
    "kl=full_reverse",
    "kl.coefficient=0.3",
    "model.lora_rank=2",
    "optimizer.learning_rate=0.02",
)
WITHOUT_AGGREGATION = [setting for setting in SHORT if not setting.startswith("aggregation")]


def llama(folder: Path, *, seed: int = 0, **changes) -> Path:
    return save_with_tokenizer(small_llama(seed, **changes), folder)


def train_on(folder: Path, path: Path, *overrides: str) -> Path:
    """Train the model at `path` in `folder` with the short settings."""
    config = config_of(*with_model(path, *overrides))
    assert validate(config)[1].problems == []
    train(config, folder, overrides=list(overrides))
    return folder


def log_softmax_rows(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return (T, V) log-probs of the token after each position, at a temperature of 0.7."""
    return (model(tokens[None]).logits[0].detach().double() / 0.7).log_softmax(-1)


def sharpen(models: Sequence[torch.nn.Module]) -> None:
    """Multiply the heads by 30, for distances that rounding does not hide."""
    for model in models:
        model.get_output_embeddings().weight.data.mul_(30)


def test_the_first_distance_is_exactly_zero(tmp_path):
    rows = metrics_of(run(tmp_path / "run", *PENALTIES, "loss=grpo"))
    assert rows[0]["kl_ref"] == 0
    assert all(row["kl_ref"] > 1e-6 for row in rows[1:])
    assert all(0 < row["entropy"] < 2.5 for row in rows)


def test_a_reference_moves_a_share_of_the_way_to_the_policy():
    module, loader = module_and_loader(*SHORT, *MOVING)
    expected = {name: weight.clone() for name, weight in module.reference.model.named_parameters()}
    for number, step in enumerate(loader, 1):
        module.training_step(step, number)
        for name, weight in module.policy.model.named_parameters():
            if number % 2 == 0:
                expected[name] += 0.25 * (weight.detach() - expected[name])
        for name, weight in module.reference.model.named_parameters():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-15)
    assert number == 6


def test_a_moving_reference_is_kept_in_float32_whatever_the_model_computes_in(tmp_path):
    path = llama(tmp_path / "model")
    module, _ = module_and_loader(*with_model(path, "model.dtype=bfloat16", *MOVING), dtype=None)
    assert {weight.dtype for weight in module.reference.model.parameters()} == {torch.float32}


def test_a_moving_reference_of_adapters_is_refused(tmp_path):
    settings = with_model(llama(tmp_path / "model"), "model.lora_rank=2", *MOVING)
    (problem,) = validate(config_of(*settings))[1].problems
    assert problem.startswith("kl.update_every=2 needs model.lora_rank=null (got 2).")


def test_a_reference_that_was_just_replaced_is_no_distance_away(tmp_path):
    rows = metrics_of(run(tmp_path / "run", *PENALTIES, "loss=grpo", "kl.update_every=2"))
    assert [row["kl_ref"] == 0 for row in rows] == [True, False] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "division"),
    [({"data_parallel": 2}, ("parallelism.shard=true",)), ({"tensor_parallel": 2}, ())],
    ids=["fsdp", "tensor"],
)
def test_a_reference_moves_over_ranks_as_in_one_process(tmp_path, recorded, sizes, division):
    settings = with_model(llama(tmp_path / "base"), *MOVING, of=recorded)
    on_ranks = run_on_ranks(tmp_path / "ranks", [*settings, *division], **sizes)
    assert_runs_close(on_ranks, run_on_ranks(tmp_path / "one", settings), 2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_distance_is_exactly_zero_in_bfloat16(tmp_path, tied):
    """Norms and embedding compute in float32, and the reference keeps them so."""
    path = llama(tmp_path / "model", tie_word_embeddings=tied)
    overrides = (
        path,
        "model.dtype=bfloat16",
        "kl=k3",
        "trainer.max_steps=2",
        "optimizer.learning_rate=1e-2",
    )
    rows = metrics_of(train_on(tmp_path / "run", *overrides))
    assert rows[0]["kl_ref"] == 0
    assert rows[1]["kl_ref"] > 0
    module, _ = module_and_loader(*with_model(*overrides))
    config = config_of(*with_model(*overrides))
    reference = reference_of(config, module.policy).model
    assert reference.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert reference.model.norm.weight.dtype == reference.get_input_embeddings().weight.dtype
    assert reference.model.embed_tokens.weight.dtype != torch.bfloat16
    assert not any(p.requires_grad for p in reference.parameters())


def test_the_distance_to_a_reference_from_a_folder_is_that_of_its_logits(tmp_path):
    """Both have the temperature of the rollouts."""
    path = llama(tmp_path / "model")
    reference_path = llama(tmp_path / "other", seed=3)
    overrides = (
        path,
        "kl=k1",
        f"kl.reference={reference_path}",
        "rollout.temperature=0.7",
        "loss=reinforce",
    )
    module, loader = module_and_loader(*with_model(*overrides))
    step = next(iter(loader))
    distance = module.training_step(step, 0)["metrics"]["kl_ref"]
    expected = 0.0
    for document in step.documents:
        new = log_softmax_rows(module.policy.model, document.tokens)[:-1]
        ref = log_softmax_rows(module.reference.model, document.tokens)[:-1]
        chosen = document.tokens[1:, None]
        gap = (ref.gather(-1, chosen) - new.gather(-1, chosen))[document.loss_mask[1:]]
        expected += float((gap.exp() - gap - 1).mean()) / len(step.documents)
    # The norms of the model compute in float32, whatever its weights are.
    assert distance == pytest.approx(expected, rel=1e-4)
    assert distance > 1e-3


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["full_reverse", "full_forward", "full_jsd"])
def test_distillation_has_the_kl_over_the_vocabulary(tmp_path, kind, kernel):
    """Against the logits of a policy and a teacher of another architecture and width."""
    teacher = llama(tmp_path / "teacher", seed=3, hidden_size=8)
    chosen = (
        f"kl={kind}",
        "kl.coefficient=2",
        f"kl.reference={teacher}",
        f"kernel={kernel}",
        "rollout.temperature=0.7",
        *(["kl.beta=0.3"] if kind == "full_jsd" else []),
    )
    module, loader = module_and_loader(
        *WITHOUT_AGGREGATION, "experiment=distillation", "model=tiny", *chosen
    )
    step = next(iter(loader))
    models = (module.policy.model, module.reference.model)
    sharpen(models)
    distances = []  # (N,) of each document
    for document in step.documents:
        new, ref = (
            log_softmax_rows(model, document.tokens)[:-1][document.loss_mask[1:]]
            for model in models
        )
        terms = new.exp() * (new - ref) if kind == "full_reverse" else ref.exp() * (ref - new)
        if kind == "full_jsd":
            mixed = (0.7 * new.exp() + 0.3 * ref.exp()).log()
            terms = 0.3 * ref.exp() * (ref - mixed) + 0.7 * new.exp() * (new - mixed)
        distances.append(terms.sum(-1))
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["loss"] == pytest.approx(2 * float(torch.cat(distances).mean()), rel=1e-5)
    means = [float(values.mean()) for values in distances]
    assert metrics["kl_ref"] == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert metrics["loss"] > (0.005 if kind == "full_jsd" else 0.02)


@pytest.mark.slow
def test_a_student_approaches_its_teacher(tmp_path, capsys):
    teacher = llama(tmp_path / "teacher", seed=3)
    settings = (
        "experiment=distillation",
        "model=tiny",
        "kl=full_reverse",
        "kl.coefficient=1",
        f"kl.reference={teacher}",
        "trainer.max_steps=12",
        "optimizer.learning_rate=0.02",
    )
    rows = metrics_of(run(tmp_path / "run", *settings))
    assert rows[-1]["kl_ref"] < rows[0]["kl_ref"] / 3
    assert "\ncompare " not in capsys.readouterr().out  # another loss would train the same


def test_the_full_kl_to_the_model_without_its_adapters_is_that_to_a_copy_of_it(tmp_path):
    base = llama(tmp_path / "base")
    for name, reference in (("adapters off", "initial"), ("copy", str(base))):
        overrides = (*FULL_KL_OF_ADAPTERS, f"kl.reference={reference}", "trainer.max_steps=3")
        train_on(tmp_path / name, base, *overrides)
    rows = metrics_of(tmp_path / "adapters off")
    assert rows[0]["kl_ref"] == 0
    assert rows[-1]["kl_ref"] > 0
    assert rows == metrics_of(tmp_path / "copy")


@pytest.mark.slow
def test_the_full_kl_to_a_divided_model_without_its_adapters_is_that_of_one_process(
    tmp_path, recorded
):
    settings = with_model(llama(tmp_path / "base"), *FULL_KL_OF_ADAPTERS, of=recorded)
    sharded = [*settings, "parallelism.shard=true"]
    on_ranks = run_on_ranks(tmp_path / "ranks", sharded, sequence_data_parallel=2)
    assert metrics_of(on_ranks)[-1]["kl_ref"] > 1e-5
    assert_runs_close(on_ranks, run_on_ranks(tmp_path / "one", settings), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "division"),
    [
        ({"tensor_parallel": 2}, ("parallelism.sequence_parallel=true", "kernel=torch")),
        ({"data_parallel": 2}, ("parallelism.shard=true",)),
    ],
    ids=["tensor", "fsdp"],
)
def test_the_full_kl_over_ranks_is_that_of_one_process(tmp_path, recorded, sizes, division):
    teacher = llama(tmp_path / "teacher", seed=3)
    kl = ("kl=full_forward", "kl.coefficient=0.3", f"kl.reference={teacher}")
    settings = with_model(llama(tmp_path / "base"), *kl, of=recorded)
    on_ranks = run_on_ranks(tmp_path / "ranks", [*settings, *division], **sizes)
    assert_runs_close(on_ranks, run_on_ranks(tmp_path / "one", settings), 2e-5)


PROMPTED = (
    "experiment=distillation",
    "model=tiny",
    "kl.coefficient=1",
    "kl.reference_prompt='{answer}={prompt}'",
)


@pytest.mark.parametrize("kind", ["k3", "full_reverse"])
def test_a_teacher_reads_its_prompt_before_the_same_completion(tmp_path, kind):
    """Against the logits of both models; the teacher's prompt is the longer one."""
    chosen = (
        f"kl={kind}",
        f"kl.reference={llama(tmp_path / 'teacher', seed=3)}",
        "rollout.temperature=0.7",
    )
    module, loader = module_and_loader(*WITHOUT_AGGREGATION, *PROMPTED, *chosen)
    step = next(iter(loader))
    sharpen((module.policy.model, module.reference.model))
    total = 0.0
    num_tokens = 0
    for document in step.documents:
        prompt = document.tokens[:4]
        completion = document.tokens[4:]
        # 428= becomes 824=428=
        for_teacher = torch.cat([prompt[:3].flip(0), prompt[3:], prompt, completion])
        places = slice(-len(completion) - 1, -1)
        new = log_softmax_rows(module.policy.model, document.tokens)[places]
        ref = log_softmax_rows(module.reference.model, for_teacher)[places]
        gap = (ref - new).gather(-1, completion[:, None])
        terms = gap.exp() - gap - 1 if kind == "k3" else new.exp() * (new - ref)
        total += float(terms.sum())
        num_tokens += len(completion)
    loss = module.training_step(step, 0)["metrics"]["loss"]
    assert loss == pytest.approx(total / num_tokens, rel=1e-5)
    assert loss > 0.1


def test_the_prompt_of_the_teacher_counts_in_the_limits_of_tokens(tmp_path):
    """4 + 4 tokens of prompts leave 4 tokens for a completion in 12, and too few in 11."""
    _, loader = module_and_loader(*WITHOUT_AGGREGATION, *PROMPTED, "kl.reference=initial")
    for micro_batch in next(iter(loader)).micro_batches:
        assert len(micro_batch.tokens) < len(micro_batch.for_reference.tokens) <= 24
    too_few_tokens = ("accumulation.max_tokens=11", "kl.reference=initial")
    with pytest.raises(
        DataError,
        match=r"prompts, or what kl\.reference_prompt makes of them, do not fit into 7 tokens",
    ):
        module_and_loader(
            *[setting for setting in WITHOUT_AGGREGATION if "max_tokens" not in setting],
            *PROMPTED,
            *too_few_tokens,
        )
    problems = validate(config_of(*SHORT, *PROMPTED, *too_few_tokens))[1].problems
    assert problems[0].startswith("accumulation.max_tokens=11 needs")
    teacher = llama(tmp_path / "teacher", max_position_embeddings=11)
    with pytest.raises(DataError, match="of them, do not fit into 7 tokens"):
        module_and_loader(*WITHOUT_AGGREGATION, *PROMPTED, f"kl.reference={teacher}")


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    path = llama(tmp_path / "model")
    wider = llama(tmp_path / "wider", vocab_size=14)
    alternative = ", or kl.reference=initial"
    refused = r"kl.reference=.*wider needs the vocabulary of the policy, 12 rows .*got 14"
    with pytest.raises(ConfigError, match=f"{refused}.* the same family{alternative}.$"):
        module_and_loader(*with_model(path, "kl=k3", f"kl.reference={wider}"))
    # A teacher may not be the policy itself.
    with pytest.raises(ConfigError, match=f"{refused}.* the same family.$"):
        module_and_loader(
            *with_model(
                path, "experiment=distillation", f"kl.reference={wider}", of=WITHOUT_AGGREGATION
            )
        )


def test_a_reference_with_other_tokens_or_without_a_configuration_is_refused(tmp_path):
    path = llama(tmp_path / "model")
    renamed = llama(tmp_path / "renamed")
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    numbers = tokenizer["model"]["vocab"]
    numbers["1"], numbers["2"] = numbers["2"], numbers["1"]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="10 of these tokens under the same number"):
        module_and_loader(*with_model(path, "kl=k3", f"kl.reference={renamed}"))
    (renamed / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"^kl.reference=.* needs a model that transformers can load"
    ):
        module_and_loader(*with_model(path, "kl=k3", f"kl.reference={renamed}"))


def rows_with_reference() -> list[dict]:
    """Return rows of two groups, with three trained tokens each, whose reference log-prob is 0.3
    below the old one."""
    return [
        {
            "token_ids": [number, 1, 10, number, 1, 2],
            "loss_mask": [False, False, False, True, True, True],
            "old_log_probs": [0, 0, 0, -2.5, -2.4, -2.3],
            "ref_log_probs": [0, 0, 0, -2.8, -2.7, -2.6],
            "reward": number % 3,
            "advantage": number / 8,
            "group_id": number // 4,
        }
        for number in range(8)
    ]


def test_recorded_log_probs_of_a_reference_make_the_penalty_without_a_model(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", rows_with_reference())
    settings = [
        "rollout=recorded",
        f"rollout.path={path}",
        "kl=k1",
        "kl.coefficient=2",
        "loss=reinforce",
    ]
    settings += [
        "advantage=given",
        "aggregation=token_mean",
        "kl.reference=recorded",
        "model.hidden_size=8",
    ]
    module, loader = module_and_loader("tracking=none", *settings, "model.num_heads=2")
    assert module.reference is None
    step = next(iter(loader))
    assert torch.allclose(step.documents[0].ref_log_probs, torch.tensor([-2.8, -2.7, -2.6]))
    metrics = module.training_step(step, 0)["metrics"]
    plain, _ = module_and_loader(
        "tracking=none",
        *[setting for setting in settings if not setting.startswith("kl")],
        "model.num_heads=2",
    )
    without = plain.training_step(step, 0)["metrics"]
    # k1 of a step is its mean new log-prob minus the mean log-prob of the reference; without a
    # penalty it is a metric only.
    assert metrics["loss"] == pytest.approx(
        without["loss"] + 2 * (metrics["new_logprobs"] + 2.7), rel=1e-6
    )
    assert without["kl_ref"] == pytest.approx(metrics["kl_ref"], rel=1e-12)


def test_recorded_log_probs_of_a_teacher_distil_without_rewards(tmp_path):
    rows = [
        {key: x for key, x in row.items() if key not in ("reward", "advantage")}
        for row in rows_with_reference()
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    chosen = (
        "experiment=distillation",
        "rollout=recorded",
        f"rollout.path={path}",
        "kl.reference=recorded",
    )
    module, loader = module_and_loader(
        "tracking=none", "model=tiny", *chosen, "model.hidden_size=8", "model.num_heads=2"
    )
    step = next(iter(loader))
    (micro_batch,) = step.micro_batches
    new = module.log_probs(micro_batch)[micro_batch.labels >= 0].double()
    old, ref = (torch.tensor([x, x + 0.1, x + 0.2]).double().repeat(8) for x in (-2.5, -2.8))
    expected = ((ref - new).exp() - (ref - new) - 1) * (new - old).exp()
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["loss"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert metrics["grad_norm"] > 1e-3


def test_a_pipeline_trains_on_recorded_reference_log_probs_as_one_process_does(tmp_path, recorded):
    """With an entropy bonus; the last stage of the pipeline has the loss."""
    settings = [setting for setting in recorded if not setting.startswith("rollout.path")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows_with_reference())
    settings += [
        f"rollout.path={path}",
        "aggregation=constant",
        "aggregation.divisor=4",
        "kl=k3_ratio",
    ]
    settings += [
        "kl.reference=recorded",
        "entropy.coefficient=0.1",
        "metrics=none",
        "rollout.epochs=3",
    ]
    on_ranks = run_on_ranks(tmp_path / "ranks", settings, pipeline_parallel=2)
    assert_runs_close(on_ranks, run_on_ranks(tmp_path / "one", settings))

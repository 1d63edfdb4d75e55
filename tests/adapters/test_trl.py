"""TRL's trainer with its own loss against the same with ours: the weights after real steps,
sampling included.

Two updates are made with each batch, so that ratios leave 1 and the clips act; an update takes two
micro-batches.
"""

import json
import os

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl")
pytest.importorskip("peft", reason="the extra lora")

import accelerate
import trl
from adapters import trl_runs
from builders.models import small_llama
from builders.processes import ForkedProcess, free_port
from builders.quick import with_slow_rest
from peft import LoraConfig

from pgtoolkit import corrections, families, top_entropy

TWICE = {"num_iterations": 2, "max_steps": 4, "learning_rate": 2.0}
NARROW = {"epsilon": 0.01, "epsilon_high": 0.015}
GSPO = families.Gspo(epsilon_low=0.01, epsilon_high=0.015)
SEQUENCE = {"importance_sampling_level": "sequence"}
# With the flags of docs/papers.md TRL's own loss is compared in test_papers.py: here is what the
# trainer adds to it.
EQUAL = [
    # (TRL's flags, our trainer's keywords, flags of both)
    ({"loss_type": "grpo"}, {"loss": "grpo", "aggregation": "sample_mean"}, {}),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"beta": 0.3}),
    (
        {"epsilon_high": 0.28, "delta": 1.4},
        {"loss": families.Grpo(epsilon_high=0.28, dual_clip=1.4), "aggregation": "token_mean"},
        {},
    ),
    ({"loss_type": "grpo"} | SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "sample_mean"}, {}),
    (
        {"off_policy_mask_threshold": 0.05},
        {
            "loss": "grpo",
            "aggregation": "token_mean",
            "correction": corrections.OffPolicyMask(threshold=0.05),
        },
        {},
    ),
    (
        {"loss_type": "bnpo"},
        {"loss": "grpo", "aggregation": "token_mean"},
        {"gradient_accumulation_steps": 1},
    ),
]
APART = [
    # (TRL's flags, our trainer's keywords, flags of both, how far apart after two updates)
    ({"loss_type": "bnpo"}, {"loss": "grpo", "aggregation": "token_mean"}, {}, 0.229),
    (
        {},
        {"loss": "grpo", "aggregation": "token_mean"},
        {"steps_per_generation": 4, "seed": 1},
        0.191,
    ),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"entropy_coef": 0.3}, 0.0038),
    (SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "token_mean"}, {"beta": 0.3}, 0.205),
]


NOT_SHOWN = {"step_time", "train_runtime", "policy_loss", "entropy_coef"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save the small model, since TRL reads the reference again, and return its folder."""
    folder = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(folder)
    return str(folder)


def trained_by_both(
    flags: dict, ours: dict, common: dict, folder: str, engine: dict | None = None
) -> tuple:
    """Return weights and log with TRL's own loss, the same with ours, and how far the former moved
    the weights."""
    start = torch.cat([x.detach().flatten() for x in small_llama().parameters()])
    tasks = (None, TWICE | common | flags, engine), (ours, TWICE | common, engine)
    theirs, ours_trained = (trl_runs.trained(trl_runs.trainer(folder, *task)) for task in tasks)
    return theirs, ours_trained, (theirs[0] - start).norm()


@pytest.mark.parametrize(("flags", "ours", "common"), with_slow_rest(EQUAL, 1), ids=str)
def test_trls_own_loss_with_these_flags_trains_the_same_weights(flags, ours, common, folder):
    (exact, their_log), (weights, log), moved = trained_by_both(flags, ours, common, folder)
    assert float(moved) > 1
    torch.testing.assert_close(weights, exact, rtol=0, atol=4e-6)
    for theirs, row in zip(their_log[:-1], log[:-1], strict=True):
        for name in theirs.keys() - NOT_SHOWN:
            assert row[name] == pytest.approx(theirs[name], abs=1e-5), name


@pytest.mark.parametrize(("flags", "ours", "common", "apart"), with_slow_rest(APART, 1), ids=str)
def test_where_trl_computes_something_else_the_weights_differ_by_as_much(
    flags, ours, common, apart, folder
):
    (exact, _), (weights, _), moved = trained_by_both(
        flags, ours, {"max_steps": 2} | common, folder
    )
    assert float((weights - exact).norm() / moved) == pytest.approx(apart, rel=0.05)


ENGINES = [
    {},  # TRL's default: documents whose ratio is above 3 are left out
    {
        "vllm_importance_sampling_mode": "sequence_truncate",
        "vllm_importance_sampling_clip_max": 1.5,
    },
    {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.8},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
    {"vllm_importance_sampling_correction": False},
]


@pytest.mark.parametrize("engine", with_slow_rest([(engine,) for engine in ENGINES], 1), ids=str)
def test_the_correction_for_vllms_log_probs_is_trls(engine, folder):
    task = {"loss_type": "grpo"}, {"loss": "grpo", "aggregation": "sample_mean"}, {}, folder
    (exact, _), (weights, log), moved = trained_by_both(*task, engine)
    assert float(moved) > 1
    torch.testing.assert_close(weights, exact, rtol=0, atol=4e-6)
    assert log[0]["pgtk/difference_old_sampling"] > 0.2
    assert ("pgtk/correction_factor" in log[0]) == (engine != ENGINES[-1])


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["prompt_mean", "balanced", "token_mean"])
def test_a_step_does_not_depend_on_how_it_is_cut(aggregation, folder):
    ours = {"loss": "gspo", "aggregation": aggregation}
    coarse = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    fine = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    results = [
        trl_runs.trained(trl_runs.trainer(folder, ours, TWICE | cut)) for cut in (coarse, fine)
    ]
    (exact, of_whole), (weights, of_fine) = results
    torch.testing.assert_close(weights, exact, rtol=0, atol=4e-6)
    for row, fine_row in zip(of_whole[:-1], of_fine[:-1], strict=True):
        for name in (name for name in row if name.startswith("pgtk/")):
            assert fine_row[name] == pytest.approx(row[name], abs=1e-5), name
    assert of_whole[0].get("pgtk/num_groups") == (None if aggregation == "token_mean" else 2)


@pytest.mark.slow
def test_two_processes_train_as_trls_do_and_share_their_totals(folder, tmp_path):
    """A prompt's completions lie on both processes where each has two of them in a micro-batch."""
    token = {"loss": "grpo", "aggregation": "token_mean"}
    prompt = {"loss": "grpo", "aggregation": "balanced"}
    small = {"ddp_backend": "gloo", "per_device_train_batch_size": 2}
    coarse = small | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    # Here DDP looks for the parameters of a step in what its forward pass returns.
    with_kl = small | {"beta": 0.1, "ddp_find_unused_parameters": True}
    with_kl |= {"gradient_checkpointing": False}
    groups = {"loss": "tpo", "aggregation": "prompt_mean"}
    tasks = [(None, with_kl), (token, with_kl), (prompt, small), (prompt, coarse)]
    tasks += [(groups, small), (groups, coarse)]
    words = [
        json.dumps([(folder, ours, TWICE | changes) for ours, changes in tasks]),
        str(tmp_path / "found.pt"),
    ]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log = tmp_path / "printed"
    process = ForkedProcess(words, tmp_path, os.environ | place, log, trl_runs.__file__)
    assert process.wait(500) == 0, log.read_text()
    results = torch.load(tmp_path / "found.pt")
    by_trl, by_token, fine_cut, coarse_cut, *of_groups = (weights for weights, _ in results)
    torch.testing.assert_close(*of_groups, rtol=0, atol=4e-6)
    assert float((of_groups[0] - fine_cut).abs().max()) > 0.001
    log = results[2][1]
    torch.testing.assert_close(by_token, by_trl, rtol=0, atol=4e-6)
    torch.testing.assert_close(fine_cut, coarse_cut, rtol=0, atol=4e-6)
    assert log[0]["pgtk/num_groups"] == 2
    assert log[0]["pgtk/num_documents"] == 8
    assert float((fine_cut - by_token).abs().max()) > 0.01


def test_a_correction_may_be_an_object_and_evaluations_are_whole_steps(folder):
    """An object with TRL's bounds corrects as TRL's settings in GRPOConfig do."""
    engine = {
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_min": 0.5,
    }
    losses = []
    for correction in (None, corrections.TokenMask(low=0.5, high=3.0)):
        made = trl_runs.trainer(
            folder, {"loss": "grpo", "aggregation": "prompt_mean"}, {"max_steps": 1}, engine
        )
        made.correction = correction
        assert made.correction_of_config() == corrections.TokenMask(low=0.5, high=3.0)
        metrics = made.evaluate(made.train_dataset.select(range(2)))
        assert metrics["eval_pgtk/num_groups"] == 2
        assert metrics["eval_pgtk/num_documents"] == 8
        losses.append(metrics["eval_loss"])
    assert losses[0] == losses[1] != 0


HEADS = [
    # (our trainer's keywords, flags, of an engine)
    ({"loss": GSPO, "aggregation": "sample_mean"}, {"temperature": 0.7, "beta": 0.3}, None),
    (
        {"loss": "grpo", "aggregation": "token_mean"},
        {"entropy_coef": 0.3, "num_iterations": 1},
        None,
    ),
    ({"loss": "vespo", "aggregation": "prompt_mean"}, {"cast_lm_head_to_fp32": True}, ENGINES[1]),
    ({"loss": "cispo", "aggregation": "token_mean", "peft_config": LoraConfig(r=4)}, {}, None),
]


@pytest.mark.parametrize(
    ("ours", "changes", "engine"), with_slow_rest(HEADS, 1), ids=lambda value: str(value)[:60]
)
def test_the_fused_head_trains_the_same_weights(ours, changes, engine, folder):
    """It has the same metrics, and calls TRL's head only for old and reference log-probs."""
    results = []
    for fused in (False, True):
        torch.manual_seed(0)  # for the adapters
        made = trl_runs.trainer(folder, ours | {"fused_head": fused}, TWICE | changes, engine)
        start = torch.cat([x.detach().flatten() for x in made.model.parameters()])
        calls, by_trl = [], made._get_per_token_logps_and_entropies

        def counted(*arguments, by_trl=by_trl, calls=calls, **keywords):
            calls.append(torch.is_grad_enabled())
            return by_trl(*arguments, **keywords)

        made._get_per_token_logps_and_entropies = counted
        results.append(trl_runs.trained(made))
        assert any(calls) == (not fused)
    (exact, their_log), (weights, log) = results
    torch.testing.assert_close(weights, exact, rtol=0, atol=4e-6)
    assert float((weights - start).norm()) > 0.1
    for theirs, row in zip(their_log[:-1], log[:-1], strict=True):
        for name in theirs.keys() - {"step_time"}:
            assert row[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name


NOT_FUSED = [
    ({}, {"entropy_coef": 0.3}, "GRPOConfig.entropy_coef is of a mean over tokens"),
    ({"logit_scale": 0.5}, {}, "the model scales its logits by logit_scale"),
]


@pytest.mark.parametrize(
    ("of_model", "changes", "reason"), NOT_FUSED, ids=lambda value: str(value)[:60]
)
def test_a_head_that_cannot_be_fused_is_computed_by_trl(of_model, changes, reason, tmp_path):
    small_llama(**of_model).save_pretrained(tmp_path)
    ours = {"loss": "grpo", "aggregation": "sample_mean"}
    assert trl_runs.trainer(str(tmp_path), ours, changes).fused_head is False
    with pytest.raises(ValueError, match=f"fused_head=True is impossible here: {reason}"):
        trl_runs.trainer(str(tmp_path), ours | {"fused_head": True}, changes)


REFUSED = [
    (
        {"loss": "grpo", "aggregation": "sample_mean"},
        {"loss_type": "grpo", "epsilon": 0.1, "delta": 2.0},
        [
            (
                "GRPOConfig.loss_type='grpo' has no effect on this loss. Use loss= and "
                "aggregation= of the trainer."
            ),
            (
                "GRPOConfig.epsilon=0.1 has no effect on this loss. Use "
                "loss=pgtoolkit.families.Grpo(epsilon_low=..., "
            ),
            (
                "GRPOConfig.delta=2.0 has no effect on this loss. Use "
                "loss=pgtoolkit.families.Grpo(dual_clip=...)."
            ),
        ],
    ),
    # The parameters are those of the loss that is named, or there are none.
    (
        {"loss": "gspo", "aggregation": "sample_mean"},
        {"epsilon_high": 0.28, "delta": 2.0, "sapo_temperature_pos": 1.5},
        [
            (
                "GRPOConfig.epsilon_high=0.28 has no effect on this loss. Use "
                "loss=pgtoolkit.families.Gspo(epsilon_low=..., epsilon_high=...)."
            ),
            ("GRPOConfig.delta=2.0 has no effect on this loss. Use None: gspo has no dual_clip."),
            (
                "GRPOConfig.sapo_temperature_pos=1.5 has no effect on this loss. Use 1.0: gspo has "
                "no temperature_positive."
            ),
        ],
    ),
    (
        {"loss": "grpo", "aggregation": "token_mean"},
        {"steps_per_generation": 1, "num_generations": 2},
        ["GRPOConfig.steps_per_generation=1 needs a multiple of gradient_accumulation_steps (2)"],
    ),
    (
        {"loss": "grpo", "aggregation": "token_mean", "correction": "token_mask"},
        {"vllm_importance_sampling_clip_max": 2.0},
        [
            (
                "GRPOConfig.vllm_importance_sampling_clip_max=2.0 has no effect beside "
                "correction=token_mask"
            ),
            "correction=token_mask needs a sampler's log-probs. Use GRPOConfig.use_vllm=True",
        ],
    ),
    (
        {"loss": "grpo", "aggregation": "token_mean", "correction": "off_policy_mask"},
        {"use_vllm": True},
        [
            (
                "correction=off_policy_mask and "
                "GRPOConfig.vllm_importance_sampling_correction=True would be two corrections"
            )
        ],
    ),
    (
        {"loss": "gspo", "aggregation": "constant"},
        {},
        ["aggregation='constant' needs a finite divisor > 0 (got None)"],
    ),
]


@pytest.mark.parametrize(
    ("ours", "changes", "messages"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_settings_that_trl_and_we_both_have_or_that_trl_lacks_are_refused(
    ours, changes, messages, folder
):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        trl_runs.trainer(folder, ours, changes)
    lines = str(raised.value).split("\n")
    assert len(lines) == len(messages)
    assert [
        message
        for line, message in zip(lines, messages, strict=True)
        if not line.startswith(message)
    ] == []


@pytest.mark.parametrize("fraction", [0.2, 0.35, 1.0])
def test_the_most_uncertain_tokens_of_a_micro_batch_are_trls(fraction):
    """Of one that is the whole step; of parts of a step TRL keeps others."""
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)  # for its choice, without model and data
    trainer.accelerator = accelerate.Accelerator(cpu=True)
    draw = torch.Generator().manual_seed(0)
    entropy = 3 * torch.rand(16, 40, generator=draw) ** 4
    entropy[:, 0] = entropy[0, 0]  # a prompt's first tokens have the same one
    mask = torch.arange(40) < torch.randint(10, 41, (16, 1), generator=draw)

    def by_trl(rows: slice) -> torch.Tensor:
        return trainer.get_high_entropy_mask(entropy[rows], mask[rows].long(), 1 - fraction)

    flat = entropy.flatten(), mask.flatten()
    ours = top_entropy(*flat, fraction).factors.bool().view_as(mask)
    assert torch.equal(by_trl(slice(None)), ours)
    parts = torch.cat([by_trl(slice(0, 8)), by_trl(slice(8, 16))])
    assert torch.equal(parts, ours) == (fraction == 1)

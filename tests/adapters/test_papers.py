"""docs/papers.md is right: its equations are those that are printed, and with the flags on it the
losses of TRL and verl have our loss and gradient."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from adapters import padded
from adapters.padded import LENGTHS, WIDTH
from torch import Tensor

from pgtoolkit.config.compose import compose
from pgtoolkit.config.plan import equation
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import KL

PAGE = Path(__file__).parents[2] / "docs/papers.md"
ADVANTAGES = padded.batch()[2]
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.read_text().split("\n## ")[1:]}


def configuration(section: str) -> Config:
    """Return the configuration of a section's command."""
    (command,) = re.findall(r"^pgtk (.*)$", SECTIONS[section], flags=re.MULTILINE)
    return compose(command.split()).config


@pytest.fixture(autouse=True)
def beside_the_example_losses(monkeypatch):
    monkeypatch.chdir(PAGE.parents[1] / "examples/losses")


def flags(section: str, peer: str) -> dict[str, object]:
    """Return the flags that the section gives for TRL or verl, or {} if it gives none."""
    match = re.search(rf"^\* {peer}: `([^`]*=[^`]*)`", SECTIONS[section], flags=re.MULTILINE)
    if match is None:
        return {}
    return {key: value(text) for key, text in (flag.split("=") for flag in match[1].split())}


def value(text: str) -> object:
    """Return the value in Python's type."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new, old and reference log-probs and the mask, (B, WIDTH) in float64.

    Some documents stay within every clip, others do not.
    """
    generator = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), WIDTH)
    old = -2 + 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    drift = torch.tensor([3e-4, 0.15, 3e-4, 0.5, 1.5, 0.15], dtype=torch.float64)[:, None]
    new = old + drift * torch.randn(*shape, generator=generator, dtype=torch.float64)
    reference = new + 0.1 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return new, old, reference, padded.batch()[3]


def ours(config: Config) -> tuple[Tensor, Tensor]:
    """Return loss and gradient by the log-probs of the step under a configuration."""
    new, old, reference, mask = batch()
    penalty = {}
    if config.kl.kind != "none":
        penalty = {"kl": KL(config.kl.kind, config.kl.coefficient), "ref_log_probs": reference}
    return padded.ours(
        configured(config.loss, FAMILIES),
        {},
        config.aggregation.mode,
        config.aggregation.divisor,
        (new, old, ADVANTAGES, mask),
        **penalty,
    )


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_the_equation_that_check_prints(section):
    config = configuration(section)
    printed = [line.strip() for line in equation(config)]
    written = [line.strip() for line in SECTIONS[section].split("```")[1].splitlines()[2:]]
    assert len(written) >= 2
    # Legends of the letters follow in what is printed.
    lines = [
        line for line in written if not any(f"{full},".startswith(f"{line},") for full in printed)
    ]
    assert lines == []


def test_the_page_has_every_experiment():
    named = {*re.findall(r"^pgtk experiment=(\w+)", PAGE.read_text(), flags=re.MULTILINE)}
    without_paper = {"gsm8k", "guess", "sums"}
    experiments = {file.stem for file in (PAGE.parents[1] / "conf/experiment").glob("*.yaml")}
    assert named | without_paper == experiments


@pytest.mark.parametrize("section", [section for section in SECTIONS if flags(section, "TRL")])
def test_trls_own_loss_with_the_flags_of_the_page_is_ours(section, tmp_path):
    trl = pytest.importorskip("trl", reason="the extra trl")
    settings = {
        "gradient_accumulation_steps": 1,
        "report_to": [],
        "bf16": False,
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "num_generations": 2,
    }
    args = trl.GRPOConfig(str(tmp_path), **(settings | flags(section, "TRL")))
    new, old, reference, mask = batch()
    leaf = new.clone().requires_grad_()
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)  # for its loss, without model and data
    trainer.args = args
    trainer.accelerator = trl_accelerator()
    trainer.model = torch.nn.Identity()
    trainer.aux_loss_enabled = False
    trainer.use_vllm = False
    trainer._entropy_bonus_enabled = False
    trainer.vllm_importance_sampling_correction = False
    trainer.top_entropy_quantile = 1.0
    trainer.off_policy_mask_threshold = None
    trainer.loss_type = args.loss_type
    trainer.importance_sampling_level = args.importance_sampling_level
    trainer.beta = args.beta
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.max_completion_length = args.max_completion_length
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        leaf,
        torch.zeros_like(leaf),
        None,
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask.long(),
            "advantages": ADVANTAGES,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    # TRL keeps the temperatures of SAPO in float32.
    tolerance = 1e-6 if section == "SAPO" else 1e-12
    assert_equal((loss.detach(), leaf.grad), ours(configuration(section)), tolerance)


def trl_accelerator() -> object:
    from accelerate import Accelerator  # installed with TRL

    return Accelerator(cpu=True)


@pytest.mark.parametrize("section", [section for section in SECTIONS if flags(section, "verl")])
def test_verls_own_loss_with_the_flags_of_the_page_is_ours(section):
    pytest.importorskip("verl", reason="the extra verl")
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    actor_flags = flags(section, "verl")
    policy_flags = {
        key: actor_flags.pop(key) for key in ("loss_mode", "dro_beta") if key in actor_flags
    }
    policy = PolicyLossConfig(**policy_flags)
    config = FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1, rollout_n=2, policy_loss=policy, **actor_flags
    )
    new, old, reference, mask = batch()
    totals = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(LENGTHS)}
    config.global_batch_info.update(totals, loss_scale_factor=config.loss_scale_factor)
    leaf = new.clone().requires_grad_()
    advantages = ADVANTAGES[:, None].expand_as(old)
    verls_loss = get_policy_loss_fn(policy.loss_mode)
    loss, _ = verls_loss(old, leaf, advantages, mask.long(), config.loss_agg_mode, config)
    if config.use_kl_loss:
        penalty = kl_penalty(leaf, reference, config.kl_loss_type)
        loss = loss + config.kl_loss_coef * agg_loss(
            penalty, mask.long(), config.loss_agg_mode, **totals
        )
    loss.backward()
    # verl adds 1e-8 to the lengths of documents.
    assert_equal((loss.detach(), leaf.grad), ours(configuration(section)), 1e-7)


def assert_equal(
    theirs: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float
) -> None:
    """Assert that loss and gradient are equal within a relative tolerance."""
    loss, gradient = theirs
    expected_loss, expected_gradient = expected
    assert float(loss) == pytest.approx(float(expected_loss), rel=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=1e-14)
    assert (expected_gradient != 0).any()

"""`assert_conforms` compares losses as others write them with the reference: correct ones pass, and
the message names the fault of each wrong one. The examples in examples/ run."""

import math
import os
import re
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from builders.losses import AGGREGATIONS, CORRECTIONS, FAMILIES
from builders.processes import ForkedProcess, free_port
from torch import Tensor

from pgtoolkit import StepTotals, from_padded, log_prob_loss, policy_loss
from pgtoolkit.losses.kl import KINDS, KL
from pgtoolkit.testing import assert_conforms

REPOSITORY = Path(__file__).parents[2]


def grpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    totals: StepTotals,
    *,
    epsilon: float = 0.2,
    select: bool = True,
    slope: float = 1.0,
) -> Tensor:
    """Return GRPO's loss by token, as a trainer would write it.

    select: False multiplies by the mask, in place of a selection. slope: a factor of the gradient.
    """
    difference = log_probs - old_log_probs
    difference = torch.where(mask, difference, 0.0) if select else difference * mask
    ratio = difference.exp()
    ratio = slope * ratio + (1 - slope) * ratio.detach()
    advantages = torch.where(mask, advantages, 0.0)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    return (losses * mask).sum() / totals.num_tokens


def mean_of_tokens(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    return -(log_ratio.exp() * torch.where(mask, advantages, 0.0) * mask).sum() / mask.sum()


def mean_of_documents(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss with metrics, as verl's policy losses do."""
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask, advantages, 0.0)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean(), {"ratio": ratio}


def conformance_error(function: Callable, *args: object, **keywords: object) -> str:
    with pytest.raises(AssertionError) as error:
        assert_conforms(function, *args, **keywords)
    return str(error.value)


def test_correct_losses_conform():
    assert_conforms(grpo, "grpo", aggregation="token_mean")
    assert_conforms(grpo, "grpo", aggregation="token_mean", tolerance=1e-12)
    assert_conforms(mean_of_documents, "grpo", aggregation="sample_mean")


@pytest.mark.parametrize(
    ("family", "aggregation"), [*zip(FAMILIES, cycle(AGGREGATIONS), strict=False)]
)
def test_the_losses_of_this_package_conform(family, aggregation):
    divisor = 8.0 if aggregation == "constant" else None

    def ours(log_probs, old_log_probs, advantages, mask, totals, group_index):
        arguments = from_padded(
            log_probs=log_probs, mask=mask, old_log_probs=old_log_probs, advantages=advantages
        )
        options = {
            "aggregation": aggregation,
            "divisor": divisor,
            "group_index": group_index,
            "totals": totals,
        }
        return log_prob_loss(**arguments, loss=FAMILIES[family], **options).loss

    assert_conforms(
        ours, FAMILIES[family], aggregation=aggregation, divisor=divisor, tolerance=1e-9
    )


@pytest.mark.parametrize(("correction", "kl"), [*zip(CORRECTIONS, cycle(KINDS), strict=False)])
def test_corrections_and_penalties_are_part_of_the_comparison(correction, kl):
    def ours(
        logits, labels, old_log_probs, advantages, mask, totals, sampling_log_probs, ref_log_probs
    ):
        vectors = {
            "old_log_probs": old_log_probs,
            "advantages": advantages,
            "mask": mask,
            "labels": labels,
            "sampling_log_probs": sampling_log_probs,
            "ref_log_probs": ref_log_probs,
        }
        options = {
            "totals": totals,
            "correction": CORRECTIONS[correction],
            "kl": KL(kl, coefficient=0.1),
        }
        return policy_loss(**from_padded(logits=logits, **vectors), **options).loss

    options = {
        "aggregation": "sample_mean",
        "correction": CORRECTIONS[correction],
        "tolerance": 1e-9,
    }
    assert_conforms(ours, "gspo", kl=KL(kl, coefficient=0.1), **options)
    assert "its value is" in conformance_error(ours, "gspo", kl=KL(kl, coefficient=0.2), **options)


@pytest.mark.parametrize(
    ("function", "aggregation", "message"),
    [
        (
            lambda **x: grpo(**x, epsilon=0.1),
            "token_mean",
            "with log-ratios of about 0.6, its value is",
        ),
        (
            lambda **x: grpo(**x, slope=0.5),
            "token_mean",
            "its gradient is wrong by 0.5 of its norm",
        ),
        (
            lambda **x: grpo(**x, select=False),
            "token_mean",
            "with nan wherever mask is False its value is nan",
        ),
        (grpo, "sample_mean", "That is the value of aggregation=token_mean"),
        (lambda **x: -grpo(**x), "token_mean", "on a whole step, on-policy, its value is"),
        (
            lambda mask, totals, **x: grpo(
                mask=mask, totals=type(totals)(6, int(mask.sum()), 0), **x
            ),
            "token_mean",
            (
                "as the sum over micro-batches of a step its value is .*: divide by totals, not by "
                "the counts of a piece"
            ),
        ),
    ],
)
def test_the_message_names_the_fault_of_a_wrong_loss(function, aggregation, message):
    def mine(log_probs, old_log_probs, advantages, mask, totals):
        vectors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
        return function(**vectors, mask=mask, totals=totals)

    error = conformance_error(mine, "grpo", aggregation=aggregation)
    assert error.startswith(
        "mine is not Grpo(epsilon_low=0.2, epsilon_high=0.2, dual_clip=None), aggregation="
    )
    assert re.search(message, error), error


def test_a_mean_over_the_tokens_of_a_piece_is_wrong_over_micro_batches():
    error = conformance_error(
        mean_of_tokens, "grpo", aggregation="token_mean", epsilon_low=0.99, epsilon_high=99.0
    )
    assert "as the mean of two micro-batches of a step" in error
    assert "take a parameter `totals`" in error
    assert "on a whole step" not in error
    options = {"epsilon_low": 0.99, "epsilon_high": 99.0, "micro_batches": False}
    assert_conforms(mean_of_tokens, "grpo", aggregation="token_mean", **options)


def test_functions_and_options_that_cannot_be_compared_are_refused():
    with pytest.raises(
        ValueError,
        match=r"does not know values\. It knows advantages, group_index, labels, log_probs",
    ):
        assert_conforms(lambda log_probs, values: log_probs.sum(), "grpo", aggregation="token_mean")
    for first, shown in (("grpo", "'grpo'"), (lambda log_ratio: -log_ratio, "<lambda>")):
        with pytest.raises(ValueError, match=re.escape(f"Use assert_conforms(grpo, {shown}, ...)")):
            assert_conforms(first, grpo, aggregation="token_mean")
    with pytest.raises(ValueError, match="a function of log_probs or of logits"):
        assert_conforms(lambda mask: mask.sum(), "grpo", aggregation="token_mean")
    with pytest.raises(ValueError, match="needs a loss of single log-probs"):
        assert_conforms(
            grpo, "grpo", aggregation="token_mean", kl=KL("full_reverse", coefficient=1.0)
        )
    with pytest.raises(ValueError, match=r"scalar tensor .got"):
        assert_conforms(lambda log_probs: log_probs, "grpo", aggregation="token_mean")
    for option in ("tolerance", "micro_batches"):
        with pytest.raises(ValueError, match=rf"^{option} needs .*\(got None\)$"):
            assert_conforms(grpo, "grpo", aggregation="token_mean", **{option: None})


@pytest.mark.slow
def test_torch_compile_changes_neither_loss_nor_gradient():
    """The compiled function breaks its graph at the loss."""
    torch.manual_seed(0)
    labels = torch.randint(0, 13, (24,))
    advantages = torch.randn(24)
    index = torch.arange(24) // 6
    results = []
    for backend in (None, "aot_eager"):
        logits = torch.linspace(-2, 2, 24 * 13).sin().view(24, 13).requires_grad_()

        def step(x: Tensor) -> Tensor:
            return policy_loss(
                2 * x, labels, -torch.ones(24), advantages, index, loss="gspo"
            ).loss.square()

        value = (torch.compile(step, backend=backend) if backend else step)(logits)
        value.backward()
        results.append((float(value.detach()), logits.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][1].norm() > 0


def losses_of_example(file: str, folder: Path, count: int = 1) -> list[float]:
    """Run an example in processes with the variables of torchrun; return the losses that they
    print."""
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [folder / f"rank-{rank}" for rank in range(count)]
    processes = [
        ForkedProcess([], REPOSITORY, os.environ | place | {"RANK": str(rank)}, log, file)
        for rank, log in enumerate(logs)
    ]
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            for process in processes:  # the others may wait for the one that failed
                process.kill()
        time.sleep(0.02)
    statuses = [process.returncode for process in processes]
    printed = "".join(log.read_text() for log in logs)
    assert statuses == [0] * count, printed
    return [float(value) for value in re.findall(r"update \d: loss (\S+)", printed)]


@pytest.mark.slow
def test_the_padded_example_prints_the_expected_losses(tmp_path):
    """The first loss, on policy, is minus the mean advantage over tokens, which follows from the
    seed."""
    losses = losses_of_example("examples/padded.py", tmp_path)
    torch.manual_seed(0)
    torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32))
    tokens = torch.randint(0, 32, (8, 12))
    lengths = torch.randint(1, 9, (8,))
    rewards = (tokens == 7).sum(1).float()
    expected = -((rewards - rewards.mean()) * lengths).sum() / lengths.sum()
    assert losses[0] == pytest.approx(float(expected), abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


@pytest.mark.slow
def test_the_ddp_example_prints_the_expected_losses(tmp_path):
    losses = losses_of_example("examples/ddp.py", tmp_path, count=2)
    total = 0.0
    count = 0
    for rank in range(2):
        torch.manual_seed(1 + rank)
        torch.randint(0, 32, (4, 13))
        lengths = torch.randint(1, 13, (4,))
        total -= float((torch.randn(4) * lengths).sum())
        count += int(lengths.sum())
    assert losses[0] == pytest.approx(total / count, abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4
    assert math.isfinite(losses[-1])

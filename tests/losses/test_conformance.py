"""Losses as others write them, held against the reference: right ones pass, and each fault is
named."""

import math
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from builders.losses import AGGREGATIONS, CORRECTIONS, FAMILIES

from pgtoolkit import from_padded, log_prob_loss, policy_loss
from pgtoolkit.losses.kl import KINDS, KL
from pgtoolkit.testing import assert_conforms

REPOSITORY = Path(__file__).parents[2]


def grpo(
    log_probs, old_log_probs, advantages, mask, totals, *, epsilon=0.2, select=True, slope=1.0
):
    """GRPO by token, as a trainer would write it; select=False multiplies by the mask instead."""
    difference = (
        torch.where(mask, log_probs - old_log_probs, 0.0)
        if select
        else (log_probs - old_log_probs) * mask
    )
    ratio = difference.exp()
    ratio = slope * ratio + (1 - slope) * ratio.detach()
    advantages = torch.where(mask, advantages, 0.0)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    return (losses * mask).sum() / totals.num_tokens


def mean_of_tokens(log_probs, old_log_probs, advantages, mask):
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    return -(log_ratio.exp() * torch.where(mask, advantages, 0.0) * mask).sum() / mask.sum()


def mean_of_documents(log_probs, old_log_probs, advantages, mask):
    """Returns metrics, too, as verl's policy losses do."""
    log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    ratio = log_ratio.exp()
    advantages = torch.where(mask, advantages, 0.0)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean(), {"ratio": ratio}


def problems(function, *args, **keywords) -> str:
    with pytest.raises(AssertionError) as error:
        assert_conforms(function, *args, **keywords)
    return str(error.value)


def test_a_right_loss_conforms():
    assert_conforms(grpo, "grpo", aggregation="token_mean")
    assert_conforms(grpo, "grpo", aggregation="token_mean", tolerance=1e-12)
    assert_conforms(mean_of_documents, "grpo", aggregation="sample_mean")


@pytest.mark.parametrize(
    ("family", "aggregation"), [*zip(FAMILIES, cycle(AGGREGATIONS), strict=False)]
)
def test_our_own_losses_conform(family, aggregation):
    divisor = 8.0 if aggregation == "constant" else None

    def ours(log_probs, old_log_probs, advantages, mask, totals, group_index):
        given = from_padded(
            log_probs=log_probs, mask=mask, old_log_probs=old_log_probs, advantages=advantages
        )
        options = {
            "aggregation": aggregation,
            "divisor": divisor,
            "group_index": group_index,
            "totals": totals,
        }
        return log_prob_loss(**given, loss=FAMILIES[family], **options).loss

    assert_conforms(
        ours, FAMILIES[family], aggregation=aggregation, divisor=divisor, tolerance=1e-9
    )


@pytest.mark.parametrize(("correction", "kl"), [*zip(CORRECTIONS, cycle(KINDS), strict=False)])
def test_corrections_and_penalties_are_part_of_it(correction, kl):
    def ours(
        logits, labels, old_log_probs, advantages, mask, totals, sampling_log_probs, ref_log_probs
    ):
        vectors = {
            "old_log_probs": old_log_probs,
            "advantages": advantages,
            "mask": mask,
            "labels": labels,
        }
        vectors |= {"sampling_log_probs": sampling_log_probs, "ref_log_probs": ref_log_probs}
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
    assert "its value is" in problems(ours, "gspo", kl=KL(kl, coefficient=0.2), **options)


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
                "what a piece holds"
            ),
        ),
    ],
)
def test_what_is_wrong_is_named(function, aggregation, message):
    def mine(log_probs, old_log_probs, advantages, mask, totals):
        vectors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
        return function(**vectors, mask=mask, totals=totals)

    found = problems(mine, "grpo", aggregation=aggregation)
    assert found.startswith(
        "mine is not Grpo(epsilon_low=0.2, epsilon_high=0.2, dual_clip=None), aggregation="
    )
    assert re.search(message, found), found


def test_a_mean_of_its_own_tokens_is_wrong_over_micro_batches():
    found = problems(
        mean_of_tokens, "grpo", aggregation="token_mean", epsilon_low=0.99, epsilon_high=99.0
    )
    assert "as the mean of two micro-batches of a step" in found
    assert "take a parameter `totals`" in found
    assert "on a whole step" not in found
    options = {"epsilon_low": 0.99, "epsilon_high": 99.0, "micro_batches": False}
    assert_conforms(mean_of_tokens, "grpo", aggregation="token_mean", **options)


def test_a_question_that_cannot_be_right_is_refused():
    with pytest.raises(
        ValueError,
        match=r"does not know values\. It knows advantages, group_index, labels, log_probs",
    ):
        assert_conforms(lambda log_probs, values: log_probs.sum(), "grpo", aggregation="token_mean")
    with pytest.raises(ValueError, match="a function of log_probs or of logits"):
        assert_conforms(lambda mask: mask.sum(), "grpo", aggregation="token_mean")
    with pytest.raises(ValueError, match="needs a loss of single log-probs"):
        assert_conforms(
            grpo, "grpo", aggregation="token_mean", kl=KL("full_reverse", coefficient=1.0)
        )
    with pytest.raises(ValueError, match=r"scalar tensor .got"):
        assert_conforms(lambda log_probs: log_probs, "grpo", aggregation="token_mean")


def test_torch_compile_goes_around_a_loss():
    """With breaks of the graph: the same value and gradient."""
    torch.manual_seed(0)
    labels, advantages, index = torch.randint(0, 13, (24,)), torch.randn(24), torch.arange(24) // 6
    results = []
    for backend in (None, "aot_eager"):
        logits = torch.linspace(-2, 2, 24 * 13).sin().view(24, 13).requires_grad_()

        def step(x):
            return policy_loss(
                2 * x, labels, -torch.ones(24), advantages, index, loss="gspo"
            ).loss.square()

        value = (torch.compile(step, backend=backend) if backend else step)(logits)
        value.backward()
        results.append((float(value.detach()), logits.grad))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][1].norm() > 0


def run(*command: str) -> list[float]:
    """The losses that an example prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *command]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(value) for value in re.findall(r"update \d: loss (\S+)", done.stdout)]


def test_the_example_of_padded_rows_runs_as_it_stands():
    """On-policy the first loss is minus the mean advantage over tokens, here counted from the
    seed."""
    losses = run("examples/padded.py")
    torch.manual_seed(0)
    torch.nn.Sequential(torch.nn.Embedding(32, 64), torch.nn.Linear(64, 32))
    tokens = torch.randint(0, 32, (8, 12))
    lengths = torch.randint(1, 9, (8,))
    rewards = (tokens == 7).sum(1).float()
    expected = -((rewards - rewards.mean()) * lengths).sum() / lengths.sum()
    assert losses[0] == pytest.approx(float(expected), abs=1e-4)
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 4


def test_the_example_of_ddp_runs_as_it_stands():
    losses = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/ddp.py"
    )
    total, count = 0.0, 0
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

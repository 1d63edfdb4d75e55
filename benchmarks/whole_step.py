"""Measure what a loss of the whole step costs beside GRPO, and a loss function beside its class.

    python benchmarks/whole_step.py FOLDER [--tiny] [--rounds 8] [--max-tokens 65536]

First it checks on this machine's device that losses and gradients of the fused head, with a step in
two pieces, are those of float64 on a CPU; it ends where they are not. Then it times updates of one
process: half a billion random weights, 32 prompts of 64 to 160 tokens with 8 completions of 512
tokens each, recorded, the same in every update, as in docs/performance.md. The cases take turns,
and the first two rounds warm up. The learning rate is so small that the weights stay, so that a
case has the same loss and gradient norm in every round; the function of GRPO must have those of the
class. `--tiny` makes all small enough for a CPU. Prints medians and ratios, and writes
whole_step.json in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from made_up_job import overrides, write_inputs
from rollouts_job import BODIES
from torch import Tensor

import pgtoolkit
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import family_of

if TYPE_CHECKING:
    from pgtoolkit.batch import Step
    from pgtoolkit.losses.objective import Loss
    from pgtoolkit.losses.views import DocumentView, GroupView, Ratio
    from pgtoolkit.training.module import PolicyGradientModule

WARM_UP = 2
"""Rounds that are not counted."""

GOALS = {"a group's class": 1.3, "a group's function": 1.3, "grpo, a fifth of the tokens": 1.3}
"""The most that a case should take, as a multiple of `grpo`."""

TOLERANCE = 2e-4
"""Of losses and gradients in float32 against float64."""


def grpo_as_function(advantages: Tensor, log_ratio: Tensor, ratio: Ratio) -> Tensor:
    """-min(r_t A_t, clip(r_t, 0.8, 1.2) A_t)"""
    r = ratio(log_ratio)
    return -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)


def towards_rewards(
    log_probs: Tensor,
    old_log_probs: Tensor,
    rewards: Tensor,
    group_rewards: Tensor,
    documents: DocumentView,
    groups: GroupView,
) -> Tensor:
    """The cross entropy of a group's softmax with the old one, tilted by the rewards."""
    better = documents.first(rewards - group_rewards)
    target = groups.softmax(documents.mean(old_log_probs) + better)
    new = documents.mean(log_probs)
    return -groups.sum(target * (new - groups.spread(groups.logsumexp(new))))


def cases(grpo: Loss) -> dict[str, Loss]:
    """Return the losses by name, made of the run's own."""
    from pgtoolkit.losses.function import FunctionLoss

    prompt_mean = aggregation_of("prompt_mean")
    of_groups = replace(grpo, aggregation=prompt_mean)
    return {
        "grpo": grpo,
        "grpo as a function": replace(grpo, family=FunctionLoss(grpo_as_function)),
        "grpo, a fifth of the tokens": replace(grpo, entropy_top_fraction=0.2),
        "a group's class": replace(of_groups, family=family_of("tpo", log_prob="mean")),
        "a group's function": replace(of_groups, family=FunctionLoss(towards_rewards)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--rounds", type=int, default=8, help="of all cases, at least 3")
    parser.add_argument("--max-tokens", type=int, default=None, help="of a micro-batch")
    arguments = parser.parse_args()
    if arguments.rounds <= WARM_UP:
        parser.error(f"--rounds must be above {WARM_UP} (got {arguments.rounds}): they warm up")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tiny = arguments.tiny
    model = BODIES["tiny" if tiny else "0.5b"]
    completion = (6, 6) if tiny else (512, 512)
    num_documents = 32 if tiny else 256
    write_inputs(folder, model, num_documents, (2, 6) if tiny else (64, 160), completion)
    num_cases = 5
    steps = arguments.rounds * num_cases
    max_tokens = arguments.max_tokens or (128 if tiny else 65536)
    job = overrides(folder, num_documents, max_tokens, steps)
    job = [override for override in job if not override.startswith("loss")]
    job += [
        "loss=grpo",
        "loss.epsilon_low=0.2",
        "loss.epsilon_high=0.2",
        "optimizer.learning_rate=1e-12",
        f"rollout.epochs={steps}",
        "kernel=fused_linear",
        f"model.compile={'false' if tiny else 'true'}",
        f"trainer.device={device}",
    ]
    os.chdir(folder)
    return _timed_run(job, steps, folder)


def check(device: str) -> None:
    """Compare losses and gradients of the device with those of float64; SystemExit if they
    differ."""
    rows = 640
    vocabulary = 3000 if device == "cuda" else 200
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    hidden = normal(rows, 64)
    weight = normal(vocabulary, 64) * 0.15
    labels = torch.randint(0, vocabulary, (rows,), generator=draw)
    labels[::7] = -1
    index = torch.arange(16).repeat_interleave(rows // 16)
    rewards = normal(16)
    log_softmax = (hidden @ weight.T).log_softmax(-1)
    log_probs = log_softmax.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    old = (log_probs + 0.1 * normal(rows)).clamp(max=0)
    advantages = normal(16)[index]
    groups = torch.arange(16) // 4
    kept = pgtoolkit.top_entropy(entropy, labels >= 0, 0.2).factors
    of_step = {"group_index": groups, "num_documents": 16}
    of_groups = of_step | {"rewards": rewards}

    def both(dtype: torch.dtype, on: str, pieces: int, **options: object) -> list[Tensor]:
        """Return the loss and its gradients by hidden states and head, in pieces of the step."""

        def moved(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            return value.to(on, dtype if value.is_floating_point() else value.dtype)

        leaves = [moved(leaf).clone().requires_grad_() for leaf in (hidden, weight)]
        options = {name: moved(value) for name, value in options.items()}
        total = 0.0
        for piece in range(pieces):
            # Rows of the other pieces are not trained here; the totals are those of the step.
            in_piece = (index % pieces == piece) & (labels >= 0)
            out = pgtoolkit.linear_policy_loss(
                *leaves,
                torch.where(in_piece, labels, -1).to(on),
                moved(old),
                moved(advantages),
                index.to(on),
                totals=_totals(labels, index, groups, on),
                logits_memory_mb=vocabulary * 4 * 130 / 2**20,
                **options,
            )
            out.loss.backward()
            total = total + out.loss.detach()
        return [total, *(leaf.grad for leaf in leaves)]

    tested = {
        "grpo": of_step | {"loss": "grpo"},
        "grpo as a function": of_step | {"loss": grpo_as_function},
        "grpo, a fifth of the tokens": of_step | {"loss": "grpo", "factors": kept},
        "gspo, a fifth of the tokens": of_step | {"loss": "gspo", "factors": kept},
    }
    for name, loss in (("a group's class", "tpo"), ("a group's function", towards_rewards)):
        coefficients = pgtoolkit.step_coefficients(
            log_probs, old, advantages, index, labels >= 0, loss=loss, **of_groups
        ).coefficients
        tested[name] = of_groups | {"loss": loss, "coefficients": coefficients}
    gradients = {}
    for name, options in tested.items():
        expected = both(torch.float64, "cpu", 1, **options)
        error = 0.0
        for pieces in (1, 2):
            got = both(torch.float32, device, pieces, **options)
            for value, right in zip(got, expected, strict=True):
                distance = (value.double().cpu() - right).norm() / right.norm().clamp(min=1e-9)
                error = max(error, float(distance))
        gradients[name] = expected
        print(f"check {name:30}largest relative error {error:.1e}", flush=True)
        if not error < TOLERANCE:
            raise SystemExit(f"{name} is wrong on {device}: {error:.1e} above {TOLERANCE:.0e}")
    for value, of_class in zip(gradients["grpo as a function"], gradients["grpo"], strict=True):
        torch.testing.assert_close(value, of_class, rtol=1e-10, atol=1e-14)


def _totals(labels: Tensor, index: Tensor, groups: Tensor, on: str) -> pgtoolkit.StepTotals:
    counts = torch.bincount(index[labels >= 0], minlength=len(groups))
    of_groups = torch.zeros(int(groups.max()) + 1, dtype=torch.int64)
    of_groups.index_add_(0, groups, counts)
    return pgtoolkit.StepTotals(
        len(groups), int(counts.sum()), int((counts == 0).sum()), len(of_groups), of_groups.to(on)
    )


def _timed_run(job: list[str], steps: int, folder: Path) -> int:
    """Run the main job, whose steps take the cases in turn, and print what each took."""
    from pgtoolkit.cli import main as pgtk
    from pgtoolkit.training.module import PolicyGradientModule

    training_step = PolicyGradientModule.training_step
    measured: dict[str, list[dict[str, float]]] = {}
    losses: dict[str, Loss] = {}

    def timed(self: PolicyGradientModule, step: Step, number: int) -> dict:
        if not losses:
            losses.update(cases(self.loss))
        # Each round begins with another case, so that none always follows the same one.
        names = [*losses]
        taken = sum(map(len, measured.values()))
        turn = (taken + taken // len(names)) % len(names)
        name = names[turn]
        self.loss = losses[name]
        _wait()
        started = time.perf_counter()
        output = training_step(self, step, number)
        _wait()
        seconds = time.perf_counter() - started
        of_step = output["metrics"]
        kept = ("loss", "grad_norm", "peak_memory_gb", "entropy_kept_fraction")
        row = {key: of_step[key] for key in kept if key in of_step}
        measured.setdefault(name, []).append({"seconds": seconds, **row})
        if sum(map(len, measured.values())) == steps:
            (folder / "whole_step.json").write_text(json.dumps(measured, indent=1))
            status = _report(measured)
            sys.stdout.flush()
            os._exit(status)  # the checkpoint that would follow is not what is measured
        return output

    PolicyGradientModule.training_step = timed
    return pgtk(job)


def _report(measured: dict[str, list[dict[str, float]]]) -> int:
    """Print a line for each case; return 1 if the function of GRPO is not the class."""
    print(
        f"\n{'':30}{'median s':>9}{'least':>8}{'most':>8}{'of grpo':>9}{'goal':>6}{'GB':>7}"
        f"{'loss':>14}{'grad norm':>12}"
    )
    grpo = [row["seconds"] for row in measured["grpo"][WARM_UP:]]
    for name, rows in measured.items():
        seconds = [row["seconds"] for row in rows[WARM_UP:]]
        ratio = statistics.median(a / b for a, b in zip(seconds, grpo, strict=True))
        goal = f"{GOALS[name]:.1f}" if name in GOALS else ""
        peak = max(row.get("peak_memory_gb", 0.0) for row in rows)
        last = rows[-1]
        print(
            f"{name:30}{statistics.median(seconds):9.3f}{min(seconds):8.3f}{max(seconds):8.3f}"
            f"{ratio:9.3f}{goal:>6}{peak:7.1f}{last['loss']:14.6g}{last['grad_norm']:12.5g}"
        )
    of_class, of_function = measured["grpo"][-1], measured["grpo as a function"][-1]
    for key in ("loss", "grad_norm"):
        if abs(of_function[key] - of_class[key]) > 1e-3 * abs(of_class[key]) + 1e-7:
            print(f"{key} of the function is {of_function[key]}, of the class {of_class[key]}")
            return 1
    return 0


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())

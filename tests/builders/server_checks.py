"""What the tests of servers check and break: log-probs against transformers' own, weights on their way, processes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from builders.shared_servers import TOKENS
from pgtoolkit.rollouts.samplers import Request
from pgtoolkit.rollouts.sampling_settings import sampling_settings, temperature_and_top_p
from pgtoolkit.rollouts.vllm_client import Sampling
from pgtoolkit.rollouts.weights_folder import WeightsFolder


def gone(processes: list[psutil.Process], seconds: float = 30) -> bool:
    """Within so many seconds; who nobody waits for stays behind as a zombie, and holds nothing."""
    deadline = time.monotonic() + seconds
    while (left := [one for one in processes if lives(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def update(module, size: float = 0.05) -> None:
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(size * torch.randn_like(weight))


def trained(module, prompts: list[Request], completions: list) -> Iterator[torch.Tensor]:
    """Of each completion (S, V) float32 log-probs, by transformers alone, of the weights as they are handed over.

    prompts: requests, in their order.
    """
    rollout, policy = module.config.rollout, module.policy
    copied = policy.copied()
    copied.load(policy.weights())
    model = copied.model.float()
    how = sampling_settings(policy.model, policy.tokenizer, rollout.temperature, rollout.top_p)
    expanded = [request for request in prompts for _ in range(request.completions)]
    for request, made in zip(expanded, completions, strict=True):
        text = torch.tensor([request.tokens + made.tokens.tolist()], device=model.device)
        with torch.no_grad():
            logits = model(text).logits[0, len(request.tokens) - 1 : -1]
        for change in temperature_and_top_p(how):
            logits = change(None, logits)
        yield logits.log_softmax(-1).cpu()


def assert_trained(module, prompts: list[Request], completions: list) -> None:
    """The log-probs are the trainer's: of a server in bfloat16 all but a few within 0.1, as rounding has it."""
    rows = zip(trained(module, prompts, completions), completions, strict=True)
    expected = torch.cat([row.gather(-1, made.tokens[:, None])[:, 0] for row, made in rows])
    found = torch.cat([made.log_probs for made in completions])
    difference = (found - expected).abs()
    print(f"{len(found)} log-probs differ from the trainer's by {difference.median():.2g} in the middle")
    if module.policy.compute_dtype == torch.float32:
        assert difference.max() < (1e-4 if module.device.type == "cpu" else 5e-3)
    else:
        assert (difference < 0.1).float().mean() > 0.95, difference


def share_of_equal(some: list, others: list) -> float:
    return sum(torch.equal(one.tokens, other.tokens) for one, other in zip(some, others, strict=True)) / len(some)


def spoil(monkeypatch, arriving: Callable) -> None:
    fill = WeightsFolder.fill

    def spoilt(self, weights):
        old = {name: self._rooms[name].clone().reshape(new.shape).to(new.device) for name, new in weights.items()}
        fill(self, {name: arriving(name, new, old[name]) for name, new in weights.items()})

    monkeypatch.setattr(WeightsFolder, "fill", spoilt)


@dataclasses.dataclass(frozen=True)
class Otherwise(Sampling):
    """Asks for something else than it expects."""

    change: dict[str, Any]

    def body(self, request: Request, salt: str) -> dict[str, Any]:
        return super().body(request, salt) | {"max_tokens": TOKENS} | self.change

"""For the tests of servers: log-probs of completions against transformers, wrong weights and
requests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.sampling.generation_settings import generation_settings, processors
from pgtoolkit.sampling.server_api import Call, ServerSampling
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.sampling.weights_folder import WeightsFolder
from pgtoolkit.training.module import PolicyGradientModule


def update(module: PolicyGradientModule, size: float = 0.05) -> None:
    """Add random numbers of this deviation to the weights."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(size * torch.randn_like(weight))


def log_probs_by_transformers(
    module: PolicyGradientModule, requests: list[Request], completions: list[Completion]
) -> Iterator[torch.Tensor]:
    """Yield the (S, V) float32 log-probs of each completion, by transformers, with the weights that
    servers get.

    requests: those of the completions, in their order.
    """
    policy = module.policy
    copied = policy.copied(policy.compute_dtype)
    copied.load(policy.weights())
    model = copied.model.float()
    settings = generation_settings(policy, module.sampling)
    request_of_completion = [request for request in requests for _ in range(request.completions)]
    for request, completion in zip(request_of_completion, completions, strict=True):
        text = torch.tensor([request.tokens + completion.tokens.tolist()], device=model.device)
        with torch.no_grad():
            logits = model(text).logits[0, len(request.tokens) - 1 : -1]
        for process in processors(settings):
            logits = process(None, logits)
        yield logits.log_softmax(-1).cpu()


def assert_log_probs_of_trainer(
    module: PolicyGradientModule, requests: list[Request], completions: list[Completion]
) -> None:
    """Assert that log-probs are the trainer's except for rounding. From a server in bfloat16 all
    but a few are within 0.1."""
    rows = log_probs_by_transformers(module, requests, completions)
    expected = torch.cat(
        [
            row.gather(-1, completion.tokens[:, None])[:, 0]
            for row, completion in zip(rows, completions, strict=True)
        ]
    )
    actual = torch.cat([completion.log_probs for completion in completions])
    difference = (actual - expected).abs()
    print(
        f"{len(actual)} log-probs differ from the trainer's by {difference.median():.2g} in the "
        "middle"
    )
    if module.policy.compute_dtype == torch.float32:
        assert difference.max() < (1e-4 if module.device.type == "cpu" else 0.02)
    else:
        assert (difference < 0.1).float().mean() > 0.95, difference


def share_of_equal(completions: list[Completion], others: list[Completion]) -> float:
    """Return the share of completions that have the tokens of the others."""
    equal = [
        torch.equal(completion.tokens, other.tokens)
        for completion, other in zip(completions, others, strict=True)
    ]
    return sum(equal) / len(completions)


WRONG_WEIGHTS: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "stale": lambda name, new, old: old,
    "half": lambda name, new, old: old if ".mlp." in name else new,
    "another model": lambda name, new, old: (
        torch.randn_like(new) * new.std() if new.ndim > 1 else new
    ),
}
"""Functions of a weight's name, its new and its old numbers, to the numbers that are written in the
new ones' place."""


def write_wrong_weights(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Write other numbers than the new weights from now on; kind: one of WRONG_WEIGHTS."""
    fill = WeightsFolder.fill
    wrong = WRONG_WEIGHTS[kind]

    def fill_with_wrong_weights(self: WeightsFolder, weights: dict[str, Tensor]) -> None:
        old = {
            name: self._rooms[name].clone().reshape(new.shape).to(new.device)
            for name, new in weights.items()
        }
        fill(self, {name: wrong(name, new, old[name]) for name, new in weights.items()})

    monkeypatch.setattr(WeightsFolder, "fill", fill_with_wrong_weights)


WRONG_REQUESTS = {
    "more tokens": ({}, {"max_tokens": 3}, r"ends with token \d+ after \d of at most 3 tokens"),
    "fewer completions": ({"n": 1}, {}, r"it gave 1 completions instead of \d"),
    "no end but one": (
        {"stop_token_ids": [11]},
        {},
        r"beyond an end-of-sequence token|ends with token 3 ",
    ),
    "an end too many": (
        {"stop_token_ids": [11, 3, 5]},
        {},
        r"ends with token 5 after \d of at most 6 tokens",
    ),
    "no log-probs": ({"logprobs": None}, {}, "its completions do not have the form of vLLM's"),
    "no token ids": (
        {"return_token_ids": False},
        {},
        "its completions do not have the form of vLLM's",
    ),
    "other vocabulary": (
        {},
        {"vocabulary_size": 4},
        r"it sampled token \d+, and the trainer's vocabulary has 4",
    ),
    "an impossible option": (
        {"temperature": -1.0},
        {},
        r"answered /v1/completions with 4\d\d: .*temperature",
    ),
}
"""Changes of the body that is sent, changes of the settings that are expected, and the message on
the answer."""


@contextlib.contextmanager
def wrong_requests(
    sampler: ServerSampler, body_changes: dict[str, object], setting_changes: dict[str, object]
) -> Iterator[int]:
    """Inside the block, servers are asked for something else than the sampler expects.

    Yields the number of a way to sample that has the expected settings.
    """

    class WrongRequests(Vllm):
        def completions(self, request: Request, sampling: ServerSampling, salt: str) -> Call:
            path, body = super().completions(request, sampler._ways[0], salt)
            return path, body | body_changes

    before = [server._api for server in sampler._servers]
    for server in sampler._servers:
        server._api = WrongRequests()
    sampler._ways.append(dataclasses.replace(sampler._ways[0], **setting_changes))
    yield len(sampler._ways) - 1
    for server, api in zip(sampler._servers, before, strict=True):
        server._api = api

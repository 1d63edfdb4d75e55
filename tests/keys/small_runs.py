"""Small models, documents and files of rollouts for the tests of single keys, and the comparison
of a training step with the specification, `losses/reference.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from builders.documents import document_of
from builders.runs import config_of, module_and_loader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pgtoolkit.batch import Step
from pgtoolkit.config.validate import validate
from pgtoolkit.document import Document
from pgtoolkit.losses import reference
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule

SMALL = (
    "tracking=none",
    "loss=grpo",
    "aggregation=constant",
    "aggregation.divisor=4",
    "optimizer.max_grad_norm=null",
    "accumulation.docs_per_step=8",
    "accumulation.max_tokens=24",
    "task.num_digits=3",
    "trainer.max_steps=6",
    "trainer.device=cpu",
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_heads=2",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_length=4",
)
"""Overrides of a run so small that it takes a fraction of a second."""

VOCABULARY = 12
"""Tokens of the tiny model for task=reverse: ten digits, "=" and the end."""


def settings(*overrides: str) -> list[str]:
    """Return `overrides` on top of those small settings that they do not replace.

    An override of a group, as in `model=huggingface`, replaces all small settings of its keys.
    Asserts that the configuration is valid.
    """
    replaced = {override.partition("=")[0] for override in overrides}
    if "rollout=recorded" in overrides:
        replaced.add("task")
    kept = []
    for setting in SMALL:
        key = setting.partition("=")[0]
        group = key.partition(".")[0]
        if key not in replaced and group not in replaced:
            kept.append(setting)
    assert validate(config_of(*kept, *overrides))[1].problems == []
    return [*kept, *overrides]


def module_and_steps(*overrides: str) -> tuple[PolicyGradientModule, StepLoader]:
    """Return the module of a small run, in float64, and its steps.

    Its matrices are 20 times as large as at a start, so that each of them changes the loss.
    """
    module, loader = module_and_loader(*settings(*overrides))
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    return module, loader


def module_of(*overrides: str) -> PolicyGradientModule:
    module, _ = module_and_steps(*overrides)
    return module


def some_documents() -> list[Document]:
    """Return six documents in three groups, whose old log-probs lie around those of the model."""
    generator = torch.Generator().manual_seed(3)
    lengths = (9, 5, 12, 7, 3, 6)
    advantages = (0.7, -0.4, 0.2, -1.1, 0.9, -0.3)
    documents = []
    for i, (length, advantage) in enumerate(zip(lengths, advantages, strict=True)):
        first_trained = length // 2
        tokens = torch.randint(0, 11, (length,), generator=generator)
        old_log_probs = -2.5 + 0.7 * torch.randn(length, generator=generator)
        documents.append(
            document_of(
                tokens,
                torch.arange(length) >= first_trained,
                old_log_probs=old_log_probs[first_trained:],
                advantages=advantage,
                group=i // 2,
                name=f"document {i}",
            )
        )
    return documents


def step_of(documents: list[Document], max_tokens: int = 1000) -> Step:
    return make_step(documents, max_tokens, {})


def labels_of(documents: list[Document]) -> Tensor:
    """Return the next token of each position, -1 where it is not trained."""
    return torch.cat(
        [torch.where(document.loss_mask, document.tokens, -1)[1:] for document in documents]
    )


def logits_of(module: PolicyGradientModule, document: Document) -> Tensor:
    """Return the model's logits (S, V) of a document alone."""
    return module.model(input_ids=document.tokens[None]).logits[0]


def loss_metric(module: PolicyGradientModule) -> float:
    """Return the loss of a training step of `some_documents()`."""
    return module.training_step(step_of(some_documents()), 0)["metrics"]["loss"]


def specified(
    module: PolicyGradientModule, documents: list[Document], **choices: Any
) -> tuple[reference.Reference, list[Tensor]]:
    """Return the step by the specification, and its gradient of every parameter.

    choices: arguments of `reference.policy_loss`, which may be of any type.
    """
    options = {"aggregation": "constant", "divisor": 4}
    if "loss" not in choices:
        options |= {"loss": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    logits = torch.cat([logits_of(module, document)[:-1] for document in documents])
    labels = labels_of(documents)

    def per_label(values: Iterable[Tensor]) -> Tensor:
        trained = torch.cat([*values])
        return trained.new_zeros(len(labels)).masked_scatter(labels >= 0, trained)

    sampling_log_probs = None
    if documents[0].sampling_log_probs is not None:
        sampling_log_probs = per_label(document.sampling_log_probs for document in documents)
    document_index = torch.cat(
        [torch.full((document.num_tokens - 1,), i) for i, document in enumerate(documents)]
    )
    expected = reference.policy_loss(
        logits.detach(),
        labels,
        per_label(document.old_log_probs for document in documents),
        per_label(document.advantages for document in documents),
        document_index,
        group_index=torch.tensor([document.group for document in documents]),
        num_documents=len(documents),
        sampling_log_probs=sampling_log_probs,
        **options | choices,
    )
    return expected, torch.autograd.grad(logits, list(module.parameters()), expected.gradient)


def loss_as_specified(
    overrides: list[str], documents: list[Document] | None = None, **choices: Any
) -> float:
    """Return the loss of one training step.

    Asserts that loss and gradient are those of the specification with `choices`.
    """
    documents = documents or some_documents()
    module = module_of(*overrides)
    expected, gradient = specified(module, documents, **choices)
    metrics = module.training_step(step_of(documents, 24), 0)["metrics"]
    torch.testing.assert_close(metrics["loss"], expected.loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], gradient, rtol=1e-9, atol=1e-13
    )
    assert metrics["grad_norm"] > 1e-3
    return metrics["loss"]


class LogitsMade(TorchDispatchMode):
    """Inside the block, records each matrix of logits that is computed: each product with V
    columns."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.rows: list[int] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ):
        out = function(*args, **(kwargs or {}))
        if function.__name__.split(".")[0] in ("mm", "addmm") and out.shape[-1] == self.vocabulary:
            self.rows.append(len(out))
            self.dtypes.append(out.dtype)
        return out


def rows_file(folder: Path, num_rows: int = 10, **columns: Any) -> Path:
    """Write recorded documents of five tokens, three of them trained, two to a group; return the
    file.

    The rewards are 0, 1, 4, 9, ...
    columns: values that replace those of every row; `...` leaves a column out.
    """
    path = folder / "rollouts.jsonl"
    rows = []
    for i in range(num_rows):
        row = {
            "token_ids": [i, 1, 2, 3, 4],
            "loss_mask": [False, False, True, True, True],
            "reward": i**2,
            "old_log_probs": [0, 0, -2.5, -2.4, -2.3],
            "group_id": i // 2,
            "advantage": i / 8,
        }
        row |= columns
        rows.append(json.dumps({name: value for name, value in row.items() if value is not ...}))
    path.write_text("\n".join(rows))
    return path


def recorded_steps(folder: Path, *overrides: str, **columns: Any) -> list[list[Document]]:
    """Return the documents of each step of a run that trains on `rows_file(folder, **columns)`."""
    path = rows_file(folder, **columns)
    _, loader = module_and_steps("rollout=recorded", f"rollout.path={path}", *overrides)
    return [step.documents for step in loader]

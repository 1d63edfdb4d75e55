"""A step of `adapters.padded` by the function that verl's workers call, with its configuration and
data."""

from __future__ import annotations

from typing import Any

import torch
from adapters.padded import LENGTHS, WIDTH, batch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from pgtoolkit.adapters import verl as _registered  # noqa: F401  what verl's registry then knows

PROMPT = 2
ONE = [[range(len(LENGTHS))]]
CUT = [[range(0, 1), range(1, 4)], [range(4, 5), range(5, 6)]]
"""Documents of each micro-batch of each rank."""


def step(
    loss_mode: str,
    flags: dict[str, Any] | None = None,
    cut: list = CUT,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Return loss, gradient by the log-probs (B, WIDTH), and the last micro-batch's metrics, of a
    step that is cut as verl does.

    In verl's data prompts precede the completions, and log-probs are those of both.
    """
    new, old, advantages, mask = batch()
    flags = dict(flags or {})
    policy = PolicyLossConfig(
        loss_mode=loss_mode, **({"dro_beta": flags.pop("dro_beta")} if "dro_beta" in flags else {})
    )
    config = FSDPActorConfig(
        ppo_micro_batch_size_per_gpu=1, rollout_n=2, policy_loss=policy, **flags
    )
    leaf = new.clone().requires_grad_()
    losses = []
    metrics = {}
    for rank in cut:
        for rows in (list(rows) for rows in rank):
            ids = torch.ones(len(rows), PROMPT + WIDTH, dtype=torch.int64)
            attention = torch.cat(
                [torch.ones(len(rows), PROMPT, dtype=torch.int64), mask[rows].long()], 1
            )
            data = TensorDict(
                {
                    "input_ids": ids,
                    "prompts": ids[:, :PROMPT],
                    "responses": ids[:, PROMPT:],
                    "attention_mask": attention,
                    "response_mask": mask[rows].long(),
                    "position_ids": torch.arange(PROMPT + WIDTH).expand(len(rows), -1),
                    "old_log_probs": old[rows],
                    "advantages": advantages[rows, None].expand(-1, WIDTH).contiguous(),
                    **({} if weights is None else {"rollout_is_weights": weights[rows]}),
                },
                batch_size=len(rows),
            )
            data = left_right_2_no_padding(data)
            totals = {"batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS)}
            tensordict_utils.assign_non_tensor(data, dp_size=len(cut), **totals)
            # The model's output at a position belongs to the next token.
            parts = [
                torch.nn.functional.pad(leaf[row, : LENGTHS[row]], (PROMPT - 1, 1)) for row in rows
            ]
            output = {"log_probs": torch.nested.as_nested_tensor(parts, layout=torch.jagged)}
            loss, metrics = ppo_loss(config, output, data)
            loss.backward()
            losses.append(loss.detach())
    return sum(losses) / len(cut), leaf.grad / len(cut), metrics

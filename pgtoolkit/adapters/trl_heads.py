"""The two ways from TRL's model to a loss: TRL's LM head with a loss of log-probs, or pgtoolkit's
fused LM head."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels.losses import (
    Computation,
    LMHead,
    PolicyLoss,
    log_probs_of_hidden,
    loss_of_hidden,
    loss_of_log_probs,
)
from pgtoolkit.losses.aggregation import Aggregation, aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import Family, Reinforce
from pgtoolkit.losses.objective import Loss

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel
    from trl.trainer.grpo_config import GRPOConfig

Inputs = dict[str, Tensor]
"""TRL's tensors of a micro-batch, by name."""

LOGIT_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_scaling",
)
"""Fields of a model's configuration that scale its logits, hidden @ weight.T."""


class Trainer(Protocol):
    """The attributes that a loss reads of a `PolicyGradientTrainer`."""

    model: PreTrainedModel
    args: GRPOConfig
    accelerator: Accelerator
    family: Family
    weighting: Aggregation
    temperature: float
    entropy_coef: float
    aux_loss_enabled: bool
    _get_per_token_logps_and_entropies: Callable[..., tuple[Tensor, Tensor, Tensor | None]]

    @property
    def totals(self) -> StepTotals | None: ...

    def tokens_and_loss(
        self, inputs: Inputs, mask: Tensor, log_probs: Tensor
    ) -> tuple[Tokens, Loss]: ...


class Computed(NamedTuple):
    """A micro-batch's losses.

    loss: with the entropy bonus.
    out: the policy loss without it, with its metrics.
    old: (B, length) old log-probs.
    entropies: (B, length).
    aux_loss: the load-balancing loss of a mixture of experts, or None.
    """

    loss: Tensor
    out: PolicyLoss
    old: Tensor
    entropies: Tensor
    aux_loss: Tensor | None = None


def trained_tokens(inputs: Inputs) -> Tensor:
    """Return (B, length) bool: the tokens that TRL trains."""
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    return mask.bool()


def by_log_probs(trainer: Trainer, model: nn.Module, inputs: Inputs) -> Computed:
    """Compute the loss from TRL's own forward pass: a log-prob and an entropy for each token."""
    mask = trained_tokens(inputs)
    flags = {"compute_entropy": True, "compute_aux_loss": trainer.aux_loss_enabled}
    log_probs, entropies, aux_loss = _forward(trainer, model, inputs, **flags)
    tokens, loss_definition = trainer.tokens_and_loss(inputs, mask, log_probs.detach())
    flat = log_probs.reshape(-1)
    totals = trainer.totals
    out = loss_of_log_probs(flat, tokens, totals, loss_definition, Ranks(), True)
    loss = out.loss
    if trainer.entropy_coef:
        # TRL's bonus is of the mean over tokens, whatever the aggregation. With advantages of 1 and
        # entropies in the place of log-probs, this loss is minus the sum of the entropies over the
        # step's tokens.
        ones = torch.ones_like(tokens.advantages)
        of_entropies = replace(tokens, advantages=ones, coefficients=None)
        mean = Loss(Reinforce(), aggregation_of("token_mean"))
        bonus = loss_of_log_probs(
            entropies.reshape(-1), of_entropies, totals, mean, Ranks(), check_finite=False
        )
        loss = loss + trainer.entropy_coef * bonus.loss
    assert tokens.old_log_probs is not None
    return Computed(loss, out, tokens.old_log_probs.view_as(mask), entropies.detach(), aux_loss)


def log_probs_of(trainer: Trainer, inputs: Inputs) -> Tensor:
    """Return (B, length) log-probs by TRL's own forward pass, without gradient."""
    with torch.no_grad():
        return _forward(trainer, trainer.model, inputs)[0]


def _forward(trainer: Trainer, model: nn.Module, inputs: Inputs, **flags: bool) -> tuple:
    """Return TRL's (log-probs, entropies, load-balancing loss) of a micro-batch."""
    forward = trainer._get_per_token_logps_and_entropies
    extra = {name: inputs[name] for name in inspect.signature(forward).parameters if name in inputs}
    ids, attention = _prompts_and_completions(inputs)
    return forward(model, ids, attention, inputs["completion_mask"].shape[1], **flags, **extra)


def by_fused_head(trainer: Trainer, model: nn.Module, inputs: Inputs) -> Computed:
    """Compute the loss by pgtoolkit's head, inside the forward pass of `model`.

    There the wrappers of the model see that the head is used.
    One pass over the head, without gradient, gives the entropies, and the old log-probs where TRL
    has none; another gives the loss and its gradients.
    """
    mask = trained_tokens(inputs)
    labels = inputs["completion_ids"].masked_fill(~mask, -100).reshape(-1)
    plain_loss = Loss(trainer.family, trainer.weighting, trainer.temperature)

    def compute(hidden: Tensor, head: nn.Linear) -> Computed:
        hidden = hidden[:, -mask.shape[1] - 1 : -1].flatten(end_dim=1)
        if trainer.args.cast_lm_head_to_fp32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(hidden.device.type):
            # TRL's head multiplies in half precision then.
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # For log-probs only the labels are read; the other vectors are there for their shape.
        places = Tokens(
            labels=labels,
            old_log_probs=labels,
            advantages=labels,
            document_index=labels,
            num_documents=len(mask),
        )
        parts = LMHead(head.weight, head.bias)
        log_probs, entropies = log_probs_of_hidden(
            hidden, parts, places, plain_loss, Ranks(), Computation(), True
        )
        tokens, loss = trainer.tokens_and_loss(inputs, mask, log_probs.view_as(mask))
        loss = replace(loss, entropy_coefficient=trainer.entropy_coef)
        out = loss_of_hidden(hidden, parts, tokens, trainer.totals, loss, Ranks(), Computation())
        assert entropies is not None
        assert tokens.old_log_probs is not None
        old = tokens.old_log_probs.view_as(mask)
        return Computed(out.loss, out, old, entropies.view_as(mask))

    ids, attention = _prompts_and_completions(inputs)
    with trainer.accelerator.autocast():
        return model(input_ids=ids, attention_mask=attention, of_hidden_states=compute)


def add_fused_head(model: nn.Module) -> None:
    """Make model(..., of_hidden_states=function) return function(hidden states, LM head).

    Other calls stay as before. DistributedDataParallel looks for a step's parameters in the output
    of the forward pass, so the head must be used inside of it.
    model: a transformers causal LM, in PEFT or not, before it is wrapped for several processes.
    """
    model = getattr(model, "get_base_model", lambda: model)()
    original_forward = model.forward

    @functools.wraps(type(model).forward)  # with its signature, which `generate` reads
    def forward(
        self,
        *arguments: object,
        of_hidden_states: Callable[[Tensor, nn.Linear], Computed] | None = None,
        **keywords: object,
    ) -> object:
        if of_hidden_states is None:
            return original_forward(*arguments, **keywords)
        keywords.pop("labels", None)  # PEFT passes it on
        hidden = self.base_model(*arguments, use_cache=False, **keywords).last_hidden_state
        return of_hidden_states(hidden, self.get_output_embeddings())

    model.forward = types.MethodType(forward, model)


def obstacles(trainer: Trainer) -> list[str]:
    """Return the reasons why pgtoolkit's fused head cannot take the place of TRL's; or []."""
    model = trainer.model
    args = trainer.args
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    distribution = trainer.accelerator.distributed_type.value
    # A layer that is quantized, sharded or PEFT's has another type.
    is_plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter
    scales = [name for name in LOGIT_SCALES if getattr(config, name, None) not in (None, 1.0)]
    peft_configs = getattr(model, "peft_config", {}).values()
    virtual_tokens = any(peft_config.is_prompt_learning for peft_config in peft_configs)
    bonus_differs = trainer.entropy_coef and (
        trainer.weighting.name != "token_mean" or trainer.entropy_coef < 0
    )
    devices = {parameter.device for parameter in model.parameters()}
    reasons = [
        (not is_plain, f"the LM head is not a plain linear layer but {type(head).__name__}"),
        (scales, f"the model scales its logits by {', '.join(scales)}"),
        (config is not model.config, "the model takes more than text"),
        (virtual_tokens, "PEFT puts virtual tokens before the prompt"),
        (distribution not in ("NO", "MULTI_CPU", "MULTI_GPU"), f"{distribution} spreads the model"),
        (len(devices) > 1, "the model lies on several devices"),
        (args.n_gpu > 1, "DataParallel copies the model for each batch"),
        (args.torch_compile, "torch.compile would compile a loss that waits for the host"),
        (
            trainer.aux_loss_enabled,
            "the load-balancing loss of a mixture of experts comes with TRL's head",
        ),
        (
            bonus_differs,
            "GRPOConfig.entropy_coef is of a mean over tokens, which needs "
            "aggregation=token_mean, and >= 0",
        ),
    ]
    return [reason for is_obstacle, reason in reasons if is_obstacle]


def _prompts_and_completions(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the ids of prompts with their completions, and their attention mask.

    Both are (B, length).
    """
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask

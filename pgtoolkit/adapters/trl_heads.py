"""The two ways from TRL's model to a loss: TRL's LM head and a loss of log-probs, or pgtoolkit's fused LM head."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgtoolkit.api import linear_policy_loss, log_prob_loss
from pgtoolkit.batch import Tokens
from pgtoolkit.kernels.losses import Computation, LMHead, PolicyLoss, log_probs_of_hidden
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.objective import Loss

LOGIT_SCALES = "final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling"
"""Fields of a model's configuration by which its logits, and those of TRL's head, are not hidden @ weight.T alone."""


class Computed(NamedTuple):
    """Of a micro-batch: the loss with its entropy bonus, the policy loss with what is known beside it, and, (B, length)
    each, old log-probs and entropies; the load-balancing loss of a mixture of experts or None."""

    loss: Tensor
    out: PolicyLoss
    old: Tensor
    entropies: Tensor
    aux_loss: Tensor | None = None


def trained_tokens(inputs: dict) -> Tensor:
    """(B, length) bool: the tokens that TRL trains."""
    mask = inputs["completion_mask"] if "tool_mask" not in inputs else inputs["completion_mask"] * inputs["tool_mask"]
    return mask.bool()


def by_log_probs(trainer: Any, model: nn.Module, inputs: dict) -> Computed:
    """By TRL's own forward pass, which gives one log-prob and one entropy a token."""
    mask = trained_tokens(inputs)
    known = inspect.signature(trainer._get_per_token_logps_and_entropies).parameters
    more = {name: inputs[name] for name in known if name in inputs}
    flags = {"compute_entropy": True, "compute_aux_loss": trainer.aux_loss_enabled}
    found = trainer._get_per_token_logps_and_entropies(model, *_whole(inputs), mask.shape[1], **flags, **more)
    log_probs, entropies, aux_loss = found
    (old, advantages, documents), options = trainer.loss_arguments(inputs, mask, log_probs.detach())
    out = log_prob_loss(log_probs.reshape(-1), old, advantages, documents, mask.reshape(-1), **options)
    loss = out.loss
    if trainer.entropy_coef:  # of the mean over tokens whatever the aggregation, as TRL has it: minus the sum of H / N
        given = entropies.reshape(-1), old, torch.ones_like(old), documents, mask.reshape(-1)
        options = {name: options[name] for name in ("num_documents", "totals")}
        bonus = log_prob_loss(*given, **options, loss="reinforce", aggregation="token_mean")
        loss = loss + trainer.entropy_coef * bonus.loss
    return Computed(loss, out, old.view_as(mask), entropies.detach(), aux_loss)


def by_fused_head(trainer: Any, model: nn.Module, inputs: dict) -> Computed:
    """By the head of pgtoolkit, within the forward pass of `model`, whose wrappers then know all that is used there.

    One pass over the head, without gradient, gives the entropies, and the old log-probs where TRL has none; another
    the loss and its gradients.
    """
    mask = trained_tokens(inputs)
    labels = inputs["completion_ids"].masked_fill(~mask, -100).reshape(-1)
    how = trainer.family, trainer.weighting, trainer.temperature

    def compute(hidden: Tensor, head: nn.Linear) -> Computed:
        hidden = hidden[:, -mask.shape[1] - 1 : -1].flatten(end_dim=1)
        if trainer.args.cast_lm_head_to_fp32:
            hidden = hidden.float()
        elif torch.is_autocast_enabled(hidden.device.type):  # as TRL's head: a half-precision product
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # Of these only the labels are read.
        tokens = Tokens(
            labels=labels,
            old_log_probs=labels,
            advantages=labels,
            document_index=labels,
            num_documents=len(mask),
        )
        own = LMHead(head.weight, head.bias)
        log_probs, entropies = log_probs_of_hidden(hidden, own, tokens, Loss(*how), Ranks(), Computation(), True)
        vectors, options = trainer.loss_arguments(inputs, mask, log_probs.view_as(mask))
        options |= {"temperature": trainer.temperature, "entropy_coefficient": trainer.entropy_coef}
        out = linear_policy_loss(hidden, head.weight, labels, *vectors, bias=head.bias, **options)
        assert entropies is not None
        return Computed(out.loss, out, vectors[0].view_as(mask), entropies.view_as(mask))

    ids, attention = _whole(inputs)
    with trainer.accelerator.autocast():
        return model(input_ids=ids, attention_mask=attention, of_hidden_states=compute)


def add_fused_head(model: nn.Module) -> None:
    """Let model(..., of_hidden_states=function) return function(hidden states, LM head); all else stays as it is.

    DistributedDataParallel finds the parameters of a step in what its forward pass returns: the head's have to be used
    within it. model: a transformers causal LM, in PEFT or not, before it is wrapped for several processes.
    """
    model = getattr(model, "get_base_model", lambda: model)()
    otherwise = model.forward

    @functools.wraps(type(model).forward)  # with its signature, which `generate` reads
    def forward(self, *arguments: Any, of_hidden_states: Callable | None = None, **keywords: Any) -> Any:
        if of_hidden_states is None:
            return otherwise(*arguments, **keywords)
        keywords.pop("labels", None)  # PEFT passes it on
        hidden = self.base_model(*arguments, use_cache=False, **keywords).last_hidden_state
        return of_hidden_states(hidden, self.get_output_embeddings())

    model.forward = types.MethodType(forward, model)


def obstacles(trainer: Any) -> list[str]:
    """Why our fused head cannot take the place of TRL's; empty if it can."""
    model, args, head = trainer.model, trainer.args, trainer.model.get_output_embeddings()
    config = model.config.get_text_config()
    kind = trainer.accelerator.distributed_type.value
    plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter  # not quantized, sharded or of PEFT
    scaled = [name for name in LOGIT_SCALES if getattr(config, name, None) not in (None, 1.0)]
    prompts = any(one.is_prompt_learning for one in getattr(model, "peft_config", {}).values())
    bonus = trainer.entropy_coef and (trainer.weighting.name != "token_mean" or trainer.entropy_coef < 0)
    found = [
        (not plain, f"the LM head is not a plain linear layer but {type(head).__name__}"),
        (scaled, f"the model scales its logits by {', '.join(scaled)}"),
        (config is not model.config, "the model takes more than text"),
        (prompts, "PEFT puts virtual tokens before the prompt"),
        (kind not in ("NO", "MULTI_CPU", "MULTI_GPU"), f"{kind} spreads the model"),
        (len({x.device for x in model.parameters()}) > 1, "the model lies on several devices"),
        (args.n_gpu > 1, "DataParallel copies the model for each batch"),
        (args.torch_compile, "torch.compile would compile a loss that waits for the host"),
        (trainer.aux_loss_enabled, "the load-balancing loss of a mixture of experts comes with TRL's head"),
        (bonus, "GRPOConfig.entropy_coef is of a mean over tokens, which needs aggregation=token_mean, and >= 0"),
    ]
    return [reason for holds, reason in found if holds]


def _whole(inputs: dict) -> tuple[Tensor, Tensor]:
    """Tokens of prompts and completions, and their mask."""
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    return ids, mask

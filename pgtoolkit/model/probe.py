"""Trials on a few tokens whether a model computes what the loss and the sampler rely on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgtoolkit.batch import pack_sampled
from pgtoolkit.document import SampledDocument
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.architectures import is_known
from pgtoolkit.model.generate import generate
from pgtoolkit.model.policy import Policy
from pgtoolkit.system import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TO_PACK = 5e-4
"""The difference of hidden states of the same tokens, relative to their norm in float32, up to
which documents of a model are packed. Packing is only faster, so that this limit is the strict one.

Of the models of transformers, rounding moves hidden states by up to 6e-5 in float32. A token before
that should not be seen moves them by 1e-3 and more where the weights are random, and one behind by
8e-3. Where weights are trained, as those in other number types are, it is most of the norm.
"""
_TO_USE = 5e-3
"""The same up to which a model is used at all."""
_COARSER = 0.3
"""The same for both in other number types than float32."""


@torch.no_grad()
def keeps_documents_apart(policy: Policy, path: str) -> bool:
    """Return whether a freshly loaded model keeps several documents in one row apart, in attention
    and everything else.

    Raises ConfigError about model.path=`path` for a model whose loss would be wrong: its logits are
    not head(hidden), such as scaled or soft-capped ones; it computes other numbers each time; or
    tokens see those behind them.
    """
    needs = "a causal language model whose body gives hidden states"
    with model_folder.refused(
        path, needs, "The loss computes logits itself, of hidden states and the LM head."
    ):
        size = policy.model.config.get_text_config().vocab_size
        # Tokens at the ends of the vocabulary may be alike, since nobody has trained them.
        first = _document(size // 7, size // 5, size // 3)
        second = _document(size // 2)
        hidden, plain = _handed_to_head(policy, first.tokens)
        rows = policy.in_rows(pack_sampled([first, second]))
        one_row = policy.in_one_row(pack_sampled([first, second, second]))
        apart = _same(one_row[3:], rows[[3, 3]], _TO_PACK)
        causal = apart or _same(policy.hidden_states(pack_sampled([second])), rows[3:])
    if not plain:
        needs = "a plain linear LM head"
        got = f"{type(policy.head).__name__} whose output is not the logits"
        reason = (
            "The loss computes logits itself as hidden @ weight.T + bias; soft-capping or "
            "scaling is not supported."
        )
    elif not _same(rows[:3], hidden):
        needs = "an LM head that reads the body's hidden states, the same each time"
        got = "one that is given others"
        reason = (
            "The loss computes logits itself: no further layer, scaling or random number may "
            "come in between."
        )
    elif not causal:
        needs = "a causal language model"
        got = "one whose tokens see those behind them"
        reason = "A token's log-prob would depend on the token itself."
    else:
        return apart
    raise ConfigError(model_folder.refusal(path, needs, got, reason))


def continues_rightly(policy: Policy) -> tuple[bool, str | None]:
    """Return whether prompts of different lengths can share a batch of the sampler, and the reason
    why no prompt can be sampled (None where they can).

    The sampler pads prompts on the left and gives the model one token after the other, with a
    cache. A model that carries padding in its state, or counts it as positions, is right only where
    no prompt is padded. A model whose steps are not its forward pass would sample from another
    distribution than the one that is trained.
    policy: freshly loaded. Models of known types are not tried.
    """
    model = policy.model
    kind = model.config.model_type
    if is_known(model):
        return True, None
    limit = _limit_of_time_steps(model)
    if limit is not None:
        reason = (
            f"{kind}, whose layers limit time steps to {limit} in a forward pass, but not token by "
            "token"
        )
        return False, reason
    if kind == "minimax" and model.config.sliding_window is not None:
        # Where its first layer is a linear one, a step has no mask. The trial below would not show
        # it, since a few tokens fit the window.
        return False, f"{kind} with a sliding window, which its steps may not keep"
    size = model.config.get_text_config().vocab_size
    tokens = [size * place // 13 for place in range(1, 13)]
    try:
        if _continues(policy, [tokens[:5], tokens[6:8]]):
            return True, None
        if _continues(policy, [tokens[:5], tokens[6:11]]):
            return False, None
    except Exception as error:  # models of every architecture raise their own
        return False, f"{kind}, which fails: {first_line(error)[:300]}"
    return False, f"{kind}, which gives other numbers token by token"


def _limit_of_time_steps(model: PreTrainedModel) -> str | None:
    """Return the bounds of the time steps of a Mamba 2 layer, in words; None if they are 0 and
    infinity.

    transformers applies them in its scan of a sequence, but not in its step with a state. How often
    they act depends on weights and tokens, so that a few tokens may not show it.
    """
    for module in model.modules():
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0 or high < math.inf:
            return f"{low:g} to {high:g}" if high < math.inf else f"{low:g} and more"
    return None


@torch.no_grad()
def _continues(policy: Policy, prompts: list[list[int]]) -> bool:
    """Return whether sampling these prompts together sees the logits of forward passes alone."""
    from transformers import GenerationConfig

    size = policy.model.config.get_text_config().vocab_size
    new = torch.tensor(
        [[size * (place + row) // 9 for place in (2, 4, 6)] for row in range(len(prompts))]
    )
    logits: list[Tensor] = []

    def choose(seen: Tensor) -> Tensor:
        logits.append(seen.clone())
        return new[:, len(logits) - 1].to(seen.device)

    padding = policy.tokenizer.pad_token_id or 0
    settings = GenerationConfig(max_new_tokens=new.shape[1], do_sample=False, pad_token_id=padding)
    generate(policy, prompts, settings, choose)
    for row, prompt in enumerate(prompts):
        document = _document(*prompt, *new[row].tolist())
        states = policy.hidden_states(pack_sampled([document]))[len(prompt) - 1 : -1]
        seen = torch.stack([step[row] for step in logits])
        if not _same(seen.to(states.dtype), policy.head(states), _TO_PACK):
            return False
    return True


def _document(*tokens: int) -> SampledDocument:
    return SampledDocument(
        tokens=torch.tensor(tokens),
        loss_mask=torch.zeros(len(tokens), dtype=torch.bool),
        group=0,
        name="a document",
    )


def _handed_to_head(policy: Policy, tokens: Tensor) -> tuple[Tensor, bool]:
    """Return the (S, H) hidden states that transformers gives to the head, and whether the head's
    output is the logits.

    The head's output is replaced by large numbers: random weights give logits so small that
    soft-capping hardly changes them.
    """
    hidden: list[Tensor] = []
    outputs: list[Tensor] = []

    def replace(_head: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        hidden[:] = [inputs[0][0]]
        large = torch.linspace(-100, 100, output.numel(), dtype=output.dtype)
        outputs[:] = [large.view_as(output)]
        return outputs[0]

    if type(policy.head) is not nn.Linear:
        return policy.hidden_states(pack_sampled([_document(*tokens.tolist())])), False
    handle = policy.head.register_forward_hook(replace)
    try:
        logits = policy.model(input_ids=tokens[None], use_cache=False).logits
    finally:
        handle.remove()
    return hidden[0], torch.equal(logits.float(), outputs[0].float())


def _same(states: Tensor, expected: Tensor, tolerance: float = _TO_USE) -> bool:
    if states.shape != expected.shape:
        return False
    if states.dtype != torch.float32:
        tolerance = _COARSER
    difference = (states - expected).float().norm()
    return bool(difference <= tolerance * expected.float().norm())

"""Tries on a few tokens whether a model computes what the loss and the sampler take it to
compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgtoolkit.batch import Document, pack
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.architectures import is_known
from pgtoolkit.model.generate import generate
from pgtoolkit.model.policy import Policy
from pgtoolkit.system import model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TO_PACK, _TO_USE, _COARSER = 5e-4, 5e-3, 0.3
"""What hidden states of the same tokens may differ by, relative to their norm: in float32 those of
a model that is packed, which is only faster, and of one that is used at all; and in other number
types.

Of the models of transformers rounding moves them by up to 6e-5 in float32; a token before that
should not be seen, by 1e-3 and more where the weights are random, one behind by 8e-3. Where they
are trained, as those in other number types are, it is most of the norm.
"""


@torch.no_grad()
def keeps_documents_apart(policy: Policy, path: str) -> bool:
    """Whether the model, freshly loaded, confines attention, and all else, to each of several
    documents in one row.

    Raises ConfigError about model.path=`path` for a model whose loss would be wrong: its logits are
    not head(hidden), as where they are scaled or soft-capped; it computes other numbers each time;
    or tokens see those behind them.
    """
    needs = "a causal language model whose body gives hidden states"
    with model_folder.refused(
        path, needs, "The loss computes logits itself, of hidden states and the LM head."
    ):
        size = policy.model.config.get_text_config().vocab_size
        # From within the vocabulary: tokens at its ends may have had no training, and be alike.
        first, second = _document(size // 7, size // 5, size // 3), _document(size // 2)
        hidden, plain = _handed_to_head(policy, first.tokens)
        rows = policy.in_rows(pack([first, second]))
        one_row = policy.in_one_row(pack([first, second, second]))
        apart = _same(one_row[3:], rows[[3, 3]], _TO_PACK)
        causal = apart or _same(policy.hidden_states(pack([second])), rows[3:])
    if not plain:
        needs, got = (
            "a plain linear LM head",
            f"{type(policy.head).__name__} whose output is not the logits",
        )
        reason = (
            "The loss computes logits itself as hidden @ weight.T + bias; soft-capping or "
            "scaling is not supported."
        )
    elif not _same(rows[:3], hidden):
        needs, got = (
            "an LM head that reads the body's hidden states, the same each time",
            "one that is given others",
        )
        reason = (
            "The loss computes logits itself: no further layer, scaling or random number may "
            "come in between."
        )
    elif not causal:
        needs, got = "a causal language model", "one whose tokens see those behind them"
        reason = "A token's log-prob would depend on the token itself."
    else:
        return apart
    raise ConfigError(model_folder.refusal(path, needs, got, reason))


def continues_rightly(policy: Policy) -> tuple[bool, str | None]:
    """Return whether prompts of different lengths can share a batch of the sampler, and why none
    can, or None.

    The sampler pads prompts on the left and gives the model one token after the other, with a
    cache. A model that carries padding in its state, or counts it as positions, is right only where
    no prompt is padded. One whose steps are not its forward pass would sample from another
    distribution than the one that is trained.
    policy: freshly loaded. A model that is known is not tried.
    """
    model = policy.model
    kind = model.config.model_type
    if is_known(model):
        return True, None
    if limit := _limit_of_time_steps(model):
        return (
            False,
            (
                f"{kind}, whose layers limit time steps to {limit} in a forward pass, not token by "
                "token"
            ),
        )
    if kind == "minimax" and model.config.sliding_window is not None:
        # Where its first layer is a linear one, a step has no mask. Documents of a few tokens fit
        # the window.
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
    """Return the bounds of a Mamba 2 layer that are not 0 and infinity.

    transformers applies them in its scan of a sequence, not in its step with a state. How often
    they act depends on weights and tokens, so that no few tokens show it.
    """
    for module in model.modules():
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0 or high < math.inf:
            return f"{low:g} to {high:g}" if high < math.inf else f"{low:g} and more"
    return None


@torch.no_grad()
def _continues(policy: Policy, prompts: list[list[int]]) -> bool:
    """Return whether sampling these prompts together sees the logits of a forward pass of each by
    itself."""
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
        states = policy.hidden_states(pack([document]))[len(prompt) - 1 : -1]
        seen = torch.stack([step[row] for step in logits])
        if not _same(seen.to(states.dtype), policy.head(states), _TO_PACK):
            return False
    return True


def _document(*tokens: int) -> Document:
    nothing = torch.zeros(0)
    return Document(
        torch.tensor(tokens),
        torch.zeros(len(tokens), dtype=torch.bool),
        nothing,
        nothing,
        0,
        "a document",
    )


def _handed_to_head(policy: Policy, tokens: Tensor) -> tuple[Tensor, bool]:
    """(S, H) hidden states that the head of transformers is given, and whether what it makes of
    them is the logits."""
    made = []

    def replaced(_head: nn.Linear, given: tuple[Tensor], output: Tensor) -> Tensor:
        # Large numbers in its place: random weights alone give logits that soft-capping leaves
        #   nearly as they are.
        made[:] = (
            given[0][0],
            torch.linspace(-100, 100, output.numel(), dtype=output.dtype).view_as(output),
        )
        return made[1]

    if type(policy.head) is not nn.Linear:
        return policy.hidden_states(pack([_document(*tokens.tolist())])), False
    handle = policy.head.register_forward_hook(replaced)
    try:
        logits = policy.model(input_ids=tokens[None], use_cache=False).logits
    finally:
        handle.remove()
    return made[0], torch.equal(logits.float(), made[1].float())


def _same(states: Tensor, expected: Tensor, tolerance: float = _TO_USE) -> bool:
    if states.shape != expected.shape:
        return False
    difference, norm = (x.float().norm() for x in (states - expected, expected))
    return bool(difference <= (tolerance if states.dtype == torch.float32 else _COARSER) * norm)

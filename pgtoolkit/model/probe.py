"""What a transformers model computes, tried on a few tokens: whether its loss can be taken from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Linear

from pgtoolkit.batch import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.policy import Policy
from pgtoolkit.packing import pack
from pgtoolkit.system import model_folder

_TO_PACK, _TO_USE, _COARSER = 5e-4, 5e-3, 0.3
"""What hidden states of the same tokens may differ by, relative to their norm: in float32 those of a model that is
packed, which is only faster, and of one that is used at all; and in other number types.

Of the models of transformers rounding moves them by up to 6e-5 in float32; a token before that should not be seen, by
1e-3 and more where the weights are random, one behind by 8e-3. Where they are trained, as those in other number types
are, it is most of the norm.
"""


@torch.no_grad()
def keeps_documents_apart(policy: Policy, path: str) -> bool:
    """Whether the model, freshly loaded, confines attention, and all else, to each of several documents in one row.

    Raises ConfigError about model.path=`path` for a model whose loss would be wrong: its logits are not head(hidden),
    as where they are scaled or soft-capped; it computes other numbers each time; or tokens see those behind them.
    """
    needs = "a causal language model whose body gives hidden states"
    with model_folder.refused(path, needs, "The loss computes logits itself, of hidden states and the LM head."):
        size = policy.model.config.get_text_config().vocab_size
        # From within the vocabulary: tokens at its ends may have had no training, and be alike.
        first, second = _document(size // 7, size // 5, size // 3), _document(size // 2)
        hidden, plain = _handed_to_head(policy, first.tokens)
        rows = policy.hidden_states(pack([first, second], [0, 0]))  # the second is padded
        one_row = policy.hidden_states(pack([first, second, second], [0, 0, 0]))
        apart = _same(one_row[3:], rows[[3, 3]], _TO_PACK)
        causal = apart or _same(policy.hidden_states(pack([second], [0])), rows[3:])
    if not plain:
        needs, got = "a plain linear LM head", f"{type(policy.head).__name__} whose output is not the logits"
        reason = (
            "The loss computes logits itself as hidden @ weight.T + bias; soft-capping or scaling is not supported."
        )
    elif not _same(rows[:3], hidden):
        needs, got = "an LM head that reads the body's hidden states, the same each time", "one that is given others"
        reason = "The loss computes logits itself: no further layer, scaling or random number may come in between."
    elif not causal:
        needs, got = "a causal language model", "one whose tokens see those behind them"
        reason = "A token's log-prob would depend on the token itself."
    else:
        return apart
    raise ConfigError(model_folder.refusal(path, needs, got, reason))


def _document(*tokens: int) -> Document:
    nothing = torch.zeros(0)
    return Document(torch.tensor(tokens), torch.zeros(len(tokens), dtype=torch.bool), nothing, nothing, 0, "a document")


def _handed_to_head(policy: Policy, tokens: Tensor) -> tuple[Tensor, bool]:
    """(S, H) hidden states that the head of transformers is given, and whether what it makes of them is the logits."""
    made = []

    def replaced(_head: Linear, given: tuple[Tensor], output: Tensor) -> Tensor:
        # Large numbers in its place: random weights alone give logits that soft-capping leaves nearly as they are.
        made[:] = given[0][0], torch.linspace(-100, 100, output.numel(), dtype=output.dtype).view_as(output)
        return made[1]

    if type(policy.head) is not Linear:
        return policy.hidden_states(pack([_document(*tokens.tolist())], [0])), False
    handle = policy.head.register_forward_hook(replaced)
    try:
        logits = policy.model(input_ids=tokens[None], use_cache=False).logits
    finally:
        handle.remove()
    return made[0], torch.equal(logits.float(), made[1].float())


def _same(found: Tensor, expected: Tensor, tolerance: float = _TO_USE) -> bool:
    if found.shape != expected.shape:
        return False
    difference, norm = (x.float().norm() for x in (found - expected, expected))
    return bool(difference <= (tolerance if found.dtype == torch.float32 else _COARSER) * norm)

"""The frozen reference that a policy is compared with: its own beginning, or a folder."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from pgtoolkit.config.paths import NO_FOLDER
from pgtoolkit.config.rules.step import other_vocabulary
from pgtoolkit.config.schema import Config, HuggingFaceModelConfig, NumberType
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.build import build_policy
from pgtoolkit.model.lora import adapted_layers
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout


def reference_of(config: Config, policy: Policy, layout: Layout = ONE_PROCESS) -> Policy | None:
    """The reference, frozen and whole; None where none is needed; the policy itself where its adapters are left out.

    policy: as a run starts with it, from the seed or model.path: a resumed run, too, before its checkpoint is read. So
    the initial weights need no place in a checkpoint. Raises ConfigError for one that cannot be loaded, or whose tokens
    are others.
    """
    if not config.kl.needs_model:
        return None
    own = config.kl.reference in NO_FOLDER
    if own and adapted_layers(policy.model):
        return policy  # the frozen weights under the adapters are those that the run starts from
    loaded = replace(policy, model=copy.deepcopy(policy.model)) if own else _loaded(config, policy, layout)
    model = loaded.model.requires_grad_(False)
    if policy.compute_dtype != torch.float32:
        _narrow(model, policy.compute_dtype)
    return loaded


def _loaded(config: Config, policy: Policy, layout: Layout) -> Policy:
    dtype = NumberType.float32 if policy.compute_dtype == torch.float32 else NumberType.bfloat16
    off = {"random_weights": False, "gradient_checkpointing": False, "fp32_lm_head": False, "compile": False}
    no_lora = {"lora_rank": None, "lora_alpha": 1.0, "lora_targets": []}
    chosen = HuggingFaceModelConfig(name="huggingface", path=config.kl.reference, dtype=dtype, **off, **no_lora)
    try:
        loaded = build_policy(chosen, None, policy.by_document, layout, policy.compiled)  # as the policy was built
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", "kl.reference=")) from error
    sizes, tokens = [len(one.head.weight) for one in (policy, loaded)], policy.tokenizer.get_vocab()
    if loaded.tokenizer.get_vocab() != tokens or sizes[0] != sizes[1]:
        own = len(set(tokens.items()) & set(loaded.tokenizer.get_vocab().items()))
        needs = f"the vocabulary of the policy, {sizes[0]} rows of the head and {len(tokens)} tokens"
        got = f"{sizes[1]} rows, and {own} of these tokens under the same number"
        raise ConfigError(other_vocabulary(config, needs, got))
    return loaded


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep what autocast would cast at each call in that type already: the matrices of linear layers.

    The rest, such as norms and embeddings, computes in float32 in the policy as well: at the start of a run both then
    have the same log-probs to the last bit.
    """
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not embeddings & {id(p) for p in module.parameters()}:
            module.to(dtype)

"""The policy: a causal transformer split into its body, which gives hidden states, and its LM head,
which the loss applies.

Axes: T tokens of a micro-batch, S tokens of a row, H hidden size.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.batch import MicroBatch
from pgtoolkit.errors import ConfigError
from pgtoolkit.kernels.losses import LMHead
from pgtoolkit.kernels.products import linear
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model import attention, compiled, lora, merged, mixture
from pgtoolkit.model.architectures import rotary_settings
from pgtoolkit.model.attention import Documents
from pgtoolkit.model.decoding import Decoding, can_decode, decoding
from pgtoolkit.model.fixed_order import rows_of
from pgtoolkit.model.settings import NumberType
from pgtoolkit.model.shared import SharedAxis
from pgtoolkit.ranks.collectives import whole
from pgtoolkit.system.report import refusal

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )

log = logging.getLogger("pgtoolkit")


@dataclass(frozen=True)
class Policy:
    """A transformers causal LM with its tokenizer. The body computes in `compute_dtype`; trained
    weights are float32.

    base_digest: where nothing but LoRA's adapters is trained, a digest of the other weights, which
        are in compute_dtype.
    packs: whether the model by itself keeps documents of one row apart, where their position ids
        start again.
    mixes_lengths: whether prompts of different lengths, padded on the left, can be continued in one
        batch.
    not_sampled: the reason why transformers cannot sample from the distribution that is trained;
        None where it can.
    compiled: whether `compiled.switch_on` was applied, as it then is to copies.
    merges: whether `load` puts weights that are multiplied together side by side, for `decode`.
    fp32_lm_head: whether the head gives float32 logits where the body computes in another type.
    pretrained: the folder, or the name on the hub, that the weights come from; None for weights
        that were drawn at random.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    compute_dtype: torch.dtype = torch.float32
    base_digest: str | None = None
    packs: bool = True
    mixes_lengths: bool = True
    not_sampled: str | None = None
    compiled: bool = False
    merges: bool = False
    fp32_lm_head: bool = False
    pretrained: str | None = None

    pipeline = None  # not a field; a policy in stages has a property of this name
    is_whole = True
    """Whether this process holds the whole model, and can sample from it."""
    sharded = False
    """Whether FSDP2 divides the weights."""

    def put_away(self) -> None:
        """Free the weights that a forward pass has gathered.

        Called after a forward pass without a backward pass.
        """

    def all_tokens(self, values: Tensor) -> Tensor:
        """Return the (T,) values of all tokens of a micro-batch.

        values: those of this rank's part.
        """
        return values

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        """Return groups of ranks, each with the parameters whose gradients are to be summed over
        it, in this order, after a step's last backward pass."""
        return []

    @property
    def head(self) -> nn.Linear:
        return cast("nn.Linear", self.model.get_output_embeddings())

    @property
    def by_document(self) -> bool:
        """Return whether attention is that of attention.py."""
        return self.model.config._attn_implementation == attention.NAME

    @property
    def max_positions(self) -> int:
        """Return the longest document, in tokens, that the model has positions for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    @property
    def unscaled_positions(self) -> int:
        """Return the longest document, in tokens, with the rotary positions of shorter ones.

        Beyond it `longrope` uses others, for every token of a document, and for all documents of a
        micro-batch.
        """
        for rotary in rotary_settings(self.model.config.get_text_config()):
            if rotary.get("rope_type") == "longrope":
                return rotary["original_max_position_embeddings"]
        return sys.maxsize

    @property
    def vocabulary_size(self) -> int:
        return self.head.weight.shape[0]

    def outline(self) -> Policy:
        """Return the same policy without numbers, its parameters and buffers on the meta device."""
        memo = {id(tensor): _outline(tensor) for tensor in all_tensors(self.model).values()}
        return replace(self, model=copy.deepcopy(self.model, memo))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in the model's Hugging Face folder.

        They are references, not copies. Adapters are added to their matrices, which are then
        copies, in compute_dtype. Weights that are spread over ranks are for `collectives.whole`,
        one after the other. Called by every rank.
        """
        named = {name: tensor.detach() for name, tensor in named_weights(self.model).items()}
        return named if self.base_digest is None else lora.merged_weights(self.model, named)

    def description(self, dtype: torch.dtype) -> PolicyDescription:
        """Return a description that another process can make a copy in `dtype` by."""
        return PolicyDescription(
            config=self.model.config,
            generation_config=self.model.generation_config,
            tokenizer=self.tokenizer,
            compute_dtype=dtype,
            by_document=self.by_document,
            mixes_lengths=self.mixes_lengths,
            compiled=self.compiled,
            fp32_lm_head=self.fp32_lm_head,
        )

    def copied(self, dtype: torch.dtype) -> Policy:
        """Return the same model on this device in `dtype`, with new weights for `load` to fill."""
        return self.description(dtype).build(self.model.device)

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over weights that `weights` of the same model returned, in compute_dtype.

        They are kept until `unload`. One matrix after the other is gathered from the ranks that it
        is spread over, which all call this. Weights in the host's memory are copied to the model's
        device once; from pages that CUDA has locked, they are still being copied when this returns.
        """
        targets = named_weights(self.model)
        if targets.keys() != weights.keys():
            raise ValueError(f"weights differ in {sorted(targets.keys() ^ weights.keys())}")
        in_place = merged.make_room(self.model, self.compute_dtype) if self.merges else ()
        for name, target in targets.items():
            source = weights[name]
            if name in in_place and isinstance(source, Tensor) and not isinstance(source, DTensor):
                target.copy_(source, non_blocking=True)
                continue
            weight = whole(source, self.compute_dtype).to(self.model.device, non_blocking=True)
            if name in in_place:
                target.copy_(weight)
            else:
                target.data = weight.clone() if weight is source else weight

    def unload(self) -> None:
        """Give the weights' memory back, until others are loaded."""
        for tensor in named_weights(self.model).values():
            tensor.data = tensor.data.new_empty(0)

    @property
    def can_decode(self) -> bool:
        """Return whether `decode` is known to compute the same as this model."""
        return can_decode(self.model)

    def decode(
        self, prompts: list[list[int]], max_tokens: int, fp32_lm_head: bool, **options
    ) -> tuple[Tensor, ...]:
        """Sample one completion of each prompt; return tokens and log-probs, (B, max_tokens) each.

        The likeliest tokens follow as `Decoding.complete` returns them.
        options: draw, uniform, check, ends, stopped and top of `decoding.Decoding`.
        """
        self.model.eval()
        with decoding(self.model):

            def logits(hidden: Tensor) -> Tensor:
                return linear(hidden, self.head.weight, self.head.bias, fp32_lm_head)

            body = merged.MergedBody(self.model) if self.merges else None
            head = self.head.weight if fp32_lm_head and self._kernel_makes_logits() else None
            completed = Decoding(self.model, logits, **options, body=body, head=head).complete(
                prompts, max_tokens
            )
        self.model.train()
        return completed

    def _kernel_makes_logits(self) -> bool:
        """Return whether the kernel that draws tokens can make the logits itself."""
        if not self.head.weight.is_cuda or self.head.bias is not None:
            return False
        from pgtoolkit.kernels.triton_draw import can_make_logits

        return can_make_logits(self.head.weight)

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Return the (T, H) hidden states of the packed tokens, in compute_dtype.

        Attention is causal and confined to each document. Where it is that of attention.py, the
        micro-batch is one packed row. Else the cheaper of two ways is chosen. One row per document
        is padded on the right, where causality keeps the padding out of sight. One packed row is
        chosen where padding would cost more than attention over all of it: transformers takes a
        position id that does not continue the one before as the start of another document. If the
        model does not, or its rotary positions are others for long documents, each document is
        computed by itself.
        """
        if micro_batch.shared:
            return self._of_shared(micro_batch)
        tokens = micro_batch.tokens
        positions = micro_batch.position_ids
        lengths = micro_batch.document_lengths
        longest = max(lengths)
        pads = self._cost(len(lengths) * longest, longest) <= self._cost(len(tokens), len(tokens))
        if longest > self.unscaled_positions or not (pads or self.packs):
            documents = zip(tokens.split(lengths), positions.split(lengths), lengths, strict=True)
            hidden = [
                self._body(document[None], places[None], [length])[0]
                for document, places, length in documents
            ]
            return torch.cat(hidden)
        if pads and not self.by_document:
            return self.in_rows(micro_batch)
        return self.in_one_row(micro_batch)

    def in_rows(self, micro_batch: MicroBatch) -> Tensor:
        """Return `hidden_states` by one row per document, padded on the right."""
        lengths = micro_batch.document_lengths
        places = (micro_batch.document_index, micro_batch.position_ids)
        rows = micro_batch.tokens.new_zeros(len(lengths), max(lengths))
        rows[places] = micro_batch.tokens
        position_ids = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
        return self._body(rows, position_ids)[places]

    def in_one_row(self, micro_batch: MicroBatch) -> Tensor:
        """Return `hidden_states` by one row of all documents, for a model that keeps them apart."""
        tokens = micro_batch.tokens[None]
        positions = micro_batch.position_ids[None]
        return self._body(tokens, positions, micro_batch.document_lengths).squeeze(0)

    def _of_shared(self, micro_batch: MicroBatch) -> Tensor:
        """Return `hidden_states` where documents share what they begin with.

        Raises ConfigError for a model that does not have the attention of attention.py, or whose
        positions depend on a document's length: all documents but the first would lack their
        beginning, or have that of another length.
        """
        if not self.by_document or self.unscaled_positions < sys.maxsize:
            raise ConfigError(
                refusal(
                    setting="share_prompts",
                    needs="a policy with the attention of pgtoolkit.model.attention, and with "
                    "positions that are the same in documents of every length",
                    got=f"a {self.model.config.model_type} without",
                    reason="Its documents would not see what they share.",
                    use="share_prompts=False wherever it is an argument",
                )
            )
        axis = SharedAxis.of(micro_batch)
        tokens = micro_batch.tokens[axis.computed]
        positions = micro_batch.position_ids[axis.computed]
        hidden = self._body(tokens[None], positions[None], documents=axis.documents)
        return rows_of(hidden.squeeze(0), axis.states)

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead, Ranks]:
        """Return the inputs of the loss: hidden states, the head, and the ranks that share them."""
        return self.hidden_states(micro_batch), LMHead(self.head.weight, self.head.bias), Ranks()

    def _cost(self, positions: int, keys: int) -> int:
        """Return the cost of a layer for a number of positions, each compared with a number of
        keys.

        In units of 2 hidden_size multiplications: the layer's matrices hold about 12 hidden_size^2
        numbers, and a key takes 2 hidden_size multiplications.
        """
        return positions * (6 * self.model.config.get_text_config().hidden_size + keys)

    def _body(
        self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int] = (), **more
    ) -> Tensor:
        """Return the (rows, S, H) hidden states of tokens (rows, S).

        lengths: of the documents of one packed row. more: further arguments of the model.
        """
        if self.by_document and "documents" not in more:
            more["documents"] = Documents.whole(lengths, tokens.shape[1], tokens.device)
        with self.autocast(tokens.device):
            hidden = self._transformer(
                input_ids=tokens, position_ids=position_ids, use_cache=False, **more
            )
        return hidden if self.compute_dtype == torch.float32 else hidden.to(self.compute_dtype)

    def _transformer(self, **inputs) -> Tensor:
        return self.model.base_model(**inputs).last_hidden_state

    @contextlib.contextmanager
    def generating(self, fp32_lm_head: bool) -> Iterator[None]:
        """Inside the block, transformers can sample from the model.

        There is a KV cache, which gradient checkpointing would switch off, and an attention for
        prompts that are padded on the left.
        fp32_lm_head: whether the head gives float32 logits of its half-precision operands, as it
            does in training.
        """
        by_document = self.by_document
        head = self.head
        dtype = self.compute_dtype
        weight = head.weight.detach().to(dtype)  # once, not for every token

        def forward(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                rows = hidden.flatten(end_dim=-2).to(dtype)
                return linear(rows, weight, head.bias, fp32=True).view(*hidden.shape[:-1], -1)

        self.model.eval()
        if by_document:
            self.model.set_attn_implementation("sdpa")
        if fp32_lm_head and dtype != torch.float32:
            vars(head)["forward"] = forward  # an object's attribute hides its class's
        try:
            with self.autocast(self.model.device):
                yield
        finally:
            vars(head).pop("forward", None)
            if by_document:
                self.model.set_attn_implementation(attention.NAME)
            self.model.train()

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return autocast to compute_dtype, which float32 does not need."""
        return torch.autocast(
            device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32
        )


def check_policy(key: str, value: object) -> None:
    """Raise ValueError for a model of transformers, or anything else, in the place of a policy."""
    if not isinstance(value, Policy):
        raise ValueError(
            f"{key} needs a Policy, a model with its tokenizer (got {type(value).__name__}). Use "
            f"{key}=Policy(model, tokenizer) of pgtoolkit.model.policy, both of transformers"
        )


@dataclass(frozen=True)
class PolicyDescription:
    """Everything but the numbers of a policy, to make a copy of it in this or another process.

    by_document, mixes_lengths, compiled, fp32_lm_head: see `Policy`.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerFast
    compute_dtype: torch.dtype
    by_document: bool
    mixes_lengths: bool
    compiled: bool
    fp32_lm_head: bool

    def build(self, device: torch.device) -> Policy:
        """Return the model on a device in compute_dtype, with new weights, for `load` to fill."""
        from transformers import AutoModelForCausalLM

        mixture.register()
        # The model is made anew, not copied: buffers that it computes, such as rotary frequencies,
        # then stay in float32.
        with device:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config),
                trust_remote_code=False,
                dtype=self.compute_dtype,
                attn_implementation="sdpa" if self.by_document else None,
            )
        model.generation_config = self.generation_config
        if self.compiled:
            compiled.switch_on(model)
        model.requires_grad_(False)
        return Policy(
            model,
            self.tokenizer,
            self.compute_dtype,
            mixes_lengths=self.mixes_lengths,
            compiled=self.compiled,
            merges=self.compiled and merged.can_merge(model),
            fp32_lm_head=self.fp32_lm_head,
        )


def torch_type(chosen: NumberType, auto: torch.dtype) -> torch.dtype:
    """Return the type that a key of the configuration names; auto: the one for its value auto."""
    return auto if chosen == NumberType.auto else getattr(torch, chosen.value)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers themselves, by name.

    A tensor with several names, such as the weight of a tied head, has the first.
    """
    named = model.state_dict(keep_vars=True).items()
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: tensor for name, tensor in named if first[id(tensor)] == name}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers themselves, each by one name, with the buffers that a folder of
    the model does not hold."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _outline(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

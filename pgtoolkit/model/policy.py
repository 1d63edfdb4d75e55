"""The policy: a causal transformer split into its body (hidden states) and its LM head (the loss's
part)."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from pgtoolkit.batch import MicroBatch
from pgtoolkit.config.schema_run import NumberType
from pgtoolkit.kernels.losses import LMHead
from pgtoolkit.kernels.products import linear
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model import attention, compiled, lora, merged
from pgtoolkit.model.attention import Documents
from pgtoolkit.model.decoding import Decoding, can_decode, decoding
from pgtoolkit.ranks.collectives import whole

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

    base_digest: where LoRA's adapters alone are trained, a digest of the other weights, which are
        in compute_dtype.
    packs: whether the model keeps documents of one row apart by itself, where their position ids
        start again.
    mixes_lengths: whether prompts of different lengths, padded on the left, can be continued in one
        batch.
    not_sampled: what keeps transformers from sampling the distribution that is trained; None where
        nothing does.
    compiled: whether it computes as `compiled.switch_on` has made it, which copies of it are to do
        as well.
    merges: whether `load` puts weights that are multiplied together side by side, of which `decode`
        makes use.
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

    pipeline = None  # not a field: what a policy in stages has in its place
    is_whole = True
    """Whether this process holds the whole model, and can sample from it."""

    def put_away(self) -> None:
        """Called after a forward pass without a backward: what was brought together for it is given
        back."""

    def all_tokens(self, values: Tensor) -> Tensor:
        """(T,) of a micro-batch's tokens, from those of this rank's piece of it."""
        return values

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        """After a step's last backward: (group, parameters whose gradients here are to be summed
        over it), in order."""
        return []

    @property
    def head(self) -> nn.Linear:
        return cast("nn.Linear", self.model.get_output_embeddings())

    @property
    def by_document(self) -> bool:
        """Whether attention is that of attention.py."""
        return self.model.config._attn_implementation == attention.NAME

    @property
    def max_positions(self) -> int:
        """Longest document in tokens that the model has positions for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    @property
    def unscaled_positions(self) -> int:
        """Longest document in tokens that has the rotary positions of shorter ones.

        Beyond it `longrope` takes others, for every token of a document, and for all documents of a
        micro-batch.
        """
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None) or {}
        return (
            rotary["original_max_position_embeddings"]
            if rotary.get("rope_type") == "longrope"
            else sys.maxsize
        )

    @property
    def vocabulary_size(self) -> int:
        return self.head.weight.shape[0]

    def outline(self) -> Policy:
        """The same policy without numbers: its parameters and buffers are on the meta device."""
        memo = {id(tensor): _outline(tensor) for tensor in all_tensors(self.model).values()}
        return replace(self, model=copy.deepcopy(self.model, memo))

    def weights(self) -> dict[str, Tensor]:
        """The weights as they are now, by their names in the model's Hugging Face folder:
        references, not copies.

        Where there are adapters, they are in the weights: those matrices are copies, in
            compute_dtype. What is spread
        over ranks is for `collectives.whole`, one after the other; called by every rank.
        """
        named = {name: tensor.detach() for name, tensor in named_weights(self.model).items()}
        return named if self.base_digest is None else lora.merged_weights(self.model, named)

    def description(self, dtype: torch.dtype) -> PolicyDescription:
        """Return what a copy of this policy in `dtype` is made of, which can be sent to another
        process."""
        return PolicyDescription(
            config=self.model.config,
            generation_config=self.model.generation_config,
            tokenizer=self.tokenizer,
            compute_dtype=dtype,
            by_document=self.by_document,
            mixes_lengths=self.mixes_lengths,
            compiled=self.compiled,
        )

    def copied(self, dtype: torch.dtype) -> Policy:
        """Return the same model on the same device in `dtype`, with weights of its own, which
        `load` fills."""
        return self.description(dtype).build(self.model.device)

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over what `weights` of the same model gave, in compute_dtype, until `unload` gives
        the memory back.

        One matrix after the other is brought together from the ranks that it is spread over, which
        all call this. Weights in the host's memory are copied to the model's device once; from
        pages that CUDA has locked they are still on their way when this returns.
        """
        own = named_weights(self.model)
        if own.keys() != weights.keys():
            raise ValueError(f"weights differ in {sorted(own.keys() ^ weights.keys())}")
        in_place = merged.make_room(self.model, self.compute_dtype) if self.merges else ()
        for name, tensor in own.items():
            given = weights[name]
            if name in in_place and isinstance(given, Tensor) and not isinstance(given, DTensor):
                tensor.copy_(given, non_blocking=True)
                continue
            piece = whole(given, self.compute_dtype).to(self.model.device, non_blocking=True)
            if name in in_place:
                tensor.copy_(piece)
            else:
                tensor.data = piece.clone() if piece is given else piece

    def unload(self) -> None:
        """Give the weights' memory back, until others are loaded."""
        for tensor in named_weights(self.model).values():
            tensor.data = tensor.data.new_empty(0)

    @property
    def can_decode(self) -> bool:
        """Whether `decode` is known to compute what this model does."""
        return can_decode(self.model)

    def decode(
        self, prompts: list[list[int]], max_tokens: int, fp32_lm_head: bool, **how
    ) -> tuple[Tensor, Tensor]:
        """Tokens (B, max_tokens) of one completion a prompt, and their log-probs; how: see
        `decoding.Decoding`."""
        self.model.eval()
        with decoding(self.model):

            def logits(hidden: Tensor) -> Tensor:
                return linear(hidden, self.head.weight, self.head.bias, fp32_lm_head)

            body = merged.MergedBody(self.model) if self.merges else None
            found = Decoding(self.model, logits, **how, body=body).complete(prompts, max_tokens)
        self.model.train()
        return found

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """(T, H) hidden states of the packed tokens, in compute_dtype.

        Attention is causal and confined to each document: by_document over the one packed row. For
            other models and
        machines in the cheaper of two ways: one row per document, padded on the right, where
            causality alone keeps
        the padding out of sight; or, where padding would cost more than attention over the whole
        axis, one packed
        row: transformers takes a position id that does not continue the one before as the start of
            another document.
        Of a model that does not, and of one whose rotary positions are others for long documents,
        each by itself.
        """
        tokens, positions, lengths = (
            micro_batch.tokens,
            micro_batch.position_ids,
            micro_batch.document_lengths,
        )
        longest = max(lengths)
        padded = self._cost(len(lengths) * longest, longest) <= self._cost(len(tokens), len(tokens))
        if longest > self.unscaled_positions or not (padded or self.packs):
            parts = zip(tokens.split(lengths), positions.split(lengths), lengths, strict=True)
            return torch.cat(
                [self._body(own[None], places[None], [n])[0] for own, places, n in parts]
            )
        return (
            self.in_rows(micro_batch)
            if padded and not self.by_document
            else self.in_one_row(micro_batch)
        )

    def in_rows(self, micro_batch: MicroBatch) -> Tensor:
        """`hidden_states` by one row per document, padded on the right."""
        lengths, places = (
            micro_batch.document_lengths,
            (micro_batch.document_index, micro_batch.position_ids),
        )
        rows = micro_batch.tokens.new_zeros(len(lengths), max(lengths))
        rows[places] = micro_batch.tokens
        return self._body(rows, torch.arange(rows.shape[1], device=rows.device).expand_as(rows))[
            places
        ]

    def in_one_row(self, micro_batch: MicroBatch) -> Tensor:
        """`hidden_states` by one row of all documents, as a model can that keeps them apart."""
        tokens, positions = micro_batch.tokens[None], micro_batch.position_ids[None]
        return self._body(tokens, positions, micro_batch.document_lengths).squeeze(0)

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead, Ranks]:
        """What the loss needs of the model: hidden states, the head, and the ranks that share
        them."""
        return self.hidden_states(micro_batch), LMHead(self.head.weight, self.head.bias), Ranks()

    def _cost(self, positions: int, keys: int) -> int:
        """What a layer computes for rows of so many positions together, each of which is compared
        with so many keys.

        In units of 2 hidden_size products: its matrices hold about 12 hidden_size^2, a key takes 2
            hidden_size.
        """
        return positions * (6 * self.model.config.get_text_config().hidden_size + keys)

    def _body(
        self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int] = (), **more
    ) -> Tensor:
        """(rows, S, H) hidden states of tokens (rows, S); lengths: of the documents of one packed
        row."""
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
    def generating(self, fp32_lm_head: bool):
        """For sampling: a KV cache, which gradient checkpointing would switch off, and prompts
        padded on the left.

        fp32_lm_head: whether the head gives float32 logits of its half-precision operands, as it
            does in training.
        """
        by_document, head, dtype = self.by_document, self.head, self.compute_dtype
        weight = head.weight.detach().to(dtype)  # once, not for every token

        def forward(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                rows = hidden.flatten(end_dim=-2).to(dtype)
                return linear(rows, weight, head.bias, fp32=True).view(*hidden.shape[:-1], -1)

        self.model.eval()
        if by_document:
            self.model.set_attn_implementation("sdpa")
        if fp32_lm_head and dtype != torch.float32:
            vars(head)["forward"] = forward  # of this object, before that of its class
        try:
            with self.autocast(self.model.device):
                yield
        finally:
            vars(head).pop("forward", None)
            if by_document:
                self.model.set_attn_implementation(attention.NAME)
            self.model.train()

    def autocast(self, device: torch.device):
        return torch.autocast(
            device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32
        )


@dataclass(frozen=True)
class PolicyDescription:
    """What a copy of a policy is made of: all but its numbers, for this process or for another one.

    by_document, mixes_lengths, compiled: see `Policy`.
    """

    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerFast
    compute_dtype: torch.dtype
    by_document: bool
    mixes_lengths: bool
    compiled: bool

    def build(self, device: torch.device) -> Policy:
        """Return the model on a device in compute_dtype, with weights of its own, which `load`
        fills."""
        from transformers import AutoModelForCausalLM

        how = {
            "dtype": self.compute_dtype,
            "attn_implementation": "sdpa" if self.by_document else None,
        }
        # Made anew, not copied: what a model computes for itself, such as rotary frequencies, stays
        #   in float32.
        with device:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), trust_remote_code=False, **how
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
        )


def torch_type(chosen: NumberType, auto: torch.dtype) -> torch.dtype:
    """Return the type that a key of the configuration names."""
    return auto if chosen == NumberType.auto else getattr(torch, chosen.value)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers themselves; one that has several names, as that of a tied head, by the
    first."""
    named = model.state_dict(keep_vars=True).items()
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: tensor for name, tensor in named if first[id(tensor)] == name}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers themselves, those that no folder of the model holds among them,
    each by one name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _outline(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

"""Builds the policy: a causal transformer split into its body (hidden states) and its LM head (the loss's part)."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pgtoolkit.batch import MicroBatch
from pgtoolkit.config.schema import HuggingFaceModelConfig, TinyModelConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.kernels.losses import LMHead
from pgtoolkit.kernels.products import linear
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.model import attention
from pgtoolkit.model.attention import Documents
from pgtoolkit.model.decoding import Decoding, can_decode, decoding
from pgtoolkit.rollouts.prompts import END, tiny_tokenizer
from pgtoolkit.system import model_folder

log = logging.getLogger("pgtoolkit")

_PADDING_LIMIT = 1.5
"""Padded positions per token up to which one row per document is cheaper than attention over all tokens at once."""


@dataclass(frozen=True)
class Policy:
    """A transformers causal LM with its tokenizer. Weights are float32; the body computes in `compute_dtype`."""

    model: nn.Module
    tokenizer: object
    compute_dtype: torch.dtype = torch.float32

    pipeline = None  # not a field: what a policy in stages has in its place

    def synchronise_gradients(self, last: bool) -> None:
        """Called before each micro-batch: whether its backward is the step's last one, which FSDP2 sums after."""

    def gradient_groups(self) -> list[tuple[ProcessGroup, list[nn.Parameter]]]:
        """After a step's last backward: (group, parameters whose gradients here are to be summed over it), in order."""
        return []

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def by_document(self) -> bool:
        """Whether attention is that of attention.py."""
        return self.model.config._attn_implementation == attention.NAME

    @property
    def max_positions(self) -> int:
        """Longest document in tokens that the model has positions for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    @property
    def vocabulary_size(self) -> int:
        return self.head.weight.shape[0]

    def weights(self) -> dict[str, Tensor]:
        """The weights as they are now, by their names in the model's Hugging Face folder: references, not copies."""
        return {name: tensor.detach() for name, tensor in named_weights(self.model).items()}

    def copied(self) -> Policy:
        """The same model on the same device in compute_dtype, with weights of its own, which `load` fills."""
        from transformers import AutoModelForCausalLM

        config, device = copy.deepcopy(self.model.config), self.model.device
        how = {"dtype": self.compute_dtype, "attn_implementation": "sdpa" if self.by_document else None}
        # Made anew, not copied: what a model computes for itself, such as rotary frequencies, stays in float32.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **how)
        return Policy(model.requires_grad_(False), self.tokenizer, self.compute_dtype)

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take over the values that `weights` of the same model gave, rounded to the type that they have here."""
        own = named_weights(self.model)
        if own.keys() != weights.keys():
            raise ValueError(f"weights differ in {sorted(own.keys() ^ weights.keys())}")
        for name, tensor in own.items():
            tensor.copy_(weights[name])

    @property
    def can_decode(self) -> bool:
        """Whether `decode` is known to compute what this model does."""
        return can_decode(self.model)

    def decode(
        self, prompts: list[list[int]], max_tokens: int, ends: list[int], draw: Callable, fp32_lm_head: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens (B, max_tokens) of one completion a prompt, and their log-probs: see `decoding.Decoding`."""
        self.model.eval()
        with decoding(self.model):
            decoder = Decoding(
                self.model, lambda hidden: linear(hidden, self.head.weight, self.head.bias, fp32_lm_head), draw, ends
            )
            found = decoder.complete(prompts, max_tokens)
        self.model.train()
        return found

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """(T, H) hidden states of the packed tokens, in compute_dtype.

        Attention is causal and confined to each document: by_document over the one packed row. For other models and
        machines in the cheaper of two ways: one row per document, padded on the right, where causality alone keeps
        the padding out of sight; or, where padding would cost more than attention over the whole axis, one packed
        row: transformers takes a position id that does not continue the one before as the start of another document.
        """
        tokens, positions, documents = micro_batch.tokens, micro_batch.position_ids, micro_batch.document_index
        lengths = micro_batch.document_lengths
        longest = max(lengths)
        if self.by_document or len(lengths) * longest > _PADDING_LIMIT * len(tokens):
            return self._body(tokens[None], positions[None], lengths)[0]
        rows = tokens.new_zeros(len(lengths), longest)
        rows[documents, positions] = tokens
        row_positions = torch.arange(longest, device=tokens.device).expand_as(rows)
        return self._body(rows, row_positions)[documents, positions]

    def loss_inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, LMHead, Ranks]:
        """What the loss needs of the model: hidden states, the head, and the ranks that share them."""
        return self.hidden_states(micro_batch), LMHead(self.head.weight, self.head.bias), Ranks()

    def _body(self, tokens: Tensor, position_ids: Tensor, lengths: Sequence[int] = (), **more) -> Tensor:
        """(rows, S, H) hidden states of tokens (rows, S); lengths: of the documents of one packed row."""
        if self.by_document and "documents" not in more:
            more["documents"] = Documents.whole(lengths, tokens.shape[1], tokens.device)
        with self.autocast(tokens.device):
            hidden = self._transformer(input_ids=tokens, position_ids=position_ids, use_cache=False, **more)
        return hidden if self.compute_dtype == torch.float32 else hidden.to(self.compute_dtype)

    def _transformer(self, **inputs) -> Tensor:
        return self.model.base_model(**inputs).last_hidden_state

    @contextlib.contextmanager
    def generating(self, fp32_lm_head: bool):
        """For sampling: a KV cache, which gradient checkpointing would switch off, and prompts padded on the left.

        fp32_lm_head: whether the head gives float32 logits of its half-precision operands, as it does in training.
        """
        by_document = self.by_document
        self.model.eval()
        if by_document:
            self.model.set_attn_implementation("sdpa")
        with self.autocast(self.model.device), self._float32_head(fp32_lm_head):
            yield
        if by_document:
            self.model.set_attn_implementation(attention.NAME)
        self.model.train()

    @contextlib.contextmanager
    def _float32_head(self, wanted: bool):
        """In half precision, the model calls its head as the loss computes it."""
        if not wanted or self.compute_dtype == torch.float32:
            yield
            return
        head = self.head
        weight = head.weight.detach().to(self.compute_dtype)  # once, not for every token

        def forward(hidden: Tensor) -> Tensor:
            with torch.autocast(hidden.device.type, enabled=False):
                rows = hidden.flatten(end_dim=-2).to(self.compute_dtype)
                return linear(rows, weight, head.bias, fp32=True).view(*hidden.shape[:-1], -1)

        head.forward = forward
        try:
            yield
        finally:
            del head.forward

    def autocast(self, device: torch.device):
        return torch.autocast(device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers themselves; one that has several names, as that of a tied head, by the first."""
    named = model.state_dict(keep_vars=True).items()
    first = {id(tensor): name for name, tensor in reversed(named)}
    return {name: tensor for name, tensor in named if first[id(tensor)] == name}


def build_policy(config, alphabet: str | None, on_gpu: bool) -> Policy:
    """The model of `config.model` with its tokenizer.

    alphabet: characters that the tiny model's tokenizer knows; None: see `tiny_tokenizer`.
    on_gpu: what `model.dtype=auto` goes by: bfloat16 on a GPU, float32 elsewhere.
    Raises ConfigError if the model cannot be loaded or its head is not a plain linear layer.
    """
    if isinstance(config, TinyModelConfig):
        return _tiny(config, alphabet)
    return _hugging_face(config, on_gpu)


def _tiny(config: TinyModelConfig, alphabet: str | None) -> Policy:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer(alphabet)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=config.max_positions,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            activation_function="gelu_pytorch_tanh",  # GPT-2's function as one operation
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return Policy(model, tokenizer)


def character_tokenizer(alphabet: str | None):
    """`tiny_tokenizer` for transformers; the end also pads.

    A padding token of its own could be sampled, and would leave no trace in the decoded text that is scored.
    """
    from transformers import PreTrainedTokenizerFast

    options = {"eos_token": END, "pad_token": END, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(alphabet), **options)


def _hugging_face(config: HuggingFaceModelConfig, on_gpu: bool) -> Policy:
    if os.path.isdir(config.path) and (problems := model_folder.problems(config.path, config.random_weights)):
        raise ConfigError(" ".join(problems))
    model_config = model_folder.load_config(config.path)
    _switch_dropout_off(model_config)
    tokenizer = model_folder.load_tokenizer(config.path)
    model = _random(config.path, model_config) if config.random_weights else _trained(config.path, model_config)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.train()  # without dropout it changes no number, but checkpointing acts only in this mode
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _check_head(Policy(model, tokenizer), config.path)
    bfloat16 = config.dtype == "bfloat16" or (config.dtype == "auto" and on_gpu)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    if on_gpu:
        attention.switch_on(model, dtype, torch.device("cuda"))
    return Policy(model, tokenizer, dtype)


def _random(path: str, model_config) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with model_folder.refused(path, "a config.json of a causal language model", "It says what to make."):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32, trust_remote_code=False)
        model.generation_config = model_folder.load_generation_config(path)
    return model


def _trained(path: str, model_config) -> nn.Module:
    """The model with exactly the weights in its files; ConfigError where they are not all there, or not numbers."""
    from transformers import AutoModelForCausalLM

    needs, reason = "weights of the model that config.json describes", "transformers would fill in random numbers."
    with model_folder.refused(path, needs, "They and config.json must be of one model."):
        model, report = AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(path),
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **model_folder.how_to_load(path),
        )
    lacks = [f"no {name}" for name in sorted(report["missing_keys"])]
    lacks += [
        f"{name} of shape {list(found)} instead of {list(needed)}"
        for name, found, needed in sorted(report["mismatched_keys"])
    ]
    if lacks:
        raise ConfigError(model_folder.refusal(path, needs, _listed(lacks), reason))
    if broken := [name for name, weight in model.named_parameters() if not _is_finite(weight)]:
        got = f"NaN or infinity in {_listed(broken)}"
        raise ConfigError(
            model_folder.refusal(path, "weights that are numbers", got, "Nothing can be learned from it.")
        )
    if more := sorted(report["unexpected_keys"]):
        log.warning(f"note: the weights of model.path={path} hold {_listed(more)}, which its config.json does not use.")
    return model


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_finite(weight: Tensor) -> bool:
    return weight.numel() == 0 or all(bool(bound.isfinite()) for bound in weight.detach().aminmax())


def _switch_dropout_off(model_config) -> None:
    """Dropout would make the old and new log-probs of one policy differ."""
    for key, value in model_config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(model_config, key, 0.0)


@torch.no_grad()
def _check_head(policy: Policy, path: str) -> None:
    """Refuse a model whose logits are not `head(hidden)`: soft-capping or scaling would silently be left out."""
    head = policy.head
    tokens = torch.arange(4) % policy.model.config.get_text_config().vocab_size
    positions = torch.arange(4)
    if isinstance(head, nn.Linear):
        expected = policy.model(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
        found = head(policy.model.base_model(input_ids=tokens[None], position_ids=positions[None]).last_hidden_state[0])
        if torch.allclose(expected, found, rtol=1e-3, atol=1e-4):
            return
    raise ConfigError(
        f"model.path={path} needs a plain linear LM head (got {type(head).__name__} whose output is not the logits). "
        "The loss computes logits itself as hidden @ weight.T + bias; soft-capping or scaling is not supported."
    )

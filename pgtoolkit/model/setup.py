"""Builds the policy: the tiny model, or one of the transformers library, checked to be what the
loss computes."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from pgtoolkit.config.schema_run import HuggingFaceModelConfig, TinyModelConfig
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import attention, compiled, fixed_order, lora
from pgtoolkit.model.architectures import is_known
from pgtoolkit.model.policy import Policy, torch_type
from pgtoolkit.model.probe import continues_rightly, keeps_documents_apart
from pgtoolkit.ranks.agreement import read_once
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.system import model_folder
from pgtoolkit.system.report import listed, refusal
from pgtoolkit.tasks.prompts import END, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("pgtoolkit")


def prepare_torch(num_threads: int | None) -> None:
    """Choose what PyTorch computes with in this process. num_threads: None for its own number."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # cuDNN's attention plans its execution anew for each shape, and each micro-batch has a shape of
    # its own: a quarter of a GPU's time in a small model's step. The other kernels of PyTorch need
    # no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)


def build_policy(
    config, alphabet: str | None, on_gpu: bool, layout: Layout = ONE_PROCESS, compiles: bool = False
) -> Policy:
    """The model of `config.model` with its tokenizer.

    Of the ranks of a node one reads it, or draws its numbers; to the others `parallelize` gives
    them.

    alphabet: characters that the tiny model's tokenizer knows; None: see `tiny_tokenizer`.
    on_gpu: what `model.dtype=auto` goes by: bfloat16 on a GPU, float32 elsewhere.
    compiles: whether what lies between the matrices of a model that is known is compiled, see
        `compiled`.
    Raises ConfigError if the model cannot be loaded or its head is not a plain linear layer.
    """
    tiny = isinstance(config, TinyModelConfig)
    read = (
        functools.partial(_tiny, config, alphabet)
        if tiny
        else functools.partial(_hugging_face, config, on_gpu)
    )
    policy = read_once(layout, read, Policy.outline)
    # What each process sets in its own transformers, or as hooks, which are not sent.
    if getattr(config, "gradient_checkpointing", False):
        policy.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    fixed_order.switch_on(policy.model)
    if on_gpu and not tiny:
        attention.switch_on(policy.model, policy.compute_dtype, torch.device("cuda"))
    if not (compiles and is_known(policy.model)):
        return policy
    if name := compiled.unknown_code(policy.model):
        version = importlib.metadata.version("transformers")
        reason = f"Its {name} computes something else than the code that is compiled in its place."
        if config.compile is True:
            needs = f"a version of transformers that it knows ({compiled.TRANSFORMERS})"
            raise ConfigError(
                refusal("model.compile=true", needs, version, reason, "model.compile=auto")
            )
        log.warning(
            f"model.compile=auto: off with transformers {version}. {reason} Known: "
            f"{compiled.TRANSFORMERS}."
        )
        return policy
    compiled.switch_on(policy.model)
    return replace(policy, compiled=True)


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
            eos_token_id=cast("int", tokenizer.eos_token_id),
            pad_token_id=cast("int", tokenizer.pad_token_id),
        )
    )
    return Policy(model, tokenizer)


def character_tokenizer(alphabet: str | None):
    """`tiny_tokenizer` for transformers; the end also pads.

    A padding token of its own could be sampled, and would leave no trace in the decoded text that
    is scored.
    """
    from transformers import PreTrainedTokenizerFast

    options = {"eos_token": END, "pad_token": END, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(alphabet), **options)


def _hugging_face(config: HuggingFaceModelConfig, on_gpu: bool) -> Policy:
    model_config = model_folder.load_config(config.path)
    kind, got = model_config.model_type, None
    if getattr(model_config, "is_encoder_decoder", False):
        needs, got = "a language model that only decodes", f"{kind}, an encoder and a decoder"
        reason = "A document is one row of tokens to it."
    elif kind == "phimoe":
        needs, got = (
            "a model that computes the same in training",
            f"{kind}, which then draws its experts at random",
        )
        reason = "The old and new log-probs of one policy would differ."
    elif kind == "reformer":
        needs, got = (
            "a model for documents of every length",
            f"{kind}, whose training takes multiples of its chunks",
        )
        reason = "Completions end where they end."
    if got is not None:
        raise ConfigError(model_folder.refusal(config.path, needs, got, reason))
    _switch_noise_off(model_config)
    dtype = torch_type(config.dtype, torch.bfloat16 if on_gpu else torch.float32)
    tokenizer = model_folder.load_tokenizer(config.path)
    if config.random_weights:
        from transformers import AutoModelForCausalLM

        with model_folder.refused(
            config.path, "a config.json of a causal language model", "It says what to make."
        ):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                model_config, dtype=torch.float32, trust_remote_code=False
            )
            model.generation_config = model_folder.load_generation_config(config.path)
    else:
        model = _trained(config.path, model_config, dtype if config.lora_rank else torch.float32)
    if broken := [name for name, weight in model.named_parameters() if not _is_finite(weight)]:
        got, reason = f"NaN or infinity in {listed(broken, 3)}", "Nothing can be learned from it."
        raise ConfigError(
            model_folder.refusal(config.path, "weights that are numbers", got, reason)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.train()  # without dropout it changes no number, but checkpointing acts only in this mode
    loaded = Policy(model, tokenizer)
    packs = keeps_documents_apart(loaded, config.path)
    mixes_lengths, not_sampled = continues_rightly(loaded)
    digest = lora.add_adapters(model, config) if config.lora_rank else None
    return Policy(model, tokenizer, dtype, digest, packs, mixes_lengths, not_sampled)


def _trained(path: str, model_config, dtype: torch.dtype) -> PreTrainedModel:
    """The model with exactly the weights in its files; ConfigError where they are not all there."""
    from transformers import AutoModelForCausalLM

    needs, reason = (
        "weights of the model that config.json describes",
        "transformers would fill in random numbers.",
    )
    with model_folder.refused(path, needs, "They and config.json must be of one model."):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(path),
            config=model_config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **model_folder.how_to_load(path),
        )
    model, report = loaded  # two, as output_loading_info says
    lacks = [f"no {name}" for name in sorted(report["missing_keys"])]
    lacks += [
        f"{name} of shape {list(shape)} instead of {list(needed)}"
        for name, shape, needed in sorted(report["mismatched_keys"])
    ]
    if lacks:
        raise ConfigError(model_folder.refusal(path, needs, listed(lacks, 3), reason))
    if more := sorted(report["unexpected_keys"]):
        log.warning(
            f"note: the weights of model.path={path} hold {listed(more, 3)}, which its config.json "
            "does not use."
        )
    _untie(model, path)
    return model


def _untie(model: PreTrainedModel, path: str) -> None:
    """Make the configuration say what was loaded, where it says tied and the files have two
    different matrices.

    transformers then loads both. Saved with a configuration of tied ones, the model would be
    another wherever the head is taken from the embeddings, as a sampler's copy and vLLM do.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    is_tied = head is None or head.weight is model.get_input_embeddings().weight
    if is_tied or not config.tie_word_embeddings or not model._tied_weights_keys:
        return
    log.warning(
        f"note: config.json of model.path={path} says tie_word_embeddings=true, but the weights of "
        "its embeddings and of its LM head differ. Both are used as they are, and saved with "
        "tie_word_embeddings=false."
    )
    config.tie_word_embeddings = False
    model.config.tie_word_embeddings = False


def _is_finite(weight: Tensor) -> bool:
    return weight.numel() == 0 or all(bool(bound.isfinite()) for bound in weight.detach().aminmax())


def _switch_noise_off(model_config) -> None:
    """Dropout, layers left out, and jitter of experts' inputs would make old and new log-probs of
    one policy differ."""
    from transformers import PreTrainedConfig

    for key, value in [*vars(model_config).items()]:
        if isinstance(value, PreTrainedConfig):
            _switch_noise_off(value)
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(model_config, key, 0.0)

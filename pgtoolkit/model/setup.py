"""Building the policy: the tiny model, or one of the transformers library, after checks that the
loss is right for it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pgtoolkit.errors import ConfigError
from pgtoolkit.model import attention, compiled, fixed_order, lora, mixture
from pgtoolkit.model.architectures import Layer, is_known
from pgtoolkit.model.policy import Policy, torch_type
from pgtoolkit.model.probe import continues_rightly, keeps_documents_apart
from pgtoolkit.model.settings import HuggingFaceModelSettings, TinyModelSettings
from pgtoolkit.model.weight_files import open_model
from pgtoolkit.ranks.agreement import read_once
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.system import model_folder
from pgtoolkit.system.report import listed, refusal
from pgtoolkit.tasks.prompts import END, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

log = logging.getLogger("pgtoolkit")


def prepare_torch(num_threads: int | None) -> None:
    """Set the threads and kernels of PyTorch in this process; None: PyTorch's number of threads."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # cuDNN's attention plans its execution anew for each shape, and each micro-batch has another
    # shape. That takes a quarter of a GPU's time in a small model's step. PyTorch's other kernels
    # need no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)


def build_policy(
    settings: TinyModelSettings | HuggingFaceModelSettings,
    alphabet: str | None,
    on_gpu: bool,
    layout: Layout = ONE_PROCESS,
    compiles: bool = False,
) -> Policy:
    """Return the configured model with its tokenizer.

    One rank of each node reads it, or draws its numbers; `parallelize` gives them to the others.

    settings: the group `model` of a configuration.
    alphabet: characters that the tiny model's tokenizer knows; None: see `tiny_tokenizer`.
    on_gpu: `model.dtype=auto` is bfloat16 on a GPU, float32 elsewhere.
    compiles: whether the code between the matrices of a model of a known type is compiled, see
        `compiled`.
    Raises ConfigError if the model cannot be loaded or its head is not a plain linear layer.
    """
    if isinstance(settings, TinyModelSettings):
        read = functools.partial(_tiny, settings, alphabet)
    else:
        read = functools.partial(_hugging_face, settings, on_gpu)
    policy = read_once(layout, read, Policy.outline)
    # Each process does the following for itself: it sets hooks, or its own transformers, and these
    # are not sent to other ranks.
    if settings.gradient_checkpointing is True:  # of auto decides what is known later
        policy.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    fixed_order.switch_on(policy.model)
    if on_gpu and not isinstance(settings, TinyModelSettings):
        attention.switch_on(policy.model, policy.compute_dtype, torch.device("cuda"))
    if compiles and is_known(policy.model):
        return _compiled(policy, settings)
    return policy


def _compiled(policy: Policy, settings: TinyModelSettings | HuggingFaceModelSettings) -> Policy:
    """Switch compiled code on, in place, where the version of transformers is known; return the
    policy.

    Raises ConfigError for model.compile=true with another version.
    """
    unknown = compiled.unknown_code(policy.model)
    if unknown is None:
        compiled.switch_on(policy.model)
        return replace(policy, compiled=True)
    version = importlib.metadata.version("transformers")
    reason = f"Its {unknown} computes something else than the code that is compiled in its place."
    if settings.compile is True:
        raise ConfigError(
            refusal(
                setting="model.compile=true",
                needs=f"a version of transformers that it knows ({compiled.TRANSFORMERS})",
                got=version,
                reason=reason,
                use="model.compile=false",
            )
        )
    log.warning(
        f"not compiled with transformers {version}. {reason} Known: {compiled.TRANSFORMERS}."
    )
    return policy


def _tiny(settings: TinyModelSettings, alphabet: str | None) -> Policy:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = character_tokenizer(alphabet)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=settings.max_positions,
            n_embd=settings.hidden_size,
            n_layer=settings.num_layers,
            n_head=settings.num_heads,
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


def character_tokenizer(alphabet: str | None) -> PreTrainedTokenizerFast:
    """Return `tiny_tokenizer` for transformers, with the end-of-sequence token for padding.

    A separate padding token could be sampled, and would leave no trace in the decoded text that is
    scored.
    """
    from transformers import PreTrainedTokenizerFast

    options = {"eos_token": END, "pad_token": END, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(alphabet), **options)


def _hugging_face(settings: HuggingFaceModelSettings, on_gpu: bool) -> Policy:
    """Return the model of a folder or of the hub, checked; ConfigError if it cannot be trained."""
    model_config, tokenizer = open_model(settings.path, settings.random_weights)
    _switch_noise_off(model_config)
    dtype = torch_type(settings.dtype, torch.bfloat16 if on_gpu else torch.float32)
    if settings.random_weights:
        from transformers import AutoModelForCausalLM

        needs = "a config.json of a causal language model"
        with model_folder.refused(settings.path, needs, "The model is built by it."):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                model_config, dtype=torch.float32, trust_remote_code=False
            )
            model.generation_config = model_folder.load_generation_config(settings.path)
    else:
        model = _trained(
            settings.path, model_config, dtype if settings.lora_rank else torch.float32
        )
    broken = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if broken:
        got = f"NaN or infinity in {listed(broken, 3)}"
        reason = "Nothing can be learned from it."
        raise ConfigError(
            model_folder.refusal(settings.path, "weights that are numbers", got, reason)
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    _round_scale(model, dtype)
    mixture.switch_on(model)
    # Without dropout this changes no number, but checkpointing acts only in this mode.
    model.train()
    loaded = Policy(model, tokenizer)
    packs = keeps_documents_apart(loaded, settings.path)
    mixes_lengths, not_sampled = continues_rightly(loaded)
    digest = lora.add_adapters(model, settings) if settings.lora_rank else None
    return Policy(
        model,
        tokenizer,
        dtype,
        digest,
        packs,
        mixes_lengths,
        not_sampled,
        fp32_lm_head=settings.fp32_lm_head,
        pretrained=None if settings.random_weights else settings.path,
    )


def _trained(path: str, model_config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with exactly the weights in its files.

    Raises ConfigError where some are missing.
    """
    from transformers import AutoModelForCausalLM

    needs = "weights of the model that config.json describes"
    reason = "transformers would fill in random numbers."
    how_to_load = model_folder.how_to_load(path)
    with model_folder.refused(path, needs, "They and config.json must be of one model."):
        loaded = AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(path),
            config=model_config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            # With peft installed, transformers looks for adapters by these arguments alone.
            adapter_kwargs={"local_files_only": how_to_load["local_files_only"]},
            **how_to_load,
        )
    # Two values, because of output_loading_info, which no type says.
    model, report = cast("tuple[PreTrainedModel, dict[str, set]]", loaded)
    lacks = [f"no {name}" for name in sorted(report["missing_keys"])]
    lacks += [
        f"{name} of shape {list(shape)} instead of {list(needed)}"
        for name, shape, needed in sorted(report["mismatched_keys"])
    ]
    if lacks:
        raise ConfigError(model_folder.refusal(path, needs, listed(lacks, 3), reason))
    unused = sorted(report["unexpected_keys"])
    if unused:
        log.warning(
            f"note: the weights of model.path={path} hold {listed(unused, 3)}, which its "
            "config.json does not use."
        )
    _untie(model, path)
    return model


def _untie(model: PreTrainedModel, path: str) -> None:
    """Switch tie_word_embeddings off where the files have two different matrices.

    transformers then loads both. If the configuration still said tied, a sampler's copy and vLLM
    would take the head from the embeddings, which would be another model.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
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


def _round_scale(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the number that Gemma's embeddings are multiplied by to the type of the forward pass.

    transformers keeps it in the type of the weights. Those of a policy are float32, so that its
    scale would be another one than that of the copy that samples, and of the published model.
    """
    embedding: Layer = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)  # a float of no type in models such as Bart
    if isinstance(scale, Tensor):
        embedding.embed_scale = scale.to(dtype)


def _is_finite(weight: Tensor) -> bool:
    return weight.numel() == 0 or all(bool(bound.isfinite()) for bound in weight.detach().aminmax())


def _switch_noise_off(model_config: PreTrainedConfig) -> None:
    """Switch off dropout, the dropping of layers, and jitter of experts' inputs, with which old and
    new log-probs of one policy would differ."""
    from transformers import PreTrainedConfig

    for key, value in [*vars(model_config).items()]:
        if isinstance(value, PreTrainedConfig):
            _switch_noise_off(value)
        elif ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(model_config, key, 0.0)

"""Checks that the files of a model's weights are whole, and of the model that its config.json
describes: by their names, sizes and headers, without torch."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError
from pgtoolkit.model.architectures import MODEL_TYPES
from pgtoolkit.system import model_folder
from pgtoolkit.system.report import listed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

Shapes = dict[str, tuple[int, ...]]
"""The shape of each tensor, by its name."""

_SAFETENSORS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_INDEX = ".index.json"
_LONGEST_HEADER = 10**8
"""Bytes of the header of a safetensors file, at most, as in the package safetensors."""

_NEEDS = "weights of the model that config.json describes"
_FILLED_IN = "transformers would fill in random numbers."
_PREFIXES = ("model.", "transformer.")
"""Begin the names of tensors of a model with its head; files without the head lack them."""


def open_model(
    path: str, random_weights: bool = False
) -> tuple[PretrainedConfig, PreTrainedTokenizerFast]:
    """Return the configuration and the tokenizer of a model that can be trained.

    `pgtk check` and the run both call it. The weights are looked at where they are on this machine.
    random_weights: whether the weights are drawn instead of read.
    Raises ConfigError.
    """
    model_config = model_folder.load_config(path)
    refuse_unsuitable(path, model_config)
    tokenizer = model_folder.load_tokenizer(path)
    folder = model_folder.local_folder(path)
    if folder is not None and not random_weights:
        _check_weights(path, folder, model_config)
    return model_config, tokenizer


def refuse_unsuitable(path: str, model_config: PretrainedConfig) -> None:
    """Raise ConfigError for a type of model that cannot be trained."""
    kind = model_config.model_type
    if getattr(model_config, "is_encoder_decoder", False):
        needs = "a language model that only decodes"
        got = f"{kind}, an encoder and a decoder"
        reason = "A document is one row of tokens to it."
    elif kind == "phimoe":
        needs = "a model that computes the same in training"
        got = f"{kind}, which then draws its experts at random"
        reason = "The old and new log-probs of one policy would differ."
    elif kind == "reformer":
        needs = "a model for documents of every length"
        got = f"{kind}, whose training takes multiples of its chunks"
        reason = "Completions end at any length."
    elif not _is_language_model(kind):
        needs = "a language model"
        got = f"{kind}, of which transformers has none"
        reason = "A completion is drawn token by token from it."
    else:
        return
    raise ConfigError(model_folder.refusal(path, needs, got, reason))


def _is_language_model(kind: str) -> bool:
    if kind in MODEL_TYPES:
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def vocabularies_differ(
    rows: int,
    tokenizer: PreTrainedTokenizerBase,
    other_rows: int,
    other_tokenizer: PreTrainedTokenizerBase,
) -> tuple[str, str] | None:
    """Return what a further model needs, and what it has instead, to read the policy's tokens; None
    if it reads them.

    rows, tokenizer: rows of the policy's head, and its tokenizer; the others are of the further
        model.
    """
    tokens = tokenizer.get_vocab()
    other_tokens = other_tokenizer.get_vocab()
    if tokens == other_tokens and rows == other_rows:
        return None
    num_equal = len(set(tokens.items()) & set(other_tokens.items()))
    needs = f"the vocabulary of the policy, {rows} rows of the head and {len(tokens)} tokens"
    return needs, f"{other_rows} rows, and {num_equal} of these tokens under the same number"


def _check_weights(path: str, folder: Path, model_config: PretrainedConfig) -> None:
    """Raise ConfigError where files of weights are missing, cut off, or those of another model."""
    try:
        stored = _shapes_in(folder)
    except (OSError, ValueError) as error:
        pointer = isinstance(error, model_folder.PointerFile)
        reason = model_folder.POINTER if pointer else model_folder.CUT_OFF
        raise ConfigError(model_folder.refusal(path, _NEEDS, str(error), reason)) from error
    if stored is None or getattr(model_config, "quantization_config", None) is not None:
        return
    lacks = _lacks(_by_expert(stored), needed_shapes(model_config))
    if lacks:
        raise ConfigError(model_folder.refusal(path, _NEEDS, listed(lacks, 3), _FILLED_IN))


def _by_expert(stored: Shapes) -> Shapes:
    """Return shapes as models are published, where a file has the experts of a layer as one tensor,
    as checkpoints of runs do."""
    shapes: Shapes = {}
    for name, shape in stored.items():
        shapes |= published(name, shape)
    return shapes


def published(name: str, shape: tuple[int, ...]) -> Shapes:
    """Return the shapes of the parts of a weight under the names that models are published with, in
    the order in which they lie in memory.

    The experts of a layer are one tensor in transformers, and many in files. Any other weight is
    one part.
    """
    owner, _, matrix = name.rpartition(".")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(matrix)
    if names is None or not owner.endswith(".experts") or len(shape) != 3:
        return {name: shape}
    number, rows, columns = shape
    return {
        f"{owner}.{place}.{part}.weight": (rows // len(names), columns)
        for place in range(number)
        for part in names
    }


def _lacks(stored: Shapes, needed: Shapes) -> list[str]:
    """Return in words which tensors are missing, or of another shape."""
    here = {_plain_name(name): shape for name, shape in stored.items()}
    missing = [f"no {name}" for name in sorted(needed) if _plain_name(name) not in here]
    others = {name: here.get(_plain_name(name), shape) for name, shape in needed.items()}
    return missing + [
        f"{name} of shape {list(shape)} instead of {list(needed[name])}"
        for name, shape in sorted(others.items())
        if shape != needed[name]
    ]


def _plain_name(name: str) -> str:
    """Return the name of a tensor as a model without its head has it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _shapes_in(folder: Path) -> Shapes | None:
    """Return the shapes of the weights in a folder; None for pickles, which only torch can read.

    The files are those that transformers takes. Raises OSError or ValueError, which say what is
    missing or damaged.
    """
    for name in (_SAFETENSORS, _PICKLED):
        if (folder / name).is_file():
            return _shapes_of(folder / name)
        if (folder / (name + _INDEX)).is_file():
            return _shapes_of_index(folder / (name + _INDEX))
    raise ValueError(_without_weights(folder))


def _without_weights(folder: Path) -> str:
    """Return in words what a folder has instead of weights."""
    unfinished = sorted(folder.rglob("*.incomplete"))
    if unfinished:
        return f"{unfinished[0].name}, of a download that has not ended"
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    if parts:
        return f"{listed(parts, 3)} without {_SAFETENSORS}{_INDEX}"
    if os.path.lexists(folder / _SAFETENSORS):
        return f"a {_SAFETENSORS} that is a folder, or a link to nothing"
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".gguf", ".h5"))
    return f"no {_SAFETENSORS}" + (f", but {listed(others, 3)}" if others else "")


def _shapes_of_index(index: Path) -> Shapes | None:
    """Return the shapes in all files that an index names. Raises OSError or ValueError."""
    try:
        places = model_folder.settings_in(index).get("weight_map")
    except model_folder.PointerFile:
        raise
    except ValueError as error:
        raise ValueError(f"a {index.name} that is not whole: {error}") from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"a {index.name} without the names of its files")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(
            f"{len(names) - len(missing)} of the {len(names)} files that {index.name} names, "
            f"without {listed(missing, 3)}"
        )
    all_shapes: Shapes = {}
    for name in names:
        shapes = _shapes_of(index.parent / name)
        if shapes is None:
            return None
        all_shapes |= shapes
    lost = sorted(set(places) - set(all_shapes))
    if lost:
        raise ValueError(f"files without {listed(lost, 3)}, which {index.name} names")
    return all_shapes


def _shapes_of(file: Path) -> Shapes | None:
    """Return the shapes of a whole safetensors file; None for a whole file of pickles.

    Raises OSError or ValueError.
    """
    model_folder.refuse_pointer(file)
    size = file.stat().st_size
    if size == 0:
        raise ValueError(f"an empty {file.name}")
    if file.suffix != ".safetensors":
        with open(file, "rb") as content:
            is_old = content.read(1) == b"\x80"  # a pickle as torch wrote it before version 1.6
        if not is_old and not zipfile.is_zipfile(file):
            raise ValueError(f"a {file.name} that is not whole")
        return None
    with open(file, "rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if not 2 <= length <= _LONGEST_HEADER:
            raise ValueError(f"a {file.name} that is no safetensors file")
        text = content.read(length)
    if len(text) < length:
        raise ValueError(f"a {file.name} that ends in its header, after {size} bytes")
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        needed = (
            8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"a {file.name} whose header is no JSON of tensors") from error
    if size != needed:
        raise ValueError(f"{size} of the {needed} bytes of {file.name}")
    return shapes


def needed_shapes(model_config: PretrainedConfig) -> Shapes:
    """Return the shapes of the weights of a model of MODEL_TYPES, by their names in transformers;
    {} for one of another type, which only loading tells."""
    kind = model_config.model_type
    if kind not in MODEL_TYPES:
        return {}
    if kind == "gpt2":
        return _shapes_of_gpt2(model_config)
    width = model_config.hidden_size
    heads = model_config.num_attention_heads
    head = getattr(model_config, "head_dim", None) or width // heads
    query = heads * head
    key = (getattr(model_config, "num_key_value_heads", None) or heads) * head
    inner = model_config.intermediate_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (model_config.vocab_size, width),
        "model.norm.weight": (width,),
    }
    if not model_config.tie_word_embeddings:
        shapes["lm_head.weight"] = (model_config.vocab_size, width)
    attention = {"q_proj": (query, width), "k_proj": (key, width), "v_proj": (key, width)}
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    has_bias = getattr(model_config, "attention_bias", False)
    for number in range(model_config.num_hidden_layers):
        layer = f"model.layers.{number}."
        matrices = {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        biased = [*matrices] if kind == "qwen2" or has_bias else []
        matrices[f"{layer}self_attn.o_proj"] = (width, query)
        if has_bias:
            biased.append(f"{layer}self_attn.o_proj")
        matrices |= _shapes_of_mlp(model_config, number, layer, mlp)
        if getattr(model_config, "mlp_bias", False):
            biased += [f"{layer}mlp.{name}" for name in mlp]
        shapes |= {f"{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{name}.bias": matrices[name][:1] for name in biased}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{layer}{name}.weight": (width,) for name in norms}
        if kind in ("gemma3_text", "qwen3", "qwen3_moe"):
            shapes[f"{layer}self_attn.q_norm.weight"] = (head,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
    return shapes


def _shapes_of_mlp(model_config: PretrainedConfig, number: int, layer: str, mlp: Shapes) -> Shapes:
    """Return the shapes of the matrices of a layer's MLP, or of its experts and their router.

    number: of the layer. layer: the beginning of its names. mlp: the shapes of a plain MLP.
    """
    is_mixture = (
        model_config.model_type == "qwen3_moe"
        and number not in model_config.mlp_only_layers
        and (number + 1) % model_config.decoder_sparse_step == 0
    )
    if not is_mixture:
        return {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
    width = model_config.hidden_size
    inner = model_config.moe_intermediate_size
    shapes: Shapes = {f"{layer}mlp.gate": (model_config.num_experts, width)}
    for expert in range(model_config.num_experts):
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.experts.{expert}.{name}"] = (inner, width)
        shapes[f"{layer}mlp.experts.{expert}.down_proj"] = (width, inner)
    return shapes


def _shapes_of_gpt2(model_config: PretrainedConfig) -> Shapes:
    width = model_config.hidden_size
    inner = model_config.n_inner or 4 * width
    matrices = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    shapes: Shapes = {
        "transformer.wte.weight": (model_config.vocab_size, width),
        "transformer.wpe.weight": (model_config.n_positions, width),
        **_norm_of_gpt2("transformer.ln_f", width),
    }
    if not model_config.tie_word_embeddings:
        shapes["lm_head.weight"] = (model_config.vocab_size, width)
    for number in range(model_config.num_hidden_layers):
        layer = f"transformer.h.{number}."
        for name, shape in matrices.items():
            shapes[f"{layer}{name}.weight"] = shape
            shapes[f"{layer}{name}.bias"] = shape[1:]
        shapes |= _norm_of_gpt2(f"{layer}ln_1", width) | _norm_of_gpt2(f"{layer}ln_2", width)
    return shapes


def _norm_of_gpt2(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

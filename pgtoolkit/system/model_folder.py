"""A Hugging Face model in a folder: whether its files are whole, and loaded without running any code of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.system import report

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_OBJECTS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Beside config.json. Of some, transformers takes a broken one for a missing one, and goes on with other settings."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = tuple(f"{name}.index.json" for name in _WEIGHTS)
ADAPTER_SETTINGS = "adapter_config.json"
"""What tells a folder of peft's adapters, which transformers would put into whatever model lies beside it."""
_EMBEDDINGS = (".embed_tokens.weight", "wte.weight")
"""What the usual models call the matrix with a row for each entry of the vocabulary."""
_UNREADABLE = (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, SafetensorError)
"""What a file raises that is no JSON, or not the JSON or header that it should be."""
_CUT_OFF = "A copy or download that was cut off looks so, or one of another model."
_KIND = "It says what kind of model it is."


def refusal(path: str, needs: str, got: str, reason: str) -> str:
    """The sentence on a model that cannot be used."""
    return report.refusal(f"model.path={path}", needs, got, reason, "model.path=FOLDER")


def problems(path: str, random_weights: bool) -> list[str]:
    """What keeps the files in a folder from being a model, as far as they tell by themselves; reads no weights."""
    folder = Path(path).expanduser()
    found = [("plain files", f"{name}: {got}", "Only those are read.") for name, got in _special(folder)]
    if (folder / ADAPTER_SETTINGS).exists():
        reason = "Adapters are part of another model; pgtk export merges those of a run into theirs."
        found.append(("a whole model", f"adapters, {ADAPTER_SETTINGS}", reason))
    if not found:
        found = list(_settings(folder))
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            reason = "Prompts and completions are texts to it."
            found.append(("a folder with a tokenizer", f"none of {', '.join(_TOKENIZERS[:3])}", reason))
        if not random_weights:
            found += _weights(folder)
    return [refusal(path, *one) for one in found]


def model_settings(path: str | Path | None) -> dict:
    """What a folder's config.json says of its language model; empty without one, or where `problems` tells of it."""
    try:
        settings = _object(Path(os.path.expanduser(path or os.devnull), "config.json"))
    except _UNREADABLE:
        return {}
    of_text = settings.get("text_config")
    return settings | of_text if isinstance(of_text, dict) else settings


def num_weights(path: str | Path | None) -> int | None:
    """How many numbers the files of weights in a folder hold, by their headers; None where these do not tell."""
    folder, total = Path(os.path.expanduser(path or os.devnull)), 0
    for file in folder.glob("*.safetensors"):
        try:
            total += sum(map(math.prod, _shapes(file).values()))
        except _UNREADABLE:
            return None
    return total or None


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a safetensors file, by its header; one of _UNREADABLE where it is not whole."""
    with safe_open(file, "np") as opened:
        return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (it is no dictionary)


def load_config(path: str) -> Any:
    """Its transformers configuration. Raises ConfigError."""
    from transformers import AutoConfig

    with refused(path, "a config.json that transformers can load", _KIND):
        return AutoConfig.from_pretrained(os.path.expanduser(path), **how_to_load(path))


def load_tokenizer(path: str) -> Any:
    """Its tokenizer, padding on the left. Raises ConfigError."""
    from transformers import AutoTokenizer

    with refused(path, "a tokenizer that transformers can load, such as tokenizer.json", _CUT_OFF):
        return AutoTokenizer.from_pretrained(os.path.expanduser(path), padding_side="left", **how_to_load(path))


def load_generation_config(path: str) -> Any:
    """What its generation_config.json says of sampling or, as transformers does, its config.json. Raises OSError."""
    from transformers import GenerationConfig

    place, only_here = os.path.expanduser(path), {"local_files_only": how_to_load(path)["local_files_only"]}
    try:
        return GenerationConfig.from_pretrained(place, **only_here)
    except OSError:
        others = {"config_file_name": "config.json", "_from_model_config": True}
        return GenerationConfig.from_pretrained(place, **others, **only_here)


def how_to_load(path: str) -> dict[str, bool]:
    """Arguments of every `from_pretrained`: no code of a model is run, and for a folder the hub is not asked."""
    return {"trust_remote_code": False, "local_files_only": os.path.isdir(os.path.expanduser(path))}


@contextlib.contextmanager
def refused(path: str, needs: str, reason: str) -> Iterator[None]:
    """ConfigError for whatever transformers raises in the block."""
    try:
        yield
    except Exception as error:  # of damaged files its many parsers each raise their own
        said = " ".join(str(error).split())
        if "trust_remote_code" in said:
            said, reason = "one that names code of its own", "Nothing of a model is run but transformers' own classes."
        raise ConfigError(refusal(path, needs, said[:300] or type(error).__name__, reason)) from error


def _special(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, what it is) of each thing that would keep its reader waiting, or is not there."""
    for entry in sorted(folder.glob("[!.]*")):
        try:
            mode = entry.stat().st_mode
        except OSError as error:
            yield entry.name, (f"a link to {os.readlink(entry)}: " if entry.is_symlink() else "") + _reason(error)
        else:
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield entry.name, "a pipe" if stat.S_ISFIFO(mode) else "a special file"


def _settings(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(needs, got, reason) of each file of settings that is none."""
    for name in ("config.json", *_OBJECTS):
        is_config = name == "config.json"
        needs, reason = ("a folder with a config.json", _KIND) if is_config else (f"a {name} that is whole", _CUT_OFF)
        try:
            if not isinstance(_object(folder / name).get("model_type"), str) and is_config:
                yield needs, f"{name}: it has no model_type", reason
        except FileNotFoundError:
            if is_config:
                yield needs, f"no {name}", reason
        except _UNREADABLE as error:
            yield needs, f"{name}: {_reason(error)}", reason


def _object(file: Path) -> dict:
    if file.is_fifo():
        raise ValueError("it is a pipe")
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _weights(folder: Path) -> list[tuple[str, str, str]]:
    """(needs, got, reason) of each file of weights that is missing or cannot be this model's."""
    index = next((folder / name for name in _INDEXES if (folder / name).is_file()), None)
    try:
        names = [name for name in _WEIGHTS if (folder / name).exists()][:1]
        if not names and index is not None:
            names = sorted({str(name) for name in _object(index)["weight_map"].values()})
    except _UNREADABLE as error:
        return [("a folder with weights", f"{index.name}: {_reason(error)}", "It names the files of the weights.")]
    if not names:
        reason = "Without them training would start from nothing; model.random_weights=true says so."
        return [("a folder with weights", f"no {' or '.join(_WEIGHTS)}", reason)]
    settings = model_settings(folder)
    damaged = [(name, got) for name in names if (got := _damage(folder / name, settings))]
    return [("whole files of weights that fit config.json", f"{name}: {got}", _CUT_OFF) for name, got in damaged]


def _damage(file: Path, settings: dict) -> str | None:
    """Why a file of weights cannot be that of the model with these settings, from its header alone."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        if file.suffix != ".safetensors":
            file.open("rb").close()
            return None if status.st_size else "empty"
        shapes = _shapes(file)
    except FileNotFoundError:
        return "missing"
    except _UNREADABLE as error:
        return _reason(error)
    widths = (settings.get(key) for key in ("word_embed_proj_dim", "hidden_size", "n_embd"))
    rows, width = settings.get("vocab_size"), next(filter(None, widths), None)
    for name, shape in shapes.items():
        # More rows than the vocabulary: some models have tokens for pictures behind it.
        if name.endswith(_EMBEDDINGS) and rows and width and not (shape[:1] >= [rows] and shape[1:] == [width]):
            return f"{name} has shape {shape} instead of {[rows, width]}"
    return None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)


def end_tokens(generation_config, tokenizer) -> list[int]:
    """The ids that end a completion: the tokenizer's end-of-sequence token and all of the model's own settings."""
    own = generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    if foreign := [token for token in ids if not (token is None or type(token) is int)]:
        needs, reason = "the numbers of tokens", "They end a completion."
        use = "one number or a list of them in generation_config.json"
        raise ConfigError(report.refusal("eos_token_id of the model", needs, foreign[0], reason, use))
    return list(dict.fromkeys(token for token in ids if token is not None))

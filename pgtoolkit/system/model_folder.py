"""A Hugging Face model in a folder or on the hub: loaded without running any code of it, or refused
in one sentence."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError
from pgtoolkit.system import hub, report
from pgtoolkit.system.plain_files import JsonObject, json_object

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PretrainedConfig,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )

ADAPTER_SETTINGS = "adapter_config.json"
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
CUT_OFF = "A copy or download that was cut off looks so, or one of another model."
"""The reason in refusals of damaged files."""

POINTER = "`git lfs pull`, typed in that folder, puts the file in its place."
"""The reason in refusals of files that git left out."""

_FILES_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)

_START_OF_POINTER = b"version https://git-lfs.github.com/spec/"


class PointerFile(ValueError):
    """A file is only the pointer to it that git keeps where Git LFS has not loaded it."""


def refusal(path: str, needs: str, got: str, reason: str) -> str:
    """Return the refusal of a model that cannot be used."""
    near = None if os.path.exists(path) else report.near_path(path)
    use = f"model.path={near or 'FOLDER'}"
    return report.refusal(f"model.path={path}", needs, got, reason, use)


@contextlib.contextmanager
def refused(path: str, needs: str, reason: str) -> Iterator[None]:
    """Turn whatever transformers raises in the block into a ConfigError."""
    try:
        yield
    except Exception as error:  # each of its many parsers raises its own kind for damaged files
        got = " ".join(str(error).split())
        if "trust_remote_code" in got:
            got = "one that names code of its own"
            reason = "Nothing of a model is run but transformers' own classes."
        if isinstance(error, PointerFile):
            reason = POINTER
        raise ConfigError(
            refusal(path, needs, got[:300] or type(error).__name__, reason)
        ) from error


def load_config(path: str) -> PretrainedConfig:
    """Return the model's transformers configuration.

    Raises ConfigError, also for adapters and damaged files that transformers would accept in
    silence.
    """
    if not os.path.isdir(os.path.expanduser(path)):
        _check_name(path)
    from transformers import AutoConfig

    folder = local_folder(path) or Path(os.devnull)

    # transformers would put them into any model beside them
    if os.path.exists(folder / ADAPTER_SETTINGS):
        raise ConfigError(
            report.refusal(
                setting=f"model.path={path}",
                needs="a whole model",
                got=f"adapters, {ADAPTER_SETTINGS}",
                reason="Adapters are part of another model, into which pgtk export merges them.",
                use=f"pgtk export {report.shell_path(folder)} MERGED and model.path=MERGED",
            )
        )
    if not os.path.exists(folder / "config.json"):
        _refuse_folder_of_models(path, folder)
    # transformers takes some broken files for missing ones, and uses other settings
    for name in _SETTINGS:
        if os.path.exists(folder / name):
            with refused(path, f"a {name} that is whole", CUT_OFF):
                settings_in(folder / name)
    with refused(
        path,
        "a model that transformers can load, with its config.json",
        "It says what kind of model it is.",
    ):
        return AutoConfig.from_pretrained(os.path.expanduser(path), **how_to_load(path))


def models_inside(folder: Path) -> list[Path]:
    """Return the models and adapters in the folders of a folder, such as a trainer's checkpoints,
    by their numbers."""
    files = [*folder.glob("*/config.json"), *folder.glob(f"*/{ADAPTER_SETTINGS}")]
    inside = {file.parent for file in files}
    return sorted(inside, key=lambda path: (int((re.findall(r"\d+", path.name) or [-1])[-1]), path))


def _refuse_folder_of_models(path: str, folder: Path) -> None:
    """Raise ConfigError for a folder whose folders are models, or the checkpoints of a run."""
    if models_inside(folder / "checkpoints"):
        got = "a run directory"
        reason = "`pgtk export` writes its model."
        use = f"pgtk export {report.shell_path(folder)} MODEL and model.path=MODEL"
    elif models_inside(folder):
        got = "checkpoints in its folders"
        reason = "Each checkpoint of a trainer is a model of its own, or adapters."
        use = f"model.path={report.shell_path(models_inside(folder)[-1])}"
    else:
        return
    needs = "the folder of a model, with its config.json"
    raise ConfigError(report.refusal(f"model.path={path}", needs, got, reason, use))


def _check_name(path: str) -> None:
    """Refuse a path that is no folder, where it cannot be the name of a model on the hub either, or
    where neither the cache nor the hub can be asked for it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    needs = "the folder of a model, or the name of one on the Hugging Face hub"
    if os.path.exists(os.path.expanduser(path)):
        reason = "The folder holds config.json, the tokenizer and the weights."
        raise ConfigError(refusal(path, needs, "a file", reason))
    no_folder = "no such folder here"
    try:
        cached = try_to_load_from_cache(path, "config.json") is not None
    except HFValidationError as error:
        reason = "A name on the hub is OWNER/NAME."
        raise ConfigError(refusal(path, needs, no_folder, reason)) from error
    if not cached and not hub.answers(path):
        got = f"{no_folder}, and no such name in the hub's cache"
        raise ConfigError(refusal(path, needs, got, hub.silence()))


def settings_in(file: Path) -> JsonObject:
    """Return the JSON object in a file of a model. Raises OSError, ValueError or PointerFile."""
    refuse_pointer(file)
    return json_object(file)


def refuse_pointer(file: Path) -> None:
    """Raise PointerFile for a file that Git LFS has not loaded."""
    with open(file, "rb") as content:
        if content.read(len(_START_OF_POINTER)) == _START_OF_POINTER:
            raise PointerFile(f"the pointer of Git LFS in the place of {file.name}")


def local_folder(path: str) -> Path | None:
    """Return the folder of a model on this machine: the path itself, or the one in the hub's cache
    where the hub does not answer; None for a model that is on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if hub.answers(path):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, which pads on the left.

    It has the chat template that is beside it, also in a chat_template.json, which transformers
    reads for models of images alone. Raises ConfigError.
    """
    from transformers import AutoTokenizer

    folder = local_folder(path)
    with refused(path, "a tokenizer that transformers can load, such as tokenizer.json", CUT_OFF):
        if folder is not None:
            _refuse_without_tokenizer(folder)
        tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
            os.path.expanduser(path), padding_side="left", **how_to_load(path)
        )
    _refuse_random(path, tokenizer)
    template = None if folder is None else folder / "chat_template.json"
    if not tokenizer.chat_template and template is not None and template.is_file():
        with refused(path, "a chat_template.json with a chat_template", CUT_OFF):
            tokenizer.chat_template = settings_in(template)["chat_template"]
    return tokenizer


def _refuse_without_tokenizer(folder: Path) -> None:
    """Raise ValueError for a folder without a tokenizer, and PointerFile for one that Git LFS has
    not loaded."""
    files = [folder / name for name in _FILES_OF_TOKENIZERS if (folder / name).is_file()]
    if not files and not (folder / "tokenizer_config.json").is_file():
        raise ValueError("none")
    if files:
        refuse_pointer(files[0])


def _refuse_random(path: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ConfigError for a tokenizer that draws the tokens of a text."""
    algorithm = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    # dropout of byte pairs, and alpha of a unigram model
    draws = {key: getattr(algorithm, key, None) for key in ("dropout", "alpha")}
    drawn = [f"{key}={value:g} in tokenizer.json" for key, value in draws.items() if value]
    settings = tokenizer.init_kwargs.get("sp_model_kwargs") or {}
    is_sampling = isinstance(settings, dict) and settings.get("enable_sampling")
    if is_sampling and algorithm is None:  # the tokenizers of the tokenizers library do not read it
        drawn.append("enable_sampling in sp_model_kwargs of tokenizer_config.json")
    if drawn:
        raise ConfigError(
            report.refusal(
                setting=f"model.path={path}",
                needs="a tokenizer that gives a text the same tokens every time",
                got=drawn[0],
                reason="The tokens of a prompt would be drawn anew each time it is read.",
                use="a copy of the model's folder in which it is null",
            )
        )


def load_generation_config(path: str) -> GenerationConfig:
    """Return the model's settings of sampling, from generation_config.json or, as transformers
    does, from config.json.

    Raises OSError.
    """
    from transformers import GenerationConfig

    place = os.path.expanduser(path)
    only_here = how_to_load(path)["local_files_only"]
    try:
        return GenerationConfig.from_pretrained(place, local_files_only=only_here)
    except OSError:
        return GenerationConfig.from_pretrained(
            place,
            config_file_name="config.json",
            local_files_only=only_here,
            _from_model_config=True,
        )


def how_to_load(path: str) -> dict[str, bool]:
    """Return the arguments of every `from_pretrained`: they keep code of the model from being run,
    and the hub from being asked for a folder, or where it does not answer."""
    is_folder = os.path.isdir(os.path.expanduser(path))
    return {"trust_remote_code": False, "local_files_only": is_folder or not hub.answers(path)}


def model_settings(path: str | Path | None) -> JsonObject:
    """Return the settings of the language model in a folder's config.json; {} where `load_config`
    refuses it."""
    try:
        settings = json_object(Path(os.path.expanduser(path or os.devnull), "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    text_settings = settings.get("text_config")
    return settings | text_settings if isinstance(text_settings, dict) else settings


def end_tokens(
    generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the ids that end a completion: the tokenizer's end token and those in the settings."""
    in_settings = generation_config.eos_token_id
    if not isinstance(in_settings, list):
        in_settings = [in_settings]
    ids = [tokenizer.eos_token_id, *in_settings]
    wrong = [token for token in ids if not (token is None or type(token) is int)]
    if wrong:
        needs = "the numbers of tokens"
        reason = "They end a completion."
        use = "one number or a list of them in generation_config.json"
        raise ConfigError(report.refusal("eos_token_id of the model", needs, wrong[0], reason, use))
    return list(dict.fromkeys(token for token in ids if token is not None))

"""A Hugging Face model in a folder or on the hub: loaded without running any code of it, or refused
in one sentence."""

from __future__ import annotations

import contextlib
import os
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
_CUT_OFF = "A copy or download that was cut off looks so, or one of another model."
"""The reason in refusals of damaged files."""


def refusal(path: str, needs: str, got: str, reason: str) -> str:
    """Return the refusal of a model that cannot be used."""
    return report.refusal(f"model.path={path}", needs, got, reason, "model.path=FOLDER")


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
        raise ConfigError(
            refusal(path, needs, got[:300] or type(error).__name__, reason)
        ) from error


def load_config(path: str) -> PretrainedConfig:
    """Return the model's transformers configuration.

    Raises ConfigError, also for adapters and damaged files that transformers would accept in
    silence.
    """
    folder = Path(path).expanduser()
    if not os.path.isdir(folder):
        _check_name(path)
    from transformers import AutoConfig

    # transformers would put them into any model beside them
    if os.path.exists(folder / ADAPTER_SETTINGS):
        reason = (
            "Adapters are part of another model; pgtk export merges those of a run into theirs."
        )
        raise ConfigError(refusal(path, "a whole model", f"adapters, {ADAPTER_SETTINGS}", reason))
    # transformers takes some broken files for missing ones, and uses other settings
    for name in _SETTINGS:
        if os.path.exists(folder / name):
            with refused(path, f"a {name} that is whole", _CUT_OFF):
                json_object(folder / name)
    with refused(
        path,
        "a model that transformers can load, with its config.json",
        "It says what kind of model it is.",
    ):
        return AutoConfig.from_pretrained(os.path.expanduser(path), **how_to_load(path))


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


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Return the model's tokenizer, which pads on the left. Raises ConfigError."""
    from transformers import AutoTokenizer

    with refused(path, "a tokenizer that transformers can load, such as tokenizer.json", _CUT_OFF):
        return AutoTokenizer.from_pretrained(
            os.path.expanduser(path), padding_side="left", **how_to_load(path)
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

"""Prompts as tokens: how a model's tokenizer sees them, and whether there is room for them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pgtoolkit.config.schema import HuggingFaceModelConfig, PromptsTaskConfig, TinyModelConfig
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.rollouts.tasks import Prompt, Task, TaskConfig, make_task
from pgtoolkit.system.model_folder import load_tokenizer

log = logging.getLogger("pgtoolkit")

Encode = Callable[[list[str]], list[list[int]]]
"""What the tokenizer makes of texts by default, special tokens such as that of the beginning included."""

TokensOf = Callable[[Sequence[Prompt]], list[list[int]]]

_AT_ONCE = 1000
"""Prompts given to a tokenizer in one call; it encodes them in parallel."""
_SHOWN = 5

END = "<end>"
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def characters(alphabet: str | None):
    """The tiny model's tokenizer, of the tokenizers library: a token per character (None: printable ASCII), and END."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*dict.fromkeys(alphabet or _PRINTABLE), END]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def by_default(tokenizer) -> Encode:
    """What a tokenizer of transformers does where it is not told otherwise."""
    return lambda texts: tokenizer(texts)["input_ids"]


def encoded(prompts: Sequence[Prompt], encode: Encode, ends: Sequence[int]) -> list[list[int]]:
    """The tokens of each prompt; an end-of-sequence token (`ends`) at the end of one is left out.

    Some tokenizers add one, after which a model begins another text. Raises DataError that names a prompt that the
    tokenizer has no tokens for.
    """
    try:
        tokens = encode([prompt.text for prompt in prompts])
    except Exception as error:  # what the tokenizers library raises for a character it has no token for
        if len(prompts) > 1:
            return [encoded([prompt], encode, ends)[0] for prompt in prompts]
        raise DataError(
            f"the prompt {prompts[0].text[:60]!r} at {prompts[0].place} cannot be encoded by the model's tokenizer: "
            f"{first_line(error)}"
        ) from error
    for row in tokens:
        while row and row[-1] in ends:
            row.pop()
    return tokens


def make_room(task: Task, tokens_of: TokensOf, longest_document: int, longest_completion: int, skip: bool) -> None:
    """Measure all prompts of the task: refuse those without a token or without room for a completion, or drop them.

    All lengths in tokens. A task without end has prompts of one length in characters, so a few of them tell.
    Raises DataError; ConfigError where not even an empty prompt has room.
    """
    room = longest_document - longest_completion
    if room < 1:
        setting, tokens = f"rollout.max_completion_length={longest_completion}", f"{longest_document} tokens"
        reason = f"The model's positions or accumulation.max_tokens allow a document of {tokens}, prompt included."
        use = f"rollout.max_completion_length={longest_document // 2}"
        raise ConfigError(f"{setting} needs less than {tokens} (got {longest_completion}). {reason} Use {use}.")
    total, bad = 0, {}
    rows = task.rows()
    while prompts := list(itertools.islice(rows, _AT_ONCE)):
        total += len(prompts)
        for prompt, tokens in zip(prompts, tokens_of(prompts), strict=True):
            if not 0 < len(tokens) <= room:
                bad[prompt.index] = f"{prompt.place} has {len(tokens)}", len(tokens)
    if not bad:
        return
    several = f"{len(bad)} of {'the first ' if task.num_prompts is None else ''}{total} prompts"
    listed = ", ".join(said for said, _ in itertools.islice(bad.values(), _SHOWN))
    listed += f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    needed = f"do not have 1 to {room} tokens: {listed}"
    skippable = task.num_prompts is not None and len(bad) < total
    if skip and skippable:
        log.warning(f"note: task.too_long=skip leaves out {several}, which {needed}.")
        task.drop(set(bad))
        return
    longest = max(length for _, length in bad.values())
    ways = ["task.too_long=skip"] if skippable else []
    if longest > room:
        document = longest + longest_completion
        ways.append(f"accumulation.max_tokens={document} with a model of as many positions, or shorter prompts")
    raise DataError(
        f"{several} {needed}. A document of at most {longest_document} tokens holds a prompt and a completion of up to "
        f"rollout.max_completion_length={longest_completion}. Use {', or '.join(ways) or 'other prompts'}."
    )


def preview(model: TinyModelConfig | HuggingFaceModelConfig, task: TaskConfig, seed: int) -> list[str]:
    """Lines that show the first prompt and its tokens; without them for a model that is not here. Asks no hub.

    Raises PgtoolkitError for prompts, or a model folder, that cannot be used.
    """
    if isinstance(task, PromptsTaskConfig):
        task = dataclasses.replace(task, verifier="exact_match", pattern=None)  # nothing is scored here
    found = make_task(task, seed)
    prompt = found.prompt(0)
    lines = [f"{prompt.place}: {_shortened(repr(prompt.text), 200)}"]
    if isinstance(model, TinyModelConfig):
        tokenizer = characters(found.alphabet)
        (tokens,) = encoded([prompt], lambda texts: [one.ids for one in tokenizer.encode_batch(texts)], ends=[])
        names = map(tokenizer.id_to_token, tokens)
    elif Path(model.path).expanduser().is_dir():
        from pgtoolkit.rollouts.generation import end_tokens, own_settings

        loaded = load_tokenizer(model.path)
        (tokens,) = encoded([prompt], by_default(loaded), end_tokens(own_settings(model.path), loaded))
        names = loaded.convert_ids_to_tokens(tokens)
    else:
        return [*lines, f"its tokens are known where model.path={model.path} is a folder"]
    shown = " ".join(f"{name!r}={token}" for name, token in itertools.islice(zip(names, tokens, strict=True), 20))
    more = f" and {len(tokens) - 20} more" if len(tokens) > 20 else ""
    return [*lines, f"{len(tokens)} tokens: {shown}{more}"]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."

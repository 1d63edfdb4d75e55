"""The first prompt as tokens, and notes on prompts and answers as a model's tokenizer sees them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Prompt
from pgtoolkit.config.evaluation_sets import HeldOut
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.rules.run import SHORT
from pgtoolkit.model.settings import HuggingFaceModelSettings, TinyModelSettings
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.system.model_folder import (
    end_tokens,
    load_generation_config,
    load_tokenizer,
    local_folder,
)
from pgtoolkit.tasks.answer_checks import FIRST
from pgtoolkit.tasks.chat_template import ChatTemplate, chat_of
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.prompt_tasks import PromptRows
from pgtoolkit.tasks.prompts import TokenizedTask, scored_by_nobody, tiny_tokenizer
from pgtoolkit.tasks.settings import (
    ConversationTaskSettings,
    GuessTaskSettings,
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    ReverseTaskSettings,
    TaskSettings,
)
from pgtoolkit.tasks.shared_prompts import note_on_repeated, note_on_shared
from pgtoolkit.tasks.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AS_TEXTS = ("exact_match", "regular_expression")
"""Verifiers that compare an answer with the completion, character by character."""

_SHOWN_TOKENS = 20
_SHOWN_CHARACTERS = 200

_FROM_FILES = (PromptsTaskSettings, ConversationTaskSettings)
"""Tasks that read prompts from files."""


class Preview(NamedTuple):
    """The first prompt of a configuration.

    lines: show the prompt and its tokens. notes: surprises in the first prompts and answers.
    """

    lines: list[str]
    notes: list[str]


def preview(
    settings: TaskSettings,
    seed: int,
    rollout: PolicyRolloutSettings,
    model: TinyModelSettings | HuggingFaceModelSettings,
    never: Collection[str] = (),
) -> Preview:
    """Return the first prompt; without its tokens if the model is not here. No hub is asked.

    settings: of the task. never: prompts that its evaluation holds out, see `make_task`.
    Raises PgtoolkitError for prompts, or a model folder, that cannot be used.
    """
    longest = rollout.max_completion_length
    task = make_task(scored_by_nobody(settings), seed, never=never)
    prompt = task.prompt(0)
    text = repr(prompt.text)
    dots = "..." if len(text) > _SHOWN_CHARACTERS else ""
    lines = [f"{prompt.place}: {text[:_SHOWN_CHARACTERS]}{dots}"]
    if isinstance(model, TinyModelSettings):
        # The tokenizer of transformers around this one takes a second to import.
        encoding = tiny_tokenizer(task.alphabet).encode(prompt.text)
        tokens = encoding.ids
        names = encoding.tokens
        notes = []
        if isinstance(settings, PromptsTaskSettings):
            first = list(itertools.islice(task.rows(), FIRST))
            lengths = [len(row.answer.strip()) for row in first]
            notes = _too_long(first, lengths, longest, _compares_texts(settings))
    elif local_folder(model.path) is not None:
        tokenizer = load_tokenizer(model.path)
        ends = end_tokens(load_generation_config(model.path), tokenizer)
        chat = chat_of(settings, tokenizer)
        tokenized = TokenizedTask(task, tokenizer, ends, chat, rollout.stop, longest=longest)
        (tokens,) = tokenized.encode([prompt])
        names = tokenizer.convert_ids_to_tokens(tokens)
        notes = notes_on_ends(ends, vocabulary_size(model, settings), rollout.stop)
        notes += [] if chat is None else chat.notes(ends)
        notes += notes_on_rows(tokenized, settings)
    else:
        lines.append(f"its tokens are known where model.path={model.path} is a folder")
        return Preview(lines, [])
    pairs = list(zip(names, tokens, strict=True))[:_SHOWN_TOKENS]
    shown = " ".join(f"{name!r}={token}" for name, token in pairs)
    num_hidden = len(tokens) - len(pairs)
    more = f" and {num_hidden} more" if num_hidden else ""
    return Preview([*lines, f"{len(tokens)} tokens: {shown}{more}"], notes)


def notes_on_shared_prompts(
    training: TaskSettings,
    seed: int,
    sets: Sequence[HeldOut],
    num_asked: int = 0,
    never: Collection[str] = (),
) -> list[str]:
    """Return a note on each evaluation set with prompts of training: of files, which are read, and
    of generators. Raises PgtoolkitError for a file that cannot be read.

    training, seed: of the run. num_asked: prompts that training without end has asked. never: those
        that it asked never, see `make_task`.
    """
    kind = _FROM_FILES if isinstance(training, _FROM_FILES) else type(training)
    of_kind = [held_out for held_out in sets if isinstance(held_out.task, kind)]
    if not of_kind or not _is_looked_at(training):
        return []
    task = _read(training, seed, never=never)
    notes = []
    for held_out in of_kind:
        if _is_looked_at(held_out.task):
            other = _read(held_out.task, held_out.seed, held_out=True)
            count = min(held_out.prompts, other.num_prompts or held_out.prompts)
            notes.append(note_on_shared(held_out.name, other, count, task, num_asked))
    return [note for note in notes if note is not None]


def _is_looked_at(settings: TaskSettings) -> bool:
    """Return whether prompts of training may be those of an evaluation set, and are known without
    the user's code. `sums` divides its problems, and conversations without a file begin as their
    environment says."""
    if isinstance(settings, ConversationTaskSettings):
        return settings.path is not None
    return isinstance(
        settings, PromptsTaskSettings | ReasoningGymTaskSettings | ReverseTaskSettings
    )


def _read(
    settings: TaskSettings, seed: int, held_out: bool = False, never: Collection[str] = ()
) -> Task:
    """Return a task of which only prompts are asked: of conversations, those of the file."""
    if isinstance(settings, ConversationTaskSettings):
        return PromptRows(settings, seed, lambda read: read())
    return make_task(scored_by_nobody(settings), seed, held_out=held_out, never=never)


def shared_with_rows(
    held_out: HeldOut,
    recorded: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
) -> tuple[int, int]:
    """Return how many prompts of an evaluation set are prompts of recorded rollouts, and how many
    it has. Raises PgtoolkitError for prompts that cannot be read.

    recorded: see `num_among`. tokenizer, ends: of the model.
    """
    # Not above: `pgtk check` does without NumPy.
    from pgtoolkit.rollouts.recorded_prompts import num_among

    task = make_task(scored_by_nobody(held_out.task), held_out.seed, held_out=True)
    with contextlib.closing(task):
        count = min(held_out.prompts, task.num_prompts or held_out.prompts)
        tokenized = TokenizedTask(task, tokenizer, ends, chat_of(held_out.task, tokenizer))
        return num_among(recorded, tokenized, count), count


def notes_on_repeated_prompts(sets: Sequence[HeldOut]) -> list[str]:
    """Return a note on each evaluation set that asks a prompt more than once. Raises PgtoolkitError
    for a file that cannot be read."""
    notes = []
    for held_out in sets:
        if held_out.task.name not in ("conversation", "guess"):
            task = make_task(scored_by_nobody(held_out.task), held_out.seed, held_out=True)
            count = min(held_out.prompts, task.num_prompts or held_out.prompts)
            notes.append(note_on_repeated(held_out.name, task, count))
    return [note for note in notes if note is not None]


def prompts_in_sets(sets: Sequence[HeldOut]) -> dict[str, int]:
    """Return how many prompts each evaluation set has, by its name; of one whose prompts never end,
    how many it asks. Raises PgtoolkitError for a file that cannot be read."""
    counts = {}
    for held_out in sets:
        counts[held_out.name] = held_out.prompts
        is_endless = isinstance(held_out.task, ConversationTaskSettings) and not held_out.files
        if not is_endless and not isinstance(held_out.task, GuessTaskSettings):
            task = _read(held_out.task, held_out.seed, held_out=True)
            counts[held_out.name] = task.num_prompts or held_out.prompts
    return counts


def notes_on_rows(tokenized: TokenizedTask, settings: TaskSettings) -> list[str]:
    """Return notes on surprises in the first prompts and answers as tokens."""
    # Each prompt of a conversation asks its environment, which is the user's.
    count = 1 if isinstance(tokenized.task, ConversationTask) else FIRST
    prompts = list(itertools.islice(tokenized.task.rows(), count))
    notes = _written_with_template(tokenized.chat, prompts)
    notes += _two_beginnings(tokenized, prompts)
    notes += _changed_prompts(tokenized, prompts)
    if isinstance(settings, PromptsTaskSettings):
        notes += _unreachable(tokenized, prompts, _compares_texts(settings))
    return notes


def _written_with_template(chat: ChatTemplate | None, prompts: Sequence[Prompt]) -> list[str]:
    """Return a note on prompts that already hold the text that the chat template adds to them."""
    marks = [] if chat is None else chat.marks()
    marked = [(prompt, mark) for prompt in prompts for mark in marks if mark in _contents(prompt)]
    if not marked:
        return []
    places = dict.fromkeys(prompt.place for prompt, _ in marked)
    prompt, mark = marked[0]
    return [
        f"{len(places)} of the first {len(prompts)} prompts hold {mark!r}, which the chat template "
        f"writes itself, first that at {prompt.place}: they go through the template a second time. "
        "Use task.chat=never, or prompts without it."
    ]


def _two_beginnings(tokenized: TokenizedTask, prompts: Sequence[Prompt]) -> list[str]:
    """Return a note on prompts that begin with the token of the beginning, to which the tokenizer
    adds another."""
    beginning = tokenized.tokenizer.bos_token_id
    rows = tokenized.encode(prompts)
    twice = [
        prompt
        for prompt, row in zip(prompts, rows, strict=True)
        if row[:2] == [beginning, beginning]
    ]
    if not twice:
        return []
    name = tokenized.tokenizer.bos_token
    reason = f"the tokenizer adds one to that of the text. Leave {name} out of the prompts."
    if not any(str(name) in prompt.text for prompt in twice):
        reason = "its tokenizer.json adds two to each text."
    return [
        f"{len(twice)} of the first {len(prompts)} prompts begin with {name} twice, first that at "
        f"{twice[0].place}: {reason}"
    ]


def _changed_prompts(tokenized: TokenizedTask, prompts: Sequence[Prompt]) -> list[str]:
    """Return a note on prompts that the tokenizer changes, such as by lower case, and on those with
    characters that it has no token for."""
    changed = []
    for prompt, tokens in zip(prompts, tokenized.encode(prompts), strict=True):
        text = str(tokenized.tokenizer.decode(tokens))
        asked = prompt.text if prompt.messages is None else prompt.messages[-1]["content"]
        if asked.strip() not in text:
            changed.append((prompt, text))
    if not changed:
        return []
    prompt, text = changed[0]
    return [
        f"{len(changed)} of the first {len(prompts)} prompts are other texts as tokens, first "
        f"{prompt.text[:60]!r} at {prompt.place}, which becomes {text[:90]!r}: the model sees what "
        "its tokenizer makes of them."
    ]


def notes_on_ends(ends: Sequence[int], rows: int | None, stop: Sequence[str]) -> list[str]:
    """Return a note where no completion can end by itself.

    rows: tokens that the model has weights of, if that is known. stop: texts that end a completion.
    """
    if stop or any(rows is None or end < rows for end in ends):
        return []
    got = f"only {ends[0]}, of which it has no weights" if ends else "none"
    return [
        f"the model has no end-of-sequence token (got {got}): every completion goes on to "
        "rollout.max_completion_length. Use eos_token_id in its generation_config.json, or "
        "rollout.stop."
    ]


def _unreachable(tokenized: TokenizedTask, prompts: Sequence[Prompt], as_texts: bool) -> list[str]:
    """Return notes on answers that no completion can equal.

    They are too long, or the tokenizer changes them. as_texts: see `_too_long`.
    """
    lengths = []
    changed = []
    for prompt in prompts:
        answer = prompt.answer.strip()
        try:
            tokens = tokenized.tokenizer(answer, add_special_tokens=False)["input_ids"]
        except Exception:  # tokenizers raises Exception for a character without a token
            tokens = []
        lengths.append(len(tokens))
        text = tokenized.text(tokens).strip()
        if text != answer:
            changed.append((prompt, text))
    notes = _too_long(prompts, lengths, tokenized.longest, as_texts)
    if changed and as_texts:
        prompt, text = changed[0]
        notes.append(
            f"{len(changed)} of the first {len(prompts)} answers are texts that the model's tokens "
            f"cannot write, first {prompt.answer[:60]!r} at {prompt.place}, which becomes "
            f"{text[:60]!r}: no completion can equal them. Write them as the tokenizer does, and "
            "without texts of rollout.stop."
        )
    return notes


def _too_long(
    prompts: Sequence[Prompt], lengths: Sequence[int], longest: int, as_texts: bool
) -> list[str]:
    """Return a note on answers that are longer than a completion may be.

    lengths: of the answers, in tokens. longest: the longest completion, in tokens.
    as_texts: whether a completion must equal its answer. Else answers may be worked solutions, and
        are no measure of long completions.
    """
    beyond = [
        (prompt, length)
        for prompt, length in zip(prompts, lengths, strict=True)
        if length > longest
    ]
    if not beyond or (not as_texts and longest >= SHORT):
        return []
    prompt, length = beyond[0]
    # With the end of the sequence.
    use = f"rollout.max_completion_length={max(lengths) + 1}"
    consequence = f"No completion can equal them. Use final answers alone, or {use}."
    if not as_texts:
        consequence = f"A completion that repeats them is cut off. Use {use}."
    return [
        f"{len(beyond)} of the first {len(prompts)} answers are longer than a completion may be "
        f"(rollout.max_completion_length={longest}), first that at {prompt.place}, of {length} "
        f"tokens: {prompt.answer[:60]!r}. {consequence}"
    ]


def _compares_texts(settings: TaskSettings) -> bool:
    if not isinstance(settings, PromptsTaskSettings):
        return False
    entries = settings.verifiers.values() or [{"verifier": settings.verifier}]
    return any(entry["verifier"] in _AS_TEXTS for entry in entries)


def _contents(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text
    return "\n".join(message["content"] for message in prompt.messages)

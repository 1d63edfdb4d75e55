"""Rows of texts for supervised fine-tuning as tokens, of which exactly the turns of the assistant
are trained."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pgtoolkit.completion import Message
from pgtoolkit.errors import first_line
from pgtoolkit.rollouts.recorded_prompts import checksum_of_messages
from pgtoolkit.rollouts.settings import TrainedTurns
from pgtoolkit.tasks.chat_template import (
    ANSWER,
    QUESTION,
    ChatTemplate,
    left_out,
    used_template,
)
from pgtoolkit.tasks.prompt_rows import UNUSED_TOOLS, has_tools, messages_of
from pgtoolkit.tasks.settings import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pgtoolkit.tasks.row_files import RawRow

LoadTokenizer = Callable[[], "tuple[PreTrainedTokenizerBase, Sequence[int]]"]
"""Returns a tokenizer and its end-of-sequence tokens."""

TEXTS = ("messages", "prompt", "completion")
"""Fields of a row of texts: a conversation, or a prompt and its completion, both of which are texts
or lists of messages."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END = "Add the id of the token that ends an answer to eos_token_id in generation_config.json."
_ENDLESS = (
    "Completions may never end. Use a chat template that writes an end-of-sequence token there."
)
_MARKS = "Use a template that marks the turns by {% generation %}"

_Span = tuple[int, int]
"""A part of a text: its first character, and the one after its last."""

_TokenRow = dict[str, list]
"""token_ids and loss_mask of a row."""


def has_texts(names: Collection[str]) -> bool:
    """Return whether a row with these fields, or a file with these columns, has texts."""
    return "messages" in names or {"prompt", "completion"} <= {*names}


@dataclass
class Conversations:
    """Makes tokens of rows of texts.

    load: gives the tokenizer and the end-of-sequence tokens, once they are needed.
    trained: which turns of the assistant are trained; of a prompt with its completion only turns of
        the completion are.
    read: the number of rows so far. doubled: the number of those whose texts already hold what the
        chat template, or the tokenizer, adds to them. first_doubled: the added text, and the text
        of the first such row.
    asked: checksums of the messages before each trained turn of the last row.
    """

    load: LoadTokenizer
    chat: Chat
    trained: TrainedTurns
    read: int = 0
    doubled: int = 0
    first_doubled: tuple[str, str] | None = None
    asked: set[int] = field(default_factory=set)

    def tokens(self, raw: RawRow) -> _TokenRow:
        """Return token_ids and loss_mask of a row. Raises ValueError that says what is wrong with
        it.

        Through the chat template these are the tokens of `apply_chat_template`. A text alone gets
        what the tokenizer adds by default before it, and the completion the end of the sequence.
        """
        self.read += 1
        if has_tools(raw):
            raise ValueError(UNUSED_TOOLS)
        messages, prompt, completion = (raw.get(name) for name in TEXTS)
        if messages is not None:
            if completion is not None:
                raise ValueError(
                    "needs to stand alone: the row also has a completion, whose tokens would be in "
                    "it twice"
                )
            return self._of_chat(messages_of(messages), 0)
        if prompt is None or completion is None:
            raise ValueError("needs a prompt and its completion")
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError(
                "needs to be of the same kind as its prompt: a text, or a list of chat messages"
            )
        if not isinstance(prompt, str):
            before = messages_of(prompt)
            return self._of_chat([*before, *messages_of(completion)], len(before))
        if self._template is None:
            self.asked = {checksum_of_messages([{"role": "user", "content": prompt}])}
            return self._of_texts(prompt, completion)
        answer = {"role": "assistant", "content": completion}
        return self._of_chat([{"role": "user", "content": prompt}, answer], 1)

    def _of_texts(self, prompt: str, completion: str) -> _TokenRow:
        """Return the tokens of a prompt and its completion where there is no chat template."""
        tokenizer, ends = self._loaded
        before = self._encoded(prompt)
        if before[:2] == [tokenizer.bos_token_id] * 2:
            self._count_doubled(str(tokenizer.bos_token), prompt)
        while before and before[-1] in ends:
            before.pop()
        after = self._encoded(completion, add_special_tokens=False)
        if not after or after[-1] not in ends:
            after = [*after, *ends[:1]]
        return {
            "token_ids": before + after,
            "loss_mask": [False] * len(before) + [True] * len(after),
        }

    def _encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer, _ = self._loaded
        encoded = tokenizer(text, add_special_tokens=add_special_tokens)
        return cast("list[int]", encoded["input_ids"])

    def notes(self) -> list[str]:
        """Return what may surprise of the template, and of the rows that were read."""
        notes = self._notes_on_ends()
        if self.first_doubled is not None:
            mark, text = self.first_doubled
            writer = "tokenizer"
            use = f"texts without {mark}"
            if self._template is not None:
                writer = "chat template"
                use = f"rollout.chat=never, or texts without {mark}"
            notes.append(
                f"{self.doubled} of the first {self.read} rows hold {mark!r}, which the {writer} "
                f"adds itself, so that they have it twice, first {text[:60]!r}. Use {use}."
            )
        return notes

    def _notes_on_ends(self) -> list[str]:
        """Return a note if no token that ends a completion is trained at the end of an answer."""
        _, ends = self._loaded
        if self._template is None:
            if ends:
                return []
            return [
                "the model has no end-of-sequence token, and completions are trained without one. "
                + _END
            ]
        try:
            row = self._of_chat([QUESTION, ANSWER], 0)
        except Exception:
            # A template for other conversations, or a tokenizer without a token for a character of
            # this one. Each row is seen by itself.
            return []
        trained = {token for token, is_trained in zip(*row.values(), strict=True) if is_trained}
        if trained & {*ends}:
            return []
        text, _ = self._written([QUESTION, ANSWER])
        after = text.rpartition(ANSWER["content"])[2]
        if not after.strip():
            return [
                "the chat template writes no end after an answer, so that none is trained. "
                + _ENDLESS
            ]
        if {*self._encoded(after, add_special_tokens=False)} & {*ends}:
            return [
                "the chat template marks an answer without its end, so that none is trained. "
                + _ENDLESS
            ]
        return [
            f"the chat template ends an answer with {after[:40]!r}, which holds no end-of-sequence "
            f"token of the model: all of it is trained, and completions may go on after it. {_END}"
        ]

    def fingerprint(self) -> int:
        """Return a checksum of the template and of the text that it writes today."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            written = self.tokens({"messages": messages}) if self._template else self._encoded("?")
        except Exception as error:  # no token for a character, or no place in the template
            written = str(error)
        return zlib.crc32(repr((self._template, self.chat, self.trained, written)).encode())

    @functools.cached_property
    def _loaded(self) -> tuple[PreTrainedTokenizerBase, Sequence[int]]:
        return self.load()

    @functools.cached_property
    def _template(self) -> str | None:
        tokenizer, _ = self._loaded
        if self.chat == Chat.auto and tokenizer.chat_template:
            return used_template(tokenizer, "rollout.chat=auto")
        return None

    def _count_doubled(self, mark: str, text: str) -> None:
        self.doubled += 1
        self.first_doubled = self.first_doubled or (mark, text)

    @functools.cached_property
    def _written_by_template(self) -> list[str]:
        return ChatTemplate(self._loaded[0]).marks()

    @property
    def _is_marked(self) -> bool:
        """Return whether the template itself marks the parts that are the assistant's."""
        return _GENERATION.search(self._template or "") is not None

    def _of_chat(self, messages: list[Message], first: int) -> _TokenRow:
        """Return the tokens of a chat. first: the message from which on turns are trained."""
        if self._template is None:
            raise ValueError(
                "is a list of chat messages, and there is no chat template, or rollout.chat=never"
            )
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [place for place in turns if place >= first]
        if self.trained == TrainedTurns.last:
            trained = trained[-1:]
        if not trained:
            raise ValueError("has no message of the assistant to be trained")
        self.asked = {checksum_of_messages(messages[:place]) for place in trained}
        text, marked = self._written(messages)
        contents = "\n".join(message["content"] for message in messages)
        doubled = [mark for mark in self._written_by_template if mark in contents]
        if doubled:
            self._count_doubled(doubled[0], contents)
        role = left_out(messages, text)
        if role is not None:
            raise ValueError(f"has a {role} message, and the chat template leaves it out")
        if self._is_marked:
            spans = _marked_spans(marked, turns, trained)
        else:
            spans = [self._difference(messages, place, text) for place in trained]
        tokenizer, _ = self._loaded
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = cast("list[int]", encoded["input_ids"])
        places = cast("list[_Span]", encoded["offset_mapping"])
        mask = [False] * len(tokens)
        for span in spans:
            inside = self._tokens_inside(span, tokens, places)
            if inside:
                mask[inside[0] : inside[-1] + 1] = [True] * (inside[-1] + 1 - inside[0])
        if not any(mask):
            raise ValueError(
                "has no token that is trained: the chat template leaves the assistant's "
                "messages out"
            )
        return {"token_ids": tokens, "loss_mask": mask}

    def _tokens_inside(self, span: _Span, tokens: list[int], places: list[_Span]) -> list[int]:
        """Return the tokens, by number, that lie in a part of the text.

        Raises ValueError for a token that the part cuts.
        """
        start, end = span
        cut = [i for i, (a, b) in enumerate(places) if a < start < b or a < end < b]
        tokenizer, ends = self._loaded
        if cut:
            name = tokenizer.convert_ids_to_tokens(tokens[cut[0]])
            raise ValueError(f"has a token, {name}, that is in part the assistant's. {_MARKS}")
        inside = [i for i, (a, b) in enumerate(places) if start <= a < b <= end]
        if not self._is_marked:
            # The template may write a line break after the end of a turn, which is not trained.
            last = max((n for n, i in enumerate(inside, 1) if tokens[i] in ends), default=None)
            inside = inside[:last]
        return inside

    def _difference(self, messages: list[Message], place: int, text: str) -> _Span:
        """Return the part of the text that a turn adds to the messages before it and the beginning
        of an answer."""
        before, _ = self._written(messages[:place], add_generation_prompt=True)
        after, _ = self._written(messages[: place + 1])
        if not (text.startswith(after) and after.startswith(before)):
            several = self.trained == TrainedTurns.all and place + 1 < len(messages)
            way_out = _MARKS + (", or rollout.trained_turns=last" if several else "")
            raise ValueError(
                f"has at place {place + 1} an answer that the chat template writes in another way "
                "where the conversation ends with it. So pgtoolkit cannot know which tokens are "
                f"the assistant's. {way_out}"
            )
        return len(before), len(after)

    def _written(
        self, messages: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[_Span]]:
        """Return the text that the template makes of messages, and the parts of it that it marks as
        the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        special_tokens: dict[str, Any] = self._loaded[0].special_tokens_map
        try:
            (text,), marked = render_jinja_template(
                [messages],
                chat_template=self._template,
                return_assistant_tokens_mask=self._is_marked,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        except Exception as error:  # A template raises what it likes.
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error
        # transformers declares each element to be texts or, as asked for here, places.
        return str(text), cast("list[_Span]", marked[0]) if marked else []


def _marked_spans(marked: list[_Span], turns: list[int], trained: list[int]) -> list[_Span]:
    """Return those of the marked parts of a text that are trained.

    marked: by the chat template. turns: places of the assistant's messages. trained: of those that
    are trained.
    """
    if trained == turns:
        return marked
    if len(marked) != len(turns):
        raise ValueError(
            f"has {len(turns)} turns of the assistant, of which the chat template marks "
            f"{len(marked)}: which of them are trained cannot be known. Use "
            "rollout.trained_turns=all"
        )
    return [marked[turns.index(place)] for place in trained]

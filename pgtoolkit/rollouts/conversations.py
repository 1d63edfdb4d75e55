"""Rows of texts for supervised fine-tuning as tokens, of which exactly the turns of the assistant
are trained."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pgtoolkit.completion import Message
from pgtoolkit.config.schema_rollouts import TrainedTurns
from pgtoolkit.config.schema_tasks import Chat
from pgtoolkit.errors import first_line
from pgtoolkit.tasks.chat_template import ANSWER, QUESTION, ChatTemplate
from pgtoolkit.tasks.prompt_rows import UNUSED_TOOLS, has_tools, messages_of

TEXTS = ("messages", "prompt", "completion")
"""Fields of such a row: a conversation, or a prompt and its completion, both texts or both lists of
messages."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END = "Add the id of the token that ends an answer to eos_token_id in generation_config.json."
_ENDLESS = (
    "Completions may never end. Use a chat template that writes an end-of-sequence token there."
)
_MARKS = "Use a template that marks the turns by {% generation %}"


@dataclass
class Conversations:
    """How a row of texts becomes tokens.

    load: gives the tokenizer and the end-of-sequence tokens, once they are needed.
    trained: which turns of the assistant are; of a prompt with its completion only those of the
        completion.
    read: how many rows there were. doubled: how many of them hold what the chat template, or the
        tokenizer, adds to
    them once more; first_doubled: what that is, and the text of the first.
    """

    load: Callable[[], tuple[Any, Sequence[int]]]
    chat: Chat
    trained: TrainedTurns
    read: int = 0
    doubled: int = 0
    first_doubled: tuple[str, str] | None = None

    def tokens(self, raw: dict[str, Any]) -> dict[str, list]:
        """token_ids and loss_mask of a row. ValueError says what is wrong with it.

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
                    "needs to stand alone, without a completion, whose tokens it would have too"
                )
            return self._of_chat(messages_of(messages), 0)
        if prompt is None or completion is None:
            raise ValueError("needs a prompt and its completion")
        if isinstance(prompt, str) != isinstance(completion, str):
            raise ValueError("needs to be what its prompt is: a text, or a list of chat messages")
        if not isinstance(prompt, str):
            before = messages_of(prompt)
            return self._of_chat([*before, *messages_of(completion)], len(before))
        if self._template is None:
            return self._of_texts(prompt, completion)
        answer = {"role": "assistant", "content": completion}
        return self._of_chat([{"role": "user", "content": prompt}, answer], 1)

    def _of_texts(self, prompt: str, completion: str) -> dict[str, list]:
        tokenizer, ends = self._loaded
        before = tokenizer(prompt)["input_ids"]
        if before[:2] == [tokenizer.bos_token_id] * 2:
            self._count_doubled(tokenizer.bos_token, prompt)
        while before and before[-1] in ends:
            before.pop()
        after = tokenizer(completion, add_special_tokens=False)["input_ids"]
        if not after or after[-1] not in ends:
            after = [*after, *ends[:1]]
        return {
            "token_ids": before + after,
            "loss_mask": [False] * len(before) + [True] * len(after),
        }

    def notes(self) -> list[str]:
        """Return what may surprise of the template, and of the rows that were read."""
        notes = self._notes_on_ends()
        if self.first_doubled is not None:
            mark, text = self.first_doubled
            writer, use = "tokenizer", f"texts without {mark}"
            if self._template is not None:
                writer, use = "chat template", f"rollout.chat=never, or texts without {mark}"
            notes.append(
                f"{self.doubled} of the first {self.read} rows hold {mark!r}, which the {writer} "
                f"adds itself, so that they have it twice, first {text[:60]!r}. Use {use}."
            )
        return notes

    def _notes_on_ends(self) -> list[str]:
        """Return a note where no token that ends a completion is trained at the end of an
        answer."""
        tokenizer, ends = self._loaded
        if self._template is None:
            nothing = (
                "the model has no end-of-sequence token: completions are trained without an end. "
                + _END
            )
            return [] if ends else [nothing]
        try:
            row = self._of_chat([QUESTION, ANSWER], 0)
        except (
            ValueError
        ):  # a template for other conversations, of which each row is seen by itself
            return []
        trained = {token for token, is_trained in zip(*row.values(), strict=True) if is_trained}
        if trained & {*ends}:
            return []
        after = self._written([QUESTION, ANSWER])[0].rpartition(ANSWER["content"])[2]
        if not after.strip():
            return [
                (
                    "the chat template writes no end after an answer, so that none is trained. "
                    f"{_ENDLESS}"
                )
            ]
        if {*tokenizer(after, add_special_tokens=False)["input_ids"]} & {*ends}:
            return [
                (
                    "the chat template marks an answer without its end, so that none is trained. "
                    f"{_ENDLESS}"
                )
            ]
        return [
            f"the chat template ends an answer with {after[:40]!r}, which holds no end-of-sequence "
            f"token of the model: all of it is trained, and completions may go on after it. {_END}"
        ]

    def fingerprint(self) -> int:
        """Of the template and of what it writes today."""
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        try:
            written = (
                self.tokens({"messages": said})
                if self._template
                else self._loaded[0]("?")["input_ids"]
            )
        except Exception as error:  # what the tokenizer has no token for, or the template no place
            written = str(error)
        return zlib.crc32(repr((self._template, self.chat, self.trained, written)).encode())

    @functools.cached_property
    def _loaded(self) -> tuple[Any, Sequence[int]]:
        return self.load()

    @functools.cached_property
    def _template(self) -> str | None:
        tokenizer, _ = self._loaded
        return (
            tokenizer.get_chat_template()
            if self.chat == Chat.auto and tokenizer.chat_template
            else None
        )

    def _count_doubled(self, mark: str, text: str) -> None:
        self.doubled += 1
        self.first_doubled = self.first_doubled or (mark, text)

    @functools.cached_property
    def _written_by_template(self) -> list[str]:
        return ChatTemplate(self._loaded[0]).marks()

    @property
    def _is_marked(self) -> bool:
        """Whether the template says itself which parts are the assistant's."""
        return _GENERATION.search(self._template or "") is not None

    def _of_chat(self, messages: list[Message], first: int) -> dict[str, list]:
        """first: the message from which on turns are trained."""
        if self._template is None:
            raise ValueError(
                "is a list of chat messages, and there is no chat template, or rollout.chat=never"
            )
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [place for place in turns if place >= first][
            -1 if self.trained == TrainedTurns.last else 0 :
        ]
        if not wanted:
            raise ValueError("has no message of the assistant to be trained")
        text, marked = self._written(messages)
        said = "\n".join(message["content"] for message in messages)
        if twice := [mark for mark in self._written_by_template if mark in said]:
            self._count_doubled(twice[0], said)
        if messages[0]["role"] == "system" and messages[0]["content"].strip() not in text:
            raise ValueError("has a system message, and the chat template leaves it out")
        if not self._is_marked:
            marked = [self._difference(messages, place, text) for place in wanted]
        elif wanted != turns:
            if len(marked) != len(turns):
                found = (
                    f"has {len(turns)} turns of the assistant, of which the chat template "
                    f"marks {len(marked)}"
                )
                raise ValueError(
                    f"{found}: which are trained cannot be told. Use rollout.trained_turns=all"
                )
            marked = [marked[turns.index(place)] for place in wanted]
        tokenizer, ends = self._loaded
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, places = encoded["input_ids"], encoded["offset_mapping"]
        mask = [False] * len(tokens)
        for start, end in marked:
            if cut := [i for i, (a, b) in enumerate(places) if a < start < b or a < end < b]:
                name = tokenizer.convert_ids_to_tokens(tokens[cut[0]])
                raise ValueError(f"has a token, {name}, that is in part the assistant's. {_MARKS}")
            inside = [i for i, (a, b) in enumerate(places) if start <= a < b <= end]
            if not self._is_marked:  # a template writes a line break after the end of a turn
                inside = inside[
                    : max((n for n, i in enumerate(inside, 1) if tokens[i] in ends), default=None)
                ]
            if inside:
                mask[inside[0] : inside[-1] + 1] = [True] * (inside[-1] + 1 - inside[0])
        if not any(mask):
            raise ValueError(
                "has no token that is trained: the chat template leaves the assistant's "
                "messages out"
            )
        return {"token_ids": tokens, "loss_mask": mask}

    def _difference(self, messages: list[Message], place: int, text: str) -> tuple[int, int]:
        """Where a turn stands in the text: what its message adds to those before it and the
        beginning of an answer."""
        before, _ = self._written(messages[:place], add_generation_prompt=True)
        after, _ = self._written(messages[: place + 1])
        if not (text.startswith(after) and after.startswith(before)):
            several = self.trained == TrainedTurns.all and place + 1 < len(messages)
            way_out = _MARKS + (", or rollout.trained_turns=last" if several else "")
            raise ValueError(
                f"has at place {place + 1} an answer that the chat template writes in another way "
                "where the conversation ends with it, so that it cannot be told which tokens are "
                f"the assistant's. {way_out}"
            )
        return len(before), len(after)

    def _written(
        self, messages: list[Message], add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """What the template makes of messages, and where in it are the parts that it marks as the
        assistant's."""
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
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"is refused by the chat template: {first_line(error)}") from error
        # transformers says of each conversation either texts or, as asked for here, places.
        return str(text), cast("list[tuple[int, int]]", marked[0]) if marked else []

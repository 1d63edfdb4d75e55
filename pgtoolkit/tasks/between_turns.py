"""The tokens between two turns of a model, without tokenising again anything that was drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from pgtoolkit.completion import Message
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.chat_template import ANSWER, QUESTION, ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BetweenTurns:
    """Makes tokens of a message that follows a model's turn, up to where its next turn begins.

    To write a conversation anew would change tokens of its earlier turns: templates leave out what
    was thought, and a text has several tokenisations. So the message is written after a short fixed
    conversation; the text from the end of its answer on is the text between two turns.

    ends: ids of the end-of-sequence tokens. chat: the template; without one a message is its
        content alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], chat: ChatTemplate | None
    ):
        self._tokenizer = tokenizer
        self._ends = set(ends)
        self._chat = chat

    def tokens(self, message: Message, last: int) -> list[int]:
        """Return the tokens of a message after a turn. Raises DataError where there are none for
        it.

        last: the turn's last token. If it is an end of the sequence, the template's own end of an
        answer is left out.
        """
        try:
            unread = self.unread(message)
            if unread:
                raise ValueError(f"{', '.join(unread)}, which would be dropped")
            if self._chat is None:
                return self._encode(message["content"])
            tokens = self._encode(self._after(message))
            start = min(tokens.index(end) for end in self._ends if end in tokens)
        except ValueError as error:
            raise DataError(
                f"the environment's message {message!r:.200} needs another chat template or "
                f"tokenizer (got {error}). Use roles, keys and characters that it has; "
                "task.chat=never needs no roles, and writes the content alone."
            ) from error
        return tokens[start + (last in self._ends) :]

    def unread(self, message: Message) -> list[str]:
        """Return the keys of a message that the model would not see. ValueError where the template
        writes nothing."""
        if len(message) == 2:
            return []
        if self._chat is None:
            return [name for name in message if name not in ("role", "content")]
        return self._chat.unread(message)

    def check(self, start: Sequence[Message]) -> None:
        """Raise ConfigError where a template rewrites earlier messages when more follow.

        start: the messages that a conversation begins with.
        """
        if self._chat is None:
            return
        try:
            before = self._chat.under_system([*start, ANSWER, start[-1]])
            more = {"role": "user", "content": "more"}
            after = self._after(more)
            longer = self._chat.text([*before, ANSWER, more], True)
            got = "one that writes messages in another way when more messages follow"
            if longer.startswith(self._chat.text(before)) and longer.endswith(after):
                if self._ends & {*self._encode(after)}:
                    return
                got = "one that ends an answer with none of eos_token_id in generation_config.json"
        except ValueError as error:
            got = str(error)
        raise ConfigError(
            refusal(
                setting="a task of several turns",
                needs="a chat template that adds to its end",
                got=got,
                reason="Each message becomes tokens once, and follows the tokens that were drawn.",
                use="task.chat=never, which writes the contents one after the other as they are, "
                "or another chat template",
            )
        )

    def _after(self, message: Message) -> str:
        """Return the text after an answer, its end first. ValueError if the template leaves
        something out."""
        assert self._chat is not None
        shown = self._chat.text(self._chat.under_system([QUESTION, ANSWER, message]), True)
        after = shown.partition(ANSWER["content"])[2]
        # Templates strip white space around a message.
        if message["content"].strip() not in after:
            raise ValueError("one that leaves out an answer, or the message after it")
        return after

    def _encode(self, text: str) -> list[int]:
        try:
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # tokenizers raises Exception for a character without a token
            raise ValueError(f"one that says: {first_line(error)}") from error
        return cast("list[int]", tokens)

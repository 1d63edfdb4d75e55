"""What stands between two turns of a model, as tokens: nothing that was drawn is tokenised
again."""

from __future__ import annotations

from collections.abc import Sequence

from pgtoolkit.completion import Message
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.chat_template import ANSWER, QUESTION, ChatTemplate


class Between:
    """The tokens of a message that follows a model's turn, up to where its next turn begins.

    To write a conversation anew would change tokens of its earlier turns: templates leave out what
    was thought, and a text has several tokenisations. So a message is written after a short fixed
    conversation, and what the template writes from the answer's end on is what stands between.

    ends: ids of the end-of-sequence tokens. chat: the template; without one a message is its
        content alone.
    """

    def __init__(self, tokenizer, ends: Sequence[int], chat: ChatTemplate | None):
        self._tokenizer, self._ends, self._chat = tokenizer, set(ends), chat

    def tokens(self, message: Message, last: int) -> list[int]:
        """last: the turn's last token; where that ended it, the template's own end of an answer is
        left out."""
        try:
            if self._chat is None:
                return self._encode(message["content"])
            tokens = self._encode(self._after(message))
            start = min(tokens.index(end) for end in self._ends if end in tokens)
        except ValueError as error:
            needs = f"needs another chat template or tokenizer (got {error})"
            use = "roles and characters that it has; task.chat=never needs no roles"
            raise DataError(
                f"the environment's message {message!r:.200} {needs}. Use {use}."
            ) from error
        return tokens[start + (last in self._ends) :]

    def check(self, start: Sequence[Message]) -> None:
        """ConfigError where a template does not simply add to what was said. start: what a
        conversation begins with."""
        if self._chat is None:
            return
        try:
            before = self._chat.under_system([*start, ANSWER, start[-1]])
            more = {"role": "user", "content": "more"}
            after = self._after(more)
            whole = self._chat.text([*before, ANSWER, more], True)
            got = "one that writes messages in another way when more is said"
            if whole.startswith(self._chat.text(before)) and whole.endswith(after):
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
                reason="Messages become tokens once, behind those that were drawn.",
                use="task.chat=never, with which contents follow each other as they are, or "
                "another chat template",
            )
        )

    def _after(self, message: Message) -> str:
        """What follows an answer, its end first. ValueError for a template that leaves something
        out."""
        assert self._chat is not None
        shown = self._chat.text(self._chat.under_system([QUESTION, ANSWER, message]), True)
        after = shown.partition(ANSWER["content"])[2]
        if message["content"].strip() not in after:  # templates strip white space around a message
            raise ValueError("one that leaves out an answer, or the message after it")
        return after

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except (
            Exception
        ) as error:  # what the tokenizers library raises for a character that it has no token for
            raise ValueError(f"one that says: {first_line(error)}") from error

"""Texts that end a completion: which of its tokens are the last, and which part of its text is
scored."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal

_MARGIN = 8
"""Tokens before those of a stop string, since some decoders treat the first token of a text as they
treat no other."""


class StopStrings:
    """`rollout.stop` as a model's tokenizer sees it; the same rule for every sampler.

    A completion ends with the first token after which its text contains one of the strings. The
    text is what the tokenizer decodes without special tokens, of the completion alone: a string
    that begins in the prompt ends nothing.
    strings: those of `rollout.stop`. window: tokens in which the end of a completion is seen.
    Raises ConfigError for a string with a special token, which no text contains.
    """

    def __init__(self, strings: Sequence[str], tokenizer):
        self.strings = list(strings)
        self._tokenizer = tokenizer
        # in bytes: no token of a text has less
        longest = max((len(one.encode()) for one in strings), default=0)
        self.window = longest + _MARGIN
        for one in strings:
            added = [
                token.content for token in tokenizer.added_tokens_decoder.values() if token.special
            ]
            if names := [
                token
                for token in dict.fromkeys([*tokenizer.all_special_tokens, *added])
                if token in one
            ]:
                raise ConfigError(
                    refusal(
                        setting=f"rollout.stop={self.strings}",
                        needs="texts without special tokens",
                        got=" ".join(names),
                        reason="A completion ends by its text without special tokens.",
                        use=(
                            "the text alone, and ids of special tokens in eos_token_id of the "
                            "model's generation_config.json"
                        ),
                    )
                )

    def __bool__(self) -> bool:
        return bool(self.strings)

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many of a completion's tokens it takes until it ends; None if no string is in its
        text."""
        if not self.strings or not self._found(self._text(tokens)):
            return None
        return (
            bisect.bisect_left(
                range(len(tokens)), True, key=lambda n: self._found(self._text(tokens[: n + 1]))
            )
            + 1
        )

    def seem_to_end(self, last_tokens: Sequence[Sequence[int]]) -> list[bool]:
        """Whether completions may end here, by their last `window` tokens alone: quick, for a
        sampler as it goes on.

        What ends is not missed, except after special tokens; whether and where it ends, `end` says.
        """
        return [
            self._found(text)
            for text in self._tokenizer.batch_decode(last_tokens, skip_special_tokens=True)
        ]

    def before(self, text: str) -> str:
        """The text up to where the first of the strings begins."""
        return text[
            : min(
                (place for one in self.strings if (place := text.find(one)) >= 0), default=len(text)
            )
        ]

    def _found(self, text: str) -> bool:
        return any(one in text for one in self.strings)

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

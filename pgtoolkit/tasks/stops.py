"""Texts that end a completion: its last token, and the part of its text that is scored."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARGIN = 8
"""Tokens that are decoded before those of a stop string, since some decoders treat the first token
of a text in another way."""


class StopStrings:
    """`rollout.stop` as a model's tokenizer sees it; the same rule for every sampler.

    A completion ends with the first token after which its text contains one of the strings. The
    text is what the tokenizer decodes without special tokens, of the completion alone: a string
    that begins in the prompt ends nothing.
    strings: those of `rollout.stop`. window: the last tokens of a completion that show whether it
        ends.
    Raises ConfigError for an empty string, and for one with a special token, which no text
    contains.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self.strings = list(strings)
        self._tokenizer = tokenizer
        # In bytes, since each token of a text has at least one.
        longest = max((len(string.encode()) for string in strings), default=0)
        self.window = longest + _MARGIN
        if "" in self.strings:
            raise ConfigError(
                refusal(
                    setting=f"stop={self.strings}",
                    needs="texts that are not empty",
                    got="",
                    reason="Every completion contains it.",
                    use="stop=[]",
                )
            )
        if self.strings:
            self._check_special_tokens()

    def _check_special_tokens(self) -> None:
        """Raise ConfigError for the first string with a special token."""
        added = [
            token.content
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special
        ]
        special = dict.fromkeys([*self._tokenizer.all_special_tokens, *added])
        for string in self.strings:
            names = [token for token in special if token in string]
            if names:
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
        """Return the number of tokens up to where a completion ends.

        None if its text has no stop string.
        """
        if not self.strings or not self._has_string(self._text(tokens)):
            return None

        def has_ended(place: int) -> bool:
            return self._has_string(self._text(tokens[: place + 1]))

        return bisect.bisect_left(range(len(tokens)), True, key=has_ended) + 1

    def seem_to_end(self, last_tokens: list[list[int]]) -> list[bool]:
        """Return whether completions may end here, by their last `window` tokens alone.

        This is quick, for a sampler while it samples. No end is missed, except after special
        tokens; `end` says whether and where a completion really ends.
        """
        texts = self._tokenizer.batch_decode(last_tokens, skip_special_tokens=True)
        return [self._has_string(text) for text in texts]

    def before(self, text: str) -> str:
        """Return the text up to where the first of the strings begins."""
        starts = [text.find(string) for string in self.strings]
        return text[: min((start for start in starts if start >= 0), default=len(text))]

    def _has_string(self, text: str) -> bool:
        return any(string in text for string in self.strings)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

"""The texts of completions, from a table of what each token stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Decodes tokens as the `decode` of a tokenizer does, special tokens included.

    Where the tokenizer's text is no more than the bytes of its tokens one after the other, as with
    the byte-level tokenizers of GPT-2, Qwen and Llama 3, they are joined here, in a fifth of the
    time: a GPU waits for the texts of a batch. The same goes for a tokenizer without a decoder,
    whose text is the tokens with spaces between them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._pieces: np.ndarray | None = None
        self._separator = b""
        if _decodes_by_library(tokenizer):
            self._make_table(cast("PreTrainedTokenizerFast", tokenizer))

    def _make_table(self, tokenizer: PreTrainedTokenizerFast) -> None:
        library = tokenizer.backend_tokenizer
        numbers = range(library.get_vocab_size(with_added_tokens=True))
        tokens = [library.id_to_token(number) for number in numbers]
        if None in tokens:
            return
        if library.decoder is None:
            self._separator = b" "
            pieces = [str(token).encode() for token in tokens]
        elif isinstance(library.decoder, ByteLevel):
            byte_of = _bytes_of_characters()
            pieces = [_bytes(str(token), byte_of) for token in tokens]
        else:
            return
        self._pieces = np.array(pieces, dtype=object)
        if self.decode(numbers) != tokenizer.decode(list(numbers)):
            self._pieces = None  # Another version of the library may have other rules.

    def decode(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of some tokens."""
        if self._pieces is not None:
            try:
                pieces = self._pieces[np.asarray(tokens, dtype=np.int64)]
            except IndexError:
                pass  # The model has more tokens than the tokenizer, which then leaves them out.
            else:
                return self._separator.join(pieces.tolist()).decode(errors="replace")
        return str(self._tokenizer.decode(cast("list[int]", tokens)))


def _decodes_by_library(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer's `decode` is that of the tokenizers library alone."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    classes = type(tokenizer).__mro__
    subclasses = classes[: classes.index(PreTrainedTokenizerFast)]
    is_overridden = any(
        name in vars(subclass) for subclass in subclasses for name in ("decode", "_decode")
    )
    return not (is_overridden or tokenizer.clean_up_tokenization_spaces)


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for.

    Printable characters of Latin-1 stand for themselves; for the other bytes, in their order, stand
    the characters from U+0100 on (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return characters


def _bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """Return the bytes of a byte-level token. One with any other character, such as an added token
    with a space in it, stands for itself."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode()

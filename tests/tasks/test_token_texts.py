"""The texts of tokens are those that the tokenizer's own `decode` gives."""

import copy
import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.tasks.token_texts import TokenTexts

TEXTS = ["", "a b , c", "ünï🎉 wörld", "a\n\nb <think> c", "the answer is 7 ← so"]


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte, and some added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<think>", "<\uff5cend\uff5c>"])
    tokenizer.add_tokens([AddedToken("é"), AddedToken("a b"), AddedToken("←")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def words(**options) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a decoder."""
    vocabulary = {word: i for i, word in enumerate(["a", ",", "ü", "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def rows_of(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return texts as tokens, and random tokens, some beyond the tokenizer's last one."""
    draw = random.Random(0)
    size = len(tokenizer)
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    rows += [[draw.randrange(size) for _ in range(40)] for _ in range(200)]
    return [*rows, [0, size + 3, 1], [size]]


@pytest.mark.parametrize("make", [byte_level, words])
def test_a_table_gives_the_texts_of_the_tokenizer(make):
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    assert texts._pieces is not None
    for row in rows_of(tokenizer):
        expected = tokenizer.decode(row)
        assert texts.decode(torch.tensor(row, dtype=torch.int64)) == expected
        assert texts.decode(row) == expected


def test_a_text_that_is_not_joined_bytes_comes_from_the_tokenizer():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments, **options):
            return super()._decode(*arguments, **options).upper()

    shouting = copy.deepcopy(byte_level())
    shouting.__class__ = Shouting
    fused = words()
    fused.backend_tokenizer.decoder = decoders.Metaspace("a")
    cleaning = words(clean_up_tokenization_spaces=True)
    for tokenizer in (shouting, fused, cleaning):
        texts = TokenTexts(tokenizer)
        for row in rows_of(tokenizer):
            assert texts.decode(torch.tensor(row, dtype=torch.int64)) == tokenizer.decode(row)
    assert TokenTexts(cleaning).decode([0, 1, 2]) == "a, ü"
    assert TokenTexts(fused).decode([2, 0, 2]) == "ü ü"


def test_a_table_that_the_tokenizer_contradicts_is_not_used(monkeypatch):
    tokenizer = byte_level()
    monkeypatch.setattr("pgtoolkit.tasks.token_texts._bytes", lambda token, _: token.encode())
    row = tokenizer("ü 7").input_ids
    assert TokenTexts(tokenizer).decode(row) == "ü 7"

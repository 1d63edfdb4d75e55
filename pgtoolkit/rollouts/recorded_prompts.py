"""The prompts of recorded rollouts, as checksums by which held-out prompts are found among them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.tasks.prompts import TokenizedTask


def checksums_before_trained(token_ids: np.ndarray, loss_mask: np.ndarray) -> list[int]:
    """Return the checksum of all tokens before each part of a row that is trained: of its prompt,
    and of the messages that each later turn answers.

    token_ids: (S,) int64. loss_mask: (S,) bool, false for the first.
    """
    checksum = hashlib.blake2b(digest_size=8)
    checksums = []
    begin = 0
    for end in np.flatnonzero(loss_mask[1:] & ~loss_mask[:-1]) + 1:
        checksum.update(token_ids[begin:end].tobytes())
        begin = end
        checksums.append(int.from_bytes(checksum.digest()))
    return checksums


def checksum_of_messages(messages: Sequence[Message]) -> int:
    """Return the checksum of the roles and contents of messages, but for those of the system, which
    training and evaluation may set otherwise."""
    asked = [(each["role"], each["content"]) for each in messages if each["role"] != "system"]
    return _checksum(repr(asked).encode())


def num_among(recorded: Collection[int], task: TokenizedTask, count: int) -> int:
    """Return how many of the first `count` prompts of a task are prompts of recorded rollouts, by
    their tokens or by their texts.

    recorded: the checksums of these.
    """
    known = {*recorded}
    prompts = [task.prompt(number) for number in range(count)]
    return sum(
        not known.isdisjoint((_checksum(np.array(tokens, np.int64).tobytes()), _of_text(prompt)))
        for prompt, tokens in zip(prompts, task.encode(prompts), strict=True)
    )


def _of_text(prompt: Prompt) -> int:
    return checksum_of_messages(prompt.messages or [{"role": "user", "content": prompt.text}])


def _checksum(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())

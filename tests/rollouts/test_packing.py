"""Packing against loops over tokens."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pgtoolkit.batch import OPTIONAL_VECTORS, Document, cut, pack
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.steps import make_step


def document(tokens, mask, name="d", first=0.0):
    places = torch.tensor(mask, dtype=torch.bool).nonzero().squeeze(1).float()
    return Document(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        old_log_probs=-(first + places) / 8,
        advantages=first + places,
        group=0,
        name=name,
        sampling_log_probs=-(first + places) / 4,
        ref_log_probs=-(first + places) / 2,
    )


DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=9).map(
        lambda pairs: document(
            [t for t, _ in pairs], [False] + [m for _, m in pairs[1:]], first=float(pairs[0][0])
        )
    ),
    max_size=6,
)


@given(DOCUMENTS)
def test_every_position_predicts_the_next_token_of_its_document(documents):
    groups = [i // 2 for i in range(len(documents))]
    batch = pack(
        [dataclasses.replace(d, group=group) for d, group in zip(documents, groups, strict=True)]
    )
    place = 0
    for number, d in enumerate(documents):
        for t in range(d.num_tokens):
            trained = t + 1 < d.num_tokens and bool(d.loss_mask[t + 1])
            assert batch.tokens[place] == d.tokens[t]
            assert batch.position_ids[place] == t
            assert batch.document_index[place] == number
            assert batch.labels[place] == (d.tokens[t + 1] if trained else -1)
            if trained:
                number_of_trained = int(d.loss_mask[: t + 1].sum())
                assert batch.old_log_probs[place] == d.old_log_probs[number_of_trained]
                assert batch.advantages[place] == d.advantages[number_of_trained]
                assert batch.sampling_log_probs[place] == d.sampling_log_probs[number_of_trained]
                assert batch.ref_log_probs[place] == d.ref_log_probs[number_of_trained]
            place += 1
    assert batch.num_documents == len(documents)
    assert batch.group_index.tolist() == groups
    numbers = ("old_log_probs", "advantages", *(OPTIONAL_VECTORS if documents else ()))
    for name in ("tokens", "position_ids", "document_index", "labels", *numbers):
        assert getattr(batch, name).shape == (place,)
        assert getattr(batch, name).dtype == (torch.float32 if name in numbers else torch.int64)


@pytest.mark.parametrize("name", [name for name in OPTIONAL_VECTORS if name != "old_log_probs"])
def test_a_vector_that_a_document_lacks_is_in_no_micro_batch_of_the_step(name):
    """Every rank must know of the same ones, also one that only has documents with it, or none at
    all."""
    own = document([1, 2], [False, True])
    without = dataclasses.replace(own, **{name: None})
    for documents, found in (([own, without], False), ([own, own], True)):
        step = make_step(documents, 2)
        assert [getattr(m, name) is not None for m in step.micro_batches] == [found, found]
    for rank in range(3):
        [micro_batch] = make_step([own, own], 2, None, rank, 3).micro_batches
        assert getattr(micro_batch, name).shape == ((2,) if rank < 2 else (0,))
    assert getattr(pack([]), name) is None


@given(DOCUMENTS, st.integers(9, 20))
def test_cut_keeps_order_and_takes_what_fits(documents, max_tokens):
    parts = cut(documents, max_tokens)
    flat = [d for part in parts for d in part]
    assert len(flat) == len(documents)
    assert all(a is b for a, b in zip(flat, documents, strict=True))
    sizes = [sum(d.num_tokens for d in part) for part in parts]
    assert all(0 < size <= max_tokens for size in sizes)
    for size, following in zip(sizes, parts[1:], strict=False):
        assert size + following[0].num_tokens > max_tokens


def test_cut_names_a_document_that_is_too_long():
    fits, long = (
        document([1] * 4, [False] * 4),
        document([1] * 5, [False] * 5, name="rollouts.jsonl:7"),
    )
    assert [len(part) for part in cut([fits, fits], 4)] == [1, 1]
    with pytest.raises(DataError, match=r"rollouts\.jsonl:7 has 5 tokens.*max_tokens=5"):
        cut([fits, long], 4)

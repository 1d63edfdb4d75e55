"""Packing documents into micro-batches, against loops over tokens."""

import dataclasses
import itertools

import pytest
import torch
from builders.documents import document_of
from hypothesis import given
from hypothesis import strategies as st

from pgtoolkit.batch import pack, pack_sampled
from pgtoolkit.document import OPTIONAL_VECTORS, Document, cut, cut_evenly
from pgtoolkit.errors import DataError
from pgtoolkit.model.shared import SharedAxis
from pgtoolkit.rollouts.steps import divide_among_ranks, is_sharing, make_step


def document(tokens: list[int], mask: list[bool], name: str = "d", first: float = 0.0) -> Document:
    """Return a document whose numbers tell its tokens apart; first: the number of its first."""
    places = torch.tensor(mask, dtype=torch.bool).nonzero().squeeze(1).float()
    return document_of(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
        old_log_probs=-(first + places) / 8,
        advantages=first + places,
        name=name,
        sampling_log_probs=-(first + places) / 4,
        ref_log_probs=-(first + places) / 2,
    )


def document_of_pairs(pairs: list[tuple[int, bool]]) -> Document:
    """Return a document of these tokens with whether they are trained; the first never is."""
    tokens = [token for token, _ in pairs]
    mask = [False] + [is_trained for _, is_trained in pairs[1:]]
    return document(tokens, mask, first=float(tokens[0]))


PAIRS = st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=9)
DOCUMENTS = st.lists(PAIRS.map(document_of_pairs), max_size=6)


@given(DOCUMENTS)
def test_every_position_predicts_the_next_token_of_its_document(documents):
    groups = [number // 2 for number in range(len(documents))]
    batch = pack(
        [
            dataclasses.replace(document, group=group)
            for document, group in zip(documents, groups, strict=True)
        ]
    )
    place = 0
    for number, document in enumerate(documents):
        for t in range(document.num_tokens):
            is_trained = t + 1 < document.num_tokens and bool(document.loss_mask[t + 1])
            assert batch.tokens[place] == document.tokens[t]
            assert batch.position_ids[place] == t
            assert batch.document_index[place] == number
            assert batch.labels[place] == (document.tokens[t + 1] if is_trained else -1)
            if is_trained:
                trained_before = int(document.loss_mask[: t + 1].sum())
                for name in ("old_log_probs", "advantages", "sampling_log_probs", "ref_log_probs"):
                    expected = getattr(document, name)[trained_before]
                    assert getattr(batch, name)[place] == expected
            place += 1
    assert batch.num_documents == len(documents)
    assert batch.group_index.tolist() == groups
    integers = ("tokens", "position_ids", "document_index", "labels")
    floats = ("old_log_probs", "advantages", *(OPTIONAL_VECTORS if documents else ()))
    for names, dtype in ((integers, torch.int64), (floats, torch.float32)):
        for name in names:
            assert getattr(batch, name).shape == (place,)
            assert getattr(batch, name).dtype == dtype


OPTIONAL = [name for name in OPTIONAL_VECTORS if name != "old_log_probs"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_vector_that_a_document_lacks_is_in_no_micro_batch_of_the_step(name):
    complete = document([1, 2], [False, True])
    incomplete = dataclasses.replace(complete, **{name: None})
    for documents, has_vector in (([complete, incomplete], False), ([complete, complete], True)):
        micro_batches = make_step(documents, 2).micro_batches
        present = [getattr(micro_batch, name) is not None for micro_batch in micro_batches]
        assert present == [has_vector, has_vector]


@pytest.mark.parametrize("name", OPTIONAL)
def test_every_rank_has_the_vectors_of_the_step_also_without_documents(name):
    """Three ranks share two documents: the last has none, and needs an empty vector."""
    complete = document([1, 2], [False, True])
    for rank in range(3):
        (micro_batch,) = make_step([complete, complete], 2, None, rank, 3).micro_batches
        assert getattr(micro_batch, name).shape == ((2,) if rank < 2 else (0,))
    assert getattr(pack([]), name) is None


@given(DOCUMENTS, st.integers(9, 20))
def test_cut_keeps_the_order_and_fills_each_part_while_the_next_document_fits(
    documents, max_tokens
):
    parts = cut(documents, max_tokens)
    kept = [document for part in parts for document in part]
    assert len(kept) == len(documents)
    assert all(a is b for a, b in zip(kept, documents, strict=True))
    sizes = [sum(document.num_tokens for document in part) for part in parts]
    assert all(0 < size <= max_tokens for size in sizes)
    for size, following in zip(sizes, parts[1:], strict=False):
        assert size + following[0].num_tokens > max_tokens


@given(DOCUMENTS.filter(bool), DOCUMENTS, st.integers(9, 20))
def test_even_parts_are_as_many_as_cut_makes_and_the_largest_is_as_small_as_can_be(
    first, second, max_tokens
):
    """The reference tries every place where the documents of a rank can be cut."""
    ranks = cut_evenly([first, second], max_tokens)
    count = max(len(cut(first, max_tokens)), len(cut(second, max_tokens)))
    for documents, parts in zip((first, second), ranks, strict=True):
        assert [id(x) for part in parts for x in part] == [id(x) for x in documents]
        assert len(parts) == count
        sizes = [document.num_tokens for document in documents]
        cuts = itertools.combinations_with_replacement(range(len(sizes) + 1), count - 1)
        smallest = min(
            max(sum(sizes[low:high]) for low, high in itertools.pairwise((0, *at, len(sizes))))
            for at in cuts
        )
        assert max(sum(document.num_tokens for document in part) for part in parts) == smallest


def test_documents_that_are_on_policy_are_not_packed_with_others():
    """The ratios of the others would be 1."""
    other = document([1] * 3, [False, True, True])
    on_policy = dataclasses.replace(other, on_policy=True, old_log_probs=None)
    assert pack([on_policy, on_policy]).old_log_probs is None
    with pytest.raises(DataError, match="all on_policy, or none"):
        pack([on_policy, other])


def test_a_document_longer_than_max_tokens_is_refused_by_its_name():
    fitting = document([1] * 4, [False] * 4)
    too_long = document([1] * 5, [False] * 5, name="rollouts.jsonl:7")
    assert [len(part) for part in cut([fitting, fitting], 4)] == [1, 1]
    with pytest.raises(DataError, match=r"rollouts\.jsonl:7 has 5 tokens.*max_tokens=5"):
        cut([fitting, too_long], 4)


def completions_of(*groups: tuple[list[int], list[list[int]]]) -> list[Document]:
    """Return documents of groups, each the tokens of a prompt and of its completions."""
    return [
        document_of(
            torch.tensor(prompt + completion),
            torch.arange(len(prompt + completion)) >= len(prompt),
            group=number,
        )
        for number, (prompt, completions) in enumerate(groups)
        for completion in completions
    ]


def test_documents_that_share_have_their_prompt_once_but_for_its_last_token():
    """By hand. The second document trains the token that the third one has in its prompt."""
    packed = pack_sampled(
        completions_of(([1, 2, 3], [[4, 5], [4, 6]]), ([1, 2, 3, 4], [[7], [8]]), ([9], [[2]])),
        shares=True,
    )
    assert packed.shared == (0, 3, 4, 4, 0)
    assert packed.document_lengths == (5, 5, 5, 5, 2)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 3, 4, 6, 4, 7, 4, 8, 9, 2]
    assert packed.labels.tolist() == [-1, -1, 4, 5, -1, 4, 6, -1, 7, -1, 8, -1, 2, -1]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 3, 4, 3, 4, 0, 1]
    assert packed.document_index.tolist() == [0] * 5 + [1] * 3 + [2, 2, 3, 3, 4, 4]
    axis = SharedAxis.of(packed)
    assert axis.computed.tolist() == [0, 1, 2, 3, 4, 6, 7, 9, 11, 12, 13]
    assert axis.states.tolist() == [0, 1, 2, 3, 4, 2, 5, 6, 5, 7, 5, 8, 9, 10]
    assert axis.documents.queries == [5, 2, 1, 1, 2]
    assert axis.documents.keys == (5, 5, 5, 5, 2)
    assert axis.documents.sources is not None
    assert axis.documents.sources.tolist() == [
        *(0, 1, 2, 3, 4),
        *(0, 1, 2, 5, 6),
        *(0, 1, 2, 5, 7),
        *(0, 1, 2, 5, 8),
        *(9, 10),
    ]


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [
        (16, [6]),  # both groups have 5 + 2 + 1 tokens
        (12, [3, 3]),  # the second group would have to be cut
        (7, [2, 1, 2, 1]),  # no part has room for a group: 5 + 2 tokens, then 4 alone
        (5, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_group_is_cut_only_where_no_micro_batch_has_room_for_it(max_tokens, sizes):
    completions = [[4, 5], [4, 6], [7]]
    groups = completions_of(([1, 2, 3], completions), ([8, 8, 8], completions))
    parts = cut(groups, max_tokens, shares=True)
    assert [len(part) for part in parts] == sizes
    for part in parts:
        packed = pack_sampled(part, shares=True)
        shared = packed.shared or (0,) * len(part)
        assert sum(packed.document_lengths) - sum(shared) <= max_tokens


def test_ranks_get_documents_that_share():
    completions = [[4, 5], [4, 6], [7]]
    groups = completions_of(([1, 2, 3], completions), ([8, 8, 8], completions))
    assert divide_among_ranks(groups, 2, sharing=True) == [[0, 1, 2], [3, 4, 5]]
    # Of a single group the ranks have 5, and 5 + 1 tokens.
    assert divide_among_ranks(groups[:3], 2, sharing=True) == [[0], [1, 2]]
    assert divide_among_ranks(groups[:1], 2, sharing=True) == [[0], []]


@pytest.mark.parametrize(("length", "is_worth"), [(2, True), (3, False)])
def test_auto_shares_where_a_fifth_of_the_tokens_is_saved(length, is_worth):
    """Two tokens of 10 are, and two of 12 are not."""
    documents = completions_of(([1, 1], [[2] + [9] * length, [3] + [9] * length]))
    assert sum(document.num_tokens for document in documents) == 2 * (3 + length)
    assert is_sharing("auto", documents) is is_worth

"""The step loader: which documents make a step, however they are cut, and where it continues."""

import dataclasses
import itertools

import pytest
import torch
from builders.threads import on_ranks

from pgtoolkit.batch import Document
from pgtoolkit.config.schema_step import AccumulationConfig, LastStep
from pgtoolkit.errors import DataError, RankLost
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader, loadable
from pgtoolkit.rollouts.steps import divide_among_ranks, make_step


class Files(Source):
    """A source over given documents, in batches of given sizes; notes which positions were asked
    for."""

    def __init__(self, documents, batch_sizes, endless=False):
        self._documents = documents
        self._ends = list(itertools.accumulate(batch_sizes))
        self.num_documents = None if endless else len(documents)
        self.asked, self.begun = [], []

    def before_step(self, position):
        self.begun.append(position)

    def document(self, position):
        self.asked.append(position)
        return self._documents[position]

    def batch_end(self, position):
        return next(end for end in self._ends if end > position)


def document(number, length=4, group=None, trained=2, trajectory=None):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[length - trained :] = True
    group = number // 2 if group is None else group
    vectors = torch.arange(length), mask, torch.zeros(trained), torch.ones(trained)
    return Document(*vectors, group, f"document {number}", trajectory=trajectory)


def documents(count, **options):
    return [document(i, **options) for i in range(count)]


def steps(
    source,
    docs_per_step=0,
    max_tokens=8,
    micro_batches=None,
    last="short",
    groups=False,
    max_steps=99,
):
    accumulation = AccumulationConfig(docs_per_step, max_tokens, micro_batches, LastStep(last))
    return StepLoader(source, accumulation, groups, max_steps)


def sizes(loader):
    return [step.totals.num_documents for step in loader]


@pytest.mark.parametrize(
    ("last", "expected"), [("short", [4, 4, 2, 4, 4, 2]), ("drop", [4] * 4), ("carry", [4] * 5)]
)
def test_docs_per_step_at_the_end_of_a_batch(last, expected):
    assert sizes(steps(Files(documents(20), [10, 10]), 4, last=last)) == expected


def test_carry_ends_with_what_is_left():
    assert sizes(steps(Files(documents(10), [5, 5]), 4, last="carry")) == [4, 4, 2]


@pytest.mark.parametrize("max_tokens", [4, 8, 12, 1000])
def test_max_tokens_does_not_change_what_a_step_is(max_tokens):
    """Only the number of micro-batches changes; every document comes once and in order."""
    loader = steps(Files(documents(10), [10]), 5, max_tokens)
    seen = []
    for step in loader:
        assert step.totals.num_documents == 5
        assert step.totals.num_tokens == 10
        assert all(len(micro_batch.tokens) <= max_tokens for micro_batch in step.micro_batches)
        assert len(step.micro_batches) == -(-5 // (max_tokens // 4))
        names = [name for micro_batch in step.micro_batches for name in micro_batch.names]
        assert names == [d.name for d in step.documents]
        seen += names
    assert seen == [f"document {i}" for i in range(10)]


def test_a_step_closes_on_a_group_when_asked():
    groups = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    source = Files([document(i, group=g) for i, g in enumerate(groups)], [10])
    assert sizes(steps(source, 2, groups=True)) == [3, 2, 5]
    assert sizes(steps(source, 2)) == [2] * 5


@pytest.mark.parametrize("docs_per_step", [0, 2])
@pytest.mark.parametrize("groups", [False, True])
def test_a_step_closes_on_a_trajectory(docs_per_step, groups):
    """Whatever the aggregation; trajectories lie within groups, and documents that name none are
    one each."""
    named = [7, 7, 7, None, None, None, 9, 9, None, 4]
    docs = [document(i, group=i // 5, trajectory=name) for i, name in enumerate(named)]
    loader = steps(Files(docs, [10]), docs_per_step, micro_batches=1, groups=groups)
    found = list(loader)
    assert [step.totals.num_documents for step in found] == ([5, 5] if groups else [3, 2, 3, 2])
    assert [step.totals.num_trajectories for step in found] == ([3, 4] if groups else [1, 2, 2, 2])


def test_trajectories_are_numbered_and_counted_over_micro_batches_and_ranks():
    named, trained = [40, None, 40, 7, None, 40], [1, 2, 3, 0, 2, 3]
    docs = [
        document(i, group=0, trained=n, trajectory=x)
        for i, (x, n) in enumerate(zip(named, trained, strict=True))
    ]
    for rank in (0, 1):
        step = make_step(docs, 4, {}, rank, 2)
        assert step.totals.tokens_per_trajectory.tolist() == [7, 2, 0, 2]
        assert (step.totals.num_trajectories, step.totals.num_empty_trajectories) == (4, 1)
        numbers = {f"document {i}": number for i, number in enumerate([0, 1, 0, 2, 3, 0])}
        for one in step.micro_batches:
            assert one.trajectory_index.tolist() == [numbers[name] for name in one.names]
    plain = make_step([document(i) for i in range(4)], 4)
    assert plain.totals.tokens_per_trajectory is None
    assert all(one.trajectory_index is None for one in plain.micro_batches)


def test_fixed_number_of_micro_batches():
    """docs_per_step=0: two micro-batches of at most 8 tokens, whatever number of documents they
    hold."""
    lengths = [4, 4, 8, 2, 2, 2, 2, 8, 4]
    source = Files([document(i, length=n, trained=1) for i, n in enumerate(lengths)], [9])
    found = list(steps(source, micro_batches=2))
    assert [[len(m.tokens) for m in step.micro_batches] for step in found] == [[8, 8], [8, 8], [4]]


def test_totals_count_what_is_masked_and_empty():
    docs = [
        document(0, trained=2),
        document(1, trained=0),
        document(2, trained=3),
        document(3, trained=0, group=7),
    ]
    totals = make_step(docs, 8, {}).totals
    assert (
        totals.num_documents,
        totals.num_tokens,
        totals.num_empty_documents,
        totals.num_groups,
    ) == (4, 5, 2, 3)
    assert totals.tokens_per_group.tolist() == [2, 3, 0]


def test_ranks_get_about_as_many_tokens_and_every_document_once():
    documents = [document(n, length, trained=1) for n, length in enumerate([2, 2, 3, 3, 9, 5])]
    assert divide_among_ranks(documents, 2) == [[0, 1, 4], [2, 3, 5]]


def test_groups_have_one_number_in_all_micro_batches_of_a_step():
    docs = [document(i, group=g) for i, g in enumerate([41, 7, 41, 7])]
    step = make_step(docs, 4, {})
    assert [m.group_index.tolist() for m in step.micro_batches] == [[0], [1], [0], [1]]
    assert step.totals.tokens_per_group.tolist() == [4, 4]


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("last", ["short", "drop", "carry"])
def test_the_next_batch_is_not_asked_for_before_it_is_needed(last, groups):
    """The next rollouts must come from the policy after this step's update."""
    source = Files(documents(8), [4, 4], endless=True)
    iterator = iter(steps(source, 4, last=last, groups=groups))
    next(iterator)
    assert max(source.asked) == 3


CHANGES = {
    "tokens": lambda d: {"tokens": d.tokens + 1},
    "loss_mask": lambda d: {"loss_mask": torch.tensor([False, True, True, False])},
    "old_log_probs": lambda d: {"old_log_probs": d.old_log_probs - 1e-6},
    "advantages": lambda d: {"advantages": d.advantages * 1.0001},
    "sampling_log_probs": lambda d: {"sampling_log_probs": d.old_log_probs},
    "ref_log_probs": lambda d: {"ref_log_probs": d.old_log_probs},
    "group": lambda d: {"group": d.group + 1},
    "trajectory": lambda d: {"trajectory": 0},
}


def digest_on_a_rank(rank, changed):
    """Two ranks take the same steps, but that one holds a document that differs in one field."""
    held = documents(4)
    if rank == 1 and changed:
        held[2] = dataclasses.replace(held[2], **CHANGES[changed](held[2]))
    accumulation = AccumulationConfig(4, 8, None, LastStep.short)
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    loader = StepLoader(Files(held, [4]), accumulation, False, 9, layout)
    try:
        return sizes(loader)
    except RankLost as error:
        return str(error).partition(".")[0]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("changed", [None, *CHANGES])
def test_ranks_that_hold_other_documents_are_told(changed):
    """Whatever the loss reads of a document counts."""
    expected = (
        [4] if changed is None else "the documents of step 1 on rank 1 differ from those on rank 0"
    )
    assert on_ranks(2, digest_on_a_rank, changed) == [expected] * 2


def asked_on_a_rank(rank):
    source = Files(documents(12), [4, 8])
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    sizes(StepLoader(source, AccumulationConfig(6, 8, None, LastStep.carry), False, 9, layout))
    return source.asked


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_no_rank_goes_back_to_a_batch_that_was_left():
    """A step has the end of one and the beginning of the next; rollouts of the one are gone by
    then."""
    for asked in on_ranks(2, asked_on_a_rank):
        assert asked == sorted(asked)


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("last", ["short", "drop", "carry"])
def test_the_same_steps_follow_from_any_step(cut, last):
    whole = steps(Files(documents(20), [10, 10]), 3, last=last)
    names = [[d.name for d in step.documents] for step in whole]
    first = steps(Files(documents(20), [10, 10]), 3, last=last)
    taken = list(itertools.islice(first, cut + 1))
    second = steps(Files(documents(20), [10, 10]), 3, last=last)
    second.load_state_dict(loadable(taken[-1].state_after))
    assert [[d.name for d in step.documents] for step in second] == names[cut + 1 :]


def test_max_steps_counts_the_steps_of_the_whole_run():
    loader = steps(Files(documents(20), [20]), 2, max_steps=5)
    state = loadable(list(loader)[2].state_after)
    again = steps(Files(documents(20), [20]), 2, max_steps=5)
    again.load_state_dict(state)
    assert len(again) == 2
    assert sizes(again) == [2, 2]


@pytest.mark.parametrize("count", [4, 8, 100])
def test_drop_that_leaves_nothing_is_an_error_and_not_an_endless_loop_or_a_run_of_no_step(count):
    with pytest.raises(
        DataError, match=r"leaves nothing to train on \(got 4 documents in a batch\)"
    ):
        sizes(
            steps(Files(documents(count), [4] * (count // 4), endless=count == 100), 5, last="drop")
        )


def test_a_run_that_is_continued_at_the_end_of_its_data_has_no_further_step():
    loader = steps(Files(documents(6), [6]), 4, last="drop")
    (only,) = loader
    again = steps(Files(documents(6), [6]), 4, last="drop")
    again.load_state_dict(loadable(only.state_after))
    assert sizes(again) == []

"""The step loader: the documents of each step, their totals, and where a resumed run continues. All
expected values are worked out by hand."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from builders.documents import document_of
from builders.threads import on_ranks

from pgtoolkit.document import Document
from pgtoolkit.errors import DataError, RankLost
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.settings import AccumulationSettings, LastStep
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader, loadable
from pgtoolkit.rollouts.steps import divide_among_ranks, make_step


class ListSource(Source):
    """A source of the documents of a list, in batches of these sizes; notes which positions were
    asked for."""

    def __init__(
        self, documents: Sequence[Document], batch_sizes: Sequence[int], endless: bool = False
    ) -> None:
        self._documents = documents
        self._ends = list(itertools.accumulate(batch_sizes))
        self.num_documents = None if endless else len(documents)
        self.asked: list[int] = []

    def document(self, position: int) -> Document:
        self.asked.append(position)
        return self._documents[position]

    def batch_end(self, position: int) -> int:
        return next(end for end in self._ends if end > position)


def document(
    number: int,
    length: int = 4,
    group: int | None = None,
    trained: int = 2,
    trajectory: int | None = None,
) -> Document:
    """Return a document whose last `trained` tokens are trained; two by two they are groups."""
    return document_of(
        length,
        torch.arange(length) >= length - trained,
        advantages=1.0,
        group=number // 2 if group is None else group,
        name=f"document {number}",
        trajectory=trajectory,
    )


def documents(count: int) -> list[Document]:
    return [document(number) for number in range(count)]


def steps_of(
    source: Source,
    docs_per_step: int = 0,
    max_tokens: int = 8,
    micro_batches: int | None = None,
    last_step: str = "short",
    groups: bool = False,
    max_steps: int = 99,
) -> StepLoader:
    """Return a loader of steps; groups: whether each step must hold complete groups."""
    accumulation = AccumulationSettings(
        docs_per_step=docs_per_step,
        max_tokens=max_tokens,
        micro_batches_per_step=None if docs_per_step else micro_batches,
        last_step=LastStep(last_step),
    )
    return StepLoader(source, accumulation, groups, max_steps)


def sizes(loader: StepLoader) -> list[int]:
    return [step.totals.num_documents for step in loader]


@pytest.mark.parametrize(
    ("batch_sizes", "last_step", "expected"),
    [
        ([10, 10], "short", [4, 4, 2, 4, 4, 2]),
        ([10, 10], "drop", [4, 4, 4, 4]),
        ([10, 10], "carry", [4, 4, 4, 4, 4]),
        ([5, 5], "carry", [4, 4, 2]),
    ],
)
def test_last_step_decides_on_the_documents_left_at_the_end_of_a_batch(
    batch_sizes, last_step, expected
):
    source = ListSource(documents(sum(batch_sizes)), batch_sizes)
    assert sizes(steps_of(source, 4, last_step=last_step)) == expected


@pytest.mark.parametrize("max_tokens", [4, 8, 12, 1000])
def test_max_tokens_does_not_change_the_documents_of_a_step(max_tokens):
    """Only the number of micro-batches changes; every document comes once and in order."""
    names = []
    for step in steps_of(ListSource(documents(10), [10]), 5, max_tokens):
        assert step.totals.num_documents == 5
        assert step.totals.num_tokens == 10
        assert all(len(micro_batch.tokens) <= max_tokens for micro_batch in step.micro_batches)
        assert len(step.micro_batches) == -(-5 // (max_tokens // 4))
        of_step = [name for micro_batch in step.micro_batches for name in micro_batch.names]
        assert of_step == [document.name for document in step.documents]
        names += of_step
    assert names == [f"document {number}" for number in range(10)]


def test_a_step_holds_complete_groups_when_asked():
    groups = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3]
    source = ListSource([document(i, group=group) for i, group in enumerate(groups)], [10])
    assert sizes(steps_of(source, 2, groups=True)) == [3, 2, 5]
    assert sizes(steps_of(source, 2)) == [2] * 5


@pytest.mark.parametrize("docs_per_step", [0, 2])
@pytest.mark.parametrize(
    ("groups", "num_documents", "num_trajectories"),
    [(False, [3, 2, 3, 2], [1, 2, 2, 2]), (True, [5, 5], [3, 4])],
)
def test_a_step_always_holds_complete_trajectories(
    docs_per_step, groups, num_documents, num_trajectories
):
    """A document without a trajectory is one of its own."""
    trajectories = [7, 7, 7, None, None, None, 9, 9, None, 4]
    source = ListSource(
        [document(i, group=i // 5, trajectory=x) for i, x in enumerate(trajectories)], [10]
    )
    steps = list(steps_of(source, docs_per_step, micro_batches=1, groups=groups))
    assert [step.totals.num_documents for step in steps] == num_documents
    assert [step.totals.num_trajectories for step in steps] == num_trajectories


def test_trajectories_are_numbered_and_counted_over_micro_batches_and_ranks():
    trajectories = [40, None, 40, 7, None, 40]
    trained = [1, 2, 3, 0, 2, 3]
    expected = {f"document {i}": number for i, number in enumerate([0, 1, 0, 2, 3, 0])}
    step_documents = [
        document(i, group=0, trained=count, trajectory=trajectory)
        for i, (trajectory, count) in enumerate(zip(trajectories, trained, strict=True))
    ]
    for rank in (0, 1):
        step = make_step(step_documents, 4, {}, rank, 2)
        assert step.totals.tokens_per_trajectory.tolist() == [7, 2, 0, 2]
        assert step.totals.num_trajectories == 4
        assert step.totals.num_empty_trajectories == 1
        for micro_batch in step.micro_batches:
            numbers = [expected[name] for name in micro_batch.names]
            assert micro_batch.trajectory_index.tolist() == numbers


def test_a_step_without_trajectories_has_no_numbers_of_them():
    step = make_step(documents(4), 4)
    assert step.totals.tokens_per_trajectory is None
    assert all(micro_batch.trajectory_index is None for micro_batch in step.micro_batches)


def test_micro_batches_per_step_makes_steps_of_that_many_micro_batches():
    """Two micro-batches of at most 8 tokens, whatever number of documents they hold."""
    lengths = [4, 4, 8, 2, 2, 2, 2, 8, 4]
    source = ListSource(
        [document(i, length=length, trained=1) for i, length in enumerate(lengths)], [9]
    )
    tokens = [
        [len(micro_batch.tokens) for micro_batch in step.micro_batches]
        for step in steps_of(source, micro_batches=2)
    ]
    assert tokens == [[8, 8], [8, 8], [4]]


def test_totals_count_documents_without_trained_tokens():
    step_documents = [
        document(0, trained=2),
        document(1, trained=0),
        document(2, trained=3),
        document(3, trained=0, group=7),
    ]
    totals = make_step(step_documents, 8, {}).totals
    assert totals.num_documents == 4
    assert totals.num_tokens == 5
    assert totals.num_empty_documents == 2
    assert totals.num_groups == 3
    assert totals.tokens_per_group.tolist() == [2, 3, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": None}, r"^max_tokens needs a whole number >= 1 \(got None\)"),
        ({"max_tokens": 9, "share_prompts": None}, "^share_prompts needs True, False or 'auto'"),
    ],
)
def test_a_step_without_a_size_or_with_half_a_choice_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_step([], **options)


def test_documents_are_divided_among_ranks_by_their_tokens():
    lengths = [2, 2, 3, 3, 9, 5]
    divided = [document(i, length, trained=1) for i, length in enumerate(lengths)]
    assert divide_among_ranks(divided, 2) == [[0, 1, 4], [2, 3, 5]]


def test_a_group_has_the_same_number_in_all_micro_batches_of_a_step():
    step = make_step([document(i, group=group) for i, group in enumerate([41, 7, 41, 7])], 4, {})
    numbers = [micro_batch.group_index.tolist() for micro_batch in step.micro_batches]
    assert numbers == [[0], [1], [0], [1]]
    assert step.totals.tokens_per_group.tolist() == [4, 4]


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("last_step", ["short", "drop", "carry"])
def test_the_next_batch_is_not_asked_for_before_the_step_is_trained(last_step, groups):
    """The next rollouts must come from the policy after this step's update."""
    source = ListSource(documents(8), [4, 4], endless=True)
    next(iter(steps_of(source, 4, last_step=last_step, groups=groups)))
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
"""Changes of a document, by the field that the loss reads."""


def sizes_on_a_rank(rank: int, field: str | None) -> list[int] | str:
    """Return the sizes of this rank's steps, or its error. On rank 1 a document has another value
    of the field."""
    held = documents(4)
    if rank == 1 and field is not None:
        held[2] = dataclasses.replace(held[2], **CHANGES[field](held[2]))
    accumulation = AccumulationSettings(docs_per_step=4, max_tokens=8)
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    loader = StepLoader(ListSource(held, [4]), accumulation, False, 9, layout)
    try:
        return sizes(loader)
    except RankLost as error:
        return str(error).partition(".")[0]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
@pytest.mark.parametrize("field", [None, *CHANGES])
def test_ranks_with_different_documents_are_refused(field):
    expected = [4]
    if field is not None:
        expected = "the documents of step 1 on rank 1 differ from those on rank 0"
    assert on_ranks(2, sizes_on_a_rank, field) == [expected] * 2


def asked_on_a_rank(rank: int) -> list[int]:
    source = ListSource(documents(12), [4, 8])
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    accumulation = AccumulationSettings(docs_per_step=6, max_tokens=8, last_step=LastStep.carry)
    sizes(StepLoader(source, accumulation, False, 9, layout))
    return source.asked


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_no_rank_asks_for_documents_of_an_earlier_batch():
    """The first step has the end of one batch and the beginning of the next. Once the next has
    begun, the documents of the first no longer exist."""
    for asked in on_ranks(2, asked_on_a_rank):
        assert asked == sorted(asked)


@pytest.mark.parametrize("num_before", range(1, 7))
@pytest.mark.parametrize("last_step", ["short", "drop", "carry"])
def test_a_resumed_run_has_the_steps_of_the_uninterrupted_run(num_before, last_step):
    def loader() -> StepLoader:
        return steps_of(ListSource(documents(20), [10, 10]), 3, last_step=last_step)

    names = [[document.name for document in step.documents] for step in loader()]
    *_, last = itertools.islice(loader(), num_before)
    resumed = loader()
    resumed.load_state_dict(loadable(last.state_after))
    later = [[document.name for document in step.documents] for step in resumed]
    assert later == names[num_before:]


def test_max_steps_counts_the_steps_before_a_resume():
    state = list(steps_of(ListSource(documents(20), [20]), 2, max_steps=5))[2].state_after
    resumed = steps_of(ListSource(documents(20), [20]), 2, max_steps=5)
    resumed.load_state_dict(loadable(state))
    assert len(resumed) == 2
    assert sizes(resumed) == [2, 2]


@pytest.mark.parametrize(
    ("num_batches", "endless"), [(1, False), (2, False), (25, True)], ids=["one", "two", "endless"]
)
def test_drop_is_refused_if_batches_are_smaller_than_a_step(num_batches, endless):
    """Otherwise the run would have no step, or look for one without an end."""
    source = ListSource(documents(4 * num_batches), [4] * num_batches, endless=endless)
    with pytest.raises(
        DataError, match=r"leaves nothing to train on \(got 4 documents in a batch\)"
    ):
        sizes(steps_of(source, 5, last_step="drop"))


def test_a_run_that_is_resumed_at_the_end_of_its_data_has_no_further_step():
    (step,) = steps_of(ListSource(documents(6), [6]), 4, last_step="drop")
    resumed = steps_of(ListSource(documents(6), [6]), 4, last_step="drop")
    resumed.load_state_dict(loadable(step.state_after))
    assert sizes(resumed) == []

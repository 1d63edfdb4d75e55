"""Prompts whose completions all score the same, left out of steps: rollout.uninformative=drop."""

import pytest
import torch
from builders.runs import SHORT, metrics_of, module_and_loader, run

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.group_rollouts import has_signal

DROP = "rollout.uninformative=drop"
FIXED = (
    "accumulation=fixed",
    "accumulation.docs_per_step=0",
    "accumulation.micro_batches_per_step=2",
)


def batch_of(*overrides):
    """The first batch, in groups, and the loader of the same settings."""
    _, loader = module_and_loader(*SHORT, *overrides)
    source = loader.source
    documents = [source.document(place) for place in range(source.batch_size)]
    return [documents[start : start + 4] for start in range(0, len(documents), 4)], loader


@pytest.mark.parametrize("accumulation", [(), FIXED, ("accumulation.last_step=carry",)])
def test_steps_have_the_groups_that_teach_and_no_others(accumulation):
    """In the order in which they were sampled, the same numbers of all documents counted as
    before."""
    groups, _ = batch_of(*accumulation)
    wanted = [document for group in groups if has_signal(group) for document in group]
    assert 0 < len(wanted) < 16
    share = 1 - len(wanted) / 16
    _, loader = module_and_loader(*SHORT, DROP, *accumulation)
    found, steps = [], []
    for step in loader:
        steps.append(step)
        found += step.documents
        if len(found) >= len(wanted):
            break
    for document, expected in zip(found, wanted, strict=False):
        assert torch.equal(document.tokens, expected.tokens)
        torch.testing.assert_close(document.advantages, expected.advantages)
        assert document.dropped_group_fraction == pytest.approx(share)
    assert all((document.advantages != 0).any() for document in found)
    if accumulation != ("accumulation.last_step=carry",):  # steps end where the batch does
        assert len(found) == len(wanted)
    for step in steps:
        assert step.totals.num_documents == len(step.documents)
        assert step.totals.num_tokens == sum(document.num_trained for document in step.documents)
        assert step.totals.num_groups == len({document.group for document in step.documents})


def test_ten_batches_without_a_difference_end_the_run(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 8)
    never = [
        "task=prompts",
        f"task.path={tmp_path / 'prompts.jsonl'}",
        "task.verifier=rollouts.test_uninformative.none",
    ]
    _, loader = module_and_loader(
        *[setting for setting in SHORT if not setting.startswith("task.")], *never, DROP
    )
    with pytest.raises(
        DataError, match=r"^10 batches in a row have no prompt whose completions score differently"
    ):
        next(iter(loader))
    assert loader.source.state_dict()["number"] == 9


def none(completion, answer):
    return 0.0


def test_a_run_says_how_many_groups_are_left_out(tmp_path):
    rows = metrics_of(run(tmp_path / "run", DROP))
    assert max(row["dropped_group_fraction"] for row in rows) > 0
    assert all(row["zero_advantage_group_fraction"] == 0 for row in rows)

"""`rollout.uninformative=drop`: groups of equal rewards are left out of steps, against the batches
of a run that keeps them."""

from dataclasses import replace

import pytest
import torch
from builders.parts import ACCUMULATION, ROLLOUT, short_loader, short_module, short_policy
from builders.rollout_rows import write_jsonl

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.data_metrics import data_metrics
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.group_rollouts import has_signal
from pgtoolkit.rollouts.settings import AccumulationSettings, LastStep, Uninformative
from pgtoolkit.tasks.settings import PromptsTaskSettings

DROP = replace(ROLLOUT, uninformative=Uninformative.drop)
FIXED = replace(ACCUMULATION, docs_per_step=0, micro_batches_per_step=2)
CARRY = replace(ACCUMULATION, last_step=LastStep.carry)


def first_groups(accumulation: AccumulationSettings) -> list[list[Document]]:
    """Return the groups of the first batch."""
    source = short_loader(short_module(), accumulation=accumulation).source
    documents = [source.document(place) for place in range(source.batch_size)]
    return [documents[start : start + 4] for start in range(0, len(documents), 4)]


@pytest.mark.parametrize("accumulation", [ACCUMULATION, FIXED, CARRY])
def test_steps_have_the_informative_groups_of_a_batch_in_their_order(accumulation):
    """Totals count only them; the fraction of groups that are left out is that of the batch."""
    groups = first_groups(accumulation)
    estimator = Estimator("dr_grpo")
    informative = [group for group in groups if has_signal(group, estimator)]
    informative = [document for group in informative for document in group]
    assert 0 < len(informative) < 16
    fraction = 1 - len(informative) / 16
    loader = short_loader(short_module(), DROP, accumulation)
    steps = []
    documents = []
    for step in loader:
        steps.append(step)
        documents += step.documents
        if len(documents) >= len(informative):
            break
    if accumulation != CARRY:  # steps end where the batch does
        assert len(documents) == len(informative)
    for document, expected in zip(documents[: len(informative)], informative, strict=True):
        assert torch.equal(document.tokens, expected.tokens)
        torch.testing.assert_close(document.advantages, expected.advantages)
        assert document.dropped_group_fraction == pytest.approx(fraction)
    assert all((document.advantages != 0).any() for document in documents)
    metrics = data_metrics(documents[: len(informative)], 0)
    assert metrics["dropped_group_fraction"] == pytest.approx(fraction)
    assert metrics["zero_advantage_group_fraction"] == 0
    for step in steps:
        assert step.totals.num_documents == len(step.documents)
        assert step.totals.num_tokens == sum(document.num_trained for document in step.documents)
        assert step.totals.num_groups == len({document.group for document in step.documents})


def always_wrong(completion: str, answer: str) -> float:
    """A verifier, which the next test names by its path."""
    return 0.0


def test_ten_batches_of_equal_rewards_end_the_run(tmp_path):
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1", "answer": "2"}] * 8)
    verifier = "rollouts.test_uninformative.always_wrong"
    task = make_task(PromptsTaskSettings(path=str(path), verifier=verifier), seed=0)
    module = short_module(policy=short_policy(task.alphabet))
    loader = short_loader(module, DROP, task=task)
    with pytest.raises(
        DataError, match=r"^10 batches in a row have no prompt whose completions score differently"
    ):
        next(iter(loader))
    assert loader.source.state_dict()["number"] == 9

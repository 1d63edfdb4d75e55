"""Documents: what was sampled, and what training adds."""

import dataclasses
import re

import pytest
import torch
from builders.documents import document_of
from builders.runs import assert_equal, some_documents

from pgtoolkit.batch import pack, pack_sampled
from pgtoolkit.document import CRITIC_VECTORS, OPTIONAL_VECTORS, Document, SampledDocument
from pgtoolkit.rollouts.saved_batches import STATE


def as_sampled(document: Document) -> SampledDocument:
    names = [field.name for field in dataclasses.fields(SampledDocument)]
    return SampledDocument(**{name: getattr(document, name) for name in names})


def test_sampled_documents_are_packed_as_for_the_loss_but_for_what_training_adds():
    documents = some_documents()
    packed = vars(pack_sampled([as_sampled(document) for document in documents]))
    expected = vars(pack(documents))
    added = {"advantages", "old_log_probs"}
    assert_equal(
        {name: value for name, value in packed.items() if name not in added},
        {name: value for name, value in expected.items() if name not in added},
    )
    assert packed["advantages"].tolist() == [0.0] * len(expected["tokens"])
    assert packed["old_log_probs"] is None


def test_sampled_documents_are_read_by_the_reference_with_its_own_prompts():
    other_prompt = torch.tensor([9, 9, 9, 1, 2])
    sampled = as_sampled(document_of(3, reference_tokens=other_prompt))
    assert sampled.num_tokens == 5
    packed = pack_sampled([sampled])
    assert packed.for_reference.tokens.tolist() == [9, 9, 9, 1, 2]
    assert packed.for_reference.labels.tolist() == [-1, -1, 1, 2, -1]
    assert packed.places.tolist() == [2, 3, 0]


@pytest.mark.parametrize("name", ["advantages", *OPTIONAL_VECTORS, *CRITIC_VECTORS])
def test_a_document_refuses_numbers_of_more_tokens_than_are_trained(name):
    message = f"a document has 3 tokens, 2 of them trained, and {{'loss_mask': 3, .*'{name}': 4"
    with pytest.raises(ValueError, match=message):
        document_of(3, **{name: torch.zeros(4)})
    if name == "sampling_log_probs":
        sampled = as_sampled(document_of(3))
        with pytest.raises(
            ValueError, match=re.escape("{'loss_mask': 3, 'sampling_log_probs': 4}")
        ):
            dataclasses.replace(sampled, sampling_log_probs=torch.zeros(4))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"tokens": [1, 2, 3]}, "tokens of d needs a tensor of torch.int64 (got list)"),
        (
            {"loss_mask": torch.tensor([0, 0.5, 1])},
            "loss_mask of d needs a tensor of torch.bool (got torch.float32)",
        ),
        ({"advantages": 1.0}, "advantages of d needs a tensor with a number for each of its 2"),
    ],
    ids=["tokens", "loss_mask", "advantages"],
)
def test_a_document_refuses_what_is_no_tensor_and_a_mask_of_weights(wrong, problem):
    fields = {
        "tokens": torch.tensor([1, 2, 3]),
        "loss_mask": torch.tensor([False, True, True]),
        "advantages": torch.ones(2),
        "old_log_probs": torch.zeros(2),
    }
    Document(**fields, group=0, name="d")
    with pytest.raises(ValueError, match=re.escape(problem)):
        Document(**(fields | wrong), group=0, name="d")


def test_a_document_refuses_to_train_its_first_token():
    with pytest.raises(ValueError, match="trains its first token, which nothing stands before"):
        document_of(3, torch.tensor([True, False, True]))


def test_a_checkpoint_has_the_fields_of_a_document_side_by_side():
    """What was sampled and what training adds are not told apart there."""
    (shape,) = STATE["documents"]
    names = {name.removesuffix("?") for name in shape}
    assert names == {field.name for field in dataclasses.fields(Document)}


@pytest.mark.parametrize("name", ["advantages", *OPTIONAL_VECTORS, *CRITIC_VECTORS])
def test_a_document_refuses_a_column_and_a_single_number(name):
    """Columns of two documents would be broadcast against each other."""
    for wrong in (torch.zeros(2, 1), torch.tensor(0.0)):
        got = re.escape(f"{name} of a document needs a number for each of its 2 trained tokens")
        with pytest.raises(ValueError, match=f"^{got}.*Use {name}"):
            document_of(3, **{name: wrong})

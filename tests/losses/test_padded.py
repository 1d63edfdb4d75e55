"""`from_padded` gives the loss and gradient of the same tokens on one axis, and refuses arrays that
do not fit together."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.losses import make_case, relative_error
from torch import Tensor

from pgtoolkit import StepTotals, from_padded, linear_policy_loss, log_prob_loss, policy_loss
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.kl import KL

CASE = make_case()
NUM_DOCUMENTS = CASE.num_documents
LONGEST = 12
ROWS = [(CASE.document_index == document).nonzero()[:, 0] for document in range(NUM_DOCUMENTS)]


def padded(values: Tensor, filler: float, left: bool = False) -> Tensor:
    """Return (documents, LONGEST, ...) of (T, ...), with the filler on the left or the right."""
    padded_values = values.new_full((NUM_DOCUMENTS, LONGEST, *values.shape[1:]), filler)
    for document, rows in enumerate(ROWS):
        start = LONGEST - len(rows) if left else 0
        padded_values[document, start : start + len(rows)] = values[rows]
    return padded_values


def padded_vectors(left: bool = False, **more: object) -> dict:
    """Return the arguments of `from_padded` but for logits; `more` replaces some."""
    vectors = {
        "old_log_probs": padded(CASE.old_log_probs, torch.nan, left),
        "mask": padded((CASE.labels >= 0).long(), 0, left),
        # Padding is a token of the vocabulary, which the mask excludes.
        "labels": padded(CASE.labels, 3, left),
        "advantages": torch.stack([CASE.advantages[rows[0]] for rows in ROWS]),
    }
    return vectors | more


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("as_numpy", [False, True])
def test_padded_rows_give_the_loss_and_gradient_of_the_packed_tokens(left, as_numpy):
    options = {"loss": "gspo", "aggregation": "prompt_mean", "group_index": CASE.group_index}
    exact = CASE.logits.clone().requires_grad_()
    expected = policy_loss(exact, *CASE.tensors[1:], num_documents=NUM_DOCUMENTS, **options)
    expected.loss.backward()
    vectors = {name: x.numpy() if as_numpy else x for name, x in padded_vectors(left).items()}
    logits = padded(CASE.logits, 7.0, left).requires_grad_()
    out = policy_loss(**from_padded(logits=logits, **vectors), **options)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-13)
    assert relative_error(logits.grad, padded(exact.grad, 0.0, left)) < 1e-13
    again = padded(CASE.logits, 7.0, left)
    eye = torch.eye(13, dtype=torch.float64)
    arguments = from_padded(hidden=again, **vectors)
    fused = linear_policy_loss(lm_head_weight=eye, **arguments, **options)
    assert float(fused.loss) == pytest.approx(expected.loss.item(), rel=1e-12)
    del vectors["labels"]
    log_probs = padded(expected.log_probs, torch.nan, left)
    by_token = padded(CASE.advantages, 0.0, left)
    arguments = from_padded(log_probs=log_probs, **vectors | {"advantages": by_token})
    assert float(log_prob_loss(**arguments, **options).loss) == pytest.approx(
        expected.loss.item(), rel=1e-12
    )


LOGITS = padded(CASE.logits, 0.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "needs one of logits, hidden and log_probs .got none"),
        ({"logits": LOGITS, "hidden": LOGITS}, "needs one of .* .got logits, hidden"),
        ({"logits": CASE.logits}, r"needs logits of shape \(B, T, V\) .got \(32, 13\)"),
        (
            {"logits": LOGITS, "advantages": torch.ones(5)},
            r"advantages needs shape \(6, 12\) .* a document, \(6,\)",
        ),
        (
            {"logits": LOGITS, "labels": torch.ones(6, 11)},
            r"label t is token t \+ 1.* .got \(6, 11\)",
        ),
        (
            {"logits": SimpleNamespace(logits=LOGITS)},
            r"^logits needs a tensor .* .got a SimpleNamespace.\. Use logits=output\.logits of",
        ),
        ({"hidden": SimpleNamespace(last_hidden_state=1)}, "Use hidden=output.last_hidden_state"),
        ({"logits": LOGITS, "mask": "x"}, r"^mask needs a tensor or an array .* .got a str.$"),
        (
            {"logits": LOGITS, "advantages": None},
            r"needs advantages, .* .got None.\. .* use advantages=torch\.zeros\(6\)$",
        ),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        from_padded(**padded_vectors(**changed))


@pytest.mark.parametrize(
    ("function", "keywords", "message"),
    [
        (
            policy_loss,
            from_padded(hidden=LOGITS, **padded_vectors()),
            r"^policy_loss needs logits \(got hidden\)\. Use from_padded\(logits=\.\.\.\), or call "
            "linear_policy_loss$",
        ),
        (
            linear_policy_loss,
            from_padded(logits=LOGITS, **padded_vectors()),
            r"^linear_policy_loss needs hidden \(got logits\)\. Use .*, or call policy_loss$",
        ),
        (
            log_prob_loss,
            from_padded(logits=LOGITS, **padded_vectors()),
            r"^log_prob_loss needs log_probs \(got logits\)",
        ),
        (
            log_prob_loss,
            {"loss": "grpo", "entropy_coefficient": 0.1},
            "^log_prob_loss has no entropy_coefficient, which needs logits. Use policy_loss or lin",
        ),
    ],
)
def test_keywords_of_another_function_are_refused_by_its_name(function, keywords, message):
    with pytest.raises(ValueError, match=message):
        function(**keywords)


def test_old_log_probs_may_be_none_where_the_loss_reads_none():
    made = {
        "logits": from_padded(logits=LOGITS, **padded_vectors(old_log_probs=None)),
        "hidden": from_padded(hidden=LOGITS, **padded_vectors(old_log_probs=None)),
    }
    rows = CASE.labels >= 0
    new = CASE.logits.log_softmax(-1)[rows, CASE.labels[rows]]
    expected = -(CASE.advantages[rows] * new).mean().item()
    options = {"loss": "reinforce", "aggregation": "token_mean"}
    assert policy_loss(**made["logits"], **options).loss.item() == pytest.approx(expected)
    head = {"lm_head_weight": torch.eye(13, dtype=torch.float64)}
    out = linear_policy_loss(**made["hidden"], **head, **options)
    assert out.loss.item() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"^old_log_probs needs .*got None\): loss='grpo' reads"):
        linear_policy_loss(**made["hidden"], **head, loss="grpo")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_old_log_probs_that_a_refusal_names_are_those_of_the_policy_itself(temperature):
    options = {"loss": "grpo", "temperature": temperature}
    with pytest.raises(ValueError, match="own samples use old_log_probs=") as refused:
        policy_loss(**from_padded(logits=LOGITS, **padded_vectors(old_log_probs=None)), **options)
    typed = str(refused.value).partition("use old_log_probs=")[2].partition(". loss=")[0]
    vectors = padded_vectors()
    vectors["old_log_probs"] = eval(typed, {"logits": LOGITS, "labels": vectors["labels"]})
    arguments = from_padded(logits=LOGITS, **vectors)
    new = policy_loss(**arguments, **options).log_probs
    trained = arguments["labels"] >= 0
    torch.testing.assert_close(arguments["old_log_probs"][trained], new[trained])


def test_a_list_of_numbers_keeps_their_digits():
    advantages = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7]
    made = from_padded(logits=LOGITS, **padded_vectors(advantages=advantages))["advantages"]
    assert made.view(6, -1)[:, 3].tolist() == advantages


@pytest.mark.parametrize("function", ["policy_loss", "linear_policy_loss", "log_prob_loss"])
def test_probabilities_and_totals_below_those_of_the_piece_are_refused(function):
    logits, labels, old, advantages, index = CASE.tensors

    def call(old: Tensor, **more: object) -> PolicyLoss:
        more = {"num_documents": NUM_DOCUMENTS, "loss": "grpo"} | more
        if function == "policy_loss":
            return policy_loss(logits, labels, old, advantages, index, **more)
        if function == "linear_policy_loss":
            return linear_policy_loss(
                logits, torch.eye(13).double(), labels, old, advantages, index, **more
            )
        log_probs = policy_loss(*CASE.tensors, num_documents=NUM_DOCUMENTS).log_probs
        return log_prob_loss(log_probs, old, advantages, index, labels >= 0, **more)

    probability = torch.where(index == 3, old.exp(), old)
    message = (
        r"old_log_probs needs log-probs, which are at most 0, .* in document 3\). Probabilities are"
    )
    with pytest.raises(ValueError, match=message):
        call(probability)
    sampling = {"sampling_log_probs": probability, "metrics": "basic"}
    with pytest.raises(ValueError, match=r"sampling_log_probs needs log-probs"):
        call(old, **sampling)
    reference = {"ref_log_probs": probability, "kl": KL("k3", coefficient=0.1)}
    with pytest.raises(
        ValueError, match=r"ref_log_probs needs log-probs, which are at most 0, .* in document 3\)"
    ):
        call(old, **reference)
    if function == "log_prob_loss":
        log_probs = torch.where(index == 3, 0.5, old)
        with pytest.raises(ValueError, match=r"^log_probs needs .* \(got 0.5 in document 3\)"):
            log_prob_loss(log_probs, old, advantages, index, labels >= 0)
    assert torch.isfinite(call(old, **reference, check_finite=False).loss)
    assert torch.isfinite(call(probability, check_finite=False).loss)
    # Those of masked tokens are not read, and 0 may come from rounding.
    call(torch.where(labels < 0, 1.0, old.clamp(max=-1e-3) + 1e-3))
    number = int((labels >= 0).sum())
    assert torch.isfinite(call(old, totals=StepTotals(NUM_DOCUMENTS, number, 1)).loss)
    with pytest.raises(
        ValueError, match=rf"totals.num_tokens needs to count at least the {number} trained tokens"
    ):
        call(old, totals=StepTotals(NUM_DOCUMENTS, torch.tensor(number - 1), 1))
    with pytest.raises(
        ValueError, match=r"totals.num_documents needs to count at least the 6 documents"
    ):
        call(old, totals=StepTotals(NUM_DOCUMENTS - 1, number, 1))


@pytest.mark.parametrize("weight", [0.5, 2, -1, math.nan])
def test_a_mask_of_other_numbers_than_0_and_1_is_refused(weight):
    mask = torch.tensor([[1.0, weight, 0.0]])
    vectors = {"log_probs": torch.zeros(1, 3), "old_log_probs": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=rf"^mask needs 0 and 1, .*\(got {weight:g}\)"):
        from_padded(**vectors, advantages=torch.zeros(1), mask=mask)
    keywords = from_padded(**vectors, advantages=torch.zeros(1), mask=[[1, 0, 1]])
    assert keywords["mask"].tolist() == [True, False, True]
    flat = (torch.zeros(3), torch.zeros(3), torch.ones(3), torch.zeros(3).long())
    with pytest.raises(ValueError, match=rf"^mask needs 0 and 1, .*\(got {weight:g}\)"):
        log_prob_loss(*flat, mask[0])
    of_bools = log_prob_loss(*flat, torch.tensor([True, False, True])).loss
    for given in (torch.tensor([1, 0, 1]), torch.tensor([1.0, 0, 1]), [1, 0, 1]):
        assert float(log_prob_loss(*flat, given).loss) == float(of_bools)


def test_numbers_of_a_document_are_taken_as_lists_or_arrays():
    of_documents = {"group_index": [0, 0, 1, 1, 2, 2], "rewards": np.array([1, 0, 1, 1, 0, 1])}
    made = from_padded(logits=LOGITS, **padded_vectors(**of_documents))
    assert made["group_index"].dtype == torch.int64
    assert made["group_index"].tolist() == of_documents["group_index"]
    assert made["rewards"].tolist() == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    for key, wrong, message in (
        (
            "group_index",
            ["a"] * 6,
            r"^group_index needs a tensor or an array of numbers \(got a lis",
        ),
        ("group_index", 0.5, r"^group_index needs one number a document, \(6,\) as the rows of"),
        (
            "group_index",
            np.full(6, 0.5),
            r"integers .*Use torch.as_tensor\(group_index\).long\(\)$",
        ),
        ("trajectory_index", torch.ones(6), r"integers .*\. Use trajectory_index.long\(\)$"),
        ("rewards", [[1.0]] * 6, r"^rewards needs one number a document, \(6,\) .* \(got \(6, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            from_padded(logits=LOGITS, **padded_vectors(**{key: wrong}))


def test_labels_say_which_log_probs_are_trained_as_they_do_of_logits():
    labels = torch.tensor([[-100, 4, 5, 0], [-100, -100, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]])
    zeros = torch.zeros(2, 4)
    vectors = {"old_log_probs": zeros, "advantages": torch.ones(2), "labels": labels}
    by_labels = [[False, True, True, True], [False, False, True, True]]
    by_both = [[False, True, True, False], [False, False, True, False]]
    for given, expected in ((None, by_labels), (mask, by_both)):
        of_logits = from_padded(logits=zeros[:, :, None], mask=given, **vectors)
        of_log_probs = from_padded(log_probs=zeros, mask=given, **vectors)
        assert of_log_probs["mask"].view(2, 4).tolist() == expected
        assert (of_logits["labels"] >= 0).view(2, 4).tolist() == expected
    with pytest.raises(ValueError, match=r"^labels needs shape \(2, 4\) as log_probs \(got \(5, 4"):
        from_padded(log_probs=zeros, mask=mask, **vectors | {"labels": torch.ones(5, 4).long()})
    with pytest.raises(ValueError, match=r"^labels needs integers .*\. Use labels\.long\(\)$"):
        from_padded(log_probs=zeros, mask=mask, **vectors | {"labels": labels.double()})
    del vectors["labels"]
    with pytest.raises(ValueError, match=r"^from_padded needs mask or labels with log_probs"):
        from_padded(log_probs=zeros, **vectors)


@pytest.mark.parametrize(
    "advantages", [[2, -1], torch.tensor([2, -1]), np.array([[2] * 3, [-1] * 3])]
)
def test_whole_numbers_that_are_floats_by_meaning_become_float64(advantages):
    log_probs = [[-1, -2, -3], [-4, -1, -2]]
    arguments = from_padded(
        log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=advantages,
        mask=torch.ones(2, 3).bool(),
        sampling_log_probs=log_probs,
        ref_log_probs=log_probs,
    )
    floats = {
        name for name, value in arguments.items() if getattr(value, "dtype", 0) == torch.float64
    }
    assert floats == {
        *("log_probs", "old_log_probs", "advantages", "sampling_log_probs", "ref_log_probs")
    }
    assert arguments["advantages"].tolist() == [2.0] * 3 + [-1.0] * 3
    # Every ratio is 1: the loss is minus the mean advantage.
    options = {"loss": "grpo", "correction": "token_truncate", "metrics": "basic"}
    assert float(log_prob_loss(**arguments, **options).loss) == -0.5


@pytest.mark.parametrize("name", ["advantages", "old_log_probs", "log_probs"])
def test_whole_numbers_are_refused_with_what_to_type(name):
    whole = torch.tensor([-1, -2])
    arguments = dict.fromkeys(("log_probs", "old_log_probs", "advantages"), whole.float())
    arguments |= {"document_index": torch.tensor([0, 1]), "mask": torch.ones(2).bool()}
    with pytest.raises(ValueError, match=rf"^{name} needs .*\(got \(2,\), int64\). Use {name}.flo"):
        log_prob_loss(**arguments | {name: whole})
    log_prob_loss(**arguments | {name: whole.float()})
    with pytest.raises(ValueError, match=r"\(got \(2, 3\), int64\)\. Use logits\.float\(\)$"):
        policy_loss(torch.ones(2, 3).long(), *[whole] * 4)

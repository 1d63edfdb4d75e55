"""What the library's two entry points refuse: each keyword with values of wrong kinds, in a
sentence that names it."""

import math

import numpy as np
import pytest
import torch
from builders.losses import make_case

from pgtoolkit import StepTotals, kl, linear_policy_loss, policy_loss
from pgtoolkit.kernels.chunks import DocumentCounts

CASE = make_case()
T, D = len(CASE.labels), CASE.num_documents
NUMBERS = [0, math.nan, math.inf, True, "0.2"]
NOT_WHOLE = [-1, 1.5, True]
KL = kl.KL("k3", coefficient=0.1)
FULL = kl.KL("full_reverse", coefficient=0.1)
VECTOR = ["labels", CASE.advantages[:-1], CASE.advantages[:, None]]


def totals(**changed):
    return StepTotals(**{"num_documents": 9, "num_tokens": 40, "num_empty_documents": 2} | changed)


def reducer(totals, mask, **_):
    return mask / totals.num_tokens


# Keyword -> the values refused; a pair is a value and the other keywords with which it is wrong.
WRONG = {
    "labels": [*VECTOR, CASE.labels.double()],
    "old_log_probs": [*VECTOR, CASE.labels],
    "advantages": [None, *VECTOR, CASE.labels],
    "document_index": [*VECTOR, CASE.document_index.double(), CASE.document_index.to("meta")],
    "loss": ["ppo", None],
    "epsilon_low": [*NUMBERS, 1.0],
    "epsilon_high": NUMBERS,
    "aggregation": ["mean", None, ("mean", {"reducer": reducer})],
    "divisor": [
        *((value, {"aggregation": "constant"}) for value in [*NUMBERS, None]),
        *(8, (8, {"reducer": reducer}), (-3, {"aggregation": "constant", "reducer": reducer})),
    ],
    "reducer": ["package.function"],
    "group_index": [
        (value, {"aggregation": "prompt_mean"})
        for value in (None, CASE.group_index[:-1], CASE.group_index.double())
    ]
    + [
        (
            CASE.group_index,
            {"totals": totals(num_groups=2, tokens_per_group=torch.tensor([20, 20]))},
        )
    ],
    "num_documents": NOT_WHOLE,
    "totals": [
        {"num_documents": 6},
        totals(num_documents=5),
        totals(num_groups=1),
        (totals(), {"aggregation": "prompt_mean", "group_index": CASE.group_index}),
    ],
    "correction": ["tis", "token_mask"],  # the last without sampling_log_probs
    "sampling_log_probs": [*VECTOR, (None, {"correction": "sequence_truncate"})],
    "kl": [FULL, "k3", KL],  # the last without ref_log_probs, the first without logits
    "ref_log_probs": [
        *((None, {"kl": KL}), CASE.advantages),  # the last would be read by nothing
        *((value, {"metrics": "basic"}) for value in (*VECTOR, CASE.labels)),
    ],
    "ref_logits": [
        CASE.logits,
        *((value, {"kl": FULL}) for value in (None, CASE.logits[:, 1:], CASE.labels)),
    ],
    "entropy_coefficient": [-1, math.nan, True],
    "temperature": NUMBERS,
    "metrics": ["all", None],
    "impl": ["cuda", None],
    "vocabulary_start": [3],
}
HIDDEN = torch.randn(T, 4, dtype=torch.float64)
WEIGHT = torch.randn(13, 4, dtype=torch.float64)
BUFFER = torch.zeros(13, 4, dtype=torch.float64)
MATRIX = [None, torch.zeros(T), torch.zeros(T, 4, dtype=torch.int64), torch.zeros(2, T, 4)]
OF_HEAD = {
    "hidden": MATRIX,
    "lm_head_weight": [*MATRIX, WEIGHT.T, WEIGHT.to("meta")],
    "bias": [torch.zeros(12), torch.zeros(13, dtype=torch.int64)],
    "num_splits": [*((value, {"loss": "grpo"}) for value in (*NOT_WHOLE, 0)), 2],
    "logits_memory_mb": [*NUMBERS, (8, {"impl": "torch"}), (8, {"loss": "grpo", "num_splits": 2})],
    "weight_gradient": [BUFFER.float(), BUFFER[:-1], (BUFFER, {"impl": "torch"})],
    "counts": [DocumentCounts([1], [1]), DocumentCounts([1] * D, [2] * D)],
}
SHARED = {name: values[-1:] for name, values in WRONG.items() if name != "ref_logits"}
TEACHER = {"kl": FULL, "ref_hidden": HIDDEN, "ref_lm_head_weight": WEIGHT}
OF_TEACHER = {
    "ref_hidden": [(value, TEACHER) for value in (*MATRIX, HIDDEN[1:])],
    "ref_lm_head_weight": [(value, TEACHER) for value in (*MATRIX, WEIGHT[1:])],
    "ref_bias": [(torch.zeros(12), TEACHER), torch.zeros(13)],
    "ref_log_probs": [(CASE.advantages, TEACHER)],
}


def rows(table):
    found = []
    for keyword, values in table.items():
        for number, value in enumerate(values):
            value, others = value if isinstance(value, tuple) else (value, {})
            found.append(pytest.param(keyword, value, others, id=f"{keyword}-{number}"))
    return found


@pytest.mark.parametrize(("keyword", "value", "others"), rows({"logits": MATRIX, **WRONG}))
def test_given_logits(keyword, value, others):
    names = ("logits", "labels", "old_log_probs", "advantages", "document_index")
    given = dict(zip(names, CASE.tensors, strict=True))
    refused(policy_loss, given | others | {keyword: value}, keyword)


@pytest.mark.parametrize(("keyword", "value", "others"), rows(OF_HEAD | SHARED) + rows(OF_TEACHER))
def test_the_head(keyword, value, others):
    names = ("hidden", "lm_head_weight", "labels", "old_log_probs", "advantages", "document_index")
    given = dict(zip(names, (HIDDEN, WEIGHT, *CASE.tensors[1:]), strict=True))
    refused(linear_policy_loss, given | others | {keyword: value}, keyword)


def refused(function, arguments, keyword):
    """By one line that names the keyword."""
    with pytest.raises(ValueError, match=rf"^[^\n]*{keyword}[^\n]*$"):
        function(**arguments)


def test_what_is_right_is_taken():
    """Whole and other numbers of numpy's too; the least of each."""
    totals = StepTotals(
        np.int64(9), torch.tensor(40), 0, 3, torch.tensor([20, 0, 20], dtype=torch.int32)
    )
    options = {
        "num_documents": np.int64(D),
        "aggregation": "constant",
        "divisor": np.float32(8),
        "totals": totals,
    }
    options["group_index"] = CASE.group_index.int()
    expected = policy_loss(
        *CASE.tensors, aggregation="constant", divisor=8.0, totals=StepTotals(9, 40, 0)
    )
    logits, labels, old, advantages, index = CASE.tensors
    found = policy_loss(logits, labels.int(), old, advantages, index.int(), **options)
    assert found.loss == expected.loss
    options = {
        "aggregation": "constant",
        "reducer": lambda totals, mask, **_: mask / totals.num_tokens,
    }
    found = policy_loss(*CASE.tensors, loss="grpo", divisor=8, **options)
    assert found.loss == policy_loss(*CASE.tensors, loss="grpo", **options).loss


def test_documents_are_numbered_from_0_unless_their_number_is_given():
    """The documents of 1-based numbers would be one too many, and the loss too small."""
    right, index = policy_loss(*CASE.tensors), CASE.document_index
    gap = torch.where(index > 2, index + 2, index)
    for numbers, last, missing in ((index + 1, 6, 0), (index + 3, 8, 0), (gap, 7, 3)):
        message = (
            f"document_index needs every number from 0 to {last} .got none of "
            f"{missing}.*num_documents"
        )
        with pytest.raises(ValueError, match=message):
            policy_loss(*CASE.tensors[:4], numbers)
        asked_for = policy_loss(*CASE.tensors[:4], numbers, num_documents=last + 1)
        assert float(asked_for.loss) == pytest.approx(float(right.loss) * 6 / (last + 1), rel=1e-14)
    # A document without a trained token is one of the step's; padding may lie before document 0, or
    # carry -1.
    padded = [torch.cat([x[:2], x]) for x in CASE.tensors[:4]]
    padded[1][:2] = -1
    found = policy_loss(*padded, torch.cat([torch.tensor([-1, -1]), index]))
    assert float(found.loss) == float(right.loss)
    assert int(right.totals.num_documents) == 6

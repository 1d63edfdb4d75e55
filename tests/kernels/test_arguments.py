"""What the library's two entry points refuse: each keyword with values of wrong kinds, in a sentence that names it."""

import inspect
import math

import numpy as np
import pytest
import torch
from builders.losses import make_case

from pgtoolkit import StepTotals, kl, linear_policy_loss, policy_loss
from pgtoolkit.kernels.chunks import DocumentCounts

CASE = make_case()
T, D = len(CASE.labels), CASE.num_documents
NUMBERS = [0, -1, 0.0, math.nan, math.inf, True, "0.2", torch.ones(1)]
NOT_WHOLE = [-1, 1.5, math.nan, True, "3", torch.ones(1)]
SWITCH = [1, "no", None]
KL = kl.KL("k3", coefficient=0.1)
VECTOR = [None, "labels", CASE.advantages.tolist(), CASE.advantages[:-1], CASE.advantages[:, None]]
GROUP = [3, "world", True, [0, 1]]


def totals(**changed):
    return StepTotals(**{"num_documents": 9, "num_tokens": 40, "num_empty_documents": 2} | changed)


# Keyword -> the values refused; a pair is a value and the other keywords with which it is wrong.
WRONG = {
    "labels": [*VECTOR, CASE.labels.double(), CASE.labels >= 0, CASE.labels.short()],
    "old_log_probs": [*VECTOR, CASE.labels, CASE.labels >= 0],
    "advantages": [*VECTOR, CASE.labels, CASE.labels >= 0],
    "document_index": [*VECTOR, CASE.document_index.double(), CASE.document_index == 1, CASE.document_index.to("meta")],
    "loss": ["ppo", None, 3, ["grpo"]],
    "epsilon_low": [*NUMBERS, 1.0],
    "epsilon_high": NUMBERS,
    "aggregation": ["mean", None, 3, ("mean", {"reducer": lambda totals, **_: None})],
    "divisor": [
        *((value, {"aggregation": "constant"}) for value in [*NUMBERS, None]),
        8,
        *((value, {"aggregation": "constant", "reducer": lambda totals, **_: None}) for value in (-3, math.nan)),
        (8, {"reducer": lambda totals, **_: None}),
    ],
    "reducer": ["package.function", 1.0, torch.ones(T)],
    "group_index": [
        (value, {"aggregation": "prompt_mean"})
        for value in (
            None,
            [0, 1, 0, 2, 1, 2],
            CASE.group_index[:-1],
            CASE.group_index.double(),
            torch.full((D,), math.nan),
            CASE.group_index == 1,
        )
    ]
    + [
        (index, {"totals": totals(num_groups=2, tokens_per_group=torch.tensor([20, 20]))})
        for index in (CASE.group_index, CASE.group_index - 1)
    ],
    "num_documents": NOT_WHOLE,
    "totals": [
        {"num_documents": 6},
        *(totals(**{name: value}) for name in ("num_documents", "num_tokens", "num_empty_documents") for value in (
            *NOT_WHOLE, torch.tensor(-1), torch.tensor(1.5), None)),
        totals(num_groups=-1, tokens_per_group=torch.tensor([1])),
        totals(num_groups=1),
        totals(tokens_per_group=torch.tensor([1])),
        *(
            totals(num_groups=1, tokens_per_group=x)
            for x in ([40], torch.tensor(40), torch.tensor([40.0]), torch.tensor([-1]))
        ),
    ],
    "correction": ["tis", 3, True, "token_mask"],  # the last without sampling_log_probs
    "sampling_log_probs": [*VECTOR[1:], CASE.labels, (None, {"correction": "sequence_truncate"})],
    "kl": ["k3", 3, True, KL],  # the last without ref_log_probs
    "ref_log_probs": [
        (None, {"kl": KL}),
        CASE.advantages,  # which nothing would read
        *((value, {"metrics": "basic"}) for value in (*VECTOR[1:], CASE.labels)),
    ],
    "entropy_coefficient": [-1, math.nan, math.inf, True, "0.2", torch.ones(1)],
    "temperature": NUMBERS,
    "metrics": ["all", None, True, 1],
    "impl": ["cuda", None, 0, ["torch"]],
    "check_finite": SWITCH,
    "overwrite_logits": SWITCH,
    "vocabulary_group": GROUP,
    "vocabulary_start": [3, -1],
    "sequence_group": [(value, {"num_documents": D}) for value in GROUP],
    "data_group": GROUP,
}  # fmt: skip
HIDDEN = torch.randn(T, 4, dtype=torch.float64)
WEIGHT = torch.randn(13, 4, dtype=torch.float64)
BUFFER = torch.zeros(13, 4, dtype=torch.float64)
MATRIX = [None, "logits", [[0.0]], torch.zeros(T), torch.zeros(T, 4, dtype=torch.int64), torch.zeros(2, T, 4)]
OF_HEAD = {
    "hidden": MATRIX,
    "lm_head_weight": [*MATRIX, WEIGHT.T, WEIGHT.long(), WEIGHT.to("meta")],
    "bias": ["bias", torch.zeros(12), torch.zeros(13, 1), torch.zeros(13, dtype=torch.int64), torch.zeros(13) > 0],
    "fp32_logits": SWITCH,
    "num_splits": [(value, {"loss": "grpo"}) for value in (*NOT_WHOLE, 0)] + [2],
    "logits_memory_mb": [*NUMBERS, (8, {"impl": "torch"}), (8, {"loss": "grpo", "num_splits": 2})],
    "weight_gradient": [
        True,
        BUFFER.long(),
        BUFFER.float(),
        BUFFER.bfloat16(),
        BUFFER[:-1],
        BUFFER.T,
        (BUFFER, {"impl": "torch"}),
    ],
    "counts": [
        3,
        [1] * D,
        DocumentCounts([1], [1]),
        DocumentCounts([1] * D, [1]),
        DocumentCounts([1] * D, [2] * D),
        DocumentCounts([-1] * D, [-1] * D),
        DocumentCounts([1.5] * D, [1] * D),
    ],
}

SHARED = {name: values[:4] for name, values in WRONG.items() if name != "overwrite_logits"}


def rows(table):
    found = []
    for keyword, values in table.items():
        for number, value in enumerate(values):
            value, others = value if isinstance(value, tuple) else (value, {})
            found.append(pytest.param(keyword, value, others, id=f"{keyword}-{number}"))
    return found


def test_the_tables_cover_every_keyword():
    of_logits, of_head = (inspect.signature(function).parameters for function in (policy_loss, linear_policy_loss))
    of_a_family = {"epsilon_low", "epsilon_high"}
    assert {"logits", *WRONG} - of_a_family == set(of_logits) - {"parameters"}
    assert {*SHARED, *OF_HEAD} - of_a_family == set(of_head) - {"parameters"}


@pytest.mark.parametrize(("keyword", "value", "others"), rows({"logits": MATRIX, **WRONG}))
def test_given_logits(keyword, value, others):
    names = ("logits", "labels", "old_log_probs", "advantages", "document_index")
    given = dict(zip(names, CASE.tensors, strict=True))
    refused(policy_loss, given | others | {keyword: value}, keyword)


@pytest.mark.parametrize(("keyword", "value", "others"), rows(OF_HEAD | SHARED))
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
    totals = StepTotals(np.int64(9), torch.tensor(40), 0, 3, torch.tensor([20, 0, 20], dtype=torch.int32))
    options = {"num_documents": np.int64(D), "aggregation": "constant", "divisor": np.float32(8), "totals": totals}
    expected = policy_loss(*CASE.tensors, aggregation="constant", divisor=8.0, totals=StepTotals(9, 40, 0))
    found = policy_loss(*CASE.tensors, **options, group_index=CASE.group_index.int())
    assert found.loss == expected.loss
    options = {"aggregation": "constant", "reducer": lambda totals, mask, **_: mask / totals.num_tokens}
    found = policy_loss(*CASE.tensors, loss="grpo", divisor=8, **options)
    assert found.loss == policy_loss(*CASE.tensors, loss="grpo", **options).loss


def test_documents_are_numbered_from_0_unless_their_number_is_given():
    """The documents of 1-based numbers used to be one too many, and the loss too small."""
    case = CASE
    right = policy_loss(*case.tensors)
    for shifted, missing in ((1, 0), (3, 0)):
        one_based = case.document_index + shifted
        message = f"document_index needs every number from 0 to {5 + shifted} .got none of {missing}.*num_documents"
        with pytest.raises(ValueError, match=message):
            policy_loss(*case.tensors[:4], one_based)
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(HIDDEN, WEIGHT, *case.tensors[1:4], one_based, check_finite=False)
        asked_for = policy_loss(*case.tensors[:4], one_based, num_documents=6 + shifted)
        assert float(asked_for.loss) == pytest.approx(float(right.loss) * 6 / (6 + shifted), rel=1e-14)
    with_gap = torch.where(case.document_index > 2, case.document_index + 2, case.document_index)
    with pytest.raises(ValueError, match=r"every number from 0 to 7 \(got none of 3\)"):
        policy_loss(*case.tensors[:4], with_gap)
    # A document without a trained token is one of the step's; padding may lie before document 0, or carry -1.
    padded = [torch.cat([x[:2], x]) for x in case.tensors[:4]]
    padded[1][:2] = -1
    found = policy_loss(*padded, torch.cat([torch.tensor([-1, -1]), case.document_index]))
    assert float(found.loss) == float(right.loss)
    assert int(right.totals.num_documents) == 6
    # A piece of a step has its totals: its numbers may be those of the step.
    totals = StepTotals(6, 27, 1)
    tail = [x[case.document_index > 2] for x in case.tensors]
    ours = policy_loss(*tail, totals=totals)
    assert float(ours.loss) == float(policy_loss(*tail[:4], tail[4] - 3, totals=totals).loss)

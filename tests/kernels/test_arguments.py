"""The library's two entry points, `policy_loss` and `linear_policy_loss`, refuse each argument of a
wrong kind in a sentence that names it, and accept what is right."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from builders.losses import make_case
from torch import Tensor

from pgtoolkit import (
    StepTotals,
    corrections,
    families,
    kl,
    linear_policy_loss,
    policy_loss,
    step_coefficients,
)
from pgtoolkit.kernels.chunks import DocumentCounts
from pgtoolkit.losses.aggregation import TokenMean

CASE = make_case()
T = len(CASE.labels)
D = CASE.num_documents
NOT_POSITIVE = [0, math.nan, math.inf, True, "0.2"]
NOT_A_COUNT = [-1, 1.5, True]
KL = kl.KL("k3", coefficient=0.1)
FULL = kl.KL("full_reverse", coefficient=0.1)
NOT_A_VECTOR = ["labels", CASE.advantages[:-1], CASE.advantages[:, None]]


def totals_with(**changes: object) -> StepTotals:
    counts = {"num_documents": 9, "num_tokens": 40, "num_empty_documents": 2}
    return StepTotals(**counts | changes)


def totals_by_sign(completions: Tensor, tokens: Tensor) -> StepTotals:
    return StepTotals(2, 6, 0, 1, torch.tensor([6]), None, completions, tokens)


def token_mean(totals: StepTotals, mask: Tensor, **_: object) -> Tensor:
    """Return equal weights: an aggregation of the user."""
    return mask / totals.num_tokens


WRONG = {
    "labels": [*NOT_A_VECTOR, CASE.labels.double()],
    "old_log_probs": [*NOT_A_VECTOR, CASE.labels],
    "advantages": [None, *NOT_A_VECTOR, CASE.labels],
    "document_index": [*NOT_A_VECTOR, CASE.document_index.double(), CASE.document_index.to("meta")],
    "loss": ["ppo", None],
    "epsilon_low": [*NOT_POSITIVE, 1.0],
    "epsilon_high": NOT_POSITIVE,
    "aggregation": ["mean", None, ("mean", {"reducer": token_mean})],
    "divisor": [
        *((value, {"aggregation": "constant"}) for value in [*NOT_POSITIVE, None]),
        *(8, (8, {"reducer": token_mean})),
    ],
    "reducer": ["package.function"],
    "group_index": [
        (value, {"aggregation": "prompt_mean"})
        for value in (None, CASE.group_index[:-1], CASE.group_index.double())
    ]
    + [
        (
            CASE.group_index,
            {"totals": totals_with(num_groups=2, tokens_per_group=torch.tensor([20, 20]))},
        )
    ],
    "num_documents": NOT_A_COUNT,
    "totals": [
        {"num_documents": 6},
        totals_with(num_documents=5),
        totals_with(num_groups=1),
        (totals_with(), {"aggregation": "prompt_mean", "group_index": CASE.group_index}),
    ],
    "correction": ["tis", "token_mask"],  # the last without sampling_log_probs
    "sampling_log_probs": [*NOT_A_VECTOR, (None, {"correction": "sequence_truncate"})],
    "kl": [FULL, "k3", KL],  # the last without ref_log_probs, the first without logits
    "ref_log_probs": [
        *((None, {"kl": KL}), CASE.advantages),  # the last would be read by nothing
        *((value, {"metrics": "basic"}) for value in (*NOT_A_VECTOR, CASE.labels)),
    ],
    "ref_logits": [
        CASE.logits,
        *((value, {"kl": FULL}) for value in (None, CASE.logits[:, 1:], CASE.labels)),
    ],
    "entropy_coefficient": [-1, math.nan, True],
    "temperature": NOT_POSITIVE,
    "metrics": ["all", None],
    "impl": ["cuda", None],
    "vocabulary_start": [3],
}
"""By argument of both entry points: the values that are refused. A pair is a value, and the other
arguments with which it is wrong."""

HIDDEN = torch.randn(T, 4, dtype=torch.float64)
WEIGHT = torch.randn(13, 4, dtype=torch.float64)
BUFFER = torch.zeros(13, 4, dtype=torch.float64)
NOT_A_MATRIX = [None, torch.zeros(T), torch.zeros(T, 4, dtype=torch.int64), torch.zeros(2, T, 4)]
WRONG_FOR_THE_HEAD = {
    "hidden": NOT_A_MATRIX,
    "lm_head_weight": [*NOT_A_MATRIX, WEIGHT.T, WEIGHT.to("meta")],
    "bias": [torch.zeros(12), torch.zeros(13, dtype=torch.int64)],
    "num_splits": [*((value, {"loss": "grpo"}) for value in (*NOT_A_COUNT, 0)), 2],
    "logits_memory_mb": [
        *NOT_POSITIVE,
        (8, {"impl": "torch"}),
        (8, {"loss": "grpo", "num_splits": 2}),
    ],
    "weight_gradient": [BUFFER.float(), BUFFER[:-1], (BUFFER, {"impl": "torch"})],
    "counts": [DocumentCounts([1], [1]), DocumentCounts([1] * D, [2] * D)],
}
LAST_OF_WRONG = {name: values[-1:] for name, values in WRONG.items() if name != "ref_logits"}
TEACHER = {"kl": FULL, "ref_hidden": HIDDEN, "ref_lm_head_weight": WEIGHT}
WRONG_FOR_THE_TEACHER = {
    "ref_hidden": [(value, TEACHER) for value in (*NOT_A_MATRIX, HIDDEN[1:])],
    "ref_lm_head_weight": [(value, TEACHER) for value in (*NOT_A_MATRIX, WEIGHT[1:])],
    "ref_bias": [(torch.zeros(12), TEACHER), torch.zeros(13)],
    "ref_log_probs": [(CASE.advantages, TEACHER)],
}


def parameters(table: dict[str, list]) -> list[ParameterSet]:
    """Return (name, value, other arguments) of each value of the table."""
    rows = []
    for name, values in table.items():
        for number, value in enumerate(values):
            value, others = value if isinstance(value, tuple) else (value, {})
            rows.append(pytest.param(name, value, others, id=f"{name}-{number}"))
    return rows


def assert_refused(function: Callable, arguments: dict, name: str) -> None:
    """Assert that the function refuses the arguments in one line that has the name."""
    with pytest.raises(ValueError, match=rf"^[^\n]*{name}[^\n]*$"):
        function(**arguments)


@pytest.mark.parametrize(("name", "value", "others"), parameters({"logits": NOT_A_MATRIX, **WRONG}))
def test_policy_loss_refuses_a_wrong_argument_by_its_name(name, value, others):
    names = ("logits", "labels", "old_log_probs", "advantages", "document_index")
    arguments = dict(zip(names, CASE.tensors, strict=True))
    assert_refused(policy_loss, arguments | others | {name: value}, name)


@pytest.mark.parametrize(
    ("name", "value", "others"),
    parameters(WRONG_FOR_THE_HEAD | LAST_OF_WRONG) + parameters(WRONG_FOR_THE_TEACHER),
)
def test_linear_policy_loss_refuses_a_wrong_argument_by_its_name(name, value, others):
    names = ("hidden", "lm_head_weight", "labels", "old_log_probs", "advantages", "document_index")
    arguments = dict(zip(names, (HIDDEN, WEIGHT, *CASE.tensors[1:]), strict=True))
    assert_refused(linear_policy_loss, arguments | others | {name: value}, name)


def test_numbers_of_numpy_and_torch_and_int32_indices_are_accepted():
    totals = StepTotals(
        np.int64(9), torch.tensor(40), 0, 3, torch.tensor([20, 9, 11], dtype=torch.int32)
    )
    options = {
        "num_documents": np.int64(D),
        "aggregation": "constant",
        "divisor": np.float32(8),
        "totals": totals,
        "group_index": CASE.group_index.int(),
    }
    expected = policy_loss(
        *CASE.tensors, aggregation="constant", divisor=8.0, totals=StepTotals(9, 40, 0)
    )
    logits, labels, old, advantages, index = CASE.tensors
    out = policy_loss(logits, labels.int(), old, advantages, index.int(), **options)
    assert out.loss == expected.loss


def test_a_transposed_head_is_refused_with_what_to_type():
    narrow = HIDDEN[:, :3]
    message = r"^lm_head_weight needs shape \(V, 3\) \(got .*\)\. Use lm_head_weight\.T, a row for"
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(narrow, WEIGHT[:, :3].T, *CASE.tensors[1:])


def test_documents_are_numbered_from_0_unless_num_documents_says_otherwise():
    """With numbers from 1 on there would be one document too many, and the loss would be too
    small."""
    expected = policy_loss(*CASE.tensors)
    index = CASE.document_index
    gap = torch.where(index > 2, index + 2, index)
    for numbers, last, missing in ((index + 1, 6, 0), (index + 3, 8, 0), (gap, 7, 3)):
        message = (
            f"document_index needs every number from 0 to {last} .got none of "
            f"{missing}.*num_documents"
        )
        with pytest.raises(ValueError, match=message):
            policy_loss(*CASE.tensors[:4], numbers)
        out = policy_loss(*CASE.tensors[:4], numbers, num_documents=last + 1)
        expected_loss = float(expected.loss) * 6 / (last + 1)
        assert float(out.loss) == pytest.approx(expected_loss, rel=1e-14)


def test_padding_may_have_the_document_number_minus_1():
    """A document without a trained token counts as a document of the step."""
    expected = policy_loss(*CASE.tensors)
    padded = [torch.cat([x[:2], x]) for x in CASE.tensors[:4]]
    padded[1][:2] = -1
    out = policy_loss(*padded, torch.cat([torch.tensor([-1, -1]), CASE.document_index]))
    assert float(out.loss) == float(expected.loss)
    assert int(expected.totals.num_documents) == 6


CALL = {
    "logits": CASE.logits,
    "labels": CASE.labels,
    "old_log_probs": CASE.old_log_probs,
    "advantages": CASE.advantages,
    "document_index": CASE.document_index,
}
INDICES = {
    "group_index": CASE.group_index,
    "trajectory_index": torch.arange(CASE.num_documents),
}


@pytest.mark.parametrize("kind", [Tensor.tolist, Tensor.numpy], ids=["list", "numpy"])
def test_logits_as_a_list_or_an_array_are_refused_with_what_makes_a_tensor_of_them(kind):
    wrong = kind(CASE.logits.detach())
    with pytest.raises(
        ValueError, match=r"^logits needs a tensor \(got a (list|ndarray)"
    ) as refused:
        policy_loss(**CALL | {"logits": wrong})
    use = str(refused.value).partition(" Use ")[2].partition(",")[0]
    mended = eval(use, {"torch": torch, "logits": wrong})
    assert torch.equal(mended.float(), CASE.logits.float())


FURTHER = {
    "sampling_log_probs": CASE.old_log_probs,
    "ref_log_probs": CASE.old_log_probs - 0.1,
    "factors": torch.ones_like(CASE.old_log_probs),
}


@pytest.mark.parametrize("kind", [Tensor.tolist, Tensor.numpy], ids=["list", "numpy"])
def test_lists_and_arrays_beside_the_models_output_count_as_tensors_do(kind):
    of_data = {name: value for name, value in CALL.items() if name != "logits"}
    of_data |= INDICES | FURTHER
    options = {"loss": "grpo", "aggregation": "prompt_mean", "metrics": "basic"}
    expected = policy_loss(CASE.logits, **of_data, **options)
    given = {name: kind(value.detach()) for name, value in of_data.items()}
    out = policy_loss(CASE.logits, **given, **options)
    assert float(out.loss) == float(expected.loss)
    assert float(out.metrics["kl_ref"]) == float(expected.metrics["kl_ref"])
    rewards = [1, 0, 1, 1, 0, 0]
    of_rewards = {"loss": "tpo", "group_index": kind(CASE.group_index), "rewards": rewards}
    log_probs = torch.where(CASE.labels >= 0, expected.log_probs.detach(), 0.0)
    vectors = {name: kind(of_data[name]) for name in CALL if name not in ("logits", "labels")}
    mask = CASE.labels >= 0
    with_list = step_coefficients(log_probs, mask=kind(mask), **vectors, **of_rewards)
    tensors = {name: of_data[name] for name in vectors}
    of_rewards |= {"group_index": CASE.group_index, "rewards": torch.tensor(rewards).double()}
    of_tensors = step_coefficients(log_probs, mask=mask, **tensors, **of_rewards)
    assert float(with_list.loss) == float(of_tensors.loss)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "group_index",
            ["a", "b"],
            r"^group_index needs a tensor or an array of numbers \(got a l",
        ),
        ("group_index", [0.5] * 6, r"Use torch.as_tensor\(group_index\).long\(\)$"),
        ("advantages", [[1.0], [2.0, 3.0]], r"^advantages needs a tensor or an array of numbers"),
        ("advantages", [1.0], r"^advantages needs one entry per row of logits, 32 \(got \(1,\), f"),
        ("labels", "many", r"^labels needs a tensor \(got 'many'\)"),
    ],
)
def test_lists_that_do_not_fit_are_refused_with_what_is_wrong(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**CALL | {name: wrong})


def test_the_result_of_a_call_shows_its_loss_and_its_metrics():
    out = policy_loss(**CALL, metrics="basic")
    shown = eval(repr(out), {"PolicyLoss": dict})
    numbers = {"loss": out.loss, **out.metrics}
    assert shown == {name: pytest.approx(float(value), rel=1e-5) for name, value in numbers.items()}
    assert repr(corrections.TokenMask()).startswith("TokenMask(low=0.5, high=5.0, measure='ratio',")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": families.Cispo}, r"loss needs an object, .*Use loss=Cispo\(\)$"),
        ({"correction": corrections.TokenMask}, r"Use correction=TokenMask\(\)$"),
        ({"loss": dict}, r"loss needs an object, not a class \(got dict\). Use a Family$"),
        ({"aggregation": TokenMean}, r"Use aggregation='token_mean'$"),
        ({"aggregation": token_mean}, r"Use reducer= for one of your own$"),
        ({"kl": kl.KL}, r"such as KL\('k3', coefficient=0.05\)"),
        ({"totals": StepTotals}, "totals needs a StepTotals or None"),
        ({"rewards": torch.ones(2)}, "rewards have no effect without a loss function that has"),
        ({"overwrite_logits": "no"}, "overwrite_logits needs True or False .got 'no'"),
        ({"check_finite": 0}, "check_finite needs True or False .got 0"),
        (
            {"totals": StepTotals(2, torch.tensor(6.0), 0)},
            r"totals.num_tokens needs a whole number >= 0, .* tensor \(got \(\), float32",
        ),
        ({"totals": StepTotals(2.0, 6, 0)}, "totals.num_documents needs a whole number >= 0"),
        (
            {"totals": StepTotals(2, 6, 0, 1, torch.tensor([6.0]))},
            r"totals.tokens_per_group needs counts, of dtype int64 \(got \(1,\), float32\). Use "
            r"tokens_per_group=tokens_per_group.long\(\)",
        ),
        (
            {"totals": StepTotals(2, 6, 0, 2, torch.tensor([2, 2, 2]))},
            r"tokens_per_group needs shape \(2,\), an entry for each of the num_groups .got \(3",
        ),
        (
            {"totals": StepTotals(2, 6, 0, 2, torch.tensor([2, 2]))},
            r"tokens_per_group needs to add up to totals.num_tokens, 6 \(got 4\)",
        ),
        (
            {"totals": totals_by_sign(torch.tensor([1, 1]), torch.tensor([[0, 0, 6]]))},
            r"totals.completions_by_sign needs shape \(1, 3\), an entry for each .*got \(2,\)",
        ),
        (
            {"totals": totals_by_sign(torch.tensor([[1, 0, 2]]), torch.tensor([[3, 0, 3]]))},
            r"completions_by_sign needs to add up to totals.num_documents, 2 \(got 3\)",
        ),
        (
            {"totals": totals_by_sign(torch.tensor([[1, 0, 1]]), torch.tensor([[3, 0, 4]]))},
            r"tokens_by_sign needs to add up to totals.num_tokens, 6 \(got 7\)",
        ),
    ],
)
def test_a_class_in_the_place_of_an_object_is_refused_with_the_object(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**CALL, **options)


def test_a_loss_that_reads_no_old_log_probs_takes_none():
    rows = CASE.labels >= 0
    new = CASE.logits.log_softmax(-1)[rows, CASE.labels[rows]]
    expected = -(CASE.advantages[rows] * new).mean()
    given = CALL | {"old_log_probs": None, "aggregation": "token_mean"}
    for options in ({}, {"impl": "reference"}):
        out = policy_loss(**given, loss="reinforce", **options)
        torch.testing.assert_close(out.loss, expected, check_dtype=False)
    with pytest.raises(ValueError, match=r"old_log_probs needs the log-probs .*\(got None\)"):
        policy_loss(**given, loss="grpo")
    kept = CASE.labels.clamp(min=0)[:, None]
    over_kept = "log_softmax over the tokens of sampling_kept_ids alone"
    with pytest.raises(ValueError, match=f"On the policy's own samples they are the {over_kept}"):
        policy_loss(**given, loss="grpo", sampling_kept_ids=kept)
    with pytest.raises(ValueError, match=r"old_log_probs=None needs metrics='none' \(got 'basic'"):
        policy_loss(**given, loss="reinforce", metrics="basic")


def _with_a_default(log_probs, advantages, old_log_probs=None):
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    return -advantages * (log_probs - old).exp()


@pytest.mark.parametrize(
    ("options", "reader"),
    [
        ({"loss": "kimi"}, "loss='kimi'"),
        ({"loss": "reinforce", "score_centering": True}, "score_centering=True of loss='reinf"),
        ({"loss": "reinforce", "correction": "off_policy_mask"}, "correction='off_policy_mask'"),
        (
            {
                "loss": "reinforce",
                "kl": kl.KL("k3_ratio", 0.1),
                "ref_log_probs": CASE.old_log_probs,
            },
            "kl='k3_ratio'",
        ),
        ({"loss": _with_a_default}, "loss='_with_a_default'"),
    ],
)
def test_what_reads_old_log_probs_is_named_where_they_are_missing(options, reader):
    with pytest.raises(ValueError, match=rf"\(got None\): {reader}.* reads them"):
        policy_loss(**CALL | {"old_log_probs": None}, **options)


COUNTED = {"num_documents": 6, "num_tokens": 99, "num_empty_documents": 0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"coefficients": torch.zeros(T)},
            r"coefficients need a loss that depends on other documents .*\(got loss='grpo', which",
        ),
        (
            {"aggregation": "prompt_mean", "group_index": [-1, 0, 0, 0, 0, 0]},
            r"group_index needs numbers from 0 on \(got -1\)",
        ),
        (
            {"aggregation": "prompt_mean"},
            r"aggregation='prompt_mean' needs group_index, each document's group \(got None\)",
        ),
        (
            {
                "aggregation": "prompt_mean",
                "group_index": [0] * 6,
                "totals": StepTotals(**COUNTED),
            },
            r"needs totals that count groups: num_groups and tokens_per_group \(got None",
        ),
    ],
)
def test_what_would_silently_be_another_loss_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        policy_loss(**CALL, loss="grpo", **options)

"""The promise: a step's loss, gradient and metrics do not depend on how the step was cut."""

import pytest
import torch
from builders.losses import AGGREGATIONS, EVERY_LOSS, OBJECTIVES, PARAMETERS, Case, make_case, totals_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtoolkit import policy_loss


def in_pieces(case: Case, pieces: list[list[int]], padding: int, loss: str, aggregation: str, level: str):
    """Loss, gradient by the logits and metrics of the step when each piece holds the given documents, in that order."""
    totals, gradient = totals_of(case), torch.zeros_like(case.logits)
    loss_sum, sums = 0.0, None
    for documents in pieces:
        rows = torch.cat([(case.document_index == d).nonzero()[:, 0] for d in documents])
        logits = torch.cat([case.logits[rows], torch.full((padding, case.logits.shape[1]), torch.nan).double()])
        logits.requires_grad_()
        local = torch.cat([torch.full((int((case.document_index == d).sum()),), i) for i, d in enumerate(documents)])
        nan = torch.full((padding,), torch.nan, dtype=torch.float64)
        out = policy_loss(
            logits,
            torch.cat([case.labels[rows], torch.full((padding,), -1)]),
            torch.cat([case.old_log_probs[rows], nan]),
            torch.cat([case.advantages[rows], nan]),
            torch.cat([local, torch.full((padding,), len(documents))]),
            loss=loss,
            aggregation=aggregation,
            divisor=8.0 if aggregation == "constant" else None,
            group_index=case.group_index[documents],
            num_documents=len(documents),
            totals=totals,
            metrics=level,
            **PARAMETERS[loss],
        )
        out.loss.backward()
        loss_sum += out.loss.item()
        gradient[rows] += logits.grad[: len(rows)]
        sums = out.metric_sums if sums is None else sums.merge(out.metric_sums)
    return loss_sum, gradient, {name: float(value) for name, value in sums.finalize(totals).items()}


def whole(case: Case, loss: str, aggregation: str, level: str):
    logits = case.logits.clone().requires_grad_()
    out = policy_loss(
        logits,
        *case.tensors[1:],
        loss=loss,
        aggregation=aggregation,
        divisor=8.0 if aggregation == "constant" else None,
        group_index=case.group_index,
        metrics=level,
        **PARAMETERS[loss],
    )
    out.loss.backward()
    return out.loss.item(), logits.grad, {name: float(value) for name, value in out.metrics.items()}


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-15)
    assert found[2] == pytest.approx(expected[2], rel=1e-12, abs=1e-14)


CUTS = {
    "halves": [[0, 1, 2], [3, 4, 5]],
    "one per document": [[0], [1], [2], [3], [4], [5]],
    "shuffled": [[4, 0], [5], [3, 2, 1]],
    "reversed whole": [[5, 4, 3, 2, 1, 0]],
}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("loss", "aggregation", "level"), OBJECTIVES)
def test_micro_batches_order_and_padding(loss, aggregation, level, cut, padding):
    case = make_case(seed=12)
    assert_same(
        in_pieces(case, CUTS[cut], padding, loss, aggregation, level),
        whole(case, loss, aggregation, level),
    )


@st.composite
def cut_steps(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    case = make_case(seed=draw(st.integers(0, 999)), lengths=tuple(lengths), vocabulary=draw(st.integers(1, 7)))
    groups = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    dense = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    case = Case(*case.tensors, torch.tensor([dense[g] for g in groups]), len(lengths))
    order = draw(st.permutations(range(len(lengths))))
    ends = sorted(draw(st.sets(st.integers(1, len(lengths) - 1)))) if len(lengths) > 1 else []
    pieces = [list(order[a:b]) for a, b in zip([0, *ends], [*ends, len(lengths)], strict=True)]
    return case, pieces, draw(st.integers(0, 2))


@settings(max_examples=60, derandomize=True)
@given(cut_steps(), st.sampled_from(EVERY_LOSS), st.sampled_from(AGGREGATIONS))
def test_any_step_cut_anyhow(step, loss, aggregation):
    case, pieces, padding = step
    if int((case.labels >= 0).sum()) == 0:
        return
    assert_same(
        in_pieces(case, pieces, padding, loss, aggregation, "with_entropy"),
        whole(case, loss, aggregation, "with_entropy"),
    )

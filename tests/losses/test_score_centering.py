"""Score centering: its identities, and the reference against automatic differentiation."""

from dataclasses import replace

import pytest
import torch
from builders.losses import (
    AGGREGATIONS,
    CENTERED,
    LEVELS,
    PENALTIES,
    TEMPERATURE,
    Choice,
    assert_results_close,
    covering,
    make_case,
    make_head_case,
    relative_error,
    result_of,
)
from torch import Tensor

from pgtoolkit import log_prob_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.families import Cispo, Reinforce
from pgtoolkit.kernels import losses

COLUMNS = 7
FACTORS = {
    "reinforce, centered": lambda r: torch.ones_like(r),
    "cispo, centered": lambda r: r.clamp(0.85, 1.2),
    "cispo, centered, no lower bound": lambda r: r.clamp(max=1.2),
    "icepop, centered": lambda r: r * (r >= 0.85) * (r <= 1.2),
}
CHOICES = [
    Choice(family, None, kl, *others)
    for family, kl, *others in covering(
        [*CENTERED], PENALTIES, AGGREGATIONS, LEVELS, (0.0, 0.3), (False, True)
    )
]


def every_label(width: int, sampler: Tensor | None = None) -> tuple[Tensor, dict[str, object]]:
    """Return logits (V, V) of one policy with each label once, and keywords of the loss, of which
    H are the `width` likeliest tokens of a sampler.

    sampler: its log-probs, (V,).
    """
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, COLUMNS, generator=generator, dtype=torch.float64)
    log_q = (other / TEMPERATURE).log_softmax(-1) if sampler is None else sampler
    top, ids = log_q.topk(width)
    return logits.expand(COLUMNS, -1).clone().requires_grad_(), {
        "labels": torch.arange(COLUMNS),
        "old_log_probs": log_q,
        "advantages": torch.full((COLUMNS,), -1.7, dtype=torch.float64),
        "document_index": torch.zeros(COLUMNS, dtype=torch.int64),
        "aggregation": "token_mean",
        "temperature": TEMPERATURE,
        "sampling_top_ids": ids.expand(COLUMNS, -1),
        "sampling_top_log_probs": top.expand(COLUMNS, -1),
    }


def gradient_of(logits: Tensor, **keywords: object) -> Tensor:
    policy_loss(logits, **keywords).loss.backward()
    return logits.grad


@pytest.mark.parametrize("family", CENTERED)
def test_the_mean_over_the_sampler_is_zero_where_h_is_the_vocabulary(family):
    logits, keywords = every_label(COLUMNS)
    gradient = gradient_of(logits, loss=CENTERED[family], **keywords)
    mean = keywords["old_log_probs"].exp() @ gradient
    assert gradient.abs().max() > 0.05
    assert mean.abs().max() < 1e-15


@pytest.mark.parametrize("width", [1, 3, COLUMNS])
def test_reinforce_gets_the_score_of_the_sampler(width):
    """On H, and as far as the tail of the sampler is proportional to that of the policy."""
    logits, keywords = every_label(width)
    gradient = gradient_of(logits, loss=Reinforce(score_centering=True), **keywords)
    q = keywords["old_log_probs"].exp()
    on_top = keywords["sampling_top_ids"][0]
    pi = (logits.detach()[0] / TEMPERATURE).softmax(-1)
    tail = pi * (1 - q[on_top].sum()) / (1 - pi[on_top].sum()).clamp(min=1e-12)
    modelled = tail.index_copy(0, on_top, q[on_top])
    expected = 1.7 / COLUMNS / TEMPERATURE * (torch.eye(COLUMNS) - modelled)
    assert relative_error(gradient, expected) < 1e-14


@pytest.mark.parametrize("family", CENTERED)
def test_the_term_has_no_gradient_where_the_policy_is_the_sampler(family):
    logits, _ = every_label(1)
    log_pi = (logits.detach()[0] / TEMPERATURE).log_softmax(-1)
    logits, keywords = every_label(3, log_pi)
    centered = gradient_of(logits, loss=CENTERED[family], **keywords)
    logits = logits.detach().clone().requires_grad_()
    top = {name: keywords.pop(name) for name in ("sampling_top_ids", "sampling_top_log_probs")}
    assert top
    plain = gradient_of(logits, loss=replace(CENTERED[family], score_centering=False), **keywords)
    assert relative_error(centered, plain) < 1e-15


@pytest.mark.parametrize("family", CENTERED)
def test_the_reference_agrees_with_automatic_differentiation(family):
    """The formula of arXiv 2609.20807, position by position."""
    case = make_case(seed=12, temperature=TEMPERATURE)
    f = FACTORS[family]
    logits = case.logits.clone().requires_grad_()
    top = case.sampling_top
    trained = (case.labels >= 0).nonzero()[:, 0].tolist()
    terms = []
    for t in trained:
        log_pi = (logits[t] / TEMPERATURE).log_softmax(-1)
        used = top["sampling_top_ids"][t] >= 0
        head = top["sampling_top_ids"][t][used]
        q = top["sampling_top_log_probs"][t][used].exp()
        pi = log_pi[head].exp().detach()
        rho = (1 - q.sum()).clamp(min=1e-6) / (1 - pi.sum()).clamp(min=1e-6)
        a = q * f(pi / q) - rho * f(1 / rho) * pi
        p = log_pi[case.labels[t]]
        policy = f((p - case.old_log_probs[t]).exp()).detach() * p
        terms.append(-case.advantages[t] * (policy - (a * log_pi[head]).sum()))
    loss = torch.stack(terms).mean()
    loss.backward()
    by_reference = Choice(family, aggregation="token_mean").by_reference(case)
    assert abs(by_reference.loss - loss.item()) < 1e-14
    assert relative_error(by_reference.gradient, logits.grad) < 1e-14


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("rows", [None, 4, 1000])
def test_it_matches_the_reference(choice, rows, monkeypatch):
    """With every penalty, from given logits and by the fused head in chunks of `rows`."""
    problem = make_head_case(6 if rows == 4 else 11)
    if rows is not None:
        monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
        result = problem.by_fused_head(choice, 3.0, check_finite=rows == 4)
        assert_results_close(result, problem.by_reference(choice), 1e-11)
        return
    case = problem.case
    expected = problem.by_reference(choice, fused=False)
    for impl in ("torch", "reference"):
        logits = case.logits.clone().requires_grad_()
        out = policy_loss(
            logits, *case.tensors[1:], impl=impl, temperature=TEMPERATURE, **choice.step(case)
        )
        assert_results_close(result_of(out, [logits], 3.0), expected, 1e-11)


def test_tails_are_at_least_a_millionth():
    """H has all but 5e-7 of the policy's mass, so that rho is 1e6 times the sampler's rest."""
    logits = torch.zeros(1, COLUMNS, dtype=torch.float64)
    logits[0, 0] = 16.3
    keywords = {
        "labels": torch.tensor([1]),
        "old_log_probs": torch.tensor([-2.0], dtype=torch.float64),
        "advantages": torch.ones(1, dtype=torch.float64),
        "document_index": torch.tensor([0]),
        "sampling_top_ids": torch.tensor([[0, -1]]),
        "sampling_top_log_probs": torch.tensor([[0.25, 0.0]], dtype=torch.float64).log(),
    }
    pi = logits.softmax(-1)[0]
    alpha = 0.75 / 1e-6
    expected = pi - torch.eye(COLUMNS, dtype=torch.float64)[1]
    expected -= pi * (0.25 - alpha * pi[0])
    # The two parts of alpha in a_0 - pi_0 a_0 are one product.
    expected[0] = pi[0] + 0.25 * (1 - pi[0]) - alpha * pi[0] * pi[1:].sum()
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 0.25)):
        leaf = logits.to(dtype).clone().requires_grad_()
        gradient = gradient_of(leaf, loss=Reinforce(score_centering=True), **keywords)
        # In float32 the log-prob of token 0 is rounded by a sixth of what it leaves to the others.
        assert relative_error(gradient, expected[None]) < tolerance


def test_a_probability_of_zero_leaves_the_gradient_finite():
    """Of the policy at a token of H, and of the sampler at one that is given all the same."""
    logits, keywords = every_label(3)
    ids = keywords["sampling_top_ids"][0]
    log_q = keywords["sampling_top_log_probs"][0].clone()
    unlike = [x for x in range(COLUMNS) if x not in ids.tolist()]
    log_q[2] = -torch.inf
    keywords["sampling_top_log_probs"] = log_q.expand(COLUMNS, -1)
    for name in ("labels", "old_log_probs", "advantages", "document_index"):
        keywords[name] = keywords[name][unlike]
    for name in ("sampling_top_ids", "sampling_top_log_probs"):
        keywords[name] = keywords[name][unlike]
    rows = logits.detach()[unlike].clone()
    rows[:, ids[0]] = -torch.inf
    for family in CENTERED.values():
        leaf = rows.clone().requires_grad_()
        out = policy_loss(leaf, loss=family, metrics="basic", **keywords)
        out.loss.backward()
        assert torch.isfinite(leaf.grad).all()
        assert torch.isfinite(out.metrics["score_centering"])


REFUSED = {
    "another old log-prob": ("sampling_top_log_probs", lambda top: top - 0.3),
    "a token twice": ("sampling_top_ids", lambda ids: ids * 0 + 2),
    "no token": ("sampling_top_ids", lambda ids: ids * 0 - 1),
    "NaN": ("sampling_top_log_probs", lambda top: top * torch.nan),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_the_likeliest_tokens_is_refused(name):
    logits, keywords = every_label(3)
    key, change = REFUSED[name]
    keywords[key] = change(keywords[key])
    with pytest.raises(DataError, match=r"^sampling_top_log_probs .*document 0"):
        policy_loss(logits, loss=Reinforce(score_centering=True), **keywords)


def test_tokens_outside_the_vocabulary_are_refused():
    logits, keywords = every_label(3)
    keywords["sampling_top_ids"] = keywords["sampling_top_ids"] + COLUMNS
    with pytest.raises(DataError, match=r"sampling_top_ids needs tokens of the vocabulary, "):
        policy_loss(logits, loss=Reinforce(score_centering=True), **keywords)


def test_log_probs_above_zero_are_refused():
    logits, keywords = every_label(3)
    keywords["sampling_top_log_probs"] = keywords["sampling_top_log_probs"] * 0 + 0.1
    keywords["old_log_probs"] = keywords["old_log_probs"] * 0
    with pytest.raises(DataError):
        policy_loss(logits, loss=Reinforce(score_centering=True), **keywords)


def test_misfits_are_refused():
    logits, keywords = every_label(3)
    loss = Reinforce(score_centering=True)
    ids = keywords["sampling_top_ids"]
    for changes, message in (
        ({"sampling_top_ids": None}, "need each other"),
        ({"loss": "reinforce"}, "no effect without score centering"),
        ({"sampling_top_ids": ids[:, :2]}, "the shape of sampling_top_ids"),
        ({"sampling_top_ids": ids[:-1]}, "one row of k >= 1 entries per row of logits, 7"),
        ({"sampling_top_ids": ids[0]}, "one row of k >= 1"),
        ({"sampling_top_ids": ids.double()}, "int64"),
        ({"sampling_top_ids": None, "sampling_top_log_probs": None}, "needs logits, and"),
        (
            {"correction": "token_mask", "sampling_log_probs": keywords["old_log_probs"]},
            "beside correction",
        ),
        ({"coefficients": keywords["advantages"]}, "coefficients need a loss that depends on"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_loss(logits, **{"loss": loss, **keywords, **changes})
    labels = keywords["labels"]
    with pytest.raises(ValueError, match="needs logits"):
        log_prob_loss(
            keywords["old_log_probs"],
            keywords["old_log_probs"],
            keywords["advantages"],
            labels * 0,
            labels >= 0,
            loss=loss,
        )
    with pytest.raises(ValueError, match="score_centering needs True or False"):
        Cispo(score_centering=1)

"""`rollout.truncated=mask`: completions that were cut off have weight 0 and still count, against
losses and gradients by loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.losses import AGGREGATIONS, covering
from builders.parallel_runs import run_on_ranks
from builders.parts import LOSS, OPTIMIZER, frozen_copy, short_module, short_policy
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import SHORT, last_of_each_key, metrics_of, module_and_loader, some_documents
from torch import Tensor

from pgtoolkit.document import Document
from pgtoolkit.errors import DataError
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import TokenMask
from pgtoolkit.losses.families import FAMILIES, Reinforce
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule

MASK = "rollout.truncated=mask"
TARGET = 0.1
"""Of the KL; within a fifth of that of the documents below."""
UNCLIPPED = replace(OPTIMIZER, max_grad_norm=None)


def documents() -> list[Document]:
    """Return seven documents: the second, the third and the last, which has no trained token, are
    truncated."""
    result = []
    for number, document in enumerate(some_documents()):
        reference = document.old_log_probs + (0.4 if number % 2 else -0.4)
        is_truncated = number in (1, 2, 6)
        result.append(replace(document, truncated=is_truncated, ref_log_probs=reference))
    return result


def penalized_module(
    aggregation: str, family: str, kernel: str, masks_truncated: bool
) -> PolicyGradientModule:
    divisor = 4 if aggregation == "constant" else None
    loss = Loss(
        FAMILIES[family](),
        aggregation_of(aggregation, divisor),
        metrics="basic",
        entropy_coefficient=0.1,
        kl=KL("k3_ratio", 0.3),
        masks_truncated=masks_truncated,
    )
    policy = short_policy()
    reference = frozen_copy(policy)
    return short_module(loss, kernel, policy=policy, reference=reference, optimizer=UNCLIPPED)


def trained_tokens_of_groups() -> dict[int, int]:
    tokens: dict[int, int] = {}
    for document in documents():
        tokens[document.group] = tokens.get(document.group, 0) + document.num_trained
    return tokens


def loss_and_gradients(
    module: PolicyGradientModule, aggregation: str, family: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss by loops: every document counts, and truncated ones add nothing."""
    tokens_of_group = trained_tokens_of_groups()
    total = torch.zeros((), dtype=torch.float64)
    for document in documents():
        if document.truncated:
            continue
        logits = module.model(input_ids=document.tokens[None]).logits[0, :-1]
        rows = logits[document.loss_mask[1:]].log_softmax(-1)
        new = rows.gather(-1, document.tokens[document.loss_mask][:, None])[:, 0]
        old = document.old_log_probs.double()
        ref = document.ref_log_probs.double()
        advantage = float(document.advantages[0])
        if family == "gspo":
            ratio = (new - old).mean().exp().expand(document.num_trained)
            clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
        else:
            ratio = (new - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
        surrogate = -torch.minimum(ratio * advantage, clipped * advantage)
        penalty = 0.3 * ((ref - new).exp() - (ref - new) - 1) * (new - old).exp()
        negative_entropy = 0.1 * (rows.exp() * rows).sum(-1)
        weight = {
            "sample_mean": 1 / (7 * document.num_trained),
            "prompt_mean": 1 / (3 * tokens_of_group[document.group]),
            "token_mean": 1 / sum(tokens_of_group.values()),
            "constant": 1 / (7 * 4),
        }[aggregation]
        total = total + weight * (surrogate + penalty + negative_entropy).sum()
    return total.detach(), torch.autograd.grad(total, [*module.model.parameters()])


def assert_trains_as_by_loops(
    module: PolicyGradientModule,
    step_documents: list[Document],
    max_tokens: int,
    aggregation: str,
    family: str,
) -> None:
    """Assert that a step of these documents has the loss and the gradients by loops."""
    module.reference = None  # the documents bring its log-probs
    loss, gradients = loss_and_gradients(module, aggregation, family)
    metrics = module.training_step(make_step(step_documents, max_tokens, {}), 0)["metrics"]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-9)
    for parameter, expected in zip(module.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-12)
    assert metrics["num_documents"] == 7
    of_groups = ("token_mean", "prompt_mean")
    assert aggregation not in of_groups or metrics["weight_sum"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("aggregation", "kernel", "family"),
    covering(AGGREGATIONS, ("torch", "auto"), ("grpo", "gspo")),
)
def test_truncated_documents_count_and_have_weight_zero(aggregation, kernel, family):
    module = penalized_module(aggregation, family, kernel, masks_truncated=True)
    assert_trains_as_by_loops(module, documents(), 24, aggregation, family)


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(("family", "max_tokens"), [("grpo", 24), ("gspo", 1000)])
def test_documents_whose_score_failed_have_weight_zero_too(family, max_tokens, kernel):
    """Whatever rollout.truncated is, and in whichever micro-batches they come."""
    module = penalized_module("prompt_mean", family, kernel, masks_truncated=False)
    failed = [
        replace(document, truncated=None, reward=None, score_failed=document.truncated)
        for document in documents()
    ]
    assert_trains_as_by_loops(module, failed, max_tokens, "prompt_mean", family)


def own_function(log_ratio, advantages, ratio, documents, *, bound=1.2):
    """GRPO, with a metric of its own that is a number per document."""
    r = ratio(log_ratio)
    losses = -torch.minimum(r * advantages, r.clamp(0.8, bound) * advantages)
    return losses, {"own": documents.mean(log_ratio) ** 2, "bounds": (0.8, bound)}


def of_group(log_ratio, advantages, ratio, documents, groups):
    """The same of the whole step, with the mean of the group besides."""
    losses, further = own_function(log_ratio, advantages, ratio, documents)
    mean = groups.spread(groups.mean(documents.mean(advantages)))
    return losses * documents.spread(mean.abs() + 1), further


def measured_by_numpy(
    module: PolicyGradientModule, step_documents: list[Document], family: str
) -> dict[str, float]:
    """Return the metrics of a step whose truncated documents count as those without a token."""
    rows = []
    for document in step_documents:
        if document.truncated or document.score_failed or not document.num_trained:
            continue
        with torch.no_grad():
            logits = module.model(input_ids=document.tokens[None]).logits[0, :-1]
        logits = logits[document.loss_mask[1:]].double().numpy()
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        new = log_probs[np.arange(len(logits)), document.tokens[document.loss_mask].numpy()]
        old, ref, sampling, A = (
            vector.double().numpy()
            for vector in (
                document.old_log_probs,
                document.ref_log_probs,
                document.sampling_log_probs,
                document.advantages,
            )
        )
        log_ratio = new - old
        if family == "gspo":
            log_ratio = np.full(len(new), log_ratio.mean())
        ratio = np.exp(log_ratio)
        low, high = {"gspo": (1 - 3e-4, 1 + 4e-4)}.get(family, (0.8, 1.2))
        factor = np.exp(old - sampling)
        outside = (factor < 0.5) | (factor > 1.2)
        rows.append(
            {
                "new_logprobs": new,
                "old_logprobs": old,
                "advantage": A,
                "ratio_new_old": ratio,
                "kl_new_old": ratio - log_ratio - 1,
                "clipped_ratio_fraction": (ratio < low) | (ratio > high),
                "kl_ref": np.exp(ref - new) - (ref - new) - 1,
                "kl_penalty": np.exp(ref - new) - (ref - new) - 1,
                "entropy": -(np.exp(log_probs) * log_probs).sum(-1),
                "own": np.full(len(new), (new - old).mean() ** 2),
                "difference_old_sampling": np.abs(old - sampling),
                "correction_factor": np.where(outside, 0.0, factor),
                "correction_outside_fraction": outside,
            }
        )
    expected = {
        name: sum(row[name].mean() for row in rows) / len(step_documents) for name in rows[0]
    }
    together = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    v = np.ones(len(together["advantage"]))
    if family == "gspo":
        v = np.concatenate(
            [np.full(len(row["advantage"]), 1 / len(row["advantage"])) for row in rows]
        )
    rho = together["ratio_new_old"]
    factors = together["correction_factor"]
    return expected | {
        "num_tokens": len(rho),
        "num_documents": len(step_documents),
        "num_empty_documents": len(step_documents) - len(rows),
        "ratio_new_old_sum": (v * rho).sum(),
        "effective_sample_size": (v * rho).sum() ** 2 / (v.sum() * (v * rho**2).sum()),
        "max_ratio_new_old": rho.max(),
        "min_ratio_new_old": rho.min(),
        "max_advantage": together["advantage"].max(),
        "min_advantage": together["advantage"].min(),
        "max_difference_old_sampling": together["difference_old_sampling"].max(),
        "max_correction_factor": factors.max(),
        "correction_effective_sample_size": factors.sum() ** 2 / (len(rho) * (factors**2).sum()),
    }


def with_sampling(step_documents: list[Document]) -> list[Document]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for document in step_documents:
        noise = 0.2 * torch.randn(document.num_trained, generator=generator)
        made.append(replace(document, sampling_log_probs=document.old_log_probs - noise))
    return made


def with_extremes(step_documents: list[Document]) -> list[Document]:
    """Give the truncated documents the largest and the smallest advantage of all."""
    extreme = {1: 9.0, 2: -9.0}
    return [
        replace(document, advantages=torch.full_like(document.advantages, extreme[number]))
        if number in extreme
        else document
        for number, document in enumerate(step_documents)
    ]


def but_extremes(totals, *, document_index, tokens_per_document, mask, advantages, **_):
    """Weigh by 1 / (D N_d), and by 0 where `with_extremes` has changed the advantage."""
    counts = torch.cat([tokens_per_document, tokens_per_document.new_ones(1)])
    index = torch.where(mask, document_index, len(tokens_per_document))
    weights = 1 / (totals.num_documents * counts[index].clamp(min=1)).double()
    return torch.where(mask & (advantages.abs() < 9), weights, 0.0)


@pytest.mark.parametrize(
    ("family", "kernel", "max_tokens", "mode", "left_out"),
    covering(
        ("grpo", "gspo", "reinforce", "own", "of_group"),
        ("torch", "auto"),
        (24, 1000),
        ("sample_mean", "prompt_mean"),
        ("truncated", "failed", "reducer"),
    ),
)
def test_metrics_count_a_document_of_weight_zero_as_one_without_a_trained_token(
    family, kernel, max_tokens, mode, left_out
):
    """For each loss, beside corrections and penalties, in each cut of the step."""
    functions = {"own": own_function, "of_group": of_group}
    families = {name: FunctionLoss(function) for name, function in functions.items()}
    aggregation = aggregation_of(mode)
    if left_out == "reducer":
        aggregation = aggregation_of(mode, reducer=but_extremes)
    loss = Loss(
        families.get(family) or FAMILIES[family](),
        aggregation,
        metrics="with_entropy",
        correction=None if family == "of_group" else TokenMask(low=0.5, high=1.2),
        kl=KL("k3", 0.3),
        masks_truncated=left_out == "truncated",
        measures_penalty=True,
    )
    step_documents = with_extremes(with_sampling(documents()))
    if left_out == "failed":
        step_documents = [
            replace(document, truncated=None, reward=None, score_failed=document.truncated)
            for document in step_documents
        ]
    module = short_module(loss, kernel, optimizer=UNCLIPPED)
    module.adaptive_kl = AdaptiveKL(target=TARGET, horizon=100, coefficient=0.3)
    expected = measured_by_numpy(module, step_documents, family)
    metrics = module.training_step(make_step(step_documents, max_tokens, {}), 0)["metrics"]
    absent = set() if family in functions else {"own"}
    if family == "of_group":
        absent |= {name for name in expected if "correction" in name}
    if family == "reinforce":
        expected["clipped_ratio_fraction"] = 0
    names = expected.keys() - absent
    assert {name: metrics[name] for name in names} == pytest.approx(
        {name: float(expected[name]) for name in names}, rel=1e-6, abs=1e-12
    )
    # The KL that moves the coefficient is the mean over the four documents that have one.
    kl = expected["kl_penalty"] * 7 / 4
    moved = 0.3 * (1 + min(0.2, max(-0.2, kl / TARGET - 1)) * 4 / 100)
    assert module.adaptive_kl.coefficient == pytest.approx(moved)
    assert abs(kl / TARGET - 1) < 0.2


def test_a_micro_batch_without_documents_has_flags_of_none():
    """Ranks have one where another of them has more documents; it is inverted, so it is bool."""
    step = make_step(documents()[:1], 1000, {}, data_rank=1, data_size=2)
    (micro_batch,) = step.micro_batches
    assert (~micro_batch.truncated).tolist() == []


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("kl", ["full_reverse", "full_forward"])
def test_a_penalty_over_the_vocabulary_leaves_truncated_documents_out(kl, kernel):
    """Loss and gradients are those of the other documents, under the totals of all."""
    loss = replace(LOSS, kl=KL(kl, 0.3), masks_truncated=True)
    policy = short_policy()
    module = short_module(loss, kernel, policy=policy, reference=frozen_copy(policy))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.reference.model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    step = make_step(documents(), 1000, {})
    kept = [document for document in documents() if not document.truncated]
    results = []
    for micro_batch in (step.micro_batches[0], make_step(kept, 1000, {}).micro_batches[0]):
        module.zero_grad()
        output = module.micro_batch_loss(micro_batch.counted(), step.totals)
        output.loss.backward()
        gradients = [weight.grad.clone() for weight in module.model.parameters()]
        results.append((output.loss.detach(), gradients))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-11)
    _, gradients = results[0]
    assert gradients[0].abs().max() > 1e-4


REINFORCE = (
    "loss=reinforce",
    "aggregation=token_mean",
    "aggregation.divisor=null",
    "optimizer.max_grad_norm=null",
)


def first_step_and_gradient(*overrides: str) -> tuple[list[Document], Tensor]:
    """Return the documents of the first step, and the gradient of the head in it."""
    module, loader = module_and_loader(*last_of_each_key(*SHORT, *REINFORCE, *overrides))
    step = next(iter(loader))
    loader.source.close()
    module.training_step(step, 0)
    return step.documents, module.policy.head.weight.grad.clone()


def test_the_gradient_of_sampled_completions_is_that_of_the_finished_ones():
    """The rewards of truncated completions stay in the baseline: advantages do not change."""
    plain, plain_gradient = first_step_and_gradient()
    masked, gradient = first_step_and_gradient(MASK)
    for document, expected in zip(masked, plain, strict=True):
        assert torch.equal(document.tokens, expected.tokens)
        assert document.reward == expected.reward
        assert document.truncated == expected.truncated
        assert torch.equal(document.advantages, expected.advantages)
    assert any(document.truncated and float(document.advantages[0]) for document in masked)

    loss = Loss(Reinforce(), aggregation_of("token_mean"))
    module = short_module(loss, optimizer=UNCLIPPED)
    without_advantage = [
        replace(document, advantages=document.advantages * (not document.truncated))
        for document in masked
    ]
    module.training_step(make_step(without_advantage, 1000, {}), 0)
    expected = module.policy.head.weight.grad
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    assert (plain_gradient - gradient).abs().max() > 1e-3


def test_two_ranks_mask_the_same_completions_as_one(tmp_path):
    settings = [*SHORT, "loss=gspo", MASK, "trainer.max_steps=3", "trainer.checkpoint_every=3"]
    single = metrics_of(run_on_ranks(tmp_path / "single", settings))
    two_ranks = metrics_of(run_on_ranks(tmp_path / "two ranks", settings, data_parallel=2))
    for row, expected in zip(two_ranks, single, strict=True):
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert expected["truncated_fraction"] > 0.2
        assert 0 < expected["num_empty_documents"] < expected["num_documents"]
        for name in ("num_tokens", "num_empty_documents", "new_logprobs", "max_advantage"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4), name


def test_recorded_rows_must_say_whether_they_are_truncated(tmp_path):
    rows = [
        good_row(number, number // 2, token_ids=[1, 2, 3, 4, 5], truncated=number == 1)
        for number in range(4)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = [
        "tracking=none",
        "trainer.device=cpu",
        "rollout=recorded",
        f"rollout.path={path}",
        MASK,
        "accumulation.docs_per_step=4",
    ]
    module, loader = module_and_loader(*settings)
    (micro_batch,) = next(iter(loader)).micro_batches
    assert micro_batch.truncated.tolist() == [False, True, False, False]
    assert module.loss.masks_truncated
    del rows[2]["truncated"]
    write_jsonl(path, rows)
    with pytest.raises(DataError, match=r"rows.jsonl:3:truncated: is missing"):
        module_and_loader(*settings)

"""`rollout.truncated=mask`: completions that were cut off have weight 0 and still count, against
losses and gradients by loops."""

from dataclasses import replace

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
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import FAMILIES, Reinforce
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule

MASK = "rollout.truncated=mask"
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
    """Assert that a step of these documents has the loss and the gradients by loops, and counts
    all documents and tokens."""
    module.reference = None  # the documents bring its log-probs
    loss, gradients = loss_and_gradients(module, aggregation, family)
    metrics = module.training_step(make_step(step_documents, max_tokens, {}), 0)["metrics"]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-9)
    for parameter, expected in zip(module.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-12)
    assert metrics["num_documents"] == 7
    assert metrics["num_tokens"] == sum(trained_tokens_of_groups().values())


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

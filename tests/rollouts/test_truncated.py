"""Completions that were cut off: `rollout.truncated=mask` gives them weights of 0, and counts
them."""

from dataclasses import replace

import pytest
import torch
from builders.parallel_runs import run_on_ranks
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import SHORT, last_of_each_key, metrics_of, module_and_loader, some_documents

from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.steps import make_step

BESIDE = ("kl=k3_ratio", "kl.coefficient=0.3", "kl.reference=initial", "entropy.coefficient=0.1")
CHOSEN = (
    "rollout.truncated=mask",
    "optimizer.max_grad_norm=null",
    "accumulation.max_tokens=24",
    *BESIDE,
)


def documents():
    """The second, the third and the last, which trains no token, were cut off."""
    found = []
    for number, document in enumerate(some_documents()):
        reference = document.old_log_probs + (0.4 if number % 2 else -0.4)
        found.append(replace(document, truncated=number in (1, 2, 6), ref_log_probs=reference))
    return found


def by_loops(module, mode, family):
    """The loss and its gradients: every document counts, and those that were cut off add
    nothing."""
    step, total = documents(), 0
    tokens_of_group = {document.group: 0 for document in step}
    for document in step:
        tokens_of_group[document.group] += document.num_trained
    for document in step:
        if document.truncated:
            continue
        logits = module.model(input_ids=document.tokens[None]).logits[0, :-1][
            document.loss_mask[1:]
        ]
        rows = logits.log_softmax(-1)
        new = rows.gather(-1, document.tokens[document.loss_mask][:, None])[:, 0]
        old, advantage, number = (
            document.old_log_probs.double(),
            float(document.advantages[0]),
            document.num_trained,
        )
        ratio, low, high = (new - old).exp(), 0.8, 1.2
        if family == "gspo":
            ratio, low, high = (new - old).mean().exp().expand(number), 1 - 3e-4, 1 + 4e-4
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        apart = document.ref_log_probs.double() - new
        penalty = 0.3 * (apart.exp() - apart - 1) * (new - old).exp()
        bonus = 0.1 * (rows.exp() * rows).sum(-1)
        weight = {
            "sample_mean": 1 / (7 * number),
            "prompt_mean": 1 / (3 * tokens_of_group[document.group]),
            "token_mean": 1 / sum(tokens_of_group.values()),
            "constant": 1 / (7 * 4),
        }[mode]
        total = total + weight * (surrogate + penalty + bonus).sum()
    return total.detach(), torch.autograd.grad(total, [*module.model.parameters()])


@pytest.mark.parametrize("family", ["grpo", "gspo"])
@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_every_count_stays_and_every_weight_is_zero(mode, kernel, family):
    divisor = "aggregation.divisor=4" if mode == "constant" else "aggregation.divisor=null"
    module, loader = module_and_loader(
        *last_of_each_key(
            *SHORT, *CHOSEN, f"loss={family}", f"kernel={kernel}", f"aggregation={mode}", divisor
        )
    )
    loader.source.close()
    module.reference = None  # the documents bring its log-probs
    loss, gradients = by_loops(module, mode, family)
    step = make_step(documents(), 24, {})
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-9)
    for parameter, expected in zip(module.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-12)
    assert (metrics["num_documents"], metrics["num_tokens"]) == (
        7,
        sum(d.num_trained for d in documents()),
    )


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(("family", "max_tokens"), [("grpo", 24), ("gspo", 1000)])
def test_those_that_nobody_could_score_have_weight_zero_too(family, max_tokens, kernel):
    """Whatever rollout.truncated says, in whichever micro-batches they come."""
    chosen = [*CHOSEN[1:], "aggregation=prompt_mean", "aggregation.divisor=null"]
    module, loader = module_and_loader(
        *last_of_each_key(*SHORT, *chosen, f"loss={family}", f"kernel={kernel}")
    )
    loader.source.close()
    module.reference = None
    loss, gradients = by_loops(module, "prompt_mean", family)
    failed = [
        replace(d, truncated=None, reward=None, score_failed=d.truncated) for d in documents()
    ]
    metrics = module.training_step(make_step(failed, max_tokens, {}), 0)["metrics"]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-9)
    for parameter, expected in zip(module.model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-12)
    assert (metrics["num_documents"], metrics["num_tokens"]) == (
        7,
        sum(d.num_trained for d in documents()),
    )


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["full_reverse", "full_forward"])
def test_a_penalty_over_the_whole_vocabulary_leaves_them_out(kind, kernel):
    """As a piece of the step without these documents, under the totals of all, has it."""
    chosen = (
        f"kl={kind}",
        "kl.coefficient=0.3",
        "kl.reference=initial",
        "loss=gspo",
        "rollout.truncated=mask",
    )
    module, loader = module_and_loader(*last_of_each_key(*SHORT, *chosen, f"kernel={kernel}"))
    loader.source.close()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.reference.model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    whole = make_step(documents(), 1000, {})
    kept = [document for document in documents() if not document.truncated]
    found = []
    for micro_batch in (whole.micro_batches[0], make_step(kept, 1000, {}).micro_batches[0]):
        module.zero_grad()
        out = module.micro_batch_loss(micro_batch.counted(), whole.totals)
        out.loss.backward()
        found.append((out.loss.detach(), [p.grad.clone() for p in module.model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-11)
    assert found[0][1][0].abs().max() > 1e-4


def test_of_completions_that_are_sampled_the_gradient_is_that_of_the_finished_ones():
    """Their rewards stay in the baseline: the advantages are those of all."""
    chosen = (
        "loss=reinforce",
        "aggregation=token_mean",
        "aggregation.divisor=null",
        "optimizer.max_grad_norm=null",
    )
    gradients, found = {}, {}
    for value in ("train", "mask"):
        module, loader = module_and_loader(
            *last_of_each_key(*SHORT, *chosen, f"rollout.truncated={value}")
        )
        step = next(iter(loader))
        loader.source.close()
        found[value] = [
            (d.tokens.tolist(), d.reward, d.truncated, float(d.advantages[0]))
            for d in step.documents
        ]
        module.training_step(step, 0)
        gradients[value] = module.policy.head.weight.grad.clone()
    assert found["train"] == found["mask"]
    assert any(cut and advantage for _, _, cut, advantage in found["mask"])
    silent = [replace(d, advantages=d.advantages * (not d.truncated)) for d in step.documents]
    module, _ = module_and_loader(*last_of_each_key(*SHORT, *chosen))
    module.training_step(make_step(silent, 1000, {}), 0)
    torch.testing.assert_close(
        gradients["mask"], module.policy.head.weight.grad, rtol=0, atol=1e-12
    )
    assert (gradients["train"] - gradients["mask"]).abs().max() > 1e-3


def test_two_ranks_leave_out_the_same(tmp_path):
    chosen = [*SHORT, "loss=gspo", "rollout.truncated=mask", "trainer.max_steps=3"]
    runs = [
        run_on_ranks(tmp_path / str(len(sizes)), chosen, **sizes)
        for sizes in ({}, {"data_parallel": 2})
    ]
    rows = [metrics_of(folder) for folder in runs]
    for one, two in zip(*rows, strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
        assert one["truncated_fraction"] > 0.2


def test_recorded_rows_have_to_say_it_and_are_left_out(tmp_path):
    rows = [good_row(i, i // 2, token_ids=[1, 2, 3, 4, 5], truncated=i == 1) for i in range(4)]
    chosen = ["tracking=none", "trainer.device=cpu", "rollout=recorded", "rollout.truncated=mask"]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    module, loader = module_and_loader(
        *chosen, f"rollout.path={path}", "accumulation.docs_per_step=4"
    )
    (micro_batch,) = next(iter(loader)).micro_batches
    assert micro_batch.truncated.tolist() == [False, True, False, False]
    assert module.loss.masks_truncated
    del rows[2]["truncated"]
    with pytest.raises(DataError, match=r"rows.jsonl:3:truncated: is missing"):
        module_and_loader(*chosen, f"rollout.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}")

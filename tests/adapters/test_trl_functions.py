"""Functions as losses inside TRL's trainer: the weights after two real steps on a batch of
completions are those of plain loops, however TRL cuts a step into micro-batches.

Everything is in float64 but for TRL's rewards and advantages, and what models round inside."""

import copy
import functools
import re

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl")

from adapters import trl_runs
from builders.models import small_llama
from builders.quick import with_slow_rest
from losses import group_formulas

RATE = 0.5
CUTS = {
    "one": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "four": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}
STEPS = {"num_iterations": 2, "max_steps": 2, "learning_rate": RATE, "max_grad_norm": 1e9}


def soft_clip(log_ratio, advantages, ratio, *, softness=0.3):
    """-softness tanh((r - 1) / softness) A"""
    return -softness * torch.tanh((ratio(log_ratio) - 1) / softness) * advantages


def by_rewards(log_ratio, ratio, rewards, group_rewards, documents):
    return -ratio(documents.mean(log_ratio)) * documents.first(rewards - group_rewards)


def above_the_median(log_probs, log_ratio, advantages, step):
    is_above = log_probs.detach() >= step.quantile(log_probs.detach(), 0.5)
    return -advantages * log_ratio.exp() * is_above


class Completion:
    """One completion. prompt, tokens: ids. old: (N,) log-probs."""

    def __init__(self, prompt, tokens, advantage):
        self.prompt = tuple(prompt)
        self.tokens = tokens
        self.advantage = advantage
        (self.reward,) = trl_runs.reward([tokens])
        self.old = None


def soft_clip_by_loops(completions, new, groups):
    total = 0.0
    num_tokens = sum(len(one.tokens) for one in completions)
    for one, vector in zip(completions, new, strict=True):
        for p, o in zip(vector, one.old, strict=True):
            r = (p - o).exp()
            total -= 0.2 * torch.tanh((r - 1) / 0.2) * one.advantage / num_tokens
    return total


def by_rewards_by_loops(completions, new, groups):
    total = 0.0
    for members in groups:
        mean = sum(completions[d].reward for d in members) / len(members)
        for d in members:
            log_ratio = sum(p - o for p, o in zip(new[d], completions[d].old, strict=True))
            ratio = (log_ratio / len(new[d])).exp()
            total -= ratio * (completions[d].reward - mean) / len(completions)
    return total


def tpo_by_loops(completions, new, groups):
    losses = [
        group_formulas.tpo(
            [new[d] for d in members],
            [completions[d].old for d in members],
            [],
            [completions[d].reward for d in members],
        )
        for members in groups
    ]
    return sum(losses) / len(losses)


def above_the_median_by_loops(completions, new, groups):
    everything = sorted(float(p.detach()) for vector in new for p in vector)
    middle = 0.5 * (len(everything) - 1)
    low = everything[int(middle)]
    high = everything[min(int(middle) + 1, len(everything) - 1)]
    median = low + (middle - int(middle)) * (high - low)
    total = 0.0
    for one, vector in zip(completions, new, strict=True):
        for p, o in zip(vector, one.old, strict=True):
            if float(p.detach()) >= median:
                total -= one.advantage * (p - o).exp() / (len(vector) * len(completions))
    return total


LOSSES = {
    "tpo": ("tpo", "prompt_mean", tpo_by_loops),
    "token": (functools.partial(soft_clip, softness=0.2), "token_mean", soft_clip_by_loops),
    "document": (by_rewards, "sample_mean", by_rewards_by_loops),
    "step": (above_the_median, "sample_mean", above_the_median_by_loops),
}


def completions_of(trainer):
    """Return the completions that the trainer has trained on."""
    made = []
    for piece in trainer._buffered_inputs:
        for row, trained in enumerate(piece["completion_mask"].bool()):
            prompt = piece["prompt_ids"][row][piece["prompt_mask"][row].bool()].tolist()
            tokens = piece["completion_ids"][row][trained].tolist()
            made.append(Completion(prompt, tokens, float(piece["advantages"][row])))
    return made


def log_probs_of(trainer, model):
    """Return (N,) log-probs of each completion, from batches as TRL pads them."""
    vectors = []
    for piece in trainer._buffered_inputs:
        ids = torch.cat([piece["prompt_ids"], piece["completion_ids"]], 1)
        attention = torch.cat([piece["prompt_mask"], piece["completion_mask"]], 1)
        width = piece["completion_ids"].shape[1]
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        rows = logits.log_softmax(-1).gather(2, piece["completion_ids"][..., None])[..., 0]
        masks = piece["completion_mask"].bool()
        vectors += [row[mask] for row, mask in zip(rows, masks, strict=True)]
    return vectors


def trained_by_loops(trainer, model, loss):
    """Return the weights after two steps of gradient descent on the trainer's completions, and the
    losses before them."""
    completions = completions_of(trainer)
    prompts = sorted({one.prompt for one in completions})
    groups = [[d for d, one in enumerate(completions) if one.prompt == p] for p in prompts]
    losses = []
    for one, vector in zip(completions, log_probs_of(trainer, model), strict=True):
        one.old = vector.detach()
    for _ in range(2):
        value = loss(completions, log_probs_of(trainer, model), groups)
        losses.append(value.item())
        gradients = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight -= RATE * gradient
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]), losses


@pytest.mark.parametrize(
    ("name", "cut"), with_slow_rest([(name, cut) for name in LOSSES for cut in CUTS], 2)
)
def test_a_function_trains_the_weights_of_plain_loops_however_the_step_is_cut(name, cut):
    loss, aggregation, by_loops = LOSSES[name]
    start = small_llama().double()
    options = {"loss": loss, "aggregation": aggregation, "fused_head": cut == "four"}
    made = trl_runs.trainer(copy.deepcopy(start), options, STEPS | CUTS[cut])
    weights, log = trl_runs.trained(made)
    exact, losses = trained_by_loops(made, start, by_loops)
    before = torch.cat([x.detach().flatten() for x in small_llama().double().parameters()])
    assert float((weights - exact).norm() / (exact - before).norm()) < 1e-5
    assert [row["loss"] for row in log[:2]] == pytest.approx(losses, abs=1e-6)
    assert [row["pgtk/num_documents"] for row in log[:2]] == [8, 8]
    assert ("pgtk/largest_group_probability" in log[0]) == (name == "tpo")


REFUSED = [
    (
        {"loss": "tpo", "aggregation": "sample_mean"},
        {"steps_per_generation": 4},
        "GRPOConfig.steps_per_generation=4 needs the number of gradient_accumulation_steps (2) "
        "with this loss",
    ),
    (
        {"loss": "tpo", "aggregation": "sample_mean"},
        {"use_vllm": True},
        "GRPOConfig.vllm_importance_sampling_correction=True needs a loss that does not ask for "
        "groups (got tpo)",
    ),
    (
        {"loss": lambda log_probs: log_probs - log_probs.mean(), "aggregation": "sample_mean"},
        {},
        "the loss function <lambda> gives a token another loss where the step is cut",
    ),
]


@pytest.mark.parametrize(("ours", "changes", "message"), REFUSED, ids=["steps", "vllm", "cut"])
def test_what_a_function_cannot_have_is_refused(ours, changes, message, tmp_path):
    small_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        trl_runs.trainer(str(tmp_path), ours, changes)


def test_a_completion_that_nothing_has_scored_has_weight_0_and_no_part_in_its_group():
    """The others are those of a group without it, though it is counted."""
    made = trl_runs.trainer(
        small_llama().double(), {"loss": by_rewards, "aggregation": "sample_mean"}, STEPS
    )
    rewards = torch.tensor([[1.0], [torch.nan], [2.0], [3.0], [0.0], [0.0], [0.0], [4.0]])
    made.reward_funcs = [lambda completion_ids, **_: rewards[:, 0].tolist()]
    made.model.train()
    batch = made._generate_and_score_completions([{"prompt": f"{n // 4}="} for n in range(8)])
    assert batch["is_excluded"].tolist() == [False, True] + 6 * [False]
    assert batch["group_rewards"].tolist() == 4 * [2.0] + 4 * [1.0]

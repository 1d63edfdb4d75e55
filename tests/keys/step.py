"""Rows of `config/test_keys.py`: what a step computes, and its update."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from keys import (
    LogitsMade,
    key,
    logits_of,
    loss_as_specified,
    module_of,
    recorded,
    some_documents,
    step_of,
)
from pgtoolkit.batch import Document
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Divergence, Grpo

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKEN_FAMILIES = [name for name, family in FAMILIES.items() if family.scope == "token"]
V = 12  # the digits, "=" and the end


@key(*(f"loss/{name}.name" for name in FAMILIES))
def loss_name():
    losses = [
        loss_as_specified([f"loss={name}"], loss=name, **vars(FAMILIES[name]()))
        for name in FAMILIES
    ]
    assert len({round(loss, 4) for loss in losses}) == len(losses)


OTHERS = {
    **{
        "epsilon_low": (0.05, 0.7),
        "epsilon_high": (0.05, 0.7),
        "dual_clip": (1.05, 1.5),
    },
    **{
        "delta_low": (0.01, 0.1),
        "delta_high": (0.01, 0.1),
        "ratio_cap": (0.8, 1.5),
    },
    "divergence": tuple(Divergence),
    **dict.fromkeys(("temperature_positive", "temperature_negative", "tau"), (0.2, 3.0)),
    **dict.fromkeys(
        ("power_positive", "decay_positive", "power_negative", "decay_negative"), (0.5, 4.0)
    ),
}


@key(*(f"loss/{name}.{one.name}" for name, family in FAMILIES.items() for one in fields(family)))
def parameter_of_a_family(key):
    """Each of its values acts as the specification says, and all of them give other losses or
    gradients."""
    group, name = key.split(".")
    family, found = group.split("/")[1], set()
    wide = (
        {"epsilon_low": 0.3, "epsilon_high": 0.3, "dual_clip": None}
        if family in ("grpo", "gspo", "cispo")
        else {}
    )
    wide |= {"delta_low": 0.02, "delta_high": 0.02} if name == "divergence" else {}
    defaults = vars(FAMILIES[family]()) | {
        one: value for one, value in wide.items() if one in vars(FAMILIES[family]())
    }
    for value in OTHERS[name]:
        given = defaults | {name: value}
        typed = [
            f"loss.{one}={'null' if number is None else number}" for one, number in given.items()
        ]
        found.add(round(loss_as_specified([f"loss={family}", *typed], loss=family, **given), 8))
    assert len(found) == len(OTHERS[name])


@dataclass(frozen=True)
class Scaled(Grpo):
    """GRPO's surrogate times a number."""

    scale: float = 1.0

    def surrogate(self, log_ratio, advantages, log_probs):
        return tuple(self.scale * x for x in super().surrogate(log_ratio, advantages, log_probs))


@key("loss/custom.name", "loss/custom.path", "loss/custom.options")
def own_family():
    step, losses = step_of(some_documents()), []
    own = ["loss=custom", "loss.path=keys.step.Scaled", "loss.options.epsilon_high=0.1"]
    for chosen in (own, [*own, "loss.options.scale=3"], ["loss=grpo", "loss.epsilon_high=0.1"]):
        losses.append(module_of(*chosen).training_step(step, 0)["metrics"]["loss"])
    assert losses == [losses[2], pytest.approx(3 * losses[2], rel=1e-12), losses[2]]


def sampled_documents() -> list[Document]:
    """With sampling log-probs from 1 above to 1 below the old ones, in the mean of each document
    also."""
    draw, documents = torch.Generator().manual_seed(4), some_documents()
    return [
        replace(
            d,
            sampling_log_probs=d.old_log_probs
            + 0.3 * torch.randn(len(d.old_log_probs), generator=draw)
            + shift,
        )
        for d, shift in zip(documents, (-0.3, 0.2, 0.05, -0.1, -0.6, 0.6), strict=True)
    ]


def corrected_loss(name: str, **changes) -> float:
    """The loss under a correction, once it is seen to be the specification's."""
    settings = vars(CORRECTIONS[name]()) | changes
    typed = [
        f"correction.{one}={'null' if value is None else value}" for one, value in settings.items()
    ]
    choices = {"correction": name, "correction_settings": settings}
    return loss_as_specified([f"correction={name}", *typed], sampled_documents(), **choices)


@key("correction/none.name", *(f"correction/{name}.name" for name in CORRECTIONS))
def correction_name():
    losses = [loss_as_specified([], sampled_documents()), *map(corrected_loss, CORRECTIONS)]
    assert len({round(loss, 8) for loss in losses}) == len(losses)


BOUNDS = {"low": (None, 0.5, 0.8, 0.95), "high": (1.0, 9.0), "threshold": (0.1, 2.0)}
BOUNDS |= {"mean": ("product", "geometric"), "factor": ("document", "token", "one")}
WORST = {"factor": "one", "high": 1.5}


@key(
    *(f"correction/{name}.{one.name}" for name, kind in CORRECTIONS.items() for one in fields(kind))
)
def parameter_of_a_correction(key):
    """Each value acts as the specification says, and they give two or three losses at least."""
    group, one = key.split(".")
    name = group.split("/")[1]
    wide = {"low": None, "high": 9.0} if hasattr(CORRECTIONS[name], "high") else {}
    values = (*BOUNDS[one], "worst") if (name, one) == ("sequence_mask", "mean") else BOUNDS[one]
    found = {
        round(corrected_loss(name, **wide | {one: value} | (WORST if value == "worst" else {})), 9)
        for value in values
    }
    assert len(found) >= min(3, len(values))


@key("aggregation.mode")
def aggregation(tmp_path):
    """The loss; and where steps end: prompt_mean needs all documents of a prompt in one, of which
    there are two."""
    divisors = {"constant": 4, "sample_mean": None, "prompt_mean": None, "token_mean": None}
    losses = [
        loss_as_specified([f"aggregation={a}"], aggregation=a, divisor=d)
        for a, d in divisors.items()
    ]
    assert len({round(loss, 6) for loss in losses}) == 4
    for chosen, expected in (("token_mean", [3, 3, 3, 1]), ("prompt_mean", [4, 4, 2])):
        steps = recorded(tmp_path, f"aggregation={chosen}", "accumulation.docs_per_step=3")
        assert [len(step) for step in steps] == expected


@key("aggregation.divisor")
def divisor():
    small, large = (loss_as_specified([f"aggregation.divisor={d}"], divisor=d) for d in (3, 12))
    assert small == pytest.approx(4 * large, rel=1e-12)


def ten_per_token(totals, *, mask, document_index, tokens_per_document, group_index):
    return torch.full(mask.shape, 10 / totals.num_tokens)


@key("aggregation.reducer")
def reducer():
    step, losses = step_of(some_documents()), []
    for chosen in ("aggregation.reducer=keys.step.ten_per_token", "aggregation=token_mean"):
        losses.append(module_of(chosen).training_step(step, 0)["metrics"]["loss"])
    assert losses[0] == pytest.approx(10 * losses[1], rel=1e-6)  # weights of the reducer in float32


@key("metrics.level")
def level():
    found = {}
    for chosen in ("none", "basic", "with_entropy"):
        found[chosen] = module_of(f"metrics={chosen}").training_step(step_of(some_documents()), 0)[
            "metrics"
        ]
    more = [
        found["basic"].keys() - found["none"].keys(),
        found["with_entropy"].keys() - found["basic"].keys(),
    ]
    assert {"ratio_new_old", "kl_new_old", "clipped_ratio_fraction", "max_advantage"} <= more[0]
    assert more[1] == {"entropy"}
    module, means = module_of(), []
    for document in some_documents():
        log_probs = logits_of(module, document)[:-1].log_softmax(-1)
        means.append((-(log_probs.exp() * log_probs).sum(-1))[document.loss_mask[1:]].mean().item())
    assert found["with_entropy"]["entropy"] == pytest.approx(sum(means) / len(means), rel=1e-10)


def losses_and_logits(*choices: str, vocabulary: int = V):
    """Of each choice of overrides: loss and logits made by one micro-batch; of a vocabulary as
    large as asked for."""
    for overrides in choices:
        module = module_of(*overrides.split())
        if vocabulary != V:
            torch.manual_seed(0)
            module.model.set_output_embeddings(
                nn.Linear(8, vocabulary, bias=False, dtype=torch.float64)
            )
        step = step_of(some_documents())
        with LogitsMade(vocabulary) as logits:
            out = module.micro_batch_loss(step.micro_batches[0], step.totals)
        yield out, logits


@key(*(f"loss/{name}.num_splits" for name in (*TOKEN_FAMILIES, "custom")))
def splits(key):
    num_tokens = sum(document.num_tokens for document in some_documents())
    chosen = f"kernel=torch loss={key.split('.')[0].split('/')[1]}"
    chosen += " loss.path=keys.step.Scaled" if chosen.endswith("custom") else ""
    whole, third = losses_and_logits(chosen, f"{chosen} loss.num_splits=3")
    assert whole[1].rows == [num_tokens]
    # Only trained tokens are multiplied, and first those without a gradient.
    assert sum(third[1].rows) < num_tokens
    assert max(third[1].rows) == num_tokens // 3
    assert third[0].loss.item() == pytest.approx(whole[0].loss.item(), rel=1e-12)


@key("kernel.logits_memory_mb")
def logits_memory():
    """A row of 20000 logits in float64 takes 0.153 MiB."""
    chosen = [f"kernel=fused_linear kernel.logits_memory_mb={mb}" for mb in (1, 2, 100)]
    (one, few), (two, more), (_, all_at_once) = losses_and_logits(*chosen, vocabulary=20000)
    assert (max(few.rows), max(more.rows)) == (6, 13)
    assert all_at_once.rows == [sum(few.rows)] == [sum(more.rows)]
    assert one.loss.item() == pytest.approx(two.loss.item(), rel=1e-12)


@key("kernel.implementation")
def implementation():
    """Told by what autograd keeps: materialised logits, their gradient (Triton's GRPO), or none of
    both."""
    kept = {}
    for name in ("torch", "triton", "fused_linear", "auto"):
        module = module_of(f"kernel={name}", "trainer.device=auto").float().to(DEVICE)
        step = step_of(some_documents())
        with LogitsMade(V) as logits:
            out = module.micro_batch_loss(step.micro_batches[0].to(DEVICE), step.totals)
        kept[name] = (
            out.loss.grad_fn.name().removesuffix("Backward"),
            max(logits.rows),
            round(out.loss.item(), 5),
        )
    num_tokens, loss = sum(document.num_tokens for document in some_documents()), kept["torch"][2]
    num_trained = sum(document.num_trained for document in some_documents())
    assert kept["torch"] == ("_GradientInBackward", num_tokens, loss)
    assert kept["triton"] == ("GradientsFromForward", num_tokens, loss)
    assert kept["fused_linear"] == kept["auto"] == ("GradientsFromForward", num_trained, loss)


@key("advantage.estimator")
def estimator(tmp_path):
    """Of the second group, whose rewards are 4 and 9."""
    found = {}
    plus = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    for name in (
        "dr_grpo",
        "grpo",
        "rloo",
        "max_rl",
        "batch_std",
        "pass_at_k",
        "opo",
        *plus,
        "given",
    ):
        documents = recorded(tmp_path, f"advantage={name}")[0]
        found[name] = [document.advantages[-1].item() for document in documents[2:4]]
    assert found["dr_grpo"] == [-2.5, 2.5]
    assert found["grpo"] == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)
    assert found["rloo"] == [-5, 5]
    assert found["max_rl"] == pytest.approx([-2.5 / 6.5, 2.5 / 6.5])
    # of all rewards in the file
    deviation = torch.tensor([float(i**2) for i in range(10)]).std().item()
    assert found["batch_std"] == pytest.approx([-2.5 / deviation, 2.5 / deviation], rel=1e-5)
    assert found["pass_at_k"] == [0, 5]
    assert found["opo"] == [-2.5, 2.5]  # all are of one length
    assert found["reinforce_plus_plus"] == pytest.approx(
        [-24.5 / deviation, -19.5 / deviation], rel=1e-5
    )
    centred = [sign * (2 * i + 0.5) for i in range(5) for sign in (-1, 1)]
    deviation = torch.tensor(centred).std().item()
    assert found["reinforce_plus_plus_baseline"] == pytest.approx(
        [-2.5 / deviation, 2.5 / deviation], rel=1e-5
    )
    assert found["given"] == [2 / 8, 3 / 8]
    documents = recorded(
        tmp_path, "advantage=none", "entropy.coefficient=0.1", reward=..., group_id=...
    )[0]
    assert [d.advantages.tolist() for d in documents] == [[0.0] * d.num_trained for d in documents]


ADAMW = {"learning_rate": 0.02, "beta1": 0.5, "beta2": 0.7, "epsilon": 0.01, "weight_decay": 0.3}


@key(*(f"optimizer.{name}" for name in ADAMW))
def adamw(key):
    """As torch's AdamW makes its steps of the same gradients; norms and biases do not decay."""
    name = key.split(".")[1]
    chosen = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.01,
    }
    steps = []
    for values in (chosen, chosen | {name: ADAMW[name]}):
        module = module_of(
            "optimizer.warmup_steps=0",
            *(f"optimizer.{one}={value}" for one, value in values.items()),
        )
        twins = [p.detach().clone().requires_grad_() for p in module.parameters()]
        settings = {
            "betas": (values["beta1"], values["beta2"]),
            "eps": values["epsilon"],
            "lr": values["learning_rate"],
        }
        decays = [values["weight_decay"] if p.ndim > 1 else 0 for p in twins]
        groups = [
            {"params": [p], "weight_decay": decay} for p, decay in zip(twins, decays, strict=True)
        ]
        peer = torch.optim.AdamW(groups, **settings)
        for number in range(3):
            module.training_step(step_of(some_documents()[number : number + 4]), number)
            for p, twin in zip(module.parameters(), twins, strict=True):
                twin.grad = p.grad.clone()
            peer.step()
        torch.testing.assert_close([*module.parameters()], twins, rtol=1e-11, atol=1e-14)
        steps.append(torch.cat([p.detach().flatten() for p in twins]))
    assert (steps[0] - steps[1]).abs().max() > 1e-4


@key("optimizer.max_grad_norm")
def max_grad_norm():
    def gradient_with(limit):
        module = module_of(f"optimizer.max_grad_norm={limit}")
        norm = module.training_step(step_of(some_documents()), 0)["metrics"]["grad_norm"]
        return norm, torch.cat([p.grad.flatten() for p in module.parameters()])

    norm, whole = gradient_with("null")
    assert norm == pytest.approx(whole.norm().item(), rel=1e-10)
    for share in (0.5, 0.01, 2):
        found, clipped = gradient_with(share * norm)
        assert found == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(clipped, min(share, 1) * whole, rtol=1e-4, atol=1e-14)


@key("optimizer.warmup_steps", "optimizer.schedule")
def learning_rates():
    shapes = {
        "constant": lambda progress: 1,
        "linear": lambda progress: 1 - progress,
        "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    }
    step = step_of(some_documents())
    for warmup in (0, 1, 3):
        for schedule, shape in shapes.items():
            chosen = [
                f"optimizer.schedule={schedule}",
                f"optimizer.warmup_steps={warmup}",
                "trainer.max_steps=8",
            ]
            module, found = module_of(*chosen, "optimizer.learning_rate=0.5"), []
            for number in range(8):
                module.training_step(step, number)
                found.append([group["lr"] for group in module.optimizer.param_groups])
            expected = [0.5 * (i + 1) / warmup for i in range(warmup)]
            expected += [0.5 * shape(i / (8 - warmup)) for i in range(8 - warmup)]
            assert found == [[pytest.approx(rate, rel=1e-12)] * 2 for rate in expected]

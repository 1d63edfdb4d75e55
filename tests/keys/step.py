"""Tests of single keys (see `keys`): the loss, gradient and update of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import group_formulas
from torch import Tensor, nn

from keys import key_test
from keys.small_runs import (
    VOCABULARY,
    LogitsMade,
    logits_of,
    loss_as_specified,
    loss_metric,
    module_of,
    recorded_steps,
    some_documents,
    step_of,
)
from pgtoolkit import step_coefficients
from pgtoolkit.assembly.loss import loss_of
from pgtoolkit.batch import StepTotals
from pgtoolkit.config.compose import compose
from pgtoolkit.document import Document
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Divergence, Grpo, Sides
from pgtoolkit.losses.function import FunctionFamily

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = {
    name: family for name, family in FAMILIES.items() if not issubclass(family, FunctionFamily)
}
TOKEN_FAMILIES = [name for name, family in CLASSES.items() if family.scope == "token"]


def typed(value: object) -> str:
    """Return a value as an override has it."""
    return "null" if value is None else str(value)


@key_test(*(f"loss/{name}.name" for name in CLASSES))
def each_family_has_the_loss_of_the_specification():
    losses = []
    for name, family in CLASSES.items():
        losses.append(loss_as_specified([f"loss={name}"], loss=name, **vars(family())))
    assert len({round(loss, 4) for loss in losses}) == len(losses)


FAMILY_VALUES: dict[str, tuple] = {
    "epsilon_low": (0.05, 0.7),
    "epsilon_high": (0.05, 0.7),
    "dual_clip": (1.05, 1.5),
    "delta_low": (0.01, 0.1),
    "delta_high": (0.01, 0.1),
    "ratio_cap": (0.8, 1.5),
    "divergence": tuple(Divergence),
    "sides": tuple(Sides),
    "low": (0.0, 0.9),
    "high": (1.05, 9.0),
    "temperature_positive": (0.2, 3.0),
    "temperature_negative": (0.2, 3.0),
    "tau": (0.2, 3.0),
    "power_positive": (0.5, 4.0),
    "decay_positive": (0.5, 4.0),
    "power_negative": (0.5, 4.0),
    "decay_negative": (0.5, 4.0),
}
"""Values of each parameter of a family, under which the losses of `some_documents()` differ."""


def parameters_that_let_others_act(family: str, parameter: str) -> dict[str, Any]:
    """Return values of a family's parameters at which a change of `parameter` changes the loss."""
    parameters = vars(FAMILIES[family]()).copy()
    if family in ("grpo", "gspo", "cispo"):
        wide = {"epsilon_low": 0.3, "epsilon_high": 0.3, "dual_clip": None}
        parameters |= {name: value for name, value in wide.items() if name in parameters}
    if parameter in ("divergence", "sides"):
        parameters |= {"delta_low": 0.02, "delta_high": 0.02}
    return parameters


@key_test(
    *(
        f"loss/{name}.{field.name}"
        for name, family in CLASSES.items()
        for field in fields(family)
        if field.name != "score_centering"
    )
)
def each_parameter_of_a_family_changes_the_loss_as_specified(key: str):
    option, parameter = key.split(".")
    family = option.removeprefix("loss/")
    losses = set()
    for value in FAMILY_VALUES[parameter]:
        parameters = parameters_that_let_others_act(family, parameter) | {parameter: value}
        overrides = [f"loss.{name}={typed(number)}" for name, number in parameters.items()]
        loss = loss_as_specified([f"loss={family}", *overrides], loss=family, **parameters)
        losses.add(round(loss, 8))
    assert len(losses) == len(FAMILY_VALUES[parameter])


GROUP_VALUES: dict[str, tuple] = {
    "tpo.name": ("tpo",),
    "tpo.temperature": (0.3, 2.0),
    "tpo.log_prob": ("mean",),
    "lpo.name": ("lpo",),
    "lpo.divergence": ("reverse",),
    "lpo.scale": ("mean", "none"),
    "lpo.temperature": (0.3, 2.0),
}
"""Values of each key of a family over groups."""


@key_test(*(f"loss/{key}" for key in GROUP_VALUES))
def each_key_of_a_family_over_groups_has_the_loss_of_the_loops(key: str):
    name, _, parameter = key.removeprefix("loss/").partition(".")
    for value in GROUP_VALUES[f"{name}.{parameter}"]:
        parameters = {} if parameter == "name" else {parameter: value}
        overrides = [f"loss.{key}={typed(number)}" for key, number in parameters.items()]
        loss = loss_of(compose([f"loss={name}", "advantage=none", *overrides]).config)
        old = [torch.tensor(v, dtype=torch.float64) for v in ([-1.0, -2.0], [-0.5], [-3.0, -0.1])]
        new = [tokens - 0.1 * (1 + number) for number, tokens in enumerate(old)]
        rewards = [1.0, 0.0, 0.25]
        made = step_coefficients(
            torch.cat(new),
            torch.cat(old),
            torch.zeros(5, dtype=torch.float64),
            torch.tensor([0, 0, 1, 2, 2]),
            torch.ones(5, dtype=torch.bool),
            loss=loss.family,
            aggregation="prompt_mean",
            group_index=torch.zeros(3, dtype=torch.int64),
            rewards=torch.tensor(rewards, dtype=torch.float64),
        )
        by_loops = getattr(group_formulas, name)(new, old, old, rewards, **parameters)
        assert float(made.loss) == pytest.approx(float(by_loops), rel=1e-10)


@dataclass(frozen=True)
class Scaled(Grpo):
    """GRPO's surrogate times a number: a family of the user."""

    scale: float = 1.0

    def surrogate(
        self, log_ratio: Tensor, advantages: Tensor, log_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        return self.scale * losses, self.scale * slope


@key_test("loss/custom.name", "loss/custom.path", "loss/custom.options")
def a_family_of_the_user_is_imported_and_gets_its_options():
    custom = ("loss=custom", "loss.path=keys.step.Scaled", "loss.options.epsilon_high=0.1")
    expected = loss_metric(module_of("loss=grpo", "loss.epsilon_high=0.1"))
    assert loss_metric(module_of(*custom)) == expected
    tripled = loss_metric(module_of(*custom, "loss.options.scale=3"))
    assert tripled == pytest.approx(3 * expected, rel=1e-12)


def sampled_documents() -> list[Document]:
    """Return documents with sampling log-probs from 1 above to 1 below the old ones, in the mean of
    each document also."""
    generator = torch.Generator().manual_seed(4)
    mean_distances = (-0.3, 0.2, 0.05, -0.1, -0.6, 0.6)
    documents = []
    for document, mean_distance in zip(some_documents(), mean_distances, strict=True):
        noise = 0.3 * torch.randn(len(document.old_log_probs), generator=generator)
        sampling_log_probs = document.old_log_probs + noise + mean_distance
        documents.append(replace(document, sampling_log_probs=sampling_log_probs))
    return documents


def corrected_loss(name: str, **changes: Any) -> float:
    """Return the loss under a correction, once it equals the specification's."""
    settings = vars(CORRECTIONS[name](**changes))
    overrides = [f"correction.{setting}={typed(value)}" for setting, value in settings.items()]
    return loss_as_specified(
        [f"correction={name}", *overrides],
        sampled_documents(),
        correction=name,
        correction_settings=settings,
    )


@key_test("correction/none.name", *(f"correction/{name}.name" for name in CORRECTIONS))
def each_correction_has_the_loss_of_the_specification():
    losses = [loss_as_specified([], sampled_documents()), *map(corrected_loss, CORRECTIONS)]
    assert len({round(loss, 8) for loss in losses}) == len(losses)


CORRECTION_VALUES: dict[str, tuple] = {
    "low": (None, 0.5, 0.8, 0.95),
    "high": (1.0, 9.0),
    "threshold": (0.1, 2.0),
    "mean": ("product", "geometric"),
    "factor": ("document", "token", "one"),
    "normalize": ("none", "step"),
}
"""Values of each setting of a correction."""


@key_test(
    *(
        f"correction/{name}.{field.name}"
        for name, correction in CORRECTIONS.items()
        for field in fields(correction)
    )
)
def each_setting_of_a_correction_changes_the_loss_as_specified(key: str):
    """Its values give at least two losses, and three where it has more than two values."""
    option, setting = key.split(".")
    correction = option.removeprefix("correction/")
    if setting in ("measure", "threshold") and correction != "off_policy_mask":
        least = 0.02 if correction == "token_mask" else 0.3
        by_distance = [("k2", least), ("k3", least), ("k3", 3 * least)]
        losses = {
            round(corrected_loss(correction, measure=measure, threshold=threshold), 9)
            for measure, threshold in by_distance
        }
        assert len(losses | {round(corrected_loss(correction), 9)}) >= 3
        return
    changes: list[dict[str, Any]] = [{setting: value} for value in CORRECTION_VALUES[setting]]
    if (correction, setting) == ("sequence_mask", "mean"):
        changes.append({"mean": "worst", "factor": "one", "high": 1.5})
    wide = {"low": None, "high": 9.0} if hasattr(CORRECTIONS[correction], "high") else {}
    losses = {round(corrected_loss(correction, **wide | change), 9) for change in changes}
    assert len(losses) >= min(3, len(changes))


@key_test("aggregation.mode")
def each_aggregation_has_its_loss_and_prompt_mean_ends_a_step_after_a_group(tmp_path: Path):
    """A recorded prompt has two documents, so prompt_mean takes four where three are asked for."""
    divisors = {
        "constant": 4,
        "sample_mean": None,
        "prompt_mean": None,
        "token_mean": None,
        "balanced": None,
    }
    losses = []
    for mode, divisor in divisors.items():
        losses.append(loss_as_specified([f"aggregation={mode}"], aggregation=mode, divisor=divisor))
    assert len({round(loss, 6) for loss in losses}) == 4
    # A group has two documents here, one of each sign.
    assert losses[4] == pytest.approx(losses[1], rel=1e-12)
    for mode, expected in (
        ("token_mean", [3, 3, 3, 1]),
        ("prompt_mean", [4, 4, 2]),
        ("balanced", [4, 4, 2]),
    ):
        steps = recorded_steps(tmp_path, f"aggregation={mode}", "accumulation.docs_per_step=3")
        assert [len(step) for step in steps] == expected


@key_test("aggregation.divisor")
def the_loss_is_divided_by_the_divisor():
    third = loss_as_specified(["aggregation.divisor=3"], divisor=3)
    twelfth = loss_as_specified(["aggregation.divisor=12"], divisor=12)
    assert third == pytest.approx(4 * twelfth, rel=1e-12)


def ten_per_token(
    totals: StepTotals,
    *,
    mask: Tensor,
    document_index: Tensor,
    tokens_per_document: Tensor,
    group_index: Tensor,
) -> Tensor:
    """Return ten times the weights of token_mean: an aggregation of the user."""
    return torch.full(mask.shape, 10 / totals.num_tokens)


@key_test("aggregation.reducer")
def an_aggregation_of_the_user_is_imported_and_weights_the_tokens():
    reduced = loss_metric(module_of("aggregation.reducer=keys.step.ten_per_token"))
    mean = loss_metric(module_of("aggregation=token_mean"))
    assert reduced == pytest.approx(10 * mean, rel=1e-6)  # the reducer's weights are in float32


@key_test("metrics.level")
def each_level_has_the_metrics_of_the_one_before_and_more():
    metrics = {}
    for level in ("none", "basic", "with_entropy"):
        module = module_of(f"metrics={level}")
        metrics[level] = module.training_step(step_of(some_documents()), 0)["metrics"]
    only_basic = metrics["basic"].keys() - metrics["none"].keys()
    assert {
        "ratio_new_old",
        "kl_new_old",
        "clipped_ratio_fraction",
        "max_advantage",
    } <= only_basic
    assert metrics["with_entropy"].keys() - metrics["basic"].keys() == {"entropy"}
    module = module_of()
    entropies = []
    for document in some_documents():
        log_probs = logits_of(module, document)[:-1].log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        entropies.append(entropy[document.loss_mask[1:]].mean().item())
    expected = sum(entropies) / len(entropies)
    assert metrics["with_entropy"]["entropy"] == pytest.approx(expected, rel=1e-10)


def loss_and_logits(*overrides: str, vocabulary: int = VOCABULARY) -> tuple[PolicyLoss, LogitsMade]:
    """Return the loss of one micro-batch, and the logits that were made for it."""
    module = module_of(*overrides)
    if vocabulary != VOCABULARY:
        torch.manual_seed(0)
        head = nn.Linear(8, vocabulary, bias=False, dtype=torch.float64)
        module.model.set_output_embeddings(head)
    step = step_of(some_documents())
    micro_batch = step.micro_batches[0]
    if isinstance(module.loss.family, FunctionFamily):
        # These are what the first pass over the step gives.
        coefficients = torch.ones(len(micro_batch.labels), dtype=torch.float64)
        micro_batch = replace(micro_batch, coefficients=coefficients)
    with LogitsMade(vocabulary) as logits:
        out = module.micro_batch_loss(micro_batch, step.totals)
    return out, logits


@key_test(*(f"loss/{name}.num_splits" for name in (*TOKEN_FAMILIES, "tpo", "lpo", "custom")))
def with_three_splits_no_more_than_a_third_of_the_logits_are_made_at_once(key: str):
    """Logits of tokens that are not trained are not made at all."""
    family = key.split(".")[0].removeprefix("loss/")
    overrides = ["kernel=torch", f"loss={family}"]
    if family == "custom":
        overrides.append("loss.path=keys.step.Scaled")
    if family in ("tpo", "lpo"):
        overrides.append("advantage=none")
    num_tokens = sum(document.num_tokens for document in some_documents())
    out, logits = loss_and_logits(*overrides)
    assert logits.rows == [num_tokens]
    split_out, split_logits = loss_and_logits(*overrides, "loss.num_splits=3")
    assert sum(split_logits.rows) < num_tokens
    assert max(split_logits.rows) == num_tokens // 3
    assert split_out.loss.item() == pytest.approx(out.loss.item(), rel=1e-12)


@key_test("kernel.logits_memory_mb")
def as_many_rows_of_logits_are_made_at_once_as_fit_into_the_memory():
    """A row of 20000 logits in float64 takes 0.153 MiB: 6 fit into 1 MiB, 13 into 2 MiB."""
    results = []
    for megabytes in (1, 2, 100):
        overrides = ("kernel=fused_linear", f"kernel.logits_memory_mb={megabytes}")
        results.append(loss_and_logits(*overrides, vocabulary=20000))
    losses = [out.loss.item() for out, _ in results]
    rows = [logits.rows for _, logits in results]
    num_trained = sum(document.num_trained for document in some_documents())
    assert max(rows[0]) == 6
    assert max(rows[1]) == 13
    assert rows[2] == [num_trained]
    assert sum(rows[0]) == sum(rows[1]) == num_trained
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@key_test("kernel.implementation")
def each_implementation_has_the_same_loss_and_makes_its_own_logits():
    """fused_linear, which auto takes, makes only logits of trained tokens. Autograd keeps the
    logits for torch, and gradients for the others."""
    seen = {}
    for name in ("torch", "triton", "fused_linear", "auto"):
        module = module_of(f"kernel={name}", "trainer.device=auto").float().to(DEVICE)
        step = step_of(some_documents())
        with LogitsMade(VOCABULARY) as logits:
            out = module.micro_batch_loss(step.micro_batches[0].to(DEVICE), step.totals)
        function = out.loss.grad_fn.name().removesuffix("Backward")
        seen[name] = (function, max(logits.rows), round(out.loss.item(), 5))
    num_tokens = sum(document.num_tokens for document in some_documents())
    num_trained = sum(document.num_trained for document in some_documents())
    loss = seen["torch"][2]
    assert seen == {
        "torch": ("_GradientInBackward", num_tokens, loss),
        "triton": ("GradientsFromForward", num_tokens, loss),
        "fused_linear": ("GradientsFromForward", num_trained, loss),
        "auto": ("GradientsFromForward", num_trained, loss),
    }


@key_test(
    "advantage.reward_shift",
    "advantage.reward_scale",
    "advantage.reward_clip",
    "advantage.clip_low",
    "advantage.clip_high",
)
def rewards_and_advantages_are_shaped_in_their_order(tmp_path: Path):
    """The rewards of the group that is looked at are 4 and 9."""
    for overrides, expected in (
        (("reward_shift=-2", "reward_clip=3"), [-0.5, 0.5]),  # 2 and 3
        (("reward_scale=0.5",), [-1.25, 1.25]),
        (("reward_shift=-2", "reward_scale=0.5", "reward_clip=3"), [-1.0, 1.0]),  # 1 and 3
        (("clip_low=-2",), [-2.0, 2.5]),
        (("clip_high=1",), [-2.5, 1.0]),
    ):
        typed_keys = [f"advantage.{override}" for override in overrides]
        documents = recorded_steps(tmp_path, "advantage=dr_grpo", *typed_keys)[0]
        assert [document.advantages[-1].item() for document in documents[2:4]] == expected
        assert [document.reward for document in documents[2:4]] == [4.0, 9.0]


@key_test("advantage.estimator")
def each_estimator_has_the_advantages_of_its_equation(tmp_path: Path):
    """The file's rewards are 0, 1, 4, ... 81; those of the group that is looked at are 4 and 9."""
    rewards = [float(i**2) for i in range(10)]
    deviation = torch.tensor(rewards).std().item()
    centred = [sign * (2 * i + 0.5) for i in range(5) for sign in (-1, 1)]
    centred_deviation = torch.tensor(centred).std().item()
    rounded = {
        "grpo": [-math.sqrt(0.5), math.sqrt(0.5)],
        "batch_std": [-2.5 / deviation, 2.5 / deviation],
        "reinforce_plus_plus": [-24.5 / deviation, -19.5 / deviation],
        "reinforce_plus_plus_baseline": [-2.5 / centred_deviation, 2.5 / centred_deviation],
    }
    exact = {
        "dr_grpo": [-2.5, 2.5],
        "rloo": [-5, 5],
        "pass_at_k": [0, 5],
        "opo": [-2.5, 2.5],  # the documents have equal lengths
        "given": [2 / 8, 3 / 8],
        "max_rl": pytest.approx([-2.5 / 6.5, 2.5 / 6.5], rel=1e-6),
    }

    def advantages_of(estimator: str) -> list[float]:
        documents = recorded_steps(tmp_path, f"advantage={estimator}")[0]
        return [document.advantages[-1].item() for document in documents[2:4]]

    for estimator, expected in rounded.items():
        assert advantages_of(estimator) == pytest.approx(expected, rel=1e-5)
    for estimator, expected in exact.items():
        assert advantages_of(estimator) == expected
    documents = recorded_steps(
        tmp_path, "advantage=none", "entropy.coefficient=0.1", reward=..., group_id=...
    )[0]
    for document in documents:
        assert document.advantages.tolist() == [0.0] * document.num_trained


ADAMW = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.01,
}
OTHER_ADAMW = {
    "learning_rate": 0.02,
    "beta1": 0.5,
    "beta2": 0.7,
    "epsilon": 0.01,
    "weight_decay": 0.3,
}


def weights_after_three_updates(options: dict[str, float]) -> Tensor:
    """Return all weights after three updates, once torch's AdamW makes the same of the same
    gradients.

    Norms and biases, which have one axis, do not decay.
    """
    overrides = [f"optimizer.{name}={value}" for name, value in options.items()]
    module = module_of("optimizer.warmup_steps=0", *overrides)
    twins = [p.detach().clone().requires_grad_() for p in module.parameters()]
    groups = []
    for twin in twins:
        weight_decay = options["weight_decay"] if twin.ndim > 1 else 0
        groups.append({"params": [twin], "weight_decay": weight_decay})
    optimizer = torch.optim.AdamW(
        groups,
        lr=options["learning_rate"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["epsilon"],
    )
    for number in range(3):
        module.training_step(step_of(some_documents()[number : number + 4]), number)
        for p, twin in zip(module.parameters(), twins, strict=True):
            twin.grad = p.grad.clone()
        optimizer.step()
    torch.testing.assert_close([*module.parameters()], twins, rtol=1e-11, atol=1e-14)
    return torch.cat([twin.detach().flatten() for twin in twins])


@key_test(*(f"optimizer.{name}" for name in ADAMW))
def each_option_of_adamw_changes_the_weights_as_in_torch(key: str):
    name = key.removeprefix("optimizer.")
    weights = weights_after_three_updates(ADAMW)
    other_weights = weights_after_three_updates(ADAMW | {name: OTHER_ADAMW[name]})
    assert (weights - other_weights).abs().max() > 1e-4


@key_test("optimizer.name")
def each_optimizer_updates_the_weights_as_in_torch():
    """Muon's matrices are those of the layers; AdamW has the rest, with torch's betas."""
    adamw = weights_after_three_updates(ADAMW)
    module = module_of(
        *("optimizer=muon", "optimizer.learning_rate=0.02", "optimizer.weight_decay=0.3"),
        *("optimizer.warmup_steps=2", "optimizer.max_grad_norm=0.5"),
    )
    twins = {
        name: weight.detach().clone().requires_grad_() for name, weight in module.named_parameters()
    }
    of_layers = {name for name in twins if ".h." in name and twins[name].ndim == 2}
    assert len(of_layers) == 4  # without the head, and the embeddings of tokens and positions
    others = [twin for name, twin in twins.items() if name not in of_layers]
    muon = torch.optim.Muon(
        [twins[name] for name in of_layers], weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    decays = [{"params": [p for p in others if p.ndim == 2], "weight_decay": 0.3}]
    stays = [{"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}]
    rest = torch.optim.AdamW([*decays, *stays])
    for number, rate in enumerate((0.01, 0.02, 0.02)):
        module.training_step(step_of(some_documents()[number : number + 4]), number)
        for name, weight in module.named_parameters():
            twins[name].grad = weight.grad.clone()
        for optimizer in (muon, rest):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(weight, twins[name], rtol=1e-12, atol=1e-15)
    weights = torch.cat([twin.detach().flatten() for twin in twins.values()])
    assert (weights - adamw).abs().max() > 1e-3


@key_test("optimizer.path", "optimizer.options")
def an_optimizer_of_ones_own_gets_its_parameters_and_the_rate():
    """PyTorch's AdamW by its path makes the updates of optimizer=adamw, to the bit."""
    expected = module_of(
        *("optimizer.beta1=0.5", "optimizer.beta2=0.7", "optimizer.epsilon=0.01"),
        "optimizer.weight_decay=0.3",
    )
    same = module_of(
        *("optimizer=torch.optim.AdamW", "optimizer.betas=[0.5,0.7]", "optimizer.eps=0.01"),
        "optimizer.weight_decay=0.3",
    )
    other = module_of("optimizer=torch.optim.SGD")
    for module in (expected, same, other):
        module.max_grad_norm = None
    weights = []
    for module in (expected, same, other):
        for number in range(3):
            module.training_step(step_of(some_documents()[number : number + 4]), number)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@key_test("optimizer.max_grad_norm")
def a_gradient_with_a_larger_norm_is_scaled_down_to_max_grad_norm():
    """The metric is the norm before."""

    def norm_and_gradient(limit: str | float) -> tuple[float, Tensor]:
        module = module_of(f"optimizer.max_grad_norm={limit}")
        norm = module.training_step(step_of(some_documents()), 0)["metrics"]["grad_norm"]
        return norm, torch.cat([p.grad.flatten() for p in module.parameters()])

    norm, gradient = norm_and_gradient("null")
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-10)
    for share in (0.5, 0.01, 2):
        norm_before, clipped = norm_and_gradient(share * norm)
        assert norm_before == pytest.approx(norm, rel=1e-10)
        torch.testing.assert_close(clipped, min(share, 1) * gradient, rtol=1e-4, atol=1e-14)


@key_test("optimizer.warmup_steps", "optimizer.schedule", "optimizer.min_learning_rate")
def the_learning_rate_warms_up_linearly_and_then_follows_the_schedule():
    schedules = {
        "constant": lambda progress: 1,
        "linear": lambda progress: 1 - progress,
        "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    }
    step = step_of(some_documents())
    for warmup, least in ((0, 0.0), (1, 0.1), (3, 0.0)):
        for name, schedule in schedules.items():
            floor = least if name != "constant" else 0.0
            module = module_of(
                f"optimizer.schedule={name}",
                f"optimizer.warmup_steps={warmup}",
                "trainer.max_steps=8",
                "optimizer.learning_rate=0.5",
                f"optimizer.min_learning_rate={floor}",
            )
            rates = []
            for number in range(8):
                module.training_step(step, number)
                rates.append([group["lr"] for group in module.optimizer.param_groups])
            expected = [0.5 * (i + 1) / warmup for i in range(warmup)]
            expected += [
                floor + (0.5 - floor) * schedule(i / (8 - warmup)) for i in range(8 - warmup)
            ]
            assert rates == [[pytest.approx(rate, rel=1e-12)] * 2 for rate in expected]

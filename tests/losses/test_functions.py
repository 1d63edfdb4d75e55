"""Losses that are plain functions: the families written as functions, and the whole step in two
passes, held against plain loops."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders.threads import on_ranks
from torch.testing import assert_close

import pgtoolkit
from pgtoolkit import (
    StepTotals,
    linear_policy_loss,
    log_prob_loss,
    policy_loss,
    step_coefficients,
    top_entropy,
)
from pgtoolkit.errors import DataError
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.trial import check_function
from pgtoolkit.testing import assert_conforms

VOCABULARY = 13
LENGTHS = (4, 1, 9, 6, 2, 7, 3)
GROUPS = torch.tensor([0, 1, 0, 2, 1, 0, 2])
AGGREGATIONS = {
    "sample_mean": {},
    "prompt_mean": {"group_index": GROUPS},
    "token_mean": {},
    "constant": {"divisor": 8.0},
}


def data(spread=0.5, outlier=None):
    """Return the inputs of `policy_loss` for documents whose tokens lie between one another."""
    generator = torch.Generator().manual_seed(0)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    index = index[torch.randperm(len(index), generator=generator)]
    logits = torch.randn(len(index), VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (len(index),), generator=generator)
    labels[::6] = -1
    chosen = labels.clamp(min=0)[:, None]
    log_probs = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    noise = torch.randn(len(index), generator=generator, dtype=torch.float64)
    old_log_probs = (log_probs + spread * noise).clamp(max=-1e-6)
    if outlier is not None:
        old_log_probs[7] = log_probs[7] - outlier
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    advantages[3] = 0.0
    return {
        "logits": logits,
        "labels": labels,
        "old_log_probs": old_log_probs.clamp(max=0.0),
        "advantages": advantages[index],
        "document_index": index,
        "num_documents": len(LENGTHS),
    }


def result(inputs, **options):
    """Return (loss, gradient by the logits, metrics) of `policy_loss`."""
    logits = inputs["logits"].clone().requires_grad_()
    made = policy_loss(**inputs | {"logits": logits}, **options)
    (gradient,) = torch.autograd.grad(made.loss, logits)
    return made.loss.detach(), gradient, made.metrics


# The families as functions


def grpo(log_ratio, advantages, ratio, epsilon_low=0.2, epsilon_high=0.2):
    """-min(r A, clip(r) A)"""
    bounds = 1 - epsilon_low, 1 + epsilon_high
    r = ratio(log_ratio)
    return -torch.minimum(r * advantages, r.clamp(*bounds) * advantages), {"bounds": bounds}


def gspo(log_ratio, advantages, ratio, documents, epsilon_low=3e-4, epsilon_high=4e-4):
    bounds = 1 - epsilon_low, 1 + epsilon_high
    r = ratio(documents.mean(log_ratio))
    mean = documents.mean(advantages)
    return -torch.minimum(r * mean, r.clamp(*bounds) * mean), {"bounds": bounds}


def gmpo(log_ratio, advantages, ratio, documents, epsilon=0.4):
    mean = documents.mean(advantages)
    sign = documents.spread(mean.sign())
    above = torch.where(sign > 0, log_ratio.clamp(max=epsilon), log_ratio)
    clipped = torch.where(sign < 0, above.clamp(min=-epsilon), above)
    return -ratio(documents.mean(clipped)) * mean


def vespo(log_probs, log_ratio, advantages, ratio, documents):
    mean = documents.mean(advantages)
    w = ratio(documents.sum(log_ratio)).detach()
    power = torch.where(mean >= 0, 2.0, 3.0).to(w)
    decay = torch.where(mean >= 0, 3.0, 2.0).to(w)
    return -documents.spread(w**power * (decay * (1 - w)).exp() * mean) * log_probs


def kimi(log_probs, log_ratio, advantages, tau=0.1):
    return -advantages * log_probs + tau / 2 * log_ratio**2


def reinforce(log_probs, advantages):
    return -advantages * log_probs


WRITTEN = {"grpo": grpo, "gspo": gspo, "gmpo": gmpo, "vespo": vespo, "reinforce": reinforce}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("outlier", [None, -60.0])
def test_a_family_written_as_a_function_is_the_class_to_1e_12(name, aggregation, outlier):
    inputs = data(outlier=outlier)
    options = {"aggregation": aggregation, "metrics": "basic", **AGGREGATIONS[aggregation]}
    loss, gradient, metrics = result(inputs, loss=name, **options)
    own_loss, own_gradient, own_metrics = result(inputs, loss=WRITTEN[name], **options)
    assert_close(own_loss, loss, rtol=1e-12, atol=1e-14)
    assert_close(own_gradient, gradient, rtol=1e-12, atol=1e-14)
    absent = metrics.keys() - own_metrics.keys()
    of_clips = {"clipped_ratio_fraction", "clipped_low_fraction", "clipped_high_fraction"}
    assert absent == (set() if name in ("grpo", "gspo") else of_clips)
    assert own_metrics.keys() <= metrics.keys()
    for metric, value in own_metrics.items():
        if metric != "clamped_log_ratio_fraction" or name != "reinforce":
            assert_close(value, metrics[metric], rtol=1e-12, atol=1e-14, msg=metric)


@pytest.mark.parametrize("name", ["grpo", "gspo", "vespo"])
def test_the_fused_head_computes_a_function_chunk_by_chunk(name):
    inputs = data()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(inputs["labels"]), 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    others = {key: value for key, value in inputs.items() if key != "logits"}
    results = []
    for loss in (name, WRITTEN[name]):
        leaf = hidden.clone().requires_grad_()
        made = pgtoolkit.linear_policy_loss(
            leaf, weight, **others, loss=loss, logits_memory_mb=12 * VOCABULARY * 8 / 2**20
        )
        results.append((made.loss.detach(), torch.autograd.grad(made.loss, leaf)[0]))
    assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_a_function_with_parameters_a_metric_and_several_pieces_adds_up_to_the_step():
    def soft(log_probs, old_log_probs, advantages, *, strength=1.0):
        moved = log_probs - old_log_probs
        return -advantages * torch.tanh(strength * moved), {"moved": moved.abs()}

    inputs = data()
    whole = result(inputs, loss=soft, strength=2.0, metrics="basic")
    counts = torch.bincount(inputs["document_index"][inputs["labels"] >= 0], minlength=7)
    totals = StepTotals(7, int(counts.sum()), int((counts == 0).sum()))
    loss, gradient, moved = 0.0, torch.zeros_like(inputs["logits"]), 0.0
    for documents in ([0, 2, 5], [1, 3, 4, 6]):
        rows = torch.isin(inputs["document_index"], torch.tensor(documents))
        piece = {key: value[rows] for key, value in inputs.items() if key != "num_documents"}
        made = result(
            piece | {"num_documents": 7}, loss=soft, strength=2.0, totals=totals, metrics="basic"
        )
        loss, moved = loss + made[0], moved + made[2]["moved"]
        gradient[rows] += made[1]
    assert_close((loss, gradient, moved), (whole[0], whole[1], whole[2]["moved"]))
    trained = inputs["labels"] >= 0
    new = inputs["logits"].log_softmax(-1).gather(1, inputs["labels"].clamp(min=0)[:, None])[:, 0]
    distance = (new - inputs["old_log_probs"]).abs()
    means = [
        float(distance[trained & (inputs["document_index"] == d)].sum() / max(1, counts[d]))
        for d in range(7)
    ]
    assert float(moved) == pytest.approx(sum(means) / 7, rel=1e-12)


def test_positions_lengths_and_running_sums_are_those_of_each_document():
    seen = {}

    def look(log_probs, documents, position, lengths):
        seen.update(position=position, lengths=lengths, before=documents.before(log_probs))
        return documents.before(log_probs)

    inputs = data()
    loss, gradient, _ = result(inputs, loss=look, aggregation="token_mean")
    log_probs = inputs["logits"].log_softmax(-1)
    expected_positions, expected_before, value = [], [], 0.0
    later = torch.zeros_like(inputs["logits"])
    num_tokens = int((inputs["labels"] >= 0).sum())
    for document in range(7):
        rows = [
            row
            for row in range(len(inputs["labels"]))
            if inputs["document_index"][row] == document and inputs["labels"][row] >= 0
        ]
        running = 0.0
        for place, row in enumerate(rows):
            expected_positions.append(place)
            expected_before.append(running)
            value += running / num_tokens
            running += float(log_probs[row, inputs["labels"][row]])
            # This token's log-prob is in the sums of all later ones.
            weight = (len(rows) - 1 - place) / num_tokens
            later[row] = -weight * log_probs[row].exp()
            later[row, inputs["labels"][row]] += weight
    assert seen["position"].tolist() == expected_positions
    assert_close(seen["before"].detach(), torch.tensor(expected_before, dtype=torch.float64))
    assert float(loss) == pytest.approx(value, rel=1e-12)
    assert_close(gradient, later)


# The whole step


def towards_rewards(log_probs, old_log_probs, rewards, group_rewards, documents, groups):
    """-sum over the group of softmax(sum o + u) log softmax(sum p)"""
    reward = documents.mean(rewards) - documents.mean(group_rewards)
    deviation = groups.spread(groups.mean(reward**2).sqrt())
    u = torch.where(deviation > 0, reward / deviation.clamp(min=1e-12), 0.0)
    target = groups.softmax(documents.sum(old_log_probs) + u)
    s = documents.sum(log_probs)
    return -groups.sum(target * (s - groups.spread(groups.logsumexp(s))))


REWARDS = torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 2.0], dtype=torch.float64)


def step_of(inputs):
    """Return the inputs of `step_coefficients`, and the log-probs."""
    mask = inputs["labels"] >= 0
    chosen = inputs["labels"].clamp(min=0)[:, None]
    log_probs = inputs["logits"].log_softmax(-1).gather(1, chosen)[:, 0]
    names = ("old_log_probs", "advantages", "document_index", "num_documents")
    return {"log_probs": log_probs, "mask": mask} | {name: inputs[name] for name in names}


def by_loops(inputs, members):
    """Return (loss, derivative by each log-prob) of `towards_rewards` under `prompt_mean`."""
    step = step_of(inputs)
    tokens = {
        d: [
            t
            for t in range(len(step["mask"]))
            if step["mask"][t] and int(step["document_index"][t]) == d
        ]
        for d in range(7)
    }
    coefficients = [0.0] * len(step["mask"])
    loss = 0.0
    for group in range(3):
        of_group = [d for d in members if int(GROUPS[d]) == group]
        new = [sum(float(step["log_probs"][t]) for t in tokens[d]) for d in of_group]
        old = [sum(float(step["old_log_probs"][t]) for t in tokens[d]) for d in of_group]
        rewards = [float(REWARDS[d]) for d in of_group]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        u = [(r - mean) / deviation if deviation else 0.0 for r in rewards]
        largest = max(o + v for o, v in zip(old, u, strict=True))
        target = [math.exp(o + v - largest) for o, v in zip(old, u, strict=True)]
        target = [value / sum(target) for value in target]
        norm = max(new) + math.log(sum(math.exp(s - max(new)) for s in new))
        for d, s, wanted in zip(of_group, new, target, strict=True):
            loss -= wanted * (s - norm) / 3
            for t in tokens[d]:
                coefficients[t] = (math.exp(s - norm) - wanted) / 3
    return loss, torch.tensor(coefficients, dtype=torch.float64)


def test_a_loss_over_groups_has_the_value_and_the_coefficients_of_plain_loops():
    inputs = data()
    loss, coefficients, _ = step_coefficients(
        **step_of(inputs),
        loss=towards_rewards,
        aggregation="prompt_mean",
        group_index=GROUPS,
        rewards=REWARDS,
    )
    expected, derivative = by_loops(inputs, range(7))
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert_close(coefficients, derivative, rtol=1e-11, atol=1e-14)


def test_the_second_pass_in_pieces_has_the_gradient_of_the_whole_step():
    inputs = data()
    step = step_of(inputs)
    options = {"loss": towards_rewards, "aggregation": "prompt_mean"}
    _, coefficients, _ = step_coefficients(**step, **options, group_index=GROUPS, rewards=REWARDS)
    counts = torch.bincount(inputs["document_index"][step["mask"]], minlength=7)
    per_group = torch.zeros(3, dtype=torch.int64).index_add(0, GROUPS, counts)
    totals = StepTotals(7, int(counts.sum()), int((counts == 0).sum()), 3, per_group)
    gradient = torch.zeros_like(inputs["logits"])
    for documents in ([0, 1, 3], [2], [4, 5, 6]):  # cut through the groups
        rows = torch.isin(inputs["document_index"], torch.tensor(documents))
        piece = {key: value[rows] for key, value in inputs.items() if key != "num_documents"}
        gradient[rows] += result(
            piece | {"num_documents": 7},
            **options,
            group_index=GROUPS,
            totals=totals,
            coefficients=coefficients[rows],
        )[1]
    _, derivative = by_loops(inputs, range(7))
    # Numbers of groups that begin at 0 in a piece are not those of the totals.
    rows = torch.isin(inputs["document_index"], torch.tensor([4, 5, 6]))
    piece = {key: value[rows] for key, value in inputs.items() if key != "num_documents"}
    here = int(counts[4:].sum())
    wrong = r"totals.tokens_per_group\[2\] needs to count at least the"
    with pytest.raises(ValueError, match=f"{wrong} {here} trained tokens of this piece"):
        policy_loss(
            **piece,
            **options,
            num_documents=7,
            group_index=torch.full((7,), 2),
            totals=totals,
            coefficients=coefficients[rows],
        )
    trained = step["mask"]
    expected = -derivative[:, None] * inputs["logits"].softmax(-1)
    expected[trained, inputs["labels"][trained]] += derivative[trained]
    assert_close(gradient, expected, rtol=1e-11, atol=1e-14)


def test_a_document_of_weight_0_is_neither_seen_nor_counted_by_its_group():
    left_out = 5

    def weights(totals, *, document_index, mask, tokens_per_document, group_index, **_):
        per_group = totals.tokens_per_group[group_index]
        weight = 1 / (3 * torch.cat([per_group, per_group.new_ones(1)])[document_index]).double()
        return torch.where(document_index == left_out, 0.0, weight)

    inputs = data()
    _, coefficients, _ = step_coefficients(
        **step_of(inputs),
        loss=towards_rewards,
        reducer=weights,
        group_index=GROUPS,
        rewards=REWARDS,
    )
    _, derivative = by_loops(inputs, [d for d in range(7) if d != left_out])
    # A group's value stands for each token, so the weights of the members that are left count.
    counts = torch.bincount(inputs["document_index"][inputs["labels"] >= 0], minlength=7)
    left = 1 - counts[left_out] / counts[GROUPS == 0].sum()
    of_group = torch.where(GROUPS[inputs["document_index"]] == 0, left, 1.0)
    assert_close(coefficients, derivative * of_group, rtol=1e-11, atol=1e-14)


def test_means_sums_and_quantiles_of_the_step_are_over_its_trained_tokens():
    seen = {}

    def look(log_probs, step):
        seen.update(
            sum=step.sum(log_probs.detach()),
            mean=step.mean(log_probs.detach()),
            quantile=step.quantile(log_probs.detach(), 0.3),
            counts=(step.num_tokens, step.num_documents),
        )
        return log_probs - step.mean(log_probs)

    step = step_of(data())
    loss, coefficients, _ = step_coefficients(**step, loss=look, aggregation="token_mean")
    trained = step["log_probs"][step["mask"]]
    assert float(loss) == pytest.approx(0, abs=1e-14)
    assert_close(coefficients, torch.zeros_like(coefficients), atol=1e-14, rtol=0)
    assert float(seen["sum"]) == pytest.approx(float(trained.sum()), rel=1e-12)
    assert float(seen["mean"]) == pytest.approx(float(trained.mean()), rel=1e-12)
    assert float(seen["quantile"]) == pytest.approx(float(trained.quantile(0.3)), rel=1e-12)
    assert seen["counts"] == (len(trained), 7)


# What is refused


def asks_for_state(log_probs, state):
    return log_probs


def without_gradient(advantages):
    return advantages


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (asks_for_state, {}, "state, which a loss function is not given. It may ask for log_pro"),
        (lambda log_ratios: log_ratios, {}, "log_ratios, which .* not given. Use log_ratio. A par"),
        (lambda log_ratio, documets=None: log_ratio, {}, "documets=None, .* fill. Use documents."),
        (without_gradient, {}, "asks for neither log_probs nor log_ratio"),
        (grpo, {"epsilon": 0.1}, "grpo has no epsilon; .* epsilon_low, epsilon_high"),
        (grpo, {"epsilon_low": "0.2"}, "epsilon_low of grpo needs a number, .* .got '0.2'."),
        (towards_rewards, {}, "Compute its coefficients by pgtoolkit.step_coefficients"),
        (lambda log_probs: log_probs.sum(), {}, "a tensor with one number per token"),
        (lambda log_probs: (log_probs, {"bounds": 0.2}), {}, r"a pair of numbers, .*\(got 0.2\)"),
        (lambda log_probs: (log_probs, {"bounds": (1.2, 0.8)}), {}, r"\(None, 1.2\) \(got \(1.2"),
        (lambda log_probs, sampling_log_probs: log_probs, {}, "asks for sampling_log_probs"),
    ],
)
def test_a_function_that_cannot_be_right_is_refused(loss, options, message):
    with pytest.raises(ValueError, match=message):
        result(data(), loss=loss, **options)


def test_a_hidden_infinity_makes_the_loss_nan():
    inputs = data()
    inputs["old_log_probs"][1] = -math.inf
    loss, _, _ = result(inputs, loss=grpo, check_finite=False)
    assert math.isnan(loss)
    assert family_of(grpo, epsilon_low=0.3).equation == (
        "-min(r A, clip(r) A)  (epsilon_low=0.3, epsilon_high=0.2)"
    )


def test_a_piece_without_a_trained_token_calls_no_function_and_has_its_metrics():
    def scaled(log_probs, advantages, documents):
        longest = documents.sum(torch.ones_like(log_probs)).max()
        losses = -documents.mean(advantages * log_probs) / longest.detach() * longest.detach()
        return losses, {"longest": documents.spread(longest.expand(len(documents)))}

    inputs = data()
    _, _, metrics = result(inputs, loss=scaled, metrics="basic")
    totals = StepTotals(len(LENGTHS), int((inputs["labels"] >= 0).sum()), 0)
    inputs["labels"] = torch.full_like(inputs["labels"], -1)
    loss, gradient, of_piece = result(inputs, loss=scaled, metrics="basic", totals=totals)
    assert float(loss) == 0.0
    assert not gradient.any()
    assert of_piece.keys() == metrics.keys()


@pytest.mark.parametrize("loss", [*WRITTEN.values(), towards_rewards])
def test_functions_whose_level_is_right_pass_the_trial(loss):
    check_function(FunctionLoss(loss))


def centred_by_call(log_probs, advantages):
    return -(advantages - advantages.mean()) * log_probs


def centred_by_documents(log_probs, advantages, documents):
    mean = documents.mean(advantages)
    return -documents.spread(mean - mean.mean()) * log_probs


def doubles_what_it_is_given(log_probs, advantages):
    return -advantages.mul_(2) * log_probs


def overflows(log_ratio, advantages):
    return -(1000 * log_ratio.abs()).exp() * advantages


def root_of_distance(log_ratio, advantages):
    return log_ratio.abs().sqrt() * advantages


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (centred_by_call, "other tokens. Ask for `documents`"),
        (centred_by_documents, "other documents. Ask for `groups`"),
        (overflows, r"not finite for a token of log-ratio -1\.38031 \(got inf\)\. `ratio\(x\)` is"),
        (
            root_of_distance,
            r"a slope \(gradient\) that is not finite for a token of log-ratio 0 \(got nan, where "
            r"the loss is 0\)\. torch.where around",
        ),
        (
            lambda log_ratio: (-log_ratio, {"odd": torch.full_like(log_ratio, math.nan)}),
            "the metric odd of the loss function <lambda> is not finite where log-ratios are about",
        ),
        (
            lambda log_ratio, documents: documents.mean(log_ratio) * log_ratio,
            r"tensor a \(8\) must match .* tensor b \(36\) .* Use documents.spread\(x\) for",
        ),
        (
            lambda log_ratio, documents, groups: (
                documents.first(log_ratio) * groups.mean(documents.sum(log_ratio))
            ),
            r"per group, the other per document\. Use groups\.spread\(x\) for",
        ),
        (
            lambda log_ratio: log_ratio.detach().numpy(),
            r"per token, \(36,\) .*\(got a ndarray: \(36,\), float64\)",
        ),
        (doubles_what_it_is_given, "another loss when it is called again"),
        (lambda log_probs: torch.rand_like(log_probs) * log_probs, "It may draw no random numbers"),
        (lambda log_probs: -log_probs.detach(), "has a gradient of 0 for every token"),
        (lambda log_ratio, step: -torch.sign(log_ratio), "has a gradient of 0 for every token"),
    ],
)
def test_a_function_that_cannot_train_as_it_says_is_told_why(loss, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        check_function(FunctionLoss(loss))


@pytest.mark.parametrize(
    "function", ["policy_loss", "linear_policy_loss", "log_prob_loss", "step_coefficients"]
)
def test_a_slope_that_is_not_finite_is_refused_where_the_loss_is_computed(function):
    def root_at_0_without_advantage(log_ratio, advantages):
        distance = (log_ratio - log_ratio.detach()).abs()  # 0, with a gradient
        return log_ratio * advantages + (distance + (advantages != 0)).sqrt()

    inputs = data()
    made_from = {name: value for name, value in inputs.items() if name != "logits"}
    made_from |= {"hidden": inputs["logits"], "lm_head_weight": torch.eye(VOCABULARY).double()}
    call, inputs = {
        "policy_loss": (policy_loss, inputs),
        "linear_policy_loss": (linear_policy_loss, made_from),
        "log_prob_loss": (log_prob_loss, step_of(inputs)),
        "step_coefficients": (step_coefficients, step_of(inputs)),
    }[function]
    message = (
        r"a slope .* for a token of log-ratio .* in document 3 \(got nan, where the loss is 0\)"
    )
    with pytest.raises(ValueError, match=message):
        call(**inputs, loss=root_at_0_without_advantage)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rewards_coefficients_and_factors_that_are_not_finite_are_refused(poison):
    inputs = data()
    rewards = REWARDS.clone()
    rewards[3] = poison

    def by_reward(log_ratio, rewards, ratio):
        return -ratio(log_ratio) * rewards

    def by_group(log_ratio, group_rewards, ratio):
        return -ratio(log_ratio) * group_rewards

    groups = {"rewards": rewards, "group_index": GROUPS}
    of_rewards = (
        r"^rewards needs a finite number for each document that is trained \(got (nan|inf) in "
        r"document 3\)\. Drop the documents, or mask all of their tokens"
    )
    for loss in (towards_rewards, "tpo", "lpo"):
        with pytest.raises(DataError, match=of_rewards):
            step_coefficients(**step_of(inputs), loss=loss, **groups)
    for loss in (by_reward, by_group):
        with pytest.raises(DataError, match=of_rewards):
            policy_loss(**inputs, loss=loss, **groups)
        assert policy_loss(**inputs, loss=loss, **groups, check_finite=False).loss.isnan()
    first = int(((inputs["document_index"] == 3) & (inputs["labels"] >= 0)).nonzero()[0])
    entropy = torch.where(inputs["document_index"] == 3, poison, 1.0)
    factors, threshold = top_entropy(entropy, inputs["labels"] >= 0, 0.5)
    assert threshold == 1
    of_lists = top_entropy(entropy.tolist(), (inputs["labels"] >= 0).tolist(), 0.5)
    assert torch.equal(of_lists.factors.nan_to_num(7.0), factors.double().nan_to_num(7.0))
    with pytest.raises(
        ValueError, match=r"^entropy needs one floating number per token \(got \(2,"
    ):
        top_entropy(torch.tensor([1, 2]), torch.ones(2), 0.5)
    with pytest.raises(DataError, match=r"^factors needs finite numbers .*nan in document 3\)"):
        policy_loss(**inputs, loss="grpo", factors=factors)
    for name, loss in (("coefficients", towards_rewards), ("factors", "grpo")):
        vector = torch.where(inputs["labels"] < 0, math.nan, 1.0)  # masked ones are not read
        assert policy_loss(**inputs, loss=loss, **{name: vector}).loss.isfinite()
        vector[first] = poison
        with pytest.raises(DataError, match=rf"^{name} needs finite .* in document 3\)"):
            policy_loss(**inputs, loss=loss, **{name: vector})
        unchecked = policy_loss(**inputs, loss=loss, **{name: vector}, check_finite=False)
        assert unchecked.loss.isnan()


def test_the_reward_of_a_document_without_a_trained_token_is_not_read():
    inputs = data()
    inputs["labels"] = torch.where(inputs["document_index"] == 3, -1, inputs["labels"])
    options = {"loss": towards_rewards, "group_index": GROUPS}
    poisoned = torch.where(torch.arange(7) == 3, math.nan, REWARDS)
    expected, found = (
        step_coefficients(**step_of(inputs), **options, rewards=rewards).coefficients
        for rewards in (REWARDS, poisoned)
    )
    assert expected.abs().sum() > 0
    assert torch.equal(found, expected)


def test_a_groups_mean_reward_counts_each_attempt_that_has_one():
    inputs = data()
    inputs["labels"] = torch.where(inputs["document_index"] == 3, -1, inputs["labels"])
    rewards = torch.tensor([2.0, 1.0, 0.0, 5.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    attempts = torch.tensor([0, 1, 2, 3, 4, 4, 5])
    groups = torch.tensor([0, 1, 0, 0, 1, 1, 1])

    def means(rewards):
        seen = {}

        def by_group(log_ratio, group_rewards, ratio):
            trained = inputs["labels"] >= 0
            numbers = inputs["document_index"][trained].tolist()
            seen.update(zip(numbers, group_rewards[trained].tolist(), strict=True))
            return -ratio(log_ratio) * group_rewards

        options = {"group_index": groups, "trajectory_index": attempts}
        policy_loss(**inputs, loss=by_group, rewards=rewards, **options)
        return [seen[0], seen[4]]

    # Document 3 has no trained token and yet a reward; 4 and 5 are one attempt.
    assert means(rewards) == pytest.approx([7 / 3, 4 / 3])
    rewards[3] = math.nan
    assert means(rewards) == pytest.approx([1.0, 4 / 3])


def by_token(log_ratio, advantages, ratio):
    return -ratio(log_ratio) * advantages, {"one": torch.ones_like(log_ratio)}


def by_documents(log_ratio, advantages, ratio, documents):
    of_documents = documents.mean(advantages)
    losses = -ratio(log_ratio) * documents.spread(of_documents)
    return losses, {"one": torch.ones_like(of_documents)}


def by_groups(log_ratio, advantages, ratio, documents, groups, step):
    mean = groups.mean(documents.mean(advantages))
    count = torch.ones_like(advantages) * step.num_documents
    losses = -ratio(log_ratio) * (advantages - documents.spread(groups.spread(mean)))
    return losses, {"one": mean * 0 + 1, "mean": mean, "count": count}


def test_a_number_per_group_is_that_of_its_document_where_each_group_has_one():
    inputs = data()
    step = step_of(inputs)

    def of_groups(log_probs, documents, groups):
        return groups.mean(documents.mean(log_probs))

    losses = [
        float(step_coefficients(**step, loss=of_groups, aggregation="token_mean", **numbers).loss)
        for numbers in (
            {"group_index": torch.arange(7)},
            {"group_index": torch.tensor([3, 0, 6, 1, 5, 2, 4])},
        )
    ]
    trained = step["mask"]
    assert losses == pytest.approx(2 * [float(step["log_probs"][trained].mean())])


def without_ratio(log_ratio, documents, groups):
    return groups.sum(documents.mean(log_ratio) ** 2)


def test_a_document_of_weight_0_counts_as_0_in_metrics_whatever_the_function_asks_for():
    """As with the families, and as a document without a trained token."""
    left_out = 5

    def weights(totals, *, document_index, tokens_per_document, **_):
        counts = torch.cat([tokens_per_document, tokens_per_document.new_ones(1)])
        weight = 1 / (totals.num_documents * counts[document_index]).double()
        return torch.where(document_index == left_out, 0.0, weight)

    inputs = data()
    step = step_of(inputs)
    trained = step["mask"]
    assert trained[inputs["document_index"] == left_out].any()
    trained = trained & (inputs["document_index"] != left_out)
    index = inputs["document_index"][trained]
    counts = torch.bincount(index, minlength=7)
    ratio = (step["log_probs"] - inputs["old_log_probs"])[trained].exp()
    expected = {
        "ratio_new_old": float((ratio / counts[index]).sum() / 7),
        "effective_sample_size": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "max_ratio_new_old": float(ratio.max()),
        "one": int((counts > 0).sum()) / 7,
    }
    advantages = torch.zeros(7, dtype=torch.float64)
    advantages[index] = inputs["advantages"][trained]
    options = {"reducer": weights, "group_index": GROUPS, "metrics": "basic"}
    for loss in (by_token, by_documents, by_groups, without_ratio):
        made = step_coefficients(**step, loss=loss, **options)
        assert made.coefficients[inputs["document_index"] == left_out].abs().sum() == 0
        measured = {name: float(made.metrics[name]) for name in expected if name in made.metrics}
        assert len(measured) == len(expected) - (loss is without_ratio)
        assert measured == pytest.approx({name: expected[name] for name in measured}), loss
        assert int(made.metrics["num_tokens"]) == len(index)
        assert int(made.metrics["num_empty_documents"]) == int((counts == 0).sum())
        if loss is by_groups:
            members = [d for d in range(7) if counts[d]]
            assert float(made.metrics["count"]) == pytest.approx(len(members) * expected["one"])
            means = [
                sum(float(advantages[d]) for d in members if GROUPS[d] == group)
                / sum(int(GROUPS[d]) == group for d in members)
                for group in range(3)
            ]
            of_all = sum(means[int(GROUPS[d])] for d in range(7) if counts[d]) / 7
            assert float(made.metrics["mean"]) == pytest.approx(of_all)


# Tokens, documents and groups of the same number

OF_COUNTS = (1, 1, 3, 2, 1, 2)
"""Trained tokens of six documents, in groups of two; the third and the last document have weight
0."""
OF_PROMPTS = torch.tensor([0, 1, 0, 2, 2, 1])
SEEN = (0, 1, 3, 4)
CUTS_WITH_AS_MANY = (
    ((0, 2), (1, 3), (4, 5)),  # a token of a seen document beside one of weight 0
    ((0, 1), (2, 4), (3, 5)),  # as many tokens as documents
    ((0, 1, 2, 4, 5), (3,)),
    ((0, 1, 2, 3, 4, 5),),
)


def six_documents():
    """Return the tensors of `log_prob_loss` of the documents of OF_COUNTS."""
    generator = torch.Generator().manual_seed(3)
    index = torch.repeat_interleave(torch.arange(6), torch.tensor(OF_COUNTS))
    new, noise = torch.randn(2, len(index), generator=generator, dtype=torch.float64)
    log_probs = -1 - new.abs()
    return {
        "log_probs": log_probs,
        "old_log_probs": (log_probs + 0.5 * noise).clamp(max=0.0),
        "advantages": torch.randn(6, generator=generator, dtype=torch.float64)[index],
        "document_index": index,
        "mask": torch.ones(len(index), dtype=torch.bool),
    }


def but_two(totals, *, document_index, tokens_per_document, **_):
    """Weigh by 1 / (D N_d), and the third and the last document by 0."""
    weight = 1 / (totals.num_documents * tokens_per_document[document_index]).double()
    return torch.where((document_index == 2) | (document_index == 5), 0.0, weight)


def of_documents_alone(log_ratio, advantages, ratio, documents):
    r = ratio(documents.mean(log_ratio))
    return -r * documents.mean(advantages), {"own": r, "bounds": (0.9, 1.1)}


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [((None, 1.1), -1.0, 1.1), ((0.9, None), 0.9, math.inf), ((None, None), -1.0, math.inf)],
)
def test_a_function_may_have_one_bound_alone(bounds, low, high):
    def bounded(log_ratio, advantages, ratio):
        return -ratio(log_ratio) * advantages, {"bounds": bounds}

    inputs = six_documents()
    made = log_prob_loss(**inputs, num_documents=6, loss=bounded, metrics="basic")
    ratio = (inputs["log_probs"] - inputs["old_log_probs"]).exp()
    shares = 1 / torch.tensor(OF_COUNTS)[inputs["document_index"]].double()
    outside = (ratio < low) | (ratio > high)
    expected = float((shares * outside).sum() / 6)
    assert float(made.metrics["clipped_ratio_fraction"]) == pytest.approx(expected)


def clipped_by_token(log_ratio, advantages, ratio):
    return -ratio(log_ratio) * advantages, {"bounds": (0.9, 1.1)}


def clipped_by_quantiles(log_ratio, advantages, ratio, step):
    r = ratio(log_ratio)
    return -r * advantages, {"bounds": (step.quantile(r, 0.3), step.quantile(r, 0.7))}


@pytest.mark.parametrize("loss", [clipped_by_token, of_documents_alone, clipped_by_quantiles])
def test_the_gap_to_the_sampler_alone_is_held_against_the_bounds_of_a_function(loss):
    """Its ratio of old to sampling log-probs, and the bounds that it has for the new ones."""
    inputs = six_documents()
    index = inputs["document_index"]
    noise = torch.randn(len(index), generator=torch.Generator().manual_seed(8)).double()
    sampling = (inputs["old_log_probs"] + 0.3 * noise).clamp(max=0.0)
    made = step_coefficients(
        **inputs,
        sampling_log_probs=sampling,
        num_documents=6,
        loss=loss,
        reducer=but_two,
        metrics="basic",
    )
    gap = inputs["old_log_probs"] - sampling
    low, high = 0.9, 1.1
    if loss is of_documents_alone:
        gap = torch.stack([gap[index == d].mean() for d in range(6)])[index]
    if loss is clipped_by_quantiles:
        of_step = (inputs["log_probs"] - inputs["old_log_probs"]).exp()
        low, high = np.quantile(of_step[torch.isin(index, torch.tensor(SEEN))], [0.3, 0.7])
    outside = ((gap.exp() < low) | (gap.exp() > high)) & torch.isin(index, torch.tensor(SEEN))
    expected = float((outside / torch.tensor(OF_COUNTS)[index]).sum() / 6)
    assert 0 < expected < 1
    assert float(made.metrics["clipped_sampling_fraction"]) == pytest.approx(expected)


def of_tokens_and_documents(log_ratio, advantages, ratio, documents):
    r = ratio(log_ratio)
    return -documents.mean(r) * documents.mean(advantages), {"own": r, "bounds": (0.9, 1.1)}


@pytest.mark.parametrize("loss", [of_documents_alone, of_tokens_and_documents])
def test_metrics_of_a_function_do_not_depend_on_where_a_piece_has_as_many_tokens_as_documents(loss):
    """v is 1 / N_d for the ratio of a document and 1 for that of a token, in every piece."""
    inputs = six_documents()
    index, counts = inputs["document_index"], torch.tensor(OF_COUNTS)
    log_ratio = inputs["log_probs"] - inputs["old_log_probs"]
    if loss is of_documents_alone:
        means = [float(log_ratio[index == d].mean()) for d in range(6)]
        ratio = torch.tensor(means, dtype=torch.float64)[index].exp()
        v = 1 / counts[index].double()
    else:
        ratio = log_ratio.exp()
        v = torch.ones_like(ratio)
    has_weight = torch.isin(index, torch.tensor(SEEN))
    v = v * has_weight
    u = has_weight / counts[index].double()
    outside = (ratio < 0.9) | (ratio > 1.1)
    expected = {
        "ratio_new_old_sum": float((v * ratio).sum()),
        "effective_sample_size": float((v * ratio).sum() ** 2 / (v.sum() * (v * ratio**2).sum())),
        "ratio_new_old": float((u * ratio).sum() / 6),
        "clipped_ratio_fraction": float((u * outside).sum() / 6),
        "own": float((u * ratio).sum() / 6),
    }
    totals = StepTotals(6, len(index), 0)
    for cut in CUTS_WITH_AS_MANY:
        sums = []
        for piece in cut:
            rows = torch.isin(index, torch.tensor(piece))
            of_piece = {name: vector[rows] for name, vector in inputs.items()}
            made = log_prob_loss(
                **of_piece,
                num_documents=6,
                totals=totals,
                loss=loss,
                reducer=but_two,
                metrics="basic",
            )
            sums.append(made.metric_sums)
        first, *others = sums
        for other in others:
            first = first.merge(other)
        measured = first.finalize(totals)
        assert {name: float(measured[name]) for name in expected} == pytest.approx(expected), cut


def test_a_number_per_document_is_none_of_its_rank_s_tokens():
    """Two ranks share two documents: the first rank has two tokens of the second document and none
    of the first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, VOCABULARY, generator=generator, dtype=torch.float64)
    inputs = {
        "labels": torch.tensor([3, 1, 4, 1, 5]),
        "old_log_probs": -1 - torch.rand(5, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([-2.0, -2.0, -2.0, 1.0, 1.0], dtype=torch.float64),
        "document_index": torch.tensor([1, 1, 1, 0, 0]),
    }
    totals = StepTotals(2, 5, 0)

    def on_rank(rank):
        rows = slice(0, 2) if rank == 0 else slice(2, 5)
        made = policy_loss(
            logits[rows],
            **{name: vector[rows] for name, vector in inputs.items()},
            num_documents=2,
            totals=totals,
            sequence_group=dist.group.WORLD,
            loss=of_documents_alone,
            metrics="basic",
        )
        loss, sums = made.metric_sums.all_reduce(made.loss, dist.group.WORLD)
        return float(loss), float(sums.finalize(totals)["own"])

    log_probs = logits.log_softmax(-1).gather(1, inputs["labels"][:, None])[:, 0]
    log_ratio = log_probs - inputs["old_log_probs"]
    first, second = (math.exp(float(part.mean())) for part in (log_ratio[3:], log_ratio[:3]))
    for of_rank in on_ranks(2, on_rank):
        assert of_rank == pytest.approx(((2 * second - first) / 2, (first + second) / 2))


def of_pairs(log_ratio, advantages, documents, groups):
    """The number of ordered pairs of a prompt, counted over (D, D) without a sum of `groups`."""
    s = documents.mean(log_ratio)
    index = groups.spread(torch.arange(len(groups), dtype=s.dtype))
    pairs = ((index[:, None] == index[None]).sum(1) - 1).to(s)
    largest = groups.max(pairs)
    return groups.sum(s * documents.mean(advantages)), {"pairs": largest}


def test_a_number_of_a_prompt_is_that_of_the_documents_that_are_seen():
    """Also where each prompt has one that is seen."""
    inputs = six_documents()
    for groups, expected in (
        (OF_PROMPTS, (0, 0, 0, 1, 1, 0)),  # prompts of documents 0 2, 1 5, and 3 4
        (torch.tensor([0, 1, 0, 2, 3, 1]), (0,) * 6),
        (torch.tensor([0, 1, 2, 0, 1, 2]), (1, 1, 0, 1, 1, 0)),  # 2 and 5 have their own prompt
        (torch.tensor([1, 0, 1, 1, 0, 0]), (1, 1, 0, 1, 1, 0)),
    ):
        made = step_coefficients(
            **inputs,
            num_documents=6,
            group_index=groups,
            loss=of_pairs,
            reducer=but_two,
            metrics="basic",
        )
        assert float(made.metrics["pairs"]) == pytest.approx(sum(expected) / 6)


def of_comparisons(log_ratio, advantages, documents, groups):
    """The documents of the step that each document is below, by a comparison of (D, D)."""
    s = documents.mean(log_ratio)
    below = (s[:, None] < s[None]).sum(1).to(s)
    return s * documents.mean(advantages), {"below": below}


@pytest.mark.parametrize("groups", [OF_PROMPTS, torch.tensor([0, 0, 1, 0, 1, 0])])
def test_documents_are_compared_with_those_of_a_weight_alone(groups):
    """Documents 2 and 5 have weight 0."""
    inputs = six_documents()
    made = step_coefficients(
        **inputs,
        num_documents=6,
        group_index=groups,
        loss=of_comparisons,
        reducer=but_two,
        metrics="basic",
    )
    index = inputs["document_index"]
    log_ratio = inputs["log_probs"] - inputs["old_log_probs"]
    means = [float(log_ratio[index == document].mean()) for document in range(6)]
    below = {d: sum(means[d] < means[other] for other in SEEN) for d in SEEN}
    of_all = {d: sum(means[d] < other for other in means) for d in SEEN}
    assert sum(below.values()) != sum(of_all.values())
    assert float(made.metrics["below"]) == pytest.approx(sum(below.values()) / 6)


def padded_soft_clip(log_probs, old_log_probs, advantages, mask, totals):
    """The mean over documents of the means of soft-clipped tokens, as somebody might have it."""
    ratio = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    losses = -0.3 * torch.tanh((ratio - 1) / 0.3) * torch.where(mask, advantages, 0.0)
    means = losses.sum(1) / mask.sum(1).clamp(min=1)
    return means.sum() / totals.num_documents


def test_a_loss_of_somebodys_own_is_held_against_a_function():
    def soft_clip(log_ratio, advantages, ratio, softness=0.3):
        return -softness * torch.tanh((ratio(log_ratio) - 1) / softness) * advantages

    assert_conforms(padded_soft_clip, soft_clip, aggregation="sample_mean")
    with pytest.raises(AssertionError, match="its value is"):
        assert_conforms(padded_soft_clip, soft_clip, aggregation="sample_mean", softness=0.2)
    with pytest.raises(AssertionError, match="its value is") as error:
        assert_conforms(padded_soft_clip, soft_clip, aggregation="token_mean")
    first, on_policy, *others = str(error.value).splitlines()
    assert first == "padded_soft_clip is not soft_clip, aggregation=token_mean:"
    # On-policy the value is 0 under every aggregation.
    assert on_policy.startswith("  on a whole step, on-policy, its gradient is wrong by ")
    assert "That is" not in on_policy
    assert "That is the value of aggregation=sample_mean" in others[0]
    with pytest.raises(ValueError, match="where the step is cut: it depends on other tokens"):
        assert_conforms(padded_soft_clip, centred_by_call, aggregation="token_mean")
    with pytest.raises(ValueError, match="has no rewards, for which tpo asks"):
        assert_conforms(padded_soft_clip, "tpo", aggregation="prompt_mean")


def test_a_padded_loss_over_groups_is_held_against_a_function_of_groups():
    def spread_of_groups(log_probs, documents, groups):
        return groups.logsumexp(documents.sum(log_probs))

    def padded(log_probs, mask, group_index, totals):
        sums = torch.where(mask, log_probs, 0.0).sum(1)
        total = torch.zeros((), dtype=torch.float64)
        for group in range(2):
            # A document without a trained token is no member of its group.
            members = (group_index == group) & mask.any(1)
            total = total + torch.logsumexp(sums[members], 0) / 2
        return total

    options = {"aggregation": "prompt_mean", "micro_batches": False}
    assert_conforms(padded, spread_of_groups, **options)


def two_documents() -> tuple[torch.Tensor, ...]:
    """Return log_probs, old_log_probs, advantages, document_index and mask of two documents."""
    new = torch.tensor([-1.0, -2.0, -1.5, -0.5], requires_grad=True)
    index = torch.tensor([0, 0, 1, 1])
    return new, new.detach() - 0.1, torch.tensor([1.0, 1.0, -1.0, -1.0]), index, index >= 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda log_probs, advantages: advantages,
        lambda log_ratio, advantages: -(log_ratio * advantages).detach(),
        lambda log_ratio, documents: documents.sum(log_ratio.detach()),
        lambda log_ratio, step: torch.ones_like(log_ratio),
    ],
)
def test_a_loss_without_a_gradient_is_refused_where_it_is_computed(loss):
    function = step_coefficients if "step" in FunctionLoss(loss).asked else log_prob_loss
    with pytest.raises(ValueError, match="gradient of 0 for every token, so it trains nothing"):
        function(*two_documents(), loss=loss)


def test_coefficients_of_a_function_in_inference_mode_are_refused():
    with torch.inference_mode(), pytest.raises(ValueError, match=r"Use torch\.no_grad\(\)$"):
        step_coefficients(*two_documents(), loss=lambda log_ratio, step: -log_ratio)
    with torch.no_grad():
        made = step_coefficients(*two_documents(), loss=lambda log_ratio, step: -log_ratio)
    assert made.coefficients.tolist() == [-0.25] * 4  # 1 / D over the document's 2 tokens


def test_log_probs_of_a_sampler_or_a_reference_that_nothing_reads_are_refused():
    arguments = two_documents()
    other = arguments[1]
    for name in ("sampling_log_probs", "ref_log_probs"):
        given = {name: other}
        with pytest.raises(ValueError, match=f"^{name} has no effect without .* metrics='none'"):
            log_prob_loss(*arguments, loss="grpo", **given)
        with pytest.raises(ValueError, match=f"^{name} has no effect"):
            step_coefficients(*arguments, loss="grpo", **given)
        assert log_prob_loss(*arguments, loss="grpo", metrics="basic", **given).metrics
    by_sampler = log_prob_loss(
        *arguments,
        loss=lambda log_probs, sampling_log_probs: log_probs - sampling_log_probs,
        sampling_log_probs=other,
    )
    by_reference = log_prob_loss(
        *arguments,
        loss=lambda log_probs, ref_log_probs: log_probs - ref_log_probs,
        ref_log_probs=other,
    )
    assert by_sampler.loss.item() == by_reference.loss.item() == pytest.approx(0.1, rel=1e-6)


def by_place(log_ratio, advantages, /):
    return -log_ratio * advantages


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (by_place, r"^by_place needs .*\(got log_ratio, advantages before a slash\)"),
        (torch.exp, r"^the loss function exp needs parameters with names"),
        (lambda log_ratio: np.exp(log_ratio), r"^the loss function <lambda> hands .* to NumPy"),
    ],
)
def test_a_function_of_another_kind_is_refused_in_a_sentence(loss, message):
    with pytest.raises(ValueError, match=message):
        log_prob_loss(*two_documents(), loss=loss)


@pytest.mark.parametrize("name", ["sampling_log_probs", "ref_log_probs"])
def test_the_second_pass_takes_what_the_first_one_has_measured(name):
    log_probs, old, advantages, index, mask = two_documents()
    rest = old, advantages, index, mask
    options = {"loss": "tpo", "rewards": torch.tensor([0.0, 1.0], dtype=torch.float64), name: old}
    options["group_index"] = torch.tensor([0, 0])
    made = step_coefficients(log_probs, *rest, **options, metrics="basic")
    leaf = log_probs.detach().requires_grad_()
    log_prob_loss(leaf, *rest, **options, coefficients=made.coefficients).loss.backward()
    assert_close(leaf.grad, made.coefficients.float())
    assert made.coefficients.abs().min() > 0


@pytest.mark.parametrize(
    ("num_empty", "message"),
    [
        (4, r"^totals.num_empty_documents needs at most totals.num_documents, 3 \(got 4\)"),
        (2, r"needs to be at least the 2 documents of this piece with a trained token \(got 1\)"),
        (torch.tensor(2), r"at least the 2 documents of this piece"),
        (1, None),
    ],
)
def test_totals_with_more_empty_documents_than_there_can_be_are_refused(num_empty, message):
    totals = StepTotals(3, 4, num_empty)
    if message is None:
        assert log_prob_loss(*two_documents(), loss="grpo", totals=totals).loss.isfinite()
        return
    with pytest.raises(ValueError, match=message):
        log_prob_loss(*two_documents(), loss="grpo", totals=totals)

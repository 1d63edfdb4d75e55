"""A function, class or reducer of the user's own that depends on the cut only for the numbers of a
real step is refused on that step; those that are right pass on any."""

from dataclasses import dataclass, replace

import pytest
import torch
from losses.test_example_losses import example
from losses.test_functions import WRITTEN, kimi, towards_rewards

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.losses.aggregation import Custom, aggregation_of
from pgtoolkit.losses.families import Family
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.slopes import check_family
from pgtoolkit.losses.trial import check_function, check_on_step, check_reducer

LENGTHS = (41, 7, 0, 25, 60, 1, 3, 18, 12, 9)
GROUPS = (0, 1, 0, 2, 1, 0, 2, 3, 3, 3)


def step(seed=0, lengths=LENGTHS, advantages=1.0, outlier=None):
    """Return (tokens, log-probs, totals) of a step of documents, some without a trained token."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    index = torch.repeat_interleave(torch.arange(len(lengths)), counts)

    def noise(size):
        return torch.randn(size, generator=generator)

    new = (-1.5 + noise(len(index))).clamp(max=-1e-4)
    old = (new + 0.1 * noise(len(index))).clamp(max=-1e-4)
    if outlier is not None:
        new[3] = old[3] + outlier
    groups = torch.tensor(GROUPS[: len(lengths)])
    rewards = noise(len(lengths)).double()
    tokens = Tokens(
        labels=torch.zeros(len(index), dtype=torch.int64),
        document_index=index,
        num_documents=len(lengths),
        advantages=(advantages * noise(len(lengths)))[index],
        old_log_probs=old,
        sampling_log_probs=old,
        ref_log_probs=old,
        group_index=groups,
        rewards=rewards,
        group_rewards=rewards,
    )
    tokens_of_groups = torch.zeros(4, dtype=torch.int64).index_add(0, groups, counts)
    empty = int((counts == 0).sum())
    return tokens, new, StepTotals(len(lengths), int(counts.sum()), empty, 4, tokens_of_groups)


def tried(loss, of_step):
    check_on_step(loss, *of_step)


def of_function(function):
    return Loss(FunctionLoss(function), aggregation_of("token_mean"))


# Each of these is right for the made-up documents of `check_function`, which have 36 tokens in
# eight documents of at most eight, and no log-prob below -20.


def centred_in_long_calls(log_probs, advantages):
    mean = advantages.mean() if len(advantages) > 100 else 0.0
    return -(advantages - mean) * log_probs


def capped_at_a_quantile(log_ratio, advantages):
    cap = log_ratio.detach().quantile(0.9) if len(log_ratio) >= 64 else 100.0
    return -advantages * log_ratio.clamp(max=cap)


def scaled_by_the_longest(log_probs, advantages, lengths):
    scale = lengths.max() if lengths.max() > 20 else 1.0
    return -advantages * log_probs / scale


def beside_rare_tokens(log_probs, advantages):
    weight = 0.5 if bool((log_probs < -30).any()) else 1.0
    return -weight * advantages * log_probs


def of_the_token_before(log_ratio, advantages, position):
    before = torch.where(position > 10, log_ratio.roll(1).detach(), 0.0)
    return -advantages * (log_ratio + before * log_ratio)


def whitened_over_many_documents(log_probs, advantages, documents):
    mean = documents.mean(advantages)
    if len(mean) > 8:
        mean = mean - mean.mean()
    return -documents.spread(mean) * log_probs


def another_metric(log_probs, advantages):
    far = log_probs.detach().sum() if len(log_probs) > 100 else log_probs.detach()
    return -advantages * log_probs, {"far": far.expand(len(log_probs))}


DEPENDENT = [
    (centred_in_long_calls, "loss", "other tokens. Ask for `documents`"),
    (capped_at_a_quantile, "loss", "other tokens. Ask for `documents`"),
    (scaled_by_the_longest, "loss", "other tokens. Ask for `documents`"),
    (beside_rare_tokens, "loss", "other tokens. Ask for `documents`"),
    (of_the_token_before, "loss", "other tokens. Ask for `documents`"),
    (whitened_over_many_documents, "loss", "other documents. Ask for `groups`"),
    (another_metric, "metric far", "other tokens. Ask for `documents`"),
]


@pytest.mark.parametrize(("function", "number", "word"), DEPENDENT)
def test_a_dependence_that_only_the_steps_own_vectors_show_is_refused(function, number, word):
    check_function(FunctionLoss(function))
    for seed in range(5):
        with pytest.raises(ValueError, match=rf"another {number} where the step is cut.*{word}"):
            check_on_step(of_function(function), *step(seed, outlier=-60.0), seed=seed)


@dataclass(frozen=True)
class CentredInLongCalls(Family):
    """A class that is right for the 1500 points of `check_family`."""

    slope_of = "log_prob"

    def surrogate(self, log_ratio, advantages, log_probs):
        mean = advantages.mean() if len(advantages) < 1000 else 0.0
        return -(advantages - mean) * log_probs, -(advantages - mean)


def test_a_class_of_the_users_own_is_tried_as_a_function_is():
    check_family(CentredInLongCalls())
    with pytest.raises(ValueError, match="the loss family centredinlongcalls gives a token anothe"):
        tried(Loss(CentredInLongCalls(), aggregation_of("token_mean")), step())


def of_totals(totals, *, mask, document_index, tokens_per_document, group_index):
    return 1.0 / (totals.num_documents * tokens_per_document.clamp(min=1)[document_index])


def of_a_micro_batch(totals, *, mask, **others):
    return mask / mask.sum()


def of_long_micro_batches(totals, *, mask, **others):
    return mask / (mask.sum() if len(mask) > 100 else totals.num_tokens)


def test_a_reducer_that_divides_by_a_micro_batch_is_refused():
    right = Loss(FunctionLoss(WRITTEN["grpo"]), Custom(of_totals))
    check_reducer(Custom(of_totals))
    tried(right, step())
    message = "the reducer gives a token another weight .*`totals`"
    with pytest.raises(ValueError, match=message):
        check_reducer(Custom(of_a_micro_batch))
    check_reducer(Custom(of_long_micro_batches))
    with pytest.raises(ValueError, match=message):
        tried(replace(right, aggregation=Custom(of_long_micro_batches)), step())


RIGHT = [*WRITTEN.values(), kimi, towards_rewards, *map(example, ("gapo", "cppo", "tis"))]
STEPS = {
    "usual": {},
    "zero advantages": {"advantages": 0.0},
    "one document": {"lengths": (9,)},
    "one token": {"lengths": (1,)},
    "no tokens": {"lengths": (0, 0)},
    "empty documents": {"lengths": (0, 6, 0, 3, 0)},
    "an outlier": {"outlier": -60.0},
}


@pytest.mark.parametrize("kind", STEPS)
def test_functions_that_are_right_pass_on_any_step(kind):
    for seed in range(2):
        for function in RIGHT:
            check_on_step(of_function(function), *step(seed, **STEPS[kind]), seed=seed)


def test_numbers_that_are_not_finite_are_left_to_the_step():
    tokens, new, totals = step()
    new[5] = float("nan")
    tried(of_function(WRITTEN["gspo"]), (tokens, new, totals))

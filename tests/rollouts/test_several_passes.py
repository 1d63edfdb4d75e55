"""Several passes over a batch of rollouts: the steps of each, what stays as it was at the batch's
begin, and where a resumed run continues. Losses are those of loops in float64."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from builders.documents import document_of
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.runs import SHORT, config_of
from builders.threads import on_ranks
from keys.small_runs import labels_of, module_and_steps, specified
from losses import group_formulas
from torch import nn

from pgtoolkit.batch import Step
from pgtoolkit.comparison.tokens import last_of_batch
from pgtoolkit.config.plan import arithmetic
from pgtoolkit.config.validate import validate
from pgtoolkit.document import OPTIONAL_VECTORS, Document
from pgtoolkit.errors import DataError
from pgtoolkit.losses import reference_terms
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.batch_counts import steps_before
from pgtoolkit.rollouts.passes import Passes
from pgtoolkit.rollouts.settings import AccumulationSettings, LastStep, PolicyRolloutSettings
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader, loadable
from pgtoolkit.training.fit import BatchesOfRollouts
from pgtoolkit.training.module import PolicyGradientModule

SHUFFLED = Passes(3, groups=3, group_size=2, seed=7)


class Batches(Source):
    """Batches of six documents, two to a prompt; notes where each step begins.

    left_out: positions of the documents that are in no step.
    """

    batch_size = 6

    def __init__(self, passes: Passes, num_batches: int = 2, left_out: Sequence[int] = ()):
        self.passes = passes
        self.num_documents = num_batches * self.batch_size
        self._left_out = left_out
        self.begins: list[tuple[int, int]] = []

    def before_step(self, position: int, number: int = 0) -> None:
        self.begins.append((position, number))

    def document(self, position: int) -> Document:
        return document_of(
            4,
            torch.arange(4) >= 2,
            group=position // 2,
            name=str(position),
            left_out=position in self._left_out,
        )


def loader_of(
    source: Source,
    docs_per_step: int = 4,
    last_step: str = "short",
    layout: Layout = ONE_PROCESS,
    max_tokens: int = 8,
    groups: bool = False,
) -> StepLoader:
    accumulation = AccumulationSettings(
        docs_per_step=docs_per_step, max_tokens=max_tokens, last_step=LastStep(last_step)
    )
    return StepLoader(source, accumulation, groups, 99, layout)


def names(step: Step) -> list[int]:
    return [int(document.name) for document in step.documents]


def places(steps: list[Step]) -> list[tuple[bool, bool]]:
    return [(step.of_pass.is_first, step.ends_batch) for step in steps]


@pytest.mark.parametrize(
    ("last_step", "left_out", "of_a_pass"),
    [
        ("short", (), [[0, 1, 2, 3], [4, 5]]),
        ("drop", (), [[0, 1, 2, 3]]),
        ("short", (0, 1, 6, 7), [[2, 3, 4, 5]]),
        ("short", (4, 5, 10, 11), [[0, 1, 2, 3]]),
    ],
)
def test_the_steps_of_a_batch_are_made_again_in_each_pass(last_step, left_out, of_a_pass):
    steps = [*loader_of(Batches(Passes(3), left_out=left_out), last_step=last_step)]
    of_second = [[number + 6 for number in step] for step in of_a_pass]
    assert [names(step) for step in steps] == [*of_a_pass * 3, *of_second * 3]
    length = len(of_a_pass)
    of_batch = [(place < length, place == 3 * length - 1) for place in range(3 * length)]
    assert places(steps) == of_batch * 2


def names_on_a_rank(rank: int) -> list[list[int]]:
    layout = Layout.of_world("cpu", 60, data_parallel=2)
    return [names(step) for step in loader_of(Batches(SHUFFLED), layout=layout)]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_shuffled_passes_take_whole_groups_in_an_order_that_only_the_seed_decides():
    """Neither micro-batches nor ranks nor the size of a step change it."""
    steps = [*loader_of(Batches(SHUFFLED))]
    orders = [names(steps[i]) + names(steps[i + 1]) for i in range(0, len(steps), 2)]
    for place, order in enumerate(orders):
        batch, number = divmod(place, 3)
        seed = int(np.random.PCG64([7, batch]).random_raw()) >> 32
        groups = np.argsort(np.random.PCG64([seed, number]).random_raw(3), kind="stable")
        assert order == [6 * batch + 2 * group + member for group in groups for member in (0, 1)]
    assert len({tuple(order) for order in orders[:3]}) > 1
    assert orders[0] != [0, 1, 2, 3, 4, 5]
    of_other_sizes = [names(step) for step in loader_of(Batches(SHUFFLED), 6, max_tokens=4)]
    assert of_other_sizes == orders

    assert on_ranks(2, names_on_a_rank) == [[names(step) for step in steps]] * 2


@pytest.mark.parametrize("passes", [Passes(3), SHUFFLED])
def test_a_loader_goes_on_from_each_place_in_each_pass(passes):
    whole = [*loader_of(Batches(passes))]
    for done, step in enumerate(whole, 1):
        resumed = loader_of(Batches(passes))
        resumed.load_state_dict(loadable(step.state_after))
        rest = [*resumed]
        assert [names(later) for later in rest] == [names(later) for later in whole[done:]]
        assert places(rest) == places(whole[done:])
    state = loadable(whole[0].state_after)
    assert (state["position"], state["pass"]) == (4, 0)
    state = loadable(whole[1].state_after)
    assert (state["position"], state["pass"]) == (0, 1)
    with pytest.raises(ValueError, match="it is in pass 4 of 3 over a batch"):
        loader_of(Batches(passes)).load_state_dict(state | {"pass": 3})


def test_an_epoch_of_the_trainer_is_a_batch_with_all_its_passes():
    batches = BatchesOfRollouts(loader_of(Batches(Passes(3))))
    epochs = []
    while not batches.have_ended:
        epochs.append([names(step) for step in batches])
        assert batches.number == min(len(epochs), 2)
    assert epochs == [[[0, 1, 2, 3], [4, 5]] * 3, [[6, 7, 8, 9], [10, 11]] * 3, []]


def test_a_place_has_no_pass_where_each_batch_has_one():
    step = next(iter(loader_of(Batches(Passes()))))
    assert loadable(step.state_after) == {"position": 4, "num_steps": 1, "source": {}}
    assert step.of_pass is None
    resumed = loader_of(Batches(Passes(3)))
    resumed.load_state_dict(loadable(step.state_after))
    assert [names(later) for later in resumed][:3] == [[4, 5], [0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("docs_per_step", [1, 4, 6, 9])
@pytest.mark.parametrize("last_step", ["short", "drop"])
def test_the_steps_until_a_batch_count_all_passes(docs_per_step, last_step):
    if last_step == "drop" and docs_per_step > Batches.batch_size:
        return  # there would be no step
    source = Batches(Passes(3), num_batches=4)
    loader = loader_of(source, docs_per_step, last_step)
    batches = [names(step)[0] // 6 for step in loader]
    first_steps = {batch: batches.index(batch) for batch in range(4)}
    for step, (position, number) in enumerate(source.begins[: len(batches)]):
        for batch in range(position // 6 + 1, 4):
            left = steps_before(batch, position, 6, loader.accumulation, 3, number)
            assert left == first_steps[batch] - step


@pytest.mark.parametrize("num_empty", [9, 10])
def test_batches_without_a_signal_count_once_however_many_passes(num_empty):
    loader = loader_of(Batches(Passes(3), num_empty + 1, left_out=range(6 * num_empty)))
    if num_empty == 10:
        with pytest.raises(DataError, match="10 batches in a row"):
            next(iter(loader))
    else:
        assert names(next(iter(loader))) == [54, 55, 56, 57]


TRAINED = ("rollout.passes=3", "optimizer.learning_rate=0.02", "trainer.max_steps=9")
"""Nine steps of a small run; a batch has sixteen documents, which make two steps in each pass."""

ONE_STEP = ("accumulation.docs_per_step=16",)

COMPARED = (
    "kl_new_old",
    "ratio_new_old",
    "clipped_ratio_fraction",
    "clipped_low_fraction",
    "clipped_high_fraction",
    "new_logprobs",
    "old_logprobs",
)


@torch.no_grad()
def log_probs(model: nn.Module, document: Document) -> torch.Tensor:
    """Return the log-probs of the trained tokens, by the model's own logits."""
    return differentiable_log_probs(model, document)


def differentiable_log_probs(model: nn.Module, document: Document) -> torch.Tensor:
    rows = model(input_ids=document.tokens[None]).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, document.tokens[1:, None])[document.loss_mask[1:], 0]


def vectors_of(document: Document) -> dict[str, object]:
    """Return what a document has from the time when training on its batch began."""
    names = (*OPTIONAL_VECTORS, "advantages", "values", "returns")
    vectors = {name: getattr(document, name) for name in names}
    return {name: vector.tolist() for name, vector in vectors.items() if vector is not None}


class Models(NamedTuple):
    """The models of a module as they were at some time."""

    model: nn.Module
    reference: nn.Module | None
    critic: nn.Module | None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


class Trained(NamedTuple):
    """A step of a small run.

    begin: the models when training on its batch began. before: before its update. gradient: of the
    policy's parameters.
    """

    step: Step
    metrics: dict[str, float]
    begin: Models
    before: Models
    gradient: list[torch.Tensor]


def trained_steps(*overrides: str) -> Iterator[Trained]:
    """Train a small run in float64, and yield its steps.

    Asserts that no document changes while its batch is trained.
    """
    module, loader = module_and_steps(*TRAINED, *overrides)
    kept: dict[str, dict[str, object]] = {}
    begin = module
    is_new = True
    for number, step in enumerate(loader):
        before = frozen(module)
        if is_new:
            begin = before
            kept = {}
        for document in step.documents:
            assert kept.setdefault(document.name, vectors_of(document)) == vectors_of(document)
        metrics = module.training_step(step, number)["metrics"]
        gradient = [parameter.grad.clone() for parameter in module.model.parameters()]
        yield Trained(step, metrics, begin, before, gradient)
        is_new = step.ends_batch
    loader.source.close()


def frozen(module: PolicyGradientModule) -> Models:
    reference = None if module.reference is None else copied(module.reference.model)
    critic = None if module.critic is None else copied(module.critic.body.model)
    return Models(copied(module.model), reference, critic)


def copied(model: nn.Module) -> nn.Module:
    """Return a model with weights of its own and the configuration of this one."""
    return copy.deepcopy(model, {id(model.config): model.config})


def assert_as_specified(trained: Trained, **choices: object) -> None:
    """Assert that loss, gradient and metrics of a step are those of loops in float64."""
    expected, of_parameters = specified(trained.before, trained.step.documents, **choices)
    metrics = trained.metrics
    assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-9, abs=1e-13)
    torch.testing.assert_close(trained.gradient, of_parameters, rtol=1e-8, atol=1e-12)
    for name in {*COMPARED, "kl_ref"} & metrics.keys() & expected.metrics.keys():
        assert metrics[name] == pytest.approx(expected.metrics[name], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("order", "cut"),
    [("same", ()), ("shuffled", ("accumulation.max_tokens=200",)), ("shuffled", ONE_STEP)],
)
def test_each_step_is_that_of_loops_with_the_old_log_probs_of_the_batchs_begin(order, cut):
    """Loss, gradient and metrics in all passes. In pass two ratios are not 1, and clips act."""
    counts = []
    steps = [*trained_steps(f"rollout.pass_order={order}", *cut)]
    for trained in steps:
        step = trained.step
        metrics = trained.metrics
        for document in step.documents:
            old = log_probs(trained.begin.model, document)
            torch.testing.assert_close(document.old_log_probs.double(), old, rtol=0, atol=1e-5)
        assert_as_specified(trained)
        if cut == ONE_STEP and step.of_pass.is_first:
            assert metrics["kl_new_old"] < 1e-12
        elif not step.of_pass.is_first:
            assert metrics["kl_new_old"] > 1e-3
            assert metrics["clipped_low_fraction"] + metrics["clipped_high_fraction"] > 0
        counts.append((metrics["documents_seen"], metrics["documents_trained"]))
    if cut == ONE_STEP:
        assert counts == [(16 * (1 + i // 3), 16 * (1 + i)) for i in range(9)]
    else:
        seen = [8, 16, 16, 16, 16, 16, 24, 32, 32]
        assert counts == [(seen[i], 8 * (1 + i)) for i in range(9)]


def test_the_values_of_a_critic_stay_those_of_the_batchs_begin():
    """The clip of the value loss is around them, also in pass three."""
    most_clipped = 0.0
    for trained in trained_steps("advantage=gae", "critic.learning_rate=0.1", "critic.clip=0.1"):
        assert_as_specified(trained)
        loss = 0.0
        for document in trained.step.documents:
            old = values_of(trained.begin.critic, document)
            torch.testing.assert_close(document.values.double(), old, rtol=0, atol=1e-5)
            now = values_of(trained.before.critic, document)
            columns = (now, document.values, document.returns)
            for row in zip(*(column.tolist() for column in columns), strict=True):
                loss += reference_terms.value_loss(*row, 0.1)[0] / 4
        loss /= len(trained.step.documents)
        assert trained.metrics["value_loss"] == pytest.approx(loss, rel=1e-9, abs=1e-13)
        if not trained.step.of_pass.is_first:
            most_clipped = max(most_clipped, trained.metrics["value_clipped_fraction"])
    assert most_clipped > 0.1


@torch.no_grad()
def values_of(critic: nn.Module, document: Document) -> torch.Tensor:
    states = critic.base_model(document.tokens[None]).last_hidden_state[0, :-1]
    head = critic.get_output_embeddings()
    return (states @ head.weight[0] + head.bias)[document.loss_mask[1:]]


@pytest.mark.parametrize(("every", "moves"), [(1, (6, 12)), (4, (6, 12)), (7, (12,))])
def test_a_reference_moves_once_a_batch_has_had_its_last_pass(every, moves):
    """Steps 1 to 6 are the first batch; of moves that are due during a batch one is made."""
    penalty = ("kl=k3", "kl.coefficient=0.3", "kl.update_rate=0.5", f"kl.update_every={every}")
    steps = [*trained_steps(*penalty, "trainer.max_steps=13")]
    expected = [weight.clone() for weight in steps[0].before.reference.parameters()]
    for number, trained in enumerate(steps, 1):
        reference = trained.before.reference
        torch.testing.assert_close([*reference.parameters()], expected, rtol=1e-12, atol=1e-15)
        if number < 8:
            distances = [log_probs(reference, document) for document in trained.step.documents]
            labels = labels_of(trained.step.documents)
            ref_log_probs = torch.zeros(len(labels), dtype=torch.float64)
            ref_log_probs.masked_scatter_(labels >= 0, torch.cat(distances))
            assert_as_specified(trained, kl="k3", kl_coefficient=0.3, ref_log_probs=ref_log_probs)
        if number in moves and number < 13:
            after = steps[number].before.parameters()
            pairs = zip(expected, after, strict=True)
            expected = [old + 0.5 * (new.detach() - old) for old, new in pairs]


def test_a_penalty_on_rewards_is_that_of_the_batchs_begin():
    penalty = ("kl=k1", "kl.coefficient=0.3", "kl.place=reward", "kl.update_every=1")
    largest = 0.0
    for trained in trained_steps(*penalty, "kl.update_rate=0.5", "trainer.max_steps=12"):
        assert_as_specified(trained)
        for document in trained.step.documents:
            old = log_probs(trained.begin.model, document)
            away = old - log_probs(trained.begin.reference, document)
            assert document.kl_reward == pytest.approx(-0.3 * float(away.sum()), abs=1e-5)
            largest = max(largest, abs(document.kl_reward))
    assert largest > 0.01


def moved(coefficient: float, distances: Sequence[float]) -> float:
    """Return the coefficient after a batch: Ziegler's rule with a target of 0.01 and a horizon of
    100."""
    mean = sum(distances) / len(distances)
    error = min(0.2, max(-0.2, mean / 0.01 - 1))
    return coefficient * (1 + error * len(distances) / 100)


ADAPTIVE = ("kl.coefficient=0.3", "kl.target=0.01", "kl.horizon=100", "rollout.passes=2")


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("k1", ()),
        ("k2", ("accumulation.max_tokens=200",)),
        ("k3", (*ONE_STEP, "entropy.top_fraction=0.5")),
    ],
)
def test_an_adaptive_coefficient_moves_after_a_batchs_last_update(kind, cut):
    """By the distance of each document as it is first trained, whatever the cut of a step."""
    # Three batches, of as many steps as a batch has in two passes.
    max_steps = 6 if ONE_STEP[0] in cut else 12
    settings = (f"kl={kind}", *ADAPTIVE, f"trainer.max_steps={max_steps}", *cut)
    coefficient = 0.3
    coefficients = []
    distances: list[float] = []
    for trained in trained_steps(*settings):
        documents = trained.step.documents
        new = [log_probs(trained.before.model, one) for one in documents]
        ref = [log_probs(trained.before.reference, one) for one in documents]
        of_step = []
        for p_of, f_of in zip(new, ref, strict=True):
            pairs = zip(p_of.tolist(), f_of.tolist(), strict=True)
            terms = [reference_terms.OF_TOKEN[kind](p, p, f)[0] for p, f in pairs]
            of_step.append(sum(terms) / len(terms))
        metrics = trained.metrics
        mean = sum(of_step) / len(of_step)
        assert metrics["kl_penalty"] == pytest.approx(mean, rel=1e-9, abs=1e-12)
        assert metrics["kl_coefficient"] == pytest.approx(coefficient, rel=1e-9)
        labels = labels_of(documents)
        ref_log_probs = torch.zeros(len(labels), dtype=torch.float64)
        ref_log_probs.masked_scatter_(labels >= 0, torch.cat(ref))
        if not any("top_fraction" in setting for setting in cut):
            penalty = {"kl": kind, "kl_coefficient": coefficient, "ref_log_probs": ref_log_probs}
            assert_as_specified(trained, **penalty)
        if trained.step.of_pass.is_first:
            distances += of_step
        if trained.step.ends_batch:
            assert len(distances) == 16
            coefficients.append(coefficient)
            coefficient = moved(coefficient, distances)
            distances = []
    changes = [later / earlier for earlier, later in itertools.pairwise(coefficients)]
    assert changes == pytest.approx([1 - 0.2 * 0.16, 1 + 0.2 * 0.16])


@pytest.mark.parametrize(
    "more", [(), ("advantage=gae", "rollout.uninformative=train"), ("rollout.lag=5",)], ids=str
)
def test_a_batchs_rewards_have_the_coefficient_to_which_the_batch_before_has_moved_it(more):
    settings = ("kl=k2", "kl.place=reward", *ADAPTIVE, "trainer.max_steps=9", *more)
    coefficient = 0.3
    used = set()
    distances: dict[str, float] = {}
    for trained in trained_steps(*settings):
        for document in trained.step.documents:
            away = (document.old_log_probs.double() - document.ref_log_probs.double()).tolist()
            terms = [distance**2 / 2 for distance in away]
            assert document.kl_reward == pytest.approx(-coefficient * sum(terms), rel=1e-9)
            distances[document.name] = sum(terms) / len(terms)
        assert trained.metrics["kl_coefficient"] == pytest.approx(coefficient, rel=1e-9)
        used.add(coefficient)
        if trained.step.ends_batch:
            assert len(distances) == 16
            coefficient = moved(coefficient, [*distances.values()])
            distances = {}
    assert len(used) == 3


def test_a_step_that_is_not_finite_moves_no_coefficient():
    adaptive = AdaptiveKL(0.05, 100, 0.3)
    adaptive.add(float("nan"), 8)
    adaptive.adapt()
    assert adaptive.coefficient == 0.3
    adaptive.add(0.8, 8)
    adaptive.add(float("inf"), 8)
    adaptive.adapt()
    assert adaptive.coefficient == pytest.approx(0.3 * (1 + 0.2 * 8 / 100), rel=1e-15)


def test_a_correction_acts_in_each_pass_by_the_log_probs_of_the_batchs_begin():
    """A batch is sampled six updates before training on it begins: one batch before."""
    ahead = ("rollout.lag=6", "rollout.old_log_probs=proximal", "trainer.max_steps=10")
    factors = []
    for number, trained in enumerate(
        trained_steps(*ahead, "correction=token_truncate", "correction.high=1.01")
    ):
        settings = {"low": None, "high": 1.01}
        assert_as_specified(trained, correction="token_truncate", correction_settings=settings)
        for document in trained.step.documents:
            assert document.model_version == 0
        assert trained.metrics["staleness"] == number
        factors.append(trained.metrics["correction_factor"])
    assert factors[:6] == pytest.approx([1.0] * 6, abs=1e-5)
    assert factors[6:8] == pytest.approx(factors[8:10], abs=1e-12)
    assert min(factors[6:]) < 0.99


def test_completions_are_sampled_while_all_passes_over_the_batch_before_are_trained():
    """Six steps make a batch, and no document becomes older than eleven updates."""
    overlap = ("rollout.max_staleness=11", "rollout.old_log_probs=sampling")
    for number, trained in enumerate(trained_steps(*overlap, "trainer.max_steps=20")):
        version = max(0, number // 6 * 6 - 6)
        assert {document.model_version for document in trained.step.documents} == {version}


def test_groups_without_a_signal_are_left_out_of_each_pass():
    counts = []
    for trained in trained_steps("rollout.uninformative=drop", "rollout.pass_order=shuffled"):
        assert all((document.advantages != 0).any() for document in trained.step.documents)
        of_pass = trained.step.of_pass
        counts.append((of_pass.is_first, trained.step.ends_batch, len(trained.step.documents)))
        assert_as_specified(trained)
    of_batch = counts[: [ends for _, ends, _ in counts].index(True) + 1]
    length = len(of_batch) // 3
    sizes = [sum(size for *_, size in of_batch[i * length : (i + 1) * length]) for i in range(3)]
    assert 0 < sizes[0] < 16
    assert sizes == [sizes[0]] * 3
    assert trained.metrics["documents_trained"] == sum(size for *_, size in counts)
    assert trained.metrics["documents_seen"] == sum(
        size for is_first, _, size in counts if is_first
    )


def centred(log_ratio, rewards, group_rewards, documents, groups):
    """A loss of the user's own: the reward of each document pulls at its sum of log-ratios, from
    which the group's mean is taken."""
    sums = documents.sum(log_ratio)
    better = documents.mean(rewards - group_rewards)
    return -better * (sums - groups.spread(groups.mean(sums))).tanh()


def centred_by_loops(new, old, sampled, rewards):
    sums = [(p - o).sum() for p, o in zip(new, old, strict=True)]
    mean = sum(sums) / len(sums)
    reward = sum(rewards) / len(rewards)
    return [-(r - reward) * (s - mean).tanh() for r, s in zip(rewards, sums, strict=True)]


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (("loss=tpo", "loss.log_prob=mean"), lambda *v: group_formulas.tpo(*v, log_prob="mean")),
        (("loss=lpo",), group_formulas.lpo),
        (("loss=rollouts.test_several_passes.centred",), centred_by_loops),
    ],
)
def test_a_loss_of_groups_is_that_of_loops_in_each_pass(loss, formula):
    """Each step's own two passes over its micro-batches go with each pass over the batch."""
    advantage = () if "centred" in loss[0] else ("advantage=none",)
    losses = []
    for trained in trained_steps(*loss, *advantage, "trainer.max_steps=6"):
        documents = trained.step.documents
        total = torch.zeros((), dtype=torch.float64)
        for first in range(0, len(documents), 4):
            group = documents[first : first + 4]
            new = [differentiable_log_probs(trained.before.model, one) for one in group]
            old = [one.old_log_probs.double() for one in group]
            sampled = [one.sampling_log_probs.double() for one in group]
            values = formula(new, old, sampled, [one.reward for one in group])
            values = values if isinstance(values, list) else [values] * 4
            for value, one in zip(values, group, strict=True):
                total = total + value * one.num_trained / (4 * len(documents))
        assert trained.metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-9, abs=1e-12)
        expected = torch.autograd.grad(total, list(trained.before.parameters()))
        torch.testing.assert_close(trained.gradient, [*expected], rtol=1e-7, atol=1e-11)
        losses.append(float(total.detach()))
    assert abs(losses[0] - losses[-2]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("loss=grpo", "advantage=gae", "kl=k1", "kl.place=reward", *ADAPTIVE[:3]),
        ("loss=tpo", "advantage=none", "kl=k3", *ADAPTIVE[:3]),
    ],
)
def test_ranks_make_the_same_passes(tmp_path, settings):
    passes = ("rollout.passes=3", "rollout.pass_order=shuffled", "optimizer.learning_rate=0.02")
    passes += ("trainer.checkpoint_every=6",)
    runs = [
        run_on_ranks(tmp_path / f"on {ranks}", [*SHORT, *passes, *settings], **sizes)
        for ranks, sizes in ((1, {}), (2, {"data_parallel": 2}))
    ]
    assert_runs_close(runs[1], runs[0], 1e-4)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ((), ["2 steps per batch of rollouts", "9 steps, 72 documents"]),
        # Batches of 16 documents, of which every second step has the last 6, or drops them.
        (
            ("accumulation.docs_per_step=10",),
            ["2 steps per batch of rollouts", "9 steps, 74 documents"],
        ),
        (
            ("accumulation.docs_per_step=10", "accumulation.last_step=drop"),
            ["; 1 step per batch of rollouts", "9 steps, 90 documents"],
        ),
        (
            ("accumulation.docs_per_step=10", "accumulation.last_step=carry"),
            ["1.6 steps per batch of rollouts", "9 steps, 90 documents"],
        ),
        (
            ("rollout.passes=3",),
            [
                "6 steps per batch of rollouts, in 3 passes over it",
                "9 steps, 32 documents, each trained 3 times",
            ],
        ),
    ],
)
def test_check_counts_the_steps_of_all_passes(overrides, lines):
    config = config_of(*SHORT, *overrides, "trainer.max_steps=9")
    *_, step, of_run = arithmetic(config)
    assert step.endswith(lines[0])
    assert of_run == f"run: at most {lines[1]}"
    clips = [note for note in validate(config)[1].notes if "clips act from pass two on" in note]
    assert len(clips) == ("rollout.passes=3" in overrides)


@pytest.mark.parametrize(
    ("place", "last"), [(None, 6), ((8, 0), 7), ((0, 1), 6), ((8, 2), 3), ((16, 0), 8)]
)
def test_tokens_shows_the_last_step_of_the_last_pass(place, last):
    """place: (position, pass) of a checkpoint of step 2, or none."""
    rollout = PolicyRolloutSettings(
        prompts_per_batch=4, group_size=4, max_completion_length=4, passes=3
    )
    checkpoint = None
    if place is not None:
        checkpoint = {"step": 2, "data": {"position": place[0], "pass": place[1]}}
    assert last_of_batch(rollout, 8, checkpoint) == last

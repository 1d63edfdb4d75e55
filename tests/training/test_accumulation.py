"""Dynamic accumulation drives a user's module through a step, however the step is cut.

Losses, gradients and weights are compared with the loops of the specification in float64.
"""

import contextlib
import copy
import dataclasses
import math
import runpy
from pathlib import Path

import pytest
import torch
from builders.documents import document_of
from builders.processes import layout, world
from builders.runs import CLOCK_COLUMNS
from torch import nn

import pgtoolkit
from pgtoolkit.batch import MicroBatch, StepTotals, pack
from pgtoolkit.document import Document
from pgtoolkit.errors import DataError, NumericalError
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses import reference
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.accumulation import DynamicAccumulation
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule

VOCABULARY = 7
RATE = 0.1
DOCS_PER_STEP = 6
GRPO = {"loss": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "aggregation": "sample_mean"}
LENGTHS = (9, 2, 12, 5, 7, 1, 3, 8, 11, 4, 6, 10)


def documents(with_trajectories: bool = False) -> list[Document]:
    """Return the documents of two steps.

    The last document of each is all masked; others have one trained token, or none.
    """
    draw = torch.Generator().manual_seed(0)
    documents = []
    for number, length in enumerate(LENGTHS):
        mask = torch.arange(length) >= max(1, length // 3)
        if number % DOCS_PER_STEP == DOCS_PER_STEP - 1:
            mask[:] = False
        trajectory = (0, 0, None, 3, 0, 3)[number % DOCS_PER_STEP]
        documents.append(
            document_of(
                torch.randint(0, VOCABULARY, (length,), generator=draw),
                mask,
                old_log_probs=(-2.0 + 0.3 * torch.randn(length, generator=draw))[mask],
                advantages=2.0 * float(torch.randn(1, generator=draw)),
                group=number // 3,
                name=f"document {number}",
                trajectory=trajectory if with_trajectories else None,
            )
        )
    return documents


class MeanSoFar(nn.Module):
    """A layer that looks at the tokens before, as attention does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]


def model(looks_back: bool = False) -> nn.Module:
    torch.manual_seed(1)
    mixing = [MeanSoFar()] if looks_back else []
    layers = [nn.Embedding(VOCABULARY, 5), *mixing, nn.Tanh(), nn.Linear(5, VOCABULARY)]
    return nn.Sequential(*layers).double()


def plain_training(net: nn.Module) -> list[tuple[float, float]]:
    """Train `net` by the loops of the specification over each step in one piece.

    Returns (loss, gradient norm) of each step.
    """
    losses_and_norms = []
    for first in range(0, len(LENGTHS), DOCS_PER_STEP):
        step = documents()[first : first + DOCS_PER_STEP]
        packed = pack(step)
        logits = torch.cat([net(tokens) for tokens in packed.tokens.split(packed.document_lengths)])
        vectors = (packed.labels, packed.old_log_probs, packed.advantages, packed.document_index)
        out = reference.policy_loss(logits.detach(), *vectors, **GRPO, num_documents=len(step))
        gradients = torch.autograd.grad(logits, list(net.parameters()), out.gradient)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= RATE * min(1.0, 1.0 / float(norm + 1e-6)) * gradient
        losses_and_norms.append((float(out.loss), float(norm)))
    return losses_and_norms


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("max_tokens", "counts"), [(1000, [1, 1]), (24, [2, 2]), (14, [3, 4]), (12, [4, 4])]
)
def test_the_module_of_the_examples_trains_the_same_however_its_steps_are_cut(
    tmp_path, monkeypatch, max_tokens, counts
):
    """Loss, gradient norm and weights after two steps, by Lightning's trainer."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs and checkpoint to the current directory
    rows = []
    monkeypatch.setattr(
        DynamicAccumulation,
        "on_train_batch_end",
        lambda self, outputs, batch, index: rows.append(outputs["metrics"]),
    )
    expected_model = model(looks_back=True)
    expected = plain_training(expected_model)
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/lightning_module.py"))
    module, trainer = example["train"](
        model(looks_back=True), documents(), DOCS_PER_STEP, max_tokens
    )
    assert [row["num_micro_batches"] for row in rows] == counts
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    assert [row["grad_norm"] for row in rows] == pytest.approx(
        [norm for _, norm in expected], rel=1e-9
    )
    assert [row["documents_seen"] for row in rows] == [6, 12]
    for name, weight in module.model.named_parameters():
        torch.testing.assert_close(
            weight, expected_model.get_parameter(name), rtol=1e-10, atol=1e-12
        )
    assert min(abs(loss) for loss, _ in expected) > 1e-3
    assert trainer.global_step == module.num_updates == 2


def train_example(folder: str) -> dict[str, torch.Tensor]:
    """Train the module of the examples as one of two ranks; return its weights."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/lightning_module.py"))
    ranks = layout(data_parallel=2)
    with contextlib.chdir(folder):  # which Lightning writes to
        module, trainer = example["train"](model(), documents(), DOCS_PER_STEP, 12, ranks)
    assert trainer.global_step == module.num_updates == 2
    return dict(module.model.state_dict())


def test_the_module_of_the_examples_trains_the_same_over_two_ranks(tmp_path):
    expected = model()
    plain_training(expected)
    for weights in world(2).run(train_example, str(tmp_path)):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected.get_parameter(name), rtol=1e-10, atol=1e-12)


class SmallModule(DynamicAccumulation):
    """The documented module without clipping, and without Lightning's trainer."""

    loss = "gspo"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model = model()
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        self.optimizers = lambda use_pl_optimizer=True: optimizer
        self.manual_backward = lambda loss: loss.backward()

    def micro_batch_loss(self, micro_batch: MicroBatch, totals: StepTotals) -> PolicyLoss:
        vectors = (
            micro_batch.labels,
            micro_batch.old_log_probs,
            micro_batch.advantages,
            micro_batch.document_index,
        )
        options = {
            "num_documents": micro_batch.num_documents,
            "totals": totals,
            "check_finite": False,
            "metrics": "basic",
        }
        options |= self.aggregation_options(micro_batch)
        return pgtoolkit.policy_loss(
            self.model(micro_batch.tokens), *vectors, loss=self.loss, **options
        )

    def aggregation_options(self, micro_batch: MicroBatch) -> dict[str, object]:
        return {"group_index": micro_batch.group_index, "aggregation": "prompt_mean"}


class ModuleOfTrajectories(SmallModule):
    """Takes the mean over trajectories of several documents."""

    def aggregation_options(self, micro_batch: MicroBatch) -> dict[str, object]:
        return {"trajectory_index": micro_batch.trajectory_index}


def take_step(ranks: Layout, max_tokens: int, with_trajectories: bool) -> tuple[dict, list, list]:
    """Return metrics, gradients and weights after one step on this rank."""
    module = ModuleOfTrajectories(ranks) if with_trajectories else SmallModule(ranks)
    step = make_step(
        documents(with_trajectories)[:DOCS_PER_STEP],
        max_tokens,
        None,
        ranks.rank_in("data_parallel"),
        ranks.size("data_parallel"),
    )
    metrics = module.training_step(step, 0)["metrics"]
    for name in ("num_micro_batches", *CLOCK_COLUMNS):
        metrics.pop(name, None)
    return metrics, [p.grad for p in module.parameters()], [p.detach() for p in module.parameters()]


def take_step_on_rank(
    num_ranks: int, max_tokens: int, with_trajectories: bool
) -> tuple[dict, list, list]:
    return take_step(layout(data_parallel=num_ranks), max_tokens, with_trajectories)


@pytest.mark.parametrize("with_trajectories", [False, True])
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(2, 12), (4, 1000)])
def test_a_step_over_data_parallel_ranks_is_that_of_one_process(
    num_ranks, max_tokens, with_trajectories
):
    """Of four ranks one holds the masked document alone; trajectories lie on several ranks."""
    metrics, gradients, weights = take_step(ONE_PROCESS, 1000, with_trajectories)
    assert metrics.get("num_trajectories") == (3 if with_trajectories else None)
    for rank_metrics, rank_gradients, rank_weights in world(num_ranks).run(
        take_step_on_rank, num_ranks, max_tokens, with_trajectories
    ):
        assert rank_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(rank_gradients, gradients, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-12, atol=1e-15)


def test_a_step_that_is_not_finite_leaves_the_weights_of_any_module():
    module = SmallModule(ONE_PROCESS, None, 2)
    before = copy.deepcopy(module.model.state_dict())
    good = documents()[:DOCS_PER_STEP]
    bad = documents()[:DOCS_PER_STEP]
    bad[2] = dataclasses.replace(bad[2], advantages=bad[2].advantages * math.nan)
    metrics = module.training_step(make_step(bad, 12), 0)["metrics"]
    assert metrics["num_skipped_steps"] == 1
    assert module.num_updates == 0
    with pytest.raises(NumericalError, match=r"2 steps in a row .* not finite in: document 2\.$"):
        module.training_step(make_step(bad, 12), 1)
    assert all(
        torch.equal(weight, before[name]) for name, weight in module.model.state_dict().items()
    )
    metrics = module.training_step(make_step(good, 12), 2)["metrics"]
    assert metrics["num_skipped_steps"] == 2
    assert module.num_updates == 1
    assert not torch.equal(module.model[2].weight, before["2.weight"])


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_would_average_gradients_is_refused():
    module = SmallModule(ONE_PROCESS)
    module.trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(
        ValueError, match=r"needs a Trainer of one device in each process \(got 2 devices\)"
    ):
        module.on_fit_start()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("precision", "use"),
    [
        ("64-true", r"Use precision='32-true', and module\.double\(\) before"),
        ("bf16-true", r"and module\.bfloat16\(\) before"),
        ("16-mixed", r"Use precision='bf16-mixed'"),
    ],
)
def test_a_precision_that_lightning_cannot_give_to_steps_is_refused(precision, use):
    def trainer(precision):
        more = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return lightning.Trainer(accelerator="cpu", max_steps=1, precision=precision, **more)

    example = Path(__file__).parents[2] / "examples/lightning_module.py"
    module = runpy.run_path(str(example))["MyModule"](model().float())
    steps = torch.utils.data.DataLoader([make_step(documents()[:DOCS_PER_STEP], 12)], None)
    with pytest.raises(ValueError, match=rf"^MyModule needs a Trainer .*{use}"):
        module.check_precision(precision)
    if precision != "16-mixed":  # which Lightning takes for bf16-mixed on a CPU
        with pytest.raises(ValueError, match=rf"^MyModule needs a Trainer .*{use}"):
            trainer(precision).fit(module, steps)
    with pytest.raises(ValueError, match=r"^PolicyGradientModule needs .*policy\.model\.double"):
        PolicyGradientModule.check_precision(module, precision)
    if precision == "64-true":  # what it says to type works
        trainer("32-true").fit(module.double(), steps)
        assert module.num_updates == 1


def test_a_loss_that_reads_old_log_probs_needs_them_of_every_document():
    """Zeros in their place would be probabilities of 1."""
    module = SmallModule(ONE_PROCESS)
    known, unknown = documents()[:2]
    unknown = dataclasses.replace(unknown, old_log_probs=None)
    of_an_update = dataclasses.replace(unknown, on_policy=True, anchor_version=0)
    for step_documents, updates in (([known, unknown], 0), ([of_an_update], 1)):
        module.num_updates = updates
        message = f"got none of {unknown.name}.* use reads_old_log_probs = False"
        with pytest.raises(DataError, match=message):
            module.training_step(make_step(step_documents, 1000), 0)
    assert (module.num_updates, module.documents_seen) == (1, 0)
    of_this_step = dataclasses.replace(unknown, on_policy=True)
    module._check_old_log_probs(make_step([of_this_step], 1000))


def test_metrics_of_old_log_probs_need_them_of_every_document():
    """Unknown ones are zeros, whose ratio says nothing about the policy."""
    module = SmallModule(ONE_PROCESS)
    module.loss = "reinforce"
    module.reads_old_log_probs = False
    known = documents()[:2]
    unknown = [dataclasses.replace(d, old_log_probs=None) for d in documents()[2:4]]
    for step, all_known in ((known + unknown, False), (unknown, False), (known, True)):
        metrics = module.training_step(make_step(step, 1000), 0)["metrics"]
        assert ("ratio_new_old" in metrics) == all_known
        assert ("old_logprobs" in metrics) == all_known
        assert math.isfinite(metrics["new_logprobs"])

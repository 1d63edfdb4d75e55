"""Dynamic accumulation: a module of the user's own, driven through steps that are cut anyhow,
against plain float64."""

import copy
import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from builders.processes import layout, world
from builders.runs import CLOCK_COLUMNS
from torch import nn

import pgtoolkit
from pgtoolkit.batch import Document, pack
from pgtoolkit.errors import NumericalError
from pgtoolkit.losses import reference
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.accumulation import DynamicAccumulation
from pgtoolkit.training.frameworks import lightning

VOCABULARY, RATE, DOCS_PER_STEP = 7, 0.1, 6
GRPO = {"loss": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "aggregation": "sample_mean"}
LENGTHS = (9, 2, 12, 5, 7, 1, 3, 8, 11, 4, 6, 10)


def documents(trajectories: bool | None = None) -> list[Document]:
    """Two steps; the last document of each is all masked, others have one, or no, trained token."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(LENGTHS):
        mask = torch.arange(length) >= max(1, length // 3)
        if number % DOCS_PER_STEP == DOCS_PER_STEP - 1:
            mask[:] = False
        made.append(
            Document(
                tokens=torch.randint(0, VOCABULARY, (length,), generator=draw),
                loss_mask=mask,
                old_log_probs=(-2.0 + 0.3 * torch.randn(length, generator=draw))[mask],
                advantages=2.0 * torch.randn(1, generator=draw).expand(int(mask.sum())),
                group=number // 3,
                name=f"document {number}",
                trajectory=trajectories and (0, 0, None, 3, 0, 3)[number % DOCS_PER_STEP],
            )
        )
    return made


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)).double()


def plain_training(net: nn.Module) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, by the loops of the reference over the step as one piece;
    trains `net`."""
    found = []
    for first in range(0, len(LENGTHS), DOCS_PER_STEP):
        step = documents()[first : first + DOCS_PER_STEP]
        whole = pack(step)
        logits = net(whole.tokens)
        vectors = (whole.labels, whole.old_log_probs, whole.advantages, whole.document_index)
        out = reference.policy_loss(logits.detach(), *vectors, **GRPO, num_documents=len(step))
        gradients = torch.autograd.grad(logits, list(net.parameters()), out.gradient)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= RATE * min(1.0, 1.0 / float(norm + 1e-6)) * gradient
        found.append((float(out.loss), float(norm)))
    return found


def documented_code() -> str:
    """The block of docs/losses.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    section = text.partition("## In a Lightning module of your own")[2]
    return re.search(r"```python\n(.*?)```", section, flags=re.DOTALL).group(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("max_tokens", "counts"), [(1000, [1, 1]), (24, [2, 2]), (14, [3, 4]), (12, [4, 4])]
)
def test_the_documented_module_trains_the_same_however_its_steps_are_cut(
    tmp_path, monkeypatch, max_tokens, counts
):
    """Loss, gradient norm and weights after two steps, by Lightning's own trainer."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs and checkpoint to the current directory
    rows = []
    monkeypatch.setattr(
        DynamicAccumulation,
        "on_train_batch_end",
        lambda self, outputs, batch, index: rows.append(outputs["metrics"]),
    )
    expected_model = model()
    expected = plain_training(expected_model)
    names = {
        "documents": documents(),
        "model": model(),
        "docs_per_step": DOCS_PER_STEP,
        "max_tokens": max_tokens,
    }
    exec(compile(documented_code(), "docs/losses.md", "exec"), names)
    assert [row["num_micro_batches"] for row in rows] == counts
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    assert [row["grad_norm"] for row in rows] == pytest.approx(
        [norm for _, norm in expected], rel=1e-9
    )
    assert [row["documents_seen"] for row in rows] == [6, 12]
    for name, weight in names["model"].named_parameters():
        torch.testing.assert_close(
            weight, expected_model.get_parameter(name), rtol=1e-10, atol=1e-12
        )
    assert min(abs(loss) for loss, _ in expected) > 1e-3
    assert names["trainer"].global_step == names["module"].num_updates == 2


class Small(DynamicAccumulation):
    """As the documented one, but without clipping, and without Lightning's trainer."""

    loss = "gspo"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.model = model()
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE)
        self.optimizers = lambda use_pl_optimizer=True: optimizer
        self.manual_backward = lambda loss: loss.backward()

    def micro_batch_loss(self, micro_batch, totals):
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

    def aggregation_options(self, micro_batch):
        return {"group_index": micro_batch.group_index, "aggregation": "prompt_mean"}


class SampleMean(Small):
    """Over trajectories of several documents."""

    def aggregation_options(self, micro_batch):
        return {"trajectory_index": micro_batch.trajectory_index}


def one_step(ranks, max_tokens: int, trajectories: bool) -> tuple[dict, list, list]:
    """Metrics, gradient and weights after one step on this rank."""
    module = SampleMean(ranks) if trajectories else Small(ranks)
    where = ranks.rank_in("data_parallel"), ranks.size("data_parallel")
    step = make_step(documents(trajectories or None)[:DOCS_PER_STEP], max_tokens, None, *where)
    metrics = module.training_step(step, 0)["metrics"]
    for name in ("num_micro_batches", *CLOCK_COLUMNS):
        metrics.pop(name, None)
    return metrics, [p.grad for p in module.parameters()], [p.detach() for p in module.parameters()]


def one_step_on_a_rank(number: int, *chosen) -> tuple[dict, list, list]:
    return one_step(layout(data_parallel=number), *chosen)


@pytest.mark.parametrize("trajectories", [False, True])
@pytest.mark.parametrize(("number", "max_tokens"), [(2, 12), (4, 1000)])
def test_any_module_is_driven_over_data_parallel_ranks(number, max_tokens, trajectories):
    """Metrics, gradient and weights of one process; with four ranks one holds the masked document
    alone.

    The parts of a trajectory lie on several ranks.
    """
    expected = one_step(ONE_PROCESS, 1000, trajectories)
    assert expected[0].get("num_trajectories") == (3 if trajectories else None)
    for metrics, gradient, weights in world(number).run(
        one_step_on_a_rank, number, max_tokens, trajectories
    ):
        assert metrics == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(weights, expected[2], rtol=1e-12, atol=1e-15)


def test_a_step_that_is_not_finite_leaves_the_weights_of_any_module():
    module = Small(ONE_PROCESS, None, 2)
    before = copy.deepcopy(module.model.state_dict())
    bad = documents()[:DOCS_PER_STEP]
    bad[2] = dataclasses.replace(bad[2], advantages=bad[2].advantages * math.nan)
    metrics = module.training_step(make_step(bad, 12), 0)["metrics"]
    assert (metrics["num_skipped_steps"], module.num_updates) == (1, 0)
    with pytest.raises(NumericalError, match=r"2 steps in a row .* not finite in: document 2\.$"):
        module.training_step(make_step(bad, 12), 1)
    assert all(
        torch.equal(weight, before[name]) for name, weight in module.model.state_dict().items()
    )
    assert (
        module.training_step(make_step(documents()[:DOCS_PER_STEP], 12), 2)["metrics"][
            "num_skipped_steps"
        ]
        == 2
    )
    assert module.num_updates == 1
    assert not torch.equal(module.model[2].weight, before["2.weight"])


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_would_average_gradients_is_refused():
    module = Small(ONE_PROCESS)
    module.trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(
        ValueError, match=r"needs a Trainer of one device in each process \(got 2 devices\)"
    ):
        module.on_fit_start()


def test_a_step_with_and_without_old_log_probs_has_no_metric_that_compares_them():
    """Zeros stand for those that are not known: a ratio of them is no number of the policy."""
    module = Small(ONE_PROCESS)
    module.loss = "reinforce"
    known, unknown = (
        documents()[:2],
        [dataclasses.replace(d, old_log_probs=None) for d in documents()[2:4]],
    )
    for step, compared in ((known + unknown, False), (unknown, False), (known, True)):
        metrics = module.training_step(make_step(step, 1000), 0)["metrics"]
        assert ("ratio_new_old" in metrics, "old_logprobs" in metrics) == (compared, compared)
        assert math.isfinite(metrics["new_logprobs"])

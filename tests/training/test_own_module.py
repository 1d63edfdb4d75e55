"""Schedulers of a Lightning module of one's own, against plain loops with PyTorch's schedulers, and
the optimizers, schedulers and results of a module that are refused."""

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from builders.documents import document_of
from builders.processes import layout, world
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import pgtoolkit
from pgtoolkit.batch import Step
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses import reference
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.settings import AccumulationSettings
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training import frameworks
from pgtoolkit.training.accumulation import DynamicAccumulation
from pgtoolkit.training.fit import fit
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.whole_step import with_mean_factor

pytestmark = pytest.mark.filterwarnings("ignore")

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
STEPS_OF_AN_EPOCH = 5
EPOCHS = 3
MASKED = (1, 5)
"""The steps of an epoch in which nothing is trained, where some are."""


def harmonic(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda number: 1 / (1 + number))


CHOICES = {
    "each step": [(harmonic, "step", 1)],
    "every other step": [(harmonic, "step", 2)],
    "one cycle": [(lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=20), "step", 1)],
    "each epoch": [(lambda optimizer: StepLR(optimizer, 1, 0.5), "epoch", 1)],
    "every other epoch": [(lambda optimizer: StepLR(optimizer, 1, 0.5), "epoch", 2)],
    "both": [(lambda optimizer: StepLR(optimizer, 1, 0.5), "epoch", 1), (harmonic, "step", 1)],
}


class OwnModule(DynamicAccumulation):
    """Trains a table of logits, and keeps the learning rate of each update."""

    aggregation = "sample_mean"

    def __init__(
        self,
        configured: Callable[[torch.optim.Optimizer], object] | None = None,
        layout: Layout = ONE_PROCESS,
    ):
        super().__init__(layout)
        self.table = nn.Parameter(torch.zeros(5, 5, dtype=torch.float64))
        self.configured = configured or (lambda optimizer: optimizer)
        self.rates: list[float] = []

    def loss(self, micro_batch, **options):
        return pgtoolkit.policy_loss(
            self.table[micro_batch.tokens],
            micro_batch.labels,
            micro_batch.old_log_probs,
            micro_batch.advantages,
            micro_batch.document_index,
            loss="grpo",
            num_documents=micro_batch.num_documents,
            aggregation=self.aggregation,
            group_index=micro_batch.group_index,
            **options,
        )

    def micro_batch_loss(self, micro_batch, totals):
        return self.loss(micro_batch, totals=totals)

    def before_update(self):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        return {}

    def configure_optimizers(self):
        return self.configured(torch.optim.SGD(self.parameters(), lr=1.0))


def documents(masked: Sequence[int] = ()) -> list[Document]:
    """Return two documents for each step; masked: the steps whose documents have no trained
    token."""
    return [
        document_of(
            torch.tensor([1, 2, 3, 4]),
            torch.tensor([False, False, True, True]) & (number // 2 + 1 not in masked),
            advantages=1.0 - 1.5 * (number % 2),
            old_log_probs=-1.6,
            group=number // 2,
            name=f"row {number}",
        )
        for number in range(2 * STEPS_OF_AN_EPOCH)
    ]


def trained(
    module: DynamicAccumulation,
    masked: Sequence[int] = (),
    path: str | None = None,
    **options: object,
) -> lightning.Trainer:
    """Train by a Trainer of three epochs of five steps, and return the Trainer."""
    steps = torch.utils.data.DataLoader(
        documents(masked), batch_size=2, collate_fn=lambda batch: make_step(batch, 4)
    )
    trainer = lightning.Trainer(**({"max_epochs": EPOCHS} | QUIET | options))
    trainer.fit(module, steps, ckpt_path=path)
    return trainer


def configured(name: str) -> Callable[[torch.optim.Optimizer], object]:
    """Return what makes the result of `configure_optimizers`."""
    return lambda optimizer: (
        [optimizer],
        [
            {"scheduler": make(optimizer), "interval": interval, "frequency": frequency}
            for make, interval, frequency in CHOICES[name]
        ],
    )


def rates_of_a_plain_loop(name: str, masked: Sequence[int] = ()) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = [(make(optimizer), *others) for make, *others in CHOICES[name]]
    rates = []
    for epoch in range(1, EPOCHS + 1):
        updates = 0
        for step in range(1, STEPS_OF_AN_EPOCH + 1):
            if step in masked:
                continue
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            updates += 1
            for scheduler, interval, frequency in schedulers:
                if interval == "step" and updates % frequency == 0:
                    scheduler.step()
        for scheduler, interval, frequency in schedulers:
            if interval == "epoch" and epoch % frequency == 0:
                scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("each step", MASKED),
        ("every other step", MASKED),
        ("one cycle", ()),
        ("each epoch", MASKED),
        ("every other epoch", ()),
        ("both", ()),
    ],
)
def test_schedulers_are_stepped_as_in_a_plain_loop(name, masked):
    """Also where the second and the last step of an epoch make no update."""
    module = OwnModule(configured(name))
    trained(module, masked)
    assert module.rates == pytest.approx(rates_of_a_plain_loop(name, masked), rel=1e-12)
    assert len({*module.rates}) > 1


@pytest.mark.parametrize("name", ["every other step", "both"])
def test_a_trainer_that_resumes_in_an_epoch_goes_on_with_its_schedulers(tmp_path, name):
    first = OwnModule(configured(name))
    path = tmp_path / "half.ckpt"
    trained(first, max_epochs=-1, max_steps=8).save_checkpoint(path)
    second = OwnModule(configured(name))
    trained(second, path=str(path), max_epochs=-1, max_steps=EPOCHS * STEPS_OF_AN_EPOCH)
    assert len(first.rates) == 8
    assert first.rates + second.rates == pytest.approx(rates_of_a_plain_loop(name), rel=1e-12)


class Batches(Source):
    """Has batches of ten documents, each of five steps."""

    batch_size = 2 * STEPS_OF_AN_EPOCH
    num_documents = EPOCHS * batch_size

    def document(self, position: int) -> Document:
        return documents()[position % self.batch_size]


@pytest.mark.parametrize("name", ["both", "every other step"])
def test_an_epoch_of_fit_is_a_batch_of_rollouts(name):
    module = OwnModule(configured(name))
    accumulation = AccumulationSettings(docs_per_step=2, max_tokens=4)
    fit(module, StepLoader(Batches(), accumulation, False, EPOCHS * STEPS_OF_AN_EPOCH))
    assert module.rates == pytest.approx(rates_of_a_plain_loop(name), rel=1e-12)
    trained(module)  # A Trainer's epochs are its own again.
    assert module.rates == pytest.approx(2 * rates_of_a_plain_loop(name), rel=1e-12)


def test_stochastic_weight_averaging_sets_the_rates_of_its_epochs():
    """From the second epoch on, in two parts of a line from 1 to 0.02."""
    averaging = frameworks.callbacks.StochasticWeightAveraging(
        swa_lrs=0.02, swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear"
    )
    module = OwnModule()
    trained(module, max_epochs=4, callbacks=[averaging])
    expected = [rate for rate in (1.0, 1.0, 0.51, 0.02) for _ in range(STEPS_OF_AN_EPOCH)]
    assert module.rates == pytest.approx(expected, rel=1e-12)


def test_a_plateau_s_scheduler_is_refused_and_stepped_and_kept_as_the_refusal_says(tmp_path):
    class WithPlateau(OwnModule):
        def on_train_epoch_end(self):
            self.plateau.step(self.trainer.callback_metrics["loss"])

    def returned(optimizer):
        return {"optimizer": optimizer, "lr_scheduler": plateau(optimizer), "monitor": "loss"}

    def plateau(optimizer):
        # All but a loss that is lower by 1e9 is a plateau.
        return ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        )

    with pytest.raises(ValueError, match=r"got ReduceLROnPlateau\).* in on_train_epoch_end self\."):
        trained(OwnModule(returned))
    module = WithPlateau()

    def kept(optimizer):
        module.plateau = plateau(optimizer)
        return optimizer

    module.configured = kept
    trained(module)
    rates = [rate for rate in (1.0, 1.0, 0.5) for _ in range(STEPS_OF_AN_EPOCH)]
    assert module.rates == rates
    # After the first epoch, of which it holds the loss, the next one is a plateau, as above.
    path = str(tmp_path / "after-1.ckpt")
    trained(module, max_epochs=1).save_checkpoint(path)
    module.rates = []
    trained(module, path=path)
    assert module.rates == rates[STEPS_OF_AN_EPOCH:]
    with pytest.raises(ConfigError, match=r"itself, none \(got a checkpoint with self\.plateau\)"):
        trained(OwnModule(), path=path)
    trained(OwnModule(), max_epochs=1).save_checkpoint(path)
    with pytest.raises(ConfigError, match=r"self\.plateau \(got a checkpoint with none\)"):
        trained(module, path=path)


def test_a_correction_over_its_mean_takes_the_whole_step_as_its_refusal_says():
    correction = pgtoolkit.corrections.TokenTruncate(high=1.1, normalize="step")

    class Corrected(OwnModule):
        def micro_batch_loss(self, micro_batch, totals):
            return self.loss(
                micro_batch,
                totals=totals,
                sampling_log_probs=micro_batch.sampling_log_probs,
                correction=correction,
            )

    class Whole(Corrected):
        def take_step(self, step):
            return super().take_step(with_mean_factor(step, correction, self.layout))

    batch = [
        document_of(
            2, advantages=1.0, old_log_probs=-1.6, sampling_log_probs=torch.full((1,), sampling)
        )
        for sampling in (-1.6, -1.65, -1.2)
    ]
    losses = []
    for max_tokens in (4, 1000):
        module = Whole()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        module.optimizers = lambda use_pl_optimizer=True, optimizer=optimizer: optimizer
        module.manual_backward = lambda loss: loss.backward()
        losses.append(module.training_step(make_step(batch, max_tokens), 0)["metrics"]["loss"])
    # The mean of factors over their mean is 1, and so is each advantage.
    ratio = math.exp(-math.log(5) + 1.6)
    assert losses == pytest.approx([-ratio, -ratio], rel=1e-6)
    module = Corrected()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    with pytest.raises(ValueError, match=r"`def take_step\(self, step\): return super\(\)\.take"):
        module.take_step(make_step(batch, 4))


def test_a_scheduler_that_the_module_steps_as_well_is_refused():
    class Twice(OwnModule):
        def on_train_batch_end(self, outputs, batch, batch_index):
            self.lr_schedulers().step()

    with pytest.raises(ValueError, match=r"^Twice steps .*\(got LambdaLR stepped elsewhere\)"):
        trained(Twice(configured("each step")))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda o: ([o], [{"scheduler": harmonic(o), "interval": "batch"}]), "got 'batch' of"),
        (lambda o: ([o], [{"scheduler": harmonic(o), "frequency": 0}]), r"at least 1 .*\(got 0 of"),
        (lambda o: [o, torch.optim.SGD(o.param_groups[0]["params"])], r"one optimizer \(got 2\)"),
        (lambda o: torch.optim.LBFGS(o.param_groups[0]["params"]), r"one gradient \(got LBFGS\)"),
        (lambda o: None, r"or none\).* Nothing would be .* torch\.optim\.AdamW"),
    ],
)
def test_optimizers_and_schedulers_that_no_step_has_a_meaning_for_are_refused(returned, message):
    with pytest.raises(ValueError, match=rf"^OwnModule needs .*{message}"):
        trained(OwnModule(returned))


def test_callbacks_that_would_set_the_rate_wrongly_are_refused():
    averaging = frameworks.callbacks.StochasticWeightAveraging(swa_lrs=0.1)
    module = OwnModule()
    module.norm = nn.BatchNorm1d(2)
    for callback in (averaging, frameworks.callbacks.LearningRateFinder()):
        with pytest.raises(ValueError, match=f"a Trainer without {type(callback).__name__} "):
            trained(module, callbacks=[callback])
    with pytest.raises(ConfigError, match="Use OptimizerSettings"):
        PolicyGradientModule.__new__(PolicyGradientModule)._check_callback(averaging)


def test_another_result_than_that_of_the_step_is_refused():
    """Of a step of two micro-batches: one without the step's totals, and a tensor."""

    class WithoutTotals(OwnModule):
        def micro_batch_loss(self, micro_batch, totals):
            return self.loss(micro_batch)

    class OfTensors(OwnModule):
        def micro_batch_loss(self, micro_batch, totals):
            return self.loss(micro_batch, totals=totals).loss

    message = (
        r"^WithoutTotals\.micro_batch_loss needs the totals of the step, of 2 documents with 4 "
        r"trained tokens \(got those of 1 documents with 2\).* Use pgtoolkit\.policy_loss\(\.\.\., "
    )
    with pytest.raises(ValueError, match=message):
        trained(WithoutTotals())
    with pytest.raises(TypeError, match=r"return a PolicyLoss \(got Tensor\).* without \.loss"):
        trained(OfTensors())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"advantages": math.nan}, "advantages needs finite .* in document 0"),
        ({"old_log_probs": 0.4}, r"old_log_probs needs log-probs.* \(got 0\.4 in document 0"),
    ],
)
def test_refused_numbers_of_a_document_are_said_with_its_name(wrong, message):
    batch = [documents()[0], document_of(4, name="the wrong one", **wrong)]
    step = make_step(batch, 4)  # each in a micro-batch of its own
    module = OwnModule()
    optimizer = torch.optim.SGD(module.parameters())
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    match = f"{message}.* Of the documents of this micro-batch 0 is the wrong one"
    with pytest.raises(DataError, match=match):
        module.training_step(step, 0)


def test_a_module_of_one_s_own_can_be_balanced():
    """In two micro-batches, against the loops of the specification; documents of one group with
    advantages of both signs, of none, and without a trained token."""
    rows = [(4, 0.8), (3, -0.5), (4, 0.0), (2, 0.3)]
    batch = [
        document_of(length, advantages=advantage, old_log_probs=-1.7, group=number // 2)
        for number, (length, advantage) in enumerate(rows)
    ]
    batch.append(document_of(2, torch.zeros(2, dtype=torch.bool), group=1))
    module = OwnModule()
    module.aggregation = "balanced"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    metrics = module.training_step(make_step(batch, 8), 0)["metrics"]
    assert metrics["num_micro_batches"] == 2
    (whole,) = make_step(batch, 1000).micro_batches
    expected = reference.policy_loss(
        module.table.detach()[whole.tokens],
        whole.labels,
        whole.old_log_probs.double(),
        whole.advantages.double(),
        whole.document_index,
        loss="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        aggregation="balanced",
        group_index=whole.group_index,
        num_documents=len(batch),
    )
    assert metrics["loss"] == pytest.approx(float(expected.loss), rel=1e-12)
    gradient = torch.zeros_like(module.table).index_add(0, whole.tokens, expected.gradient)
    torch.testing.assert_close(module.table.grad, gradient, rtol=1e-12, atol=1e-15)
    assert abs(expected.loss) > 1e-3
    several = document_of(4, advantages=torch.tensor([0.1, 0.1, 0.2]))
    assert make_step([several], 8).totals.completions_by_sign is None


def result_of_layout(sizes: dict[str, int], share: dict[str, int]) -> list[float] | str:
    """Return the gradient of a step of three documents on this rank, or the refusal.

    sizes: of the module's layout; empty for one process. share: arguments of make_step.
    """
    of_module = layout(**sizes) if sizes else ONE_PROCESS
    if share.get("data_rank") == -1:
        share["data_rank"] = dist.get_rank()
    module = OwnModule(layout=of_module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    try:
        module.training_step(make_step(documents()[:3], 8, **share), 0)
    except ValueError as error:
        return str(error)
    return module.table.grad.flatten().tolist()


OF_ALL = "data_rank=layout.rank_in('data_parallel'), data_size=layout.size('data_parallel')"


@pytest.mark.parametrize(
    ("sizes", "share", "refused"),
    [
        ({"data_parallel": 2}, {}, ("data_parallel=2 (got 6)", OF_ALL)),
        ({"data_parallel": 2}, {"data_rank": 0, "data_size": 2}, ("got 4)", OF_ALL)),
        ({"data_parallel": 2}, {"data_rank": 1, "data_size": 2}, ("got 2)", OF_ALL)),
        ({}, {"data_rank": -1, "data_size": 2}, ("=1 (got", "Layout.of_world(...)")),
        ({}, {"data_rank": 1, "data_size": 2}, ("=1 (got 1)", "without data_rank and data_size")),
        ({"data_parallel": 2}, {"data_rank": -1, "data_size": 2}, None),
        ({"sequence_data_parallel": 2}, {"data_rank": -1, "data_size": 2}, ("got",)),
    ],
)
def test_a_step_that_does_not_fit_the_layout_is_refused_on_all_ranks(sizes, share, refused):
    whole = result_of_layout({}, {})
    for result in world(2).run(result_of_layout, sizes, share):
        if refused is None:
            torch.testing.assert_close(torch.tensor(result), torch.tensor(whole))
        else:
            assert all(words in result for words in refused), result


def test_a_document_that_two_ranks_have_instead_of_another_is_refused():
    step = make_step(documents()[:2], 4, None, 0, 2)
    (micro_batch,) = step.micro_batches
    step.micro_batches[:] = [micro_batch, micro_batch]
    with pytest.raises(ValueError, match="got 2, some of them twice"):
        OwnModule().take_step(step)


class WithoutSuper(OwnModule):
    """Has a hook of its own, which does not call that of its class."""

    def on_train_epoch_end(self):
        pass


@pytest.mark.parametrize("limits", [{"max_steps": 50}, {"min_epochs": 4, "max_steps": 50}])
def test_data_that_begin_only_once_end_the_training(limits, caplog):
    """It went on with empty epochs, without end."""
    module = WithoutSuper()
    trainer = lightning.Trainer(**({"max_epochs": -1} | QUIET | limits))
    with caplog.at_level("WARNING", "pgtoolkit"):
        trainer.fit(module, steps_once())
    assert module.num_updates == STEPS_OF_AN_EPOCH
    told = [message for message in caplog.messages if "no step left after 5 updates" in message]
    assert len(told) == 1
    assert "before lightning.Trainer(max_steps=50)" in told[0]


@pytest.mark.parametrize(
    ("masked", "options", "message"),
    [
        (range(1, 6), {}, r"^trainer\.fit needs data with trained tokens \(got 5 steps in which"),
        (
            (),
            {"min_steps": 9},
            r"^lightning\.Trainer\(min_steps=9\) needs .*\(got 5\)\. .*min_steps=5",
        ),
        (
            (),
            {"overfit_batches": 1},
            r"overfit_batches=1\) needs .*got a generator\).* DataLoader of",
        ),
    ],
)
def test_a_training_that_would_not_end_or_train_nothing_is_refused(masked, options, message):
    trainer = lightning.Trainer(**({"max_epochs": -1, "max_steps": 50} | QUIET | options))
    with pytest.raises((DataError, ValueError), match=message):
        trainer.fit(OwnModule(), steps_once(masked))


def test_data_without_a_step_are_refused_but_not_where_a_training_goes_on(tmp_path):
    data = steps_once()
    path = tmp_path / "end.ckpt"
    trainer = lightning.Trainer(**({"max_epochs": 1} | QUIET))
    trainer.fit(OwnModule(), data)
    trainer.save_checkpoint(path)
    with pytest.raises(
        DataError, match=r"needs data with a step \(got none in an epoch.* new StepL"
    ):
        lightning.Trainer(**({"max_epochs": 1} | QUIET)).fit(OwnModule(), data)
    module = OwnModule()
    resumed = lightning.Trainer(**({"max_epochs": -1, "max_steps": 50} | QUIET))
    resumed.fit(module, data, ckpt_path=path)
    assert module.num_updates == STEPS_OF_AN_EPOCH


def steps_once(masked: Sequence[int] = ()) -> Iterator[Step]:
    """Yield the steps of an epoch. A generator gives them once."""
    rows = documents(masked)
    for start in range(0, len(rows), 2):
        yield make_step(rows[start : start + 2], max_tokens=8)

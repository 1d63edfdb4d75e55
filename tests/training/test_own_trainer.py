"""PolicyGradientModule in a Trainer of the user's own: its metrics, its schedule, and what the
Trainer must leave to it."""

import csv
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.families import Grpo
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training import frameworks
from pgtoolkit.training.critic import with_value_head
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import CriticSettings, OptimizerSettings, Schedule

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def make_module(
    max_steps: int = 1,
    kl: KL | None = None,
    metrics: str = "basic",
    kind: type[PolicyGradientModule] = PolicyGradientModule,
    **options: Any,
) -> PolicyGradientModule:
    policy = build_policy(TinyModelSettings(), alphabet="0123456789=", on_gpu=False)
    loss = Loss(Grpo(), aggregation_of("token_mean"), metrics=metrics, kl=kl)
    optimizer = OptimizerSettings(learning_rate=1e-3, warmup_steps=0, schedule=Schedule.linear)
    return kind(
        policy, loss, Computation(check_finite=False), optimizer, max_steps=max_steps, **options
    )


def make_module_with_all_parts(max_steps: int) -> PolicyGradientModule:
    """Return a module with a critic, a reference that moves, an adaptive KL and a loss scale."""
    policies = [
        build_policy(TinyModelSettings(), alphabet="0123456789=", on_gpu=False) for _ in range(2)
    ]
    module = make_module(
        max_steps, KL("k3", 0.1), reference=policies[0], reference_every=1, reference_rate=0.5
    )
    module.add_critic(with_value_head(policies[1]), CriticSettings(learning_rate=1e-2))
    module.adaptive_kl = AdaptiveKL(target=0.01, horizon=10, coefficient=0.1)
    module.loss_scale = LossScale(value=256.0)
    return module


def steps(ref_log_probs: torch.Tensor | None = None) -> torch.utils.data.DataLoader:
    documents = [
        Document(
            tokens=torch.tensor([1, 2, 3, 4]),
            loss_mask=torch.tensor([False, False, True, True]),
            advantages=torch.full((2,), advantage),
            old_log_probs=torch.full((2,), -2.0),
            ref_log_probs=ref_log_probs,
            values=torch.zeros(2),
            returns=torch.full((2,), advantage),
            group=0,
            name=f"document {advantage}",
            reward=reward,
        )
        for advantage, reward in ((1.0, 0.75), (-0.5, 0.25))
    ]
    return torch.utils.data.DataLoader(
        [*documents, *documents], batch_size=2, collate_fn=lambda batch: make_step(batch, 8)
    )


class Seen(lightning.Callback):
    """Keeps what a callback finds at the end of each step."""

    def __init__(self):
        self.of_steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.of_steps.append((dict(trainer.callback_metrics), outputs["metrics"]))


@pytest.mark.filterwarnings("ignore")
def test_callbacks_and_loggers_get_the_metrics_of_each_step(tmp_path, caplog):
    seen = Seen()
    # Without `loss` among the metrics it raises an error.
    stopping = frameworks.callbacks.EarlyStopping("loss", check_on_train_epoch_end=True)
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path, version=0)
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[seen, stopping], logger=logger, log_every_n_steps=1, **QUIET
    )
    with caplog.at_level(logging.WARNING, "pgtoolkit"):
        trainer.fit(make_module(), steps())
    assert len(seen.of_steps) == 2
    for found, expected in seen.of_steps:
        assert {"loss", "reward", "learning_rate", "weight_sum"} <= {*expected} <= {*found}
        for name, value in expected.items():
            assert float(found[name]) == pytest.approx(value, rel=1e-6, nan_ok=True), name
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["reward"]) for row in rows] == [0.5, 0.5]
    losses = [metrics["loss"] for _, metrics in seen.of_steps]
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-5)
    # The schedule ended with the first of the two updates.
    assert caplog.text.count("has made its max_steps=1 updates, to whose end schedule=linear") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"^PolicyGradientModule .*\(got 0.5\).* Use max_grad_norm=0.5",
        ),
        ({"accumulate_grad_batches": 2}, r"^PolicyGradientModule .*\(got 2\).* Use steps of more"),
    ],
)
def test_a_trainer_that_would_clip_or_accumulate_is_refused_with_what_does(option, message):
    trainer = lightning.Trainer(max_steps=1, logger=False, **option, **QUIET)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_module(), steps())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [make_module, make_module_with_all_parts])
def test_a_trainer_of_one_s_own_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    tmp_path, make
):
    def trained(max_epochs: int, path: str | None = None) -> tuple[PolicyGradientModule, list]:
        torch.manual_seed(0)
        module = make(max_steps=4)
        seen = Seen()
        trainer = lightning.Trainer(max_epochs=max_epochs, callbacks=[seen], logger=False, **QUIET)
        trainer.fit(module, steps(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"after-{max_epochs}.ckpt")
        return module, [metrics["learning_rate"] for _, metrics in seen.of_steps]

    uninterrupted, rates = trained(2)
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    trained(1)
    resumed, rates_after = trained(2, str(tmp_path / "after-1.ckpt"))
    assert rates_after == rates[2:]
    assert (resumed.num_updates, resumed.documents_seen) == (4, 8)
    pairs = zip(uninterrupted.parameters(), resumed.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    if resumed.critic is None:
        return
    assert uninterrupted.critic is not None
    assert resumed.critic.num_updates == uninterrupted.critic.num_updates == 4
    assert resumed.adaptive_kl == uninterrupted.adaptive_kl != AdaptiveKL(0.01, 10, 0.1)
    assert resumed.loss_scale == uninterrupted.loss_scale == LossScale(256.0, good_steps=4)
    assert resumed.loss.kl == uninterrupted.loss.kl


def test_a_checkpoint_of_the_trainer_that_lacks_what_a_module_goes_on_with_is_refused():
    module = make_module()
    remedy = r"Use module\.load_state_dict\(torch\.load\(PATH, weights_only=False\)"
    for checkpoint in ({}, {"pgtoolkit": {}}, {"pgtoolkit": None}):
        with pytest.raises(ConfigError, match="with the counters of PolicyGradientModule") as error:
            module.on_load_checkpoint(checkpoint)
        assert "super().on_save_checkpoint(checkpoint); of a checkpoint" in str(error.value)
    checkpoint = {}
    module.reference_every = 2
    module.reference_is_due = True
    module.on_save_checkpoint(checkpoint)
    module.reference_is_due = False
    module.on_load_checkpoint(checkpoint)
    assert module.reference_is_due
    module.loss_scale = LossScale()
    module.adaptive_kl = AdaptiveKL(0.01, 10, 0.1)
    with pytest.raises(
        ConfigError, match=rf"\(got one without adaptive_kl, loss_scale\).* {remedy}"
    ):
        module.on_load_checkpoint(checkpoint)


@pytest.mark.filterwarnings("ignore")
def test_an_adaptive_coefficient_of_python_is_that_of_the_loss_and_moves():
    """The reference is far away: each batch of 2 documents moves it by 20 % of 2/10."""
    measured = []
    for coefficient, adaptive in ((5.0, AdaptiveKL(0.01, 10, 0.1)), (0.1, None)):
        torch.manual_seed(0)
        module = make_module(2, KL("k3", coefficient))
        module.adaptive_kl = adaptive
        seen = Seen()
        trainer = lightning.Trainer(max_epochs=1, callbacks=[seen], logger=False, **QUIET)
        trainer.fit(module, steps(ref_log_probs=torch.full((2,), -9.0)))
        measured.append([metrics for _, metrics in seen.of_steps])
    with_adaptive, fixed = measured
    assert [each["kl_coefficient"] for each in with_adaptive] == pytest.approx([0.1, 0.104])
    assert with_adaptive[0]["loss"] == fixed[0]["loss"]


@pytest.mark.parametrize(("kind", "metrics"), [("full_reverse", "basic"), ("k3", "none")])
def test_an_adaptive_coefficient_that_nothing_would_move_is_refused(kind, metrics):
    reference = build_policy(TinyModelSettings(), alphabet="0123456789=", on_gpu=False)
    module = make_module(kl=KL(kind, 0.1), metrics=metrics, reference=reference)
    module.adaptive_kl = AdaptiveKL(0.01, 10, 0.1)
    with pytest.raises(ConfigError, match=r"^adaptive_kl needs .*kl=KL\('k3', \.\.\.\), metrics="):
        module.take_step(next(iter(steps())))


def test_an_adaptive_coefficient_of_no_penalty_is_refused():
    """A penalty on rewards is seen by the documents, those of failed scores among them."""
    module = make_module()
    module.adaptive_kl = AdaptiveKL(0.01, 10, 0.1)
    step = next(iter(steps()))
    for known in ({}, {"reward": None}, {"ref_log_probs": torch.zeros(2)}):
        step.documents[:] = [replace(document, **known) for document in step.documents]
        with pytest.raises(ConfigError, match=r"^adaptive_kl needs a penalty.*kl=KL\('k3'"):
            module.take_step(step)
        step = next(iter(steps()))
    for of_rewards in ({"kl_reward": -0.5}, {"reward": None, "ref_log_probs": torch.zeros(2)}):
        step.documents[-1] = replace(step.documents[-1], **of_rewards)
        module._check_adaptive_kl(step)
        step = next(iter(steps()))


@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_beside_that_of_the_settings_is_refused():
    module = make_module()
    configured = module.configure_optimizers

    def with_another():
        optimizers, schedulers = configured()
        return optimizers, [*schedulers, torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]

    module.configure_optimizers = with_another
    with pytest.raises(ConfigError, match=r"no scheduler of your own \(got StepLR\)"):
        lightning.Trainer(max_steps=1, logger=False, **QUIET).fit(module, steps())


class OwnOptimizer(PolicyGradientModule):
    """Has an optimizer of its own, and perhaps the schedule of the rates that it keeps."""

    scheduled = False

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.rates: list[float] = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def before_update(self):
        metrics = super().before_update()
        self.rates.append(metrics["learning_rate"])
        return metrics


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("scheduled", "rates"), [(False, [0.5, 0.5]), (True, [0.5, 0.05])])
def test_a_subclass_trains_with_an_optimizer_of_its_own(scheduled, rates):
    module = make_module(2, kind=OwnOptimizer)
    module.scheduled = scheduled
    body = build_policy(TinyModelSettings(), alphabet="0123456789=", on_gpu=False)
    module.add_critic(with_value_head(body), CriticSettings(learning_rate=1e-2))
    lightning.Trainer(max_steps=2, logger=False, **QUIET).fit(module, steps())
    assert module.rates == pytest.approx(rates)
    assert module.num_updates == module.critic.num_updates == 2


def test_a_batch_that_is_no_step_is_refused_with_what_collates_one():
    module = make_module()
    loader = torch.utils.data.DataLoader(steps().dataset, batch_size=2, collate_fn=list)
    with pytest.raises(ValueError, match=r"needs a Step as a batch \(got a list\).* make_step\("):
        lightning.Trainer(max_steps=1, logger=False, **QUIET).fit(module, loader)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_steps": 0}, r"max_steps needs a whole number >= 1 \(got 0\)"),
        ({"max_bad_steps": 0}, "max_bad_steps needs a whole number >= 1"),
        ({"reference_every": 0}, "reference_every needs a whole number >= 1"),
        ({"reference_rate": 2.0}, "reference_rate needs a number above 0 and at most 1"),
    ],
)
def test_a_module_refuses_numbers_that_it_cannot_train_with(options, words):
    with pytest.raises(ValueError, match=words):
        make_module(**options)

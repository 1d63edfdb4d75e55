"""Families as objects: `check_family` compares slopes with automatic differentiation, for the
package's families and a user's, and `log_prob_loss` refuses wrong arguments."""

import re

import pytest
import torch
from builders.losses import EVERY_LOSS, PARAMETERS, make_case
from builders.runs import run
from losses.families import Squared, SquaredByDocument, WrongSlope

from pgtoolkit import families, log_prob_loss
from pgtoolkit.config.compose import compose
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.check import check, problems
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.slopes import check_family


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_the_slopes_of_each_family_are_the_derivatives_of_its_loss(loss):
    check_family(family_of(loss))
    check_family(family_of(loss, **PARAMETERS[loss]))


def test_consistent_families_of_a_user_pass_the_check():
    check_family(Squared())
    check_family(SquaredByDocument(tau=2.0))


CLIP_METRICS = {
    "clipped_ratio_fraction": 3 / 8,
    "clipped_low_fraction": 1 / 8,
    "clipped_high_fraction": 1 / 8,
    "clipped_sampling_fraction": 3 / 8,
}
"""Of the documents of `metrics_of` under the bounds 0.8 and 1.2."""


def metrics_of(family):
    """Return the metrics of a document of four tokens and one of a single token."""
    ratio = torch.tensor([0.5, 0.7, 1.1, 1.5, 0.9], dtype=torch.float64)
    gap = torch.tensor([1.3, 1.0, 0.5, 0.6, 1.1], dtype=torch.float64)
    old = torch.full_like(ratio, -2.0)
    return log_prob_loss(
        old + ratio.log(),
        old,
        torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64),
        torch.tensor([0, 0, 0, 0, 1]),
        torch.ones(5, dtype=torch.bool),
        sampling_log_probs=old - gap.log(),
        loss=family,
        metrics="basic",
    ).metrics


class WithBounds(Squared):
    bounds = 0.8, 1.2


class OpenBelow(Squared):
    @property
    def bounds(self):
        return None, 1.2


class WithOutside(Squared):
    def outside(self, ratio, token_log_ratio, log_probs):
        return ratio < 0.8, ratio > 1.2


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (WithBounds, CLIP_METRICS),
        (WithOutside, CLIP_METRICS),
        (
            OpenBelow,
            {
                "clipped_ratio_fraction": 1 / 8,
                "clipped_low_fraction": 0.0,
                "clipped_high_fraction": 1 / 8,
                "clipped_sampling_fraction": 1 / 8,
            },
        ),
        (Squared, {}),
    ],
)
def test_a_class_of_a_user_has_the_metrics_of_a_clip_where_it_names_one(family, expected):
    metrics = metrics_of(family())
    of_clips = {name: float(metrics[name]) for name in CLIP_METRICS if name in metrics}
    assert of_clips == pytest.approx(expected)
    assert float(metrics["ratio_new_old"]) == pytest.approx((3.8 / 4 + 0.9) / 2)


class WrongBounds(Squared):
    bounds = 1.2, 0.8


class ForgottenStop(Squared):
    """A family that claims a slope by the log-prob and forgets to stop the other gradient."""

    slope_of = "log_prob"

    def surrogate(self, log_ratio, advantages, log_probs):
        return -log_ratio.exp() * advantages * log_probs, -log_ratio.exp() * advantages


class NotSilent(Squared):
    silent_without_advantage = True


class Denies(Squared):
    reads_old_log_probs = False


class WrongToken(Squared):
    def token(self, log_ratio, advantages):
        return log_ratio.clamp(-1, 1), None


class WrongNear(Squared):
    """A family that is wrong only within a clip as narrow as GSPO's, where A < 0."""

    def surrogate(self, log_ratio, advantages, log_probs):
        losses, slope = super().surrogate(log_ratio, advantages, log_probs)
        return losses, torch.where((log_ratio.abs() < 3e-4) & (advantages < 0), -slope, slope)


class Standardised(Squared):
    """A family whose loss of a token depends on which tokens share its micro-batch."""

    def surrogate(self, log_ratio, advantages, log_probs):
        return super().surrogate(log_ratio, advantages / advantages.std(), log_probs)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            WrongSlope,
            (
                r"WrongSlope.surrogate needs a slope that is the derivative of its value by the "
                r"log_ratio .got"
            ),
        ),
        (
            ForgottenStop,
            r"ForgottenStop.surrogate needs a slope .* by the log_ratio .* needs \.detach\(\)",
        ),
        (NotSilent, "silent_without_advantage needs a slope of 0"),
        (WrongBounds, r"bounds of wrongbounds need to be a pair .* \(got \(1.2, 0.8\)\)"),
        (Denies, "reads_old_log_probs=False needs a surrogate without the log-ratio"),
        (WrongToken, "WrongToken.token needs a slope"),
        (WrongNear, "at a log-ratio of -0.0002.*, an advantage of -3.21"),
        (
            Standardised,
            (
                "Standardised.surrogate needs numbers of a token that do not depend on the other "
                "tokens"
            ),
        ),
    ],
)
def test_a_family_that_contradicts_itself_is_refused(family, message):
    with pytest.raises(ValueError, match=message):
        check_family(family())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": "with_entropy"}, "needs logits"),
        ({"mask": torch.full((32,), 0.5)}, r"mask needs 0 and 1, .*\(got 0.5\). Use mask=weights"),
        (
            {"mask": torch.ones(31)},
            r"mask needs a bool, or 0 or 1, per token, 32 \(got \(31,\), fl",
        ),
        ({"temperature": 2.0, "loss": "grpo"}, r"already. Use log_probs of logits / temperature$"),
        ({"temperature": 2.0, "loss": "tpo"}, r"Use loss=pgtoolkit.families.Tpo\(temperature=2.0"),
        ({"temperature": 2.0, "loss": len}, r"Use loss=functools.partial\(..., temperature=2.0"),
        ({"log_probs": torch.zeros(32, 2)}, "one floating number per token"),
        ({"loss": families.Cispo(), "epsilon_high": 3.0}, "its parameters belong to it, Cispo"),
        ({"loss": "cispo", "epsilon_low": 1.5}, "epsilon_low needs a number from 1e-09 to 0.999"),
        ({"loss": "cispo", "epsilon_high": None}, r"1e-09 to 1e\+09 \(got None\)$"),
        ({"loss": families.Cispo(), "epsilon_high": None}, "its parameters belong to it, Cispo"),
        ({"loss": "dppo", "delta_high": None}, r"a number \(got None\). Leave it out for its def"),
    ],
)
def test_log_prob_loss_refuses_wrong_arguments(change, message):
    case = make_case()
    arguments = {"log_probs": case.old_log_probs, "mask": case.labels >= 0} | change
    with pytest.raises(ValueError, match=message):
        log_prob_loss(
            arguments.pop("log_probs"),
            *case.tensors[2:],
            arguments.pop("mask"),
            num_documents=case.num_documents,
            **arguments,
        )


def scaled(log_probs, advantages, scale=0.5):
    return -log_probs * advantages * (3.0 if scale is None else scale)


def test_none_is_a_value_of_a_parameter_and_not_its_default():
    case = make_case()

    def value(loss, **parameters):
        mask = case.labels >= 0
        vectors = case.tensors[2:]
        return log_prob_loss(case.old_log_probs, *vectors, mask, loss=loss, **parameters).loss

    assert family_of("cispo", epsilon_low=None).bounds == (0.0, 5.0)
    assert float(value(scaled, scale=None)) == pytest.approx(6 * float(value(scaled)), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "WrongSlope",
            [],
            "a slope that is the derivative of its value by the log_ratio (got 1.375",
        ),
        (
            "NoNumber",
            [],
            (
                "needs to return finite numbers (got nan, at a log-ratio of -18.483, an "
                "advantage of 0 and"
            ),
        ),
        ("Squared", ["loss.tau=1e400"], "surrogate needs to return finite numbers (got inf, at a"),
        ("no_family", [], "no_family asks for"),
        ("SquaredByDocument", ["loss.num_splits=2", "kernel=torch"], "loss.num_splits"),
        ("Squared", ["loss.taw=3"], "unexpected keyword argument 'taw'"),
        ("Nothing", [], "(got no Nothing)"),
    ],
)
def test_check_refuses_a_family_that_cannot_be_trained_with(name, options, message):
    refusals = problems(check(["tracking=none", f"loss=losses.families.{name}", *options]))
    assert len(refusals) == 1
    assert message in refusals[0]
    assert "<string>" not in refusals[0]  # the file of no code


@pytest.mark.parametrize(
    ("sums", "last"),
    [("false", "KeyError: {}"), ("true", "ValueError: () is not one number per token, ({},)")],
)
def test_the_error_names_a_users_family_that_fails_in_training(sums, last, tmp_path):
    overrides = ["loss=losses.families.FailsLater", f"loss.sums={sums}"]
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "run", *overrides)
    lines = str(error.value).splitlines()
    name = last.partition(":")[0]
    first = rf"loss=losses\.families\.FailsLater raised {name} on a micro-batch of (\d+) tokens:"
    assert lines[-1] == last.format(re.fullmatch(first, lines[0])[1])


def test_a_resumed_run_keeps_the_options_of_its_family(tmp_path):
    overrides = ["loss=losses.families.Squared", "loss.tau=0.3"]
    run(tmp_path, *overrides, "trainer.max_steps=1")
    resumed = compose(["loss.path=losses.families.Squared"], run_dir=tmp_path)
    assert resumed.problems == []
    assert dict(resumed.config.loss.options) == {"tau": 0.3}
    changed = compose(["loss.tau=0.5", "seed=1"], run_dir=tmp_path)
    assert dict(changed.config.loss.options) == {"tau": 0.5}
    assert len(changed.problems) == 1

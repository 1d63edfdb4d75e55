"""Finds options that a run has set and that changed no number of its steps, by its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pgtoolkit.config.keys import OPTION_KEYS, default, shown
from pgtoolkit.config.own_code import chosen
from pgtoolkit.runs.series import Columns, values
from pgtoolkit.system.conditions import holds, value_of
from pgtoolkit.system.report import text

Test = Callable[[Sequence[float], float], bool]
"""Whether the values of a metric, at least one, show that a key of this value never acted."""


@dataclass(frozen=True)
class Silent:
    """Holds how the metrics of a run show that a key never acted.

    key: by its name in config.yaml.
    condition: the configurations in which the metrics tell, as `holds` reads it; "" for all.
    shown_by: metric -> its test. All of them have to hold.
    never: what did not happen in any step, in words.
    """

    key: str
    condition: str
    shown_by: Mapping[str, Test]
    never: str


def _is_zero(measured: Sequence[float], _: float) -> bool:
    return not any(measured)


def _is_one(measured: Sequence[float], _: float) -> bool:
    """Return whether all values are 1, but for the rounding of log-probs."""
    return all(abs(value - 1) <= 1e-5 for value in measured)


def _within(bound: Callable[[float], float], sign: int) -> Test:
    """Return a test that values never lie beyond a bound. sign: 1 for an upper one, else -1."""
    return lambda measured, value: all(sign * number <= sign * bound(value) for number in measured)


_at_most = _within(lambda value: value, 1)
_at_least = _within(lambda value: value, -1)

_CUTTING = "loss.name=grpo or loss.name=gspo or loss.name=gmpo"
_BOUNDED = (
    "correction.name=token_truncate or correction.name=sequence_truncate or "
    "correction.name=token_mask or correction.name=sequence_mask"
)

SILENT = (
    Silent(
        "loss.epsilon_low",
        _CUTTING,
        {"clipped_low_fraction": _is_zero},
        "no ratio was below it where the advantage is negative",
    ),
    Silent(
        "loss.epsilon_high",
        _CUTTING,
        {"clipped_high_fraction": _is_zero},
        "no ratio was above it where the advantage is positive",
    ),
    Silent(
        "loss.epsilon_low",
        "loss.name=cispo",
        {"min_ratio_new_old": _within(lambda epsilon: 1 - epsilon, -1)},
        "no ratio was below it",
    ),
    Silent(
        "loss.epsilon_high",
        "loss.name=cispo",
        {"max_ratio_new_old": _within(lambda epsilon: 1 + epsilon, 1)},
        "no ratio was above it",
    ),
    Silent("loss.dual_clip", "", {"max_ratio_new_old": _at_most}, "no ratio was above it"),
    Silent("loss.ratio_cap", "", {"max_ratio_new_old": _at_most}, "no ratio was above it"),
    Silent("loss.low", "", {"min_ratio_new_old": _at_least}, "no ratio was below it"),
    Silent("loss.high", "", {"max_ratio_new_old": _at_most}, "no ratio was above it"),
    Silent(
        "correction.name",
        "correction.name!=none",
        {"min_correction_factor": _is_one, "max_correction_factor": _is_one},
        "every factor was 1",
    ),
    Silent(
        "correction.low",
        _BOUNDED,
        {"correction_outside_fraction": _is_zero},
        "no factor was outside of the bounds",
    ),
    Silent(
        "correction.high",
        _BOUNDED,
        {"correction_outside_fraction": _is_zero},
        "no factor was outside of the bounds",
    ),
    Silent(
        "kl.kind", "kl.kind!=none and kl.place=loss", {"kl_ref": _is_zero}, "the distance was 0"
    ),
    Silent(
        "kl.kind",
        "kl.kind!=none and kl.place=reward",
        {"kl_reward": _is_zero},
        "the distance was 0",
    ),
    Silent(
        "entropy.top_fraction",
        "",
        {"entropy_kept_fraction": lambda measured, _: {*measured} == {1}},
        "every token was counted",
    ),
    Silent(
        "advantage.clip_low",
        "",
        {"min_advantage": lambda measured, bound: min(measured) > bound},
        "no advantage was below it",
    ),
    Silent(
        "advantage.clip_high",
        "",
        {"max_advantage": lambda measured, bound: max(measured) < bound},
        "no advantage was above it",
    ),
    Silent("critic.clip", "", {"value_clipped_fraction": _is_zero}, "no value moved so far"),
    Silent(
        "rollout.overlong_buffer",
        "",
        {"overlong_penalty": _is_zero},
        "no completion was so long",
    ),
    Silent(
        "rollout.truncated",
        "rollout.truncated=mask",
        {"truncated_fraction": _is_zero},
        "no completion was cut off",
    ),
    Silent(
        "rollout.max_sampling_rounds",
        "",
        {"dropped_prompt_fraction": _is_zero},
        "no prompt was dropped",
    ),
    Silent(
        "rollout.uninformative",
        "rollout.uninformative=drop",
        {"dropped_group_fraction": _is_zero},
        "no prompt was dropped",
    ),
    Silent("loss.name", "", {"grad_norm": _is_zero}, "the gradient of every step was exactly 0"),
    Silent("rollout.retire_at", "", {"retired_prompts": _is_zero}, "no prompt was retired"),
    Silent("optimizer.max_grad_norm", "", {"grad_norm": _at_most}, "no gradient was longer"),
)


def without_effect(config: Mapping[str, object], columns: Columns) -> Iterator[str]:
    """Yield `KEY=VALUE: ...` for each key that was set to another value than its option's default,
    and that changed no number of the steps so far.

    config: by dotted keys, or nested. columns: of metrics.jsonl. A key whose metrics were not
    measured is passed over.
    """
    for silent in SILENT:
        value = value_of(config, silent.key)
        if value is None or (silent.condition and not holds(silent.condition, config)):
            continue
        if silent.key not in OPTION_KEYS.values() and value == default(config, silent.key):
            continue
        measured = {name: values(columns, name) for name in silent.shown_by}
        if all(measured.values()) and all(
            shows(measured[name], value) for name, shows in silent.shown_by.items()
        ):
            group = silent.key.partition(".")[0]
            if silent.key == OPTION_KEYS.get(group):
                value = chosen(config, group)
            yield f"{shown(silent.key)}={text(value)}: {silent.never}"

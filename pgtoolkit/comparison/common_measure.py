"""Decides whether a number means the same in two runs, by the keys that change the number itself,
and says what to run where such keys differ.

Keys declare what they change (`Alters`). Here stand the numbers that each kind concerns, and how a
held-out number follows from the configuration of its run.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pgtoolkit.comparison.compared_runs import learned
from pgtoolkit.comparison.measures import AXES
from pgtoolkit.config.defaults import Computed, scores_by_own_code
from pgtoolkit.config.evaluation_sets import (
    DEFAULT_SET,
    values_of_set,
)
from pgtoolkit.config.keys import KEYS, OPTION_KEYS, shown
from pgtoolkit.config.own_code import PARAMETERS
from pgtoolkit.runs.declared_metrics import metric_named
from pgtoolkit.runs.find import HELD_OUT, Run
from pgtoolkit.runs.history import CODE, CONTENTS, EVALUATION_CODE
from pgtoolkit.runs.metric import OF_OWN_METRICS
from pgtoolkit.system.declared import REQUIRED, Alters, Dictionary
from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.system.report import identity, text

_OF_DOCUMENTS = {Alters.prompts, Alters.scores, Alters.selection, Alters.sampling, Alters.age}
"""What concerns a mean over the documents of a step."""

_RECORDED = "takes completions that the policy in training has not written"

_OF_A_STEP_S_SIZE = ("rank 0", "the run", "the step")
"""What times and counts are taken over, which are no measurements of a policy."""


def _kinds_of_keys() -> dict[str, frozenset[Alters]]:
    kinds: dict[str, frozenset[Alters]] = {}
    for key in KEYS:
        if key.alters not in (None, Alters.nothing):
            kinds[key.name] = kinds.get(key.name, frozenset()) | {key.alters}
    return kinds


_KINDS = _kinds_of_keys()
"""Key -> what it changes, of the keys that change a number themselves."""

_DEFAULTS = {
    key.name: None if isinstance(key.default, Computed) or key.default == REQUIRED else key.default
    for key in reversed(KEYS)
}

_ASKED_AS_IN_TRAINING = ("temperature", "top_p", "top_k", "max_completion_length")
"""Keys of evaluation that take the value of the same key of rollout where they are null."""


@dataclass(frozen=True)
class Difference:
    """A key that changes a number itself, and in which two runs differ.

    name: as the user types it. why: what it changes, as a predicate. use: the override of `pgtk
    evaluate` with which it measures both as the first; "" where it does so without one, None where
    no override does.
    """

    name: str
    why: str
    use: str | None = ""

    def __str__(self) -> str:
        return f"{self.name} {self.why}"


def kinds_of(metric: str) -> frozenset[Alters]:
    """Return the kinds of keys that change a metric themselves."""
    declared = metric_named(metric)
    is_formula = bool(_in_formula(metric))
    if declared is not None and declared.over in _OF_A_STEP_S_SIZE and not is_formula:
        return frozenset()
    kinds = {*_OF_DOCUMENTS, Alters.end}
    if metric.startswith(HELD_OUT):
        kinds.add(Alters.evaluation)
    if metric == "reward":
        kinds.add(Alters.reward)
    if is_formula:
        kinds.add(Alters.formula)
    return frozenset(kinds)


def _in_formula(metric: str) -> tuple[str, ...]:
    """Return the groups and keys that are in the formula of a metric."""
    if is_own_metric(metric):
        return OF_OWN_METRICS
    declared = metric_named(metric)
    return () if declared is None else declared.in_formula


def is_own_metric(metric: str) -> bool:
    """Return whether a metric is one that a loss of the user's own returns: all others are
    declared."""
    is_known = metric_named(metric) is not None or metric in AXES
    return not is_known and not metric.startswith(HELD_OUT)


@functools.cache
def altering(name: str) -> frozenset[Alters]:
    """Return what a key changes, also an entry of a free-form one, and a parameter of code of the
    user's own; empty for one that changes only what is learned."""
    group, _, parameter = name.partition(".")
    is_one_name = parameter != "" and "." not in parameter
    if is_one_name and name not in _DEFAULTS and group in PARAMETERS:
        name = PARAMETERS[group]
    while name not in _KINDS and "." in name:
        name = name.rpartition(".")[0]
    return _KINDS.get(name, frozenset())


def alters(name: str, metric: str) -> frozenset[Alters]:
    """Return what of a metric of training a key changes itself; empty where it does not."""
    kinds = altering(name) & kinds_of(metric)
    if Alters.formula not in kinds:
        return kinds
    places = _in_formula(metric)
    is_in_formula = any(name == place or name.startswith(f"{place}.") for place in places)
    return kinds if is_in_formula else kinds - {Alters.formula}


def measured_as(run: Run, metric: str, ignore_code: bool = False) -> dict[str, object]:
    """Return what decides what a metric of a run means, by names of keys, contents and code.

    Two runs measure the same if these are equal, and neither `selects` its prompts by itself.
    """
    if metric.startswith(HELD_OUT):
        values = _held_out_as(run, metric)
        code = (CODE, EVALUATION_CODE)
    else:
        values = {name: learned(run, name) for name in run.config if alters(name, metric)}
        for name in run.trained_with:
            if name.startswith(CONTENTS) and alters(name.removeprefix(CONTENTS), metric):
                values[name] = run.trained_with[name]
        values.pop("seed", None)
        code = (CODE,) if Alters.scores in kinds_of(metric) else ()
    if not ignore_code:
        scoring = [*_modules_that_score(run)]
        if is_own_metric(metric):
            scoring.append(_module_of_loss(run))
        for name in run.trained_with:
            prefix = next((prefix for prefix in code if name.startswith(prefix)), None)
            if prefix and (prefix == EVALUATION_CODE or name.removeprefix(prefix) in scoring):
                values[name] = run.trained_with[name]
    return values


def measure_of(
    runs: Sequence[Run], metric: str, ignore_code: bool = False, without: Collection[str] = ()
) -> str | None:
    """Return what a metric of the runs of one configuration means, as a text that is equal where it
    means the same; None where it means something of its own.

    without: names that are left out.
    """
    if any(selects(run, metric) for run in runs):
        return None
    texts = set()
    for run in runs:
        # A key at its default says the same as one that is younger than the run.
        settings = [
            (name, value)
            for name, value in sorted(measured_as(run, metric, ignore_code).items(), key=_name)
            if name not in without and (name not in _DEFAULTS or value != _DEFAULTS[name])
        ]
        texts.add(identity(settings))
    return "; ".join(sorted(texts))


def selects(run: Run, metric: str) -> list[Difference]:
    """Return why a metric of a run means something of its own, whatever it is compared with.

    Which prompts count depends on the policy's scores, or no policy of the run wrote the
    completions.
    """
    if metric.startswith(HELD_OUT) or not kinds_of(metric):
        return []
    if run.config.get("rollout.name") == "recorded":
        has_length = run.config.get("rollout.max_completion_length") is not None
        use = "" if has_length else "evaluation.max_completion_length=256"
        return [Difference("rollout=recorded", _RECORDED, use)]
    return [
        Difference(f"{name}={text(run.config[name])}", Alters.selection)
        for name, kinds in _KINDS.items()
        if Alters.selection in kinds
        and name in run.config
        and run.config[name] not in (_DEFAULTS[name], None)
    ]


def evaluated_alike(runs: Sequence[Run]) -> list[str]:
    """Return the keys that may differ here without changing a held-out number: evaluation.every,
    where all runs are evaluated after as many batches, since it counts the updates of all passes
    over a batch."""
    intervals = {
        int(str(run.config.get("evaluation.every") or 0))
        / int(str(run.config.get("rollout.passes") or 1))
        for run in runs
    }
    return ["evaluation.every"] if len(intervals) == 1 else []


def decided_by_blocks(
    runs: Sequence[Run], metric: str, ignore_code: bool, over: Sequence[str]
) -> list[str]:
    """Return the --over keys, and the names beside them that decide what a metric means and have
    one value in each of their blocks, such as the digits of a task where they are tasks.

    Between runs of one block these need not be compared.
    """
    if not over:
        return []
    blocks = [tuple(identity(learned(run, key)) for key in over) for run in runs]
    measured = [measured_as(run, metric, ignore_code) for run in runs]
    decided = []
    for name in dict.fromkeys(name for of_run in measured for name in of_run):
        texts = [identity(_or_default(of_run, name)) for of_run in measured]
        if len({*texts}) > 1 and len({*zip(blocks, texts, strict=True)}) == len({*blocks}):
            decided.append(name)
    return list(dict.fromkeys([*over, *decided]))


def differences(first: Run, second: Run, metric: str, ignore_code: bool) -> list[Difference]:
    """Return why a metric means something else in two runs; empty where it means the same."""
    reasons = {why.name: why for run in (first, second) for why in selects(run, metric)}
    of_first = measured_as(first, metric, ignore_code)
    of_second = measured_as(second, metric, ignore_code)
    passed = {name.partition("=")[0] for name in reasons} | {*evaluated_alike([first, second])}
    for name in dict.fromkeys((*of_first, *of_second)):
        values = [_or_default(of_run, name) for of_run in (of_first, of_second)]
        is_option_s = _option_differs(name, of_first, of_second)
        if identity(values[0]) == identity(values[1]) or name in passed or is_option_s:
            continue
        why = _difference(name, first, second, metric, values[0])
        reasons.setdefault(why.name, why)
    return [*reasons.values()]


def asked_differently(
    configurations: Sequence[Sequence[Run]],
    metric: str,
    ignore_code: bool = False,
    without: Collection[str] = (),
) -> list[dict[str, object]]:
    """Return, for each run of these configurations in their order, what tells apart runs that were
    trained alike and whose held-out metric means something else: the values by names as the user
    types them.

    without: the --over keys, which are left out.
    """
    runs = [run for configuration in configurations for run in configuration]
    settings: list[dict[str, object]] = [{} for _ in runs]
    if not metric.startswith(HELD_OUT):
        return settings
    classes = [
        (str(place),) for place, configuration in enumerate(configurations) for _ in configuration
    ]
    measured = [measured_as(run, metric, ignore_code) for run in runs]
    for name in dict.fromkeys(name for of_run in measured for name in of_run):
        values = [_or_default(of_run, name) for of_run in measured]
        texts = [identity(value) for value in values]
        has_no_record = name.startswith((CONTENTS, CODE, EVALUATION_CODE)) and None in values
        if name in without or (has_no_record and len({*texts}) == 2):
            continue  # a run without a record is assumed to agree with the others
        finer = [(*of_run, words) for of_run, words in zip(classes, texts, strict=True)]
        if len({*finer}) == len({*classes}):
            continue
        classes = finer
        other = next(run for run, words in zip(runs, texts, strict=True) if words != texts[0])
        shown_name = _difference(name, runs[0], other, metric, values[0]).name
        for of_run, value in zip(settings, values, strict=True):
            of_run[shown_name] = value
    return settings


def _name(pair: tuple[str, object]) -> str:
    return pair[0]


def _or_default(values: Mapping[str, object], name: str) -> object:
    """Return a value; the default of a key that is younger than the run."""
    return values.get(name, _DEFAULTS.get(name))


def _option_differs(name: str, first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    """Return whether a key belongs to options of which the two have different ones, which says
    enough."""
    option = OPTION_KEYS.get(name.removeprefix(CONTENTS).partition(".")[0])
    return option is not None and name != option and first.get(option) != second.get(option)


def _difference(name: str, first: Run, second: Run, metric: str, value: object) -> Difference:
    """Return a difference in words. name: in `measured_as`. value: that of the first run."""
    if name.startswith((CODE, EVALUATION_CODE)):
        is_loss = is_own_metric(metric) and name == CODE + _module_of_loss(first)
        return Difference(name, Alters.formula if is_loss else Alters.scores, None)
    if name.startswith(CONTENTS):
        return Difference(name, Alters.prompts, None)
    if not metric.startswith(HELD_OUT):
        kind = next(kind for kind in Alters if kind in alters(name, metric))
        return Difference(shown(name), kind, _use_instead(name, kind, value))
    kind = next(kind for kind in Alters if kind in altering(name))
    group, _, leaf = name.partition(".")
    values_here = [run.config.get(name) for run in (first, second)]
    if group == "evaluation" and leaf in _ASKED_AS_IN_TRAINING and values_here == [None, None]:
        return Difference(
            f"rollout.{leaf}", Alters.sampling, _use_instead(f"rollout.{leaf}", kind, value)
        )
    of_set = f"evaluation.sets.{set_of(metric)}.{leaf}"
    if group == "task" and any(run.config.get(of_set) is not None for run in (first, second)):
        return Difference(of_set, kind, None if leaf == "path" else f"{of_set}={_typed(value)}")
    if name in ("evaluation.every", "trainer.stop_at"):
        return Difference(name, kind, None)
    use = f"{name}={_typed(value)}" if group == "evaluation" else _use_instead(name, kind, value)
    return Difference(shown(name), kind, use)


def _use_instead(name: str, kind: Alters, value: object) -> str | None:
    """Return `Difference.use` of a key of training with this value."""
    group, _, leaf = name.partition(".")
    if kind not in (Alters.prompts, Alters.scores, Alters.sampling, Alters.evaluation):
        return ""
    if group == "rollout" and leaf in _ASKED_AS_IN_TRAINING:
        return f"evaluation.{leaf}={1 if value is None else _typed(value)}"
    is_plain = isinstance(value, int | float | str)
    if group == "task" and "." not in leaf and leaf not in ("name", "path") and is_plain:
        return f"{name}={_typed(value)}"
    return None


def _typed(value: object) -> str:
    return shlex.quote(text(value)) if isinstance(value, str) else text(value)


def set_of(metric: str) -> str:
    """Return the name of the evaluation set of a held-out metric."""
    return metric.removeprefix(HELD_OUT).partition("/")[0]


def _held_out_as(run: Run, metric: str) -> dict[str, object]:
    """Return what decides the numbers of an evaluation set of a run: how it is asked and scored,
    with the values that it takes from training."""
    name = set_of(metric)
    values = {
        key: run.config.get(key)
        for key, kinds in _KINDS.items()
        if kinds & {Alters.evaluation, Alters.end} or key in ("rollout.stop", "sampler.arguments")
    }
    del values["evaluation.sets"]
    for leaf in _ASKED_AS_IN_TRAINING:
        if values[f"evaluation.{leaf}"] is None:
            values[f"evaluation.{leaf}"] = run.config.get(f"rollout.{leaf}")
    task, sets = (nested(run.config, prefix) for prefix in ("task.", "evaluation.sets."))
    settings = sets.get(name, {})
    if not isinstance(settings, dict) or (name not in sets and name != DEFAULT_SET):
        return values
    values["evaluation.seed"] = settings.get("seed", values["evaluation.seed"])
    values["evaluation.prompts_per_set"] = settings.get(
        "prompts", values["evaluation.prompts_per_set"]
    )
    for leaf, value in values_of_set(task, settings).items():
        if altering(f"task.{leaf}"):
            values[f"task.{leaf}"] = value
    place = f"evaluation.sets.{name}.path" if "path" in settings else "task.path"
    if CONTENTS + place in run.trained_with:
        values[CONTENTS + place] = run.trained_with[CONTENTS + place]
    return values


def nested(config: Mapping[str, object], prefix: str) -> Dictionary:
    """Return the keys behind a prefix as nested dictionaries."""
    nested: Dictionary = {}
    for name, value in config.items():
        if not name.startswith(prefix):
            continue
        *parents, leaf = name.removeprefix(prefix).split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return nested


def _module_of_loss(run: Run) -> str:
    """Return the module of a run's loss of the user's own; "" for another loss."""
    return str(run.config.get("loss.path") or "").rpartition(".")[0]


def _modules_that_score(run: Run) -> Iterator[str]:
    """Yield the user's own modules of a run that may decide a score: all but those that only other
    keys name."""
    paths: dict[bool, list[str]] = {True: [], False: []}
    for name, value in run.config.items():
        group, _, leaf = name.partition(".")
        scores = group in ("task", "evaluation")
        is_named = not scores or leaf.endswith(("verifier", "environment"))
        if is_named and isinstance(value, str) and is_dotted_path(value):
            paths[scores].append(value.rpartition(".")[0])
    for name in run.trained_with:
        module = name.removeprefix(CODE)
        if paths[True] and (module in paths[True] or module not in paths[False]):
            yield module


def is_scored_by_own_code(run: Run, metric: str = "") -> bool:
    """Return whether code of the user's own scores the completions of a run, so that nobody knows
    whether a score of 1 means that one is right.

    metric: of the evaluation set in question; "" for training.
    """
    task = nested(run.config, "task.")
    if metric.startswith(HELD_OUT):
        settings = nested(run.config, "evaluation.sets.").get(set_of(metric), {})
        if isinstance(settings, dict):
            task = values_of_set(task, settings)
    return scores_by_own_code(task)


def why_unlike(
    first: Sequence[Run],
    second: Sequence[Run],
    metric: str,
    ignore_code: bool = False,
    without: Collection[str] = (),
) -> list[Difference]:
    """Return why a metric means something else in the runs of two configurations, or in those of
    one; empty where it means the same in all.

    without: the --over keys, which are a reason only where there is no other.
    """
    runs = [*first, *second]
    of_blocks: list[Difference] = []
    for run in runs[1:]:
        reasons = differences(runs[0], run, metric, ignore_code)
        others = [why for why in reasons if why.name not in map(shown, without)]
        if others:
            return others
        of_blocks = of_blocks or reasons
    return of_blocks

"""Finds what a configuration of TRL or verl is here, by their tables.

Only what trl.yaml and verl.yaml know goes into the command, and what `pgtk check` accepts. All else
that the file sets to another value than their default is listed with its reason.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import replace
from importlib.machinery import PathFinder

from pgtoolkit.config.compose import compose
from pgtoolkit.config.keys import default, evaluated_keys, is_inside, key_named
from pgtoolkit.config.schema import default_options
from pgtoolkit.config.their_values import NO_VALUE, VERIFIER, Overrides, TheirValues
from pgtoolkit.config.trainer_keys import Theirs, words_used
from pgtoolkit.config.translate_code import Unread
from pgtoolkit.config.translate_file import TheirConfig, is_same
from pgtoolkit.config.validate import RULES, RULES_OF_EVALUATION, validated
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.conditions import with_values
from pgtoolkit.system.declared import Alters
from pgtoolkit.system.functions import is_dotted_path
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import nearest, override, text
from pgtoolkit.tasks.settings import VERIFIERS, PromptsTaskSettings

IDLE = "it does nothing beside the other keys"
OF_UNSLOTH = "unsloth's own default, not TRL's: set it in the program"


def _misfit(row: Theirs | None, value: object) -> str:
    """Return what a word is not that stands in the place of a number, or of true or false; empty
    where it may be what their program takes."""
    if row is None or type(value) is not str or "${" in value or value in row.named:
        return ""
    if not (row.cases or row.see):
        return ""  # which is listed with its reason
    if isinstance(row.default, bool):
        return "it is neither true nor false"
    if isinstance(row.default, int | float):
        with contextlib.suppress(ValueError):
            [float(bound) for bound in value.split("_")]  # verl's threshold may be 0.5_5.0
            return ""
        return "it is no number"
    return ""


def _without_digits(value: str) -> str:
    """Return a value without its digits: what differs by these alone is no typing error, as `k1`
    and `k2`."""
    return re.sub(r"\d", "", value)


class Translation:
    """Finds the overrides that a configuration of theirs is here.

    left: (key with its value, why it has no equal, its row). differing: what is not quite the same.
    apart: what is typed and changes what is learned all the same.
    lacking: what this machine lacks.
    behind: the name of a row -> the file's keys that its values follow from; none: their defaults.
    trains: whether it is a training; else an evaluation of the model alone.
    """

    def __init__(self, theirs: TheirConfig):
        self.theirs = theirs
        self.left: list[tuple[str, str, Theirs]] = []
        self.differing: list[str] = []
        self.apart: list[str] = []
        misfits = {
            name: _misfit(theirs.table.rows.get(name), theirs.values[name])
            for name in theirs.values
        }
        self._misfits = {name: misfit for name, misfit in misfits.items() if misfit}
        theirs.values |= {name: Unread(theirs.values[name]) for name in self._misfits}
        self._values = TheirValues(theirs)
        names = self._values.names
        self.trains = not names.get("only_evaluates")
        if names.get("processes") == 1 and not names["launched"]:
            advice = "N says another number"
            if theirs.gpus:
                number = len(theirs.gpus.split(","))
                advice = f"{number} says one for each GPU of CUDA_VISIBLE_DEVICES={theirs.gpus}"
            theirs.assumed.append(f"1 process trains: --processes {advice}")
        elif "processes" in theirs.table.content["words"] and "processes" not in names:
            theirs.assumed.append("how many processes train is not known: --processes N says it")
        self._first = self._values.overrides(theirs.table.content["first"])
        self.typed = dict(self._first)
        self.behind: dict[str, list[str]] = {}
        names_of: dict[str, list[str]] = {}
        for name in theirs.values:
            row = theirs.table.row(name)
            if row is not None and row.cases and row.name != name:
                reason = self._values.reason(row) or f"it has no equal beside {row.name}"
                self._leave(row, [name], reason)
            elif row is not None:
                names_of.setdefault(row.see or row.name, []).append(name)
        for row in theirs.table.rows.values():
            self._translate(row, names_of.get(row.name, []))
        if "task.verifiers" in self.typed:
            del self.typed["task.verifier"]
        self.typed = {key: self.typed[key] for key in self.typed if self._is_taken(key)}

    def _is_taken(self, key: str) -> bool:
        """Return whether the command takes a key: `pgtk evaluate` does not take those of
        training."""
        return self.trains or any(is_inside(key, name) for name in evaluated_keys("model"))

    def _is_about(self, row: Theirs) -> bool:
        """Return whether a row is about what the command does, or has no equal at all."""
        return not row.typed_keys or any(map(self._is_taken, row.typed_keys))

    def _translate(self, row: Theirs, names: list[str]) -> None:
        """Find what is to be typed for a key. names: the file's keys that its row is about."""
        reason = self._values.reason(row)
        try:
            acts = not row.acts or self._values.evaluated(row.acts)
            if not row.cases or not acts:
                self._leave(row, names, reason if acts else IDLE, True)
                return
            typed = self._values.overrides(self._values.case(row), row)
            self.typed |= typed
            if any(VERIFIER in text(value) for value, _ in typed.values()):
                self._leave(row, names, reason)
            idle = [name for name in names if name != row.name and self._is_idle(row, name, typed)]
            self._leave(row, idle, IDLE, True)
            self.behind[row.name] = [name for name in names if name not in idle]
            shown = ", ".join(map(self.shown, self.behind[row.name] or [row.name]))
            for notes, sentences in ((self.apart, row.apart), (self.differing, row.differs)):
                for condition, sentence in sentences.items():
                    if self._is_about(row) and self._values.may_be(condition):
                        notes.append(f"{redact(shown)}: {self._values.filled_in(sentence)}")
        except NameError:
            rows = self.theirs.table.rows
            by_unsloth = [name for name in self._values.own if (rows[name].see or name) == row.name]
            unsloth = self.theirs.table.content.get("unsloth", {})
            for name in by_unsloth:
                of_version = f"in {unsloth['version']} it is {text(unsloth['own'][name])}"
                self._leave(row, [name], f"{OF_UNSLOTH} ({of_version})")
            unknown = "what it follows from is known when their program runs"
            if self._values.own:
                unknown = "what it follows from is not set, or known when their program runs"
            if self._misfits:
                unknown = f"what it follows from is not known: {self._misfits_behind(row)}"
            if row.unread and isinstance(self._values.of[row.name], Unread):
                unknown = row.unread
            for name in names:
                self._leave(row, [name], self._misfits.get(name, unknown))
            self._leave(row, [] if by_unsloth or names else [row.name], unknown)
        except NO_VALUE:
            value = text(self._values.of[row.name])
            near = nearest(value, row.named, 0.8) if row.name in names else None
            is_known = value in row.named or f"`{value}`" in reason
            if near and not is_known and _without_digits(value) != _without_digits(near):
                near = f"of the values that have an equal here, {near} is nearest"
                reason = f"{reason}; {near}" if reason else near
            self._leave(row, names or [row.name], reason or "it has no such value")

    def _misfits_behind(self, row: Theirs) -> str:
        """Return those keys with a word in the place of a number that a row's formulas name; all
        where they name none."""
        conditions = [*row.reasons, *row.differs, *(condition for condition, _ in row.cases)]
        formulas = " ".join([words_used(row), row.acts, *row.typed, *conditions])
        ends = {name: ".".join(name.split(".")[-2:]) for name in self._misfits}
        named = [
            name for name in ends if re.search(rf"(?<!\w){re.escape(ends[name])}(?!\w)", formulas)
        ]
        return ", ".join(map(self.shown, named or self._misfits))

    def _is_idle(self, row: Theirs, name: str, typed: Overrides) -> bool:
        """Return whether a key is not read beside a row's other keys: with another value, also one
        that is no number, what is typed would be the same, and so would what is said to differ."""
        value = self._values.of[name]
        another = not value if isinstance(value, bool) else "another"
        values = TheirValues(TheirConfig(self.theirs.table, self.theirs.values | {name: another}))
        if any(map(self._values.may_be, row.apart)):
            return False
        with contextlib.suppress(*NO_VALUE):
            acts = not row.acts or values.evaluated(row.acts)
            differs, then = (
                [sentence for condition, sentence in row.differs.items() if of.may_be(condition)]
                for of in (self._values, values)
            )
            is_said = differs != then or (differs and not typed)
            return acts and not is_said and values.overrides(values.case(row), row) == typed
        return False

    def _leave(self, row: Theirs, names: list[str], reason: str, changed: bool = False) -> None:
        """List keys with a reason. changed: only those with another value than their default."""
        rows = self.theirs.table.rows
        for name in names if self._is_about(row) else ():
            default = self._values.resolved(name, rows[name].default if name in rows else None)
            if not changed or text(self._values.of[name]) != text(default):
                self.left.append((self.shown(name), reason, row))

    def shown(self, name: str) -> str:
        if name in self._values.own:
            return name
        if name == "launch.rloo":
            return "RLOO"
        shown = f"{name}={text(self._values.of[name])}"
        return shown if name in self.theirs.values else f"{shown} (their default)"

    @property
    def refused(self) -> list[str]:
        """Sentences on what their trainer does not start with, where the file names no other
        version of it."""
        content = self.theirs.table.content
        if not is_same(self.theirs):
            return []
        sentences = []
        for condition, sentence in content.get("refused", {}).items():
            with contextlib.suppress(*NO_VALUE):
                if self._values.evaluated(condition):
                    sentences.append(self._values.filled_in(sentence))
        return sentences

    def check(self) -> None:
        """Take out of the command what is our default as well, and what `pgtk check` refuses; what
        every command has stays, and the learning rate, whose default is another for each model."""
        self._compose()
        for key, (value, row) in [*self.typed.items()]:
            always = key in self._first or key == "optimizer.learning_rate"
            if row is not None and not self.behind[row.name] and not always:
                known = key_named(key, self.composed.config)
                is_idle = known and known.learns is False and known.alters != Alters.evaluation
                if known and (is_idle or self.ours(key) == text(value)):
                    del self.typed[key]
        while problems := self._compose():
            setting = problems[0].partition(" needs ")[0]
            rows = {key: row for key, (_, row) in self.typed.items() if row is not None}
            group = setting.partition("=")[0]
            named = [key for key in rows if key in problems[0] or key.startswith(f"{group}.")]
            if not named:
                raise ConfigError(problems[0])
            key = max(named, key=lambda key: (key in setting, len(key)))
            row = rows[key]
            if self._drop_set(setting, problems[0]):
                continue
            value, _ = self.typed.pop(key)
            names = [*self.behind[row.name]] or [row.name]
            if key.startswith(("evaluation.sets", "evaluation.every")):  # without which none acts
                names += self._drop_evaluation()
            filled_in = "task.verifier" if key == "task.verifiers" else key
            if filled_in in self._first:
                self.typed[filled_in] = self._first[filled_in]
            if all(of is not row or "is refused here" not in reason for _, reason, of in self.left):
                problem = problems[0].rstrip(".")  # others of its row are refused as a consequence
                names = [*dict.fromkeys(names)]
                self._leave(row, names, f"{key}={text(value)} is refused here: {problem}")
        if not self.trains and not any(key.startswith("evaluation.sets") for key in self.typed):
            self.typed["task.path"] = self._first["task.path"]  # else it would be that of training

    def _drop_set(self, setting: str, problem: str) -> bool:
        """Take a refused set of several out of the command, and list its file; return whether it is
        one of several."""
        sets, row = self.typed.get("evaluation.sets", ({}, None))
        name = setting.removeprefix("evaluation.sets.").partition(".")[0]
        if row is None or not isinstance(sets, dict) or name not in sets or len(sets) == 1:
            return False
        self.typed["evaluation.sets"] = ({each: sets[each] for each in sets if each != name}, row)
        file = f"{text(sets[name]['path'])} of {', '.join(self.behind[row.name] or [row.name])}"
        self.left.append((file, f"it is refused here: {problem.rstrip('.')}", row))
        return True

    def _drop_evaluation(self) -> list[str]:
        """Take all keys of evaluations out of the command; return the file's keys that they follow
        from."""
        keys = [key for key in self.typed if key.startswith("evaluation.")]
        rows = [self.typed.pop(key)[1] for key in keys]
        return [name for row in rows if row is not None for name in self.behind[row.name]]

    def _compose(self) -> list[str]:
        """Compose what is typed; return the problems with it, beside those of this machine.

        An option that is to be filled in is our default meanwhile, and a penalty k3, so that its
        other keys are checked.
        """
        options = [key for key in self.to_fill if not key.endswith(".path")]
        typed = [override(key, self.typed[key][0]) for key in self.typed if key not in options]
        typed = [word.replace(f"verifier: {VERIFIER}", "verifier: exact_match") for word in typed]
        if self.trains:
            self.composed = compose([*typed, "kl=k3"] if "kl" in options else typed)
        else:
            composed = compose(typed, evaluate="model")
            measured = composed.config and with_values(composed.config, {"evaluation.every": 1})
            self.composed = replace(composed, config=measured)
        report = validated(self.composed, RULES if self.trains else RULES_OF_EVALUATION)[1]
        self.lacking = [problem for problem in report.lacking if "=PROMPTS" not in problem]
        self.lacking += self._modules_lacking()
        return [problem for problem in report.problems if problem not in report.lacking]

    @property
    def python_path(self) -> str:
        """The folder of a reward function's file that Python does not look into by itself, for the
        variable PYTHONPATH of the command; "" for none."""
        names = self._values.names
        verifier, _ = self.typed.get("task.verifier", ("", None))
        is_elsewhere = verifier == names.get("scores_there") != names.get("scores")
        return str(names["elsewhere"]) if is_elsewhere else ""

    def _modules_lacking(self) -> list[str]:
        """Return a sentence on each module of verifiers that is not found; none is imported."""
        task = getattr(self.composed.config, "task", None)
        if not isinstance(task, PromptsTaskSettings):
            return []
        paths = [task.verifier, *(entry["verifier"] for entry in task.verifiers.values())]
        modules: dict[str, list[str]] = {}
        for path in paths:
            if path and is_dotted_path(path):
                modules.setdefault(path.partition(".")[0], []).append(path)
        place = self.python_path or "the current directory"
        return [
            f"{' and '.join(of)} need{'s' * (len(of) == 1)} {module}: a package that is installed, "
            f"or {module}.py in {place}; {', '.join(VERIFIERS)} come with pgtoolkit"
            for module, of in modules.items()
            if PathFinder.find_spec(module, [self.python_path, os.getcwd(), *sys.path]) is None
        ]

    @property
    def to_fill(self) -> list[str]:
        """The keys that are to be filled in, whose value is a word in capitals."""
        keys = [key for key, (value, row) in self.typed.items() if not row and str(value).isupper()]
        verifiers, _ = self.typed.get("task.verifiers", ({}, None))
        if isinstance(verifiers, dict):
            unnamed = [name for name, made in verifiers.items() if made["verifier"] == VERIFIER]
            keys += [f"task.verifiers.{name}.verifier" for name in unnamed]
        return keys

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command."""
        return [override(key, value) for key, (value, _) in self.typed.items()]

    def ours(self, key: str) -> str:
        """Return our default of a key, beside the others that are typed."""
        if key in default_options():
            return default_options()[key]
        return text(default(self.composed.config, key, self.composed.choices))

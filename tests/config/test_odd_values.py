"""Whatever is typed as the value of a key, `pgtk check` answers with a page, never with a traceback."""

import dataclasses
import random

import pytest

from pgtoolkit.config.files import options
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.launch.check import check, problems, render_plan

ODD = (
    *("[]", "{}", "{a: 1}", "[1, 2]", "???", "${nope}", "${loss}", "abc", "-1", "true", "null", "''", "nan"),
    *("9" * 4400, "x" * 300, "é✓", "'\0'", "'~nobody/x'", "'http://[::1'", "${oc.env:HOME}"),
)
OF_HYDRA = (
    *("hydra", "hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.sweeper.params"),
    *("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir", "hydra.launcher.n_jobs"),
    *("hydra.mode", "hydra.searchpath", "hydra.job.name", "hydra.overrides.task", "hydra.callbacks"),
)


def keys():
    """(override that chooses the option, its keys) of everything in the schema; the seed; the groups themselves."""
    found = [(None, ["seed"]), (None, sorted(options()))]
    for schema, types in SCHEMAS.items():
        group, _, option = schema.partition("/")
        own = [f"{group}.{field.name}" for field in dataclasses.fields(types)]
        found.append((schema.replace("/", "=") if option else None, own))
    return found


def looked_at(*overrides, multirun=False):
    """The problems of a command line, after its page was made."""
    checked = check(list(overrides), multirun)
    assert render_plan(checked)
    return problems(checked)


def in_sentences(found):
    other = ("the configuration cannot be composed: ", "Unknown key '")
    return all(" needs " in problem or problem.startswith(other) for problem in found)


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "own"), keys(), ids=lambda value: str(value)[:40])
def test_all_keys_of_an_option_at_once(chosen, own):
    for first in range(0, len(ODD), 5):
        typed = [f"{key}={ODD[(first + number) % len(ODD)]}" for number, key in enumerate(own)]
        found = looked_at(*([chosen] if chosen else []), *typed)
        assert in_sentences(found), (typed, found)


def test_hydras_own_keys():
    pairs = [(key, value, multirun) for key in OF_HYDRA for value in ODD for multirun in (False, True)]
    for key, value, multirun in random.Random(0).sample(pairs, 8):
        assert in_sentences(looked_at(f"{key}={value}", multirun=multirun)), (key, value)


@pytest.mark.parametrize("body", ["loss: null", "model: {name: unknown}", "task: 3", "trainer: ${nope}", "seed: 1e400"])
def test_a_file_that_makes_no_configuration(tmp_path, body):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{body}\n")
    checked = check(["experiment=mine"], config_dir=tmp_path)
    assert render_plan(checked)
    assert len(problems(checked)) >= 1
    assert in_sentences(problems(checked)), problems(checked)

"""`pgtk check` answers any value of any key with a page and sentences, never with a traceback."""

import dataclasses
import random

import pytest

from pgtoolkit.config.files import options
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.launch.check import check, problems, render_plan

ODD = (
    *(
        "[]",
        "{}",
        "{a: 1}",
        "[1, 2]",
        "???",
        "${nope}",
        "${loss}",
        "abc",
        "-1",
        "true",
        "null",
        "''",
        "nan",
    ),
    *("9" * 4400, "x" * 300, "é✓", "'\0'", "'~nobody/x'", "'http://[::1'", "${oc.env:HOME}"),
)
OF_HYDRA = (
    *(
        "hydra",
        "hydra/launcher",
        "hydra/sweeper",
        "hydra.launcher",
        "hydra.sweeper",
        "hydra.sweeper.params",
    ),
    *(
        "hydra.run.dir",
        "hydra.sweep.dir",
        "hydra.sweep.subdir",
        "hydra.output_subdir",
        "hydra.launcher.n_jobs",
    ),
    *(
        "hydra.mode",
        "hydra.searchpath",
        "hydra.job.name",
        "hydra.overrides.task",
        "hydra.callbacks",
    ),
)


def keys_by_option() -> list[tuple[str | None, list[str]]]:
    """Return the keys of each option, with the override that chooses it; the seed; the groups
    themselves."""
    rows = [(None, ["seed"]), (None, sorted(options()))]
    for schema, types in SCHEMAS.items():
        group, _, option = schema.partition("/")
        names = [f"{group}.{field.name}" for field in dataclasses.fields(types)]
        rows.append((schema.replace("/", "=") if option else None, names))
    return rows


def problems_of(*overrides: str, multirun: bool = False) -> list[str]:
    """Return the problems of a command line, after its page was made."""
    checked = check(list(overrides), multirun)
    assert render_plan(checked)
    return problems(checked)


def are_sentences(refusals: list[str]) -> bool:
    openings = ("the configuration cannot be composed: ", "Unknown key '")
    return all(" needs " in refusal or refusal.startswith(openings) for refusal in refusals)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "keys"), keys_by_option(), ids=lambda value: str(value)[:40])
def test_odd_values_of_all_keys_of_an_option_are_answered_in_sentences(option, keys):
    for first in range(0, len(ODD), 7):
        typed = [f"{key}={ODD[(first + number) % len(ODD)]}" for number, key in enumerate(keys)]
        refusals = problems_of(*([option] if option else []), *typed)
        assert are_sentences(refusals), (typed, refusals)


def test_odd_values_of_the_keys_of_hydra_are_answered_in_sentences():
    pairs = [
        (key, value, multirun) for key in OF_HYDRA for value in ODD for multirun in (False, True)
    ]
    for key, value, multirun in random.Random(0).sample(pairs, 8):
        assert are_sentences(problems_of(f"{key}={value}", multirun=multirun)), (key, value)


@pytest.mark.parametrize(
    ("typed", "multirun", "message"),
    [
        ("hydra.job.chdir=true", False, "hydra.job.chdir=true needs to be left out"),
        ("hydra.job.chdir=true", True, "hydra.job.chdir=true needs to be left out"),
        ("hydra.launcher.n_jobs=1.5", True, "n_jobs=1.5 needs a whole number (got 1.5)"),
        ("hydra.launcher.fail_fast=maybe", True, "fail_fast=maybe needs true or false"),
        ("hydra.launcher.njobs=many", True, "Use hydra.launcher.n_jobs=1."),
        ("hydra.launcher.foo=2", True, "Unknown key 'hydra.launcher.foo'. Use pgtk --cfg hydra"),
        ("hydra/launcher=joblib", True, "=joblib needs one of local, slurm, ray_cluster"),
        ("hydra.launcher.n_jobs=2", False, "Use pgtk -m hydra.launcher.n_jobs=2, or leave it out"),
        ("hydra.sweep.dir=x", False, "Use hydra.run.dir=x, or pgtk -m hydra.sweep.dir=x"),
        ("hydra.run.dir=x", True, "needs a single run (got a sweep)"),
        ("hydra.run.dir=", False, "hydra.run.dir= needs the path of a folder (got '')"),
        ("seed=glob(*)", True, "seed=glob(*) needs values (got a pattern)"),
        ("hydra.mode=${loss.name}", False, "hydra.mode=${loss.name} needs a plain value"),
        (
            "hydra.launcher.n_jobs=${loss.name}",
            True,
            "hydra.launcher.n_jobs=${loss.name} needs a plain value",
        ),
        (
            "loss.epsilon_high=interval(0.1,0.2)",
            True,
            "loss.epsilon_high=interval(0.1,0.2) needs hydra/sweeper=optuna_search",
        ),
        (
            "seed=range(1,3,0)",
            True,
            "A range has from 1 to 10000 values. Use pgtk -m 'seed=range(1,4)'",
        ),
        ("seed=range(3,1)", True, "A range has from 1 to 10000 values"),
        ("loss.epsilon_high=range(0,1,1e-9)", True, "A range has from 1 to 10000 values"),
        (
            "kl.reference_prompt='{prompt[a]}'",
            False,
            "kl.reference_prompt={prompt[a]} needs a template",
        ),
        (
            "kl.reference_prompt='{prompt:>99999999999}'",
            False,
            "needs a template of {prompt} and {answer}",
        ),
        (
            "kl.reference_prompt='{prompt!r} {answer.x}'",
            False,
            "needs a template of {prompt} and {answer}",
        ),
    ],
)
def test_values_that_would_end_in_a_traceback_or_an_endless_sweep_are_one_sentence(
    typed, multirun, message
):
    (problem,) = problems_of(typed, "kl=k3_ratio", "kl.coefficient=1", multirun=multirun)
    assert message in problem


@pytest.mark.parametrize(
    "body", ["loss: null", "model: {name: unknown}", "task: 3", "trainer: ${nope}", "seed: 1e400"]
)
def test_a_file_that_gives_no_valid_configuration_is_answered_in_sentences(
    tmp_path, monkeypatch, body
):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{body}\n")
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(tmp_path))
    checked = check(["experiment=mine"])
    assert render_plan(checked)
    assert len(problems(checked)) >= 1
    assert are_sentences(problems(checked)), problems(checked)

"""Which runs are seeds of one configuration: by all that they were trained with, not by their last
config.yaml."""

import json

import pytest

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs


def save(folder, seed, *changes, steps=6, data=None, modules=None, **more):
    """A run of six steps; changes: (step, loss or overrides of the configuration) of each resume.

    data, modules: what data.json and provenance.json say.
    """
    config = {
        "seed": seed,
        "loss": {"name": "gspo"},
        "task": {"name": "prompts", "path": "train.jsonl"},
        "optimizer": {"schedule": "constant"},
        "trainer": {"max_steps": steps},
        "evaluation": {"sets": {"test": {"path": "test.jsonl"}}},
        **more,
    }
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        for step, changed in changes:
            config = config | changed
            run.write_config(config, [], step)
        for step in range(1, steps + 1):
            run.append_metrics(
                step, {"reward": 0.1 * step + seed, "documents_seen": 8 * step, "num_tokens": 5}
            )
        row = {
            "step": steps,
            "time": 1.0,
            "set": "test",
            "pass@1": 0.5,
            "avg": 0.5,
            "documents": 8,
            "prompts": 4,
        }
        run.append_evaluations([row | {"completions_per_prompt": 2, "seconds": 1.0}])
        if data is not None:
            (folder / "data.json").write_text(json.dumps(data))
        if modules is not None:
            (folder / "provenance.json").write_text(json.dumps(modules))
        run.set_status("done", steps)
    return folder


def labels(folder, metric="final:reward", **options):
    """The configurations by their values, each with its seeds."""
    compared = compare(find_runs([str(folder)]), metric, **options)
    found = {}
    for group in compared.groups:
        found[group.label] = sorted(run.config["seed"] for run in group.counted)
    return compared.keys, found


LOSS = {"loss": {"name": "grpo"}}


def test_a_run_that_was_continued_with_another_loss_is_no_seed_of_it(tmp_path):
    save(tmp_path / "0", 0, (4, {"loss": {"name": "gspo"}}), loss={"name": "grpo"})
    save(tmp_path / "1", 1)
    save(tmp_path / "2", 2)
    keys, found = labels(tmp_path)
    assert keys == ["loss"]
    assert found == {"gspo": [1, 2], "grpo to step 4, then gspo": [0]}


@pytest.mark.parametrize("step", [0, 6])
def test_what_no_step_was_made_with_tells_no_runs_apart(tmp_path, step):
    """Changed before the first step, where the later value holds, or after the last, where the
    earlier does."""
    first, second = (
        {"loss": {"name": name}} for name in (("grpo", "gspo") if step == 0 else ("gspo", "grpo"))
    )
    save(tmp_path / "0", 0, (step, second), **first)
    save(tmp_path / "1", 1)
    assert labels(tmp_path) == ([], {"all runs": [0, 1]})


def test_a_key_that_only_the_option_of_before_had_counts(tmp_path):
    """And one of tracking, which changes nothing that is learned, does not."""
    before = {"loss": {"name": "gspo", "old": 1}, "tracking": {"name": "mlflow", "uri": "a"}}
    save(tmp_path / "0", 0, (4, {"loss": {"name": "gspo"}, "tracking": {"name": "none"}}), **before)
    save(tmp_path / "1", 1, tracking={"name": "none"})
    keys, found = labels(tmp_path)
    assert keys == ["loss.old"]
    assert compare(find_runs([str(tmp_path)]), "final:reward").following == []
    assert found == {"1 to step 4, then null": [0], "null": [1]}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {"all runs": [0, 1]}),
        ("linear", {"4 to step 4, then 6": [0], "6": [1]}),
    ],
)
def test_a_run_that_was_made_longer_is_one_that_began_so_unless_its_rate_decays(
    tmp_path, schedule, expected
):
    optimizer = {"schedule": schedule}
    longer = {"trainer": {"max_steps": 6, "stop_at": None}}
    save(
        tmp_path / "0",
        0,
        (4, longer),
        trainer={"max_steps": 4, "stop_at": 0.5},
        optimizer=optimizer,
    )
    save(tmp_path / "1", 1, trainer={"max_steps": 6, "stop_at": None}, optimizer=optimizer)
    assert labels(tmp_path)[1] == expected


def files(sha, name="train.jsonl"):
    return {name: {"bytes": 3, "sha256": sha * 64}}


def test_other_contents_under_the_same_path_are_another_configuration(tmp_path):
    for seed, sha in enumerate("aab"):
        save(tmp_path / str(seed), seed, data={"task.path": files(sha)})
    keys, found = labels(tmp_path)
    assert keys == ["contents of task.path"]
    assert sorted(found.values()) == [[0, 1], [2]]
    (pair,) = compare(find_runs([str(tmp_path)]), "final:reward").comparisons
    assert not pair.paired


def test_the_same_seeds_on_other_prompts_are_not_paired(tmp_path):
    """Model folders of other contents are: the prompts are the same."""
    for key, paired in (("task.path", False), ("model.path", True)):
        for seed in range(2):
            for sha in "ab":
                data = {key: files(sha)}
                save(
                    tmp_path / key / f"{sha}{seed}",
                    seed,
                    data=data,
                    model={"name": "huggingface", "path": "m"},
                )
        (pair,) = compare(find_runs([str(tmp_path / key)]), "final:reward").comparisons
        assert pair.paired is paired


def test_contents_that_a_resume_accepted_count_from_its_step_on(tmp_path):
    accepted = [
        {"step": 2, "before": {"task.path": files("a")}},
        {"step": 4, "before": {"task.path": files("b")}},
    ]
    save(tmp_path / "0", 0, data={"task.path": files("c"), "accepted": accepted})
    for seed, sha in ((1, "a"), (2, "b"), (3, "c")):
        save(tmp_path / str(seed), seed, data={"task.path": files(sha)})
    found = {tuple(seeds): label for label, seeds in labels(tmp_path)[1].items()}
    a, b, c = (found[seed,] for seed in (1, 2, 3))
    assert found[0,] == f"{a} to step 2, then {b} to step 4, then {c}"


def test_other_code_of_the_users_own_is_another_configuration_unless_it_is_ignored(
    tmp_path, capsys
):
    for seed, digest in enumerate(("aaaaaaaa", "aaaaaaaa", "bbbbbbbb")):
        save(tmp_path / str(seed), seed, modules={"step": 0, "modules": {"rewards": digest}})
    keys, found = labels(tmp_path)
    assert keys == ["code of rewards"]
    assert found == {"aaaaaaaa": [0, 1], "bbbbbbbb": [2]}
    assert labels(tmp_path, ignore_code=True) == ([], {"all runs": [0, 1, 2]})
    assert main(["compare", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: code of rewards differs, not in comments or docstrings alone" in said
    assert "--ignore=code counts them as such" in said
    assert main(["compare", str(tmp_path), "--ignore=code"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 runs (3 counted) of 1 configuration: they differ in nothing but the seed" in said
    assert "Note: --ignore=code counts as the same what differs: code of rewards" in said


def test_code_that_changed_before_a_resume_counts_from_its_step_on(tmp_path):
    resumed = {"time": "2026-01-01T00:00:00+0000", "step": 4, "modules": {"rewards": "bbbbbbbb"}}
    save(
        tmp_path / "0",
        0,
        modules={"step": 0, "modules": {"rewards": "aaaaaaaa"}, "resumed": [resumed]},
    )
    save(tmp_path / "1", 1, modules={"step": 0, "modules": {"rewards": "bbbbbbbb"}})
    assert labels(tmp_path)[1] == {"aaaaaaaa to step 4, then bbbbbbbb": [0], "bbbbbbbb": [1]}


def test_a_run_that_does_not_say_its_code_or_data_differs_from_no_others(tmp_path):
    save(tmp_path / "0", 0)
    save(
        tmp_path / "1",
        1,
        data={"task.path": files("a")},
        modules={"modules": {"rewards": "aaaaaaaa"}},
    )
    resumed = {"time": "2026-01-01T00:00:00+0000", "step": 4, "modules": {"rewards": "aaaaaaaa"}}
    save(tmp_path / "2", 2, modules={"resumed": [resumed]})
    assert labels(tmp_path) == ([], {"all runs": [0, 1, 2]})
    save(tmp_path / "3", 3, modules={"modules": {"rewards": "bbbbbbbb"}})
    assert labels(tmp_path)[1] == {"null": [0], "aaaaaaaa": [1, 2], "bbbbbbbb": [3]}


def test_what_evaluations_alone_depend_on_is_a_note(tmp_path):
    for seed, sha in enumerate("ab"):
        data = {"evaluation.sets.test.path": files(sha)}
        modules = {"modules": {}, "evaluation_modules": {"scores": sha * 8}}
        save(tmp_path / str(seed), seed, data=data, modules=modules)
    assert labels(tmp_path) == ([], {"all runs": [0, 1]})
    notes = compare(find_runs([str(tmp_path)]), "final:evaluation/test/pass@1").notes
    named = "contents of evaluation.sets.test.path, evaluation code of scores"
    assert f"the runs were evaluated differently ({named})" in notes[0]
    assert compare(find_runs([str(tmp_path)]), "final:reward").notes == []

"""`compare` groups runs into configurations by all that they were trained with: changes at a
resume, the contents of their data and the user's code included."""

import json
from pathlib import Path

import pytest

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.experiment import load
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.find import find_runs

STEPS = 6


def save(
    folder: Path,
    seed: int,
    *changes: tuple[int, dict],
    data: dict | None = None,
    provenance: dict | None = None,
    **more: object,
) -> None:
    """Write a run of six steps.

    changes: for each resume, the step it began at and groups of the configuration from then on.
    data, provenance: contents of data.json and provenance.json.
    more: groups of the configuration that the run began with.
    """
    config = {
        "seed": seed,
        "loss": {"name": "gspo"},
        "task": {"name": "prompts", "path": "train.jsonl"},
        "optimizer": {"schedule": "constant"},
        "trainer": {"max_steps": STEPS},
        "evaluation": {"sets": {"test": {"path": "test.jsonl"}}},
        **more,
    }
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        for step, changed in changes:
            config = config | changed
            run.write_config(config, [], step)
        for step in range(1, STEPS + 1):
            run.append_metrics(
                step, {"reward": 0.1 * step + seed, "documents_seen": 8 * step, "num_tokens": 5}
            )
        row = {
            "step": STEPS,
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
        if provenance is not None:
            (folder / "provenance.json").write_text(json.dumps(provenance))
        run.set_status("done", STEPS)


def keys_and_seeds(
    folder: Path, ignore_code: bool = False
) -> tuple[list[str], dict[str, list[int]]]:
    """Return the keys that tell the runs apart, and the seeds of each configuration by its
    label."""
    compared = compare(find_runs([str(folder)]), "final:reward", ignore_code=ignore_code)
    seeds = {}
    for group in compared.groups:
        seeds[group.label] = sorted(run.config["seed"] for run in group.counted)
    return compared.keys, seeds


def test_a_run_that_was_resumed_with_another_loss_is_another_configuration(tmp_path):
    save(tmp_path / "0", 0, (4, {"loss": {"name": "gspo"}}), loss={"name": "grpo"})
    save(tmp_path / "1", 1)
    save(tmp_path / "2", 2)
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["loss"]
    assert seeds == {"gspo": [1, 2], "grpo to step 4, then gspo": [0]}


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        (0, "grpo", "gspo"),  # changed before the first step: all were made with gspo
        (6, "gspo", "grpo"),  # changed after the last step: as well
    ],
)
def test_a_value_that_no_step_was_made_with_tells_no_runs_apart(tmp_path, step, before, after):
    save(tmp_path / "0", 0, (step, {"loss": {"name": after}}), loss={"name": before})
    save(tmp_path / "1", 1)
    assert keys_and_seeds(tmp_path) == ([], {"all runs": [0, 1]})


def test_a_key_that_a_resume_removed_counts_unless_it_changes_nothing_that_is_learned(tmp_path):
    before = {"loss": {"name": "gspo", "old": 1}, "tracking": {"name": "mlflow", "uri": "a"}}
    save(tmp_path / "0", 0, (4, {"loss": {"name": "gspo"}, "tracking": {"name": "none"}}), **before)
    save(tmp_path / "1", 1, tracking={"name": "none"})
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["loss.old"]
    assert compare(find_runs([str(tmp_path)]), "final:reward").following == []
    assert seeds == {"1 to step 4, then null": [0], "null": [1]}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {"all runs": [0, 1]}),
        ("linear", {"4 to step 4, then 6": [0], "6": [1]}),
    ],
)
def test_a_run_that_was_made_longer_is_another_configuration_only_if_its_rate_decays(
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
    _, seeds = keys_and_seeds(tmp_path)
    assert seeds == expected


def files(digit: str) -> dict[str, dict]:
    """Return what data.json knows of a file: its name, size and SHA-256, here of one digit."""
    return {"train.jsonl": {"bytes": 3, "sha256": digit * 64}}


def test_other_contents_under_the_same_path_are_another_configuration(tmp_path):
    for seed, sha in enumerate("aab"):
        save(tmp_path / str(seed), seed, data={"task.path": files(sha)})
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["contents of task.path"]
    assert sorted(seeds.values()) == [[0, 1], [2]]


@pytest.mark.parametrize(("key", "paired"), [("task.path", False), ("model.path", True)])
def test_seeds_with_other_prompts_are_not_paired_but_with_another_model_they_are(
    tmp_path, key, paired
):
    model = {"name": "huggingface", "path": "m"}
    for seed in range(2):
        for sha in "ab":
            save(tmp_path / f"{sha}{seed}", seed, data={key: files(sha)}, model=model)
    (pair,) = compare(find_runs([str(tmp_path)]), "final:reward").comparisons
    assert pair.paired is paired


def test_data_that_a_resume_accepted_counts_from_its_step_on(tmp_path):
    accepted = [
        {"step": 2, "before": {"task.path": files("a")}},
        {"step": 4, "before": {"task.path": files("b")}},
    ]
    save(tmp_path / "0", 0, data={"task.path": files("c"), "accepted": accepted})
    for seed, sha in ((1, "a"), (2, "b"), (3, "c")):
        save(tmp_path / str(seed), seed, data={"task.path": files(sha)})
    _, seeds = keys_and_seeds(tmp_path)
    label = {seed: label for label, (seed,) in seeds.items()}
    assert label[0] == f"{label[1]} to step 2, then {label[2]} to step 4, then {label[3]}"


def test_other_code_of_the_user_is_another_configuration_unless_it_is_ignored(tmp_path, capsys):
    for seed, digest in enumerate(("aaaaaaaa", "aaaaaaaa", "bbbbbbbb")):
        save(tmp_path / str(seed), seed, provenance={"step": 0, "modules": {"rewards": digest}})
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["code of rewards"]
    assert seeds == {"aaaaaaaa": [0, 1], "bbbbbbbb": [2]}
    assert keys_and_seeds(tmp_path, ignore_code=True) == ([], {"all runs": [0, 1, 2]})
    assert main(["compare", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Note: code of rewards differs, not in comments or docstrings alone" in printed
    assert "--ignore=code counts them as such" in printed
    assert main(["compare", str(tmp_path), "--ignore=code"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 runs (3 counted) of 1 configuration: they differ in nothing that counts" in printed
    assert "Note: --ignore=code counts as the same what differs: code of rewards" in printed


def test_code_that_changed_before_a_resume_counts_from_its_step_on(tmp_path):
    resumed = {"time": "2026-01-01T00:00:00+0000", "step": 4, "modules": {"rewards": "bbbbbbbb"}}
    save(
        tmp_path / "0",
        0,
        provenance={"step": 0, "modules": {"rewards": "aaaaaaaa"}, "resumed": [resumed]},
    )
    save(tmp_path / "1", 1, provenance={"step": 0, "modules": {"rewards": "bbbbbbbb"}})
    _, seeds = keys_and_seeds(tmp_path)
    assert seeds == {"aaaaaaaa to step 4, then bbbbbbbb": [0], "bbbbbbbb": [1]}


def test_code_that_changed_on_the_way_is_a_column_beside_keys_that_tell_the_runs_apart(
    tmp_path, capsys
):
    """Each run has a learning rate of its own, so that none is told apart by its code alone."""
    resumed = {"time": "2026-01-01T00:00:00+0000", "step": 4, "modules": {"rewards": "bbbbbbbb"}}
    mixed = {"step": 0, "modules": {"rewards": "aaaaaaaa"}, "resumed": [resumed]}
    whole = {"step": 0, "modules": {"rewards": "bbbbbbbb"}}
    without = {"step": 0}
    for seed, provenance in enumerate((mixed, whole, without, without)):
        rate = {"learning_rate": 0.1 / (1 + seed)}
        save(tmp_path / str(seed), 0, provenance=provenance, optimizer=rate)
    assert main(["compare", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "which differ in optimizer.learning_rate, code of rewards optimizer" in printed
    assert "aaaaaaaa to step 4, then bbbbbbbb" in printed
    assert "Note: code of rewards differs" in printed
    keys, _ = keys_and_seeds(tmp_path, ignore_code=True)
    assert keys == ["optimizer.learning_rate"]
    # A module of one version alone follows from the key by which a run uses it.
    for seed in (0, 1):
        (tmp_path / str(seed) / "provenance.json").write_text(json.dumps(whole))
    keys, _ = keys_and_seeds(tmp_path)
    assert keys == ["optimizer.learning_rate"]


def test_a_base_without_code_of_the_user_is_compared_with_every_version_of_it(tmp_path):
    """Two losses at two learning rates; the second loss has other code at each."""
    for number, rate in enumerate((0.1, 0.05)):
        of_rate = {"optimizer": {"learning_rate": rate}}
        save(tmp_path / f"a{number}", 0, loss={"name": "grpo"}, provenance={"step": 0}, **of_rate)
        code = {"step": 0, "modules": {"rewards": "ab"[number] * 8}}
        save(tmp_path / f"b{number}", 0, provenance=code, **of_rate)
    compared = compare(find_runs([str(tmp_path)]), "final:reward", against="loss=grpo")
    assert "code of rewards" in compared.keys
    rates = [group.values["optimizer.learning_rate"] for group in compared.groups]
    pairs = compared.comparisons.primary
    assert pairs is not None
    assert len(pairs) == 2
    assert all(rates[first] == rates[second] for first, second in pairs)


def save_with_code(
    folder: Path, seed: int, *versions: str, later: dict | None = None, **options: object
) -> None:
    """Write a run with a loss of the user's own, and the copies of its code.

    versions: of the code, each a letter with the default of the parameter `low` behind it, as in
        "a0.3"; the second one is that of a resume after step 4.
    options: of the loss; later: those with which a resume after step 4 goes on.
    """
    starts = [
        {"time": "2026-01-01T00:00:00+0000", "step": step, "modules": {"mine": version[0] * 8}}
        for step, version in zip((0, 4), versions, strict=False)
    ]
    provenance = {**starts[0], "resumed": starts[1:]}
    loss = {"name": "custom", "path": "mine.bounded", "options": options}
    changes = [] if later is None else [(4, {"loss": {**loss, "options": later}})]
    save(folder, seed, *changes, provenance=provenance, loss=loss)
    (folder / "code").mkdir()
    for version in versions:
        code = f"def bounded(log_ratio, advantages, low={version[1:]}): ..."
        (folder / f"code/mine-{version[0] * 8}.py").write_text(code)


def test_a_run_resumed_with_other_code_has_the_defaults_of_all_of_its_versions(tmp_path):
    save_with_code(tmp_path / "0", 0, "a0.3")
    save_with_code(tmp_path / "1", 1, "b0.3")
    save_with_code(tmp_path / "2", 2, "a0.3", "b0.3")
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["code of mine"]
    assert sorted(seeds.values()) == [[0], [1], [2]]
    assert keys_and_seeds(tmp_path, ignore_code=True) == ([], {"all runs": [0, 1, 2]})
    save_with_code(tmp_path / "3", 3, "a0.3", "c0.05")
    save_with_code(tmp_path / "4", 4, "c0.05")
    save_with_code(tmp_path / "5", 5, "c0.05", "a0.3", low=0.05)
    keys, seeds = keys_and_seeds(tmp_path, ignore_code=True)
    assert keys == ["loss.low"]
    assert seeds == {"0.3": [0, 1, 2], "0.3 to step 4, then 0.05": [3], "0.05": [4, 5]}
    assert [run.config["loss.low"] for run in load(tmp_path)] == [0.3, 0.3, 0.3, 0.05, 0.05, 0.05]


def test_a_parameter_that_a_resume_has_set_had_its_default_before(tmp_path):
    save_with_code(tmp_path / "0", 0, "a0.3")
    save_with_code(tmp_path / "1", 1, "a0.3", later={"low": 0.5})
    keys, seeds = keys_and_seeds(tmp_path)
    assert keys == ["loss.low"]
    assert seeds == {"0.3": [0], "0.3 to step 4, then 0.5": [1]}


def test_a_number_for_own_code_is_one_value_in_each_form_that_is_typed(tmp_path):
    save_with_code(tmp_path / "0", 0, "a1.0")
    save_with_code(tmp_path / "1", 1, "a1.0", low=1)
    save_with_code(tmp_path / "2", 2, "a1.0", low=[2, 3])
    save_with_code(tmp_path / "3", 3, "a1.0", low=[2.0, 3.0])
    save_with_code(tmp_path / "4", 4, "a1.0", low=True)
    _, seeds = keys_and_seeds(tmp_path)
    assert sorted(seeds.values()) == [[0, 1], [2, 3], [4]]


def test_a_run_without_a_record_of_code_or_data_differs_from_no_other_run(tmp_path):
    save(tmp_path / "0", 0)
    save(
        tmp_path / "1",
        1,
        data={"task.path": files("a")},
        provenance={"modules": {"rewards": "aaaaaaaa"}},
    )
    resumed = {"time": "2026-01-01T00:00:00+0000", "step": 4, "modules": {"rewards": "aaaaaaaa"}}
    save(tmp_path / "2", 2, provenance={"resumed": [resumed]})
    assert keys_and_seeds(tmp_path) == ([], {"all runs": [0, 1, 2]})
    save(tmp_path / "3", 3, provenance={"modules": {"rewards": "bbbbbbbb"}})
    _, seeds = keys_and_seeds(tmp_path)
    assert seeds == {"null": [0], "aaaaaaaa": [1, 2], "bbbbbbbb": [3]}


def test_data_and_code_of_evaluations_alone_tell_held_out_numbers_apart_and_no_others(tmp_path):
    for seed, sha in enumerate("ab"):
        data = {"evaluation.sets.test.path": files(sha)}
        provenance = {"modules": {}, "evaluation_modules": {"scores": sha * 8}}
        save(tmp_path / str(seed), seed, data=data, provenance=provenance)
    assert keys_and_seeds(tmp_path) == ([], {"all runs": [0, 1]})
    compared = compare(find_runs([str(tmp_path)]), "final:evaluation/test/pass@1")
    assert compared.keys == ["contents of evaluation.sets.test.path"]
    assert [len(group.counted) for group in compared.groups] == [1, 1]
    assert compare(find_runs([str(tmp_path)]), "final:reward").notes == []

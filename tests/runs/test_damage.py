"""Damaged files of a run: one message that names the file and the way to go on, whatever command meets it."""

import json
import shutil

import pytest
import torch
from builders.runs import checkpoint_of, replace_file, run
from safetensors.torch import save

from pgtoolkit.cli import main

READ_BY = {
    "config.yaml": ("compare", "diff", "sync", "export", "resume"),
    "overrides.yaml": ("diff", "sync", "resume"),
    "status.json": ("compare", "sync", "resume"),
    "provenance.json": ("compare", "diff", "resume"),
    "metrics.jsonl": ("compare", "sync", "resume"),
    "drift.jsonl": ("compare", "sync"),
    "data.json": ("resume",),
}
"""The commands that look into each file before their work; `sync` and `resume` do it where a note is not enough."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two steps that was resumed with another configuration."""
    folder = run(tmp_path_factory.mktemp("whole") / "run", "trainer.max_steps=1")
    return run(folder, "trainer.max_steps=2", "optimizer.learning_rate=0.002", resume=True)


def command_line(command, folder, uri, tmp_path):
    return {
        "compare": ["compare", str(folder)],
        "diff": ["diff", str(folder), str(folder)],
        "sync": ["sync", str(folder), f"--uri={uri}"],
        "export": ["export", str(folder), str(tmp_path / "model")],
        "resume": ["resume", str(folder)],
    }[command]


def bad(folder, name, damage):
    path = folder / name
    data = path.read_bytes()
    if damage == "no file":
        path.unlink()
    else:
        kinds = {"list": b"[1, [2], {}]\n", "object": b'{"a": {"b": [1]}}\n{"a": 1}\n'}
        path.write_bytes(kinds.get(damage, data[: len(data) // 2]))


KINDS = ("no file", "half", "list", "object")

HARMLESS = {
    "config.yaml": (),
    "overrides.yaml": ("half", "list"),
    "status.json": ("no file",),
    "provenance.json": ("no file", "object"),
    "data.json": ("no file", "object"),
    "drift.jsonl": ("no file", "half"),
    "metrics.jsonl": ("no file", "half"),
}
"""Where a run goes on without a word: a shorter list is a list, and the last line of metrics may be torn."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ_BY)
def test_a_damaged_file_is_one_message(whole, uri, tmp_path, capsys, name, kind):
    for command in READ_BY[name]:
        if command == "resume" and kind in HARMLESS.get(name, ()):
            continue  # it would go on, which takes seconds
        folder = tmp_path / command
        shutil.copytree(whole, folder)
        bad(folder, name, kind)
        others = {path: path.read_bytes() for path in folder.glob("*.*") if path.is_file() and path.name in READ_BY}
        status = main(command_line(command, folder, uri, tmp_path))
        said = capsys.readouterr()
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        where = f"{command}: {status}: {said.err[-2000:]}{said.out[-2000:]}"
        assert "Traceback" not in where, where
        assert status in (0, 2, 6), where
        if status:
            (line,) = said.err.splitlines()
            assert line.startswith("pgtk: error: ")
            assert name in line or (command, name) == ("compare", "metrics.jsonl"), where  # there are no steps then
            refused = "does not fit" in line or (kind == "no file" and name == "config.yaml")
            assert status == (2 if refused or command == "compare" else 6), where  # it needs one run that can be read
            assert all(path.read_bytes() == data for path, data in others.items()), where
        elif command in ("resume", "export", "sync"):
            assert kind in HARMLESS[name], where


EVALUATION = {"step": 1, "set": "held_out", "prompts": 8, "avg": 0.5, "pass@1": 0.5}
NONSENSE = {
    "status.json": [{"state": "done", "step": 2, **more} for more in ({"mlflow": [1]}, {"saved": "1"}, {"step": -1})],
    "provenance.json": [{"git": [3]}, {"resumed": None}, {"resumed": [{"time": "now"}]}, {"packages": [1]}],
    "evaluations.jsonl": [EVALUATION | more for more in ({"avg": "x"}, {"pass@1": 3}, {"set": [1]}, {"step": 1.5})],
    "metrics.jsonl": [{"step": 1, "reward": "x"}, {"step": 10**400}],
    "data.json": [{"rollout.path": {"a": 1}}],
}
"""What is valid JSON, and not what a run writes."""


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_a_valid_file_is_one_message(whole, tmp_path, capsys, name):
    for number, nonsense in enumerate(NONSENSE[name]):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        (folder / name).write_text(json.dumps(nonsense) + "\n")
        for command in ("compare", "diff", "resume"):
            status = main(command_line(command, folder, None, tmp_path))
            errors = capsys.readouterr().err
            assert status in ((6,) if command == "resume" else (0, 2)), (command, nonsense, errors)
            if status:
                (line,) = errors.splitlines()
                assert f"{name}" in line
                assert "is damaged (" in line


def test_what_is_missing_or_torn_does_not_keep_a_run_from_going_on(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name, kind in (("metrics.jsonl", "half"), ("status.json", "no file"), ("provenance.json", "no file")):
        bad(folder, name, kind)
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
    assert json.loads((folder / "status.json").read_text())["step"] == 3


def test_a_checkpoint_whose_state_lacks_a_key_is_passed_over(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        state = json.loads((checkpoint / "training" / "state.json").read_text())
        del state["data"], state["num_updates"]
        replace_file(checkpoint, "training/state.json", json.dumps(state).encode())
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    said = capsys.readouterr()
    assert "step-000001 cannot be read and is passed over: its state lacks data, num_updates" in said.out
    assert "none of the 2 checkpoints in " in said.err


def test_an_export_of_weights_that_do_not_fit_their_configuration_is_one_message(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints" / "step-000002"
    weights = checkpoint_of(folder, 2)["model"]
    for changed in ({"a": torch.zeros(1)}, weights | {"lm_head.weight": torch.zeros(1)}):
        replace_file(newest, "model.safetensors", save(changed))
        assert main(["export", str(folder), str(tmp_path / "model")]) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{newest} is damaged: transformers cannot load it (" in line
    assert not (tmp_path / "model").exists()

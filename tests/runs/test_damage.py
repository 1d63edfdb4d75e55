"""Damaged files of a run: one message that names the file and the way to go on, whatever command
meets it."""

import json
import shutil
import zlib

import pytest
import torch
from builders.runs import change_state, checkpoint_of, replace_file, run
from safetensors.torch import load, save

from pgtoolkit.cli import main
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.checksums import check_rows
from pgtoolkit.runs.find import read_run

READ_BY = {
    "config.yaml": ("compare", "sync", "export", "resume"),
    "overrides.yaml": ("sync", "resume"),
    "status.json": ("compare", "sync", "resume"),
    "provenance.json": ("compare", "resume"),
    "metrics.jsonl": ("compare", "sync", "resume"),
    "drift.jsonl": ("compare",),
    "data.json": ("resume",),
}
"""The commands that look into each file before their work; `sync` and `resume` do it where a note
is not enough."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two steps that was resumed with another configuration."""
    folder = run(tmp_path_factory.mktemp("whole") / "run", "trainer.max_steps=1")
    return run(folder, "trainer.max_steps=2", "optimizer.learning_rate=0.002", resume=True)


def command_line(command, folder, uri, tmp_path):
    return {
        "compare": ["compare", str(folder)],
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
"""Where a run goes on without a word: a shorter list is a list, and the last line of metrics may be
torn."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READ_BY)
def test_a_damaged_file_is_one_message(whole, uri, tmp_path, capsys, name, kind):
    for command in READ_BY[name]:
        if command == "resume" and kind in HARMLESS.get(name, ()):
            continue  # it would go on, which takes seconds
        folder = tmp_path / command
        shutil.copytree(whole, folder)
        bad(folder, name, kind)
        others = {
            path: path.read_bytes()
            for path in folder.glob("*.*")
            if path.is_file() and path.name in READ_BY
        }
        status = main(command_line(command, folder, uri, tmp_path))
        said = capsys.readouterr()
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        where = f"{command}: {status}: {said.err[-2000:]}{said.out[-2000:]}"
        assert "Traceback" not in where, where
        assert status in (0, 2, 6), where
        if status:
            (line,) = said.err.splitlines()
            assert line.startswith("pgtk: error: ")
            # there are no steps then
            assert name in line or (command, name) == ("compare", "metrics.jsonl"), where
            refused = "does not fit" in line or (kind == "no file" and name == "config.yaml")
            # it needs one run that can be read
            assert status == (2 if refused or command == "compare" else 6), where
            assert all(path.read_bytes() == data for path, data in others.items()), where
        elif command in ("resume", "export", "sync"):
            assert kind in HARMLESS[name], where


EVALUATION = {"step": 1, "set": "held_out", "prompts": 8, "avg": 0.5, "pass@1": 0.5}
NONSENSE = {
    "status.json": [
        {"state": "done", "step": 2, **more}
        for more in ({"mlflow": [1]}, {"saved": "1"}, {"step": -1})
    ],
    "provenance.json": [
        {"git": [3]},
        {"resumed": None},
        {"resumed": [{"time": "now"}]},
        {"packages": [1]},
    ],
    "evaluations.jsonl": [
        EVALUATION | more for more in ({"avg": "x"}, {"pass@1": 3}, {"set": [1]}, {"step": 1.5})
    ],
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
        for command in ("compare", "resume"):
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
    for name, kind in (
        ("metrics.jsonl", "half"),
        ("status.json", "no file"),
        ("provenance.json", "no file"),
    ):
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
    assert (
        "step-000001 cannot be read and is skipped: its state lacks data, num_updates" in said.out
    )
    assert "none of the 2 checkpoints in " in said.err


def test_an_export_of_weights_that_do_not_fit_their_configuration_is_one_message(
    whole, tmp_path, capsys
):
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


def test_a_checkpoint_has_the_checksums_of_the_rows_up_to_it(whole):
    """Written by two processes: the second one has gone on from the first one's rows."""
    lines = (whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step in (1, 2):
        checkpoint = whole / "checkpoints" / f"step-{step:06d}"
        rows = b"".join(lines[:step])
        saved = json.loads((checkpoint / "manifest.json").read_text())["rows"]
        assert saved == {"metrics.jsonl": {"bytes": len(rows), "crc32": zlib.crc32(rows)}}


def test_a_flipped_bit_of_the_rows_is_seen(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    check_rows(folder)
    path = folder / "metrics.jsonl"
    data = path.read_bytes()
    for place in (*range(0, len(data), 29), len(data) - 1):
        flipped = data[place] ^ (1 << place % 8)
        path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
        with pytest.raises(StorageError, match=r"metrics\.jsonl is damaged"):
            check_rows(folder)


DAMAGES = {
    "a digit": lambda rows: [
        rows[0].replace(b"1", b"2", 1) if b"1" in rows[0] else rows[0],
        rows[1],
    ],
    "another digit": lambda rows: [rows[0], rows[1].replace(b'"reward": 0', b'"reward": 1')],
    "no JSON": lambda rows: [rows[0].replace(b'"reward": ', b'"reward"; '), rows[1]],
    "the last line break": lambda rows: [rows[0], rows[1][:-1] + b"\x0b"],
    "doubled": lambda rows: [rows[0], rows[0], rows[1]],
    "reordered": lambda rows: [rows[1], rows[0]],
    "the first one gone": lambda rows: [rows[1]],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_that_the_run_has_not_recorded_are_refused(whole, tmp_path, capsys, uri, damage):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "metrics.jsonl"
    rows = path.read_bytes().splitlines(keepends=True)
    changed = b"".join(DAMAGES[damage](rows))
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert read_run(folder).state in ("unreadable", "incomplete")
    for command in ("resume", "sync"):
        assert main(command_line(command, folder, uri, tmp_path)) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "metrics.jsonl" in line
        assert "is damaged" in line
    assert path.read_bytes() == changed


def test_a_run_without_checksums_goes_on_and_is_counted(whole, tmp_path, capsys):
    """As version 0.1.0.dev wrote its checkpoints; rows that are doubled are seen all the same."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["rows"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        state = json.loads((checkpoint / "training" / "state.json").read_text())
        del state["without_moments"]
        replace_file(checkpoint, "training/state.json", json.dumps(state).encode())
    assert read_run(folder).state == "done"
    doubled = tmp_path / "doubled"
    shutil.copytree(folder, doubled)
    rows = (doubled / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (doubled / "metrics.jsonl").write_bytes(b"".join([rows[0], *rows]))
    assert main(["resume", str(doubled)]) == 6
    assert "metrics.jsonl:2 is damaged (step 1 follows step 1)" in capsys.readouterr().err
    assert read_run(doubled).state == "unreadable"
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
    assert read_run(folder).state == "done"
    assert "rows" in json.loads((folder / "checkpoints/step-000003/manifest.json").read_text())


def data_with(state, **changes):
    return {"data": state["data"] | changes}


def first_document_with(state, **changes):
    source = state["data"]["source"]
    documents = [source["documents"][0] | changes, *source["documents"][1:]]
    return data_with(state, source=source | {"documents": documents})


FORGERIES = {
    "its state is of step 7": lambda state: {"step": 7},
    "its state is of step 0": lambda state: data_with(state, num_steps=0),
    "its num_updates is not what": lambda state: {"num_updates": "x"},
    "its data is not what": lambda state: {"data": []},
    "its position is not what": lambda state: data_with(state, position=[1]),
    "its config is not what": lambda state: {"config": "[]"},
    "its documents is not what": lambda state: data_with(
        state, source=state["data"]["source"] | {"documents": [1.5]}
    ),
    "it holds 0 documents": lambda state: data_with(
        state, source=state["data"]["source"] | {"documents": []}
    ),
    "its group is not what": lambda state: first_document_with(state, group="x"),
    "its tokens is not what": lambda state: first_document_with(state, tokens=None),
    "its loss_mask is not what": lambda state: first_document_with(state, loss_mask=[1]),
}
"""What is said -> what of a checkpoint's state is changed, with a manifest that fits."""


@pytest.mark.parametrize("says", FORGERIES)
def test_a_forged_state_is_one_message(whole, tmp_path, capsys, says):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    checkpoint = folder / "checkpoints" / "step-000002"
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    change_state(checkpoint, **FORGERIES[says](state))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert says in line + said.out
    assert str(checkpoint) in line or "none of the 1 checkpoints" in line
    assert "Traceback" not in said.out


def test_documents_of_another_vocabulary_are_refused(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    checkpoint = folder / "checkpoints" / "step-000002"
    tensors = load((checkpoint / "training" / "state.safetensors").read_bytes())
    changed = {name: x + 1000 if x.dtype == torch.int64 else x for name, x in tensors.items()}
    replace_file(checkpoint, "training/state.safetensors", save(changed))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "prompt 0, completion 0 holds tokens that are not in the vocabulary" in line


@pytest.mark.parametrize(
    "file", ["model.safetensors", "training/optimizer-00001-00001.safetensors"]
)
def test_a_file_of_tensors_that_is_none_is_one_message(whole, tmp_path, capsys, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    replace_file(folder / "checkpoints" / "step-000002", file, b"none")
    commands = [["resume", str(folder), "trainer.max_steps=3"]]
    if file == "model.safetensors":  # no others are read
        commands.append(["evaluate", str(folder)])
    for command in commands:
        assert main(command) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "step-000002 is damaged: " in line

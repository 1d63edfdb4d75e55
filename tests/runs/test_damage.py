"""A damaged file of a run is refused in one line that names it, by whichever command reads it.

Files are emptied, cut, flipped bit by bit, and replaced by valid files of other contents.
"""

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

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
"""The commands that need each file."""


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory) -> Path:
    """Return a run of two steps that was resumed with another configuration after the first."""
    folder = run(tmp_path_factory.mktemp("undamaged") / "run", "trainer.max_steps=1")
    return run(folder, "trainer.max_steps=2", "optimizer.learning_rate=0.002", resume=True)


@pytest.fixture
def folder(undamaged, tmp_path) -> Path:
    """Return a copy of the run, for a test to damage."""
    return shutil.copytree(undamaged, tmp_path / "run")


@pytest.fixture
def checkpoint(folder) -> Path:
    """Return the newest checkpoint of the copy."""
    return folder / "checkpoints" / "step-000002"


def command_line(command: str, folder: Path, uri: str | None = None) -> list[str]:
    return {
        "compare": ["compare", str(folder)],
        "sync": ["sync", str(folder), f"--uri={uri}"],
        "export": ["export", str(folder), str(folder.parent / "model")],
        "resume": ["resume", str(folder)],
    }[command]


def cut_in_half(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def write_list(file: Path) -> None:
    file.write_text("[1, [2], {}]\n")


def write_objects(file: Path) -> None:
    file.write_text('{"a": {"b": [1]}}\n{"a": 1}\n')


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no file": Path.unlink,
    "half": cut_in_half,
    "list": write_list,
    "object": write_objects,
}

HARMLESS = {
    "config.yaml": (),
    "overrides.yaml": ("half", "list"),
    "status.json": ("no file",),
    "provenance.json": ("no file", "object"),
    "data.json": ("no file", "object"),
    "drift.jsonl": ("no file", "half"),
    "metrics.jsonl": ("no file", "half"),
}
"""Damages that no command refuses: half of a list is a list, a last line may be torn, and a missing
status or provenance is written anew."""

CASES = [
    pytest.param(name, command, damage, id=f"{name}-{command}-{damage}")
    for name, commands in READ_BY.items()
    for command in commands
    for damage in DAMAGES
    # A resume would train, which takes seconds.
    if command != "resume" or damage not in HARMLESS.get(name, ())
]


@pytest.mark.parametrize(("name", "command", "damage"), CASES)
def test_a_damaged_file_is_harmless_or_refused_in_one_line(
    folder, uri, capsys, name, command, damage
):
    DAMAGES[damage](folder / name)
    before = {file: (folder / file).read_bytes() for file in READ_BY if (folder / file).exists()}
    status = main(command_line(command, folder, uri))
    output = capsys.readouterr()
    shown = f"{status}: {output.err[-2000:]}{output.out[-2000:]}"
    assert "Traceback" not in shown
    if status == 0:
        assert command == "compare" or damage in HARMLESS[name], shown
        return
    (line,) = output.err.splitlines()
    assert line.startswith("pgtk: error: ")
    assert name in line, shown
    assert re.search("[Pp]ut (it|them|the file) back|Use |Delete |pgtk resume", line), shown
    is_bad_configuration = "does not fit" in line or (name, damage) == ("config.yaml", "no file")
    # compare refuses with 2, since it needs a run that can be read.
    assert status == (2 if is_bad_configuration or command == "compare" else 6), shown
    assert {file: (folder / file).read_bytes() for file in before} == before


EVALUATION = {"step": 1, "set": "held_out", "prompts": 8, "avg": 0.5, "pass@1": 0.5}
NONSENSE = {
    "status.json": [
        {"state": "done", "step": 2, "mlflow": [1]},
        {"state": "done", "step": 2, "saved": "1"},
        {"state": "done", "step": -1},
    ],
    "provenance.json": [
        {"git": [3]},
        {"resumed": None},
        {"resumed": [{"time": "now"}]},
        {"packages": [1]},
    ],
    "evaluations.jsonl": [
        EVALUATION | {"avg": "x"},
        EVALUATION | {"pass@1": 3},
        EVALUATION | {"set": [1]},
        EVALUATION | {"step": 1.5},
    ],
    "metrics.jsonl": [{"step": 1, "reward": "x"}, {"step": 10**400}],
    "data.json": [{"rollout.path": {"a": 1}}],
}
"""Valid JSON that no run writes."""


@pytest.mark.parametrize(
    ("name", "nonsense"), [(name, value) for name, values in NONSENSE.items() for value in values]
)
def test_nonsense_in_a_valid_file_is_refused_in_one_line(folder, capsys, name, nonsense):
    (folder / name).write_text(json.dumps(nonsense) + "\n")
    for command, statuses in (("compare", (0, 2)), ("resume", (6,))):
        status = main(command_line(command, folder))
        errors = capsys.readouterr().err
        assert status in statuses, (command, errors)
        if status:
            (line,) = errors.splitlines()
            assert name in line
            assert "is damaged (" in line


def test_a_run_without_status_and_provenance_and_with_torn_metrics_is_resumed(folder):
    cut_in_half(folder / "metrics.jsonl")
    (folder / "status.json").unlink()
    (folder / "provenance.json").unlink()
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
    assert json.loads((folder / "status.json").read_text())["step"] == 3


def test_a_checkpoint_whose_state_lacks_a_key_is_skipped(folder, capsys):
    for checkpoint in (folder / "checkpoints").iterdir():
        state = json.loads((checkpoint / "training" / "state.json").read_text())
        del state["data"], state["num_updates"]
        replace_file(checkpoint, "training/state.json", json.dumps(state).encode())
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    output = capsys.readouterr()
    note = "step-000001 cannot be read and is skipped: its state lacks data, num_updates"
    assert note in output.out
    assert "none of the 2 checkpoints in " in output.err


def test_an_export_of_weights_that_do_not_fit_their_configuration_is_refused_in_one_line(
    folder, checkpoint, tmp_path, capsys
):
    weights = checkpoint_of(folder, 2)["model"]
    for changed in ({"a": torch.zeros(1)}, weights | {"lm_head.weight": torch.zeros(1)}):
        replace_file(checkpoint, "model.safetensors", save(changed))
        assert main(["export", str(folder), str(tmp_path / "model")]) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{checkpoint} is damaged: transformers cannot load it (" in line
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_has_the_checksums_of_the_rows_up_to_it(undamaged):
    """The second process has continued the rows of the first."""
    lines = (undamaged / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step in (1, 2):
        checkpoint = undamaged / "checkpoints" / f"step-{step:06d}"
        rows = b"".join(lines[:step])
        saved = json.loads((checkpoint / "manifest.json").read_text())["rows"]
        assert saved == {"metrics.jsonl": {"bytes": len(rows), "crc32": zlib.crc32(rows)}}


def test_a_flipped_bit_of_the_rows_is_refused(folder):
    check_rows(folder)
    path = folder / "metrics.jsonl"
    data = path.read_bytes()
    for place in (*range(0, len(data), 29), len(data) - 1):
        flipped = data[place] ^ (1 << place % 8)
        path.write_bytes(data[:place] + bytes([flipped]) + data[place + 1 :])
        with pytest.raises(StorageError, match=r"metrics\.jsonl is damaged"):
            check_rows(folder)


CHANGED_ROWS: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "a digit of the first": lambda first, second: [first.replace(b"1", b"2", 1), second],
    "a digit of the last": lambda first, second: [
        first,
        second.replace(b'"reward": 0', b'"reward": 1'),
    ],
    "no JSON": lambda first, second: [first.replace(b'"reward": ', b'"reward"; '), second],
    "another last line break": lambda first, second: [first, second[:-1] + b"\x0b"],
    "doubled": lambda first, second: [first, first, second],
    "reordered": lambda first, second: [second, first],
    "without the first": lambda first, second: [second],
}


@pytest.mark.parametrize("change", CHANGED_ROWS)
def test_rows_that_the_run_has_not_recorded_are_refused(folder, capsys, uri, change):
    path = folder / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    changed = b"".join(CHANGED_ROWS[change](first, second))
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert read_run(folder).state in ("unreadable", "incomplete")
    for command in ("resume", "sync"):
        assert main(command_line(command, folder, uri)) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "metrics.jsonl" in line
        assert "is damaged" in line
    assert path.read_bytes() == changed


def remove_checksums(folder: Path) -> None:
    """Make checkpoints as version 0.1.0.dev wrote them."""
    for checkpoint in (folder / "checkpoints").iterdir():
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["rows"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        state = json.loads((checkpoint / "training" / "state.json").read_text())
        del state["without_moments"]
        replace_file(checkpoint, "training/state.json", json.dumps(state).encode())


def test_doubled_rows_of_a_run_without_checksums_are_refused(folder, capsys):
    remove_checksums(folder)
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([rows[0], *rows]))
    assert main(["resume", str(folder)]) == 6
    assert "metrics.jsonl:2 is damaged (step 1 follows step 1)" in capsys.readouterr().err
    assert read_run(folder).state == "unreadable"


def test_a_run_without_checksums_is_read_and_resumed(folder):
    remove_checksums(folder)
    assert read_run(folder).state == "done"
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 0
    assert read_run(folder).state == "done"
    assert "rows" in json.loads((folder / "checkpoints/step-000003/manifest.json").read_text())


def change_data(state: dict, **changes: object) -> dict:
    return {"data": state["data"] | changes}


def change_first_document(state: dict, **changes: object) -> dict:
    source = state["data"]["source"]
    documents = [source["documents"][0] | changes, *source["documents"][1:]]
    return change_data(state, source=source | {"documents": documents})


FORGERIES = {
    "its state is of step 7": lambda state: {"step": 7},
    "its state is of step 0": lambda state: change_data(state, num_steps=0),
    "its num_updates is not what": lambda state: {"num_updates": "x"},
    "its data is not what": lambda state: {"data": []},
    "its position is not what": lambda state: change_data(state, position=[1]),
    "its config is not what": lambda state: {"config": "[]"},
    "its documents is not what": lambda state: change_data(
        state, source=state["data"]["source"] | {"documents": [1.5]}
    ),
    "it holds 0 documents": lambda state: change_data(
        state, source=state["data"]["source"] | {"documents": []}
    ),
    "its group is not what": lambda state: change_first_document(state, group="x"),
    "its tokens is not what": lambda state: change_first_document(state, tokens=None),
    "its loss_mask is not what": lambda state: change_first_document(state, loss_mask=[1]),
}
"""Changes of a checkpoint's state, whose manifest fits them, by the message that refuses each."""


@pytest.mark.parametrize("message", FORGERIES)
def test_a_forged_state_is_refused_in_one_line(folder, checkpoint, capsys, message):
    shutil.rmtree(folder / "checkpoints" / "step-000001")
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    change_state(checkpoint, **FORGERIES[message](state))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert message in line + output.out
    assert str(checkpoint) in line or "none of the 1 checkpoints" in line
    assert "Traceback" not in output.out


def test_documents_of_another_vocabulary_are_refused(folder, checkpoint, capsys):
    tensors = load((checkpoint / "training" / "state.safetensors").read_bytes())
    changed = {name: x + 1000 if x.dtype == torch.int64 else x for name, x in tensors.items()}
    replace_file(checkpoint, "training/state.safetensors", save(changed))
    assert main(["resume", str(folder), "trainer.max_steps=3"]) == 6
    (line,) = capsys.readouterr().err.splitlines()
    assert "prompt 0, completion 0 holds tokens that are not in the vocabulary" in line


@pytest.mark.parametrize(
    "file", ["model.safetensors", "training/optimizer-00001-00001.safetensors"]
)
def test_a_file_without_tensors_in_place_of_one_with_is_refused_in_one_line(
    folder, checkpoint, tmp_path, capsys, monkeypatch, file
):
    monkeypatch.chdir(tmp_path)
    replace_file(checkpoint, file, b"none")
    commands = [["resume", str(folder), "trainer.max_steps=3"]]
    if file == "model.safetensors":  # an evaluation does not read the moments
        commands.append(["evaluate", str(folder)])
    for command in commands:
        assert main(command) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert "step-000002 is damaged: " in line

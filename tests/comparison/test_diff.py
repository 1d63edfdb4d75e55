"""`pgtk compare` of two runs begins with their differences in configuration, code, packages and
hardware, and with nothing else."""

import json
from pathlib import Path

from builders.studies import four_losses

from pgtoolkit.cli import main
from pgtoolkit.comparison.diff import render_diff
from pgtoolkit.runs.directory import RunDirectory

PROVENANCE = {
    "host": "a",
    "version": "0.1.0",
    "git": [{"path": "/x/code", "commit": "1234567890abcdef", "diff": "", "diff_truncated": False}],
    "python": "3.11.7",
    "platform": "Linux",
    "packages": {"torch": "2.6", "PyYAML": "6.0", "Flask_Cors": "1"},
    "cpus": {"machine": 2, "usable": 2},
    "memory_bytes": 2**33,
    "gpus": [],
}
CHANGED = {
    "git": [
        {
            "path": "/y/code",
            "commit": "1234567890abcdef",
            "diff": "--- a\n+++ b\n+x\n+y\n-z\n",
            "diff_truncated": False,
        }
    ],
    "packages": {"torch": "2.7", "pyyaml": "6.0", "flask-cors": "1", "scipy": "1"},
    "cpus": {"machine": 2, "usable": 1},
    "gpus": [{"name": "H200", "memory": "141 GiB", "driver": "1"}] * 2,
}


def save(folder: Path, config: dict, provenance: dict | None = PROVENANCE) -> None:
    """Write a run directory; provenance: None for none."""
    with RunDirectory(folder) as run:
        run.write_config(config, [])
        if provenance:
            run.write_provenance(provenance)


def test_only_the_keys_that_differ_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(
        tmp_path / "a",
        {"seed": 0, "loss": {"name": "grpo", "epsilon": 0.2}, "same": 1, "gone": None},
    )
    save(
        tmp_path / "b", {"seed": 0, "loss": {"name": "gspo", "epsilon": 0.2}, "same": 1, "new": [1]}
    )
    assert render_diff(Path("a"), Path("b")) == (
        "A  a\nB  b\n\nconfiguration\n  loss  grpo  ->  gspo\n  new   null  ->  [1]\n\n"
        "No difference in code, packages, hardware."
    )


def test_code_packages_and_hardware_that_differ_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", {"seed": 0})
    save(tmp_path / "b", {"seed": 0}, PROVENANCE | CHANGED)
    assert render_diff(Path("a"), Path("b")).splitlines()[3:] == [
        "code",
        "  commit  1234567890ab  ->  1234567890ab+bf348b54",
        "",
        "packages",
        "  torch  2.6   ->  2.7",
        "  scipy  null  ->  1",
        "",
        "hardware",
        "  cpus.usable  2     ->  1",
        "  gpus         none  ->  2 x H200 141 GiB 1",
        "",
        "No difference in configuration.",
    ]


def test_the_last_start_of_a_resumed_run_is_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", {"seed": 0})
    save(
        tmp_path / "b",
        {"seed": 0},
        PROVENANCE | {"resumed": [PROVENANCE | {"host": "z", "time": "2026-11-21T10:00:00+0000"}]},
    )
    text = render_diff(Path("a"), Path("b"))
    assert "host  a  ->  z" in text
    assert "b was resumed: compared is its last start." in text


def test_a_missing_provenance_is_unknown_and_not_equal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "a", {"seed": 0})
    save(tmp_path / "c", {"seed": 1}, None)
    text = render_diff(Path("a"), Path("c"))
    assert "seed  0  ->  1" in text
    assert "not known: no readable provenance.json in c." in text
    assert "No difference" not in text


def test_only_a_comparison_of_two_readable_runs_begins_with_their_differences(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(four_losses(tmp_path))
    assert main(["compare", "grpo-0", "gspo-1"]) == 0
    printed = capsys.readouterr().out
    differences = (
        "A  grpo-0\nB  gspo-1\n\nconfiguration\n  seed  0     ->  1\n  loss  grpo  ->  gspo\n\n"
    )
    assert printed.startswith(differences)
    assert "grpo" in printed.removeprefix(differences)

    assert main(["compare", "grpo-0", "gspo-1", "gspo-2"]) == 0
    assert "A  grpo-0" not in capsys.readouterr().out

    Path("gspo-1/config.yaml").write_text("a: [")
    assert main(["compare", "grpo-0", "gspo-1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "A grpo-0" not in printed
    assert "config.yaml is damaged (no YAML, line 1:" in printed


def test_a_path_of_the_same_contents_is_said_to_be_so(tmp_path):
    digests = {"bytes": 3, "sha256": "a" * 64}
    for name, file in (("a", "train.jsonl"), ("b", "copy.jsonl")):
        save(tmp_path / name, {"seed": 0, "task": {"path": f"/{name}/{file}"}})
        data = {"task.path": {file: digests}}
        (tmp_path / name / "data.json").write_text(json.dumps(data))
    page = render_diff(tmp_path / "a", tmp_path / "b")
    assert "/a/train.jsonl  ->  /b/copy.jsonl  (the same contents)" in page

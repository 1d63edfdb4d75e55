"""YAML that a stranger may have written (a run's configuration, a sweep, options): aliases, deep
nesting and other unreadable texts are refused in one sentence."""

import shutil
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.errors import StorageError
from pgtoolkit.runs.records import read_resolved
from pgtoolkit.system.yaml_text import plain_yaml

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
"""Ten to the tenth texts, in less than a kilobyte."""


@pytest.fixture(autouse=True)
def current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_aliases_are_refused_before_they_are_followed(tmp_path, capsys):
    assert len(BOMB) < 1000
    (tmp_path / "bomb.yaml").write_text(BOMB)
    message = refusal(capsys, "sweep", "bomb.yaml")
    assert "bomb.yaml needs YAML that can be read (got line 2 has the alias *a0" in message
    (tmp_path / "mine/loss").mkdir(parents=True)
    shutil.copy("bomb.yaml", "mine/loss/large.yaml")
    assert "large.yaml needs YAML that can be read" in refusal(
        capsys, "check", "--config-dir=mine", "loss=large"
    )
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(StorageError, match=r"config.yaml is damaged \(line 2 has the alias \*a0"):
        read_resolved(tmp_path)


def test_interpolations_in_a_saved_configuration_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("a: xx\nb: ${a}${a}\n")
    with pytest.raises(StorageError, match=r"config.yaml is damaged \(a line has several"):
        read_resolved(tmp_path)


def test_a_star_or_an_ampersand_within_a_text_is_no_alias():
    assert plain_yaml(b"a: 2 * 3 & 4\nb: '*c &d'\n") == {"a": "2 * 3 & 4", "b": "*c &d"}


DEEP = {
    "brackets": b"[" * 100_000 + b"]" * 100_000,
    "braces": b"{a: " * 100_000 + b"}" * 100_000,
    "dashes": b"- " * 100_000 + b"x",
    "indentation": b"".join(b" " * level + b"a:\n" for level in range(3000)),
}


@pytest.mark.parametrize("shape", DEEP)
def test_a_deeply_nested_text_is_refused_before_it_is_parsed(shape):
    with pytest.raises(ValueError, match="is more than 30 lists or keys deep"):
        plain_yaml(DEEP[shape])


def test_thirty_levels_are_read_and_thirty_one_refused():
    value = plain_yaml(b"[" * 30 + b"1" + b"]" * 30)
    for _ in range(30):
        value = value[0]
    assert value == 1
    with pytest.raises(ValueError, match="line 1 is more than 30"):
        plain_yaml(b"[" * 31 + b"1" + b"]" * 31)


def test_a_deeply_nested_run_option_or_sweep_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_bytes(DEEP["brackets"])
    assert main(["resume", "run"]) == 6
    assert "config.yaml is damaged (line 1 is more than 30" in capsys.readouterr().err
    (tmp_path / "mine/loss").mkdir(parents=True)
    (tmp_path / "mine/loss/deep.yaml").write_bytes(DEEP["braces"])
    assert "deep.yaml needs YAML that can be read" in refusal(
        capsys, "check", "--config-dir=mine", "loss=deep"
    )
    (tmp_path / "deep.yaml").write_bytes(DEEP["dashes"])
    assert "deep.yaml needs YAML that can be read" in refusal(capsys, "sweep", "deep.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a: b\n  - : {", "mine.yaml needs YAML that can be read (got no YAML, line 2:"),
        (
            "defaults: [config, _self_]\ntask: {verifier: exact_match}\n",
            "task.verifier: exact_match in mine.yaml needs task=prompts (got task=reverse)",
        ),
        ("- seed\n", "must be a DictConfig, got ListConfig"),
    ],
)
def test_a_sweep_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, capsys, text, expected):
    (tmp_path / "mine.yaml").write_text(text)
    page = refusal(capsys, "check", "sweep", "mine.yaml")
    (problem,) = page.partition("Problems (1)\n")[2].splitlines()
    assert expected in problem

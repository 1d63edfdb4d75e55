"""Files of the user's: where they are found, and what is refused in them."""

import shlex
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main

GLOBAL = "# @package _global_\n"


def write(files: dict[str, str]) -> None:
    """Write files in the current directory."""
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


@pytest.fixture(autouse=True)
def current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("variable", [None, "mine"])
@pytest.mark.parametrize(
    "words",
    [
        "check experiment=long",
        "check sweep s.yaml seed=1",
        "--cfg job experiment=long",
        "--help",
    ],
)
def test_every_command_knows_the_folder_of_own_options_wherever_it_is_named(
    capsys, monkeypatch, words, variable
):
    write(
        {
            "mine/experiment/long.yaml": GLOBAL + "# Mine.\ntrainer: {max_steps: 1234}\n",
            "s.yaml": "defaults: [config, override experiment: long, _self_]\n",
        }
    )
    typed = shlex.split(words)
    lines = [
        ["--config-dir=mine", *typed],
        ["-cd", "mine", *typed],
        [*typed, "--config-dir", "mine"],
    ]
    if variable is not None:
        monkeypatch.setenv("PGTK_CONFIG_DIR", variable)
        lines = [typed]
    for line in lines:
        assert main(line) == 0
        printed = capsys.readouterr().out
        assert {"--help": "  long"}.get(typed[0], "1234") in printed


def test_a_folder_of_own_options_that_is_none_is_refused(capsys, monkeypatch):
    message = refusal(capsys, "check", "--config-dir=nowhere")
    assert "--config-dir=nowhere needs a folder (got nowhere)." in message
    monkeypatch.setenv("PGTK_CONFIG_DIR", "nowhere")
    message = refusal(capsys, "check")
    assert "PGTK_CONFIG_DIR=nowhere needs a folder (got nowhere)." in message

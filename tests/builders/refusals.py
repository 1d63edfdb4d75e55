"""The message of a command that is refused."""

from __future__ import annotations

import pytest

from pgtoolkit.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return what a refused command prints: its error, or for `pgtk check` the page."""
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return printed.err + printed.out

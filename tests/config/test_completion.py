"""The Tab key: `pgtk -sc query=bash` offers the shell commands, keys and options."""

import pytest

from pgtoolkit.cli import main


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pgtk ch", {"check"}),
        ("pgtk check exp", {"experiment="}),
        ("pgtk check loss=", {"loss=grpo", "loss=gspo"}),
        ("pgtk check swe", {"sweep"}),
        ("pgtk sweep loss", {"loss_by_aggregation"}),
        ("pgtk sweep loss_by_aggregation metrics=b", {"metrics=basic"}),
        ("pgtk resume ", set()),
        ("pgtk resume outputs/x rollout=p", {"rollout=policy"}),
        ("pgtk export ", set()),
        ("pgtk check '(", set()),
    ],
)
def test_tab_completes_commands_keys_and_options(capsys, monkeypatch, line, words):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    out = capsys.readouterr()
    assert words <= set(out.out.split())
    assert words or not out.out.split()
    assert out.err == ""

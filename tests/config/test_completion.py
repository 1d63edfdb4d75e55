"""The Tab key: what the shell is offered, by the command itself."""

import pytest

from pgtoolkit.cli import main
from pgtoolkit.config.files import options


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
def test_tab_completion(capsys, monkeypatch, line, words):
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    out = capsys.readouterr()
    assert words <= set(out.out.split())
    assert words or not out.out.split()
    assert out.err == ""


def test_tab_completion_offers_what_can_be_typed_alone(capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "pgtk check loss=")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == [f"loss={name}" for name in options()["loss"]]

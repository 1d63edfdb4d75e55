"""The programs of docs/architecture.md make parts of a run by their settings alone."""

import ast
import json
import re
import sys
from pathlib import Path

import pgtoolkit

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SEEN = """
import json
from pgtoolkit.errors import ConfigError

refused = []
for schedule, steps in (("cosine", 5), ("linear", 1), ("constant", 1), ("linear", 2)):
    of = replace(optimizer, schedule=schedule)
    other = PolicyGradientModule(policy, loss, Computation(check_finite=False), of, max_steps=2)
    loader.max_steps = steps
    rollouts.trained = other
    try:
        fit(other, loader)
    except ConfigError as error:
        refused.append(str(error))
print(json.dumps({
    "updates": module.num_updates,
    "documents": module.documents_seen,
    "lengths": [len(completion.tokens) for completion in completions],
    "refused": refused,
    "are equal": all(c.tokens.equal(completions[0].tokens) for c in completions),
}))
"""


AFTERWARDS = """
rollouts.trained = module
documents = next(iter(StepLoader(rollouts, accumulation, False, max_steps=1))).documents
fit(module, StepLoader(rollouts, accumulation, False, max_steps=2))
texts = [policy.tokenizer.decode(each.tokens[each.loss_mask]) for each in documents]
print(json.dumps({
    "updates of the critic": module.critic.num_updates,
    "rewards": [[each.reward, text.count("9") / 7] for each, text in zip(documents, texts)],
}))
"""


ABOVE = ("config", "assembly", "launch")
"""The rooms that know the configuration: tests/test_imports.py sees that no other imports it."""


def programs() -> list[str]:
    """Return the programs of the page, which follow each other."""
    part = PAGE.read_text().partition("## Parts without a configuration")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", part, flags=re.DOTALL | re.MULTILINE)


def test_each_program_has_ten_lines_beside_its_imports():
    assert len(programs()) == 5
    for program in programs():
        parts = [part for part in ast.parse(program).body if not isinstance(part, ast.ImportFrom)]
        assert 0 < sum(part.end_lineno - part.lineno + 1 for part in parts) <= 10


def test_the_programs_make_two_steps_without_the_configuration(monkeypatch, capsys):
    """Whatever imports the configuration or Hydra meanwhile fails."""
    for room in ABOVE:
        monkeypatch.delattr(pgtoolkit, room, raising=False)
    refused = ("hydra", "omegaconf", *(f"pgtoolkit.{room}" for room in ABOVE))
    for name in {*refused, *sys.modules}:
        if name in refused or name.startswith(tuple(f"{above}." for above in refused)):
            monkeypatch.setitem(sys.modules, name, None)
    *first, last = programs()
    program = "\n".join([*first, SEEN, last, AFTERWARDS])
    exec(compile(program, "parts", "exec"), {"__name__": "parts"})
    seen, of_own = [json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert seen["updates"] == 2
    assert seen["documents"] == 16
    assert len(seen["lengths"]) == 4
    assert seen["are equal"]  # at temperature 0
    assert of_own["updates of the critic"] == 2
    assert len(of_own["rewards"]) == 8
    assert all(reward == expected for reward, expected in of_own["rewards"])
    # A schedule that ends before the run does, and one that the run ends before.
    cosine, linear = seen["refused"]
    assert "needs max_steps=5, as the StepLoader has (got schedule=cosine, which ends at" in cosine
    assert "Later steps would have the least rate. Use max_steps=5 in both." in cosine
    assert "The rate would not come down. Use max_steps=1 in both." in linear

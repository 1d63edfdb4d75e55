"""The programs of docs/architecture.md make parts of a run by their settings alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
SEEN = """
import json, sys
print(json.dumps({
    "updates": module.num_updates,
    "documents": module.documents_seen,
    "lengths": [len(completion.tokens) for completion in completions],
    "are equal": all(c.tokens.equal(completions[0].tokens) for c in completions),
    "config": sorted(name for name in sys.modules if name.startswith("pgtoolkit.config")),
    "hydra": sorted({"hydra", "omegaconf"} & set(sys.modules)),
}))
"""


def test_the_programs_of_the_page_make_two_steps_without_the_configuration():
    text = PAGE.read_text()
    part = text[text.index("<!-- parts -->") : text.index("<!-- end of parts -->")]
    programs = re.findall(r"^```python\n(.*?)^```$", part, flags=re.DOTALL | re.MULTILINE)
    assert len(programs) == 4
    for program in programs:
        statements = re.sub(r"^from [^(]*?(\([^)]*\))?$", "", program, flags=re.MULTILINE)
        assert len(statements.split("\n\n")[-1].strip().splitlines()) <= 10
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*programs, SEEN])], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["updates"] == 2
    assert seen["documents"] == 16
    assert len(seen["lengths"]) == 4
    assert seen["are equal"]  # at temperature 0
    assert seen["config"] == seen["hydra"] == []

"""Every adapter can be imported where its trainer is not installed, and names what it needs when it
is used."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib.util, sys
find = importlib.util.find_spec
others = ("trl", "verl", "prime_rl")
importlib.util.find_spec = lambda name, *more: None if name in others else find(name, *more)
import pgtoolkit.adapters.prime_rl, pgtoolkit.adapters.trl, pgtoolkit.adapters.verl
print([name for name in ("trl", "verl", "prime_rl", "transformers") if name in sys.modules])
pgtoolkit.adapters.trl.PolicyGradientTrainer("model", loss="grpo", aggregation="token_mean")
"""


@pytest.mark.slow
def test_adapters_are_imported_without_their_trainers():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n", done.stderr
    assert done.stderr.endswith(
        'ImportError: PolicyGradientTrainer needs TRL: pip install "pgtk[trl]"\n'
    )

"""Type checkers know the library as it is documented: names, objects and functions, and what is
wrong."""

import json
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from typing import get_args

import pytest

from pgtoolkit.losses.aggregation import AGGREGATIONS, AggregationName
from pgtoolkit.losses.corrections import CORRECTIONS, CorrectionName
from pgtoolkit.losses.families import FAMILIES, LossName

PROGRAM = """
from typing import Any

from torch import Tensor

import pgtoolkit
from pgtoolkit import StepTotals, corrections, experiment, families, kl
from pgtoolkit.corrections import Correction, TokenMask
from pgtoolkit.families import FAMILIES, Cispo, Family
from pgtoolkit.kl import KL


def soft_clip(log_ratio: Tensor, advantages: Tensor, *, softness: float = 0.3) -> Tensor:
    return -log_ratio * advantages * softness


def total(logits: Tensor, labels: Tensor, old: Tensor, advantages: Tensor, index: Tensor) -> Tensor:
    family: Family = families.Cispo(epsilon_high=2.0)
    mask: TokenMask = corrections.TokenMask(low=0.2)
    penalty: KL = kl.KL("k3", coefficient=0.05)
    classes: dict[str, type[Family]] = FAMILIES
    high: float | None = Cispo().epsilon_high
    masks: list[Correction] = [mask]
    tensors = (logits, labels, old, advantages, index)
    objects = pgtoolkit.policy_loss(
        *tensors, loss=family, correction=mask, kl=penalty, ref_log_probs=old
    )
    names = pgtoolkit.policy_loss(
        *tensors, loss="grpo", aggregation="token_mean", correction="token_mask", epsilon_low=0.1
    )
    function = pgtoolkit.policy_loss(
        *tensors, loss=soft_clip, aggregation="constant", divisor=8.0, softness=0.2
    )
    step = pgtoolkit.step_coefficients(old, old, advantages, index, labels >= 0, loss="tpo")
    arguments: dict[str, Any] = pgtoolkit.from_padded(
        log_probs=old, old_log_probs=old, advantages=advantages, mask=labels >= 0
    )
    padded = pgtoolkit.log_prob_loss(**arguments, loss="grpo", totals=StepTotals(2, 8, 0))
    pgtoolkit.policy_loss(*tensors, loss="gpro")  # refused
    pgtoolkit.policy_loss(*tensors, aggregation="tokens")  # refused
    pgtoolkit.policy_loss(*tensors, correction="mask")  # refused
    pgtoolkit.policy_loss(*tensors, kl="k3")  # refused
    pgtoolkit.policy_loss(*tensors, loss=Cispo().missing)  # refused
    number: float = objects.loss  # refused
    run = experiment.train(experiment.compose("loss=gspo"), "outputs/first")
    reached: str = run.status
    experiment.compare(run, [run], "outputs", against="loss=grpo").figure()
    experiment.train("loss=gspo")  # refused
    return objects.loss + names.loss + function.loss + step.loss + padded.loss
"""


@pytest.mark.parametrize(
    ("literal", "names"),
    [(LossName, FAMILIES), (AggregationName, AGGREGATIONS), (CorrectionName, CORRECTIONS)],
)
def test_the_names_for_type_checkers_are_all_names(literal, names):
    assert get_args(literal) == tuple(names)


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_program_of_the_documented_names_passes_strict_checks(checker, tmp_path):
    pytest.importorskip(checker)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # All that is installed would take mypy a minute.
    others = sorted(f"{name}.*" for name in {*packages_distributions()} - {"pgtoolkit"})
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\n[mypy-{','.join(others)}]\nfollow_imports = skip\n"
        "[mypy-torch,torch._tensor,torch._C]\nfollow_imports = normal\n"
    )
    options = {
        "mypy": ["--cache-dir", str(tmp_path / "cache")],
        "pyright": ["--outputjson", "--pythonpath", sys.executable],
    }
    command = [sys.executable, "-m", checker, *options[checker], str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if checker == "mypy":
        found = {int(number) for number in re.findall(r"program.py:(\d+): error", done.stdout)}
    else:
        problems = json.loads(done.stdout)["generalDiagnostics"]
        found = {problem["range"]["start"]["line"] + 1 for problem in problems}
    lines = PROGRAM.split("\n")
    refused = {number for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    assert found == refused, done.stdout

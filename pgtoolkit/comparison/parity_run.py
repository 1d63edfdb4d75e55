"""Runs TRL's or verl's own functions on a step, in a Python environment of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from pgtoolkit.comparison.parity_step import RecordedStep
from pgtoolkit.comparison.parity_switches import TheirSide
from pgtoolkit.comparison.parity_theirs import (
    Rows,
    counted_together,
    micro_batches,
    their_numbers,
)
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.plain_files import JsonObject

_SECONDS = 600
"""The longest that their functions may take: most of it is the import of their libraries."""


def run(step: RecordedStep, side: TheirSide, python: Path) -> TheirSide:
    """Return the side with the quantities that their own functions give for the step.

    python: of an environment with TRL or verl.
    Raises ConfigError where the environment lacks them, or they fail.
    """
    if not (their_numbers(step, side.convention)["mask"] > 0).any():
        return side  # there is nothing to call them on
    return with_ran(step, side, _called(request(step, side), python))


def request(step: RecordedStep, side: TheirSide, dtype: str = "float64") -> JsonObject:
    """Return the content of the file that `parity_script.py` reads: the documents that are trained,
    padded, and the arguments of their functions as we read them."""
    read = their_numbers(step, side.convention)
    kept = read["signal"].nan_to_num(nan=1.0) > 0
    trained = step.of(kept.tolist())
    convention = side.convention
    rows = Rows(trained, convention)
    tensors = {"new": rows.new, "old": rows.old, "mask": rows.mask}
    for name in ("advantages", "correction"):
        tensors[name] = rows.padded(read[name][kept[step.index]])
    if convention.entropy_coefficient:
        tensors["entropy"] = rows.entropy()
    if step.ref is not None:
        tensors["ref"] = rows.ref()
    if step.sampling is not None:
        tensors["sampling"] = rows.sampling()
    documents = range(len(trained.attempts))
    parts = micro_batches(convention, documents)
    generated = [[*documents]]
    if convention.mean_of == "generated_batch":
        generated = counted_together(convention, documents)
    return {
        "trainer": side.trainer.partition(" ")[0],
        "dtype": dtype,
        "values": side.values,
        "rows": {name: tensor.tolist() for name, tensor in tensors.items()},
        "rewards": read["rewards"][kept].tolist() if step.has_rewards else None,
        "groups": [*trained.groups],
        "ranks": convention.ranks,
        "micro_batches": parts,
        "generated_batches": generated,
        "corrects": convention.correction is not None,
    }


def with_ran(step: RecordedStep, side: TheirSide, made: JsonObject) -> TheirSide:
    """Return the side with the numbers of `parity_script.py`, with the version that made it."""
    kept = their_numbers(step, side.convention)["signal"].nan_to_num(nan=1.0) > 0
    rows = Rows(step.of(kept.tolist()), side.convention)
    of_tokens = kept[step.index]
    ran = {}
    for name in made.keys() - {"version"}:
        vector = torch.tensor(made[name], dtype=torch.float64)
        if name != "loss":
            zeros = torch.zeros(len(of_tokens)).double()
            vector = zeros.masked_scatter(of_tokens, rows.flat(vector))
        ran[name] = vector
    trainer = side.trainer.partition(" ")[0]
    return replace(side, ran=ran, trainer=f"{trainer} {made['version']}")


def _called(request: JsonObject, python: Path) -> JsonObject:
    script = Path(__file__).with_name("parity_script.py")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "step.json"
        target = Path(folder) / "made.json"
        source.write_text(json.dumps(request), encoding="utf-8")
        # Isolated: this package's folder and the current one are no places for their imports. Not
        # resolved: the link in an environment says which it is.
        executable = Path(shutil.which(python) or python).absolute()
        words = [str(executable), "-I", str(script), str(source), str(target)]
        try:
            done = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
            problem = done.stderr.strip().rpartition("\n")[2]
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if not target.is_file():
            raise ConfigError(
                f"--python={python} needs the Python of an environment with {request['trainer']} "
                f"(got: {problem[:500]}). Its own functions compute the step there. Leave it "
                "out to compare with our reading of them."
            )
        return json.loads(target.read_text(encoding="utf-8"))

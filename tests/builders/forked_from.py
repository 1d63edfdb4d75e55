"""What the server that forks processes for tests has done before it forks one: imports, and what is
the same in each run."""

import os
import tempfile
from pathlib import Path

import pandas  # noqa: F401
import transformers.models.gpt2.modeling_gpt2  # noqa: F401

import builders.parallel_runs  # noqa: F401
import pgtoolkit.cli
import pgtoolkit.sampling.copies  # noqa: F401
from builders.quickened import (
    PICTURES,
    quicken_compositions,
    quicken_git,
    quicken_hydra,
    quicken_processes,
    quicken_stores,
)
from pgtoolkit.assembly import train
from pgtoolkit.config.files import options
from pgtoolkit.config.hydra_files import compose_choices
from pgtoolkit.runs import provenance

# Only the server needs the folder by which it has found this file: see `processes._Server`.
_, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)
quicken_processes()
quicken_git()
quicken_hydra()
quicken_compositions()
quicken_stores()
for name in options()["advantage"]:  # the group with the most options: all compositions are made
    compose_choices([f"advantage={name}"])
provenance._packages()
with tempfile.TemporaryDirectory() as folder:
    PICTURES.plot_curves({}, Path(folder, "curves.png"), "")
train.plot_curves = PICTURES.plot_curves

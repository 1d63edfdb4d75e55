"""The shell blocks of a page, run with stand-ins that record what they are asked."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]

STAND_INS = (
    *("pgtk", "srun", "sbatch", "scontrol", "torchrun", "nohup", "docker"),
    *("python", "python3", "pip", "hf", "make", "vllm", "git", "source"),
    *("apptainer", "ssh", "wandb", "rsync"),
)
"""Programs that the scripts call, in place of which a script writes down their arguments."""

_RECORDS = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" $'\\1' >> "$CALLS"
if [ "${0##*/} ${1:-}" = "scontrol show" ]; then printf 'node%s\\n' 1 2 3 4; fi
if [ "${0##*/}" = srun ]; then
    # A run waits until its servers have started.
    if [[ "$*" == *" continue "*" sampler.urls="* ]]; then
        until grep -qa processed_logprobs "$CALLS"; do sleep 0.05; done
    fi
    exit "${SRUN_STATUS:-0}"
fi
"""

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(
    rf"^(#!|([A-Z_0-9]+=\S* +)*(~\S*/)?({'|'.join(STAND_INS)}|export|eval) |[A-Z]+=)"
)


def scripts_of(page: Path) -> list[str]:
    """Return the scripts of a page: each block that begins as a file does, then one of all others,
    which are typed into one shell."""
    files = []
    typed = []
    for indent, language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        block = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
        # What a command prints is indented below it.
        block = re.sub(r"(?<=[^\\]\n)  +(l_t|w_t|rho_t|\+|where) .*\n", "", block)
        if language or not _COMMAND.match(block) or "fish" in block:
            continue
        block = re.sub(r"<(\w+)>", r"\1", block)  # a placeholder such as <date>
        (files if block.startswith("#!") else typed).append(block)
    return [*files, *(["\n".join(typed)] if typed else [])]


def calls_of(script: str, folder: Path) -> list[list[str]]:
    """Return the programs that a script has called, each with its arguments.

    It runs by bash, in an empty folder, without variables but those of SLURM. Everything that bash
    itself complains about, such as a variable that is not set, is an error.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    return _calls(["bash", "-u", "-c", script], folder, work)


def calls_of_file(
    file: Path, folder: Path, *words: str, status: int = 0, **variables: str
) -> list[list[str]]:
    """Return the programs that a script in a file calls, as `calls_of` does.

    words: its arguments. status: with which it has to end. variables: further ones.
    """
    return _calls(["bash", "-u", str(file), *words], folder, folder, status, variables)


def _calls(
    command: list[str],
    folder: Path,
    work: Path,
    status: int = 0,
    further: Mapping[str, str] = MappingProxyType({}),
) -> list[list[str]]:
    """Run a command in the folder `work`, and return the calls of stand-ins, which lie in
    `folder`."""
    programs = folder / "programs"
    home = folder / "home"
    environments = [home / name / "bin" for name in ("vllm", "trl", "verl")]
    programs.mkdir()
    for name in STAND_INS:
        (programs / name).write_text(_RECORDS)
        (programs / name).chmod(0o755)
    for place in (*environments, work / ".venv/bin"):
        place.parent.mkdir(parents=True)
        place.symlink_to(programs)
    variables = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(home),
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-4]",
        **further,
    }
    done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True)
    assert done.stderr == "", f"{done.stderr}\n{command}"
    assert done.returncode == status, command
    calls = (folder / "calls").read_text().split("\1\0")
    return [call.split("\0")[:-1] for call in calls if call]


def pgtk_arguments(calls: list[list[str]]) -> list[list[str]]:
    """Return the arguments of each call of pgtk, also of those that a launcher makes."""
    found = []
    for words in calls:
        names = [word for word in ("pgtk", "pgtoolkit.cli") if word in words]
        if names:
            found.append(words[words.index(names[0]) + 1 :])
    return found


def pages() -> list[Path]:
    """Return the pages that have scripts."""
    names = ["README.md", "CONTRIBUTING.md", "sweeps/README.md", "study/README.md"]
    found = [ROOT / name for name in names]
    found += sorted((ROOT / "docs").glob("*.md"))
    return [page for page in found if scripts_of(page)]

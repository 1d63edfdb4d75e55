"""The scripts of the docs run as they stand, with `set -u`, and pgtk's check accepts each command.

srun, sbatch, torchrun and all other programs are stand-ins that record what they are asked.
"""

import re

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.scripts import (
    ROOT,
    calls_of,
    calls_of_file,
    pages,
    pgtk_arguments,
    scripts_of,
)

from pgtoolkit.cli import COMMANDS
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import sweep_file, sweep_files
from pgtoolkit.config.sweeps import compose_sweep
from pgtoolkit.launch.check import check_run

_OF_THE_USER = re.compile(
    "needs an existing|needs the package|needs a function|needs a class|needs a module|"
    "needs an importable|needs to be importable|to be installed"
)
"""Matches problems with files, packages and code of the user's, which are not here."""


def problems_of(arguments: list[str]) -> set[str]:
    """Return the problems with a command, but those with what the user has.

    They are those of the rules, without this machine.
    """
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        arguments = arguments[1:]
        if name not in ("check", "sweep", "continue"):
            return set()
        if name == "check" and arguments[:1] == ["sweep"]:
            name = "sweep"
            arguments = arguments[1:]
    overrides = [word for word in arguments if re.match(r"[\w./+~]+=", word)]
    overrides = [word for word in overrides if not word.startswith("hydra.run.dir=")]
    file = None
    if name == "sweep" and arguments[0] in sweep_files():
        file = sweep_file(arguments[0])
    if file is not None or "-m" in arguments:
        sweep = compose_sweep(overrides, file)
        found = {*sweep.problems}
        for number, job in enumerate([*sweep.jobs[:1], *sweep.jobs[-1:]]):
            composed = sweep.compose_job(job, number)
            found |= {*check_run(composed, job).report.problems}
    else:
        found = {*check_run(compose(overrides), overrides).report.problems}
    return {problem for problem in found if not _OF_THE_USER.search(problem)}


def _cases() -> list:
    """Return the pages; that with a model, from which torch makes the shape, is slow."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.slow] if page.name == "rollouts.md" else [],
        )
        for page in pages()
    ]


@pytest.mark.parametrize("page", _cases())
def test_every_script_of_a_page_runs_as_it_stands_and_passes_the_check(page, tmp_path, monkeypatch):
    calls = []
    for number, script in enumerate(scripts_of(page)):
        calls += calls_of(script, tmp_path / str(number))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "10=", "answer": "2"}\n')
    if page.name == "rollouts.md":
        model = small_llama(num_attention_heads=4, num_hidden_layers=2)
        save_with_tokenizer(model, tmp_path / "qwen")
    for arguments in pgtk_arguments(calls):
        # Options of the user's own, and the rest of a command, are not on the page.
        is_whole = "..." not in arguments and not any("--config-dir" in word for word in arguments)
        if is_whole:
            assert problems_of(arguments) == set(), arguments


def test_the_job_script_of_slurm_asks_srun_for_the_page_s_job_and_queues_it_again(tmp_path):
    page = ROOT / "docs/rollouts.md"
    script = next(script for script in scripts_of(page) if "#SBATCH" in script)
    calls = calls_of(script, tmp_path / "done")
    (run,) = pgtk_arguments(calls)
    assert run[-1] == "parallelism.data_parallel=32"
    assert run[:3] == ["continue", "outputs/qwen", "model=huggingface"]
    assert "task=prompts" in run
    assert [words[0] for words in calls] == ["srun"]
    interrupted = script.replace("srun pgtk", "(exit 75) # pgtk")
    with pytest.raises(AssertionError):  # its own exit status is that of the run
        calls_of(interrupted, tmp_path / "interrupted")
    calls = (tmp_path / "interrupted/calls").read_text().split("\0")
    assert calls[:3] == ["scontrol", "requeue", "7"]


def test_the_image_is_built_of_the_wheel_and_make_runs_what_the_check_accepts(tmp_path):
    build, image = calls_of_file(ROOT / "docker/build.sh", tmp_path)
    assert build[:5] == ["python3", "-m", "build", "--wheel", "--outdir"]
    assert image[:4] == ["docker", "build", "--tag", "pgtk"]
    assert image[4] == build[5]
    demo = re.findall(r"^\t\.venv/bin/pgtk (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [problems_of(line.split()) for line in demo] == [set()]

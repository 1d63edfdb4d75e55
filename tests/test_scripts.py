"""The scripts of the docs run as they stand, with `set -u`, and pgtk's check accepts each command.

srun, sbatch, torchrun and all other programs are stand-ins that record what they are asked.
"""

import re
import shlex

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


SHARED = "/shared/pgtk"
CLUSTER = ROOT / "examples/cluster"


def asked_of_slurm(words: list[str]) -> dict[str, str]:
    """Return the options among the words of sbatch or srun by their names."""
    options = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in options}


def processes(asked: dict[str, str]) -> int:
    return int(asked["nodes"]) * int(asked["ntasks-per-node"])


@pytest.mark.parametrize("file", sorted(CLUSTER.glob("*.sbatch")), ids=lambda file: file.stem)
@pytest.mark.parametrize("container", ["", f"apptainer exec --nv {SHARED}/pgtk.sif "])
def test_a_job_of_slurm_starts_as_many_processes_as_its_run_needs(
    file, container, tmp_path, monkeypatch
):
    header = " ".join(re.findall(r"^#SBATCH (.*)$", file.read_text(), re.MULTILINE)).split()
    job = asked_of_slurm(header)
    variables = {"PGTK": f"{container}pgtk"} if container else {}
    calls = calls_of_file(file, tmp_path, **variables)
    (step,) = [words for words in calls if words[0] == "srun" and "continue" in words]
    (run,) = pgtk_arguments([step])
    assert run[:2] == ["continue", f"{SHARED}/outputs/{file.stem}"]
    assert (f"{SHARED}/pgtk.sif" in step) == bool(container)
    asked = job | asked_of_slurm(step[: step.index("continue")])
    sizes = [int(word.partition("=")[2]) for word in run if word.startswith("parallelism.data")]
    # Where a node has one task, that starts the ranks on all of its GPUs.
    assert sizes == [max(processes(asked), int(asked["gpus-per-node"]))]
    save_with_tokenizer(small_llama(num_attention_heads=4), tmp_path / "qwen")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "10=", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    here = [word.replace(f"{SHARED}/", "") for word in run]
    assert problems_of([here[0], *here[2:]]) == set()

    # A run that was interrupted is queued again, and one that failed is not.
    for status, requeued in ((75, [["scontrol", "requeue", "7"]]), (5, [])):
        folder = tmp_path / str(status)
        folder.mkdir()
        again = calls_of_file(file, folder, status=status, SRUN_STATUS=str(status))
        assert [words for words in again if words[:2] == ["scontrol", "requeue"]] == requeued


def test_servers_of_a_job_have_the_nodes_gpus_and_ports_that_the_run_asks(tmp_path):
    vllm = tmp_path / "vllm"  # in its place
    vllm.write_text(
        '#!/bin/bash\nprintf "%s\\0" "$CUDA_VISIBLE_DEVICES" "$@" $\'\\1\' >> "$CALLS"\n'
    )
    vllm.chmod(0o755)
    calls = calls_of_file(CLUSTER / "trainer_and_vllm.sbatch", tmp_path, VLLM=str(vllm))
    steps = {asked_of_slurm(words)["nodelist"]: words for words in calls if words[0] == "srun"}
    assert {*steps} == {"node1,node2", "node3,node4"}
    server = steps["node3,node4"]
    task = tmp_path / "task"
    task.write_text(f"exec {shlex.join(server[server.index('bash') :])}\n")
    for rank in range(8):
        folder = tmp_path / str(rank)
        folder.mkdir()
        ((gpu, *words),) = calls_of_file(task, folder, SLURM_LOCALID=str(rank))
        assert gpu == str(rank)
        assert words[:5] == [
            "serve",
            f"{SHARED}/qwen",
            "--port",
            str(8000 + rank),
            "--logprobs-mode",
        ]
    assert processes(asked_of_slurm(server)) == 16
    urls = [f"http://node{node}:{8000 + rank}" for node in (3, 4) for rank in range(8)]
    assert f"sampler.urls=[{','.join(urls)}]" in steps["node1,node2"]


def test_the_image_is_built_of_the_wheel_and_make_runs_what_the_check_accepts(tmp_path):
    (tmp_path / "alone").mkdir()
    build, image = calls_of_file(ROOT / "docker/build.sh", tmp_path / "alone")
    assert build[:5] == ["python3", "-m", "build", "--wheel", "--outdir"]
    assert image[:4] == ["docker", "build", "--tag", "pgtk"]
    assert image[4] == build[5]
    (tmp_path / "saved").mkdir()
    words = ("--save", "pgtk.tar", "mine")
    *_, image, saved = calls_of_file(ROOT / "docker/build.sh", tmp_path / "saved", *words)
    assert image[:4] == ["docker", "build", "--tag", "mine"]
    assert saved == ["docker", "save", "--output", f"{tmp_path}/saved/pgtk.tar", "mine"]
    demo = re.findall(r"^\t\.venv/bin/pgtk (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [problems_of(line.split()) for line in demo] == [set()]

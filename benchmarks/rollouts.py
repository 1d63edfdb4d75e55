"""Measure iterations of rollouts and an update of a model with random weights, by stage.

    python benchmarks/rollouts.py FOLDER [--shape 0.5b] [--sampler transformers vllm]
        [--trl generate static vllm] [--verl vllm] [--lengths 512 1024 4096]
        [--completions 64 256 1024] [--override sampler.static_cache=false ...]

Each case is a process of its own with a time limit, so that one that runs out of memory or hangs
costs nothing else. The first iteration warms up: it compiles kernels, loads cuBLAS's and fills the
allocator. The table has the medians of the others. Rows are appended to rollouts.csv in FOLDER,
where the output of each case lies as well; peak_gb is what PyTorch had in use, gpu_used_gb what all
processes held. For `--trl` TRL must be importable, for `--verl` verl with flash-attn or
flash_attn_by_torch.py, for vllm vLLM, too.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from rollouts_job import BODIES, GROUP, Case, write_inputs

SECONDS = {
    "sample": "seconds_sampling",
    "score": "seconds_scoring",
    "old_log_probs": "seconds_old_log_probs",
    "update": "seconds_update",
}
"""Stages of an iteration, by the metrics that have them."""

COLUMNS = (
    "trainer",
    "sampler",
    "overrides",
    "length",
    "completions",
    *SECONDS,
    "whole",
    "peak_gb",
    "gpu_used_gb",
    "error",
)


def main() -> int:
    arguments = _arguments()
    folder = Path(arguments.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(
        folder, max(arguments.completions) // GROUP * arguments.iterations, arguments.shape
    )
    until = time.monotonic() + arguments.seconds
    samplers = {"pgtoolkit": arguments.sampler, "trl": arguments.trl, "verl": arguments.verl}
    overrides = {"pgtoolkit": arguments.override, "verl": arguments.verl_override}
    print(_line(dict(zip(COLUMNS, COLUMNS, strict=True))), flush=True)
    for length in arguments.lengths:
        for completions in arguments.completions:
            for trainer, sampler in _pairs(samplers):
                case = Case(
                    folder=str(folder),
                    trainer=trainer,
                    sampler=sampler,
                    length=length,
                    completions=completions,
                    overrides=overrides.get(trainer, []),
                    iterations=arguments.iterations,
                    shape=arguments.shape,
                )
                row = _measured(case, min(arguments.seconds_per_case, until - time.monotonic()))
                print(_line(row), flush=True)
                _append(folder / "rollouts.csv", row)
    return 0


def _pairs(samplers: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(trainer, sampler) for trainer, names in samplers.items() for sampler in names]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--sampler", nargs="*", default=[], choices=("transformers", "vllm"))
    parser.add_argument("--trl", nargs="*", default=[], choices=("generate", "static", "vllm"))
    parser.add_argument("--verl", nargs="*", default=[], choices=("vllm",))
    parser.add_argument("--verl-override", nargs="+", default=[], help="further overrides of verl")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512], help="tokens of a completion"
    )
    parser.add_argument(
        "--completions", nargs="+", type=int, default=[256], help="completions of an iteration"
    )
    parser.add_argument("--override", nargs="+", default=[], help="further overrides of pgtk")
    parser.add_argument(
        "--iterations", type=int, default=3, help="of each case, the first of which warms up"
    )
    parser.add_argument("--seconds-per-case", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=480, help="of all cases together")
    parser.add_argument(
        "--shape", choices=BODIES, default="0.5b", help="of the model; tiny for a CPU"
    )
    arguments = parser.parse_args()
    if not arguments.sampler and not arguments.trl and not arguments.verl:
        arguments.sampler = ["transformers"]
        arguments.trl = ["generate", "vllm"]
    return arguments


def _line(row: dict) -> str:
    values = [row[name] for name in COLUMNS[3:-1]]
    numbers = " ".join(f"{x:>13.2f}" if isinstance(x, float) else f"{x:>13}" for x in values)
    return f"{row['trainer']:>10} {row['sampler']:>13} {numbers}  {row['overrides']} {row['error']}"


def _append(file: Path, row: dict) -> None:
    new = not file.exists()
    with file.open("a", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def _measured(case: Case, seconds: float) -> dict:
    """Return the row of a case, by a process that is ended after `seconds`."""
    row = dict.fromkeys(COLUMNS, "") | {"trainer": case.trainer, "sampler": case.sampler}
    row |= {
        "overrides": " ".join(case.overrides),
        "length": case.length,
        "completions": case.completions,
    }
    if seconds < 10:
        return row | {"error": "no time left"}
    name = f"{case.trainer}-{case.sampler}-{case.length}-{case.completions}-{time.time():.0f}"
    run_folder = Path(case.folder) / name
    run_folder.mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    }
    # TRL's engine joins the trainer's world of one process.
    if case.trainer == "trl" and case.sampler == "vllm":
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29511",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
    used = _GpuMemory()
    with (run_folder / "output").open("w") as output:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", case.as_json()],
            cwd=run_folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            row["error"] = f"ended after {seconds:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)  # pgtk ends what it has started
                time.sleep(3)
                _kill_all_of(child)
    row["gpu_used_gb"] = used.peak()
    if case.trainer == "pgtoolkit":
        result = _recorded(run_folder)
    else:
        result = _printed(run_folder / "output")
    if len(result["iterations"]) < 2:
        print((run_folder / "output").read_text()[-1500:], flush=True)
        return row | {"error": row["error"] or f"ended with {child.returncode}"}
    later = result["iterations"][1:]
    row |= {name: statistics.median(x[name] for x in later) for name in later[0]}
    return row | {"peak_gb": result["peak_gb"]}


def _printed(output: Path) -> dict:
    """Return the last iterations that another trainer's case has printed."""
    lines = output.read_text().splitlines()
    printed = [line for line in lines if line.startswith('{"iterations"')]
    return json.loads(printed[-1]) if printed else {"iterations": []}


def _recorded(run_folder: Path) -> dict:
    """Return the iterations of pgtk's run in the folder."""
    rows = [
        json.loads(line)
        for file in run_folder.rglob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    ends = [row["time"] for row in rows]
    iterations = [
        {stage: row[name] for stage, name in SECONDS.items()} | {"whole": end - before}
        for row, end, before in zip(rows, ends, [*ends[:1], *ends], strict=False)
    ]
    return {
        "iterations": iterations,
        "peak_gb": max((row.get("peak_memory_gb", 0.0) for row in rows), default=0.0),
    }


def _kill_all_of(child: subprocess.Popen) -> None:
    """Send SIGKILL to all that the process has left in its session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


class _GpuMemory:
    """Watches the first GPU's memory in use, of all processes, twice a second by nvidia-smi."""

    def __init__(self):
        self._peak = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        command = [
            "nvidia-smi",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            "--id=0",
        ]
        while not self._done.wait(0.5):
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=10, check=True
                )
            except (OSError, subprocess.SubprocessError):
                return
            self._peak = max(self._peak, int(done.stdout) * 2**20 / 1e9)

    def peak(self) -> float:
        """End the watch and return the most that was in use, in GB."""
        self._done.set()
        self._thread.join()
        return self._peak


def _child(case: Case) -> None:
    if case.trainer == "trl":
        from rollouts_trl import run
    elif case.trainer == "verl":
        from rollouts_verl import run
    else:
        run = _pgtoolkit
    run(case)
    os._exit(0)  # nothing that a library does at the end is measured


def _pgtoolkit(case: Case) -> None:
    import pgtoolkit.training.recorder
    from pgtoolkit.cli import main as pgtk

    pgtoolkit.training.recorder.save_checkpoint = lambda *_: None  # not what is measured
    job = [
        *("model=huggingface", f"model.path={case.model}", "model.gradient_checkpointing=true"),
        *("task=prompts", f"task.path={case.prompts}", "task.verifier=rollouts_job.reward"),
        *(f"rollout.prompts_per_batch={case.completions // GROUP}", f"rollout.group_size={GROUP}"),
        f"rollout.max_completion_length={case.length}",
        f"sampler={case.sampler}",
        f"accumulation.docs_per_step={case.completions}",
        "accumulation.max_tokens=65536",
        *("loss=gspo", "aggregation=constant", f"aggregation.divisor={case.length}"),
        *(
            f"trainer.max_steps={case.iterations}",
            "trainer.checkpoint_every=1000000",
            "tracking=none",
        ),
    ]
    chosen = {override.partition("=")[0] for override in case.overrides}
    job = [override for override in job if override.partition("=")[0] not in chosen]
    status = pgtk(job + case.overrides)
    if status:
        raise SystemExit(f"pgtk ended with {status}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(Case(**json.loads(sys.argv[2])))
    else:
        raise SystemExit(main())

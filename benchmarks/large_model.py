"""Measure iterations of a model whose weights, gradients and moments no single GPU holds.

    python benchmarks/large_model.py FOLDER [--shape 7b] [--sampler transformers] [--kind fsdp]
        [--override KEY=VALUE]

First, unless `--no-check`, a small model in float32 on all GPUs: `parallelism=fsdp` against `ddp`,
every metric of three steps. Then the model of Qwen2.5's shape with random weights, all of them
trained (LoRA's adapters with `--lora`): 32 prompts x 8 completions of 512 tokens an iteration, one
update of these 256 documents. It prints a line of JSON for each iteration (seconds by stage,
`fill`: of the weights on their way to the sampler; the most memory that PyTorch had in use, of each
GPU) and the medians without the first. Without a GPU, or with `--shape tiny`, a small model on two
processes. With `--trl` the same job by TRL with FSDP (version 2), whose vLLM runs in its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollouts_job import BODIES, GROUP, Case, write_inputs

if TYPE_CHECKING:
    from pgtoolkit.batch import Step

SIZES = {
    "ddp": "data_parallel",
    "fsdp": "data_parallel",
    "tensor": "tensor_parallel",
    "sequence": "tensor_parallel",
    "sequence_data": "sequence_data_parallel",
}
"""The key that holds the number of processes, by kind of parallelism."""

STAGES = ("sampling", "scoring", "old_log_probs", "update")


def main() -> int:
    arguments = _arguments()
    folder = Path(arguments.folder).resolve()
    if arguments.check:
        print(_check(folder, arguments), flush=True)
    if arguments.trl:
        print(_trl(folder / f"{arguments.shape}-trl", arguments), flush=True)
        return 0
    rows = _run(
        folder / f"{arguments.shape}-{arguments.kind}-{arguments.sampler}",
        arguments,
        arguments.override,
    )
    for row in rows:
        print(json.dumps(row), flush=True)
    later = rows[1:] or rows
    names = [name for name in rows[0] if name != "peak_gb"]
    print(json.dumps({name: statistics.median(row[name] for row in later) for name in names}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument(
        "--shape", choices=BODIES, default="7b" if torch.cuda.is_available() else "tiny"
    )
    parser.add_argument("--kind", choices=SIZES, default="fsdp")
    parser.add_argument("--sampler", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--trl", action="store_true", help="by TRL instead")
    parser.add_argument(
        "--lora", action="store_true", help="train adapters of rank 16 beside frozen weights"
    )
    parser.add_argument("--iterations", type=int, default=3, help="the first of which warms up")
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--override", nargs="+", default=[], help="further overrides of pgtk")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="not first fsdp against ddp"
    )
    parser.add_argument("--seconds", type=float, default=480, help="until the large run is ended")
    return parser.parse_args()


def _check(folder: Path, arguments: argparse.Namespace) -> str:
    """Return a line with the largest relative difference of a metric between the two kinds."""
    rows = {}
    for kind in ("ddp", "fsdp"):
        small = argparse.Namespace(
            **vars(arguments) | {"shape": "tiny", "kind": kind, "sampler": "transformers"}
        )
        small.lora = False
        small.iterations = 3
        rows[kind] = _run(folder / f"check-{kind}", small, ["model.dtype=float32"], metrics=True)
    names = set(rows["ddp"][0]) - {"time", "tokens_per_second", "peak_memory_gb"}
    names = [name for name in names if not name.startswith("seconds")]
    pairs = [
        (copied[name], sharded[name])
        for copied, sharded in zip(rows["ddp"], rows["fsdp"], strict=True)
        for name in names
    ]
    worst = max(abs(x - y) / max(1e-3, abs(x), abs(y)) for x, y in pairs if x is not None)
    return (
        f"{'ok' if worst < 1e-4 else 'FAILED'}: fsdp against ddp, {len(pairs)} numbers, at most "
        f"{worst:.2g} apart"
    )


def _run(
    folder: Path, arguments: argparse.Namespace, more: list[str], metrics: bool = False
) -> list[dict]:
    """Run the job on several processes and return its iterations.

    metrics: return the rows of metrics.jsonl instead.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tiny = arguments.shape == "tiny"
    count = arguments.processes
    length, prompts = _size(arguments.shape)
    write_inputs(folder, prompts * arguments.iterations, arguments.shape, weights=arguments.lora)
    job = [
        "model=huggingface",
        f"model.path={folder}/model",
        f"model.random_weights={str(not arguments.lora).lower()}",
        "model.gradient_checkpointing=true",
        "model.dtype=bfloat16",
        "loss=gspo",
        f"parallelism={arguments.kind}",
        f"parallelism.{SIZES[arguments.kind]}={count}",
        "task=prompts",
        f"task.path={folder}/prompts.jsonl",
        "task.verifier=rollouts_job.reward",
        f"rollout.prompts_per_batch={prompts}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_completion_length={length}",
        f"accumulation.docs_per_step={prompts * GROUP}",
        f"accumulation.max_tokens={256 if tiny else 32768}",
        f"sampler={arguments.sampler}",
        "aggregation=constant",
        f"aggregation.divisor={length}",
        "tracking=none",
        f"trainer.max_steps={arguments.iterations}",
        "trainer.checkpoint_every=1000000",
        *(["model.lora_rank=16"] if arguments.lora else []),
        *more,
    ]
    # The last override of a key counts.
    overrides = {override.partition("=")[0]: override for override in job}
    status = _wait_for(folder, arguments, ["--child", str(folder), *overrides.values()])
    rows = [
        json.loads(line)
        for file in folder.rglob("metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    if len(rows) < arguments.iterations:
        raise SystemExit(
            f"ended {status}, {len(rows)} iterations "
            f"made\n{(folder / 'output').read_text()[-3000:]}"
        )
    if metrics:
        return rows
    by_rank = [
        [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]
        for rank in range(count)
    ]
    ends = [row["time"] for row in rows]
    return [
        {stage: row[f"seconds_{stage}"] for stage in STAGES}
        | {
            "fill": by_rank[0][i]["fill"],
            "whole": end - before,
            "peak_gb": [ranks[i]["peak_gb"] for ranks in by_rank],
        }
        | {"most_gb": max(ranks[i]["peak_gb"] for ranks in by_rank)}
        for i, (row, end, before) in enumerate(zip(rows, ends, [*ends[:1], *ends], strict=False))
    ]


def _size(shape: str) -> tuple[int, int]:
    """Return the tokens of a completion and the prompts of an iteration."""
    return (16, 4) if shape == "tiny" else (512, 32)


def _wait_for(folder: Path, arguments: argparse.Namespace, child: list[str]) -> object:
    """Run this file with these arguments on several processes and return how they ended.

    What they print goes into the file `output`.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    }
    environment.setdefault("OMP_NUM_THREADS", "8" if torch.cuda.is_available() else "1")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.processes}",
    ]
    with (folder / "output").open("w") as output:
        processes = subprocess.Popen(
            [*command, __file__, *child],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return processes.wait(arguments.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(processes.pid, signal.SIGKILL)
            return f"after {arguments.seconds:.0f} s"


def _trl(folder: Path, arguments: argparse.Namespace) -> str:
    """Return what rank 0 prints of the iterations by TRL, as JSON."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    length, prompts = _size(arguments.shape)
    write_inputs(folder, prompts * arguments.iterations, arguments.shape)
    case = Case(
        folder=str(folder),
        trainer="trl",
        sampler="vllm" if arguments.sampler == "vllm" else "generate",
        length=length,
        completions=prompts * GROUP,
        overrides=[],
        iterations=arguments.iterations,
        shape=arguments.shape,
    )
    status = _wait_for(folder, arguments, ["--trl-child", case.as_json()])
    output = (folder / "output").read_text()
    printed = [line for line in output.splitlines() if line.startswith('{"iterations"')]
    return printed[-1] if printed else f"ended {status}\n{output[-3000:]}"


def _child(folder: Path, job: list[str]) -> None:
    """Be a rank of the run and write what it measures into a file of its own."""
    import pgtoolkit.training.recorder
    from pgtoolkit.cli import main as pgtk
    from pgtoolkit.model.policy import Policy
    from pgtoolkit.sampling.servers import ServerSampler
    from pgtoolkit.training.module import PolicyGradientModule

    pgtoolkit.training.recorder.save_checkpoint = lambda *_: None  # not what is measured
    filled = [0.0]
    training_step = PolicyGradientModule.training_step

    def timed(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            _wait()
            started = time.perf_counter()
            result = function(*arguments)
            _wait()
            filled[0] += time.perf_counter() - started
            return result

        return call

    def recorded(self: PolicyGradientModule, step: Step, index: int) -> dict:
        output = training_step(self, step, index)
        row = {"fill": filled[0], "peak_gb": output["metrics"].get("peak_memory_gb", 0.0)}
        with (folder / f"rank-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        filled[0] = 0.0
        return output

    Policy.load = timed(Policy.load)
    ServerSampler.publish = timed(ServerSampler.publish)
    PolicyGradientModule.training_step = recorded
    status = pgtk(job)
    sys.stdout.flush()
    os._exit(status)  # nothing that a library does at the end is measured


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--trl-child"]:
        from rollouts_trl import run

        run(Case(**json.loads(sys.argv[2])))
        os._exit(0)  # nothing that a library does at the end is measured
    else:
        raise SystemExit(main())

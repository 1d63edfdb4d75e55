"""Runs with servers in which each pair of their options is combined, with the small server of the
tests, or vLLM on GPUs.

    PGTOOLKIT_VLLM=VLLM PYTHONPATH=.:tests python tests/sampling/server_combinations.py FOLDER

runs them all at once on the GPUs of a machine, with vLLM as VLLM calls it, and prints a table.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import requests
import torch
from builders.parallel_runs import run_on_ranks
from builders.runs import metrics_of
from builders.shared_servers import save_llama, vllm_command
from builders.vllm_servers import COMMAND, ServerCommand

from pgtoolkit.cli import main
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.sampling.server_process import reserve_port
from pgtoolkit.system import child

CHOICES = (
    ("full", "lora"),
    ("started", "joined"),
    ("no evaluation", "evaluation"),
    ("no reference", "reference"),
    ("in turn", "lag", "max_staleness"),
    ("text", "chat and stop"),
    ("tied", "untied"),
    ("one server", "two servers"),
    ("one rank", "two ranks"),
)
ROWS = (
    (
        "lora, started, no evaluation, reference, max_staleness, chat and stop, tied, two servers, "
        "one rank"
    ),
    "full, joined, evaluation, no reference, max_staleness, text, untied, one server, two ranks",
    "full, started, no evaluation, reference, in turn, text, untied, one server, one rank",
    "lora, joined, evaluation, no reference, lag, text, tied, two servers, two ranks",
    "full, joined, evaluation, no reference, in turn, chat and stop, tied, two servers, one rank",
    "full, started, evaluation, reference, lag, chat and stop, untied, one server, one rank",
    (
        "lora, started, no evaluation, no reference, in turn, chat and stop, untied, two servers, "
        "two ranks"
    ),
    "lora, joined, no evaluation, reference, lag, text, tied, one server, two ranks",
)
"""Each pair of choices is in one of these rows. Two ranks on GPUs that start servers have one on
each GPU."""
STEPS = 6
STOPS = ("1", "4", "7")
_CHAT = (
    "{% for m in messages %}={{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% "
    "endif %}"
)
_SETTINGS = (
    "tracking=none",
    "model=huggingface",
    "sampler=vllm",
    "task=prompts",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_length=8",
    # Rewards differ by length alone, so that there is something to learn from.
    "rollout.overlong_buffer=7",
    "rollout.overlong_penalty=1.0",
    "rollout.keep_completions=16",
    "accumulation.docs_per_step=8",
    "accumulation.max_tokens=256",
    f"trainer.max_steps={STEPS}",
    "optimizer.warmup_steps=0",
    "sampler.start_seconds=240",
    "sampler.answer_seconds=60",
)
_OPTIONS = f"--enforce-eager --kv-cache-memory-bytes={2**30}"
_JOINED = (
    f"{_OPTIONS} --logprobs-mode processed_logprobs --generation-config vllm --max-model-len 256"
)
_JOINED += " --max-num-seqs 64 --gpu-memory-utilization 0.05"
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def pairs_of(row: str) -> set[tuple[str, str]]:
    """Return the pairs of choices in a row."""
    return set(itertools.combinations(row.split(", "), 2))


def all_pairs() -> set[tuple[str, str]]:
    return {
        pair
        for first, second in itertools.combinations(CHOICES, 2)
        for pair in itertools.product(first, second)
    }


class Combination:
    """The run of a row, in its own folder. gpus: those that it may use; without any it has the
    small server."""

    def __init__(self, row: str, folder: Path, gpus: list[int]) -> None:
        self.chosen = row.split(", ")
        self._folder = folder
        self._gpus = gpus
        self._num_servers = 2 if "two servers" in self.chosen else 1
        self._dtype = "bfloat16" if gpus else "float32"
        self._program = vllm_command() if gpus else f"{COMMAND} --marks {folder}/marks-PORT"

    def run(self) -> dict[str, float]:
        """Train, and return what was measured.

        Raises AssertionError if the run does not end well, or if a number is wrong.
        """
        self._folder.mkdir(parents=True)
        tied = "tied" in self.chosen
        self._model = save_llama(
            self._folder / "model", chat_template=_CHAT, tie_word_embeddings=tied
        )
        rows = [{"prompt": f"{number * 37 % 1000:03}=", "answer": "1"} for number in range(24)]
        self._write("training.jsonl", rows)
        self._write(
            "held_out.jsonl",
            [{"prompt": f"{number * 91 % 1000:04}=", "answer": "1"} for number in range(5)],
        )
        with ExitStack() as opened:
            count = self._num_servers if "joined" in self.chosen else 0
            urls = [opened.enter_context(self._server(number)) for number in range(count)]
            for url in urls:
                _wait_for(url)
            begin = time.monotonic()
            overrides = list(self._overrides(urls))
            directory = self._folder / "run"
            if self._gpus:
                visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._gpus))}
                command = ServerCommand(self._folder, *overrides, environment=visible)
                try:
                    assert command.process.wait(400) == 0, command.log.read_text()[-3000:]
                finally:
                    command.kill()
            elif "two ranks" in self.chosen:  # of the processes that tests share
                run_on_ranks(directory, overrides, seconds=400, data_parallel=2)
            else:  # in this process, which has imported already what a run needs
                assert main([*overrides, f"hydra.run.dir={directory}"]) == 0
        return self._checked(directory) | {"seconds": round(time.monotonic() - begin)}

    def _write(self, name: str, rows: list[dict]) -> None:
        (self._folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def _overrides(self, urls: list[str]) -> Iterator[str]:
        yield from _SETTINGS
        yield from (f"model.path={self._model}", f"model.dtype={self._dtype}")
        yield f"trainer.device={'auto' if self._gpus else 'cpu'}"
        yield f"task.path={self._folder}/training.jsonl"
        if urls:
            yield f"sampler.urls=[{','.join(urls)}]"
        else:
            yield from (
                f'sampler.executable="{self._program}"',
                f"sampler.arguments={_OPTIONS.split()}",
            )
            yield from ("sampler.gpu_memory_share=0.05", "sampler.max_sequences=64")
            on_each_gpu = len(self._gpus) if "two ranks" in self.chosen else 1
            yield f"sampler.servers_per_gpu={max(1, self._num_servers // max(1, on_each_gpu))}"
        for choice in self.chosen:
            yield from {
                "lora": ("model.lora_rank=4", "optimizer.learning_rate=0.003"),
                "full": ("optimizer.learning_rate=0.001",),
                "evaluation": (
                    "evaluation.every=2",
                    f"evaluation.sets.other.path={self._folder}/held_out.jsonl",
                ),
                "reference": ("kl=k3",),
                "lag": ("rollout.lag=2",),
                "max_staleness": ("rollout.max_staleness=3", "rollout.old_log_probs=sampling"),
                "text": ("task.chat=never",),
                "chat and stop": (f"rollout.stop={[*STOPS]}",),
                "two ranks": (
                    f"parallelism={'ddp' if 'no evaluation' in self.chosen else 'fsdp'}",
                ),
            }.get(choice, ())

    @contextmanager
    def _server(self, number: int) -> Iterator[str]:
        """Run a server as docs/rollouts.md says, and yield its address."""
        reserved = reserve_port()
        port = reserved.getsockname()[1]
        command = (
            f"{self._program} serve {self._model} --port {port} --dtype {self._dtype} {_JOINED}"
        )
        gpu = (
            {"CUDA_VISIBLE_DEVICES": str(self._gpus[number % len(self._gpus)])}
            if self._gpus
            else {}
        )
        with open(self._folder / f"joined-{number}.log", "w") as log:
            process = child.subprocess.Popen(  # of `forked_children` in the tests
                shlex.split(command),
                stdout=log,
                stderr=log,
                env=os.environ | _VARIABLES | gpu,
                start_new_session=True,
            )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)
            reserved.close()

    def _checked(self, directory: Path) -> dict[str, float]:
        rows = metrics_of(directory)
        noise = 0.05 if self._gpus else 1e-4
        assert len(rows) == STEPS
        assert abs(rows[0]["ratio_new_old"] - 1) < noise
        measured = {"moved": max(abs(row["max_ratio_new_old"] - 1) for row in rows)}
        assert measured["moved"] > 0.05  # so that old weights differ visibly from new ones
        if "max_staleness" not in self.chosen:
            measured["difference"] = max(row["difference_old_sampling"] for row in rows)
            assert measured["difference"] < noise
        if "reference" in self.chosen:
            penalties = [row["kl_ref"] for row in rows]
            assert abs(penalties[0]) < noise
            measured["penalty"] = max(penalties)
            assert measured["penalty"] > 1e-5
        if "evaluation" in self.chosen:
            evaluations = read_evaluations(directory)
            assert [row["step"] for row in evaluations] == [*range(0, STEPS + 1, 2)]
            assert {row["prompts"] for row in evaluations} == {5}
        kept = [
            row
            for file in (directory / "completions").glob("steps_*")
            for row in read_completions(file)
        ]
        # The weights that wrote the three batches.
        versions = {0, 2, 4} if "in turn" in self.chosen else {0, 2}
        assert {row.version for row in kept} == versions
        if "chat and stop" in self.chosen:
            assert all(row.prompt.startswith("=") for row in kept)
            measured["stopped"] = sum(row.completion.endswith(STOPS) for row in kept)
            assert measured["stopped"] >= 3
            assert not any(stop in row.completion[:-1] for row in kept for stop in STOPS)
        marks = [file.read_text() for file in self._folder.glob("marks-*")]
        if marks:  # of small servers
            assert len(marks) == self._num_servers
            assert all("/collective_rpc" in text for text in marks)
        return measured


def _wait_for(url: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        assert time.monotonic() < deadline, f"{url} does not answer"
        time.sleep(0.2)


def _outcome(number: int, folder: Path, num_gpus: int) -> tuple[bool, str]:
    """Return whether the row passed, and its numbers or its error."""
    row = ROWS[number]
    gpus = list(range(num_gpus)) if "two ranks" in row else [number % num_gpus]
    try:
        measured = Combination(row, folder / f"row-{number}", gpus).run()
        return True, "  ".join(f"{name} {value:.4g}" for name, value in measured.items())
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def on_gpus(folder: Path) -> int:
    """Run all rows on a machine with two GPUs, and return 1 if one failed, else 0."""
    count = torch.cuda.device_count()
    with ThreadPoolExecutor(len(ROWS)) as pool:
        outcomes = list(pool.map(lambda number: _outcome(number, folder, count), range(len(ROWS))))
    for row, (passed, text) in zip(ROWS, outcomes, strict=True):
        print(f"{'ok    ' if passed else 'FAILED'} {row}\n       {text}", flush=True)
    print(f"{sum(passed for passed, _ in outcomes)} of {len(ROWS)} combinations on {count} GPUs")
    return int(not all(passed for passed, _ in outcomes))


if __name__ == "__main__":
    sys.exit(on_gpus(Path(sys.argv[1])))

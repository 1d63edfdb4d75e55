"""Servers that the tests of a file share, all started at once: the small one of ours, or vLLM
itself on a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
import torch

from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, config_of, sampler_of
from builders.vllm_servers import COMMAND, ServerCommand
from pgtoolkit.config.schema_tasks import GuessTaskConfig
from pgtoolkit.config.validate import validate
from pgtoolkit.rollouts.policy_rollouts import PolicyRollouts
from pgtoolkit.sampling.proof import Proof
from pgtoolkit.training.build import build
from pgtoolkit.training.train import train

END_TOKENS = [11, 3]
"""The model's end-of-sequence token, and one of a digit that its generation_config.json adds."""
MAX_TOKENS = 6
"""The most of a completion."""
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MORE = {"max_position_embeddings": 512, "initializer_range": 0.12}
_SOONER = ("--enforce-eager", "--api-server-count=1")
SERVER_ARGUMENTS = {
    "first": (),
    "raw": ("--logprobs-mode=raw_logprobs", *_SOONER),
    "float32": _SOONER,
    "refused": ("--no-such-option",),
}
"""The servers, and how their arguments differ; the first is as users have it, and the others start
sooner."""
_DIFFERENT = {"raw": ("rollout.stop=['zzz']",), "float32": ("model.dtype=float32",)}
"""Overrides: a text to stop at gives a server a tokenizer."""
DIGITS = ("task.num_digits=40", f"rollout.max_completion_length={MAX_TOKENS}")
_MEMORY = f"--kv-cache-memory-bytes={2**30}"
"""Fixed, since servers that start at once would each take the others' memory for their own."""


def vllm_command() -> str:
    """How vLLM is called here; skips the test where it is not."""
    command = os.environ.get("PGTOOLKIT_VLLM") or shutil.which("vllm")
    if command is None:
        pytest.skip("needs vLLM: `vllm` on the PATH, or how it is called in PGTOOLKIT_VLLM")
    return command


class SharedServers:
    """Servers around one small model, each started by a sampler of this process, which the tests'
    samplers join.

    is_vllm: whether they are vLLM's, with the model in bfloat16.
    names: of STARTS. save: writes the model; task: overrides of what is asked. marks: what the
        small ones note.
    """

    def __init__(self, folder: Path, is_vllm: bool, names: list[str], save=None, task=DIGITS):
        self.is_vllm, self._folder = is_vllm, folder
        self._environment = pytest.MonkeyPatch()
        self._environment.setenv("VLLM_API_KEY", "of the tests")  # those who join need it
        self.free_memory = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        self.model = (save or save_llama)(folder / "model")
        self.marks = folder / "marks"
        self.runs: dict[str, ServerCommand] = {}
        command, device = (
            (vllm_command(), "auto") if is_vllm else (f"{COMMAND} --marks {self.marks}", "cpu")
        )
        self._settings = (
            *(one for one in SHORT if not one.startswith(("model.", "task."))),
            *(
                "sampler=vllm",
                "model=huggingface",
                f"model.path={self.model}",
                f"trainer.device={device}",
            ),
            f"model.dtype={'bfloat16' if is_vllm else 'float32'}",
            *task,
            "accumulation.max_tokens=256",
            *("sampler.answer_seconds=60", "sampler.start_seconds=170"),
        )
        self._own = (
            f"sampler.executable={command}",
            "sampler.gpu_memory_share=0.05",
            "sampler.max_sequences=64",
        )
        self.samplers = {name: self._built(name) for name in names}
        self._started: dict[str, Future] = {}

    def begin(self, name: str, *overrides: str) -> None:
        """A run of `pgtk` with a server of its own."""
        own = (*self._own, _arguments(*_SOONER))
        self.runs[name] = ServerCommand(self._folder / name, *self._settings, *own, *overrides)

    def start(self) -> None:
        """All at once, until each is up or has failed."""
        with (
            pytest.MonkeyPatch.context() as patch,
            ThreadPoolExecutor(thread_name_prefix="start") as pool,
        ):
            patch.setattr(Proof, "log_probs", _one_at_a_time(Proof.log_probs))
            for name, (module, sampler) in self.samplers.items():
                self._started[name] = pool.submit(self._publish, name, module, sampler)

    def url(self, name: str) -> str:
        """Of a server that is up; raises what kept it from being so."""
        self._started[name].result()
        return self.samplers[name][1]._servers[0].url

    def error(self, name: str) -> BaseException | None:
        return self._started[name].exception()

    def source(self, run_dir: Path, *overrides: str, of: str = "first") -> PolicyRollouts:
        """Rollouts of a policy of its own, sampled by a server."""
        _, loader = self._build(run_dir, f"sampler.urls=[{self.url(of)}]", *overrides)
        return loader.source

    @contextlib.contextmanager
    def joined(
        self, run_dir: Path, *overrides: str, to: tuple[str, ...] = ("first",)
    ) -> Iterator[tuple]:
        """A policy of its own, and a sampler by the servers of these names."""
        urls = ",".join(self.url(name) for name in to)
        module, sampler = self.built(run_dir, f"sampler.urls=[{urls}]", *overrides)
        try:
            yield module, sampler
        finally:
            sampler.close()

    def built(self, run_dir: Path, *overrides: str) -> tuple:
        module, loader = self._build(run_dir, *overrides)
        return module, sampler_of(loader)

    def _build(self, run_dir: Path, *overrides: str) -> tuple:
        torch.manual_seed(0)
        module, loader = build(config_of(*self._settings, *overrides), run_dir=run_dir)
        return module.to("cuda" if self.is_vllm and torch.cuda.is_available() else "cpu"), loader

    def train(self, run_dir: Path, *overrides: str, of: str = "first") -> Path:
        """A run of this process, sampled by a server."""
        recorded = "rollout=recorded" in overrides
        settings = [one for one in self._settings if not (recorded and one.startswith("rollout."))]
        config = config_of(*settings, f"sampler.urls=[{self.url(of)}]", *overrides)
        assert validate(config)[1].problems == []
        train(config, run_dir, overrides=list(overrides))
        return run_dir

    def fault(self, name: str | None, of: str = "first") -> None:
        """From now on, of a small server."""
        requests.post(f"{self.url(of)}/fault", json={"name": name, "after": 0}, timeout=5)

    def noted(self) -> list[str]:
        return self.marks.read_text().splitlines()

    def log(self, name: str) -> str:
        return (self._folder / name / "vllm.log").read_text()

    def processes(self, name: str) -> list[psutil.Process]:
        """Those of a server, with its guard."""
        guard = psutil.Process(self.samplers[name][1]._processes[0].guard.pid)
        return [guard, *guard.children(recursive=True)]

    def engine(self, name: str) -> psutil.Process:
        """The process that has the model."""
        engines = [
            one
            for one in self.processes(name)
            if "EngineCore" in " ".join([*one.cmdline(), one.name()])
        ]
        return engines[0] if engines else self.processes(name)[1]

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """The engine computes nothing meanwhile."""
        engine = self.engine(name)
        engine.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """It takes requests meanwhile, and answers them afterwards."""
        assert requests.post(f"{self.url(name)}/pause", timeout=5).ok
        try:
            yield
        finally:
            requests.post(f"{self.url(name)}/resume", timeout=5)

    def close(self) -> None:
        for run in self.runs.values():
            run.kill()
        for _, sampler in self.samplers.values():
            sampler.close()
        self._environment.undo()

    def _built(self, name: str) -> tuple:
        (self._folder / name).mkdir()
        return self.built(
            self._folder / name,
            *self._own,
            _arguments(*SERVER_ARGUMENTS[name]),
            *_DIFFERENT.get(name, ()),
        )

    def _publish(self, name: str, module, sampler) -> None:
        threading.current_thread().name = name
        sampler.publish(module.policy.weights, 0)


def _arguments(*more: str) -> str:
    return f"sampler.arguments={[_MEMORY, *more]}"


def _one_at_a_time(function: Callable) -> Callable:
    """What computes with the trainer's model may not be meant for several threads."""
    lock = threading.Lock()

    def locked(*arguments):
        with lock:
            return function(*arguments)

    return locked


def save_llama(
    folder: Path, alphabet_size: int = 12, chat_template: str | None = None, **changes
) -> Path:
    """A small model with random weights whose log-probs tell one version of them from another."""
    model = small_llama(vocab_size=alphabet_size, **(_SHAPE | _MORE | changes))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
        END_TOKENS,
        END_TOKENS[0],
    )
    return save_with_tokenizer(model, folder, chat_template)


def save_guesser(folder: Path, seed: int = 0) -> Path:
    """The same for task=guess: several letters end a turn, so that turns are short, and have a
    number now and then."""
    alphabet = GuessTaskConfig.alphabet
    model = small_llama(seed, vocab_size=len(alphabet) + 1, **_SHAPE, **_MORE)
    ends = [len(alphabet), *map(alphabet.index, "-eghw")]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, ends[0]
    return save_with_tokenizer(model, folder, alphabet=alphabet)

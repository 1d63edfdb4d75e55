"""Servers that the tests of a file share, started together: small ones (vllm_server.py), or vLLM
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
from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.config.validate import validate
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.proof import Proof
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.tasks.settings import GuessTaskSettings
from pgtoolkit.training.module import PolicyGradientModule

END_TOKENS = [11, 3]
"""The model's end-of-sequence token, and one of a digit that its generation_config.json adds."""
MAX_TOKENS = 6
"""The longest completion, in tokens."""
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_MORE = {"max_position_embeddings": 512, "initializer_range": 0.12}
_FAST_START = ("--enforce-eager", "--api-server-count=1")
SERVER_ARGUMENTS = {
    "first": ("--max-logprobs=33",),
    "raw": ("--logprobs-mode=raw_logprobs", *_FAST_START),
    "float32": _FAST_START,
    "refused": ("--no-such-option",),
}
"""The servers by name, with the arguments in which they differ.

The first starts with no further argument than `pgtk check` asks for, as a user's would; the others
skip what makes a start slow.
"""
_OVERRIDES = {"raw": ("rollout.stop=['zzz']",), "float32": ("model.dtype=float32",)}
"""The overrides in which they differ: a text to stop at makes a server load a tokenizer."""
DIGITS = ("task.num_digits=40", f"rollout.max_completion_length={MAX_TOKENS}")
_MEMORY = f"--kv-cache-memory-bytes={2**30}"
"""A fixed size: servers that start together would each count the others' memory as their own."""


def vllm_command() -> str:
    """Return the command that runs vLLM; skip the test where there is none."""
    command = os.environ.get("PGTOOLKIT_VLLM") or shutil.which("vllm")
    if command is None:
        pytest.skip("needs vLLM: `vllm` on the PATH, or how it is called in PGTOOLKIT_VLLM")
    return command


class SharedServers:
    """Servers around one small model, each started by a sampler of this process.

    A test makes a sampler of its own, which joins them by their addresses.

    is_vllm: whether they are vLLM's, with the model in bfloat16.
    names: which of SERVER_ARGUMENTS to start.
    save: writes the model into a folder.
    task: overrides of the task.
    marks: the file in which the small servers note their calls.
    """

    def __init__(
        self,
        folder: Path,
        is_vllm: bool,
        names: list[str],
        save: Callable[[Path], Path] | None = None,
        task: tuple[str, ...] = DIGITS,
    ):
        self.is_vllm = is_vllm
        self._folder = folder
        self._environment = pytest.MonkeyPatch()
        # Samplers that join a server send this key with each call.
        self._environment.setenv("VLLM_API_KEY", "of the tests")
        self.free_memory = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        self.model = (save or save_llama)(folder / "model")
        self.marks = folder / "marks"
        self.runs: dict[str, ServerCommand] = {}
        command = vllm_command() if is_vllm else f"{COMMAND} --marks {self.marks}"
        self._settings = (
            *(setting for setting in SHORT if not setting.startswith(("model.", "task."))),
            "sampler=vllm",
            "model=huggingface",
            f"model.path={self.model}",
            f"trainer.device={'auto' if is_vllm else 'cpu'}",
            f"model.dtype={'bfloat16' if is_vllm else 'float32'}",
            *task,
            "accumulation.max_tokens=256",
            "sampler.answer_seconds=60",
            "sampler.start_seconds=170",
        )
        self._start_settings = (
            f"sampler.executable={command}",
            "sampler.gpu_memory_share=0.05",
            "sampler.max_sequences=64",
        )
        self.samplers = {name: self._starting_sampler(name) for name in names}
        self._started: dict[str, Future] = {}

    def begin_run(self, name: str, *overrides: str) -> None:
        """Start a run of `pgtk` that starts a server for itself."""
        arguments = _arguments(*_FAST_START)
        self.runs[name] = ServerCommand(
            self._folder / name, *self._settings, *self._start_settings, arguments, *overrides
        )

    def start_all(self) -> None:
        """Start all servers; return when each is up or has failed.

        Those of vLLM start at the same time. A process without further threads forks small ones.
        """
        if not self.is_vllm:
            for name, (module, sampler) in self.samplers.items():
                self._started[name] = Future()
                try:
                    sampler.publish(module.policy.weights, 0)
                except Exception as error:
                    self._started[name].set_exception(error)
                else:
                    self._started[name].set_result(None)
            return
        with (
            pytest.MonkeyPatch.context() as patch,
            ThreadPoolExecutor(thread_name_prefix="start") as pool,
        ):
            patch.setattr(Proof, "log_probs", _with_lock(Proof.log_probs))
            for name, (module, sampler) in self.samplers.items():
                self._started[name] = pool.submit(self._publish, name, module, sampler)

    def url(self, name: str) -> str:
        """Return the address of a server; raise the error of its start if it has failed."""
        self._started[name].result()
        return self.samplers[name][1]._servers[0].url

    def error(self, name: str) -> BaseException | None:
        return self._started[name].exception()

    def rollouts_of(self, run_dir: Path, *overrides: str, server: str = "first") -> SampledRollouts:
        """Return rollouts of a new policy, sampled by a server."""
        _, loader = self._build(run_dir, f"sampler.urls=[{self.url(server)}]", *overrides)
        return loader.source

    @contextlib.contextmanager
    def joined_sampler(
        self, run_dir: Path, *overrides: str, names: tuple[str, ...] = ("first",)
    ) -> Iterator[tuple[PolicyGradientModule, ServerSampler]]:
        """Give a module with a new policy, and a sampler that has joined the named servers."""
        urls = ",".join(self.url(name) for name in names)
        module, sampler = self.module_and_sampler(run_dir, f"sampler.urls=[{urls}]", *overrides)
        try:
            yield module, sampler
        finally:
            sampler.close()

    def module_and_sampler(
        self, run_dir: Path, *overrides: str
    ) -> tuple[PolicyGradientModule, ServerSampler]:
        module, loader = self._build(run_dir, *overrides)
        return module, sampler_of(loader)

    def _build(self, run_dir: Path, *overrides: str) -> tuple[PolicyGradientModule, StepLoader]:
        torch.manual_seed(0)
        module, loader = build(config_of(*self._settings, *overrides), run_dir=run_dir)
        device = "cuda" if self.is_vllm and torch.cuda.is_available() else "cpu"
        return module.to(device), loader

    def train(self, run_dir: Path, *overrides: str, server: str = "first") -> Path:
        """Train a run in this process, sampled by a server; return its directory."""
        settings = self._settings
        if "rollout=recorded" in overrides:
            settings = [setting for setting in settings if not setting.startswith("rollout.")]
        config = config_of(*settings, f"sampler.urls=[{self.url(server)}]", *overrides)
        assert validate(config)[1].problems == []
        train(config, run_dir, overrides=list(overrides))
        return run_dir

    def set_fault(self, name: str | None, server: str = "first") -> None:
        """Give a small server a fault from its next call on; None: it works again."""
        requests.post(f"{self.url(server)}/fault", json={"name": name, "after": 0}, timeout=5)

    def noted_calls(self) -> list[str]:
        return self.marks.read_text().splitlines()

    def log(self, name: str) -> str:
        return (self._folder / name / "vllm.log").read_text()

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the guard of a server, then all processes below it."""
        guard = psutil.Process(self.samplers[name][1]._processes[0].guard.pid)
        return [guard, *guard.children(recursive=True)]

    def engine(self, name: str) -> psutil.Process:
        """Return the process of a server that holds the model."""
        processes = self.processes(name)
        for process in processes:
            if "EngineCore" in " ".join([*process.cmdline(), process.name()]):
                return process
        return processes[1]

    @contextlib.contextmanager
    def stopped_engine(self, name: str) -> Iterator[None]:
        """Stop a server's engine by a signal, and let it continue after the block."""
        engine = self.engine(name)
        engine.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused_server(self, name: str) -> Iterator[None]:
        """Pause a server: it accepts requests in the block, and answers them afterwards."""
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

    def _starting_sampler(self, name: str) -> tuple[PolicyGradientModule, ServerSampler]:
        """Return the module and the sampler that starts the server of this name."""
        run_dir = self._folder / name
        run_dir.mkdir()
        arguments = _arguments(*SERVER_ARGUMENTS[name])
        overrides = _OVERRIDES.get(name, ())
        return self.module_and_sampler(run_dir, *self._start_settings, arguments, *overrides)

    def _publish(self, name: str, module: PolicyGradientModule, sampler: ServerSampler) -> None:
        threading.current_thread().name = name
        sampler.publish(module.policy.weights, 0)


def _arguments(*more: str) -> str:
    return f"sampler.arguments={[_MEMORY, *more]}"


def _with_lock(function: Callable) -> Callable:
    """Return the function behind a lock: the trainer's model may not be safe in several threads."""
    lock = threading.Lock()

    def locked(*arguments: object) -> object:
        with lock:
            return function(*arguments)

    return locked


def save_llama(
    folder: Path, alphabet_size: int = 12, chat_template: str | None = None, **changes
) -> Path:
    """Save a small model with weights random enough that versions differ in their log-probs."""
    model = small_llama(vocab_size=alphabet_size, **(_SHAPE | _MORE | changes))
    model.generation_config.eos_token_id = END_TOKENS
    model.generation_config.pad_token_id = END_TOKENS[0]
    return save_with_tokenizer(model, folder, chat_template)


def save_guesser(folder: Path, seed: int = 0) -> Path:
    """Save a small model for task=guess.

    Several letters end a turn: turns are short, and some contain a number.
    """
    alphabet = GuessTaskSettings.alphabet
    model = small_llama(seed, vocab_size=len(alphabet) + 1, **_SHAPE, **_MORE)
    ends = [len(alphabet), *map(alphabet.index, "-eghw")]
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = ends[0]
    return save_with_tokenizer(model, folder, alphabet=alphabet)

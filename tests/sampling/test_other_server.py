"""Another kind of server than vLLM needs only a class with its API: here that of SGLang, for a
small server of the tests, whose log-probs are those of transformers."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from builders.parts import LOSS, ROLLOUT, short_module
from builders.shared_servers import save_llama
from builders.vllm_servers import COMMAND, all_ended, processes_of
from sampling.server_checks import assert_log_probs_of_trainer, update

from pgtoolkit.completion import Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.model.setup import build_policy
from pgtoolkit.sampling.server_api import Call, Choice, ServerPlan, ServerSampling
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.settings import VllmSamplerSettings
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.state import write_settings

REQUESTS = [Request([1, 2, 3, 10], 3, seed=5), Request([4, 5, 10], 2, seed=9)]


class SGLang:
    """The API of SGLang, as `Vllm` has that of vLLM."""

    NAME = "SGLang"
    HEALTH = "/health"
    RESUME = "/continue_generation"
    KEY = "SGLANG_API_KEY"
    START_WITH = "a version from 0.5 on"
    LOAD = "/update_weights_from_disk"
    FIXED_MEMORY = "--mem-fraction-static"
    VARIABLES: ClassVar[dict[str, str]] = {}
    MODULES = None

    def command(
        self,
        settings: VllmSamplerSettings,
        seed: int,
        has_stops: bool,
        folder: Path,
        plan: ServerPlan,
        host: str,
        port: int,
    ) -> list[str]:
        options = (
            f"--host {host} --port {port} --dtype {plan.number_type} --logprobs-mode "
            "processed_logprobs"
        )
        return [*shlex.split(settings.executable), "serve", str(folder), *options.split()]

    def completions(self, request: Request, sampling: ServerSampling, salt: str) -> Call:
        settings = {
            "n": request.completions,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": sampling.ends,
            "stop": sampling.stops.strings,
            "sampling_seed": request.seed,
        }
        body = {"input_ids": request.tokens, "sampling_params": settings, "return_logprob": True}
        return "/generate", body | {"logprob_start_len": 0}

    def choices(self, answer: list[dict]) -> list[Choice]:
        return [self._choice(completion["meta_info"]) for completion in answer]

    def _choice(self, information: dict) -> Choice:
        tokens = information["output_token_logprobs"]
        return Choice(
            tokens=[token for _, token, _ in tokens],
            log_probs=[log_prob for log_prob, _, _ in tokens],
            finish_reason=information["finish_reason"]["type"],
            stop_text=information["finish_reason"].get("matched"),
        )

    def scores(self, tokens: Sequence[int], salt: str) -> Call:
        settings = {
            "n": 1,
            "max_new_tokens": 1,
            "temperature": 1.0,
            "stop_token_ids": [],
            "sampling_seed": 0,
        }
        return "/generate", {
            "input_ids": tokens,
            "sampling_params": settings,
            "return_logprob": True,
        }

    def log_probs(self, answer: list[dict], tokens: Sequence[int]) -> list[float]:
        return [log_prob for log_prob, _, _ in answer[0]["meta_info"]["input_token_logprobs"][1:]]

    def load(self, folder: Path, config: dict) -> Call:
        return self.LOAD, {"model_path": str(folder)}

    def forget(self) -> Call:
        return "/flush_cache", None

    def sleep(self) -> Call:
        return "/release_memory_occupation", None

    def wake(self, part: str) -> Call:
        return "/resume_memory_occupation", None

    def advice(self, last_words: str) -> str:
        return ""


@pytest.fixture
def module_and_sampler(tmp_path: Path) -> Iterator[tuple[PolicyGradientModule, ServerSampler]]:
    program = COMMAND.replace("vllm_server.py", "other_server.py")
    model = save_llama(tmp_path / "model")
    policy = build_policy(HuggingFaceModelSettings(path=str(model)), None, on_gpu=False)
    module = short_module(replace(LOSS, temperature=0.7), policy=policy, dtype=None)
    module.sampling = replace(ROLLOUT, temperature=0.7).sampling
    settings = functools.partial(write_settings, module, merged=True)
    prompts = [request.tokens for request in REQUESTS]
    sampler = ServerSampler(
        SGLang(),
        module.sampling,
        VllmSamplerSettings(executable=program, answer_seconds=600),
        module,
        module.layout,
        prompts,
        24,
        settings,
        tmp_path,
        seed=0,
        on_gpu=False,
        is_async=False,
    )
    with contextlib.closing(sampler):
        yield module, sampler


@pytest.mark.slow
def test_another_kind_of_server_needs_only_a_class_with_its_api(module_and_sampler, tmp_path):
    module, sampler = module_and_sampler
    for version in range(3):
        sampler.publish(module.policy.weights, version)
        completions = sampler.complete(REQUESTS)
        assert [completion.model_version for completion in completions] == [version] * 5
        assert_log_probs_of_trainer(module, REQUESTS, completions)
        update(module)
    processes = processes_of(tmp_path)
    folder = sampler._folder.path
    assert len(processes) == 2
    sampler._api.load = lambda folder, _: ("/flush_cache", None)  # the weights do not arrive
    with pytest.raises(
        SamplerLost,
        match=r"still from those of version 2: its log-probs of a text have not changed",
    ):
        sampler.publish(module.policy.weights, 3)
    sampler.close()
    assert all_ended(processes, 1)
    assert not Path(folder).exists()

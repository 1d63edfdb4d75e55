"""Another kind of server than vLLM needs nothing but a class with its words: here those of SGLang,
for a small server of the tests."""

from __future__ import annotations

import contextlib
import functools
import shlex
from pathlib import Path
from typing import ClassVar

import pytest
from builders.runs import SHORT, config_of
from builders.shared_servers import save_llama
from builders.vllm_servers import COMMAND, all_ended, processes_of
from sampling.server_checks import assert_trained, update

from pgtoolkit.completion import Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.server_api import Call, Choice
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.training.build import build
from pgtoolkit.training.state import write_settings

REQUESTS = [Request([1, 2, 3, 10], 3, seed=5), Request([4, 5, 10], 2, seed=9)]


class SGLang:
    """The words of SGLang, as `Vllm` has those of vLLM."""

    NAME = "SGLang"
    HEALTH = "/health"
    RESUME = "/continue_generation"
    KEY = "SGLANG_API_KEY"
    START_WITH = "a version from 0.5 on"
    LOAD = "/update_weights_from_disk"
    FIXED_MEMORY = "--mem-fraction-static"
    VARIABLES: ClassVar[dict[str, str]] = {}
    MODULES = None

    def command(self, config, folder, plan, host, port):
        options = (
            f"--host {host} --port {port} --dtype {plan.number_type} --logprobs-mode "
            "processed_logprobs"
        )
        return [*shlex.split(config.sampler.executable), "serve", str(folder), *options.split()]

    def completions(self, request, sampling, salt) -> Call:
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

    def choices(self, answer) -> list[Choice]:
        return [self._choice(completion["meta_info"]) for completion in answer]

    def _choice(self, information: dict) -> Choice:
        written = information["output_token_logprobs"]
        return Choice(
            tokens=[token for _, token, _ in written],
            log_probs=[log_prob for log_prob, _, _ in written],
            finish_reason=information["finish_reason"]["type"],
            stop_text=information["finish_reason"].get("matched"),
        )

    def scores(self, tokens, salt) -> Call:
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

    def log_probs(self, answer, tokens) -> list[float]:
        return [log_prob for log_prob, _, _ in answer[0]["meta_info"]["input_token_logprobs"][1:]]

    def load(self, folder, config) -> Call:
        return self.LOAD, {"model_path": str(folder)}

    def forget(self) -> Call:
        return "/flush_cache", None

    def sleep(self) -> Call:
        return "/release_memory_occupation", None

    def wake(self, part) -> Call:
        return "/resume_memory_occupation", None

    def advice(self, last_words) -> str:
        return ""


@pytest.fixture
def sampling(tmp_path):
    program = COMMAND.replace("vllm_server.py", "other_server.py")
    model = save_llama(tmp_path / "model")
    config = config_of(
        *(setting for setting in SHORT if not setting.startswith("model.")),
        "model=huggingface",
        f"model.path={model}",
        "model.dtype=float32",
        "sampler=vllm",
        f'sampler.executable="{program}"',
        "trainer.device=cpu",
        "rollout.temperature=0.7",
    )
    module, loader = build(config, run_dir=tmp_path)
    loader.source.sampler.close()  # it has the words of vLLM, and has started nothing
    settings = functools.partial(write_settings, module, merged=True)
    prompts = [request.tokens for request in REQUESTS]
    sampler = ServerSampler(
        SGLang(), config, module, module.layout, prompts, 24, settings, tmp_path
    )
    with contextlib.closing(sampler):
        yield module, sampler


def test_a_class_of_words_is_all_that_another_kind_of_server_needs(sampling, tmp_path):
    module, sampler = sampling
    for version in range(3):
        sampler.publish(module.policy.weights, version)
        completions = sampler.complete(REQUESTS)
        assert [completion.model_version for completion in completions] == [version] * 5
        assert_trained(module, REQUESTS, completions)
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

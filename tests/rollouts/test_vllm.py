"""sampler=vllm against a small server of vLLM's protocol: real processes, real HTTP, a real model, and every fault."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests
import torch
from builders.runs import SHORT, config_of, sampler_of
from builders.vllm_servers import COMMAND, SERVER, gone, processes_of
from omegaconf import OmegaConf
from safetensors.torch import load_file

from pgtoolkit.errors import SamplerLost, StorageError
from pgtoolkit.rollouts.samplers import Request
from pgtoolkit.rollouts.server_process import free_port
from pgtoolkit.rollouts.vllm import VllmSampler
from pgtoolkit.rollouts.weights_folder import WeightsFolder, _lock_pages
from pgtoolkit.training.build import build

pytestmark = pytest.mark.slow  # servers are processes

VLLM = ("sampler=vllm", f"sampler.executable={COMMAND}", "trainer.device=cpu")
REQUESTS = [Request([1, 2, 10], 3, seed=5), Request([3, 4, 5, 10], 2, seed=9)]


def module_and_sampler(run_dir: Path, *overrides: str):
    """A policy whose weights are larger than at a start, so that every number matters, and its sampler."""
    config = OmegaConf.to_object(config_of(*SHORT, *VLLM, *overrides))
    module, loader = build(config, run_dir=run_dir)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    return module, sampler_of(loader)


@contextlib.contextmanager
def closing(run_dir: Path, *overrides: str):
    module, sampler = module_and_sampler(run_dir, *overrides)
    try:
        yield module, sampler
    finally:
        sampler.close()


class Running:
    """A server that nobody of pgtk has started. marks: what it noted."""

    def __init__(self, folder: Path):
        self.marks = folder / "marks"
        module, sampler = module_and_sampler(folder)
        sampler._write(module.policy.weights())
        self.url = f"http://127.0.0.1:{free_port()}"
        more = ("--marks", str(self.marks), "serve", str(sampler._folder.path), "--port", self.url.rpartition(":")[2])
        command = [sys.executable, str(SERVER), *more, "--logprobs-mode", "processed_logprobs"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self.answers():
            assert self.process.poll() is None
            time.sleep(0.1)
        sampler.close()

    def answers(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.url}/health", timeout=5).ok
        return False

    def fault(self, name: str | None, after: int = 0) -> None:
        requests.post(f"{self.url}/fault", json={"name": name, "after": after}, timeout=5)

    def noted(self) -> list[str]:
        return self.marks.read_text().splitlines()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    found = [Running(tmp_path_factory.mktemp(f"server{i}")) for i in range(2)]
    yield found
    for one in found:
        for process in psutil.Process(one.process.pid).children(recursive=True):
            process.kill()
        one.process.kill()
        one.process.wait()


@pytest.fixture
def server(servers):
    servers[0].marks.write_text("")
    yield servers[0]
    servers[0].fault(None)


def joined(server: Running) -> tuple[str, ...]:
    return f"sampler.urls=[{server.url}]", "sampler.executable=vllm"


def trained_log_probs(module, request: Request, completion) -> torch.Tensor:
    """By transformers alone, of the whole text at once."""
    tokens = torch.cat([torch.tensor(request.tokens), completion.tokens])
    with torch.no_grad():
        logits = module.model(tokens[None]).logits[0] / module.config.rollout.temperature
    return logits.log_softmax(-1)[len(request.tokens) - 1 : -1].gather(-1, completion.tokens[:, None])[:, 0]


def update(module, size: float = 0.05) -> None:
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(size * torch.randn_like(weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_completions_carry_the_log_probs_of_the_weights_published_last(server, tmp_path, temperature):
    with closing(tmp_path, *joined(server), f"rollout.temperature={temperature}") as (module, sampler):
        assert type(sampler) is VllmSampler
        for version in (0, 3, 4):
            sampler.publish(module.policy.weights, version)
            completions = sampler.complete(REQUESTS)
            prompts = [request for request in REQUESTS for _ in range(request.completions)]
            for request, completion in zip(prompts, completions, strict=True):
                expected = trained_log_probs(module, request, completion)
                torch.testing.assert_close(completion.log_probs, expected, rtol=1e-4, atol=1e-5)
                ended = bool(completion.tokens[-1] == module.policy.tokenizer.eos_token_id)
                assert completion.finish_reason == ("stop" if ended else "length")
                assert ended or len(completion.tokens) == 4
                assert completion.model_version == version
            assert len({tuple(completion.tokens.tolist()) for completion in completions}) > 2
            update(module)
    assert server.answers()  # what was joined is left alone


def test_a_request_is_sampled_by_its_seed_alone(server, tmp_path):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        once, again = sampler.complete(REQUESTS), sampler.complete(REQUESTS[::-1])
        for one, other in zip(once, again[2:] + again[:2], strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.log_probs, other.log_probs)
    assert {"complete 5", "complete 9"} <= {*server.noted()}
    server.marks.write_text("")
    with closing(tmp_path, *joined(server), "sampler.seeded=false") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        sampler.complete(REQUESTS)
    asked = {line for line in server.noted() if "complete" in line}
    assert asked == {"complete None", "complete 1", "complete score"}


@pytest.mark.parametrize("fault", [None, "late_stop"])
def test_completions_end_with_the_token_that_completes_a_stop_string(server, tmp_path, fault):
    with closing(tmp_path / "without", *joined(server)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        whole = sampler.complete(REQUESTS)
    texts = [module.policy.tokenizer.decode(completion.tokens) for completion in whole]
    stop = texts[0][1]
    with closing(tmp_path / "with", *joined(server), f"rollout.stop=['{stop}']") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.fault(fault)
        ended = sampler.complete(REQUESTS)
    lengths = [text.index(stop) + 1 if stop in text else len(text) for text in texts]
    assert lengths[0] == 2  # of four characters, which are tokens here
    for one, other, length in zip(ended, whole, lengths, strict=True):
        assert torch.equal(one.tokens, other.tokens[:length])
        assert torch.equal(one.log_probs, other.log_probs[:length])
        assert one.finish_reason == ("stop" if length < 4 or stop == texts[0][3] else other.finish_reason)


def test_the_same_version_is_published_once(server, tmp_path):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        for _ in range(3):
            sampler.publish(module.policy.weights, 7)
    assert [line for line in server.noted() if "complete" not in line] == ["/collective_rpc", "/reset_prefix_cache"]


def test_servers_share_the_requests_and_get_the_same_weights(servers, tmp_path):
    for one in servers:
        one.marks.write_text("")
    urls = ",".join(one.url for one in servers)
    with closing(tmp_path, f"sampler.urls=[{urls}]", "sampler.executable=vllm") as (module, sampler):
        for version in range(2):
            sampler.publish(module.policy.weights, version)
            requests_of = [Request([1, 10], 1, seed=100 + i) for i in range(5)]
            completions = sampler.complete(requests_of)
            for request, completion in zip(requests_of, completions, strict=True):
                expected = trained_log_probs(module, request, completion)
                torch.testing.assert_close(completion.log_probs, expected, rtol=1e-4, atol=1e-5)
            update(module)
    seen = [{line for line in one.noted() if line.startswith("complete 10")} for one in servers]
    assert seen == [{"complete 100", "complete 102", "complete 104"}, {"complete 101", "complete 103"}]


SAMPLING = {
    "null_log_probs": r"the log-prob of a sampled token is None",
    "too_long": r"a completion has 7 tokens, and 4 is the most allowed",
    "too_few": r"it gave 2 completions instead of 3",
    "foreign_token": r"it sampled token \d+, and the trainer's vocabulary has \d+ entries",
    "no_ids": r"a completion has no token_ids",
    "beyond_the_end": r"a completion ends with token .*end-of-sequence token, for the reason length",
    "odd_stop": r"a completion ends with token \d+ after 1 of at most 4 tokens, for the reason stop",
    "no_json": r"/v1/completions answered what is no JSON: <html>",
    "paused": r"answers 503 for more than 1 seconds .*paused.*/resume",
    "hangs": r"did not answer /v1/completions within sampler.answer_seconds=3. It hangs",
}


@pytest.mark.parametrize("fault", SAMPLING)
def test_a_fault_while_sampling_is_one_sentence(server, tmp_path, monkeypatch, fault):
    monkeypatch.setattr("pgtoolkit.rollouts.vllm_client._BUSY_SECONDS", 1)
    with closing(tmp_path, *joined(server), "sampler.answer_seconds=3") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.fault(fault)
        many = [Request([1, 2, 10], 3, seed=seed) for seed in range(12)]
        with pytest.raises(SamplerLost, match=SAMPLING[fault]) as caught:
            sampler.complete(many)
        assert caught.value.exit_status == 5
        server.fault(None)
        assert len(sampler.complete(many)) == 36  # it can be asked again


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server, tmp_path):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.fault("busy_for_a_moment")
        assert len(sampler.complete(REQUESTS)) == 5


SYNC = {
    "stale": r"version 1, but still from those of version 0: it answers to the last bit as it did",
    "half": r"does not sample from the weights of version 1: .* differ from the trainer's by [\d.]+ on average",
    "other_model": r"does not sample from the weights of version 1: .* differ from the trainer's",
    "stale_cache": r"version 1",
    "reload_error": r"answered /collective_rpc with 500: .*layers.7.weight",
    "no_development_mode": r"has no /collective_rpc. Start it with VLLM_SERVER_DEV_MODE=1",
}


@pytest.mark.parametrize("fault", SYNC)
def test_a_version_that_did_not_arrive_is_an_error(server, tmp_path, fault):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        server.fault(fault if fault == "stale_cache" else None)
        sampler.publish(module.policy.weights, 0)
        update(module)
        server.fault(fault)
        with pytest.raises(SamplerLost, match=SYNC[fault]):
            sampler.publish(module.policy.weights, 1)


@pytest.mark.parametrize("fault", ["raw", "temperature"])
def test_log_probs_of_another_distribution_are_an_error(server, tmp_path, fault):
    with closing(tmp_path, *joined(server), "rollout.temperature=0.7") as (module, sampler):
        server.fault(fault)
        with pytest.raises(SamplerLost, match="--logprobs-mode processed_logprobs"):
            sampler.publish(module.policy.weights, 0)


def test_weights_that_stay_behind_by_less_than_the_tolerance_are_seen(server, tmp_path):
    """Their log-probs differ by less than rounding may explain, but they are those of before to the last bit."""
    with closing(tmp_path, *joined(server), "sampler.tolerance=0.1") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        update(module, 1e-3)
        sampler.publish(module.policy.weights, 1)
        update(module, 1e-3)
        server.fault("stale")
        with pytest.raises(SamplerLost, match="still from those of version 1"):
            sampler.publish(module.policy.weights, 2)


def test_weights_that_stay_behind_are_seen_where_no_answer_is_like_another(server, tmp_path):
    """Rounding differs each time, but the log-probs are nearer to those of before."""
    with closing(tmp_path, *joined(server), "sampler.tolerance=1") as (module, sampler):
        sampler.publish(module.policy.weights, 3)
        update(module, 1e-3)
        server.fault("stale_and_noisy")
        with pytest.raises(SamplerLost, match=r"are 0\.\d+ from the trainer's of that version, and .* of version 3\."):
            sampler.publish(module.policy.weights, 4)


def test_weights_that_did_not_change_are_no_fault(server, tmp_path):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        for version in range(3):
            sampler.publish(module.policy.weights, version)


def test_top_p_is_no_fault(server, tmp_path):
    with closing(tmp_path, *joined(server), "rollout.top_p=0.5") as (module, sampler):
        sampler.publish(module.policy.weights, 0)


def test_a_server_sleeps_between_batches(server, tmp_path):
    with closing(tmp_path, *joined(server)) as (module, sampler):
        sampler._plan = dataclasses.replace(sampler._plan, sleeps=True)  # as on a GPU that it shares
        for version in (0, 0, 1):
            sampler.publish(module.policy.weights, version)
            sampler.complete(REQUESTS)
            update(module)
        sampler.publish(module.policy.weights, 2)
    load = ["/collective_rpc", "/reset_prefix_cache"]
    wake, rest = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"
    assert [line for line in server.noted() if line[0] == "/"] == [
        *(*load, "/sleep?level=1"),
        *(wake, rest, "/sleep?level=1"),
        *(wake, load[0], rest, load[1], "/sleep?level=1"),
        *(wake, load[0], rest, load[1]),
    ]


def test_nothing_listens_at_a_joined_address(tmp_path):
    more = (f"sampler.urls=[http://127.0.0.1:{free_port()}]", "sampler.executable=vllm", "sampler.start_seconds=1")
    with closing(tmp_path, *more) as (module, sampler), pytest.raises(SamplerLost, match=r"start_seconds=1"):
        sampler.publish(module.policy.weights, 0)


STARTS = {
    "does_not_start": r"ended with status 1\. Its last words: .*free memory on device.*vllm\.log",
    "model_refused": r"does not yet support: stock torch\.compile .*\. Set VLLM_USE_V2_MODEL_RUNNER=0 in the env",
    "never_up": r"does not answer within sampler\.start_seconds=2",
    "another_program": r"serves \['/another/model'\] and not .*another program has taken its port",
}


@pytest.mark.parametrize("fault", STARTS)
def test_a_server_that_does_not_start_is_one_sentence(tmp_path, fault):
    more = (f"sampler.executable={COMMAND} --fault {fault}", "sampler.start_seconds=2")
    more = more[: 1 + (fault == "never_up")]
    with closing(tmp_path, *more) as (module, sampler), pytest.raises(SamplerLost, match=STARTS[fault]):
        sampler.publish(module.policy.weights, 0)
    assert processes_of(tmp_path) == []


def test_a_program_that_is_not_there_is_one_sentence(tmp_path):
    with closing(tmp_path, "sampler.executable=no-such-vllm") as (module, sampler):
        with pytest.raises(SamplerLost, match="there is no program no-such-vllm"):
            sampler.publish(module.policy.weights, 0)
        assert sampler._folder.path.exists()
    assert not sampler._folder.path.exists()


def test_a_server_is_started_as_the_configuration_says(tmp_path, monkeypatch):
    """On another port where the first is taken by then; with the variables of its own environment."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PYTHONPATH", "/of/ranks")
    monkeypatch.setenv("PGTK_PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    command = f"{COMMAND} --fault port_taken --after 2 --marks {tmp_path}/marks"
    own = ("sampler.gpus=[1,2]", "sampler.tensor_parallel=2", "sampler.arguments=['--enforce-eager']")
    sizes = ("sampler.gpu_memory_share=0.7", "sampler.max_sequences=11", "seed=3", "accumulation.max_tokens=20")
    with closing(tmp_path, f"sampler.executable={command}", *own, *sizes) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        assert len(processes_of(tmp_path)) == 2
        folder = sampler._folder.path
    assert processes_of(tmp_path) == []
    assert not folder.exists()
    starts = [json.loads(line[6:]) for line in (tmp_path / "marks").read_text().splitlines() if line[:5] == "start"]
    assert len(starts) == 3
    assert len({arguments[arguments.index("--port") + 1] for _, arguments, _ in starts}) == 3
    variables, arguments, python_path = starts[-1]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert variables == own | {"CUDA_VISIBLE_DEVICES": "5,GPU-6", "RANK": None}
    assert python_path == "/of/the/user"
    place = arguments.index("serve")
    assert arguments[place + 1] == str(folder)
    given = dict(zip(arguments[place + 2 :: 2], arguments[place + 3 :: 2], strict=False))
    expected = {
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--max-model-len": "20",
        "--max-num-seqs": "11",
        "--gpu-memory-utilization": "0.7",
        "--tensor-parallel-size": "2",
        "--generation-config": "vllm",
        "--seed": "3",
    }
    assert given.items() >= expected.items()
    assert {"--skip-tokenizer-init", "--enforce-eager", "--api-server-count=4"} <= {*arguments}
    assert "--enable-sleep-mode" not in arguments


def test_servers_of_one_gpu_start_one_after_the_other(tmp_path, monkeypatch):
    """As vLLM measures what memory it needs by what is taken meanwhile. A variable of the user's own holds."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = (f"sampler.executable={COMMAND} --marks {tmp_path}/marks", "sampler.gpus=[1,2]", "sampler.servers_per_gpu=2")
    with closing(tmp_path, *own, "sampler.gpu_memory_share=0.5") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        many = [Request([1, 2, 10], 1, seed=seed) for seed in range(8)]
        assert len(sampler.complete(many)) == 8
        assert len(sampler._servers) == 4
    lines = (tmp_path / "marks").read_text().splitlines()
    kinds = [line.split()[0] for line in lines if line.split()[0] in ("start", "up")]
    assert kinds == ["start", "start", "up", "up"] * 2
    starts = [json.loads(line[6:]) for line in lines if line.startswith("start")]
    assert sorted(one[0]["CUDA_VISIBLE_DEVICES"] for one in starts[:2]) == ["1", "2"]
    assert sorted(one[0]["CUDA_VISIBLE_DEVICES"] for one in starts[2:]) == ["1", "2"]
    for variables, arguments, _ in starts:
        assert variables["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.25"
        assert "--api-server-count=2" in arguments
    assert sorted(line for line in lines if re.fullmatch(r"complete [02-7]", line)) == [
        f"complete {seed}" for seed in (0, *range(2, 8))
    ]


def test_a_server_that_dies_while_it_samples_is_one_sentence(tmp_path):
    command = f"{COMMAND} --fault dies --after 3"
    with closing(tmp_path, f"sampler.executable={command}") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        sampler.complete(REQUESTS)
        with pytest.raises(SamplerLost, match=r"ended with status 1.*illegal memory access.*vllm\.log"):
            sampler.complete(REQUESTS)
        assert gone(tmp_path)


def test_the_weights_of_the_folder_are_a_hugging_face_model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, sampler = module_and_sampler(tmp_path, f"sampler.weights_folder={tmp_path}/weights")
    sampler._write(module.policy.weights())
    folder = sampler._folder.path
    assert folder.parent == tmp_path / "weights"
    for _ in range(2):
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == module.model.state_dict().keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in module.model.state_dict().items())
        del loaded
        update(module)
        sampler._write(module.policy.weights())
    assert AutoTokenizer.from_pretrained(folder)("12=").input_ids == module.policy.tokenizer("12=").input_ids
    sampler.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path):
    import resource

    module, sampler = module_and_sampler(tmp_path, f"sampler.weights_folder={tmp_path}")
    sampler._folder.make(1, lambda folder: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match=r"weights for the sampling server cannot be written.*weights_folder"):
            sampler._folder.fill(module.policy.weights())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sampler.close()


def test_a_server_of_its_own_keeps_its_weights_until_it_is_told(tmp_path):
    with closing(tmp_path, f"sampler.executable={COMMAND} --fault stale") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        update(module)
        with pytest.raises(SamplerLost, match="still from those of version 0"):
            sampler.publish(module.policy.weights, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
def test_weights_of_a_gpu_are_in_the_file_once_they_are_written(tmp_path, shared):
    folder = WeightsFolder(None if shared else tmp_path, tmp_path, torch.bfloat16)
    weights = {"large": torch.randn(8000, 5000, device="cuda"), "small": torch.randn(3, device="cuda")}
    weights["count"] = torch.arange(7, device="cuda")
    folder.make(2**27, lambda _: None)
    try:
        for _ in range(3):
            folder.fill(weights)
            found = load_file(folder.path / "model.safetensors")
            for name, tensor in weights.items():
                assert torch.equal(found[name], tensor.to(found[name].dtype).cpu())
                tensor.add_(1)
            assert (folder._known_at is not None) == shared
        if shared:
            content = folder._rooms["large"]
            assert content.is_pinned()
            assert not _lock_pages(content)  # a second time
            assert torch.ones(3, device="cuda").sum().item() == 3
    finally:
        folder.remove()

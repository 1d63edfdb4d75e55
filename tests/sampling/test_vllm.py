"""sampler=vllm with the small server of the tests: the start of servers, the requests to them, and
faults of their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
from builders.runs import SHORT, config_of, sampler_of
from builders.shared_servers import SharedServers, save_llama
from builders.vllm_servers import COMMAND, processes_of
from sampling.server_checks import (
    assert_log_probs_of_trainer,
    log_probs_by_transformers,
    update,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from pgtoolkit.assembly.build import build
from pgtoolkit.completion import Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.proof import check_batch
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.training.module import PolicyGradientModule

VLLM = ("sampler=vllm", f"sampler.executable={COMMAND}", "trainer.device=cpu")
REQUESTS = [Request([1, 2, 10], 3, seed=5), Request([3, 4, 5, 10], 2, seed=9)]


def module_and_sampler(
    run_dir: Path, *overrides: str
) -> tuple[PolicyGradientModule, ServerSampler]:
    module, loader = build(config_of(*SHORT, *VLLM, *overrides), run_dir=run_dir)
    return module, sampler_of(loader)


@contextlib.contextmanager
def open_sampler(
    run_dir: Path, *overrides: str
) -> Iterator[tuple[PolicyGradientModule, ServerSampler]]:
    """Yield a module and its sampler, which is closed after the block."""
    module, sampler = module_and_sampler(run_dir, *overrides)
    try:
        yield module, sampler
    finally:
        sampler.close()


@pytest.fixture(scope="module")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    folder = tmp_path_factory.mktemp("small")
    servers = SharedServers(
        folder, is_vllm=False, names=["first"], save=lambda path: save_llama(path, alphabet_size=40)
    )
    with contextlib.closing(servers):
        servers.start_all()
        yield servers


@pytest.fixture
def server(shared_servers: SharedServers) -> Iterator[SharedServers]:
    """Yield the servers without faults, and with an empty list of calls."""
    shared_servers.url("first")
    shared_servers.marks.write_text("")
    yield shared_servers
    shared_servers.set_fault(None)


def test_a_request_holds_all_settings_of_sampling(tmp_path):
    overrides = ("rollout.temperature=0.6", "rollout.top_p=0.9", "rollout.stop=['01']")
    with open_sampler(tmp_path, *overrides) as (module, sampler):
        _, body = Vllm().completions(Request([1, 2], 3, seed=77), sampler._ways[0], "salt")
    assert body == {
        "prompt": [1, 2],
        "n": 3,
        "seed": 77,
        "max_tokens": 4,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["01"],
        "stop_token_ids": [module.policy.tokenizer.eos_token_id],
        "ignore_eos": True,
        "logprobs": 12,  # sampler.keep_top is 32, but the model has no more tokens
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": "salt",
    }
    evaluated = dataclasses.replace(
        module.sampling, temperature=0.0, top_p=None, max_completion_length=9
    )
    sampler.sampling_otherwise(evaluated, lambda: None)
    sampling = sampler._ways[1]
    _, evaluation_body = Vllm().completions(Request([1, 2], 3, seed=77), sampling, "salt")
    assert evaluation_body == body | {
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 9,
        "logprobs": 0,
    }


def test_a_server_gives_the_likeliest_tokens_that_are_asked_for(server, tmp_path):
    """Beside a token that is not among them, too; a server that allows fewer refuses in its
    words, and one that pgtk starts allows as many as are asked for."""
    settings = ("rollout.temperature=1.7", "rollout.old_log_probs=sampling")
    with server.joined_sampler(tmp_path, *settings, "sampler.keep_top=3") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        completions = sampler.complete(REQUESTS)
        rows = log_probs_by_transformers(module, REQUESTS, completions)
        num_others = 0
        for completion, row in zip(completions, rows, strict=True):
            expected, ids = row.topk(3)
            assert torch.equal(completion.top_ids, ids.int())
            torch.testing.assert_close(completion.top_log_probs, expected, rtol=1e-4, atol=1e-4)
            num_others += int((completion.top_ids != completion.tokens[:, None]).all(1).sum())
        assert num_others > 0
        command = Vllm().command(
            sampler._settings, 0, False, tmp_path, sampler._plan, "localhost", 1
        )
        assert "--max-logprobs=4" in command
    with server.joined_sampler(tmp_path, *settings, "sampler.keep_top=34") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        with pytest.raises(SamplerLost, match="of 34, which is greater than max allowed: 33"):
            sampler.complete(REQUESTS)


def test_a_server_gives_the_tokens_that_truncated_sampling_keeps(server, tmp_path):
    """One more than sampler.keep_top is asked for, and tokens of no probability are left out. One
    that gives log-probs from before truncation names other tokens than these."""
    settings = ("rollout.temperature=1.7", "rollout.top_k=4", "rollout.top_p=0.9")
    with server.joined_sampler(tmp_path, *settings, "sampler.keep_top=5") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        completions = sampler.complete(REQUESTS)
        rows = log_probs_by_transformers(module, REQUESTS, completions)
        sizes = set()
        for completion, row in zip(completions, rows, strict=True):
            assert completion.top_ids.shape[1] == 6
            for ids, of_row in zip(completion.top_ids.tolist(), row, strict=True):
                kept = (of_row > -math.inf).nonzero()[:, 0].tolist()
                assert sorted(v for v in ids if v >= 0) == kept
                sizes.add(len(kept))
        assert sizes <= {1, 2, 3, 4}
        _, body = Vllm().completions(REQUESTS[0], sampler._ways[0], "salt")
        assert (body["top_k"], body["logprobs"]) == (4, 6)


def test_the_same_version_is_published_once(server, tmp_path):
    salts = []
    with server.joined_sampler(tmp_path) as (module, sampler):
        for version in (7, 7, 7, 8):
            sampler.publish(module.policy.weights, version)
            salts.append(sampler._salt)
    load = ["/collective_rpc reload_weights", "/reset_prefix_cache"]
    assert [line for line in server.noted_calls() if "complete" not in line] == [*load, *load]
    # Another salt, since prompts in the cache are of other weights.
    assert salts[0] == salts[1] == salts[2] != salts[3]


FAULTS = {
    "null_log_probs": r"its completions do not have the form of vLLM's \(",
    "no_json": r"its answer to /v1/completions is not JSON: <html>",
    "busy": r"answered /v1/completions with 503: .*busy.*/resume",
    "sends_on": r"answered /v1/completions with 302: Found\.",
    "trickles": r"did not answer /v1/completions within sampler.answer_seconds=1\.",
    "endless": r"its answer to /v1/completions has more than the \d{7} bytes that such an",
    "gzip": r"its answer to /v1/completions has more than the \d{7} bytes that such an",
    "breaks_off": r"cannot be reached, or breaks off its answers: .*IncompleteRead",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_is_refused_and_the_server_can_be_asked_again(
    server, tmp_path, monkeypatch, fault
):
    """test_vllm_servers.py has the faults that vLLM itself can be brought to."""
    monkeypatch.setattr("pgtoolkit.sampling.server_client._PATIENCE_SECONDS", 0.7)
    answer_seconds = 1 if fault == "trickles" else 3
    joined = server.joined_sampler(tmp_path, f"sampler.answer_seconds={answer_seconds}")
    with joined as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.set_fault(fault)
        server.marks.write_text("")
        with pytest.raises(SamplerLost, match=FAULTS[fault]) as error:
            sampler.complete(REQUESTS[:1])
        assert error.value.exit_status == 5
        num_calls = 2 if fault in ("breaks_off", "busy") else 1
        assert server.noted_calls() == ["complete 5"] * num_calls
        server.set_fault(None)
        patient = dataclasses.replace(sampler._settings, answer_seconds=60)
        sampler._settings = patient
        assert len(sampler.complete(REQUESTS)) == 5


ONE_UPDATE = "training accumulation.docs_per_step=16"


@pytest.mark.parametrize(
    ("fault", "old"),
    [
        *(("another_prompt", old) for old in ("training", "sampling", ONE_UPDATE)),
        ("ignores_temperature", "training"),
        ("nan_log_probs", "sampling"),
        ("unprocessed", ONE_UPDATE),
        ("zeros", "training"),
    ],
)
def test_a_batch_that_the_trainers_weights_would_not_write_is_not_trained(
    server, tmp_path, old, fault
):
    """Each answer by itself looks right. The second batch has the same weights as the first,
    so that no proof of a version comes first."""
    num_on_policy = {"training": 8, "sampling": 0, ONE_UPDATE: 16}
    settings = (*f"rollout.old_log_probs={old}".split(), "rollout.temperature=0.5")
    with contextlib.closing(server.rollouts_of(tmp_path, *settings)) as source:
        documents = [source.document(place) for place in range(source.batch_size)]
        assert source.batch_size == 16
        assert sum(document.on_policy for document in documents) == num_on_policy[old]
        if old == "training":
            for document in documents:
                if not document.on_policy:
                    difference = document.old_log_probs - document.sampling_log_probs
                    assert difference.abs().max() < 1e-4
        server.set_fault(fault)
        with pytest.raises(
            SamplerLost, match=r"differ from the trainer's by .* The batch is not trained"
        ) as error:
            source.document(source.batch_size)
    mean = re.search(
        r"by (\S+) on average and \S+ at most, and sampler.tolerance=0.01 allows", str(error.value)
    )
    assert not float(mean[1]) <= 0.3  # also if it is NaN


def test_with_top_p_log_probs_may_be_above_the_trainers_by_its_logarithm():
    """A server may renormalise over the kept tokens: with top_p=0.5 that adds up to log 2. Beyond
    it the tolerance counts."""
    trainer = -torch.arange(1.0, 5.0)
    above = torch.tensor([0.0, 0.3, 0.6, math.log(2)])
    check_batch(trainer + above, trainer, 1e-6, 0.5)
    check_batch(trainer + above + 5, trainer, 1e-6, 0)
    for difference, top_p, expected in (
        (above, 1, "0.4"),
        (above + 0.4, 0.5, "0.18"),
        (above - 0.4, 0.5, "0.12"),
        (above - 0.4, 0, "0.12"),
    ):
        with pytest.raises(SamplerLost, match=rf"by {expected} on average"):
            check_batch(trainer + difference, trainer, 1e-6, top_p)


def test_equal_completions_of_a_prompt_are_refused_unless_chance_explains_them(server, tmp_path):
    with server.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.set_fault("identical")
        with pytest.raises(
            SamplerLost,
            match=r"16 of 16 completions of a prompt are the same, whose log-prob is -\d+",
        ):
            sampler.complete([Request([1, 2, 10], 16, seed=5)])
        # Completions of one token may be equal by chance.
        sampler._ways.append(dataclasses.replace(sampler._ways[0], max_tokens=1))
        sampler.complete_in(1, [Request([1, 2, 10], 4, seed=5)], more=False)
        server.set_fault(None)
        sampler.complete_in(1, [Request([1, 2, 10], 64, seed=5)], more=False)


def test_a_server_that_is_busy_for_a_moment_is_asked_again(server, tmp_path):
    with server.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        server.set_fault("busy_for_a_moment")
        assert len(sampler.complete(REQUESTS)) == 5


def test_a_server_without_the_endpoints_for_weights_is_refused(server, tmp_path):
    server.set_fault("no_development_mode")
    message = r"answered /collective_rpc with 404: .*Start it with VLLM_SERVER_DEV_MODE=1"
    with (
        server.joined_sampler(tmp_path) as (module, sampler),
        pytest.raises(SamplerLost, match=message),
    ):
        sampler.publish(module.policy.weights, 0)


def test_another_program_at_the_address_of_a_server_is_refused(server, tmp_path):
    more = (f"sampler.urls=[{server.url('first')}/other]", "sampler.start_seconds=1")
    module, sampler = server.module_and_sampler(tmp_path, *more)
    message = (
        r"/other does not answer within sampler\.start_seconds=1\. It answers /health with 404\."
    )
    with contextlib.closing(sampler), pytest.raises(SamplerLost, match=message):
        sampler.publish(module.policy.weights, 0)


def test_old_weights_are_refused_though_log_probs_are_within_the_tolerance(server, tmp_path):
    """Their log-probs have not changed, to the last bit."""
    with server.joined_sampler(tmp_path, "sampler.tolerance=0.2") as (module, sampler):
        sampler.publish(module.policy.weights, 3)
        update(module, 2e-3)
        server.set_fault("stale")
        with pytest.raises(
            SamplerLost,
            match=r"still from those of version 3: its log-probs of a text have not changed",
        ):
            sampler.publish(module.policy.weights, 4)


def test_weights_that_another_run_gives_a_server_are_refused_before_any_training(server, tmp_path):
    with (
        server.joined_sampler(tmp_path / "first") as (module, sampler),
        server.joined_sampler(tmp_path / "other") as (other_module, other_sampler),
    ):
        sampler.publish(module.policy.weights, 0)
        assert len(sampler.complete(REQUESTS)) == 5
        update(other_module)
        other_sampler.publish(other_module.policy.weights, 0)
        with pytest.raises(
            SamplerLost,
            match=r"got other weights than those of version 0 .* by \d+\.\d+ on average",
        ):
            sampler.complete(REQUESTS)
        assert len(other_sampler.complete(REQUESTS)) == 5


def test_a_server_wakes_for_its_weights_before_its_cache(server, tmp_path):
    with server.joined_sampler(tmp_path) as (module, sampler):
        # As on a GPU that also trains.
        sampler._plan = dataclasses.replace(sampler._plan, sleeps=True)
        for version in (0, 0, 1):
            sampler.publish(module.policy.weights, version)
            sampler.complete(REQUESTS)
            update(module)
        sampler.publish(module.policy.weights, 2)
    load = ["/collective_rpc reload_weights", "/reset_prefix_cache"]
    wake = ["/wake_up?tags=weights", load[0], "/wake_up?tags=kv_cache", load[1]]
    sleep = ["/sleep?level=2"]
    calls = [line for line in server.noted_calls() if line[0] == "/"]
    assert calls == [*load, *sleep, *wake, *sleep, *wake, *sleep, *wake]


STARTS = {
    "does_not_start": r"ended with status 1\. Its last words: .*free memory on device.*vllm\.log",
    "no_path": (
        r"No module named 'pgtk_vllm_worker'.* pass PYTHONPATH on, or use "
        r"sampler\.arguments=\[--worker-ext"
    ),
    "model_refused": (
        r"does not yet support: stock torch\.compile .*\. Set "
        r"VLLM_USE_V2_MODEL_RUNNER=0 in the env"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", STARTS)
def test_a_server_that_does_not_start_is_reported_with_its_last_words(tmp_path, fault):
    more = (
        f"sampler.executable={'env -u PYTHONPATH ' if fault == 'no_path' else ''}{COMMAND} "
        f"--fault {fault}"
    )
    with (
        open_sampler(tmp_path, more) as (module, sampler),
        pytest.raises(SamplerLost, match=STARTS[fault]),
    ):
        sampler.publish(module.policy.weights, 0)
    assert processes_of(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--worker-extension-cls="], []])
def test_a_started_server_loads_from_memory_unless_the_user_chooses_the_extension(
    tmp_path, arguments
):
    """The log-probs are those of the trainer in both. A path of the program's own hides nothing."""
    more = (
        f"sampler.executable='env PYTHONPATH={tmp_path} {COMMAND} --marks {tmp_path}/marks'",
        f"sampler.arguments={arguments}",
    )
    with open_sampler(tmp_path, *more) as (module, sampler):
        for version in range(3):  # the third overwrites the second in place
            sampler.publish(module.policy.weights, version)
            assert_log_probs_of_trainer(module, REQUESTS, sampler.complete(REQUESTS))
            update(module)
    lines = (tmp_path / "marks").read_text().splitlines()
    calls = [line for line in lines if line.startswith("/collective_rpc")]
    assert calls == [f"/collective_rpc {'reload_weights' if arguments else 'load_from_memory'}"] * 3


def test_a_missing_program_is_refused_and_leaves_no_folder(tmp_path):
    with open_sampler(tmp_path, "sampler.executable=no-such-vllm") as (module, sampler):
        with pytest.raises(SamplerLost, match="there is no program no-such-vllm"):
            sampler.publish(module.policy.weights, 0)
        assert sampler._folder.path.exists()
    assert not sampler._folder.path.exists()


OTHERS = ({}, {"Authorization": "Bearer another"})
"""Headers that another user of the machine may send."""


@pytest.mark.slow
def test_a_server_is_started_with_the_options_and_variables_of_the_configuration(
    tmp_path, monkeypatch
):
    """It gets no variables of ranks, and the user's PYTHONPATH."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PYTHONPATH", "/of/ranks")
    monkeypatch.setenv("PGTK_PYTHONPATH", "/of/the/user")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    command = f"{COMMAND} --marks {tmp_path}/marks"
    overrides = (
        f"sampler.executable={command}",
        "sampler.gpus=[1,2]",
        "sampler.tensor_parallel=2",
        "sampler.arguments=['--enforce-eager']",
        "seed=3",
        "accumulation.max_tokens=20",
    )
    with open_sampler(tmp_path, *overrides) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        assert len(processes_of(tmp_path)) == 2
        folder = sampler._folder.path
        url = sampler._servers[0].url
        assert folder.stat().st_mode & 0o777 == 0o700
        answers = [
            requests.post(f"{url}/v1/completions", json={}, headers=headers, timeout=5)
            for headers in OTHERS
        ]
        assert [answer.status_code for answer in answers] == [401, 401]
    assert processes_of(tmp_path) == []
    assert not folder.exists()
    lines = (tmp_path / "marks").read_text().splitlines()
    starts = [json.loads(line[6:]) for line in lines if line.startswith("start")]
    [(variables, arguments, python_path)] = starts
    key = variables.pop("VLLM_API_KEY")
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert not any(key in file.read_text() for file in tmp_path.glob("vllm*.log"))
    assert key not in " ".join(arguments)
    assert variables == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "CUDA_VISIBLE_DEVICES": "5,GPU-6",
        "RANK": None,
    }
    assert python_path == f"/of/the/user:{Vllm.MODULES}"
    assert arguments[arguments.index("serve") + 1] == str(folder)
    options = (
        "--dtype float32 --logprobs-mode processed_logprobs --max-model-len 20 "
        "--generation-config vllm --seed 3"
    )
    assert {*options.split(), "--skip-tokenizer-init", "--enforce-eager"} <= {*arguments}
    assert "--enable-sleep-mode" not in arguments


@pytest.mark.slow
def test_servers_of_one_gpu_start_one_after_the_other(tmp_path, monkeypatch):
    """A server of vLLM counts all memory that is taken while it measures its need. Here a server is
    up once that of the other GPU has started, too. A variable that the user has set keeps its
    value."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    overrides = (
        f"sampler.executable={COMMAND} --marks {tmp_path}/marks --together 2",
        "sampler.gpus=[1,2]",
        "sampler.servers_per_gpu=2",
    )
    with open_sampler(tmp_path, *overrides) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        seeds = range(8)
        completions = sampler.complete([Request([1, 2, 10], 1, seed=seed) for seed in seeds])
        assert len(completions) == 8
        assert len(sampler._servers) == 4
    lines = (tmp_path / "marks").read_text().splitlines()
    kinds = [line.split()[0] for line in lines if line.split()[0] in ("start", "up")]
    assert kinds == ["start", "start", "up", "up"] * 2
    environments = [json.loads(line[6:])[0] for line in lines if line.startswith("start")]
    gpus = [environment["CUDA_VISIBLE_DEVICES"] for environment in environments]
    assert [sorted(gpus[:2]), sorted(gpus[2:])] == [["1", "2"]] * 2
    runners = {environment["VLLM_USE_V2_MODEL_RUNNER"] for environment in environments}
    assert runners == {"0"}
    assert {f"complete {seed}" for seed in seeds} <= {*lines}


def test_the_weights_of_the_folder_are_a_hugging_face_model(tmp_path):
    module, sampler = module_and_sampler(tmp_path, f"sampler.weights_folder={tmp_path}/weights")
    sampler._folder.write(module.policy.weights(), sampler._layout, sampler._write_settings)
    folder = sampler._folder.path
    assert folder.parent == tmp_path / "weights"
    for _ in range(2):
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == module.model.state_dict().keys()
        assert all(
            torch.equal(loaded[name], weight) for name, weight in module.model.state_dict().items()
        )
        del loaded
        update(module)
        sampler._folder.write(module.policy.weights(), sampler._layout, sampler._write_settings)
    assert (
        AutoTokenizer.from_pretrained(folder)("12=").input_ids
        == module.policy.tokenizer("12=").input_ids
    )
    sampler.close()
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_folder_of_a_policy_with_adapters_is_a_model_without_any(tmp_path, tied):
    """transformers, like a server, loads a model that computes what is trained."""
    model = save_llama(tmp_path / "model", tie_word_embeddings=tied)
    lora = ("model=huggingface", f"model.path={model}", "model.dtype=float32", "model.lora_rank=3")
    short = (setting for setting in SHORT if not setting.startswith("model."))
    config = config_of(*short, *VLLM, *lora, f"sampler.weights_folder={tmp_path}/weights")
    module, loader = build(config, run_dir=tmp_path)
    sampler = sampler_of(loader)
    with contextlib.closing(sampler):
        update(module)
        sampler._folder.write(module.policy.weights(), sampler._layout, sampler._write_settings)
        assert not (sampler._folder.path / "adapter_config.json").exists()
        loaded, report = AutoModelForCausalLM.from_pretrained(
            sampler._folder.path, output_loading_info=True
        )
        assert not {*report["missing_keys"], *report["unexpected_keys"]}
        text = torch.tensor([[1, 2, 3, 10]])
        actual = loaded(text).logits
        expected = module.policy.model(text).logits
        base = AutoModelForCausalLM.from_pretrained(model)(text).logits
    assert (actual - expected).abs().max() < 1e-5
    assert (actual - base).abs().max() > 0.01

"""Sampling by servers: the same tests for vLLM itself and for the small server of the tests, whose
log-probs are compared with those of transformers.

The tests with vLLM need a CUDA device and vLLM 0.24, `vllm` on the PATH or the command in
PGTOOLKIT_VLLM. They take about three minutes, half of them for the start of the servers. The order
of the tests matters: they share servers, and the last ones end them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders.shared_servers import (
    END_TOKENS,
    MAX_TOKENS,
    SERVER_ARGUMENTS,
    SharedServers,
    save_llama,
)
from builders.vllm_servers import all_ended
from sampling.server_checks import (
    WRONG_REQUESTS,
    WRONG_WEIGHTS,
    assert_log_probs_of_trainer,
    log_probs_by_transformers,
    share_of_equal,
    update,
    write_wrong_weights,
    wrong_requests,
)

from pgtoolkit.completion import Completion, Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm

PROMPTS = [[(7 * i + i * j * j) % 10 for j in range(40)] + [10] for i in range(10)]
"""Prompts of several blocks of a server's cache."""
REQUESTS = [Request(prompt, 2 + i % 3, seed=1000 + 97 * i) for i, prompt in enumerate(PROMPTS)]
VLLM = pytest.param("vllm", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow), VLLM])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    is_vllm = request.param == "vllm"
    names = [*SERVER_ARGUMENTS] if is_vllm else ["first", "raw"]
    shared = SharedServers(tmp_path_factory.mktemp(request.param), is_vllm, names)
    with contextlib.closing(shared):
        if is_vllm:
            endless = (
                "task.num_digits=4",
                "trainer.max_steps=1000000",
                "trainer.checkpoint_every=100000",
            )
            for name in ("interrupted", "killed"):
                shared.begin_run(name, *endless)
        shared.start_all()
        yield shared


of_vllm = pytest.mark.parametrize("servers", [VLLM], indirect=True)
quick = pytest.mark.parametrize("servers", ["small", VLLM], indirect=True)  # not slow


@of_vllm
@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_a_run_that_is_ended_leaves_no_server(servers, end):
    run = servers.runs[end]
    run.wait_for_steps(3)
    processes = run.server_processes()
    weights = run.weights()
    assert len(processes) >= 3  # the guard, the server and its engine
    assert str(weights).startswith("/dev/shm/")
    assert weights.exists()
    if end == "killed":
        run.kill()
    else:
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 75, run.log.read_text()[-2000:]
    assert all_ended(processes, 30 if end == "killed" else 1)
    assert not weights.exists()


@of_vllm
def test_an_unknown_argument_is_reported_with_the_last_words_of_vllm(servers):
    error = servers.error("refused")
    assert isinstance(error, SamplerLost)
    assert "ended with status 2. Its last words: " in str(error)
    assert "unrecognized arguments: --no-such-option" in str(error)


@pytest.mark.parametrize(
    "overrides",
    [(), ("rollout.temperature=0.6",), ("rollout.temperature=0.7", "rollout.top_p=0.5")],
    ids=["plain", "temperature", "temperature and top_p"],
)
def test_completions_have_the_log_probs_of_the_weights_published_last(servers, tmp_path, overrides):
    """The prompts are the same for each version, so that a server has them in its cache."""
    with servers.joined_sampler(tmp_path, *overrides) as (module, sampler):
        ends = sampler._ways[0].ends
        assert ends == END_TOKENS
        for version in (0, 3, 4):
            sampler.publish(module.policy.weights, version)
            completions = sampler.complete(REQUESTS)
            assert_log_probs_of_trainer(module, REQUESTS, completions)
            for completion in completions:
                tokens = completion.tokens.tolist()
                assert not set(tokens[:-1]) & set(ends)
                assert completion.finish_reason == ("stop" if tokens[-1] in ends else "length")
                assert tokens[-1] in ends or len(tokens) == MAX_TOKENS
                assert completion.model_version == version
            assert len({tuple(completion.tokens.tolist()) for completion in completions}) > 5
            if not overrides:
                last_tokens = {completion.tokens[-1].item() for completion in completions}
                assert last_tokens >= set(ends)
            update(module)


@of_vllm
def test_a_model_in_float32_passes_the_proof_of_its_weights(servers, tmp_path):
    joined = servers.joined_sampler(tmp_path, "model.dtype=float32", names=("float32",))
    with joined as (module, sampler):
        for version in range(2):
            sampler.publish(module.policy.weights, version)
            assert_log_probs_of_trainer(module, REQUESTS, sampler.complete(REQUESTS))
            update(module)


def test_a_seed_makes_the_same_completions_again(servers, tmp_path):
    """vLLM promises it only for the same computation: another batch is rounded differently."""
    other_seeds = [dataclasses.replace(request, seed=request.seed + 5) for request in REQUESTS]
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)

        def complete_one_by_one() -> list[Completion]:
            lists = [sampler.complete([request]) for request in REQUESTS]
            return [completion for completions in lists for completion in completions]

        first = complete_one_by_one()
        second = complete_one_by_one()
        together = sampler.complete(REQUESTS)
        others = sampler.complete(other_seeds)
    least = 0.85 if servers.is_vllm else 0.999
    assert share_of_equal(first, second) > least
    assert share_of_equal(first, together) > least
    assert share_of_equal(first, others) < 0.5


def test_without_seeds_completions_differ(servers, tmp_path):
    with servers.joined_sampler(tmp_path, "sampler.seeded=false") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        assert share_of_equal(sampler.complete(REQUESTS), sampler.complete(REQUESTS)) < 0.5


def test_completions_end_with_the_token_that_completes_a_stop_string(servers, tmp_path):
    with servers.joined_sampler(tmp_path / "without", names=("raw",)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        completions = sampler.complete(REQUESTS)
    counts = torch.cat([completion.tokens[1:] for completion in completions]).bincount()
    counts[sampler._ways[0].ends] = 0
    decode = module.policy.tokenizer.decode
    stops = [decode(counts.argmax()), "01"]
    overrides = f"rollout.stop={json.dumps(stops)}"
    with servers.joined_sampler(tmp_path / "with", overrides, names=("raw",)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        if not servers.is_vllm:
            # Some decoders give the text of a token only with the next token.
            servers.set_fault("late_stop", server="raw")
        completions = sampler.complete(REQUESTS)
        if not servers.is_vllm:
            servers.set_fault(None, server="raw")
        assert_log_probs_of_trainer(module, REQUESTS, completions)
    num_stopped = 0
    for completion in completions:
        before = decode(completion.tokens[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in stops)
        text = decode(completion.tokens, skip_special_tokens=True)
        if any(stop in text for stop in stops):
            num_stopped += 1
            assert completion.finish_reason == "stop"
    assert num_stopped >= 3


def test_at_temperature_0_an_evaluation_takes_the_likeliest_tokens(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        rollout = dataclasses.replace(module.sampling, temperature=0.0, max_completion_length=3)
        greedy = sampler.sampling_otherwise(rollout, lambda: None)
        greedy.publish(module.policy.weights, 0)
        # At temperature 0 vLLM refuses to write several completions.
        single = [dataclasses.replace(request, completions=1) for request in REQUESTS]
        completions = greedy.complete(single)
        rows = log_probs_by_transformers(module, single, completions)
        for row, completion in zip(rows, completions, strict=True):
            assert len(completion.tokens) == 3 or completion.finish_reason == "stop"
            chosen = row.gather(-1, completion.tokens[:, None])[:, 0]
            assert (row.max(-1).values - chosen).max() < 0.1


def test_two_servers_share_the_requests_and_get_the_same_weights(servers, tmp_path):
    with servers.joined_sampler(tmp_path, names=("first", "raw")) as (module, sampler):
        for version in range(2):
            sampler.publish(module.policy.weights, version)
            assert_log_probs_of_trainer(module, REQUESTS, sampler.complete(REQUESTS))
            update(module)
        with servers.stopped_engine("raw"):  # this server has half of the requests
            # Without urls there is no later check of joined servers, which would notice it too.
            impatient = dataclasses.replace(sampler._settings, answer_seconds=2, urls=[])
            sampler._settings = impatient
            sampler._servers[1]._answer_seconds = 2
            with pytest.raises(SamplerLost, match=f"{servers.url('raw')} did not answer"):
                sampler.complete(REQUESTS[:6])


@quick
def test_log_probs_without_the_temperature_are_refused(servers, tmp_path):
    source = servers.rollouts_of(tmp_path, "rollout.temperature=0.7", server="raw")
    with (
        contextlib.closing(source),
        pytest.raises(SamplerLost, match="--logprobs-mode processed_logprobs"),
    ):
        source.document(0)


def test_weights_that_did_not_change_are_accepted(servers, tmp_path):
    with servers.joined_sampler(tmp_path, "rollout.top_p=0.5") as (module, sampler):
        for version in range(3):
            sampler.publish(module.policy.weights, version)


@quick
def test_completions_from_an_old_prefix_cache_are_refused(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(ServerSampler, "_salt", "always the same")
    monkeypatch.setattr(Vllm, "forget", lambda self: ("/resume", None))
    source = servers.rollouts_of(tmp_path)
    with contextlib.closing(source):
        source.sampler.publish(source.trained.policy.weights, 0)
        prompts = source.task.encode([source.task.prompt(number) for number in range(4)])
        source.sampler.complete([Request(tokens, 1, seed=1) for tokens in prompts])
        update(source.trained, 0.1)
        source.trained.num_updates = 1
        with pytest.raises(
            SamplerLost, match=r"an old prefix cache, or .* The batch is not trained"
        ):
            source.document(0)


@pytest.mark.parametrize("kind", WRONG_WEIGHTS)
@quick
def test_a_server_with_wrong_weights_is_refused_until_it_has_new_ones(
    servers, tmp_path, monkeypatch, kind
):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        update(module, 0.1)
        write_wrong_weights(monkeypatch, kind)
        with pytest.raises(
            SamplerLost, match="does not sample from the weights of version 1"
        ) as error:
            sampler.publish(module.policy.weights, 1)
        print(error.value)
        monkeypatch.undo()
        sampler.publish(module.policy.weights, 2)
        assert_log_probs_of_trainer(module, REQUESTS[:3], sampler.complete(REQUESTS[:3]))


@quick
def test_an_answer_that_does_not_fit_the_request_is_refused(servers, tmp_path):
    num_completions = sum(request.completions for request in REQUESTS)
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        for body_changes, setting_changes, message in WRONG_REQUESTS.values():
            with (
                wrong_requests(sampler, body_changes, setting_changes) as way,
                pytest.raises(SamplerLost, match=message) as error,
            ):
                sampler.complete_in(way, REQUESTS, more=False)
            print(error.value)
            assert len(sampler.complete(REQUESTS)) == num_completions


def test_a_server_that_pauses_for_a_moment_is_waited_for(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        with ThreadPoolExecutor() as pool:
            with servers.paused_server("first"):
                waiting = pool.submit(sampler.complete, REQUESTS)
                time.sleep(2)
                assert not waiting.done()
            assert_log_probs_of_trainer(module, REQUESTS, waiting.result())


@pytest.mark.parametrize("halt", [SharedServers.paused_server, SharedServers.stopped_engine])
def test_a_server_that_does_not_answer_in_time_is_lost_and_can_be_asked_again(
    servers, tmp_path, halt
):
    with servers.joined_sampler(tmp_path, "sampler.answer_seconds=3") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        message = r"did not answer /v1/completions within sampler.answer_seconds=3\."
        with halt(servers, "first"), pytest.raises(SamplerLost, match=message):
            # The small server accepts no more connections than these at a time.
            sampler.complete(REQUESTS[:3])
        assert_log_probs_of_trainer(module, REQUESTS, sampler.complete(REQUESTS))


def test_a_server_sleeps_between_batches(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        # As on a GPU that it shares with the trainer.
        sampler._plan = dataclasses.replace(sampler._plan, sleeps=True)
        for version in (0, 0, 1, 2):
            if version:
                update(module)
            sampler.publish(module.policy.weights, version)
            awake = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
            completions = sampler.complete(REQUESTS)
            if awake is not None:
                assert torch.cuda.mem_get_info()[0] - awake > 0.9 * 2**30  # its cache
            assert_log_probs_of_trainer(module, REQUESTS, completions)
        sampler.publish(module.policy.weights, 2)  # wakes it for the next test


MISMATCH = r"answered /collective_rpc with 500|does not sample from the weights of version 0"


@pytest.mark.parametrize("other", [{"num_hidden_layers": 3}, {"alphabet_size": 20}], ids=str)
def test_a_server_of_another_model_is_refused(servers, tmp_path, other):
    folder = save_llama(tmp_path / "other", **other)
    joined = servers.joined_sampler(tmp_path, f"model.path={folder}", names=("raw",))
    with joined as (module, sampler):
        with pytest.raises(SamplerLost, match=MISMATCH) as error:
            sampler.publish(module.policy.weights, 0)
        print(error.value)


def test_a_server_that_is_killed_while_it_samples_is_lost_and_leaves_nothing(servers):
    _, sampler = servers.samplers["first"]
    processes = servers.processes("first")
    folder = sampler._folder.path
    assert folder.exists()
    with servers.stopped_engine("first"):  # so that its requests are not answered before
        threading.Timer(1, servers.engine("first").kill).start()
        with pytest.raises(SamplerLost, match=r"Its last words: .*vllm\.log") as error:
            sampler.complete(REQUESTS)
    print(error.value)
    sampler.close()
    assert all_ended(processes, 1)
    assert not folder.exists()


def test_nothing_is_left_of_servers_that_are_closed(servers):
    names = ("raw", "float32") if servers.is_vllm else ("raw",)
    processes = [process for name in names for process in servers.processes(name)]
    folders = [sampler._folder.path for _, sampler in servers.samplers.values()]
    servers.close()
    assert all_ended(processes, 1)
    assert not any(folder.exists() for folder in folders)
    if servers.free_memory is not None:
        torch.cuda.empty_cache()
        deadline = time.monotonic() + 10  # the driver takes a moment
        while (
            torch.cuda.mem_get_info()[0] < servers.free_memory - 2**30
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
        assert torch.cuda.mem_get_info()[0] > servers.free_memory - 2**30

"""What vLLM itself and the tests' small server have in common: the same tests against both.

Those of vLLM need a CUDA device and vLLM 0.24, `vllm` on the PATH or how it is called in
PGTOOLKIT_VLLM, and take about three minutes, half of them for the servers' start. The tests stand
in the order in which the servers can bear them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import threading
import time
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
    ARRIVING,
    ASKED,
    assert_trained,
    otherwise,
    share_of_equal,
    spoil,
    trained,
    update,
)

from pgtoolkit.completion import Request
from pgtoolkit.errors import SamplerLost
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm

# of several blocks of a cache
PROMPTS = [[(7 * i + i * j * j) % 10 for j in range(40)] + [10] for i in range(10)]
REQUESTS = [Request(prompt, 2 + i % 3, seed=1000 + 97 * i) for i, prompt in enumerate(PROMPTS)]
VLLM = pytest.param("vllm", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=[pytest.param("small", marks=pytest.mark.slow), VLLM])
def servers(request, tmp_path_factory):
    folder, is_vllm = tmp_path_factory.mktemp(request.param), request.param == "vllm"
    with contextlib.closing(
        SharedServers(folder, is_vllm, [*SERVER_ARGUMENTS] if is_vllm else ["first", "raw"])
    ) as found:
        if is_vllm:
            endless = (
                "task.num_digits=4",
                "trainer.max_steps=1000000",
                "trainer.checkpoint_every=100000",
            )
            for name in ("interrupted", "killed"):
                found.begin_run(name, *endless)
        found.start_all()
        yield found


of_vllm = pytest.mark.parametrize("servers", [VLLM], indirect=True)
quick = pytest.mark.parametrize("servers", ["small", VLLM], indirect=True)  # not slow


@of_vllm
@pytest.mark.parametrize("end", ["interrupted", "killed"])
def test_a_run_that_is_ended_leaves_no_server(servers, end):
    run = servers.runs[end]
    run.wait_for_steps(3)
    server, weights = run.server_processes(), run.weights()
    assert len(server) >= 3  # the guard, the server and its engine
    assert str(weights).startswith("/dev/shm/")
    assert weights.exists()
    if end == "killed":
        run.kill()
    else:
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 75, run.log.read_text()[-2000:]
    assert all_ended(server, 30 if end == "killed" else 1)
    assert not weights.exists()


@of_vllm
def test_an_argument_that_it_does_not_know_is_one_sentence(servers):
    error = servers.error("refused")
    assert isinstance(error, SamplerLost)
    assert "ended with status 2. Its last words: " in str(error)
    assert "unrecognized arguments: --no-such-option" in str(error)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"temperature": 0.7, "top_p": 0.5}], ids=str
)
def test_completions_have_the_log_probs_of_the_weights_published_last(servers, tmp_path, how):
    """Of the same prompts before and after, which a server has in its cache."""
    with servers.joined_sampler(
        tmp_path, *(f"rollout.{key}={value}" for key, value in how.items())
    ) as (
        module,
        sampler,
    ):
        ends = sampler._ways[0].ends
        assert ends == END_TOKENS
        for version in (0, 3, 4):
            sampler.publish(module.policy.weights, version)
            completions = sampler.complete(REQUESTS)
            assert_trained(module, REQUESTS, completions)
            for one in completions:
                tokens = one.tokens.tolist()
                assert not {*tokens[:-1]} & {*ends}
                assert one.finish_reason == ("stop" if tokens[-1] in ends else "length")
                assert tokens[-1] in ends or len(tokens) == MAX_TOKENS
                assert one.model_version == version
            assert len({tuple(one.tokens.tolist()) for one in completions}) > 5
            if not how:
                assert {one.tokens[-1].item() for one in completions} >= {*ends}
            update(module)


@of_vllm
def test_a_model_in_float32_is_proved_too(servers, tmp_path):
    with servers.joined_sampler(tmp_path, "model.dtype=float32", names=("float32",)) as (
        module,
        sampler,
    ):
        for version in range(2):
            sampler.publish(module.policy.weights, version)
            assert_trained(module, REQUESTS, sampler.complete(REQUESTS))
            update(module)


def test_a_seed_makes_the_same_completions_again(servers, tmp_path):
    """To vLLM's promise, which is for the same computation alone: another batch rounds
    otherwise."""
    later = [dataclasses.replace(one, seed=one.seed + 5) for one in REQUESTS]
    with servers.joined_sampler(tmp_path / "seeds") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        first, again = ([sampler.complete([one]) for one in REQUESTS] for _ in range(2))
        together, others = sampler.complete(REQUESTS), sampler.complete(later)
    first, again = ([made for several in found for made in several] for found in (first, again))
    assert share_of_equal(first, again) > (0.85 if servers.is_vllm else 0.999)
    assert share_of_equal(first, together) > (0.85 if servers.is_vllm else 0.999)
    assert share_of_equal(first, others) < 0.5
    with servers.joined_sampler(tmp_path / "none", "sampler.seeded=false") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        assert share_of_equal(sampler.complete(REQUESTS), sampler.complete(REQUESTS)) < 0.5


def test_completions_end_with_the_token_that_completes_a_stop_string(servers, tmp_path):
    with servers.joined_sampler(tmp_path / "without", names=("raw",)) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        counts = torch.cat([one.tokens[1:] for one in sampler.complete(REQUESTS)]).bincount()
    decode = module.policy.tokenizer.decode
    counts[sampler._ways[0].ends] = 0
    stops = [decode(counts.argmax()), "01"]
    with servers.joined_sampler(
        tmp_path / "with", f"rollout.stop={json.dumps(stops)}", names=("raw",)
    ) as (
        module,
        sampler,
    ):
        sampler.publish(module.policy.weights, 0)
        if not servers.is_vllm:
            # some decoders give a token's text only with the next one
            servers.set_fault("late_stop", server="raw")
        completions = sampler.complete(REQUESTS)
        if not servers.is_vllm:
            servers.set_fault(None, server="raw")
        assert_trained(module, REQUESTS, completions)
    texts = [decode(one.tokens, skip_special_tokens=True) for one in completions]
    by_text = [any(stop in text for stop in stops) for text in texts]
    assert sum(by_text) >= 3
    for one, stopped in zip(completions, by_text, strict=True):
        before = decode(one.tokens[:-1], skip_special_tokens=True)
        assert not any(stop in before for stop in stops)
        assert not stopped or one.finish_reason == "stop"


def test_an_evaluation_takes_the_likeliest_tokens(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        rollout = dataclasses.replace(
            module.config.rollout, temperature=0.0, max_completion_length=3
        )
        greedy = sampler.sampling_otherwise(rollout, lambda: None)
        greedy.publish(module.policy.weights, 0)
        # vLLM makes no more of the likeliest
        single = [dataclasses.replace(one, completions=1) for one in REQUESTS]
        completions = greedy.complete(single)
        for row, made in zip(trained(module, single, completions), completions, strict=True):
            assert len(made.tokens) == 3 or made.finish_reason == "stop"
            assert (row.max(-1).values - row.gather(-1, made.tokens[:, None])[:, 0]).max() < 0.1


def test_two_servers_share_the_requests_and_get_the_same_weights(servers, tmp_path):
    with servers.joined_sampler(tmp_path, names=("first", "raw")) as (module, sampler):
        for version in range(2):
            sampler.publish(module.policy.weights, version)
            assert_trained(module, REQUESTS, sampler.complete(REQUESTS))
            update(module)
        with servers.stopped_engine("raw"):  # which has half of them
            # The check afterwards, of servers that were joined, would see it, too: there are none.
            impatient = dataclasses.replace(sampler._config.sampler, answer_seconds=2, urls=[])
            sampler._config = dataclasses.replace(sampler._config, sampler=impatient)
            sampler._servers[1]._answer_seconds = 2
            with pytest.raises(SamplerLost, match=f"{servers.url('raw')} did not answer"):
                sampler.complete(REQUESTS[:6])


@quick
def test_log_probs_from_before_the_temperature_are_an_error(servers, tmp_path):
    source = servers.rollouts_of(tmp_path, "rollout.temperature=0.7", server="raw")
    with (
        contextlib.closing(source),
        pytest.raises(SamplerLost, match="--logprobs-mode processed_logprobs"),
    ):
        source.document(0)


def test_weights_that_did_not_change_are_no_fault(servers, tmp_path):
    with servers.joined_sampler(tmp_path, "rollout.top_p=0.5") as (module, sampler):
        for version in range(3):
            sampler.publish(module.policy.weights, version)


@quick
def test_an_old_prefix_cache_is_an_error(servers, tmp_path, monkeypatch):
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


@pytest.mark.parametrize("fault", ARRIVING)
@quick
def test_a_version_that_did_not_arrive_is_an_error(servers, tmp_path, monkeypatch, fault):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        update(module, 0.1)
        spoil(monkeypatch, fault)
        with pytest.raises(
            SamplerLost, match="does not sample from the weights of version 1"
        ) as caught:
            sampler.publish(module.policy.weights, 1)
        print(caught.value)
        monkeypatch.undo()
        sampler.publish(module.policy.weights, 2)
        assert_trained(module, REQUESTS[:3], sampler.complete(REQUESTS[:3]))


@pytest.mark.parametrize("fault", ASKED)
@quick
def test_what_was_not_asked_for_is_one_sentence(servers, tmp_path, fault):
    asked, expected, said = ASKED[fault]
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        with (
            otherwise(sampler, asked, expected) as way,
            pytest.raises(SamplerLost, match=said) as caught,
        ):
            sampler.complete_in(way, REQUESTS, more=False)
        print(caught.value)
        assert len(sampler.complete(REQUESTS)) == sum(one.completions for one in REQUESTS)


def test_a_server_that_is_paused_for_a_moment_is_waited_for(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        with ThreadPoolExecutor() as pool:
            with servers.paused_server("first"):
                waiting = pool.submit(sampler.complete, REQUESTS)
                time.sleep(2)
                assert not waiting.done()
            assert_trained(module, REQUESTS, waiting.result())


@pytest.mark.parametrize("halted", [SharedServers.paused_server, SharedServers.stopped_engine])
def test_a_server_that_does_not_answer_is_one_sentence(servers, tmp_path, halted):
    with servers.joined_sampler(tmp_path, "sampler.answer_seconds=3") as (module, sampler):
        sampler.publish(module.policy.weights, 0)
        said = r"did not answer /v1/completions within sampler.answer_seconds=3\."
        with halted(servers, "first"), pytest.raises(SamplerLost, match=said):
            # more connections than that wait for the small server's attention
            sampler.complete(REQUESTS[:3])
        assert_trained(module, REQUESTS, sampler.complete(REQUESTS))  # it can be asked again


def test_a_server_sleeps_between_batches(servers, tmp_path):
    with servers.joined_sampler(tmp_path) as (module, sampler):
        # as on a GPU that it shares
        sampler._plan = dataclasses.replace(sampler._plan, sleeps=True)
        for version in (0, 0, 1, 2):
            if version:
                update(module)
            sampler.publish(module.policy.weights, version)
            awake = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
            completions = sampler.complete(REQUESTS)
            if awake is not None:
                assert torch.cuda.mem_get_info()[0] - awake > 0.9 * 2**30  # its cache
            assert_trained(module, REQUESTS, completions)
        sampler.publish(module.policy.weights, 2)  # awake for the next test


SAID_OF_ANOTHER = r"answered /collective_rpc with 500|does not sample from the weights of version 0"


@pytest.mark.parametrize("other", [{"num_hidden_layers": 3}, {"alphabet_size": 20}], ids=str)
def test_another_model_than_the_trainers_is_one_sentence(servers, tmp_path, other):
    folder = save_llama(tmp_path / "other", **other)
    with servers.joined_sampler(tmp_path, f"model.path={folder}", names=("raw",)) as (
        module,
        sampler,
    ):
        with pytest.raises(SamplerLost, match=SAID_OF_ANOTHER) as caught:
            sampler.publish(module.policy.weights, 0)
        print(caught.value)


def test_a_server_that_is_killed_while_it_samples_is_one_sentence(servers):
    _, sampler = servers.samplers["first"]
    everything, folder = servers.processes("first"), sampler._folder.path
    assert folder.exists()
    with servers.stopped_engine("first"):  # so that it has requests
        threading.Timer(1, servers.engine("first").kill).start()
        with pytest.raises(SamplerLost, match=r"Its last words: .*vllm\.log") as caught:
            sampler.complete(REQUESTS)
    print(caught.value)
    sampler.close()
    assert all_ended(everything, 1)
    assert not folder.exists()


def test_nothing_is_left_of_servers_that_are_closed(servers):
    everything = [
        *servers.processes("raw"),
        *(servers.processes("float32") if servers.is_vllm else []),
    ]
    folders = [sampler._folder.path for _, sampler in servers.samplers.values()]
    servers.close()
    assert all_ended(everything, 1)
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

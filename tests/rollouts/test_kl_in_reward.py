"""A distance from the reference that is taken off the rewards: kl.place=reward."""

import itertools
import math

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.runs import SHORT, config_of, metrics_of, module_and_loader, run, with_model

from pgtoolkit.batch import Document
from pgtoolkit.config.validate import validate
from pgtoolkit.kl import KL
from pgtoolkit.losses.reference_terms import OF_TOKEN
from pgtoolkit.rollouts.group_rollouts import has_signal

IN_REWARD = ("kl=k1", "kl.coefficient=0.3", "kl.place=reward")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a policy, and of another model as its reference."""
    folder = tmp_path_factory.mktemp("models")
    return [save_with_tokenizer(small_llama(seed), folder / str(seed)) for seed in (0, 3)]


def first_batch(*overrides):
    """The first batch of rollouts, and the module that has sampled it."""
    module, loader = module_and_loader(*overrides)
    return [loader.source.document(place) for place in range(loader.source.batch_size)], module


@torch.no_grad()
def log_probs(model, document):
    """Of the trained tokens, by the model's own logits."""
    rows = model(document.tokens[None]).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, document.tokens[1:, None])[document.loss_mask[1:], 0].tolist()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_advantages_are_made_of_rewards_less_the_distance(models, kind):
    """By loops, of the models' own logits; the rewards themselves stay."""
    path, reference_path = models
    settings = with_model(
        path,
        f"kl={kind}",
        "kl.coefficient=0.3",
        f"kl.reference={reference_path}",
        "advantage=dr_grpo",
    )
    plain, _ = first_batch(*settings)
    documents, module = first_batch(*settings, "kl.place=reward")
    assert module.loss.kl is None
    rewards = []
    for document, without in zip(documents, plain, strict=True):
        assert torch.equal(document.tokens, without.tokens)
        assert document.reward == without.reward
        assert without.kl_reward is None
        old = log_probs(module.policy.model, document)
        ref = log_probs(module.reference.model, document)
        terms = [OF_TOKEN[kind](o, o, f)[0] for o, f in zip(old, ref, strict=True)]
        assert document.kl_reward == pytest.approx(-0.3 * math.fsum(terms), rel=1e-3, abs=1e-4)
        assert document.ref_log_probs.tolist() == pytest.approx(ref, abs=1e-4)
        rewards.append(document.reward - 0.3 * math.fsum(terms))
    assert max(abs(document.kl_reward) for document in documents) > 0.01
    for place, document in enumerate(documents):
        group = rewards[place // 4 * 4 :][:4]
        expected = [rewards[place] - math.fsum(group) / 4] * document.num_trained
        assert document.advantages.tolist() == pytest.approx(expected, abs=1e-3)


def verls_kl_penalty(log_prob, ref_log_prob, kind):
    """Return the estimates of verl's `kl_penalty_forward` for kl_penalty=kl, mse and low_var_kl.

    Written anew after verl/trainer/ppo/core_algos.py at b178a3c; `apply_kl_penalty` takes beta
    times their masked sum off the scores of a completion.
    """
    if kind == "kl":
        return log_prob - ref_log_prob
    if kind == "mse":
        return 0.5 * (log_prob - ref_log_prob) ** 2
    difference = torch.clamp(ref_log_prob - log_prob, -20, 20)
    return torch.clamp(torch.exp(difference) - difference - 1, -10, 10)


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_the_distance_is_verls(ours, theirs):
    """Where low_var_kl stays below 10, at which verl cuts it off."""
    random = torch.Generator().manual_seed(0)
    old, ref = (-4 * torch.rand(200, generator=random, dtype=torch.float64) for _ in range(2))
    cut_off = 0.7 * verls_kl_penalty(old, ref, theirs)
    kept = cut_off < 6.9
    assert kept.sum() > 150
    torch.testing.assert_close(
        KL(ours, 0.7).of_samples(old, ref)[kept], cut_off[kept], rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize(
    "late",
    [("rollout.lag=3", "rollout.old_log_probs=proximal"), ("rollout.max_staleness=5",)],
)
def test_the_distance_is_of_the_old_log_probs_and_the_reference_as_it_is_then(late):
    """Under lag too: a reference that moves has moved when training on the batch begins."""
    moving = (
        "kl.update_every=1",
        "kl.update_rate=0.5",
        "optimizer.learning_rate=0.02",
        "trainer.max_steps=8",
    )
    settings = [setting for setting in SHORT if not setting.startswith("trainer.max_steps")]
    module, loader = module_and_loader(*settings, *IN_REWARD, *moving, *late)
    distances = []
    with torch.no_grad():
        for number, step in enumerate(itertools.islice(loader, 8)):
            for document in step.documents if number % 2 == 0 else ():
                ref = torch.tensor(log_probs(module.reference.model, document), dtype=torch.float64)
                torch.testing.assert_close(document.ref_log_probs.double(), ref, rtol=0, atol=1e-5)
            for document in step.documents:
                terms = (document.old_log_probs.double() - document.ref_log_probs.double()).tolist()
                assert document.kl_reward == pytest.approx(-0.3 * math.fsum(terms), abs=1e-9)
                distances.append(document.kl_reward)
            with torch.enable_grad():
                metrics = module.training_step(step, number)["metrics"]
            mean = math.fsum(document.kl_reward for document in step.documents) / len(
                step.documents
            )
            assert metrics["kl_reward"] == pytest.approx(mean, rel=1e-9)
    loader.source.close()
    assert max(map(abs, distances)) > 1e-3


def test_groups_have_a_signal_by_the_rewards_of_the_task():
    """Groups whose completions the task scores alike are left out, though their distances
    differ."""
    module, loader = module_and_loader(
        *SHORT, *IN_REWARD, "rollout.uninformative=drop", "optimizer.learning_rate=0.02"
    )
    left_out = 0
    for number, step in enumerate(itertools.islice(loader, 4)):
        documents = [Document(**document) for document in loader.source.state_dict()["documents"]]
        for start in range(0, 16, 4):
            group = documents[start : start + 4]
            assert [document.left_out for document in group] == [not has_signal(group)] * 4
            if group[0].left_out and len({document.kl_reward for document in group}) > 1:
                left_out += 1
        module.training_step(step, number)
    assert left_out > 0


def test_a_run_shows_the_reward_of_the_task_and_the_distance_beside_it(tmp_path):
    rows = metrics_of(
        run(tmp_path / "run", *IN_REWARD, "loss=grpo", "optimizer.learning_rate=0.02")
    )
    assert rows[0]["kl_reward"] == pytest.approx(0, abs=1e-5)
    assert any(abs(row["kl_reward"]) > 1e-3 for row in rows[2:])
    assert all(row["kl_ref"] >= 0 for row in rows)
    plain = metrics_of(run(tmp_path / "plain", "loss=grpo", "trainer.max_steps=1"))
    assert rows[0]["reward"] == plain[0]["reward"]


@pytest.mark.slow
def test_the_distance_is_the_same_over_two_ranks(tmp_path, models):
    path, reference_path = models
    settings = with_model(path, *IN_REWARD, f"kl.reference={reference_path}", "trainer.max_steps=3")
    sharded = [*settings, "parallelism.shard=true"]
    on_ranks = run_on_ranks(tmp_path / "ranks", sharded, data_parallel=2)
    assert_runs_close(on_ranks, run_on_ranks(tmp_path / "one", settings), 2e-5)


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        (["kl=k3_ratio"], "kl.place=reward needs kl=k1, k2 or k3 (got kl=k3_ratio)."),
        (["kl=full_reverse"], "kl.place=reward needs kl=k1, k2 or k3 (got kl=full_reverse)."),
        (
            ["kl=k1", "advantage=max_rl"],
            "kl.place=reward needs an advantage that takes rewards below 0",
        ),
        (["kl=k3", "advantage=none"], "kl.place=reward needs an advantage that reads the reward"),
        (["kl=none"], "kl.place=reward needs kl other than none"),
    ],
)
def test_what_has_no_such_reward_is_refused(typed, problem):
    problems = validate(config_of("kl.place=reward", *typed))[1].problems
    assert any(refusal.startswith(problem) for refusal in problems), problems

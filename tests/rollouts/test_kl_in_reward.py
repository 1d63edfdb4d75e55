"""A KL penalty in the rewards, kl.place=reward: against loops over the models' own logits, and
against verl's formula."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.runs import SHORT, config_of, metrics_of, module_and_loader, with_model
from torch import Tensor

from pgtoolkit.config.compose import compose
from pgtoolkit.config.plan import equation
from pgtoolkit.config.validate import validate
from pgtoolkit.document import Document
from pgtoolkit.kl import KL
from pgtoolkit.losses.reference_terms import OF_TOKEN
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.group_rollouts import has_signal
from pgtoolkit.training.module import PolicyGradientModule

IN_REWARD = ("kl=k1", "kl.coefficient=0.3", "kl.place=reward")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a policy, and of another model as its reference."""
    folder = tmp_path_factory.mktemp("models")
    policy = save_with_tokenizer(small_llama(0), folder / "policy")
    reference = save_with_tokenizer(small_llama(3), folder / "reference")
    return policy, reference


def first_batch(*overrides: str) -> tuple[list[Document], PolicyGradientModule]:
    """Return the first batch of rollouts, and the module that has sampled it."""
    module, loader = module_and_loader(*overrides)
    return [loader.source.document(place) for place in range(loader.source.batch_size)], module


@torch.no_grad()
def log_probs(model: torch.nn.Module, document: Document) -> list[float]:
    """Return the log-probs of the trained tokens, by the model's own logits."""
    rows = model(document.tokens[None]).logits[0, :-1].log_softmax(-1)
    return rows.gather(-1, document.tokens[1:, None])[document.loss_mask[1:], 0].tolist()


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_advantages_are_made_of_rewards_less_the_penalty(models, estimate):
    """The rewards themselves do not change."""
    policy_path, reference_path = models
    settings = with_model(
        policy_path,
        f"kl={estimate}",
        "kl.coefficient=0.3",
        f"kl.reference={reference_path}",
        "advantage=dr_grpo",
    )
    plain, _ = first_batch(*settings)
    documents, module = first_batch(*settings, "kl.place=reward")
    assert module.loss.kl is None
    rewards = []
    for document, without_penalty in zip(documents, plain, strict=True):
        assert torch.equal(document.tokens, without_penalty.tokens)
        assert document.reward == without_penalty.reward
        assert without_penalty.kl_reward is None
        old = log_probs(module.policy.model, document)
        ref = log_probs(module.reference.model, document)
        terms = [OF_TOKEN[estimate](o, o, r)[0] for o, r in zip(old, ref, strict=True)]
        penalty = 0.3 * math.fsum(terms)
        assert document.kl_reward == pytest.approx(-penalty, rel=1e-3, abs=1e-4)
        assert document.ref_log_probs.tolist() == pytest.approx(ref, abs=1e-4)
        rewards.append(document.reward - penalty)
    assert max(abs(document.kl_reward) for document in documents) > 0.01
    for place, document in enumerate(documents):
        start = place // 4 * 4
        mean = math.fsum(rewards[start : start + 4]) / 4
        expected = [rewards[place] - mean] * document.num_trained
        assert document.advantages.tolist() == pytest.approx(expected, abs=1e-3)


def verls_kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
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
def test_the_penalty_is_that_of_verl(ours, theirs):
    """The comparison leaves out values above 10, which verl's low_var_kl clips."""
    generator = torch.Generator().manual_seed(0)
    old = -4 * torch.rand(200, generator=generator, dtype=torch.float64)
    ref = -4 * torch.rand(200, generator=generator, dtype=torch.float64)
    expected = 0.7 * verls_kl_penalty(old, ref, theirs)
    kept = expected < 6.9
    assert kept.sum() > 150
    penalty = KL(ours, 0.7).of_samples(old, ref)
    torch.testing.assert_close(penalty[kept], expected[kept], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "sampled_ahead",
    [
        (ahead, "rollout.old_log_probs=proximal")
        for ahead in ("rollout.lag=3", "rollout.max_staleness=5")
    ],
)
def test_the_penalty_takes_the_reference_as_it_is_when_training_on_the_batch_begins(sampled_ahead):
    """The reference moves at each update. Documents may have been sampled some updates before.

    Metrics show the mean penalty, the mean reward of the task, and the distance beside them.
    """
    settings = [setting for setting in SHORT if not setting.startswith("trainer.max_steps")]
    module, loader = module_and_loader(
        *settings,
        *IN_REWARD,
        "kl.update_every=1",
        "kl.update_rate=0.5",
        "optimizer.learning_rate=0.02",
        "trainer.max_steps=8",
        *sampled_ahead,
    )
    penalties = []
    for number, step in enumerate(itertools.islice(loader, 8)):
        if number % 2 == 0:  # the first of the two steps of a batch
            for document in step.documents:
                ref = torch.tensor(log_probs(module.reference.model, document), dtype=torch.float64)
                torch.testing.assert_close(document.ref_log_probs.double(), ref, rtol=0, atol=1e-5)
        for document in step.documents:
            terms = document.old_log_probs.double() - document.ref_log_probs.double()
            expected = -0.3 * math.fsum(terms.tolist())
            assert document.kl_reward == pytest.approx(expected, abs=1e-9)
        of_step = [document.kl_reward for document in step.documents]
        penalties += of_step
        metrics = module.training_step(step, number)["metrics"]
        assert metrics["kl_reward"] == pytest.approx(math.fsum(of_step) / len(of_step), rel=1e-9)
        rewards = [document.reward for document in step.documents]  # those of the task
        assert metrics["reward"] == pytest.approx(math.fsum(rewards) / len(rewards), rel=1e-9)
        assert metrics["kl_ref"] >= 0
    loader.source.close()
    assert max(map(abs, penalties)) > 1e-3


def test_groups_of_equal_task_rewards_are_left_out_though_their_penalties_differ():
    module, loader = module_and_loader(
        *SHORT, *IN_REWARD, "rollout.uninformative=drop", "optimizer.learning_rate=0.02"
    )
    num_left_out = 0
    for number, step in enumerate(itertools.islice(loader, 4)):
        documents = [Document(**fields) for fields in loader.source.state_dict()["documents"]]
        for start in range(0, 16, 4):
            group = documents[start : start + 4]
            assert [document.left_out for document in group] == [
                not has_signal(group, Estimator("dr_grpo"))
            ] * 4
            penalties = {document.kl_reward for document in group}
            if group[0].left_out and len(penalties) > 1:
                num_left_out += 1
        module.training_step(step, number)
    assert num_left_out > 0


MOVING = ("kl.update_every=100", "kl.update_rate=1.0")
WIDE = ("model.hidden_size=128", "accumulation.max_tokens=50")


ROUNDS = "rollout.max_sampling_rounds=4"


@pytest.mark.parametrize(
    "more",
    [
        (ROUNDS,),
        ("rollout.max_staleness=5", "rollout.old_log_probs=proximal", *MOVING),
        ("rollout.lag=3", ROUNDS, *MOVING),
    ],
    ids=str,
)
def test_the_distance_of_the_policy_from_itself_is_exactly_0(more):
    """Though the groups of several rounds are cut into other micro-batches than the batch is, and
    a reference may move until training on the batch begins."""
    settings = [*SHORT, *IN_REWARD, *WIDE, *more]
    module, loader = module_and_loader(*settings, dtype=None)
    documents = [loader.source.document(place) for place in range(loader.source.batch_size)]
    assert module.reference is not None
    for document in documents:
        assert torch.equal(document.old_log_probs, document.ref_log_probs)
        assert document.kl_reward == 0


@pytest.mark.slow
def test_the_penalty_is_the_same_on_two_ranks(tmp_path, models):
    policy_path, reference_path = models
    settings = with_model(
        policy_path,
        *IN_REWARD,
        f"kl.reference={reference_path}",
        "trainer.max_steps=3",
        "trainer.checkpoint_every=3",
    )
    sharded = [*settings, "parallelism.shard=true"]
    two_ranks = run_on_ranks(tmp_path / "two ranks", sharded, data_parallel=2)
    single = run_on_ranks(tmp_path / "single", settings)
    assert_runs_close(two_ranks, single, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("rollout.lag=3", *MOVING)], ids=str)
def test_the_distance_of_the_policy_from_itself_is_exactly_0_on_two_ranks(more, tmp_path):
    settings = [*SHORT, *IN_REWARD, *WIDE, *more, "trainer.max_steps=1"]
    folder = run_on_ranks(tmp_path / "run", settings, data_parallel=2)
    assert metrics_of(folder)[0]["kl_reward"] == 0


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["kl=k3_ratio"], "kl.place=reward needs kl=k1 or k2 or k3 (got kl=k3_ratio)."),
        (["kl=full_reverse"], "kl.place=reward needs kl=k1 or k2 or k3 (got kl=full_reverse)."),
        (
            ["kl=k1", "advantage=max_rl"],
            "kl.place=reward needs advantage other than max_rl (got advantage=max_rl)",
        ),
        (["kl=k3", "advantage=none"], "kl.place=reward needs advantage other than none and gdpo"),
        (["kl=none"], "kl.place=reward needs kl other than none"),
    ],
)
def test_kl_in_the_reward_needs_an_estimate_per_token_and_an_advantage_of_rewards(
    overrides, problem
):
    problems = validate(config_of("kl.place=reward", *overrides))[1].problems
    assert any(refusal.startswith(problem) for refusal in problems), problems


def test_the_plan_says_where_the_penalty_is_taken_off():
    """The sum off the reward of a completion, and with a critic each token's own."""
    symbols = "(o_t - f_t),  o_t = old log-prob, f_t = log-prob under the reference"
    for advantage, less in (
        ("grpo", f"less the sum over trained tokens of 0.3 {symbols}"),
        ("gae", f"less 0.3 {symbols.replace(',', ' at each trained token t,', 1)}"),
    ):
        *_, last = equation(compose([*IN_REWARD, f"advantage={advantage}"]).config)
        assert last == f"reward of the advantage: {less}"

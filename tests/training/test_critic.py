"""The critic of advantage=gae: its values, its loss and gradient, when it trains, and what is
refused."""

import itertools
import math

import pytest
import torch
from builders.losses import AGGREGATIONS
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    last_of_each_key,
    metrics_of,
    module_and_loader,
    run,
    with_model,
)

from pgtoolkit.batch import Document
from pgtoolkit.config.validate import validate
from pgtoolkit.losses import reference_terms
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.critic import value_losses

GAE = ("advantage=gae", "loss=grpo")
LEARNING = (
    *GAE,
    "optimizer.learning_rate=0.02",
    "critic.learning_rate=0.05",
    "trainer.max_steps=8",
)


def of_settings(*overrides):
    return module_and_loader(*last_of_each_key(*SHORT, *LEARNING, *overrides))


def critics_values(module, document):
    """(N,) value of the state before each trained token, of the document alone; differentiable."""
    model = module.critic.body.model
    states = model.base_model(document.tokens[None]).last_hidden_state[0, :-1]
    head = model.get_output_embeddings()
    return (states @ head.weight[0] + head.bias)[document.loss_mask[1:]]


def test_the_value_loss_and_its_slope_are_those_of_the_specification():
    random = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 400, generator=random, dtype=torch.float64)
    values.requires_grad_()
    for clip in (None, 0.2, 0.5, 10.0):
        losses = value_losses(values, old, returns, clip)
        slopes = slope_of(losses, values)
        rows = zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)
        expected = [reference_terms.value_loss(*row, clip) for row in rows]
        torch.testing.assert_close(
            losses.detach(), torch.tensor([loss for loss, _ in expected], dtype=torch.float64)
        )
        torch.testing.assert_close(
            slopes, torch.tensor([slope for _, slope in expected], dtype=torch.float64)
        )
    narrow = slope_of(value_losses(values, old, returns, 0.2), values)
    assert 0 < int((slopes != narrow).sum()) < 400


def slope_of(losses, values):
    return torch.autograd.grad(losses.sum(), values)[0]


def verls_value_loss(predictions, returns, values, mask, clip):
    """Return verl's `compute_value_loss` under token-mean.

    Written anew after verl/trainer/ppo/core_algos.py at b178a3c.
    """
    bounded = torch.max(torch.min(predictions, values + clip), values - clip)
    free, held = (predictions - returns) ** 2, (bounded - returns) ** 2
    return 0.5 * (torch.max(free, held) * mask).sum() / mask.sum()


def test_the_value_loss_and_its_gradient_are_verls():
    random = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 5, 40, generator=random, dtype=torch.float64)
    mask = (torch.rand(5, 40, generator=random) < 0.6).double()
    values.requires_grad_()
    theirs = verls_value_loss(values, returns, old, mask, 0.5)
    ours = (value_losses(values, old, returns, 0.5) * mask / mask.sum()).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    (expected,) = torch.autograd.grad(theirs, values)
    torch.testing.assert_close(
        torch.autograd.grad(ours, values)[0], expected, rtol=1e-12, atol=1e-15
    )


def test_every_value_is_0_at_the_start():
    module, loader = of_settings()
    step = next(iter(loader))
    for document in step.documents:
        assert document.values.tolist() == [0.0] * document.num_trained
        expected = [document.reward * 0.95**left for left in reversed(range(document.num_trained))]
        assert document.returns.tolist() == pytest.approx(expected, rel=1e-6)
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["value"] == 0
    assert metrics["critic_grad_norm"] > 0


@pytest.mark.parametrize(
    "late",
    [
        (),
        ("rollout.lag=3", "rollout.old_log_probs=proximal"),
        ("rollout.max_staleness=5",),
    ],
)
def test_values_are_the_critics_as_training_on_a_batch_begins(late):
    """Under lag too; the whitened advantages are of the whole batch, also where its steps are
    several."""
    module, loader = of_settings(*late)
    spread = []
    for number, step in enumerate(itertools.islice(loader, 8)):
        if number % 2 == 0:
            batch = [Document(**document) for document in loader.source.state_dict()["documents"]][
                :16
            ]
            advantages = []
            for document in batch:
                with torch.no_grad():
                    expected = critics_values(module, document)
                torch.testing.assert_close(document.values.double(), expected, rtol=0, atol=1e-6)
                rewards = [0.0] * document.num_trained
                rewards[-1] = document.reward
                trained = [True] * document.num_trained
                advantages_and_returns = reference_terms.gae(
                    rewards, expected.tolist(), trained, 1.0, 0.95
                )
                assert document.returns.tolist() == pytest.approx(
                    [x[1] for x in advantages_and_returns.values()], abs=1e-5
                )
                advantages += [x[0] for x in advantages_and_returns.values()]
            numbers = torch.tensor(advantages, dtype=torch.float64)
            white = (numbers - numbers.mean()) / (numbers.var() + 1e-8).sqrt()
            torch.testing.assert_close(
                torch.cat([document.advantages for document in batch]).double(),
                white,
                rtol=0,
                atol=1e-4,
            )
            spread.append(float(torch.cat([document.values for document in batch]).abs().max()))
        module.training_step(step, number)
    loader.source.close()
    assert spread[0] == 0
    assert spread[-1] > 0.01


def known_documents(module, seed=0):
    """Documents of two groups with values that the critic's have moved away from, one without a
    trained token."""
    random = torch.Generator().manual_seed(seed)
    documents = []
    for number, (length, digits) in enumerate([(6, 3), (9, 5), (4, 2), (7, 4), (5, 0)]):
        mask = torch.arange(length) >= length - digits
        count = int(mask.sum())
        vectors = 0.4 * torch.randn(4, count, generator=random)
        document = Document(
            tokens=torch.randint(0, 11, (length,), generator=random),
            loss_mask=mask,
            old_log_probs=-2.4 + vectors[0],
            advantages=vectors[1],
            group=number // 2,
            name=f"document {number}",
            reward=0.0,
            values=vectors[2],
            returns=vectors[3],
        )
        documents.append(document)
    return documents


def weight_of(aggregation, document, documents):
    """w_t by its definition."""
    tokens = sum(d.num_trained for d in documents)
    group = [d for d in documents if d.group == document.group]
    return {
        "sample_mean": 1 / (len(documents) * max(1, document.num_trained)),
        "prompt_mean": 1
        / (len({d.group for d in documents}) * max(1, sum(d.num_trained for d in group))),
        "token_mean": 1 / tokens,
        "constant": 1 / (len(documents) * 4),
    }[aggregation]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_the_specifications_however_the_step_is_cut(aggregation):
    divisor = "aggregation.divisor=4" if aggregation == "constant" else "aggregation.divisor=null"
    module, _ = of_settings(
        f"aggregation={aggregation}", divisor, "critic.clip=0.1", "optimizer.max_grad_norm=null"
    )
    critic = module.critic
    head = critic.body.model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(2))
    documents = known_documents(module)
    parameters = list(critic.body.model.parameters())
    loss = torch.zeros((), dtype=torch.float64)
    total = 0.0
    for document in documents:
        values = critics_values(module, document)
        weight = weight_of(aggregation, document, documents)
        rows = zip(
            values.tolist(), document.values.tolist(), document.returns.tolist(), strict=True
        )
        expected = [reference_terms.value_loss(*row, 0.1) for row in rows]
        total += weight * math.fsum(value for value, _ in expected)
        slopes = torch.tensor([slope for _, slope in expected], dtype=torch.float64)
        loss = loss + weight * (values * slopes).sum()
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for order, room in ((documents, 100), (documents, 9), (documents[::-1], 12)):
        step = make_step(order, room)
        metrics = critic.gradient(step.micro_batches, step.totals, None)
        assert metrics["value_loss"] == pytest.approx(total, rel=1e-9)
        for parameter, gradient in zip(parameters, expected, strict=True):
            actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            specified = torch.zeros_like(parameter) if gradient is None else gradient
            torch.testing.assert_close(actual, specified, rtol=1e-8, atol=1e-12)
    every = torch.cat([critics_values(module, document) for document in documents]).detach()
    returns = torch.cat([document.returns for document in documents]).double()
    assert metrics["value"] == pytest.approx(float(every.mean()), rel=1e-9)
    assert metrics["return"] == pytest.approx(float(returns.mean()), rel=1e-9)
    variance = float(1 - (returns - every).var() / returns.var())
    assert metrics["explained_variance"] == pytest.approx(variance, rel=1e-9)


def test_what_has_no_weight_in_the_policys_loss_has_none_in_the_critics():
    """Completions that were cut off, under rollout.truncated=mask, and those that nobody could
    score."""
    module, _ = of_settings("rollout.truncated=mask")
    documents = known_documents(module)
    kept = module.critic.gradient(*parts(documents[:1], of=documents), None)
    marked = [documents[0], *[Document(**vars(d) | {"truncated": True}) for d in documents[1:3]]]
    marked += [Document(**vars(d) | {"score_failed": True, "reward": None}) for d in documents[3:]]
    assert module.critic.gradient(*parts(marked), None)["value_loss"] == pytest.approx(
        kept["value_loss"], rel=1e-9
    )


def parts(documents, of=None):
    """The micro-batches of documents under the totals of a step."""
    step = make_step(documents, 100)
    return step.micro_batches, (step if of is None else make_step(of, 100)).totals


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_the_critic_trains_alone_at_first():
    module, loader = of_settings("critic.steps_before_policy=3")
    for number, step in enumerate(itertools.islice(loader, 4)):
        policy, critic = weights_of(module.model), weights_of(module.critic.body.model)
        metrics = module.training_step(step, number)["metrics"]
        assert ("loss" in metrics) == (number == 3)
        if number < 3:
            assert_equal(weights_of(module.model), policy)
        trained = weights_of(module.critic.body.model)
        assert [name for name, weight in trained.items() if not weight.equal(critic[name])]
    assert (module.num_updates, module.critic.num_updates, module.num_skipped_steps) == (1, 4, 0)
    assert not weights_of(module.model)["lm_head.weight"].equal(policy["lm_head.weight"])


def test_a_step_whose_value_loss_is_not_finite_changes_neither_model():
    module, loader = of_settings()
    step = next(iter(loader))
    step.micro_batches[0].returns[step.micro_batches[0].labels >= 0] = math.nan
    policy, critic = weights_of(module.model), weights_of(module.critic.body.model)
    metrics = module.training_step(step, 0)["metrics"]
    assert math.isfinite(metrics["loss"])
    assert math.isnan(metrics["value_loss"])
    assert_equal(weights_of(module.model), policy)
    assert_equal(weights_of(module.critic.body.model), critic)
    assert (module.num_skipped_steps, module.critic.num_updates) == (1, 0)


def test_the_policys_step_is_that_of_the_same_advantages_without_a_critic():
    module, loader = of_settings()
    step = next(iter(loader))
    metrics = module.training_step(step, 0)["metrics"]
    without_critic, _ = of_settings("advantage=dr_grpo", "critic.learning_rate=0.001")
    expected = without_critic.training_step(step, 0)["metrics"]
    assert metrics["grad_norm"] == expected["grad_norm"]
    assert_equal(weights_of(module.model), weights_of(without_critic.model))


@pytest.mark.slow
def test_ranks_train_the_critic_as_one_process_does_and_resume(tmp_path):
    """And a resumed one continues to the same numbers; nothing of the critic is lost where it is
    divided."""
    path = save_with_tokenizer(small_llama(0), tmp_path / "model")
    settings = last_of_each_key(
        *with_model(path, *GAE, "trainer.max_steps=4", "critic.learning_rate=0.01")
    )
    sharded = [*settings, "parallelism.shard=true"]
    on_ranks = run_on_ranks(tmp_path / "ranks", sharded, data_parallel=2)
    in_one_process = run_on_ranks(tmp_path / "one", settings)
    assert_runs_close(on_ranks, in_one_process, 2e-5)
    expected = checkpoint_of(in_one_process, 4)["critic"]
    divided = checkpoint_of(on_ranks, 4)["critic"]
    assert expected.keys() == divided.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-3, atol=2e-5)
    resumed = copy_as_of(on_ranks, 2, tmp_path / "resumed")
    run_on_ranks(resumed, sharded, resume=True, data_parallel=2)
    assert metrics_of(resumed) == metrics_of(on_ranks)
    assert_equal(checkpoint_of(resumed, 4), checkpoint_of(on_ranks, 4))


def test_the_critic_of_another_folder(tmp_path):
    path, critic_path = (
        save_with_tokenizer(small_llama(seed), tmp_path / str(seed)) for seed in (0, 3)
    )
    module, _ = module_and_loader(*with_model(path, *GAE, f"critic.path={critic_path}"))
    of_critic, of_policy = module.critic.body.model.state_dict(), module.model.state_dict()
    expected = small_llama(3).state_dict()
    body = [name for name in expected if name.startswith("model.")]
    assert body
    for name in body:
        assert torch.equal(of_critic[name].float(), expected[name])
    assert not torch.equal(of_critic[body[0]], of_policy[body[0]])
    assert of_critic["lm_head.weight"].shape == (1, of_policy["lm_head.weight"].shape[1])


def test_a_conversations_turns_are_one_completion(tmp_path):
    """Of several turns the last trained token has the reward, and those between are passed over."""
    turns = (
        "task=guess",
        "rollout.max_completion_length=24",
        "model.max_positions=128",
        "accumulation.max_tokens=256",
    )
    kept = [
        setting
        for setting in SHORT
        if not setting.startswith(("task.", "rollout.max", "accumulation.max"))
    ]
    module, loader = module_and_loader(*kept, *GAE, *turns, "advantage.whiten=false")
    step = next(iter(loader))
    gaps = 0
    for document in step.documents:
        trained = document.loss_mask.nonzero()[:, 0]
        gaps += int(trained[-1] - trained[0]) + 1 > len(trained)
        expected = [document.reward * 0.95**left for left in reversed(range(len(trained)))]
        assert document.advantages.tolist() == pytest.approx(expected, rel=1e-5)
    assert gaps > 0
    assert math.isfinite(module.training_step(step, 0)["metrics"]["value_loss"])


def test_a_run_without_a_critic_has_none_of_it(tmp_path):
    (row,) = metrics_of(run(tmp_path / "run", "trainer.max_steps=1"))
    assert not {"value_loss", "value", "critic_grad_norm", "critic_learning_rate"} & row.keys()
    assert checkpoint_of(tmp_path / "run", 1)["critic"] == {}
    assert not list((tmp_path / "run").rglob("*critic*"))


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        (["rollout=recorded", "rollout.path=nowhere.jsonl"], "advantage=gae needs rollout=policy"),
        (
            ["model=huggingface", "model.path=a/b", "model.lora_rank=4"],
            "advantage=gae needs model.lora_rank=null",
        ),
        (["parallelism=tensor"], "advantage=gae needs parallelism.tensor_parallel=1"),
        (["parallelism=sequence_data"], "advantage=gae needs parallelism.sequence_data_parallel=1"),
        (
            ["parallelism=pipeline", "metrics=none"],
            "advantage=gae needs parallelism.pipeline_parallel=1",
        ),
        (
            ["critic.steps_before_policy=300"],
            "critic.steps_before_policy=300 needs fewer than trainer.max_steps=300",
        ),
        (["critic.path=a/b"], "critic.path=a/b needs model=huggingface"),
        (["advantage=dr_grpo", "critic.clip=1"], "critic.clip=1 needs advantage=gae"),
        (["advantage=dr_grpo", "advantage.gamma=0.9"], "advantage.gamma=0.9 needs advantage=gae"),
    ],
)
def test_what_a_critic_cannot_be_combined_with_is_refused(typed, problem):
    problems = validate(config_of("advantage=gae", "loss=grpo", *typed))[1].problems
    assert any(found.startswith(problem) for found in problems), problems

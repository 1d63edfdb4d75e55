"""The critic of advantage=gae has the values, loss and gradient of the specification's loops.

verl's value loss, written anew, is a second reference; runs show when the critic trains.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from builders.documents import document_of
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

from pgtoolkit.batch import MicroBatch, StepTotals
from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validate, validated
from pgtoolkit.document import Document
from pgtoolkit.losses import reference_terms
from pgtoolkit.rollouts.settings import AdvantageEstimator, PolicyRolloutSettings, Truncated
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.critic import value_losses
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.surprises import Surprises

GAE = ("advantage=gae", "loss=grpo")
LEARNING = (
    *GAE,
    "optimizer.learning_rate=0.02",
    "critic.learning_rate=0.05",
    "trainer.max_steps=8",
)


def module_with_critic(*overrides: str) -> tuple[PolicyGradientModule, StepLoader]:
    return module_and_loader(*last_of_each_key(*SHORT, *LEARNING, *overrides))


def values_by_critic(module: PolicyGradientModule, document: Document) -> torch.Tensor:
    """Return (N,) values of the states before each trained token, differentiable.

    The document goes through the critic alone.
    """
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


def slope_of(losses: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(losses.sum(), values)[0]


def value_loss_of_verl(
    predictions: torch.Tensor,
    returns: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
) -> torch.Tensor:
    """Return verl's `compute_value_loss` under token-mean.

    Written anew after verl/trainer/ppo/core_algos.py at b178a3c.
    """
    bounded = torch.max(torch.min(predictions, values + clip), values - clip)
    unclipped = (predictions - returns) ** 2
    clipped = (bounded - returns) ** 2
    return 0.5 * (torch.max(unclipped, clipped) * mask).sum() / mask.sum()


def test_the_value_loss_and_its_gradient_are_those_of_verl():
    random = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 5, 40, generator=random, dtype=torch.float64)
    mask = (torch.rand(5, 40, generator=random) < 0.6).double()
    values.requires_grad_()
    expected = value_loss_of_verl(values, returns, old, mask, 0.5)
    loss = (value_losses(values, old, returns, 0.5) * mask / mask.sum()).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(
        slope_of(loss, values), slope_of(expected, values), rtol=1e-12, atol=1e-15
    )


def test_every_value_is_0_and_returns_are_discounted_rewards_at_the_start():
    module, loader = module_with_critic()
    step = next(iter(loader))
    for document in step.documents:
        assert document.values.tolist() == [0.0] * document.num_trained
        expected = [document.reward * 0.95**left for left in reversed(range(document.num_trained))]
        assert document.returns.tolist() == pytest.approx(expected, rel=1e-6)
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["value"] == 0
    assert metrics["critic_grad_norm"] > 0


def whitened(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers - numbers.mean()) / (numbers.var() + 1e-8).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("rollout.lag=3", "rollout.old_log_probs=proximal"),
        ("rollout.max_staleness=5", "rollout.old_log_probs=proximal"),
    ],
)
def test_values_are_those_of_the_critic_as_training_on_a_batch_begins(settings):
    """Also of a batch that was sampled earlier. Advantages are whitened over the two steps of a
    batch."""
    module, loader = module_with_critic(*settings)
    largest_values = []
    for number, step in enumerate(itertools.islice(loader, 8)):
        if number % 2 == 0:
            documents = loader.source.state_dict()["documents"]
            batch = [Document(**fields) for fields in documents[:16]]
            advantages = []
            for document in batch:
                with torch.no_grad():
                    expected = values_by_critic(module, document)
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
            torch.testing.assert_close(
                torch.cat([document.advantages for document in batch]).double(),
                whitened(torch.tensor(advantages, dtype=torch.float64)),
                rtol=0,
                atol=1e-4,
            )
            values = torch.cat([document.values for document in batch])
            largest_values.append(float(values.abs().max()))
        module.training_step(step, number)
    loader.source.close()
    assert largest_values[0] == 0
    assert largest_values[-1] > 0.01


def documents_with_values() -> list[Document]:
    """Return documents of three groups, whose values differ from the critic's; the last has no
    trained token."""
    random = torch.Generator().manual_seed(0)
    documents = []
    for number, (length, digits) in enumerate([(6, 3), (9, 5), (4, 2), (7, 4), (5, 0)]):
        mask = torch.arange(length) >= length - digits
        count = int(mask.sum())
        vectors = 0.4 * torch.randn(4, count, generator=random)
        document = document_of(
            torch.randint(0, 11, (length,), generator=random),
            mask,
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


def weight_of(aggregation: str, document: Document, documents: list[Document]) -> float:
    """Return w_t of a document's tokens by the definition of its aggregation."""
    tokens = sum(d.num_trained for d in documents)
    group = [d for d in documents if d.group == document.group]
    return {
        "sample_mean": 1 / (len(documents) * max(1, document.num_trained)),
        "prompt_mean": 1
        / (len({d.group for d in documents}) * max(1, sum(d.num_trained for d in group))),
        "token_mean": 1 / tokens,
        "constant": 1 / (len(documents) * 4),
    }[aggregation]


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_the_specification_however_the_step_is_cut(aggregation):
    divisor = "aggregation.divisor=4" if aggregation == "constant" else "aggregation.divisor=null"
    module, _ = module_with_critic(
        f"aggregation={aggregation}", divisor, "critic.clip=0.1", "optimizer.max_grad_norm=null"
    )
    critic = module.critic
    head = critic.body.model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(2))
    documents = documents_with_values()
    parameters = list(critic.body.model.parameters())
    loss = torch.zeros((), dtype=torch.float64)
    total = 0.0
    for document in documents:
        values = values_by_critic(module, document)
        weight = weight_of(aggregation, document, documents)
        rows = zip(
            values.tolist(), document.values.tolist(), document.returns.tolist(), strict=True
        )
        expected = [reference_terms.value_loss(*row, 0.1) for row in rows]
        total += weight * math.fsum(value for value, _ in expected)
        slopes = torch.tensor([slope for _, slope in expected], dtype=torch.float64)
        loss = loss + weight * (values * slopes).sum()
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for order, max_tokens in ((documents, 100), (documents, 9), (documents[::-1], 12)):
        step = make_step(order, max_tokens)
        metrics = critic.gradient(step.micro_batches, step.totals, None)
        assert metrics["value_loss"] == pytest.approx(total, rel=1e-9)
        for parameter, gradient in zip(parameters, expected, strict=True):
            actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            specified = torch.zeros_like(parameter) if gradient is None else gradient
            torch.testing.assert_close(actual, specified, rtol=1e-8, atol=1e-12)
    values = torch.cat([values_by_critic(module, document) for document in documents]).detach()
    returns = torch.cat([document.returns for document in documents]).double()
    assert metrics["value"] == pytest.approx(float(values.mean()), rel=1e-9)
    assert metrics["return"] == pytest.approx(float(returns.mean()), rel=1e-9)
    explained_variance = float(1 - (returns - values).var() / returns.var())
    assert metrics["explained_variance"] == pytest.approx(explained_variance, rel=1e-9)
    # A document of weight 0 is in no mean, and a step of such documents has none.
    failed = [replace(document, reward=None, score_failed=True) for document in documents]
    step = make_step(failed, 12)
    metrics = critic.gradient(step.micro_batches, step.totals, None)
    assert metrics.keys() == {"value_loss", "critic_grad_norm"}
    step = make_step([*failed[:2], *documents[2:]], 12)
    metrics = critic.gradient(step.micro_batches, step.totals, None)
    left = values[sum(document.num_trained for document in documents[:2]) :]
    assert metrics["value"] == pytest.approx(float(left.mean()), rel=1e-9)


def micro_batches_and_totals(
    documents: Sequence[Document], step_documents: Sequence[Document] | None = None
) -> tuple[list[MicroBatch], StepTotals]:
    """Return the micro-batches of documents, and the totals of a step of `step_documents`."""
    step = make_step(documents, 100)
    if step_documents is None:
        return step.micro_batches, step.totals
    return step.micro_batches, make_step(step_documents, 100).totals


def test_documents_without_weight_in_the_loss_of_the_policy_have_none_in_the_critic():
    """Truncated completions under rollout.truncated=mask, and completions without a score."""
    module, _ = module_with_critic("rollout.truncated=mask")
    documents = documents_with_values()
    alone = micro_batches_and_totals(documents[:1], step_documents=documents)
    expected = module.critic.gradient(*alone, None)["value_loss"]
    marked = [documents[0], *[replace(document, truncated=True) for document in documents[1:3]]]
    marked += [replace(document, score_failed=True, reward=None) for document in documents[3:]]
    metrics = module.critic.gradient(*micro_batches_and_totals(marked), None)
    assert metrics["value_loss"] == pytest.approx(expected, rel=1e-9)


def copied_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_the_critic_trains_alone_in_its_steps_before_the_policy():
    module, loader = module_with_critic("critic.steps_before_policy=3")
    for number, step in enumerate(itertools.islice(loader, 4)):
        policy = copied_weights(module.model)
        critic = copied_weights(module.critic.body.model)
        metrics = module.training_step(step, number)["metrics"]
        assert ("loss" in metrics) == (number == 3)
        if number < 3:
            assert_equal(copied_weights(module.model), policy)
        trained = copied_weights(module.critic.body.model)
        assert [name for name, weight in trained.items() if not weight.equal(critic[name])]
    assert (module.num_updates, module.critic.num_updates, module.num_skipped_steps) == (1, 4, 0)
    assert not copied_weights(module.model)["lm_head.weight"].equal(policy["lm_head.weight"])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decaying_rate_of_the_policy_ends_with_the_run_after_steps_of_the_critic_alone(schedule):
    """Two of six steps are the critic's: the policy has one update of warm-up and three at rates
    that go down to 0 at step 6, as in a run of four steps."""
    overrides = (
        "optimizer.warmup_steps=1",
        f"optimizer.schedule={schedule}",
        "optimizer.learning_rate=0.01",
        "trainer.max_steps=6",
        "critic.steps_before_policy=2",
    )
    module, loader = module_with_critic(*overrides)
    steps = itertools.islice(loader, 6)
    metrics = [module.training_step(step, i)["metrics"] for i, step in enumerate(steps)]
    linear = (1.0, 1.0, 2 / 3, 1 / 3)
    shares = linear if schedule == "linear" else (1.0, 1.0, 0.75, 0.25)
    rates = [row["learning_rate"] for row in metrics if "learning_rate" in row]
    assert rates[-4:] == pytest.approx([0.01 * share for share in shares], rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["trainer.max_steps=12", "critic.steps_before_policy=2"],
            [
                "optimizer.warmup_steps=10 WITH: the run ends during warm-up. Use "
                "optimizer.warmup_steps=1."
            ],
        ),
        (["trainer.max_steps=13", "critic.steps_before_policy=2"], []),
        (
            [
                "trainer.max_steps=9",
                "critic.steps_before_policy=2",
                "optimizer.warmup_steps=7",
                "optimizer.schedule=cosine",
            ],
            [
                "optimizer.warmup_steps=7 WITH: the run ends during warm-up, and never decays "
                "(cosine). Use optimizer.warmup_steps=0."
            ],
        ),
        (
            [
                "trainer.max_steps=20",
                "critic.steps_before_policy=2",
                "kl=k3",
                "kl.update_every=18",
                "rollout.lag=18",
            ],
            [
                "kl.update_every=18 WITH: no step has a reference that has moved.",
                "rollout.lag=18 WITH: the first weights sample every completion.",
            ],
        ),
        (
            [
                "trainer.max_steps=20",
                "critic.steps_before_policy=2",
                "kl=k3",
                "kl.update_every=17",
                "rollout.lag=17",
            ],
            [],
        ),
    ],
)
def test_counts_of_steps_that_the_policy_does_not_reach_are_noted(overrides, expected):
    steps = overrides[0].partition("=")[2]
    _, report = validated(compose(["advantage=gae", "loss=grpo", *overrides]))
    assert report.problems == []
    with_steps = f"with trainer.max_steps={steps} and critic.steps_before_policy=2"
    words = ("optimizer.warmup_steps", "kl.update_every", "rollout.lag")
    notes = [note for note in report.notes if note.startswith(words)]
    assert notes == [note.replace("WITH", with_steps) for note in expected]


def test_a_step_whose_value_loss_is_not_finite_changes_neither_model():
    module, loader = module_with_critic()
    step = next(iter(loader))
    step.micro_batches[0].returns[step.micro_batches[0].labels >= 0] = math.nan
    policy = copied_weights(module.model)
    critic = copied_weights(module.critic.body.model)
    metrics = module.training_step(step, 0)["metrics"]
    assert math.isfinite(metrics["loss"])
    assert math.isnan(metrics["value_loss"])
    assert_equal(copied_weights(module.model), policy)
    assert_equal(copied_weights(module.critic.body.model), critic)
    assert (module.num_skipped_steps, module.critic.num_updates) == (1, 0)


def test_the_policy_takes_the_step_of_the_same_advantages_without_a_critic():
    module, loader = module_with_critic()
    step = next(iter(loader))
    metrics = module.training_step(step, 0)["metrics"]
    without_critic, _ = module_with_critic("advantage=dr_grpo", "critic.learning_rate=0.001")
    expected = without_critic.training_step(step, 0)["metrics"]
    assert metrics["grad_norm"] == expected["grad_norm"]
    assert_equal(copied_weights(module.model), copied_weights(without_critic.model))


@pytest.mark.slow
def test_ranks_train_the_critic_as_one_process_does_and_resume(tmp_path):
    """A run resumed on the same ranks is equal to the last bit, its critic included."""
    path = save_with_tokenizer(small_llama(0), tmp_path / "model")
    settings = last_of_each_key(
        *with_model(path, *GAE, "trainer.max_steps=3", "critic.learning_rate=0.01")
    )
    sharded = [*settings, "parallelism.shard=true"]
    once = "trainer.checkpoint_every=3"
    on_ranks = run_on_ranks(tmp_path / "ranks", sharded, data_parallel=2)
    in_one_process = run_on_ranks(tmp_path / "one", [*settings, once])
    assert_runs_close(on_ranks, in_one_process, 2e-5)
    expected = checkpoint_of(in_one_process, 3)["critic"]
    divided = checkpoint_of(on_ranks, 3)["critic"]
    assert expected.keys() == divided.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-3, atol=2e-5)
    resumed = copy_as_of(on_ranks, 2, tmp_path / "resumed")
    run_on_ranks(resumed, sharded, resume=True, data_parallel=2)
    assert metrics_of(resumed) == metrics_of(on_ranks)
    assert_equal(checkpoint_of(resumed, 3), checkpoint_of(on_ranks, 3))


def test_a_critic_of_another_folder_has_its_body_and_a_head_of_one_row(tmp_path):
    path, critic_path = (
        save_with_tokenizer(small_llama(seed), tmp_path / str(seed)) for seed in (0, 3)
    )
    module, _ = module_and_loader(*with_model(path, *GAE, f"critic.path={critic_path}"))
    of_critic = module.critic.body.model.state_dict()
    of_policy = module.model.state_dict()
    expected = small_llama(3).state_dict()
    body = [name for name in expected if name.startswith("model.")]
    assert body
    for name in body:
        assert torch.equal(of_critic[name].float(), expected[name])
    assert not torch.equal(of_critic[body[0]], of_policy[body[0]])
    assert of_critic["lm_head.weight"].shape == (1, of_policy["lm_head.weight"].shape[1])


def test_the_turns_of_a_conversation_are_one_completion(tmp_path):
    """The last trained token of all turns has the reward; untrained tokens between turns discount
    nothing."""
    turns = (
        "task=guess",
        "rollout.max_completion_length=24",
        "model.max_positions=128",
        "accumulation.max_tokens=256",
    )
    settings = [
        setting
        for setting in SHORT
        if not setting.startswith(("task.", "rollout.max", "accumulation.max"))
    ]
    module, loader = module_and_loader(*settings, *GAE, *turns, "advantage.whiten=false")
    step = next(iter(loader))
    gaps = 0
    for document in step.documents:
        trained = document.loss_mask.nonzero()[:, 0]
        gaps += int(trained[-1] - trained[0]) + 1 > len(trained)
        expected = [document.reward * 0.95**left for left in reversed(range(len(trained)))]
        assert document.advantages.tolist() == pytest.approx(expected, rel=1e-5)
    assert gaps > 0
    assert math.isfinite(module.training_step(step, 0)["metrics"]["value_loss"])


def test_a_run_without_a_critic_has_no_metrics_or_files_of_it(tmp_path):
    (row,) = metrics_of(run(tmp_path / "run", "trainer.max_steps=1"))
    assert not {"value_loss", "value", "critic_grad_norm", "critic_learning_rate"} & row.keys()
    assert checkpoint_of(tmp_path / "run", 1)["critic"] == {}
    assert not list((tmp_path / "run").rglob("*critic*"))


@pytest.mark.parametrize(
    ("settings", "problem"),
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
def test_a_setting_that_excludes_a_critic_is_refused(settings, problem):
    problems = validate(config_of("advantage=gae", "loss=grpo", *settings))[1].problems
    assert any(text.startswith(problem) for text in problems), problems


def test_a_step_without_advantages_is_explained_by_the_estimator(caplog):
    """Nothing of a critic's is about the rewards of a group, and neither are those of a file."""
    rollout = PolicyRolloutSettings(max_completion_length=8)
    for estimator, says in {
        "gae": "the critic expects what every completion gets",
        "given": "so they are given.",
        "grpo": "all completions of a prompt have equal rewards",
    }.items():
        caplog.clear()
        surprises = Surprises("grpo", rollout, AdvantageEstimator(estimator))
        surprises.of_step({"zero_advantage_group_fraction": 1}, 8)
        (note,) = [record.getMessage() for record in caplog.records]
        assert f"so the step teaches the policy nothing: {says}" in note
    caplog.clear()
    surprises = Surprises("grpo", rollout, AdvantageEstimator.grpo)
    surprises.of_step({"zero_advantage_group_fraction": 1, "failed_score_fraction": 11 / 12}, 8)
    assert "nothing: 92% of the scores failed, and the rewards of each prompt are" in caplog.text
    assert "too hard" not in caplog.text
    caplog.clear()
    masking = PolicyRolloutSettings(max_completion_length=8, truncated=Truncated.mask)
    surprises = Surprises("grpo", masking, AdvantageEstimator.grpo)
    surprises.of_step({"zero_advantage_group_fraction": 1, "truncated_fraction": 0.5}, 8)
    assert "nothing: 50% of the completions were cut off, which rollout.truncated" in caplog.text


def test_a_run_without_a_gradient_says_so_once_in_its_third_step(caplog):
    """Nothing is said of zeros after a gradient, nor where a note says that advantages are 0."""
    rollout = PolicyRolloutSettings(max_completion_length=8)
    zeros = {"grad_norm": 0.0}
    silent = {**zeros, "zero_advantage_group_fraction": 1}
    for steps, number in (
        ([zeros] * 2, 0),
        ([zeros] * 5, 1),
        ([{"grad_norm": 1e-30}, *[zeros] * 5], 0),
        ([{}, *[zeros] * 3], 1),  # a step that trains nothing has no gradient
        ([silent] * 5, 0),
    ):
        caplog.clear()
        surprises = Surprises("mine.loss", rollout, AdvantageEstimator.grpo)
        for metrics in steps:
            surprises.of_step(metrics, 8)
        said = [record.getMessage() for record in caplog.records]
        assert sum("loss=mine.loss with advantage=grpo" in text for text in said) == number

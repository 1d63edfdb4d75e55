"""Completions of a prompt that share it are trained and scored to the numbers of completions that
do not, in float64, however their groups are cut.

The reference is the same step without sharing: rows of whole documents, by transformers' attention.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from builders.documents import document_of
from builders.losses import CENTERED, FAMILIES
from builders.models import small_llama
from builders.runs import CLOCK_COLUMNS, SHORT, config_of, last_of_each_key, module_and_loader
from torch import Tensor

from pgtoolkit.assembly.build import sharing
from pgtoolkit.batch import Step
from pgtoolkit.config.plan import arithmetic
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.families import family_of
from pgtoolkit.model.policy import Policy
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule

GROUPS = ((7, (5, 1, 6, 3)), (1, (4, 2)), (4, (6, 6, 0, 6, 9)))
"""Tokens of a prompt, and of each of its completions."""
COUNTED = {
    "num_micro_batches",
    "tokens_per_second",
    "seconds_update",
    "documents_seen",
    "learning_rate",
}
"""Metrics that say how a step was computed, and which one of the run it was."""


def documents() -> list[Document]:
    """Return the documents of a step, the last of which goes on where the one before ends."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for group, (prompt_length, lengths) in enumerate(GROUPS):
        prompt = torch.randint(0, 11, (prompt_length,), generator=draw)
        for number, length in enumerate(lengths):
            tokens = torch.cat([prompt, torch.randint(0, 11, (length,), generator=draw)])
            mask = torch.arange(len(tokens)) >= prompt_length
            if group == 2 and number == 1:
                mask[:] = False  # a masked member
            if group == 2 and number == 4:
                turn = made[-1].tokens
                tokens[: len(turn)] = turn
                mask[: len(turn)] = False
            count = int(mask.sum())
            likeliest = torch.stack([tokens[mask], (tokens[mask] + 1) % 11], 1).int()
            made.append(
                document_of(
                    tokens,
                    mask,
                    advantages=float(torch.randn(1, generator=draw)),
                    old_log_probs=-2.5 + 0.2 * torch.randn(count, generator=draw),
                    sampling_log_probs=-2.5 + 0.2 * torch.randn(count, generator=draw),
                    sampling_top_ids=likeliest,
                    sampling_top_log_probs=torch.tensor([[-1.0, -2.0]]).repeat(count, 1),
                    reward=float(torch.rand(1, generator=draw)),
                    group=group,
                    name=f"document {len(made)}",
                )
            )
    return made


def module_of(share: str, *overrides: str) -> PolicyGradientModule:
    settings = last_of_each_key(
        *SHORT, "trainer.device=cpu", f"model.share_prompts={share}", *overrides
    )
    module, _ = module_and_loader(*settings)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)  # so that no softmax is nearly uniform
    standing = torch.optim.SGD(module.parameters(), lr=0.0)
    module.optimizers = lambda use_pl_optimizer=True: standing
    return module


def results(module: PolicyGradientModule, step: Step) -> tuple[dict[str, float], list[Tensor]]:
    """Return the metrics of a step, and the gradient of each weight of policy and critic."""
    metrics = module.training_step(step, 0)["metrics"]
    gradients = [p.grad.clone() for p in module.model.parameters() if p.grad is not None]
    return {name: value for name, value in metrics.items() if name not in COUNTED}, gradients


def assert_the_same(
    result: tuple[dict[str, float], list[Tensor]], expected: tuple[dict[str, float], list[Tensor]]
) -> None:
    metrics, gradients = result
    expected_metrics, expected_gradients = expected
    assert metrics == pytest.approx(expected_metrics, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-10, atol=1e-12)
    assert max(gradient.abs().max() for gradient in expected_gradients) > 1e-3


def assert_nothing_depends_on_sharing(
    unshared: PolicyGradientModule, shared: PolicyGradientModule
) -> None:
    """Compare loss, metrics and gradients: in one micro-batch, with a group that is cut, and with
    micro-batches of hardly more than the longest document, in the opposite order."""
    step_documents = documents()
    expected = results(unshared, make_step(step_documents, 1000))
    for max_tokens, order in ((1000, 1), (30, 1), (19, -1)):
        step = make_step(step_documents[::order], max_tokens, share_prompts=True)
        assert any(micro_batch.shared for micro_batch in step.micro_batches)
        assert_the_same(results(shared, step), expected)


@pytest.fixture(scope="module")
def modules() -> list[PolicyGradientModule]:
    return [module_of(share) for share in ("false", "true")]


@pytest.mark.parametrize("name", [*FAMILIES, *CENTERED, "tpo", "lpo"])
def test_every_loss_has_the_numbers_of_documents_that_do_not_share(modules, name):
    family = FAMILIES.get(name) or CENTERED.get(name) or family_of(name)
    for module in modules:
        module.loss = replace(module.loss, family=family)
    assert_nothing_depends_on_sharing(*modules)


TERMS = [
    ("kl=k3", "kl.coefficient=0.1", "kl.reference=initial", "aggregation=balanced"),
    ("kl=full_reverse", "kl.coefficient=0.1", "kl.reference=initial", "kernel=fused_linear"),
    ("entropy.coefficient=0.1", "entropy.top_fraction=0.4", "correction=sequence_mask"),
]


@pytest.mark.parametrize("overrides", TERMS, ids=lambda x: ",".join(x))
def test_penalties_and_corrections_have_the_numbers_of_documents_that_do_not_share(overrides):
    more = ("aggregation.divisor=null", "metrics=with_entropy", "correction.high=1.1")
    overrides += more if "correction=sequence_mask" in overrides else more[:2]
    if "aggregation=balanced" not in overrides:
        overrides += ("aggregation=prompt_mean",)
    assert_nothing_depends_on_sharing(
        *(module_of(share, *overrides) for share in ("false", "true"))
    )


def test_a_reference_with_prompts_of_its_own_has_the_numbers_of_documents_that_do_not_share():
    """Its prompts are two tokens longer, but for those of the first group, which differ from
    completion to completion."""
    overrides = ("kl=k3", "kl.coefficient=0.1", "kl.reference=initial", "loss=grpo")
    made = []
    for number, document in enumerate(documents()):
        begin = [number, 1] if document.group == 0 else [3, 4]
        tokens = torch.cat([torch.tensor(begin), document.tokens])
        made.append(replace(document, reference_tokens=tokens))
    expected = results(module_of("false", *overrides), make_step(made, 1000))
    module = module_of("true", *overrides)
    for max_tokens in (1000, 21):
        step = make_step(made, max_tokens, share_prompts=True)
        read = [micro_batch.for_reference for micro_batch in step.micro_batches]
        assert any(micro_batch.shared for micro_batch in step.micro_batches)
        assert any(micro_batch.shared for micro_batch in read)
        for micro_batch in read:
            shared = sum(micro_batch.shared)
            assert sum(micro_batch.document_lengths) - shared <= max_tokens
        assert_the_same(results(module, step), expected)


def test_models_that_cannot_share_are_refused_and_auto_is_off():
    """Of an unknown type, and with rotary positions that depend on a document's length."""
    shape = {"vocab_size": 19, "hidden_size": 8, "n_head": 2, "n_layer": 1}
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(**shape))
    llama = small_llama(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            "factor": 2.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
    )
    for model, got in ((bloom, "bloom"), (llama, "longrope")):
        policy = Policy(model, None)
        assert sharing(False, policy) is False
        assert sharing("auto", policy) is False
        assert not policy.by_document
        with pytest.raises(ConfigError, match=rf"model.share_prompts=true .*\(got {got}\)"):
            sharing(True, policy)
    policy = Policy(small_llama(), None)
    assert sharing("auto", policy) is False
    assert not policy.by_document
    assert sharing(True, policy) is True
    assert policy.by_document
    assert sharing("auto", policy) == "auto"


FOLDER = "model=huggingface model.path=folder"
PROMPTS_OF_7 = (
    "task=prompts task.path=prompts.jsonl task.max_prompt_length=7 rollout.max_completion_length=7"
)


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            "model.share_prompts=true",
            "7 + 8 x 7 = 63 tokens for a prompt with its completions in place of 112, if all are "
            "of the greatest length",
        ),
        (
            f"{FOLDER} rollout.group_size=1 {PROMPTS_OF_7}",
            "on a GPU 7 + 1 x 7 = 14 tokens for a prompt with its completions in place of 14, if "
            "all are of the greatest length; not shared then, since that is less than a fifth",
        ),
        (
            "model.share_prompts=auto",
            "no, since the model computes in float32; model.share_prompts=true shares them",
        ),
        (
            "model.share_prompts=auto parallelism=tensor",
            "no; model.share_prompts=true would be refused with the reason",
        ),
        (
            f"{FOLDER} rollout=recorded rollout.path=rollouts.jsonl",
            "what they save is known once the run has read its data",
        ),
        ("model.share_prompts=false", None),
    ],
)
def test_check_shows_the_tokens_that_are_saved(overrides, shown):
    config = config_of(*overrides.split())
    lines = [line for line in arithmetic(config) if line.startswith("shared prompts: ")]
    assert lines == ([] if shown is None else [f"shared prompts: {shown}"])


RUNS = {
    "two updates of a batch": ("rollout.old_log_probs=training", "loss=grpo"),
    "reference in rewards": (
        "kl=k3",
        "kl.place=reward",
        "kl.coefficient=0.1",
        "kl.reference=initial",
        "advantage=rloo",
    ),
    "critic": ("advantage=gae", "rollout.passes=2", "accumulation.docs_per_step=16"),
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_a_run_has_the_numbers_of_one_that_does_not_share(overrides):
    """Its completions are sampled, and scored before its updates by policy, reference and
    critic. Micro-batches of 24 tokens hold the 4 + 4 x 4 tokens of one prompt."""
    rows = {}
    for share in ("false", "true"):
        settings = (*SHORT, "trainer.device=cpu", f"model.share_prompts={share}", *overrides)
        module, loader = module_and_loader(*last_of_each_key(*settings))
        num_computed = []
        body = type(module.policy)._body

        def counted(policy, tokens, *args, body=body, num_computed=num_computed, **more):
            num_computed.append(tokens.numel())
            return body(policy, tokens, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(module.policy), "_body", counted)
            rows[share] = [
                module.training_step(step, number)["metrics"]
                for number, step in enumerate(itertools.islice(loader, 4))
            ]
        loader.source.close()
        rows[share, "tokens"] = sum(num_computed)
    for row, expected in zip(rows["true"], rows["false"], strict=True):
        ignored = COUNTED.union(CLOCK_COLUMNS)
        compared = {name: value for name, value in row.items() if name not in ignored}
        expected = {name: value for name, value in expected.items() if name not in ignored}
        assert compared == pytest.approx(expected, rel=1e-8, abs=1e-10)
    # 8 tokens a document, or with its prompt once 5 of them.
    assert rows["true", "tokens"] < 0.7 * rows["false", "tokens"]

"""A step spread over ranks has the loss, metrics and gradients of one process.

In float64 on real processes over gloo, which run `spread.py`. The models are small: GPT-2, Qwen2,
Qwen3, Mistral and Gemma 3, two of them with LoRA's adapters.
"""

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from builders import models
from builders.processes import world
from model import spread

from pgtoolkit.batch import MicroBatch
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.model.spread import refuse_misfit

pytestmark = pytest.mark.slow  # ranks are processes; test_parallel_loss.py has them as threads

TOLERANCE = 1e-12
OF_FLOAT32 = 1e-5  # Gemma's norms add up gradients in float32
GSPO = {"loss": "gspo", "aggregation": "sample_mean", "metrics": "with_entropy"}
GRPO = {"loss": "grpo", "aggregation": "prompt_mean", "metrics": "basic"}
LOSS_ONLY = {"loss": "gspo", "aggregation": "token_mean", "metrics": "none"}
EVERY_MODEL = (("gpt2", GSPO), ("qwen2", GRPO), ("qwen3", LOSS_ONLY))
CHECKPOINTED = ("qwen2_checkpointed", GSPO)
BY_DOCUMENT = ("qwen2_checkpointed_by_document", LOSS_ONLY)  # as on a GPU
COMPILED = ("qwen3_checkpointed_compiled", GRPO)
WINDOWED = ("mistral", LOSS_ONLY)
MIXTURE = ("mixture_experts", LOSS_ONLY)
GEMMA3 = ("gemma3_tied_checkpointed", LOSS_ONLY)
ADAPTED_EXPERTS = ("mixture_experts_lora", LOSS_ONLY)
ADAPTED = (("gpt2_tied_lora", GSPO), ("qwen2_checkpointed_lora", GRPO), ADAPTED_EXPERTS)
TP = "tensor_parallel"
SDP = "sequence_data_parallel"
DP = "data_parallel"
PP = "pipeline_parallel"
CUTS = {
    "data": ({DP: 2}, "", (("qwen2", GRPO), ("gpt2_tied_lora", GSPO))),
    "fully sharded": (
        {DP: 2},
        "shard",
        (
            ("qwen3", LOSS_ONLY),
            ("gpt2_tied", GRPO),
            CHECKPOINTED,
            BY_DOCUMENT,
            GEMMA3,
            MIXTURE,
            *ADAPTED,
        ),
    ),
    "tensor": ({TP: 2}, "", (*EVERY_MODEL, ("qwen2_tied", GSPO), CHECKPOINTED, GEMMA3)),
    "sequence": (
        {TP: 2},
        "sequence",
        (("qwen3", LOSS_ONLY), ("gpt2_tied", GSPO), CHECKPOINTED, WINDOWED, BY_DOCUMENT, GEMMA3),
    ),
    "sequence-data": (
        {SDP: 2},
        "",
        (("gpt2", GSPO), ("qwen3", LOSS_ONLY), WINDOWED, BY_DOCUMENT, GEMMA3, MIXTURE, *ADAPTED),
    ),
    "pipeline": (
        {PP: 2},
        "",
        (
            ("gpt2", LOSS_ONLY),
            ("qwen2", LOSS_ONLY),
            ("gemma3", LOSS_ONLY),
            ADAPTED_EXPERTS,
            BY_DOCUMENT,
        ),
    ),
    "tensor 4": ({TP: 4}, "", (("gpt2", GSPO), ("qwen3", LOSS_ONLY))),
    "sequence 4": ({TP: 4}, "sequence", (("qwen2", GRPO),)),
    "sequence-data 4": ({SDP: 4}, "", (("qwen2", GRPO),)),
    "data x sequence-data": ({DP: 2, SDP: 2}, "", (("gpt2", GSPO),)),
    "data x sequence-data, fully sharded": (
        {DP: 2, SDP: 2},
        "shard",
        (("qwen2", GRPO), ("gpt2_tied_lora", GSPO)),
    ),
    "data x tensor": ({DP: 2, TP: 2}, "", (("qwen2", GRPO),)),
    "data x tensor, fully sharded": (
        {DP: 2, TP: 2},
        "shard",
        (("gpt2", GSPO), ("qwen2_tied", GSPO)),
    ),
    "data x sequence, fully sharded": (
        {DP: 2, TP: 2},
        "shard sequence",
        (("gpt2", GSPO), CHECKPOINTED, COMPILED),
    ),
    "sequence-data x tensor": ({SDP: 2, TP: 2}, "", (("qwen2", GRPO),)),
    "sequence-data x sequence": ({SDP: 2, TP: 2}, "sequence", (("gpt2", GSPO), CHECKPOINTED)),
    "pipeline x data": ({PP: 2, DP: 2}, "", (("gpt2", LOSS_ONLY),)),
    "pipeline x data, fully sharded": ({PP: 2, DP: 2}, "shard", (("qwen2", LOSS_ONLY),)),
    "pipeline x tensor": ({PP: 2, TP: 2}, "", (("qwen2", LOSS_ONLY),)),
}


CUTS_OVER_TWO_RANKS = ["data", "tensor", "sequence", "sequence-data", "pipeline"]
"""Without "fully sharded": sharding divides weights, which no objective sees."""
SOME_OBJECTIVES = (
    ("grpo", "constant", "none"),
    ("gspo", "prompt_mean", "with_entropy"),
    ("gmpo", "token_mean", "basic"),
    ("vespo", "prompt_mean", "basic"),
    ("cispo", "sample_mean", "with_entropy"),
)


@functools.cache
def step_of_one_process(kind: str, objective: tuple) -> dict:
    return spread.step_of_one_process(kind, **dict(objective))


@pytest.mark.parametrize("name", CUTS)
def test_the_step_does_not_depend_on_how_the_model_is_spread(name):
    sizes, options, cases = CUTS[name]
    assert_steps_are_those_of_one_process(sizes, options, cases)


@pytest.mark.parametrize("name", CUTS_OVER_TWO_RANKS)
def test_no_objective_depends_on_how_the_model_is_spread(name):
    """Each way in which a document's tokens make its ratio, each aggregation and each level of the
    metrics, and three corrections.

    The test above has three objectives, and test_parallel_loss.py every family over such ranks.
    """
    sizes, options, _ = CUTS[name]
    cases = []
    for loss, correction in (
        ("gspo", "sequence_mask"),
        ("grpo", "off_policy_mask"),
        ("cispo", "token_truncate"),
    ):
        objective = {"loss": loss, "aggregation": "sample_mean", "correction": correction}
        cases.append(("gpt2", objective | {"metrics": "none" if name == "pipeline" else "basic"}))
    for loss, aggregation, level in SOME_OBJECTIVES:
        objective = {
            "loss": loss,
            "aggregation": aggregation,
            "metrics": "none" if name == "pipeline" else level,
        }
        cases.append(("gpt2", objective | ({"divisor": 8.0} if aggregation == "constant" else {})))
    assert_steps_are_those_of_one_process(sizes, options, cases)


def assert_steps_are_those_of_one_process(
    sizes: dict[str, int], options: str, cases: Sequence[tuple[str, dict]]
) -> None:
    """Assert that each number and gradient that a rank has is that of one process, and that none is
    missing on all ranks."""
    num_ranks = math.prod(sizes.values())
    shard = "shard" in options
    sequence_parallel = "sequence" in options
    steps_by_rank = world(num_ranks).run(
        spread.spread_steps, list(cases), tuple(sizes.items()), shard, sequence_parallel
    )
    for i, (kind, objective) in enumerate(cases):
        expected = step_of_one_process(kind, tuple(objective.items()))
        tolerance = OF_FLOAT32 if kind.startswith("gemma3") else TOLERANCE
        compared = set()
        for rank in range(num_ranks):
            for key, value in steps_by_rank[rank][i].items():
                message = functools.partial("{0}, {1}, rank {2}: {3}".format, kind, key, rank)
                torch.testing.assert_close(
                    value, expected[key], rtol=tolerance, atol=tolerance, msg=message
                )
                compared.add(key)
        assert compared == set(expected)


def test_a_rank_gets_its_piece_of_the_packed_axis():
    """7 tokens of 2 documents are divided among 3 ranks of 2 tensor ranks each: pieces have 4
    tokens, and the last is padding."""
    index = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    numbers = torch.arange(7)
    micro_batch = MicroBatch(
        tokens=numbers,
        position_ids=numbers,
        labels=numbers,
        document_index=index,
        old_log_probs=numbers.float(),
        advantages=numbers.float(),
        num_documents=2,
        group_index=index[:2],
        names=("a", "b"),
        document_lengths=(3, 4),
    )
    pieces = []
    for rank in range(3):
        sizes = {"sequence_data_parallel": 3, "tensor_parallel": 2}
        layout = SimpleNamespace(size=sizes.get, rank_in=lambda _axis, rank=rank: rank)
        pieces.append(local_tokens(micro_batch, layout))
    assert [piece.labels.tolist() for piece in pieces] == [
        [0, 1, 2, 3],
        [4, 5, 6, -1],
        [-1, -1, -1, -1],
    ]
    assert [piece.position_ids.tolist() for piece in pieces] == [
        [0, 1, 2, 3],
        [4, 5, 6, 0],
        [0, 0, 0, 0],
    ]
    assert [piece.document_index.tolist() for piece in pieces] == [
        [0, 0, 0, 1],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
    ]
    for piece in pieces:
        assert piece.names == ("a", "b")
        assert piece.group_index.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "gpt2",
            {TP: 3},
            (
                "tensor_parallel=3 needs a divisor of the model's 4 attention heads "
                ".*tensor_parallel=2"
            ),
        ),
        (
            "qwen2",
            {TP: 8},
            (
                "tensor_parallel=8 needs a divisor of the model's 4 key-value heads "
                ".*tensor_parallel=4"
            ),
        ),
        (
            "mixture",
            {TP: 2},
            "tensor_parallel=2 needs a model without a mixture .*parallelism=fsdp",
        ),
        (
            "gpt2",
            {PP: 3},
            "pipeline_parallel=3 needs at most the model's 2 layers .*pipeline_parallel=2",
        ),
        (
            "gpt2_tied",
            {PP: 2},
            "pipeline_parallel=2 needs a model whose embedding and LM head are two matrices",
        ),
    ],
)
def test_a_model_whose_parts_the_ranks_cannot_divide_is_refused(kind, sizes, message):
    model = models.small_policy(kind).model
    with pytest.raises(ConfigError, match=message):
        refuse_misfit(model, dict.fromkeys((TP, SDP, DP, PP), 1) | sizes, False)
    refuse_misfit(model, {TP: 1 if kind == "mixture" else 4, SDP: 1, DP: 1, PP: 1}, False)


def test_tensor_parallel_refuses_a_model_of_an_unknown_type():
    model = models.small_policy("gpt2").model
    model.config.model_type = "mamba"
    with pytest.raises(
        ConfigError, match=r"tensor_parallel=2 needs a model of type gemma3_text, .* .got mamba"
    ):
        refuse_misfit(model, {TP: 2, SDP: 1, DP: 1, PP: 1}, False)
    refuse_misfit(model, {TP: 1, SDP: 1, DP: 2, PP: 1}, False)

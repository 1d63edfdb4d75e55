"""One rank of each node reads the model and the prompts of a run and passes them to the others.

The weights and prompts of every rank are compared with those of a build in one process.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.processes import world
from builders.runs import config_of, with_model

from pgtoolkit.assembly.build import build
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, RankLost
from pgtoolkit.model.policy import Policy, all_tensors
from pgtoolkit.ranks.collectives import local, whole
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.training.module import PolicyGradientModule

pytestmark = pytest.mark.slow  # ranks are processes

FSDP = ("parallelism.data_parallel=4", "parallelism.shard=true")


def build_on_nodes(
    config: Config, sizes: dict[str, int], model_paths: list[str], prompt_paths: list[str] | None
) -> tuple[PolicyGradientModule, StepLoader]:
    """Build on this rank, as one of two ranks of a node; the paths are those of each rank."""
    rank = torch.distributed.get_rank()
    os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun numbers the nodes
    try:
        layout = Layout.of_world("cpu", 60, **sizes)
    finally:
        del os.environ["GROUP_RANK"]
    config = replace(config, model=replace(config.model, path=model_paths[rank]))
    if prompt_paths is not None:
        config = replace(config, task=replace(config.task, path=prompt_paths[rank]))
    return build(config, layout=layout)


def gathered_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: whole(tensor, tensor.dtype).clone() for name, tensor in policy.weights().items()}


def contents_of_rank(*arguments) -> tuple:
    """Return a rank's gathered weights, the ranks that read, the bytes of storage behind its
    tensors, the bytes of the tensors themselves, and its first three prompts."""
    module, loader = build_on_nodes(*arguments)
    tensors = [local(tensor) for tensor in all_tensors(module.model).values()]
    storage_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    tensor_bytes = sum(tensor.nbytes for tensor in tensors)
    prompts = [loader.source.task.prompt(number) for number in range(3)]
    weights = gathered_weights(module.policy)
    return weights, module.layout.readers, storage_bytes, tensor_bytes, prompts


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    model = small_llama(3, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)
    return save_with_tokenizer(model.bfloat16(), tmp_path_factory.mktemp("llama"))


def config_with_prompts(model: Path, prompts: Path | str, *overrides: str) -> Config:
    settings = [
        setting for setting in with_model(model, *overrides) if not setting.startswith("task.")
    ]
    return config_of(*settings, "task=prompts", f"task.path={prompts}")


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        (
            {"data_parallel": 4},
            [FSDP[0], "model.lora_rank=2", "model.gradient_checkpointing=true"],
        ),
        ({"data_parallel": 4}, [*FSDP, "model.random_weights=true", "kl=k3", "kl.coefficient=0.1"]),
        (
            {"data_parallel": 2, "tensor_parallel": 2},
            ["parallelism.data_parallel=2", "parallelism.tensor_parallel=2"],
        ),
    ],
    ids=["ddp with LoRA", "fsdp, random weights", "tensor"],
)
def test_one_rank_of_each_node_reads_and_all_have_the_weights_of_one_process(
    llama, tmp_path, sizes, settings
):
    """The ranks that do not read are given paths where nothing lies."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{n}=", "answer": "2"}}\n' for n in range(5)))
    missing = str(tmp_path / "missing")
    config = config_with_prompts(llama, prompts, *settings)
    in_one_process = [setting for setting in settings if not setting.startswith("parallelism.")]
    module, loader = build(config_with_prompts(llama, prompts, *in_one_process))
    expected_weights = gathered_weights(module.policy)
    expected_prompts = [loader.source.task.prompt(number) for number in range(3)]

    ranks = world(4).run(
        contents_of_rank, config, sizes, [str(llama), missing] * 2, [str(prompts), missing] * 2
    )

    for weights, readers, storage_bytes, tensor_bytes, rank_prompts in ranks:
        assert readers == (0, 2)
        assert rank_prompts == expected_prompts
        assert weights.keys() == expected_weights.keys()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
        # A rank's parts keep no memory of the tensors that they were cut from.
        assert tensor_bytes <= storage_bytes < 1.2 * tensor_bytes


def refusal_of_rank(*arguments) -> tuple[type, str]:
    with pytest.raises((ConfigError, RankLost)) as refused:
        build_on_nodes(*arguments)
    return refused.type, str(refused.value)


def test_nodes_with_different_weights_are_refused(llama, tmp_path):
    model = small_llama(4, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)
    other = save_with_tokenizer(model.bfloat16(), tmp_path / "other")
    config = config_of(*with_model(llama, *FSDP))
    paths = [str(llama)] * 2 + [str(other)] * 2
    for kind, message in world(4).run(refusal_of_rank, config, {"data_parallel": 4}, paths, None):
        assert kind is RankLost
        assert message.startswith(
            "the weights of the model on rank 2, 3 differ from those on rank 0. Every process"
        )


@pytest.mark.parametrize(
    ("nodes_without", "prefix"), [([1], "rank 2: "), ([0, 1], "")], ids=["second node", "both"]
)
def test_nodes_without_the_model_are_refused_on_all_ranks(llama, tmp_path, nodes_without, prefix):
    missing = str(tmp_path / "missing")
    config = config_of(*with_model(llama, *FSDP))
    paths = [missing if rank // 2 in nodes_without else str(llama) for rank in range(4)]
    for kind, message in world(4).run(refusal_of_rank, config, {"data_parallel": 4}, paths, None):
        assert kind is ConfigError
        assert message.startswith(f"{prefix}model.path={missing} needs")


def test_nodes_with_different_prompts_are_refused(llama, tmp_path):
    files = []
    for rank in range(4):
        file = tmp_path / f"{rank}.jsonl"
        file.write_text(
            f'{{"prompt": "10=", "answer": "2"}}\n{{"prompt": "{rank // 2}=", "answer": "2"}}\n'
        )
        files.append(str(file))
    config = config_with_prompts(llama, files[0], *FSDP)
    refusals = world(4).run(refusal_of_rank, config, {"data_parallel": 4}, [str(llama)] * 4, files)
    for kind, message in refusals:
        assert kind is RankLost
        assert message.startswith(
            "the prompts of the task on rank 2, 3 differ from those on rank 0. Every process must"
        )

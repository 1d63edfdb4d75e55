"""The start of a run on several ranks: one of each node reads model and prompts, the others get
them from it."""

import os
from dataclasses import replace

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.processes import world
from builders.runs import config_of, with_model
from torch.distributed.tensor import DTensor

from pgtoolkit.errors import ConfigError, RankLost
from pgtoolkit.model.policy import all_tensors
from pgtoolkit.ranks.collectives import local, whole
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.training.build import build

pytestmark = pytest.mark.slow  # ranks are processes

FSDP = ("parallelism.data_parallel=4", "parallelism.shard=true")


def on_node(config, sizes: dict[str, int], folders: list[str], prompts: list[str] | None):
    """Module and loader of this rank, of nodes of two ranks each, where each rank has paths of its
    own."""
    rank = torch.distributed.get_rank()
    os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun numbers the nodes
    try:
        layout = Layout.of_world("cpu", 60, **sizes)
    finally:
        del os.environ["GROUP_RANK"]
    config = replace(config, model=replace(config.model, path=folders[rank]))
    if prompts is not None:
        config = replace(config, task=replace(config.task, path=prompts[rank]))
    return build(config, layout=layout)


def whole_weights(policy) -> dict[str, torch.Tensor]:
    return {name: whole(tensor, tensor.dtype).clone() for name, tensor in policy.weights().items()}


def what_a_rank_has(*arguments) -> tuple:
    module, loader = on_node(*arguments)
    tensors = all_tensors(module.model).values()
    held = sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)
    parts = sum(
        local(tensor).nbytes if isinstance(tensor, DTensor) else tensor.nbytes for tensor in tensors
    )
    asked = [loader.source.task.prompt(number) for number in range(3)]
    return whole_weights(module.policy), module.layout.readers, held, parts, asked


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)
    return save_with_tokenizer(model.bfloat16(), tmp_path_factory.mktemp("llama"))


def asking(folder, file, *more: str):
    """The configuration of a run on four ranks, with prompts from a file, and its modules' in one
    process."""
    settings = [one for one in with_model(folder, *more) if not one.startswith("task.")]
    settings += ["task=prompts", f"task.path={file}"]
    return config_of(*settings)


@pytest.mark.parametrize(
    ("sizes", "more"),
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
    llama, tmp_path, sizes, more
):
    """The others are given paths where nothing lies."""
    file, nowhere = tmp_path / "prompts.jsonl", str(tmp_path / "nowhere")
    file.write_text("".join(f'{{"prompt": "{number}=", "answer": "2"}}\n' for number in range(5)))
    config = asking(llama, file, *more)
    places = [str(llama), nowhere] * 2, [str(file), nowhere] * 2
    alone = asking(llama, file, *(one for one in more if not one.startswith("parallelism.")))
    module, loader = build(alone)
    expected = whole_weights(module.policy)
    asked = [loader.source.task.prompt(number) for number in range(3)]
    for weights, readers, held, parts, prompts in world(4).run(
        what_a_rank_has, config, sizes, *places
    ):
        assert readers == (0, 2)
        assert prompts == asked
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert parts <= held < 1.2 * parts  # not the whole tensors that they were cut from


def refusal(*arguments) -> tuple[type, str]:
    with pytest.raises((ConfigError, RankLost)) as refused:
        on_node(*arguments)
    return refused.type, str(refused.value)


def test_nodes_that_have_read_other_weights_or_none_are_told(llama, tmp_path):
    """As the nodes of a cluster may, whose disks are their own."""
    model = small_llama(4, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)
    other, nowhere = (
        str(save_with_tokenizer(model.bfloat16(), tmp_path / "other")),
        str(tmp_path / "nowhere"),
    )
    config = config_of(*with_model(llama, *FSDP))
    sizes = {"data_parallel": 4}
    for kind, said in world(4).run(refusal, config, sizes, [str(llama)] * 2 + [other] * 2, None):
        assert kind is RankLost
        assert said.startswith(
            "the weights of the model on rank 2, 3 differ from those on rank 0. Every process"
        )
    for kind, said in world(4).run(refusal, config, sizes, [str(llama)] * 2 + [nowhere] * 2, None):
        assert kind is ConfigError
        assert said.startswith(f"rank 2: model.path={nowhere} needs")
    for kind, said in world(4).run(refusal, config, sizes, [nowhere] * 4, None):
        assert kind is ConfigError
        assert said.startswith(f"model.path={nowhere} needs")


def test_nodes_that_have_read_other_prompts_are_told(llama, tmp_path):
    files = [str(tmp_path / f"{number}.jsonl") for number in (0, 0, 1, 1)]
    for number, file in enumerate(files):
        with open(file, "w") as opened:
            opened.write(
                f'{{"prompt": "10=", "answer": "2"}}\n{{"prompt": "{number // 2}=", "answer": '
                f'"2"}}\n'
            )
    config = asking(llama, files[0], *FSDP)
    for kind, said in world(4).run(refusal, config, {"data_parallel": 4}, [str(llama)] * 4, files):
        assert kind is RankLost
        assert said.startswith(
            "the prompts of the task on rank 2, 3 differ from those on rank 0. Every process must"
        )

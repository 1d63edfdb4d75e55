"""The folder that a server reads weights from: the numbers in its files, its place, its end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from builders.commands import wait_until
from builders.models import save_with_tokenizer, small_llama, small_policy
from builders.processes import fork_server, layout, world
from builders.runs import config_of, with_model
from builders.vllm_servers import COMMAND
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pgtoolkit.assembly.build import build
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import StorageError
from pgtoolkit.sampling.weights_folder import WeightsFolder, _lock_pages


def test_a_full_disk_is_reported_with_the_key_of_the_folder(tmp_path):
    folder = WeightsFolder(tmp_path, tmp_path, torch.float32)
    folder.make(1, lambda _: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            StorageError, match=r"weights for the sampling server cannot be written.*weights_folder"
        ):
            folder.make_room({"weight": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.remove()


def test_only_floating_point_numbers_are_written_in_the_folders_type(tmp_path):
    """bfloat16 has 8 bits of a number, so that 257 and 2^31 + 1 would become others."""
    steps = torch.tensor([257, 2**31 + 1, -3])
    others = {
        "mask": torch.tensor([True, False, True, True, False]),
        "steps": steps,
        "index": steps[::2].int(),
        "bytes": torch.tensor([255, 0, 7]).byte(),
    }
    weight = torch.tensor([1 / 3, 1.0])
    folder = WeightsFolder(tmp_path, tmp_path, torch.bfloat16)
    path = folder.make(1, lambda _: None)
    folder.make_room({**others, "weight": weight})
    folder.fill({**others, "weight": weight})
    written = load_file(path / "model.safetensors")
    expected = {**others, "weight": torch.tensor([0.333984375, 1.0], dtype=torch.bfloat16)}
    assert written.keys() == expected.keys()
    for name, numbers in expected.items():
        assert written[name].dtype == numbers.dtype
        assert torch.equal(written[name], numbers)
    folder.remove()


def test_experts_have_the_names_in_a_file_that_models_are_published_with(tmp_path):
    """vLLM passes over tensors with other names. The numbers are those of transformers' file."""
    model = small_policy("mixture").model.float()
    folder = WeightsFolder(tmp_path, tmp_path, torch.float32, published=True)
    path = folder.make(1, lambda _: None)
    for _ in range(2):
        model.save_pretrained(tmp_path / "model")
        published = load_file(tmp_path / "model" / "model.safetensors")
        folder.make_room(model.state_dict())
        folder.fill(model.state_dict())
        written = load_file(path / "model.safetensors")
        assert written.keys() == published.keys()
        assert all(torch.equal(written[name], weight) for name, weight in published.items())
        for weight in model.parameters():
            weight.data += 1
    assert len([name for name in written if ".experts." in name]) == 2 * 5 * 3
    folder.remove()


@pytest.mark.parametrize(("more", "in_memory"), [(0, False), (1, True)])
def test_64_mib_of_shared_memory_stay_free_beside_the_weights(
    tmp_path, monkeypatch, more, in_memory
):
    """Other programs need some of it. Weights that would leave less are written to the disk."""
    num_bytes = 3 * 2**30
    free = num_bytes + 64 * 1024 * 1024 + more
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    folder = WeightsFolder(None, tmp_path, torch.float32)
    path = folder.make(num_bytes, lambda _: None)
    assert path.parent == (Path("/dev/shm") if in_memory else tmp_path)
    folder.remove()


@pytest.mark.parametrize(("for_others", "rights"), [(False, 0o700), (True, 0o755)])
def test_other_users_can_read_weights_only_where_one_may_have_started_the_server(
    tmp_path, for_others, rights
):
    folder = WeightsFolder(tmp_path, tmp_path, torch.float32, for_others)
    path = folder.make(1, lambda path: (path / "config.json").touch())
    assert path.stat().st_mode & 0o777 == rights
    folder.remove()


def make_folder_and_die(folder: Path) -> None:
    made = WeightsFolder(folder, None, torch.float32).make(1, lambda folder: None)
    (folder / "made").write_text(f"{made} {made.exists()}")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_folder_of_a_process_that_is_killed_is_deleted(tmp_path):
    process = fork_server().Process(target=make_folder_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    path, existed = (tmp_path / "made").read_text().split()
    assert existed == "True"
    wait_until(lambda: not Path(path).exists(), 30)


def write_on_ranks(config: Config, sizes: dict[str, int]) -> str:
    """Write two versions of a module's weights on these ranks; return a copy of the folder."""
    layout_here = layout(**sizes)
    module, loader = build(config, layout=layout_here)
    sampler = loader.source.sampler
    for version in range(2):
        sampler._folder.write(module.policy.weights(), sampler._layout, sampler._write_settings)
        if version == 0:
            assert all(room.numel() for room in sampler._folder._rooms.values())
            with torch.no_grad():
                for parameter in module.model.parameters():
                    parameter += 1
    dist.barrier()
    if layout_here.rank == 0:
        shutil.copytree(sampler._folder.path, f"{sampler._folder.path.parent}/kept")
    dist.barrier()
    sampler.close()
    return f"{sampler._folder.path.parent}/kept"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "more"),
    [
        ("mixture", {"data_parallel": 2}, ["parallelism.shard=true"]),
        ("llama", {"data_parallel": 2}, ["model.lora_rank=2"]),
        ("llama", {"tensor_parallel": 2}, []),
        ("llama", {"pipeline_parallel": 2}, ["metrics=none"]),
    ],
    ids=["fsdp", "ddp with LoRA", "tensor", "pipeline"],
)
def test_ranks_write_a_file_each_that_together_are_the_weights_of_one_process(
    tmp_path, kind, sizes, more
):
    model = small_llama(5, num_hidden_layers=3)
    if kind == "mixture":
        model = small_policy("mixture").model.float()
    model = save_with_tokenizer(model, tmp_path / "model")
    sampler = [
        "sampler=vllm",
        f"sampler.executable={COMMAND}",
        f"sampler.weights_folder={tmp_path}/weights",
    ]
    settings = with_model(model, "trainer.device=cpu", "model.dtype=bfloat16", *sampler, *more)
    parallelism = [f"parallelism.{axis}={size}" for axis, size in sizes.items()]
    config = config_of(*settings, *parallelism)
    folders = [Path(folder) for folder in world(2).run(write_on_ranks, config, sizes)]
    files = sorted(folders[0].glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    assert 0.3 < files[0].stat().st_size / files[1].stat().st_size < 3
    index = json.loads((folders[0] / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {name: file.name for file in files for name in load_file(file)}
    assert ("model.layers.0.mlp.experts.4.up_proj.weight" in index) == (kind == "mixture")
    loaded = AutoModelForCausalLM.from_pretrained(folders[0]).state_dict()
    alone = [setting for setting in settings if not setting.startswith("parallelism.")]
    module, _ = build(config_of(*alone), run_dir=tmp_path)
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter += 1
    expected = {name: weight.bfloat16() for name, weight in module.policy.weights().items()}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name].bfloat16(), weight) for name, weight in expected.items())


@pytest.mark.gpu
@pytest.mark.parametrize(("shared", "device"), [(True, "cuda"), (False, "cuda"), (True, "cpu")])
def test_a_process_with_a_gpu_has_written_the_file_when_fill_returns(tmp_path, shared, device):
    """Also those of a run with trainer.device=cpu."""
    torch.cuda.init()
    folder = WeightsFolder(None if shared else tmp_path, tmp_path, torch.bfloat16)
    weights = {
        "large": torch.randn(8000, 5000, device=device),
        "small": torch.randn(3, device=device),
    }
    weights["count"] = torch.arange(7, device=device)
    folder.make(2**27, lambda _: None)
    try:
        for _ in range(3):
            folder.make_room(weights)
            folder.fill(weights)
            loaded = load_file(folder.path / "model.safetensors")
            for name, tensor in weights.items():
                assert torch.equal(loaded[name], tensor.to(loaded[name].dtype).cpu())
                tensor.add_(1)
            assert (folder._known_at is not None) == shared
        if shared:
            content = folder._rooms["large"]
            assert content.is_pinned()
            assert not _lock_pages(content)  # they are locked already
            assert torch.ones(3, device="cuda").sum().item() == 3
    finally:
        folder.remove()

"""Real steps of TRL's trainer on a small model, with its own loss or ours.

As a script it is a process that torchrun starts: `trl_runs.py TASKS OUT`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from types import SimpleNamespace

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from builders.models import ALPHABET
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from pgtoolkit.adapters.trl import PolicyGradientTrainer
from pgtoolkit.model.setup import character_tokenizer


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Return rewards that depend on tokens and lengths, so that advantages differ."""
    return [sum(ids) / 10 - (7 in ids) for ids in completion_ids]


def config(**changes) -> GRPOConfig:
    """Return the settings of three optimizer steps of two micro-batches of four completions, on a
    CPU, without files or trackers."""
    options = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "max_steps": 3,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return GRPOConfig(tempfile.mkdtemp(), **(options | changes))


def trainer(
    model: str, ours: dict | None, changes: dict, engine: dict | None = None
) -> GRPOTrainer:
    """Return the trainer before its first step.

    ours: keywords of PolicyGradientTrainer; None for TRL's own loss.
    engine: fields of GRPOConfig on the correction for vLLM; `sample` then takes vLLM's place.
    """
    data = Dataset.from_dict({"prompt": [f"{number}=" for number in range(40)]})
    args = config(**changes, **(engine or {}))
    trainer_class = GRPOTrainer if ours is None else PolicyGradientTrainer
    new_trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        processing_class=character_tokenizer(ALPHABET),
        **(ours or {}),
    )
    if engine is not None:
        new_trainer.rollout_func = sample
        new_trainer.use_vllm = True
        new_trainer._last_loaded_step = -1
        new_trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return new_trainer


def sample(prompts: list, _: object) -> dict[str, list]:
    """Return completions with log-probs that are not the trainer's. The first is None, which vLLM
    gives at times."""
    generator = torch.Generator().manual_seed(len(prompts))
    lengths = (1 + torch.randint(8, (len(prompts),), generator=generator)).tolist()
    tokens = [torch.randint(11, (length,), generator=generator).tolist() for length in lengths]
    known = [(-2.5 + 0.5 * torch.randn(length, generator=generator)).tolist() for length in lengths]
    known[0][0] = None
    return {"prompt_ids": [[1, 10] for _ in prompts], "completion_ids": tokens, "logprobs": known}


def trained(trainer: GRPOTrainer) -> tuple[torch.Tensor, list[dict]]:
    """Train, and return all weights as a vector and the rows of the log."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([x.detach().flatten() for x in model.parameters()])
    return weights, trainer.state.log_history


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The second rank is forked, so that TRL is imported once.
    second = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if second == 0 else "0"
    results = [trained(trainer(*task)) for task in json.loads(sys.argv[1])]
    if os.environ["RANK"] == "0":
        torch.save(results, sys.argv[2])
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))

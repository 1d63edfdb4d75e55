"""Real steps of TRL's trainer on a small model: its own loss, or ours in its place.

As a script it is one process of several, as torchrun starts them: `trl_runs.py TASKS OUT`.
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


def reward(completion_ids, **_):
    """Uneven over tokens and lengths, so that advantages differ."""
    return [sum(ids) / 10 - (7 in ids) for ids in completion_ids]


def config(**changes) -> GRPOConfig:
    """Three optimizer steps of two micro-batches of four completions, on a CPU, without files or
    trackers."""
    sizes = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
    }
    sizes |= {"max_completion_length": 8, "max_steps": 3}
    steps = {
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "bf16": False,
        "use_cpu": True,
    }
    quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return GRPOConfig(tempfile.mkdtemp(), **(sizes | steps | quiet | changes))


def trainer(model: str, ours: dict | None, changes: dict, engine: dict | None = None):
    """The trainer, before its first step; ours: keywords of PolicyGradientTrainer, None for TRL's
    own loss.

    engine: fields of GRPOConfig on the correction for vLLM, whose place `sample` takes then.
    """
    data = Dataset.from_dict({"prompt": [f"{number}=" for number in range(40)]})
    args = config(**changes, **(engine or {}))
    made = {"model": model, "reward_funcs": reward, "args": args, "train_dataset": data}
    kind, more = (GRPOTrainer, {}) if ours is None else (PolicyGradientTrainer, ours)
    made = kind(**made, processing_class=character_tokenizer(ALPHABET), **more)
    if engine is not None:
        made.rollout_func, made.use_vllm, made._last_loaded_step = sample, True, -1
        made.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    return made


def sample(prompts, _):
    """Completions with log-probs beside those of the trainer; one that is not known, as vLLM has it
    at times."""
    generator = torch.Generator().manual_seed(len(prompts))
    lengths = (1 + torch.randint(8, (len(prompts),), generator=generator)).tolist()
    tokens = [torch.randint(11, (length,), generator=generator).tolist() for length in lengths]
    known = [(-2.5 + 0.5 * torch.randn(length, generator=generator)).tolist() for length in lengths]
    known[0][0] = None
    return {"prompt_ids": [[1, 10] for _ in prompts], "completion_ids": tokens, "logprobs": known}


def trained(of):
    """(all weights after training, as one vector; the rows of the log)."""
    of.train()
    model = of.accelerator.unwrap_model(of.model)
    return torch.cat([x.detach().flatten() for x in model.parameters()]), of.state.log_history


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [trained(trainer(*task)) for task in json.loads(sys.argv[1])]
    if os.environ["RANK"] == "0":
        torch.save(found, sys.argv[2])

"""The rollout benchmark's job by TRL, in the process of one case, or in several with FSDP."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable

from rollouts_job import GROUP, Case, longest_prompt, reward


def run(case: Case) -> None:
    """Print the iterations by stage. Loss and settings are TRL 1.16's own, but for the job's."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = torch.cuda.is_available()
    iterations = []
    spent = {"generate": 0.0, "with_scores": 0.0}

    def timed(method: Callable, stage: str) -> Callable:
        @functools.wraps(method)
        def measured(*arguments, **named):
            started = _now(on_gpu)
            result = method(*arguments, **named)
            spent[stage] += _now(on_gpu) - started
            return result

        return measured

    class Clock(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.before = _now(on_gpu)

        def on_step_end(self, *_, **__):
            now = _now(on_gpu)
            duration = now - self.before
            iterations.append(
                {
                    "sample": spent["generate"],
                    "score": spent["with_scores"] - spent["generate"],
                    "update": duration - spent["with_scores"],
                    "whole": duration,
                }
            )
            self.before = now
            spent.update(generate=0.0, with_scores=0.0)
            # After each, in case the limit of time ends the process before the last.
            print(
                "\n" + json.dumps({"iterations": iterations, "peak_gb": _peak(on_gpu)}), flush=True
            )

    GRPOTrainer._generate = timed(GRPOTrainer._generate, "generate")
    GRPOTrainer._generate_and_score_completions = timed(
        GRPOTrainer._generate_and_score_completions, "with_scores"
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    completions = case.completions // processes
    # At 512 tokens this gives TRL's default of 8.
    batch = 1
    while batch < completions and 2 * batch * case.longest <= 8192:
        batch *= 2
    settings = {
        "max_steps": case.iterations,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": completions // batch,
        "num_generations": GROUP,
        "max_completion_length": case.length,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "learning_rate": 1e-6,
        "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if case.sampler == "static":
        settings |= {"cache_implementation": "static"}
    if case.sampler == "vllm":
        settings |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
        settings |= {"vllm_max_model_length": longest_prompt(case.shape) + case.length}
    if processes > 1:
        fsdp = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
            "reshard_after_forward": True,
        }
        settings |= {
            "fsdp": True,
            "fsdp_config": fsdp,
            "vllm_enable_sleep_mode": case.sampler == "vllm",
        }
        settings |= {"vllm_gpu_memory_utilization": 0.35}
    trainer = GRPOTrainer(
        model=case.model,
        reward_funcs=lambda completions, **_: [reward(completion) for completion in completions],
        args=GRPOConfig(output_dir=f"{case.folder}/trl", **settings),
        train_dataset=load_dataset("json", data_files=case.prompts, split="train"),
        callbacks=[Clock()],
    )
    trainer.train()


def _peak(on_gpu: bool) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0


def _now(on_gpu: bool) -> float:
    if on_gpu:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()

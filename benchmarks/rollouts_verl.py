"""The rollout benchmark's job by verl, whose processes a case's process starts and watches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rollouts_job import BODIES, GROUP, Case, longest_prompt, make_tokenizer, reward

STAGES = {
    "sample": ("gen", "update_weights"),
    "old_log_probs": ("old_log_prob",),
    "update": ("update_actor",),
    "score": ("reward", "adv"),
    "whole": ("step",),
}
"""Stages of an iteration, by verl's own timers (`timing_s/...`) that make them up.

`gen` waits for completions and their rewards, `update_weights` wakes vLLM and hands it the weights.
"""

_METRIC = re.compile(r"([\w/]+):(?:np\.float\d+\()?(-?\d[\d.]*(?:e[+-]?\d+)?)")


def run(case: Case) -> None:
    """Print the iterations by stage; verl's own loss and settings, but for what the job says.

    verl samples with vLLM and trains with FSDP on the same GPU. Its loss is GSPO, with the mean
    over tokens and then over documents.
    """
    folder = Path(case.folder)
    _write_rows(folder, case)
    model = _with_chat_template(folder, BODIES[case.shape]["vocab_size"])
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *_overrides(case, folder, model)]
    iterations = []
    peak = 0.0
    # Not a cluster of Ray that somebody else runs on this machine.
    environment = os.environ | {"RAY_ADDRESS": "local"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            measured = dict(_METRIC.findall(line))
            if "timing_s/step" not in measured:
                continue
            iterations.append(_stages(measured))
            peak = max(peak, float(measured["actor/perf/max_memory_allocated_gb"]) * 2**30 / 1e9)
            print("\n" + json.dumps({"iterations": iterations, "peak_gb": peak}), flush=True)
    if child.returncode:
        raise SystemExit(f"verl ended with {child.returncode}")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    """Return the job's reward, under the names by which verl asks for it."""
    return reward(solution_str)


def _stages(measured: dict[str, str]) -> dict[str, float]:
    return {
        stage: sum(float(measured.get(f"timing_s/{timer}", 0)) for timer in timers)
        for stage, timers in STAGES.items()
    }


def _write_rows(folder: Path, case: Case) -> None:
    """Write the prompts as verl reads them."""
    import pyarrow
    from pyarrow import parquet

    rows = []
    for line in Path(case.prompts).read_text().splitlines():
        prompt = json.loads(line)
        rows.append(
            {
                "data_source": "benchmark",
                "prompt": [{"role": "user", "content": prompt["prompt"]}],
                "reward_model": {"style": "rule", "ground_truth": prompt["answer"]},
                "extra_info": {"index": len(rows)},
            }
        )
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")


def _with_chat_template(folder: Path, vocabulary: int) -> Path:
    """Return a folder of the same model whose chat template adds nothing to a prompt.

    verl reads chats only, and of a model of Qwen's it wants tokens of a line's and a message's end.
    They take the place of two that no prompt has. The other trainers keep a folder without them.
    """
    original = folder / "model"
    copied = folder / "model_with_template"
    copied.mkdir(exist_ok=True)
    for file in original.iterdir():
        if "tokenizer" not in file.name and not (copied / file.name).exists():
            os.symlink(file, copied / file.name)
    tokenizer = make_tokenizer(vocabulary - 2)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(copied)
    return copied


def _overrides(case: Case, folder: Path, model: Path) -> list[str]:
    prompts = case.completions // GROUP
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={longest_prompt(case.shape)}",
        f"data.max_response_length={case.length}",
        "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{actor}.optim.lr=1e-6",
        f"{actor}.ppo_mini_batch_size={prompts}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.policy_loss.loss_mode=gspo",
        f"{actor}.loss_agg_mode=seq-mean-token-mean",
        f"{actor}.clip_ratio_low=3e-4",
        f"{actor}.clip_ratio_high=4e-4",
        f"{rollout}.name=vllm",
        f"{rollout}.n={GROUP}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.4",
        f"{rollout}.max_model_len={case.longest}",
        f"{rollout}.agent.num_workers=4",
        "reward.num_workers=2",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        # Of Ray's bookkeeping: verl's actors ask for more than a small machine has.
        "ray_kwargs.ray_init.num_cpus=32",
        "trainer.logger=[console]",
        f"trainer.total_training_steps={case.iterations}",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/verl_checkpoints",
        f"hydra.run.dir={folder}/verl_hydra",
        *case.overrides,
    ]

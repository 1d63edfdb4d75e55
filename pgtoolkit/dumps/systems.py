"""Which dumps of other trainers can be replayed, where each column comes from, and which cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgtoolkit.dumps import records
from pgtoolkit.dumps.records import Converted


@dataclass(frozen=True)
class System:
    """A trainer's dump.

    names: its files in a folder, as a pattern; its other files are left alone. read(path) gives (place, record).
    row(record, found) gives the fields of a row, or None for a document that was dropped. `group_id` of a row is what
    the record says, of any type; where it says nothing, `prompt_length` lets equal prompts that follow each other be a
    group. columns: of each field of ours, where it comes from.
    """

    names: str
    read: Callable[[Path], Iterator[tuple[str, dict]]]
    row: Callable[[dict, Converted], dict[str, Any] | None]
    columns: dict[str, str]


_SAMPLER = "by the engine that sampled; the dump has none of the trainer"
SYSTEMS = {
    "nemo-rl": System(
        "train_data_step*.jsonl",
        records.objects,
        records.nemo_rl,
        {
            "old_log_probs": "prev_logprobs, by the trainer with the weights at the start of the step",
            "sampling_log_probs": "generation_logprobs, by the engine that sampled",
            "advantage": "advantages, of each token",
            "reward": "rewards; with dynamic sampling filtered_rewards, which are those of these documents",
            "group_id": "no field: documents in a row with the same prompt",
            "loss_mask": "token_loss_mask, cut at input_lengths as all lists",
        },
    ),
    "open-instruct": System(
        "*_rollouts_*.jsonl",
        records.objects,
        records.open_instruct,
        {
            "old_log_probs": f"logprobs, {_SAMPLER}",
            "advantage": "advantage",
            "reward": "reward",
            "group_id": "step and prompt_idx",
            "loss_mask": "all of response_tokens; the dump has no mask",
            "truncated": "finish_reason is length",
        },
    ),
    "slime": System(
        "*.pt",
        records.pickled,
        records.slime,
        {
            "old_log_probs": (
                "rollout_log_probs, by the engine that sampled; of training data log_probs, by the trainer with the "
                "weights at the start of the rollout's first update"
            ),
            "sampling_log_probs": "rollout_log_probs, by the engine that sampled",
            "advantage": "advantages, of each token",
            "reward": "reward; of training data local_raw_reward, before slime normalised it",
            "group_id": "group_index; where there is none, documents in a row with the same prompt",
            "loss_mask": "loss_mask or loss_masks of the response; all of it where there is none",
            "truncated": "status or truncated",
        },
    ),
    "prime-rl": System(
        "rank_*.jsonl",
        records.stable,
        records.prime_rl,
        {
            "old_log_probs": (
                "trainer_logprobs, by the trainer with the weights that the step began with; prime-rl's own loss takes "
                "its ratio against inference_logprobs"
            ),
            "sampling_log_probs": "inference_logprobs, by the engine that sampled, maybe with older weights",
            "advantage": "advantages, of each token",
            "reward": "no field: train with advantage=given",
            "group_id": "no field: aggregation=prompt_mean needs one",
            "loss_mask": "loss_mask, less tokens with rl_weights 0",
        },
    ),
    "pipelinerl": System(
        "*.jsonl",
        records.lists,
        records.pipeline_rl,
        {
            "old_log_probs": f"logprobs, {_SAMPLER}",
            "reward": "reward",
            "group_id": "the line of the stream and metadata.step_index: a line is a group",
            "loss_mask": "labels other than -100",
            "truncated": "not finished",
        },
    ),
}
SYSTEMS["miles"] = SYSTEMS["slime"]

REFUSED = {
    "verl": (
        "texts and scores (trainer.rollout_data_dir), or pickles that run code as they are loaded (RolloutSkip's "
        "gen_batch.dp)",
        "_log_rollout_data of its trainer to write input_ids, response_mask, rollout_log_probs (with "
        "actor_rollout_ref.rollout.calculate_log_probs=true), old_log_probs, token_level_scores and uid of `batch` as "
        "rows of docs/data.md",
    ),
    "trl": (
        "texts and rewards (log_completions)",
        "the subclass of GRPOTrainer in docs/dumps.md, which writes a file for rollout=recorded as it trains",
    ),
    "skyrl": (
        "pickles that run code as they are loaded (dump_data_batch)",
        "the place that writes them, so that sequences, loss_mask, rollout_logprobs, action_log_probs and rewards are "
        "rows of docs/data.md",
    ),
}
"""System -> (what its dumps are, what to switch on or change in it)."""

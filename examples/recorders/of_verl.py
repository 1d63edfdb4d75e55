"""Writes the rows on which verl trains to rollouts.jsonl, for `pgtk rollout=recorded`.

Import it where verl starts. verl calls the function if `trainer.rollout_data_dir` is set.
`rollout_log_probs` needs `actor_rollout_ref.rollout.calculate_log_probs=true`; without it leave
that line out.
"""

import json

import torch
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


def record(self, batch, reward_extra_infos_dict, timing_raw, rollout_data_dir):
    tensors = batch.batch
    start = tensors["prompts"].shape[1]

    def of_all(values, kept):
        # Prompts are padded on the left, responses on the right.
        return torch.cat([values.new_zeros(start), values])[kept].tolist()

    with open(f"{rollout_data_dir}/rollouts.jsonl", "a") as file:
        for i, tokens in enumerate(tensors["input_ids"]):
            kept = tensors["attention_mask"][i].bool()
            row = {
                "token_ids": tokens[kept].tolist(),
                "loss_mask": of_all(tensors["response_mask"][i], kept),
                "old_log_probs": of_all(tensors["old_log_probs"][i], kept),
                "sampling_log_probs": of_all(tensors["rollout_log_probs"][i], kept),
                "reward": tensors["token_level_scores"][i].sum().item(),
                "group_id": batch.non_tensor_batch["uid"][i],
            }
            file.write(json.dumps(row) + "\n")


RayPPOTrainer._log_rollout_data = record

"""Writes the rows on which TRL trains to rollouts.jsonl, for `pgtk rollout=recorded` and parity.

A completion that mask_truncated_completions leaves out has no token that is trained.
"""

import json

import torch
from trl import GRPOTrainer


class Recorded(GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start = self.accelerator.process_index * len(prompts)
        own = rewards[start : start + len(prompts)].cpu()  # they are those of all processes
        self._to_record = (own * self.reward_weights.cpu()).nansum(1), own.isnan().all(1)
        self._ids_to_record = completion_ids_list
        return rewards

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        if self.model.training:
            with open("rollouts.jsonl", "a") as file:
                for row in self._rows(out):
                    file.write(json.dumps(row) + "\n")
        return out

    def _rows(self, out):
        log_probs = {
            "old_log_probs": out.get("old_per_token_logps"),
            "sampling_log_probs": out.get("sampling_per_token_logps"),
            "ref_log_probs": out.get("ref_per_token_logps"),
        }
        if log_probs["old_log_probs"] is None:  # TRL takes the new ones, if no update comes between
            log_probs["old_log_probs"] = self._log_probs(out)
        mask = out["completion_mask"] * out.get("tool_mask", 1)
        start = self.accelerator.process_index * len(mask)
        for i, completion in enumerate(self._ids_to_record):
            prompt = out["prompt_ids"][i][out["prompt_mask"][i].bool()].tolist()
            row = {
                "token_ids": prompt + completion,
                "loss_mask": [False] * len(prompt) + mask[i].bool().tolist()[: len(completion)],
                "advantage": out["advantages"][i].item(),
                "group_id": f"{self.state.global_step} {(start + i) // self.num_generations}",
                "truncated": completion[-1] not in self.eos_token_ids,
                "score_failed": self._to_record[1][i].item(),
            }
            if not row["score_failed"]:
                row["reward"] = self._to_record[0][i].item()
            for name, values in log_probs.items():
                if values is not None:
                    row[name] = [0.0] * len(prompt) + values[i].tolist()[: len(completion)]
            yield row

    @torch.no_grad()
    def _log_probs(self, out):
        ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
        mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
        length = out["completion_ids"].shape[1]
        size = self.args.per_device_train_batch_size
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, length, size)[0]

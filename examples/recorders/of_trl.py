"""Writes the rows on which TRL trains to rollouts.jsonl, for `pgtk rollout=recorded`.

TRL computes the log-probs if updates come between sampling and training: with `num_iterations=2`,
with `steps_per_generation` above `gradient_accumulation_steps`, or with vLLM, where
`sampling_per_token_logps` are `sampling_log_probs`.
"""

import json

from trl import GRPOTrainer


class Recorded(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        with open("rollouts.jsonl", "a") as file:
            for i in range(len(out["completion_ids"])):
                prompt = out["prompt_ids"][i][out["prompt_mask"][i].bool()].tolist()
                kept = out["completion_mask"][i].bool()
                completion = out["completion_ids"][i][kept].tolist()
                row = {
                    "token_ids": prompt + completion,
                    "loss_mask": [False] * len(prompt) + [True] * len(completion),
                    "old_log_probs": [0.0] * len(prompt)
                    + out["old_per_token_logps"][i][kept].tolist(),
                    "advantage": out["advantages"][i].item(),
                    "group_id": f"{self.state.global_step} {i // self.num_generations}",
                }
                file.write(json.dumps(row) + "\n")
        return out

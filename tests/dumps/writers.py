"""Dumps of other trainers as they write them, restated from their sources: the same rollouts in each one's form.

Of the fields that are not read some stand for all.

The writers, by repository, file and commit:
    NVIDIA-NeMo/RL 7ea279ab: nemo_rl/algorithms/grpo.py (3635-3652), nemo_rl/utils/logger.py (log_batched_dict_as_jsonl)
    allenai/open-instruct e6c3044a: open_instruct/rl_utils.py (RolloutRecord, _save_rollouts)
    THUDM/slime 624b824a: slime/observability/rollout_data_utils.py, train_data_utils.py, slime/utils/types.py (Sample)
    radixark/miles 31f1ca96: miles/ray/rollout/debug_data.py, miles/utils/train_dump_utils.py
    PrimeIntellect-ai/prime-rl 559b4477: src/prime_rl/trainer/rl/token_export.py
    ServiceNow/PipelineRL 58d39345: pipelinerl/rollouts.py (TrainingText), pipelinerl/actor.py, pipelinerl/streams.py
    PrimeIntellect-ai/verifiers 00eee6c6: verifiers/v1/trace.py (Trace.to_record), verifiers/v1/graph.py (MessageNode)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Rollout:
    """What was sampled. sampler, trainer: log-probs of the response's tokens. group: of the prompt."""

    prompt: list[int]
    response: list[int]
    sampler: list[float]
    trainer: list[float]
    reward: float
    advantage: float
    group: int
    truncated: bool = False


@torch.no_grad()
def sampled(model, groups: int = 16, size: int = 4, temperature: float = 1.0) -> list[Rollout]:
    """Completions of one to six tokens by a model of at least 12 tokens, whose last ends one. The trainer's log-probs
    are the model's, and the sampler's differ by up to 0.02."""
    generator, found = torch.Generator().manual_seed(0), []
    for group in range(groups):
        prompt = [group // 10, group % 10, 10]
        for member in range(size):
            response, log_probs = [], []
            while len(response) < 6 and 11 not in response:
                logits = model(torch.tensor([prompt + response])).logits[0, -1].double() / temperature
                token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
                response.append(token)
                log_probs.append(float(logits.log_softmax(0)[token]))
            sampler = [value - 0.01 * ((place + member) % 3) for place, value in enumerate(log_probs)]
            reward, advantage = float(member % 2), (-0.5, 0.5)[member % 2]
            found.append(Rollout(prompt, response, sampler, log_probs, reward, advantage, group, 11 not in response))
    return found


def nemo_rl(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    """A step's file: each line a batch of one, so that every value is a list of length 1, padded to the longest."""
    longest = max(len(one.prompt) + len(one.response) for one in rollouts)

    def padded(values, filler=0.0):
        return [*values, *[filler] * (longest - len(values))]

    lines = []
    for number, one in enumerate(rollouts):
        before, length = len(one.prompt), len(one.prompt) + len(one.response)
        line = {
            "rewards": [one.reward],
            "input_lengths": [length],
            "token_ids": [padded(one.prompt + one.response, 0)],
            "token_loss_mask": [padded([0] * before + [1] * len(one.response), 0)],
            "sample_loss_mask": [1.0],
            "advantages": [[one.advantage] * longest],
            "generation_logprobs": [padded([0.0] * before + one.sampler)],
            # of the whole text, the prompt included, with 0 for the first token
            "prev_logprobs": [padded([0.0] + [-1.5] * (before - 1) + one.trainer)],
        }
        lines.append(line | {key: change(number, line[key]) for key, change in changes.items()} | {"idx": number})
    return _lines(folder / "train_data_step3.jsonl", lines)


def open_instruct(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    size = sum(one.group == rollouts[0].group for one in rollouts)
    lines = []
    for number, one in enumerate(rollouts):
        line = {
            "step": 5,
            "sample_idx": number,
            "prompt_idx": number // size,
            "prompt_tokens": one.prompt,
            "response_tokens": one.response,
            "reward": one.reward,
            "advantage": one.advantage,
            "finish_reason": "length" if one.truncated else "stop",
            "request_info": {"num_calls": 0, "tool_calleds": False, "rollout_state": {}},
            "logprobs": one.sampler,
        }
        lines.append(line | {key: change(number, line[key]) for key, change in changes.items()})
    _lines(folder / "try_metadata.jsonl", [{"run_name": "try", "git_commit": "0", "model_name": "m", "timestamp": "t"}])
    return _lines(folder / "try_rollouts_000000.jsonl", lines)


def slime(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    """--save-debug-rollout-data; miles adds metadata beside the samples and a few fields to each."""
    samples = []
    for number, one in enumerate(rollouts):
        sample = {
            "group_index": one.group,
            "index": number,
            "prompt": "a text",
            "tokens": one.prompt + one.response,
            "multimodal_inputs": None,
            "response_length": len(one.response),
            "reward": one.reward,
            "loss_mask": None,
            "rollout_log_probs": one.sampler,
            "remove_sample": False,
            "status": "truncated" if one.truncated else "completed",
        }
        samples.append(sample | {key: change(number, sample[key]) for key, change in changes.items()})
    torch.save({"rollout_id": 7, "samples": samples}, folder / "7.pt")
    return folder / "7.pt"


def slime_training(folder: Path, rollouts: list[Rollout]) -> Path:
    """--save-debug-train-data, format 2: a tensor for each list, of the response alone but for the tokens."""
    samples = [
        {
            "tokens": torch.tensor(one.prompt + one.response),
            "response_lengths": len(one.response),
            "local_raw_reward": one.reward,
            "truncated": int(one.truncated),
            "loss_masks": torch.ones(len(one.response), dtype=torch.int32),
            "rollout_log_probs": torch.tensor(one.sampler),
            "log_probs": torch.tensor(one.trainer),
            "advantages": torch.full((len(one.response),), one.advantage),
        }
        for number, one in enumerate(rollouts)
    ]
    torch.save({"format_version": 2, "rollout_id": 7, "rank": 0, "samples": samples}, folder / "7.pt")
    return folder / "7.pt"


def prime_rl(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    """token_exports/step_N/rank_R.jsonl: log-probs of the token itself; those of prompts are fillers."""
    step = folder / "token_exports" / "step_4"
    step.mkdir(parents=True)
    lines = []
    for number, one in enumerate(rollouts):
        before, length = len(one.prompt), len(one.prompt) + len(one.response)
        line = {
            "step": 4,
            "token_ids": one.prompt + one.response,
            "loss_mask": [False] * before + [True] * len(one.response),
            "advantages": [one.advantage] * length,
            "inference_logprobs": [0.0] * before + one.sampler,
            "trainer_logprobs": [-2.5] * before + one.trainer,
            "rl_weights": [None] * length,
        }
        lines.append(line | {key: change(number, line[key]) for key, change in changes.items()})
    (step / "STABLE").touch()
    return _lines(step / "rank_0.jsonl", lines)


def pipeline_rl(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    """streams/actor/0/0/0.jsonl: a line is the list of a group's texts, log-probs of the completion alone."""
    groups: dict[int, list[dict]] = {}
    for number, one in enumerate(rollouts):
        text = {
            "text": "a text",
            "reward": one.reward,
            "logprobs": one.sampler,
            "input_ids": one.prompt + one.response,
            "labels": [-100] * len(one.prompt) + one.response,
            "group_id": f"scheduler_{one.group}",
            "finished": not one.truncated,
            "visual_features": None,
            "metadata": {"model_version": 1024, "rollout_index": number, "step_index": 0},
        }
        changed = text | {key: change(number, text[key]) for key, change in changes.items()}
        groups.setdefault(one.group, []).append(changed)
    path = folder / "streams" / "actor" / "0" / "0"
    path.mkdir(parents=True)
    return _lines(path / "0.jsonl", list(groups.values()))


def verifiers(folder: Path, rollouts: list[Rollout], **changes) -> Path:
    """traces.jsonl: the messages of an attempt as a graph, each with the tokens that it adds."""
    lines = []
    for number, one in enumerate(rollouts):
        asked = {"parent": None, "sampled": False, "token_ids": one.prompt, "mask": [False] * len(one.prompt)}
        answered = {"parent": 0, "sampled": True, "token_ids": one.response, "mask": [True] * len(one.response)}
        line = {
            "version": 1,
            "id": f"trace {number}",
            "task": {"type": "Task", "key": f"task {one.group}", "data": {"idx": one.group}},
            "agent": {"name": "agent", "trainable": True},
            "nodes": [asked | {"logprobs": []}, answered | {"logprobs": one.sampler}],
            "calls": [{"node": 1, "finish_reason": "length" if one.truncated else "stop", "error": None}],
            "rewards": {"right": {"score": one.reward, "weight": 1.0}, "not_scored": None},
            "stop_condition": None,
            "ok": True,
        }
        lines.append(line | {key: change(number, line[key]) for key, change in changes.items()})
    return _lines(folder / "traces.jsonl", lines)


def _lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


WRITERS = {
    "nemo-rl": nemo_rl,
    "open-instruct": open_instruct,
    "slime": slime,
    "miles": slime,
    "prime-rl": prime_rl,
    "pipelinerl": pipeline_rl,
    "verifiers": verifiers,
}

"""The records in the dumps of other trainers: how they are read, and how one becomes a row of docs/data.md."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgtoolkit.batch import Document
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.row_files import JsonlFile


class Unusable(Exception):
    """Why a record cannot be used, as the end of a sentence that begins with its place."""


@dataclass
class Converted:
    """What became of a dump, of which reward_key says which of several rewards counts.

    dropped: reason -> documents. notes: sentence -> how often it is true. fields: of every row. groups: size -> how
    many. sample: the first documents. proofs: what tells that log-probs stand at their own tokens.
    """

    reward_key: str | None = None
    files: int = 0
    documents: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    fields: frozenset[str] | None = None
    groups: Counter[int] = field(default_factory=Counter)
    sample: list[Document] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)

    def drop(self, reason: str) -> None:
        self.dropped[reason] += 1


def objects(path: Path) -> Iterator[tuple[str, dict]]:
    for number, _, record in JsonlFile(path, path.name).rows():
        if isinstance(record, str):
            raise DataError(f"{path}:{number}: {record}")
        yield str(number), record


class _Lists(JsonlFile):
    """One array of objects per line."""

    kind = list


def lists(path: Path) -> Iterator[tuple[str, dict]]:
    """The texts of a line are a group, whatever they call it: numbers of groups begin anew when a run is resumed."""
    for number, _, records in _Lists(path, path.name).rows():
        if isinstance(records, str):
            raise DataError(f"{path}:{number}: {records}. This is not PipelineRL's stream `actor`.")
        for place, record in enumerate(records):
            yield f"{number}[{place}]", record | {"line": number}


def stable(path: Path) -> Iterator[tuple[str, dict]]:
    if not (path.parent / "STABLE").exists():
        raise DataError(
            f"{path} needs the file STABLE beside it (got none). prime-rl writes it when the step's export is whole. "
            "Wait for it, or convert the other steps."
        )
    yield from objects(path)


def pickled(path: Path) -> Iterator[tuple[str, dict]]:
    """slime's files are read whole, one rollout each; nothing in them is run."""
    import torch

    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error))
        raise DataError(
            f"{path} needs plain numbers, texts, lists and tensors (got more: {what.strip()[:200]}). Loading it would "
            "run code from the file. Where you trust it, load it with slime, and save its samples again with nothing "
            "but tokens, response_length, loss_mask, rollout_log_probs, reward, group_index and status."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise DataError(f"{path} is no whole file of torch.save: {error}. Copy it again.") from error
    if isinstance(payload, dict) and "rollout_data" in payload:
        raise DataError(
            f"{path} needs a list of samples (got what miles' --save-debug-train-data writes). It has a file per rank, "
            "and ranks that share a model hold the same samples. Use the files of --save-debug-rollout-data."
        )
    if not isinstance(payload, dict) or not isinstance(payload.get("samples"), list):
        raise DataError(f"{path} needs a list of samples (got none). Use a file of --save-debug-rollout-data.")
    for number, sample in enumerate(payload["samples"]):
        yield str(number), sample


def nemo_rl(record: dict, found: Converted) -> dict[str, Any] | None:
    one = {key: value[0] if isinstance(value, list) and value else value for key, value in record.items()}
    length = one["input_lengths"]
    mask = [bool(trained) for trained in one["token_loss_mask"][:length]]
    if not any(mask):
        return found.drop("no token was generated (token_loss_mask is 0 everywhere)")
    sampling, old = one["generation_logprobs"][:length], one["prev_logprobs"][:length]
    prompt_length = mask.index(True)
    if not any(old) and min(sampling) < -1e-3:
        found.notes[
            "without prev_logprobs of NeMo-RL (all are 0, as with force_on_policy_ratio): generation_logprobs stand in "
            "both columns"
        ] += 1
        old = sampling
    if one["sample_loss_mask"] not in (0, 1):
        raise Unusable(f"has sample_loss_mask={one['sample_loss_mask']}; it is 0 or 1")
    if one["sample_loss_mask"] == 0:
        found.notes[
            "left out of its loss by NeMo-RL (sample_loss_mask 0): rewards count for the groups, no token is trained, "
            "and denominators count the documents"
        ] += 1
        mask = [False] * length
    return {
        "token_ids": one["token_ids"][:length],
        "loss_mask": mask,
        "old_log_probs": old,
        "sampling_log_probs": sampling,
        "advantage": one["advantages"][:length],
        "reward": one["filtered_rewards" if "filtered_rewards" in one else "rewards"],
        "prompt_length": prompt_length,
    }


def open_instruct(record: dict, found: Converted) -> dict[str, Any] | None:
    prompt, response, log_probs = record["prompt_tokens"], record["response_tokens"], record["logprobs"]
    if not log_probs or len(log_probs) != len(response):
        return found.drop("no log-probs")
    known = [value is not None and value == value for value in log_probs]
    if not any(known):
        return found.drop("an empty completion: its one token is none that was sampled (log-prob NaN)")
    if (record.get("request_info") or {}).get("num_calls"):
        found.notes["with calls of tools: what they wrote is told by a log-prob of exactly 0, and not trained"] += 1
        known = [value != 0 and is_known for value, is_known in zip(log_probs, known, strict=True)]
    return _after_prompt(prompt, response, known, log_probs) | {
        "advantage": record["advantage"],
        "reward": record["reward"],
        "group_id": (record["step"], record["prompt_idx"]),
        "truncated": record["finish_reason"] == "length",
        "id": f"{record['step']}:{record['sample_idx']}",
    }


def slime(sample: dict, found: Converted) -> dict[str, Any] | None:
    """A sample of --save-debug-rollout-data, or of --save-debug-train-data, whose names are others."""
    if sample.get("multimodal_inputs") or sample.get("multimodal_train_inputs"):
        return found.drop("pictures or sounds, which token ids do not hold")
    sample = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in sample.items()}
    trained = "response_lengths" in sample
    length, tokens = sample["response_lengths" if trained else "response_length"], sample["tokens"]
    mask, log_probs = (sample[name] for name in (("loss_masks", "log_probs") if trained else _OF_ROLLOUTS))
    if not length or not log_probs:
        return found.drop("no completion, or no log-probs")
    if sample.get("remove_sample"):
        found.notes["not trained by slime (remove_sample): trained here neither"] += 1
        mask = [0] * length
    row = _after_prompt(tokens[:-length], tokens[-length:], [1] * length if mask is None else mask, log_probs)
    if not trained:
        reward = _reward(sample["reward"], found.reward_key)
        return row | {"reward": reward, "group_id": sample["group_index"], "truncated": sample["status"] == "truncated"}
    for ours, theirs in _OF_TRAINING.items():
        if sample.get(theirs) is not None:
            row[ours] = [0.0] * row["prompt_length"] + sample[theirs]
    reward, truncated = sample.get("local_raw_reward"), sample.get("truncated")
    return row | {
        "reward": None if reward is None else _reward(reward, found.reward_key),
        "truncated": None if truncated is None else bool(truncated),
    }


_OF_ROLLOUTS = "loss_mask", "rollout_log_probs"
_OF_TRAINING = {
    "sampling_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "advantage": "advantages",
}


def prime_rl(record: dict, found: Converted) -> dict[str, Any] | None:
    mask, weights = record["loss_mask"], record["rl_weights"]
    if any(weight not in (None, 0, 1) for weight in weights):
        raise Unusable("has rl_weights other than 0 and 1, which no field of a recorded rollout says")
    if any(weights[t] == 0 and mask[t] for t in range(len(mask))):
        found.notes["with tokens outside of the policy-gradient loss (rl_weights 0): those are not trained"] += 1
        mask = [trained and weight != 0 for trained, weight in zip(mask, weights, strict=True)]
    if not any(mask):
        return found.drop("no token of the policy-gradient loss (rl_weights 0 everywhere)")
    return {
        "token_ids": record["token_ids"],
        "loss_mask": mask,
        "old_log_probs": record["trainer_logprobs"],
        "sampling_log_probs": record["inference_logprobs"],
        "advantage": record["advantages"],
    }


def pipeline_rl(record: dict, found: Converted) -> dict[str, Any] | None:
    if record.get("visual_features"):
        return found.drop("pictures, which token ids do not hold")
    labels, log_probs = record["labels"], list(record["logprobs"])
    mask = [label != -100 for label in labels]
    if sum(mask) != len(log_probs):
        raise Unusable(f"has {len(log_probs)} logprobs and {sum(mask)} labels other than -100; there is one for each")
    values = iter(log_probs)
    return {
        "token_ids": record["input_ids"],
        "loss_mask": mask,
        "old_log_probs": [next(values) if trained else 0.0 for trained in mask],
        "reward": record["reward"],
        "truncated": not record["finished"],
        "group_id": (record["line"], record["metadata"].get("step_index", 0)),
    }


def _after_prompt(prompt: list[int], response: list[int], mask: list, log_probs: list) -> dict[str, Any]:
    """The lists of a row whose mask and log-probs are of the response alone."""
    before = len(prompt)
    return {
        "token_ids": [*prompt, *response],
        "loss_mask": [False] * before + [bool(trained) for trained in mask],
        "old_log_probs": [0.0] * before + list(log_probs),
        "prompt_length": before,
    }


def _reward(reward: Any, key: str | None) -> float:
    if isinstance(reward, dict):
        if key not in reward:
            raise Unusable(f"has several rewards ({', '.join(map(str, reward))}). Use --reward-key KEY")
        return reward[key]
    if reward is None:
        raise Unusable("has no reward")
    return reward

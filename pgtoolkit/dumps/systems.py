"""Which dumps of other trainers can be replayed: their files, where each column comes from, and what a record needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import refusal


class Dropped(Exception):
    """Why a document has no place among recorded rollouts."""


class Unusable(Exception):
    """Why a record cannot be used, as the end of a sentence that begins with its place."""


@dataclass(frozen=True)
class System:
    """A trainer's dump.

    files: of a folder, as a pattern. columns: of each field of ours, theirs.
    prepare(record, notes) gives a record with these fields: lists of the whole document, prompt included. It counts in
    notes what of a document is other than the dump says, and raises Dropped or Unusable.
    Where no field names the group, documents in a row with the same `prompt` are one, if the record has that; those
    that continue a trajectory are of its group, whatever their prompt.
    marker: a file that stands beside complete ones.
    """

    files: str
    prepare: Callable[[dict, Counter[str]], dict]
    columns: dict[str, str]
    marker: str | None = None


def _nemo_rl(record: dict, notes: Counter[str]) -> dict:
    record = {key: value[0] if isinstance(value, list) and value else value for key, value in record.items()}
    length = record["input_lengths"]
    record = {key: value[:length] if isinstance(value, list) else value for key, value in record.items()}
    mask = [bool(trained) for trained in record["token_loss_mask"]]
    if not any(mask):
        raise Dropped("no token was generated (token_loss_mask is 0 everywhere)")
    record |= {"token_loss_mask": mask, "prompt": record["token_ids"][: mask.index(True)]}
    if not any(record["prev_logprobs"]) and min(record["generation_logprobs"]) < -1e-3:
        notes[
            "without prev_logprobs of NeMo-RL (all are 0, as with force_on_policy_ratio): generation_logprobs stand in "
            "both columns"
        ] += 1
        record["prev_logprobs"] = record["generation_logprobs"]
    if record["sample_loss_mask"] not in (0, 1):
        raise Unusable(f"has sample_loss_mask={record['sample_loss_mask']}; it is 0 or 1")
    if record["sample_loss_mask"] == 0:
        notes[
            "left out of its loss by NeMo-RL (sample_loss_mask 0): rewards count for the groups, no token is trained, "
            "and denominators count the documents"
        ] += 1
        record["token_loss_mask"] = [False] * length
    return record | {"rewards": record.get("filtered_rewards", record["rewards"])}


def _open_instruct(record: dict, notes: Counter[str]) -> dict:
    prompt, response, log_probs = record["prompt_tokens"], record["response_tokens"], record["logprobs"]
    if not log_probs or len(log_probs) != len(response):
        raise Dropped("no log-probs")
    sampled = [value is not None and value == value for value in log_probs]
    if not any(sampled):
        raise Dropped("an empty completion: its one token is none that was sampled (log-prob NaN)")
    if (record.get("request_info") or {}).get("num_calls"):
        notes["with calls of tools: what they wrote is told by a log-prob of exactly 0, and not trained"] += 1
        sampled = [value != 0 and known for value, known in zip(log_probs, sampled, strict=True)]
    return record | {
        "response_tokens": prompt + response,
        "logprobs": _after(prompt, log_probs),
        "sampled": _after(prompt, sampled),
        "prompt_idx": (record["step"], record["prompt_idx"]),
        "sample_idx": f"{record['step']}:{record['sample_idx']}",
        "finish_reason": record["finish_reason"] == "length",
    }


def _slime(sample: dict, notes: Counter[str]) -> dict:
    """Of --save-debug-rollout-data, or of --save-debug-train-data, whose names are others."""
    if sample.get("multimodal_inputs") or sample.get("multimodal_train_inputs"):
        raise Dropped("pictures or sounds, which token ids do not hold")
    sample = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in sample.items()}
    if trained := "response_lengths" in sample:
        sample |= {"response_length": sample["response_lengths"], "loss_mask": sample["loss_masks"]}
        sample |= {"reward": sample.get("local_raw_reward"), "group_index": None}
        sample["rollout_id"] = sample.get("rollout_ids")
    else:
        sample |= {"log_probs": sample["rollout_log_probs"], "truncated": sample["status"] == "truncated"}
        if "rollout_id" in sample and sample["rollout_id"] is None:  # such samples are one each there, too
            sample["rollout_id"] = f"sample {sample['index']}"
        del sample["rollout_log_probs"]
    length, tokens = sample["response_length"], sample["tokens"]
    if not length or not sample["log_probs"]:
        raise Dropped("no completion, or no log-probs")
    if sample["loss_mask"] is None:
        sample["loss_mask"] = [1] * length
    if sample.get("remove_sample"):
        notes["not trained by slime (remove_sample): trained here neither"] += 1
        sample["loss_mask"] = [0] * length
    if sample["reward"] is None and not trained:
        raise Unusable("has no reward")
    prompt = tokens[:-length]
    vectors = ("loss_mask", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    sample |= {name: _after(prompt, sample[name]) for name in vectors if sample.get(name) is not None}
    truncated = sample.get("truncated")
    return sample | {"prompt": prompt, "truncated": None if truncated is None else bool(truncated)}


def _prime_rl(record: dict, notes: Counter[str]) -> dict:
    mask, weights = record["loss_mask"], record["rl_weights"]
    if any(weight not in (None, 0, 1) for weight in weights):
        raise Unusable("has rl_weights other than 0 and 1, which no field of a recorded rollout says")
    if any(weight == 0 and trained for weight, trained in zip(weights, mask, strict=True)):
        notes["with tokens outside of the policy-gradient loss (rl_weights 0): those are not trained"] += 1
        mask = [bool(trained) and weight != 0 for trained, weight in zip(mask, weights, strict=True)]
    if not any(mask):
        raise Dropped("no token of the policy-gradient loss (rl_weights 0 everywhere)")
    return record | {"loss_mask": mask}


def _pipeline_rl(record: dict, _notes: Counter[str]) -> dict:
    if record.get("visual_features"):
        raise Dropped("pictures, which token ids do not hold")
    mask, log_probs = [label != -100 for label in record["labels"]], record["logprobs"]
    if sum(mask) != len(log_probs):
        raise Unusable(f"has {len(log_probs)} logprobs and {sum(mask)} labels other than -100; there is one for each")
    values = iter(log_probs)
    return record | {
        "labels": mask,
        "logprobs": [next(values) if trained else 0.0 for trained in mask],
        "finished": not record["finished"],
        # Its texts of one rollout_index are the calls of one attempt, whose reward each of them has.
        "group_id": record["line"],
        "rollout_index": record["metadata"].get("rollout_index"),
    }


def branches(record: dict) -> list[dict]:
    """A trace of verifiers for each leaf of its messages, whose number is added; another record as it is.

    A compaction that was not used is no leaf.
    """
    nodes = record.get("nodes") if isinstance(record, dict) else None
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        return [record]
    links = [(number, link) for number, node in enumerate(nodes) for link in node.get("semantic_parents") or ()]
    used = {link["node"] for _, link in links if link["type"] == "compaction"}
    unused = {number for number, link in links if link["type"] == "compaction_attempt"} - used
    none = unused | {node.get("parent") for node in nodes}
    return [record | {"leaf": number} for number in range(len(nodes)) if number not in none]


def _verifiers(trace: dict, notes: Counter[str]) -> dict:
    """A branch: the messages from the first to a leaf. What several have in common is trained in the first alone."""
    nodes, leaf, task, agent = trace["nodes"], trace["leaf"], trace["task"], trace.get("agent") or {}
    if trace.get("ok") is False or not agent.get("trainable", True):
        raise Dropped("of an attempt that failed, or of an agent that is not trained")
    if trace.get("mm_token_type_id_map"):
        raise Dropped("pictures or videos, which token ids do not hold")
    earlier = {number for one in branches(trace) if one["leaf"] < leaf for number in _path(nodes, one["leaf"])}
    document: dict[str, list] = {"token_ids": [], "mask": [], "logprobs": []}
    for number in _path(nodes, leaf):
        tokens, sampled, log_probs = (nodes[number].get(name) or [] for name in document)
        if len(log_probs) != sum(sampled):
            raise Unusable(f"has {len(log_probs)} logprobs for {sum(sampled)} sampled tokens of message {number}")
        values = iter(log_probs)
        document["token_ids"] += tokens
        document["mask"] += [bool(one) and number not in earlier for one in sampled]
        document["logprobs"] += [next(values) if one else 0.0 for one in sampled]
    if not any(document["mask"]):
        raise Dropped("no sampled tokens of its own, or none recorded")
    if not (rewards := [reward for reward in trace["rewards"].values() if reward is not None]):
        raise Dropped("no reward: it was not scored")
    stopped = trace.get("stop_condition") or ""
    ends = [call.get("finish_reason") for call in trace.get("calls", ()) if not call.get("error")]
    return document | {
        "id": trace["id"],
        "branch": f"{trace['id']}:{leaf}",
        "reward": sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards),
        "group": (task.get("key") or task.get("hash") or task["data"]["idx"], agent.get("name")),
        "truncated": stopped.startswith("max_") or stopped == "compaction_failed" or ends[-1:] == ["length"],
    }


def _path(nodes: list[dict], leaf: int) -> list[int]:
    """Numbers of the messages from the first to a leaf."""
    path = [leaf]
    while (parent := nodes[path[-1]].get("parent")) is not None and len(path) < len(nodes):
        path.append(parent)
    return path[::-1]


def _after(prompt: Sequence, values: Sequence) -> list:
    """What belongs to the tokens of a response, of the whole document."""
    return [0] * len(prompt) + list(values)


_TABLE = """
                   nemo-rl                open-instruct      slime             prime-rl           pipelinerl  verifiers
files              train_data_step*.jsonl *_rollouts_*.jsonl *.pt              rank_*.jsonl       *.jsonl     *.jsonl
token_ids          token_ids              response_tokens    tokens            token_ids          input_ids   token_ids
loss_mask          token_loss_mask        sampled            loss_mask         loss_mask          labels      mask
old_log_probs      prev_logprobs          logprobs           log_probs         trainer_logprobs   logprobs    logprobs
sampling_log_probs generation_logprobs    -                  rollout_log_probs inference_logprobs -           -
ref_log_probs      -                      -                  ref_log_probs     -                  -           -
advantage          advantages             advantage          advantages        advantages         -           -
reward             rewards                reward             reward            -                  reward      reward
group_id           -                      prompt_idx         group_index       -                  group_id    group
trajectory         -                      -                  rollout_id        -                  rollout_index id
truncated          -                      finish_reason      truncated         -                  finished    truncated
id                 -                      sample_idx         -                 -                  -           branch
"""
"""The files of a system's dump, and where each of our columns comes from; docs/dumps.md says what they are."""
_PREPARE = (_nemo_rl, _open_instruct, _slime, _prime_rl, _pipeline_rl, _verifiers)


def _systems() -> dict[str, System]:
    (*names,), *rows = (line.split() for line in _TABLE.strip().splitlines())
    found = {}
    for place, (name, prepare) in enumerate(zip(names, _PREPARE, strict=True), 1):
        columns = {row[0]: row[place] for row in rows if row[place] != "-"}
        found[name] = System(columns.pop("files"), prepare, columns, "STABLE" if name == "prime-rl" else None)
    return found | {"miles": found["slime"]}


SYSTEMS = _systems()
REFUSED = {
    "verl": "texts and scores, or pickles that run code as they are loaded",
    "trl": "texts and rewards",
    "skyrl": "pickles that run code as they are loaded",
}
"""What the dumps of other systems hold."""


def system_of(name: str) -> System:
    """Raises ConfigError for a system whose dumps cannot be replayed, or that is not known."""
    if name in REFUSED:
        reason = "The loss needs the log-prob of every token, and a text tokenized again need not give its tokens."
        use = "what docs/dumps.md says of it"
        raise ConfigError(refusal(name, "dumps with token ids and log-probs", REFUSED[name], reason, use))
    if name not in SYSTEMS:
        reason = "The dump of any other trainer needs a script of yours that writes rows of docs/data.md."
        raise ConfigError(refusal("SYSTEM", f"one of {', '.join(SYSTEMS)}", name, reason, "one of these"))
    return SYSTEMS[name]

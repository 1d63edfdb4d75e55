"""The made-up job of the benchmarks of a training step: a model, and rollouts from no policy."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path


def write_inputs(
    folder: Path,
    model: dict,
    num_documents: int,
    prompt: tuple[int, int],
    completion: tuple[int, int],
    num_words: int | None = None,
    weights: bool = False,
) -> None:
    """Write a model's folder and a file of recorded rollouts.

    model: entries of its config.json, of Qwen2 where they name no other architecture. prompt,
    completion: least and most tokens of a document's two parts. num_words: how many tokens of the
    vocabulary the documents are made of; None: all. weights: whether random weights are written,
    too, as LoRA needs them.
    """
    from pgtoolkit.model.setup import character_tokenizer

    defaults = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    (folder / "model").mkdir(exist_ok=True)
    character_tokenizer("abc").save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(defaults | model))
    if weights:
        _write_weights(folder / "model")
    draw = random.Random(0)
    words = range(num_words or model["vocab_size"])
    even = round(-math.log(model["vocab_size"]), 1)
    with (folder / "rollouts.jsonl").open("w") as file:
        for document in range(num_documents):
            first = draw.randint(*prompt)
            length = first + draw.randint(*completion)
            row = {
                "token_ids": draw.choices(words, k=length),
                "loss_mask": [t >= first for t in range(length)],
                "old_log_probs": [even if t >= first else 0 for t in range(length)],
                "reward": draw.random(),
                "group_id": document // 8,
            }
            file.write(json.dumps(row) + "\n")


def _write_weights(model: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    made.to(torch.bfloat16).save_pretrained(model)


def overrides(folder: Path, docs_per_step: int, max_tokens: int, max_steps: int) -> list[str]:
    """Return the main job on these inputs. The clip is wide, since no policy sampled them."""
    return [
        "rollout=recorded",
        f"rollout.path={folder}/rollouts.jsonl",
        "model=huggingface",
        f"model.path={folder}/model",
        "model.random_weights=true",
        "model.gradient_checkpointing=true",
        "model.dtype=bfloat16",
        "model.fp32_lm_head=false",
        "loss=gspo",
        "loss.epsilon_low=0.9",
        "loss.epsilon_high=9",
        "aggregation=sample_mean",
        "metrics=basic",
        f"accumulation.docs_per_step={docs_per_step}",
        f"accumulation.max_tokens={max_tokens}",
        f"trainer.max_steps={max_steps}",
        "trainer.checkpoint_every=1000000",
        "tracking=none",
    ]

"""The made-up job of the benchmarks of a training step: a Qwen2-like model, and recorded rollouts
from no policy."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_inputs(
    folder: Path,
    model: dict,
    num_documents: int,
    prompt: tuple[int, int],
    completion: tuple[int, int],
) -> None:
    """model: entries of its config.json. prompt, completion: least and most tokens of a document's
    two parts."""
    from pgtoolkit.model.setup import character_tokenizer

    fixed = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 8192,
    }
    (folder / "model").mkdir(exist_ok=True)
    character_tokenizer("abc").save_pretrained(folder / "model")
    config = fixed | {"tie_word_embeddings": False} | model
    (folder / "model" / "config.json").write_text(json.dumps(config))
    draw = random.Random(0)
    with (folder / "rollouts.jsonl").open("w") as file:
        for document in range(num_documents):
            first, length = draw.randint(*prompt), draw.randint(*completion)
            length += first
            row = {
                "token_ids": [draw.randrange(model["vocab_size"]) for _ in range(length)],
                "loss_mask": [t >= first for t in range(length)],
                "old_log_probs": [-11.9 if t >= first else 0 for t in range(length)],
                "reward": draw.random(),
                "group_id": document // 8,
            }
            file.write(json.dumps(row) + "\n")


def overrides(folder: Path, docs_per_step: int, max_tokens: int, max_steps: int) -> list[str]:
    """The main job on these inputs. The clip is wide, since the rollouts come from no policy."""
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

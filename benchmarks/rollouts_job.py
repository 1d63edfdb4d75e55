"""The job of the benchmarks of rollouts: a model with random weights, prompts, and a reward."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GROUP = 8
"""Completions of a prompt."""


def _body(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool
) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


BODIES = {
    "tiny": _body(32, 64, 2, 4, 2, 512, True),
    "0.5b": _body(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": _body(1536, 8960, 28, 12, 2, 151936, True),
    "7b": _body(3584, 18944, 28, 28, 4, 152064, False),
    "14b": _body(5120, 13824, 48, 40, 8, 152064, False),
}
"""Entries of config.json, by names of Qwen2.5's shapes."""


@dataclass(frozen=True)
class Case:
    """A case that a process measures.

    trainer: pgtoolkit, trl or verl. sampler: transformers or vllm; of trl also static, transformers
        with a static cache.
    length: tokens of a completion, which ends before only where one token of the vocabulary is
        drawn. completions: of an iteration. overrides: further ones of pgtk or verl. iterations:
        rollouts with an update each. shape: of BODIES.
    """

    folder: str
    trainer: str
    sampler: str
    length: int
    completions: int
    overrides: list[str]
    iterations: int
    shape: str

    @property
    def model(self) -> str:
        return f"{self.folder}/model"

    @property
    def prompts(self) -> str:
        return f"{self.folder}/prompts.jsonl"

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return longest_prompt(self.shape) + self.length

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def longest_prompt(shape: str) -> int:
    """Return the most tokens of a prompt."""
    return 16 if shape == "tiny" else 160


def write_inputs(folder: Path, num_prompts: int, shape: str, weights: bool = True) -> None:
    """Write the prompts, and the model's folder if it is not there yet.

    Its weights are in bfloat16, as on the hub, and its tokenizer has a word for each of its tokens.

    shape: of BODIES. weights: whether they are written, too.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    body = BODIES[shape]
    draw = random.Random(0)
    longest = longest_prompt(shape)
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(num_prompts):
            text = "".join(
                draw.choice("abcdefgh") for _ in range(draw.randint(longest * 2 // 5, longest))
            )
            file.write(json.dumps({"prompt": text, "answer": "x"}) + "\n")
    if (folder / "model" / "config.json").exists():
        return
    tokenizer = make_tokenizer(body["vocab_size"])
    end = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    config = Qwen2Config(**body, **end)
    if not weights:
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder / "model")
    elif torch.cuda.is_available():
        with torch.device("cuda"):
            Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(
                folder / "model"
            )
    else:
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that makes each character of a prompt a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", *"abcdefgh"]
    words += [f"w{number}" for number in range(size - len(words))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


def reward(completion: str, _answer: str = "") -> float:
    """Return a reward as if at random, which depends on the completion alone."""
    return random.Random(completion).random()

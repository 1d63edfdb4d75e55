"""Stop strings end a completion where the shortest decoded text contains one, and cut the scored
text."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders.models import ALPHABET, model_config, save_with_tokenizer, small_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.completion import Completion, Prompt, Request
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.stops import StopStrings
from pgtoolkit.tasks.tasks import Score

TEXTS = ["the answer is </answer> and </think>", "ünï🎉 wörld", "a\n\nb", "so so so"] * 8
END = "<|im_end|>"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE like that of Qwen or Llama 3.

    Some tokens are parts of characters, some several characters.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


@pytest.fixture(scope="module")
def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: pieces begin with a space, and its decoder removes the
    first space of a text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<0x00>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    every_byte = [END, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=every_byte, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def num_tokens_until_stop(
    tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], strings: Sequence[str]
) -> int | None:
    """Return the smallest number of tokens whose text, without special tokens, contains one of the
    strings; None if there is no such number."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        if any(string in text for string in strings):
            return count
    return None


STRINGS = [["</answer>"], [" is"], ["ï🎉 w"], ["so s", "</"], ["world"]]


@pytest.mark.parametrize("strings", STRINGS, ids=str)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_completion_ends_at_the_first_token_that_completes_a_stop_string(kind, strings, request):
    tokenizer = request.getfixturevalue(kind)
    stops = StopStrings(strings, tokenizer)
    num_ended = 0
    generator = torch.Generator().manual_seed(0)
    completions = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS[:4]]
    for _ in range(20):
        random_tokens = torch.randint(1, len(tokenizer), (60,), generator=generator)
        completions.append(random_tokens.tolist())
    for tokens in completions:
        end = num_tokens_until_stop(tokenizer, tokens, strings)
        assert stops.end(tokens) == end
        num_ended += end is not None
        # The last tokens suffice for a sampler to see the end, and not before it.
        if end is not None:
            assert stops.seem_to_end([tokens[:end][-stops.window :]]) == [True]
            before = tokens[: end - 1]
            assert stops.seem_to_end([before[-stops.window :]]) == [False]
    assert num_ended > 0 or strings == ["world"]


def test_the_text_is_cut_where_the_first_string_begins(byte_level):
    stops = StopStrings(["</a>", "stop"], byte_level)
    assert stops.before("x stop y </a>") == "x "
    assert stops.before("x </a> stop") == "x "
    assert stops.before("neither") == "neither"
    assert bool(stops)
    assert not StopStrings([], byte_level)


def test_a_stop_string_with_a_special_token_is_refused(byte_level):
    with pytest.raises(ConfigError) as error:
        StopStrings(["ok", f"x{END}"], byte_level)
    assert str(error.value) == (
        "rollout.stop=['ok', 'x<|im_end|>'] needs texts without special tokens (got <|im_end|>). A "
        "completion ends by its text without special tokens. Use the text alone, and ids of "
        "special tokens in eos_token_id of the model's generation_config.json."
    )


class RecordingTask:
    """A task that records the texts that it is asked to score."""

    def __init__(self) -> None:
        self.answers = []

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        self.answers += [(response.text, response.finished) for response in responses]
        return [Score(0.0, False)] * len(responses)


def test_the_scored_text_excludes_the_stop_string_that_the_tokens_contain(byte_level):
    task = RecordingTask()
    prompt = Prompt("?", "", 0, "p")
    tokenized = TokenizedTask(task, byte_level, [byte_level.eos_token_id], stop=["</answer>"])
    # The last of these tokens is only the end of the string.
    pieces = byte_level.convert_tokens_to_ids([*"so</answer>"])
    completions = []
    for text, ending, reason in [
        ("so </answer>", [], "stop"),
        ("", pieces, "stop"),
        ("so", [byte_level.eos_token_id], "stop"),
        ("so </answer", [], "length"),
    ]:
        tokens = torch.tensor([*byte_level(text, add_special_tokens=False).input_ids, *ending])
        completions.append(Completion(tokens, torch.zeros(len(tokens)), reason, 0))
    tokenized.scores([prompt] * 4, completions)
    assert task.answers == [("so ", True), ("so", True), ("so", True), ("so </answer", False)]


def test_the_scored_text_contains_special_tokens_other_than_the_end(byte_level):
    """A stop string cuts the text, also if special tokens stand within the string."""
    byte_level = copy.deepcopy(byte_level)
    byte_level.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    end = byte_level.eos_token_id
    think, done = byte_level.convert_tokens_to_ids(["<think>", "</think>"])

    def ids(text: str) -> list[int]:
        return byte_level(text, add_special_tokens=False).input_ids

    completions = [
        ([think, *ids("so"), done, *ids(" 12"), end], "stop", "<think>so</think> 12"),
        ([*ids("1"), think, *ids("2"), end], "stop", "1<think>2"),
        ([*ids("1"), think, *ids("2")], "length", "1<think>2"),
        ([think, *ids("a think.STOP")], "stop", "<think>a think."),
        # Only without the special token in it this is the stop string.
        ([think, *ids("aSTO"), done, *ids("P")], "stop", "a"),
        ([*ids("no special token"), end], "stop", "no special token"),
    ]
    for stop in ([], ["STOP"]):
        tokenized = TokenizedTask(None, byte_level, [end], stop=stop)
        for tokens, reason, text in completions:
            if stop or not text.startswith(("<think>a", "a")):
                completion = Completion(torch.tensor(tokens), torch.zeros(len(tokens)), reason, 0)
                assert tokenized.answer(completion) == (text, reason == "stop")


@pytest.fixture
def folder(tmp_path):
    """Save a Llama whose tokens, the digits, `=` and the end, are about equally probable."""
    return save_with_tokenizer(small_llama(), tmp_path / "model")


def sampler_and_policy(
    folder: Path,
    stop: list[str] | None = None,
    static_cache: bool | None = None,
    max_completion_length: int = 20,
) -> tuple[TransformersSampler, Policy]:
    policy = build_policy(model_config(folder), None, on_gpu=False)
    rollout = PolicyRolloutSettings(max_completion_length=max_completion_length, stop=stop or [])
    settings = TransformersSamplerSettings(static_cache=static_cache)
    return TransformersSampler(policy, rollout.sampling, settings), policy


PROMPTS = [[4, 8, 2, 10], [9, 10], [1, 2]]


def sampled(sampler: TransformersSampler) -> list[Completion]:
    return sampler.complete([Request(prompt, 16, seed) for seed, prompt in enumerate(PROMPTS)])


@pytest.mark.parametrize("static_cache", [None, True])
def test_a_stop_string_changes_no_token_and_no_log_prob_before_it(folder, static_cache):
    """Up to its end a completion has the tokens and log-probs of the one without stop strings."""
    strings = ["12", "7=", "333"]
    plain, policy = sampler_and_policy(folder, static_cache=static_cache)
    stopping, _ = sampler_and_policy(folder, strings, static_cache)
    reasons = set()
    for uncut, cut in zip(sampled(plain), sampled(stopping), strict=True):
        end = num_tokens_until_stop(policy.tokenizer, uncut.tokens.tolist(), strings)
        reasons.add((uncut.finish_reason, cut.finish_reason, end is None))
        assert torch.equal(cut.tokens, uncut.tokens[:end])
        torch.testing.assert_close(cut.log_probs, uncut.log_probs[:end], rtol=0, atol=0)
        assert cut.finish_reason == ("stop" if end is not None else uncut.finish_reason)
    assert reasons >= {("length", "stop", False), ("stop", "stop", False), ("stop", "stop", True)}


def test_a_stop_string_that_begins_in_the_prompt_ends_nothing(folder):
    """Two prompts end in `=`, and some of their completions begin with one of these digits."""
    strings = ["=1", "=2", "=3"]
    plain, policy = sampler_and_policy(folder)
    stopping, _ = sampler_and_policy(folder, strings)
    num_begun = 0
    for place, (uncut, cut) in enumerate(zip(sampled(plain), sampled(stopping), strict=True)):
        end = num_tokens_until_stop(policy.tokenizer, uncut.tokens.tolist(), strings)
        assert torch.equal(cut.tokens, uncut.tokens[:end])
        num_begun += place < 32 and int(uncut.tokens[0]) in (1, 2, 3)
    assert num_begun > 4


def test_with_a_static_cache_stop_strings_are_looked_for_every_32_tokens(folder):
    """Each time at all tokens since the last time."""
    small_llama(max_position_embeddings=256).save_pretrained(folder)
    sampler, policy = sampler_and_policy(folder, [*ALPHABET], True, 100)
    passes = []
    policy.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    assert {len(completion.tokens) for completion in sampled(sampler)} == {1}
    assert len(passes) == 33  # not 100
    sampler, _ = sampler_and_policy(folder, ["98765432101234"], True, 100)
    looks = []
    stopped = sampler._stopped

    def recording(written: torch.Tensor, num_new: int) -> torch.Tensor:
        looks.append((written.shape[1], num_new))
        return stopped(written, num_new)

    sampler._stopped = recording
    sampled(sampler)
    assert looks[:2] == [(33, 33), (65, 32)]
    written = torch.tensor([[3, 3, 3, 3, *[4] * 60], [4] * 64])
    sampler, _ = sampler_and_policy(folder, ["333"], True, 100)
    assert sampler._stopped(written, 64).tolist() == [True, False]
    assert sampler._stopped(written, 32).tolist() == [False, False]

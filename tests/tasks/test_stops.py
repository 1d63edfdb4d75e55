"""Stop strings: which tokens a completion has that one of them ends, what of it is scored, with any
sampler."""

import copy

import pytest
import torch
from builders.models import ALPHABET, save_with_tokenizer, small_llama
from builders.runs import SHORT, config_of, sampler_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.completion import Completion, Prompt, Request
from pgtoolkit.errors import ConfigError
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.stops import StopStrings
from pgtoolkit.tasks.tasks import Score
from pgtoolkit.training.build import build

TEXTS = ["the answer is </answer> and </think>", "ünï🎉 wörld", "a\n\nb", "so so so"] * 8
END = "<|im_end|>"


@pytest.fixture(scope="module")
def byte_level():
    """Byte-level BPE, as that of Qwen or Llama 3: tokens of parts of characters, and of several."""
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
def metaspace():
    """Pieces with a space before them, as Llama 2's, whose decoder takes the first space of a text
    away."""
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


def shortest(tokenizer, tokens, strings):
    """The definition: the fewest tokens whose text, special tokens aside, has one of the
    strings."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        if any(string in text for string in strings):
            return count
    return None


STRINGS = [["</answer>"], [" is"], ["ï🎉 w"], ["so s", "</"], ["world"]]


@pytest.mark.parametrize("strings", STRINGS, ids=str)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_a_completion_ends_with_the_first_token_that_completes_a_string(kind, strings, request):
    tokenizer = request.getfixturevalue(kind)
    stops, found = StopStrings(strings, tokenizer), 0
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randint(1, len(tokenizer), (60,), generator=generator).tolist() for _ in range(20)
    ]
    for tokens in [
        *(tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS[:4]),
        *drawn,
    ]:
        end = shortest(tokenizer, tokens, strings)
        assert stops.end(tokens) == end
        found += end is not None
        # a sampler sees it when it is there, and not before, by the last tokens alone
        if end is not None:
            assert stops.seem_to_end([tokens[:end][-stops.window :]]) == [True]
            before = tokens[: end - 1]
            assert stops.seem_to_end([before[-stops.window :]]) == [False]
    assert found or strings == ["world"]


def test_the_text_is_cut_where_the_first_string_begins(byte_level):
    stops = StopStrings(["</a>", "stop"], byte_level)
    assert stops.before("x stop y </a>") == "x "
    assert stops.before("x </a> stop") == "x "
    assert stops.before("neither") == "neither"
    assert bool(stops)
    assert not StopStrings([], byte_level)


def test_a_special_token_is_no_text(byte_level):
    with pytest.raises(ConfigError) as error:
        StopStrings(["ok", f"x{END}"], byte_level)
    assert str(error.value) == (
        "rollout.stop=['ok', 'x<|im_end|>'] needs texts without special tokens (got <|im_end|>). A "
        "completion ends by its text without special tokens. Use the text alone, and ids of "
        "special tokens in eos_token_id of the model's generation_config.json."
    )


class Seen:
    """A task that notes what it is asked to score."""

    def __init__(self):
        self.answers = []

    def scores(self, responses):
        self.answers += [(response.text, response.finished) for response in responses]
        return [Score(0.0, False)] * len(responses)


def test_tokens_hold_the_string_and_the_scored_text_does_not(byte_level):
    task, prompt = Seen(), Prompt("?", "", 0, "p")
    tokenized = TokenizedTask(task, byte_level, [byte_level.eos_token_id], stop=["</answer>"])
    completions, pieces = [], byte_level.convert_tokens_to_ids([*"so</answer>"])
    for text, ending, reason in [
        ("so </answer>", [], "stop"),
        ("", pieces, "stop"),  # whose last token is only the end of the string
        ("so", [byte_level.eos_token_id], "stop"),
        ("so </answer", [], "length"),
    ]:
        tokens = torch.tensor([*byte_level(text, add_special_tokens=False).input_ids, *ending])
        completions.append(Completion(tokens, torch.zeros(len(tokens)), reason, 0))
    tokenized.scores([prompt] * 4, completions)
    assert task.answers == [("so ", True), ("so", True), ("so", True), ("so </answer", False)]


def test_special_tokens_but_the_end_are_part_of_the_scored_text(byte_level):
    """Where a string of rollout.stop ends the text, it is cut there, as the text without special
    tokens says."""
    byte_level = copy.deepcopy(byte_level)
    byte_level.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    end, (think, done) = (
        byte_level.eos_token_id,
        byte_level.convert_tokens_to_ids(["<think>", "</think>"]),
    )

    def ids(text):
        return byte_level(text, add_special_tokens=False).input_ids

    written = [
        ([think, *ids("so"), done, *ids(" 12"), end], "stop", "<think>so</think> 12"),
        ([*ids("1"), think, *ids("2"), end], "stop", "1<think>2"),
        ([*ids("1"), think, *ids("2")], "length", "1<think>2"),
        ([think, *ids("a think.STOP")], "stop", "<think>a think."),
        # the string is there only without the token in it
        ([think, *ids("aSTO"), done, *ids("P")], "stop", "a"),
        ([*ids("no special token"), end], "stop", "no special token"),
    ]
    for stop in ([], ["STOP"]):
        tokenized = TokenizedTask(None, byte_level, [end], stop=stop)
        for tokens, reason, text in written:
            if stop or not text.startswith(("<think>a", "a")):
                completion = Completion(torch.tensor(tokens), torch.zeros(len(tokens)), reason, 0)
                assert tokenized.answer(completion) == (text, reason == "stop")


@pytest.fixture
def folder(tmp_path):
    """A Llama whose tokens are the digits, `=` and the end, with equal chances, so that strings are
    met."""
    return save_with_tokenizer(small_llama(), tmp_path / "model")


def sampler_and_policy(folder, *overrides):
    own = [one for one in SHORT if not one.startswith(("model.", "rollout.max"))]
    chosen = [
        *own,
        "model=huggingface",
        f"model.path={folder}",
        "rollout.max_completion_length=20",
        *overrides,
    ]
    chosen = list({one.partition("=")[0]: one for one in chosen}.values())
    module, loader = build(config_of(*chosen))
    return sampler_of(loader), module.policy


PROMPTS = [[4, 8, 2, 10], [9, 10], [1, 2]]


def sampled(sampler):
    return sampler.complete([Request(prompt, 16, seed) for seed, prompt in enumerate(PROMPTS)])


@pytest.mark.parametrize("static_cache", ["null", "true"])
def test_the_sampler_ends_at_a_string_and_keeps_its_log_probs(folder, static_cache):
    """Up to its end each completion is the one without stop strings: the same draws, the same
    log-probs."""
    own = f"sampler.static_cache={static_cache}"
    plain, policy = sampler_and_policy(folder, own)
    stopping, _ = sampler_and_policy(folder, "rollout.stop=['12','7=','333']", own)
    tokenizer, reasons = policy.tokenizer, set()
    for whole, cut in zip(sampled(plain), sampled(stopping), strict=True):
        end = shortest(tokenizer, whole.tokens.tolist(), ["12", "7=", "333"])
        reasons.add((whole.finish_reason, cut.finish_reason, end is None))
        assert torch.equal(cut.tokens, whole.tokens[:end])
        torch.testing.assert_close(cut.log_probs, whole.log_probs[:end], rtol=0, atol=0)
        assert cut.finish_reason == ("stop" if end is not None else whole.finish_reason)
    assert reasons >= {("length", "stop", False), ("stop", "stop", False), ("stop", "stop", True)}


def test_a_string_that_the_prompt_begins_ends_nothing(folder):
    """Two of the prompts end in `=`, and some of their completions begin with one of these
    digits."""
    strings = ["=1", "=2", "=3"]
    plain, policy = sampler_and_policy(folder)
    stopping, _ = sampler_and_policy(folder, f"rollout.stop={strings}")
    begun = 0
    for place, (whole, cut) in enumerate(zip(sampled(plain), sampled(stopping), strict=True)):
        assert torch.equal(
            cut.tokens, whole.tokens[: shortest(policy.tokenizer, whole.tokens.tolist(), strings)]
        )
        begun += place < 32 and int(whole.tokens[0]) in (1, 2, 3)
    assert begun > 4


def test_a_static_cache_looks_for_strings_every_32_tokens(folder):
    """And at all that was written since it looked last."""
    small_llama(max_position_embeddings=256).save_pretrained(folder)
    own = [
        "sampler.static_cache=true",
        "rollout.max_completion_length=100",
        "accumulation.max_tokens=128",
    ]
    strings = ",".join(f"'{character}'" for character in ALPHABET)
    sampler, policy = sampler_and_policy(folder, *own, f"rollout.stop=[{strings}]")
    passes = []
    policy.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    assert {len(one.tokens) for one in sampled(sampler)} == {1}
    assert len(passes) == 33  # not 100
    sampler, _ = sampler_and_policy(folder, *own, "rollout.stop=['98765432101234']")
    asked, look = [], sampler._stopped
    sampler._stopped = lambda written, new: (
        asked.append((written.shape[1], new)) or look(written, new)
    )
    sampled(sampler)
    assert asked[:2] == [(33, 33), (65, 32)]
    written = torch.tensor([[3, 3, 3, 3, *[4] * 60], [4] * 64])
    sampler, _ = sampler_and_policy(folder, *own, "rollout.stop=['333']")
    assert sampler._stopped(written, 64).tolist() == [True, False]
    assert sampler._stopped(written, 32).tolist() == [False, False]

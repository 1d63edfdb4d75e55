"""Recorded rows of texts: their tokens are those of the chat template, and the assistant's turns
are trained. References are texts written by hand and the masks of transformers."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.models import small_llama
from builders.refusals import refusal
from builders.rollout_rows import recorded_config, write_jsonl, write_parquet
from builders.runs import module_and_loader
from tasks.test_chat import CHATML, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.cli import main
from pgtoolkit.errors import DataError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.rollouts.conversations import Conversations
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.settings import TrainedTurns
from pgtoolkit.tasks.settings import Chat

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 * 7?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And 7 * 7?"},
    {"role": "assistant", "content": " 49\n"},
]
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' "
    "}}{% endif %}{{ '\n' }}",
)
LLAMA = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + "
    "eos_token }}{% else %}{{ '[' + m['role'] + ']' + m['content'] + '[/]' }}{% endif %}{% "
    "endfor %}"
)
"""Like Llama 2's template: answers have no beginning, and only they have an end."""

QWEN = CHATML.replace(
    "{% for m in messages %}",
    (
        "{% for m in messages %}{% if m['role'] == 'assistant' and loop.last %}{{ '<think>' }}{% "
        "endif %}"
    ),
)
"""Like Qwen3's template: the text of a turn depends on whether others follow."""


def conversations_of(
    template: str | None, trained: str = "all", chat: str = "auto"
) -> tuple[PreTrainedTokenizerFast, Conversations]:
    """Return a tokenizer with this template, and conversations that end by <end> or <|im_end|>."""
    tokenizer = tokenizer_of(template)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return tokenizer, conversations_with(tokenizer, ends, trained, chat)


def conversations_with(
    tokenizer: PreTrainedTokenizerFast,
    ends: list[int],
    trained: str = "all",
    chat: str = "auto",
) -> Conversations:
    return Conversations(lambda: (tokenizer, ends), Chat(chat), TrainedTurns(trained))


def trained_texts(tokenizer: PreTrainedTokenizerFast, row: dict) -> list[str]:
    """Return the text of each run of trained tokens."""
    runs = [[]]
    for token, is_trained in zip(row["token_ids"], row["loss_mask"], strict=True):
        if is_trained:
            runs[-1].append(token)
        else:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["differences of prefixes", "marked"])
def test_the_trained_tokens_are_the_answers_with_their_ends(template):
    tokenizer, conversations = conversations_of(template)
    row = conversations.tokens({"messages": TALK})
    assert row["token_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert trained_texts(tokenizer, row) == ["42.<|im_end|>", " 49\n<|im_end|>"]
    tokenizer, conversations = conversations_of(template, "last")
    row = conversations.tokens({"messages": TALK})
    assert trained_texts(tokenizer, row) == [" 49\n<|im_end|>"]


def test_an_answer_that_quotes_its_end_token_is_trained_to_its_last_end():
    tokenizer, conversations = conversations_of(CHATML)
    messages = [
        {"role": "user", "content": "How does it end?"},
        {"role": "assistant", "content": "With <|im_end|>, so."},
    ]
    row = conversations.tokens({"messages": messages})
    assert trained_texts(tokenizer, row) == ["With <|im_end|>, so.<|im_end|>"]


def test_the_fingerprint_depends_on_template_chat_trained_turns_and_tokens():
    """A kept index is made anew where the fingerprint differs."""
    longer, _ = conversations_of(CHATML)
    longer.add_tokens(["assistant"])
    different = [
        conversations_of(CHATML)[1],
        conversations_of(MARKED)[1],
        conversations_of(CHATML, trained="last")[1],
        conversations_of(CHATML, chat="never")[1],
        conversations_with(longer, [longer.eos_token_id]),
    ]
    fingerprints = [conversations.fingerprint() for conversations in different]
    assert len(set(fingerprints)) == len(fingerprints)
    assert conversations_of(CHATML)[1].fingerprint() == fingerprints[0]


def test_a_template_without_a_beginning_of_answers_trains_them_with_their_ends():
    tokenizer, conversations = conversations_of(LLAMA)
    row = conversations.tokens({"messages": TALK})
    assert tokenizer.decode(row["token_ids"]) == (
        "[system]Be brief.[/][user]6 * 7?[/] 42. <end>[user]And 7 * 7?[/]  49\n <end>"
    )
    assert trained_texts(tokenizer, row) == [" 42. <end>", "  49\n <end>"]


def row_by_transformers(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> dict:
    """Return the tokens and the mask of a template that marks the assistant's turns."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    output = tokenizer.apply_chat_template(messages, **options)
    return {"token_ids": output["input_ids"], "loss_mask": output["assistant_masks"]}


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["differences of prefixes", "marked"])
def test_the_mask_is_that_of_transformers(template):
    """CHATML has no marks: its mask is that of the same template with marks."""
    tokenizer, _ = conversations_of(MARKED)
    _, conversations = conversations_of(template)
    for messages in (TALK, TALK[1:3], [*TALK, {"role": "user", "content": "<|im_end|>?"}]):
        expected = row_by_transformers(tokenizer, messages)
        assert sum(expected["loss_mask"]) > 3
        assert conversations.tokens({"messages": messages}) == expected


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["differences of prefixes", "marked"])
def test_the_mask_is_that_of_transformers_for_byte_level_tokens(template):
    """Tokens of byte-level BPE have several characters, a space before them, or parts of one
    character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(
        [message["content"] + " assistant user and the answer is forty-two" for message in TALK],
        trainer,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    contents = ["the answer is 42", " é and 🙂\n\n", "🙂", "\nforty-two "]
    messages = [
        {"role": role, "content": content} for content in contents for role in ("user", "assistant")
    ]
    tokenizer.chat_template = MARKED
    expected = row_by_transformers(tokenizer, messages)

    tokenizer.chat_template = template
    row = conversations_with(tokenizer, [tokenizer.eos_token_id]).tokens({"messages": messages})

    assert row == expected
    assert trained_texts(tokenizer, row) == [content + "<|im_end|>" for content in contents]
    assert len(row["token_ids"]) < len(tokenizer.decode(row["token_ids"])) / 1.5


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_row_of_prompt_and_completion_trains_the_completion_alone(template):
    tokenizer, conversations = conversations_of(template)
    row = conversations.tokens({"prompt": TALK[:4], "completion": TALK[4:]})
    assert row["token_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert trained_texts(tokenizer, row) == [" 49\n<|im_end|>"]
    row = conversations.tokens({"prompt": "6 * 7?", "completion": "42."})
    assert row == conversations.tokens({"messages": TALK[1:3]})
    assert trained_texts(tokenizer, row) == ["42.<|im_end|>"]


@pytest.mark.parametrize("chat", ["auto", "never"])
@pytest.mark.parametrize("completion", ["42", "42<end>"])
def test_texts_without_a_template_have_the_tokenizers_beginning_and_one_end(chat, completion):
    """The beginning is that of a prompt that is sampled from."""
    tokenizer, conversations = conversations_of(None if chat == "auto" else CHATML, chat=chat)
    prompt = [tokenizer.bos_token_id, *tokenizer.encode("6=", add_special_tokens=False)]
    answer = [*tokenizer.encode("42", add_special_tokens=False), tokenizer.eos_token_id]
    assert conversations.tokens({"prompt": "6=", "completion": completion}) == {
        "token_ids": prompt + answer,
        "loss_mask": [False] * len(prompt) + [True] * 3,
    }


def test_an_end_that_the_tokenizer_adds_to_a_prompt_is_not_before_its_completion():
    tokenizer, conversations = conversations_of(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "$A <end>", special_tokens=[("<end>", tokenizer.eos_token_id)]
    )
    row = conversations.tokens({"prompt": "6=", "completion": "42"})
    assert tokenizer.decode(row["token_ids"]) == "6=42<end>"
    assert row["loss_mask"] == [False] * 2 + [True] * 3


@pytest.mark.parametrize(
    ("template", "trained", "row", "message"),
    [
        (
            QWEN,
            "all",
            {"messages": TALK},
            "at place 3 an answer .* or rollout.trained_turns=last",
        ),
        (
            QWEN,
            "last",
            {"messages": TALK[:4]},
            "at place 3 .* marks the turns by {% generation %}$",
        ),
        (None, "all", {"messages": TALK}, "there is no chat template"),
        (CHATML, "all", {"messages": TALK[:2]}, "no message of the assistant"),
        (CHATML, "all", {"messages": TALK, "completion": "42"}, "needs to stand alone"),
        (CHATML, "all", {"prompt": "6"}, "needs a prompt and its completion"),
        (
            CHATML,
            "all",
            {"prompt": "6", "completion": TALK[2:3]},
            "needs to be of the same kind as its prompt: a text, or a list",
        ),
        (CHATML, "all", {"messages": [{"role": "user"}]}, "role and content are texts"),
        (
            MARKED.replace("m['role'] == 'assistant'", "loop.index == 3"),
            "last",
            {"messages": TALK},
            "2 turns .* marks 1",
        ),
        (
            CHATML.replace("m in messages", "m in messages if m.role != 'system'"),
            "all",
            {"messages": TALK},
            "leaves it out",
        ),
        (
            "{{ messages[0].content }}",
            "all",
            {"messages": TALK},
            "leaves it out|no token that is trained",
        ),
        (
            "{{ raise_exception('no') }}",
            "all",
            {"messages": TALK},
            "refused by the chat template: no",
        ),
    ],
)
def test_rows_whose_trained_tokens_cannot_be_known_are_refused(template, trained, row, message):
    _, conversations = conversations_of(template, trained)
    with pytest.raises(ValueError, match=message):
        conversations.tokens(row)


def test_the_last_turn_can_be_trained_if_the_template_depends_on_its_place():
    """The last turn and the text before it are in the whole text as they are by themselves."""
    tokenizer, conversations = conversations_of(QWEN.replace("<think>", ""), "last")
    row = conversations.tokens({"messages": TALK})
    assert trained_texts(tokenizer, row) == [" 49\n<|im_end|>"]


def test_a_token_of_prompt_and_answer_together_is_refused():
    vocabulary = {"A:yes": 0, "no": 1, "A:": 2, "<end>": 3}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ (m.role == 'user') and m.content + ' A:' "
        "or m.content }}{% endfor %}"
    )
    conversations = conversations_with(tokenizer, [3])
    with pytest.raises(ValueError, match="a token, A:yes, that is in part the assistant's"):
        conversations.tokens({"prompt": "no", "completion": "yes"})
    row = conversations.tokens({"prompt": "no", "completion": " yes"})
    assert row["loss_mask"] == [False, False, True]


def recorded(
    path: Path,
    max_tokens: int | None = None,
    template: str = CHATML,
    run_dir: Path | None = None,
    **changes: object,
) -> RecordedRollouts:
    """Return recorded rollouts of texts; changes: to their configuration."""
    tokenizer = character_tokenizer(None)
    tokenizer.chat_template = template
    return RecordedRollouts(
        recorded_config(path, **changes),
        Estimator("given"),
        len(tokenizer),
        reads_old_log_probs=False,
        max_tokens=max_tokens,
        run_dir=run_dir,
        tokenizer=lambda: (tokenizer, [tokenizer.eos_token_id]),
    )


TEXTS = [
    {"prompt": f"{number} + {number}?", "completion": number * "o" + str(2 * number)}
    for number in range(6)
]


def test_rows_of_jsonl_parquet_and_messages_make_the_same_documents(tmp_path):
    jsonl = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    parquet = write_parquet(tmp_path / "rows.parquet", TEXTS, row_group_size=2)
    messages = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        for row in TEXTS
    ]
    table = pa.table({"messages": messages, "prompt": ["seen"] * 6})
    pq.write_table(table, tmp_path / "messages.parquet")
    sources = [recorded(path) for path in (jsonl, parquet, tmp_path / "messages.parquet")]
    for position in (5, 0, 3):
        first, *others = [source.document(position) for source in sources]
        trained = first.tokens[first.loss_mask].tolist()
        # No end-of-sequence token is in the template's end, so all of it is trained.
        expected = position * "o" + str(2 * position) + "<|im_end|>\n"
        assert character_tokenizer(None).decode(trained) == expected
        assert first.advantages.tolist() == [1] * len(trained)
        for other in others:
            assert other.tokens.tolist() == first.tokens.tolist()
            assert other.loss_mask.tolist() == first.loss_mask.tolist()


def test_rows_that_are_too_long_are_refused_or_skipped_with_their_count(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    lengths = [len(recorded(path).document(position).tokens) for position in range(6)]
    assert lengths == sorted(lengths)
    with pytest.raises(
        DataError,
        match=rf"rows\.jsonl:6:token_ids: has {lengths[5]} tokens and at most {lengths[4]} fit",
    ):
        recorded(path, max_tokens=lengths[4])
    rollouts = recorded(path, max_tokens=lengths[3], too_long="skip")
    assert rollouts.num_documents == 4
    kept = [len(rollouts.document(position).tokens) for position in range(4)]
    assert kept == lengths[:4]
    (note,) = [note for note in rollouts.index.notes if "too_long" in note]
    assert (
        note == f"rollout.too_long=skip leaves out 2 of 6 rows, with more than {lengths[3]} tokens."
    )


def test_bad_rows_are_all_refused_by_file_line_and_field(tmp_path):
    rows = [
        *TEXTS,
        {"prompt": "6?", "completion": None},
        {"messages": [{"role": "user", "content": "6?"}]},
        {"a": 1},
        {**TEXTS[0], "prompt": "é"},
    ]
    with pytest.raises(DataError) as error:
        recorded(write_jsonl(tmp_path / "rows.jsonl", rows))
    places = [line.partition(": ")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert places == [
        "rows.jsonl:7:token_ids",
        "rows.jsonl:7:loss_mask",
        "rows.jsonl:8:messages",
        "rows.jsonl:9:token_ids",
        "rows.jsonl:9:loss_mask",
        "rows.jsonl:10:completion",
    ]


def test_a_kept_index_is_made_anew_for_another_template(tmp_path):
    """A template may write the date: on the next day the rows would seem to have been changed."""
    path = write_jsonl(tmp_path / "rows.jsonl", TEXTS)
    kept = recorded(path, run_dir=tmp_path).index
    assert kept.texts is not None
    assert recorded(path, run_dir=tmp_path).index.texts == kept.texts
    other = recorded(path, run_dir=tmp_path, template="today " + CHATML)
    assert other.index.texts != kept.texts
    assert len(other.document(0).tokens) == kept.rows["tokens"][0] + len("today ")


def test_keys_of_texts_are_refused_where_rows_have_tokens(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"token_ids": [1, 2], "loss_mask": [0, 1]}])
    assert recorded(path).index.texts is None
    for name, value in (("chat", Chat.never), ("trained_turns", TrainedTurns.last)):
        with pytest.raises(
            DataError, match=rf"rollout\.{name}={value}.* needs rows of messages, .*\(got tokens\)"
        ):
            recorded(path, **{name: value})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model that ends its turns with <|im_end|>, which stands only in its
    generation_config.json."""
    tokenizer = tokenizer_of(CHATML)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": ends[0], "max_position_embeddings": 192}
    small_llama(**sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tmp_path / "model"


SFT = (
    "experiment=sft",
    "trainer.device=cpu",
    "tracking=none",
    "accumulation.docs_per_step=2",
    "accumulation.max_tokens=192",
)


@pytest.mark.parametrize(
    ("row", "overrides", "expected"),
    [
        ({"messages": TALK}, [], "42.<|im_end|> 49\n<|im_end|>"),
        ({"messages": TALK}, ["rollout.trained_turns=last"], " 49\n<|im_end|>"),
        ({"prompt": "6?", "completion": "7"}, [], "7<|im_end|>"),
        ({"prompt": "6?", "completion": "7"}, ["rollout.chat=never"], "7<end>"),
    ],
    ids=["all turns", "last turn", "completion", "without the template"],
)
def test_a_run_trains_on_the_turns_that_are_asked_for(tmp_path, model, row, overrides, expected):
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row])
    module, loader = module_and_loader(
        *SFT, "model=huggingface", f"model.path={model}", f"rollout.path={path}", *overrides
    )
    decode = module.policy.tokenizer.decode
    uses_template = "rollout.chat=never" not in overrides
    for document in next(iter(loader)).documents:
        assert decode(document.tokens[document.loss_mask]) == expected
        assert ("<|im_start|>" in decode(document.tokens)) is uses_template


def test_pgtk_check_reads_the_first_rows_through_the_template(tmp_path, model, capsys):
    rows = [{"messages": TALK}, {"messages": TALK[:2]}]
    overrides = [*SFT, f"rollout.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}"]
    with_template = ("model=huggingface", f"model.path={model}")
    problem = "rows.jsonl:2:messages: has no message of the assistant to be trained"
    assert problem in refusal(capsys, "check", *overrides, *with_template)
    problem = "rows.jsonl:1:messages: is a list of chat messages, and there is no chat template"
    assert problem in refusal(capsys, "check", *overrides)


ADD = "Add the id of the token that ends an answer to eos_token_id in generation_config.json."
ENDLESS_ANSWERS = (
    "Completions may never end. Use a chat template that writes an end-of-sequence token there."
)


@pytest.mark.parametrize(
    ("template", "ends", "note"),
    [
        (CHATML, ["<|im_end|>"], None),
        (MARKED, ["<|im_end|>"], None),
        (LLAMA, ["<end>"], None),
        (
            CHATML,
            ["<end>"],
            "the chat template ends an answer with '<|im_end|>\\n', which holds no end-of-sequence "
            f"token of the model: all of it is trained, and completions may go on after it. {ADD}",
        ),
        (
            CHATML.replace(" + '<|im_end|>' + '\n'", ""),
            ["<end>"],
            (
                "the chat template writes no end after an answer, so that none is trained. "
                f"{ENDLESS_ANSWERS}"
            ),
        ),
        (
            MARKED.replace(
                "m['content'] + '<|im_end|>' }}{% endgen", "m['content'] }}{% endgen"
            ).replace("{% else %}", "{{ '<|im_end|>' }}{% else %}"),
            ["<|im_end|>"],
            (
                "the chat template marks an answer without its end, so that none is trained. "
                f"{ENDLESS_ANSWERS}"
            ),
        ),
        (
            None,
            [],
            (
                "the model has no end-of-sequence token, and completions are trained without one. "
                f"{ADD}"
            ),
        ),
        (None, ["<end>"], None),
    ],
    ids=[
        "chatml",
        "marked",
        "llama",
        "base model",
        "none",
        "outside of marks",
        "no template, no end",
        "no template",
    ],
)
def test_a_note_says_that_no_end_is_trained_exactly_where_none_is(template, ends, note):
    tokenizer = tokenizer_of(template)
    end_ids = tokenizer.convert_tokens_to_ids(ends)
    conversations = conversations_with(tokenizer, end_ids)
    assert conversations.notes() == ([] if note is None else [note])
    row = conversations.tokens({"prompt": "6?", "completion": "7"})
    trained = {
        token
        for token, is_trained in zip(row["token_ids"], row["loss_mask"], strict=True)
        if is_trained
    }
    assert bool(trained & set(end_ids)) is (note is None)


def test_a_note_counts_rows_that_hold_what_the_template_or_the_tokenizer_adds():
    _, conversations = conversations_of(CHATML)
    templated = "<|im_start|>user\n6?<|im_end|>\n<|im_start|>assistant\n"
    for prompt in ("6?", templated, templated):
        conversations.tokens({"prompt": prompt, "completion": "7"})
    beginning = f"{templated}\n7"[:60]
    assert conversations.notes() == [
        "2 of the first 3 rows hold '<|im_start|>', which the chat template adds itself, so that "
        f"they have it twice, first {beginning!r}. Use rollout.chat=never, or "
        "texts without <|im_start|>."
    ]
    _, conversations = conversations_of(None)
    for prompt in ("6?", "<bos>6?"):
        conversations.tokens({"prompt": prompt, "completion": "7"})
    assert conversations.notes() == [
        "1 of the first 2 rows hold '<bos>', which the tokenizer adds itself, so that they have it "
        "twice, first '<bos>6?'. Use texts without <bos>."
    ]


def test_a_vocabulary_without_the_words_that_try_a_template_gets_no_note():
    words = {"<end>": 0, "yes": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), eos_token="<end>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    assert conversations_with(tokenizer, [0]).notes() == []


def test_pgtk_check_and_a_run_note_that_no_end_is_trained(tmp_path, model, capsys):
    """Rows of tokens have no template, and no such note."""
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"messages": TALK}] * 2)
    tokens = {"token_ids": [1, 2], "loss_mask": [0, 1]}
    tokens = write_jsonl(tmp_path / "tokens.jsonl", [tokens] * 2)
    (model / "generation_config.json").unlink()  # leaves the tokenizer's own end
    overrides = [*SFT, "model=huggingface", f"model.path={model}", "trainer.max_steps=1"]
    note = (
        "the chat template ends an answer with '<|im_end|>\\n', which holds no end-of-sequence "
        "token"
    )
    assert main(["check", *overrides, f"rollout.path={texts}"]) == 0
    assert note in capsys.readouterr().out
    assert main(["check", *overrides, f"rollout.path={tokens}"]) == 0
    assert note not in capsys.readouterr().out
    run_dir = f"hydra.run.dir={tmp_path / 'run'}"
    assert main([*overrides, f"rollout.path={texts}", run_dir]) == 0
    assert f"note: {note}" in capsys.readouterr().err


def test_rows_with_tools_that_the_template_would_not_get_are_refused(tmp_path):
    _, conversations = conversations_of(CHATML)
    for tools in ([], None, "[]", "null"):
        assert conversations.tokens({"messages": TALK, "tools": tools})
    for tools in ([{"name": "add"}], [{"name": "add"}, {"name": "subtract"}], '[{"name": "add"}]'):
        with pytest.raises(
            ValueError, match="has tools, which are not handed to the chat template"
        ):
            conversations.tokens({"messages": TALK, "tools": tools})
        table = pa.table({"messages": [TALK, TALK], "tools": [tools, tools[:0]]})
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=r"rows\.parquet:1:messages: has tools, which"):
            recorded(tmp_path / "rows.parquet")

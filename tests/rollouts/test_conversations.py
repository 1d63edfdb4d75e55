"""Rows of texts: their tokens are those of the chat template, and exactly the turns of the
assistant are trained."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.models import small_llama
from builders.rollout_rows import recorded_config, write_parquet
from builders.runs import module_and_loader
from tasks.test_chat import CHATML, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.cli import main
from pgtoolkit.config.schema_rollouts import TrainedTurns
from pgtoolkit.config.schema_tasks import Chat
from pgtoolkit.errors import DataError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.rollouts.conversations import Conversations
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.recorded import RecordedRollouts

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
ENDLESS = (  # as Llama 2's: no beginning of an answer, and an end after the assistant's turns alone
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + "
    "eos_token }}{% else %}{{ '[' + m['role'] + ']' + m['content'] + '[/]' }}{% endif %}{% "
    "endfor %}"
)
FORGETFUL = CHATML.replace(
    "{% for m in messages %}",
    (
        "{% for m in messages %}{% if m['role'] == 'assistant' and loop.last %}{{ '<think>' }}{% "
        "endif %}"
    ),
)
"""As Qwen3's: what it writes of a turn depends on whether others follow."""


def of(template, trained="all", chat="auto", ends=None):
    tokenizer = tokenizer_of(template)
    ends = ends or [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    return tokenizer, Conversations(lambda: (tokenizer, ends), Chat(chat), TrainedTurns(trained))


def parts(tokenizer, found):
    """The texts of the tokens that are trained, one for each run of them."""
    marked = [
        (token if trained else None)
        for token, trained in zip(found["token_ids"], found["loss_mask"], strict=True)
    ]
    runs = [[]]
    for token in marked:
        runs[-1].append(token) if token is not None else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["differences of prefixes", "marked"])
def test_by_hand_the_trained_tokens_are_the_answers_with_their_ends(template):
    tokenizer, every = of(template)
    found = every.tokens({"messages": TALK})
    assert found["token_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert parts(tokenizer, found) == ["42.<|im_end|>", " 49\n<|im_end|>"]
    assert parts(tokenizer, of(template, "last")[1].tokens({"messages": TALK})) == [
        " 49\n<|im_end|>"
    ]


def test_a_turn_that_holds_its_end_is_trained_up_to_its_last_one():
    """An answer may quote the token that ends it."""
    tokenizer, every = of(CHATML)
    talk = [
        {"role": "user", "content": "How does it end?"},
        {"role": "assistant", "content": "With <|im_end|>, so."},
    ]
    assert parts(tokenizer, every.tokens({"messages": talk})) == ["With <|im_end|>, so.<|im_end|>"]


def test_the_fingerprint_tells_apart_what_makes_other_tokens():
    """A kept index of the same rows is made anew where it differs: by template, use of it, trained
    turns, tokens."""
    conversations = [
        of(CHATML)[1],
        of(MARKED)[1],
        of(CHATML, trained="last")[1],
        of(CHATML, chat="never")[1],
    ]
    longer, _ = of(CHATML)
    longer.add_tokens(["assistant"])
    conversations.append(
        Conversations(lambda: (longer, [longer.eos_token_id]), Chat.auto, TrainedTurns.all)
    )
    fingerprints = [every.fingerprint() for every in conversations]
    assert len(set(fingerprints)) == len(fingerprints)
    assert of(CHATML)[1].fingerprint() == fingerprints[0]


def test_by_hand_a_template_without_a_beginning_of_answers():
    tokenizer, every = of(ENDLESS)
    found = every.tokens({"messages": TALK})
    assert tokenizer.decode(found["token_ids"]) == (
        "[system]Be brief.[/][user]6 * 7?[/] 42. <end>[user]And 7 * 7?[/]  49\n <end>"
    )
    assert parts(tokenizer, found) == [" 42. <end>", "  49\n <end>"]


def test_the_mask_is_that_of_transformers():
    """Where the template marks the turns; and of one that does not, that of the same template with
    marks."""
    tokenizer, marked = of(MARKED)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    for messages in (TALK, TALK[1:3], [*TALK, {"role": "user", "content": "<|im_end|>?"}]):
        theirs = tokenizer.apply_chat_template(messages, **options)
        assert sum(theirs["assistant_masks"]) > 3
        for ours in (marked, of(CHATML)[1]):
            found = ours.tokens({"messages": messages})
            assert (found["token_ids"], found["loss_mask"]) == (
                theirs["input_ids"],
                theirs["assistant_masks"],
            )


def test_the_mask_is_that_of_transformers_with_tokens_of_several_characters_and_of_parts_of_one():
    """Byte-level BPE, whose tokens hold the space before them and parts of characters such as
    these."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    text = [message["content"] + " assistant user and the answer is forty-two" for message in TALK]
    specials, letters = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        text, trainers.BpeTrainer(special_tokens=specials, initial_alphabet=letters)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    said = ["the answer is 42", " é and 🙂\n\n", "🙂", "\nforty-two "]
    messages = [{"role": role, "content": one} for one in said for role in ("user", "assistant")]
    for template in (MARKED, CHATML):
        tokenizer.chat_template = MARKED
        theirs = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        tokenizer.chat_template = template
        ours = Conversations(
            lambda: (tokenizer, [tokenizer.eos_token_id]), Chat.auto, TrainedTurns.all
        )
        found = ours.tokens({"messages": messages})
        assert (found["token_ids"], found["loss_mask"]) == (
            theirs["input_ids"],
            theirs["assistant_masks"],
        )
        assert parts(tokenizer, found) == [one + "<|im_end|>" for one in said]
    assert len(found["token_ids"]) < len(tokenizer.decode(found["token_ids"])) / 1.5


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_of_a_prompt_with_its_completion_the_completion_is_trained(template):
    tokenizer, every = of(template)
    pair = every.tokens({"prompt": TALK[:4], "completion": TALK[4:]})
    assert pair["token_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert parts(tokenizer, pair) == [" 49\n<|im_end|>"]
    texts = every.tokens({"prompt": "6 * 7?", "completion": "42."})
    assert texts == every.tokens({"messages": TALK[1:3]})
    assert parts(tokenizer, texts) == ["42.<|im_end|>"]


@pytest.mark.parametrize("chat", ["auto", "never"])
def test_texts_without_a_template_are_a_prompt_and_its_answer(chat):
    """The tokenizer's own beginning, as of a prompt that is sampled from, and one end of the
    sequence."""
    tokenizer, texts = of(None if chat == "auto" else CHATML, chat=chat)
    expected = [tokenizer.bos_token_id, *tokenizer.encode("6=", add_special_tokens=False)]
    for completion in ("42", "42<end>"):
        found = texts.tokens({"prompt": "6=", "completion": completion})
        answer = [*tokenizer.encode("42", add_special_tokens=False), tokenizer.eos_token_id]
        assert found == {
            "token_ids": expected + answer,
            "loss_mask": [False] * len(expected) + [True] * 3,
        }


def test_an_end_that_the_tokenizer_adds_to_a_prompt_does_not_stand_before_its_completion():
    tokenizer, texts = of(None)
    end = [("<end>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "$A <end>", special_tokens=end
    )
    found = texts.tokens({"prompt": "6=", "completion": "42"})
    assert tokenizer.decode(found["token_ids"]) == "6=42<end>"
    assert found["loss_mask"] == [False] * 2 + [True] * 3


@pytest.mark.parametrize(
    ("template", "trained", "raw", "message"),
    [
        (
            FORGETFUL,
            "all",
            {"messages": TALK},
            "at place 3 an answer .* or rollout.trained_turns=last",
        ),
        (
            FORGETFUL,
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
            "in another way|no token that is trained",
        ),
        (
            "{{ raise_exception('no') }}",
            "all",
            {"messages": TALK},
            "refused by the chat template: no",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(template, trained, raw, message):
    with pytest.raises(ValueError, match=message):
        of(template, trained)[1].tokens(raw)


def test_the_last_turn_of_a_template_that_forgets():
    """It is in the text as it is written by itself, and so is what comes before it."""
    tokenizer, last = of(FORGETFUL.replace("<think>", ""), "last")
    assert parts(tokenizer, last.tokens({"messages": TALK})) == [" 49\n<|im_end|>"]


def test_a_token_that_is_only_in_part_the_assistants_is_refused():
    words = Tokenizer(models.WordLevel({"A:yes": 0, "no": 1, "A:": 2, "<end>": 3}, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ (m.role == 'user') and m.content + ' A:' "
        "or m.content }}{% endfor %}"
    )
    of_words = Conversations(lambda: (tokenizer, [3]), Chat.auto, TrainedTurns.all)
    with pytest.raises(ValueError, match="a token, A:yes, that is in part the assistant's"):
        of_words.tokens({"prompt": "no", "completion": "yes"})
    assert of_words.tokens({"prompt": "no", "completion": " yes"})["loss_mask"] == [
        False,
        False,
        True,
    ]


def rows_of(path, max_tokens=None, template=CHATML, run_dir=None, **changes):
    tokenizer = character_tokenizer(None)
    tokenizer.chat_template = template
    options = {"reads_old_log_probs": False, "max_tokens": max_tokens, "run_dir": run_dir}
    options["tokenizer"] = lambda: (tokenizer, [tokenizer.eos_token_id])
    return RecordedRollouts(
        recorded_config(path, **changes), Estimator("given"), len(tokenizer), **options
    )


TEXTS = [{"prompt": f"{i} + {i}?", "completion": i * "o" + str(2 * i)} for i in range(6)]


def test_files_of_texts_are_read_like_others_and_are_all_the_same(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    write_parquet(tmp_path / "rows.parquet", TEXTS, row_group_size=2)
    talks = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
        for row in TEXTS
    ]
    pq.write_table(
        pa.table({"messages": talks, "prompt": ["seen"] * 6}), tmp_path / "messages.parquet"
    )
    found = [
        rows_of(tmp_path / name) for name in ("rows.jsonl", "rows.parquet", "messages.parquet")
    ]
    for position in (5, 0, 3):
        first, *others = [source.document(position) for source in found]
        trained = first.tokens[first.loss_mask].tolist()
        tokenizer = character_tokenizer(None)
        # none ends a sequence
        assert tokenizer.decode(trained) == position * "o" + str(2 * position) + "<|im_end|>\n"
        assert first.advantages.tolist() == [1] * len(trained)
        for other in others:
            assert other.tokens.tolist() == first.tokens.tolist()
            assert other.loss_mask.tolist() == first.loss_mask.tolist()


def test_rows_that_are_too_long_are_refused_or_skipped_with_their_count(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    lengths = [len(rows_of(tmp_path / "rows.jsonl").document(i).tokens) for i in range(6)]
    assert lengths == sorted(lengths)
    with pytest.raises(
        DataError,
        match=rf"rows\.jsonl:6:token_ids: has {lengths[5]} tokens and at most {lengths[4]} fit",
    ):
        rows_of(tmp_path / "rows.jsonl", max_tokens=lengths[4])
    kept = rows_of(tmp_path / "rows.jsonl", max_tokens=lengths[3], too_long="skip")
    assert kept.num_documents == 4
    assert [len(kept.document(i).tokens) for i in range(4)] == lengths[:4]
    (note,) = [note for note in kept.index.notes if "too_long" in note]
    assert (
        note == f"rollout.too_long=skip leaves out 2 of 6 rows, with more than {lengths[3]} tokens."
    )


def test_bad_rows_name_file_line_and_field(tmp_path):
    rows = [
        *TEXTS,
        {"prompt": "6?", "completion": None},
        {"messages": [{"role": "user", "content": "6?"}]},
        {"a": 1},
    ]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {**TEXTS[0], "prompt": "é"}])
    )
    with pytest.raises(DataError) as error:
        rows_of(tmp_path / "rows.jsonl")
    assert [line.partition(": ")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        *(
            "rows.jsonl:7:token_ids",
            "rows.jsonl:7:loss_mask",
            "rows.jsonl:8:messages",
            "rows.jsonl:9:token_ids",
        ),
        *("rows.jsonl:9:loss_mask", "rows.jsonl:10:completion"),
    ]


def test_another_template_has_the_kept_index_made_anew(tmp_path):
    """As one that writes the date does on the next day: else each row would seem to have been
    changed."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    kept = rows_of(path, run_dir=tmp_path).index
    assert rows_of(path, run_dir=tmp_path).index.texts == kept.texts is not None
    other = rows_of(path, run_dir=tmp_path, template="today " + CHATML)
    assert other.index.texts != kept.texts
    assert len(other.document(0).tokens) == kept.rows["tokens"][0] + len("today ")


def test_keys_of_texts_are_not_ignored_where_rows_have_tokens(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"token_ids": [1, 2], "loss_mask": [0, 1]}))
    assert rows_of(tmp_path / "rows.jsonl").index.texts is None
    for name, value in (("chat", Chat.never), ("trained_turns", TrainedTurns.last)):
        with pytest.raises(
            DataError, match=rf"rollout\.{name}={value}.* needs rows of messages, .*\(got tokens\)"
        ):
            rows_of(tmp_path / "rows.jsonl", **{name: value})


@pytest.fixture
def model(tmp_path):
    """The folder of one that ends its turns with <|im_end|>, which only its generation_config.json
    says."""
    tokenizer = tokenizer_of(CHATML)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": ends[0], "max_position_embeddings": 192}
    small_llama(**sizes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tmp_path / "model"


SHORT = (
    "trainer.device=cpu",
    "tracking=none",
    "accumulation.docs_per_step=2",
    "accumulation.max_tokens=192",
)


def test_a_run_trains_on_the_turns_that_are_asked_for(tmp_path, model):
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps({"messages": TALK}) + "\n"))
    (tmp_path / "pairs.jsonl").write_text(
        2 * (json.dumps({"prompt": "6?", "completion": "7"}) + "\n")
    )
    for file, overrides, expected in (
        ("rows", [], "42.<|im_end|> 49\n<|im_end|>"),
        ("rows", ["rollout.trained_turns=last"], " 49\n<|im_end|>"),
        ("pairs", [], "7<|im_end|>"),
        ("pairs", ["rollout.chat=never"], "7<end>"),
    ):
        chosen = [
            "model=huggingface",
            f"model.path={model}",
            f"rollout.path={tmp_path / file}.jsonl",
            *overrides,
        ]
        module, loader = module_and_loader("experiment=sft", *SHORT, *chosen)
        decode = module.policy.tokenizer.decode
        for document in next(iter(loader)).documents:
            assert decode(document.tokens[document.loss_mask]) == expected
            assert ("<|im_start|>" in decode(document.tokens)) is (
                "rollout.chat=never" not in overrides
            )


def test_the_check_reads_the_first_rows_through_the_template(tmp_path, model, capsys):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK[:2]})
    )
    rows = ["experiment=sft", *SHORT, f"rollout.path={tmp_path / 'rows.jsonl'}"]
    assert main(["check", *rows, "model=huggingface", f"model.path={model}"]) == 2
    assert (
        "rows.jsonl:2:messages: has no message of the assistant to be trained"
        in capsys.readouterr().out
    )
    assert main(["check", *rows]) == 2
    assert (
        "rows.jsonl:1:messages: is a list of chat messages, and there is no chat template"
        in capsys.readouterr().out
    )


ADD = "Add the id of the token that ends an answer to eos_token_id in generation_config.json."
ENDLESS_ANSWERS = (
    "Completions may never end. Use a chat template that writes an end-of-sequence token there."
)


@pytest.mark.parametrize(
    ("template", "ends", "note"),
    [
        (CHATML, ["<|im_end|>"], None),
        (MARKED, ["<|im_end|>"], None),
        (ENDLESS, ["<end>"], None),
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
                "the model has no end-of-sequence token: completions are trained without an end. "
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
def test_where_no_end_is_trained_a_note_says_so(template, ends, note):
    tokenizer = tokenizer_of(template)
    ids = tokenizer.convert_tokens_to_ids(ends)
    texts = Conversations(lambda: (tokenizer, ids), Chat.auto, TrainedTurns.all)
    assert texts.notes() == ([] if note is None else [note])
    row = texts.tokens({"prompt": "6?", "completion": "7"})
    trained = {
        token
        for token, is_trained in zip(row["token_ids"], row["loss_mask"], strict=True)
        if is_trained
    }
    assert bool(trained & {*ids}) is (note is None)  # what the note says is so


def test_rows_that_hold_what_is_added_to_them_are_counted():
    _, texts = of(CHATML)
    written = "<|im_start|>user\n6?<|im_end|>\n<|im_start|>assistant\n"
    for prompt in ("6?", written, written):
        texts.tokens({"prompt": prompt, "completion": "7"})
    assert texts.notes() == [
        "2 of the first 3 rows hold '<|im_start|>', which the chat template adds itself, so that "
        f"they have it twice, first {(written + chr(10) + '7')[:60]!r}. Use rollout.chat=never, or "
        "texts without <|im_start|>."
    ]
    _, texts = of(None)
    for prompt in ("6?", "<bos>6?"):
        texts.tokens({"prompt": prompt, "completion": "7"})
    assert texts.notes() == [
        "1 of the first 2 rows hold '<bos>', which the tokenizer adds itself, so that they have it "
        "twice, first '<bos>6?'. Use texts without <bos>."
    ]


def test_check_and_start_say_that_no_end_is_trained(tmp_path, model, capsys):
    """Of rows of texts; rows of tokens have no template."""
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps({"messages": TALK}) + "\n"))
    (tmp_path / "tokens.jsonl").write_text(
        2 * (json.dumps({"token_ids": [1, 2], "loss_mask": [0, 1]}) + "\n")
    )
    (model / "generation_config.json").unlink()  # the tokenizer's own end is left
    chosen = [
        "experiment=sft",
        *SHORT,
        "model=huggingface",
        f"model.path={model}",
        "trainer.max_steps=1",
    ]
    said = (
        "the chat template ends an answer with '<|im_end|>\\n', which holds no end-of-sequence "
        "token"
    )
    for file, is_said in (("rows", True), ("tokens", False)):
        assert main(["check", *chosen, f"rollout.path={tmp_path / file}.jsonl"]) == 0
        assert (said in capsys.readouterr().out) is is_said
    assert (
        main(
            [
                *chosen,
                f"rollout.path={tmp_path / 'rows'}.jsonl",
                f"hydra.run.dir={tmp_path / 'run'}",
            ]
        )
        == 0
    )
    assert f"note: {said}" in capsys.readouterr().err


def test_rows_with_tools_that_the_model_would_not_see_are_refused(tmp_path):
    _, every = of(CHATML)
    for tools in ([], None, "[]", "null"):
        assert every.tokens({"messages": TALK, "tools": tools})
    for tools in ([{"name": "add"}], [{"name": "add"}, {"name": "subtract"}], '[{"name": "add"}]'):
        with pytest.raises(
            ValueError, match="has tools, which are not handed to the chat template"
        ):
            every.tokens({"messages": TALK, "tools": tools})
        table = pa.table({"messages": [TALK, TALK], "tools": [tools, tools[:0]]})
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=r"rows\.parquet:1:messages: has tools, which"):
            rows_of(tmp_path / "rows.parquet")

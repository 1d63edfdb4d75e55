"""`BetweenTurns` writes the tokens between two turns: with those sampled before they make up
the text of the chat template."""

import pytest
from tasks.test_chat import CHATML, LLAMA, tokenizer_of
from transformers import PreTrainedTokenizerFast

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.tasks.between_turns import BetweenTurns
from pgtoolkit.tasks.chat_template import ChatTemplate

START = ({"role": "user", "content": "6 * 7?"},)
MORE = {"role": "user", "content": "And 5?"}
THINKING = (  # Like Qwen3's: it leaves the thoughts of earlier answers out.
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>' + '\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)

NAMED = CHATML.replace("m['role']", "m['role'] + m.get('name', '')")


def between_of(
    template: str | None, system: str | None = None
) -> tuple[PreTrainedTokenizerFast, BetweenTurns]:
    tokenizer = tokenizer_of(template)
    chat = ChatTemplate(tokenizer, system) if template else None
    return tokenizer, BetweenTurns(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], chat)


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA, THINKING], ids=["chatml", "with a beginning", "thinking"]
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tokens_of_two_turns_are_those_of_the_template(template, system):
    tokenizer, between = between_of(template, system)
    between.check(START)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    beginning = [] if system is None else [{"role": "system", "content": system}]
    beginning += START
    messages = [*beginning, {"role": "assistant", "content": "42"}, MORE]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    drawn = tokenizer("42<|im_end|>", add_special_tokens=False).input_ids
    prompt = tokenizer.apply_chat_template(beginning, add_generation_prompt=True)["input_ids"]
    if template == THINKING:  # It leaves the <think> of earlier answers out.
        prompt = prompt[: -len("<think>")]
    assert prompt + drawn + between.tokens(MORE, end) == expected
    # A turn that a stop string has ended gets the template's end, which was not sampled.
    assert prompt + drawn[:-1] + between.tokens(MORE, drawn[-2]) == expected


def test_another_sampled_end_token_gets_no_second_end():
    tokenizer, _ = between_of(CHATML)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<bos>"])
    between = BetweenTurns(tokenizer, ends, ChatTemplate(tokenizer))
    after_template_end = between.tokens(MORE, ends[0])
    assert between.tokens(MORE, ends[1]) == after_template_end
    assert between.tokens(MORE, 5)[1:] == after_template_end


def test_without_a_template_a_message_is_only_its_content():
    tokenizer, between = between_of(None)
    between.check(START)
    assert between.tokens(MORE, 0) == tokenizer("And 5?", add_special_tokens=False).input_ids


LAST = (
    "{% for m in messages %}{{ m['role'] + (' (last)' if loop.last else '') + m['content'] + "
    "'<|im_end|>' }}{% endfor %}"
)
COUNTED = (
    "{% for m in messages %}{{ loop.index | string + m['content'] + '<|im_end|>' }}{% endfor %}"
)
HOISTED = (
    "{% for m in messages if m['role'] != 'system' %}{{ messages[0]['content'] if loop.last }}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
)
BARE = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% "
    "endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
)
NO_ANSWERS = (
    "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] + '<|im_end|>' "
    "}}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "got"),
    [
        (LAST, "writes messages in another way when more messages follow"),
        (COUNTED, "writes messages in another way when more messages follow"),
        (HOISTED, "writes messages in another way when more messages follow"),
        (BARE, "ends an answer with none of eos_token_id in generation_config.json"),
        (NO_ANSWERS, "one that leaves out an answer, or the message after it"),
    ],
    ids=["last", "counted", "hoisted", "bare", "no answers"],
)
def test_a_template_that_rewrites_earlier_messages_is_refused(template, got):
    _, between = between_of(template, "Be brief.")
    with pytest.raises(
        ConfigError, match=rf"{got}.*Use task\.chat=never, which writes the contents"
    ):
        between.check(START)


def test_the_error_of_an_unknown_role_names_the_message():
    _, between = between_of(STRICT)
    between.check(START)
    with pytest.raises(
        DataError, match=r"'role': 'tool'.* .*got one that says: no tools here.\. Use roles"
    ):
        between.tokens({"role": "tool", "content": "x"}, 0)


def test_the_error_of_a_character_without_a_token_names_it():
    between = BetweenTurns(character_tokenizer("0123456789=?"), [12], None)
    with pytest.raises(
        DataError, match=r"'4\xe9'\} .*got one that says: WordLevel error: .* Use roles, keys and"
    ):
        between.tokens({"role": "user", "content": "4\xe9"}, 0)


@pytest.mark.parametrize(
    ("template", "reads"), [(CHATML, False), (NAMED, True), (None, False)], ids=str
)
def test_a_key_of_a_message_that_the_model_would_not_see_is_refused(template, reads):
    _, between = between_of(template)
    message = {"role": "user", "content": "5", "name": "Ada"}
    if reads:
        assert between.tokens(message, 0) != between.tokens(message | {"name": "Bob"}, 0)
        return
    with pytest.raises(DataError, match=r"got name, which would be dropped\). Use roles, keys"):
        between.tokens(message, 0)

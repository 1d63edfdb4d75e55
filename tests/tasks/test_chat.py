"""Prompts through chat templates: their tokens are those of `apply_chat_template`, and messages or
arguments that a template would ignore are refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders.models import small_llama
from builders.runs import SHORT, config_of, last_of_each_key, with_model
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.preview import preview
from pgtoolkit.assembly.train import train
from pgtoolkit.completion import Prompt
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema import SCHEMAS
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.setup import character_tokenizer
from pgtoolkit.tasks.chat_template import ChatTemplate, chat_of
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.settings import Chat, PromptsTaskSettings
from pgtoolkit.tasks.shuffle import seed_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']' + (m['content'] | trim) + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
)
DEAF = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<bos>"]


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each character and for each mark of a chat.

    Like Llama's it adds <bos> to every text.
    """
    tokenizer = character_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:2], "bos_token": "<bos>"})
    beginning = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A", special_tokens=beginning
    )
    tokenizer.chat_template = template
    return tokenizer


def task_config(path: Path | str = "", **changes: object) -> PromptsTaskSettings:
    values = option_values("task", "prompts") | {"path": str(path)}
    return PromptsTaskSettings(**(values | changes))


def encoded(
    tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Prompt], **changes: object
) -> list[list[int]]:
    """Return the tokens of prompts; `changes`: of the task's configuration."""
    chat = chat_of(task_config(**changes), tokenizer)
    return TokenizedTask(None, tokenizer, [], chat).encode(prompts)


def template_tokens(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, str]], **arguments: object
) -> list[int]:
    """Return the tokens of messages by transformers' own `apply_chat_template`."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **arguments)[
        "input_ids"
    ]


CONVERSATION = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "6 * 7?"},
)
TEXT = Prompt("6 * 7?", "42", 0, "p:1")
TALK = Prompt("6 * 7?", "42", 1, "p:2", CONVERSATION)
USER = {"role": "user", "content": "6 * 7?"}
SYSTEM = {"role": "system", "content": "Think first."}


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "with a beginning of its own"])
def test_tokens_of_a_prompt_are_those_of_its_template(template):
    tokenizer = tokenizer_of(template)
    for prompt, system, conversation in (
        (TEXT, None, [USER]),
        (TEXT, "Think first.", [SYSTEM, USER]),
        (TALK, None, CONVERSATION),
    ):
        (tokens,) = encoded(tokenizer, [prompt], system_prompt=system)
        assert tokens == template_tokens(tokenizer, conversation)
        # The tokenizer alone would have added one more.
        assert tokens.count(tokenizer.bos_token_id) == (1 if template == LLAMA else 0)
    assert encoded(tokenizer, [TEXT, TALK]) == [
        *encoded(tokenizer, [TEXT]),
        *encoded(tokenizer, [TALK]),
    ]


def test_a_reference_reads_its_own_prompt_through_the_same_template():
    """It replaces the last message of a chat; braces of a prompt are not fields; a prompt without
    an answer is refused."""
    tokenizer = tokenizer_of(CHATML)
    template = "{prompt} It is {answer} {{x}}."
    task = TokenizedTask(
        None, tokenizer, chat=chat_of(task_config(), tokenizer), reference_prompt=template
    )
    last = {"role": "user", "content": "6 * 7? It is 42 {x}."}
    of_text, of_talk = task.encode_for_reference([TEXT, TALK])
    assert of_text == template_tokens(tokenizer, [last])
    assert of_talk == template_tokens(tokenizer, [*CONVERSATION[:-1], last])
    alone = TokenizedTask(None, tokenizer, reference_prompt=template)
    (tokens,) = alone.encode_for_reference([Prompt("{a}", "1", 0, "p:1")])
    assert tokenizer.decode(tokens) == "<bos>{a} It is 1 {x}."
    with pytest.raises(
        DataError,
        match=r"kl.reference_prompt=.* needs the answer of each prompt \(got none at p:9\)",
    ):
        alone.encode_for_reference([Prompt("a", "", 0, "p:9")])


def test_without_a_template_or_with_chat_never_a_prompt_is_only_its_text():
    for tokenizer, chat in ((tokenizer_of(LLAMA), Chat.never), (tokenizer_of(None), Chat.auto)):
        (tokens,) = encoded(tokenizer, [TEXT], chat=chat)
        assert tokens == tokenizer("6 * 7?").input_ids
        assert tokens[0] == tokenizer.bos_token_id
        with pytest.raises(
            DataError,
            match=r"'6 \* 7\?' at p:2 .*a list of chat messages, and there is no chat templ",
        ):
            encoded(tokenizer, [TEXT, TALK], chat=chat)


@pytest.mark.parametrize(
    ("template", "chosen", "got"),
    [
        (LLAMA, Chat.never, "none"),
        (DEAF, Chat.auto, "one that leaves it out"),
        (NO_SYSTEM, Chat.auto, "one that says: System role not supported"),
    ],
    ids=["never", "left out", "refused"],
)
def test_a_system_prompt_that_would_be_ignored_is_refused(template, chosen, got):
    with pytest.raises(ConfigError) as error:
        chat_of(task_config(system_prompt=" Think first. ", chat=chosen), tokenizer_of(template))
    assert (
        f"needs a chat template that has a place for it (got {got}). It would be ignored."
        in str(error.value)
    )


THINKS = (
    CHATML
    + "{% if enable_thinking is defined and not enable_thinking %}{{ '(no thoughts)' }}{% endif %}"
    "{% for tool in tools or range(0) %}{% generation %}{{ tool }}{% endgeneration %}{% break %}{% "
    "endfor %}"
)


@pytest.mark.parametrize("task", ["prompts", "reasoning_gym", "conversation", "sums"])
def test_a_template_gets_the_arguments_of_task_chat_arguments(task):
    tokenizer = tokenizer_of(THINKS)
    config = SCHEMAS[f"task/{task}"](
        **(option_values("task", task) | {"chat_arguments": {"enable_thinking": False}})
    )
    chat = chat_of(config, tokenizer)
    (tokens,) = chat.encode([TEXT])
    assert tokens == template_tokens(tokenizer, [USER], enable_thinking=False)
    assert tokenizer.decode(tokens).endswith("assistant\n(no thoughts)")
    assert chat.text([USER], goes_on=True).endswith("assistant\n(no thoughts)")
    assert not tokenizer.decode(encoded(tokenizer, [TEXT])[0]).endswith("(no thoughts)")


@pytest.mark.parametrize(
    ("template", "name", "got"),
    [
        (THINKS, "thinking", "one that reads enable_thinking"),
        (THINKS, "tools", "one that reads enable_thinking"),
        (CHATML, "enable_thinking", "one that reads none"),
        (None, "enable_thinking", "no template"),
    ],
)
def test_arguments_that_a_template_does_not_read_are_refused(template, name, got):
    with pytest.raises(ConfigError) as error:
        chat_of(task_config(chat_arguments={name: False}), tokenizer_of(template))
    needs = f"task.chat_arguments.{name}=false needs a chat template that reads {name}"
    assert f"{needs} (got {got}). It would be ignored." in str(error.value)


def test_a_row_whose_system_message_would_be_ignored_is_refused():
    reason = "it has a system message, and the chat template is one that leaves it out"
    assert encoded(tokenizer_of(DEAF), [TEXT])
    with pytest.raises(DataError, match=f"at p:2 cannot be .*: {reason}"):
        encoded(tokenizer_of(DEAF), [TEXT, TALK])


IN_PARTS = (
    "{% for m in messages %}{{ m['role'] }}:{% for part in m['content'] if part['type'] == "
    "'text' %}{{ part['text'] }}{% endfor %}{% endfor %}"
)
LEAVE_OUT = {
    "content in parts": IN_PARTS,
    "nothing": "user:",
    "the end": "{{ messages[0]['content'][:3] }}",
    "upper case": "{{ messages[0]['content'] | upper }}",
    "quotes": "{{ 'prompt:' }}{{ ('\"' + messages[0]['content'] + '\"') | tojson }}",
    "the last message alone": None,
}


@pytest.mark.parametrize("kind", LEAVE_OUT)
def test_a_template_that_drops_a_text_is_refused(kind):
    template = LEAVE_OUT[kind]
    prompt = Prompt('What is "6 * 7"?\nSay it.', "42", 0, "p:1")
    if template is None:
        template = "{{ messages[-1]['content'] }}"
        prompt = Prompt("6?", "42", 0, "p:1", ({"role": "user", "content": "Before"}, USER))
    with pytest.raises(DataError, match=r"at p:1 .*its chat template leaves out a message of"):
        encoded(tokenizer_of(template), [prompt])
    assert encoded(tokenizer_of("{{ messages | map(attribute='content') | join }}"), [prompt])


@pytest.mark.parametrize(
    ("template", "got"),
    [
        ("{{ ['a', 'b'] | random }}" + CHATML, "one that draws at random, by random"),
        ("{{ lipsum(1) }}" + CHATML, "one that draws at random, by lipsum"),
        ("{{ strftime_now('%d %H:%M') }}" + CHATML, "one that writes the time of day"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ({"rag": CHATML, "tool_use": CHATML}, "rag, tool_use, and none named default"),
        (5, "expected string or bytes-like object"),
    ],
)
def test_a_template_that_cannot_be_read_or_changes_is_refused(template, got):
    for changes in ({}, {"system_prompt": "Brief."}, {"chat_arguments": {"a": 1}}):
        with pytest.raises(
            ConfigError, match=r"^task\.chat=auto needs a chat template that"
        ) as error:
            chat_of(task_config(**changes), tokenizer_of(template))
        assert f"(got {got}" in str(error.value)
    assert chat_of(task_config(chat="never"), tokenizer_of(template)) is None


def test_a_row_with_a_second_system_message_is_refused():
    with pytest.raises(
        DataError, match=r"at p:2 .*it has a system message of its own beside task\.system_prompt"
    ):
        encoded(tokenizer_of(CHATML), [TEXT, TALK], system_prompt="Think first.")


def test_notes_name_the_end_and_the_date_that_a_template_writes():
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    used = (
        "task.chat=auto: prompts go through the chat template of the model's tokenizer; "
        "task.chat=never leaves it out."
    )
    assert ChatTemplate(tokenizer).notes([tokenizer.eos_token_id, end]) == [used]
    first, second = ChatTemplate(tokenizer).notes([tokenizer.eos_token_id])
    assert first == used
    assert second.startswith(
        "the chat template ends an answer with '<|im_end|>\\n', which holds no end-of-sequence "
        "token"
    )
    tokenizer.chat_template = CHATML + "{{ strftime_now('%d') }}"
    assert "writes today's date" in ChatTemplate(tokenizer).notes([end])[-1]


@pytest.fixture
def folder(tmp_path):
    """Save a model whose turns end with <|im_end|>, according to generation_config.json alone, and
    two prompts."""
    tokenizer = tokenizer_of(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = small_llama(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=128,
    )
    with torch.no_grad():
        # Completions shall contain this token.
        model.lm_head.weight[end] = model.lm_head.weight.mean(0) + 0.1
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    ends = {"eos_token_id": [tokenizer.eos_token_id, end]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    rows = [{"prompt": [USER], "answer": "42"}, {"prompt": "7 * 7?", "answer": "49"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def settings_of(folder: Path, *overrides: str, task: Sequence[str] | None = None) -> list[str]:
    """Return the settings of a short run with the model and, if `task` is None, the prompts."""
    left_out = ("model.", "task.", "accumulation.max")
    short = [setting for setting in SHORT if not setting.startswith(left_out)]
    if task is None:
        task = ["task=prompts", f"task.path={folder / 'p.jsonl'}"]
    settings = with_model(folder / "model", "accumulation.max_tokens=128", of=short)
    return last_of_each_key(*settings, *task, *overrides)


def test_a_run_trains_on_prompts_through_the_template(folder, capsys):
    config = config_of(*settings_of(folder, "task.system_prompt=Brief.", "trainer.max_steps=1"))
    module, loader = build(config)
    documents = next(iter(loader)).documents
    tokenizer = module.policy.tokenizer
    shown = {tokenizer.decode(document.tokens[~document.loss_mask]) for document in documents}
    shown_prompt = (
        "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert shown == {shown_prompt % "6 * 7?", shown_prompt % "7 * 7?"}
    train(config, folder / "run")
    assert "note: task.chat=auto: prompts go through the chat template" in capsys.readouterr().out
    (place, tokens), notes = preview(config.task, config.seed, config.rollout, config.model)
    assert notes[0].startswith("task.chat=auto: prompts go through the chat template")
    assert place.startswith("p.jsonl:")
    ids = tokenizer(shown_prompt % "6 * 7?", add_special_tokens=False).input_ids
    assert tokens.startswith(f"{len(ids)} tokens: '<|im_st")


def test_a_conversation_goes_through_the_template_turn_by_turn(folder):
    """The sampled tokens stay, and the tokens between the turns are those of the template."""
    task = ["task=conversation", "task.environment=tasks.environments_for_tests.Counting"]
    settings = settings_of(folder, "rollout.max_completion_length=60", task=task)
    module, loader = build(config_of(*settings, "task.system_prompt=Brief."))
    documents = next(iter(loader)).documents
    tokenizer = module.policy.tokenizer
    several = [document for document in documents if document.measures["turns"] > 1]
    assert len(several) > 1
    for document in several:
        prompt, *turns = tokenizer.decode(document.tokens).split("<|im_start|>user\n")[1:]
        assert prompt.startswith(
            f"{seed_of(0, document.group) % 10}=<|im_end|>\n<|im_start|>assistant\n"
        )
        for number, turn in enumerate(turns, 1):
            assert turn.startswith(f"+{number}<|im_end|>\n<|im_start|>assistant\n")
        untrained = tokenizer.decode(document.tokens[~document.loss_mask])
        assert untrained.split("<|im_start|>system\n")[1].startswith(
            "Brief.<|im_end|>\n<|im_start|>user\n"
        )
        # The end of a turn was sampled; the line break after it was not.
        first = document.loss_mask.int().argmax()
        last = first + (~document.loss_mask[first:]).int().argmax() - 1
        assert int(document.tokens[last]) in loader.source.task.ends
        assert tokenizer.decode(document.tokens[last + 1 :]).startswith(
            "\n<|im_start|>user\n+1<|im_end|>\n"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(
        ConfigError, match=r"needs a model with a chat template .*Use task\.chat=never"
    ):
        build(config_of(*settings))
    _, loader = build(config_of(*settings, "task.chat=never"))
    (text,) = loader.source.task.encode([loader.source.task.prompt(0)])
    assert text == tokenizer(f"{seed_of(0, 0) % 10}=").input_ids

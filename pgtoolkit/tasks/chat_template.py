"""The chat template of a model's tokenizer: the text that it writes, and what it leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.system.report import listed, refusal, text
from pgtoolkit.tasks.settings import Chat, TaskSettings

if TYPE_CHECKING:
    from jinja2.nodes import Template
    from transformers import PreTrainedTokenizerBase

QUESTION = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "the answer of a model"}
"""Messages that show what a template does."""

_OF_EVERY_TEMPLATE = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
)
"""Names that a chat template may read besides arguments of the user's."""

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags that transformers adds to the language of templates."""

_SHORT = 3
"""Characters of a piece of a template that is too short to tell: many texts hold it by chance."""


_TIME_OF_DAY = re.compile(r"%[-#^_0]*[HIMSfpXcsTRr]")
"""Parts of a format of strftime that change within a day."""

_READ = ("system", "user")
"""Roles whose messages a template writes as they are. Of an assistant's it may leave thoughts out,
and a tool's it may quote."""


def left_out(messages: Sequence[Message], written: str) -> str | None:
    """Return the role of the first message whose content is not in the text that a chat template
    has written; None if all are."""
    for message in messages:
        # Templates strip white space around a message.
        if message["role"] in _READ and message["content"].strip() not in written:
            return message["role"]
    return None


def used_template(tokenizer: PreTrainedTokenizerBase, setting: str) -> str:
    """Return the template by which messages become texts.

    setting: that has it used. Raises ConfigError for one that cannot be read, and for one that
    writes a prompt in another way each time.
    """
    from jinja2 import nodes

    needs = "a chat template that writes a prompt in the same way every time"
    reason = "The tokens of a prompt would be others each time that it is read."
    got = None
    try:
        template = tokenizer.get_chat_template()
        parsed = _parsed(template)
    except Exception as error:  # Jinja and transformers raise errors of their own.
        needs = "a chat template that can be read"
        reason = "Messages become tokens by it."
        got = first_line(error)
        if isinstance(tokenizer.chat_template, dict):
            got = f"{listed(sorted(tokenizer.chat_template), 4)}, and none named default"
    else:
        calls = [call for call in parsed.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
        formats = [
            str(getattr(call.args[0], "value", ""))
            for call in calls
            if getattr(call.node, "name", None) == "strftime_now" and call.args
        ]
        drawn = {filter_node.name for filter_node in parsed.find_all(nodes.Filter)} & {"random"}
        drawn |= {str(getattr(call.node, "name", "")) for call in calls} & {"lipsum"}
        if drawn:
            got = f"one that draws at random, by {drawn.pop()}"
        elif any(_TIME_OF_DAY.search(form) for form in formats):
            got = "one that writes the time of day"
        else:
            return template
    raise ConfigError(
        refusal(
            setting=setting,
            needs=needs,
            got=got,
            reason=reason,
            use=f"{setting.partition('=')[0]}=never, or a copy of the model's folder with another "
            "chat template",
        )
    )


def _parsed(template: str) -> Template:
    """Return the parts of a template. Raises an error of Jinja's."""
    from jinja2 import Environment

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(_GENERATION.sub("", template))


class ChatTemplate:
    """The chat template of a tokenizer, under the system message of a run.

    system_prompt: the content of that message; None: there is none.
    arguments: further arguments of the template, by name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ):
        self._tokenizer = tokenizer
        self._arguments: dict[str, Any] = dict(arguments or {})
        self._system: list[Message] = []
        if system_prompt is not None:
            self._system = [{"role": "system", "content": system_prompt}]

    def under_system(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages after the run's system message.

        Raises ValueError if they begin with another one.
        """
        if self._system and messages[0]["role"] == "system":
            raise ValueError("it has a system message of its own beside task.system_prompt")
        return [*self._system, *messages]

    def text(self, messages: Sequence[Message], goes_on: bool = False) -> str:
        """Return the text that the template writes. ValueError says why it writes none.

        goes_on: with the beginning of an answer at the end.
        """
        try:
            written = self._tokenizer.apply_chat_template(
                [*messages],
                tokenize=False,
                add_generation_prompt=goes_on,
                **self._arguments,
            )
        except Exception as error:  # A template raises what it likes.
            raise ValueError(f"one that says: {first_line(error)}") from error
        return cast("str", written)

    def unread(self, message: Message) -> list[str]:
        """Return the keys of a message, beside role and content, that change nothing in what the
        template writes. ValueError where it writes nothing."""
        before = self.under_system([QUESTION, ANSWER])
        written = self.text([*before, message], True)
        names = [name for name in message if name not in ("role", "content")]
        return [
            name
            for name in names
            if self.text([*before, {key: message[key] for key in message if key != name}], True)
            == written
        ]

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of each prompt: those of `apply_chat_template` with the beginning of
        the answer.

        The tokenizer adds no token of the beginning to the template's own. ValueError for a message
        that the template leaves out.
        """
        conversations = [self.messages(prompt) for prompt in prompts]
        with_system = [messages for messages in conversations if messages[0]["role"] == "system"]
        problem = self.problem(with_system[0][:1]) if with_system else None
        if problem is not None:
            raise ValueError(f"it has a system message, and the chat template is {problem}")
        texts = [self._whole_text(messages) for messages in conversations]
        encoded = self._tokenizer(texts, add_special_tokens=False)
        return cast("list[list[int]]", encoded["input_ids"])

    def _whole_text(self, messages: Sequence[Message]) -> str:
        """Return the text of a prompt. ValueError where a message is not in it."""
        try:
            written = self.text(messages, goes_on=True)
        except ValueError as error:
            raise ValueError(f"its chat template is {error}") from error
        role = left_out(messages, written)
        if role is not None:
            raise ValueError(
                f"its chat template leaves out a message of the {role}, or writes it in another "
                "way, as one does that asks for a content in parts. Use task.chat=never, or a copy "
                "of the model's folder with another chat template"
            )
        return written

    def messages(self, prompt: Prompt) -> list[Message]:
        """Return the messages of a prompt for the template; a text is the message of a user."""
        return self.under_system(prompt.messages or [QUESTION | {"content": prompt.text}])

    def problem(self, system: list[Message] | None = None) -> str | None:
        """Return why the template leaves a system message out; None if it does not.

        system: the message in a list; None: that of the run.
        """
        system = self._system if system is None else system
        try:
            shown = self.text([*system, QUESTION])
        except ValueError as error:
            return str(error)
        # Templates strip white space around a message.
        if system and system[0]["content"].strip() not in shown:
            return "one that leaves it out"
        return None

    def notes(self, ends: Sequence[int]) -> list[str]:
        """Return what may surprise of the template; ends: ids of the end-of-sequence tokens."""
        notes = [
            "task.chat=auto: prompts go through the chat template of the model's tokenizer; "
            "task.chat=never leaves it out."
        ]
        after = self._after_answer()
        tokens = self._tokenizer(after, add_special_tokens=False)["input_ids"]
        if tokens and not set(tokens) & set(ends):
            notes.append(
                f"the chat template ends an answer with {after[:40]!r}, which holds no "
                "end-of-sequence token of the model: completions may go on after their answer. Add "
                "the id of the token that ends an answer to eos_token_id in generation_config.json."
            )
        if "strftime_now" in self._tokenizer.get_chat_template():
            notes.append(
                "the chat template writes today's date: on another day the same prompt has other "
                "tokens."
            )
        return notes

    def _after_answer(self) -> str:
        try:
            shown = self.text([QUESTION, ANSWER])
        except ValueError:  # It has no place for answers, so it ends none.
            return ""
        return shown.rpartition(ANSWER["content"])[2]

    def marks(self) -> list[str]:
        """Return texts that only a prompt that already went through the template holds."""
        asked = QUESTION | {"content": ANSWER["content"]}
        try:
            before, _, after = self.text([asked], goes_on=True).partition(ANSWER["content"])
        except ValueError:  # It is a template for other conversations.
            return []
        added = [
            token.content
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special
        ]
        special = dict.fromkeys([*self._tokenizer.all_special_tokens, *added])
        written = [token for token in special if token in before + after]
        pieces = [piece.strip() for piece in (before, after)]
        return written + [piece for piece in pieces if len(piece) > _SHORT]


def chat_of(task: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """Return the template that prompts go through; None where they are texts alone.

    Raises ConfigError for a template as `used_template` does, and where task.system_prompt or
    task.chat_arguments would be ignored.
    """
    system = getattr(task, "system_prompt", None)
    arguments = getattr(task, "chat_arguments", {})
    template = None
    if getattr(task, "chat", Chat.never) == Chat.auto and tokenizer.chat_template:
        used_template(tokenizer, "task.chat=auto")
        template = ChatTemplate(tokenizer, system, arguments)
    if system is not None:
        problem = "none" if template is None else template.problem()
        if problem is not None:
            raise ConfigError(
                refusal(
                    setting=f"task.system_prompt={system:.40}",
                    needs="a chat template that has a place for it",
                    got=problem,
                    reason="It would be ignored.",
                    use="task.system_prompt=null, and instructions in the prompts",
                )
            )
    if arguments:
        _check_arguments(arguments, tokenizer if template is not None else None)
    return template


def _check_arguments(
    arguments: Mapping[str, object], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise ConfigError for task.chat_arguments that the chat template does not read.

    tokenizer: None without a template.
    """
    known: list[str] = []
    if tokenizer is not None:
        from jinja2 import Environment, meta

        environment = Environment()
        read = meta.find_undeclared_variables(_parsed(tokenizer.get_chat_template()))
        known = sorted(
            read - {*_OF_EVERY_TEMPLATE, *environment.globals, *tokenizer.special_tokens_map}
        )
    template_reads = "no template"
    if tokenizer is not None:
        template_reads = f"one that reads {listed(known, 8) or 'none'}"
    unread = [name for name in arguments if name not in known]
    if unread:
        raise ConfigError(
            refusal(
                setting=f"task.chat_arguments.{unread[0]}={text(arguments[unread[0]])}",
                needs=f"a chat template that reads {', '.join(unread)}",
                got=template_reads,
                reason="It would be ignored.",
                use="'task.chat_arguments={}', or arguments of the model's template",
            )
        )

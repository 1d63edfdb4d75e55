"""Prompts in the form that a model was taught to answer: the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from pgtoolkit.config.schema import Chat
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.tasks import Prompt, TaskConfig

_WORD = "example"
"""A message to see what a template makes of it."""


class ChatTemplate:
    """The chat template of a tokenizer, under the system message of a run; system_prompt: None for none of its own."""

    def __init__(self, tokenizer, system_prompt: str | None = None):
        self._tokenizer = tokenizer
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._keeps_system = False  # until it was seen

    def messages(self, prompt: Prompt) -> list[dict]:
        """The conversation that the model is to continue. ValueError for two system messages."""
        messages = prompt.messages or ({"role": "user", "content": prompt.text},)
        if self._system and messages[0]["role"] == "system":
            raise ValueError("it has a system message of its own beside task.system_prompt")
        return [*self._system, *messages]

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens of each, exactly those of `apply_chat_template` with the beginning of the answer.

        What the template writes is all there is: the tokenizer adds no token of the beginning to the template's own.
        ValueError for a system message that it leaves out.
        """
        conversations = [self.messages(prompt) for prompt in prompts]
        first = next((messages[0] for messages in conversations if messages[0]["role"] == "system"), None)
        if first is not None and not self._keeps_system:
            if got := self.problem([first]):
                raise ValueError(f"it has a system message, and the chat template is {got}")
            self._keeps_system = True
        return self._tokenizer.apply_chat_template(conversations, add_generation_prompt=True)["input_ids"]

    def problem(self, system: list[dict] | None = None) -> str | None:
        """Why the template leaves a system message out, if it does; None: that of the run."""
        system = self._system if system is None else system
        try:
            shown = self._tokenizer.apply_chat_template([*system, {"role": "user", "content": _WORD}], tokenize=False)
        except Exception as error:  # a template raises what it likes
            return f"one that says: {first_line(error)}"
        # Templates strip white space around a message.
        return None if not system or system[0]["content"].strip() in shown else "one that leaves it out"

    def notes(self, ends: Sequence[int]) -> list[str]:
        """What may surprise of the template; ends: ids of the end-of-sequence tokens."""
        notes = ["task.chat=auto: prompts go through the chat template of the model's tokenizer; never leaves it out."]
        answer = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _WORD}]
        try:
            shown = self._tokenizer.apply_chat_template(answer, tokenize=False)
        except Exception:  # it has no place for answers, so that it ends none
            shown = ""
        after = self._tokenizer(shown.rpartition(_WORD)[2], add_special_tokens=False)["input_ids"]
        if after and not set(after) & set(ends):
            names = " ".join(self._tokenizer.convert_ids_to_tokens(after)[:3])
            notes.append(
                f"the chat template ends an answer with {names}, which is no end-of-sequence token of the model: "
                "completions may go on after their answer. Add its id to eos_token_id in generation_config.json."
            )
        if "strftime_now" in self._tokenizer.get_chat_template():
            notes.append("the chat template writes today's date: on another day the same prompt has other tokens.")
        return notes


def chat_of(task: TaskConfig, tokenizer) -> ChatTemplate | None:
    """The template that prompts go through; None where they are texts alone.

    Raises ConfigError where task.system_prompt would be ignored.
    """
    system = getattr(task, "system_prompt", None)
    template = None
    if getattr(task, "chat", Chat.never) == Chat.auto and tokenizer.chat_template:
        template = ChatTemplate(tokenizer, system)
    if system is not None and (got := "none" if template is None else template.problem()):
        needs, reason = "a chat template that has a place for it", "It would be ignored."
        setting, use = f"task.system_prompt={system:.40}", "task.system_prompt=null, and instructions in the prompts"
        raise ConfigError(refusal(setting, needs, got, reason, use))
    return template

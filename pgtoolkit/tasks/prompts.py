"""Prompts as tokens: how a model's tokenizer and its chat template see them, and whether there is
room for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.config.schema_tasks import PromptsTaskConfig, TaskConfig
from pgtoolkit.errors import DataError, first_line
from pgtoolkit.system.report import listed, refusal
from pgtoolkit.tasks.between import Between
from pgtoolkit.tasks.chat_template import ChatTemplate
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.reward_functions import TrainerState
from pgtoolkit.tasks.stops import StopStrings
from pgtoolkit.tasks.tasks import Once, Score, Task
from pgtoolkit.tasks.verifiers import Response

if TYPE_CHECKING:  # `pgtk check` does without torch
    from torch import Tensor

log = logging.getLogger("pgtoolkit")

_CHUNK = 1000
"""Prompts given to a tokenizer in one call; it encodes them in parallel."""

Answer = tuple[str, bool]
"""The text of a completion that is scored, and whether the completion ended by itself."""

END = "<end>"
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def tiny_tokenizer(alphabet: str | None):
    """The tiny model's tokenizer, of the tokenizers library: a token per character (None: printable
    ASCII), and END."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*dict.fromkeys(alphabet or _PRINTABLE), END]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@dataclasses.dataclass
class TokenizedTask:
    """A task as a model's tokenizer, of transformers, sees it.

    ends: ids of the end-of-sequence tokens. chat: the template that prompts go through; None: they
        are texts alone.
    stop: texts that end a completion. vocabulary: how many tokens the model has weights of; None:
        not asked.
    reference_prompt: the template, of `prompt` and `answer`, of what a reference reads in the place
        of the prompt.
    longest: most tokens of a completion; of a conversation, of all that follows its prompt.
    max_steps: updates of the run, for reward functions that ask for them.
    """

    task: Task
    tokenizer: Any
    ends: Sequence[int] = ()
    chat: ChatTemplate | None = None
    stop: Sequence[str] = ()
    vocabulary: int | None = None
    reference_prompt: str | None = None
    longest: int = 0
    max_steps: int = 0

    def __post_init__(self):
        self._stops = StopStrings(self.stop, self.tokenizer)
        self.between = Between(self.tokenizer, self.ends, self.chat)

    def prompt(self, index: int) -> Prompt:
        return self.task.prompt(index)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens of each prompt: through the chat template, if there is one, exactly what that
        gives.

        A text alone gets the special tokens that the tokenizer adds by default, such as the first;
        an end-of-sequence token at the end is left out, after which a model begins another text.
        Raises DataError that names a prompt that the tokenizer or the model has no tokens for, or a
        chat without a template.
        """
        try:
            tokens = self._tokens(prompts) if prompts else []
            if self.vocabulary and (
                foreign := [token for row in tokens for token in row if token >= self.vocabulary]
            ):
                raise ValueError(
                    f"it gives token {foreign[0]}, and the model has weights of {self.vocabulary} "
                    "tokens"
                )
        except (
            Exception
        ) as error:  # what the tokenizers library raises for a character it has no token for
            if len(prompts) > 1:
                return [self.encode([prompt])[0] for prompt in prompts]
            reason = first_line(error)
            # of the tiny model, whose tokens are the characters that its task has
            if "[UNK]" in reason:
                foreign = listed(
                    [
                        repr(sign)
                        for sign in sorted({*prompts[0].text} - {*self.tokenizer.get_vocab()})
                    ],
                    5,
                )
                reason = (
                    f"it has no token for {foreign}, which prompts and answers of training lack"
                )
            raise DataError(
                f"the prompt {prompts[0].text[:60]!r} at {prompts[0].place} cannot be encoded by "
                f"the model's tokenizer: {reason}"
            ) from error
        return tokens

    def encode_for_reference(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The tokens that a reference reads in the place of each prompt's. DataError for a missing
        answer."""
        return self.encode([self._for_reference(prompt) for prompt in prompts])

    def _for_reference(self, prompt: Prompt) -> Prompt:
        assert self.reference_prompt is not None
        if "{answer" in self.reference_prompt and not prompt.answer:
            raise DataError(
                refusal(
                    setting=f"kl.reference_prompt={self.reference_prompt:.40}",
                    needs="the answer of each prompt",
                    got=f"none at {prompt.place}",
                    reason="The template puts it before the reference.",
                    use="a template of {prompt} alone",
                )
            )
        text = self.reference_prompt.format(prompt=prompt.text, answer=prompt.answer)
        messages = prompt.messages and (
            *prompt.messages[:-1],
            prompt.messages[-1] | {"content": text},
        )
        return dataclasses.replace(prompt, text=text, messages=messages)

    def _tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if self.chat is not None:
            return self.chat.encode(prompts)
        if any(prompt.messages is not None for prompt in prompts) and not isinstance(
            self.task, ConversationTask
        ):
            raise ValueError(
                "it is a list of chat messages, and there is no chat template, or task.chat=never"
            )
        tokens = self.tokenizer([prompt.text for prompt in prompts])["input_ids"]
        for row in tokens:
            while row and row[-1] in self.ends:
                row.pop()
        return tokens

    def answers(self, completions: Sequence[Completion]) -> list[Answer]:
        """Return what `scores` reads of completions: of conversations, which hold their texts,
        nothing."""
        return (
            []
            if isinstance(self.task, ConversationTask)
            else [self.answer(one) for one in completions]
        )

    def scores(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        answers: Sequence[Answer] | None = None,
    ) -> list[Score]:
        """Of each completion, of the prompt at its place. answers: those of the completions, where
        they are known."""
        if isinstance(self.task, ConversationTask):
            return self.task.judged([completion.conversation for completion in completions])
        if answers is None:
            answers = self.answers(completions)
        responses = []
        for prompt, completion, (text, finished) in zip(prompts, completions, answers, strict=True):
            messages = None if self.chat is None else self.chat.messages(prompt)
            state = TrainerState(completion.model_version, self.max_steps)
            responses.append(
                Response(prompt, text, finished, completion.tokens.tolist(), messages, state)
            )
        return self.task.scores(responses)

    def close(self) -> None:
        """End what scoring has started."""
        self.task.close()

    def answer(self, completion: Completion) -> Answer:
        """Return the text that is scored, or said to an environment, and whether the completion
        ended by itself.

        The end is no part of the text, whether or not the tokenizer holds it for a special token;
        nor is a stop string.
        """
        finished = completion.finish_reason == "stop"
        tokens = completion.tokens
        if finished and int(tokens[-1]) in self.ends:
            tokens = tokens[:-1]
        return self.text(tokens), finished

    def text(self, tokens: Sequence[int] | Tensor) -> str:
        """Return what tokens say up to a stop string, special tokens such as `<think>` included."""
        text = self.tokenizer.decode(tokens)
        if not self._stops:
            return text
        # Completions end by their text without special tokens, see `StopStrings`.
        plain = self.tokenizer.decode(tokens, skip_special_tokens=True)
        before = self._stops.before(plain)
        cut_off = plain[len(before) :]
        return text.removesuffix(cut_off) if text.endswith(cut_off) else before

    def check_lengths(
        self,
        longest_document: int,
        longest_completion: int,
        skip: bool,
        longest_prompt: int | None = None,
        once: Once = lambda measure: measure(),
    ) -> None:
        """Measure all prompts: refuse those without a token or longer than one may be (DataError),
        or drop them.

        All lengths in tokens. longest_prompt: None for as many as leave room for a completion. Of a
            task without end
        a few of its longest prompts tell.
        """
        room, task = max(0, longest_document - longest_completion), self.task
        room = min(longest_prompt or room, room)
        total, bad = once(functools.partial(self._misfits, room))
        if not bad:
            return
        several = (
            f"{len(bad)} of {'the longest ' if task.num_prompts is None else ''}{total} prompts"
        )
        several += ", or what kl.reference_prompt makes of them," if self.reference_prompt else ""
        lengths = listed([f"{prompt.place} has {length}" for prompt, length in bad], 5)
        needed = f"{f'do not have 1 to {room} tokens' if room else 'have no room'}: {lengths}"
        skippable = task.num_prompts is not None and len(bad) < total
        if skip and skippable:
            log.warning(f"note: task.too_long=skip leaves out {several}, which {needed}.")
            task.drop({prompt.index for prompt, _ in bad})
            return
        longest = max(length for _, length in bad)
        ways = ["task.too_long=skip"] if skippable else []
        ways += [f"task.max_prompt_length={longest}"] if longest_prompt is not None else []
        if (tokens := longest + longest_completion) > longest_document > longest:
            ways.append(f"rollout.max_completion_length={longest_document - longest}")
        if tokens > longest_document:
            ways.append(
                f"a model of {tokens} positions, in training with accumulation.max_tokens={tokens}"
            )
        ways.append("other prompts")
        raise DataError(
            f"{several} {needed}. A document of at most {longest_document} tokens holds a prompt "
            f"and a completion of up to rollout.max_completion_length={longest_completion}. Use "
            f"{', or '.join(ways)}."
        )

    def _misfits(self, room: int) -> tuple[int, list[tuple[Prompt, int]]]:
        """How many prompts there are, and those that do not have 1 to `room` tokens, with how many
        they have."""
        rows, total, bad = self.task.rows(), 0, []
        while prompts := list(itertools.islice(rows, _CHUNK)):
            total += len(prompts)
            lengths = [*map(len, self.encode(prompts))]
            if self.reference_prompt is not None:
                lengths = map(max, lengths, map(len, self.encode_for_reference(prompts)))
            bad += [
                (p, length)
                for p, length in zip(prompts, lengths, strict=True)
                if not 0 < length <= room
            ]
        return total, bad


def scored_by_nobody(task: TaskConfig) -> TaskConfig:
    """The same prompts where nothing is scored, without a verifier of the user's, whose code would
    run."""
    nobody = {"verifier": "exact_match", "pattern": None, "verifiers": {}, "verifier_processes": 0}
    return dataclasses.replace(task, **nobody) if isinstance(task, PromptsTaskConfig) else task

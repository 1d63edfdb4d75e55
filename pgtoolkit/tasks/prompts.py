"""Prompts as tokens: how a model's tokenizer and chat template see them, and the room for them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.system.report import listed, plural, refusal
from pgtoolkit.tasks.between_turns import BetweenTurns
from pgtoolkit.tasks.chat_template import ChatTemplate
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.reward_functions import TrainerState
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.settings import Chat, PromptsTaskSettings, TaskSettings
from pgtoolkit.tasks.stops import StopStrings
from pgtoolkit.tasks.tasks import Once, Score, Task

if TYPE_CHECKING:  # `pgtk check` does without torch
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("pgtoolkit")

_CHUNK = 1000
"""Number of prompts that a tokenizer gets in one call; it encodes them in parallel."""

Answer = tuple[str, bool]
"""The text of a completion that is scored, and whether the completion ended by itself."""

END = "<end>"
_PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"


def tiny_tokenizer(alphabet: str | None) -> Tokenizer:
    """Return the tiny model's tokenizer, of the tokenizers library: a token per character, and END.

    alphabet: the characters; None: printable ASCII.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*dict.fromkeys(alphabet or _PRINTABLE), END]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class Lengths(NamedTuple):
    """The lengths of prompts in tokens.

    num_prompts: how many were measured. longest: of those that fit. misfits: those without a token
    and those that are too long, with their lengths.
    """

    num_prompts: int
    longest: int
    misfits: list[tuple[Prompt, int]]


@dataclasses.dataclass
class TokenizedTask:
    """A task as a model's tokenizer, of transformers, sees it.

    ends: ids of the end-of-sequence tokens.
    chat: the template that prompts go through; None: they are texts alone.
    stop: texts that end a completion.
    vocabulary: the number of tokens that the model has weights of; None: not checked.
    reference_prompt: the template, of `prompt` and `answer`, of the text that a reference reads
        instead of the prompt.
    longest: the most tokens of a completion; in a conversation, of all that follows its prompt.
    max_steps: updates of the run, for reward functions that ask for them.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    ends: Sequence[int] = ()
    chat: ChatTemplate | None = None
    stop: Sequence[str] = ()
    vocabulary: int | None = None
    reference_prompt: str | None = None
    longest: int = 0
    max_steps: int = 0

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.stop, self.tokenizer)
        self.between = BetweenTurns(self.tokenizer, self.ends, self.chat)

    def prompt(self, index: int) -> Prompt:
        prompt = self.task.prompt(index)
        if not isinstance(prompt, Prompt):
            raise TypeError(
                f"{type(self.task).__name__}.prompt needs to return a Prompt (got "
                f"{prompt!r:.60}). Use Prompt(text, answer, index, place=f'prompt {{index}}') of "
                "pgtoolkit.completion."
            )
        return prompt

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens of each prompt: those that the chat template gives, if there is one.

        A text alone gets the special tokens that the tokenizer adds by default, such as the first;
        an end-of-sequence token at the end is left out, since a model begins another text after it.
        Raises DataError that names a prompt that the tokenizer or the model has no tokens for, or a
        chat without a template.
        """
        try:
            tokens = self._tokens(prompts) if prompts else []
            self._check_vocabulary(tokens)
        except Exception as error:  # tokenizers raises Exception for a character without a token
            if len(prompts) > 1:
                return [self.encode([prompt])[0] for prompt in prompts]
            prompt = prompts[0]
            reason = first_line(error)
            if "[UNK]" in reason:
                reason = f"it has no token for {self._without_token(prompt)}"
            raise DataError(
                f"the prompt {prompt.text[:60]!r} at {prompt.place} cannot be encoded by "
                f"the model's tokenizer: {reason}"
            ) from error
        return tokens

    def _without_token(self, prompt: Prompt) -> str:
        """Return what a tokenizer of whole words or characters, as the tiny model's, lacks."""
        unknown = self._unknown_in(prompt.text)
        if unknown or self.chat is None:
            return f"{unknown}, which prompts and answers of training lack"
        text = self.chat.text(self.chat.messages(prompt), goes_on=True)
        return (
            f"{self._unknown_in(text)}, in the text that the chat template makes of the prompt: "
            f"{text!r:.200}"
        )

    def _unknown_in(self, text: str) -> str:
        """Return the pieces of a text that are no tokens, in words."""
        vocabulary = self.tokenizer.get_vocab()
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        marks = sorted(added, key=len, reverse=True)
        parts = re.split("|".join(map(re.escape, marks)), text) if marks else [text]
        backend = cast("Tokenizer", self.tokenizer.backend_tokenizer)
        pieces = {*parts}
        if backend.pre_tokenizer is not None:
            pieces = {
                piece for part in parts for piece, _ in backend.pre_tokenizer.pre_tokenize_str(part)
            }
        return listed([repr(piece) for piece in sorted(pieces - {*vocabulary, ""})], 5)

    def _check_vocabulary(self, tokens: list[list[int]]) -> None:
        """Raise ValueError for a token that the model has no weights of."""
        if not self.vocabulary:
            return
        for row in tokens:
            for token in row:
                if token >= self.vocabulary:
                    raise ValueError(
                        f"it gives token {token}, and the model has weights of {self.vocabulary} "
                        "tokens"
                    )

    def encode_for_reference(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens that a reference reads instead of each prompt's. DataError for a
        missing answer."""
        return self.encode([self._for_reference(prompt) for prompt in prompts])

    def _for_reference(self, prompt: Prompt) -> Prompt:
        assert self.reference_prompt is not None
        if "{answer" in self.reference_prompt and not prompt.answer:
            raise DataError(
                refusal(
                    setting=f"kl.reference_prompt={self.reference_prompt:.40}",
                    needs="the answer of each prompt",
                    got=f"none at {prompt.place}",
                    reason="The template shows it to the reference.",
                    use="a template with {prompt} only",
                )
            )
        text = self.reference_prompt.format(prompt=prompt.text, answer=prompt.answer)
        messages = prompt.messages and (
            *prompt.messages[:-1],
            prompt.messages[-1] | {"content": text},
        )
        return dataclasses.replace(prompt, text=text, messages=messages)

    def _tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        if isinstance(self.task, ConversationTask):
            for message in {repr(m): m for p in prompts for m in p.messages or ()}.values():
                unread = self.between.unread(message)
                if unread:
                    raise ValueError(
                        f"the message {message!r:.100} has {', '.join(unread)}, which would be "
                        "dropped. Use the content, or a chat template that reads it"
                    )
        if self.chat is not None:
            return self.chat.encode(prompts)
        is_chat = any(prompt.messages is not None for prompt in prompts)
        if is_chat and not isinstance(self.task, ConversationTask):
            raise ValueError(
                "it is a list of chat messages, and there is no chat template, or task.chat=never"
            )
        encoded = self.tokenizer([prompt.text for prompt in prompts])
        tokens = cast("list[list[int]]", encoded["input_ids"])
        for row in tokens:
            while row and row[-1] in self.ends:
                row.pop()
        return tokens

    def answers(self, completions: Sequence[Completion]) -> list[Answer]:
        """Return the answer of each completion, for `scores`.

        Return [] for conversations, which hold their texts.
        """
        if isinstance(self.task, ConversationTask):
            return []
        return [self.answer(completion) for completion in completions]

    def scores(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        answers: Sequence[Answer] | None = None,
    ) -> list[Score]:
        """Return the score of each completion of the prompt at its place.

        answers: of the completions, where they are known.
        """
        if isinstance(self.task, ConversationTask):
            conversations = [completion.conversation for completion in completions]
            return self.task.score_conversations(conversations)
        if answers is None:
            answers = self.answers(completions)
        signatures = getattr(self.task, "signatures", ())
        of_others = any(signature and signature.of_another_trainer for signature in signatures)
        responses = []
        for prompt, completion, (text, finished) in zip(prompts, completions, answers, strict=True):
            plain = self.plain_text(self._answering(completion)) if of_others else None
            messages = None if self.chat is None else self.chat.messages(prompt)
            state = TrainerState(completion.model_version, self.max_steps)
            responses.append(
                Response(prompt, text, finished, completion.tokens, messages, state, plain)
            )
        scores = self.task.scores(responses)
        others = [score for score in scores if not isinstance(score, Score)]
        if others or len(scores) != len(responses):
            got = f"{others[0]!r:.60}" if others else f"{len(scores)} of {len(responses)}"
            raise TypeError(
                f"{type(self.task).__name__} needs a Score for each completion (got {got}). The "
                "reward is a part of it. Use return Score(reward, exact_match=reward >= 1), of "
                "pgtoolkit.tasks.tasks, in its method score."
            )
        return scores

    def close(self) -> None:
        """End what scoring has started."""
        self.task.close()

    def answer(self, completion: Completion) -> Answer:
        """Return the text that is scored, or that an environment reads, and whether the completion
        ended by itself.

        The end-of-sequence token is no part of the text, whether or not the tokenizer calls it
        special; nor is a stop string.
        """
        return self.text(self._answering(completion)), completion.finish_reason == "stop"

    def _answering(self, completion: Completion) -> Tensor:
        """Return the tokens of a completion without the one that ends it."""
        tokens = completion.tokens
        if completion.finish_reason == "stop" and int(tokens[-1]) in self.ends:
            return tokens[:-1]
        return tokens

    def text(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of tokens up to a stop string, with special tokens such as `<think>`."""
        text = str(self.tokenizer.decode(cast("list[int]", tokens)))
        if not self._stops:
            return text
        # Completions end by their text without special tokens, see `StopStrings`.
        plain = str(self.tokenizer.decode(cast("list[int]", tokens), skip_special_tokens=True))
        before = self._stops.before(plain)
        cut_off = plain[len(before) :]
        return text.removesuffix(cut_off) if text.endswith(cut_off) else before

    def plain_text(self, tokens: Sequence[int] | Tensor) -> str:
        """Return the text of tokens up to a stop string, without special tokens."""
        plain = str(self.tokenizer.decode(cast("list[int]", tokens), skip_special_tokens=True))
        return self._stops.before(plain) if self._stops else plain

    def check_lengths(
        self,
        limits: Mapping[str, int],
        longest_completion: int,
        skip: bool,
        longest_prompt: int | None = None,
        once: Once = lambda measure: measure(),
        first: int | None = None,
    ) -> Lengths:
        """Measure all prompts and return their lengths; refuse those without a token and those that
        are too long (DataError), or drop them.

        All lengths are in tokens. longest_prompt: None for as many as leave room for a completion.
        Of a task without end, a few of its longest prompts are measured.
        limits: what bounds a document, in words that a number completes to what raises it, such as
            `model.max_positions=` -> its tokens.
        first: the number of prompts to measure at most, only to see whether they would be refused,
            which takes the lengths of all; None: all.
        """
        task = self.task
        longest_document = min(limits.values())
        room = max(0, longest_document - longest_completion)
        room = min(longest_prompt or room, room)
        lengths = once(functools.partial(self._lengths, room, first))
        can_skip = task.num_prompts is not None and len(lengths.misfits) < task.num_prompts
        if not lengths.misfits or (first is not None and skip and can_skip):
            return lengths
        if first is not None:
            lengths = self._lengths(room, None)
        num_prompts = lengths.num_prompts
        misfits = lengths.misfits
        of = "the longest " if task.num_prompts is None else ""
        if task.num_prompts is not None and num_prompts < task.num_prompts:
            of = "the first "
        subject = f"{len(misfits)} of {of}{num_prompts} prompts"
        if self.reference_prompt:
            subject += ", or what kl.reference_prompt makes of them,"
        places = listed([f"{prompt.place} has {length}" for prompt, length in misfits], 5)
        longest = max(length for _, length in misfits)
        verb = (
            f"do not fit into {plural(room, 'token')}" if room else "do not fit beside a completion"
        )
        is_empty = not all(length for _, length in misfits)
        if is_empty:
            verb = f"{verb}, or have no token" if longest else "have no token"
        problem = f"{verb}: {places}"
        if skip and can_skip:
            log.warning(f"note: task.too_long=skip leaves out {subject}, which {problem}.")
            task.drop({prompt.index for prompt, _ in misfits})
            return lengths
        ways = ["task.too_long=skip"] if can_skip else []
        if not is_empty:
            ways += _ways_to_make_room(longest, longest_completion, longest_prompt, limits)
        ways.append("other prompts")
        raise DataError(
            f"{subject} {problem}. A document of at most {longest_document} tokens holds a prompt "
            f"and a completion of up to rollout.max_completion_length={longest_completion}. Use "
            f"{', or '.join(ways)}."
        )

    def _lengths(self, room: int, first: int | None) -> Lengths:
        """Measure prompts, of which those with 1 to `room` tokens fit.

        first: the number of prompts at most; of conversations, whose prompts the user's environment
            writes, one.
        """
        if first is not None and isinstance(self.task, ConversationTask):
            first = 1
        rows = itertools.islice(self.task.rows(), first)
        num_prompts = 0
        longest = 0
        misfits = []
        while prompts := list(itertools.islice(rows, _CHUNK)):
            num_prompts += len(prompts)
            lengths = [len(tokens) for tokens in self.encode(prompts)]
            if self.reference_prompt is not None:
                of_reference = [len(tokens) for tokens in self.encode_for_reference(prompts)]
                lengths = map(max, lengths, of_reference)
            for prompt, length in zip(prompts, lengths, strict=True):
                if 0 < length <= room:
                    longest = max(longest, length)
                else:
                    misfits.append((prompt, length))
        return Lengths(num_prompts, longest, misfits)


def _ways_to_make_room(
    longest: int, longest_completion: int, longest_prompt: int | None, limits: Mapping[str, int]
) -> list[str]:
    """Return the settings by which the longest prompt would fit a document.

    All lengths are in tokens. longest_prompt, limits: see `TokenizedTask.check_lengths`.
    """
    in_all = []
    if longest_prompt is not None and longest_prompt < longest:
        in_all = [f"task.max_prompt_length={longest}"]
    longest_document = min(limits.values())
    tokens = longest + longest_completion
    if tokens <= longest_document:
        return [" and ".join(in_all)]
    ways = []
    if longest < longest_document:
        ways.append([*in_all, f"rollout.max_completion_length={longest_document - longest}"])
    raised = [f"{words}{tokens}" for words, limit in limits.items() if limit < tokens]
    ways.append([*in_all, *raised])
    return [" and ".join(way) for way in ways]


def check_turns(tokenized: TokenizedTask, settings: TaskSettings, model_name: str) -> None:
    """Raise ConfigError for a conversation that the model has no tokens for.

    settings: of the task. model_name: the option of the group `model`.
    """
    task = tokenized.task
    if not isinstance(task, ConversationTask):
        return
    asks_for_template = getattr(settings, "chat", Chat.never) == Chat.auto
    if tokenized.chat is None and model_name == "huggingface" and asks_for_template:
        raise ConfigError(
            refusal(
                setting="task.chat=auto",
                needs="a model with a chat template",
                got="none",
                reason="A conversation's messages have roles.",
                use="task.chat=never, which writes their contents alone",
            )
        )
    tokenized.between.check(task.prompt(0).messages or ())


def scored_by_nobody(task: TaskSettings) -> TaskSettings:
    """Return a task with the same prompts and no verifier of the user's, whose code would run.

    For commands that score nothing.
    """
    if not isinstance(task, PromptsTaskSettings):
        return task
    off = {"verifier": "exact_match", "pattern": None, "verifiers": {}, "verifier_processes": 0}
    # What remains set for its verifiers has no effect, and need not be refused.
    return type(task).unchecked({**vars(task), **off})

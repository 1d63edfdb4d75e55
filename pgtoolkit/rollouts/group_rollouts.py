"""From prompts to completions, of several turns in lockstep, to scored documents; which groups have
a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.completion import Completion, Message, Prompt, Request
from pgtoolkit.document import AnyDocument, Document, SampledDocument
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import failing_together, largest
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.advantages import EQUAL_REWARDS, are_equal, reward_problem
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.settings import Mixed, PolicyRolloutSettings
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.tasks.conversation import LENGTH, Conversation, ConversationTask
from pgtoolkit.tasks.prompts import Answer, TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.tasks import Score

_ROUNDED = 1e-9
"""Rewards that differ by less, relative to the largest, may differ by rounding alone."""


def requests_of(
    task: TokenizedTask, prompts: Sequence[Prompt], count: int, seeds: Iterable[int]
) -> list[Request]:
    """Return a request for `count` completions of each prompt, drawn by the seed at its place."""
    return [
        Request(tokens, count, seed, prompt=prompt)
        for tokens, seed, prompt in zip(task.encode(prompts), seeds, prompts, strict=True)
    ]


@dataclass(eq=False)
class _Exchange:
    """A conversation that is being sampled: the request it began with, and its place among the
    completions of that request."""

    conversation: Conversation
    request: Request
    place: int

    @property
    def is_over(self) -> bool:
        return self.conversation.end is not None


def complete_all(
    task: TokenizedTask, sampler: Sampler, requests: list[Request], layout: Layout
) -> list[Completion]:
    """Return the completions of each request; in a task of several turns, a conversation each.

    The next request of a conversation is all of its tokens so far, those drawn and those of the
    environment, under a seed that depends only on that of its prompt, its place among the prompt's
    completions, and the turn. A message that leaves no room for an answer is no part of it.
    layout: of the ranks that call this at the same time. Each calls the sampler equally often.
    """
    conversation_task = task.task
    if not isinstance(conversation_task, ConversationTask):
        return sampler.complete(requests)
    firsts = [(request, place) for request in requests for place in range(request.completions)]
    with failing_together(layout):
        conversations = conversation_task.begin([_prompt_of(request) for request, _ in firsts])
    going = [
        _Exchange(conversation, request, place)
        for conversation, (request, place) in zip(conversations, firsts, strict=True)
    ]
    while largest(len(going), layout):
        with failing_together(layout):
            _add_turns(task, going, sampler.complete(requests, more=True))
            going = [exchange for exchange in going if not exchange.is_over]
            replies = conversation_task.reply([exchange.conversation for exchange in going])
            requests = []
            for exchange, message in zip(going, replies, strict=True):
                request = _next_request(task, exchange, message)
                if request is not None:
                    requests.append(request)
            going = [exchange for exchange in going if not exchange.is_over]
    conversation_task.note_unanswered(conversations, task.longest)
    sampler.complete([])  # The sampler gives back what it kept for further turns.
    return [as_completion(conversation) for conversation in conversations]


def _add_turns(
    task: TokenizedTask, exchanges: Sequence[_Exchange], completions: Sequence[Completion]
) -> None:
    for exchange, completion in zip(exchanges, completions, strict=True):
        text, _ = task.answer(completion)
        exchange.conversation.add_turn(completion, text)


def _next_request(
    task: TokenizedTask, exchange: _Exchange, message: Message | None
) -> Request | None:
    """Add the environment's message to a conversation, and return the request for its next turn.

    Return None where the conversation is over: the environment says nothing, or there is no room
    for an answer.
    """
    conversation = exchange.conversation
    between: list[int] = []
    if message is not None:
        try:
            between = task.between.tokens(message, conversation.tokens[-1])
        except DataError as error:
            assert isinstance(task.task, ConversationTask)
            raise DataError(f"{task.task.in_reply(conversation)}: {error}") from error
    room = task.longest - len(conversation.tokens) - len(between)
    if room <= 0:
        conversation.unanswered = len(between)
        conversation.end = conversation.end or LENGTH
    if message is None or room <= 0:
        return None
    conversation.add(between, False, message)
    first = exchange.request
    seed = seed_of(first.seed, (conversation.turns << 32) + exchange.place)
    return Request(first.tokens + conversation.tokens, 1, seed, room)


def as_completion(conversation: Conversation) -> Completion:
    """Return all that followed the prompt of a conversation."""
    return Completion(
        tokens=torch.tensor(conversation.tokens),
        log_probs=torch.cat(conversation.log_probs),
        finish_reason="length" if conversation.end == LENGTH else "stop",
        model_version=conversation.version,
        drawn=torch.tensor(conversation.drawn),
        top_ids=torch.cat(conversation.top_ids) if conversation.top_ids else None,
        top_log_probs=torch.cat(conversation.top_log_probs) if conversation.top_ids else None,
        conversation=conversation,
    )


def overlong_penalty(
    length: int, longest: int, buffer: int | None, largest_penalty: float
) -> float:
    """Return what DAPO adds to the reward of a completion of `length` tokens, its end included.

    It is 0 up to longest - buffer tokens, and falls from there in equal steps to -largest_penalty
    at `longest`. buffer: None for no penalty. Source: arXiv 2503.14476, equation 13.
    """
    if buffer is None:
        return 0.0
    beyond = max(0, min(length, longest) - (longest - buffer))
    return -largest_penalty * beyond / buffer if beyond else 0.0


def scored_groups(
    task: TokenizedTask,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    rollout: PolicyRolloutSettings,
    answers: Sequence[Answer] | None = None,
) -> list[list[SampledDocument]]:
    """Return the documents of each request: its completions with their scores.

    answers: of the completions (`TokenizedTask.answers`), where they are known.
    """
    size = rollout.group_size
    prompts = [_prompt_of(request) for request in requests]
    reference_prompts: list[Tensor | None] = [None] * len(requests)
    if task.reference_prompt is not None:
        reference_prompts = [torch.tensor(tokens) for tokens in task.encode_for_reference(prompts)]
    scores = task.scores([prompt for prompt in prompts for _ in range(size)], completions, answers)
    starts = [torch.tensor(request.tokens) for request in requests]
    documents = []
    for i, (completion, score) in enumerate(zip(completions, scores, strict=True)):
        place, number = divmod(i, size)
        name = f"prompt {prompts[place].index}, completion {number}"
        documents.append(
            _document(
                prompts[place].index,
                name,
                starts[place],
                completion,
                score,
                rollout,
                reference_prompts[place],
            )
        )
    return in_groups(documents, size)


def _document(
    group: int,
    name: str,
    start: Tensor,
    completion: Completion,
    score: Score,
    rollout: PolicyRolloutSettings,
    reference_prompt: Tensor | None,
) -> SampledDocument:
    """Return a completion as a scored document. start: the tokens of its prompt."""
    written = completion.tokens
    drawn = completion.drawn
    if drawn is None:
        drawn = torch.ones_like(written, dtype=torch.bool)
    reward = score.reward
    if reward is not None:
        problem = reward_problem(reward)
        if problem is not None:
            raise DataError(f"the reward of {name} {problem}")
        reward += overlong_penalty(
            len(written),
            rollout.max_completion_length,
            rollout.overlong_buffer,
            rollout.overlong_penalty,
        )
    reference_tokens = None
    if reference_prompt is not None:
        reference_tokens = torch.cat([reference_prompt, written])
    kept = None
    if rollout.sampling.is_truncated and completion.top_ids is not None:
        kept = kept_ids(completion.top_ids)
    return SampledDocument(
        tokens=torch.cat([start, written]),
        loss_mask=torch.cat([torch.zeros_like(start, dtype=torch.bool), drawn]),
        group=group,
        name=name,
        sampling_log_probs=completion.log_probs,
        sampling_top_ids=completion.top_ids if kept is None else None,
        sampling_top_log_probs=completion.top_log_probs if kept is None else None,
        sampling_kept_ids=kept,
        reward=reward,
        exact_match=score.exact_match,
        truncated=completion.finish_reason == "length",
        model_version=completion.model_version,
        measures=score.measures,
        task_reward=None if rollout.overlong_buffer is None else score.reward,
        score_failed=score.failed,
        logged=score.logged,
        reference_tokens=reference_tokens,
    )


def kept_ids(likeliest: Tensor) -> Tensor:
    """Return the tokens that truncated sampling has kept, (N, k), -1 where unused.

    likeliest: (N, k + 1), the likeliest of them. Where that is k + 1 tokens, there may be more, and
    the result has none.
    """
    is_larger = likeliest[:, -1:] >= 0
    return torch.where(is_larger, -1, likeliest[:, :-1])


def _prompt_of(request: Request) -> Prompt:
    assert request.prompt is not None
    return request.prompt


def in_groups(documents: list[AnyDocument], size: int) -> list[list[AnyDocument]]:
    """Split documents into consecutive groups of `size`."""
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def check_scores(groups: list[list[Document]]) -> None:
    """Raise DataError where every score of a batch failed: nothing is left to learn from, and
    nobody would notice."""
    documents = [document for group in groups for document in group]
    if all(document.score_failed for document in documents):
        raise DataError(
            f"the score of each of {len(documents)} completions of a batch failed, so nothing can "
            "be learned from them; the notes above say why. Mend the verifier or environment, or "
            "give it more time: task.verifier_seconds, or task.environment_seconds."
        )


def small_rewards_note(groups: list[list[Document]]) -> str:
    """Return a note where rewards differ so little that no group has a signal; "" elsewhere.

    Differences that may be the rounding of sums are none.
    """
    widest = 0.0
    for group in groups:
        rewards = [document.reward for document in group if document.reward is not None]
        if not are_equal(rewards):
            return ""
        if rewards:
            spread = max(rewards) - min(rewards)
            if spread > _ROUNDED * max(map(abs, rewards)):
                widest = max(widest, spread)
    if not widest:
        return ""
    return (
        f"the rewards of a batch differ within its prompts by at most {widest:.2g}, and rewards "
        f"at most {EQUAL_REWARDS:g} apart count as equal: nothing is learned from them. Return "
        "larger scores, or give the verifier a larger weight."
    )


def resample_uninformative(
    groups: list[list[Document]],
    sample: Callable[[int], list[list[Document]]],
    rounds: int,
    estimator: Estimator,
    mixed: Mixed = Mixed.reward,
) -> tuple[list[list[Document]], float | None]:
    """Replace groups without a signal by further ones, as long as the rounds last.

    This is DAPO's dynamic sampling (arXiv 2503.14476, equation 11). Return (the groups that are
    kept, the share of the sampled ones that are dropped: None if nothing can be).

    groups: of the first round, in the order of their prompts, as are those that are kept.
    sample: takes a number of further prompts, and returns their groups.
    rounds: how often prompts are sampled at most, the first time included; with 1 nothing is
        dropped.
    estimator, mixed: as in `has_signal`.

    If groups with a signal do not suffice, the earliest groups without one stay. Every decision
    follows from the groups alone, so ranks that hold the same groups decide the same.
    """
    if rounds == 1:
        return groups, None
    wanted = len(groups)
    missing = wanted - sum(has_signal(group, estimator, mixed) for group in groups)
    for _ in range(rounds - 1):
        if missing == 0:
            break
        groups = groups + sample(missing)
        missing = wanted - sum(has_signal(group, estimator, mixed) for group in groups)
    without = [
        place for place, group in enumerate(groups) if not has_signal(group, estimator, mixed)
    ]
    dropped = set(without[max(0, missing) :])
    kept = [group for place, group in enumerate(groups) if place not in dropped]
    return kept, len(dropped) / len(groups)


def is_solved(group: Sequence[SampledDocument], least: float) -> bool:
    """Return whether at least this share of the completions is right, of those on which the first
    verifier has decided."""
    scored = [
        document
        for document in group
        if not document.score_failed and document.exact_match is not None
    ]
    right = sum(bool(document.exact_match) for document in scored)
    return bool(scored) and right / len(scored) >= least


def has_signal(
    group: Sequence[SampledDocument], estimator: Estimator, mixed: Mixed = Mixed.reward
) -> bool:
    """Return whether the task's rewards give a group advantages by the estimator or, by `mixed`,
    whether only some of its completions are right.

    What is taken off for length is no part of these rewards. Completions that are excluded, since
    nobody could score them, do not count. Nor do, by `mixed`, those that may be right or wrong.
    """
    scored = [document for document in group if not document.is_excluded]
    if mixed == Mixed.exact_match:
        return len({document.exact_match for document in scored} - {None}) > 1
    attempts = [
        Attempt(
            document.reward if document.task_reward is None else document.task_reward,
            document.num_trained,
            document.measures,
        )
        for document in scored
    ]
    return estimator.has_signal(attempts)

"""From prompts to completions, of several turns in lockstep, to scored documents; which prompts
teach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pgtoolkit.batch import Document
from pgtoolkit.completion import Completion, Prompt, Request
from pgtoolkit.config.schema_rollouts import Mixed, PolicyRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import failing_together, largest
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.advantages import are_equal
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.tasks.conversation import LENGTH, Conversation, ConversationTask
from pgtoolkit.tasks.prompts import Answer, TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of


def requests_of(
    task: TokenizedTask, prompts: Sequence[Prompt], count: int, seeds: Iterable[int]
) -> list[Request]:
    """So many completions of each prompt, each by its seed."""
    asked = zip(task.encode(prompts), seeds, prompts, strict=True)
    return [Request(tokens, count, seed, prompt=prompt) for tokens, seed, prompt in asked]


def completed(
    task: TokenizedTask, sampler: Sampler, requests: list[Request], layout: Layout
) -> list[Completion]:
    """The completions of each request; of a task of several turns a whole conversation is one.

    The next request of a conversation is all of its tokens, as they were drawn and said, under a
    seed that depends on that of its prompt, its place among the prompt's completions, and the turn
    alone. A message that leaves no room for
    an answer is no part of it. layout: of the ranks that call this at the same time, and sample as
        often as each other.
    """
    if not isinstance(task.task, ConversationTask):
        return sampler.complete(requests)
    firsts = [(request, place) for request in requests for place in range(request.completions)]
    with failing_together(layout):
        conversations = task.task.begin([_prompt_of(request) for request, _ in firsts])
    going = [*zip(conversations, firsts, strict=True)]
    while largest(len(going), layout):
        with failing_together(layout):
            for (one, _), written in zip(going, sampler.complete(requests, more=True), strict=True):
                one.add_turn(written, task.answer(written)[0])
            going = [pair for pair in going if pair[0].end is None]
            requests = []
            for (one, (first, place)), message in zip(
                going, task.task.reply([one for one, _ in going]), strict=True
            ):
                between = [] if message is None else task.between.tokens(message, one.tokens[-1])
                room = task.longest - len(one.tokens) - len(between)
                if message is not None and room > 0:
                    one.add(between, False, message)
                    seed = seed_of(first.seed, (one.turns << 32) + place)
                    requests.append(Request(first.tokens + one.tokens, 1, seed, room))
                one.end = one.end or (None if room > 0 else LENGTH)
            going = [pair for pair in going if pair[0].end is None]
    sampler.complete([])  # what was kept for more is given back
    return list(map(whole, conversations))


def whole(one: Conversation) -> Completion:
    """All that followed a prompt."""
    reason = "length" if one.end == LENGTH else "stop"
    tokens, drawn = torch.tensor(one.tokens), torch.tensor(one.drawn)
    return Completion(tokens, torch.cat(one.log_probs), reason, one.version, drawn, one)


def overlong_penalty(length: int, longest: int, buffer: int | None, most: float) -> float:
    """What DAPO adds to the reward of a completion of `length` tokens, its end included
    (2503.14476, eq. 13).

    0 up to longest - buffer tokens, from there on in equal steps, down to -most at `longest`;
    buffer: None for none.
    """
    if buffer is None:
        return 0.0
    beyond = max(0, min(length, longest) - (longest - buffer))
    return -most * beyond / buffer if beyond else 0.0


def scored_groups(
    task: TokenizedTask,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    rollout: PolicyRolloutConfig,
    answers: Sequence[Answer] | None = None,
) -> list[list[Document]]:
    """The documents of each request, with what it was completed to, and the scores; advantages are
    0.

    answers: those of the completions (`TokenizedTask.answers`), where they are known.
    """
    prompts = [_prompt_of(request) for request in requests]
    # What a reference reads in the place of the prompt.
    instead: list[Tensor | None] = [None] * len(requests)
    if task.reference_prompt is not None:
        instead = [torch.tensor(tokens) for tokens in task.encode_for_reference(prompts)]
    asked = [
        (*both, i)
        for both in zip(requests, instead, strict=True)
        for i in range(rollout.group_size)
    ]
    scores = task.scores([_prompt_of(request) for request, *_ in asked], completions, answers)
    penalty = rollout.max_completion_length, rollout.overlong_buffer, rollout.overlong_penalty
    documents = []
    for (request, other, i), completion, score in zip(asked, completions, scores, strict=True):
        written = completion.tokens
        start = torch.tensor(request.tokens)
        prompt = _prompt_of(request)
        drawn = (
            torch.ones_like(written, dtype=torch.bool)
            if completion.drawn is None
            else completion.drawn
        )
        documents.append(
            Document(
                tokens=torch.cat([start, written]),
                loss_mask=torch.cat([torch.zeros_like(start, dtype=torch.bool), drawn]),
                old_log_probs=completion.log_probs,
                advantages=torch.zeros(len(completion.log_probs)),
                group=prompt.index,
                name=f"prompt {prompt.index}, completion {i}",
                reward=None
                if score.reward is None
                else score.reward + overlong_penalty(len(written), *penalty),
                exact_match=score.exact_match,
                truncated=completion.finish_reason == "length",
                model_version=completion.model_version,
                measures=score.measures,
                task_reward=None if rollout.overlong_buffer is None else score.reward,
                score_failed=score.failed,
                logged=score.logged,
                reference_tokens=None if other is None else torch.cat([other, written]),
            )
        )
    return in_groups(documents, rollout.group_size)


def _prompt_of(request: Request) -> Prompt:
    assert request.prompt is not None
    return request.prompt


def in_groups(documents: list[Document], size: int) -> list[list[Document]]:
    """So many consecutive ones each."""
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def check_scores(groups: list[list[Document]]) -> None:
    """Raise DataError where every score of a batch failed: nothing is left to learn from, and
    nobody would notice."""
    documents = [document for group in groups for document in group]
    if all(document.score_failed for document in documents):
        raise DataError(
            f"the score of each of {len(documents)} completions of a batch failed, so nothing can "
            "be learned from them; the notes above say why. Mend what scores them, or give it more "
            "time: task.verifier_seconds, or task.environment_seconds."
        )


def fill(
    groups: list[list[Document]],
    sample: Callable[[int], list[list[Document]]],
    rounds: int,
    mixed: Mixed = Mixed.reward,
) -> list[list[Document]]:
    """DAPO's dynamic sampling (2503.14476, eq. 11): groups that teach nothing replaced as long as
    the rounds last.

    groups: of the first round, in the order of their prompts, as is what is returned. sample:
        (number) -> the groups
    of so many further prompts. rounds: how often is sampled at most, the first time included; with
        1 nothing is
    dropped. mixed: by what a group teaches. Where they do not suffice, the earliest groups that
        teach nothing stay.

    Every decision follows from the groups alone, so that ranks that hold the same groups take the
    same.
    """
    if rounds == 1:
        return groups
    wanted, number = len(groups), 1
    while (missing := wanted - sum(teaches(group, mixed) for group in groups)) and number < rounds:
        groups = groups + sample(missing)
        number += 1
    without = [place for place, group in enumerate(groups) if not teaches(group, mixed)]
    dropped = set(without[max(0, missing) :])
    share = len(dropped) / len(groups)
    kept = [group for place, group in enumerate(groups) if place not in dropped]
    return [
        [replace(document, dropped_prompt_fraction=share) for document in group] for group in kept
    ]


def without_uninformative(groups: list[list[Document]]) -> list[Document]:
    """Return the documents of all groups, those of groups that teach nothing marked as left out."""
    is_left_out = [not teaches(group) for group in groups]
    share = sum(is_left_out) / len(groups)
    return [
        replace(document, left_out=left_out, dropped_group_fraction=share)
        for group, left_out in zip(groups, is_left_out, strict=True)
        for document in group
    ]


def is_solved(group: list[Document], least: float) -> bool:
    """Return whether at least this share of the completions that could be scored are right."""
    scored = [document for document in group if not document.score_failed]
    right = sum(bool(document.exact_match) for document in scored)
    return bool(scored) and right / len(scored) >= least


def teaches(group: list[Document], mixed: Mixed = Mixed.reward) -> bool:
    """Whether the task scores the completions differently, or finds only some right; without what
    lengths take off.

    Completions that are left out, since nobody could score them, tell nothing.
    """
    group = [document for document in group if not document.is_excluded]
    if mixed == Mixed.exact_match:
        return len({document.exact_match for document in group}) > 1
    rewards = [d.reward if d.task_reward is None else d.task_reward for d in group]
    return not are_equal(reward for reward in rewards if reward is not None)

"""Completions of several turns: the turns of all conversations go in lockstep through a sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pgtoolkit.ranks.agreement import failing_together, largest
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.tasks.completion import Completion, Request
from pgtoolkit.tasks.conversation import LENGTH, Conversation, ConversationTask
from pgtoolkit.tasks.prompt_rows import Prompt
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of


def completed(
    task: TokenizedTask, sampler: Sampler, prompts: Sequence[Prompt], requests: list[Request], layout: Layout
) -> list[Completion]:
    """The completions of each prompt's request; of a task of several turns a whole conversation is one.

    The next request of a conversation is all of its tokens, as they were drawn and said, under a seed that depends on
    that of its prompt, its place among the prompt's completions, and the turn alone. A message that leaves no room for
    an answer is no part of it. layout: of the ranks that call this at the same time, and sample as often as each other.
    """
    if not isinstance(task.task, ConversationTask):
        return sampler.complete(requests)
    asked = zip(prompts, requests, strict=True)
    firsts = [(prompt, one, place) for prompt, one in asked for place in range(one.completions)]
    with failing_together(layout):
        conversations = task.task.begin([prompt for prompt, _, _ in firsts])
    going = [*range(len(firsts))]
    while largest(len(going), layout):
        with failing_together(layout):
            for number, written in zip(going, sampler.complete(requests, more=True), strict=True):
                conversations[number].add_turn(written, task.answer(written)[0])
            going = [number for number in going if conversations[number].end is None]
            messages = task.task.reply([conversations[number] for number in going])
            requests = []
            for number, message in zip(going, messages, strict=True):
                one, (_, first, place) = conversations[number], firsts[number]
                between = [] if message is None else task.between.tokens(message, one.tokens[-1])
                room = task.longest - len(one.tokens) - len(between)
                if message is not None and room > 0:
                    one.add(between, False, message)
                    seed = seed_of(first.seed, (one.turns << 32) + place)
                    requests.append(Request(first.tokens + one.tokens, 1, seed, room))
                one.end = one.end or (None if room > 0 else LENGTH)
            going = [number for number in going if conversations[number].end is None]
    sampler.complete([])  # what was kept for more is given back
    return list(map(whole, conversations))


def whole(one: Conversation) -> Completion:
    """All that followed a prompt."""
    reason = "length" if one.end == LENGTH else "stop"
    tokens, drawn = torch.tensor(one.tokens), torch.tensor(one.drawn)
    return Completion(tokens, torch.cat(one.log_probs), reason, one.version, drawn, one)

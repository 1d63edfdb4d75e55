"""Completions of several turns: the turns of all conversations go in lockstep through a sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pgtoolkit.ranks.agreement import failing_together, largest
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.sampling.samplers import Sampler
from pgtoolkit.tasks.completion import Completion, Request
from pgtoolkit.tasks.conversation import LENGTH, Conversation, ConversationTask
from pgtoolkit.tasks.prompt_rows import Prompt
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of


def requests_of(task: TokenizedTask, prompts: Sequence[Prompt], count: int, seeds: Iterable[int]) -> list[Request]:
    """So many completions of each prompt, each by its seed."""
    asked = zip(task.encode(prompts), seeds, prompts, strict=True)
    return [Request(tokens, count, seed, prompt=prompt) for tokens, seed, prompt in asked]


def completed(task: TokenizedTask, sampler: Sampler, requests: list[Request], layout: Layout) -> list[Completion]:
    """The completions of each request; of a task of several turns a whole conversation is one.

    The next request of a conversation is all of its tokens, as they were drawn and said, under a seed that depends on
    that of its prompt, its place among the prompt's completions, and the turn alone. A message that leaves no room for
    an answer is no part of it. layout: of the ranks that call this at the same time, and sample as often as each other.
    """
    if not isinstance(task.task, ConversationTask):
        return sampler.complete(requests)
    firsts = [(request, place) for request in requests for place in range(request.completions)]
    with failing_together(layout):
        conversations = task.task.begin([request.prompt for request, _ in firsts])
    going = [*zip(conversations, firsts, strict=True)]
    while largest(len(going), layout):
        with failing_together(layout):
            for (one, _), written in zip(going, sampler.complete(requests, more=True), strict=True):
                one.add_turn(written, task.answer(written)[0])
            going = [pair for pair in going if pair[0].end is None]
            requests = []
            for (one, (first, place)), message in zip(going, task.task.reply([one for one, _ in going]), strict=True):
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

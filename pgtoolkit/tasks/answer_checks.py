"""Checks that a task's verifiers accept the answers of its prompts: an answer that no completion
can give teaches nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from pgtoolkit.completion import Prompt
from pgtoolkit.errors import DataError, VerifierLost
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.chat_template import QUESTION
from pgtoolkit.tasks.math_answers import math_golds
from pgtoolkit.tasks.process_pool import NOTHING, Failure
from pgtoolkit.tasks.prompt_tasks import PromptsTask
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.settings import VERIFIERS
from pgtoolkit.tasks.tasks import above_one, is_first_above_one
from pgtoolkit.tasks.verifiers import Named, last_number

FIRST = 100
"""Number of answers that are tried."""

FIRST_OF_A_FUNCTION = 10
"""Number of answers that a function of the user's is tried on: it may ask a model, which takes time
and money."""

_SHOWN = 3

_MOVES = re.compile(r"\(\?[=!<(]|\(\?P=|\\[bB1-9]")
"""Constructs by which a group matches depending on the text around it, which is not known here."""


def notes_on_answers(task: PromptsTask, has_template: bool = False) -> list[str]:
    """Score the first answers against themselves; return a note for each verifier that does not
    accept some of them, and for each that gives some of them no score, with the reason.

    has_template: whether prompts go through a chat template, so that functions in TRL's form get
        messages.

    Raises DataError where the first verifier, which decides what is right, is one of pgtoolkit's
    and accepts no answer at all; and where a function of the user's raises, returns no number, or
    cannot reach its server, since it would end the run. A function of the user's may expect a form
    around the answer, so there is only a note if it rejects answers.
    """
    notes = []
    for number, verifier in enumerate(task.named):
        if verifier.name in VERIFIERS:
            notes += _of_built_in(task, number, verifier)
        elif number == 0:
            notes += _of_function(task, verifier, has_template)
        else:
            first = list(itertools.islice(task.rows(), 1))
            outcomes = _tried(task, number, verifier, first, has_template)
            # One beside the first need not score every completion: it may return None.
            failed = [
                isinstance(outcome, Failure) and outcome.kind != NOTHING for outcome in outcomes
            ]
            if any(failed):
                notes += _of_failures(verifier, first, outcomes)
    return notes


def notes_on_rows(task: PromptsTask, answer_field: str, is_prompt: bool) -> list[str]:
    """Return notes on answers that are no answers to their prompts, where a verifier reads them:
    those that are the prompt itself, and those of a prompt that has another one in another row.

    answer_field: the column of the answers. is_prompt: whether it is the column of the prompts.
    """
    reading = [
        verifier
        for verifier, signature in zip(task.named, task.signatures, strict=True)
        if signature is None or signature.reads_answer
    ]
    if not reading:
        return []
    if is_prompt:
        return [
            f"task.answer_field={answer_field} is the column of the prompts, so the answer that "
            f"{reading[0]} reads is the prompt itself. Use the column of the answers, or leave "
            "the parameter out of a function that does not use it."
        ]
    first: dict[tuple[str, object], Prompt] = {}
    contradicting = []
    for prompt in task.rows():
        key = (prompt.text, prompt.messages and repr(prompt.messages))
        if prompt.answer != first.setdefault(key, prompt).answer:
            contradicting.append(prompt)
    if not contradicting:
        return []
    other = contradicting[0]
    same = first[other.text, other.messages and repr(other.messages)]
    rows = "1 row has" if len(contradicting) == 1 else f"{len(contradicting)} rows have"
    return [
        f"{rows} another answer than an earlier row with the same prompt, first "
        f"{other.text[:60]!r} at {other.place}: {other.answer[:40]!r}, and "
        f"{same.answer[:40]!r} at {same.place}. What is right for the one is wrong for the other: "
        "mend or remove one of them."
    ]


def _of_built_in(task: PromptsTask, number: int, verifier: Named) -> list[str]:
    rows = task.rows()
    first = list(itertools.islice(rows, FIRST))
    if verifier.name == "exact_match":
        return _of_exact_match(verifier, first)
    outcomes = _outcomes(task, number, verifier, first)
    notes = _of_failures(verifier, first, outcomes)
    rejected = _rejected(first, outcomes)
    if not rejected:
        return notes
    if verifier.pattern is None:
        setting = str(verifier)
        needs = "answers that it can read"
        use = "answers of another form"
        way_out = ""
    else:
        key = _pattern_key(verifier)
        setting = f"{key}={verifier.pattern}"
        needs = "answers that its group can capture"
        use = f"another {key}"
        way_out = f", or use another {key}"
    if len(rejected) == len(first) and number == 0 and not _accepts_any(task, verifier, rows):
        raise DataError(
            refusal(
                setting=setting,
                needs=needs,
                got=f"{rejected[0].answer:.80} at {rejected[0].place}, and no other is one",
                reason="Every completion would score 0.",
                use=use,
            )
        )
    return [
        *notes,
        f"{setting} accepts no completion for {_counted(rejected, first)}, whose completions all "
        f"score 0: {_listed(rejected)}. Mend these answers{way_out}.",
    ]


def _of_exact_match(verifier: Named, first: Sequence[Prompt]) -> list[str]:
    """Return a note on answers of several lines.

    exact_match accepts every answer, but nobody means worked solutions, such as those of GSM8K, to
    be written word for word.
    """
    solutions = [prompt for prompt in first if "\n" in prompt.answer.strip()]
    if not solutions:
        return []
    return [
        f"{verifier} asks a completion for the whole answer, word for word, and "
        f"{_counted(solutions, first)} have several lines, first that at {solutions[0].place}: "
        f"{solutions[0].answer[:80]!r}. Keep only the final answer of worked solutions."
    ]


def _accepts_any(task: PromptsTask, verifier: Named, rows: Iterator[Prompt]) -> bool:
    """Return whether the verifier accepts the own answer of some prompt."""
    while chunk := list(itertools.islice(rows, FIRST)):
        if len(_rejected(chunk, _outcomes(task, 0, verifier, chunk))) < len(chunk):
            return True
    return False


def _outcomes(
    task: PromptsTask, number: int, verifier: Named, prompts: Sequence[Prompt]
) -> Sequence[float | Failure | None]:
    """Return the best score that the own answer of each prompt can get in any form, by a verifier
    of pgtoolkit's."""
    if verifier.name == "last_number":
        return [float(last_number(prompt.answer) is not None) for prompt in prompts]
    if verifier.name == "regular_expression":
        pattern = verifier.pattern or ""
        return [float(can_capture(pattern, prompt.answer)) for prompt in prompts]
    responses = [Response(prompt, math_golds(prompt.answer)[0], True) for prompt in prompts]
    return task.outcomes(number, responses)


def _rejected(
    prompts: Sequence[Prompt], outcomes: Sequence[float | Failure | None]
) -> list[Prompt]:
    """Return the prompts whose answer got a score below 1."""
    return [
        prompt
        for prompt, outcome in zip(prompts, outcomes, strict=True)
        if isinstance(outcome, int | float) and outcome < 1
    ]


def _of_failures(
    verifier: Named,
    prompts: Sequence[Prompt],
    outcomes: Sequence[float | Failure | None],
    has_others: bool = False,
) -> list[str]:
    """Return a note for each reason for which an answer got no score.

    has_others: whether other verifiers may score what this one does not (None).
    """
    by_reason: dict[str, list[Prompt]] = {}
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if outcome is None or isinstance(outcome, Failure):
            reason = "returned None" if outcome is None else outcome.reason
            by_reason.setdefault(reason, []).append(prompt)
    notes = []
    for reason, failed in by_reason.items():
        consequence = "Such a completion has no score: task.verifier_failure says what becomes of "
        consequence += "it."
        if has_others and reason == "returned None":
            consequence = (
                "Other verifiers may score such a completion; task.verifier_failure says what "
                "becomes of one that none scores."
            )
        notes.append(
            f"{verifier} {reason}, for {_counted(failed, prompts)} as the completion: "
            f"{_listed(failed)}. {consequence}"
        )
    return notes


def _of_function(task: PromptsTask, verifier: Named, has_template: bool) -> list[str]:
    signature = task.signatures[0]
    asks_a_server = signature is not None and signature.is_async
    first = list(itertools.islice(task.rows(), 1 if asks_a_server else FIRST_OF_A_FUNCTION))
    outcomes = _tried(task, 0, verifier, first, has_template)
    notes = _of_failures(verifier, first, outcomes, has_others=len(task.named) > 1)
    scored = [
        (outcome, prompt)
        for outcome, prompt in zip(outcomes, first, strict=True)
        if isinstance(outcome, int | float)
    ]
    score, prompt = max(scored, key=lambda pair: pair[0], default=(0.0, None))
    if score > 1 and prompt is not None:
        is_first_above_one(verifier.name)  # so that the run does not say it again
        on = f"the answer {prompt.answer[:40]!r} at {prompt.place} as the completion"
        notes.append(above_one(str(verifier), score, on))
    rejected = _rejected(first, outcomes)
    if not rejected:
        return notes
    return [
        *notes,
        f"{verifier} does not count a completion that repeats its answer as right, for "
        f"{_counted(rejected, first)}: {_listed(rejected)}. Only a score of 1 or more does. That "
        "is as it should be if it expects a form around the answer.",
    ]


def _tried(
    task: PromptsTask,
    number: int,
    verifier: Named,
    prompts: Sequence[Prompt],
    has_template: bool,
) -> Sequence[float | Failure | None]:
    """Score answers as completions by a function of the user's, which must score every text."""
    responses = []
    for prompt in prompts:
        messages = None
        if has_template:
            messages = prompt.messages or [QUESTION | {"content": prompt.text}]
        # Its bytes take the place of tokens, which are not known before the model is loaded.
        responses.append(
            Response(prompt, prompt.answer, True, list(prompt.answer.encode()), messages)
        )
    try:
        outcomes = task.outcomes(number, responses)
    except VerifierLost as error:
        raise DataError(f"{error} Without that the run would end.") from error
    except DataError as error:
        raise DataError(
            f"{verifier} must score every text, and fails on an answer as the completion. {error}"
        ) from error
    return outcomes


def can_capture(pattern: str, answer: str) -> bool:
    """Return whether the one group of a pattern can match an answer, up to white space around that.

    True where that depends on the text around the group.
    """
    group = _group(pattern)
    if _MOVES.search(group):
        return True
    expression = re.compile(group, re.compile(pattern).flags)
    answer = answer.strip()
    spaces = ("", " ", "\n")
    return any(
        expression.fullmatch(f"{before}{answer}{after}") for before in spaces for after in spaces
    )


def _group(pattern: str) -> str:
    """Return the one capturing group of a valid pattern, with its parentheses."""
    opened: list[int] = []
    start = None
    for token in re.finditer(
        r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?!P<))?|\)", pattern, re.DOTALL
    ):
        if token[0] == ")":
            if opened.pop() == start and start is not None:
                return pattern[start : token.end()]
        elif token[0].startswith("("):
            opened.append(token.start())
            if token[0] == "(":
                start = token.start()
    raise AssertionError(f"a pattern without a group: {pattern}")


def _pattern_key(verifier: Named) -> str:
    return verifier.key.removesuffix("verifier") + "pattern"


def _counted(rejected: Sequence[Prompt], first: Sequence[Prompt]) -> str:
    return f"{len(rejected)} of the first {len(first)} answers"


def _listed(prompts: Sequence[Prompt]) -> str:
    shown = ", ".join(f"{prompt.answer[:40]!r} at {prompt.place}" for prompt in prompts[:_SHOWN])
    return shown + (f" and {len(prompts) - _SHOWN} more" if len(prompts) > _SHOWN else "")

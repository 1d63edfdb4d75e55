"""Tasks whose prompts come from files, and the scores that verifiers give their completions."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

from pgtoolkit.completion import Prompt
from pgtoolkit.errors import DataError
from pgtoolkit.system.declared import Dictionary
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.failed_scores import FailedScore, FailedScores
from pgtoolkit.tasks.process_pool import NOTHING, Failure
from pgtoolkit.tasks.prompt_rows import read_prompts
from pgtoolkit.tasks.retries import Retries
from pgtoolkit.tasks.reward_functions import BatchScores
from pgtoolkit.tasks.scoring import Response, Scoring
from pgtoolkit.tasks.settings import ConversationTaskSettings, PromptsTaskSettings
from pgtoolkit.tasks.signatures import Signature
from pgtoolkit.tasks.tasks import NumberedRows, Once, Score, above_one, is_first_above_one
from pgtoolkit.tasks.verifiers import Named

log = logging.getLogger("pgtoolkit")


class PromptRows(NumberedRows):
    """Prompts from files, which are all read at the start. Every pass has another seeded order."""

    def __init__(
        self,
        settings: PromptsTaskSettings | ConversationTaskSettings,
        seed: int,
        once: Once,
        keep_rows: bool = False,
    ):
        # Not above: `pgtk check` does without NumPy and pyarrow.
        from pgtoolkit.tasks.shuffle import shuffled

        assert settings.path is not None
        read = functools.partial(
            read_prompts,
            settings.path,
            settings.split,
            settings.prompt_field,
            settings.answer_field,
            config=getattr(settings, "config", None),
            answer_pattern=getattr(settings, "answer_pattern", None),
            keep_rows=keep_rows,
        )
        self._prompts: list[Prompt] = once(read)
        super().__init__(len(self._prompts))
        characters = {
            character for prompt in self._prompts for character in prompt.text + prompt.answer
        }
        self.alphabet = "".join(sorted(characters))
        # The number of prompts is among the arguments since some may be dropped.
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch, count: shuffled(count, seed, epoch)
        )

    def row(self, index: int) -> int:
        epoch, place = divmod(index, self.num_prompts)
        return self._kept[self._order(epoch, self.num_prompts)[place]]

    def of_row(self, row: int) -> Prompt:
        return self._prompts[row]


class PromptsTask(PromptRows):
    """Prompts with reference answers from files, scored by verifiers.

    Verifiers see the text of a completion whether it was finished or cut off at its maximum length.
    The reward is the weighted sum of the scores of the verifiers that score the completion. The
    first verifier alone decides whether it is an exact match, by a score of 1 or more.
    """

    def __init__(
        self, settings: PromptsTaskSettings, seed: int, once: Once, held_out: bool = False
    ):
        single: dict[str, Dictionary] = {
            "": {"verifier": settings.verifier, "pattern": settings.pattern}
        }
        verifiers = settings.verifiers or single
        self._weights = {
            name: float(options.get("weight", 1)) for name, options in verifiers.items()
        }
        self.named = [
            Named(
                f"task.verifiers.{name}.verifier" if name else "task.verifier",
                options["verifier"],
                options.get("pattern"),
            )
            for name, options in verifiers.items()
        ]
        self._failed_scores = FailedScores(settings, held_out)
        self._scoring = Scoring(
            self.named,
            settings.verifier_processes,
            settings.verifier_seconds,
            settings.verifier_concurrency,
            Retries(settings.verifier_retries, settings.verifier_retry_seconds),
        )
        self.signatures = self._scoring.signatures
        keep_rows = any(
            signature is not None and signature.wants_rows for signature in self.signatures
        )
        super().__init__(settings, seed, once, keep_rows)
        for verifier, signature in zip(self.named, self.signatures, strict=True):
            if signature is not None:
                self._check_columns(verifier, signature)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        return self.scores([Response(prompt, completion, finished)])[0]

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        by_verifier = [self._scoring.scores(number, responses) for number in range(len(self.named))]
        outcomes = [
            list(of_response)
            for of_response in zip(*(batch.scores for batch in by_verifier), strict=True)
        ]
        for of_response in outcomes:
            if all(outcome is None for outcome in of_response):
                of_response[:] = [Failure(NOTHING, "returned None")] * len(of_response)
        self._note_failures(responses, outcomes)
        self._note_above_one(responses, outcomes)
        metrics = self._metrics(by_verifier)
        return [
            replace(self._score(of_response, metrics), logged=self._logged(by_verifier, place))
            for place, of_response in enumerate(outcomes)
        ]

    def outcomes(
        self, number: int, responses: Sequence[Response]
    ) -> Sequence[float | Failure | None]:
        """Return the scores by the verifier of this number in `named`; None for a completion that
        it does not score."""
        return self._scoring.scores(number, responses).scores

    def close(self) -> None:
        self._scoring.close()

    def _check_columns(self, verifier: Named, signature: Signature) -> None:
        """Raise DataError if a row lacks a column that a function asks for."""
        for name in signature.columns:
            without = (prompt for prompt in self.rows() if name not in (prompt.row or {}))
            lacking = next(without, None)
            if lacking is not None:
                raise DataError(
                    refusal(
                        setting=str(verifier),
                        needs=f"a column {name} in every row, which its function asks for",
                        got=f"{', '.join(lacking.row or {})} at {lacking.place}",
                        reason="Parameters without a default are columns of the file, beside "
                        "completions and prompts.",
                        use=f"a file with this column, or a default: {name}=None",
                    )
                )

    def _metrics(self, by_verifier: Sequence[BatchScores]) -> dict[str, float]:
        """Return the metrics that functions have logged of all these completions together."""
        metrics = {}
        for name, scores in zip(self._weights, by_verifier, strict=True):
            prefix = f"verifier/{name}/" if name else "verifier/"
            for metric, values in scores.metrics.items():
                metrics[prefix + metric] = sum(values) / len(values)
        return metrics

    def _logged(self, by_verifier: Sequence[BatchScores], place: int) -> dict[str, str]:
        """Return the texts that functions have logged of the completion at this place, by column,
        each under the name of its verifier."""
        logged = {}
        for name, scores in zip(self._weights, by_verifier, strict=True):
            for column, texts in scores.columns.items():
                logged[f"{name}/{column}" if name else column] = texts[place]
        return logged

    def _note_failures(
        self, responses: Sequence[Response], outcomes: list[list[float | Failure | None]]
    ) -> None:
        """Log notes on the completions that verifiers have failed on.

        outcomes: for each completion, those of all verifiers.
        """
        failures = [
            FailedScore(str(verifier), outcome, str(response))
            for response, of_response in zip(responses, outcomes, strict=True)
            for verifier, outcome in zip(self.named, of_response, strict=True)
            if isinstance(outcome, Failure)
        ]
        self._failed_scores.note(failures, len(responses))

    def _note_above_one(
        self, responses: Sequence[Response], outcomes: list[list[float | Failure | None]]
    ) -> None:
        """Log a note on the first completions of which the first verifier scores one above 1."""
        scored = [
            (of_response[0], str(response))
            for response, of_response in zip(responses, outcomes, strict=True)
            if isinstance(of_response[0], int | float)
        ]
        score, on = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
        if score > 1 and is_first_above_one(self.named[0].name):
            log.warning(f"note: {above_one(str(self.named[0]), score, on)}")

    def _score(self, outcomes: list[float | Failure | None], metrics: dict[str, float]) -> Score:
        """Return the score of one completion.

        There is no reward without the score of a verifier that failed.
        """
        failed = any(isinstance(outcome, Failure) for outcome in outcomes)
        scored = [
            (name, weight, self._failed_scores.score if isinstance(outcome, Failure) else outcome)
            for (name, weight), outcome in zip(self._weights.items(), outcomes, strict=True)
            if outcome is not None
        ]
        counted = [weight * score for _, weight, score in scored if score is not None]
        reward = sum(counted) if len(counted) == len(scored) else None
        measures = {
            f"reward/{name}": score for name, _, score in scored if name and score is not None
        }
        first = outcomes[0]
        is_right = None  # unknown where the first verifier does not score this completion
        if first is not None:
            is_right = not isinstance(first, Failure) and first >= 1
        measures |= metrics | self._scoring.measures(outcomes)
        return Score(reward, is_right, measures, failed)

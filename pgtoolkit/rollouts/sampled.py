"""Batches of documents that the policy in training samples itself, at once or some steps ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from pgtoolkit.completion import Completion, Prompt, Request
from pgtoolkit.document import Document, fields_of
from pgtoolkit.errors import DataError, VerifierLost
from pgtoolkit.losses.adaptive_kl import AdaptiveKL
from pgtoolkit.losses.checks import check_object
from pgtoolkit.losses.corrections import Correction
from pgtoolkit.losses.kl import KL
from pgtoolkit.ranks.agreement import failing_together, gather_objects
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.batch_counts import steps_ahead, steps_before, steps_of_batch
from pgtoolkit.rollouts.estimator import Estimator, advantages_of
from pgtoolkit.rollouts.forward_passes import ForwardPasses, sum_of_kl
from pgtoolkit.rollouts.gae import with_gae
from pgtoolkit.rollouts.group_rollouts import (
    check_scores,
    complete_all,
    has_signal,
    in_groups,
    is_solved,
    requests_of,
    resample_uninformative,
    scored_groups,
    small_rewards_note,
)
from pgtoolkit.rollouts.passes import Passes
from pgtoolkit.rollouts.recording import write_batch
from pgtoolkit.rollouts.rules_in_python import misfit
from pgtoolkit.rollouts.saved_batches import STATE
from pgtoolkit.rollouts.settings import (
    WITHOUT_OTHERS,
    AccumulationSettings,
    AdvantageSettings,
    OldLogProbs,
    PolicyRolloutSettings,
    Uninformative,
)
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.stages import Stopwatch
from pgtoolkit.runs.records import expect
from pgtoolkit.sampling.samplers import Sampler, TransformersSampler
from pgtoolkit.sampling.settings import SamplingSettings
from pgtoolkit.sampling.trained_policy import TrainedPolicy
from pgtoolkit.system.background import in_background
from pgtoolkit.system.declared import AutoOrBool
from pgtoolkit.tasks.prompts import Answer, TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of

log = logging.getLogger("pgtoolkit")


class _PendingBatch(NamedTuple):
    """A batch that is being sampled.

    number: the number of the batch.
    prompt_numbers: the numbers of its prompts.
    wait_for_groups: waits for the completions, and returns the documents of each prompt, in the
        order of the prompts. Every rank calls it, and gets the documents of all ranks.
    """

    number: int
    prompt_numbers: list[int]
    wait_for_groups: Callable[[], list[list[Document]]]


@dataclass(eq=False)
class SampledRollouts(Source):
    """The source of documents of a reinforcement-learning run.

    A batch has `prompts_per_batch` groups of `group_size` documents. Batches follow each other
    without end, unless `rollout.retire_at` retires all prompts.

    By default the policy samples a batch when its first document is asked for. With `rollout.lag`
    or `rollout.max_staleness` it samples the batch some steps earlier (`steps_ahead` in
    batch_counts.py), and with `max_staleness` training continues meanwhile. A batch is part of
    the state until all its documents have been used, because the weights that sampled it are gone.

    layout: the ranks. Each rank samples for its share of the prompts; then all hold all documents.
    seed: of the prompts' completions.
    folder: the folder where each batch is recorded; None if batches are not recorded.
    penalty: on rewards, by the reference of `trained`; None: there is none.
    adaptive_kl: the coefficient of that penalty, which each batch moves; None: it stays.
    gae: no longer read. The estimator has these settings, which the critic's values make advantages
        with: Estimator.of(AdvantageSettings(estimator='gae', ...), settings).
    correction: of the loss; one of the gap to the sampler reads old log-probs early.
    share_prompts: see `steps.is_sharing`.
    """

    task: TokenizedTask
    sampler: Sampler
    trained: TrainedPolicy
    settings: PolicyRolloutSettings
    estimator: Estimator
    accumulation: AccumulationSettings
    seed: int = 0
    layout: Layout = ONE_PROCESS
    folder: Path | None = None
    penalty: KL | None = None
    adaptive_kl: AdaptiveKL | None = None
    gae: InitVar[AdvantageSettings | None] = None
    correction: Correction | None = None
    share_prompts: AutoOrBool = False

    def __post_init__(self, gae: AdvantageSettings | None) -> None:
        if gae is not None:
            raise ValueError(
                "SampledRollouts(gae=...) needs to be left out: the estimator has these settings. "
                "Use Estimator.of(AdvantageSettings(estimator='gae', ...), settings), or "
                "Estimator('gae') for what they are by default."
            )
        self._check_parts()
        self._rollout = self.settings
        self.batch_size = self._rollout.prompts_per_batch * self._rollout.group_size
        self.passes = Passes.of(self._rollout, self.seed)
        # A batch is sampled this many steps before the first step that trains on it.
        self._ahead = steps_ahead(self._rollout, self.accumulation)
        self._stopwatch = Stopwatch()
        self._passes = ForwardPasses(
            self._rollout,
            self.accumulation,
            self.trained,
            self.layout,
            self._stopwatch,
            is_ahead=self._ahead > 0,
            reads_early=self._rollout.save_path is not None
            or self.penalty is not None
            or self._corrects(),
            has_kl_reward=self.penalty is not None,
            share_prompts=self.share_prompts,
        )
        # The number of the batch in use: the one that steps take documents from. -1 before the
        # first.
        self._number = -1
        # The number of the first prompt that no sampled batch has.
        self._next_prompt = 0
        # Batch number -> documents, of the batch in use and of those sampled after it.
        self._batches: dict[int, list[Document]] = {}
        # Rows of the task whose prompts were solved, and are not asked again.
        self._retired: set[int] = set()
        # The note is given once, and not where the rewards of a prompt are not compared.
        self._may_note_small_rewards = self.estimator.name not in WITHOUT_OTHERS
        self._noted_measures = False
        self._pending: _PendingBatch | None = None
        # Prompt number -> its completions, of a batch that nobody could score: they are scored when
        # a resumed run begins that batch, instead of others of newer weights.
        self._unscored: dict[int, list[Completion]] = {}
        # The prompt numbers and completions of this rank in each round of the pending batch.
        self._rounds: list[tuple[Sequence[int], list[list[Completion]]]] = []
        # The latest call of the sampler in a background thread.
        self._background: Future | None = None

    @property
    def values_by_key(self) -> dict[str, object]:
        values: dict[str, object] = {
            "rollout": self.settings.name,
            "correction": "none" if self.correction is None else self.correction.name,
            "kl.reference_prompt": self.task.reference_prompt,
            **self.estimator.values_by_key,
        }
        values |= {f"rollout.{name}": value for name, value in vars(self.settings).items()}
        values |= {f"accumulation.{name}": value for name, value in vars(self.accumulation).items()}
        if isinstance(self.sampler, TransformersSampler):
            values["sampler.keep_top"] = self.sampler.sampling.kept
        return values

    def _check_parts(self) -> None:
        """Raise ValueError for parts of another kind, or that do not fit each other."""
        check_object("task", self.task, TokenizedTask, "TokenizedTask(task, policy.tokenizer, ...)")
        use = "PolicyRolloutSettings(max_completion_length=256)"
        check_object("settings", self.settings, PolicyRolloutSettings, use)
        check_object("estimator", self.estimator, Estimator, "Estimator('dr_grpo')")
        use = "AccumulationSettings(docs_per_step=64, max_tokens=8192)"
        check_object("accumulation", self.accumulation, AccumulationSettings, use)
        values = self.values_by_key
        if self.penalty is not None:
            values |= {"kl": self.penalty.kind, "kl.place": "reward"}
        problem = misfit(values)
        if problem is not None:
            raise ValueError(problem)
        if self.adaptive_kl is not None and self.penalty is None:
            raise ValueError(
                "adaptive_kl needs penalty=, whose coefficient it is (got None). Use "
                "penalty=KL('k3', coefficient=...), or leave it out; that of a penalty in the "
                "loss is an attribute of the module"
            )
        if isinstance(self.sampler, TransformersSampler):
            self._check_sampler(self.sampler)
        if list(self.task.stop) != self.settings.stop:
            raise ValueError(
                f"TokenizedTask needs stop={self.settings.stop!r}, as the settings of the rollouts "
                f"have (got {list(self.task.stop)!r}): it cuts these texts off before a completion "
                "is scored. Use TokenizedTask(..., stop=settings.stop)"
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Raise ValueError for numbers that a batch of this size does not fit."""
        settings = self.settings
        if settings.max_staleness is not None:
            steps = steps_of_batch(settings, self.accumulation)
            if settings.max_staleness < steps:
                raise ValueError(
                    f"PolicyRolloutSettings(max_staleness={settings.max_staleness}) needs at least "
                    f"the {steps} steps of a batch in all of its passes (got "
                    f"{settings.max_staleness}). With less, nothing could be trained while a batch "
                    f"is sampled. Use max_staleness={2 * steps - 1}."
                )
        if settings.retire_at is not None and self.task.task.num_prompts is None:
            raise ValueError(
                f"PolicyRolloutSettings(retire_at={settings.retire_at}) needs a task of a number "
                f"of prompts (got {type(self.task.task).__name__}). Prompts of a generator never "
                "come back. Use retire_at=None, or a PromptsTask."
            )
        if self.adaptive_kl is not None:
            self.adaptive_kl.check_batch(settings.prompts_per_batch * settings.group_size)

    def _check_sampler(self, sampler: TransformersSampler) -> None:
        """Raise ValueError for a sampler that samples from another policy, or in another way than
        the rollouts say."""
        if sampler.live is not self.trained.policy:
            raise ValueError(
                "sampler needs the policy of the module (got another one): its completions count "
                "as those of the policy in training. Use TransformersSampler(module.policy, ...)"
            )
        is_async = self.settings.max_staleness is not None
        if is_async and not sampler.is_async:
            raise ValueError(
                f"PolicyRolloutSettings(max_staleness={self.settings.max_staleness}) needs a "
                "sampler of is_async=True (got False): completions are sampled while the weights "
                "change. Use TransformersSampler(..., is_async=True)"
            )
        sampling = sampler.sampling
        wanted = self.settings.sampling
        for name in ("temperature", "top_p", "top_k", "max_completion_length", "stop"):
            got = _in_one_form(name, sampling)
            needed = _in_one_form(name, wanted)
            if got != needed:
                raise ValueError(
                    f"sampler needs {name}={needed!r}, as the settings of the rollouts have (got "
                    f"{got!r}): log-probs are taken as these say. Use "
                    f"PolicyRolloutSettings(..., {name}={got!r}), or the sampler with {name}="
                    f"{needed!r}"
                )

    def _corrects(self) -> bool:
        """Return whether the loss corrects for the gap to the sampler."""
        return self.correction is not None and not self.correction.of_policy

    @property
    def num_documents(self) -> int | None:
        """Return the number of documents in all batches of the run, once every prompt is retired;
        None before, since there will be more batches."""
        return self._next_batch * self.batch_size if self.all_retired else None

    @property
    def _next_batch(self) -> int:
        """Return the number of the first batch whose sampling has not begun.

        Batches are numbered from 0, so this is also how many have begun. There must be a batch in
        use.
        """
        return self._number + len(self._batches) + (self._pending is not None)

    @property
    def all_retired(self) -> bool:
        """Return whether rollout.retire_at has left no prompt to ask."""
        return bool(self._retired) and len(self._retired) == self.task.task.num_prompts

    def before_step(self, position: int, number: int = 0) -> None:
        """Sample the batches that are due before the step that begins at this position, in pass
        `number` over its batch.

        With `rollout.max_staleness` the last of them only begins to be sampled. Without lag nothing
        is due: `document` then samples a batch when it needs it.
        """
        if self._ahead == 0:
            return
        self._use(position // self.batch_size)
        batch = self._next_batch
        while self._steps_before(batch, position, number) <= self._ahead:
            self._begin_sampling(batch)
            if self._rollout.max_staleness is None or self._unscored:
                self._finish_sampling()
            if self.all_retired:
                break
            batch += 1

    def _steps_before(self, batch: int, position: int, passes_done: int) -> int:
        """Return the number of steps from `position` until training on a batch begins."""
        return steps_before(
            batch, position, self.batch_size, self.accumulation, self.passes.count, passes_done
        )

    def document(self, position: int) -> Document:
        number, place = divmod(position, self.batch_size)
        self._use(number)
        return self._batches[number][place]

    def state_dict(self) -> dict:
        """Wait for the batch that is being sampled, and return the state. Called by every rank."""
        self._finish_sampling()
        documents = [document for batch in self._batches.values() for document in batch]
        return {
            "number": self._number,
            "next_prompt": self._next_prompt,
            "retired": sorted(self._retired),
            "unscored": [
                {"prompt": number, "completions": [_saved(completion) for completion in group]}
                for number, group in self._unscored.items()
            ],
            "documents": [fields_of(document) for document in documents],
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue from a state that `state_dict` returned.

        Raises ValueError if it has another shape, or does not fit this run; the caller names the
        checkpoint.
        """
        expect(state, STATE)
        for document in state["documents"]:
            tokens = document["tokens"]
            if not ((tokens >= 0) & (tokens < self.trained.policy.vocabulary_size)).all():
                raise ValueError(f"{document['name']} holds tokens that are not in the vocabulary")
        self._number = state["number"]
        size = self.batch_size
        documents = [Document(**document) for document in state["documents"]]
        if len(documents) % size or (self._number >= 0 and not documents):
            raise ValueError(f"it holds {len(documents)} documents, in batches of {size}")
        self._batches = dict(enumerate(in_groups(documents, size), self._number))
        self._next_prompt = state["next_prompt"]
        self._unscored = {
            entry["prompt"]: [Completion(**completion) for completion in entry["completions"]]
            for entry in state.get("unscored", ())
        }
        if self._rollout.retire_at is not None:
            num_prompts = self.task.task.num_prompts or 0
            rows = {self.task.task.row(number) for number in range(num_prompts)}
            self._retired = rows & set(state.get("retired", ()))

    def prompt(self, document: Document) -> Prompt:
        """Return the prompt that a document of this source answers."""
        return self.task.prompt(document.group)

    def seconds(self) -> dict[str, float]:
        """Return the seconds that this process took since the last call, by stage.

        The time it waited for other ranks is not counted.
        """
        return self._stopwatch.reset()

    def close(self) -> None:
        """Close the sampler and the task. A batch that is being sampled is lost."""
        self.sampler.close()
        if self._background is not None:
            # Closing the sampler has asked this call to end.
            wait([self._background], timeout=10)
        self.task.close()

    def _use(self, number: int) -> None:
        """Make this batch the one in use, and forget the batches before it.

        Samples it if that has not been done. What must come from the weights with which training on
        it begins, such as proximal log-probs, is computed now. The batch is then recorded.
        """
        if number == self._number:
            return
        self._finish_sampling()
        if number not in self._batches:
            self._begin_sampling(number)
            self._finish_sampling()
        if number not in self._batches:
            return  # Every prompt is retired.
        batches = {kept: batch for kept, batch in self._batches.items() if kept >= number}
        if self._ahead > 0 and self._rollout.old_log_probs == OldLogProbs.proximal:
            log_probs = self._passes.log_probs(batches[number])
            batches[number] = [
                replace(document, **vars(of_document))
                for document, of_document in zip(batches[number], log_probs, strict=True)
            ]
        if self._makes_advantages_late:
            batches[number] = self._with_late_advantages(batches[number])
        self._batches = batches
        self._number = number
        if self.folder is not None:
            write_batch(self.folder, number, batches[number])

    @property
    def _makes_advantages_late(self) -> bool:
        """Return whether advantages are computed when training on a batch begins.

        They need the reference's or the critic's numbers of its tokens. Otherwise they are computed
        as soon as the batch is sampled.
        """
        return self.penalty is not None or self.estimator.gae is not None

    def _with_late_advantages(self, documents: list[Document]) -> list[Document]:
        """Return the documents of a batch on which training begins, with their advantages."""
        penalty = self._present_penalty()
        if penalty is not None:
            documents = self._passes.with_kl_reward(documents, penalty)
        if self.estimator.gae is not None:
            values = self._passes.measured(documents, self.trained.values)
            documents = with_gae(documents, values, self.estimator.gae, penalty)
        else:
            groups = in_groups(documents, self._rollout.group_size)
            advantages = advantages_of(groups, self.estimator, self.prompt)
            documents = [
                replace(document, advantages=of_document)
                for document, of_document in zip(documents, advantages, strict=True)
            ]
        if penalty is not None and self.adaptive_kl is not None:
            # Last, so that a batch that fails above is not counted twice in a resumed run.
            counted = [document for document in documents if not document.left_out]
            self.adaptive_kl.add(sum_of_kl(counted, penalty), len(counted))
        return documents

    def _present_penalty(self) -> KL | None:
        """Return the penalty on the rewards of a batch, with the coefficient to which the batch
        before has moved it."""
        if self.penalty is None or self.adaptive_kl is None:
            return self.penalty
        self.adaptive_kl.adapt()
        return replace(self.penalty, coefficient=self.adaptive_kl.coefficient)

    def _begin_sampling(self, number: int) -> None:
        """Begin to sample a batch from the present policy, unless every prompt is retired.

        Waits for an earlier batch first: a sampler writes one batch at a time.
        """
        self._finish_sampling()
        if self.all_retired:
            return
        prompt_numbers = self._prompt_numbers(self._next_prompt, self._rollout.prompts_per_batch)
        self._pending = _PendingBatch(number, prompt_numbers, self._sample(prompt_numbers))

    def _prompt_numbers(self, first: int, count: int) -> list[int]:
        """Return the numbers of the next `count` prompts, from `first` on, that are not retired.

        Each pass over the task numbers its rows anew, so several numbers stand for one row.
        """
        if not self._retired:
            return list(range(first, first + count))
        numbers: list[int] = []
        number = first
        while len(numbers) < count:
            if self.task.task.row(number) not in self._retired:
                numbers.append(number)
            number += 1
        return numbers

    def _sample(self, prompt_numbers: Sequence[int]) -> Callable[[], list[list[Document]]]:
        """Publish the weights to the sampler, and begin to complete this rank's share of prompts.

        Return a function for `_PendingBatch.wait_for_groups`.
        """
        size = self.layout.world_size
        with failing_together(self.layout):
            share = prompt_numbers[self.layout.rank :: size]
            requests = self._requests(share)
            unsampled = [
                request
                for number, request in zip(share, requests, strict=True)
                if number not in self._unscored
            ]
            with self._stopwatch.timed("sampling"):
                self.sampler.publish(self.trained.policy.weights, self.trained.num_updates)
            wait_for_completions = self._begin_completing(unsampled)

        def wait_for_groups() -> list[list[Document]]:
            with failing_together(self.layout):
                with self._stopwatch.timed("sampling"):
                    completions, answers = wait_for_completions()
                if len(unsampled) < len(requests):
                    completions = self._with_unscored(share, completions)
                    answers = None
                groups_of_share = [
                    completions[start : start + self._rollout.group_size]
                    for start in range(0, len(completions), self._rollout.group_size)
                ]
                self._rounds.append((prompt_numbers, groups_of_share))
                with self._stopwatch.timed("scoring"):
                    groups = scored_groups(self.task, requests, completions, self._rollout, answers)
            shares = gather_objects(groups, self.layout.world_group)
            # Rank r has completed the prompts at the places r, r + size, r + 2 size, ...
            in_order = [shares[i % size][i // size] for i in range(len(prompt_numbers))]
            sampled = [document for group in in_order for document in group]
            log_probs = self._passes.log_probs(
                sampled, self._recomputes_when_sampled, self.sampler.tolerance
            )
            documents = [
                Document(
                    **fields_of(document) | vars(of_document),
                    advantages=torch.zeros(document.num_trained),
                )
                for document, of_document in zip(sampled, log_probs, strict=True)
            ]
            return in_groups(documents, self._rollout.group_size)

        return wait_for_groups

    def _with_unscored(
        self, share: Sequence[int], completions: Sequence[Completion]
    ) -> list[Completion]:
        """Return the completions of this rank's prompts, those in `_unscored` at their places."""
        sampled = iter(completions)
        return [
            completion
            for number in share
            for completion in self._unscored.get(number)
            or [next(sampled) for _ in range(self._rollout.group_size)]
        ]

    def _keep_unscored(self) -> None:
        """Keep the completions of all ranks, of every round so far. Called by every rank."""
        size = self.layout.world_size
        for shares in zip(*gather_objects(self._rounds, self.layout.world_group), strict=True):
            prompt_numbers = shares[0][0]
            for place, number in enumerate(prompt_numbers):
                self._unscored[number] = shares[place % size][1][place // size]

    def _requests(self, prompt_numbers: Sequence[int]) -> list[Request]:
        """Return a request for `group_size` completions of each prompt, with the prompt's seed."""
        prompts = [self.task.prompt(number) for number in prompt_numbers]
        seeds = [seed_of(self.seed, number) for number in prompt_numbers]
        return requests_of(self.task, prompts, self._rollout.group_size, seeds)

    def _begin_completing(
        self, requests: list[Request]
    ) -> Callable[[], tuple[list[Completion], list[Answer] | None]]:
        """Return a function that returns the completions of this rank's requests, and their
        answers if they are decoded already.

        With `rollout.max_staleness` a background thread begins to write the completions now, and
        the function waits for it. Otherwise they are written when the function is called.
        """

        def complete_now() -> tuple[list[Completion], None]:
            return complete_all(self.task, self.sampler, requests, self.layout), None

        def complete_in_background() -> tuple[list[Completion], list[Answer]]:
            # ONE_PROCESS, since this thread must not exchange anything with other ranks: the main
            # thread does so at the same time. It also decodes the texts, which so costs training
            # no time.
            completions = complete_all(self.task, self.sampler, requests, ONE_PROCESS)
            return completions, self.task.answers(completions)

        if self._rollout.max_staleness is None:
            return complete_now
        self._background = in_background(complete_in_background)
        return self._background.result

    @property
    def _recomputes_when_sampled(self) -> bool:
        """Return whether the trainer computes old log-probs as soon as a batch is sampled.

        Proximal ones of a batch that is sampled ahead are computed by `_use`.
        """
        source = self._rollout.old_log_probs
        if source == OldLogProbs.proximal:
            return self._ahead == 0
        return source == OldLogProbs.training

    def _finish_sampling(self) -> None:
        """Wait for the batch that is being sampled, if there is one, and keep its documents.

        Groups without a signal are replaced or marked, as the configuration asks; advantages are
        computed, unless they come late; and solved prompts are retired.
        """
        pending = self._pending
        if pending is None:
            return
        self._pending = None
        self._rounds = []
        try:
            self._finish(pending)
        except VerifierLost:
            self._keep_unscored()
            raise

    def _finish(self, pending: _PendingBatch) -> None:
        first_round = pending.wait_for_groups()
        # Of all rounds, also of groups that are replaced below.
        prompt_numbers = list(pending.prompt_numbers)
        sampled_groups = list(first_round)

        def sample_further(count: int) -> list[list[Document]]:
            further_numbers = self._prompt_numbers(prompt_numbers[-1] + 1, count)
            further_groups = self._sample(further_numbers)()
            prompt_numbers.extend(further_numbers)
            sampled_groups.extend(further_groups)
            return further_groups

        groups, dropped_prompt_fraction = resample_uninformative(
            first_round,
            sample_further,
            self._rollout.max_sampling_rounds,
            self.estimator,
            self._rollout.mixed,
        )
        check_scores(groups)
        self._check_measures(groups)
        if self._may_note_small_rewards:
            note = small_rewards_note(groups)
            if note:
                self._may_note_small_rewards = False
                log.warning("note: %s", note)
        retired = self._retired | self._solved(sampled_groups)
        documents = self._completed(groups, dropped_prompt_fraction, len(retired))
        # The state changes only from here on. If sampling fails above, a resumed run asks the same
        # prompts again.
        self._unscored = {}
        self._retired = retired
        self._batches[pending.number] = documents
        self._next_prompt = prompt_numbers[-1] + 1

    def _check_measures(self, groups: list[list[Document]]) -> None:
        """Raise DataError where no completion of a batch has a measure that the estimator weighs;
        note it, once, where only some of them are missing, since a verifier may score a part."""
        names = self.estimator.weights
        measured = {name for group in groups for document in group for name in document.measures}
        missing = [name for name in names if name not in measured]
        if not missing or (self._noted_measures and len(missing) < len(names)):
            return
        self._noted_measures = True
        message = (
            f"no completion of a batch has {', '.join(missing)}, which advantage=gdpo weighs: its "
            f"advantage is 0. They have {', '.join(sorted(measured)) or 'no measures'}."
        )
        if len(missing) == len(names):
            raise DataError(f"{message} Use Estimator('gdpo', weights=...) of their names.")
        log.warning("note: %s", message)

    def _completed(
        self,
        groups: list[list[Document]],
        dropped_prompt_fraction: float | None,
        retired_prompts: int,
    ) -> list[Document]:
        """Return the documents of a batch with their advantages, unless these come late, and with
        the numbers of the batch."""
        documents = [document for group in groups for document in group]
        advantages = [document.advantages for document in documents]
        if not self._makes_advantages_late:
            advantages = advantages_of(groups, self.estimator, self.prompt)
        drops = self._rollout.uninformative == Uninformative.drop
        left_out = [drops and not has_signal(group, self.estimator) for group in groups]
        return [
            replace(
                document,
                advantages=advantages[place],
                left_out=left_out[place // self._rollout.group_size],
                dropped_prompt_fraction=dropped_prompt_fraction,
                dropped_group_fraction=sum(left_out) / len(groups) if drops else None,
                retired_prompts=None if self._rollout.retire_at is None else retired_prompts,
            )
            for place, document in enumerate(documents)
        ]

    def _solved(self, groups: list[list[Document]]) -> set[int]:
        """Return the rows of the prompts to retire: at least `retire_at` of their completions are
        right."""
        share = self._rollout.retire_at
        if share is None:
            return set()
        return {self.task.task.row(group[0].group) for group in groups if is_solved(group, share)}


def _saved(completion: Completion) -> dict[str, object]:
    """Return a completion as a checkpoint holds it. Those of conversations are not kept."""
    fields = dict(vars(completion))
    del fields["conversation"]
    return fields


def _in_one_form(name: str, sampling: SamplingSettings) -> object:
    """Return a setting of sampling: texts as a list, and no top_p where it leaves out nothing."""
    value = getattr(sampling, name)
    if name == "stop":
        return [*value]
    return None if name == "top_p" and value == 1 else value

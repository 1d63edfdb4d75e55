"""Makes the rollouts that a policy is trained on, and its evaluator of held-out prompts."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.assembly.data import record_rollouts
from pgtoolkit.assembly.loss import penalty_on_rewards
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.assembly.preview import notes_on_ends, notes_on_rows
from pgtoolkit.assembly.recorded_rollouts import estimator_of, recorded_rollouts
from pgtoolkit.config.counts import POSITIONS, limits_of_documents
from pgtoolkit.config.evaluation_sets import (
    HeldOut,
    held_out_sets,
    place_of_set,
    watched,
    with_keys_of_set,
)
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.ranks.agreement import check_same, failing_together, read_once
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.evaluator import Evaluator, PromptSet, as_evaluated
from pgtoolkit.rollouts.recorded import RecordedRollouts
from pgtoolkit.rollouts.recorded_prompts import num_among
from pgtoolkit.rollouts.recording import recording_folder
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.rollouts.source import Source
from pgtoolkit.sampling.copies import CopySampler
from pgtoolkit.sampling.generation_settings import ignored_settings
from pgtoolkit.sampling.samplers import Sampler, TransformersSampler, check_sampled
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.settings import (
    SamplingSettings,
    TransformersSamplerSettings,
    VllmSamplerSettings,
)
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.declared import AutoOrBool
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.tasks.chat_template import chat_of
from pgtoolkit.tasks.prompts import TokenizedTask, check_turns
from pgtoolkit.tasks.settings import TaskSettings, TooLong
from pgtoolkit.tasks.shared_prompts import note_on_number, note_on_repeated, note_on_shared
from pgtoolkit.tasks.tasks import Task
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.state import write_settings

log = logging.getLogger("pgtoolkit")


class _Asked(NamedTuple):
    """Says how the prompts of a run are asked.

    by_transformers: whether this library samples. model: the option of the group `model`.
    max_steps: of the run.
    """

    sampling: SamplingSettings
    by_transformers: bool
    model: str
    max_steps: int


def source_of(
    config: Config,
    task: Task,
    module: PolicyGradientModule,
    longest_document: int,
    resume: bool,
    run_dir: Path | None,
    share_prompts: AutoOrBool = False,
) -> Source:
    """Return the rollouts that the module is trained on, from the start of the data.

    longest_document: in tokens.
    run_dir: of the run, which keeps the index of recorded rollouts; None: no index is kept.
    share_prompts: see `rollouts.steps.is_sharing`.
    """
    if isinstance(config.rollout, PolicyRolloutSettings):
        return _sampled_rollouts(
            config,
            config.rollout,
            task,
            module,
            resume,
            run_dir or Path(),
            share_prompts,
        )
    layout = module.layout
    tokenizer = module.policy.tokenizer
    tokenizer_and_ends = (tokenizer, end_tokens(module.model.generation_config, tokenizer))
    source = recorded_rollouts(
        config,
        module.loss,
        module.policy.vocabulary_size,
        longest_document,
        None,
        layout,
        run_dir,
        lambda: tokenizer_and_ends,
    )
    with failing_together(layout):
        if layout.rank == 0 and run_dir is not None:
            record_rollouts(run_dir, source.index)
    return source


def _sampled_rollouts(
    config: Config,
    rollout: PolicyRolloutSettings,
    task: Task,
    module: PolicyGradientModule,
    resume: bool,
    run_dir: Path,
    share_prompts: AutoOrBool,
) -> SampledRollouts:
    """Return rollouts of the policy in training, and print notes on its prompts and settings."""
    folder = None
    if rollout.save_path and module.layout.rank == 0:
        folder = recording_folder(rollout.save_path, resume)
    with failing_together(module.layout):
        limits = limits_of_documents(config, module.policy.max_positions)
        if module.reference is not None:
            words = "a kl.reference with max_position_embeddings >= "
            limits[words] = module.reference.max_positions
        tokenized = _tokenized_task(
            _Asked(
                rollout.sampling,
                config.sampler.name == "transformers",
                config.model.name,
                config.trainer.max_steps,
            ),
            config.task,
            task,
            module,
            limits,
            config.kl.reference_prompt,
        )
        notes = notes_on_ends(tokenized.ends, module.policy.vocabulary_size, rollout.stop)
        notes += _notes_on_template(tokenized)
        for note in [*notes, *notes_on_rows(tokenized, config.task)]:
            log.warning(f"note: {note}")
    _check_prompts(module.layout, "the task", task)
    is_async = rollout.max_staleness is not None
    make_sampler = functools.partial(
        _sampler, config.sampler, config.seed, config.trainer.device != "cpu"
    )
    sampling = replace(rollout.sampling, keep_top=config.sampler.keep_top)
    longest_document = min(limits.values())
    sampler = make_sampler(sampling, module, tokenized, longest_document, run_dir, is_async)
    ignored = ignored_settings(module.policy, rollout.sampling)
    if ignored and isinstance(config.model, HuggingFaceModelSettings):
        values = ", ".join(f"{name}={value}" for name, value in ignored.items())
        log.warning(
            f"note: {config.model.path}/generation_config.json suggests {values}, which is "
            "ignored: only rollout.temperature, rollout.top_p and rollout.top_k decide how "
            "completions are sampled."
        )
    penalty = penalty_on_rewards(config.kl)
    return SampledRollouts(
        tokenized,
        sampler,
        module,
        rollout,
        estimator_of(config.advantage, rollout, config.task),
        config.accumulation,
        config.seed,
        module.layout,
        folder,
        penalty=penalty,
        adaptive_kl=None if penalty is None else module.adaptive_kl,
        correction=module.loss.correction,
        share_prompts=share_prompts,
    )


def evaluator_of(
    config: Config,
    training_task: Task | None,
    module: PolicyGradientModule,
    source: Source | None,
    run_dir: Path,
) -> Evaluator:
    """Return the evaluator of a module's policy, and print notes on its sets of prompts.

    training_task: has the prompts that the policy is trained on; None without training, and for
        recorded rollouts.
    source: the rollouts that it is trained on, if it is.
    Raises ConfigError or DataError for a set whose prompts cannot be read, or are too long.
    """
    rollout = as_evaluated(config.evaluation, config.rollout)
    asked = _Asked(
        rollout.sampling,
        config.sampler.name == "transformers",
        config.model.name,
        config.trainer.max_steps,
    )
    limits = limits_of_documents(config, module.policy.max_positions, is_trained=False)
    with failing_together(module.layout):
        sets = [
            _prompt_set(
                asked,
                place_of_set(config, held_out),
                held_out,
                module,
                limits,
            )
            for held_out in held_out_sets(config)
        ]
        _note_on_sets(sets, training_task, source)
    for prompt_set in sets:
        _check_prompts(module.layout, f"evaluation set {prompt_set.name}", prompt_set.task.task)
    sampling = replace(rollout.sampling, keep_top=0)  # nothing is trained on these completions
    if isinstance(source, SampledRollouts) and isinstance(
        source.sampler, ServerSampler | CopySampler
    ):
        sampler = source.sampler.sampling_otherwise(sampling, source.state_dict)
    else:
        make_sampler = functools.partial(
            _sampler, config.sampler, config.seed, config.trainer.device != "cpu"
        )
        longest_document = min(limits.values())
        sampler = make_sampler(sampling, module, sets[0].task, longest_document, run_dir)
    return Evaluator(
        sets,
        sampler,
        module,
        rollout,
        module.layout,
        run_dir,
        config.evaluation.every,
        watched(config),
    )


def _note_on_sets(sets: list[PromptSet], training_task: Task | None, source: Source | None) -> None:
    """Print notes on chat templates, on prompts that training has too, and on repeated prompts."""
    if training_task is None:  # otherwise the same notes came with the prompts of training
        notes = [note for prompt_set in sets for note in _notes_on_template(prompt_set.task)]
        for note in dict.fromkeys(notes):
            log.warning(f"note: {note}")
    for prompt_set in sets:
        task = prompt_set.task.task
        shared = None
        if training_task is not None:
            shared = note_on_shared(prompt_set.name, task, prompt_set.count, training_task)
        elif isinstance(source, RecordedRollouts):
            num_shared = num_among(source.index.prompts.tolist(), prompt_set.task, prompt_set.count)
            shared = note_on_number(prompt_set.name, num_shared, prompt_set.count)
        repeated = note_on_repeated(prompt_set.name, task, prompt_set.count)
        for note in [shared, repeated]:
            if note is not None:
                log.warning(f"note: {note}")


def _prompt_set(
    asked: _Asked,
    place: str,
    held_out: HeldOut,
    module: PolicyGradientModule,
    limits: Mapping[str, int],
) -> PromptSet:
    """Return an evaluation set with its tokens.

    place: the key below which it has its task. limits: see `limits_of_documents`.
    """

    once = functools.partial(read_once, module.layout)
    try:
        task = make_task(held_out.task, held_out.seed, once, held_out=True)
        tokenized = _tokenized_task(asked, held_out.task, task, module, limits)
    except (ConfigError, DataError) as error:
        problem = with_keys_of_set(str(error), place)
        raise type(error)(f"evaluation set {held_out.name}: {problem}") from error
    for note in notes_on_rows(tokenized, held_out.task):
        log.warning(f"note: evaluation set {held_out.name}: {with_keys_of_set(note, place)}")
    count = min(held_out.prompts, task.num_prompts or held_out.prompts)
    return PromptSet(held_out.name, tokenized, count, held_out.seed)


def _tokenized_task(
    asked: _Asked,
    task_config: TaskSettings,
    task: Task,
    module: PolicyGradientModule,
    limits: Mapping[str, int],
    template: str | None = None,
) -> TokenizedTask:
    """Return a task with the policy's tokenizer, once the lengths of its prompts are checked.

    limits: see `limits_of_documents`. template: of the prompts that the reference reads, if they
        are other ones.
    Raises ConfigError or DataError for prompts that are too long, or conversations that the model
    has no tokens for.
    """
    tokenizer = module.policy.tokenizer
    chat = chat_of(task_config, tokenizer)
    longest_completion = asked.sampling.max_completion_length
    assert longest_completion is not None
    tokenized = TokenizedTask(
        task,
        tokenizer,
        end_tokens(module.model.generation_config, tokenizer),
        chat,
        asked.sampling.stop,
        module.policy.vocabulary_size,
        template,
        longest_completion,
        asked.max_steps,
    )
    unscaled = module.policy.unscaled_positions
    if asked.by_transformers and unscaled < min(limits.values()):
        # Sampled token by token, the first tokens would have other positions than in training.
        log.warning(
            f"note: documents have at most {unscaled} tokens. In a longer one the model's rotary "
            "positions (longrope) change for all tokens, so sampling token by token would not "
            "agree with training."
        )
        limits = {**limits, POSITIONS[asked.model]: unscaled}
    skips_long_prompts = getattr(task_config, "too_long", None) == TooLong.skip
    longest_prompt = getattr(task_config, "max_prompt_length", None)
    once = functools.partial(read_once, module.layout)
    tokenized.check_lengths(limits, longest_completion, skips_long_prompts, longest_prompt, once)
    check_turns(tokenized, task_config, asked.model)
    return tokenized


def _notes_on_template(tokenized: TokenizedTask) -> list[str]:
    return [] if tokenized.chat is None else tokenized.chat.notes(tokenized.ends)


def _check_prompts(layout: Layout, place: str, task: Task) -> None:
    """Raise RankLost where ranks, each of which completes its share of the prompts, have read
    different ones."""
    if layout.world_size > 1:
        rows = [(prompt.text, prompt.messages, prompt.answer) for prompt in task.rows()]
        check_same(layout, f"the prompts of {place}", zlib.crc32(repr(rows).encode()))


def _sampler(
    settings: TransformersSamplerSettings | VllmSamplerSettings,
    seed: int,
    on_gpu: bool,
    sampling: SamplingSettings,
    module: PolicyGradientModule,
    task: TokenizedTask,
    longest_document: int,
    run_dir: Path,
    is_async: bool = False,
) -> Sampler:
    if isinstance(settings, TransformersSamplerSettings):
        if settings.copies:
            return CopySampler(module.policy, sampling, settings, module.layout, run_dir)
        check_sampled(module.policy, settings)
        return TransformersSampler(module.policy, sampling, settings, is_async)
    with failing_together(module.layout):
        prompts = task.encode([task.prompt(number) for number in range(16)])
    return ServerSampler(
        Vllm(),
        sampling,
        settings,
        module,
        module.layout,
        prompts,
        longest_document,
        functools.partial(write_settings, module, merged=True),
        run_dir,
        seed=seed,
        on_gpu=on_gpu,
        is_async=is_async,
    )

"""What a policy's completions come from: the rollouts that it is trained on, and the evaluator of
held-out prompts."""

from __future__ import annotations

import functools
import logging
import zlib
from pathlib import Path

from pgtoolkit.config.counts import copies_of
from pgtoolkit.config.evaluation_sets import HeldOut, held_out_sets
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig
from pgtoolkit.config.schema_run import HuggingFaceModelConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig
from pgtoolkit.config.schema_tasks import Chat, TaskConfig, TooLong
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.ranks.agreement import check_same, failing_together, read_once
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.evaluator import (
    Evaluator,
    PromptSet,
    as_evaluated,
    asked_by_both,
    different,
)
from pgtoolkit.rollouts.policy_rollouts import PolicyRollouts
from pgtoolkit.rollouts.recorded import recorded_rollouts
from pgtoolkit.rollouts.recording import recording_folder
from pgtoolkit.rollouts.steps import Source
from pgtoolkit.sampling.copies import CopySampler
from pgtoolkit.sampling.samplers import Sampler, TransformersSampler, check_sampled
from pgtoolkit.sampling.sampling_settings import ignored_settings
from pgtoolkit.sampling.servers import ServerSampler
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.system.model_folder import end_tokens
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.chat_template import chat_of
from pgtoolkit.tasks.conversation import ConversationTask
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.preview import notes_on_rows
from pgtoolkit.tasks.prompts import TokenizedTask
from pgtoolkit.tasks.tasks import Task
from pgtoolkit.training.data import record_rollouts
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.state import write_settings

log = logging.getLogger("pgtoolkit")


def source_of(
    config: Config,
    task: Task,
    module: PolicyGradientModule,
    room: int,
    resume: bool,
    run_dir: Path | None,
) -> Source:
    """The rollouts that the module is trained on, from the start of the data. room: tokens of the
    longest document.

    run_dir: of the run, which keeps the index of recorded rollouts; None: none is kept.
    """
    rollout = config.rollout
    if isinstance(rollout, PolicyRolloutConfig):
        folder = None
        if rollout.save_path and module.layout.rank == 0:
            folder = recording_folder(rollout.save_path, resume)
        with failing_together(module.layout):
            if module.reference is not None:
                room = min(room, module.reference.max_positions)
            tokenized = _tokenized(
                config, config.task, task, module, room, config.kl.reference_prompt
            )
            for note in [*_notes_on_template(tokenized), *notes_on_rows(tokenized, config.task)]:
                log.warning(f"note: {note}")
        _check_prompts(module.layout, "the task", task)
        sampler = _sampler(config, module, tokenized, room, run_dir or Path())
        ignored = ignored_settings(module.policy, rollout)
        if ignored and isinstance(config.model, HuggingFaceModelConfig):
            values = ", ".join(f"{name}={value}" for name, value in ignored.items())
            log.warning(
                f"note: {config.model.path}/generation_config.json suggests {values}, which is "
                "ignored: completions are sampled as rollout.temperature and rollout.top_p say, "
                "and nothing else."
            )
        return PolicyRollouts(config, tokenized, sampler, module, module.layout, folder)
    layout = module.layout
    tokenizer = module.policy.tokenizer
    known = tokenizer, end_tokens(module.model.generation_config, tokenizer)
    vocabulary = module.policy.vocabulary_size
    source = recorded_rollouts(
        config, module.loss, vocabulary, room, None, layout, run_dir, lambda: known
    )
    with failing_together(layout):
        if layout.rank == 0 and run_dir is not None:
            record_rollouts(run_dir, source.index)
    return source


def evaluator_of(
    config: Config,
    trained: Task | None,
    module: PolicyGradientModule,
    source: Source | None,
    run_dir: Path,
) -> Evaluator:
    """What evaluates the policy of a module. trained: the prompts that it is trained on, if it is.
    source: likewise.

    Raises ConfigError or DataError for sets whose prompts cannot be read, or have no room.
    """
    evaluated, room = as_evaluated(config), module.policy.max_positions
    assert isinstance(evaluated.rollout, PolicyRolloutConfig)
    if config.sampler.name == "vllm":
        room = min(room, config.accumulation.max_tokens)
    with failing_together(module.layout):
        sets = [
            _prompt_set(evaluated, prompt_set, module, room) for prompt_set in held_out_sets(config)
        ]
        if trained is None:  # else training has said the same
            for note in dict.fromkeys(
                note for prompt_set in sets for note in _notes_on_template(prompt_set.task)
            ):
                log.warning(f"note: {note}")
        for prompt_set in sets:
            task = prompt_set.task.task
            if trained is not None and (count := asked_by_both(trained, task, prompt_set.count)):
                log.warning(
                    f"note: {count} of the {prompt_set.count} prompts of evaluation set "
                    f"{prompt_set.name} are also prompts of training: what is measured on those is "
                    "not held out."
                )
            # which may begin alike, and go on by the prompts' seeds
            if isinstance(task, ConversationTask):
                continue
            if count := prompt_set.count - len(
                different(map(task.prompt, range(prompt_set.count)))
            ):
                log.warning(
                    f"note: {count} of the {prompt_set.count} prompts of {prompt_set.name} repeat "
                    "one before."
                )
    for prompt_set in sets:
        _check_prompts(module.layout, f"evaluation set {prompt_set.name}", prompt_set.task.task)
    if isinstance(source, PolicyRollouts) and isinstance(
        source.sampler, ServerSampler | CopySampler
    ):
        sampler = source.sampler.sampling_otherwise(evaluated.rollout, source.state_dict)
    else:
        sampler = _sampler(evaluated, module, sets[0].task, room, run_dir)
    return Evaluator(sets, sampler, module, evaluated.rollout, module.layout, run_dir)


def _prompt_set(
    config: Config, chosen: HeldOut, module: PolicyGradientModule, room: int
) -> PromptSet:
    place = f"evaluation.sets.{chosen.name}" if config.evaluation.sets else "task"
    try:
        task = make_task(
            chosen.task, chosen.seed, functools.partial(read_once, module.layout), held_out=True
        )
        tokenized = _tokenized(config, chosen.task, task, module, room)
    except (ConfigError, DataError) as error:
        problem = (
            str(error)
            .replace("task.", f"{place}.")
            .replace("rollout.max_comp", "evaluation.max_comp")
        )
        raise type(error)(f"evaluation set {chosen.name}: {problem}") from error
    for note in notes_on_rows(tokenized, chosen.task):
        of_set = note.replace("task.", f"{place}.").replace(
            "rollout.max_comp", "evaluation.max_comp"
        )
        log.warning(f"note: evaluation set {chosen.name}: {of_set}")
    return PromptSet(
        chosen.name, tokenized, min(chosen.prompts, task.num_prompts or chosen.prompts), chosen.seed
    )


def _tokenized(
    config: Config,
    chosen: TaskConfig,
    task: Task,
    module: PolicyGradientModule,
    room: int,
    template: str | None = None,
) -> TokenizedTask:
    """A task as the policy's tokenizer sees it, its prompts measured against the room for a
    document."""
    assert isinstance(config.rollout, PolicyRolloutConfig)
    tokenizer = module.policy.tokenizer
    ends = end_tokens(module.model.generation_config, tokenizer)
    chat = chat_of(chosen, tokenizer)
    vocabulary = module.policy.vocabulary_size
    longest = config.rollout.max_completion_length
    tokenized = TokenizedTask(
        task,
        tokenizer,
        ends,
        chat,
        config.rollout.stop,
        vocabulary,
        template,
        longest,
        config.trainer.max_steps,
    )
    unscaled = module.policy.unscaled_positions
    if config.sampler.name == "transformers" and unscaled < room:
        # One token after the other, a document would begin with other positions than a forward pass
        # of it has.
        log.warning(
            f"note: documents have at most {unscaled} tokens, since the model's rotary positions "
            "(longrope) change for all tokens of a longer one: it could not be sampled token by "
            "token as it is trained."
        )
        room = unscaled
    skip = getattr(chosen, "too_long", None) == TooLong.skip
    longest_prompt = getattr(chosen, "max_prompt_length", None)
    once = functools.partial(read_once, module.layout)
    tokenized.check_lengths(room, longest, skip, longest_prompt, once)
    if isinstance(task, ConversationTask):
        if (
            chat is None
            and config.model.name == "huggingface"
            and getattr(chosen, "chat", Chat.never) == Chat.auto
        ):
            raise ConfigError(
                refusal(
                    setting="task.chat=auto",
                    needs="a chat template of the model's",
                    got="none",
                    reason="A conversation's messages have roles.",
                    use="task.chat=never, with which they are their contents",
                )
            )
        tokenized.between.check(task.prompt(0).messages or ())
    return tokenized


def _notes_on_template(tokenized: TokenizedTask) -> list[str]:
    return [] if tokenized.chat is None else tokenized.chat.notes(tokenized.ends)


def _check_prompts(layout: Layout, place: str, task: Task) -> None:
    """RankLost where ranks, each of which has its share of the prompts completed, have read other
    ones."""
    if layout.world_size > 1:
        rows = [(prompt.text, prompt.messages, prompt.answer) for prompt in task.rows()]
        check_same(layout, f"the prompts of {place}", zlib.crc32(repr(rows).encode()))


def _sampler(
    config: Config, module: PolicyGradientModule, task: TokenizedTask, room: int, run_dir: Path
) -> Sampler:
    if copies_of(config):
        return CopySampler(config, module.policy, module.layout, run_dir)
    if isinstance(config.sampler, TransformersSamplerConfig):
        check_sampled(module.policy, config.sampler)
        return TransformersSampler(module.policy, config)
    with failing_together(module.layout):
        prompts = task.encode([task.prompt(number) for number in range(16)])
    settings = functools.partial(write_settings, module, merged=True)
    return ServerSampler(Vllm(), config, module, module.layout, prompts, room, settings, run_dir)

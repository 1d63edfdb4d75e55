"""The page of `pgtk check`: what a configuration would compute, section by section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from pgtoolkit.config.counts import (
    ReadData,
    ReadDocuments,
    ReadPrompts,
    documents_per_step,
    documents_sampled,
    longest_document,
)
from pgtoolkit.config.evaluation_sets import held_out_sets, is_on, sampling_in_words, watched
from pgtoolkit.config.keys import KEYS, OWN_CODE, has_effect, is_inside, option_help
from pgtoolkit.config.models import computes_again, shares_prompts, vocabulary_size
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import as_typed, chosen, family_of_config, short_name, typed_key
from pgtoolkit.config.schema import Config, default_options
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.family import Family, configured
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import FULL_KINDS, KL
from pgtoolkit.ranks.environment import AXES, world_size
from pgtoolkit.rollouts.batch_counts import (
    documents_per_batch,
    saves_a_fifth,
    steps_ahead,
    steps_of_batch,
    tokens_of_group,
)
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.functions import documented, lacks, parameters_in_file
from pgtoolkit.system.report import plural, text
from pgtoolkit.tasks.settings import TooLong

_MEBIBYTE = 2**20


def plan_sections(
    config: Config,
    defaults: Config,
    overrides: list[str],
    read: ReadData | None = None,
    in_sets: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[str, list[str]]]:
    """Return (title, lines) of each section of the plan.

    config, defaults: resolved configurations. overrides: what was typed, which the defaults lack.
    read: what prompts or recorded documents have told, where they were read. in_sets: see
        `evaluations`.
    """
    typed, followed = differences(config, defaults, overrides)
    return [
        *computed(config, read, in_sets),
        ("Changed from the defaults", typed or ["nothing"]),
        ("Follows from that", followed),
    ]


def computed(
    config: Config,
    read: ReadData | None = None,
    in_sets: Mapping[str, int] = MappingProxyType({}),
) -> list[tuple[str, list[str]]]:
    """Return (title, lines) of each section on what a run computes."""
    return [
        ("Loss", equation(config)),
        ("Reference", [*reference(config)] if config.kl.kind != "none" else []),
        ("Critic", [*critic(config)] if config.advantage.estimator == "gae" else []),
        ("Step", list(arithmetic(config, read))),
        ("Logits", [logits_memory(config, read)]),
        ("Evaluation", [*evaluations(config, in_sets)] if is_on(config) else []),
    ]


def equation(config: Config) -> list[str]:
    """Return the lines that define the loss of a step, with the configuration's numbers."""
    loss = chosen(config, "loss")
    title = f"{loss}, {chosen(config, 'aggregation')}"
    summed = "l_t"
    penalties = [*_penalties(config)]
    correction = configured(config.correction, CORRECTIONS)
    if correction is not None:
        title += f", {correction.name}"
        summed = "rho_t l_t"
        if penalties:
            summed = "(rho_t l_t + penalties)"
            penalties[0] = f"penalties = {penalties[0].removeprefix('      + ').strip()}"
    family = family_of_config(config)
    surrogate = documented(loss) or f"as {loss} computes it"
    if family is not None:
        surrogate = family.equation
    weight, symbols, sum_of_weights = _weight(config)
    equation_of_token = [] if family is None and lacks(loss) else [f"l_t = {surrogate}"]
    lines = [
        f"{title}: sum over trained tokens of w_t {summed}",
        *equation_of_token,
        *_top_entropy(config),
        *penalties,
        f"w_t = {weight},  {symbols}",
        f"sum of w_t over a step = {sum_of_weights}",
    ]
    if correction is not None:
        lines.append(f"rho_t = {correction.equation}; without gradient")
    are_read = _reads_advantages(config, family)
    if are_read:
        lines.append(f"advantage ({chosen(config, 'advantage')}): {_advantage_in_words(config)}")
    if config.kl.kind != "none" and config.kl.target is not None:
        lines.append(_adaptive_coefficient(config))
    if are_read and config.kl.kind != "none" and config.kl.place == "reward":
        k_t = _kl_term(config).replace("p_t", "o_t")
        less = f"less the sum over trained tokens of {k_t}"
        if config.advantage.estimator == "gae":
            less = f"less {k_t} at each trained token t"
        lines.append(
            f"reward of the advantage: {less},  o_t = old log-prob, f_t = log-prob under the "
            "reference"
        )
    return lines


def _reads_advantages(config: Config, family: Family | None) -> bool:
    """Return whether the loss or its weights read the advantages, as far as that is known without
    importing own code. family: of the configuration; None for own code."""
    reducer = config.aggregation.reducer
    if config.aggregation.mode == "balanced" or (reducer and _may_ask_for_advantages(reducer)):
        return True
    if isinstance(family, FunctionFamily):
        return "advantages" in family.asked
    return family is not None or _may_ask_for_advantages(chosen(config, "loss"))


def _may_ask_for_advantages(path: str) -> bool:
    """Return False for a function of one's own without a parameter for them."""
    parameters = parameters_in_file(path)
    return parameters is None or "advantages" in parameters


def _weight(config: Config) -> tuple[str, str, str]:
    """Return the weight w_t, what its symbols stand for, and the sum of w_t over a step."""
    aggregation = config.aggregation
    mode = AGGREGATIONS[aggregation.mode]
    if aggregation.reducer is None:
        divisor = text(aggregation.divisor)
        return (
            mode.equation,
            mode.symbols.format(divisor=divisor),
            mode.total.format(divisor=divisor),
        )
    symbols = "a function of your own"
    if chosen(config, "aggregation") != aggregation.reducer:
        symbols = f"in the place of aggregation={aggregation.mode}"
    return f"{aggregation.reducer}(...)", symbols, "whatever it returns"


def _kl_term(config: Config) -> str:
    assert config.kl.coefficient is not None  # `validate` refuses a penalty without one
    return KL(config.kl.kind, config.kl.coefficient, config.kl.beta_of_kind).equation


def _adaptive_coefficient(config: Config) -> str:
    return (
        f"coefficient of the KL: c = {config.kl.coefficient:g} at first; after each batch of n "
        f"documents c <- c (1 + clip(KL / {config.kl.target:g} - 1, -0.2, 0.2) n / "
        f"{config.kl.horizon})"
    )


def _top_entropy(config: Config) -> Iterator[str]:
    """Yield which tokens the surrogate counts, where it does not count all."""
    fraction = config.entropy.top_fraction
    if fraction is not None:
        yield (
            f"      where H_t is at least the {1 - fraction:g} quantile of the step's trained "
            "tokens, else 0; H_t = entropy of the policy at token t, from a forward pass over the "
            "step before"
        )


def _penalties(config: Config) -> Iterator[str]:
    """Yield the terms of the loss besides the surrogate."""
    if config.kl.kind != "none" and config.kl.place == "loss":
        line = f"      + {_kl_term(config)},  f_t = log-prob under the reference"
        if config.kl.kind in FULL_KINDS:
            line += ", f_tv and p_tv those of token v of the vocabulary there"
        yield line
    if config.entropy.coefficient:
        coefficient = config.entropy.coefficient
        yield f"      - {coefficient:g} H_t,  H_t = entropy of the policy at token t"


def _advantage_in_words(config: Config) -> str:
    estimator = config.advantage.estimator
    if estimator == "custom":
        return "a function of your own"
    return option_help("advantage", estimator)


def reference(config: Config) -> Iterator[str]:
    """Yield where the reference's log-probs come from, and what they cost."""
    source = config.kl.reference
    update_every = config.kl.update_every
    if source == "recorded":
        yield "the column ref_log_probs of the recorded rollouts; no second model"
        return
    if update_every is not None:
        line = (
            f"the weights that the run starts from; after every {update_every} updates "
            f"{config.kl.update_rate:g} of the way towards the policy's"
        )
        if _passes(config) > 1:
            line += ", at the end of the last pass over a batch"
        yield line
    elif source == "initial":
        yield "the weights that the run starts from, frozen"
    else:
        yield f"{source}, frozen"
    share = ""
    if source == "initial":
        fraction = "a quarter" if computes_again(config) else "a third"
        share = f", about {fraction} of the arithmetic of an update"
    yield f"time: its forward pass of each micro-batch{share}"
    if source == "initial" and config.model.lora_rank is not None:
        yield "memory: none, since it is the model in training without its adapters"
    else:
        number_type = "in float32"
        if update_every is None:
            number_type = "matrices in bfloat16 take half"
        yield f"memory: a second model, shared by ranks that share a model; {number_type}"


def critic(config: Config) -> Iterator[str]:
    """Yield what the critic starts from, what it learns, and what it costs."""
    start = config.critic.path or "the weights that the policy starts from"
    yield f"{start}, with a head of one number V_t that starts at 0"
    clip = config.critic.clip
    loss = "(V_t - return_t)^2"
    if clip is not None:
        clipped = f"clip(V_t, V_old - {clip:g}, V_old + {clip:g})"
        loss = f"max({loss}, ({clipped} - return_t)^2)"
    yield f"loss: sum over trained tokens of w_t {loss} / 2"
    yield (
        "time: what an update of the policy takes, and a forward pass of each batch; memory: 16 "
        "bytes a weight"
    )


def arithmetic(config: Config, read: ReadData | None = None) -> Iterator[str]:
    """Yield the numbers of documents, micro-batches and steps.

    read: what prompts or recorded documents have told, where they were read.
    """
    yield from _batch(config)
    max_tokens = config.accumulation.max_tokens
    prompt, completion = longest_document(config)
    of_first = ""
    if prompt is None and isinstance(read, ReadPrompts):
        prompt = read.longest
        of_first = "" if read.are_all else f", by the first {read.num_prompts} prompts"
    longest = None
    if isinstance(read, ReadDocuments):
        longest = read.longest
        of_first = "" if read.are_all else f", by {read.num_documents} that were read"
        yield f"longest document: {longest} tokens{of_first}"
    elif prompt and completion:
        longest = prompt + completion
        yield (
            f"longest document: prompt {prompt} + completion {completion} = {longest} tokens"
            f"{of_first}"
        )
    else:
        yield (
            "longest document: known once the run has read its data; it must fit in "
            f"{max_tokens} tokens"
        )
    processes = world_size(config.parallelism)
    if processes > 1:
        axes = {axis: getattr(config.parallelism, axis) for axis in AXES}
        yield f"processes: {processes}; " + ", ".join(
            f"{axis}={size}" for axis, size in axes.items() if size > 1
        )
    yield from _step(config, None if of_first else longest)
    if config.model.share_prompts is not False:
        yield f"shared prompts: {_shared_prompts(config, prompt, completion)}"


def _shared_prompts(config: Config, prompt: int | None, completion: int | None) -> str:
    """Return what sharing saves. prompt, completion: tokens of the longest ones, if known."""
    share = shares_prompts(config)
    if share is False:
        return "no; model.share_prompts=true would be refused with the reason"
    if share == "auto" and config.model.dtype == "float32":
        return "no, since the model computes in float32; model.share_prompts=true shares them"
    rollout = config.rollout
    if not (isinstance(rollout, PolicyRolloutSettings) and prompt and completion):
        return "what they save is known once the run has read its data"
    size = rollout.group_size
    shared, alone = tokens_of_group(size, prompt, completion)
    line = (
        f"{prompt} + {size} x {completion} = {shared} tokens for a prompt with its completions in "
        f"place of {alone}, if all are of the greatest length"
    )
    if share != "auto":
        return line
    if not saves_a_fifth(shared, alone):
        line += "; not shared then, since that is less than a fifth"
    return f"on a GPU {line}"


def _batch(config: Config) -> Iterator[str]:
    """Yield a batch's size, the prompts that it leaves out, and how early it is sampled."""
    rollout = config.rollout
    if not isinstance(rollout, PolicyRolloutSettings):
        return
    line = (
        f"rollouts: {rollout.prompts_per_batch} prompts x {rollout.group_size} completions = "
        f"{documents_per_batch(rollout)} documents a batch"
    )
    further_rounds = rollout.max_sampling_rounds - 1
    if rollout.uninformative == "drop":
        line += ", less those of prompts whose completions all score the same"
    elif further_rounds > 0:
        line += f", those without signal replaced in at most {further_rounds} further rounds"
    if rollout.retire_at is not None:
        line += (
            f"; a prompt is not asked again once {rollout.retire_at:g} of its completions are right"
        )
    yield line
    if config.accumulation.docs_per_step:
        ahead = steps_ahead(rollout, config.accumulation)
        if ahead > 0:
            kind = "lag" if rollout.lag else "overlap"
            before = f"{plural(ahead, 'step')} before the one that begins it"
            yield f"{kind}: a batch is sampled {before}"


def _passes(config: Config) -> int:
    """Return how often a batch is trained."""
    rollout = config.rollout
    return rollout.passes if isinstance(rollout, PolicyRolloutSettings) else 1


def _step(config: Config, longest: int | None) -> Iterator[str]:
    """Yield the size of a step and of the run.

    longest: tokens of the longest document; None where only the data knows.
    """
    accumulation = config.accumulation
    max_tokens = accumulation.max_tokens
    if accumulation.docs_per_step == 0:
        micro_batches = text(accumulation.micro_batches_per_step)
        yield f"step: {micro_batches} micro-batches of at most {max_tokens} tokens"
        return
    documents = documents_per_step(config)
    ranks = config.parallelism.data_parallel
    line = f"step: {documents} documents"
    if longest and max_tokens >= longest:
        documents_of_rank = math.ceil(documents / ranks)
        micro_batches = math.ceil(documents_of_rank / (max_tokens // longest))
        line += f", in {micro_batches} micro-batches of at most {max_tokens} tokens"
        line += " on each data rank" if ranks > 1 else ""
    rollout = config.rollout
    passes = _passes(config)
    if isinstance(rollout, PolicyRolloutSettings):
        steps_per_batch = rollout.prompts_per_batch * rollout.group_size / documents
        if accumulation.last_step != "carry":
            steps_per_batch = steps_of_batch(rollout, accumulation)
        noun = "step" if steps_per_batch == 1 else "steps"
        line += f"; {steps_per_batch:g} {noun} per batch of rollouts"
    if passes > 1:
        line += f", in {passes} passes over it"
    yield line
    line = f"run: at most {config.trainer.max_steps} steps, {documents_sampled(config)} documents"
    if passes > 1:
        line += f", each trained {passes} times"
    yield line


def evaluations(config: Config, in_sets: Mapping[str, int] = MappingProxyType({})) -> Iterator[str]:
    """Yield what is measured on which prompts, how often, and how many completions that costs.

    in_sets: how many prompts sets have, by their names, where they were read; of one whose prompts
        never end, how many it asks.
    """
    every = config.evaluation.every
    max_steps = config.trainer.max_steps
    completions_per_prompt = config.evaluation.completions_per_prompt
    times = 1 + math.ceil(max_steps / every)
    yield f"every {every} steps, before the first and after the last: {times} times"
    completions = 0
    for held_out in held_out_sets(config):
        prompts = min(held_out.prompts, in_sets.get(held_out.name, held_out.prompts))
        completions_of_set = prompts * completions_per_prompt
        if held_out.name not in in_sets or getattr(held_out.task, "too_long", "") == TooLong.skip:
            how_many = f"at most {prompts}"
        else:
            how_many = f"all {prompts}" if prompts < held_out.prompts else str(prompts)
        yield (
            f"{held_out.name}: {held_out.source}; {how_many} prompts x "
            f"{completions_per_prompt} completions = {completions_of_set}"
        )
        completions += completions_of_set
    yield f"sampled {sampling_in_words(config)}"
    line = f"in total at most {times * completions} completions"
    trained = documents_sampled(config)
    if trained and config.rollout.name == "policy":
        line += f", besides {trained} documents of training"
    yield line
    best = watched(config)
    if best is not None:
        line = f"the best checkpoint is kept by {'/'.join(best)}"
        stop_at = config.trainer.stop_at
        if stop_at is not None:
            line += f"; the run ends once that is {text(stop_at)} or more"
        yield line


def logits_memory(config: Config, read: ReadData | None = None) -> str:
    """Return how large the largest piece of logits is that exists at once.

    read: what prompts or recorded documents have told, where they were read.
    """
    max_tokens = config.accumulation.max_tokens
    vocabulary = vocabulary_size(config.model, config.task)
    if vocabulary is None and isinstance(read, ReadPrompts) and config.model.name == "tiny":
        vocabulary = read.vocabulary
    if vocabulary is None:
        return "unknown until the model is loaded"
    are_halves = (
        config.model.name == "huggingface"
        and config.model.dtype in ("bfloat16", "float16")
        and not config.model.fp32_lm_head
    )
    size = 2 if are_halves else 4
    mebibytes = max_tokens * vocabulary * size / _MEBIBYTE
    line = (
        f"{max_tokens} tokens x {vocabulary} entries of the vocabulary x {size} bytes = "
        f"{mebibytes:.3g} MiB per micro-batch"
    )
    if config.loss.num_splits > 1:
        return f"{line}, in {config.loss.num_splits} splits"
    if config.kernel.implementation not in ("auto", "fused_linear"):
        return line
    limit = config.kernel.logits_memory_mb
    size_of_parts = f"of at most {limit} MiB" if limit else "that fit into the device's memory"
    return f"{line}, made one after the other in parts {size_of_parts}"


def differences(
    config: Config, defaults: Config, overrides: list[str]
) -> tuple[list[str], list[str]]:
    """Return a line for each option and key whose value is not the default's: first those that
    overrides name, then the others.

    The others are what an option, an experiment or a sweep's file sets, and computed defaults,
    without those that have no effect in this configuration.
    """
    values = as_typed(dict(leaves(plain_config(config))))
    drift = config_drift(as_typed(dict(leaves(plain_config(defaults)))), values)
    default_option = {**default_options(), "experiment": "null", "debug": "null"}
    choices: dict[str, str] = {}
    typed_keys: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        key = typed_key(short_name(key), config)
        if key in OWN_CODE:
            value = chosen(config, key)
        if key in default_option and not value.startswith("{"):
            choices[key] = value
        else:
            typed_keys.append(key)
    typed = [
        _difference(group, option, default_option[group])
        for group, option in choices.items()
        if option != default_option[group]
    ]
    names_of_options = {key.name for key in KEYS if key.option and key.group in choices}
    followed = []
    for name in values:
        if name not in drift or name in names_of_options:
            continue
        default, value = map(text, drift[name])
        line = _difference(name, value, default)
        if any(is_inside(name, key) for key in typed_keys):
            typed.append(line)
        elif has_effect(name, config):
            followed.append(line)
    return typed, followed


def _difference(name: str, value: str, default: str) -> str:
    return f"{name} = {value}" + ("" if default == "null" else f" (default {default})")

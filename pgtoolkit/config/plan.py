"""What a configuration would do: equation, a step's arithmetic, when each batch is sampled, whether
code compiles."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pgtoolkit.config.evaluation_sets import held_out_sets, how_sampled, is_on, watched
from pgtoolkit.config.keys import KEYS, OWN_CODE, is_inside, option_help
from pgtoolkit.config.models import sizes, vocabulary_size
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.own_code import as_typed, chosen, short_name, typed_key
from pgtoolkit.config.schema import Config, default_options
from pgtoolkit.config.schema_rollouts import PolicyRolloutConfig, RolloutConfig
from pgtoolkit.config.schema_samplers import TransformersSamplerConfig
from pgtoolkit.config.schema_step import AccumulationConfig
from pgtoolkit.config.schema_tasks import GeneratedTaskConfig
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES, Family
from pgtoolkit.losses.family import configured
from pgtoolkit.losses.kl import FULL_KINDS, KL
from pgtoolkit.ranks.environment import AXES, world_size
from pgtoolkit.runs.directory import config_drift
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.report import text

MEBIBYTE = 2**20

_RATE = 3e14
"""Operations a second of an update, as measured on an H200: 8 a weight and token."""

_SAVED, _COST = 0.2, 10
"""Which part of the updates' time is saved at least; the seconds that compiling takes where nothing
is cached."""


def plan_sections(
    config: Config, defaults: Config, overrides: list[str]
) -> list[tuple[str, list[str]]]:
    """Return (title, lines) of each section of the plan.

    config, defaults: resolved configurations. overrides: those by which the one differs from the
        other.
    """
    typed, followed = differences(config, defaults, overrides)
    return [
        ("Loss", equation(config)),
        ("Reference", [*reference(config)] if config.kl.kind != "none" else []),
        ("Critic", [*critic(config)] if config.advantage.estimator == "gae" else []),
        ("Step", list(arithmetic(config))),
        ("Logits", [logits_memory(config)]),
        ("Evaluation", [*evaluations(config)] if is_on(config) else []),
        ("Changed from the defaults", typed or ["nothing"]),
        ("Follows from that", followed),
    ]


def equation(config: Config) -> list[str]:
    """The loss of a step, with its numbers."""
    aggregation = config.aggregation
    family, weighting = family_of_config(config), AGGREGATIONS[aggregation.mode]
    own, weights = chosen(config, "loss"), chosen(config, "aggregation")
    weight, where, total = weighting.equation, weighting.where, weighting.total
    if aggregation.reducer is not None:
        weight = f"{aggregation.reducer}(...)"
        where = "a function of your own"
        if weights != aggregation.reducer:
            where = f"in the place of aggregation={aggregation.mode}"
        total = "whatever it returns"
    penalties = []
    of_reward = []
    if config.kl.kind != "none":
        assert config.kl.coefficient is not None  # which `validate` refuses
        k_t = KL(config.kl.kind, config.kl.coefficient).equation
        of_row = (
            ", f_tv and p_tv those of token v of the vocabulary there"
            if config.kl.kind in FULL_KINDS
            else ""
        )
        if config.kl.place == "reward":
            of_reward.append(
                "reward of the advantage: less the sum over trained tokens of "
                f"{k_t.replace('p_t', 'o_t')},  o_t = old log-prob, f_t = log-prob under the "
                "reference"
            )
        else:
            penalties.append(f"      + {k_t},  f_t = log-prob under the reference{of_row}")
    if config.entropy.coefficient:
        penalties.append(
            f"      - {config.entropy.coefficient:g} H_t,  H_t = entropy of the policy at token t"
        )
    correction = configured(config.correction, CORRECTIONS)
    named = "" if correction is None else f", {correction.name}"
    factor = [] if correction is None else [f"rho_t = {correction.equation}; without gradient"]
    return [
        f"{own}, {weights}{named}: sum over trained tokens of w_t {'rho_t ' if factor else ''}l_t",
        f"l_t = {f'as {own} computes it' if family is None else family.equation}",
        *penalties,
        f"w_t = {weight},  {where.format(divisor=text(aggregation.divisor))}",
        f"sum of w_t over a step = {total.format(divisor=text(aggregation.divisor))}",
        *factor,
        f"advantage ({chosen(config, 'advantage')}): {_advantage_in_words(config)}",
        *of_reward,
    ]


def _advantage_in_words(config: Config) -> str:
    advantage = config.advantage.estimator
    return (
        "a function of your own" if advantage == "custom" else option_help("advantage", advantage)
    )


def family_of_config(config: Config) -> Family | None:
    """The family of a configuration; None for one of the user's own, which only a run imports."""
    return None if config.loss.name == "custom" else configured(config.loss, FAMILIES)


def reference(config: Config) -> Iterator[str]:
    """Where the reference's log-probs come from, and what they cost."""
    model, chosen = config.model, config.kl.reference
    if chosen == "recorded":
        yield "the column ref_log_probs of the recorded rollouts; no second model"
        return
    if (every := config.kl.update_every) is None:
        yield (
            "the weights that the run starts from, frozen"
            if chosen == "initial"
            else f"{chosen}, frozen"
        )
    else:
        yield (
            f"the weights that the run starts from; after every {every} updates "
            f"{config.kl.update_rate:g} of the way towards the policy's"
        )
    share = "a quarter" if model.gradient_checkpointing else "a third"
    share = f", about {share} of the arithmetic of an update" if chosen == "initial" else ""
    yield f"time: its forward pass of each micro-batch{share}"
    if chosen == "initial" and model.lora_rank is not None:
        yield "memory: none, since it is the model in training without its adapters"
    else:
        halved = "matrices in bfloat16 take half" if every is None else "in float32"
        yield f"memory: that of a second model, which ranks that share a model share; {halved}"


def critic(config: Config) -> Iterator[str]:
    """What the critic starts from, what it learns, and what it costs."""
    chosen = config.critic
    start = "the weights that the policy starts from" if chosen.path is None else chosen.path
    yield f"{start}, with a head of one number V_t that starts at 0"
    loss = "(V_t - return_t)^2"
    if chosen.clip is not None:
        loss = (
            f"max({loss}, (clip(V_t, V_old - {chosen.clip:g}, V_old + {chosen.clip:g}) - "
            "return_t)^2)"
        )
    yield f"loss: sum over trained tokens of w_t {loss} / 2"
    yield (
        "time: what an update of the policy takes, and a forward pass of each batch; memory: 16 "
        "bytes a weight"
    )


def arithmetic(config: Config) -> Iterator[str]:
    """Documents, micro-batches and steps."""
    rollout, accumulation, steps = config.rollout, config.accumulation, config.trainer.max_steps
    docs, room, batch = (
        accumulation.docs_per_step,
        accumulation.max_tokens,
        documents_per_batch(rollout),
    )
    if isinstance(rollout, PolicyRolloutConfig):
        rounds = rollout.max_sampling_rounds
        more = (
            f", those that teach nothing replaced in at most {rounds - 1} further rounds"
            if rounds > 1
            else ""
        )
        if rollout.uninformative == "drop":
            more = ", less those of prompts whose completions all score the same"
        if rollout.retire_at is not None:
            more += (
                f"; a prompt is asked no more once {rollout.retire_at:g} of its completions "
                "are right"
            )
        yield (
            f"rollouts: {rollout.prompts_per_batch} prompts x {rollout.group_size} completions = "
            f"{batch} documents a batch{more}"
        )
        if docs and (ahead := steps_ahead(rollout, accumulation)) > 0:
            kind = "lag" if rollout.lag else "overlap"
            yield f"{kind}: a batch is sampled {ahead} steps before the one that begins it"
    prompt, completion = longest_document(config)
    longest = prompt + completion if prompt and completion else None
    if longest:
        yield f"longest document: prompt {prompt} + completion {completion} = {longest} tokens"
    else:
        yield f"longest document: known once the data is read; it must fit in {room} tokens"
    if (processes := world_size(config.parallelism)) > 1:
        sizes = [
            f"{axis}={size}" for axis in AXES if (size := getattr(config.parallelism, axis)) > 1
        ]
        yield f"processes: {processes}; {', '.join(sizes)}"
    if docs == 0:
        yield (
            f"step: {text(accumulation.micro_batches_per_step)} micro-batches of at most {room} "
            "tokens"
        )
        return
    taken, ranks = documents_per_step(config), config.parallelism.data_parallel
    line = f"step: {taken} documents"
    if longest and room >= longest:
        line += (
            f", in {math.ceil(math.ceil(taken / ranks) / (room // longest))} micro-batches of "
            f"at most {room} tokens"
        )
        line += " on each data rank" if ranks > 1 else ""
    if batch is not None:
        per_batch = (
            batch / taken if accumulation.last_step == "carry" else steps_of(batch, accumulation)
        )
        line += f"; {per_batch:g} steps per batch of rollouts"
    yield line
    yield f"run: at most {steps} steps, {steps * taken} documents"


def evaluations(config: Config) -> Iterator[str]:
    """What is measured on which prompts, how often, and how many completions that costs."""
    each, every, total = config.evaluation.completions_per_prompt, config.evaluation.every, 0
    count = 1 + -(-config.trainer.max_steps // every)
    yield f"every {every} steps, before the first and after the last: {count} times"
    for held_out in held_out_sets(config):
        prompts = held_out.prompts
        yield (
            f"{held_out.name}: {held_out.source}; at most {prompts} prompts x {each} completions "
            f"= {prompts * each}"
        )
        total += prompts * each
    yield f"sampled {how_sampled(config)}"
    trained = config.trainer.max_steps * documents_per_step(config)
    beside = (
        f", beside {trained} documents of training"
        if trained and config.rollout.name == "policy"
        else ""
    )
    yield f"in all at most {count * total} completions{beside}"
    if (best := watched(config)) is not None:
        line, stop_at = f"the best checkpoint is kept by {'/'.join(best)}", config.trainer.stop_at
        yield line + (
            "" if stop_at is None else f"; the run ends once that is {text(stop_at)} or more"
        )


def longest_document(config: Config) -> tuple[int | None, int | None]:
    """(prompt, completion) tokens of the longest document, each None where only the data knows."""
    prompt = None
    if config.rollout.name == "policy":
        if not isinstance(config.task, GeneratedTaskConfig):
            prompt = getattr(config.task, "max_prompt_length", None)
        elif config.model.name == "tiny":
            template = config.kl.reference_prompt
            prompt, answer = config.task.longest
            if template is not None:  # a token per character
                prompt = max(
                    prompt, len(template.format(prompt=" " * prompt, answer=" " * (answer - 1)))
                )
    return prompt, config.rollout.max_completion_length


def tokens_at_least(config: Config) -> int:
    """Tokens that the longest document has at least."""
    return sum(tokens or 1 for tokens in longest_document(config))


def documents_per_batch(rollout: RolloutConfig) -> int | None:
    """Documents of a batch of rollouts; None for recorded ones."""
    if not isinstance(rollout, PolicyRolloutConfig):
        return None
    return rollout.prompts_per_batch * rollout.group_size


def documents_per_step(config: Config) -> int:
    """Documents of a step at most; 0 where it is a number of micro-batches."""
    docs, batch = config.accumulation.docs_per_step, documents_per_batch(config.rollout)
    return docs if batch is None or config.accumulation.last_step == "carry" else min(docs, batch)


def logits_memory(config: Config) -> str:
    """The largest piece of logits that exists at once."""
    vocabulary, room = vocabulary_size(config.model, config.task), config.accumulation.max_tokens
    if vocabulary is None:
        return "unknown until the model is loaded"
    half = config.model.name == "huggingface" and config.model.dtype in ("bfloat16", "float16")
    half = half and not config.model.fp32_lm_head
    size, splits, limit = 2 if half else 4, config.loss.num_splits, config.kernel.logits_memory_mb
    whole = room * vocabulary * size / MEBIBYTE
    line = (
        f"{room} tokens x {vocabulary} entries of the vocabulary x {size} bytes = {whole:.3g} "
        "MiB per micro-batch"
    )
    if splits > 1:
        return line + f", in {splits} splits"
    if config.kernel.implementation not in ("auto", "fused_linear"):
        return line
    return line + (
        f", of which at most {f'{limit} MiB' if limit else 'what the device has room for'} exist "
        "at once"
    )


def differences(
    config: Config, defaults: Config, overrides: list[str]
) -> tuple[list[str], list[str]]:
    """Return a line for each option and key whose value is not the default's: those of overrides,
    then the others.

    The others are what an option or an experiment sets, what a sweep's file does, and defaults that
    are computed.
    """
    now = as_typed(dict(leaves(plain_config(config))))
    drift = config_drift(as_typed(dict(leaves(plain_config(defaults)))), now)
    default_option = {**default_options(), "experiment": "null", "debug": "null"}
    choices: dict[str, str] = {}
    keys: list[str] = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        key = typed_key(short_name(key), config)
        if key in OWN_CODE:
            value = chosen(config, key)
        if key in default_option and not value.startswith("{"):
            choices[key] = value
        else:
            keys.append(key)
    typed = [
        _difference(group, option, default_option[group])
        for group, option in choices.items()
        if option != default_option[group]
    ]
    names_of_options = {key.name for key in KEYS if key.option and key.group in choices}
    followed = []
    for name in [name for name in now if name in drift and name not in names_of_options]:
        default, value = map(text, drift[name])
        lines = typed if any(is_inside(name, key) for key in keys) else followed
        lines.append(_difference(name, value, default))
    return typed, followed


def _difference(name: str, value: str, default: str) -> str:
    return f"{name} = {value}" + ("" if default == "null" else f" (default {default})")


def steps_of(documents: int, accumulation: AccumulationConfig) -> int:
    """Steps that so many documents of one batch last; accumulation: docs_per_step > 0, last_step
    short or drop."""
    docs = accumulation.docs_per_step
    return documents // docs if accumulation.last_step == "drop" else -(-documents // docs)


def steps_before(
    number: int, position: int, batch_size: int, accumulation: AccumulationConfig
) -> int:
    """Steps from the one that begins at `position` to the one that begins batch `number`, a later
    batch than its own.

    position: in documents, where a step begins. accumulation: docs_per_step > 0.
    """
    if accumulation.last_step == "carry":
        return (number * batch_size - position) // accumulation.docs_per_step
    left = steps_of(batch_size - position % batch_size, accumulation)
    return left + (number - position // batch_size - 1) * steps_of(batch_size, accumulation)


def steps_ahead(rollout: PolicyRolloutConfig, accumulation: AccumulationConfig) -> int:
    """How many steps ahead of the one that begins it each batch is sampled, at the earliest at the
    start of the run.

    rollout: of rollout=policy. With `max_staleness` they are as many as keep the last step of the
        batch within it, and
    at most those of one batch: then one batch is sampled while the one before it is trained.
    """
    if rollout.max_staleness is None:
        return rollout.lag
    own = steps_of(rollout.prompts_per_batch * rollout.group_size, accumulation)
    return min(rollout.max_staleness - (own - 1), own)


def samples_beside(c: Config) -> bool:
    """Whether completions are sampled during updates by the process that makes these."""
    is_ahead = getattr(c.rollout, "max_staleness", None) is not None
    return c.sampler.name == "transformers" and is_ahead and not copies_of(c)


def copies_of(c: Config) -> list[int]:
    """Return the GPU of each process that samples from a copy of the weights, or its number on the
    CPU; [] for none."""
    if not isinstance(c.sampler, TransformersSamplerConfig):
        return []
    return list(range(c.sampler.processes)) if c.sampler.gpus is None else c.sampler.gpus


def compilation(c: Config, on_gpu: bool) -> tuple[bool, str]:
    """Whether it is compiled, and the reason in words."""
    if c.model.compile != "auto":
        return c.model.compile, "as configured"
    if not on_gpu:
        return False, "since it pays on a GPU alone"
    if (shape := sizes(c.model)) is None:
        return False, "since this is no model whose type and sizes are known from a folder"
    room = c.accumulation.max_tokens
    tokens = documents_per_step(c) * min(room, sum(x or 0 for x in longest_document(c)) or room)
    if tokens == 0:
        micro_batches = c.accumulation.micro_batches_per_step
        assert micro_batches is not None  # `validate` refuses a step without a size
        tokens = micro_batches * room
    seconds = 8 * shape.weights * tokens * c.trainer.max_steps / _RATE / world_size(c.parallelism)
    compares = "more" if (pays := _SAVED * seconds > _COST) else "less"
    return pays, (
        f"since {100 * _SAVED:.0f} % of about {seconds:.3g} s of updates, each of up to {tokens} "
        f"tokens, is {compares} than the {_COST} s that compiling may take"
    )

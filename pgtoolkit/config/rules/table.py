"""The rules that compare settings alone, each as a row; those that compute something are functions
beside this file, and those between the parts of a training are in `rollouts.rules`.

The table in docs/keys.md is written from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from pgtoolkit.config.rules.rule import Rule
from pgtoolkit.model.settings import SEQUENCE_PARALLEL, SHARD
from pgtoolkit.rollouts import rules
from pgtoolkit.rollouts.settings import GREEDY
from pgtoolkit.system.declared import Needed
from pgtoolkit.training.settings import OPTIMIZER_PATH

_WHOLE_MICRO_BATCHES = "Stages hand over whole micro-batches."


def _of(rows: Iterable[Needed]) -> tuple[Rule, ...]:
    return tuple(Rule.of(row) for row in rows)


CORRECTION = _of(rules.CORRECTION)
BALANCED = _of(rules.BALANCED)
TOP_ENTROPY = _of(rules.TOP_ENTROPY)
TRUNCATED = _of(rules.TRUNCATED)
CENTERING = _of(rules.CENTERING)
GROUP_LOSS = _of(rules.GROUP_LOSS)
ADVANTAGE = _of(rules.ADVANTAGE)
SHAPE = _of(rules.SHAPE)
SIGNAL = _of(rules.SIGNAL)
CRITIC = _of(rules.CRITIC)
KL = _of(rules.KL)
ACCUMULATION = _of(rules.ACCUMULATION)
SHARING = _of(rules.SHARING)

PARALLELISM = (
    Rule.of(SEQUENCE_PARALLEL),
    Rule.of(SHARD),
    Rule(
        "metrics!=none",
        needs="parallelism.pipeline_parallel=1",
        because="Stages without the loss have no advantage extrema to give.",
        use="metrics=none or parallelism.pipeline_parallel=1",
    ),
    Rule.of(OPTIMIZER_PATH),
    Rule(
        "optimizer=muon",
        needs="parallelism.tensor_parallel=1",
        because="The update of a matrix is orthogonal as a whole; that of its parts is another.",
        use="parallelism.tensor_parallel=1 or optimizer=adamw",
    ),
    Rule(
        "parallelism.sequence_data_parallel>1",
        needs="parallelism.pipeline_parallel=1",
        because=_WHOLE_MICRO_BATCHES,
        use="parallelism.sequence_data_parallel=1",
    ),
    Rule(
        "parallelism.sequence_parallel=true",
        needs="parallelism.pipeline_parallel=1",
        because=_WHOLE_MICRO_BATCHES,
        use="parallelism.sequence_parallel=false",
    ),
)

SAMPLING = (
    Rule(
        "trainer.deterministic=true and rollout.max_staleness!=null and sampler=transformers",
        needs="sampler.gpus!=null or sampler.processes>0",
        because="PyTorch has one setting for a process, and asynchronous sampling must not have "
        "it.",
        use="trainer.deterministic=auto",
    ),
    Rule(
        "sampler.processes>0",
        needs="sampler.gpus=null",
        because="On each GPU one process samples.",
        use="sampler.processes=0",
    ),
)

EVALUATION = (Rule.of(GREEDY),)

TABLE = (
    *CORRECTION,
    *BALANCED,
    *TOP_ENTROPY,
    *TRUNCATED,
    *CENTERING,
    *GROUP_LOSS,
    *ADVANTAGE,
    *SHAPE,
    *SIGNAL,
    *CRITIC,
    *KL,
    *ACCUMULATION,
    *PARALLELISM,
    *SHARING,
    *SAMPLING,
    *EVALUATION,
)
"""All rows, in the order of the table in docs/keys.md."""

OWN_AT_ONCE = _of(rules.OWN_AT_ONCE)
OWN_LATER = _of(rules.OWN_LATER)
OWN_WITHOUT_REWARDS = _of(rules.OWN_WITHOUT_REWARDS)
OWN_OF_GROUPS = _of(rules.OWN_OF_GROUPS)

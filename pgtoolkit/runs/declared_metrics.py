"""The numbers of metrics.jsonl and evaluations.jsonl, and what each of them means.

The tables of docs/metrics.md and docs/evaluation.md, `pgtk explain` and `pgtk doctor` follow from
these declarations.
"""

from __future__ import annotations

from functools import lru_cache, partial

from pgtoolkit.runs.loss_metrics import OF_THE_CORRECTION, OF_THE_LOSS, OF_THE_SAMPLER
from pgtoolkit.runs.metric import Metric, declared_as
from pgtoolkit.runs.step_metrics import OF_DATA_AND_TRAINER

_of_prompts = partial(Metric, over="prompts")

OF_EVALUATIONS = (
    _of_prompts(
        "avg",
        "mean reward, without the punishment of long completions: of a prompt over its "
        "completions, then over prompts",
        healthy="rises",
    ),
    _of_prompts(
        "pass@k",
        "the unbiased estimate of the chance that one of k completions of a prompt is right, for k "
        "= 1, 2, 4, ... up to its n completions, c of which are right, by a score of 1 or more "
        "(arXiv 2107.03374)",
        formula="1 − C(n − c, k) / C(n, k)",
        healthy="rises",
    ),
    _of_prompts("avg_error", "standard error of that mean"),
    _of_prompts(
        "pass@k_error",
        "standard error of that mean: the standard deviation over prompts / √prompts. Completions "
        "of one prompt are not independent measurements",
    ),
    _of_prompts("length", "mean number of tokens of a completion"),
    _of_prompts("truncated", "share of the completions that did not end by themselves"),
    _of_prompts(
        "failed_score_fraction",
        "share of the completions that could not be scored; missing if it is 0. They are no exact "
        "matches if the first verifier failed, and with `task.verifier_failure=exclude` they do "
        "not count in `avg`",
        see="data.md#verifiers",
    ),
    Metric(
        "seconds",
        "how long the evaluation took; this time is between two rows of `metrics.jsonl`, and in no "
        "`seconds_` of a step",
        over="rank 0",
    ),
    Metric("set", "the name of the set of prompts"),
    Metric("step", "the step after which it was made; 0 is before the first"),
    Metric("documents", "documents that training had seen by then"),
    Metric("prompts", "number of prompts of the set"),
    Metric("completions_per_prompt", "completions of each of them"),
    Metric("time", "when it ended, in seconds since 1970"),
)

OF_TRACKERS = (
    Metric(
        "evaluation/SET/NAME",
        "a number of an evaluation, by the name of its set; MLflow has `pass_at_k` for `pass@k`",
        see="evaluation.md#what-is-measured",
    ),
    Metric(
        "NAME_by_documents",
        "a metric once more, with `documents_seen` in the place of the step",
        condition="in MLflow",
    ),
    Metric(
        "Main/N NAME",
        "one of the ten metrics to look at first, once more: its chart stands before others",
        condition="in MLflow",
    ),
    Metric(
        "final/NAME",
        "the mean of a metric over the last tenth of the steps",
        condition="in Weights & Biases and TensorBoard, at the last step",
    ),
    Metric(
        "tokens_seen",
        "trained tokens of this step and all before it",
        condition="in `pgtk compare`",
    ),
)

TABLES = {
    "metrics of the loss": OF_THE_LOSS,
    "metrics of the sampler": OF_THE_SAMPLER,
    "metrics of the correction": OF_THE_CORRECTION,
    "metrics of data and trainer": OF_DATA_AND_TRAINER,
    "metrics of evaluations": OF_EVALUATIONS,
    "metrics of trackers": OF_TRACKERS,
}
"""The name of each table of docs/ -> its metrics."""

OF_STEPS = (*OF_THE_LOSS, *OF_THE_SAMPLER, *OF_THE_CORRECTION, *OF_DATA_AND_TRAINER)
"""The metrics of metrics.jsonl."""

METRICS = {metric.name: metric for metric in OF_STEPS}
"""The same by name."""


@lru_cache(2**12)
def metric_named(name: str) -> Metric | None:
    """Return the metric of a column of `pgtk compare`, such as evaluation/SET/pass@1; None for a
    name that no run writes."""
    kind, _, rest = name.partition("/")
    if kind == "evaluation":
        return declared_as(rest.partition("/")[2], (*OF_EVALUATIONS, *OF_STEPS))
    return declared_as(name, OF_STEPS)

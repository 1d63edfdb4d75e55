"""The words of printed reports, of the states of runs, and of the field, for `pgtk explain`.

Each entry is short; the page of docs/ that it names has the rule.
"""

from __future__ import annotations

from pgtoolkit.config.word import Word

_SURE = "comparing.md#how-sure-it-is"
_PLANNED = "comparing.md#a-planned-comparison"
_COUNT = "comparing.md#which-runs-count"
_MEASURE = "comparing.md#a-number-that-means-the-same-in-both"

OF_COMPARISONS = (
    Word(
        "better",
        "a verdict: the difference is real, p < 0.05; a column: its probability",
        see=_SURE,
    ),
    Word(
        "equal", "a verdict: within the `--margin`, or in all numbers to the last bit", see=_PLANNED
    ),
    Word("undecided", "a prediction that the runs showed neither right nor wrong", see="study.md"),
    Word(
        "repeats",
        "finished runs of one configuration and one seed, of which the newest counts",
        see=_COUNT,
    ),
    Word("configuration", "all keys of a run but its seed and those that change nothing learned"),
    Word(
        "verdict",
        "what the tests say of two configurations: better or worse (higher or lower), equal within "
        "a margin, equal to the bit, or unknown",
        see=_SURE,
    ),
    Word(
        "worse", "a verdict: the difference is real, p < 0.05, and in the bad direction", see=_SURE
    ),
    Word(
        "unknown",
        "a verdict: nothing was shown, not even that there is no difference; more seeds, or a "
        "margin, may show it",
        see=_SURE,
    ),
    Word(
        "no noise to test by",
        "a verdict: all seeds of both have the same value, or all differences of a seed are the "
        "same",
        see=_SURE,
    ),
    Word("no verdict", "no number means the same in both configurations", see=_MEASURE),
    Word(
        "headline",
        "the number that runs are compared by where none is named: a held-out one where there is "
        "one, else the documents to a threshold of training",
        see="comparing.md#what-is-compared",
    ),
    Word(
        "held-out",
        "of prompts that training does not ask: those of `evaluation.sets`",
        see="evaluation.md",
    ),
    Word(
        "reached",
        "how many seeds came to the threshold that is compared; a seed that did not counts as one "
        "measurement later than the limit",
        see="comparing.md#what-is-compared",
    ),
    Word(
        "threshold",
        "the value of a metric that a run has to come to, such as a reward of 0.9; documents to it "
        "are what is compared: `--reach`",
        see="comparing.md#what-is-compared",
    ),
    Word(
        "mean",
        "a column: the mean of the compared number over seeds, with ≥ where a seed did not come to "
        "the threshold",
        see="comparing.md#what-is-compared",
    ),
    Word(
        "restricted mean",
        "the mean up to a limit, of seeds of which some did not come to the threshold: a lower "
        "bound",
        see="comparing.md#what-is-compared",
    ),
    Word(
        "interval",
        "a column: the confidence interval of the mean, or of the difference of a pair",
        see=_SURE,
    ),
    Word(
        "seeds",
        "a column: how many seeds of each configuration would find the difference that was seen; "
        "those of a sweep are the values of the key `seed`",
        see=_SURE,
    ),
    Word(
        "difference",
        "a column: a configuration's mean less that of the one it is compared with",
        see=_SURE,
    ),
    Word(
        "area under the curve",
        "the mean of a metric over the documents that all runs have seen: `--metric area:NAME`",
        see="comparing.md",
    ),
    Word("curve", "a metric over the documents that were seen", see="comparing.md"),
    Word(
        "final",
        "the mean of a metric over the last tenth of a run's steps, of a held-out one over the "
        "last three evaluations: `--metric final:NAME`",
        see="comparing.md",
    ),
    Word("IQM", "the interquartile mean, that of the middle half of all runs", see=_PLANNED),
    Word("interquartile mean", "the mean of the middle half of all runs: IQM", see=_PLANNED),
    Word("p", "how often chance alone would show such a difference, as a share", see=_SURE),
    Word("p-value", "how often chance alone would show such a difference: p", see=_SURE),
    Word("t-test", "whether two means differ by more than their spread shows by chance", see=_SURE),
    Word("Welch", "Welch's t-test, of configurations whose seeds or prompts differ", see=_SURE),
    Word("Holm", "Holm's method, which raises p where several pairs are tested", see=_SURE),
    Word(
        "paired",
        "both configurations have the same seeds and prompts: the difference of each is tested",
        see=_SURE,
    ),
    Word(
        "BCa",
        "bias-corrected and accelerated: a bootstrap interval whose ends move with the skew of the "
        "values (Efron 1987)",
        see=_SURE,
    ),
    Word("bootstrap", "an interval from means of runs that are drawn anew", see=_SURE),
    Word(
        "confidence interval",
        "the interval of a difference or a mean, of 95 % and with few seeds too narrow, by a "
        "bootstrap; no verdict uses it",
        see=_SURE,
    ),
    Word(
        "seed noise",
        "how far runs that differ in their seed alone end apart; `pgtk check --find` and the "
        "column seeds say how many seeds find a difference",
        see=_SURE,
    ),
    Word(
        "block",
        "runs that are paired with each other: a seed, and the keys of `--over`",
        see=_PLANNED,
    ),
    Word(
        "base",
        "the configuration that others are compared with: `--against`, else the sweep's first",
        see=_PLANNED,
    ),
    Word(
        "exploratory",
        "a verdict on a pair that `--against` did not plan: its p is not adjusted",
        see=_PLANNED,
    ),
    Word("arm", "a configuration of a study with all of its seeds", see="study.md"),
    Word(
        "control",
        "a configuration whose effect is known, which a comparison has to find, such as half of "
        "the advantages shuffled",
        see="study.md",
    ),
    Word(
        "counted",
        "a run that averages include: a finished or collapsed one, of repeats the newest",
        see=_COUNT,
    ),
)
"""The words of `pgtk compare` and of docs/study.md."""

STATES = (
    Word("done", "it has made all of its steps, or was stopped by `trainer.stop_at`"),
    Word("running", "a process trains it"),
    Word("interrupted", "stopped by a signal after a checkpoint; `pgtk resume` goes on"),
    Word("failed", "an error has ended it, which `status.json` and `run.log` have"),
    Word("pruned", "a search has stopped it early"),
    Word("killed", "its record says that it runs, but no process does: `pgtk resume` goes on"),
    Word("incomplete", "it is done, but rows of its metrics are missing"),
    Word("pending", "a job of a sweep that has not begun"),
    Word("unreadable", "files of its directory are damaged or missing"),
)
"""The states of a run."""

OF_THE_FIELD = (
    Word(
        "GRPOConfig",
        "TRL's class of settings: `pgtk translate FILE` makes a command of a program or a file of "
        "them, and `pgtk explain KEY` says what one of its keys is here",
        see="trl_and_verl.md",
    ),
    Word(
        "RLOOConfig",
        "TRL's class of settings of RLOO, which is `experiment=rloo` here, with `advantage=rloo`; "
        "`pgtk translate` reads files of GRPO alone, which have most of its keys",
        see="trl_and_verl.md",
    ),
    Word(
        "baseline",
        "what a reward is compared with, such as the mean of its group: a reward less the baseline "
        "is an advantage",
        see="losses.md#advantages",
    ),
    Word("old policy", "the weights before the updates of a batch: `rollout.old_log_probs`"),
    Word(
        "surrogate",
        "l_t, the loss of a token, whose gradient is that of the policy's objective: -A_t times "
        "the ratio, bounded as the family says",
        see="losses.md#families",
    ),
    Word("l_t", "the loss of a token before its weight: the surrogate", see="losses.md"),
    Word("w_t", "the weight of a token's loss, which the aggregation gives", see="losses.md"),
    Word("clipping", "a bound of the ratio beyond which a token gets no gradient", see="losses.md"),
    Word(
        "importance ratio",
        "exp(p_t - o_t), a token's probability now over that before",
        see="losses.md",
    ),
    Word("trust region", "how far a step may move the policy: the bounds of the ratio, and `kl`"),
    Word(
        "off-policy",
        "documents of older weights than those in training: `staleness`",
        see="rollouts.md",
    ),
    Word(
        "mismatch",
        "the gap between the log-probs of sampler and trainer: `pgtk doctor RUN --sampler`",
        see="losses.md#corrections",
    ),
    Word(
        "packing",
        "documents of a micro-batch stand in one row, without padding",
        see="performance.md",
    ),
    Word("padding", "tokens without meaning, which fill rows to one length; there are none here"),
    Word(
        "collapse",
        "numbers that are not finite, or an entropy near 0: `pgtk doctor RUN` says which",
    ),
    Word(
        "reward hacking",
        "the reward of training rises while held-out numbers fall: `pgtk doctor RUN`",
    ),
    Word("fork", "jobs of a sweep that share one start of Python and its libraries"),
    Word("judge", "a verifier that asks another model", see="data.md"),
    Word(
        "adapter",
        "LoRA's matrices, or a module that gives another trainer our losses",
        see="adapters.md",
    ),
)
"""Words of the field that docs/ use."""

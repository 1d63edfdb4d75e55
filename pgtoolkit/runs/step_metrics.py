"""The metrics of a step's documents, and of the trainer."""

from __future__ import annotations

from functools import partial

from pgtoolkit.runs.metric import OF_ADVANTAGES, OF_THE_WHOLE_LOSS, Metric

_of_attempts = partial(Metric, over="attempts")
_of_conversations = partial(Metric, over="conversations", condition="with `task.environment`")
_of_step = partial(Metric, over="the step")
_of_critic = partial(
    Metric,
    over="trained tokens",
    condition="with `advantage=gae`",
    in_formula=OF_THE_WHOLE_LOSS,
)
_of_rank_0 = partial(Metric, over="rank 0")
_of_making = partial(_of_rank_0, condition="with `rollout=policy`")

OF_DATA_AND_TRAINER = (
    _of_attempts(
        "reward",
        "mean reward of those whose reward is known; with `rollout.overlong_buffer` after its "
        "penalty",
        healthy="rises, and stays",
    ),
    _of_attempts(
        "overlong_penalty",
        "mean of the number that `rollout.overlong_buffer` has added to rewards, 0 or less: "
        "`reward` "
        "minus this is the reward of the task itself",
        condition="with `rollout.overlong_buffer`",
    ),
    _of_attempts(
        "kl_reward",
        "mean of the number that the distance from the reference adds to rewards before advantages "
        "are "
        "made; `reward` is without it",
        formula="−β Σ_t k_t",
        condition="with `kl.place=reward`",
        in_formula=("kl", "rollout.old_log_probs"),
    ),
    _of_step(
        "kl_coefficient",
        "the coefficient β of the penalty, which `kl.target` moves after each batch of rollouts",
        condition="with `kl.target`",
        healthy="rises while the KL is above the target, and falls while it is below",
        in_formula=("kl",),
    ),
    _of_critic("value_loss", "the loss of the critic", see="losses.md#a-critic"),
    _of_step(
        "critic_grad_norm",
        "length of the critic's gradient before clipping",
        condition="with `advantage=gae`",
        in_formula=OF_THE_WHOLE_LOSS,
    ),
    _of_step(
        "critic_learning_rate",
        "learning rate of the critic's update",
        condition="with `advantage=gae`",
    ),
    _of_critic("value", "mean value that the critic says"),
    _of_critic("return", "mean target of the critic"),
    _of_critic(
        "explained_variance",
        "1 − variance of the difference of return and value / variance of the return: 1 for values "
        "that are right, 0 for values that say no more than their mean; missing if all returns are "
        "equal",
    ),
    _of_critic(
        "value_clipped_fraction",
        "share of those whose value has moved by more than `critic.clip` since training on the "
        "batch began",
    ),
    _of_attempts(
        "dropped_prompt_fraction",
        "share of the prompts sampled for this batch that were dropped because their completions "
        "all scored the same. `reward` and `exact_match` are then those of the prompts that were "
        "kept",
        condition="with `rollout.max_sampling_rounds` > 1",
    ),
    _of_attempts(
        "dropped_group_fraction",
        "share of the prompts of this batch that are left out. Other metrics, `reward` among them, "
        "are then those of the prompts that were kept",
        condition="with `rollout.uninformative=drop`",
    ),
    Metric(
        "retired_prompts",
        "number of prompts that are never sampled again, once this batch is scored",
        over="the run",
        condition="with `rollout.retire_at`",
    ),
    _of_attempts(
        "exact_match",
        "share of the completions that are right: the verifier (the first of several, before its "
        "weight) gives them a score of 1 or more",
        healthy="rises",
    ),
    _of_attempts(
        "reward/NAME",
        "mean score of each of several verifiers, before its weight, also over those that `reward` "
        "leaves out",
        condition="with `task.verifiers`",
        see="data.md#verifiers",
    ),
    _of_attempts(
        "verifier/NAME",
        "mean of the number that a reward function logs by `log_metric`; with several verifiers "
        "`verifier/VERIFIER/NAME`",
        condition="with a reward function of your own",
        see="data.md#a-reward-of-your-own",
    ),
    _of_attempts(
        "verifier_timeout_fraction",
        "share of those whose verifier exceeded its time",
        condition="with `task.verifier_processes`",
        healthy="0",
        most=0.02,
    ),
    _of_attempts(
        "verifier_crash_fraction",
        "share of those whose verifier ended its process",
        condition="with `task.verifier_processes`",
        healthy="0",
        most=0.02,
    ),
    _of_attempts(
        "failed_score_fraction",
        "share of those that could not be scored, for any reason; missing if it is 0. With "
        "`task.verifier_failure=exclude` they do not count in `reward`",
        healthy="missing or 0",
        most=0.02,
        see="data.md#verifiers",
    ),
    Metric(
        "kept_set_overflow_fraction",
        "share of those with a token at which sampling by `rollout.top_p` or `rollout.top_k` kept "
        "more tokens than `sampler.keep_top`. They are not trained; their rewards stay in the "
        "baseline",
        over="documents",
        condition="with `rollout.top_p` or `rollout.top_k`, and `sampler.keep_top` > 0",
        healthy="near 0",
        see="losses.md#truncated-sampling",
    ),
    _of_conversations(
        "turns",
        "mean number of turns of the policy",
        see="conversations.md#what-is-trained",
    ),
    _of_conversations("environment_tokens", "mean number of tokens of the environment's messages"),
    _of_conversations(
        "ended_by_environment_fraction",
        "share of those that their environment ended",
    ),
    _of_conversations(
        "ended_by_max_turns_fraction",
        "share of those that reached `task.max_turns`",
    ),
    _of_conversations(
        "ended_by_length_fraction",
        "share of those that reached the limit of tokens",
    ),
    _of_conversations(
        "environment/NAME",
        "mean of a number that `score` of an environment measured",
        see="conversations.md",
    ),
    Metric(
        "environment_timeout_fraction",
        "share of those whose environment exceeded its time",
        over="conversations",
        condition="with `task.environment_processes`",
        healthy="0",
        most=0.02,
    ),
    Metric(
        "environment_crash_fraction",
        "share of those whose environment ended its process",
        over="conversations",
        condition="with `task.environment_processes`",
        healthy="0",
        most=0.02,
    ),
    Metric(
        "completion_length",
        "mean number of tokens with a label, also where the document has weight 0",
        over="documents",
    ),
    Metric(
        "truncated_fraction",
        "share of the completions that were cut off at the length limit",
        over="documents",
        healthy="below 0.1 in the end, unless the task is solved",
        most=0.8,
    ),
    Metric(
        "zero_advantage_group_fraction",
        "share of those in which every advantage is 0 or its document of weight 0: nothing is "
        "learned from them, but with advantage=none, which makes all of them 0",
        over="groups",
        in_formula=OF_ADVANTAGES,
        healthy="below 0.9 until the task is solved",
        most=0.9,
    ),
    Metric(
        "staleness",
        "mean number of updates between the policy that generated a document and the one in "
        "training",
        over="documents",
        see="rollouts.md#documents-of-older-weights",
    ),
    _of_step("num_tokens", "trained tokens, without those of documents of weight 0"),
    _of_step("num_documents", "documents"),
    _of_step("num_groups", "groups"),
    _of_step(
        "num_trajectories",
        "attempts",
        condition="where documents name trajectories",
        see="losses.md#trajectories-of-several-documents",
    ),
    _of_step(
        "num_empty_documents",
        "documents without a trained token or of weight 0, counted in D, adding nothing to the "
        "loss",
    ),
    _of_step("num_micro_batches", "forward and backward passes, on one process"),
    Metric(
        "num_skipped_steps",
        "steps so far without an update, because nothing was trained or a number was not finite",
        over="the run",
        healthy="0",
    ),
    _of_step(
        "loss_scale",
        "the factor of the step's loss",
        condition="with `model.dtype=float16`",
        see="parallelism.md#float16",
    ),
    Metric(
        "num_overflows",
        "steps so far without an update because a gradient overflowed, which `num_skipped_steps` "
        "does not count",
        over="the run",
        condition="with `model.dtype=float16`",
        see="parallelism.md#float16",
    ),
    Metric(
        "documents_seen",
        "documents of this step and all before it, also before a resume, each counted once",
        over="the run",
    ),
    Metric(
        "documents_trained",
        "the same with each document counted in each pass over its batch",
        over="the run",
        condition="with `rollout.passes` > 1",
    ),
    _of_step("learning_rate", "the learning rate of the step's update"),
    _of_step(
        "weight_sum",
        "sum of the weights by the aggregation's formula, including the documents of "
        "`rollout.truncated=mask` and of failed scores; not with a reducer of your own. With "
        "`sample_mean` and `prompt_mean` it is below 1 if documents or prompts have no trained "
        "token",
        formula="Σ w_t",
        in_formula=("aggregation", *OF_ADVANTAGES),
    ),
    _of_step(
        "grad_norm",
        "length of the gradient before clipping to `optimizer.max_grad_norm`",
        in_formula=OF_THE_WHOLE_LOSS,
        healthy="within a few times its median",
    ),
    _of_rank_0(
        "tokens_per_second",
        "tokens with a label over the time of the update, without generation",
    ),
    _of_rank_0(
        "seconds_update",
        "seconds of the update: forward and backward passes, exchange, optimizer",
    ),
    _of_making(
        "seconds_sampling",
        "seconds of sampling since the step before, including handing over the weights",
        see="rollouts.md#what-happens-in-an-iteration",
    ),
    _of_making("seconds_scoring", "seconds of scoring the completions since the step before"),
    _of_making(
        "seconds_old_log_probs",
        "seconds of computing old log-probs since the step before, with the reference's under "
        "`kl.place=reward` and the critic's values under `advantage=gae`; 0 if the old log-probs "
        "are those of sampling, or of the update itself",
        see="rollouts.md#what-happens-in-an-iteration",
    ),
    _of_rank_0(
        "peak_memory_gb",
        "the peak of PyTorch's allocated memory since the step before, in 10⁹ bytes",
        condition="on a GPU",
    ),
    _of_step("step", "the number of the step, from 1 on"),
    _of_rank_0("time", "when the step ended, in seconds since 1970"),
)

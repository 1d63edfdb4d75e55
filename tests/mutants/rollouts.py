"""Mistakes in rewards, advantages, steps, packing, the order of data, and metrics of the data."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import torch

from mutants import mutant


@mutant("rollouts.advantages:group_advantages")
def rloo_compares_with_the_mean_of_all(right, estimator, rewards, lengths=()):
    return right("dr_grpo" if estimator == "rloo" else estimator, rewards, lengths)


@mutant("rollouts.sampled:SampledRollouts._completed")
def uninformative_groups_are_not_left_out(right, self, *arguments):
    return [replace(document, left_out=False) for document in right(self, *arguments)]


@mutant("rollouts.group_rollouts:is_solved")
def a_prompt_retires_by_its_best_completion(right, group, least):
    return any(document.exact_match for document in group)


@mutant("rollouts.advantages:_deviation")
def the_standard_deviation_divides_by_n(right, rewards):
    return right(rewards) * ((len(rewards) - 1) / len(rewards)) ** 0.5


@mutant("rollouts.advantages:group_advantages")
def pass_at_k_rewards_every_good_completion(right, estimator, rewards, lengths=()):
    advantages = right(estimator, rewards, lengths)
    return [
        abs(advantage) + 0.1 * (reward > 0)
        for advantage, reward in zip(advantages, rewards, strict=True)
    ]


@mutant("rollouts.advantages:group_advantages")
def opo_ignores_the_lengths(right, estimator, rewards, lengths=()):
    return right("dr_grpo" if estimator == "opo" else estimator, rewards, lengths)


@mutant("rollouts.advantages:over_batch")
def reinforce_plus_plus_is_whitened_in_each_group(right, estimator, groups, rewards):
    return [
        right(estimator, [group], [of_group])[0]
        for group, of_group in zip(groups, rewards, strict=True)
    ]


@mutant("rollouts.advantages:gdpo")
def gdpo_sums_scores_before_it_normalises_them(right, scores, weights):
    weighted = [
        sum(weight * (score or 0) for weight, score in zip(weights, of_completion, strict=True))
        for of_completion in zip(*scores, strict=True)
    ]
    return right([weighted], [1.0])


@mutant("rollouts.gae:gae")
def gae_ignores_its_lambda(right, rewards, values, gamma, gae_lambda):
    return right(rewards, values, gamma, 1.0)


@mutant("rollouts.gae:whitened")
def advantages_of_tokens_are_whitened_in_each_document(right, advantages):
    return [right([of_document])[0] for of_document in advantages]


@mutant("losses.kl:KL.of_samples")
def the_kl_in_the_reward_has_its_policies_exchanged(right, self, old_log_probs, ref_log_probs):
    return right(self, ref_log_probs, old_log_probs)


@mutant("training.critic:value_losses")
def the_critics_values_are_not_clipped(right, values, old_values, returns, clip):
    return right(values, old_values, returns, None)


@mutant("training.module:PolicyGradientModule._move_reference")
def a_moving_reference_becomes_the_policy_at_once(right, self):
    rate = self._reference_rate
    self._reference_rate = 1.0
    right(self)
    self._reference_rate = rate


@mutant("training.loss_scale:LossScale.fall")
def an_overflow_does_not_lower_the_loss_scale(right, self):
    value = self.value
    may_be_the_cause = right(self)
    self.value = value
    return may_be_the_cause


@mutant("batch:pack")
def truncated_completions_are_trained(right, *arguments, **keywords):
    return replace(
        right(*arguments, **keywords), truncated=torch.zeros(len(arguments[0]), dtype=torch.bool)
    )


@mutant("rollouts.steps:make_step")
def truncated_completions_are_missing_in_the_totals(right, documents, *arguments, **keywords):
    step = right(documents, *arguments, **keywords)
    kept = right([d for d in documents if not d.truncated], *arguments, **keywords).totals
    return replace(
        step,
        totals=replace(step.totals, num_tokens=kept.num_tokens, num_documents=kept.num_documents),
    )


@mutant("rollouts.group_rollouts:has_signal")
def dynamic_sampling_ignores_its_setting_and_compares_rewards(right, group, estimator, mixed):
    return right(group, estimator)


@mutant("rollouts.group_rollouts:overlong_penalty")
def the_overlong_penalty_begins_one_token_late(right, length, longest, buffer, penalty):
    return right(length - 1, longest, buffer, penalty)


@mutant("rollouts.group_rollouts:has_signal")
def a_group_counts_as_informative_only_by_its_rewards(right, group, estimator, mixed="reward"):
    return len({document.reward for document in group}) > 1


@mutant("batch:pack")
def a_position_predicts_its_own_token(right, *arguments, **keywords):
    batch = right(*arguments, **keywords)
    return replace(batch, labels=torch.where(batch.labels >= 0, batch.tokens, -1))


@mutant("batch:pack")
def old_log_probs_are_shifted_by_one_position(right, *arguments, **keywords):
    batch = right(*arguments, **keywords)
    return replace(batch, old_log_probs=batch.old_log_probs.roll(1))


@mutant("rollouts.steps:make_step")
def the_totals_of_a_step_are_those_of_one_rank(right, *arguments, **keywords):
    step = right(*arguments, **keywords)
    num_documents = sum(micro_batch.num_documents for micro_batch in step.micro_batches)
    return replace(step, totals=replace(step.totals, num_documents=num_documents))


@mutant("rollouts.steps:make_step")
def ranks_have_different_numbers_of_micro_batches(right, documents, *more, **keywords):
    step = right(documents, *more, **keywords)
    not_empty = [batch for batch in step.micro_batches if batch.num_documents > 0]
    return replace(step, micro_batches=not_empty)


@mutant("rollouts.step_loader:StepLoader._closes_before")
def a_step_ends_within_a_group(right, self, position, documents):
    close_on_groups = self.close_on_groups
    self.close_on_groups = False
    try:
        return right(self, position, documents)
    finally:
        self.close_on_groups = close_on_groups


@mutant("rollouts.step_loader:StepLoader._closes_before")
def a_step_ends_within_a_trajectory(right, self, position, documents):
    return right(self, position, [replace(document, trajectory=None) for document in documents])


@mutant("rollouts.steps:trajectories_of")
def documents_without_a_trajectory_share_one(right, documents):
    return [(document.trajectory is None, document.trajectory) for document in documents]


@mutant("rollouts.steps:make_step")
def the_tokens_of_a_trajectory_are_counted_on_one_rank(right, *arguments, **keywords):
    step = right(*arguments, **keywords)
    if step.totals.tokens_per_trajectory is None:
        return step
    tokens = torch.zeros_like(step.totals.tokens_per_trajectory)
    for batch in step.micro_batches:
        trained = batch.document_index[batch.labels >= 0]
        counts = torch.bincount(trained, minlength=batch.num_documents)
        tokens.index_add_(0, batch.trajectory_index, counts)
    return replace(step, totals=replace(step.totals, tokens_per_trajectory=tokens))


@mutant("rollouts.recorded_index:first_parts")
def each_document_of_a_trajectory_counts_in_the_baseline(right, rows):
    return np.arange(len(rows))


@mutant("rollouts.data_metrics:trajectories_of")
def each_document_of_a_trajectory_counts_in_the_mean_reward(right, documents):
    return [*range(len(documents))]


@mutant("rollouts.batch_counts:steps_ahead")
def asynchronous_batches_are_one_step_too_old(right, rollout, accumulation):
    ahead = right(rollout, accumulation)
    return ahead + 1 if ahead else 0


@mutant("rollouts.batch_counts:steps_before")
def a_batch_that_is_carried_over_counts_from_its_start(
    right, number, position, batch_size, accumulation, passes, passes_done
):
    begin = position // batch_size * batch_size
    return right(number, begin, batch_size, accumulation, passes, passes_done)


@mutant("rollouts.sampled:SampledRollouts.state_dict")
def a_resume_begins_with_the_first_prompt(right, self):
    return right(self) | {"next_prompt": 0}


@mutant("rollouts.forward_passes:ForwardPasses._computed")
def old_log_probs_stay_those_of_the_sampler(right, self, parts, sharing):
    computed = right(self, parts, sharing)
    return [replace(vectors, old_log_probs=vectors.sampling_log_probs) for vectors in computed]


@mutant("rollouts.sampled:SampledRollouts._use")
def proximal_log_probs_are_computed_by_the_weights_that_sampled(right, self, number):
    ahead = self._ahead
    self._ahead = 0
    try:
        return right(self, number)
    finally:
        self._ahead = ahead


@mutant("rollouts.forward_passes:_sampled")
def sampling_log_probs_are_zero_beside_proximal_ones(right, document):
    return right(document) * 0


@mutant("rollouts.forward_passes:ForwardPasses._needs_old_log_probs_before")
def on_policy_documents_get_a_second_forward_pass(right, self):
    return True


@mutant("rollouts.forward_passes:ForwardPasses._num_in_first_update")
def the_second_update_of_a_batch_is_taken_for_on_policy_too(right, self, documents):
    return min(2 * right(self, documents), len(documents))


@mutant("document:Rooms.shares_of")
def micro_batches_are_filled_one_after_the_other(right, self, count, enough=None):
    return right(self, count) if enough is None else self.parts(enough)


@mutant("document:num_shared")
def documents_share_the_last_token_of_a_prompt_too_few(right, before, document):
    return max(0, right(before, document) - 1)


@mutant("document:Rooms.parts")
def a_group_is_cut_where_a_micro_batch_is_full(right, self, max_tokens):
    return right(replace(self, units=[1] * len(self.alone)), max_tokens)


@mutant("model.attention:rows_of")
def a_shared_prompt_gets_no_gradient_through_its_keys(right, x, index):
    return right(x.detach(), index)


@mutant("losses.objective:Objective.at")
def on_policy_old_log_probs_are_shifted_by_one_token(right, self, log_probs, top_log_probs=None):
    return right(self, log_probs.roll(1), top_log_probs)


@mutant("rollouts.recording:row_of")
def recorded_log_probs_are_those_of_the_sampler(right, document):
    sampling = document.sampling_log_probs
    return right(document if sampling is None else replace(document, old_log_probs=sampling))


@mutant("rollouts.data_metrics:data_metrics")
def staleness_grows_with_the_version_of_the_weights(right, documents, num_updates, masks_truncated):
    return right(documents, 2 * num_updates, masks_truncated)


@mutant("rollouts.recorded_index:RecordedIndex.knows")
def a_changed_file_counts_as_unchanged(right, self, name, path):
    return True


@mutant("rollouts.rows:RecordedRow.digest")
def the_checksum_of_a_row_ignores_its_reward(right, self):
    return right(type(self)(**vars(self) | {"reward": None}))


@mutant("rollouts.parsed_rows:_checked_vectors")
def the_lists_of_a_batch_are_shifted_by_one_row(right, batch, rules):
    return {name: rows[1:] + rows[:1] for name, rows in right(batch, rules).items()}


@mutant("rollouts.recorded:RecordedRollouts.outline")
def outlines_ignore_the_shuffled_order(right, self, position):
    order = self._order
    self._order = lambda epoch: range(self.batch_size)
    try:
        return right(self, position)
    finally:
        self._order = order


def _masked(row, change):
    """Return the row with another loss mask."""
    return row | {"loss_mask": change(row["loss_mask"])}


@mutant("rollouts.conversations:Conversations.tokens")
def the_end_of_a_turn_is_not_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a and b for a, b in itertools.pairwise([*mask, False])]
    )


@mutant("rollouts.conversations:Conversations.tokens")
def the_token_after_a_turn_is_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a or b for a, b in itertools.pairwise([False, *mask])]
    )


@mutant("rollouts.conversations:Conversations.tokens")
def the_token_before_a_turn_is_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a or b for a, b in itertools.pairwise([*mask, False])]
    )


@mutant("rollouts.conversations:Conversations._of_chat")
def answers_within_the_prompt_are_trained(right, self, messages, first):
    return right(self, messages, 0)


@mutant("tasks.generated:is_held_out")
def a_held_out_sum_is_asked_with_its_terms_in_another_order(right, text):
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


@mutant("rollouts.group_rollouts:as_completion")
def the_mask_of_a_conversation_is_shifted_by_one_token(right, conversation):
    completion = right(conversation)
    return replace(completion, drawn=completion.drawn.roll(1))


@mutant("rollouts.group_rollouts:seed_of")
def every_turn_is_sampled_with_the_same_seed(right, seed, number):
    return right(seed, number & 0xFFFFFFFF)


@mutant("tasks.conversation:Conversation.measures")
def tokens_of_the_policy_count_as_environment_tokens(right, conversation):
    return right(conversation) | {"environment_tokens": len(conversation.drawn)}


@mutant("tasks.environments:Guess.score")
def a_wrong_guess_is_rewarded_by_its_full_nearness(right, guess, messages):
    reward, measures = right(guess, messages)
    return (reward if reward == 1 else 2 * reward), measures


@mutant("rollouts.recorded_checks:Plausibility._correlation")
def shifted_log_probs_are_not_suspected(right, self, place):
    return right(self, 0)

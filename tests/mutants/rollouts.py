"""Mistakes of rewards, advantages, steps, packing, the order of data, and metrics of the data."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import torch

from mutants import mutant


@mutant("rollouts.advantages:group_advantages")
def rloo_compares_with_the_mean_of_all(right, estimator, rewards, lengths=()):
    return right("dr_grpo" if estimator == "rloo" else estimator, rewards, lengths)


@mutant("rollouts.group_rollouts:without_uninformative")
def groups_without_a_difference_stay(right, groups):
    return [replace(document, left_out=False) for document in right(groups)]


@mutant("rollouts.group_rollouts:is_solved")
def a_prompt_retires_by_its_best_completion(right, group, least):
    return any(document.exact_match for document in group)


@mutant("rollouts.advantages:_deviation")
def the_deviation_is_that_of_the_population(right, rewards):
    return right(rewards) * ((len(rewards) - 1) / len(rewards)) ** 0.5


@mutant("rollouts.advantages:group_advantages")
def pass_at_k_rewards_every_good_completion(right, estimator, rewards, lengths=()):
    found = right(estimator, rewards, lengths)
    return [abs(one) + 0.1 * (reward > 0) for one, reward in zip(found, rewards, strict=True)]


@mutant("rollouts.advantages:group_advantages")
def opo_forgets_the_lengths(right, estimator, rewards, lengths=()):
    return right("dr_grpo" if estimator == "opo" else estimator, rewards, lengths)


@mutant("rollouts.advantages:over_batch")
def reinforce_plus_plus_is_whitened_in_each_group(right, estimator, groups, rewards):
    return [
        right(estimator, [group], [of_group])[0]
        for group, of_group in zip(groups, rewards, strict=True)
    ]


@mutant("rollouts.advantages:gdpo")
def gdpo_adds_up_before_it_normalises(right, scores, weights):
    total = [
        sum(w * one for w, one in zip(weights, row, strict=True))
        for row in zip(*scores, strict=True)
    ]
    return right([total], [1.0])


@mutant("rollouts.gae:gae")
def gae_forgets_its_lambda(right, rewards, values, gamma, gae_lambda):
    return right(rewards, values, gamma, 1.0)


@mutant("rollouts.gae:whitened")
def advantages_of_tokens_are_whitened_in_each_document(right, advantages):
    return [right([of_document])[0] for of_document in advantages]


@mutant("losses.kl:KL.of_samples")
def the_penalty_of_the_reward_is_of_the_reference_against_the_policy(
    right, self, old_log_probs, ref_log_probs
):
    return right(self, ref_log_probs, old_log_probs)


@mutant("training.critic:value_losses")
def values_are_not_clipped(right, values, old_values, returns, clip):
    return right(values, old_values, returns, None)


@mutant("training.module:PolicyGradientModule._move_reference")
def the_reference_becomes_the_policy_at_once(right, self):
    kl = self.config.kl
    self.config = replace(self.config, kl=replace(kl, update_rate=1.0))
    right(self)
    self.config = replace(self.config, kl=kl)


@mutant("training.loss_scale:LossScale.fall")
def an_overflow_leaves_the_scale_as_it_is(right, self):
    value = self.value
    may_be_the_cause = right(self)
    self.value = value
    return may_be_the_cause


@mutant("batch:pack")
def what_was_cut_off_is_trained(right, *arguments, **keywords):
    return replace(
        right(*arguments, **keywords), truncated=torch.zeros(len(arguments[0]), dtype=torch.bool)
    )


@mutant("rollouts.steps:make_step")
def what_was_cut_off_leaves_the_totals(right, documents, *arguments, **keywords):
    step = right(documents, *arguments, **keywords)
    kept = right([d for d in documents if not d.truncated], *arguments, **keywords).totals
    return replace(
        step,
        totals=replace(step.totals, num_tokens=kept.num_tokens, num_documents=kept.num_documents),
    )


@mutant("rollouts.group_rollouts:has_signal")
def dynamic_sampling_always_looks_at_rewards(right, group, mixed):
    return right(group)


@mutant("rollouts.group_rollouts:overlong_penalty")
def the_buffer_begins_one_token_late(right, length, longest, buffer, most):
    return right(length - 1, longest, buffer, most)


@mutant("rollouts.group_rollouts:has_signal")
def a_group_of_other_lengths_teaches(right, group, mixed="reward"):
    return len({document.reward for document in group}) > 1


@mutant("batch:pack")
def a_position_predicts_its_own_token(right, *arguments, **keywords):
    batch = right(*arguments, **keywords)
    return replace(batch, labels=torch.where(batch.labels >= 0, batch.tokens, -1))


@mutant("batch:pack")
def old_log_probs_stand_one_place_late(right, *arguments, **keywords):
    batch = right(*arguments, **keywords)
    return replace(batch, old_log_probs=batch.old_log_probs.roll(1))


@mutant("rollouts.steps:make_step")
def the_totals_are_those_of_one_rank(right, *arguments, **keywords):
    step = right(*arguments, **keywords)
    held = sum(one.num_documents for one in step.micro_batches)
    return replace(step, totals=replace(step.totals, num_documents=held))


@mutant("rollouts.steps:make_step")
def ranks_have_other_numbers_of_micro_batches(right, documents, *more, **keywords):
    step = right(documents, *more, **keywords)
    return replace(step, micro_batches=[one for one in step.micro_batches if one.num_documents])


@mutant("rollouts.step_loader:StepLoader._closes_before")
def a_step_ends_within_a_group(right, self, position, documents):
    kept, self.close_on_groups = self.close_on_groups, False
    try:
        return right(self, position, documents)
    finally:
        self.close_on_groups = kept


@mutant("rollouts.step_loader:StepLoader._closes_before")
def a_step_ends_within_a_trajectory(right, self, position, documents):
    return right(self, position, [replace(document, trajectory=None) for document in documents])


@mutant("rollouts.steps:trajectories_of")
def documents_that_name_no_trajectory_are_one(right, documents):
    return [(document.trajectory is None, document.trajectory) for document in documents]


@mutant("rollouts.steps:make_step")
def the_tokens_of_a_trajectory_are_those_of_one_rank(right, *arguments, **keywords):
    step = right(*arguments, **keywords)
    if (tokens := step.totals.tokens_per_trajectory) is None:
        return step
    tokens = torch.zeros_like(tokens)
    for one in step.micro_batches:
        trained = torch.bincount(one.document_index[one.labels >= 0], minlength=one.num_documents)
        tokens.index_add_(0, one.trajectory_index, trained)
    return replace(step, totals=replace(step.totals, tokens_per_trajectory=tokens))


@mutant("rollouts.recorded_index:first_parts")
def each_part_of_an_attempt_is_in_the_baseline(right, rows):
    return np.arange(len(rows))


@mutant("rollouts.data_metrics:trajectories_of")
def each_part_of_an_attempt_has_a_reward(right, documents):
    return [*range(len(documents))]


@mutant("config.counts:steps_ahead")
def batches_are_one_step_too_old(right, rollout, accumulation):
    ahead = right(rollout, accumulation)
    return ahead + 1 if ahead else 0


@mutant("config.counts:steps_before")
def a_batch_that_is_carried_over_is_counted_anew(right, number, position, batch_size, accumulation):
    return right(number, position // batch_size * batch_size, batch_size, accumulation)


@mutant("rollouts.sampled:SampledRollouts.state_dict")
def the_next_prompt_is_asked_again_after_a_resume(right, self):
    return right(self) | {"next_prompt": 0}


@mutant("rollouts.forward_passes:ForwardPasses._with_training_log_probs")
def the_sampler_s_log_probs_stay_the_old_ones(right, self, parts, passes):
    documents = [document for part in parts for document in part]
    rescored = zip(right(self, parts, passes), documents, strict=True)
    return [replace(document, old_log_probs=before.old_log_probs) for document, before in rescored]


@mutant("rollouts.sampled:SampledRollouts._use")
def proximal_log_probs_are_those_of_the_weights_that_sampled(right, self, number):
    kept, self._ahead = self._ahead, 0
    try:
        return right(self, number)
    finally:
        self._ahead = kept


@mutant("rollouts.forward_passes:_sampled")
def nothing_stays_beside_proximal_log_probs(right, document):
    return right(document) * 0


@mutant("rollouts.forward_passes:ForwardPasses._with_on_policy")
def two_passes_are_made_of_all_documents(right, self, groups):
    return groups


@mutant("losses.objective:Objective.at")
def new_log_probs_stand_for_the_old_ones_of_the_token_before(right, self, log_probs):
    return right(self, log_probs.roll(1))


@mutant("rollouts.recording:row_of")
def recorded_log_probs_are_those_of_the_sampler(right, document):
    sampling = document.sampling_log_probs
    return right(document if sampling is None else replace(document, old_log_probs=sampling))


@mutant("rollouts.data_metrics:data_metrics")
def staleness_is_the_version_of_the_weights(right, documents, num_updates):
    return right(documents, 2 * num_updates)


@mutant("rollouts.recorded_index:RecordedIndex.knows")
def a_changed_file_is_taken_for_the_same(right, self, name, path):
    return True


@mutant("rollouts.rows:Row.digest")
def a_row_s_reward_is_no_part_of_its_checksum(right, self):
    return right(type(self)(**vars(self) | {"reward": None}))


@mutant("rollouts.parsed_rows:_checked_vectors")
def the_lists_of_a_batch_belong_to_the_rows_before(right, batch, rules):
    return {name: rows[1:] + rows[:1] for name, rows in right(batch, rules).items()}


@mutant("rollouts.recorded:RecordedRollouts.outline")
def outlines_come_in_the_order_of_the_files(right, self, position):
    order, self._order = self._order, lambda epoch: range(self.batch_size)
    try:
        return right(self, position)
    finally:
        self._order = order


def _masked(found, change):
    return found | {"loss_mask": change(found["loss_mask"])}


@mutant("rollouts.conversations:Conversations.tokens")
def the_end_of_a_turn_is_not_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a and b for a, b in itertools.pairwise([*mask, False])]
    )


@mutant("rollouts.conversations:Conversations.tokens")
def what_follows_a_turn_is_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a or b for a, b in itertools.pairwise([False, *mask])]
    )


@mutant("rollouts.conversations:Conversations.tokens")
def the_beginning_of_a_turn_is_trained(right, self, raw):
    return _masked(
        right(self, raw), lambda mask: [a or b for a, b in itertools.pairwise([*mask, False])]
    )


@mutant("rollouts.conversations:Conversations._of_chat")
def turns_of_the_prompt_are_trained(right, self, messages, first):
    return right(self, messages, 0)


@mutant("tasks.generated:is_held_out")
def the_order_of_terms_makes_another_problem(right, text):
    return hashlib.sha256(text.encode()).digest()[0] % 8 == 0


@mutant("tasks.generated:ShortestPathTask._is_right")
def only_the_worked_path_is_right(right, self, prompt, completion):
    return completion == prompt.answer


@mutant("tasks.generated:ChainSumTask._is_right")
def a_sum_that_is_written_anywhere_counts(right, self, prompt, completion):
    return prompt.answer[-2:] in completion


@mutant("rollouts.group_rollouts:as_completion")
def the_mask_of_a_conversation_begins_a_token_late(right, one):
    found = right(one)
    return replace(found, drawn=found.drawn.roll(1))


@mutant("rollouts.group_rollouts:seed_of")
def every_turn_is_drawn_by_the_same_numbers(right, seed, number):
    return right(seed, number & 0xFFFFFFFF)


@mutant("tasks.conversation:Conversation.measures")
def tokens_of_the_policy_count_as_the_environments(right, one):
    return right(one) | {"environment_tokens": len(one.drawn)}


@mutant("tasks.environments:Guess.score")
def a_miss_is_worth_how_near_it_came(right, one, messages):
    reward, measures = right(one, messages)
    return (reward if reward == 1 else 2 * reward), measures


@mutant("rollouts.plausible:Plausibility._correlation")
def log_probs_are_compared_at_their_own_places_alone(right, self, place):
    return right(self, 0)

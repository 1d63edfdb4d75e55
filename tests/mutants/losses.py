"""Mistakes in loss families, aggregations, corrections, penalties and the metrics of the loss."""

from dataclasses import replace

import torch

from mutants import mutant
from pgtoolkit.losses.corrections import TokenMask

# Aggregations: the weight of a token.


@mutant("losses.aggregation:SampleMean.denominators")
def sample_mean_does_not_count_empty_documents(right, self, totals, counts, group_index):
    num_documents = totals.num_documents - totals.num_empty_documents
    return right(self, replace(totals, num_documents=num_documents), counts, None)


@mutant("losses.aggregation:PromptMean.denominators")
def prompt_mean_averages_the_means_of_documents(right, self, totals, counts, group_index):
    documents = torch.bincount(group_index, minlength=totals.num_groups)
    return counts * documents[group_index] * totals.num_groups


@mutant("losses.aggregation:TokenMean.denominators")
def token_mean_divides_by_the_tokens_of_one_piece(right, self, totals, counts, group_index):
    return counts * 0 + counts.sum()


@mutant("losses.aggregation:Constant.denominators")
def constant_does_not_divide_by_the_number_of_documents(right, self, totals, counts, group_index):
    return right(self, replace(totals, num_documents=1), counts, group_index)


@mutant("losses.aggregation:Aggregation.weights")
def masked_tokens_have_a_weight(right, self, totals, documents, mask, *indices):
    return right(self, totals, documents, torch.ones_like(mask), *indices)


@mutant("losses.aggregation:Aggregation.weights")
def a_document_of_a_trajectory_counts_only_its_own_tokens(
    right, self, totals, documents, mask, *indices
):
    return right(self, totals, documents, mask, indices[0], None)


@mutant("batch:StepTotals.num_trajectories")
def each_document_of_a_trajectory_counts_as_a_trajectory(right, self):
    return self.num_documents


@mutant("batch:StepTotals.num_empty_trajectories")
def a_trajectory_with_an_empty_document_counts_as_empty(right, self):
    return self.num_empty_documents


@mutant("losses.documents:_renumbered")
def a_trajectory_counts_only_the_tokens_of_one_rank(right, index, counts, data_group):
    return right(index, counts, None)


# Sums over documents.


@mutant("losses.documents:DocumentSums.of_tokens")
def padding_counts_as_tokens_of_a_document(
    right, cls, document_index, mask, num_documents, group=None
):
    return right(
        cls, document_index.clamp(0, num_documents - 1), torch.ones_like(mask), num_documents, group
    )


@mutant("losses.family:scope_mean")
def gspo_uses_the_advantage_of_each_token(right, scope, values, documents):
    return values


@mutant("losses.family:over_scope")
def a_product_over_a_document_is_a_geometric_mean(right, scope, values, documents):
    if scope == "document_sum":
        return documents.broadcast(documents.mean(values))
    return right(scope, values, documents)


# Families.


@mutant("losses.family:clamped")
def log_ratios_are_not_clamped(right, log_ratio):
    return log_ratio


@mutant("losses.families:Gspo.scope")
def gspo_uses_the_ratio_of_each_token(right):
    return "token"


@mutant("losses.families:_Clipped.surrogate")
def the_lower_bound_is_used_as_the_upper_one(right, self, log_ratio, advantages, log_probs):
    return right(
        replace(self, epsilon_high=self.epsilon_low or self.epsilon_high),
        log_ratio,
        advantages,
        log_probs,
    )


@mutant("losses.families:_Clipped.surrogate")
def the_clip_ignores_the_sign_of_the_advantage(right, self, log_ratio, advantages, log_probs):
    losses, slope = right(self, log_ratio, advantages, log_probs)
    low, high = self.bounds
    ratio = log_ratio.exp()
    return losses, slope.where((ratio >= low) & (ratio <= high), 0.0)


@mutant("losses.families:_Clipped.surrogate")
def a_ratio_at_the_bound_has_no_gradient(right, self, log_ratio, advantages, log_probs):
    losses, slope = right(self, log_ratio, advantages, log_probs)
    ratio = log_ratio.exp()
    return losses, slope.where((ratio != self.bounds[0]) & (ratio != self.bounds[1]), 0.0)


@mutant("losses.families:Grpo.surrogate")
def the_dual_clip_is_ignored(right, self, log_ratio, advantages, log_probs):
    return right(replace(self, dual_clip=None), log_ratio, advantages, log_probs)


@mutant("losses.families:Sapo.surrogate")
def sapo_uses_the_temperature_of_the_other_sign(right, self, log_ratio, advantages, log_probs):
    swapped = {
        "temperature_positive": self.temperature_negative,
        "temperature_negative": self.temperature_positive,
    }
    return right(replace(self, **swapped), log_ratio, advantages, log_probs)


@mutant("losses.families:Gmpo.token")
def gmpo_clips_on_both_sides_whatever_the_sign(right, self, log_ratio, advantages):
    clipped = log_ratio.clamp(-self.epsilon_low, self.epsilon_high)
    return clipped, (clipped == log_ratio).to(log_ratio.dtype)


@mutant("losses.families:Dppo.outside")
def dppo_compares_ratios_in_place_of_probabilities(right, self, ratio, token_log_ratio, log_probs):
    return ratio - 1 < -self.delta_low, ratio - 1 > self.delta_high


@mutant("losses.families:Dppo.outside")
def the_binary_kl_of_dppo_has_its_policies_exchanged(
    right, self, ratio, token_log_ratio, log_probs
):
    if self.divergence != "binary_kl":
        return right(self, ratio, token_log_ratio, log_probs)
    mirrored = replace(self, delta_low=self.delta_high, delta_high=self.delta_low)
    low, high = right(mirrored, 1 / ratio, -token_log_ratio, log_probs - ratio.log())
    return high, low


# Corrections.


@mutant("losses.corrections:_Bounded.factors")
def a_ratio_at_the_bound_of_a_mask_is_masked(right, self, log_ratio, token_log_ratio, advantages):
    values, outside = right(self, log_ratio, token_log_ratio, advantages)
    ratio = log_ratio.exp()
    outside = outside | (ratio == self.bounds[0]) | (ratio == self.bounds[1])
    return values.where(~outside, 0.0) if self.masks else values, outside


@mutant("losses.corrections:_Bounded.factors")
def a_correction_uses_the_inverse_ratio(right, self, log_ratio, token_log_ratio, advantages):
    return right(self, -log_ratio, -token_log_ratio, advantages)


@mutant("losses.corrections:Factors.of")
def only_the_worst_token_of_a_document_is_masked(right, cls, correction, *others):
    alone = TokenMask(correction.low, correction.high) if correction.by_worst else correction
    return right(cls, alone, *others)


@mutant("losses.corrections:SequenceMask.equal_within_documents")
def a_correction_claims_equal_factors_within_documents(right, self):
    return True


# Penalties.


@mutant("losses.kl:KL.terms")
def the_kl_penalty_has_its_policies_exchanged(right, self, distance, log_ratio):
    values, slopes = right(self, -distance, log_ratio)
    return values, -slopes


@mutant("losses.kl:Penalties.by_entropy")
def the_entropy_bonus_has_the_wrong_sign(right, self):
    return -right(self)


@mutant("losses.kl:Penalties.with_kl")
def the_kl_penalty_weighs_all_tokens_equally(right, self, log_probs, losses, coefficients):
    return right(
        replace(self, weights=self.mask / self.mask.sum()), log_probs, losses, coefficients
    )


@mutant("losses.kl:Penalties.of_rows")
def the_full_kl_ignores_its_coefficient(right, self):
    return [*right(self)[:-1], self.weights]


@mutant("losses.kl:Penalties.distance")
def the_metric_of_the_full_kl_is_half_of_it(right, self, log_probs):
    return right(self, log_probs) * (1 if self.divergence is None else 0.5)


@mutant("losses.objective:Objective.silent_without_advantage")
def tokens_without_advantage_get_no_penalty(right, self):
    return self.family.silent_without_advantage


# Metrics.


@mutant("losses.metrics:_Kind.finalize")
def the_effective_sample_size_is_halved(right, self, sums, maxima, num_documents):
    metrics = right(self, sums, maxima, num_documents)
    if self.sample_size in metrics:
        metrics = metrics | {self.sample_size: metrics[self.sample_size] * 0.5}
    return metrics


@mutant("losses.metrics:MetricSums.merge")
def extrema_of_a_step_are_those_of_its_last_piece(right, self, other):
    return replace(right(self, other), maxima=other.maxima)


@mutant("losses.metrics:MetricSums.all_reduce")
def extrema_of_a_step_are_those_of_one_rank(right, self, loss, group):
    loss, sums = right(self, loss, group)
    return loss, replace(sums, maxima=self.maxima)


@mutant("losses.measure:_left_out")
def documents_of_weight_0_are_counted_as_trained(right, objective):
    return right(objective) * 0


@mutant("losses.measure:_maxima")
def maxima_are_never_below_zero(right, objective, values):
    return right(objective, values).clamp(min=0.0)


# Score centering.


@mutant("losses.centering:Centering.rows")
def score_centering_leaves_the_tokens_outside_of_h_alone(right, self):
    rows = right(self)
    return rows._replace(elsewhere=rows.elsewhere * 0)


@mutant("losses.centering:Centering.terms")
def the_metric_of_score_centering_has_the_wrong_sign(right, self):
    return -right(self)

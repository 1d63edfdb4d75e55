"""Mistakes in the passes over the vocabulary, the fused head and its chunks, and Triton kernels."""

import copy

import torch
import triton
import triton.language as tl

from mutants import mutant
from pgtoolkit.kernels.triton_families import _clamped


@mutant("kernels.torch_passes:forward_shard")
def logits_are_not_divided_by_the_temperature(right, logits, labels, temperature, *more):
    return right(logits, labels, 1.0, *more)


@mutant("kernels.torch_passes:forward_shard")
def every_shard_of_the_vocabulary_begins_at_column_zero(
    right, logits, labels, temperature, with_entropy, vocabulary_start
):
    return right(logits, labels, temperature, with_entropy, 0)


@mutant("kernels.torch_passes:backward")
def the_gradient_is_not_divided_by_the_temperature(
    right, logits, labels, normalizer, coefficients, temperature, *more, **k
):
    return right(logits, labels, normalizer, coefficients * temperature, temperature, *more, **k)


@mutant("kernels.torch_passes:backward")
def gradients_of_masked_rows_are_multiplied_by_zero_and_not_selected(
    right, logits, labels, *more, **keywords
):
    untrained = (labels < 0).unsqueeze(-1) & ~torch.isfinite(logits)
    return torch.where(untrained, torch.nan, right(logits, labels, *more, **keywords))


@mutant("kernels.torch_passes:backward")
def the_entropy_bonus_has_no_gradient(
    right, logits, labels, normalizer, coefficients, *more, **keywords
):
    return right(
        logits, labels, normalizer[:2], torch.atleast_2d(coefficients)[0], *more, **keywords
    )


@mutant("kernels.torch_passes:divergence")
def forward_and_reverse_full_kl_are_exchanged(right, logits, normalizer, teacher, *more):
    other = "full_forward" if teacher.kind == "full_reverse" else "full_reverse"
    return right(logits, normalizer, teacher._replace(kind=other), *more)


@mutant("kernels.torch_passes:backward")
def the_gradient_of_the_full_kl_lacks_the_term_of_its_value(right, *more, teacher=None, **keywords):
    if teacher is not None:
        teacher = teacher._replace(of_policy=torch.zeros_like(teacher.of_policy))
    return right(*more, teacher=teacher, **keywords)


@mutant("kernels.given_logits:compared")
def the_reference_logits_are_divided_by_the_temperature_twice(
    right, passes, logits, normalizer, kind, ref_logits, *more
):
    return right(passes, logits, normalizer, kind, ref_logits / more[1], *more)


@mutant("kernels.given_logits:VocabularyShard.divergence")
def the_full_kl_sums_only_the_columns_of_one_shard(right, self, *more):
    return self.implementation.divergence(*more)


@mutant("kernels.products:_MixedLinear.backward")
def the_heads_gradient_is_summed_in_the_dtype_of_the_weight(right, ctx, gradient):
    hidden, weight = ctx.saved_tensors
    total = None
    if ctx.needs_input_grad[1]:
        total = (gradient.to(hidden.dtype).T @ hidden).to(weight.dtype)
    return right(ctx, gradient)[0], total, None


@mutant("kernels.chunks:make_plan")
def tokens_without_advantage_are_skipped_also_under_kimi_and_penalties(
    right, objective, *more, **keywords
):
    """Only the plan of chunks is wrong, which needs the lengths of documents."""
    silent = copy.copy(objective)
    informative = objective.informative
    kind = type(
        "Silent",
        (type(objective),),
        {"silent_without_advantage": True, "informative": lambda _: informative()},
    )
    object.__setattr__(silent, "__class__", kind)
    return right(silent, *more, **keywords)


@mutant("losses.exchange:all_sum")
def sums_over_ranks_are_divided_by_the_number_of_ranks(right, values, group):
    total = right(values, group)
    return total if group is None else (total / group.size()).to(total.dtype)


@mutant("kernels.given_logits:VocabularyShard.forward")
def a_label_outside_of_every_shard_has_a_finite_log_prob(
    right, self, logits, labels, temperature, with_entropy
):
    log_probs, *others = right(self, logits, labels, temperature, with_entropy)
    return log_probs.nan_to_num(0.0), *others


@mutant("kernels.triton_families:clipped")
def the_clip_in_triton_ignores_the_sign_of_the_advantage(right):
    return _clipped_on_both_sides


@triton.jit
def _clipped_on_both_sides(log_ratio, advantage, log_prob, below, above, dual_clip, _unused):
    _, ratio = _clamped(log_ratio)
    return tl.where((ratio <= 1 + above) & (ratio >= 1 - below), -ratio * advantage, 0.0)


@mutant("kernels.triton_families:pulled_back")
def the_squared_term_of_kimi_has_no_gradient_in_triton(right):
    return _not_pulled_back


@triton.jit
def _not_pulled_back(log_ratio, advantage, log_prob, tau, _unused, _unused_too, _unused_as_well):
    return -advantage


@mutant("kernels.triton_passes:forward_gradient")
def the_gradient_of_tritons_single_pass_is_not_divided_by_the_temperature(
    right, logits, labels, temperature, with_entropy, objective, out
):
    result = right(logits, labels, temperature, with_entropy, objective, out)
    out.mul_(temperature)
    return result


@mutant("kernels.triton_attention:attend")
def an_attention_window_is_one_key_too_wide(
    right, query, key, value, keys, values, positions, scaling, window, *more
):
    window = window and window + 1
    return right(query, key, value, keys, values, positions, scaling, window, *more)


@mutant("kernels.triton_attention:attend")
def a_token_behind_the_prompt_is_read_from_another_row(right, *more, prompts=None):
    return right(*more, prompts=prompts and (prompts[0], prompts[1] + 1))


@mutant("kernels.triton_layer:rms_norm_backward")
def the_gradient_by_a_norms_input_lacks_that_of_the_residual_stream(
    right, x, weight, epsilon, by_normed, by_x, dtype
):
    return right(x, weight, epsilon, by_normed, torch.zeros_like(by_x), dtype)


@mutant("kernels.triton_draw:draw_tokens")
def tokens_are_sampled_at_temperature_one(right, logits, uniform, temperature):
    return right(logits, uniform, 1.0)

"""Mistakes of losses, kernels and of tests over seeds for `test_mutants.py`: (name, file, edits, what catches it)."""

ARGUMENTS = "tests/kernels/test_arguments.py"
FORMULAS = "tests/losses/test_family_formulas.py::test_loss_and_coefficients_are_those_of_the_paper"
KERNELS = "tests/kernels/test_kernels.py"
OPTIONS = "tests/kernels/test_parallel_loss_options.py"

CUT = "tests/losses/test_invariance.py::test_micro_batches_order_and_padding"
CORRECTIONS = "tests/losses/test_corrections.py"
IN_CODE = "tests/losses/test_correction_implementations.py"

MUTANTS_OF_LOSSES = [
    (
        "a factor that a trainer brings weighs each token's own slope where the ratio is the document's",
        "losses/objective.py",
        {
            "tokens.factors.to(dtype), 0.0), False": "tokens.factors.to(dtype), 0.0), equal",
        },
        (f"{CORRECTIONS}::test_factors_that_a_trainer_brings_are_a_correction[gspo]",),
    ),
    (
        "a factor that a trainer brings is left out",
        "losses/objective.py",
        {"weights * torch.where(mask, tokens.factors.to(dtype), 0.0), False": "weights, False"},
        (f"{CORRECTIONS}::test_factors_that_a_trainer_brings_are_a_correction[grpo]",),
    ),
    (
        "a correction's factor that is left out of the gradient of a family by document",
        "losses/objective.py",
        {"equal and correction.equal_within_documents": "equal"},
        (f"{IN_CODE}::test_given_logits_match_the_reference[gspo-sample_mean-none-token masked]",),
    ),
    (
        "a correction's factor that divides by what it keeps (verl's deprecated trainer)",
        "losses/objective.py",
        {"weights * factors.values, equal": "weights * factors.values / factors.values[mask].mean(), equal"},
        (f"{CORRECTIONS}::test_worked_examples[token_mask 2]",),
    ),
    (
        "the ratio of sampler to trainer instead of trainer to sampler (verl's rollout_rs)",
        "losses/objective.py",
        {"old_log_probs - tokens.sampling_log_probs.to(dtype)": "tokens.sampling_log_probs.to(dtype) - old_log_probs"},
        (f"{CORRECTIONS}::test_worked_examples[token_truncate 0]",),
    ),
    (
        "untrained sampling log-probs multiplied by 0 instead of left out",
        "losses/objective.py",
        {
            "torch.where(mask, old_log_probs - tokens.sampling_log_probs.to(dtype), 0.0)": "mask * (old_log_probs - "
            "tokens.sampling_log_probs.to(dtype))"
        },
        (f"{CORRECTIONS}::test_untrained_positions_may_hold_anything[nan-token masked]",),
    ),
    (
        "a sampler's NaN counts as a ratio of 1 (TRL)",
        "losses/corrections.py",
        {"values.where(distance < math.inf, math.nan)": "values"},
        (f"{CORRECTIONS}::test_a_sampling_log_prob_that_is_not_finite_names_the_document[torch-nan-token masked]",),
    ),
    (
        "a correction's log-ratio is not clamped before exp",
        "losses/corrections.py",
        {"limited, distance = clamped(over)": "limited, distance = over"},
        (f"{CORRECTIONS}::test_a_factor_is_at_most_e_to_the_20[TokenTruncate]",),
    ),
    (
        "the bounds of a mask are outside",
        "losses/corrections.py",
        {"outside = ratio != within": "outside = (ratio <= low) | (ratio >= high)"},
        (f"{CORRECTIONS}::test_a_ratio_equal_to_a_bound_is_within[token_mask]",),
    ),
    (
        "documents of positive advantage are masked as well",
        "losses/corrections.py",
        {"(advantages < 0) & (-log_ratio > self.threshold)": "-log_ratio > self.threshold"},
        (f"{CORRECTIONS}::test_a_document_that_the_policy_has_left_is_masked_where_its_advantage_is_negative",),
    ),
    (
        "a mask by the policy in Triton's single pass, which knows no document",
        "kernels/given_logits.py",
        {"wanted and not objective.by_document": "wanted and not objective.family.by_document"},
        (f"{IN_CODE}::test_in_float32_with_kernels_or_without[grpo-constant-off policy-triton]",),
    ),
    (
        "Triton's metrics lack those of a correction",
        "kernels/triton_objective.py",
        {"with_more(objective, MetricSums(level, sums[1:], maxima), log_probs)": "MetricSums(level, sums[1:], maxima)"},
        (f"{IN_CODE}::test_in_float32_with_kernels_or_without[grpo-constant-token masked-triton]",),
    ),
    (
        "an effective sample size over documents of their factors",
        "losses/measures.py",
        {"values[: len(means)] *=": "values *="},
        (f"{CORRECTIONS}::test_worked_examples[token_truncate 0]",),
    ),
    (
        "GMPO's clipped tokens keep their gradient",
        "losses/families.py",
        {"return clipped, (clipped == log_ratio).to(log_ratio.dtype)": "return clipped, 1.0 + 0 * log_ratio"},
        (f"{FORMULAS}[gmpo]",),
    ),
    (
        "DPPO leaves tokens out on the wrong side of the advantage",
        "losses/families.py",
        {"left_out = (low & (advantages < 0))": "left_out = (high & (advantages < 0))"},
        (f"{FORMULAS}[dppo]",),
    ),
    (
        "VESPO's ratio by the mean of the log-ratios instead of their sum",
        "losses/family.py",
        {"documents.broadcast(documents.sum(values))": "documents.broadcast(documents.mean(values))"},
        (f"{FORMULAS}[vespo]", "tests/losses/test_losses.py::test_matches_reference[1.0-vespo-sample_mean-basic]"),
    ),
    (
        "a dual clip that also acts where the advantage is positive",
        "losses/families.py",
        {"beyond = (advantages < 0) & (log_ratio.exp() > self.dual_clip)": "beyond = log_ratio.exp() > self.dual_clip"},
        (
            "tests/losses/test_family_formulas.py::test_a_dual_clip_acts_where_the_advantage_is_negative_and_the_ratio_large",
        ),
    ),
    (
        "SAPO's temperatures exchanged",
        "losses/families.py",
        {".where(~(advantages > 0), self.temperature_positive)": ".where(advantages > 0, self.temperature_positive)"},
        (f"{FORMULAS}[sapo]",),
    ),
    (
        "a clipped token that is not finite counts as a number",
        "losses/objective.py",
        {"own = torch.where(torch.isfinite(token_log_ratio), own, torch.nan)": "pass"},
        (
            "tests/losses/test_family_formulas.py::test_without_the_check_a_number_that_is_not_finite_makes_the_loss_nan[inf-gmpo]",
        ),
    ),
    (
        "sample mean over the micro-batch's documents instead of the step's (TRL #3021, verl #5877)",
        "losses/aggregation.py",
        {"counts * totals.num_documents": "counts * len(counts)"},
        (f"{CUT}[grpo-sample_mean-basic-halves-0]", f"{CUT}[gspo-sample_mean-none-shuffled-3]"),
    ),
    (
        "token mean over the micro-batch's tokens instead of the step's (prime-rl #583, OpenRLHF #1249)",
        "losses/aggregation.py",
        {"counts * 0 + totals.num_tokens": "counts * 0 + counts.sum()"},
        (f"{CUT}[gspo-token_mean-basic-halves-0]", f"{CUT}[gspo-token_mean-basic-shuffled-3]"),
    ),
    (
        "Dr. GRPO without its 1/D (verl #3741)",
        "losses/aggregation.py",
        {"self.divisor) * totals.num_documents": "self.divisor)"},
        ("tests/losses/test_losses.py::test_worked_example[grpo-constant-0.40625]",),
    ),
    (
        "prompt mean over the groups of the micro-batch (TRL and SkyRL pull requests)",
        "losses/aggregation.py",
        {"* totals.num_groups": "* len(group_index.unique())"},
        (f"{CUT}[gspo-prompt_mean-with_entropy-one per document-0]",),
    ),
    (
        "a divisor of NaN passes a comparison that is always false",
        "losses/checks.py",
        {"math.isfinite(value) and value > 0": "not value <= 0"},
        ("tests/losses/test_losses.py::test_constant_refuses_a_divisor_that_cannot_divide[nan]",),
    ),
    (
        "a phantom token for each fully masked document, in a loss without given totals (slime)",
        "losses/documents.py",
        {"counts.sum(), (counts": "counts.clamp(min=1).sum(), (counts"},
        (
            "tests/losses/test_losses.py::test_a_masked_document_counts_as_a_document_and_adds_no_phantom_token[token_mean]",
        ),
    ),
    (
        "masked positions multiplied by 0 instead of left out: NaN * 0 is NaN (NeMo-RL #4120)",
        "losses/objective.py",
        {"torch.where(self.mask, log_probs - self.old_log_probs, 0.0)": "self.mask * (log_probs - self.old_log_probs)"},
        ("tests/losses/test_losses.py::test_masked_positions_may_hold_anything[nan-grpo]",),
    ),
    (
        "rows without a gradient multiplied by 0 instead of left out (prime-rl #2084)",
        "kernels/torch_passes.py",
        {"torch.where(active, block, 0.0)": "(active * block)"},
        ("tests/losses/test_losses.py::test_masked_positions_may_hold_anything[nan-gspo]",),
    ),
    (
        "GSPO's ratio by the sum of the log-ratios instead of their mean (TRL #5814, NeMo-RL #2269)",
        "losses/family.py",
        {"documents.mean(values)": "documents.sum(values)"},
        ("tests/losses/test_losses.py::test_gspo_ratio_is_the_exp_of_the_mean_and_not_of_the_sum",),
    ),
    (
        "the clip acts already at its bounds, in the gradient by formula",
        "losses/families.py",
        {"ratio <= upper": "ratio < upper"},
        ("tests/losses/test_peers.py::test_the_clip_does_not_act_at_its_bounds[1.0-1.25-fused_linear-grpo]",),
    ),
    (
        "the clip acts already at its bounds, in the metrics",
        "losses/family.py",
        {"return ratio < self.bounds[0], ratio": "return ratio <= self.bounds[0], ratio"},
        ("tests/losses/test_peers.py::test_the_clip_does_not_act_at_its_bounds[-1.0-0.75-torch-gspo]",),
    ),
    (
        "the log-ratio is not clamped before exp (OpenRLHF #1293: computed and never read)",
        "losses/objective.py",
        {"clamped(unclamped)": "unclamped"},
        ("tests/kernels/test_kernels.py::test_huge_log_ratios_stay_finite[grpo-1.0-dtype0-torch]",),
    ),
    (
        "extrema start from 0 (Fast-LLM #494)",
        "losses/measures.py",
        {"torch.where(objective.mask, values, -torch.inf)": "torch.where(objective.mask, values, 0.0)"},
        (
            "tests/losses/test_losses.py::test_matches_reference[1.0-grpo-sample_mean-basic]",
            "tests/losses/test_peers.py::test_a_piece_without_trained_tokens_does_not_touch_the_extrema",
        ),
    ),
    (
        "metrics as the mean of the micro-batches' means (TRL #7047, verl #2259)",
        "losses/metrics.py",
        {"self.sums + other.sums": "(self.sums + other.sums) / 2"},
        (f"{CUT}[grpo-sample_mean-basic-halves-0]",),
    ),
    (
        "untrained positions counted as one more document (Fast-LLM: padding with an index of its own)",
        "losses/documents.py",
        {"num_documents, group)\n\n": "num_documents + 1, group)\n\n"},
        ("tests/losses/test_losses.py::test_on_policy_numbers",),
    ),
    (
        "the temperature left out of the gradient",
        "kernels/torch_passes.py",
        {"(coefficients[rows] / temperature)": "coefficients[rows]"},
        ("tests/losses/test_losses.py::test_matches_reference[0.7-grpo-sample_mean-none]",),
    ),
    (
        "entropy of vocabulary shards: a local sum under a global normalizer (Fast-LLM #494)",
        "kernels/torch_passes.py",
        {"dots[0] + shift.clamp(min=-1000.0) * sums": "dots[0]"},
        ("tests/kernels/test_passes.py::test_vocabulary_shards_merge[torch-True]",),
    ),
    (
        "gradients pass through the clamp of the log-ratio",
        "losses/objective.py",
        {"torch.where(was_clamped, 0.0, slope)": "slope"},
        (
            f"{KERNELS}::test_huge_log_ratios_stay_finite[grpo-1.0-dtype0-torch]",
            f"{KERNELS}::test_huge_log_ratios_stay_finite[gspo--1.0-dtype1-torch]",
        ),
    ),
    (
        "gradients pass through the clamp of the log-ratio, in Triton",
        "kernels/triton_families.py",
        {"passes & (tl.abs(log_ratio) <= 20.0)": "passes"},
        (
            f"{KERNELS}::test_huge_log_ratios_stay_finite[grpo-1.0-dtype2-triton]",
            f"{KERNELS}::test_huge_log_ratios_stay_finite[gspo--1.0-dtype2-triton]",
        ),
    ),
    (
        "Triton's clip acts already at its upper bound",
        "kernels/triton_families.py",
        {"ratio <= 1 + above": "ratio < 1 + above"},
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[grpo-triton]",),
    ),
    (
        "Triton's clip acts already at its lower bound",
        "kernels/triton_families.py",
        {"ratio >= 1 - below": "ratio > 1 - below"},
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[gspo-triton]",),
    ),
    (
        "Triton's clipped fraction counts the bounds",
        "kernels/triton_families.py",
        {"return ratio < 1 - below, ratio > 1 + above": "return ratio <= 1 - below, ratio >= 1 + above"},
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[grpo-triton]",),
    ),
    (
        "Triton's dual clip acts where A > 0",
        "kernels/triton_families.py",
        {"beyond = (advantage < 0) & (ratio > dual_clip)": "beyond = ratio > dual_clip"},
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[grpo-dual_clip-6]",),
    ),
    (
        "Triton's gmpo gives clipped tokens a gradient",
        "kernels/triton_tokens.py",
        {"tl.where(limit == token_log_ratio, slope, 0.0)": "slope"},
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[gmpo-6]",),
    ),
    (
        "Triton's gmpo clips on the wrong side",
        "kernels/triton_tokens.py",
        {
            "tl.sum(sum_if_negative, 0), scope": "tl.sum(sum_if_positive, 0), scope",
        },
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[gmpo-6]",),
    ),
    (
        "Triton's vespo takes the document's mean",
        "kernels/triton_tokens.py",
        {'if SCOPE == "document":': "if BY_DOCUMENT:"},
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[vespo-6]",),
    ),
    (
        "Triton's vespo is weighted by the document's mean weight",
        "kernels/triton_objective.py",
        {'OWN_WEIGHT=family.slope_of != "log_ratio"': "OWN_WEIGHT=False"},
        ("tests/kernels/test_triton_families.py::test_vectors_match_those_of_pytorch[vespo-none]",),
    ),
    (
        "Triton's sapo takes one temperature for both signs",
        "kernels/triton_families.py",
        {"tau = tl.where(advantage > 0, positive, negative)": "tau = positive"},
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[sapo-6]",),
    ),
    (
        "Triton's dppo keeps what moved too far upwards",
        "kernels/triton_families.py",
        {
            "tl.where(below | above, 0.0": "tl.where(below, 0.0",
        },
        ("tests/kernels/test_triton_families.py::test_matches_the_reference[dppo-11]",),
    ),
    (
        "Triton's clamped fraction never counts",
        "kernels/triton_tokens.py",
        {"tl.where(tl.abs(log_ratio) > 20.0, 1.0, 0.0)": "tl.where(tl.abs(limited) > 20.0, 1.0, 0.0)"},
        (f"{KERNELS}::test_huge_log_ratios_stay_finite[gspo-0.0-dtype2-triton]",),
    ),
    (
        "an infinite log-ratio is clamped to a number",
        "losses/objective.py",
        {"torch.isfinite(unclamped) & torch.isfinite(advantages)": "~torch.isnan(unclamped)"},
        (f"{KERNELS}::test_what_is_not_finite_makes_the_loss_nan_where_nobody_looks_for_it[torch-grpo-2-inf]",),
    ),
    (
        "an infinite log-ratio is clamped to a number, in Triton",
        "kernels/triton_families.py",
        {'(tl.abs(log_ratio) < float("inf"))': "(log_ratio == log_ratio)"},
        (f"{KERNELS}::test_what_is_not_finite_makes_the_loss_nan_where_nobody_looks_for_it[triton-gspo-2--inf]",),
    ),
    (
        "a reducer's weights outside of the mask are kept",
        "losses/aggregation.py",
        {"found.double().where(mask, 0.0)": "found.double()"},
        ("tests/losses/test_losses.py::test_a_reducers_weights_outside_of_the_mask_are_dropped[grpo]",),
    ),
    (
        "1-based documents are one too many",
        "kernels/arguments.py",
        {"if widest > 1 and is_whole_step:": "if False:"},
        (f"{ARGUMENTS}::test_documents_are_numbered_from_0_unless_their_number_is_given",),
    ),
    (
        "the weight's gradient for autograd adds up in the weight's dtype",
        "kernels/fused_head.py",
        {"torch.zeros_like(weight, dtype=wide)": "torch.zeros_like(weight)"},
        ("tests/kernels/test_weight_gradient.py::test_the_weight_gradient_adds_up_in_float32_over_chunks[False]",),
    ),
    (
        "what is added to the float32 gradient is rounded to bfloat16",
        "kernels/products.py",
        {"addmm_(a[rows].to(total.dtype), b.to(total.dtype), alpha=alpha)": "add_(a[rows] @ b, alpha=alpha)"},
        (
            "tests/kernels/test_weight_gradient.py::test_products_add_to_a_float32_total_without_rounding_in_between[dtype0]",
        ),
    ),
    (
        "an empty vocabulary shard counts as zeros",
        "kernels/shards.py",
        {"torch.where(trained, -1e30, 0.0)": "0.0"},
        (f"{OPTIONS}::test_an_empty_vocabulary_shard_has_no_maximum[grpo-False]",),
    ),
    (
        "the fp32 LM head rounds its logits to bfloat16",
        "kernels/fused_head.py",
        {"wide if head.fp32_logits else hidden.dtype": "hidden.dtype"},
        ("tests/model/test_huggingface.py::test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights[True]",),
    ),
]

SAME_BITS = "tests/losses/test_peers.py::test_the_same_step_twice_gives_the_same_bits"
LARGE = f"{KERNELS}::test_more_logits_than_int32_can_count"
MUTANTS_ON_A_GPU = [
    (
        "float atomics in the sums over documents",
        "losses/documents.py",
        {
            'torch.segment_reduce(values.contiguous(), "sum", lengths=self.lengths, unsafe=True)': "values.new_zeros("
            "len(self.lengths)).index_add_(0, torch.repeat_interleave(self.lengths), values)"
        },
        (f"{SAME_BITS}[gspo-torch]",),
    ),
    (
        "a row's offset in 32 bits, in one pass",
        "kernels/triton_one_pass.py",
        {"source = words + row.to(tl.int64) * row_stride": "source = words + row * row_stride"},
        (f"{LARGE}[grpo-dtype1-151936]",),
    ),
    (
        "a row's offset in 32 bits, forward",
        "kernels/triton_two_pass.py",
        {"row = tl.program_id(0).to(tl.int64)": "row = tl.program_id(0)"},
        (f"{LARGE}[gspo-dtype0-151936]",),
    ),
    (
        "a row's offset in 32 bits, backward",
        "kernels/triton_two_pass.py",
        {"(tl.program_id(0) // blocks_per_row).to(tl.int64)": "(tl.program_id(0) // blocks_per_row)"},
        (f"{LARGE}[gspo-dtype0-151936]",),
    ),
]

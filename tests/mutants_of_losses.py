"""Mistakes of losses, kernels and of tests over seeds for `test_mutants.py`: (name, file, edits, what catches it)."""

ARGUMENTS = "tests/kernels/test_arguments.py"
KERNELS = "tests/kernels/test_kernels.py"
OPTIONS = "tests/kernels/test_parallel_loss_options.py"

MUTANTS_OF_LOSSES = [
    (
        "gradients pass through the clamp of the log-ratio",
        "losses/objective.py",
        {"torch.where(clamped, 0.0, slope)": "slope"},
        (
            f"{KERNELS}::test_huge_log_ratios_stay_finite[grpo-1.0-dtype0-torch]",
            f"{KERNELS}::test_huge_log_ratios_stay_finite[gspo--1.0-dtype1-torch]",
        ),
    ),
    (
        "gradients pass through the clamp of the log-ratio, in Triton",
        "kernels/triton_tokens.py",
        {"passes & (tl.abs(log_ratio) <= 20.0)": "passes"},
        (
            f"{KERNELS}::test_huge_log_ratios_stay_finite[grpo-1.0-dtype2-triton]",
            f"{KERNELS}::test_huge_log_ratios_stay_finite[gspo--1.0-dtype2-triton]",
        ),
    ),
    (
        "Triton's clip acts already at its upper bound",
        "kernels/triton_tokens.py",
        {"ratio <= 1 + above": "ratio < 1 + above"},
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[grpo-triton]",),
    ),
    (
        "Triton's clip acts already at its lower bound",
        "kernels/triton_tokens.py",
        {"ratio >= 1 - below": "ratio > 1 - below"},
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[gspo-triton]",),
    ),
    (
        "Triton's clipped fraction counts the bounds",
        "kernels/triton_tokens.py",
        {
            "own & (ratio < 1 - below), own & (ratio > 1 + above)": "own & (ratio <= 1 - below), "
            "own & (ratio >= 1 + above)"
        },
        (f"{KERNELS}::test_the_clip_does_not_act_at_its_bounds[grpo-triton]",),
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
        "kernels/triton_tokens.py",
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
        ("tests/kernels/test_linear.py::test_the_weight_gradient_adds_up_in_float32_over_chunks[False]",),
    ),
    (
        "what is added to the float32 gradient is rounded to bfloat16",
        "kernels/products.py",
        {"addmm_(a[rows].to(total.dtype), b.to(total.dtype), alpha=alpha)": "add_(a[rows] @ b, alpha=alpha)"},
        ("tests/kernels/test_linear.py::test_products_add_to_a_float32_total_without_rounding_in_between[dtype0]",),
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
        {"wide if options.fp32_logits else hidden.dtype": "hidden.dtype"},
        ("tests/model/test_huggingface.py::test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights[True]",),
    ),
    (
        "Holm's correction without its running maximum",
        "comparison/statistics.py",
        {"highest = max(highest, min(": "highest = max(0.0, min("},
        ("tests/comparison/test_compare.py::test_a_verdict_goes_by_the_adjusted_p_which_never_falls",),
    ),
    (
        "a verdict by the p of its own test alone",
        "comparison/terminal.py",
        {"comparison.adjusted_p < LEVEL": "comparison.p < LEVEL"},
        ("tests/comparison/test_compare.py::test_a_verdict_goes_by_the_adjusted_p_which_never_falls",),
    ),
]

SAME_BITS = "tests/losses/test_peers.py::test_the_same_step_twice_gives_the_same_bits"
LARGE = f"{KERNELS}::test_more_logits_than_int32_can_count"
MUTANTS_ON_A_GPU = [
    (
        "float atomics in the sums over documents",
        "losses/documents.py",
        {
            'torch.segment_reduce(values.contiguous(), "sum", lengths=self._lengths, unsafe=True)': "values.new_zeros("
            "len(self._lengths)).index_add_(0, torch.repeat_interleave(self._lengths), values)"
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

"""Mistakes of the penalty against a reference and of the entropy bonus, for `test_mutants.py`."""

BONUS = "tests/losses/test_entropy_bonus.py"
KL = "tests/losses/test_kl.py"
RUNS = "tests/training/test_reference.py"
PASSES = "tests/kernels/test_passes.py::test_gradient_of_the_entropy"

MUTANTS_OF_PENALTIES = [
    (
        "the gradient of k3 is that of k2 (NeMo-RL: a ratio of value 1 left in the graph)",
        "losses/kl.py",
        {"(-(-distance).expm1()).where(moves, 0.0)": "distance.where(moves, 0.0)"},
        (f"{KL}::test_value_and_gradient_are_those_of_the_formula[torch-k3]",),
    ),
    (
        "k3_ratio without the gradient of its ratio",
        "losses/kl.py",
        {"ratio * (slopes + values.where(log_ratio.abs() <= LOG_RATIO_LIMIT, 0.0))": "ratio * slopes"},
        (f"{KL}::test_matches_reference[grpo-sample_mean-k3_ratio]",),
    ),
    (
        "policy and reference exchanged in k3",
        "losses/kl.py",
        {"return (-distance).expm1() + distance": "return distance.expm1() - distance"},
        (
            f"{KL}::test_value_and_gradient_are_those_of_the_formula[torch-k3]",
            f"{RUNS}::test_a_reference_from_a_folder_gives_its_log_probs",
        ),
    ),
    (
        "the distance is not clamped before exp",
        "losses/kl.py",
        {"    distance = clamped(distance)\n": ""},
        (f"{KL}::test_value_and_gradient_are_those_of_the_formula[torch-k3]",),
    ),
    (
        "tokens of advantage 0 feel no penalty",
        "losses/objective.py",
        {"self.family.silent_without_advantage and not self.penalties.active": "self.family.silent_without_advantage"},
        (
            f"{KL}::test_fused_head[grpo-sample_mean-basic-k1-4]",
            f"{BONUS}::test_fused_head[gspo-sample_mean-none-4]",
        ),
    ),
    (
        "the penalty is weighted by the correction, too (ms-swift)",
        "losses/objective.py",
        {
            "penalties = Penalties(loss.kl, loss.entropy_coefficient, mask, weights,": "penalties = None; given = (",
            "        penalties,\n": "        Penalties(loss.kl, loss.entropy_coefficient, mask, weights, *given),\n",
        },
        (f"{KL}::test_a_correction_leaves_the_penalties_alone[token truncated]",),
    ),
    (
        "a number of the reference at an untrained position counts",
        "losses/penalties.py",
        {"torch.where(self.mask, log_probs - self.ref_log_probs, 0.0)": "log_probs - self.ref_log_probs"},
        (f"{KL}::test_matches_reference[gspo-token_mean-k2]", f"{KL}::test_log_probs_given[k3]"),
    ),
    (
        "an infinite reference log-prob counts as 20",
        "losses/penalties.py",
        {"return torch.where(torch.isfinite(distance), distance, torch.nan)": "return distance"},
        (f"{KL}::test_a_reference_that_is_no_number_where_trained_names_the_document[torch-inf]",),
    ),
    (
        "the entropy's gradient without the entropy",
        "kernels/torch_passes.py",
        {".clamp(min=-1000.0) + entropy[0]": ".clamp(min=-1000.0)"},
        (f"{PASSES}[dtype1-4098-torch]", f"{BONUS}::test_matches_reference[sample_mean-grpo]"),
    ),
    (
        "the same in Triton",
        "kernels/triton_two_pass.py",
        {"* LN_2 + tl.load(entropies + row))": "* LN_2)"},
        (
            f"{PASSES}[dtype1-4098-triton]",
            f"{BONUS}::test_triton_matches_reference[gspo-sample_mean-dtype0]",
        ),
    ),
    (
        "Triton's entry of the label without the bonus",
        "kernels/triton_two_pass.py",
        {"                own += tl.sum(": "                own *= tl.sum("},
        (f"{PASSES}[dtype1-4098-triton]",),
    ),
    (
        "rows of coefficient 0 lose their bonus",
        "kernels/torch_passes.py",
        {"active = active | (by_entropy[0][rows] != 0)": "pass"},
        (f"{PASSES}[dtype1-4098-torch]",),
    ),
    (
        "Triton's single pass knows no bonus",
        "kernels/triton_one_pass.py",
        {"by_exponent = -bonus * LN_2": "by_exponent = 0.0 * bonus"},
        (f"{BONUS}::test_triton_matches_reference[grpo-sample_mean-dtype0]",),
    ),
    (
        "Triton's single pass knows no reference",
        "kernels/triton_one_pass.py",
        {"factor += pull * back": "factor += 0.0 * back"},
        (f"{KL}::test_triton_matches_reference[grpo-sample_mean-basic-k1-triton-dtype0]",),
    ),
    (
        "nor do its vectors",
        "kernels/triton_tokens.py",
        {"slope + pull * back": "slope"},
        ("tests/kernels/test_triton_families.py::test_vectors_match_those_of_pytorch[gspo-none]",),
    ),
    (
        "k3_ratio without the gradient of its ratio, in Triton",
        "kernels/triton_families.py",
        {"tl.where(tl.abs(log_ratio) <= 20.0, both, slope)": "slope"},
        (f"{KL}::test_triton_on_and_beyond_the_clamps[k3_ratio]",),
    ),
    (
        "the fused head rounds the gradient of a mean over a step to float16",
        "kernels/fused_head.py",
        {
            "coefficients * self.scale, temperature\n": "coefficients, temperature\n",
            "temperature / self.scale)": "temperature)",
        },
        (f"{BONUS}::test_fused_head_in_half_precision[grpo-dtype1-True]",),
    ),
    (
        "the reference follows the policy",
        "training/module.py",
        {
            "        log_probs = self.log_probs_of(self.reference.loss_inputs(micro_batch), micro_batch)[0]\n": (
                "        self.reference.model.load_state_dict(self.model.state_dict())\n"
                "        log_probs = self.log_probs_of(self.reference.loss_inputs(micro_batch), micro_batch)[0]\n"
            )
        },
        (f"{RUNS}::test_the_first_distance_is_exactly_zero[grpo]",),
    ),
    (
        "the reference of a resumed run is the checkpoint",
        "training/module.py",
        {
            "        with without_adapters(self.reference.model):\n": (
                "        if not hasattr(self, 'late'):\n"
                "            self.late = self.reference.model.load_state_dict(self.model.state_dict())\n"
                "        with without_adapters(self.reference.model):\n"
            )
        },
        (f"{RUNS}::test_a_resumed_run_equals_one_that_was_never_stopped[initial]",),
    ),
    (
        "all of the reference in bfloat16, its norms and embedding too",
        "training/build.py",
        {"if isinstance(module, nn.Linear | Conv1D) and not": "if True or not"},
        (f"{RUNS}::test_the_first_distance_is_exactly_zero_in_bfloat16[False]",),
    ),
    (
        "to load a reference draws random numbers",
        "training/build.py",
        {"with torch.random.fork_rng(devices=[]):": "with torch.random.fork_rng(enabled=bool(torch.rand(1) < 0)):"},
        (f"{RUNS}::test_a_reference_of_its_own_changes_no_draw",),
    ),
]

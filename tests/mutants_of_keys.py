"""Keys that do not arrive, and steps that go on where they should not: (name, file, edits, the tests that catch it)."""

ROW = "tests/config/test_keys.py::test_the_key_acts"
STEP = "tests/training/test_training.py"

MUTANTS_OF_KEYS = [
    (
        "training ignores the correction",
        "training/loss.py",
        {"temperature, level, correction, config": "temperature, level, None, config"},
        (f"{ROW}[correction/token_mask.high]",),
    ),
    (
        "a correction of the sampler's own log-probs is allowed",
        "config/rules/step.py",
        {'rollout.name == "policy" and rollout.old_log_probs == "sampling"': "False"},
        (
            "tests/config/test_validate.py::test_rule[correction=token_mask rollout.old_log_probs=sampling-"
            "correction=token_mask needs rollout.old_log_probs=training (-"
            "correction=off_policy_mask rollout.old_log_probs=sampling]",
        ),
    ),
    (
        "training ignores the temperature",
        "training/loss.py",
        {"config.rollout.temperature, config.metrics": "1.0, config.metrics"},
        (f"{ROW}[rollout/policy.temperature]", f"{ROW}[rollout/recorded.temperature]"),
    ),
    (
        "training ignores fp32_lm_head",
        "training/module.py",
        {"fp32_logits=self.config.model.fp32_lm_head": "fp32_logits=False"},
        (f"{ROW}[model/huggingface.fp32_lm_head]",),
    ),
    (
        "training ignores num_splits",
        "training/loss.py",
        {"num_splits=config.loss.num_splits": "num_splits=1"},
        (f"{ROW}[loss/grpo.num_splits]",),
    ),
    (
        "training ignores logits_memory_mb",
        "training/loss.py",
        {"logits_memory_mb=config.kernel.logits_memory_mb": "logits_memory_mb=512"},
        (f"{ROW}[kernel.logits_memory_mb]",),
    ),
    (
        "training ignores max_grad_norm",
        "training/accumulation.py",
        {"math.inf if self.max_grad_norm is None else self.max_grad_norm": "math.inf"},
        (f"{ROW}[optimizer.max_grad_norm]",),
    ),
    (
        "the optimizer ignores epsilon",
        "training/module.py",
        {", eps=config.epsilon": ""},
        (f"{ROW}[optimizer.epsilon]",),
    ),
    (
        "the cosine schedule is linear",
        "training/module.py",
        {"0.5 * (1.0 + math.cos(math.pi * progress))": "(1.0 - progress)"},
        (f"{ROW}[optimizer.schedule]",),
    ),
    (
        "a gradient of infinite norm still updates",
        "training/accumulation.py",
        {' and math.isfinite(metrics["grad_norm"]):': ":"},
        (f"{STEP}::test_a_gradient_whose_norm_is_infinite_changes_no_weight",),
    ),
    (
        "bad steps are never forgiven",
        "training/accumulation.py",
        {"self.num_updates += 1\n            self._bad_steps_in_a_row = 0": "self.num_updates += 1"},
        (f"{STEP}::test_bad_steps_count_only_in_a_row",),
    ),
]

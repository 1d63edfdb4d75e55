"""Mistakes of evaluation for `test_mutants.py`: (name, file, edits, what catches it)."""

NUMBERS = "tests/rollouts/test_evaluation.py"
RUNS = "tests/training/test_evaluation.py"
RULES = "tests/config/test_evaluation.py"

MUTANTS_OF_EVALUATION = [
    (
        "an evaluation draws from the random numbers of training",
        "training/state.py",
        {"    finally:\n        set_random_state(before)\n": "    finally:\n        pass\n"},
        (f"{RUNS}::test_an_evaluation_changes_no_bit_of_the_training",),
    ),
    (
        "standard errors over completions",
        "rollouts/evaluation.py",
        {"numbers[name], error = mean_and_error(values)": "numbers[name], error = mean_and_error(values * count)"},
        (f"{NUMBERS}::test_errors_are_over_prompts_and_not_over_completions",),
    ),
    (
        "pass@k by the share of right completions, which is biased",
        "rollouts/evaluation.py",
        {
            "1 - math.comb(completions - right, k) / math.comb(completions, k)": "1 - (1 - right / completions) ** k",
        },
        (f"{NUMBERS}::test_pass_at_k_is_the_share_of_all_subsets", f"{NUMBERS}::test_pass_at_k_is_unbiased"),
    ),
    (
        "weights that are no numbers have a likeliest token",
        "sampling/sampling_settings.py",
        {"tokens, 0 * scores.gather(-1, tokens)": "tokens, 0.0"},
        (f"{NUMBERS}::test_without_temperature_the_likeliest_token_is_taken",),
    ),
    (
        "of equal evaluations the first is the best",
        "runs/evaluations.py",
        {'key=lambda row: (row[number], row["step"])': "key=lambda row: row[number]"},
        ("tests/config/test_keys.py::test_the_key_acts[evaluation.best]",),
    ),
    (
        "the best checkpoint is deleted with the old ones",
        "training/checkpoint.py",
        {' and old.name != f"step-{best or 0:06d}"': ""},
        (f"{RUNS}::test_the_best_checkpoint_survives_later_ones_and_a_resume",),
    ),
    (
        "a resume keeps the evaluations of later steps",
        "runs/directory.py",
        {'if row["step"] <= step]': 'if row["step"] <= step or "set" in row]'},
        (f"{RUNS}::test_a_resumed_run_goes_on_with_the_same_training_and_evaluations",),
    ),
    (
        "an evaluation that is made again reaches MLflow twice",
        "tracking/metric_batches.py",
        {"if known not in self.delivered": 'if "set" in row or known not in self.delivered'},
        ("tests/tracking/test_evaluations.py::test_evaluations_are_delivered_once",),
    ),
    (
        "a run with evaluation is another configuration",
        "config/names.py",
        {', "evaluation."),': "),"},
        (f"{RULES}::test_runs_with_and_without_evaluation_are_of_one_configuration",),
    ),
    (
        "a data set of reasoning-gym with the next seed is held out",
        "config/evaluation.py",
        {"if -sizes[1] < one.seed - c.seed < sizes[0]:": "if one.seed == c.seed:"},
        (f"{RULES}::test_seeds_of_reasoning_gym_that_overlap_are_refused",),
    ),
    (
        "the file of training by another name is held out",
        "config/evaluation.py",
        {"os.path.realpath(os.path.expanduser(str(task.path)))": "str(task.path)"},
        (f"{RULES}::test_the_file_of_training_is_refused_and_another_is_not",),
    ),
]

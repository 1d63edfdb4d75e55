"""Mistakes of comparisons of runs for `test_mutants.py`: (name, file, edits, what catches it)."""

MEASURES = "tests/comparison/test_measures.py"
STATISTICS = "tests/comparison/test_statistics.py"
NEVER = f"{MEASURES}::test_a_run_that_never_reaches_the_threshold_counts_with_what_was_looked_at"

MUTANTS_OF_COMPARISON = [
    (
        "Holm's correction without its running maximum",
        "comparison/statistics.py",
        {"highest = max(highest, min(": "highest = max(0.0, min("},
        (f"{STATISTICS}::test_a_verdict_goes_by_the_adjusted_p_which_never_falls",),
    ),
    (
        "a verdict by the p of its own test alone",
        "comparison/terminal.py",
        {"comparison.adjusted_p < LEVEL": "comparison.p < LEVEL"},
        (f"{STATISTICS}::test_a_verdict_goes_by_the_adjusted_p_which_never_falls",),
    ),
    (
        "a run that never reaches the threshold is dropped",
        "comparison/groups.py",
        {
            "axis]) for one in group.reached]": "axis]) for one in group.reached if one.to]",
            "for run in group.counted), values, strict=True": "for run in group.counted), values, strict=False",
        },
        (NEVER,),
    ),
    (
        "a run that never reaches the threshold counts as one that did",
        "comparison/groups.py",
        {"one.to.get(axis, inf) <= self.limits[axis] for": "one.to.get(axis, 0) <= self.limits[axis] for"},
        (NEVER,),
    ),
    (
        "a run that ended at the threshold limits how far is looked",
        "comparison/groups.py",
        {"for one in found if axis not in one.to), default": "for one in found), default"},
        (f"{MEASURES}::test_a_run_that_ends_early_limits_the_others_unless_it_has_reached_the_threshold",),
    ),
    (
        "one lucky step reaches a threshold",
        "comparison/measures.py",
        {'np.searchsorted(x, x - goal.window, side="right"), ends - 1)': "ends - 1, ends - 1)"},
        (f"{MEASURES}::test_one_lucky_step_reaches_nothing_and_a_mean_of_equal_values_is_not_missed_by_rounding",),
    ),
    (
        "runs of other prompts are paired",
        "comparison/statistics.py",
        {" and one.prompts == other.prompts": ""},
        (f"{MEASURES}::test_seeds_are_paired_where_their_prompts_are_the_same",),
    ),
    (
        "pairs are made in the order of the runs, not by seed",
        "comparison/statistics.py",
        {
            "[other.values[seed] for seed in one.values] if paired else ": "",
        },
        (f"{STATISTICS}::test_samples_of_the_same_seeds_and_prompts_are_paired_by_seed",),
    ),
    (
        "metrics of training come before held-out ones",
        "comparison/measures.py",
        {'for name in (*firsts, "exact_match")': 'for name in ("exact_match", *firsts)'},
        (f"{MEASURES}::test_held_out_metrics_come_first_and_their_time_is_no_training",),
    ),
    (
        "runs without held-out metrics are left out where others have them",
        "comparison/measures.py",
        {"if all(run.values(name) for run in done)": "if any(run.values(name) for run in done)"},
        (f"{MEASURES}::test_without_held_out_metrics_in_every_run_none_is_left_out",),
    ),
    (
        "the time of evaluations counts as training",
        "runs/find.py",
        {' - evaluated[before["step"]]': ""},
        (f"{MEASURES}::test_held_out_metrics_come_first_and_their_time_is_no_training",),
    ),
    (
        "the seeds needed are counted from the spread of one of both",
        "comparison/statistics.py",
        {"np.sqrt(sum(variances) / counts)": "np.sqrt(variances[0] / counts)"},
        (f"{STATISTICS}::test_seeds_needed_are_those_of_the_tables[0.5-variances0-64]",),
    ),
]

"""Mistakes of evaluations, of comparisons over seeds, of what dumps say, and of rules that keep numbers apart."""

import math

from mutants import mutant


@mutant("rollouts.evaluation:pass_at_k", "test_pass_at_k_is_the_share_of_all_subsets")
def pass_at_k_by_the_share_of_right_completions(right, completions, correct, k):
    return 1 - (1 - correct / completions) ** k


@mutant("rollouts.evaluation:mean_and_error", "test_errors_are_over_prompts_and_not_over_completions")
def the_error_is_the_deviation(right, values):
    mean, error = right(values)
    return mean, None if error is None else error * math.sqrt(len(values))


@mutant("rollouts.evaluation:seed_of", "test_each_prompt_of_each_set_at_each_step_has_a_seed_of_its_own")
def every_evaluation_asks_with_the_same_seeds(right, seed, number):
    return right(seed, number % 2**32)


@mutant("training.evaluations:Evaluations.reached", "test_a_goal_ends_the_run_which_can_be_resumed")
def a_goal_that_is_met_exactly_is_not_reached(right, self, step):
    trainer = self._config.trainer
    goal, trainer.stop_at = trainer.stop_at, trainer.stop_at and math.nextafter(trainer.stop_at, math.inf)
    try:
        return right(self, step)
    finally:
        trainer.stop_at = goal


@mutant("config.evaluation:sampling", "test_a_stop_string_ends_the_completions_of_an_evaluation")
def evaluations_have_no_stop_strings(right, config):
    return right(config) | {"stop": []}


@mutant("config.evaluation:are_training_prompts", "test_seeds_of_reasoning_gym_that_overlap_are_refused")
def the_next_seed_of_reasoning_gym_is_held_out(right, config, one):
    return None if one.task.name == "reasoning_gym" and one.seed != config.seed else right(config, one)


@mutant("comparison.statistics:seeds_needed", "test_seeds_needed_are_those_of_the_tables")
def the_variance_is_that_of_one_sample(right, difference, variances):
    return right(difference, variances[:1])


@mutant(
    "comparison.statistics:_pairing",
    "test_samples_of_the_same_seeds_and_prompts_are_paired_by_seed",
)
def seeds_are_never_paired(right, sample):
    return right(sample), object()


@mutant("comparison.statistics:interquartile_mean", "test_the_interquartile_mean_and_its_interval_are_those_of_rliable")
def a_fifth_is_cut_for_a_quarter(right, values):
    import numpy as np

    cut = values.shape[-1] // 5
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


@mutant("comparison.statistics:interquartile_interval", "test_seeds_are_drawn_anew_within_their_stratum")
def strata_are_mixed(right, sample):
    from pgtoolkit.comparison.statistics import Sample

    return right(Sample({(number,): value for number, value in enumerate(sample.values.values())}))


@mutant("comparison.statistics:improvement", "test_the_probability_of_improvement_is_that_of_rliable")
def equal_runs_are_no_improvement(right, first, second):
    import numpy as np

    ours, theirs = first.strata, second.strata
    return np.mean([(theirs[name][:, None] > ours[name]).mean() for name in ours if name in theirs] or [0])


@mutant("comparison.measures:margin_of", "test_two_one_sided_tests_are_those_of_scipy")
def a_margin_is_two_sided(right, text, mean=1.0):
    return 2 * right(text, mean)


@mutant("comparison.statistics:_adjusted", "test_p_is_adjusted_over_planned_pairs_alone")
def p_is_adjusted_over_exploratory_pairs_too(right, p, counted):
    return right(p, counted | True)


@mutant("comparison.measures:final_of", "test_final_is_the_mean_of_the_last_evaluations")
def final_is_the_last_tenth_of_evaluations(right, values, metric):
    return right(values, "reward")


@mutant("comparison.groups:_carry_on", "test_a_run_that_collapsed_stays_where_it_ended")
def a_collapsed_run_counts_as_far_as_it_came(right, runs, metric):
    return right([], metric) or ["collapsed, and not dropped: a-1"]


@mutant("comparison.groups:_planned", "test_contrasts_are_with_the_base_that_differs_in_nothing_else")
def every_pair_with_a_base_is_planned(right, compared, against):
    right(compared, against)
    return {(i, j) for i in (0, 1) for j in range(2, len(compared.groups))}


@mutant("comparison.statistics:holm", "test_p_is_adjusted_by_holm")
def p_is_not_adjusted(right, p):
    return p


@mutant(
    "runs.series:rows_until",
    "test_a_resume_keeps_the_rows_up_to_its_step_and_those_alone",
)
def a_resume_keeps_a_row_too_many(right, path, step, *shape):
    return right(path, step + 1, *shape)


@mutant("runs.series:_parsed", "test_columns_are_what_the_rows_say_wherever_blocks_end")
def gaps_in_a_column_are_zero(right, data, names):
    import numpy as np

    found = right(data, names)
    return found and {name: np.nan_to_num(column, nan=0.0) for name, column in found.items()}


@mutant("comparison.statistics:mean_and_std", "test_runs_that_differ_in_the_seed_are_one_group")
def the_deviation_of_seeds_is_that_of_the_population(right, values):
    mean, deviation = right(values)
    return mean, None if deviation is None else deviation * math.sqrt(1 - 1 / len(values))


@mutant("comparison.groups:_limits", "test_of_runs_that_never_arrive_the_shortest_limits_all")
def runs_that_never_got_there_count_as_the_longest(right, goal, found):
    limits = right(goal, found)
    seen = {axis: [one.seen[axis] for one in found if axis not in one.to] for axis in limits}
    return {axis: max(values) if values else limits[axis] for axis, values in seen.items()}


@mutant("config.rules.step:parallelism", "test_what_is_refused_and_what_is_accepted")
def sequence_shards_cannot_divide_the_weights(right, c, report):
    right(c, report)
    p = c.parallelism
    if p.shard and p.data_parallel == 1 and p.sequence_data_parallel > 1:
        report.refuse("parallelism.shard=true", "parallelism.data_parallel > 1", 1, "x", "y")

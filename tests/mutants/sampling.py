"""Mistakes of decoding, of what a sampler gives, of tasks and their verifiers."""

from mutants import mutant


@mutant(
    "sampling.samplers:TransformersSampler._completion", "test_log_probs_are_those_of_the_distribution_sampled_from"
)
def log_probs_are_a_hundredth_too_small(right, self, tokens, log_probs):
    return right(self, tokens, log_probs - 0.01)


@mutant(
    "sampling.samplers:TransformersSampler._completion",
    "test_every_end_of_the_folder_and_the_tokenizer_ends_a_completion",
)
def the_end_of_a_sequence_is_no_token_of_the_completion(right, self, tokens, log_probs):
    return right(self, tokens[:-1], log_probs[:-1]) if len(tokens) > 1 else right(self, tokens, log_probs)


@mutant("sampling.sampling_settings:temperature_and_top_p", "test_log_probs_are_those_of_the_distribution_sampled_from")
def top_p_is_left_out(right, settings):
    return [one for one in right(settings) if "TopP" not in type(one).__name__]


@mutant("sampling.sampling_settings:likeliest", "test_without_temperature_the_likeliest_token_is_taken")
def weights_that_are_no_numbers_have_a_likeliest_token(right, input_ids, scores):
    return right(input_ids, scores.nan_to_num(0.0))


@mutant("sampling.draw:uniform_numbers", "test_numbers_are_those_of_splitmix64")
def all_completions_of_a_request_draw_the_same(right, rows, count):
    return right([(seed, 0) for seed, _ in rows], count)


@mutant("sampling.draw:draw", "test_the_token_is_where_the_cumulative_probability_exceeds")
def the_token_before_the_right_one_is_drawn(right, scores, uniform):
    tokens, log_probs = right(scores, uniform)
    return (tokens - 1).clamp(min=0), log_probs


@mutant("sampling.samplers:uniform_numbers", "test_a_completion_is_drawn_by_its_request_alone")
def rows_are_drawn_by_their_place_in_the_batch(right, rows, count):
    return right([(place, 0) for place in range(len(rows))], count)


@mutant("model.decoding:_attend", "test_log_probs_are_the_models_own")
def tokens_are_written_one_place_late(right, query, key, value, keys, values, positions, scaling, window):
    return right(query, key, value, keys, values, positions + 1, scaling, window)


@mutant("model.decoding:Cache.read", "test_greedy_completions_are_those_of_generate")
def rows_have_the_prompts_of_their_neighbours(right, self, layer, key, value):
    rows, prompt_of = self.reading
    self.reading = rows, prompt_of.roll(1)
    right(self, layer, key, value)
    self.reading = rows, prompt_of


@mutant("model.attention:_one_document", "test_a_query_sees_the_keys_of_its_document_up_to_itself")
def attention_has_no_window(right, query, key, value, scaling, window):
    return right(query, key, value, scaling, None)


@mutant("tasks.shuffle:seed_of", "test_a_seed_is_the_prompts_own_in_this_run")
def every_prompt_has_the_seed_of_the_run(right, seed, number):
    return seed % 2**32

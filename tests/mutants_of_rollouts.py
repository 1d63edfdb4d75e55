"""Mistakes of rollouts and models for `test_mutants.py`: (name, file, edits, what catches it)."""

MUTANTS_OF_ROLLOUTS = [
    (
        "the sampler's log-probs are lost where the trainer computes the old ones",
        "rollouts/policy.py",
        {", sampling_log_probs=d.old_log_probs)": ")"},
        ("tests/rollouts/test_policy.py::test_old_log_probs_are_those_of_the_sampler_or_of_training[training]",),
    ),
    (
        "a rank without documents knows no vector that the others have",
        "rollouts/steps.py",
        {"for document in part], known) for part": "for document in part]) for part"},
        (
            "tests/rollouts/test_packing.py::test_a_vector_that_a_document_lacks_is_in_no_micro_batch_of_the_step"
            "[sampling_log_probs]",
        ),
    ),
    (
        "the checksum of rows changes for files of before",
        "rollouts/rows.py",
        {
            "[name.encode() + values.tobytes() for name, values in known if values is not None]": (
                '[b"" if values is None else name.encode() + values.tobytes() for name, values in known]'
            )
        },
        ("tests/rollouts/test_rollout_files.py::test_rows_have_the_checksum_that_files_of_before_hold",),
    ),
    (
        "a correction of two equal columns",
        "rollouts/recorded.py",
        {'"sampling_log_probs" in self._rules.required and not self._is_mismatched': "False"},
        ("tests/training/test_training.py::test_a_correction_needs_sampling_log_probs_that_differ",),
    ),
    (
        "a piece of the packed axis without its sampling log-probs",
        "model/sequence_data.py",
        {"names += known_vectors(micro_batch)": "pass"},
        (
            "tests/model/test_parallel_models.py::test_every_objective_is_the_same_however_the_model_is_spread"
            "[sequence-data]",
        ),
    ),
    (
        "groups that differ only by what was taken off for length are kept",
        "rollouts/dynamic_sampling.py",
        {"d.reward if d.task_reward is None else d.task_reward": "d.reward"},
        (
            "tests/rollouts/test_dynamic_sampling.py::test_what_is_taken_off_for_the_length_does_not_make_a_group_worth_keeping",
        ),
    ),
    (
        "dynamic sampling keeps the latest of the groups that teach nothing",
        "rollouts/dynamic_sampling.py",
        {"without[max(0, missing) :]": "without[: len(without) - max(0, missing)]"},
        ("tests/rollouts/test_dynamic_sampling.py::test_what_is_dropped_and_what_stays",),
    ),
    (
        "a resumed run counts prompts by batches",
        "rollouts/policy.py",
        {'self._next_prompt = state["next_prompt"]': "self._next_prompt = (self._number + 1) * 4"},
        ("tests/rollouts/test_dynamic_sampling.py::test_a_resumed_run_samples_what_it_would_have_sampled",),
    ),
    (
        "the punishment for length begins one token late",
        "rollouts/advantages.py",
        {"- (longest - buffer))": "- (longest - buffer) - 1)"},
        ("tests/rollouts/test_dynamic_sampling.py::test_the_punishment_is_that_of_the_paper",),
    ),
    (
        "metrics of the ratio are given where nobody knows the old log-probs",
        "losses/metrics.py",
        {"if not with_old_log_probs:": "if False:"},
        ("tests/training/test_supervised.py::test_nothing_is_told_of_rewards_and_old_log_probs_that_nobody_has",),
    ),
    (
        "rows without old log-probs beside others that have them are taken",
        "rollouts/recorded.py",
        {"if (field, True) in self._first and (field, False) in self._first:": "if False:"},
        ("tests/training/test_supervised.py::test_what_some_rows_lack_is_refused[old_log_probs]",),
    ),
    (
        "a phantom token for each fully masked document, in the step's totals (slime)",
        "rollouts/steps.py",
        {"num_tokens=sum(tokens_per_group)": "num_tokens=sum(max(1, document.num_trained) for document in documents)"},
        ("tests/rollouts/test_steps.py::test_totals_count_what_is_masked_and_empty",),
    ),
    (
        "sampling ignores the temperature",
        "sampling/sampling_settings.py",
        {"temperature=float(rollout.temperature)": "temperature=1.0"},
        (
            "tests/sampling/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[0.5-None]",
            "tests/sampling/test_samplers.py::test_tokens_are_as_frequent_as_the_distribution_says[2.0-None-False]",
        ),
    ),
    (
        "sampling ignores top_p",
        "sampling/sampling_settings.py",
        {"top_p=1.0 if top_p is None else top_p": "top_p=1.0"},
        (
            "tests/sampling/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[1.0-0.7]",
            "tests/sampling/test_samplers.py::test_tokens_are_as_frequent_as_the_distribution_says[0.6-0.8-False]",
        ),
    ),
    (
        "sampled log-probs not renormalised after top_p has cut the distribution",
        "sampling/samplers.py",
        {"[*temperature_and_top_p(self.settings), drawn]": "[drawn, *temperature_and_top_p(self.settings)]"},
        ("tests/sampling/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[1.0-0.7]",),
    ),
    (
        "the model folder's generation_config.json acts on what is sampled",
        "sampling/sampling_settings.py",
        {"own, model.generation_config = model.generation_config, GenerationConfig()": "own = model.generation_config"},
        ("tests/sampling/test_samplers.py::test_what_the_folder_suggests_does_not_act[repetition_penalty]",),
    ),
    (
        "the sampler is not told which weights it samples from after an update",
        "rollouts/policy.py",
        {"policy.weights, self.trained.num_updates)": "policy.weights, 0)"},
        ("tests/rollouts/test_policy.py::test_every_prompt_is_sampled_with_the_weights_of_now",),
    ),
    (
        "a batch is sampled a step later than the lag says",
        "rollouts/policy.py",
        {"self.config.accumulation) <= self._ahead:": "self.config.accumulation) < self._ahead:"},
        ("tests/rollouts/test_lag.py::test_ages_of_a_lag",),
    ),
    (
        "only the batch in use is part of the state, not those that were sampled ahead",
        "rollouts/policy.py",
        {"for batch in self._batches.values() for": "for batch in [*self._batches.values()][:1] for"},
        ("tests/rollouts/test_lag.py::test_a_run_continues_bit_for_bit_from_every_step[lag]",),
    ),
    (
        "a checkpoint forgets what is being sampled",
        "rollouts/policy.py",
        {
            'becomes part of the state."""\n        self._finish()\n': 'becomes part of the state."""\n',
        },
        ("tests/rollouts/test_lag.py::test_a_run_continues_bit_for_bit_from_every_step[overlap]",),
    ),
    (
        "staleness is bounded for the first step of a batch alone",
        "config/schedule.py",
        {"rollout.max_staleness - (own - 1)": "rollout.max_staleness"},
        ("tests/rollouts/test_overlap.py::test_no_document_is_trained_later_than_allowed[how2-2-2]",),
    ),
    (
        "training waits for what is being sampled",
        "rollouts/policy.py",
        {"            if self._rollout.max_staleness is None:\n": "            if True:\n"},
        ("tests/rollouts/test_overlap.py::test_a_batch_is_sampled_while_another_is_trained",),
    ),
    (
        "in the background the weights are sampled from as they are being trained",
        "sampling/samplers.py",
        {"None if self._beside_training or policy": "None if policy", "if self._beside_training:\n": "if False:\n"},
        ("tests/rollouts/test_overlap.py::test_a_batch_is_sampled_while_another_is_trained",),
    ),
    (
        "what is sampled in the background draws from the random state of all",
        "sampling/samplers.py",
        {"1, generator=self.generator": "1, generator=None"},
        (
            "tests/rollouts/test_overlap.py::test_the_global_random_state_stays_as_it_is",
            "tests/rollouts/test_overlap.py::test_no_timing_and_nobody_elses_random_numbers_change_a_run",
        ),
    ),
    (
        "the old log-probs of training are one token off",
        "rollouts/policy.py",
        {".cpu()[micro_batch.labels >= 0]": ".cpu().roll(1)[micro_batch.labels >= 0]"},
        ("tests/rollouts/test_policy.py::test_old_log_probs_are_those_of_the_sampler_or_of_training[training]",),
    ),
    (
        "the scores of every sampled token are kept",
        "sampling/samplers.py",
        {
            "self.log_probs.append(log_probs.gather(-1, tokens))": (
                "self.log_probs.append(log_probs.gather(-1, tokens))\n"
                "        self.__dict__.setdefault('all', []).append(scores)"
            )
        },
        ("tests/sampling/test_samplers.py::test_memory_does_not_grow_with_the_vocabulary_times_the_completion",),
    ),
    (
        "documents share a row in a model that does not keep them apart",
        "model/policy.py",
        {"not (padded or self.packs)": "not (padded or True)"},
        ("tests/model/test_probe.py::test_a_document_is_computed_as_if_it_were_alone[Mamba-mixed]",),
    ),
    (
        "the sampler rounds its logits to bfloat16 where training computes them in float32",
        "model/policy.py",
        {"if fp32_lm_head and dtype": "if False and dtype"},
        ("tests/sampling/test_samplers.py::test_sampling_has_the_head_of_training[True]",),
    ),
    (
        "the sampler's copy keeps the weights that it was made with",
        "sampling/samplers.py",
        {"        if self._beside_training:\n": "        if self._beside_training and not version:\n"},
        ("tests/sampling/test_samplers.py::test_a_copy_samples_as_the_policy_did_when_it_was_published[true]",),
    ),
    (
        "decoding takes the likeliest token",
        "sampling/samplers.py",
        {"(noise + scores).argmax(-1)": "scores.argmax(-1)"},
        ("tests/sampling/test_samplers.py::test_tokens_are_as_frequent_as_the_distribution_says[1.0-None-True]",),
    ),
    (
        "rows that go on get the keys of rows that have ended",
        "model/decoding.py",
        {"values[rows] for values in kept": "values[: len(rows)] for values in kept"},
        ("tests/model/test_decoding.py::test_rows_that_have_ended_are_dropped_and_the_others_go_on[1-cpu]",),
    ),
    (
        "decoding shares keys among other queries than the model does",
        "model/decoding.py",
        {
            "query.reshape(rows, keys.shape[1], -1, width)": "query.reshape(rows, -1, keys.shape[1], width)"
            ".transpose(1, 2)"
        },
        ("tests/model/test_decoding.py::test_log_probs_are_the_models_own[qwen2-cpu]",),
    ),
    (
        "attention does not look at more of the cache as it fills",
        "model/decoding.py",
        {"_rounded(self._longest + segment)": "_rounded(self._longest + _FIRST_SEGMENT)"},
        ("tests/model/test_decoding.py::test_log_probs_are_the_models_own[qwen2-cpu]",),
    ),
    (
        "decoding sees past the window of attention",
        "model/decoding.py",
        {"self._positions[:, None, None, None] - window,": "self._positions[:, None, None, None] - window - 1,"},
        ("tests/model/test_decoding.py::test_log_probs_are_the_models_own[mistral-cpu]",),
    ),
    (
        "what the sampler has started goes on after the run",
        "training/train.py",
        {"                started.callback(loader.source.close)\n": ""},
        ("tests/training/test_training.py::test_the_sampler_is_closed_however_a_run_ends[RuntimeError]",),
    ),
    (
        "prompts without the token of the beginning that the model's tokenizer adds",
        "tasks/prompts.py",
        {'for prompt in prompts])["input_ids"]': 'for prompt in prompts], add_special_tokens=False)["input_ids"]'},
        ("tests/model/test_huggingface.py::test_prompts_are_tokens_as_the_tokenizer_makes_them",),
    ),
    (
        "labels that are not shifted: each position predicts its own token",
        "packing.py",
        {"labels=labelled(tokens[trained], -1)": "labels=torch.where(labelled(tokens[trained], -1) < 0, -1, tokens)"},
        ("tests/rollouts/test_packing.py::test_a_document_without_a_trained_token_stays",),
    ),
    (
        "old log-probs that are not shifted with their labels",
        "packing.py",
        {"labelled(_concatenate(old, torch.float32), 0.0)": "labelled(_concatenate(old, torch.float32), 0.0).roll(1)"},
        ("tests/losses/test_peers.py::test_old_log_probs_and_advantages_are_shifted_with_their_labels",),
    ),
    (
        "advantages divided by the population's standard deviation instead of the sample's",
        "rollouts/advantages.py",
        {"/ max(1, len(rewards) - 1)": "/ len(rewards)"},
        ("tests/rollouts/test_advantages.py::test_worked_example",),
    ),
    (
        "the next step's documents taken before this step's update is made",
        "rollouts/steps.py",
        {
            "                documents = self._take()\n": "                documents = self._take()\n"
            "                self.source.document(self._position)\n"
        },
        ("tests/rollouts/test_steps.py::test_the_next_batch_is_not_asked_for_before_it_is_needed[short-False]",),
    ),
    (
        "a step that closes on a group asks for the next batch before its update",
        "rollouts/steps.py",
        {"self.close_on_groups and not at_batch_end and": "self.close_on_groups and"},
        ("tests/rollouts/test_steps.py::test_the_next_batch_is_not_asked_for_before_it_is_needed[carry-True]",),
    ),
    (
        "ranks compare their documents without the advantages",
        "rollouts/steps.py",
        {'"old_log_probs", "advantages", *known):': '"old_log_probs", *known):'},
        ("tests/rollouts/test_steps.py::test_ranks_that_hold_other_documents_are_told[advantages]",),
    ),
    (
        "recorded rows that change while they are in use",
        "rollouts/recorded.py",
        {"or row.digest(0) != self._checksum[index]": ""},
        (
            "tests/rollouts/test_recorded.py::test_a_file_that_changes_while_it_is_in_use"
            "[write_jsonl-in place, at the same time]",
        ),
    ),
    (
        "a position in the data one step ahead of the weights",
        "rollouts/steps.py",
        {'{"position": self._position,': '{"position": self._position + self.accumulation.docs_per_step,'},
        ("tests/rollouts/test_steps.py::test_continuing_from_any_step[short-0]",),
    ),
    (
        "a rank whose documents ran out makes fewer passes than the others (Fast-LLM: a bare next before a collective)",
        "rollouts/steps.py",
        {" + [[]] * (max(map(len, shares)) - len(shares[data_rank]))": ""},
        (
            "tests/ranks/test_processes_steps.py::test_every_rank_gets_as_many_micro_batches_and_together_they_hold_the_step_once",
        ),
    ),
]

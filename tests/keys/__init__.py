"""The tests of the single keys of the configuration: each changes a key, and asserts that the
number which this key configures changes as it should.

How the table of these tests works:

1. `tests/config/test_keys.py` runs `test_the_key_acts` once for every key of the schema, and a new
   key fails until it has an entry here. A key is named as in `loss/gspo.epsilon_low` where its
   group has options, and as in `kl.kind` elsewhere.
2. An entry is a function in a module of this folder, with the names of its keys above it:
   `@key_test("rollout/policy.prompts_per_batch", "rollout/policy.group_size")`. The decorator puts
   it into `KEY_TESTS`.
3. The function's parameters are pytest fixtures, by their names, and perhaps `key`, the name of
   the key under test. With `key` it runs once for each of its keys. Without, it tests all of them
   together and runs once.
4. A key that an ordinary test of another folder shows needs no function: `TESTED_ELSEWHERE` names
   that test. `test_the_key_has_a_test` checks that the test exists.

`small_runs.py` has the small models, documents and files that the functions share.
"""

# ruff: noqa: E501 (names of tests are not broken)

from __future__ import annotations

from collections.abc import Callable

from pgtoolkit.losses.families import FAMILIES

KEY_TESTS: dict[str, Callable[..., None]] = {}
"""The function that tests each key; filled by `key_test`."""


def key_test(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that enters a function as the test of these keys."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        entered_twice = set(keys) & KEY_TESTS.keys()
        assert not entered_twice, f"a key has one test: {sorted(entered_twice)}"
        KEY_TESTS.update(dict.fromkeys(keys, function))
        return function

    return enter


_VLLM = "sampling/test_vllm.py"
TESTED_ELSEWHERE = {
    **dict.fromkeys(
        [f"loss/{name}.num_splits" for name, family in FAMILIES.items() if family.scope != "token"]
        + ["model/tiny.fp32_lm_head"],
        # Each of these keys accepts a single value.
        "config/test_golden_refusals.py::test_every_configuration_of_the_list_is_refused_or_accepted_as_it_says",
    ),
    **dict.fromkeys(
        ("accumulation.docs_per_step", "accumulation.last_step"),
        "rollouts/test_steps.py::test_last_step_decides_on_the_documents_left_at_the_end_of_a_batch",
    ),
    "callbacks.own": "training/test_callbacks.py::test_early_stopping_ends_a_run_of_constant_rewards_at_its_fourth_batch",
    "accumulation.max_tokens": "rollouts/test_steps.py::test_max_tokens_does_not_change_the_documents_of_a_step",
    "accumulation.micro_batches_per_step": "rollouts/test_steps.py::test_micro_batches_per_step_makes_steps_of_that_many_micro_batches",
    "rollout/policy.retire_at": "rollouts/test_retired.py::test_solved_prompts_are_asked_once_and_others_in_every_pass",
    "trainer.stop_at": "training/test_evaluation.py::test_a_goal_that_is_reached_exactly_ends_the_run_which_can_be_resumed",
    **dict.fromkeys(
        ("evaluation.best", "trainer.checkpoint_every", "trainer.keep_checkpoints"),
        "training/test_evaluation.py::test_the_best_checkpoint_is_kept_beside_the_last",
    ),
    **dict.fromkeys(
        ("task/conversation.chat", "task/conversation.system_prompt"),
        "tasks/test_chat.py::test_a_conversation_goes_through_the_template_turn_by_turn",
    ),
    **dict.fromkeys(
        [
            f"task/{name}.{key}"
            for name in ("reasoning_gym", "prompts", "sums")
            for key in ("chat", "system_prompt")
        ],
        "tasks/test_chat.py::test_a_run_trains_on_prompts_through_the_template",
    ),
    **dict.fromkeys(
        [
            f"task/{name}.chat_arguments"
            for name in ("reasoning_gym", "prompts", "conversation", "sums")
        ],
        "tasks/test_chat.py::test_a_template_gets_the_arguments_of_task_chat_arguments",
    ),
    "task/prompts.config": "tasks/test_hub_data.py::test_a_data_set_is_read_by_its_name_configuration_and_split",
    "task/prompts.verifier_concurrency": "tasks/test_reward_functions.py::"
    "test_calls_of_an_async_function_wait_concurrently_up_to_the_limit",
    "task/prompts.verifier_retries": "tasks/test_reward_functions.py::"
    "test_a_failing_server_is_asked_again_as_often_as_the_key_says",
    "task/prompts.verifier_retry_seconds": "tasks/test_reward_functions.py::"
    "test_each_wait_is_four_times_the_one_before_up_to_a_minute",
    **dict.fromkeys(
        ("task/sums.num_terms", "task/sums.num_digits"),
        "tasks/test_generated.py::test_sums_have_the_configured_size_and_are_scored_by_the_last_number",
    ),
    "task/reverse.num_digits": "tasks/test_tasks.py::test_the_length_of_generated_prompts_is_checked_by_the_longest",
    "kl.beta": "training/test_reference.py::test_distillation_has_the_kl_over_the_vocabulary",
    "advantage.path": "rollouts/test_estimators.py::test_a_users_function_gets_all_groups_of_a_batch",
    "rollout/policy.max_sampling_rounds": "rollouts/test_dynamic_sampling.py::"
    "test_a_resumed_run_samples_the_prompts_of_the_uninterrupted_run",
    "rollout/policy.old_log_probs": "rollouts/test_sampled.py::"
    "test_old_log_probs_of_training_are_computed_by_the_model_beside_the_samplers",
    "rollout/policy.temperature": "training/test_reference.py::test_the_distance_to_a_reference_from_a_folder_is_that_of_its_logits",
    "rollout/policy.truncated": "rollouts/test_truncated.py::"
    "test_the_gradient_of_sampled_completions_is_that_of_the_finished_ones",
    "rollout/recorded.truncated": "rollouts/test_truncated.py::test_recorded_rows_must_say_whether_they_are_truncated",
    "rollout/policy.stop": "tasks/test_stops.py::test_a_stop_string_changes_no_token_and_no_log_prob_before_it",
    **dict.fromkeys(
        ("rollout/recorded.epochs", "rollout/recorded.shuffle"),
        "rollouts/test_recorded.py::test_every_epoch_is_the_data_once_and_shuffled_by_groups",
    ),
    **dict.fromkeys(
        ("rollout/recorded.chat", "rollout/recorded.trained_turns"),
        "rollouts/test_conversations.py::test_a_run_trains_on_the_turns_that_are_asked_for",
    ),
    "rollout/recorded.too_long": "rollouts/test_conversations.py::"
    "test_rows_that_are_too_long_are_refused_or_skipped_with_their_count",
    "rollout/recorded.group_size": "rollouts/test_recorded.py::test_without_group_ids_group_size_makes_the_groups",
    "rollout/recorded.max_completion_length": "rollouts/test_rollout_files.py::test_rows_beyond_the_limits_of_the_run_are_refused",
    "sampler/transformers.processes": "sampling/test_copies.py::test_several_processes_share_the_prompts_of_a_batch",
    "sampler/vllm.answer_seconds": f"{_VLLM}::test_a_faulty_answer_is_refused_and_the_server_can_be_asked_again",
    **dict.fromkeys(
        ("model/huggingface.compile", "model/tiny.compile"),
        "model/test_compiled.py::test_the_copies_of_a_policy_compute_as_it_does",
    ),
    "model/huggingface.dtype": "model/test_huggingface.py::"
    "test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights",
    "model/huggingface.lora_alpha": "model/test_lora.py::test_the_gradient_is_that_of_the_plain_formulation",
    "model/huggingface.lora_rank": "model/test_lora.py::test_the_gradient_is_that_of_the_plain_formulation",
    "model/huggingface.lora_targets": "model/test_lora.py::test_the_layers_that_are_named_get_adapters",
    "rollout/policy.keep_completions": "training/test_kept_completions.py::test_keeping_completions_changes_neither_training_nor_digest",
    "rollout/policy.lag": "rollouts/test_lag.py::test_a_batch_is_sampled_by_the_weights_of_lag_updates_ago",
    "rollout/policy.max_staleness": "rollouts/test_lag.py::test_no_document_is_trained_later_than_allowed",
    "rollout/policy.save_path": "rollouts/test_lag.py::"
    "test_batches_are_recorded_once_they_are_used_with_the_version_that_wrote_them",
    **dict.fromkeys(
        [f"loss/{name}.score_centering" for name in ("reinforce", "cispo", "icepop")],
        "rollouts/test_top_tokens.py::test_the_loss_of_recorded_rows_is_that_of_the_specification",
    ),
    "sampler/transformers.keep_top": "rollouts/test_top_tokens.py::"
    "test_the_likeliest_tokens_are_those_of_the_logits",
    "sampler/vllm.keep_top": f"{_VLLM}::test_a_server_gives_the_likeliest_tokens_that_are_asked_for",
    "rollout/policy.top_k": "rollouts/test_kept_tokens.py::"
    "test_the_kept_tokens_are_those_of_the_logits",
    "rollout/policy.top_p": "sampling/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from",
    "sampler/transformers.dtype": "training/test_float16.py::test_a_sampler_of_another_number_type_has_log_probs_further_from_the_trainers",
    "sampler/transformers.static_cache": "tasks/test_stops.py::test_with_a_static_cache_stop_strings_are_looked_for_every_32_tokens",
    "sampler/vllm.executable": f"{_VLLM}::test_a_missing_program_is_refused_and_leaves_no_folder",
    "sampler/vllm.name": f"{_VLLM}::test_a_missing_program_is_refused_and_leaves_no_folder",
    "sampler/vllm.start_seconds": f"{_VLLM}::test_another_program_at_the_address_of_a_server_is_refused",
    "sampler/vllm.tolerance": f"{_VLLM}::test_old_weights_are_refused_though_log_probs_are_within_the_tolerance",
    "sampler/vllm.urls": f"{_VLLM}::test_another_program_at_the_address_of_a_server_is_refused",
    "sampler/vllm.weights_folder": f"{_VLLM}::test_the_weights_of_the_folder_are_a_hugging_face_model",
    "trainer.accept_changed_data": "training/test_data.py::test_changed_data_are_refused_until_they_are_accepted_once",
    "trainer.max_bad_steps": "training/test_training.py::test_only_bad_steps_in_a_row_end_a_run",
}
"""The ordinary test, below tests/, that shows each of these keys."""

"""Mistakes of accumulation, updates, checkpoints, resumes and adapters."""

import math
from dataclasses import replace

from mutants import mutant

CUT = "test_the_documented_module_trains_the_same_however_its_steps_are_cut"
RESUMED = "test_resume_at_every_step_is_bit_equal"


@mutant("training.accumulation:DynamicAccumulation.backward_of_all", CUT)
def the_loss_is_divided_by_the_number_of_micro_batches(right, self, micro_batches, totals):
    outputs = right(self, micro_batches, totals)
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(micro_batches)
    return outputs


@mutant("training.accumulation:DynamicAccumulation.backward_of_all", CUT)
def a_micro_batch_of_the_step_is_left_out(right, self, micro_batches, totals):
    return right(self, micro_batches[:-1], totals)


@mutant("training.accumulation:DynamicAccumulation.backward_of_all", CUT)
def only_the_gradient_of_the_last_micro_batch_is_kept(right, self, micro_batches, totals):
    right(self, micro_batches[:-1], totals)
    self.optimizer.zero_grad()
    return right(self, micro_batches[-1:], totals)


@mutant("training.accumulation:DynamicAccumulation.backward_of_all", CUT)
def each_micro_batch_is_divided_by_totals_of_its_own(right, self, micro_batches, totals):
    found = []
    for one in micro_batches:
        trained = int((one.labels >= 0).sum())
        found += right(self, [one], replace(totals, num_documents=one.num_documents, num_tokens=trained))
    return found


@mutant("training.accumulation:DynamicAccumulation._over_ranks", "test_any_module_is_driven_over_data_parallel_ranks")
def loss_and_metrics_are_those_of_one_rank(right, self, outputs):
    from pgtoolkit.ranks.layout import ONE_PROCESS

    layout, self.layout = self.layout, ONE_PROCESS
    try:
        return right(self, outputs)
    finally:
        self.layout = layout


@mutant(
    "training.accumulation:DynamicAccumulation._step_metrics",
    "test_a_gradient_whose_norm_is_infinite_changes_no_weight",
)
def a_gradient_that_is_not_finite_updates(right, self, outputs, step):
    metrics = right(self, outputs, step)
    return metrics | {name: 1.0 for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])}


@mutant("training.module:learning_rate", "test_an_update_is_made_at_the_reported_learning_rate")
def the_rate_is_always_the_configured_one(right, config, num_updates, max_steps):
    return config.learning_rate


@mutant("training.module:learning_rate", "test_the_key_acts[optimizer.schedule]")
def the_cosine_schedule_is_linear(right, config, num_updates, max_steps):
    from pgtoolkit.config.schema_run import Schedule

    linear = config.schedule == Schedule.cosine
    return right(replace(config, schedule=Schedule.linear) if linear else config, num_updates, max_steps)


@mutant("training.module:PolicyGradientModule._precise", "test_the_key_acts[model/huggingface.fp32_lm_head]")
def fp32_lm_head_is_left_out(right, self, head):
    return replace(head, fp32_logits=False)


@mutant("training.module:_here", "test_a_teacher_reads_another_prompt")
def a_teacher_s_tokens_are_taken_where_the_policy_s_stand(right, values, micro_batch):
    return values[: len(micro_batch.tokens)]


@mutant("training.module:PolicyGradientModule.with_reference", "test_the_first_distance_is_exactly_zero")
def the_reference_is_the_policy_in_training(right, self, micro_batch):
    if self.reference is None:
        return micro_batch
    return replace(micro_batch, ref_log_probs=self.log_probs(micro_batch))


# Checkpoints.


@mutant("training.checkpoint:_prune", "test_the_best_checkpoint_survives_later_ones_and_a_resume")
def the_best_checkpoint_is_deleted_with_the_old_ones(right, newest, keep, best):
    return right(newest, keep, None)


@mutant("training.checkpoint:checksum", "test_no_damage_passes_for_a_checkpoint[model.safetensors-one byte]")
def a_damaged_file_has_the_checksum_of_a_whole_one(right, path):
    return dict.fromkeys(right(path), 0)


# Resumes.


@mutant(
    "training.state:_restore_tensors",
    "test_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration",
)
def the_moments_of_the_optimizer_begin_anew(right, module, state, names):
    right(module, state, names)
    module.optimizer.state.clear()


@mutant("training.state:restore", "test_the_count_of_skipped_steps_goes_on_after_a_resume")
def skipped_steps_are_forgotten(right, module, state):
    right(module, state)
    module.num_skipped_steps = 0


@mutant("rollouts.steps:StepLoader.load_state_dict", "test_resume_of_recorded_rollouts_is_bit_equal")
def the_place_in_the_data_begins_anew(right, self, state):
    right(self, state)
    self._position = 0


# Adapters.


@mutant("model.lora:_merged", "test_the_merged_weights_are_the_policy")
def the_sampler_has_the_weights_that_training_began_with(right, layer):
    return layer.get_base_layer().weight


@mutant("model.lora:without_adapters", "test_the_reference_is_the_model_without_its_adapters")
def the_reference_has_the_adapters_of_the_policy(right, model):
    import contextlib

    return contextlib.nullcontext()

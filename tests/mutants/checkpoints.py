"""Mistakes of checkpoints and resumes."""

import math

from mutants import mutant


@mutant("training.checkpoint:_prune")
def the_best_checkpoint_is_deleted_with_the_old_ones(right, newest, keep, best):
    return right(newest, keep, None)


@mutant("runs.checksums:checksum")
def a_damaged_file_has_the_checksum_of_a_whole_one(right, path, most=math.inf):
    return dict.fromkeys(right(path, most), 0)


@mutant("training.state:_restore_tensors")
def the_moments_of_the_optimizer_begin_anew(right, module, state, names):
    right(module, state, names)
    module.optimizer.state.clear()


@mutant("training.state:restore")
def skipped_steps_are_forgotten(right, module, state):
    right(module, state)
    module.num_skipped_steps = 0


@mutant("rollouts.step_loader:StepLoader.load_state_dict")
def the_place_in_the_data_begins_anew(right, self, state):
    right(self, state)
    self._position = 0

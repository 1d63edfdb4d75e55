"""Mistakes in checkpoints and resumes."""

import math

from mutants import mutant


@mutant("training.checkpoint:_prune")
def the_best_checkpoint_is_deleted_like_older_ones(right, newest, keep, best):
    return right(newest, keep, None)


@mutant("runs.checksums:checksum")
def a_damaged_file_has_the_checksum_of_the_undamaged_one(right, path, limit=math.inf):
    return dict.fromkeys(right(path, limit), 0)


@mutant("training.state:_restore_tensors")
def a_resume_forgets_the_moments_of_the_optimizer(right, module, state, names):
    right(module, state, names)
    module.optimizer.state.clear()


@mutant("training.state:restore")
def a_resume_forgets_the_number_of_skipped_steps(right, module, state):
    right(module, state)
    module.num_skipped_steps = 0


@mutant("rollouts.step_loader:StepLoader.load_state_dict")
def a_resume_begins_the_data_from_the_start(right, self, state):
    right(self, state)
    self._position = 0

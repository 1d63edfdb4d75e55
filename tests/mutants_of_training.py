"""Mistakes of training and of its checkpoints for `test_mutants.py`: (name, file, edits, what catches it)."""

ACCUMULATION = "tests/training/test_accumulation.py"

MUTANTS_OF_TRAINING = [
    (
        "the loss divided by the number of micro-batches (TRL #6024, ms-swift #10117)",
        "training/accumulation.py",
        {
            "        for group, parameters in self.gradient_groups():": "        for p in self.parameters():\n"
            "            p.grad /= len(micro_batches)\n        for group, parameters in self.gradient_groups():"
        },
        (
            "tests/losses/test_peers.py::test_an_update_does_not_depend_on_the_number_of_micro_batches[grpo-sample_mean]",
            f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",
        ),
    ),
    (
        "the gradient of all but the last micro-batch lost (Fast-LLM #551)",
        "training/accumulation.py",
        {"self.manual_backward(out.loss)": "self.optimizer.zero_grad(); self.manual_backward(out.loss)"},
        (
            "tests/losses/test_peers.py::test_an_update_does_not_depend_on_the_number_of_micro_batches[grpo-sample_mean]",
            f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",
        ),
    ),
    (
        "each micro-batch divided by totals of its own (TRL #3021, verl #5877)",
        "training/accumulation.py",
        {
            "self.micro_batch_loss(micro_batch.counted().to(self.device), totals)": "self.micro_batch_loss("
            "micro_batch.counted().to(self.device), StepTotals(micro_batch.num_documents, "
            "int((micro_batch.labels >= 0).sum()), 0))"
        },
        (f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",),
    ),
    (
        "a micro-batch of the step left out",
        "training/accumulation.py",
        {"for micro_batch in step.micro_batches]": "for micro_batch in step.micro_batches[:3]]"},
        (f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[12-counts3]",),
    ),
    (
        "gradients exchanged with every micro-batch of a step",
        "training/accumulation.py",
        {"last=number == len(micro_batches)": "last=True"},
        (f"{ACCUMULATION}::test_gradients_are_exchanged_with_the_last_micro_batch_of_a_step_alone",),
    ),
    (
        "gradients of a module of the user's own not summed over ranks",
        "training/accumulation.py",
        {"return [(self.layout.loss_group,": "return [] and [(self.layout.loss_group,"},
        (f"{ACCUMULATION}::test_any_module_is_driven_over_data_parallel_ranks[2-12]",),
    ),
    (
        "a step's loss and metrics of one rank alone",
        "training/accumulation.py",
        {"for group in (self.layout.loss_group,": "for group in (None,"},
        (f"{ACCUMULATION}::test_any_module_is_driven_over_data_parallel_ranks[2-12]",),
    ),
    (
        "the scheduled learning rate reported but not used",
        "training/module.py",
        {'group["lr"] = rate': "pass"},
        ("tests/losses/test_peers.py::test_an_update_is_made_at_the_reported_learning_rate",),
    ),
    (
        "gradients averaged over ranks as DDP and FSDP do, not summed (prime-rl #2562)",
        "ranks/gradients.py",
        {"dist.all_reduce(flat, group=group)": "dist.all_reduce(flat, group=group); flat /= group.size()"},
        ("tests/ranks/test_processes_steps.py::test_gradients_are_summed_bitwise_alike_on_all_ranks",),
    ),
    (
        "a checkpoint written in place",
        "training/checkpoint.py",
        {
            'temporary = folder / f".{path.name}.tmp"\n': "temporary = path\n",
            "remove(path)  # written before": "pass  # written before",
            "temporary.rename(path)\n": "pass\n",
        },
        ("tests/training/test_checkpoint.py::test_killed_in_the_middle_of_saving",),
    ),
    (
        "an older checkpoint is passed over as if it were damaged",
        "training/checkpoint.py",
        {"        except _OtherFormat:\n            raise\n": ""},
        (
            "tests/training/test_checkpoint.py::"
            "test_a_run_with_checkpoints_of_an_earlier_version_is_refused_and_not_started_again[of one process]",
        ),
    ),
    (
        "older checkpoints are not seen, so that their run starts again",
        "training/checkpoint.py",
        {r'r"step-\d+(\.ckpt)?"': r'r"step-\d+"'},
        (
            "tests/training/test_checkpoint.py::"
            "test_a_run_with_checkpoints_of_an_earlier_version_is_refused_and_not_started_again[of one process]",
        ),
    ),
    (
        "a rank whose disk is full leaves the others waiting for its parts",
        "training/checkpoint.py",
        {"failure = error  # only now": "raise  # only now"},
        ("tests/training/test_processes_checkpoint.py::test_a_full_disk_of_one_rank_is_an_error_on_all",),
    ),
    (
        "the names in a manifest lead anywhere",
        "training/checkpoint.py",
        {'if not re.fullmatch(r"(\\w[\\w.-]*/)?\\w[\\w.-]*", name):': "if False:"},
        ("tests/training/test_checkpoint.py::test_what_a_manifest_names_lies_in_the_checkpoint",),
    ),
    (
        "checkpoints sorted by their names as texts",
        "training/checkpoint.py",
        {"return sorted(found, key=step_of)": "return sorted(found)"},
        ("tests/training/test_checkpoint.py::test_steps_beyond_a_million_are_newer_than_those_before",),
    ),
    (
        "a damaged newest checkpoint counts among those that are kept",
        "training/checkpoint.py",
        {"if step_of(path) < step]": "if path != newest]"},
        ("tests/training/test_checkpoint.py::test_a_damaged_newest_one_takes_no_place_of_those_that_are_kept[2]",),
    ),
    (
        "the number of skipped steps is forgotten on resume",
        "training/state.py",
        {'module.num_skipped_steps = state["num_skipped_steps"]': "pass"},
        ("tests/training/test_resume.py::test_the_count_of_skipped_steps_goes_on_after_a_resume",),
    ),
    (
        "the optimizer starts anew on resume",
        "training/state.py",
        {"module.optimizer.state[parameter] = rooms": "pass"},
        (
            "tests/losses/test_peers.py::test_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration",
        ),
    ),
    (
        "the optimizer's settings taken from the checkpoint on resume, whatever the user asks for",
        "training/state.py",
        {
            '"data": data_state,': '"data": data_state, '
            '"settings": [{**g, "params": 0} for g in module.optimizer.param_groups],',
            'module.num_updates = state["num_updates"]': 'module.num_updates = state["num_updates"]; '
            '[g.update(found, params=g["params"]) '
            'for g, found in zip(module.optimizer.param_groups, state["settings"], strict=True)]',
        },
        (
            "tests/losses/test_peers.py::test_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration",
        ),
    ),
]

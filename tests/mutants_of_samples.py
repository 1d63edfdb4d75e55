"""Mistakes of completions and what shows them, for `test_mutants.py`: (name, file, edits, what catches it)."""

_KEPT, _SHOWN = "tests/training/test_completions.py::test", "tests/inspection/test_samples.py::test"

MUTANTS_OF_SAMPLES = [
    (
        "prompts that teach nothing are kept first",
        "rollouts/completions.py",
        {"len({d.reward for d in groups[group]}) == 1": "len({d.reward for d in groups[group]}) != 1"},
        (f"{_KEPT}_which_are_kept[1-expected1]",),
    ),
    (
        "of a prompt the worst completion is kept last",
        "rollouts/completions.py",
        {"falling[i // 2 if i % 2 == 0 else -1 - i // 2]": "falling[i]"},
        (f"{_KEPT}_which_are_kept[2-expected2]",),
    ),
    (
        "a resumed run keeps what the attempt before wrote after the checkpoint",
        "training/train.py",
        {"drop_completions_after(run.path, step)": "pass"},
        (f"{_KEPT}_a_resumed_run_has_the_files_of_one_that_was_never_stopped[5]",),
    ),
    (
        "the step of the checkpoint loses its completions",
        "runs/completions.py",
        {"if row.step <= step]": "if row.step < step]"},
        (f"{_KEPT}_a_resumed_run_has_the_files_of_one_that_was_never_stopped[5]",),
    ),
    (
        "a checkpoint is written before the completions up to it",
        "training/recorder.py",
        {"self.completions.write()  # first": "pass  # first"},
        (f"{_KEPT}_a_checkpoint_comes_after_the_completions_up_to_it",),
    ),
    (
        "what is kept makes another job of a sweep's job",
        "config/names.py",
        {'"rollout.keep_completions", ': ""},
        (f"{_KEPT}_training_is_the_same_whatever_is_kept",),
    ),
    (
        "a secret in a completion is written",
        "runs/completions.py",
        {"redact(text).encode": "text.encode"},
        ("tests/runs/test_completions.py::test_what_looks_like_a_secret_is_hidden_and_what_is_no_text_replaced",),
    ),
    (
        "marks of direction act on the terminal",
        "system/legible.py",
        {'"Cc", "Cf"': '"Cc"'},
        (f"{_SHOWN}_nothing_that_a_model_wrote_acts_on_the_terminal",),
    ),
    (
        "a completion ends the script that holds it",
        "inspection/samples.py",
        {'.replace("<", "\\\\u003c")': ""},
        (f"{_SHOWN}_the_page_holds_what_was_kept_and_nothing_that_acts",),
    ),
    (
        "a prompt's change is that of one completion",
        "inspection/samples.py",
        {"mean(steps[max(steps)]) - mean(steps[min(steps)])": "steps[max(steps)][0] - steps[min(steps)][0]"},
        (f"{_SHOWN}_what_changed_is_told_by_the_mean_reward_of_each_prompt",),
    ),
]

"""Mistakes of prompts, stop strings and verifiers for `test_mutants.py`: (name, file, edits, what catches it)."""

CHAT = "tests/tasks/test_chat.py"
STOPS = "tests/tasks/test_stops.py"
DATASETS = "tests/tasks/test_datasets.py"
PROCESSES = "tests/tasks/test_verifier_processes.py"

MUTANTS_OF_PROMPTS = [
    (
        "a chat is rendered as text and tokenized again, with a second token of the beginning",
        "tasks/chat.py",
        {
            "return self._tokenizer.apply_chat_template(conversations": (
                "return self._tokenizer(self._tokenizer.apply_chat_template(conversations"
            ),
            ', add_generation_prompt=True)["input_ids"]': (
                ', add_generation_prompt=True, tokenize=False))["input_ids"]'
            ),
        },
        (f"{CHAT}::test_tokens_are_those_of_the_template[with a beginning of its own]",),
    ),
    (
        "a chat without the beginning of the answer",
        "tasks/chat.py",
        {'(conversations, add_generation_prompt=True)["input_ids"]': '(conversations)["input_ids"]'},
        (f"{CHAT}::test_the_whole_text_of_a_prompt",),
    ),
    (
        "a system prompt that the template leaves out goes unnoticed",
        "tasks/chat.py",
        {"return None if not system or system[0]": "return None if system or system[0]"},
        (f"{CHAT}::test_a_system_prompt_that_would_be_ignored_is_refused[left out]",),
    ),
    (
        "a conversation that ends with the answer is a prompt",
        "tasks/prompt_rows.py",
        {'if last["role"] == "assistant":': 'if last["role"] == "nobody":'},
        (f"{DATASETS}::test_what_is_no_chat_is_refused_with_its_row[answered]",),
    ),
    (
        "the token that completes a stop string is not trained",
        "tasks/stops.py",
        {"self._found(self._text(tokens[: n + 1]))) + 1": "self._found(self._text(tokens[: n + 1])))"},
        (f"{STOPS}::test_a_completion_ends_with_the_first_token_that_completes_a_string[byte_level-['is']]",),
    ),
    (
        "the stop string is part of the text that is scored",
        "tasks/prompts.py",
        {
            "text = self._stops.before(self.tokenizer.decode(tokens, skip_special_tokens=True))": (
                "text = self.tokenizer.decode(tokens, skip_special_tokens=True)"
            )
        },
        (f"{STOPS}::test_tokens_hold_the_string_and_the_scored_text_does_not",),
    ),
    (
        "the last token of a completion that a stop string ended is taken for its end-of-sequence token",
        "tasks/prompts.py",
        {"if finished and int(tokens[-1]) in self.ends:": "if finished:"},
        (f"{STOPS}::test_tokens_hold_the_string_and_the_scored_text_does_not",),
    ),
    (
        "a completion that a stop string ended counts as truncated",
        "sampling/samplers.py",
        {'"stop" if len(places) or stopped is not None else "length"': '"stop" if len(places) else "length"'},
        (f"{STOPS}::test_the_sampler_ends_at_a_string_and_keeps_its_log_probs[null]",),
    ),
    (
        "a stop string that the prompt begins ends a completion",
        "sampling/samplers.py",
        {"self._stopped(whole[:, longest:], 1)": "self._stopped(whole[:, longest - 1 :], 1)"},
        (f"{STOPS}::test_a_string_that_the_prompt_begins_ends_nothing",),
    ),
    (
        "sampling goes on after every completion has ended with a stop string",
        "sampling/samplers.py",
        {"self._stopped(whole[:, longest:], 1)] if self._stops else []": "self._stopped(whole[:, longest:], 1)][:0]"},
        (f"{STOPS}::test_sampling_stops_once_every_completion_has_ended",),
    ),
    (
        "a static cache overlooks the stop strings before the last of its tokens",
        "model/decoding.py",
        {"so_far - self._asked)": "1)"},
        (f"{STOPS}::test_a_static_cache_looks_for_strings_every_32_tokens",),
    ),
    (
        "an Arrow stream that was cut off between two batches is read as a shorter one",
        "tasks/row_files.py",
        {"if file.read() != _END_OF_STREAM:": "if not file.size():"},
        (f"{DATASETS}::test_a_saved_data_set_that_is_not_whole",),
    ),
    (
        "the train and test files of a folder are mixed",
        "tasks/datasets.py",
        {"if len(splits) > 1 or (splits and not here):": "if splits and not here:"},
        (f"{DATASETS}::test_a_folder_of_several_splits_is_not_read_as_a_whole",),
    ),
    (
        "an exact match is a reward of 1, whichever verifiers it comes from",
        "tasks/tasks.py",
        {"return Score(reward, scores[0] >= 1, measures)": "return Score(reward, reward >= 1, measures)"},
        ("tests/config/test_keys.py::test_the_key_acts[task/prompts.verifiers]",),
    ),
    (
        "the measures of a batch are lost with a checkpoint",
        "rollouts/policy.py",
        {
            "[dict(vars(document)) for document in documents]}": (
                "[dict(vars(document)) | {'measures': {}} for document in documents]}"
            )
        },
        (f"{PROCESSES}::test_a_run_that_was_killed_within_a_batch_goes_on_with_its_measures",),
    ),
    (
        "a verifier that spins in C outlives the process that trains",
        "tasks/verifier_processes.py",
        {"flags | os.O_ASYNC": "flags"},
        (f"{PROCESSES}::test_no_process_outlives_the_one_that_trains[busy-9]",),
    ),
    (
        "what a verifier has left behind outlives a run that is killed",
        "tasks/verifier_processes.py",
        {"os.killpg(os.getpgrp(), signal.SIGKILL)  # with what verifiers have left behind": "pass"},
        (f"{PROCESSES}::test_no_process_outlives_the_one_that_trains[idle-9]",),
    ),
    (
        "answers of verifiers stand in the order in which they came",
        "tasks/verifier_processes.py",
        {
            "found = list(threads.map(self._outcome, questions))": (
                "from concurrent.futures import as_completed\n"
                "            asked = [threads.submit(self._outcome, question) for question in questions]\n"
                "            found = [one.result() for one in as_completed(asked)]"
            )
        },
        (f"{PROCESSES}::test_a_verifier_that_hangs_scores_nothing_and_the_rest_goes_on[sleep 600]",),
    ),
    (
        "a file names a function among several verifiers",
        "config/rules/executed.py",
        {"(*_functions_of(config), *COMMANDS)": "(*FUNCTIONS, *COMMANDS)"},
        ("tests/config/test_executed.py::test_one_of_several_verifiers_is_typed_too",),
    ),
]

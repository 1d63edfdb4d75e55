"""Mistakes of `pgtk convert` and `pgtk doctor` for `test_mutants.py`: (name, file, edits, what catches it)."""

_CONVERT, _DOCTOR = "tests/dumps/test_convert.py::", "tests/dumps/test_doctor.py::"

MUTANTS_OF_DUMPS = [
    (
        "misplaced log-probs are converted all the same",
        "dumps/convert.py",
        {"    if shift in WHOSE:\n        raise DataError": "    if False:\n        raise DataError"},
        (
            f"{_CONVERT}test_log_probs_one_place_off_are_refused[open-instruct-next_tokens]",
            f"{_CONVERT}test_log_probs_one_place_off_are_refused[open-instruct-tokens_before]",
            f"{_CONVERT}test_a_model_finds_it_where_no_documents_part[next_tokens-of the next token]",
        ),
    ),
    (
        "the two ways of being one place off are taken for each other",
        "dumps/alignment.py",
        {"NEXT if shared > 0.25 * spread else BEFORE": "BEFORE if shared > 0.25 * spread else NEXT"},
        (f"{_DOCTOR}test_log_probs_one_place_off[1-of the next token]",),
    ),
    (
        "a file of torch.save may run code",
        "dumps/records.py",
        {"weights_only=True": "weights_only=False"},
        (f"{_CONVERT}test_a_pickle_that_would_run_code_is_refused",),
    ),
    (
        "log-probs of a response begin one token too late",
        "dumps/records.py",
        {'"old_log_probs": [0.0] * before + list(log_probs)': '"old_log_probs": [0.0] * (before + 1) + log_probs[:-1]'},
        (f"{_CONVERT}test_a_dump_trains_to_the_loss_of_the_reference[slime]",),
    ),
    (
        "the padding of NeMo-RL is trained on",
        "dumps/records.py",
        {'"token_ids": one["token_ids"][:length]': '"token_ids": one["token_ids"]'},
        (f"{_CONVERT}test_a_dump_trains_to_the_loss_of_the_reference[nemo-rl]",),
    ),
    (
        "rewards of documents that dynamic sampling has dropped",
        "dumps/records.py",
        {'one["filtered_rewards" if "filtered_rewards" in one else "rewards"]': 'one["rewards"]'},
        (f"{_CONVERT}test_what_nemo_rl_left_out_or_did_not_compute",),
    ),
    (
        "zeros in the place of log-probs that were not computed",
        "dumps/records.py",
        {"        old = sampling\n": ""},
        (f"{_CONVERT}test_what_nemo_rl_left_out_or_did_not_compute",),
    ),
    (
        "groups of a resumed run run together",
        "dumps/records.py",
        {'"group_id": (record["line"], ': '"group_id": (record["group_id"], '},
        (f"{_CONVERT}test_groups_of_pipeline_rl_are_its_lines",),
    ),
    (
        "the engine's log-probs of prime-rl are taken for the trainer's",
        "dumps/records.py",
        {'"old_log_probs": record["trainer_logprobs"]': '"old_log_probs": record["inference_logprobs"]'},
        (f"{_CONVERT}test_a_dump_trains_to_the_loss_of_the_reference[prime-rl]",),
    ),
    (
        "a document's share is that of its weights, whatever its advantage",
        "dumps/examine.py",
        {'self.documents["weight"] / self._denominators': 'self.documents["trained"] / self._denominators'},
        (f"{_DOCTOR}test_what_truncated_documents_carry[token_mean]",),
    ),
    (
        "every pair of equal documents counts twice in what is expected",
        "dumps/checks.py",
        {"np.exp(log_prob)).sum() / 2)": "np.exp(log_prob)).sum())"},
        (f"{_DOCTOR}test_equal_documents_of_a_certain_policy_are_no_copies",),
    ),
    (
        "the best temperature is the nearest of a few",
        "dumps/alignment.py",
        {"* (before - after) / (2 * (before - 2 * here + after))": "* 0 * (before + here + after)"},
        (f"{_DOCTOR}test_another_temperature[0.6-0.6]",),
    ),
    (
        "a fault has no exit status",
        "launch/commands.py",
        {'DataError.exit_status if diagnosis.count("wrong") else 0': "0"},
        (f"{_DOCTOR}test_log_probs_one_place_off[1-of the next token]",),
    ),
]

"""Mistakes with sampling servers for `test_mutants.py`: (name, file, edits, what catches it)."""

_SMALL, _SERVERS = "tests/sampling/test_vllm.py::", "tests/sampling/test_vllm_servers.py::"
_LEFT = (f"{_SMALL}test_nothing_of_the_sampling_is_left_to_the_server",)
_BEHIND = f"{_SMALL}test_weights_that_stay_behind_by_less_than_the_tolerance_are_seen"
_PUBLISHED = f"{_SERVERS}test_completions_have_the_log_probs_of_the_weights_published_last[small-{{}}]"

MUTANTS_OF_SERVERS = [
    (
        "nothing is proved after a publication",
        "sampling/vllm.py",
        {"            self._version = version\n            self._prove()\n": "            self._version = version\n"},
        (f"{_BEHIND}[stale]", f"{_SERVERS}test_a_version_that_did_not_arrive_is_an_error[small-half]"),
    ),
    (
        "a server may answer to the last bit as it did before",
        "sampling/vllm_proof.py",
        {"if torch.equal(now.server, last.server) and moved > _MOVED * self._tolerance:": "if False:"},
        (f"{_BEHIND}[stale]",),
    ),
    (
        "log-probs may be nearer to those of an earlier version",
        "sampling/vllm_proof.py",
        {"if old < _CLEARLY * new:": "if False:"},
        (f"{_BEHIND}[stale_and_noisy]",),
    ),
    (
        "the log-probs of completions are not compared with the trainer's",
        "sampling/vllm_proof.py",
        {"if not mean <= self._tolerance:": "if False:"},
        (f"{_SERVERS}test_log_probs_from_before_the_temperature_are_an_error[small]",),
    ),
    (
        "the seed of a request is not passed on",
        "sampling/vllm_client.py",
        {'{"seed": request.seed} if self.seeded else {}': "{}"},
        (*_LEFT, f"{_SERVERS}test_a_seed_makes_the_same_completions_again[small]"),
    ),
    (
        "which tokens end a completion is left to the server",
        "sampling/vllm_client.py",
        {'                "stop_token_ids": self.ends,\n': ""},
        _LEFT,
    ),
    (
        "top_k is left to the server",
        "sampling/vllm_client.py",
        {'                "top_k": 0,\n': ""},
        _LEFT,
    ),
    (
        "a cache is used for every version",
        "sampling/vllm.py",
        {'return f"{self._run_name}-{self._version}"': "return self._run_name"},
        (f"{_SMALL}test_the_same_version_is_published_once",),
    ),
    (
        "completions are those of the first version",
        "sampling/vllm_client.py",
        {"values[:stopped].float(), reason, version)": "values[:stopped].float(), reason, 0)"},
        (_PUBLISHED,),
    ),
    (
        "more tokens than asked for are taken",
        "sampling/vllm_client.py",
        {"if len(tokens) > sampling.max_tokens:": "if False:"},
        (f"{_SERVERS}test_what_was_not_asked_for_is_one_sentence[small-more tokens]",),
    ),
    (
        "a server that answers 503 is asked for as long as the batch may take",
        "sampling/vllm_client.py",
        {"time.monotonic() < min(deadline, begin + _BUSY_SECONDS)": "time.monotonic() < deadline"},
        (f"{_SMALL}test_a_fault_while_sampling_is_one_sentence[busy]",),
    ),
    (
        "an answer may take as long as something of it comes now and then",
        "sampling/vllm_client.py",
        {"**how)).result(seconds)": "**how)).result()"},
        (f"{_SMALL}test_a_fault_while_sampling_is_one_sentence[trickles]",),
    ),
    (
        "another run may give a server its weights",
        "sampling/vllm_proof.py",
        {"        if not changed <= self._tolerance:": "        if False:"},
        (f"{_SMALL}test_weights_that_another_run_gives_a_server_are_seen_before_anything_is_trained",),
    ),
    (
        "nobody deletes the weights of a killed run",
        "sampling/server_guard.py",
        {"    shutil.rmtree(folder, ignore_errors=True)\n": ""},
        ("tests/sampling/test_weights_folder.py::test_nothing_is_left_of_the_folder_of_a_process_that_is_killed",),
    ),
    (
        "one server samples everything",
        "sampling/vllm.py",
        {"self._servers[(i + self._layout.rank) % count]": "self._servers[0]"},
        (f"{_SERVERS}test_two_servers_share_the_requests_and_get_the_same_weights[small]",),
    ),
    (
        "the weights stay behind in memory",
        "sampling/weights_folder.py",
        {"            shutil.rmtree(self.path, ignore_errors=True)": "            pass"},
        (f"{_SMALL}test_the_weights_of_the_folder_are_a_hugging_face_model",),
    ),
]

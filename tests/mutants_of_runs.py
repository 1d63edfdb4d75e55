"""Mistakes of run directories, their files and stores for `test_mutants.py`: (name, file, edits, what catches it)."""

MUTANTS_OF_RUNS = [
    (
        "files of a run written in place",
        "system/plain_files.py",
        {'temporary = path.with_name(f".{path.name}.tmp")\n': "temporary = path\n"},
        ("tests/system/test_links.py::test_replacing_keeps_what_was_there_when_it_fails",),
    ),
    (
        "files of a run are opened through links",
        "system/plain_files.py",
        {"flags | os.O_NOFOLLOW | os.O_NONBLOCK": "flags | os.O_NONBLOCK"},
        ("tests/system/test_links.py::test_a_link_in_the_place_of_a_file_is_refused[run.log]",),
    ),
    (
        "temporary files are opened where they lie, through links",
        "system/plain_files.py",
        {
            "temporary.unlink(missing_ok=True)  # of a link, the link itself": "pass",
            "os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW": "os.O_CREAT",
        },
        ("tests/system/test_links.py::test_a_link_in_the_place_of_a_temporary_file_is_no_way_out[status.json]",),
    ),
    (
        "a second run goes into the directory of another",
        "config/rules/places.py",
        {"if by else []": "if False else []"},
        (
            "tests/runs/test_run_directory.py::test_the_refusal_of_a_second_run_names_resume_and_a_free_directory_is_accepted",
        ),
    ),
    (
        "MLflow's rows are told by their step alone",
        "tracking/mlflow_run.py",
        {"for row in rows if delivered.get(": "for row in rows if False and delivered.get("},
        ("tests/tracking/test_sync.py::test_sync_compares_values_and_not_only_steps[loss]",),
    ),
    (
        "an MLflow run takes rows of whatever run names it",
        "tracking/mlflow_run.py",
        {"own = f\"tags.`pgtk.id` = {search_literal(str(status.get('id')))}\"": 'own = ""'},
        ("tests/tracking/test_sync.py::test_an_mlflow_run_takes_rows_of_its_own_run_only",),
    ),
]

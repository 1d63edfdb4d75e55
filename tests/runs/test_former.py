"""What earlier versions wrote into a run directory is read as what it meant."""

import pytest
from builders.runs import config_of, with_model

from pgtoolkit.assembly.continuing import counterpart_command
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import compiled_as_begun, saved_config
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import leaves, read_leaves, read_resolved
from pgtoolkit.system.conditions import with_values

_TIME = "2026-11-28 16:58:26,283 INFO"
_ON = f"{_TIME} model.compile=auto: on, since 20 % of about 121 s of updates is more\n"
_OFF = f"{_TIME} model.compile=auto: off, since only a GPU gains by it\n"


@pytest.mark.parametrize(
    ("log", "compiled"),
    [
        (_ON, True),
        (_OFF, False),
        (_OFF + "continues after step 2\n" + _ON, True),
        (_ON + _OFF, False),
        (f"{_TIME} model.compile=auto: off with transformers 9.9. Its LlamaAttention\n", False),
        ("model        tiny, 408,064 weights, drawn from the seed\n", False),
        (None, False),
    ],
)
def test_a_run_that_chose_by_itself_whether_to_compile_keeps_its_choice(tmp_path, log, compiled):
    """`pgtk resume` and the job of a sweep that goes on; neither changes the configuration."""
    job = config_of(*with_model(tmp_path / "model"))
    run_dir = tmp_path / "run"
    with RunDirectory(run_dir, new=True) as run:
        as_written = with_values(job, {"model.compile": "auto"})
        run.write_config(plain_config(as_written), ["model.compile=auto"])
        if log is not None:
            (run_dir / "run.log").write_text(log)
        resumed = saved_config(run_dir)
        assert resumed.model.compile is compiled
        assert compiled_as_begun(job, run_dir) == resumed
        assert f"model.compile={str(compiled).lower()}" in counterpart_command(run_dir)
        assert run.write_config(plain_config(resumed), []) == {}
    assert saved_config(run_dir) == resumed


def test_a_job_that_says_whether_it_is_compiled_is_continued_so(tmp_path):
    job = config_of(*with_model(tmp_path / "model", "model.compile=true"))
    run_dir = tmp_path / "run"
    with RunDirectory(run_dir, new=True) as run:
        run.write_config(plain_config(with_values(job, {"model.compile": False})), [])
        assert compiled_as_begun(job, run_dir) == job


def test_a_run_without_callbacks_is_one_that_had_none(tmp_path):
    """Runs of earlier versions have no such group; they go on, and are compared, as if it were
    empty."""
    today = plain_config(compose(["tracking=none"]).config)
    with RunDirectory(tmp_path / "run", new=True) as run:
        run.write_config({key: value for key, value in today.items() if key != "callbacks"}, [])
    assert "callbacks" not in (run.path / "config.yaml").read_text()
    assert read_resolved(run.path) == today
    assert read_leaves(run.path) == dict(leaves(today))

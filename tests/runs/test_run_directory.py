"""A run directory under two processes, kills, torn lines and resumes; its columns read in blocks.

Columns are compared with a reading row by row, the configuration with OmegaConf's.
"""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
from builders.runs import SHORT, config_of
from omegaconf import OmegaConf

from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError, StorageError
from pgtoolkit.launch.ranks import train_job
from pgtoolkit.runs import series
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.runs.records import leaves, plain, read_leaves, read_resolved, read_status
from pgtoolkit.runs.series import metric_names, read_metrics, rows_until

OPEN_RUN = (
    "import sys, time\n"
    "from pgtoolkit.runs.directory import RunDirectory\n"
    "run = RunDirectory(sys.argv[1])\n"
)


def start_with_run(folder: Path, code: str) -> subprocess.Popen:
    """Start a process that opens the run directory as `run`, and wait for its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN_RUN + code, str(folder)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    return process


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    holder = start_with_run(tmp_path, "print('open', flush=True); time.sleep(60)")
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "):
        RunDirectory(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    RunDirectory(tmp_path).close()


def test_closing_frees_the_directory_even_while_a_forked_child_lives(tmp_path):
    run = RunDirectory(tmp_path)
    with pytest.raises(ConfigError, match="in use by process"):
        RunDirectory(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    run.close()
    RunDirectory(tmp_path).close()
    child.kill()
    child.join()


def test_a_kill_while_the_status_is_written_leaves_a_valid_status(tmp_path):
    loop = (
        "step = 0\n"
        "run.set_status('running', step)\n"
        "print('running', flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    run.set_status('running', step)\n"
    )
    for delay in (0.0, 0.01, 0.1):
        writer = start_with_run(tmp_path, loop)
        end = time.monotonic() + delay
        # A kill at any moment would leave the status that is read at that moment.
        while time.monotonic() < end:
            assert read_status(tmp_path)["state"] == "running"
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        assert read_status(tmp_path)["pid"] == writer.pid


def test_written_metrics_are_finite_and_keep_their_type(tmp_path):
    metrics = {
        "loss": np.float32(0.5),
        "num_tokens": np.int64(7),
        "kl": float("nan"),
        "max": float("inf"),
    }
    with RunDirectory(tmp_path) as run:
        run.append_metrics(1, metrics)
    row = json.loads(run.metrics_path.read_text())
    assert row.pop("time") == pytest.approx(time.time(), abs=60)
    assert row == {"step": 1, "loss": 0.5, "num_tokens": 7}
    assert type(row["num_tokens"]) is int
    assert type(row["loss"]) is float


def test_a_torn_last_line_is_skipped_and_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with RunDirectory(tmp_path) as run:
        assert read_metrics(path)["step"].tolist() == [1]
        run.drop_metrics_after(1)
        run.append_metrics(2, {"loss": 2.0})
        assert read_metrics(path)["step"].tolist() == [1, 2]


def test_a_torn_line_before_the_last_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2 is damaged"):
        read_metrics(path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2 is damaged"):
        rows_until(path, 9)


def test_a_resume_drops_the_metrics_after_its_step(tmp_path):
    """Also behind a gap, rows with another order of keys, and a torn line."""
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3, 6, 7, 8):
            run.append_metrics(step, {"loss": step / 8})
        with run.metrics_path.open("a") as file:
            file.write('{"loss": 1.125, "step": 9}\n{"step": 10, "time": 1.5, "lo')
        lines = run.metrics_path.read_bytes().splitlines(keepends=True)
        assert rows_until(run.metrics_path, 99) == (7, sum(map(len, lines[:7])))
        for step, num_kept in ((9, 7), (8, 6), (6, 4), (5, 3), (0, 0)):
            num_rows, num_bytes = rows_until(run.metrics_path, step)
            assert num_rows == num_kept
            # The number of bytes may be passed, or counted there.
            run.drop_metrics_after(step, num_bytes if step % 2 else None)
            assert run.metrics_path.read_bytes() == b"".join(lines[:num_kept])


def test_a_resume_drops_the_evaluations_after_its_step(tmp_path):
    rows = [
        {"step": step, "set": name, "prompts": 1, "avg": 0.5, "pass@1": 0.5}
        for step in (1, 2)
        for name in "ab"
    ]
    with RunDirectory(tmp_path) as run:
        run.append_evaluations(rows)
        run.drop_metrics_after(1)
        text = run.evaluations_path.read_text()
    assert [json.loads(line) for line in text.splitlines()] == rows[:2]


def test_columns_are_those_of_the_rows_wherever_blocks_end(tmp_path, monkeypatch):
    """Integers and floats, gaps, values that are not finite, and a metric of later rows alone."""
    rows = [{"step": n, "time": n / 3, "count": n, "loss": n / 7} for n in range(1, 200)]
    for row in rows[::5]:
        del row["loss"]
    for row in rows[100:]:
        row["late"] = 1 / row["step"]
    rows[7]["loss"] = math.nan
    rows[8]["loss"] = -math.inf
    rows[9]["count"] = 2**60
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for size in (2**24, 1000, 90):
        monkeypatch.setattr(series, "_BLOCK_BYTES", size)
        columns = read_metrics(path)
        assert [*columns] == ["step", "time", "count", "loss", "late"]
        for name, column in columns.items():
            expected = [
                float(row[name]) if math.isfinite(row.get(name, math.nan)) else math.nan
                for row in rows
            ]
            np.testing.assert_array_equal(column, expected)
        some = read_metrics(path, ["loss", "late", "other"])
        assert [*some] == ["step", "loss", "late"]
        for name, column in some.items():
            np.testing.assert_array_equal(column, columns[name])
    assert metric_names(path) == {*columns}


@pytest.mark.parametrize("number", [1, 30])
@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1.5}',
        '{"step": -1}',
        '{"step": true}',
        '{"a": 1}',
        "[1]",
        '{"step": 3, "a": "x"}',
        '{"step": 3, "a": [1]}',
        '{"step": 3, "a": 1%s}' % ("0" * 400),
    ],
)
def test_a_broken_row_is_refused_by_its_number_in_any_block(tmp_path, monkeypatch, line, number):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(series, "_BLOCK_BYTES", 100)
    path.write_text('{"step": 2, "loss": 0.5}\n' * (number - 1) + f'{line}\n{{"step": 9}}\n')
    with pytest.raises(StorageError, match=rf"metrics\.jsonl:{number} is damaged"):
        read_metrics(path)


class Mode(StrEnum):
    constant = "constant"


def test_changes_of_the_configuration_are_recorded_with_their_step(tmp_path):
    first = {
        "loss": {"name": "gspo", "epsilon_low": 3e-4},
        "aggregation": {"mode": Mode.constant},
        "tag": "1e-3",
    }
    with RunDirectory(tmp_path) as run:
        assert run.write_config(first, ["loss=gspo", "seed=1"]) == {}
        assert run.write_config(first, []) == {}
        assert not (tmp_path / "drift.jsonl").exists()
        second = {**first, "loss": {"name": "gspo", "epsilon_low": 1e-3}}
        drift = run.write_config(second, ["loss.epsilon_low=1e-3", "seed=2"], step=40)
    assert drift == {"loss.epsilon_low": [3e-4, 1e-3]}
    line = json.loads((tmp_path / "drift.jsonl").read_text())
    assert line["step"] == 40
    assert line["changes"] == drift
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == plain(second)


def test_the_last_override_of_each_key_is_kept(tmp_path):
    """Another option of a group drops the overrides of the keys of the option before."""
    with RunDirectory(tmp_path) as run:
        run.write_config({}, ["loss=gspo", "seed=1"])
        run.write_config({}, ["loss.epsilon_low=1e-3", "seed=2"])
        overrides = (tmp_path / "overrides.yaml").read_text()
        assert overrides == "- loss=gspo\n- loss.epsilon_low=1e-3\n- seed=2\n"
        run.write_config({}, ["loss=grpo"])
        assert (tmp_path / "overrides.yaml").read_text() == "- seed=2\n- loss=grpo\n"


@pytest.mark.parametrize(
    "text",
    [
        (
            "seed: 1\nloss:\n  name: a\n  both: [1, 2]\nlist:\n- a\n- b: 1e-3\nnone: {}\ntext: "
            "|+\n  a: b\n\nlast: null\n"
        ),
        "# words\nseed: 1\n",
        "a: 1\n? b\n: 2\n",
        "a: 1\nb.c: 2\n",
        "a: 1\n1: 2\n",
        "a: 'x\nb: y'\n",
        "a: ${b}\nb: 1\n",
        "a: 1\na: 2\n",
        "a: {b: 1,\nc: 2}\n",
        "a: &x 1\nb: *x\n",
        "- a\n- b\n",
        "a: 1\nb:2\n",
        "a: [\n",
        "",
    ],
)
def test_a_configuration_read_key_by_key_is_that_of_the_parsed_file(tmp_path, text):
    """A file that is refused is refused in the same words."""
    (tmp_path / "config.yaml").write_text(text)
    results = []
    for read in (lambda path: dict(leaves(read_resolved(path))), read_leaves):
        try:
            results.append(read(tmp_path))
        except StorageError as error:
            results.append(str(error))
    expected, result = results
    assert result == expected
    assert [repr(key) for key in result] == [repr(key) for key in expected]


def test_the_provenance_of_resumes_is_added_to_that_of_the_start(tmp_path):
    with RunDirectory(tmp_path) as run:
        starts = [{"host": host, "time": "2026-11-21T10:00:00+0000"} for host in ("a", "b", "c")]
        for start in starts:
            run.write_provenance(dict(start))
    saved = json.loads((tmp_path / "provenance.json").read_text())
    assert saved == {**starts[0], "resumed": starts[1:]}


@pytest.mark.parametrize("name", ["config.yaml", "sweep.json"])
def test_a_second_run_into_a_directory_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys, name
):
    """The name of a file is enough, also of a dangling link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / name).symlink_to("nowhere")
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    assert main(["hydra.run.dir='my run'", "seed=4"]) == 2
    assert main(["check", "hydra.run.dir='my run'"]) == 2
    output = capsys.readouterr()
    assert (
        f"error: hydra.run.dir=my run needs a directory without a run (got one with {name}). A "
        "second"
    ) in output.err
    assert "Use another directory." in output.out
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before


def test_train_refuses_a_directory_with_a_run_and_leaves_it_free(tmp_path):
    """Another launcher may call it, or two may start at once."""
    with RunDirectory(tmp_path, new=True) as run:
        run.write_config({"seed": 1}, [])
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(
        ConfigError, match=r"needs a directory without a run \(got one with config.yaml\)"
    ):
        train(config_of(*SHORT), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert not (tmp_path / "run.log").exists()
    RunDirectory(tmp_path).close()


def test_a_job_that_would_continue_another_run_is_refused(tmp_path):
    config = config_of(*SHORT)
    with RunDirectory(tmp_path) as run:
        run.write_config(plain_config(config) | {"seed": 1}, [])
        run.set_status("interrupted", 3)
    with pytest.raises(ConfigError, match=r"got one with seed=1, not 0\)"):
        train_job(config, tmp_path, [], "sweep")


@pytest.mark.parametrize("deleted", ["file", "rows"])
def test_a_run_whose_rows_are_deleted_ends_and_can_be_resumed(tmp_path, deleted):
    with RunDirectory(tmp_path) as run:
        for step in (1, 2, 3):
            run.append_metrics(step, {"loss": 0.5})
        rows = run.metrics_path.read_text().splitlines(keepends=True)
        if deleted == "file":
            run.metrics_path.unlink()
        else:
            run.metrics_path.write_text(rows[0])
        with pytest.raises(
            StorageError, match=r"metrics\.jsonl needs the \d+ bytes .* pgtk resume"
        ):
            run.append_metrics(4, {"loss": 0.5})
    with RunDirectory(tmp_path) as run:  # as a resume opens it
        run.append_metrics(4, {"loss": 0.5})

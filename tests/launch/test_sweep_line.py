"""The progress line of a sweep on a real terminal, and the last step of a job by its metrics."""

import re
import sys

from builders.terminals import on_terminal

from pgtoolkit.launch.sweep_line import last_step

JOBS = """
import time
from dataclasses import replace
from pathlib import Path
from pgtoolkit.config.compose import compose
from pgtoolkit.launch.check import check_run
from pgtoolkit.launch.sweep_line import SweepLine

composed = compose(["trainer.max_steps=10"])
done, running, failing, waiting = jobs = [
    check_run(replace(composed, directory=f"job-{number}"), []) for number in range(4)
]
done.status = "done"
waiting.status = "failed"  # in an earlier launch: it waits to be continued
waiting.step = 1
Path("job-1").mkdir()
Path("job-1/metrics.jsonl").write_text('{"step": 3, "loss": 1}\\n{"step": 4, "loss": 1}\\n')
line = SweepLine(Path("."), jobs)
line.begin()
time.sleep(0.2)
failing.status = "failed"
line.show([waiting], [running])
line.close()
"""


def test_the_line_shows_the_share_of_all_steps_and_the_number_of_jobs_in_each_state(tmp_path):
    status, written = on_terminal([sys.executable, "-c", JOBS], tmp_path)
    assert status == 0, written
    # 10 + 4 steps are made, 10 more are not needed, and 1 was made before: 25 of 40.
    assert re.search(r"2/4 jobs \|██████▎   \| \d:\d\d left 1 running 1 failed 1 done", written), (
        written
    )
    assert "4 jobs |██▊       |" in written  # before: 11 of 40


def test_no_line_is_written_into_a_file(tmp_path):
    status, written = on_terminal(
        [sys.executable, "-c", JOBS], tmp_path, environment={"TERM": "dumb"}
    )
    assert (status, written) == (0, "")


def test_the_last_step_of_a_job_is_that_of_the_last_complete_row(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == 0
    metrics.write_text("")
    assert last_step(metrics) == 0
    rows = [f'{{"step": {step}, "time": 1.5, "loss": {"0" * 1000}}}' for step in range(1, 200)]
    metrics.write_text("\n".join([*rows, '{"step": 2']))  # the last is being written
    assert last_step(metrics) == 199

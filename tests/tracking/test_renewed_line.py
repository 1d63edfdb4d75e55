"""The progress line that renews itself, and what is printed above it, on the screen of a terminal.

Processes write to a pseudo-terminal whose control sequences are carried out on a screen of text.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders.terminals import on_terminal, screen

SHOW = """
import sys, threading, time, warnings
from pgtoolkit.system.child import Child
from pgtoolkit.system.terminal import output_of_child, prepare_streams, write_line
from pgtoolkit.tracking.renewed_line import RenewedLine, is_terminal
prepare_streams()
print("terminal", is_terminal(sys.stdout))
line = RenewedLine(8)
line.show(0, ["step 0/8"])
"""
FIELDS = (
    '["step 2/8", "0:09 left", "loss -1.23e-03", "reward 0.51", "{odd} 0.50", "exact 3%", '
    '"21k tok/s"]'
)


def written_by(script: str, folder: Path, columns: int = 80, **environment: str) -> str:
    """Return what a process that shows the line, and then runs `script`, writes to a terminal."""
    command = [sys.executable, "-c", SHOW + script]
    status, written = on_terminal(command, folder, columns, environment)
    assert status == 0, written
    return written


def lines_after(script: str, folder: Path, columns: int = 80, **environment: str) -> list[str]:
    """Return the lines on the screen after `script`."""
    return screen(written_by(script, folder, columns, **environment), columns)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            100,
            (
                "step 2/8 |██▌       | 0:09 left loss -1.23e-03 reward 0.51 {odd} 0.50 exact 3% "
                "21k tok/s"
            ),
        ),
        (61, "step 2/8 |██▌       | 0:09 left loss -1.23e-03 reward 0.51"),
        (40, "step 2/8 0:09 left loss -1.23e-03"),
        (11, "step 2/8"),
        (10, ""),
    ],
)
def test_fields_without_room_are_left_out(tmp_path, columns, line):
    script = f"line._shown_at = 0\nline.show(2, {FIELDS})\nline.close()\nprint('after')"
    assert lines_after(script, tmp_path, columns)[-3:-1] == [line, "after"]


def test_a_terminal_without_block_characters_gets_ascii(tmp_path):
    environment = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "LC_ALL": "C"}
    script = f"line._shown_at = 0\nline.show(2, {FIELDS})\nline.close()"
    lines = lines_after(script, tmp_path, 61, **environment)
    assert lines[-2] == "step 2/8 |##5       | 0:09 left loss -1.23e-03 reward 0.51"


def test_other_output_is_printed_above_the_line(tmp_path):
    lines = lines_after(
        """
write_line("a line", sys.stdout)
write_line("an error", sys.stderr)
print("in", end=" ")
print("parts")
warnings.warn("mind this")
thread = threading.Thread(target=print, args=("of a thread",))
thread.start(); thread.join()
with output_of_child() as printed:
    child = Child([sys.executable, "-c", "print('of a child')"], printed=printed)
child.wait()
time.sleep(0.5)
print("\\r10%", "\\r20% of a bar", file=sys.stderr)
print("unfinished", end="")
line._shown_at = 0
line.show(8, ["step 8/8"])
line.close()
print("after")
""",
        tmp_path,
    )
    assert lines[:4] == ["terminal True", "a line", "an error", "in parts"]
    assert "mind this" in lines[4]
    assert lines[-7:] == [
        "of a thread",
        "of a child",
        "20% of a bar",
        "unfinished",
        "step 8/8 |██████████|",
        "after",
        "",
    ]


def test_quick_steps_renew_the_line_at_most_ten_times_a_second(tmp_path):
    written = written_by(
        "began = time.monotonic()\n"
        "for step in range(5000): line.show(0, [f'step {step}'])\n"
        "seconds = time.monotonic() - began\nline.close()\nprint('seconds', seconds)",
        tmp_path,
    )
    seconds = float(re.search(r"seconds ([\d.]+)", written)[1])
    assert written.count("\x1b[K") <= 3 + seconds / 0.1


def test_a_removed_line_leaves_nothing(tmp_path):
    lines = lines_after("line.close(leave=False)\nprint('table')", tmp_path)
    assert lines == ["terminal True", "table", ""]


ASKS_IS_TERMINAL = [
    sys.executable,
    "-c",
    (
        "import sys\nfrom pgtoolkit.tracking.renewed_line import is_terminal\n"
        "print(is_terminal(sys.stdout))"
    ),
]


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": ""}])
def test_a_terminal_without_a_cursor_does_not_count_as_one(tmp_path, environment):
    _, written = on_terminal(ASKS_IS_TERMINAL, tmp_path, environment=environment)
    assert written.strip() == "False"


def test_a_pipe_does_not_count_as_a_terminal():
    piped = subprocess.run(
        ASKS_IS_TERMINAL, capture_output=True, text=True, env=os.environ, check=True
    )
    assert piped.stdout.strip() == "False"


@pytest.mark.slow
def test_a_run_stopped_on_a_terminal_keeps_the_line_of_its_last_step(tmp_path):
    command = [sys.executable, "-P", "-m", "pgtoolkit.cli", "debug=short", "trainer.max_steps=900"]

    def press_ctrl_c_at_step_2(written: str) -> bytes:
        return b"\x03" if "step   2/900" in written else b""

    status, written = on_terminal(command, tmp_path, 100, keys=press_ctrl_c_at_step_2)
    assert status == 75, written
    lines = screen(written, 100)
    labels = [line.split()[0] for line in lines if re.match("(run|model|device|sampler) ", line)]
    assert labels == ["run", "model", "device", "sampler"]
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 1, steps
    numbers = r"\S+ left loss [ -]\d\.\d\de[-+]\d\d reward 0\.\d\d exact +\d+% "
    assert re.match(rf"step +\d+/900 \|.{{10}}\| {numbers}", steps[0])
    (stopped,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith("SIGINT: finishing this step")
    ]
    assert lines[stopped + 1] == steps[0]
    assert lines[stopped + 2].startswith("pgtk: stopped as asked (SIGINT) after step ")
    (log,) = tmp_path.glob("outputs/*/*/run.log")
    assert re.search(r"INFO step +1/900 loss [ -]\de[-+]\d\d ratio 1.0000 ", log.read_text())
    assert "\x1b" not in log.read_text()

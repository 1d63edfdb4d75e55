"""A real sweep in a real browser: MLflow's comparison pages and the HTML report draw what the runs have measured."""

import json
import re
import signal
import subprocess
import sys

import pytest
from builders.browser import NEEDED, keep, opened, text, wait
from builders.runs import SHORT
from builders.stores import free_port

pytestmark = [pytest.mark.slow, NEEDED]

PGTK = [sys.executable, "-m", "pgtoolkit.cli"]
STEPS = 4
# What the charts were given, not how they look: (name of the line, x, y) of each of a Plotly chart's curves.
CURVES = """
const card = [...document.querySelectorAll('[data-testid=experiment-view-compare-runs-card]')]
    .find(card => card.innerText.includes(%s));
const chart = card && card.querySelector('.js-plotly-plot');
if (!chart || !chart.data || !chart.querySelectorAll('path.js-line').length) return null;
const curves = chart.data.filter(curve => curve.mode && curve.mode.includes('lines') && curve.x && curve.x.length > 1);
return curves.length ? curves.map(curve => [curve.name, [...curve.x], [...curve.y]]) : null;
"""
PARAMETERS = """
return Object.fromEntries([...document.querySelectorAll('tr')].map(row => [...row.children].map(
    cell => cell.innerText.trim())).map(cells => [cells[0], cells.slice(1)]))
"""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """(folder it was started from, the sweep's folder): two jobs of a few steps, through the command line."""
    cwd = tmp_path_factory.mktemp("browser")
    settings = [s for s in SHORT if not s.startswith(("tracking", "trainer.max_steps"))]
    command = [
        *PGTK,
        "-m",
        "loss=grpo,gspo",
        *settings,
        f"trainer.max_steps={STEPS}",
        "hydra.sweep.dir=outputs/sweeps/s",
    ]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd, cwd / "outputs" / "sweeps" / "s"


@pytest.fixture(scope="module")
def page():
    with opened() as browser:
        yield browser


def measured(folder, metric):
    """{name of the loss: (documents seen, values)} as the run directories have them."""
    found = {}
    for file in folder.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        loss = "grpo" if "loss-grpo" in file.parent.name else "gspo"
        found[loss] = ([row["documents_seen"] for row in rows], [row[metric] for row in rows])
    return found


def test_the_pages_that_pgtk_ui_names_compare_the_sweep(sweep, page):
    cwd, folder = sweep
    port = free_port()
    server = subprocess.Popen([*PGTK, "ui", "--port", str(port)], cwd=cwd, stdout=subprocess.PIPE, text=True)
    try:
        lines = [server.stdout.readline().strip() for _ in range(6)]
        assert lines[3] == "newest sweep  s (2 runs)"
        compare, charts = (line.split()[-1] for line in lines[4:])
        assert compare.startswith(f"http://127.0.0.1:{port}/#/compare-runs?runs=")

        page.get(compare)
        wait(page, "return document.body.innerText.includes('Comparing 2 Runs from 1 Experiment')")
        rows = wait(page, PARAMETERS.replace("return", "const rows =", 1) + "; return rows['loss.name'] ? rows : null")
        assert rows["loss.name"] == ["grpo", "gspo"]
        assert rows["loss.epsilon_low"] == ["0.2", "0.0003"]
        assert rows["aggregation.mode"] == ["constant", "constant"]
        assert rows["Run Name:"] == ["loss-grpo", "loss-gspo"]
        final = [measured(folder, "grad_norm")[loss][1][-1] for loss in ("grpo", "gspo")]
        shown = [float(line) for line in text(page).splitlines() if re.fullmatch(r"\d+\.\d+", line)]
        assert all(min(abs(value - number) for number in shown) < 1e-3 for value in final)
        wait(page, "return document.querySelector('.js-plotly-plot .parcoords') !== null")
        keep(page, "compare")

        page.get(charts)
        curves = wait(page, f"{CURVES % json.dumps('by_documents/loss')}")
        expected = measured(folder, "loss")
        assert {name for name, *_ in curves} == {"loss-grpo", "loss-gspo"}
        for name, x, y in curves:
            documents, values = expected[name.removeprefix("loss-")]
            assert x == documents
            assert y == pytest.approx(values)
        assert "2 matching runs" in text(page)  # without the summary run
        keep(page, "charts")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def test_the_report_draws_its_charts(sweep, page, tmp_path):
    cwd, _ = sweep
    done = subprocess.run([*PGTK, "compare", "s", "--html", tmp_path / "report.html"], cwd=cwd, capture_output=True)
    assert done.returncode == 0, done.stderr
    page.get(f"file://{tmp_path}/report.html")
    boxes = page.execute_script(
        "return [...document.querySelectorAll('g[id^=mean-] path')].map(path => {"
        "const box = path.getBBox(); return [box.width, path.getTotalLength(), getComputedStyle(path).stroke]})"
    )
    assert len(boxes) == 4  # two losses, against documents and against time
    assert all(width > 20 and length > 20 for width, length, _ in boxes)
    assert len({color for *_, color in boxes}) == 2
    assert "exact_match by loss" in text(page)
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    keep(page, "report")

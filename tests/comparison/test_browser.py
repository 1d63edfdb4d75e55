"""The HTML report of `pgtk compare`, opened in a real browser, has a curve for each loss."""

import pytest
from builders.browser import NEEDS_BROWSER, open_browser, page_text, save_screenshot

from pgtoolkit.cli import main
from pgtoolkit.runs.directory import RunDirectory

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]


def test_report_draws_a_curve_for_each_loss_against_documents_and_time(tmp_path):
    for loss in ("grpo", "gspo"):
        with RunDirectory(tmp_path / loss) as run:
            run.write_config({"seed": 0, "loss": {"name": loss}, "trainer": {"max_steps": 4}}, [])
            rows = [
                f'{{"step": {n}, "time": {n}, "documents_seen": {8 * n}, "reward": 0.{n}}}\n'
                for n in range(1, 5)
            ]
            run.metrics_path.write_text("".join(rows))
            run.set_status("done", 4)
    assert main(["compare", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    with open_browser() as page:
        page.get(f"file://{tmp_path}/report.html")
        boxes = page.execute_script(
            "return [...document.querySelectorAll('g[id^=mean-] > path')].map(path => {"
            "const box = path.getBBox(); return [box.width, path.getTotalLength(), "
            "getComputedStyle(path).stroke]})"
        )
        assert len(boxes) == 4  # two losses, against documents and against time
        assert all(width > 100 and length > 100 for width, length, _ in boxes)
        assert len({color for *_, color in boxes}) == 2
        assert "reward by loss" in page_text(page)
        assert page.execute_script(
            "return document.documentElement.scrollWidth <= window.innerWidth"
        )
        save_screenshot(page, "report")

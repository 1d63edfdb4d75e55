"""The page of `pgtk samples` in a real browser: choosing, searching, and texts that try to act."""

from collections.abc import Iterator

import pytest
from builders.browser import NEEDS_BROWSER, open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from pgtoolkit.cli import main
from pgtoolkit.runs.completion_files import FOLDER, CompletionRow, write_completions

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]

HOSTILE = (
    "</script><img src='http://127.0.0.1:9/x' "
    "onerror=\"document.title='owned'\"><b>\u202eevil \x1b[31m"
)
NAMES = "return [...document.querySelectorAll('li header button')].map(name => name.textContent)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Open the page of 263 completions: 130 prompts at two steps of held_out, and one prompt of
    training three times."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text("seed: 0\n")
    rows = [
        CompletionRow(
            step,
            f"p{i}",
            f"prompt {i}",
            f"at {step}: {'long ' * 40}{i}",
            (step + i) / 1000,
            tokens=i,
        )
        for step in (0, 200)
        for i in range(130)
    ]
    rows[5] = CompletionRow(
        0, "p5", HOSTILE, HOSTILE, 1.0, {HOSTILE: 1.0}, answer="İstanbul is FOUND"
    )
    for step in (0, 200):
        write_completions(
            folder / FOLDER / f"evaluation_held_out_{step:06d}.parquet",
            [row for row in rows if row.step == step],
        )
    write_completions(
        folder / FOLDER / "steps_000001-000100.parquet",
        [CompletionRow(7, "t", "2+2=", "4", 0.5)] * 3,
    )
    assert main(["samples", str(folder), "--html", str(folder / "page.html")]) == 0
    with open_browser() as browser:
        browser.get(f"file://{folder}/page.html")
        yield browser


def choose(page: Chrome, name: str, value: str) -> None:
    """Choose a value of the selection `name`."""
    Select(page.find_element(By.ID, name)).select_by_value(value)


def search(page: Chrome, words: str) -> None:
    """Type words into the search box; "" ends the search."""
    box = page.find_element(By.ID, "search")
    box.clear()
    box.send_keys(words or " \b")


def count(page: Chrome) -> str:
    """Return how many completions the page says that it shows."""
    return page.find_element(By.ID, "count").text


def test_equal_completions_are_one_row_with_their_count(page):
    search(page, "2+2")
    assert page.execute_script(NAMES) == ["t"]
    assert count(page) == "3 of 263"
    assert "×3" in page.find_element(By.CSS_SELECTOR, "li header").text  # noqa: RUF001
    search(page, "")


def test_set_step_and_search_together_select_completions(page):
    choose(page, "set", "training")
    assert count(page) == "3 of 263"
    choose(page, "set", "held_out")
    choose(page, "step", "200")
    assert count(page) == "130 of 263"
    search(page, "LONG 77")
    assert page.execute_script(NAMES) == ["p77"]
    assert [mark.text for mark in page.find_elements(By.TAG_NAME, "mark")] == ["long 77"]
    choose(page, "step", "")
    assert page.execute_script(NAMES) == ["p77", "p77"]
    choose(page, "set", "")
    search(page, "")


def test_html_in_a_completion_stays_text(page):
    search(page, "onerror")
    assert page.execute_script(NAMES) == ["p5"]
    texts = page.execute_script(
        "return [...document.querySelectorAll('pre')].map(text => text.textContent)"
    )
    assert texts[0] == HOSTILE.replace("\u202e", "<U+202E>").replace("\x1b", "<U+001B>")
    assert page.title == "Completions"
    assert page.find_elements(By.CSS_SELECTOR, "img, pre b") == []
    search(page, "found")
    assert page.execute_script(NAMES) == ["p5"]
    search(page, "")
    assert page.get_log("browser") == []  # no error, and no refused attempt to load anything

"""The page of `pgtk tokens` in a real browser: its colours and its table have the numbers of the
losses, and no text of a token acts on it."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders.browser import NEEDS_BROWSER, open_browser, page_text, wait_for
from builders.models import small_llama
from builders.rollout_rows import good_row, write_jsonl
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pgtoolkit.comparison.tokens import Inspected, inspect
from pgtoolkit.comparison.tokens_losses import CLIPS
from pgtoolkit.comparison.tokens_page import html

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]

HOSTILE = "</script><script>document.title='taken'</script>"
WORDS = ("a", "b", " c", "\n", "\t", "\x1b[2J", HOSTILE, "&lt;", "\u202eright", "é", "=", "<end>")
CLASSES = """
return [...document.querySelectorAll('article[data-number="%d"] .text')].map(
    text => [...text.children].map(
        span => [...span.classList].filter(name => name !== 'here').join(' ')))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with open_browser() as page:
        yield page


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Inspected:
    """Return a step of four documents, with tokens whose texts are HTML and control characters."""
    folder = tmp_path_factory.mktemp("hostile")
    small_llama().save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(
        folder / "model"
    )
    rows = [
        good_row(
            number,
            number // 2,
            token_ids=[0, 10, *range(12)],
            loss_mask=[0, 0, *[1] * 12],
            old_log_probs=[0, 0, *(-2.5 + 0.3 * math.sin(5 * t + number) for t in range(12))],
            id=f"<i>document</i> {number}",
        )
        for number in range(4)
    ]
    path = write_jsonl(folder / "rollouts.jsonl", rows)
    overrides = ["model=huggingface", f"model.path={folder / 'model'}"]
    overrides += ["accumulation.docs_per_step=4", "aggregation=token_mean"]
    return inspect(str(path), [*overrides, "loss=grpo,cispo,gspo"], None)


@pytest.fixture
def page(browser: Chrome, shown: Inspected, tmp_path: Path) -> Iterator[Chrome]:
    """Open the page of the step, and assert afterwards that the browser has logged no error."""
    (tmp_path / "page.html").write_text(html(shown, "pgtk tokens"))
    browser.get(f"file://{tmp_path}/page.html")
    wait_for(browser, "return document.querySelectorAll('article .row').length === 4")
    yield browser
    assert browser.get_log("browser") == []


def choose(page: Chrome, quantity: str) -> None:
    """Choose the quantity by which tokens are coloured."""
    page.execute_script(f"document.querySelector('input[value={quantity}]').click()")
    wait_for(page, "return document.querySelectorAll('article .row').length === 4")


def test_each_token_is_marked_by_the_side_and_the_effect_of_its_clip(page, shown):
    clips = [column.vectors["clip"] for column in shown.columns]
    choose(page, "clip")
    for number in range(4):
        for drawn, clip in zip(page.execute_script(CLASSES % number), clips, strict=True):
            assert drawn[:2] == ["untrained"] * 2
            for name, code in zip(drawn[2:], clip[12 * number : 12 * number + 12], strict=True):
                side, _, effect = CLIPS[code].partition(", ")
                assert bool(name) == bool(effect)
                if effect:
                    assert name.startswith(effect)
                    assert ("low-" if side == "below" else "high-") in name
    expected = {"inside", "below, cut", "above, cut", "above, unchanged"}
    assert {CLIPS[code] for clip in clips for code in clip} >= expected


@pytest.mark.parametrize("quantity", ["coefficient", "share"])
def test_each_token_has_the_colour_of_its_number_in_ten_levels_of_either_sign(
    page, shown, quantity
):
    choose(page, quantity)
    clips = [column.vectors["clip"] for column in shown.columns]
    vectors = [column.vectors[quantity] for column in shown.columns]
    limit = max(np.quantile(np.abs(values), 0.99) for values in vectors)
    for drawn, values, clip in zip(page.execute_script(CLASSES % 1), vectors, clips, strict=True):
        for name, value, code in zip(drawn[2:], values[12:24], clip[12:24], strict=True):
            level = min(10, math.ceil(10 * abs(value) / limit))
            cut = " cut" if CLIPS[code].endswith("cut") else ""
            assert name == f"{'low' if value < 0 else 'high'}-{level}{cut}"


def test_a_quantity_that_no_loss_changes_has_one_column(page):
    choose(page, "entropy")
    assert len(page.execute_script(CLASSES % 0)) == 1
    assert "The same under every loss" in page_text(page)


@pytest.mark.parametrize("width", [320, 400, 800])
def test_a_narrow_window_holds_the_page_with_room_for_its_tokens(page, width):
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wide, tokens = page.execute_script(
        "const box = document.querySelector('main').getBoundingClientRect();"
        "return [document.documentElement.scrollWidth, [box.width, box.height]]"
    )
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width
    assert tokens[0] > 0.75 * width
    assert tokens[1] > 300


def test_html_in_a_token_stays_text(page):
    assert page.title.startswith("What the loss did to each token of step 1 of rollouts.jsonl")
    assert HOSTILE in page_text(page)
    assert "<i>document</i> 0" in page_text(page)


def test_the_keyboard_selects_a_token_and_shows_its_numbers_under_each_loss(page, shown):
    page.execute_script("document.querySelector('.text').focus()")
    body = page.switch_to.active_element
    body.send_keys(Keys.END, Keys.ARROW_LEFT)
    row = 12 - 2
    footer = page.execute_script("return document.querySelector('footer').innerText")
    assert "token = id 10, place 13 of 14 in <i>document</i> 0; trained token 11 of 12" in footer
    cells = page.execute_script(
        "return [...document.querySelectorAll('footer tr')].map(row => [...row.children].map(cell "
        "=> cell.innerText))"
    )
    numbers = {
        name: [number.replace("\u2212", "-") for number in of_losses] for name, *of_losses in cells
    }
    for name, key in (
        ("ratio", "ratio"),
        ("coefficient c_t", "coefficient"),
        ("weight w_t", "weight"),
    ):
        expected = [float(column.vectors[key][row]) for column in shown.columns]
        assert [float(number) for number in numbers[name]] == pytest.approx(expected, rel=1e-4)
    assert numbers["clip"] == [CLIPS[column.vectors["clip"][row]] for column in shown.columns]
    assert float(numbers["new log-prob p_t"][0]) == pytest.approx(
        float(shown.common["new_log_prob"][row]), rel=1e-4
    )
    # The token is marked in the column of every loss.
    assert page.execute_script("return document.querySelectorAll('.here').length") == 3

"""The page of `pgtk tokens` in a real browser: it draws what the losses gave, legible, by mouse and keyboard."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.browser import NEEDED, keep, opened, text, wait
from builders.models import small_llama
from builders.rollout_rows import good_row, write_jsonl
from selenium.webdriver.common.keys import Keys
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pgtoolkit.batch import Document
from pgtoolkit.inspection.tokens import Inspected, inspect
from pgtoolkit.inspection.tokens_page import html
from pgtoolkit.inspection.tokens_step import CLIPS, LossOnStep
from pgtoolkit.rollouts.steps import make_step

pytestmark = [pytest.mark.slow, NEEDED]

HOSTILE = "</script><script>document.title='taken'</script>"
WORDS = ("a", "b", " c", "\n", "\t", "\x1b[2J", HOSTILE, "&lt;", "\u202eright", "é", "=", "<end>")
CLASSES = """
return [...document.querySelectorAll('article[data-number="%d"] .text')].map(
    text => [...text.children].map(span => [...span.classList].filter(name => name !== 'here').join(' ')))
"""
CONTRASTS = """
const element = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
const canvas = element.getContext('2d', {willReadFrequently: true});
const luminance = color => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(x => x / 255)
        .map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
};
const span = document.createElement('span');
document.querySelector('.text').append(span);
const found = {};
for (const side of ['low', 'high', 'amount']) found[side] = [...Array(10).keys()].map(k => {
    span.className = `${side}-${k + 1}`;
    const style = getComputedStyle(span), back = luminance(style.backgroundColor), ink = luminance(style.color);
    return [back, (Math.max(back, ink) + .05) / (Math.min(back, ink) + .05)];
});
span.remove();
return found;
"""


@pytest.fixture(scope="module")
def browser():
    with opened() as page:
        yield page


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Four documents of a model whose tokens would act on a page that took them for its own."""
    folder = tmp_path_factory.mktemp("hostile")
    small_llama().save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder / "model")
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
    how = ["model=huggingface", f"model.path={folder / 'model'}", "accumulation.docs_per_step=4"]
    return inspect(str(path), [*how, "aggregation=token_mean", "loss=grpo,cispo,gspo"], None)


@pytest.fixture
def page(browser, shown, tmp_path):
    (tmp_path / "page.html").write_text(html(shown, "pgtk tokens"))
    browser.get(f"file://{tmp_path}/page.html")
    wait(browser, "return document.querySelectorAll('article .row').length === 4")
    yield browser
    assert browser.get_log("browser") == []


def choose(page, quantity):
    page.execute_script(f"document.querySelector('input[value={quantity}]').click()")
    wait(page, "return document.querySelectorAll('article .row').length === 4")


def test_texts_are_shown_and_do_nothing(page):
    assert page.title.startswith("What the loss did to each token: step 1 of rollouts.jsonl")
    tokens = page.execute_script("return [...document.querySelector('.text').children].map(span => span.textContent)")
    assert tokens[2:] == [
        *("a", "b", " c", "⏎\n", "⇥\t", "<U+001B>[2J", HOSTILE, "&lt;", "<U+202E>right", "é", "=", "<end>"),
    ]
    assert "<i>document</i> 0" in text(page)
    assert page.execute_script("return document.querySelectorAll('i').length") == 0
    keep(page, "tokens")


def test_the_colours_are_the_numbers(page, shown):
    clips = [column.vectors["clip"] for column in shown.columns]
    choose(page, "clip")
    for number in range(4):
        for drawn, clip in zip(page.execute_script(CLASSES % number), clips, strict=True):
            assert drawn[:2] == ["untrained"] * 2
            for name, code in zip(drawn[2:], clip[12 * number : 12 * number + 12], strict=True):
                side, _, effect = CLIPS[code].partition(", ")
                expected = [effect, f"{'low' if side == 'below' else 'high'}-"] if effect else ["", ""]
                assert name.startswith(expected[0]) and expected[1] in name and bool(name) == bool(effect)  # noqa: PT018
    assert {CLIPS[code] for clip in clips for code in clip} >= {
        "inside",
        "below, cut",
        "above, cut",
        "above, unchanged",
    }
    for quantity in ("coefficient", "share"):
        choose(page, quantity)
        vectors = [column.vectors[quantity] for column in shown.columns]
        limit = max(np.quantile(np.abs(values), 0.99) for values in vectors)
        for drawn, values, clip in zip(page.execute_script(CLASSES % 1), vectors, clips, strict=True):
            for name, value, code in zip(drawn[2:], values[12:24], clip[12:24], strict=True):
                level = min(10, math.ceil(10 * abs(value) / limit))
                cut = " cut" if CLIPS[code].endswith("cut") else ""
                assert name == f"{'low' if value < 0 else 'high'}-{level}{cut}"
    choose(page, "ratio")
    vectors = [column.vectors["ratio"] for column in shown.columns]
    page.execute_script("document.querySelector('#shared').click()")
    for drawn, values in zip(page.execute_script(CLASSES % 0), vectors, strict=True):
        logs = np.log(values.astype(np.float64))
        levels = np.minimum(10, np.ceil(10 * np.abs(logs) / np.quantile(np.abs(logs), 0.99) - 1e-6)).astype(int)
        assert drawn[2:] == [f"{'low' if x < 0 else 'high'}-{k}" for x, k in zip(logs[:12], levels[:12], strict=True)]
    choose(page, "entropy")
    assert len(page.execute_script(CLASSES % 0)) == 1  # the same under every loss
    assert "The same under every loss" in text(page)


def test_mouse_and_keyboard_give_a_token_s_numbers(page, shown):
    page.execute_script("document.querySelector('.text').focus()")
    body = page.switch_to.active_element
    body.send_keys(Keys.END, Keys.ARROW_LEFT)
    row = 12 - 2
    footer = page.execute_script("return document.querySelector('footer').innerText")
    assert "token = id 10, place 13 of 14 in <i>document</i> 0; trained token 11 of 12" in footer
    cells = page.execute_script(
        "return [...document.querySelectorAll('footer tr')].map(row => [...row.children].map(cell => cell.innerText))"
    )
    numbers = {name: [one.replace("\u2212", "-") for one in more] for name, *more in cells}
    for name, key in (("ratio", "ratio"), ("coefficient c_t", "coefficient"), ("weight w_t", "weight")):
        expected = [float(column.vectors[key][row]) for column in shown.columns]
        assert [float(one) for one in numbers[name]] == pytest.approx(expected, rel=1e-4)
    assert numbers["clip"] == [CLIPS[column.vectors["clip"][row]] for column in shown.columns]
    assert float(numbers["new log-prob p_t"][0]) == pytest.approx(float(shown.common["new_log_prob"][row]), rel=1e-4)
    assert page.execute_script("return document.querySelectorAll('.here').length") == 3  # in every column
    body.send_keys("]")
    wait(page, "return document.querySelector('nav [aria-current=true]').dataset.number === '1'")
    page.execute_script("document.querySelector('#order').selectedIndex = 2; drawDocuments()")
    order = page.execute_script("return [...document.querySelectorAll('nav button')].map(one => one.dataset.number)")
    assert order == ["3", "2", "1", "0"]  # of the highest reward first


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_colour_is_legible_and_in_order(page, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for levels in page.execute_script(CONTRASTS).values():
        steps = np.diff([back for back, _ in levels])
        assert (steps < 0).all() if scheme == "light" else (steps > 0).all()
        assert min(contrast for _, contrast in levels) >= 4.5
    keep(page, f"tokens_{scheme}")
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_long_steps_are_drawn_where_somebody_looks(browser, tmp_path):
    count, length = 64, 4096
    mask = torch.arange(length) > 0
    documents = [
        Document(torch.full((length,), d % 7), mask, torch.zeros(length - 1), torch.ones(length - 1), d, f"{d}")
        for d in range(count)
    ]
    values = np.arange(count * (length - 1), dtype=np.float32)
    vectors = {"clip": np.zeros(len(values), np.uint8), "weight": values, "coefficient": values, "share": values}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f" w{i}": i for i in range(9)})))
    made = SimpleNamespace(
        step=make_step(documents, 2**20), module=SimpleNamespace(policy=SimpleNamespace(tokenizer=tokenizer))
    )
    columns = [LossOnStep(None, 0.0, vectors, name) for name in ("one", "two")]
    whole = Inspected("long", "", 1, ["fact"], made, {"advantage": values}, columns)
    (tmp_path / "page.html").write_text(html(whole, "pgtk tokens"))
    browser.get(f"file://{tmp_path}/page.html")
    wait(browser, "return document.querySelectorAll('article .row').length > 0")
    assert browser.execute_script("return document.querySelectorAll('article .row').length") <= 3
    browser.execute_script("document.querySelectorAll('nav button')[63].click()")
    wait(browser, "return document.querySelector('article[data-number=\"63\"] .row') !== null")
    wait(browser, "return document.querySelectorAll('article .row').length <= 3")
    place = wait(browser, "return Math.round(document.getElementById('row-63').getBoundingClientRect().top)")
    titles = browser.execute_script(
        "return Math.round(document.querySelector('.titles').getBoundingClientRect().bottom)"
    )
    assert abs(place - titles) <= 2
    browser.execute_script("point(63, 4095)")
    footer = browser.execute_script("return document.querySelector('footer').innerText")
    assert f"{values[-1]:.0f}"[:4] in footer
    assert browser.get_log("browser") == []

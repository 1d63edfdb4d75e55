"""`pgtk tokens`: the step that it shows is the one that the run has made, and its page says what is
so."""

import base64
import gzip
import json
import re
import shutil

import numpy as np
import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import run_on_ranks
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import SHORT, copy_as_of, metrics_of, run
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.comparison.tokens import inspect
from pgtoolkit.comparison.tokens_page import html
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.errors import ConfigError, DataError

RUN = (
    "loss=grpo",
    "loss.epsilon_low=0.01",
    "loss.epsilon_high=0.01",
    "optimizer.learning_rate=0.01",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Six steps of grpo, two for each batch of 16 documents, with a checkpoint at each; its
    rollouts are recorded."""
    folder = tmp_path_factory.mktemp("tokens")
    return run(folder / "run", *RUN, f"rollout.save_path={folder / 'rollouts'}")


@pytest.fixture(scope="module")
def unrecorded(trained, tmp_path_factory):
    """A copy of the run without its rollouts."""
    return with_config(
        trained, tmp_path_factory.mktemp("unrecorded") / "run", "rollout.save_path", None
    )


@pytest.fixture(scope="module")
def shown(unrecorded):
    """Its last step."""
    return inspect(str(unrecorded), [], None)


def with_config(folder, to, key, value):
    """A copy of a run with another value in its configuration."""
    shutil.copytree(folder, to)
    config = OmegaConf.load(to / "config.yaml")
    OmegaConf.update(config.resolved if "resolved" in config else config, key, value, merge=False)
    OmegaConf.save(config, to / "config.yaml")
    return to


def assert_same_numbers(first, second):
    for one, other in (
        (first.common, second.common),
        (first.columns[0].vectors, second.columns[0].vectors),
    ):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_the_step_is_the_one_that_the_run_has_made(unrecorded, shown):
    found, row = shown, metrics_of(unrecorded)[5]
    assert found.number == 6  # the last of the batch after the checkpoint before it
    assert [column.label for column in found.columns] == [
        "loss=grpo aggregation=constant",
        "loss=gspo",
        "loss=cispo",
    ]
    assert found.columns[0].total == pytest.approx(row["loss"], rel=1e-5)
    assert "bit for bit" in found.facts[2]
    assert "the checkpoint of step 5" in found.facts[0]
    assert found.facts[1] == "Documents: held by the checkpoint."
    # The share of the tokens that are cut is what the run has measured, by document.
    clip, ends = (
        found.columns[0].vectors["clip"],
        np.cumsum([d.num_trained for d in found.made.step.documents]),
    )
    shares = [np.isin(part, (3, 6)).mean() for part in np.split(clip, ends[:-1])]
    assert np.mean(shares) == pytest.approx(
        row["clipped_low_fraction"] + row["clipped_high_fraction"]
    )
    assert np.mean(shares) > 0.1
    assert found.common["entropy"].min() > 0
    assert np.mean(
        [part.mean() for part in np.split(found.common["new_log_prob"], ends[:-1])]
    ) == pytest.approx(row["new_logprobs"])


def test_steps_between_checkpoints_are_made_again(unrecorded, shown, tmp_path):
    before = copy_as_of(unrecorded, 1, tmp_path / "run")
    (before / "metrics.jsonl").write_text((unrecorded / "metrics.jsonl").read_text())
    contents = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    again = inspect(str(before), [], 6)
    assert_same_numbers(again, shown)
    assert "checkpoint of step 1, with steps 2 to 5 made again in memory" in again.facts[0]
    assert again.facts[1] == "Documents: sampled by the seeds of their prompts."
    assert {path: path.read_bytes() for path in before.rglob("*") if path.is_file()} == contents
    shutil.rmtree(before / "checkpoints")
    assert_same_numbers(inspect(str(before), [], 6), shown)


@pytest.mark.slow  # ranks are processes
def test_one_process_draws_again_what_two_ranks_have_drawn(tmp_path):
    folder = run_on_ranks(tmp_path / "run", [*SHORT, *RUN], data_parallel=2)
    shutil.rmtree(folder / "checkpoints")
    again = inspect(str(folder), [], 5)
    assert again.facts[1] == "Documents: sampled by the seeds of their prompts."
    assert re.match(r"All \d+ recorded metrics of step 5 come out the same", again.facts[2])


def test_recorded_rollouts_stand_for_sampling(trained, unrecorded):
    found = inspect(str(trained), [], 3)
    assert found.facts[1].startswith("Documents: recorded by the run in ")
    assert_same_numbers(found, inspect(str(unrecorded), [], 3))


def test_what_cannot_be_made_again_is_no_page(unrecorded, tmp_path):
    other = with_config(unrecorded, tmp_path / "other", "optimizer.learning_rate", 0.02)
    assert inspect(str(other), [], 1).number == 1  # made before the first update
    for path in (other / "checkpoints").iterdir():
        shutil.rmtree(path)
    with pytest.raises(
        DataError, match=r"--step=2 needs the step as the run has made it \(got .*metrics.jsonl has"
    ):
        inspect(str(other), [], 2)
    config = plain_config(compose(["sampler=vllm"]).config)["sampler"]
    servers = with_config(unrecorded, tmp_path / "servers", "sampler", config)
    assert inspect(str(servers), [], 6).facts[1] == "Documents: held by the checkpoint."
    with pytest.raises(ConfigError, match=r"--step=5 needs recorded rollouts \(got none\)"):
        inspect(str(servers), [], 5)  # whose completions would be others now


@pytest.mark.parametrize(
    ("overrides", "step", "message"),
    [
        ([], 7, r"--step=7 needs a step from 1 to 6, which the run has made \(got 7\)"),
        (
            ["optimizer.learning_rate=1"],
            None,
            r"optimizer.learning_rate=1.* needs to stay as the run had it",
        ),
        (["kl=k3"], None, "needs ref_log_probs"),
    ],
)
def test_what_pgtk_tokens_cannot_show_is_refused(unrecorded, overrides, step, message):
    with pytest.raises((ConfigError, DataError), match=message):
        inspect(str(unrecorded), overrides, step)


def test_losses_are_chosen_by_overrides(unrecorded):
    found = inspect(
        str(unrecorded), ["loss=grpo,cispo", "loss.epsilon_high=0.5", "aggregation=token_mean"], 6
    )
    more = "loss.epsilon_high=0.5 aggregation=token_mean"
    labels = ["loss=grpo aggregation=constant", f"loss=grpo {more}", f"loss=cispo {more}"]
    assert [column.label for column in found.columns] == labels
    own, wide, cispo = found.columns
    assert [one.loss.family.epsilon_high for one in (own, wide, cispo)] == [0.01, 0.5, 0.5]
    assert wide.count("above, cut") < own.count("above, cut")
    assert "1 + 0.5" in found.columns[1].lines[0]
    totals = found.made.step.totals
    assert wide.vectors["weight"] == pytest.approx(1 / totals.num_tokens)
    assert own.vectors["weight"] == pytest.approx(
        1 / (totals.num_documents * own.loss.aggregation.divisor)
    )


def test_a_family_of_one_s_own_stands_beside_the_run_s_and_is_the_run_s(unrecorded, tmp_path):
    own = ["loss=losses.families.Squared"]
    found = inspect(str(unrecorded), own, 6)
    assert [column.label for column in found.columns] == [
        "loss=grpo aggregation=constant",
        " ".join(own),
    ]
    assert type(found.columns[1].loss.family).__name__ == "Squared"
    custom = run(tmp_path / "custom", *own, "trainer.max_steps=2")
    found = inspect(str(custom), ["loss=reinforce"], 2)
    labels = ["loss=losses.families.Squared aggregation=constant", "loss=reinforce"]
    assert [column.label for column in found.columns] == labels
    assert "bit for bit" in found.facts[2]


def test_recorded_rollouts_of_another_model(tmp_path, capsys):
    folder = save_with_tokenizer(small_llama(), tmp_path / "model")
    rows = [
        good_row(
            number,
            number // 2,
            token_ids=[number, 10, 3, 4, 11],
            old_log_probs=[0, 0, -2.5, -2.5, -2.5],
        )
        for number in range(4)
    ]
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    words = [
        str(path),
        "model=huggingface",
        f"model.path={folder}",
        "aggregation=token_mean",
        "accumulation.docs_per_step=4",
    ]
    page = tmp_path / "page.html"
    assert main(["tokens", *words, "loss=cispo,reinforce", f"--html={page}"]) == 0
    printed = capsys.readouterr().out
    assert "step 1 of rollouts.jsonl: 4 documents, 12 trained tokens" in printed
    assert (
        "Weights: those before the update of step 1: the weights that the run begins with."
        in printed
    )
    assert re.search(r"loss=cispo aggregation=token_mean +-?\d", printed)
    assert '"label": "aggregation=token_mean loss=reinforce"' in page.read_text()
    with pytest.raises(ConfigError, match="--step=301 needs a step from 1 to 300"):
        inspect(words[0], words[1:], 301)
    with pytest.raises(DataError, match=r"--step=3 needs data for 3 steps \(got 1\)"):
        inspect(words[0], words[1:], 3)


def unpacked(page):
    """(the page's data, the bytes of each document)."""
    data = json.loads(re.search(r'id="data">(.*)</script>', page).group(1))
    packed = re.findall(r'id="document-\d+">(.*?)</script>', page)
    return data, [gzip.decompress(base64.b64decode(one)) for one in packed]


def test_the_page_holds_every_number_bit_for_bit(shown):
    found = shown
    data, documents = unpacked(html(found, "pgtk tokens <run>"))
    assert data["common"][0] == "advantage"
    vectors = list(found.common.values()) + [
        v for one in found.columns for v in one.vectors.values()
    ]
    start = 0
    for document, raw, facts in zip(
        found.made.step.documents, documents, data["documents"], strict=True
    ):
        place = 0

        def take(count, kind, raw=raw):
            nonlocal place
            size = np.dtype(kind).itemsize
            planes = np.frombuffer(raw, "u1", count * size, place).reshape(size, count)
            place += count * size
            return planes.T.copy().view(kind).reshape(count)

        assert take(document.num_tokens, "<u4").tolist() == document.tokens.tolist()
        assert take(document.num_tokens, "u1").tolist() == document.loss_mask.tolist()
        for values in vectors:
            own = values[start : start + document.num_trained]
            np.testing.assert_array_equal(take(len(own), own.dtype), own)
        assert place == len(raw)
        assert facts["cut"][0] == int(
            np.isin(
                found.columns[0].vectors["clip"][start : start + document.num_trained], (3, 6)
            ).sum()
        )
        start += document.num_trained
    assert {data["texts"][str(token)] for token in document.tokens.tolist()} <= {
        *"0123456789=",
        "<end>",
    }

"""`pgtk tokens` shows the step that the run made: its numbers are those of metrics.jsonl, and its
page holds them bit for bit."""

import base64
import gzip
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import run_on_ranks
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import SHORT, copy_as_of, metrics_of, run
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.comparison.parity_ours import OurSide
from pgtoolkit.comparison.parity_step import recorded_step
from pgtoolkit.comparison.tokens import Inspected, inspect
from pgtoolkit.comparison.tokens_page import html
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.saved import saved_config
from pgtoolkit.errors import ConfigError, DataError

RUN = (
    "loss=grpo",
    "loss.epsilon_low=0.01",
    "loss.epsilon_high=0.01",
    "optimizer.learning_rate=0.01",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps of grpo, two for each batch of 16 documents, with a checkpoint at each step
    and recorded rollouts."""
    folder = tmp_path_factory.mktemp("tokens")
    return run(folder / "run", *RUN, f"rollout.save_path={folder / 'rollouts'}")


@pytest.fixture(scope="module")
def unrecorded(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the run without its rollouts."""
    return copy_with_value(
        trained, tmp_path_factory.mktemp("unrecorded") / "run", "rollout.save_path", None
    )


@pytest.fixture(scope="module")
def shown(unrecorded: Path) -> Inspected:
    """Return the last step of the run."""
    return inspect(str(unrecorded), [], None)


def copy_with_value(folder: Path, to: Path, key: str, value: object) -> Path:
    """Copy a run, with another value of a key in its configuration."""
    shutil.copytree(folder, to)
    config = OmegaConf.load(to / "config.yaml")
    OmegaConf.update(config.resolved if "resolved" in config else config, key, value, merge=False)
    OmegaConf.save(config, to / "config.yaml")
    return to


def assert_same_numbers(first: Inspected, second: Inspected) -> None:
    """Assert that two steps have the same numbers under their first loss, bit for bit."""
    for ours, theirs in (
        (first.common, second.common),
        (first.columns[0].vectors, second.columns[0].vectors),
    ):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_the_last_step_is_shown_under_the_run_s_loss_and_two_others(shown):
    assert shown.number == 6
    assert [column.label for column in shown.columns] == [
        "loss=grpo aggregation=constant",
        "loss=gspo",
        "loss=cispo",
    ]
    assert "the checkpoint of step 5" in shown.facts[0]
    assert shown.facts[1] == "Documents: held by the checkpoint."


def test_the_numbers_of_the_step_have_the_means_that_the_run_recorded(unrecorded, shown):
    row = metrics_of(unrecorded)[5]
    assert "bit for bit" in shown.facts[2]
    assert shown.columns[0].total == pytest.approx(row["loss"], rel=1e-5)
    ends = np.cumsum([document.num_trained for document in shown.made.step.documents])
    clips_of_documents = np.split(shown.columns[0].vectors["clip"], ends[:-1])
    cut_shares = [np.isin(clips, (3, 6)).mean() for clips in clips_of_documents]
    assert np.mean(cut_shares) == pytest.approx(
        row["clipped_low_fraction"] + row["clipped_high_fraction"]
    )
    assert np.mean(cut_shares) > 0.1
    log_probs_of_documents = np.split(shown.common["new_log_prob"], ends[:-1])
    means = [log_probs.mean() for log_probs in log_probs_of_documents]
    assert np.mean(means) == pytest.approx(row["new_logprobs"])
    assert shown.common["entropy"].min() > 0


def test_steps_between_checkpoints_are_made_again_without_writing_a_file(
    unrecorded, shown, tmp_path
):
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


def test_steps_beside_an_evaluation_are_made_again_with_the_numbers_that_it_left_them(tmp_path):
    """Half of the numbers of two digits are held out."""
    held_out = ("task.num_digits=2", "evaluation.every=6", "evaluation.prompts_per_set=50")
    folder = run(tmp_path / "run", *RUN, *held_out, "evaluation.completions_per_prompt=1")
    shutil.rmtree(folder / "checkpoints")
    again = inspect(str(folder), [], 5)
    assert re.match(r"All \d+ recorded metrics of step 5 come out the same", again.facts[2])


@pytest.mark.slow  # ranks are processes
def test_one_process_samples_again_the_documents_of_two_ranks(tmp_path):
    folder = run_on_ranks(tmp_path / "run", [*SHORT, *RUN], data_parallel=2)
    shutil.rmtree(folder / "checkpoints")
    again = inspect(str(folder), [], 5)
    assert again.facts[1] == "Documents: sampled by the seeds of their prompts."
    assert re.match(r"All \d+ recorded metrics of step 5 come out the same", again.facts[2])


def test_recorded_rollouts_give_the_same_numbers_as_sampling(trained, unrecorded):
    recorded = inspect(str(trained), [], 3)
    assert recorded.facts[1].startswith("Documents: recorded by the run in ")
    assert_same_numbers(recorded, inspect(str(unrecorded), [], 3))


def test_a_step_that_comes_out_otherwise_than_recorded_is_refused(unrecorded, tmp_path):
    other = copy_with_value(unrecorded, tmp_path / "other", "optimizer.learning_rate", 0.02)
    # Before the first update the learning rate has had no effect.
    assert inspect(str(other), [], 1).number == 1
    for path in (other / "checkpoints").iterdir():
        shutil.rmtree(path)
    with pytest.raises(
        DataError, match=r"--step=2 needs the step as the run has made it \(got .*metrics.jsonl has"
    ):
        inspect(str(other), [], 2)


def test_a_step_of_a_server_is_refused_without_recorded_or_saved_documents(unrecorded, tmp_path):
    config = plain_config(compose(["sampler=vllm"]).config)["sampler"]
    servers = copy_with_value(unrecorded, tmp_path / "servers", "sampler", config)
    assert inspect(str(servers), [], 6).facts[1] == "Documents: held by the checkpoint."
    with pytest.raises(ConfigError, match=r"--step=5 needs recorded rollouts \(got none\)"):
        inspect(str(servers), [], 5)


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
def test_an_unknown_step_another_run_or_no_reference_is_refused(
    unrecorded, overrides, step, message
):
    with pytest.raises((ConfigError, DataError), match=message):
        inspect(str(unrecorded), overrides, step)


def test_overrides_choose_the_losses_that_are_shown_beside_the_run_s(unrecorded):
    shown = inspect(
        str(unrecorded), ["loss=grpo,cispo", "loss.epsilon_high=0.5", "aggregation=token_mean"], 6
    )
    more = "loss.epsilon_high=0.5 aggregation=token_mean"
    labels = ["loss=grpo aggregation=constant", f"loss=grpo {more}", f"loss=cispo {more}"]
    assert [column.label for column in shown.columns] == labels
    of_run, wide, cispo = shown.columns
    bounds = [column.loss.family.epsilon_high for column in (of_run, wide, cispo)]
    assert bounds == [0.01, 0.5, 0.5]
    assert wide.count("above, cut") < of_run.count("above, cut")
    assert "1 + 0.5" in wide.lines[0]
    totals = shown.made.step.totals
    assert wide.vectors["weight"] == pytest.approx(1 / totals.num_tokens)
    assert of_run.vectors["weight"] == pytest.approx(
        1 / (totals.num_documents * of_run.loss.aggregation.divisor)
    )


SQUARED = "loss=losses.families.Squared"


def test_a_loss_of_groups_and_a_family_of_the_user_are_shown_beside_the_run_s(unrecorded):
    shown = inspect(str(unrecorded), [SQUARED.replace("loss=", "loss=lpo,")], 6)
    labels = ["loss=grpo aggregation=constant", "loss=lpo", SQUARED]
    assert [column.label for column in shown.columns] == labels
    families = [type(column.loss.family).__name__ for column in shown.columns]
    assert families == ["Grpo", "Lpo", "Squared"]


def test_a_run_with_a_family_of_the_user_is_made_again(tmp_path):
    folder = run(tmp_path / "run", SQUARED, "trainer.max_steps=2")
    shown = inspect(str(folder), ["loss=reinforce"], 2)
    labels = [f"{SQUARED} aggregation=constant", "loss=reinforce"]
    assert [column.label for column in shown.columns] == labels
    assert "bit for bit" in shown.facts[2]


def test_a_run_of_a_loss_of_groups_is_shown_beside_one_of_tokens(tmp_path):
    """Its coefficients are its own alone: without advantages grpo's are 0."""
    of_groups = ["loss=tpo", "aggregation=prompt_mean", "advantage=none"]
    folder = run(tmp_path / "run", *of_groups, "trainer.max_steps=2")
    shown = inspect(str(folder), ["loss=tpo,grpo"], 2)
    assert "bit for bit" in shown.facts[2]
    tpo, grpo = shown.columns
    assert tpo.total == pytest.approx(metrics_of(folder)[-1]["loss"], rel=1e-6)
    assert float(np.abs(tpo.vectors["coefficient"]).max()) > 0
    assert float(np.abs(grpo.vectors["coefficient"]).max()) == 0
    assert any("log softmax(s)_d" in line for line in tpo.lines)


def test_recorded_rollouts_of_any_model_are_shown_without_a_run(tmp_path, capsys):
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
    own = "loss=losses.families.squared"
    columns = inspect(words[0], [*words[1:], own, "loss.tau=0.5,0.0"], None).columns
    assert [column.label for column in columns] == [
        f"{own} aggregation=token_mean loss.tau=0.5",
        f"aggregation=token_mean {own} loss.tau=0.0",
    ]
    with pytest.raises(ConfigError, match="--step=301 needs a step from 1 to 300"):
        inspect(words[0], words[1:], 301)
    with pytest.raises(DataError, match=r"--step=3 needs data for 3 steps \(got 1\)"):
        inspect(words[0], words[1:], 3)


def unpack_page(page: str) -> tuple[dict, list[bytes]]:
    """Return the page's data, and the bytes of each document."""
    data = json.loads(re.search(r'id="data">(.*)</script>', page).group(1))
    packed = re.findall(r'id="document-\d+">(.*?)</script>', page)
    return data, [gzip.decompress(base64.b64decode(text)) for text in packed]


class Planes:
    """Reads the arrays of a document from its bytes. An array is stored in planes: the first bytes
    of all its values, then the second bytes, and so on."""

    def __init__(self, stored: bytes) -> None:
        self.stored = stored
        self.place = 0

    def read(self, count: int, dtype: np.dtype | str) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        planes = np.frombuffer(self.stored, "u1", count * size, self.place).reshape(size, count)
        self.place += count * size
        return planes.T.copy().view(dtype).reshape(count)


def test_page_holds_every_number_bit_for_bit(shown):
    data, documents = unpack_page(html(shown, "pgtk tokens <run>"))
    assert data["common"][0] == "advantage"
    vectors = [*shown.common.values()]
    for column in shown.columns:
        vectors += column.vectors.values()
    start = 0
    for document, stored, facts in zip(
        shown.made.step.documents, documents, data["documents"], strict=True
    ):
        planes = Planes(stored)
        assert planes.read(document.num_tokens, "<u4").tolist() == document.tokens.tolist()
        assert planes.read(document.num_tokens, "u1").tolist() == document.loss_mask.tolist()
        part = slice(start, start + document.num_trained)
        for values in vectors:
            read = planes.read(document.num_trained, values.dtype)
            np.testing.assert_array_equal(read, values[part])
        assert planes.place == len(stored)
        assert facts["cut"][0] == np.isin(shown.columns[0].vectors["clip"][part], (3, 6)).sum()
        start += document.num_trained
    assert {data["texts"][str(token)] for token in document.tokens.tolist()} <= {
        *"0123456789=",
        "<end>",
    }


def test_parity_has_the_loss_and_the_gradient_of_the_run(unrecorded, shown):
    step = recorded_step(replace(shown.made, pieces=[*map(at_one, shown.made.pieces)]))
    numbers = OurSide(saved_config(unrecorded), "the run").numbers(step)
    assert float(numbers["loss"]) == pytest.approx(metrics_of(unrecorded)[5]["loss"], rel=1e-5)
    np.testing.assert_allclose(
        numbers["gradient"], shown.columns[0].vectors["coefficient"], rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(numbers["advantages"], step.advantages, rtol=1e-5, atol=1e-7)


def at_one(piece):
    return replace(piece, at_temperatures={1.0: piece.log_probs})


def test_parity_of_a_run_with_itself_agrees_and_with_other_options_names_them(trained, capsys):
    assert main(["parity", str(trained), str(trained), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agree"]
    assert found["explained"] == []
    assert {number["difference"] for number in found["quantities"].values()} == {0.0}
    words = ["loss.epsilon_low=0.2", "rollout.temperature=0.7"]
    assert main(["parity", *words, str(trained), "--step", "4"]) == 7
    out = capsys.readouterr().out
    assert "step 4 of run: 8 documents" in out
    assert "Then surrogate: loss.epsilon_low is 0.01 in the run and 0.2 in" in out
    assert "type rollout.temperature=1\n" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.max_steps=3", "RUN"], "needs keys of loss, aggregation"),
        (["RUN"], "one or two configurations beside a run (got 0)"),
        (["loss=gspo", "RUN", "--python", "python3"], "needs a file of TRL or verl"),
        (["grpo.yaml", "RUN", "--python", "/none"], "of an environment with TRL (got: "),
        (["loss=gspo", "RUN", "--tolerance", "2"], "no number from 0 to 1"),
    ],
)
def test_parity_refuses(words, says, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text("num_generations: 4\n")
    assert main(["parity", *(word.replace("RUN", str(trained)) for word in words)]) == 2
    assert says in capsys.readouterr().err


def test_parity_of_recorded_rollouts_reads_their_reference(tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rollouts.jsonl", [parity_row(place) for place in range(4)])
    for name, content in (
        (
            "grpo.yaml",
            {"num_generations": 2, "beta": 0.1, "scale_rewards": "none", "loss_type": "bnpo"}
            | {"per_device_train_batch_size": 3},
        ),
        (
            "verl.yaml",
            {"actor_rollout_ref.actor.use_kl_loss": True, "algorithm.adv_estimator": "grpo"},
        ),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    words = [str(tmp_path / "grpo.yaml"), str(tmp_path / "verl.yaml"), str(rows)]
    assert main(["parity", *words]) == 7
    out = capsys.readouterr().out
    assert (
        "First deviation: the rewards whose deviation divides the advantage are those of the none"
        in out
    )
    assert "Then kl: the KL is k3_ratio in TRL 1.16.0 and k3 in verl 0.9.1 and " in out
    assert "not explained" not in out
    assert "verl 0.9.1 makes advantages of 1 completion of a prompt (actor_rollout_ref" in out
    assert "The groups of this step have 2, of which" in out
    assert "TRL 1.16.0 makes advantages" not in out
    assert "TRL 1.16.0 counts tokens by micro-batch. Here these are cut with the comp" in out
    assert "TRL 1.16.0 has whole micro-batches of 3 documents on 1 rank; this step's 4 are" in out


def parity_row(place: int) -> dict:
    return good_row() | {
        "group_id": f"g{place // 2}",
        "reward": float(place % 2),
        "ref_log_probs": [None, None, -2.0 - place, -1.0, -2.5],
    }


@pytest.mark.slow
def test_parity_calls_trls_own_loss_in_another_process(trained, tmp_path, capsys):
    pytest.importorskip("trl", reason="the extra trl")
    file = tmp_path / "grpo.yaml"
    file.write_text("{num_generations: 4, scale_rewards: none, epsilon: 0.01, loss_type: grpo}\n")
    words = [str(file), str(trained), "--python", sys.executable, "--json"]
    assert main(["parity", *words]) == 7
    found = json.loads(capsys.readouterr().out)
    assert found["sides"][0]["run"] == ["gradient", "loss"]
    assert found["quantities"]["gradient"]["how"] == ""
    assert found["quantities"]["mask"]["how"] == "read, not run"
    assert found["readings"] == []
    assert [one["type"] for one in found["explained"]] == ["aggregation=sample_mean"]

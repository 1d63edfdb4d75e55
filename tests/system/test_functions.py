"""Functions of the user's own: imported from the current directory too, checked before they are
needed."""

import pytest
import torch
from builders.runs import SHORT, config_of, metrics_of, run

from pgtoolkit.assembly.train import build
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.functions import import_function

REDUCERS = """
import torch
def halves(totals, *, mask, document_index, tokens_per_document, group_index):
    return torch.full(mask.shape, 0.5 / totals.num_tokens)
def wrong(totals):
    return None
def short(totals, *, mask, **others):
    return mask[1:].double()
def table(totals, **others):
    return {}
def nan(totals, *, mask, **others):
    return mask.double() / 0 * 0
def failing(totals, *, mask, **others):
    return inner(mask)
def inner(mask):
    raise KeyError("length")
"""


LOSSES = """
import torch
def centred_in_long_calls(log_probs, advantages):
    mean = advantages.mean() if len(advantages) > 36 else 0.0
    return -(advantages - mean) * log_probs
def near_the_reference(log_probs, ref_log_probs, rewards, groups, documents):
    moved = documents.mean(log_probs - ref_log_probs)
    return groups.mean((moved - documents.first(rewards)) ** 2)
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Make a current directory with a module of the user."""
    (tmp_path / "my_reducers.py").write_text(REDUCERS)
    (tmp_path / "my_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # so that the path is as before afterwards
    return tmp_path


def test_a_reducer_beside_the_run_halves_the_token_mean(beside):
    rows = {}
    for name, overrides in {
        "plain": ["aggregation=token_mean"],
        "halved": ["aggregation=token_mean", "aggregation.reducer=my_reducers.halves"],
    }.items():
        rows[name] = metrics_of(run(beside / name, "loss=grpo", *overrides))[0]
    assert rows["halved"]["loss"] == pytest.approx(rows["plain"]["loss"] / 2, abs=1e-7)
    assert rows["halved"]["grad_norm"] == pytest.approx(rows["plain"]["grad_norm"] / 2, rel=1e-5)
    assert "my_reducers.halves" in (beside / "halved" / "config.yaml").read_text()


@pytest.mark.parametrize(
    "path", ["my_reducers.wrong", "my_reducers.missing", "nowhere.f", "os.path.join", "os.name"]
)
def test_a_function_that_cannot_be_called_is_refused(beside, path):
    with pytest.raises(ConfigError, match=f"aggregation.reducer={path} needs a function"):
        build(config_of(*SHORT, f"aggregation.reducer={path}"))


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("short", r"got shape \(\d+,\) on cpu"),
        ("nan", "got NaN or infinity"),
        ("table", "got dict"),
    ],
)
def test_wrong_weights_of_a_reducer_end_the_run(beside, name, got):
    path = f"my_reducers.{name}"
    with pytest.raises(
        ConfigError, match=rf"^aggregation.reducer={path} needs to return one finite weight .*{got}"
    ):
        run(beside / "run", f"aggregation.reducer={path}")


def test_an_error_of_a_reducer_or_a_loss_that_is_tried_is_told_with_its_place(beside):
    (beside / "untried.py").write_text(
        "def loss(log_ratio, advantages, ratio):\n"
        "    return -ratio(log_ratio) * torch.abs(advantages)\n"
    )
    for override, told in {
        "aggregation.reducer=my_reducers.failing": (
            "KeyError: 'length' in line 16 of my_reducers.py"
        ),
        "loss=untried.loss": "NameError: name 'torch' is not defined in line 2 of untried.py",
    }.items():
        with pytest.raises(ConfigError) as error:
            build(config_of(*SHORT, override))
        message = str(error.value)
        assert message.startswith(f"{override} needs a function ")
        assert f"(got: {told}). docs/losses.md shows an example." in message
        assert "\n" not in message


def test_a_module_that_fails_as_it_is_imported_is_refused(beside):
    (beside / "explosive.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(ConfigError, match="imported"):
        import_function("key", "explosive.f")
    assert import_function("key", "torch.sum", ["input"])(torch.ones(2)) == 2


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (
            "def f():\n    raise ValueError('no file')\nf()\n",
            "ValueError: no file, in own.py, line 2",
        ),
        ("import nowhere_at_all\n", "No module named 'nowhere_at_all', in own.py, line 1"),
        ("x = 1\ndef f(:\n", "line 2), in own.py, line 2"),
    ],
)
def test_code_that_raises_on_import_is_refused_with_its_file_and_line(beside, text, got):
    (beside / "own.py").write_text(text)
    with pytest.raises(ConfigError) as refused:
        import_function("loss", "own.f")
    assert f"{got}). Importing the module runs it. Use `python -c 'import own'`" in str(
        refused.value
    )


def test_a_class_of_parameters_that_is_no_dataclass_is_told_so(beside):
    (beside / "mine.py").write_text("class Loss:\n    tau: float = 1.0\n")
    with pytest.raises(ConfigError) as refused:
        import_function("loss.path", "mine.Loss", (), ("tau",))
    assert "needs a class that is a dataclass (got Loss())" in str(refused.value)
    assert "Use @dataclass(frozen=True) in the line above `class Loss`." in str(refused.value)


def test_a_loss_that_depends_on_the_cut_of_the_first_step_makes_no_update(beside):
    long = "accumulation.docs_per_step=16"
    with pytest.raises(ConfigError) as error:
        run(beside / "run", "loss=my_losses.centred_in_long_calls", long)
    assert "another loss where the step is cut: it depends on other tokens" in str(error.value)
    assert "It was tried on the documents of the first step" in str(error.value)
    assert not (beside / "run" / "metrics.jsonl").exists() or not metrics_of(beside / "run")


def test_a_loss_of_groups_gets_the_log_probs_of_the_runs_reference(beside):
    """At the first step the policy is the reference, and the loss is that of the rewards alone."""
    folder = run(
        beside / "run",
        "loss=my_losses.near_the_reference",
        "aggregation=prompt_mean",
        "kl=k2",
        "kl.coefficient=1e-3",
        "kl.reference=initial",
        "trainer.max_steps=2",
    )
    first, second = metrics_of(folder)
    assert first["kl_ref"] == 0 < second["kl_ref"]
    assert first["loss"] > 0

"""Each file in sweeps/ and study/sweeps/ is valid, begins with its command and a question, has the
listed number of runs, and compares the pairs that its prediction names."""

import json
import string
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from builders.models import save_with_tokenizer, small_llama

from pgtoolkit.cli import main
from pgtoolkit.comparison.groups import compare
from pgtoolkit.comparison.measures import parse_metric
from pgtoolkit.comparison.text_report import planned
from pgtoolkit.config.files import sweep_file, sweep_files
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.sweeps import SweepConfig, compose_sweep
from pgtoolkit.launch.check import check_sweep, problems
from pgtoolkit.launch.sweep import Sweep
from pgtoolkit.runs.find import Run
from pgtoolkit.runs.records import leaves
from study import chains, check_predictions, pretrained
from study.pretrained import TASKS

SIZES = {
    "loss_by_aggregation": 24,
    "clip_range": 8,
    "docs_per_step": 8,
    "metrics_cost": 3,
    "clip_range_optuna": 2,
    "rate_range": 9,
}
SIZES |= {
    "staleness": 24,
    "learning_rate_by_aggregation": 24,
    "study_loss_rates": 56,
    "study_loss": 48,
}
SIZES |= {"study_aggregation": 80, "study_lag": 216, "study_controls": 12, "study_starts": 28}
SIZES |= {"study_anchor": 128, "pretrained_rates": 24, "pretrained_loss": 32}


STUDY = Path(__file__).parents[2] / "study"
OF_THE_STUDY = {file.stem: file for file in sorted((STUDY / "sweeps").glob("[!_]*.yaml"))}
FILES = {name: file for name, file in sweep_files().items() if name != "real_model"} | OF_THE_STUDY


ONE = ("seed", "model.path")
"""Keys of which one value stands for all: they make blocks of the same arms."""
TWO = ("optimizer.learning_rate",)
"""Keys of which two values are enough to choose the best of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with small models and a few problems in the places of the study's."""
    folder = tmp_path_factory.mktemp("study")
    model = small_llama(max_position_embeddings=1024, vocab_size=128)
    for name in (*(f"small-{start}" for start in range(1, 11)), "smollm2"):
        save_with_tokenizer(model, folder / "outputs/study" / name, alphabet=string.printable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "NUM_TRAINING", 2000)
        patch.setattr(pretrained, "NUM_TRAINING", 2000)
        chains.write_problems(folder / "outputs/study/chains")
        pretrained.write_problems(folder / "outputs/study/arithmetic", TASKS["arithmetic"])
    return folder


def thinned(sweep: SweepConfig) -> list[str]:
    """Return overrides by which a sweep has all its arms, and few blocks of them."""
    overrides = []
    for key, values in sweep.varying.items():
        if key in ONE + TWO:
            overrides.append(f"{key}={','.join(values[: 1 if key in ONE else 2])}")
    return overrides


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_sweep_file_is_valid_and_has_its_runs_and_its_predicted_pairs(name, folder, monkeypatch):
    """All jobs are counted; those of one block are checked."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda plugin: True)
    config = compose_sweep([], FILES[name])
    assert len(config.jobs) == SIZES[name]
    sweep = check_sweep(thinned(config), FILES[name])
    assert problems(sweep) == []
    lines = FILES[name].read_text().splitlines()
    typed = f"study/sweeps/{name}.yaml" if name in OF_THE_STUDY else name
    assert lines[0] == f"# pgtk sweep {typed}"
    assert "?" in lines[1]
    if name in (
        "study_loss",
        "study_starts",
        "study_aggregation",
        "study_lag",
        "study_anchor",
        "pretrained_loss",
    ):
        predicted, options = prediction_of(name)
        assert planned_configurations(sweep, options) == predicted


def prediction_of(name: str) -> tuple[list[str], Namespace]:
    """Return the configurations that the prediction of a sweep names, and its options of
    `compare`."""
    options = Namespace(
        **dict.fromkeys(("metric", "reach", "against", "margin", "over", "best_of"))
    )
    file = STUDY / "predictions" / f"{name}.yaml"
    return sorted(check_predictions.take(file, options)), options


def planned_configurations(sweep: Sweep, options: Namespace) -> list[str]:
    """Return the configurations that `compare` will compare with the base, once the runs of the
    sweep exist."""
    metric = parse_metric(options.metric)[1]
    runs = []
    for run in sweep.runs:
        columns = {key: np.array([1.0]) for key in ("step", "documents_seen", metric)}
        runs.append(
            Run("", "", "done", config=dict(leaves(plain_config(run.config))), columns=columns)
        )
    compared = compare(
        runs, options.metric, options.best_of, over=options.over, against=options.against
    )
    return sorted(
        {
            compared.arm(compared.groups[pair.second])
            for pairs in planned(compared)
            for pair in pairs
        }
    )


def test_the_sweep_of_a_real_model_is_valid_with_the_files_of_its_comments(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    model = small_llama(max_position_embeddings=1024, vocab_size=128)
    save_with_tokenizer(model, Path("qwen-sft"), template, alphabet=string.printable)
    for name in ("prompts", "test"):
        Path(f"{name}.jsonl").write_text(
            json.dumps({"prompt": f"{name} 12", "answer": "144"}) + "\n"
        )
    assert main(["check", "sweep", "real_model"]) == 0
    page = capsys.readouterr().out
    assert "Sweep of 6 runs" in page
    assert "varies: loss = grpo, gspo, cispo" in page
    assert "rollouts: 64 prompts x 8 completions = 512 documents a batch" in page
    assert "  model.lora_rank = 32\n" in page
    assert page.rstrip().endswith("Problems\n  none")


def test_all_runs_of_the_sweep_docs_per_step_train_on_the_same_number_of_documents():
    runs = check_sweep([], sweep_file("docs_per_step")).runs
    assert {
        run.config.trainer.max_steps * run.config.accumulation.docs_per_step for run in runs
    } == {19200}
    assert all(type(run.config.trainer.max_steps) is int for run in runs)

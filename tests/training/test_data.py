"""The data that a run reads from outside of its directory: found from anywhere, changes refused.

Digests are compared with hashlib's; runs are resumed and exported from other directories.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.runs import SHORT, config_of, metrics_of
from omegaconf import OmegaConf

from pgtoolkit.assembly.data import (
    WHOLE_BYTES,
    Digests,
    digests,
    model_paths,
    record_data,
    tasks_with_files,
)
from pgtoolkit.cli import main
from pgtoolkit.config.evaluation_sets import held_out_sets
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.training.loss_settings import KLKind, KLSettings
from pgtoolkit.training.settings import CriticSettings

SMALL = [
    setting
    for setting in SHORT
    if not setting.startswith(("task.", "trainer.max_steps", "rollout."))
]
POLICY = [setting for setting in SHORT if setting.startswith("rollout.")]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return a folder with prompts, a run `first` on them, its recorded rollouts and exported
    policy, and a run `second` of this policy on these rollouts."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = [
            "task=prompts",
            "task.path=prompts.jsonl",
            "rollout.save_path=recorded",
            "trainer.max_steps=2",
        ]
        assert main([*SMALL, *POLICY, *settings, "hydra.run.dir=first"]) == 0
        assert main(["export", "first", "policy"]) == 0
        settings = [
            "rollout=recorded",
            "rollout.path=recor*/*0.parquet",
            "rollout.epochs=9",
            "aggregation.divisor=4",
        ]
        settings += ["model=huggingface", "model.path=policy", "trainer.max_steps=2"]
        small = [setting for setting in SMALL if not setting.startswith("model.")]
        assert main([*small, *settings, "hydra.run.dir=second"]) == 0
    return folder


@pytest.fixture
def copied_home(home, tmp_path) -> Path:
    """Return a copy whose runs have the paths of the copy."""
    shutil.copytree(home, tmp_path / "home")
    for file in (tmp_path / "home").glob("*/config.yaml"):
        file.write_text(file.read_text().replace(str(home), str(tmp_path / "home")))
    return tmp_path / "home"


def digests_of(config: Config) -> dict[str, Digests]:
    models = model_paths(config.model, config.kl, config.critic)
    sets = held_out_sets(config) if config.evaluation.sets else ()
    return digests(models, tasks_with_files(config.task, sets))


def digests_of_model(folder: Path) -> Digests:
    model = HuggingFaceModelSettings(path=str(folder))
    no_others = (KLSettings(kind=KLKind.none), CriticSettings(learning_rate=1e-3))
    return digests(model_paths(model, *no_others), {})["model.path"]


def resume(run: Path | str, *overrides: str) -> int:
    """Resume a run; for the first one, type the folder of its rollouts, which is not in the run."""
    words = ["resume", str(run), *overrides]
    if Path(run).name == "first":
        words.append(f"rollout.save_path={Path(run).parent / 'recorded'}")
    return main(words)


@pytest.mark.slow
def test_a_run_is_resumed_and_exported_from_another_directory(copied_home, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for run in ("first", "second"):
        assert resume(f"../home/{run}", "trainer.max_steps=3") == 0
        assert [row["step"] for row in metrics_of(copied_home / run)] == [1, 2, 3]
        assert main(["export", f"../home/{run}", run]) == 0
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["first", "second"]
    recorded = sorted(path.name for path in (copied_home / "recorded").iterdir())
    assert recorded == ["batch-000000.parquet", "batch-000001.parquet"]


def add_prompt(file: Path) -> None:
    with file.open("a") as opened:
        opened.write('{"prompt": "1+1=", "answer": 2}\n')


def raise_rewards(file: Path) -> None:
    table = pq.read_table(file)
    rewards = pa.array([reward + 1 for reward in table["reward"].to_pylist()], pa.float64())
    column = table.schema.get_field_index("reward")
    changed = table.set_column(column, "reward", rewards).replace_schema_metadata(None)
    pq.write_table(changed, file)


def add_empty_line(file: Path) -> None:
    file.write_text(file.read_text() + "\n")


class Change(NamedTuple):
    """A change of a file that a run reads; names are relative to the folder of the run."""

    run: str
    file: str
    change: Callable[[Path], None]


CHANGES = {
    "task.path": Change("first", "prompts.jsonl", add_prompt),
    "rollout.path": Change("second", "recorded/batch-000000.parquet", raise_rewards),
    "model.path": Change("second", "policy/tokenizer_config.json", add_empty_line),
}
"""A change of the data that each key names."""


@pytest.mark.parametrize("key", CHANGES)
def test_changed_data_are_refused_until_they_are_accepted_once(copied_home, key, capsys):
    run = copied_home / CHANGES[key].run
    file = copied_home / CHANGES[key].file
    change = CHANGES[key].change
    records = [run / name for name in ("data.json", "config.yaml", "status.json")]
    before = [record.read_text() for record in records]
    digests_before = json.loads(before[0])[key]

    change(file)
    capsys.readouterr()
    assert resume(run, "trainer.max_steps=3") == 2
    path = OmegaConf.select(OmegaConf.load(run / "config.yaml"), key)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"pgtk: error: {key}={path} needs the contents that the run began with (got "
        f"{file.name} changed). Its first 2 steps were made with those. Restore them, or "
        "use trainer.accept_changed_data=true."
    )
    assert [record.read_text() for record in records] == before

    assert resume(run, "trainer.max_steps=3", "trainer.accept_changed_data=true") == 0
    note = f"note: from step 3 on {key} has other contents: {file.name} changed."
    assert note in capsys.readouterr().out
    accepted = json.loads((run / "data.json").read_text())["accepted"]
    assert accepted == [{"step": 2, "before": {key: digests_before}}]
    assert metrics_of(run)[-1]["step"] == 3

    change(file)
    capsys.readouterr()
    assert resume(run, "trainer.max_steps=4") == 2
    assert (
        f"{key}={path} needs the contents that step 3 had (got {file.name} changed). Since a "
        "change was accepted, the run has gone on with those; it made steps 1 to 2 with others. "
        "Restore those of step 3, or use trainer.accept_changed_data=true."
    ) in capsys.readouterr().err


def test_the_steps_before_an_accepted_change_are_told_from_those_after_it(copied_home, capsys):
    run = copied_home / "first"
    file = copied_home / "prompts.jsonl"
    contents = file.read_bytes()
    add_prompt(file)
    assert resume(run, "trainer.max_steps=4", "trainer.accept_changed_data=true") == 0
    file.write_bytes(contents)
    capsys.readouterr()
    assert resume(run, "trainer.max_steps=5") == 2
    assert (
        "needs the contents that steps 3 to 4 had (got prompts.jsonl changed). Since a change was "
        "accepted, the run has gone on with those; it made steps 1 to 2 with those that are there "
        "now. Restore those of steps 3 to 4, or use trainer.accept_changed_data=true."
    ) in capsys.readouterr().err
    assert resume(run, "trainer.max_steps=5", "trainer.accept_changed_data=true") == 0


def test_an_accepted_change_with_which_no_step_was_made_is_no_history(copied_home, monkeypatch):
    """The data that the checkpoint was made with, and those that were accepted, are taken."""
    monkeypatch.chdir(copied_home)
    config = saved_config(copied_home / "first")
    contents = (copied_home / "prompts.jsonl").read_bytes()
    add_prompt(copied_home / "prompts.jsonl")
    trainer = replace(config.trainer, accept_changed_data=True)
    record_data(copied_home / "first", replace(config, trainer=trainer), 2)
    record_data(copied_home / "first", config, 2)
    (copied_home / "prompts.jsonl").write_bytes(contents)
    record_data(copied_home / "first", config, 2)
    add_prompt(copied_home / "prompts.jsonl")
    with pytest.raises(ConfigError, match="Its first 2 steps were made with those"):
        record_data(copied_home / "first", config, 2)


def test_a_resume_takes_data_from_another_place(copied_home, tmp_path, monkeypatch, capsys):
    (tmp_path / "moved").mkdir()
    (copied_home / "prompts.jsonl").rename(tmp_path / "moved" / "prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    assert resume("home/first") == 2
    assert "needs an existing file" in capsys.readouterr().err
    assert resume("home/first", "task.path=moved/prompts.jsonl", "trainer.max_steps=3") == 0
    assert OmegaConf.load("home/first/config.yaml").task.path == str(
        tmp_path / "moved" / "prompts.jsonl"
    )
    renamed = (tmp_path / "moved" / "prompts.jsonl").rename(tmp_path / "renamed.jsonl")
    assert resume("home/first", "task.path=renamed.jsonl", "trainer.max_steps=4") == 0
    assert [*json.loads(Path("home/first/data.json").read_text())] == ["task.path"]
    add_prompt(renamed.rename(tmp_path / "other.jsonl"))
    capsys.readouterr()
    assert resume("home/first", "task.path=other.jsonl", "trainer.max_steps=5") == 2
    said = "began with (got other.jsonl, with other contents than renamed.jsonl). Its first 4 steps"
    assert said in capsys.readouterr().err
    assert resume("home/first", "task.verifier=math_verify") == 2


def test_a_run_without_a_checkpoint_starts_again_with_changed_data(copied_home):
    """A kill before the first checkpoint leaves such a run."""
    shutil.rmtree(copied_home / "first" / "checkpoints")
    (copied_home / "first" / "status.json").write_text('{"state": "running", "step": 0}')
    add_prompt(copied_home / "prompts.jsonl")
    assert resume(str(copied_home / "first")) == 0
    assert "accepted" not in json.loads((copied_home / "first" / "data.json").read_text())


def test_samples_of_a_large_file_make_its_digest(tmp_path):
    """Changes of a byte near its ends, of 2^20 bytes in its middle, and of its length are seen."""
    file = tmp_path / "model.safetensors"
    size = WHOLE_BYTES + 2**20
    entries = []
    for place, data in (
        (0, b""),
        (0, b"x"),
        (2**20 - 1, b"x"),
        (2**20, b"x"),
        (WHOLE_BYTES // 2, b"x" * 2**20),
        (WHOLE_BYTES, b"x"),
        (size - 1, b"x"),
        (size, b"x"),
    ):
        with file.open("wb") as opened:
            opened.truncate(size)
            opened.seek(place)
            opened.write(data)
        entries.append(digests_of_model(tmp_path)["model.safetensors"])
    assert len({entry["sha256"] for entry in entries}) == len(entries)
    assert all(entry["sampled"] for entry in entries)
    assert {entry["bytes"] for entry in entries} == {size, size + 1}


def test_the_card_and_hidden_files_of_a_model_are_not_data(tmp_path):
    for name in ("model.safetensors", "README.md", ".cache"):
        (tmp_path / name).write_text("x")
    assert list(digests_of_model(tmp_path)) == ["model.safetensors"]


def test_prompts_of_conversations_are_data_of_training_and_of_sets(tmp_path):
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for number, file in enumerate(files):
        file.write_text(f'{{"prompt": "{number}", "answer": 1}}\n')
    conversation = ("task=conversation", "task.environment=tasks.environments_for_tests.Counting")
    sets = f"evaluation.sets={{test: {{path: {files[1]}}}}}"
    config = config_of(*conversation, f"task.path={files[0]}", "evaluation.every=1", sets)
    train_sum, test_sum = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert digests_of(config) == {
        "task.path": {"train.jsonl": {"bytes": 29, "sha256": train_sum}},
        "evaluation.sets.test.path": {"test.jsonl": {"bytes": 29, "sha256": test_sum}},
    }
    assert digests_of(config_of(*conversation)) == {}


@pytest.fixture
def folder_with_brackets(tmp_path, monkeypatch) -> Path:
    """Enter a folder whose name is a pattern of glob, with a folder `model`."""
    folder = tmp_path / "a[1]"
    (folder / "model").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    return folder


@pytest.mark.parametrize(
    ("setting", "key", "expected"),
    [
        ("rollout.path=data/*.jsonl", "path", "{parent}/a[[]1]/data/*.jsonl"),
        ("rollout.save_path=new/${{seed}}", "save_path", "{parent}/a[1]/new/0"),
        ("rollout.save_path=/x/../y", "save_path", "/x/../y"),
    ],
)
def test_paths_of_rollouts_are_made_absolute(folder_with_brackets, setting, key, expected):
    """A pattern stays a pattern, and the folder's own brackets are escaped in it."""
    rollout = "recorded" if key == "path" else "policy"
    config = absolute_paths(config_of(f"rollout={rollout}", setting.format()))
    assert getattr(config.rollout, key) == expected.format(parent=folder_with_brackets.parent)


def test_a_path_of_a_model_is_made_absolute_where_the_folder_exists(folder_with_brackets):
    for path, expected in (
        ("Qwen/Qwen3", "Qwen/Qwen3"),
        ("model", f"{folder_with_brackets}/model"),
    ):
        config = absolute_paths(config_of("model=huggingface", f"model.path={path}"))
        assert config.model.path == expected


def test_paths_of_prompts_and_of_the_store_are_made_absolute(folder_with_brackets):
    config = absolute_paths(config_of("task=prompts", "task.path='~/p.jsonl'"))
    assert config.task.path == "/home/me/p.jsonl"
    assert config.tracking.uri == f"sqlite:///{folder_with_brackets}/outputs/mlflow.db"
    assert absolute_paths(config_of("tracking=none")).tracking.uri is None

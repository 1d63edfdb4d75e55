"""What a run reads from outside of its directory: found from anywhere, and noticed where it
changed."""

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders.runs import SHORT, config_of, metrics_of
from omegaconf import OmegaConf

from pgtoolkit.cli import main
from pgtoolkit.config.paths import absolute_paths
from pgtoolkit.training.data import WHOLE_BYTES, digests

SMALL = [
    setting
    for setting in SHORT
    if not setting.startswith(("task.", "trainer.max_steps", "rollout."))
]
POLICY = [setting for setting in SHORT if setting.startswith("rollout.")]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with prompts, a run on them that recorded its rollouts, and the policy that it
    left."""
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
def copy(home, tmp_path):
    """The same, with all paths in the copy."""
    shutil.copytree(home, tmp_path / "home")
    for file in (tmp_path / "home").glob("*/config.yaml"):
        file.write_text(file.read_text().replace(str(home), str(tmp_path / "home")))
    return tmp_path / "home"


def resume(run, *overrides):
    """Of the first run the folder of its rollouts is typed again: it lies outside of the run."""
    saved = (
        [f"rollout.save_path={Path(run).parent / 'recorded'}"] if Path(run).name == "first" else []
    )
    return main(["resume", str(run), *overrides, *saved])


def status_of(run):
    return json.loads((run / "status.json").read_text())["state"]


def test_resume_and_export_from_another_directory(copy, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for run in ("first", "second"):
        assert resume(f"../home/{run}", "trainer.max_steps=3") == 0
        assert [row["step"] for row in metrics_of(copy / run)] == [1, 2, 3]
        assert main(["export", f"../home/{run}", run]) == 0
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["first", "second"]
    recorded = sorted(path.name for path in (copy / "recorded").iterdir())
    assert recorded == ["batch-000000.parquet", "batch-000001.parquet"]


def other_rewards(file):
    table = pq.read_table(file)
    column = table.schema.get_field_index("reward")
    changed = pa.array([reward + 1 for reward in table["reward"].to_pylist()], pa.float64())
    pq.write_table(
        pa.table(table).set_column(column, "reward", changed).replace_schema_metadata(None), file
    )


CHANGES = {
    "task.path": (
        "first",
        "prompts.jsonl",
        lambda file: file.open("a").write('{"prompt": "1+1=", "answer": 2}\n'),
    ),
    "rollout.path": ("second", "recorded/batch-000000.parquet", other_rewards),
    "model.path": (
        "second",
        "policy/tokenizer_config.json",
        lambda file: file.write_text(file.read_text() + "\n"),
    ),
}


@pytest.mark.parametrize("key", CHANGES)
def test_changed_data_are_refused_until_they_are_accepted_once(copy, key, capsys):
    run, name, change = CHANGES[key]
    before = {
        name: (copy / run / name).read_text()
        for name in ("data.json", "config.yaml", "status.json")
    }
    change(copy / name)
    capsys.readouterr()
    assert resume(str(copy / run), "trainer.max_steps=3") == 2
    path = OmegaConf.select(OmegaConf.load(copy / run / "config.yaml"), key)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"pgtk: error: {key}={path} needs the contents that the run began with (got "
        f"{(copy / name).name} changed). Its first 2 steps were made with those. Restore them, or "
        "use trainer.accept_changed_data=true."
    )
    assert {name: (copy / run / name).read_text() for name in before} == before
    assert resume(str(copy / run), "trainer.max_steps=3", "trainer.accept_changed_data=true") == 0
    assert (
        f"note: from step 3 on {key} has other contents: {(copy / name).name} changed."
        in capsys.readouterr().out
    )
    recorded = json.loads((copy / run / "data.json").read_text())
    assert recorded["accepted"] == [
        {"step": 2, "before": {key: json.loads(before["data.json"])[key]}}
    ]
    assert metrics_of(copy / run)[-1]["step"] == 3
    change(copy / name)
    assert resume(str(copy / run), "trainer.max_steps=4") == 2  # accepted once, not for ever


def test_data_may_lie_elsewhere_when_a_run_is_resumed(copy, tmp_path, monkeypatch, capsys):
    (tmp_path / "moved").mkdir()
    (copy / "prompts.jsonl").rename(tmp_path / "moved" / "prompts.jsonl")
    monkeypatch.chdir(tmp_path)
    assert resume("home/first") == 2
    assert "needs an existing file" in capsys.readouterr().err
    assert resume("home/first", "task.path=moved/prompts.jsonl", "trainer.max_steps=3") == 0
    assert OmegaConf.load("home/first/config.yaml").task.path == str(
        tmp_path / "moved" / "prompts.jsonl"
    )
    assert resume("home/first", "task.verifier=math_verify") == 2


def test_a_run_that_has_no_checkpoint_starts_with_the_data_of_today(copy):
    """As after a kill before the first one."""
    shutil.rmtree(copy / "first" / "checkpoints")
    (copy / "first" / "status.json").write_text('{"state": "running", "step": 0}')
    CHANGES["task.path"][2](copy / "prompts.jsonl")
    assert resume(str(copy / "first")) == 0
    assert "accepted" not in json.loads((copy / "first" / "data.json").read_text())


def test_large_files_are_looked_at_in_samples(tmp_path):
    file = tmp_path / "model.safetensors"
    config = config_of("model=huggingface", f"model.path={tmp_path}")
    seen = []
    size = WHOLE_BYTES + 2**20
    for place in (None, 0, 2**20 - 1, 2**20, WHOLE_BYTES // 2, WHOLE_BYTES, size - 1, size):
        with open(file, "wb") as out:
            out.truncate(size)
            out.seek(place or 0)
            out.write(b"" if place is None else b"x" * (2**20 if place == WHOLE_BYTES // 2 else 1))
        seen.append(digests(config)["model.path"]["model.safetensors"])
    assert len({one["sha256"] for one in seen}) == len(seen)
    assert all(one["sampled"] for one in seen)
    assert {one["bytes"] for one in seen} == {size, size + 1}
    (tmp_path / "README.md").write_text("a model")
    (tmp_path / ".cache").write_text("x")
    assert list(digests(config)["model.path"]) == ["model.safetensors"]


def test_prompts_of_conversations_are_data_too(tmp_path):
    """Of training and of a set; without a path there are none."""
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for number, file in enumerate(files):
        file.write_text(f'{{"prompt": "{number}", "answer": 1}}\n')
    talk = "task=conversation", "task.environment=tasks.environments_for_tests.Counting"
    sets = f"evaluation.sets={{test: {{path: {files[1]}}}}}"
    config = config_of(*talk, f"task.path={files[0]}", "evaluation.every=1", sets)
    found = digests(config)
    sums = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert found["task.path"] == {"train.jsonl": {"bytes": 29, "sha256": sums[0]}}
    assert found["evaluation.sets.test.path"] == {"test.jsonl": {"bytes": 29, "sha256": sums[1]}}
    assert digests(config_of(*talk)) == {}


def test_paths_are_made_absolute(tmp_path, monkeypatch):
    folder = tmp_path / "a[1]"
    (folder / "model").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    config = config_of(
        "rollout=recorded",
        "rollout.path=data/*.jsonl",
        "model=huggingface",
        "model.path=Qwen/Qwen3",
    )
    config = absolute_paths(config)
    assert config.rollout.path == f"{tmp_path}/a[[]1]/data/*.jsonl"
    assert config.model.path == "Qwen/Qwen3"
    assert config.tracking.uri == f"sqlite:///{folder}/outputs/mlflow.db"
    config = config_of(
        "rollout.save_path=new/${seed}", "model=huggingface", "model.path=model", "tracking=none"
    )
    config = absolute_paths(config)
    assert (config.rollout.save_path, config.model.path) == (f"{folder}/new/0", f"{folder}/model")
    assert config.tracking.uri is None
    config = config_of("task=prompts", "task.path='~/p.jsonl'", "rollout.save_path=/x/../y")
    config = absolute_paths(config)
    assert (config.task.path, config.rollout.save_path) == ("/home/me/p.jsonl", "/x/../y")

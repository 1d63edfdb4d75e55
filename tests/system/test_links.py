"""Links and pipes inside a run directory: nothing outside of it is written, uploaded or waited for."""

import json
import os

import pytest
import torch
from builders.runs import SHORT, config_of, save_state, state
from builders.runs import run as train_short
from builders.stores import CONFIG, start, train
from mlflow import MlflowClient
from omegaconf import OmegaConf

from pgtoolkit.batch import Document
from pgtoolkit.cli import main
from pgtoolkit.errors import StorageError
from pgtoolkit.launch.engines import LocalEngine
from pgtoolkit.launch.jobs import _Jobs
from pgtoolkit.launch.sweep import Job, Sweep
from pgtoolkit.rollouts.writer import RolloutWriter
from pgtoolkit.runs.directory import RunDirectory, is_held
from pgtoolkit.system.plain_files import remove, write_atomically
from pgtoolkit.tracking.curves import plot_curves
from pgtoolkit.tracking.mlflow_run import ARTIFACTS
from pgtoolkit.tracking.store import open_store
from pgtoolkit.tracking.system_metrics import SystemMetrics
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.data import record_data
from pgtoolkit.training.train import _logging_to

REFUSED = r"needs to be a plain file \(got a link to .*outside\)\. A run reads and writes its own files only"


@pytest.fixture
def outside(tmp_path):
    """A file that no run may touch."""
    path = tmp_path / "outside"
    path.write_text("{}\n")
    yield path
    assert path.read_text() == "{}\n"
    assert not path.is_symlink()


def everything(folder):
    """Writes all that a run writes, by the functions that do."""
    with RunDirectory(folder) as run, _logging_to(folder / "run.log"):
        run.write_config(CONFIG, [])
        run.write_config(CONFIG | {"seed": 2}, [])
        for _ in range(2):
            run.write_provenance({"time": "2026-11-21T10:00:00+0000"})
            record_data(folder, OmegaConf.to_object(config_of(*SHORT)), step=0)
        run.set_status("running", 0)
        run.append_metrics(1, {"loss": 0.5})
        run.drop_metrics_after(1)
        run.append_metrics(2, {"loss": 0.5})
        save_state(folder / "checkpoints", state(1))
        plot_curves(run.read_metrics(), folder / "curves.png", "run")
        SystemMetrics(folder / "system_metrics.jsonl").stop()


WRITTEN = (
    *(".lock", "config.yaml", "overrides.yaml", "provenance.json", "status.json", "metrics.jsonl", "drift.jsonl"),
    *("run.log", "data.json", "curves.png", "system_metrics.jsonl"),
)


def test_the_list_of_files_is_complete(tmp_path):
    everything(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith("checkpoints/step-000001/")} == set(WRITTEN)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_the_place_of_a_file_is_refused(tmp_path, outside, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    with pytest.raises(StorageError, match=REFUSED):
        everything(tmp_path / "run")
    assert path.is_symlink()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_in_the_place_of_a_temporary_file_is_no_way_out(tmp_path, outside, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.with_name(f".{path.name}.tmp").symlink_to(outside)
    everything(tmp_path / "run")
    assert path.is_file()
    assert outside.read_text() == "{}\n"


@pytest.mark.parametrize("name", WRITTEN)
def test_a_pipe_keeps_nobody_waiting(tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert not is_held(tmp_path / "run")
    with pytest.raises(StorageError, match=r"needs to be a plain file \(got a pipe\)"):
        everything(tmp_path / "run")


@pytest.mark.parametrize("read", [load_newest, lambda folder: save_state(folder, state(1))])
def test_a_link_in_the_place_of_the_folder_of_checkpoints_is_refused(tmp_path, read):
    elsewhere = tmp_path / "elsewhere"
    whole = save_state(elsewhere, state(1, x=torch.zeros(3)))
    before = {file: file.read_bytes() for file in whole.rglob("*.*")}
    (tmp_path / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"checkpoints needs to be a folder \(got a link to .*elsewhere\)"):
        read(tmp_path / "checkpoints")
    assert {file: file.read_bytes() for file in elsewhere.rglob("*.*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["", "training", "manifest.json", "model.safetensors", "training/state.json"])
def test_no_link_in_a_checkpoint_is_followed(tmp_path, caplog, name):
    """It is damage when it is read, and is gone when the step is saved again."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    save_state(folder, state(1))
    path = save_state(folder, state(2), weights={"x": torch.zeros(3)})
    (path / name).rename(elsewhere)
    before = {file: file.read_bytes() for file in (elsewhere, *elsewhere.rglob("*")) if file.is_file()}
    (path / name).symlink_to(elsewhere)
    assert load_newest(folder)["step"] == 1
    assert "(got a link to " in caplog.text
    save_state(folder, state(2))
    assert load_newest(folder)["step"] == 2
    assert not (path / name).is_symlink()
    assert {file: file.read_bytes() for file in (elsewhere, *elsewhere.rglob("*")) if file.is_file()} == before


@pytest.mark.parametrize("name", ["step-000001", "step-000001.ckpt", ".step-000002.tmp", ".step-000001.old"])
def test_deleting_old_checkpoints_follows_no_link(tmp_path, outside, name):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    folder.mkdir()
    (folder / name).symlink_to(outside if name.endswith("ckpt") else elsewhere)
    save_state(folder, state(2), keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    assert (elsewhere / "kept").exists()
    (folder / ".x.old").symlink_to(elsewhere)
    (folder / "x").mkdir()
    remove(folder / "x")
    assert (elsewhere / "kept").exists()


@pytest.mark.parametrize("name", ["sweep.json", ".lock", "job/.job.json", "job/output.log"])
def test_a_sweep_follows_no_link(tmp_path, outside, name):
    folder = tmp_path / "sweep"
    (folder / "job").mkdir(parents=True)
    (folder / name).symlink_to(outside)
    job = Job("job", "job", [], log="job/output.log")
    sweep = Sweep(folder, "sweep", ["pgtk"], {"job": job})

    def launch():
        with sweep.held():
            sweep.save()
            _Jobs(sweep, [job], False).run(lambda: LocalEngine(1))

    with pytest.raises(StorageError, match=REFUSED):
        launch()
    if name == "sweep.json":
        with pytest.raises(StorageError, match=REFUSED):
            Sweep.load(folder)


@pytest.mark.parametrize("name", ["multirun.yaml", ".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml"])
def test_what_hydra_writes_itself_goes_through_no_link(tmp_path, outside, capsys, name):
    """Of a sweep the first, of a single run the others."""
    path = tmp_path / "place" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(outside)
    place = (
        ["-m", f"hydra.sweep.dir={tmp_path}/place"] if name == "multirun.yaml" else [f"hydra.run.dir={tmp_path}/place"]
    )
    assert main([*place, *SHORT, "seed=1"]) == 2
    assert f"{path} needs to be a " in (said := capsys.readouterr().err)
    assert said.count("got a link to") == 1


@pytest.mark.parametrize("inside", ["../x", "/x"])
def test_hydra_writes_inside_of_the_jobs(tmp_path, capsys, inside):
    assert main(["check", "-m", "seed=1", f"hydra.sweep.dir={tmp_path}", f"hydra.output_subdir={inside}"]) == 2
    assert f"hydra.output_subdir={inside} needs a folder in the run directory (got" in capsys.readouterr().out


def test_the_lock_beside_a_store_follows_no_link(tmp_path, outside):
    (tmp_path / ".mlflow.db.lock").symlink_to(outside)
    with pytest.raises(StorageError, match=REFUSED):
        open_store(f"sqlite:///{tmp_path}/mlflow.db", "tests")
    assert not (tmp_path / "mlflow.db").exists()


def test_recorded_rollouts_are_written_through_no_link(tmp_path, outside):
    writer = RolloutWriter(tmp_path / "rollouts.jsonl")
    document = Document(torch.arange(3), torch.arange(3) > 0, torch.zeros(2), torch.zeros(2), 0, "one")
    (tmp_path / "rollouts.jsonl" / ".batch-000000.jsonl.tmp").symlink_to(outside)
    assert writer.write(0, [document]).is_file()
    (tmp_path / "rollouts.jsonl" / "batch-000001.jsonl").symlink_to(outside)
    with pytest.raises(StorageError, match=REFUSED):
        writer.write(1, [document])


@pytest.mark.parametrize("name", ARTIFACTS)
def test_nothing_that_a_link_leads_to_is_uploaded(uri, run, outside, name):
    run.write_config(CONFIG, [])
    run.set_status("done", 0)
    path = run.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    run.close()
    before = len(MlflowClient(uri).search_experiments())
    assert main(["sync", str(run.path), "--uri", uri, "--experiment", f"links {name}"]) == 6
    assert len(MlflowClient(uri).search_experiments()) == before


def test_a_link_that_is_put_there_during_the_run_is_not_uploaded(uri, run, outside):
    tracker = start(uri, run)
    train(run, 1, 2)
    (run.path / "curves.png").symlink_to(outside)
    assert tracker.finish("done") == ["artifacts"]
    names = {file.path for file in MlflowClient(uri).list_artifacts(tracker.info["run_id"])}
    assert "curves.png" not in names


def test_a_run_directory_behind_a_link_works_and_its_files_may_not_be_links(tmp_path, outside, capsys):
    (tmp_path / "disk").mkdir()
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    folder = tmp_path / "outputs" / "run"
    train_short(folder, "trainer.max_steps=1")
    train_short(folder, "trainer.max_steps=2", resume=True)
    assert main(["export", str(folder), str(tmp_path / "model")]) == 0
    assert main(["compare", str(folder)]) == 0
    assert json.loads((tmp_path / "disk" / "run" / "status.json").read_text())["step"] == 2
    (folder / "curves.png").unlink()
    (folder / "curves.png").symlink_to(outside)
    assert main(["export", str(folder), str(tmp_path / "again")]) == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "model", "outputs", "outside"]
    assert "curves.png needs to be a plain file (got a link to " in capsys.readouterr().err


def test_replacing_keeps_what_was_there_when_it_fails(tmp_path):
    write_atomically(tmp_path / "file", "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]

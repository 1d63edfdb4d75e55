"""The rule of trust: a command that only reads imports nothing and sends no secret, one that trains
says what it imports, and some settings count only when typed. A module that leaves a mark when it
is imported proves it, and a server that records the secrets that it gets."""

import json
import shlex
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from builders.refusals import refusal
from builders.runs import SHORT, config_of

from pgtoolkit.assembly.continuing import resume_command
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.rules.executed import before_start
from pgtoolkit.launch.check import check, problems
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tracking.store import open_store
from pgtoolkit.tracking.store_file import problem_of_store

EVIL = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
def score(completion, answer):
    return 1.0
def weights(totals, *, mask, document_index, tokens_per_document, group_index):
    return mask / totals.num_tokens
class Callback:
    pass
"""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a current directory with a module that leaves a mark when it is imported, and assert
    afterwards that there is none."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12=", "answer": "21"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not (tmp_path / "executed").exists()


HYDRA = {
    "callbacks: {a: {_target_: evil.Callback}}": (
        "hydra.callbacks.a._target_ needs to be left out (got evil.Callback)"
    ),
    (
        "job_logging: {version: 1, handlers: {a: {(): evil.Callback}}}"
    ): "hydra.job_logging.handlers.a.()=evil.",
    "job: {env_set: {LD_PRELOAD: evil.so}}": (
        "hydra.job.env_set.LD_PRELOAD=evil.so needs to be left out"
    ),
    "launcher: {_target_: evil.Callback}": "hydra.launcher._target_ needs to be left out",
    "sweeper: {_target_: hydra_plugins.evil.S}": "hydra.sweeper._target_ needs to be left out",
    "sweeper: {params: {+hydra.callbacks.a: 1}}": (
        "hydra.sweeper.params.+hydra.callbacks.a=1 needs to be left out"
    ),
    "sweeper: {params: {seed: '${oc.create:1}'}}": (
        "hydra.sweeper.params.seed=${oc.create:1} needs a plain value"
    ),
    "searchpath: ['pkg://evil']": "hydra.searchpath needs to be left out",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", HYDRA)
def test_settings_of_hydra_in_a_sweep_file_that_would_run_code_are_refused(evil, capsys, setting):
    (evil / "mine.yaml").write_text(f"defaults: [config, _self_]\nhydra:\n  {setting}\n")
    assert HYDRA[setting] in refusal(capsys, "sweep", "mine.yaml", "seed=1,2", "debug=short")
    assert not (evil / "outputs").exists()


def test_a_callback_of_hydra_in_an_experiment_of_config_dir_is_refused(evil, capsys):
    (evil / "conf/experiment").mkdir(parents=True)
    callback = "hydra: {callbacks: {a: {_target_: evil.Callback}}}"
    (evil / "conf/experiment/mine.yaml").write_text(f"# @package _global_\n{callback}\n")
    for command in (["check"], ["-m"]):
        message = refusal(
            capsys, *command, f"--config-dir={evil}/conf", "experiment=mine", "seed=1"
        )
        assert "hydra.callbacks.a._target_ needs to be left out (got evil.Callback)" in message
    assert not (evil / "outputs").exists()


def test_a_callback_of_hydra_in_an_option_that_no_job_chooses_is_refused(evil, capsys):
    """The experiment chooses the loss with the callback; each job of the sweep chooses another."""
    (evil / "conf/experiment").mkdir(parents=True)
    (evil / "conf/loss").mkdir()
    callback = "hydra: {callbacks: {a: {_target_: evil.Callback}}}"
    (evil / "conf/experiment/second.yaml").write_text(
        "# @package _global_\ndefaults: [override /loss: with_callback]\n"
    )
    (evil / "conf/loss/with_callback.yaml").write_text(
        f"# @package _global_\ndefaults: [/loss/gspo@loss]\n{callback}\n"
    )
    command = [
        "-m",
        f"--config-dir={evil}/conf",
        "experiment=second",
        "loss=gspo,grpo",
        "debug=short",
    ]
    assert "with_callback.yaml needs to be left out" in refusal(capsys, *command)
    assert not (evil / "outputs").exists()


def test_a_file_of_the_user_that_hydra_takes_for_our_settings_of_hydra_is_refused(evil, capsys):
    """Hydra looks for options beside the sweep file first, and in --config-dir before conf/."""
    (evil / "mine.yaml").write_text("defaults: [config, _self_]\n")
    for folder, more in ((evil, []), (evil / "options", [f"--config-dir={evil}/options"])):
        (folder / "hydra").mkdir(parents=True)
        (folder / "hydra/pgtk.yaml").write_text(
            "job: {name: pgtk, env_set: {LD_PRELOAD: evil.so}}\n"
        )
        message = refusal(capsys, "sweep", "mine.yaml", "seed=1,2", *more)
        assert "hydra/pgtk.yaml needs a name that pgtoolkit does not have" in message
        (folder / "hydra/pgtk.yaml").unlink()


@pytest.mark.parametrize(
    ("file", "use"),
    [
        ("loss/grpo.yaml", "/loss/my_grpo.yaml with loss=my_grpo."),
        ("experiment/dapo.yaml", "/experiment/my_dapo.yaml with experiment=my_dapo."),
        ("Loss/GRPO.yml", "/loss/my_grpo.yaml with loss=my_grpo."),
        ("loss/schema_grpo.yaml", "/loss/my_schema_grpo.yaml with loss=my_schema_grpo."),
        (
            "hydra/launcher/slurm.yaml",
            "/hydra/launcher/my_slurm.yaml with hydra/launcher=my_slurm.",
        ),
        ("config.yaml", "/experiment/mine.yaml with experiment=mine, or another folder for the "),
    ],
)
def test_a_file_of_the_user_with_the_name_of_one_of_ours_is_refused_by_each_command(
    evil, monkeypatch, capsys, file, use
):
    (evil / "mine").mkdir()
    (evil / "mine/sweep.yaml").write_text("defaults: [config, _self_]\n")
    (evil / "mine" / file).parent.mkdir(parents=True, exist_ok=True)
    (evil / "mine" / file).write_text("epsilon_low: 0.4\n")
    problem = f"mine/{file} needs a name that pgtoolkit does not have (got {file.partition('.')[0]}"
    commands = [
        ["loss=grpo"],
        ["-m", "loss=grpo,gspo"],
        ["--cfg", "job"],
        ["check"],
        ["continue", "run"],
        ["sweep", "clip_range"],
    ]
    commands = [[*command, "--config-dir=mine"] for command in commands]
    commands += [["sweep", "mine/sweep.yaml", "seed=1,2"], ["check", "sweep", "mine/sweep.yaml"]]
    for command in commands:
        message = refusal(capsys, *command)
        assert problem in message, command
        assert f"Use mine{use}" in message, command
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(evil / "mine"))
    assert problem in refusal(capsys, "debug=short")
    # Ours are read from beside the program, whatever lies in the folder of the user's.
    (evil / "mine" / file).rename(evil / "mine" / f"{file}.bak")
    assert main(["check", "loss=grpo"]) == 0


def test_a_sweep_file_chooses_a_launcher_its_folder_and_commands_for_it(evil, monkeypatch):
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda plugin: True)
    file = evil / "mine.yaml"
    file.write_text(
        "defaults: [config, override hydra/launcher: slurm, _self_]\n"
        "hydra: {launcher: {partition: gpu, nodes: 2}, sweep: {dir: mine}, sweeper: {params: "
        "{seed: '1,2'}}}\n"
    )
    checked = check(["hydra.launcher.setup=[module load cuda]"], True, sweep_file=file)
    assert problems(checked) == []
    assert checked.config.launcher.settings["partition"] == "gpu"
    second = evil / "second.yaml"  # a new name, since a composed file is cached
    second.write_text(
        "defaults: [config, override hydra/launcher: slurm, _self_]\n"
        "hydra: {launcher: {setup: [module load cuda]}}\n"
    )
    checked = check(["seed=1,2"], True, sweep_file=second)
    assert problems(checked) == []
    assert checked.config.launcher.settings["setup"] == ["module load cuda"]
    (evil / "conf/hydra/launcher").mkdir(parents=True)
    (evil / "conf/hydra/launcher/ours.yaml").write_text("defaults: [slurm]\npartition: gpu\n")
    typed = ["hydra/launcher=ours", "seed=1,2"]
    monkeypatch.setenv("PGTK_CONFIG_DIR", str(evil / "conf"))
    assert problems(check(typed, True)) == []


def test_an_interpolation_of_an_environment_variable_is_refused_however_it_is_spelled(
    evil, monkeypatch
):
    monkeypatch.setenv("SECRET", "hunter2")
    for text in (
        "${${tracking.experiment}:SECRET}",
        "${oc.${metrics.level}:SECRET}",
        "${oc.decode:'${tracking.uri}'}",
    ):
        refusals = problems(check([f"tracking.run_name={text}", "tracking.experiment=oc.env"]))
        assert "hunter2" not in str(refusals)
        assert any(problem.startswith("tracking.run_name") for problem in refusals), text


# Functions of the user's own


VERIFIER = ["task=prompts", "task.path=prompts.jsonl"]


@pytest.fixture
def imported(evil: Path) -> Callable[[], bool]:
    """Return a function that tells whether the module was imported since its last call."""

    def was_imported() -> bool:
        sys.modules.pop("evil", None)
        mark = evil / "executed"
        if not mark.exists():
            return False
        mark.unlink()
        return True

    return was_imported


def notes_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the notes on imports and on secrets of a command that succeeds."""
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith(("note: imports", "note: sends"))]


def test_functions_that_a_file_names_are_imported_and_a_note_names_them(evil, imported, capsys):
    (evil / "conf/experiment").mkdir(parents=True)
    (evil / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\naggregation: {reducer: evil.weights}\n"
    )
    (evil / "mine.yaml").write_text(
        "defaults: [config, override task: prompts, _self_]\ntask: {path: prompts.jsonl, verifier: "
        "evil.score}\n"
        "hydra: {sweeper: {params: {aggregation.reducer: 'evil.weights'}}}\n"
    )
    notes = notes_of(capsys, "check", *VERIFIER, "task.verifier=evil.score")
    assert notes == ["note: imports evil.score (task.verifier)"]
    assert imported()
    both = "note: imports evil.weights (aggregation), evil.score (task.verifier)"
    assert notes_of(capsys, "check", "sweep", "mine.yaml", "seed=1,2") == [both]
    assert imported()
    notes = notes_of(capsys, "check", f"--config-dir={evil}/conf", "experiment=mine")
    assert notes == ["note: imports evil.weights (aggregation)"]
    assert imported()
    assert notes_of(capsys, "check", *VERIFIER, "task.verifier=exact_match") == []
    short = ["rollout.max_completion_length=26"]
    assert notes_of(capsys, "check", "task=guess", *short) == []


def test_a_configuration_that_the_rules_refuse_imports_nothing(evil, capsys):
    refusal(capsys, *VERIFIER, "task.verifier=evil.score", "loss=gspo", "loss.num_splits=2")
    main(["check", *VERIFIER, "task.verifier=evil.score", "loss=gspo", "loss.num_splits=2"])
    assert "imports" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_file_with_a_reward_of_the_user_is_swept_resumed_and_evaluated(
    evil, imported, capsys
):
    short = [
        override for override in SHORT if not override.startswith(("task.", "trainer.max_steps"))
    ]
    (evil / "mine.yaml").write_text(
        "defaults: [config, override task: prompts, _self_]\ntask: {path: prompts.jsonl, verifier: "
        "evil.score}\n"
        "evaluation: {every: 1, prompts_per_set: 1, sets: {held_out: {path: test.jsonl}}}\n"
        "hydra: {sweeper: {params: {seed: '1,2'}}}\n"
    )
    (evil / "test.jsonl").write_text('{"prompt": "21=", "answer": "12"}\n')
    note = "note: imports evil.score (task.verifier)"
    command = ["sweep", "mine.yaml", *short, "hydra.sweep.dir=swept", "trainer.max_steps=1"]
    assert notes_of(capsys, *command) == [note]
    (first, second) = sorted(path.parent for path in Path("swept").glob("*/metrics.jsonl"))
    assert json.loads((first / "metrics.jsonl").read_text())["reward"] == 1.0
    assert notes_of(capsys, *command) == [note]  # both are done
    assert notes_of(capsys, "resume", str(first), "trainer.max_steps=2") == [note]
    assert notes_of(capsys, "evaluate", str(second)) == [note]
    assert imported()


def test_a_program_that_samples_may_be_named_by_an_experiment_but_not_by_a_run(
    evil, capsys, monkeypatch
):
    (evil / "conf/experiment").mkdir(parents=True)
    (evil / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\ndefaults: [{override /sampler: vllm}]\n"
        "sampler: {executable: ./evil.sh, arguments: [--trust-remote-code]}\n"
    )
    (evil / "evil.sh").touch(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PGTK_CONFIG_DIR", str(evil / "conf"))
        assert problems(check(["experiment=mine"])) == []
    words = ["sampler.executable=./evil.sh", "sampler.arguments=['--trust-remote-code']"]
    save_run(evil, "sampler=vllm", *words)
    message = refusal(capsys, "resume", "run", "trainer.max_steps=8")
    executable = (
        "sampler.executable=./evil.sh needs to be typed (got it from the run's file). It "
        "is run as a command"
    )
    assert executable in message
    assert "Use sampler.executable=VALUE on the command line." in message
    assert "sampler.arguments=[--trust-remote-code] needs to be typed" in message
    assert compose(words, run_dir=evil / "run").problems == []
    hidden = ["sampler.executable=${tracking.run_name}", "tracking.run_name=evil", words[1]]
    assert "needs to be typed" in str(compose(hidden, run_dir=evil / "run").problems)


SHORT_WITHOUT_TASK = [setting for setting in SHORT if not setting.startswith("task.")]


def save_run(folder: Path, *overrides: str) -> None:
    """Write the configuration of a run that has begun with these overrides."""
    with RunDirectory(folder / "run") as run:
        run.write_config(plain_config(config_of(*SHORT_WITHOUT_TASK, *overrides)), [])


def test_the_printed_command_that_resumes_types_the_program_again(evil):
    words = ["sampler.executable=./a program --x", "sampler.arguments=['--y=1','--z']"]
    save_run(evil, "sampler=vllm", *words)
    typed = ["sampler.executable='./a program --x'", words[1]]
    assert shlex.split(resume_command(evil / "run"))[-2:] == typed
    assert compose(words, run_dir=evil / "run").problems == []
    assert "needs to be typed" in str(compose([], run_dir=evil / "run").problems)


@pytest.mark.parametrize(
    ("verifiers", "options"),
    [
        ("{a: {verifier: exact_match}, b: {verifier: evil.score, weight: 2}}", None),
        ("{b: '${loss.options}'}", "{verifier: evil.score}"),
        ("'${loss.options}'", "{b: {verifier: evil.score}}"),
    ],
    ids=["direct", "entry by reference", "all by reference"],
)
def test_a_verifier_among_several_is_named_and_imported_however_a_file_refers_to_it(
    evil, imported, capsys, verifiers, options
):
    """options: parameters of a loss that the verifiers refer to."""
    loss = f"loss: {{path: evil.Loss, options: {options}}}\n" if options else ""
    choice = ", override loss: custom" if options else ""
    (evil / "mine.yaml").write_text(
        f"defaults: [config, override task: prompts{choice}, _self_]\n{loss}"
        f"task: {{path: prompts.jsonl, verifier: null, verifiers: {verifiers}}}\n"
    )
    main(["check", "sweep", "mine.yaml", "seed=1,2"])
    assert "evil.score (task.verifiers.b.verifier)" in capsys.readouterr().err
    assert imported()


@pytest.fixture
def foreign_run(evil: Path, imported: Callable[[], bool]) -> Path:
    """Train a run whose configuration names functions of the module beside it."""
    functions = ["task.verifier=evil.score", "aggregation.reducer=evil.weights"]
    overrides = [*VERIFIER, *functions, "trainer.max_steps=1"]
    train(config_of(*SHORT_WITHOUT_TASK, *overrides), evil / "run", overrides=overrides)
    assert imported()
    return evil / "run"


def test_a_run_of_several_verifiers_is_resumed_with_the_same_verifiers(evil):
    several = "task.verifiers={a: {verifier: exact_match}, b: {verifier: operator.eq}}"
    save_run(evil, *VERIFIER, "task.verifier=null", several)
    assert resume_command(evil / "run").endswith("resume run")
    assert compose([], run_dir=evil / "run").problems == []
    changed = ["task.verifier_processes=1", "task.verifier_seconds=9"]
    assert compose(changed, run_dir=evil / "run").problems == []
    (problem,) = compose(["task.verifiers.b.weight=2"], run_dir=evil / "run").problems
    assert "task.verifiers.b.weight=2 needs to stay as the run began" in problem


def test_commands_that_read_a_run_import_nothing_and_those_that_continue_it_name_the_imports(
    foreign_run, imported, capsys
):
    assert main(["export", "run", "model"]) == 0
    assert (Path("model") / "model.safetensors").exists()
    store = f"--uri=sqlite:///{foreign_run.parent}/mlflow.db"
    shutil.copytree("run", "copy")
    for command in (
        ["compare", "run"],
        ["compare", "run", "copy"],
        ["samples", "run"],
        ["sync", "run", store],
    ):
        assert main(command) == 0
    assert main(["explain", "task.verifier"]) == 0
    assert not imported()
    assert resume_command(foreign_run).endswith("resume run")
    capsys.readouterr()
    notes = notes_of(capsys, "resume", "run", "trainer.max_steps=2")
    assert notes == ["note: imports evil.weights (aggregation.reducer), evil.score (task.verifier)"]
    assert imported()
    assert len(notes_of(capsys, "tokens", "run", "--step=2")) == 1
    assert imported()


# Where credentials go


@pytest.fixture
def server(
    capsys: pytest.CaptureFixture[str],
) -> Iterator[tuple[str, list[str | None], list[str]]]:
    """Start a server that refuses every request.

    Yields its address, the header Authorization of each request, and all that was printed to stderr
    before each request.
    """
    authorizations = []
    printed = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            printed.append(capsys.readouterr().err)
            authorizations.append(self.headers.get("Authorization"))
            self.send_error(403)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", authorizations, printed
        listening.shutdown()


def test_sync_sends_a_run_only_to_an_address_that_was_typed_or_is_in_the_environment(
    evil, server, capsys, monkeypatch
):
    address, authorizations, _ = server
    save_run(evil, "tracking=mlflow", f"tracking.uri={address}")
    message = refusal(capsys, "sync", "run")
    assert (
        f"pgtk sync run needs its store to be typed (got {address} from the run's file)" in message
    )
    assert "Use --uri=ADDRESS, or MLFLOW_TRACKING_URI=ADDRESS" in message
    assert authorizations == []
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    assert main(["sync", "run", f"--uri={address}"]) == 6
    assert set(authorizations) == {"Bearer hunter2"}
    authorizations.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}/")
    assert main(["sync", "run"]) == 6
    assert set(authorizations) == {"Bearer hunter2"}


def test_a_run_is_sent_only_to_addresses_that_were_typed_when_it_is_continued(evil, monkeypatch):
    urls = "sampler.urls=['http://evil:1']"
    save_run(evil, "tracking=mlflow", "tracking.uri=http://evil:2", "sampler=vllm", urls)
    assert [
        problem.partition(" (got")[0] for problem in compose([], run_dir=evil / "run").problems
    ] == [
        "tracking.uri=http://evil:2 needs to be typed",
        "sampler.urls=[http://evil:1] needs to be typed",
    ]
    words = ["tracking.uri=http://evil:2", urls]
    assert shlex.split(resume_command(evil / "run"))[-2:] == words
    assert compose(words, run_dir=evil / "run").problems == []
    hidden = ["tracking.uri=${tracking.run_name}", "tracking.run_name=x", urls]
    assert "needs to be typed" in str(compose(hidden, run_dir=evil / "run").problems)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://evil:2/")
    assert compose([urls], run_dir=evil / "run").problems == []


def name_store(folder: Path, uri: str | None) -> None:
    """Write an address of a store into the configuration of the run in a folder."""
    path = folder / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["tracking"]["uri"] = uri
    path.write_text(yaml.safe_dump(config))


def test_a_file_that_only_a_run_names_gets_no_table(evil, capsys):
    database = evil / "victim.db"
    with closing(sqlite3.connect(database)) as victim, victim:
        victim.execute("CREATE TABLE mine (x)")
    before = database.read_bytes()
    save_run(evil, "tracking=mlflow")
    for uri in ("sqlite:///{}", "sqlite+pysqlite:///{}", "file://{}", "{}"):
        name_store(evil, uri.format(database))
        assert "needs its store to be typed" in refusal(capsys, "sync", "run")
        assert "tracking.uri=" in refusal(capsys, "resume", "run")
    # The place of the default store may be a link.
    (evil / "outputs").mkdir()
    (evil / "outputs" / "mlflow.db").symlink_to(database)
    name_store(evil, None)
    assert main(["sync", "run"]) == 6
    assert "needs a store of MLflow's" in capsys.readouterr().err
    problem = problem_of_store(Path(database), "pgtoolkit")
    assert problem is not None
    assert "needs a store of MLflow's" in problem
    assert database.read_bytes() == before


def test_a_default_store_that_keeps_files_elsewhere_gets_no_run(evil, capsys):
    save_run(evil, "tracking=mlflow")
    store = f"sqlite:///{evil}/outputs/mlflow.db"
    client, _ = open_store(store, "other")
    client.create_experiment("pgtoolkit", artifact_location=f"file://{evil}/victim")
    assert main(["sync", "run"]) == 6
    assert f"(got file://{evil}/victim)" in capsys.readouterr().err
    assert not (evil / "victim").exists()


@pytest.mark.slow
def test_a_sweep_names_the_receiver_of_a_token_before_the_first_request(evil, server, monkeypatch):
    address, authorizations, printed = server
    (evil / "mine.yaml").write_text(
        f"defaults: [config, _self_]\ntracking: {{uri: '{address}'}}\nhydra: {{sweeper: {{params: "
        f"{{seed: '1,2'}}}}}}\n"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    short = [override for override in SHORT if not override.startswith("tracking")]
    assert main(["sweep", "mine.yaml", *short]) != 0
    note = f"note: sends MLFLOW_TRACKING_TOKEN to {address} (tracking.uri)"
    assert note in printed[0].splitlines()
    assert set(authorizations) == {"Bearer hunter2"}


def test_a_resume_names_the_receiver_of_a_token_before_the_first_request(evil, server, monkeypatch):
    address, authorizations, printed = server
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hunter2")
    save_run(evil, "task.num_digits=3", "tracking=mlflow", f"tracking.uri={address}")
    assert main(["resume", "run", f"tracking.uri={address}"]) == 6
    note = f"note: sends MLFLOW_TRACKING_TOKEN to {address} (tracking.uri)"
    assert note in printed[0].splitlines()
    assert set(authorizations) == {"Bearer hunter2"}


def test_a_note_says_that_the_key_of_vllm_is_sent_to_the_servers_of_sampler_urls(evil, monkeypatch):
    servers = ["sampler=vllm", "sampler.urls=[http://127.0.0.1:9]"]
    assert before_start(config_of(*servers)) == []
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    assert before_start(config_of(*servers)) == [
        "sends VLLM_API_KEY to http://127.0.0.1:9 (sampler.urls)"
    ]


def test_a_note_says_where_wandb_finds_the_key_that_it_sends_and_to_which_server(
    evil, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    config = config_of("tracking=wandb")
    assert before_start(config) == []
    settings = tmp_path / ".config/wandb/settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\napi_key = hunter2\nbase_url = https://w.example.org\n")
    to_server = "to https://w.example.org (wandb)"
    assert before_start(config) == [f"sends the key in {settings} {to_server}"]
    (tmp_path / ".netrc").write_text("machine w.example.org\n  login user\n  password hunter2\n")
    assert before_start(config) == [f"sends the key in {tmp_path}/.netrc {to_server}"]
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    assert before_start(config) == [f"sends WANDB_API_KEY {to_server}"]
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.org")
    assert before_start(config) == ["sends WANDB_API_KEY to https://other.example.org (wandb)"]
    settings.write_text("[default]\nmode = offline\n")
    assert before_start(config) == []

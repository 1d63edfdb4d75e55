"""The command `pgtk`: exit statuses, help, suggestions; nothing is created before the configuration
is right."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from builders.forked import ForkedPython
from builders.refusals import refusal
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from pgtoolkit.cli import COMMANDS, main
from pgtoolkit.config.compose import compose
from pgtoolkit.config.files import options
from pgtoolkit.config.models import vocabulary_size
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.overrides import hydra_form
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.help import help_page
from pgtoolkit.runs.records import read_resolved
from pgtoolkit.system.yaml_text import to_yaml


def pgtk(*arguments, cwd):
    """Return the exit status of the command as a process, its output and its errors."""
    command = [sys.executable, "-m", "pgtoolkit.cli", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ForkedPython(command, cwd=cwd, text=True, **streams) as process:
        printed, errors = process.communicate(timeout=120)
    return process.returncode, printed, errors


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("agregation=constant", "Use aggregation=constant."),
        ("loss=gpro", "Use loss=grpo."),
        ("lr=1", "Use optimizer.learning_rate=1."),
        ("trainer.docs_per_step=8", "Use accumulation.docs_per_step=8."),
        ("sed=1", "Use seed=1."),
        ("optimizer.betas=[0.9,0.95]", "Use optimizer.beta1=0.9 optimizer.beta2=0.95."),
        ("loss.beta=0.1", "Use kl=k3 kl.reference=initial kl.coefficient=0.1."),
        ("sampler.gpus=1", "Use sampler.gpus=[1]."),
        (
            "sampler.tensor_parallel=4",
            "Use sampler=vllm sampler.gpus=[1,2,3,4] sampler.tensor_parallel=4.",
        ),
        ("tracking.also=[tensorboard,tensorboard]", "Use tracking.also=[tensorboard]."),
        (
            "loss.zzz=1",
            "loss has the keys loss.num_splits, loss.epsilon_low, loss.epsilon_high. Use pgtk",
        ),
        ("zzz=1", "Use pgtk --help"),
        ("task.dataset=x", "Use task=reasoning_gym task.dataset=x."),
        (
            "task.path=x",
            (
                "task.path=x needs task=prompts or task=conversation (got task=reverse). "
                "task=reverse does not"
            ),
        ),
        ("loss.name=grpo", "Use loss=grpo."),
        ("trainer.max_steps=1e3", "Use trainer.max_steps=1000."),
        ("hydra.run.dir=~/runs", "Use hydra.run.dir=$HOME/runs."),
        ("task.path=prömpts.jsonl", "Use task=prompts \"task.path='prömpts.jsonl'\"."),
        ("parallelism.sequence_parallel=3.5", "needs true or false"),
        ("seed=1,2", "Use pgtk check -m seed=1,2."),
        ("mine.yaml", "Use pgtk check sweep mine.yaml."),
        ("loss=glob(*)", "Options are chosen by their names, not by a pattern"),
        ("~tracking", "Use tracking=none."),
    ],
)
def test_the_nearest_valid_override_is_suggested(capsys, typed, suggested):
    error = refusal(capsys, "check", typed)
    assert suggested in error
    assert typed.lstrip("+").split("=")[0] in error


@pytest.mark.parametrize(
    ("typed", "first", "last"),
    [
        ("seed=1 tracking=none tracking=none seed=2", "seed=1", "seed=2"),
        ("+seed=1 seed=2", "+seed=1", "seed=2"),
        ("seed=[1] seed=2", "seed=[1]", "seed=2"),
        ("hydra.run.dir=a hydra.run.dir=b", "hydra.run.dir=a", "hydra.run.dir=b"),
        ("-m seed=1,2 seed=3", "seed=1,2", "seed=3"),
        ("sweep loss_by_aggregation seed=1 seed=2", "seed=1", "seed=2"),
    ],
)
def test_a_value_given_twice_is_refused(capsys, typed, first, last):
    error = refusal(capsys, "check", *typed.split())
    needs = (
        f"{last} needs to be the only value of {last.partition('=')[0]} (got {first} before it)."
    )
    assert f"  {needs} One of the two would be ignored. Use {shlex.quote(first)}" in error
    assert error.count("the only value") == 1


@pytest.mark.parametrize(
    ("dictionary", "part"),
    [
        ("loss={epsilon_low: 0.1, epsilon_high: 0.3}", "loss.epsilon_low=0.2"),
        ("evaluation.sets={hard: {num_digits: 3, prompts: 8}}", "evaluation.sets.hard.prompts=16"),
        ("callbacks.own={a: {path: m.A, x: 1, y: 2}}", "callbacks.own.a.x=3"),
        ("model={num_layers: 1, hidden_size: 48}", "model.num_layers=3"),
    ],
)
def test_a_key_changes_its_part_of_a_dictionary_typed_before_it(dictionary, part):
    before = plain_config(compose([dictionary]).config)
    after = plain_config(compose([dictionary, part]).config)
    name, _, value = part.partition("=")
    *groups, leaf = name.split(".")
    place = before
    for group in groups:
        place = place[group]
    assert place[leaf] != float(value)
    place[leaf] = type(place[leaf])(value)
    assert after == before


def test_a_dictionary_after_a_part_of_it_is_refused_with_the_order_that_works(capsys):
    dictionary = "evaluation.sets={hard: {num_digits: 3, prompts: 8}}"
    part = "evaluation.sets.hard.prompts=16"
    error = refusal(capsys, "check", "evaluation.every=20", part, dictionary)
    words = error.partition("One of the two would be ignored. Use ")[2].partition(", or one of")[0]
    assert shlex.split(words) == [dictionary, part]
    assert main(["check", "evaluation.every=20", *shlex.split(words)]) == 0


def test_a_value_typed_twice_alike_is_typed_once(capsys):
    """Nothing is ignored: so any override may follow a command that has it."""
    for command in ("check", "check -m loss=grpo,gspo", "check sweep loss_by_aggregation"):
        assert main([*command.split(), "tracking=none", "seed=3", "seed=3", "tracking=none"]) == 0
    assert main(["--cfg", "job", "tracking=none", "seed=3", "seed=3", "tracking=none"]) == 0
    assert "seed: 3\n" in capsys.readouterr().out


def test_overrides_may_change_the_values_of_a_file(capsys):
    assert main(["check", "sweep", "loss_by_aggregation", "+seed=5", "loss=grpo"]) == 0
    assert "Sweep of 4 runs" in capsys.readouterr().out
    overrides = ["loss=gspo", "loss.epsilon_low=1e-3", "loss={epsilon_high:1e-3}"]
    assert main(["check", "experiment=dapo", *overrides]) == 0


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("chek", "Use pgtk check."),
        ("agregation", "Use aggregation=sample_mean."),
        ("train", "Use pgtk."),
        ("sweep.yaml", "Use pgtk sweep sweep.yaml."),
        ("zzz", "Use pgtk --help."),
    ],
)
def test_the_nearest_command_is_suggested(capsys, word, suggested):
    assert suggested in refusal(capsys, word)


def test_all_problems_of_all_kinds_are_printed_together(capsys):
    error = refusal(
        capsys, "loss=gpro", "sed=1", "seed=x", "loss.num_splits=2", "rollout.temperature=0"
    )
    assert error.startswith("pgtk: error: 5 problems in the configuration:\n")
    assert len(error.splitlines()) == 6


def test_a_wrong_key_in_a_file_of_the_user_is_refused_with_the_files_name(tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nloss:\n  epsilon_hi: 3\n"
    )
    error = refusal(capsys, "check", f"--config-dir={tmp_path}", "experiment=mine")
    assert "loss.epsilon_hi: 3 in " in error
    assert "experiment/mine.yaml needs a key that there is (got loss.epsilon_hi). " in error
    assert "Use loss: {epsilon_high: 3}." in error
    assert "Use experiment=mine." in refusal(
        capsys, "check", f"--config-dir={tmp_path}", "experiment=mien"
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "task:\n  num_digit: 3\n",
            "mine.yaml needs a key that there is (got task.num_digit). There is no key "
            "task.num_digit. Use task: {num_digits: 3}.",
        ),
        (
            "tusk:\n  path: x\n",
            "mine.yaml needs a group that there is (got tusk). There is no group tusk. Use task: ",
        ),
        ("  - override task: revers\n", "- override task: revers in "),
    ],
)
def test_a_typing_error_in_a_file_of_a_sweep_is_answered_with_the_nearest_name(
    tmp_path, capsys, lines, said
):
    order = [lines, "  - _self_\n"] if lines.startswith(" ") else ["  - _self_\n", lines]
    file = tmp_path / "mine.yaml"
    file.write_text("".join(["defaults:\n  - config\n", *order]))
    assert main(["check", "sweep", str(file)]) == 2
    assert said in capsys.readouterr().out


def test_check_prints_how_a_step_is_divided_among_ranks(capsys):
    assert (
        main(
            [
                "check",
                "parallelism=ddp",
                "parallelism.data_parallel=3",
                "accumulation.max_tokens=140",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "  processes: 3; data_parallel=3\n" in shown
    # 22 of 64 documents at most on a rank, 10 documents in a micro-batch.
    assert "in 3 micro-batches of at most 140 tokens on each data rank; 4 steps" in shown
    sizes = ["parallelism=pipeline", "metrics=none", "parallelism.tensor_parallel=2"]
    assert main(["check", *sizes, "rollout=recorded", "rollout.path=."]) in (0, 2)
    assert "  processes: 4; pipeline_parallel=2, tensor_parallel=2\n" in capsys.readouterr().out
    assert main(["check"]) == 0
    assert "processes" not in capsys.readouterr().out


def test_check_prints_the_plan(capsys):
    assert main(["check", "experiment=dapo", "seed=3"]) == 0
    page = capsys.readouterr().out
    for expected in (
        "clip(r_t, 1 - 0.2, 1 + 0.28)",
        "w_t = 1 / N,",
        "32 prompts x 8 completions = 256 documents",
        "prompt 7 + completion 9 = 16 tokens",
        "step: 64 documents, in 2 micro-batches of at most 512 tokens; 4 steps per batch",
        "300 steps, 19200 documents",
        "512 tokens x 12 entries of the vocabulary x 4 bytes = 0.0234 MiB per micro-batch, made "
        "one after the other in parts that fit into the device's memory\n",
        "Changed from the defaults\n  experiment = dapo\n  seed = 3 (default 0)\n\n",
        "Follows from that\n  loss.name = grpo (default gspo)\n",
        "  loss.epsilon_high = 0.28 (default 0.0004)\n",
        "Run name\n  grpo_token-mean_dapo_seed-3\n",
        "7 tokens: '3'=3 '7'=7 '6'=6 '3'=3 '7'=7 '3'=3 '='=10",
    ):
        assert expected in page


def test_the_vocabulary_of_a_local_model_is_read(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    (tmp_path / "tokenizer.json").write_text("{}")
    arguments = [
        "model=huggingface",
        f"model.path={tmp_path}",
        "accumulation.max_tokens=8192",
        "kernel=torch",
    ]
    main(["check", *arguments, "model.random_weights=true"])  # which misses the rest of the model
    page = capsys.readouterr().out
    assert "8192 tokens x 151936 entries of the vocabulary x 4 bytes = 4.75e+03 MiB" in page
    # What follows from it is only what has an effect: without advantage=gae there is no critic.
    assert "  model.dtype = auto\n" in page
    assert "critic.learning_rate" not in page
    assert "model.lora_alpha" not in page
    main(["check", *arguments, "advantage=gae"])
    assert "  critic.learning_rate = 1e-05 (default 0.001)\n" in capsys.readouterr().out


def test_help_fits_one_screen():
    lines = help_page(COMMANDS).splitlines()
    assert len(lines) <= 38
    assert max(map(len, lines)) <= 100
    for group, names in options().items():
        assert group in help_page(COMMANDS)
        assert all(name in help_page(COMMANDS) for name in names)


def test_each_command_has_a_help_of_its_own(capsys):
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):  # argparse's
            main([command, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: pgtk {command} ")
    main(["sweep", "-h"])
    assert {"loss_by_aggregation,", "--fail-fast:"} <= {*capsys.readouterr().out.split()}


def test_help_lists_every_flag(capsys):
    """Those of Hydra's parser that pgtk does not refuse, and of each command those that are read
    for it."""
    flags = {
        name
        for action in get_args_parser()._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    # tests below see them refused
    refused = {"--config-path", "--config-name", "--experimental-rerun"}
    of_no_use = {"--help", "--hydra-help", "--run"}
    page = help_page(COMMANDS)
    assert {flag for flag in flags | {"--fail-fast"} if flag not in page} == refused | of_no_use
    pages = {}
    for command in ("sweep", "check", "resume", "continue"):
        main([command, "--help"])
        pages[command] = {
            *re.findall(r"^(?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        }
    assert pages == {
        "sweep": {"--fail-fast", "--config-dir"},
        "check": {"--find", "--multirun", "--json", "--config-dir"},
        "resume": {"--step"},
        "continue": {"--config-dir"},
    }


def test_check_and_explain_print_json(capsys):
    plan = json.loads(refusal(capsys, "check", "loss=gspo", "loss.num_splits=2", "--json"))
    assert plan["run_name"] == ["gspo_sample-mean_num-splits-2"]
    problems = [problem.partition(" (")[0] for problem in plan["problems"]]
    assert problems == ["loss=gspo needs loss.num_splits=1"]
    assert plan["runs"][0]["overrides"] == ["loss=gspo", "loss.num_splits=2"]
    assert main(["check", "-m", "seed=0,1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == []
    assert [run["state"] for run in plan["runs"]] == ["pending", "pending"]
    assert main(["explain", "optimizer.schedule", "--json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["pages"]
    assert (page["title"], page["default"]) == ("optimizer.schedule: a key", "constant")


def test_help_loads_nothing(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "pgtoolkit.cli", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pgtk check" in done.stdout
    loaded = set(re.findall(r"\| +([\w.]+)$", done.stderr, flags=re.MULTILINE))
    assert {"torch", "lightning", "mlflow", "hydra", "omegaconf"} & loaded == set()
    assert "pgtoolkit.config.files" in loaded


def test_a_wrong_configuration_exits_with_2_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, printed, errors = pgtk("loss.num_splits=2", cwd=tmp_path)
    assert (status, printed) == (2, "")
    assert errors.startswith("pgtk: error: loss=gspo needs loss.num_splits=1 (got 2). ")
    assert "Use loss=grpo." in refusal(capsys, "--cfg", "job", "loss=gpro")
    assert (
        "Overrides are written without dashes, and pgtk has no such flag. Use loss=grpo."
        in refusal(capsys, "--loss=grpo")
    )
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pgtk ")
    assert main(["check", "loss=gspo", "-m", "seed=1,2"]) == 0
    assert capsys.readouterr().out.startswith("Sweep of 2 runs")
    assert "loss=gspo needs" in refusal(capsys, "-m", "loss=grpo,gspo", "loss.num_splits=2")
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_prints_the_configuration(tmp_path, capsys):
    assert main(["--cfg", "job", "--resolve", "aggregation=constant"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).aggregation.divisor == 7
    # which leaves a log of Hydra's open
    assert pgtk("--info", "defaults-tree", cwd=tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("words", "status"),
    [(["check"], 141), (["--cfg", "job"], 141)],
)
def test_a_closed_pipe_is_not_an_error_message(tmp_path, words, status):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "pgtoolkit.cli", *words],
            cwd=tmp_path,
            stdout=closed,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == status
    assert done.stderr == b""


def test_plus_signs_are_put_where_hydra_wants_them():
    assert hydra_form("+experiment=dapo") == "experiment=dapo"
    assert hydra_form("task.options.a=1") == "++task.options.a=1"
    composed = compose(
        ["task=reasoning_gym", "task.dataset=x", "task.options={a: 1}", "task.options.b=2"]
    )
    assert composed.problems == []
    assert composed.config.task.options == {"a": 1, "b": 2}


@pytest.fixture
def run_dir(tmp_path):
    config = plain_config(compose(["loss=grpo", "seed=5"]).config)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    return tmp_path


@pytest.mark.parametrize("lacks", ["rollout.lag", "parallelism.shard", "correction", "kl"])
def test_a_saved_configuration_that_does_not_fit_is_refused_in_one_sentence(run_dir, lacks):
    saved = read_resolved(run_dir)
    group, _, name = lacks.partition(".")
    del (saved[group] if name else saved)[name or group]
    (run_dir / "config.yaml").write_text(to_yaml(saved))
    with pytest.raises(
        ConfigError, match="does not fit this version of pgtoolkit: it has no '" + lacks
    ):
        compose([], run_dir=run_dir)


def test_a_run_from_before_a_key_was_added_gets_its_default(run_dir, capsys):
    config = compose(["task=prompts", "task.path=p.jsonl", "task.verifier_failure=score"]).config
    saved = plain_config(config) | {"seed": 5}
    del saved["task"]["verifier_failure"], saved["task"]["failure_score"]
    (run_dir / "config.yaml").write_text(to_yaml(saved))
    task = compose([], run_dir=run_dir).config.task
    assert (task.verifier_failure, task.failure_score) == ("exclude", 0)
    note = (
        "is older than these keys, whose defaults hold: task.failure_score=0, "
        "task.verifier_failure=exclude\n"
    )
    assert capsys.readouterr().err == f"note: {run_dir}/config.yaml {note}"


def test_a_run_from_before_a_group_was_added_gets_its_defaults(run_dir, capsys):
    saved = read_resolved(run_dir)
    before = saved.pop("critic")
    (run_dir / "config.yaml").write_text(to_yaml(saved))
    assert plain_config(compose([], run_dir=run_dir).config)["critic"] == before
    assert (
        "whose defaults hold: critic.clip=0.5, critic.learning_rate=0.001,"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("folder", ["sweeps/mine", "sweeps/mine/job", "sweeps"])
@pytest.mark.parametrize("command", ["compare", "resume"])
def test_a_sweep_without_a_run_names_the_command_that_goes_on_with_it(
    tmp_path, monkeypatch, capsys, command, folder
):
    monkeypatch.chdir(tmp_path)
    Path("sweeps/mine/job").mkdir(parents=True)
    job = {"name": "job", "directory": "job", "status": "pending"}
    words = ["pgtk", "-m", "seed=0,1", "hydra.sweep.dir=sweeps/mine"]
    sweep = {"name": "mine", "command": words, "jobs": [job]}
    Path("sweeps/mine/sweep.json").write_text(json.dumps(sweep))
    problem = refusal(capsys, command, folder)
    assert "a sweep's folder without runs" in problem
    assert problem.rstrip().endswith(f"Use {' '.join(words)}.")
    Path("sweeps/mine/job/status.json").write_text("{}")
    problem = refusal(capsys, command, "sweeps/mine/job")
    assert "a run without its config.yaml" in problem


@pytest.mark.parametrize("typed", ["seed=3", "experiment=dapo"])
def test_what_a_resume_cannot_change_is_answered_with_the_command_of_a_new_run(run_dir, typed):
    (run_dir / "overrides.yaml").write_text("[seed=1, trainer.max_steps=2, task.num_digits=4]\n")
    (problem,) = compose([typed], run_dir=run_dir).problems
    kept = "trainer.max_steps=2 task.num_digits=4"
    if typed != "seed=3":
        kept = f"seed=1 {kept}"
    assert problem.endswith(f"pgtk {typed} {kept}.")
    assert compose([typed, *kept.split()]).problems == []
    (run_dir / "overrides.yaml").unlink()
    (problem,) = compose([typed], run_dir=run_dir).problems
    assert problem.endswith("Use a new run.")


def test_resume_needs_a_run_directory(tmp_path, capsys):
    assert "needs a run directory (got none)" in refusal(capsys, "resume")
    assert "no such folder" in refusal(capsys, "resume", str(tmp_path / "x"))
    assert "a folder without runs" in refusal(capsys, "resume", str(tmp_path))
    (tmp_path / "config.yaml").write_text("seed: [")
    assert main(["resume", str(tmp_path)]) == 6
    assert f"{tmp_path}/config.yaml is damaged (no YAML, line 1: " in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert "does not fit this version" in refusal(capsys, "resume", str(tmp_path))


def test_a_folder_of_runs_is_no_run_and_its_runs_are_named(tmp_path, capsys):
    run = tmp_path / "sweep" / "job"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "provenance.json").touch()
    for folder in (tmp_path, run.parent):
        said = refusal(capsys, "resume", str(folder))
        assert f"(got {folder}: a folder of runs)" in said
        assert said.rstrip().endswith(f"Use {run}.")
    sweep = {"name": "sweep", "command": ["pgtk", "-m", "experiment=dapo,grpo"], "jobs": []}
    (run.parent / "sweep.json").write_text(json.dumps(sweep))
    said = refusal(capsys, "resume", str(run.parent))
    assert "All jobs of this sweep go on with pgtk -m experiment=dapo,grpo. Use " in said
    said = refusal(capsys, "sweep", str(run.parent))
    assert said.rstrip().endswith("Use pgtk -m experiment=dapo,grpo.")


@pytest.mark.parametrize(
    "words",
    [
        ["continue", "", "loss=grpo"],
        ["compare", "outputs/a", " "],
        ["sync", ""],
        ["samples", "outputs/a", "--html="],
        ["check", ""],
        [""],
    ],
)
def test_an_empty_word_is_not_the_current_directory(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    assert "needs words that are not empty (got '" in refusal(capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("task", ["reverse", "reasoning_gym"])
def test_the_predicted_vocabulary_is_the_tokenizers(task):
    from pgtoolkit.model.setup import character_tokenizer
    from pgtoolkit.tasks.tasks import ReverseTask

    alphabet = {"reverse": ReverseTask.alphabet, "reasoning_gym": None}[task]
    config = compose([f"task={task}"]).config
    predicted = vocabulary_size(config.model, config.task)
    assert predicted == len(character_tokenizer(alphabet))


def test_only_a_single_configuration_is_printed_at_a_time(capsys):
    assert "needs one run (got -m)" in refusal(capsys, "-m", "--cfg", "job", "seed=1,2")


@pytest.mark.parametrize("command", [[], ["check"]])
@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (
            "--config-name=x",
            "--config-name=x needs to be left out (got x). pgtk begins with its own conf/",
        ),
        ("--config-path=x", "--config-path=x needs to be left out"),
        ("--experimental-rerun=x.pickle", "--experimental-rerun=x.pickle needs to be left out"),
        ("--config-dir=nowhere", "--config-dir=nowhere needs a folder (got nowhere)."),
        ("--config-dir", "--config-dir= needs a folder (got '')."),
        ("--config-dir=", "--config-dir= needs a folder (got '')."),
    ],
)
def test_options_of_hydra_that_pgtk_does_not_take_are_refused(capsys, command, typed, says):
    assert f"pgtk: error: {says}" in refusal(capsys, *command, typed)

"""`pgtk explain` answers every word that the docs tell to type, and code of the user's own."""

import re
import sys
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import COMMANDS, main
from pgtoolkit.config.explain import explain, pages_on
from pgtoolkit.config.explained import explanations
from pgtoolkit.config.field_words import FIELD_WORDS
from pgtoolkit.config.files import options
from pgtoolkit.config.words import KINDS
from pgtoolkit.errors import ConfigError
from pgtoolkit.launch.command_pages import pages_on_commands
from pgtoolkit.launch.commands import REPORTS
from pgtoolkit.losses.aggregation import REDUCER_KEYWORDS
from pgtoolkit.losses.function import ASKED
from pgtoolkit.rollouts import rows
from pgtoolkit.runs import completion_files
from pgtoolkit.runs.directory import BELONGS_TO_A_RUN
from pgtoolkit.tasks import signatures

REPOSITORY = Path(__file__).parents[2]
OURS = {*options(), "hydra", "seed"}

OF_LIGHTNING = {"callback_metrics", "current_epoch", "global_step", "should_stop"}
"""Attributes of Lightning's trainer, which docs/configuration.md names as `trainer.NAME`."""

OF_PYTHON = {"compose"}
"""Functions of `pgtoolkit.experiment`, which docs/python.md names as `experiment.NAME`."""


def words_to_type() -> dict[str, str]:
    """Return what the docs tell to type, each with a page that does: commands and their flags, keys
    and options, environment variables."""
    words = {}
    for file in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        if file.name == "trl_and_verl_keys.md":  # whose words are those of other trainers
            continue
        page = file.read_text()
        for command in re.findall(r"\bpgtk ([^#`\n|]*)", page.replace("\\\n", " ")):
            for word in of_command(command):
                words.setdefault(word, file.name)
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)):
            key = re.fullmatch(r"([a-z]\w*)([./]\w+)*(=.*)?", code)
            if (key is not None and is_ours(code)) or re.fullmatch(
                r"(?!UNSLOTH)[A-Z]+_[A-Z_]+(=\S*)?", code
            ):
                words.setdefault(code, file.name)
    return words


def of_command(command: str) -> list[str]:
    """Return the name of a command, its flags, and the keys with their values."""
    command = re.sub(r"\$\(.*?\)", "", command)
    parts = re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", command)
    names = [parts[0]] if parts and parts[0] in COMMANDS else []
    flags = [part.partition("=")[0] for part in parts if re.match("--?[a-z]", part)]
    settings = [part.strip("\"'") for part in parts if re.match(r"[\"']?[a-z][\w./]*=", part)]
    return [*names, *flags, *filter(is_ours, settings)]


def is_ours(code: str) -> bool:
    name = code.partition("=")[0]
    group, _, leaf = name.partition(".")
    is_path = "/" in name and not name.startswith("hydra/")
    return group.partition("/")[0] in OURS and leaf not in OF_LIGHTNING | OF_PYTHON and not is_path


def test_every_word_that_the_docs_tell_to_type_is_explained(monkeypatch):
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # of the docs, and of other tests
    words = words_to_type()
    assert len(words) > 550
    commands = pages_on_commands(REPORTS)
    unknown = []
    for word, page in words.items():
        try:
            kinds = {explained.kind for explained in pages_on(word, commands)}
        except ConfigError:
            kinds = {"mentions"}
        if kinds == {"mentions"}:
            unknown.append(f"{word} ({page})")
    assert unknown == []


def test_every_word_of_the_field_means_keys_or_groups_that_there_are():
    for names in FIELD_WORDS.values():
        assert [name for name in names if not known_kinds(name) & {"key", "group", "word"}] == []


def known_kinds(name: str) -> set[str]:
    return {page.kind for page in explanations().get(name, ())}


def test_declared_words_are_those_of_the_parts():
    names = {kind: [word.name for word in words] for kind, words in KINDS.items()}
    assert {*names["a column of recorded rollouts"]} == {*rows.COLUMNS}
    completions = {*completion_files.COLUMNS, "reward/NAME"}
    assert {*names["a column of kept completions"]} == completions
    parameters = {*signatures.SINGLE, *signatures.OF_A_BATCH, *signatures.OF_VERL}
    assert {*names["a parameter of a reward function"]} == parameters
    assert {*names["a parameter of a loss function"]} == {*ASKED}
    assert {"mask", *names["a parameter of a reducer"]} == {*REDUCER_KEYWORDS}
    assert {*BELONGS_TO_A_RUN} <= {*names["a file of a run directory"]}


@pytest.mark.parametrize(
    ("word", "titles"),
    [
        (
            "GRPO",
            ["experiment=grpo: an option", "loss=grpo: an option", "advantage=grpo: an option"],
        ),
        ("status.json", ["status.json, a file of a run directory"]),
        ("--best", ["--best: a flag"]),
        ("best-of", ["--best-of: a flag"]),
        ("compare", ["compare: a command"]),
        ("pgtk compare RUN --over task", ["compare: a command", "--over: a flag"]),
        ("micro batch", ["micro-batch, a word of these pages"]),
        ("Learning_Rate", ["critic.learning_rate: a key", "optimizer.learning_rate: a key"]),
        (
            "task.verifiers.NAME.weight",
            ["task.verifiers: a key of task=prompts"],
        ),
        ("evaluation.sets.NAME.num_digits", ["evaluation.sets: a key", "task.num_digits: a key"]),
        ("hydra.launcher.partition", ["hydra.launcher.partition: a key of hydra/launcher=slurm"]),
        ("hydra.verbose", ["hydra.verbose: a key of Hydra's"]),
        ("conf/kl/k3.yaml", ["kl=k3: an option"]),
        ("clip_range", ["clip_range: a sweep"]),
        ("batch_size", ["accumulation.docs_per_step: a key"]),
        (
            "clip",
            [
                "loss.epsilon_low: a key",
                "loss.epsilon_high: a key",
                "clip: on the line",
                "clipped_ratio_fraction: a metric",
                "critic.clip: a key",
            ],
        ),
        ("epochs", ["rollout.epochs: a key", "trainer.max_steps: a key"]),
        ("iqm", ["IQM, a word of comparisons"]),
        ("controls", ["control, a word of comparisons"]),
        ("surrogate", ["surrogate, a word of these pages"]),
        ("interrupted", ["interrupted, the state of a run"]),
        ("seeds", ["seeds, a word of comparisons", "seed: a key"]),
        ("epsilon", ["loss.epsilon_low: a key", "loss.epsilon_high: a key"]),
        ("lora-r", ["model.lora_rank: a key"]),
        ("geo_mean", ["loss=gmpo: verl loss_mode"]),
    ],
)
def test_a_word_may_be_written_in_several_ways(word, titles):
    found = [page.title for page in pages_on(word, pages_on_commands(REPORTS))]
    assert [title for title in titles if not any(other.startswith(title) for other in found)] == []
    assert len(found) <= len(titles) + 2


def test_a_word_of_many_things_is_answered_by_a_list_of_them():
    lines = explain("path").splitlines()
    assert lines[0] == "path may be"
    assert "  model.path: a key of model=huggingface" in lines
    assert lines[-1] == "pgtk explain loss.path says more of one."


OWN = """
from dataclasses import dataclass

from pgtoolkit.families import Family


@dataclass(frozen=True)
class MyLoss(Family):
    \"\"\"Squares the ratio.

    tau: how strong it is.
    \"\"\"

    tau: float = 0.3


def score(completion, answer, strict=True):
    return 1.0


def advantages(rewards):
    return rewards


def soft(log_ratio, advantages, *, softness=0.1):
    return advantages


def measured(log_ratio, ratio):
    \"\"\"Minus the ratio.

    far: how far the ratio is from 1
    \"\"\"
    r = ratio(log_ratio)
    return -r, {"far": (r - 1).abs(), "square": r * r, "bounds": (None, 1.2)}


class Game:
    def start(self, prompt): ...
    def reply(self, messages): ...
    def score(self, messages): ...
"""


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        (
            "MyLoss",
            [
                ": a class",
                "  Squares the ratio.",
                "  parameters: tau=0.3 (how strong it is)",
                "  use: loss={}",
            ],
        ),
        (
            "score",
            [
                ": a function",
                "  parameters: completion; answer; strict=true",
                "  use: task.verifier={}",
            ],
        ),
        ("advantages", [": a function", "  parameters: rewards", "  use: advantage={}"]),
        (
            "soft",
            [": a function", "  parameters: log_ratio; advantages; softness=0.1", "  use: loss={}"],
        ),
        (
            "measured",
            [
                ": a function",
                "  Minus the ratio.",
                "  parameters: log_ratio; ratio",
                "  metrics: far (how far the ratio is from 1); square",
                "  use: loss={}",
            ],
        ),
        ("Game", [": a class", "  use: task=conversation task.environment={}"]),
    ],
)
def test_code_of_one_s_own_is_explained(tmp_path, monkeypatch, word, lines):
    monkeypatch.chdir(tmp_path)
    Path("explained_code.py").write_text(OWN)
    path = f"explained_code.{word}"
    assert explain(path).splitlines() == [
        path + lines[0],
        *(line.format(path) for line in lines[1:]),
    ]


def test_code_that_an_override_chooses_is_explained_with_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chosen_code.py").write_text(OWN)
    titles = [page.title for page in pages_on("loss=chosen_code.soft")]
    assert titles[:2] == ["chosen_code.soft: a function", "loss: a group of options"]
    titles = [page.title for page in pages_on("task.verifier=chosen_code.score")]
    assert titles == ["chosen_code.score: a function", "task.verifier: a key of task=prompts"]
    assert "`pgtk explain MODULE.NAME`, of your loss, says what it means" in explain(
        "loss.softness"
    )


def test_code_that_is_not_there_is_refused_with_what_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("lacking_code.py").write_text(OWN)
    message = refusal(capsys, "explain", "lacking_code.Mine")
    assert "pgtk explain lacking_code.Mine needs a function in the module" in message
    assert "MyLoss, score, advantages, soft, measured, Game" in message
    assert "needs a word that is known" in refusal(capsys, "explain", "no_module_of_this.Name")


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("lerning_rate", "learning_rate"),
        ("clip_fraction", "clip"),  # top_fraction is written like it, and means another thing
        ("reward_mean", "reward"),
    ],
)
def test_a_word_that_is_near_is_proposed(capsys, word, near):
    assert refusal(capsys, "explain", word).endswith(f"Use pgtk explain {near}.\n")


def test_a_file_of_the_own_folder_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = Path("mine/loss/wide.yaml")
    mine.parent.mkdir(parents=True)
    mine.write_text("# A wide clip.\ndefaults: [grpo, _self_]\nepsilon_high: 0.5\n")
    assert main(["explain", "loss=wide", "--config-dir=mine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "loss=wide: an option",
        "  A wide clip.",
        "  sets: epsilon_high=0.5",
    ]

"""The tables of TRL and verl: their defaults are those of the packages where these are installed,
what they say to type exists here, and words of theirs are answered from them."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import pytest
from builders.refusals import refusal

from benchmarks.drift import defaults_of_verl, differing, unknown
from pgtoolkit.config.explain import explain
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.tables import keys_of_trainer
from pgtoolkit.config.trainer_keys import flat, keys_called, known_as, rloo_table, tables
from pgtoolkit.config.translate import Translation
from pgtoolkit.config.translate_file import TheirConfig
from pgtoolkit.runs.declared_metrics import metric_named
from pgtoolkit.system.report import text
from pgtoolkit.system.yaml_text import plain_yaml

TABLES = Path(inspect.getfile(Translation)).parent


def test_the_defaults_of_trl_are_those_of_the_installed_classes():
    trl = pytest.importorskip("trl")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"the table is of 1.16.0, not of {trl.__version__}")
    fields = [
        *dataclasses.fields(trl.GRPOConfig),
        *dataclasses.fields(trl.ModelConfig),
        *dataclasses.fields(trl.ScriptArguments),
    ]
    factories = {
        field.name: field.default_factory() for field in fields if callable(field.default_factory)
    }
    defaults = {field.name: getattr(field.default, "value", field.default) for field in fields}
    assert len(defaults) > 200
    assert differing("TRL", defaults | factories) == {}
    assert unknown("TRL", defaults | factories) == []
    of_rloo = {field.name: field for field in dataclasses.fields(trl.RLOOConfig)}
    ours = {name: row.default for name, row in rloo_table().rows.items()}
    others = [
        name
        for name, field in of_rloo.items()
        if not callable(field.default_factory)
        and text(getattr(field.default, "value", field.default)) != text(ours[name])
    ]
    assert others == []
    of_grpo = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert of_grpo - of_rloo.keys() == {*tables()["TRL"].content["grpo"]}
    scripts = pytest.importorskip("trl.scripts.grpo")
    of_scripts = (scripts.GRPOScriptArguments, trl.DatasetMixtureConfig)
    known = {"config", "env", *defaults, *of_rloo, *inspect.signature(trl.GRPOTrainer).parameters}
    known |= {field.name for kind in of_scripts for field in dataclasses.fields(kind)}
    earlier = [name for name in tables()["TRL"].rows if not {name, name.partition(".")[0]} & known]
    sections = ("GRPOTrainer", "get_soft_overlong_punishment.", "launch", "peft_config.")
    sections += ("vllm_sampling_params",)
    earlier = sorted(name for name in earlier if not name.startswith(sections))
    assert earlier == tables()["TRL"].content["earlier"]
    page = (TABLES.parents[1] / "docs" / "trl_and_verl_keys.md").read_text()
    listed = page.partition("that 1.16.0 does not have:")[2].partition(".\n")[0]
    assert re.findall("`([^`]+)`", listed) == earlier


def _attributes_read(nodes: list[ast.stmt], owner: str) -> set[str]:
    """Return which attributes of an object code reads, such as those of self.args."""
    return {
        node.attr
        for each in nodes
        for node in ast.walk(each)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if ast.unparse(node.value) == owner
    }


def test_when_trls_trainers_read_a_key_is_as_their_code_has_it():
    """`taken` are keys that no method but __init__ reads from args; `later` are attributes that
    other methods read."""
    trl = pytest.importorskip("trl")
    content = tables()["TRL"].content
    taken: set[str] = set()
    read_later: set[str] = set()
    for trainer, config in ((trl.GRPOTrainer, trl.GRPOConfig), (trl.RLOOTrainer, trl.RLOOConfig)):
        (kind,) = ast.parse(textwrap.dedent(inspect.getsource(trainer))).body
        assert isinstance(kind, ast.ClassDef)
        methods = {each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)}
        first = [methods.pop("__init__")]
        others = [*methods.values()]
        of_config = set(vars(config)["__annotations__"])
        read_first = _attributes_read(first, "args") | _attributes_read(first, "self.args")
        taken |= (of_config & read_first) - _attributes_read(others, "self.args")
        read_later |= _attributes_read(others, "self")
    assert {*content["taken"]} == taken
    assert {*content["later"]} <= read_later
    # The others act on no number of a step, or stand for what is made with the trainer.
    without = {"generation_kwargs", "log_completions", "log_multimodal", "log_unique_prompts"}
    without |= {"max_tool_calling_iterations", "num_completions_to_print", "num_generations_eval"}
    without |= {"pad_to_multiple_of", "router_aux_loss_coef", "use_adaptive_entropy", "use_vllm"}
    without |= {"use_transformers_continuous_batching", "vllm_mode"}
    assert {*content["later"]} == (taken & read_later) - without | {"epsilon_low"}


@pytest.mark.parametrize(
    "values",
    [
        {"per_device_train_batch_size": 1, "steps_per_generation": 4},
        {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        {"generation_batch_size": 12, "num_generations": 4},
        {"generation_batch_size": 16, "num_generations": 4},
        {"num_generations": 1},
        {"eval_strategy": "steps", "num_generations_eval": 3},
        {"eval_strategy": "steps", "num_generations_eval": 4},
        {"auto_find_batch_size": True},
        {"log_completions_hub_repo": "a/b"},
        {"log_completions_hub_repo": "a/b", "log_completions": True},
        {"use_vllm": True, "vllm_importance_sampling_clip_min": 3.0},
        {"use_vllm": True, "vllm_importance_sampling_clip_min": 2.0},
    ],
)
def test_what_is_said_to_be_refused_is_what_trl_refuses(values):
    trl = pytest.importorskip("trl")
    is_refused = False
    try:
        trl.GRPOConfig(use_cpu=True, bf16=False, report_to="none", **values)
    except ValueError:
        is_refused = True
    translation = Translation(TheirConfig(tables()["TRL"], {**values}))
    assert bool(translation.refused) == is_refused


def test_the_keys_of_which_unsloth_has_a_default_are_those_of_the_installed_file():
    unsloth = importlib.util.find_spec("unsloth")
    content = tables()["TRL"].content["unsloth"]
    if unsloth is None or unsloth.origin is None:
        pytest.skip("unsloth is not installed")
    if importlib.metadata.version("unsloth") != content["version"]:
        pytest.skip(f"the table is of unsloth {content['version']}")
    source = (Path(unsloth.origin).parent / "models" / "rl.py").read_text()
    replaced: dict[str, object] = {"warmup_steps": 0.1}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[ast.Name(id="replacements")], value=ast.Dict() as values):
                if len(values.keys) > 5:  # those of all trainers, and those of GRPO's
                    replaced |= ast.literal_eval(values)
    rows = tables()["TRL"].rows
    changed = {
        name
        for name in replaced.keys() & rows.keys()
        if rows[name].typed_keys or rows[name].learns or rows[name].see
        if replaced[name] != rows[name].default
    }
    # The first three change nothing that a command has; the bound follows from the loss.
    changed -= {"seed", "generation_kwargs", "router_aux_loss_coef"}
    assert {*content["own"]} == changed | {"epsilon_high"}


def test_the_defaults_of_verl_are_those_of_the_installed_file():
    verl = importlib.util.find_spec("verl")
    if verl is None or verl.origin is None:
        pytest.skip("verl is not installed")
    package = Path(verl.origin).parent
    if (package / "version" / "version").read_text().strip() != "0.9.1":
        pytest.skip("the table is of verl 0.9.1")
    dump = package / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    defaults = defaults_of_verl(dump.read_text())
    assert len(defaults) > 800
    assert differing("verl", defaults) == {}
    assert unknown("verl", defaults) == []
    translation = Translation(TheirConfig(tables()["verl"], defaults))
    assert [shown for shown, *_ in translation.left] == ["trainer.total_epochs=30"]


@pytest.mark.parametrize("trainer", ["TRL", "verl"])
def test_a_table_names_what_exists(trainer):
    table = tables()[trainer]
    words = table.content["words"]
    keys = {key.name for key in KEYS if not key.option}
    for row in table.rows.values():
        assert row.typed or row.cases or row.see or row.reason, row
        assert not row.see or table.rows[row.see].cases, row
        for override in row.typed:
            key, _, value = override.partition("=")
            if key.startswith("evaluation.sets.held_out."):
                assert key.replace("evaluation.sets.held_out", "task") in keys, row
            elif key in options():
                assert value in options()[key] or "{" in value, row
            else:
                assert key in keys, row
        formulas = [row.acts, *row.differs, *row.reasons, *(where for where, _ in row.cases)]
        formulas += re.findall(r"\{([^}]*)\}", " ".join(row.typed))
        for formula in filter(None, formulas):
            names = names_in(formula)
            names = {
                f"{words[name.partition('.')[0]]}.{name.partition('.')[2]}"
                if name.partition(".")[0] in words and "." in name
                else name
                for name in names
            }
            assert names <= {*table.rows, *words, "processes"}, (row.name, formula)


def names_in(formula: str) -> set[str]:
    """Return the dotted names in a formula, without those of functions."""
    nodes = [*ast.walk(ast.parse(formula.strip(), mode="eval"))]
    functions = {node.func for node in nodes if isinstance(node, ast.Call)}
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    return {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute) and node not in functions | inner
    }


def test_the_tables_hold_no_key_twice():
    for file in ("trl.yaml", "verl.yaml"):
        content = plain_yaml((TABLES / file).read_bytes())
        assert content == tables()[content["trainer"]].content
        rows = [*content["keys"]]
        for block in content["none"]:
            rows += [*dict(flat(block.get("keys", {}))), *block.get("sections", [])]
        assert sorted(name for name in rows if rows.count(name) > 1) == []


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("num_generations", ["rollout.group_size"]),
        ("actor_rollout_ref.rollout.n", ["rollout.group_size"]),
        ("clip_ratio_low", ["loss.epsilon_low"]),
        ("epsilon", ["loss.epsilon_low", "loss.epsilon_high"]),
        ("lr", ["optimizer.learning_rate"]),
        ("scale_rewards", []),
        ("actor_rollout_ref.actor.profiler.tool_config.npu.level", []),
        ("model.vocab_size", []),  # of the section model, whose value is a path
        ("nothing_of_theirs", []),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_the_keys_that_take_its_value(name, keys):
    assert keys_called(name) == keys


def test_a_section_stands_for_its_keys():
    assert [name for name, _ in known_as("actor_rollout_ref.actor.megatron.new.key")] == [
        "actor_rollout_ref.actor.megatron"
    ]


@pytest.mark.parametrize("trainer", sorted(tables()))
def test_a_key_is_answered_by_the_table_that_has_it_in_full(trainer):
    """Others have keys of the same last word: TRL's weight_decay and seed, of no section."""
    for name, row in tables()[trainer].rows.items():
        assert known_as(name) == [(name, row)]


def test_the_end_of_a_key_is_looked_up_where_no_table_has_its_section():
    assert known_as("grpo_config.num_generations") == known_as("num_generations") != []
    assert {row.trainer for _, row in known_as("optim.weight_decay")} == {"verl"}
    assert known_as("model.seed") == known_as("seed")
    for name in ("actor_rollout_ref.actor.megatron", "generation_kwargs"):
        assert [of for of, _ in known_as(f"{name}.seed")] == [name]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("actor_rollout_ref.actor.optim.weight_decay", "default there: 0.01"),
        ("reward_funcs", "task.verifier takes the dotted path of a function"),
        ("num_train_epochs", "trainer.max_steps counts optimizer steps"),
        ("scale_rewards", "group, true: `advantage=grpo`; batch: `advantage=batch_std`"),
        ("min_p", "null, 0: nothing to type"),
        ("ppo_epochs", "1: nothing to type; else rollout.passes"),
        ("lam", "here: `advantage.gae_lambda`"),
        (
            "kl_loss_type",
            "where: kl_in_loss is actor.use_kl_loss and (not known",
        ),
        ("tau_pos", "where: mode is actor.policy_loss.loss_mode"),
        ("param_offload", "here: there is none nothing is offloaded to the CPU"),
        ("total_epochs", "trainer.total_epochs is a key of verl"),
        # Values of keys, alone and with the key; sections of keys; metrics; a class.
        ("bnpo", "else aggregation=token_mean"),
        ("loss_type=luspo", "aggregation=constant aggregation.divisor=1"),
        ("low_var_kl", "here: kl=k3"),
        ("seq_mean_k1", "correction.mean=geometric"),
        ("clip_cov", "clip_cov: a value of verl's actor_rollout_ref.actor.policy_loss.loss_mode"),
        (
            "adv_estimator=remax",
            "optimal_token_baseline and tir_optimal_token_baseline have no equal",
        ),
        ("val_kwargs.do_sample", "the loops of agents take val_kwargs.temperature without it"),
        ("loss_type", "aggregation=token_mean: TRL loss_type: dapo (default), cispo, vespo"),
        ("filter_groups", "keys: algorithm.filter_groups.enable,"),
        ("rollout_correction", "algorithm.rollout_correction.rollout_is_threshold"),
        ("clip_ratio/high_mean", "here: clipped_high_fraction"),
        ("frac_reward_zero_std", "zero_advantage_group_fraction: a metric share of those in which"),
        ("reward_std", "here: there is none"),
        ("completions/mean_length", "completion_length: a metric mean number of tokens with a"),
        ("completions/clipped_ratio", "here: truncated_fraction"),
        ("GRPOConfig", "pgtk translate FILE makes a command"),
        *(
            (word, f"{word} is a key of earlier versions of TRL, which 1.16.0 lacks; see")
            for word in ("warmup_ratio", "dataset_num_proc", "max_prompt_length")
        ),
    ],
)
def test_explain_answers_the_words_of_other_trainers(word, answer):
    page = " ".join(explain(word).split())
    assert answer.replace("`", "") in page.replace("`", "")


def test_metrics_of_trl_are_those_that_it_logs_and_name_ours():
    metrics = tables()["TRL"].content["metrics"]
    for name, here in metrics.items():
        for word in re.findall(r"`(\w+)`", here):
            assert metric_named(word) is not None, (name, word)
    trl = importlib.util.find_spec("trl")
    is_read = trl is not None and trl.origin is not None
    if is_read and importlib.metadata.version("trl") == tables()["TRL"].content["version"]:
        trainer = Path(trl.origin).parent / "trainer" / "grpo_trainer.py"
        logged = re.findall(r'_metrics\[mode\]\["([^"]+)"\]', trainer.read_text())
        assert {*metrics} <= {*logged}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("num_iterations=2", "Use rollout.passes=2."),
        ("data.train_batch_size=64", "Use rollout.prompts_per_batch=64."),
        ("push_to_hub=true", "TRL's push_to_hub has no equal here: `pgtk export RUN DIR` writes"),
        ("loss_type=cispo", "`cispo` caps every ratio at epsilon_high"),
        ("use_vllm=true", "Use sampler=vllm."),
        ("logging_dir=x", "TRL's logging_dir, which 1.16.0 lacks, has no equal here: every step"),
        (
            "warmup_ratio=0.1",
            "TRL's warmup_ratio, which 1.16.0 lacks, is told here with `warmup_steps`. "
            "Use pgtk explain warmup_ratio.",
        ),
    ],
)
def test_a_typed_key_of_another_trainer_is_answered_from_the_tables(capsys, override, answer):
    assert answer in refusal(capsys, override)


@pytest.mark.parametrize("trainer", sorted(tables()))
def test_the_table_of_the_docs_names_each_key_in_one_row(trainer):
    """Sections that have the same keys, and keys that are told together, share a row; `NAME.*` are
    all keys of a section."""
    rows = [name.removeprefix("actor_rollout_ref.") for name in tables()[trainer].rows]
    found = []
    for cell, *_ in keys_of_trainer(trainer)[1:]:
        for part in cell.split("; "):
            names, _, leaves = part.partition(": ")
            first, *others = re.findall(r"`([^`]+)`", names)
            if first.endswith(".*"):
                found += [name for name in rows if name.startswith(first[:-1])]
            elif leaves:
                of = [first, *others]
                found += [f"{section}.{leaf}" for section in of for leaf in leaves.split(", ")]
            else:
                section = first.rpartition(".")[0]
                found += [first, *(name if "." in name else f"{section}.{name}" for name in others)]
    assert sorted(name.strip(".") for name in found) == sorted(rows)

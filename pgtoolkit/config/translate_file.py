"""Reads what people have of TRL and verl: YAML and JSON, scripts that start them, and Python."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pgtoolkit.config.elsewhere import Table, flat, tables
from pgtoolkit.config.translate_shell import Script
from pgtoolkit.errors import ConfigError, as_storage_error
from pgtoolkit.system.report import refusal
from pgtoolkit.system.yaml_text import plain_yaml

_LARGEST = 1 << 20
"""Most bytes of a file."""

_OTHERS = {
    "distributed_type": "accelerate's own configuration, which says how many processes train",
    "aggregation": "pgtoolkit's own: pgtk resume RUN continues its run",
    "zero_optimization": "DeepSpeed's own configuration",
    "trainer": "of another trainer of verl",
}
"""Key of a file -> what the file is."""


_CALLS = (
    ("GRPOTrainer", "", ("model", "reward_funcs", "args", "train_dataset")),
    ("GRPOConfig", "", ("output_dir",)),
    ("LoraConfig", "peft_config.", ()),
)
"""Call in a program, what begins the names of its arguments in the table, and those without one."""


class Unread(str):
    """The text of a value that is made when a program runs."""


@dataclass
class TheirConfig:
    """What a file sets. values: by full dotted name. processes: how many train, where the file says
    so. assumed: sentences on what was assumed in reading it."""

    table: Table
    values: dict[str, Any]
    processes: int | None = None
    assumed: list[str] = field(default_factory=list)


def read(path: Path) -> TheirConfig:
    """Return what a file of TRL or verl sets; raises ConfigError that says what another file is."""
    if not path.is_file():
        raise _refused(path, "a file", "There is none at this path.")
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise as_storage_error(error) from error
    try:
        if len(data) > _LARGEST:
            raise ValueError(f"more than {_LARGEST} bytes")
        content = data.decode()
        if path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
            content = "\n".join("".join(cell["source"]) for cell in cells)
            content = re.sub(r"^\s*[%!].*", "", content, flags=re.M)
        if path.suffix in (".py", ".ipynb"):
            return _python(content, path)
        if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or content.startswith("#!"):
            return _shell(content, path)
        return _keys(plain_yaml(data), path)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        raise _refused(path, "text that can be read", f"It is no such text: {error}.") from None


def _refused(path: Path, needs: str, reason: str) -> ConfigError:
    use = "a configuration of TRL's GRPOTrainer or of verl's PPO trainer: YAML, JSON, .sh or .py"
    setting = f"pgtk translate {path}"
    return ConfigError(refusal(setting=setting, needs=needs, got=path, reason=reason, use=use))


def _not_theirs(path: Path, what: str) -> ConfigError:
    return _refused(path, "a configuration of TRL's GRPO or of verl's PPO", f"It is {what}.")


def _keys(values: Any, path: Path) -> TheirConfig:
    """Return the configuration in the keys of a YAML or JSON file."""
    if not isinstance(values, dict) or not values:
        raise _not_theirs(path, "a list" if values else "empty")
    logged = {name: value for name, value in values.items() if "wandb" not in name}
    if all(isinstance(value, dict) and "value" in value for value in logged.values()):
        values = {name: value["value"] for name, value in logged.items()}  # Weights & Biases' form
    if any(name.partition(".")[0] == "actor_rollout_ref" for name in values):
        return _config("verl", values)
    for name, what in _OTHERS.items():
        if name in values:
            raise _not_theirs(path, what)
    table = tables()["TRL"].content
    for name, signs in table["others"].items():
        if {*signs} & {*values}:
            raise _not_theirs(path, f"a configuration of {name}")
    if not {*table["signs"]} & {*values}:
        raise _not_theirs(path, "one without any key of GRPO, such as num_generations")
    return _config("TRL", values)


def _config(trainer: str, values: dict[str, Any], processes: object = None) -> TheirConfig:
    table = tables()[trainer]
    dictionaries = [row.name for row in table.rows.values() if row.keys]
    values = {
        name: value
        for name, value in flat(values, dictionaries)
        if not (name.endswith("_target_") and str(value).startswith("verl."))  # their own classes
    }
    sizes = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation")
    numbers = [values[name] for name in sizes if isinstance(values.get(name), int)]
    if processes is None and len(numbers) == 3:  # as to_dict() has them
        processes = numbers[0] // (numbers[1] * numbers[2])
    return TheirConfig(table, values, processes if isinstance(processes, int) else None)


def _shell(content: str, path: Path) -> TheirConfig:
    """Return the configuration of the first command in a script that starts verl or TRL."""
    found = []
    what = "a script that starts neither"
    signs = {f"--{name}" for name in tables()["TRL"].content["signs"]}
    for words in Script(content).commands:
        modules = [after for word, after in pairwise(words) if word == "-m"]
        theirs = [name for name in modules if name in tables()["verl"].content["modules"]]
        is_script = any(re.search(r"(grpo|gspo)\w*\.py$", word) for word in words)
        if theirs:
            found.append(_overrides(words[words.index(theirs[0]) :]))
        elif is_script or signs & {*words} or words[:2] == ["trl", "grpo"]:
            found.append(_options(words, path))
        elif modules or words[:1] == ["trl"]:
            what = f"a script that starts {' '.join(modules[:1] or words[:2])}"
    if not found:
        raise _not_theirs(path, what)
    if len(found) > 1:
        found[0].assumed.append(f"the first of its {len(found)} commands is meant")
    return found[0]


def _value(content: str) -> Any:
    """Return a value of a command line."""
    if "$" in content or "`" in content:
        return Unread(content)
    try:
        return plain_yaml(f"value: {content}".encode())["value"]
    except (ValueError, KeyError):
        return content


def _overrides(words: list[str]) -> TheirConfig:
    """Return the configuration of Hydra's overrides."""
    matches = [re.fullmatch(r"[+-]*([\w.@/-]+)=(.*)", word, re.S) for word in words]
    pairs = [(match[1].replace("-", "_"), _value(match[2])) for match in matches if match]
    return _config("verl", dict(pairs))


def _options(words: list[str], path: Path) -> TheirConfig:
    """Return the configuration of a command line with `--key value`, and of its file."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        match = re.fullmatch(r"--?([A-Za-z]\w*)(?:=(.*))?", word, re.S)
        if match is not None:
            name = match[1]
            given[name] = [match[2]] if match[2] else []
        elif name and not word.endswith(".py"):
            given[name].append(word.strip(","))
    values = {
        name: _value(f"[{','.join(items)}]" if len(items) > 1 else items[0]) if items else True
        for name, items in given.items()
    }
    values |= {name[3:]: False for name in values if name.startswith("no_")}
    values = {name: value for name, value in values.items() if not name.startswith("no_")}
    files = {}
    for name in ("config", "config_file"):
        file = path.parent / str(values.get(name, ""))
        read_file = plain_yaml(file.read_bytes()) if file.is_file() else {}
        files[name] = read_file if isinstance(read_file, dict) else {}
        if files[name]:
            del values[name]
    processes = values.pop("num_processes", values.pop("nproc_per_node", None))
    processes = processes or files["config_file"].get("num_processes")
    return _config("TRL", files["config"] | values, processes)


def _python(content: str, path: Path) -> TheirConfig:
    """Return the configuration of the calls of GRPOConfig and GRPOTrainer in a program, or of the
    command in its docstring where it takes its arguments from there."""
    tree = ast.parse(content)
    names: dict[str, ast.expr | None] = {}
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names[name] = None if name in names else node.value  # None: assigned twice
        elif isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
    if "GRPOConfig" not in calls:
        if "TrlParser" in content and "GRPOConfig" in content:
            return _shell((ast.get_docstring(tree) or "").replace("`", ""), path)
        others = [name for name in calls if re.fullmatch(r"[A-Z]\w*(Config|Trainer)", name)]
        raise _not_theirs(path, f"a program with {', '.join(sorted(others)) or 'no GRPOConfig'}")

    def value(node: ast.expr) -> Any:
        named = names.get(node.id) if isinstance(node, ast.Name) else None
        if named is not None:
            return value(named)
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [ast.literal_eval(key) for key in node.keys if key]
            return dict(zip(keys, map(value, node.values), strict=True))
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Unread(ast.unparse(node))

    values: dict[str, Any] = {"peft_config": True} if "LoraConfig" in calls else {}
    assumed = []
    for call, prefix, positional in _CALLS:
        for node in calls.get(call, [])[:1]:
            given = [*zip(positional, node.args, strict=False)]
            given += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
            given = [(name, item) for name, item in given if name not in ("args", "peft_config")]
            values |= {f"{prefix}{name}": value(item) for name, item in given if name != "**"}
            assumed += [f"{call} has no other arguments" for name, _ in given if name == "**"]
        if len(calls.get(call, [])) > 1:
            assumed.append(f"the first {call} of {len(calls[call])} is meant")
    config = _config("TRL", values)
    config.assumed += assumed
    return config

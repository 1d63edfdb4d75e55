"""Reads what people have of TRL and verl: YAML and JSON, scripts that start them, and Python."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config.trainer_keys import Table, flat, rloo_table, tables
from pgtoolkit.config.translate_code import Unread
from pgtoolkit.config.translate_launcher import LaunchFiles
from pgtoolkit.config.translate_program import PUNISHMENT, Program
from pgtoolkit.config.translate_shell import Command, Script
from pgtoolkit.config.translate_trainer import adapters, of_unsloth, set_on_trainer
from pgtoolkit.errors import ConfigError, as_storage_error
from pgtoolkit.system.model_folder import ADAPTER_SETTINGS
from pgtoolkit.system.report import near_path, refusal, text
from pgtoolkit.system.yaml_text import plain_yaml

_UNKNOWN = re.compile(r"\$(?!\{?[@*\d])|`").match
"""Matches a word that stands for settings, but for what is typed behind a script's name."""

_UNKNOWN_NAME = re.compile(r"(?:--|[+~]{0,2})[^=\s]*[$`][^=]*=|--[^=\s]*[$`]").match
"""Matches a setting whose name is not known."""

_BACKQUOTED = re.compile(r"`(.*?)`", re.S)
"""What a command prints, in the older way to write it; a page has no backquotes."""

_EXPANSION = re.compile(r"\$(?:[\w@*]+|\{.*\}|\(.*\))|`.*`", re.S).fullmatch

_SEVERAL = re.compile(
    r"\$\{?(?:[@*]|\w*(?:ARGS|ARGUMENTS|EXTRA|FLAGS|OPTIONS|OPTS)(?!\w))", re.I
).match
"""Matches a word that stands for several words, none of which is a value of the option before."""

_SETTING = re.compile(r"--[\w-]+(?:=|$)|[+~]{0,2}\w+(?:\.\w+)+=").match
"""Matches a setting that stands where a command begins."""

_VERSION = re.compile(
    r"(?i)(?<![\w.-])trl(?:\[[\w, -]*\])?(?:\.git)?[\"' ]*(?:==|~=|@|:| )[\"' ]*v?"
    r"((?:0\.\d\d|[1-9]\.\d+)(?:\.\d+)?)(?![\d.])"
).search
"""Matches TRL with its version."""

_PUNISHMENT = re.compile(
    rf"{PUNISHMENT}(?:\(max_completion_len=(\d+), soft_punish_cache=(\d+)\))?"
).fullmatch

_PYTHON = re.compile(r"(?:\S*/)?(?:python[\d.]*|accelerate|torchrun|deepspeed|uv)").fullmatch
"""Matches a word that starts a program in Python."""

_LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch")
"""Modules that start the program behind them."""

OF_RLOO = (
    "it is of `trl grpo`. `trl rloo` has all of its keys, too: with the comment # trl rloo in it, "
    "it is read as one of that"
)
"""A sentence on a YAML that may be RLOO's, too."""

_SCRIPTS = ("trl/scripts/grpo.py", "trl/scripts/rloo.py")
"""TRL's own programs."""

_IGNORES_KEYS = re.compile(
    r"fail_with_unknown_args\s*=\s*False|(?:return_remaining_strings|allow_extra_keys)\s*=\s*True"
).search
"""Matches what has a program ignore the keys of a YAML that it does not know, as TRL's own do."""

_IS_RLOO = re.compile(r"(?:rloo\w*\.py|^trl rloo|-m trl\.scripts\.rloo)(?: |$)").search
"""Matches a command that starts TRL's RLOO, or a program with rloo in its name."""

_NAMES_TRAINER = re.compile(r"(?i)\btrl[ ./](?:scripts[./])?(grpo|rloo)\b").search
"""Matches TRL's command or its script of GRPO or RLOO, as a comment names it."""

_NOT_READ = (ValueError, SyntaxError, KeyError, TypeError, RecursionError)


@dataclass
class TheirConfig:
    """Holds the values that a file sets, by full dotted name.

    assumed: sentences on how it was read. lost: settings that a script hands to no command.
    unread: sentences on settings that are not read. files: those that it names and that were read.
    version: of TRL; "" where no file names it. named_by: the file that does.
    gpus: what CUDA_VISIBLE_DEVICES is for a command where it names several; else "".
    """

    table: Table
    values: dict[str, object]
    assumed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    version: str = ""
    named_by: str = ""
    gpus: str = ""


def read(path: Path) -> TheirConfig:
    """Return what a file of TRL or verl sets; raises ConfigError that says what another file is."""
    try:
        config = _read(path)
        if config.table.content["trainer"] == "TRL":
            _set_version(config, path)
            files = LaunchFiles(
                config.table, config.values, lambda name: _found(name, path.parent), _mapping
            )
            config.assumed += files.read
        if "launch.rloo" in config.values and config.version and is_older(config, "0.22.0"):
            raise ValueError(f"of the RLOO of TRL {config.version}, which is another trainer")
        if is_older(config, "0.28.0"):  # of the time of transformers 4, which has warmup_ratio
            config.values.pop("launch.yaml", None)
        return config
    except OSError as error:
        raise as_storage_error(error) from error
    except _NOT_READ as error:
        needs = "a configuration of TRL's GRPO or RLOO or of verl's PPO"
        near = None if path.exists() else near_path(path)
        use = f"pgtk translate {near}" if near else f"{needs}: YAML, JSON, .sh, .py or .ipynb"
        reason = f"It is none: {error}."
        raise ConfigError(refusal(f"pgtk translate {path}", needs, path, reason, use)) from None


def _read(path: Path) -> TheirConfig:
    """Return what a file sets; raises ValueError and the like for another one."""
    content = _content(path)
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(content)["cells"] if cell["cell_type"] == "code"]
        content = "\n".join("".join(cell["source"]) for cell in cells)
        content = re.sub(r"^\s*[%!].*", "", content, flags=re.M)
    if path.suffix in (".py", ".ipynb"):
        return _program(content, path.stem if path.suffix == ".py" else "")
    if path.suffix == ".sh" or content.startswith("#!"):
        return _script(content, path.parent)
    config = _keys(plain_yaml(content.encode()), f"{content}\n{path.stem}")
    is_given = "warmup_ratio" in config.values and path.suffix != ".json"  # which is a dump
    return _as_yaml(config) if is_given else config


def _as_yaml(config: TheirConfig) -> TheirConfig:
    """Note that TRL's scripts read a configuration from a YAML, and return it.

    There they ignore a key that they do not know. In a program of one's own TRL's parser refuses
    it, so that such a job is of transformers 4.
    """
    config.values["launch.yaml"] = True
    return config


def _set_version(config: TheirConfig, path: Path) -> None:
    """Set the version of TRL, from a pip line, a requirement or a comment.

    It stands in the file itself, in a file that it names, or in a list of its folder's packages.
    """
    lists = [*sorted(path.parent.glob("requirements*.txt")), path.parent / "pyproject.toml"]
    for file in [path, *config.files, *(file for file in lists if file.is_file())]:
        named = _VERSION(_content(file))
        if named:
            config.version = named[1]
            config.named_by = "It" if file == path else str(file)
            return


def is_same(config: TheirConfig) -> bool:
    """Return whether a file names no other version than the one that the table has."""
    named = config.version
    return not named or _numbers(named) == _numbers(config.table.content["version"])


def is_older(config: TheirConfig, version: str) -> bool:
    """Return whether a file is of a version of TRL before another one.

    The file says its version, or has a key that later versions lack.
    """
    content = config.table.content
    if config.version:
        return _numbers(config.version) < _numbers(version)
    gone = [_numbers(content["until"][name]) for name in dating_keys(config)]
    return bool(gone) and min(gone) <= _numbers(version)


def dating_keys(config: TheirConfig) -> list[str]:
    """Return the keys of a file that TRL has no longer since a version."""
    return [name for name in config.table.content.get("until", {}) if name in config.values]


def _numbers(version: str) -> list[int]:
    return [*map(int, f"{version}.0".split("."))][:3]


def _content(path: Path) -> str:
    """Return the text of a file; raises ValueError where there is none, or a large one."""
    if not path.is_file():
        raise ValueError("there is no file at this path")
    if path.stat().st_size > 1 << 20:
        raise ValueError("larger than 1 MiB")
    return path.read_text(encoding="utf-8")


def _config(trainer: str, values: dict[str, object]) -> TheirConfig:
    """Return a configuration. values: by their keys, which may be nested or dotted."""
    table = rloo_table() if values.get("launch.rloo") else tables()[trainer]
    mixed = values.get("datasets")
    if isinstance(mixed, list) and len(mixed) == 1:
        values = values | {"train_dataset": {"split": "train"} | mixed[0]}
        del values["datasets"]
    dotted = dict(flat(values, [row.name for row in table.rows.values() if row.keys]))
    if trainer == "TRL":
        _set_punishment_apart(dotted)
        for name in ("model", "model_name_or_path"):
            path = dotted.get(name)
            if type(path) is str and Path(path, ADAPTER_SETTINGS).is_file():  # a folder of adapters
                dotted["peft_config.folder"] = dotted.pop(name)
                others = [each for each in ("peft_config", "use_peft") if dotted.get(each) is True]
                dotted = _without_mixture(dotted, "folder" if others else "")
    classes = [key for key in dotted if key.endswith("_target_") and "verl." in str(dotted[key])]
    return TheirConfig(table, {key: dotted[key] for key in dotted if key not in classes})


def _without_mixture(values: dict[str, object], beside: str) -> dict[str, object]:
    """Return values without both kinds of adapters, where a model has some and a configuration of
    others stands beside. beside: how the model has them; "" where it has none."""
    if not beside:
        return values
    of_adapters = re.compile(r"peft_config|use_peft|lora_|use_rslora").match
    kept = {name: values[name] for name in values if not of_adapters(name)}
    return kept | {"peft_config.beside": beside}


def _set_punishment_apart(values: dict[str, object]) -> None:
    """Give TRL's punishment of long completions a section of its own: it is
    `rollout.overlong_buffer` here.

    By its name alone it is the one that `trl grpo` of earlier versions has.
    """
    functions = values.get("reward_funcs")
    if not isinstance(functions, list):
        return
    weights = values.get("reward_weights") or [1] * len(functions)
    for at, function in enumerate(functions):
        sizes = _PUNISHMENT(str(function))
        if sizes and isinstance(weights, list) and len(weights) == len(functions):
            values[f"{PUNISHMENT}.max_completion_len"] = int(sizes[1] or 1280)
            values[f"{PUNISHMENT}.soft_punish_cache"] = int(sizes[2] or 256)
            values[f"{PUNISHMENT}.weight"] = weights[at]
            values["reward_funcs"] = functions[:at] + functions[at + 1 :]
            if "reward_weights" in values:
                values["reward_weights"] = weights[:at] + weights[at + 1 :]
            break
    for name in ("reward_funcs", "reward_weights"):
        if values.get(name) == []:
            del values[name]


def _keys(values: object, content: str) -> TheirConfig:
    """Return the configuration in the keys of a YAML or JSON file. content: its text and name."""
    if not isinstance(values, dict) or not values:
        raise ValueError("a list" if values else "empty")
    logged = {name: value for name, value in values.items() if "wandb" not in name}
    if all(isinstance(value, dict) and "value" in value for value in logged.values()):
        values = {name: value["value"] for name, value in logged.items()}  # Weights & Biases' form
    if any(name.partition(".")[0] == "actor_rollout_ref" for name in values):
        return _config("verl", values)
    for trainer, names in tables()["TRL"].content["others"].items():
        if {*names} & {*values}:
            raise ValueError(trainer)
    of_trl = tables()["TRL"].content
    named = _NAMES_TRAINER(content)
    by_name = "rloo" in content.rpartition("\n")[2].lower()
    assumed: list[str] = []
    of_rloo: dict[str, object] = {"launch.rloo": True}
    if {*of_trl["rloo"]["signs"]} & {*values}:
        values = of_rloo | values
    elif not {*of_trl["grpo"]} & {*values}:
        if named[1].lower() == "rloo" if named else by_name:
            values = of_rloo | values
            assumed.append(f"it is of RLOO, as {'it' if named else 'its name'} says")
        elif not named:
            assumed.append(OF_RLOO)
    config = _config("TRL", values)
    config.values = _of_launcher(config.values)
    if "launch.rloo" in values or {*of_trl["signs"]} & {*values}:
        config.assumed += assumed
        return config
    is_loss = text(values.get("loss_type", "grpo")) in config.table.rows["loss_type"].named
    if not (is_loss and {*of_trl["shared"]} & {*values}):
        raise ValueError("it has no key of GRPO, such as num_generations")
    config.assumed.append("it is of GRPO: it has no key that GRPO alone has")
    return config


def _script(content: str, folder: Path | None = None) -> TheirConfig:
    """Return the configuration of the first command in a script that starts verl or TRL.

    folder: the one that the script lies in; None: it lies in none.
    """
    signs = "|".join(tables()["TRL"].content["signs"])
    of_trl = r"(?:^trl |-m trl\.scripts\.)(?:grpo|rloo)(?: |$)"
    is_trl = re.compile(rf"(?:g[rs]po|rloo)\w*\.py |{of_trl}|^(?!trl ).*--(?:{signs})\b").search
    configs = []
    others = []
    lost: list[str] = []
    for command in _commands(content, folder):
        words = ["-m" if word == "--module" else word for word in command.words]
        program = _started(words) if folder is not None else None
        problem = _problem(program, folder) if program else ""
        started = _from_module(words)
        if started[0] in tables()["verl"].content["modules"]:
            configs.append(_config("verl", {"launch.module": started[0]} | _given(started)))
        elif (program and not problem) or is_trl(" ".join(words)):
            configs.append(_launched(words, folder))
        else:
            if _SETTING(words[0]):
                lost += words
            elif program:
                others.append(f"{program}, {problem}")
            elif started is not words or words[0] == "trl":
                others.append(" ".join(started[: 1 + (started is words)]))
            elif {"bash", "sh"} & {*words}:
                shell = next(at for at, word in enumerate(words) if word in ("bash", "sh"))
                others.append(
                    f"{' '.join(words[: shell + 2])}, whose commands are not read: translate a "
                    "file, run.sh, that has them itself"
                )
            continue
        pairs = itertools.pairwise(started)
        unknown = [
            _BACKQUOTED.sub(r"$(\1)", word)
            for before, word in pairs
            if _UNKNOWN_NAME(word)
            or (_UNKNOWN(word) and (before[:2] != "--" or "=" in before or _SEVERAL(word)))
        ]
        configs[-1].assumed += dict.fromkeys(f"{word} sets nothing" for word in unknown)
        configs[-1].assumed += command.assumed
        configs[-1].gpus = command.gpus
    if not configs:
        raise ValueError(f"a script that starts {[*others, 'neither of them with its keys'][0]}")
    if len(configs) > 1:
        configs[0].assumed.append(f"the first of its {len(configs)} commands is meant")
    configs[0].lost += lost
    return configs[0]


def _commands(content: str, folder: Path | None) -> list[Command]:
    """Return the commands of a script. folder: None for a docstring: there they are the lines that
    can be read as bash."""
    if folder is not None:
        return Script(content, folder).commands
    commands = []
    for line in re.split(r"(?<!\\)\n", content):
        with contextlib.suppress(ValueError):
            commands += Script(line).commands
    return commands


def _from_module(words: list[str]) -> list[str]:
    """Return the words of a command from the module that it starts on; all if it starts none."""
    rest = words
    while "-m" in rest[:-1] and not any(word.endswith(".py") for word in rest[: rest.index("-m")]):
        rest = rest[rest.index("-m") + 1 :]
        if rest[0] not in _LAUNCHERS:
            break
    return rest


def _launched(words: list[str], folder: Path | None) -> TheirConfig:
    """Return what a command sets, over what the file sets that its `--config` names.

    Options of the launcher, before the program, get the section `launch`. folder: the script's.
    """
    programs = [at for at, word in enumerate(words, 1) if word.endswith(".py")]
    module = words.index("-m") if "-m" in words else 0
    program = programs[0] if programs else module
    of_launcher = _given(words[:program])
    values = _given(words[program:])
    if isinstance(values.get("scale_rewards"), bool):  # TRL's parser keeps the word
        values["scale_rewards"] = str(values["scale_rewards"])
    started = words[program - 1] if programs else ""
    is_own = bool(started) and not started.endswith(_SCRIPTS) and words[0] != "trl"
    modules = [word for before, word in itertools.pairwise(words[:program]) if before == "-m"]
    is_read = is_own and folder is not None and {*modules} <= {*_LAUNCHERS}
    assumed: list[str] = []
    if is_read:
        assumed += _without_option(words[program:])
    files = _found(values.get("config"), folder)
    of_yaml: dict[str, object] = {}
    for file in files:
        del values["config"]
        of_yaml = _mapping(file)
    has_ratio = "warmup_ratio" in of_yaml.keys() - values.keys()
    is_trls = started.endswith(_SCRIPTS) or _from_module(words)[0].partition(".")[0] == "trl"
    ignores = is_trls or any(_IGNORES_KEYS(_content(file)) for file in _found(started, folder))
    values = of_yaml | values
    assumed += [f"{file} is the file that --config names" for file in files]
    is_found = is_read and _found(started, folder)
    if {*tables()["TRL"].content["rloo"]["signs"]} & {*values}:
        values = values | {"launch.rloo": True}
    elif not is_found and _IS_RLOO(" ".join(words)):
        values = values | {"launch.rloo": True}
        if is_own:
            assumed.append(f"{started} is of RLOO, as its name says")
    unread: list[str] = []
    if is_read:
        values = _with_started(started, folder, values, assumed, unread)
    else:
        values = _of_launcher(values)
    config = _config("TRL", values | {f"launch.{key}": of_launcher[key] for key in of_launcher})
    config.assumed += assumed
    config.unread += unread
    config.files = [*files, *(_found(started, folder) if is_read else [])]
    return _as_yaml(config) if has_ratio and ignores else config


def _found(name: object, folder: Path | None) -> list[Path]:
    """Return the file that a command names, in a list; none where there is no such file. folder:
    the one of the script with the command."""
    places = [Path(name), *([folder / name] if folder else [])] if type(name) is str else []
    return [place for place in places if place.is_file()][:1]


def _started(words: list[str]) -> str | None:
    """Return the program in Python that a command starts."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return word if at == 0 or any(map(_PYTHON, words[:at])) else None
    return None


def _problem(program: str, folder: Path | None) -> str:
    """Return why a program that a command starts is none with TRL's GRPO; "" for one that is."""
    for file in _found(program, folder):
        try:
            _program(_content(file), file.stem, {})
        except _NOT_READ as error:
            return f"which is not read: it is {error}"
        return ""
    return "which is not read, since there is no such file here"


def _of_launcher(values: dict[str, object]) -> dict[str, object]:
    """Return values with the options of accelerate in a section of their own: `trl grpo` takes
    them beside its own, also in its YAML."""
    rows = tables()["TRL"].rows
    return {f"launch.{name}" if f"launch.{name}" in rows else name: values[name] for name in values}


def _without_option(words: list[str]) -> list[str]:
    """Return a sentence on the words behind a program that are no value of an option `--name`."""
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    short = [word for word in words if re.match(r"-[A-Za-z]", word)]
    unread = [word for word in [*words[:first], *short] if not _UNKNOWN(word)]
    return [f"{' '.join(unread)} behind the program sets nothing"] if unread else []


def _with_started(
    name: str,
    folder: Path | None,
    options: dict[str, object],
    assumed: list[str],
    unread: list[str],
) -> dict[str, object]:
    """Return what the options of a command and the program that it starts set, and say what was
    read of that. folder: the one of the script with the command."""
    for file in _found(name, folder):
        try:
            config = _program(_content(file), file.stem, options)
        except _NOT_READ as error:
            assumed.append(f"{file}, which the command starts, is not read: it is {error}")
            return options
        assumed.append(
            f"{file}, which the command starts, is read with its options, but for what a function "
            "or a branch sets"
        )
        assumed += config.assumed
        unread += config.unread
        return config.values
    assumed.append(
        f"{name}, which the command starts, is not read, since there is no such file here: its "
        "data and reward functions are not known, nor what it sets beside its options"
    )
    return options


def _mapping(path: Path) -> dict[str, object]:
    """Return what a YAML sets that a command names; raises ValueError with its path."""
    try:
        values = plain_yaml(_content(path).encode())
        if not isinstance(values, dict):
            raise ValueError("a list")
    except ValueError as error:
        raise ValueError(f"{path}, which it names: {error}") from error
    return values


def _given(words: list[str]) -> dict[str, object]:
    """Return what `KEY=VALUE`, `--key=value`, `--key value...` and `--flag` set in a command."""
    lists = tables()["TRL"].content["lists"]
    words_of: dict[str, list[str]] = {}
    name = ""
    for word in words:
        key, equals, value = word.lstrip("+-").partition("=")
        if _UNKNOWN_NAME(word):
            name = ""
        elif equals or word.startswith("--"):
            name = "" if equals else key
            words_of[key] = [value] if equals else []
        elif word == "-m" or _SEVERAL(word):
            name = ""  # a module or further options follow, and no further value
        elif name and words_of[name] and name not in lists and _EXPANSION(word):
            name = ""
        elif name and not word.endswith(".py"):
            words_of[name].append(word.strip(","))
    values: dict[str, object] = {}
    for name, items in words_of.items():
        joined = f"[{','.join(items)}]" if len(items) > 1 else "".join(items)
        flag = not name.startswith("no_")
        value = value_of(joined) if items else flag
        is_one = name in lists and len(items) == 1 and not isinstance(value, Unread | list)
        values[name.removeprefix("no_").replace("-", "_")] = [value] if is_one else value
    return values


def value_of(word: str) -> object:
    """Return the value that a word of a command line stands for."""
    if "$" in word or "`" in word:
        return Unread(word)
    try:
        return plain_yaml(f"value: {word}".encode())["value"]
    except (ValueError, KeyError):
        return word


def _program(content: str, module: str, options: dict[str, object] | None = None) -> TheirConfig:
    """Return the configuration of the calls of GRPOConfig and GRPOTrainer in a program.

    options: those of the command that starts it; None: no command is known, and a program that
        parses options is read with the command in its docstring.
    """
    is_rloo = _is_rloo_program(content)
    if is_rloo:  # whose classes take the same arguments
        content = re.sub(r"\bRLOO(?=Config\b|Trainer\b)", "GRPO", content)
    table = rloo_table() if is_rloo else tables()["TRL"]
    program = Program(content, module)
    program.options = options or {}
    values: dict[str, object] = {}
    parses = "TrlParser" in content or "HfArgumentParser" in content
    if parses and "GRPOConfig" not in program.calls and "GRPOConfig" in content:
        if options is None and not program.docstring:
            raise ValueError(
                "its options come from a command or a YAML: translate a script, run.sh, with the "
                "command that starts it, and it is read with these options"
            )
        if options is None:
            command = _script(program.docstring.replace("`", ""))
            program.options = command.values
            program.assumed += command.assumed
        program.defaults = {name: row.default for name, row in table.rows.items()}
        values = {**program.options}
    elif not {"GRPOConfig", "GRPOTrainer"} & {*program.calls}:
        others = [name for name in program.calls if re.fullmatch(r"[A-Z]\w*(Config|Trainer)", name)]
        raise ValueError(f"a program with {', '.join(sorted(others)) or 'no GRPOConfig'}")
    content_of_trl = tables()["TRL"].content
    of_trainer = program.given("GRPOTrainer", content_of_trl["calls"]["GRPOTrainer"])
    of_config = program.config(of_trainer.get("args"), content_of_trl["taken"])
    made, of_adapters = adapters(program, of_trainer, parses=bool(program.defaults))
    values |= of_unsloth(program) | made
    for section, arguments in (("", of_trainer), ("", of_config), ("peft_config.", of_adapters)):
        for name, node in arguments.items():
            if name == "model":
                values |= {} if section else program.model(node)
            elif name == "processing_class":
                values |= program.tokenizer(node)
            elif name in ("train_dataset", "eval_dataset"):
                values[name] = program.rows(node)
            elif name == "reward_funcs":
                values[name] = program.rewards(node)
            elif name == "vllm_sampling_params":
                values |= program.sampling(node)
            elif name == "optimizers":
                values[name] = program.optimizer(node)
            elif name not in ("args", "peft_config"):
                values[f"{section}{name}"] = program.value(node)
    frozen = program.frozen()
    if frozen:
        values["model.requires_grad_"] = Unread("; ".join(frozen))
    beside = ""
    if values.get("peft_config") is True and "peft_config" in of_trainer:
        beside = program.adapters_of_model(of_trainer, "peft_config.model_id" in values)
    for name, node in program.loaded_adapters().items():
        values.pop("model", None)
        values.setdefault(f"peft_config.{name}", program.value(node))
    values = _without_mixture(values, beside) | program.set_later()
    set_on_trainer(program, values, is_rloo)
    unplaced = [] if parses else [name for name in program.options if name not in program.placed]
    if unplaced:
        words = ", ".join(_as_option(name, program.options[name]) for name in unplaced)
        program.assumed.append(f"{words} sets nothing that is read of the program")
    if values.get("processing_class") == values.get("model"):
        values.pop("processing_class", None)
    made = values.get("train_dataset")
    if isinstance(made, Unread) or (isinstance(made, dict) and made.get("changed")):
        values.pop("dataset_name", None)  # the rows are made of these
    if is_rloo:
        values["launch.rloo"] = True
        for lines in (program.assumed, program.unread):
            lines[:] = [re.sub(r"\bGRPO(?=Config\b|Trainer\b)", "RLOO", line) for line in lines]
    config = _config("TRL", values)
    config.assumed += dict.fromkeys(program.assumed)
    config.unread += dict.fromkeys(program.unread)
    return config


def _is_rloo_program(content: str) -> bool:
    """Return whether a program is of TRL's RLOO: names its classes, and calls none of GRPO's."""
    if not re.search(r"\bRLOO(?:Config|Trainer)\b", content):
        return False
    calls_rloo = re.search(r"\bRLOO(?:Config|Trainer)\(", content)
    of_grpo = r"\bGRPO(?:Config|Trainer)\(" if calls_rloo else r"\bGRPO(?:Config|Trainer)\b"
    return not re.search(of_grpo, content)


def _as_option(name: str, value: object) -> str:
    """Return an option as a command has it."""
    return f"--no_{name}" if value is False else f"--{name}={text(value)}"

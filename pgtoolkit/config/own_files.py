"""Checks files of the user's before Hydra puts them together: the options that their lists
`defaults` name, and their keys with the values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pgtoolkit.config import hydra_keys
from pgtoolkit.config.composable import changeable
from pgtoolkit.config.files import OPTIONAL, config_directory, misplaced, options, own_folder
from pgtoolkit.config.keys import (
    KEYS,
    OPTION_KEYS,
    default,
    fits,
    is_own_code,
    key_named,
    values_in_words,
)
from pgtoolkit.config.launchers import LAUNCHERS, SEARCH
from pgtoolkit.config.meant_keys import option_meant, overrides_meant
from pgtoolkit.config.meant_values import value_meant, values_meant
from pgtoolkit.config.own_code import parameter_key
from pgtoolkit.config.schema import OPTIONS, SCHEMAS, Config
from pgtoolkit.system.declared import Key
from pgtoolkit.system.report import is_number, nearest, refusal, shortest_path, text

HYDRA_OPTIONS = {"hydra/launcher": LAUNCHERS, "hydra/sweeper": ("basic", SEARCH)}
"""Group of Hydra's -> its options that pgtk knows, the default first."""


@dataclass
class Reading:
    """The files of the user's that one composition reads.

    folders: in which files are looked for, the first first.
    config: the main configuration, to tell what is similar.
    problems: what is wrong in the files, each once. What is refused is left out of a file, so that
        all problems are found at once.
    chosen: group -> the name of its option, as nested dictionaries by keys; None until it is known.
    own_options: the groups whose option is a file or code of the user's.
    hydra: a configuration with Hydra's own keys, as they are without these files; None until the
        launcher is known.
    """

    folders: list[Path]
    config: DictConfig
    problems: dict[str, None] = field(default_factory=dict)
    chosen: dict[str, dict[str, str]] | None = None
    own_options: set[str] = field(default_factory=set)
    hydra: DictConfig | None = None

    def key_of(self, name: str) -> Key | None:
        """Return the key of this name in the chosen options; None where there is none.

        Any name is a parameter of own code.
        """
        if name.partition(".")[0] in self.own_options:
            name = parameter_key(name, self.chosen)
        return key_named(name, self.chosen)


class RefusedFilesError(Exception):
    """Files of the user's that Hydra cannot put together. problems: what is wrong in them."""

    def __init__(self, problems: list[str]):
        super().__init__("; ".join(problems))
        self.problems = problems


def groups_of_options() -> dict[str, list[str]]:
    """Return group -> its options, those of Hydra's groups that pgtk knows included."""
    folder = own_folder()
    groups = options()
    for group, names in HYDRA_OPTIONS.items():
        files = [] if folder is None else sorted((folder / group).glob("[!_]*.yaml"))
        groups[group] = [*names, *(file.stem for file in files)]
    return groups


def unknown_hydra_option(group: str, value: object) -> str | None:
    """Refuse an option of Hydra's launchers or sweepers that does not exist. Returns None for one
    that exists."""
    names = groups_of_options().get(group, [text(value)])
    if value in names:
        return None
    return refusal(
        setting=f"{group}={text(value)}",
        needs=f"one of {', '.join(names)}",
        got=text(value),
        reason="pgtk knows how to stop and continue the jobs of these.",
        use=f"{group}={nearest(text(value), names) or names[0]}",
    )


class OwnFile:
    """The content of a file of the user's.

    file: its path. group: the group that it is an option of; empty for any other file.
    header: what its first comments say to Hydra.
    """

    def __init__(self, reading: Reading, file: Path, group: str, header: dict[str, str | None]):
        self._reading = reading
        self._file = shortest_path(file)
        self._stem = file.stem
        self._group = group
        self._groups = groups_of_options()
        self.package = header["package"]

    @property
    def _is_global(self) -> bool:
        """True if its keys are those of the whole configuration."""
        return not self._group or self.package == "_global_"

    def check(self, keys: DictConfig) -> None:
        """Refuse what is wrong in the file, and leave it out of its keys.

        Keys are looked at once the options are known.
        """
        self._check_package(keys)
        if keys.get("defaults") is not None:
            self._check_defaults(keys)
        elif self._group in OPTIONS and self._group not in SCHEMAS:
            self._check_name(keys)
        if self._reading.chosen is not None and not self._group.startswith("hydra"):
            for name in [str(name) for name in keys if name != "defaults"]:
                self._check_node(keys, name)

    def check_options(self, keys: DictConfig) -> None:
        """Refuse an experiment of ours whose keys the chosen options do not have."""
        chosen = self._reading.chosen
        for group in [] if chosen is None else [str(name) for name in keys if name in OPTIONS]:
            values = keys._get_node(group)
            assert isinstance(values, DictConfig)
            for leaf in [str(leaf) for leaf in values]:
                if self._reading.key_of(f"{group}.{leaf}") is not None:
                    continue
                del values[leaf]
                names = [
                    key.schema.partition("/")[2] for key in KEYS if key.name == f"{group}.{leaf}"
                ]
                problem = refusal(
                    setting=f"{self._group}={self._stem}",
                    needs=" or ".join(f"{group}={name}" for name in names),
                    got=f"{group}={self._name_of(group)}",
                    reason=f"It sets {group}.{leaf}, which other options do not have.",
                    use=f"{group}={names[0]}",
                )
                self._reading.problems[problem] = None

    def _name_of(self, group: str) -> str:
        """Return the chosen option of a group."""
        assert self._reading.chosen is not None
        return next(iter(self._reading.chosen[group].values()))

    def _check_package(self, keys: DictConfig) -> None:
        """Refuse a file whose keys would be set in another place than its folder says."""
        is_option = self._group in OPTIONS or self._group.startswith("hydra")
        if not self._group or is_option == (self.package != "_global_"):
            return
        if is_option:
            self._refuse(
                setting="# @package _global_",
                needs="to be left out",
                got="the whole configuration",
                reason=f"The file is an option of {self._group}, whose keys stand in it alone.",
                use=f"the folder experiment/ for a file on several groups, or the keys of "
                f"{self._group} without their group above them",
            )
            for name in [*keys]:
                del keys[name]
            keys["defaults"] = [next(iter(self._groups[self._group]))]
            self.package = None
            return
        self._refuse(
            setting="the first line",
            needs="to be `# @package _global_`",
            got="another",
            reason=f"Its keys would be set inside of a group {self._group}, which has none.",
            use="`# @package _global_` as the first line",
        )
        self.package = "_global_"

    def _refuse(self, setting: str, needs: str, got: object, reason: str, use: str) -> None:
        problem = refusal(f"{setting} in {self._file}", needs, got, reason, use)
        self._reading.problems[problem] = None

    def _check_defaults(self, keys: DictConfig) -> None:
        entries = keys._get_node("defaults")
        if not isinstance(entries, ListConfig):
            self._refuse(
                setting="defaults",
                needs="a list",
                got=text(OmegaConf.to_container(keys, resolve=False)["defaults"]),  # type: ignore[index,call-overload]
                reason="Each entry is a file or the option of a group.",
                use="defaults: [_self_]" if self._group else "defaults: [config, _self_]",
            )
            del keys["defaults"]
            return
        plain = OmegaConf.to_container(entries, resolve=False)
        assert isinstance(plain, list)
        kept = [entry for entry in plain if self._is_good_entry(entry)]
        if kept.count("_self_") > 1:
            reason = "The file's own keys have one place in the list."
            self._refuse("- _self_", "to stand once", "two of them", reason, "- _self_")
            last = len(kept) - 1 - kept[::-1].index("_self_")
            kept = [entry for n, entry in enumerate(kept) if entry != "_self_" or n == last]
        # Hydra wants what is overridden at the end.
        changes = [entry for entry in kept if _keywords_of(entry)[0] == "override"]
        keys["defaults"] = [*(entry for entry in kept if entry not in changes), *changes]

    def _is_good_entry(self, entry: object) -> bool:
        """Return whether Hydra can take an entry of the list `defaults`; refuse others."""
        if isinstance(entry, str):
            return self._is_good_file(entry)
        if not isinstance(entry, dict) or len(entry) != 1:
            self._refuse(
                setting=f"- {text(entry)}",
                needs="the form GROUP: OPTION, or the name of a file",
                got=text(entry),
                reason="Each entry chooses one option.",
                use="- override /loss: grpo",
            )
            return False
        (name, value) = next(iter(entry.items()))
        typed = f"- {name}: {_in_yaml(value)}"
        keywords, path = _keywords_of(entry)
        group = self._group_named(path.partition("@")[0])
        misspelled = {*name.split()[:-1]} - {"override", "optional"}
        if misspelled or "${" in text(value):
            use = f"- override /{self._choice(group, value)}" if group in self._groups else typed
            got = ", ".join(misspelled) or "an interpolation"
            reason = "A group, an option and `override` are written out."
            self._refuse(typed, "the form `override /GROUP: OPTION`", got, reason, use)
            return False
        use_word = "" if group not in self._all_groups() else "override "
        if keywords != "override" and "@" not in path and self._is_own_group(group):
            return True
        if group not in self._groups or path.startswith("@") or "@" in path:
            near = nearest(path.strip("/").partition("@")[0], self._all_groups(), 0.6)
            reason = "Groups do not move." if "@" in path else "The groups are folders in conf/."
            use = f"- override /{near or 'GROUP'}: {_in_yaml(value)}"
            if near is not None:
                use = f"- override /{self._choice(near, value)}"
            self._refuse(typed, "a group that there is", path, reason, use)
            return False
        is_included = group == self._group
        if keywords != "override" and group in self._all_groups():
            use = f"- override /{group}: {_in_yaml(value)}"
            reason = "The main configuration has chosen an option of it."
            if is_included:
                use = f"- {text(value[0] if isinstance(value, list) else value)}"
                reason = "The file is an option of this group itself."
            self._refuse(typed, "another form", typed, reason, use)
            return False
        if path.startswith("/") is False and self._group and group == path:
            use = f"- override /{group}: {_in_yaml(value)}"
            reason = f"Without a slash it is looked for inside of {self._group}/."
            self._refuse(typed, "a slash before the group", path, reason, use)
            return False
        return self._is_good_option(typed, group, value, use_word)

    def _is_good_option(self, typed: str, group: str, value: object, use_word: str) -> bool:
        if value is None and group in OPTIONAL:
            return True
        several = value if isinstance(value, list) and group in OPTIONAL else [value]
        names = self._groups[group]
        unknown = [
            option
            for option in several
            if not (isinstance(option, str) and (option in names or is_own_code(group, option)))
            and not self._exists(f"{group}/{option}")
        ]
        if not unknown:
            return True
        word = "null" if unknown[0] is None else text(unknown[0])
        reason, use = misplaced(group, word) or (
            self._where_options_are(group),
            f"- {use_word}/{self._choice(group, word)}",
        )
        self._refuse(typed, f"one of {', '.join(names)}", word, reason, use)
        return False

    def _where_options_are(self, group: str) -> str:
        if group in HYDRA_OPTIONS:
            return "pgtk knows how to stop and continue the jobs of these."
        folder = own_folder()
        more = (
            "and, with --config-dir=FOLDER, in yours"
            if folder is None
            else f"and in {folder}/{group}"
        )
        return f"The options of {group} are the files in conf/{group}, {more}."

    def _choice(self, group: str, value: object) -> str:
        """Return the entry of the option that is most likely meant."""
        if group in HYDRA_OPTIONS:
            return f"{group}: {nearest(text(value), self._groups[group]) or self._groups[group][0]}"
        meant = option_meant(self._reading.config, group, value, self._groups)
        meant_group, equals, option = (
            meant.removeprefix("pgtk -m ").partition(" ")[0].partition("=")
        )
        is_option = equals and option in self._groups.get(meant_group, [])
        if is_option:
            return f"{meant_group}: {option}"
        return f"{group}: {'null' if group in OPTIONAL else self._groups[group][0]}"

    def _all_groups(self) -> list[str]:
        """Return the groups of which the main configuration has an option."""
        return [*OPTIONS, *OPTIONAL, *HYDRA_OPTIONS]

    def _is_own_group(self, group: str) -> bool:
        """Return whether a group is a folder of the user's that conf/ does not have."""
        folders = [folder / group for folder in self._reading.folders]
        return group not in self._groups and any(folder.is_dir() for folder in folders)

    def _group_named(self, path: str) -> str:
        """Return the group that a path in the list stands for."""
        inside = f"{self._group}/{path}" if self._group and not path.startswith("/") else path
        return inside if inside in self._groups else path.strip("/")

    def _is_good_file(self, entry: str) -> bool:
        """Return whether an entry of the list names a file that exists, or own code; refuse
        others."""
        if entry == "_self_" or is_own_code(self._group, entry):
            return True
        path = self._path_of(entry)
        own_path = f"{self._group}/{self._stem}".lstrip("/")
        if path == own_path:
            reason = "The file would include itself."
            self._refuse(f"- {entry}", "another file", entry, reason, "- _self_")
            return False
        if self._exists(path):
            return True
        without_words = re.sub(r"^((override|optional)\s+)+", "", entry)
        folder, _, word = self._path_of(without_words).rpartition("/")
        files = {
            file.stem for place in self._reading.folders for file in (place / folder).glob("*.yaml")
        }
        names = sorted(files - {self._stem})
        near = without_words.removesuffix(word) + (nearest(word, names) or next(iter(names), ""))
        self._refuse(
            setting=f"- {entry}",
            needs="a file that there is",
            got=path,
            reason="An entry without a group is the name of a file.",
            use=f"- {near}",
        )
        return False

    def _path_of(self, entry: str) -> str:
        """Return the path of a file from the folders, as the file names it."""
        return entry[1:] if entry.startswith("/") else f"{self._group}/{entry}".lstrip("/")

    def _exists(self, path: str) -> bool:
        """Return whether one of the folders has a file of this name, without its ending."""
        return any(
            (folder / f"{path}.yaml").is_file() and ".." not in path
            for folder in self._reading.folders
        )

    def _check_name(self, keys: DictConfig) -> None:
        """Refuse an option of a group without the name of the option on which it is based."""
        name = keys.get("name")
        if name in OPTIONS[self._group]:
            return
        near = nearest(text(name), OPTIONS[self._group]) if name else None
        self._refuse(
            setting="name",
            needs=f"one of {', '.join(OPTIONS[self._group])}",
            got="none" if name is None else name,
            reason="It says which keys the file has, and `defaults` takes their values.",
            use=f"defaults: [{near or next(iter(OPTIONS[self._group]))}, _self_]",
        )
        for key in [*keys]:
            del keys[key]
        keys["defaults"] = [near or next(iter(OPTIONS[self._group]))]

    def _check_node(self, keys: DictConfig, name: str) -> None:
        """Check a key of the file, or the keys of a group in it."""
        node = keys._get_node(name)
        if not self._is_global:
            self._check_key(keys, name, f"{self._group}.{name}")
        elif nearest(name, ["defaults"], 0.9) is not None:
            use = "defaults: [config, _self_]"
            reason = "The list of files and options has this name."
            self._refuse(f"{name}:", "to be `defaults:`", name, reason, use)
            del keys[name]
        elif name in ("sweeper", "launcher", "sweep", "run", "job"):
            self._refuse(
                setting=f"{name}:",
                needs="to stand below `hydra:`",
                got="a key of its own",
                reason="It is one of Hydra's keys.",
                use=f"hydra: {{{name}: {_in_yaml(_plain(keys, name))}}}",
            )
            del keys[name]
        elif name == "hydra" and isinstance(node, DictConfig):
            self._check_hydra(node)
        elif name in OPTIONS and isinstance(node, DictConfig) and node._value() is not None:
            for leaf in [str(leaf) for leaf in node]:
                self._check_key(node, leaf, f"{name}.{leaf}")
        elif name in OPTIONS or name in OPTIONAL:
            value = _plain(keys, name)
            if isinstance(value, str) and value.startswith("${"):
                return
            del keys[name]
            if value is None:  # a group whose keys are all comments
                reason = "A group without keys is left out."
                self._refuse(f"{name}: null", "its keys below it", "none", reason, f"{name}: {{}}")
                return
            self._refuse(
                setting=f"{name}: {_in_yaml(value)}",
                needs="to stand in the list `defaults:`",
                got="a key",
                reason="A group's option is a file.",
                use=f"- override /{self._choice(name, value)}",
            )
        else:
            self._check_key(keys, name, name)

    def _check_key(self, keys: DictConfig, leaf: str, name: str) -> None:
        """Check the value of one key; leave it out of the file's keys where it is refused."""
        value = _plain(keys, leaf)
        if isinstance(value, str) and ("${" in value or value == "???"):
            return
        if "." in leaf and self._is_global:
            self._refuse(
                setting=f"{name}: {_in_yaml(value)}",
                needs="its group above it",
                got=name,
                reason="Files have a level for each part of a name.",
                use=self._line(name, value),
            )
            del keys[leaf]
            return
        if leaf == self._group and isinstance(value, dict):
            self._refuse(
                setting=f"{leaf}: {_in_yaml(value)}",
                needs="its keys without the group",
                got=leaf,
                reason=f"The file is an option of {leaf}, whose keys stand in it alone.",
                use=_in_yaml(value)[1:-1],
            )
            del keys[leaf]
            return
        key = self._reading.key_of(name)
        if key is not None and (
            key.free or name == f"{key.group}.name" == OPTION_KEYS.get(key.group)
        ):
            if not key.option or not self._is_global:
                return
            option = f"- override /{self._choice(key.group, value)}"
            reason = f"The other keys of {key.group} come with their option."
            self._refuse(f"{name}: {_in_yaml(value)}", "to be left alone", value, reason, option)
        elif key is None or name in OPTIONS:
            self._unknown(name, value)
        elif not _takes(key, value):
            self._wrong_value(key, value)
        else:
            return
        del keys[leaf]

    def _line(self, name: str, value: object) -> str:
        """Return the line of this file that sets a key."""
        group, _, leaf = name.rpartition(".")
        if not self._is_global or not group:
            return f"{leaf}: {_in_yaml(value)}"
        return f"{group}: {{{leaf}: {_in_yaml(value)}}}"

    def _wrong_value(self, key: Key, value: object) -> None:
        better = value_meant(key, value, default(self._reading.chosen, key.name))
        if better is None and not fits(key, None):
            better = key.example or "VALUE"
        use = self._line(key.name, better)
        several = values_meant(key, value)
        if several is not None and not self._group:
            use = f"hydra: {{sweeper: {{params: {{{key.name}: '{several}'}}}}}}"
        self._refuse(
            setting=f"{key.name}: {_in_yaml(value)}",
            needs=values_in_words(key),
            got=_in_yaml(value),
            reason=key.help or "Every key has a type.",
            use=use,
        )

    def _unknown(self, name: str, value: object) -> None:
        """Refuse a key that the chosen options do not have."""
        setting = f"{name}: {_in_yaml(value)}"
        with_key = [key for key in KEYS if key.name == name]
        if with_key:
            names = [key.schema.partition("/")[2] for key in with_key]
            group = with_key[0].group
            assert self._reading.chosen is not None
            self._refuse(
                setting=setting,
                needs=" or ".join(f"{group}={option}" for option in names),
                got=f"{group}={self._name_of(group)}",
                reason="Other options do not have the key.",
                use=f"- override /{group}: {names[0]}",
            )
            return
        near = nearest(name, OPTIONS, 0.6)
        if isinstance(value, dict) and self._is_global and near is not None:
            reason = f"There is no group {name}."
            self._refuse(setting, "a group that there is", name, reason, self._line(near, value))
            return
        meant = overrides_meant(self._reading.config, name, value, options())
        use = "another key: `pgtk --help` has the groups"
        first = (meant or "").partition(" ")[0]
        key, equals, typed = first.partition("=")
        if equals and (key in OPTIONS or key in OPTIONAL):
            use = f"- override /{key}: {typed}"
        elif equals:
            use = self._line(key, typed)
            if not self._is_global and key.rpartition(".")[0] != self._group:
                use = f"{key}={typed} on the command line"
        reason = f"There is no key {name}."
        self._refuse(setting, "a key that there is", name, reason, use)

    def _check_hydra(self, node: DictConfig) -> None:
        """Check Hydra's own keys; leave those out that Hydra does not take."""
        values = OmegaConf.to_container(node, resolve=False)
        assert isinstance(values, dict)
        for path, value in _flat(values):
            name = ".".join(("hydra", *path))
            problem = None
            if path[:2] == ("sweeper", "params"):
                problem = self._wrong_params(path, value)
            elif not path[0].startswith("searchpath") and self._reading.hydra is not None:
                problem = hydra_keys.wrong_in_file(self._reading.hydra, name, value)
            if problem is not None:
                _leave_out(node, path)
                self._reading.problems[f"{self._file}: {problem}"] = None

    def _wrong_params(self, path: tuple[str, ...], value: object) -> str | None:
        """Return what is wrong with the values of a sweep's keys; None if nothing is."""
        if len(path) == 2 and value not in (None, {}):
            return refusal(
                setting=f"hydra.sweeper.params: {_in_yaml(value)}",
                needs="keys with their values",
                got=_in_yaml(value),
                reason="Each key has its values in one text.",
                use="params: {seed: '0,1'}",
            )
        if len(path) > 3:
            key = ".".join(path[2:])
            return refusal(
                setting=f"hydra.sweeper.params.{key}: {_in_yaml(value)}",
                needs="its whole name",
                got=path[2],
                reason="Each key has its values in one text.",
                use=f"params: {{{key}: {_in_yaml(value)}}}",
            )
        return None


def _keywords_of(entry: object) -> tuple[str, str]:
    """Return ("override" or nothing, the path of the group) of an entry with a group."""
    if not isinstance(entry, dict):
        return "", ""
    words = str(next(iter(entry))).split()
    is_override = any(nearest(word, ["override"], 0.8) for word in words[:-1])
    return "override" if is_override else "", words[-1] if words else ""


def _leave_out(node: DictConfig, path: tuple[str, ...]) -> None:
    """Remove a value from nested dictionaries, and those that it leaves empty."""
    parents = [node]
    for part in path[:-1]:
        parents.append(parents[-1][part])
    for parent, part in zip(reversed(parents), reversed(path), strict=True):
        del parent[part]
        if len(parent) > 0:
            return


def _plain(keys: DictConfig, name: str) -> object:
    """Return a value in plain types, interpolations unresolved."""
    node = keys._get_node(name)
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False)  # type: ignore[arg-type]
    return None if node is None else node._value()  # type: ignore[union-attr]


def _in_yaml(value: object) -> str:
    """Return a value as it stands in a file, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_in_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_in_yaml(part)}' for name, part in value.items())}}}"
    written = repr(value) if isinstance(value, float) else text(value)
    return (
        f"'{written}'" if isinstance(value, str) and re.search(r"[,:#{}\[\]]", value) else written
    )


def _takes(key: Key, value: object) -> bool:
    """Return whether a key takes the value of a file; a number may stand in quotes."""
    schema = SCHEMAS[key.schema] if key.schema else Config
    node = OmegaConf.structured(changeable(schema))
    try:
        node[key.leaf] = value
    except (OmegaConfBaseException, OverflowError):
        return False
    taken = _plain(node, key.leaf)
    return fits(key, taken) if key.range and is_number(taken) else True


def _flat(values: dict, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
    """Return (path, value) of everything in nested dictionaries, empty ones included."""
    flat = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat += _flat(value, (*path, str(name)))
        else:
            flat.append(((*path, str(name)), value))
    return flat


def is_of_user(file: Path) -> bool:
    """Return whether a file is not one of ours."""
    return file.is_file() and not file.is_relative_to(config_directory())


def options_chosen(paths: list[str | None]) -> dict[str, dict[str, str]]:
    """Return group -> the name of its option among ours, by the files that Hydra has listed: of a
    file of the user's, the option on which it is based."""
    chosen: dict[str, dict[str, str]] = {}
    for path in paths:
        group, _, name = (path or "").rpartition("/")
        name = name.removeprefix("schema_")
        if group in OPTION_KEYS and name in OPTIONS[group]:
            chosen[group] = {OPTION_KEYS[group].rpartition(".")[2]: name}
    return chosen

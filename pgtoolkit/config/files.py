"""The places of `conf/`, `sweeps/` and docs/, and the names of the files in them; few files are
read, so that `--help` is quick."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from pgtoolkit.errors import ConfigError
from pgtoolkit.runs.records import command_of_sweep
from pgtoolkit.system.report import (
    near_path,
    nearest,
    refusal,
    shell_path,
    shortest_path,
    with_ending,
    without_ending,
)
from pgtoolkit.system.yaml_text import plain_yaml

OPTIONAL = ("experiment", "debug")
"""Groups whose options change other groups. None of their options is chosen by default, and several
may be."""


OWN_FOLDER = "PGTK_CONFIG_DIR"
"""Environment variable that names the folder with options of the user's own. The command's flag
`--config-dir` sets it for its process."""


def own_folder() -> Path | None:
    """Return the folder with options of the user's own, laid out as conf/ is; None if there is
    none."""
    named = os.environ.get(OWN_FOLDER)
    return Path(named).resolve() if named else None


def config_directory() -> Path:
    """Return `conf/`: inside the installed package, or next to it in a working copy."""
    return _shipped("conf")


def sweep_files() -> dict[str, Path]:
    """Return name -> file of pgtoolkit's sweeps, without those that others include (_NAME.yaml)."""
    return {file.stem: file for file in sorted(_shipped("sweeps").glob("[!_]*.yaml"))}


def sweep_file(name: str = "") -> Path:
    """Return the file of a sweep: by its name if it comes with pgtoolkit, by its path if it is the
    user's.

    Raises ConfigError if there is none.
    """
    path = Path(name)
    shipped = sweep_files()
    if name in shipped:
        return shipped[name]
    if path.suffix == ".yaml" and path.is_file():
        return path.resolve()
    command = command_of_sweep(path)
    if command is not None:
        raise ConfigError(
            refusal(
                setting=f"pgtk sweep {name}",
                needs="the name of a sweep, or a file ending in .yaml",
                got="the folder of a sweep that was started",
                reason="Its own command goes on with its unfinished jobs.",
                use=command,
            )
        )
    known = _sweeps_here() | {stem: stem for stem in shipped}
    near = known.get(nearest(without_ending(path).name, known, 0.6) or "")
    near = near or (near_path(with_ending(path, ".yaml")) if name else None)
    use = f"pgtk sweep {near or next(iter(shipped))}"
    if "=" in name:
        use = f"pgtk -m {name}"
    if path.is_file():
        use = f"mv {shell_path(path)} {shell_path(with_ending(path, '.yaml'))}"
    raise ConfigError(
        refusal(
            setting="pgtk sweep",
            needs="a sweep that exists",
            got=name or "none",
            reason=f"There are {', '.join(shipped)}, or your own file ending in .yaml.",
            use=use,
        )
    )


def _sweeps_here() -> dict[str, str]:
    """Return name -> path of the sweeps in `sweeps/` of the current directory, and in that of each
    of its folders."""
    folders = [*sorted(Path().glob("*/sweeps")), Path("sweeps")]
    return {
        file.stem: shell_path(file)
        for folder in folders
        for file in sorted(folder.glob("[!_]*.yaml"))
    }


def read_options(file: Path) -> object:
    """Return the keys in a file of a sweep or of an option; raises ConfigError if it is no YAML."""
    try:
        return plain_yaml(file.read_bytes())
    except ValueError as error:
        reason = "A file of a sweep or of an option holds keys and their values."
        use = "the files in sweeps/ and conf/ as examples"
        raise ConfigError(
            f"{file} needs YAML that can be read (got {error}). {reason} Use {use}."
        ) from error


@functools.cache
def _shipped(folder: str) -> Path:
    package = Path(__file__).resolve().parents[1]
    inside = package / folder
    return inside if inside.is_dir() else package.parent / folder


def options() -> dict[str, list[str]]:
    """Return group -> its options: the YAML files in conf/ and in the user's folder, without
    _NAME.yaml, which others include."""
    options_by_group = {group: {*names} for group, names in _shipped_options().items()}
    folder = own_folder()
    if folder is not None:
        for group, names in _options_in(folder).items():
            if group in options_by_group:
                options_by_group[group] |= names
    return {group: sorted(names) for group, names in options_by_group.items()}


@functools.cache
def _shipped_options() -> dict[str, set[str]]:
    return _options_in(config_directory())


def _options_in(folder: Path) -> dict[str, set[str]]:
    options_by_group: dict[str, set[str]] = {}
    for file in folder.glob("*/*.yaml"):
        if file.parent.name != "hydra" and not file.name.startswith("_"):
            options_by_group.setdefault(file.parent.name, set()).add(file.stem)
    return options_by_group


def taken_names(sweep_file: Path | None = None) -> list[str]:
    """Return a problem for each file of options of the user's that has the name of one of
    pgtoolkit's.

    Such files lie in the user's folder, or beside the file of a sweep. Hydra would take them in one
    command and pgtoolkit's in another. On some disks names that differ in capitals are one.
    """
    folders = {own_folder(), sweep_file and sweep_file.parent} - {
        None,
        _shipped("sweeps"),
        config_directory(),
    }
    problems = []
    for folder in sorted(filter(None, folders)):
        for file in _files_of_options(folder):
            name = file.relative_to(folder).with_suffix("").as_posix()
            if file != sweep_file and name.lower() in _shipped_names():
                problems.append(_taken_name(file, name))
    return problems


def _files_of_options(folder: Path) -> list[Path]:
    """Return the files in the places where conf/ has some, in any case of letters."""
    places = {name.partition("/")[0] for name in _shipped_names()}
    groups = [path for path in folder.glob("*/") if path.name.lower() in places]
    files = [*folder.glob("*.y*ml")]
    for group in groups:
        files += [*group.glob("*.y*ml"), *group.glob("*/*.y*ml")]
    return sorted(file for file in files if file.suffix.lower() in (".yaml", ".yml"))


@functools.cache
def _shipped_names() -> set[str]:
    """Return the names of the files below conf/, and those of the schemas, without their ends."""
    folder = config_directory()
    files = [file.relative_to(folder).with_suffix("") for file in folder.rglob("*.yaml")]
    names = {file.as_posix() for file in files}
    names |= {(file.parent / "schema").as_posix() for file in files}
    return names | {f"{file.parent}/schema_{file.name}" for file in files}


def _taken_name(file: Path, name: str) -> str:
    """Return the refusal of a file. name: below its folder, without the end."""
    group, _, option = name.lower().rpartition("/")
    folder = shortest_path(str(file).removesuffix(f"/{name}{file.suffix}"))
    use = f"{folder}/{group}/my_{option}.yaml with {group}=my_{option}"
    if name.lower() == "hydra/pgtk":
        use = "the same keys in a sweep's file or in an experiment"
    elif not group:
        use = f"{folder}/experiment/mine.yaml with experiment=mine, or another folder for the "
        use += "file of a sweep"
    return refusal(
        setting=shortest_path(file),
        needs="a name that pgtoolkit does not have",
        got=name,
        reason="pgtoolkit's file of this name would be taken in its place, or it in the place of "
        "that one.",
        use=use,
    )


def option_file(group: str, name: str) -> Path:
    """Return the file of an option: of the user's own folder, or of conf/."""
    folders = [folder for folder in (own_folder(), config_directory()) if folder]
    files = [folder / group / f"{name}.yaml" for folder in folders]
    return next(file for file in files if file.is_file())


def leading_comment(file: Path) -> str:
    """Return the comment at the top of a YAML file, without Hydra's directive and the command."""
    sentences = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        sentence = line.lstrip("# ")
        if not sentence.startswith(("@package", "pgtk ")):
            sentences.append(sentence)
    return " ".join(sentences)


def misplaced(group: str, word: str) -> tuple[str, str] | None:
    """Return why an option of the user's is not found, and what to type; None where there is no
    file of its name."""
    if not re.fullmatch(r"[\w.-]{1,80}", word):
        return None
    users = own_folder()
    if users is not None:
        right = users / group / f"{word}.yaml"
        near = [*users.glob(f"{group}*/{word}.y*ml"), *users.glob(f"{group}/{word}.*")]
        near += [*users.glob(f"{word}.y*ml")]
        for file in near:
            move = f"mkdir -p {shell_path(right.parent)}; mv {shell_path(file)} {shell_path(right)}"
            if file.parent == right.parent:
                move = f"mv {shell_path(file)} {shell_path(right)}"
            return f"{shell_path(file)} is not {shell_path(right)}.", move
    here = [file for file in Path().glob(f"*/{group}/{word}.yaml") if file.parts[0] != "conf"]
    if users is None and here:
        folder = shell_path(here[0].parents[1])
        return (
            f"{shell_path(here[0])} is in a folder that was not named.",
            f"--config-dir={folder} {group}={word}",
        )
    return None

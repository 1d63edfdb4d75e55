"""Where `conf/` and `sweeps/` lie and what is in them; reads file names only, so `--help` is
quick."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import nearest, refusal
from pgtoolkit.system.yaml_text import plain_yaml

OPTIONAL = ("experiment", "debug")
"""Groups that change others, of which none is chosen by default, and perhaps several."""


def config_directory() -> Path:
    """`conf/` inside the installed package, else beside it in a working copy."""
    return _shipped("conf")


def sweep_files() -> dict[str, Path]:
    """Name -> file of each sweep that comes with pgtoolkit, but for _NAME.yaml, which some
    share."""
    return {file.stem: file for file in sorted(_shipped("sweeps").glob("[!_]*.yaml"))}


def sweep_file(name: str = "") -> Path:
    """The file of a sweep: one that comes with pgtoolkit, by its name, or one of the user's, by its
    path.

    Raises ConfigError if there is none.
    """
    path = Path(name)
    shipped = sweep_files()
    if name in shipped:
        return shipped[name]
    if path.suffix == ".yaml" and path.is_file():
        return path.resolve()
    near = nearest(path.stem, shipped, 0.6)
    raise ConfigError(
        refusal(
            setting="pgtk sweep",
            needs="a sweep that exists",
            got=name or "none",
            reason="The sweeps are files in sweeps/, or your own file ending in .yaml.",
            use=f"pgtk sweep {near}"
            if near
            else f"one of {', '.join(shipped)}, or path/to/file.yaml",
        )
    )


def read_options(file: Path) -> Any:
    """Return the keys in a file of a sweep or of an option; raises ConfigError for what is no
    YAML."""
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


def docs_page(name: str) -> str:
    """The text of a page of docs/ that comes with pgtoolkit: see pyproject.toml for which do."""
    return (_shipped("docs") / name).read_text(encoding="utf-8")


def options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Group -> its options: YAML files in conf/ and in a folder of one's own, but for _NAME.yaml,
    which some share."""
    found = {group: {*names} for group, names in _shipped_options().items()}
    for group, names in _options_in(config_dir).items() if config_dir else ():
        found.setdefault(group, set()).update(names)
    return {group: sorted(names) for group, names in found.items()}


@functools.cache
def _shipped_options() -> dict[str, set[str]]:
    return _options_in(config_directory())


def _options_in(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in folder.glob("*/*.yaml"):
        if file.parent.name != "hydra" and not file.name.startswith("_"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return found


def leading_comment(file: Path) -> str:
    """Return the comment at the top of a YAML file, without Hydra's directive and the command that
    runs it."""
    sentences = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        sentence = line.lstrip("# ")
        if not sentence.startswith(("@package", "pgtk ")):
            sentences.append(sentence)
    return " ".join(sentences)

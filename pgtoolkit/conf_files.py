"""Where `conf/` lies and which groups, options and defaults are in it; reads file names only, so `--help` is quick."""

from __future__ import annotations

import re
from pathlib import Path


def config_directory() -> Path:
    """`conf/` inside the installed package, else beside it in a working copy."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Group -> its options: the YAML files in conf/ and in a directory of one's own."""
    found: dict[str, set[str]] = {}
    for root in filter(None, (config_directory(), config_dir)):
        for file in root.glob("*/*.yaml"):
            if file.parent.name != "hydra":
                found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in found.items()}


def default_options() -> dict[str, str]:
    """Group -> the option that conf/config.yaml chooses, in its order."""
    lines = (config_directory() / "config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\w+)$", lines, flags=re.MULTILINE))

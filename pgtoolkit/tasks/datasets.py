"""Which files hold the prompts: JSONL, Parquet, and folders of Hugging Face data sets, saved or as the hub has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.row_files import SUFFIXES, find_files

_USUAL = ("train", "test", "validation", "valid", "dev", "eval")
"""Names of splits; a folder with files of several is not meant as a whole."""


def prompt_files(path: str, split: str | None) -> list[Path]:
    """The files of task.path and task.split, in the order of their names, or as the data set lists them.

    A folder is a data set that `save_to_disk` has written, with or without splits; or, with a split, one of the hub:
    files named `train.jsonl` or `train-00000-of-00002.parquet`, or in a folder `train`, at any depth. Anything else is
    a file, a folder of files or a glob. Raises ConfigError where the split does not fit, DataError without files.
    """
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json(folder / "dataset_dict.json")["splits"]]
        if split not in splits:
            raise ConfigError(_refused(path, split, f"one of {', '.join(splits)}", "The data set has these.", splits))
        return _saved(folder / split)
    if (folder / "state.json").is_file():
        saved_split = _json(folder / "state.json").get("_split")
        if split not in (None, saved_split):
            named = f"It is the split {saved_split}." if saved_split else "The data set has no splits."
            raise ConfigError(_refused(path, split, saved_split or "null", named, [saved_split or "null"]))
        return _saved(folder)
    if not folder.is_dir():
        if split is not None:
            reason = "Only the folder of a data set has splits."
            raise ConfigError(_refused(path, split, "null", reason, ["null"]))
        return find_files(path, "task.path")
    if split is None:
        return _all_in(path, folder)
    return _of_the_hub(path, folder, split)


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of one data set."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        reason = "An old version of datasets kept an order beside the rows"
        raise DataError(f"{folder} needs rows in the order of its files. {reason}. Save it again with a newer one.")
    files = [folder / Path(one["filename"]).name for one in state["_data_files"]]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(f"{folder} lacks {', '.join(missing)}, which its state.json names. Copy or save it again.")
    return files


def _all_in(path: str, folder: Path) -> list[Path]:
    files = _data_files(folder)
    here = [file for file in files if file.parent == folder]
    splits = sorted({split for file in here or files for split in _USUAL if _is_of(file, split)})
    if len(splits) > 1 or (splits and not here):
        reason = f"The folder has files of {' and '.join(splits)}."
        raise ConfigError(_refused(path, None, "the name of one split", reason, splits))
    return find_files(path, "task.path")


def _of_the_hub(path: str, folder: Path, split: str) -> list[Path]:
    files = [file for file in _data_files(folder) if _is_of(file, split)]
    if not files:
        names = sorted({one for file in _data_files(folder) for one in _USUAL if _is_of(file, one)})
        needs = f"{split}.jsonl, {split}-00000-of-00001.parquet or a folder {split} at that place"
        raise ConfigError(_refused(path, split, needs, "No file of prompts is named so.", names or ["null"]))
    homes = sorted({file.parent.parent if file.parent.name == split else file.parent for file in files})
    if len(homes) > 1:
        reason = f"Files of {split} lie in {', '.join(str(home.relative_to(folder)) for home in homes[:4])}."
        use = f"task.path={homes[0]}"
        raise ConfigError(refusal(f"task.path={path}", "one data set", f"{len(homes)}", reason, use))
    return files


def _data_files(folder: Path) -> list[Path]:
    inside = [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES and file.is_file()]
    return [file for file in inside if not any(p.startswith(".") for p in file.relative_to(folder).parts)]


def _is_of(file: Path, split: str) -> bool:
    name = re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+(-\w+)?)?", file.stem)
    return bool(name) or file.parent.name == split


def _refused(path: str, split: str | None, needs: str, reason: str, instead: list[str]) -> str:
    use = " or ".join(f"task.split={one}" for one in instead[:4])
    return refusal(f"task.split={split or 'null'} with task.path={path}", needs, split, reason, use)


def _json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return content
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}. Copy or save the data set again.") from error

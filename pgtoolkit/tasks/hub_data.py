"""Data sets of the Hugging Face hub by their names, which the package datasets loads and keeps on
this machine."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path

from pgtoolkit.errors import ConfigError
from pgtoolkit.system import hub
from pgtoolkit.system.report import refusal, text

_MAX_CHARACTERS = 300
"""Characters of the package's error that are shown."""


@functools.lru_cache(maxsize=16)
def hub_files(name: str, config: str | None, split: str | None) -> tuple[Path, ...]:
    """Return the Arrow files of a split, in their order, after a download where they are not in the
    cache.

    Without the network only the cache is used. Raises ConfigError where there is no such data
    set, configuration or split.
    """
    import datasets

    setting = f"task.path={name}"
    if config is not None:
        setting += f" with task.config={config}"
    reason = "There is no such folder here, so it is taken for a name on the hub."
    with _quiet():
        try:
            if hub.answers(name, "dataset"):
                splits = datasets.load_dataset(name, config)
            else:
                reason += f" {hub.silence()}"
                with _offline():
                    splits = datasets.load_dataset(name, config)
        except Exception as error:  # The package and its dependencies raise what they like.
            raise ConfigError(
                refusal(
                    setting=setting,
                    needs="a data set of the Hugging Face hub, or of its cache on this machine",
                    got=" ".join(str(error).split())[:_MAX_CHARACTERS],
                    reason=reason,
                    use="OWNER/NAME, with task.config=NAME if it has several configurations, or "
                    "the path of a file or folder",
                )
            ) from error
    names = [str(name) for name in splits]
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names:
        raise ConfigError(
            refusal(
                setting=f"task.split={text(split)} with {setting}",
                needs=f"one of {', '.join(names)}",
                got=split,
                reason="These are the splits that it has.",
                use=" or ".join(f"task.split={text(name)}" for name in names),
            )
        )
    return tuple(Path(file["filename"]) for file in splits[split].cache_files)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside the block the package reads its cache, and does not wait for the hub."""
    from datasets import config

    was_offline = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = was_offline


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block the package and the hub's client write no warnings and no progress bars."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "httpx")]
    levels = [logger.level for logger in loggers]
    had_bars = datasets.utils.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if had_bars:
            datasets.utils.enable_progress_bars()

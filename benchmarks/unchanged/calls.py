"""Run many `pgtk` command lines in forks of one process that has imported what they need.

usage: TREE/.venv/bin/python calls.py COMMANDS.json OUT.json

COMMANDS.json: [{"name": ..., "words": [...]}]. OUT.json: {name: {"status": n, "out": text, "err":
    text}}.
Only the entry point `pgtoolkit.cli.main` of the tree is used.
"""

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

SKIPPED = ("__main__", "_pytest", "tests")


def call(words: list[str], modules_to: str | None = None) -> dict:
    """Run one command line in a fork; return its exit status and what it printed."""
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (both processes use them)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for stream, file in zip((1, 2), files, strict=False):
            os.dup2(file.fileno(), stream)
        status = 1
        try:
            from pgtoolkit.cli import main

            sys.argv = ["pgtk"]
            status = main(words)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
        except BaseException:
            traceback.print_exc()
            status = 99
        if modules_to:
            with open(modules_to, "w") as file:
                json.dump([*sys.modules], file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
    _, status = os.waitpid(child, 0)
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
    return {"status": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


def main() -> None:
    with open(sys.argv[1]) as file:
        commands = json.load(file)
    target = sys.argv[2]
    with tempfile.NamedTemporaryFile() as modules:
        for warm_up in (["check"], ["--cfg", "job"], ["compare", "--help"]):
            call(warm_up, modules.name)
            for name in json.loads(Path(modules.name).read_text()):
                # transformers and mlflow make lazy modules that break when imported by name
                if name.partition(".")[0] in (
                    "pgtoolkit",
                    "hydra",
                    "omegaconf",
                    "yaml",
                    "antlr4",
                    "hydra_plugins",
                ):
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
    results = {command["name"]: call(command["words"]) for command in commands}
    with open(target, "w") as file:
        json.dump(results, file)


main()

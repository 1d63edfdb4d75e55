"""Records of two working copies must not differ while code is rearranged: makes and compares them.

See README.md. The exit status of `compare` is 1 if something differs that must not.

usage: records.py make TREE                     make runs with the older commit, in made_by_base/
       records.py record TREE OUT [PART...]     write the records of a working copy to a folder
       records.py compare BASE OUT [--texts]    print what differs
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from differences import compare
from small_runs import made, make, many, prepare, runs
from working_copy import Tree, cpu_seconds


def record(tree: Tree, out: Path, chosen: list[str]) -> None:
    """Write the records, or the parts of them that are named."""
    out.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(
        ["git", "-C", tree.path, "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    began = time.monotonic()
    parts = {
        "public": public,
        "configurations": configurations,
        "checks": checks,
        "names": names,
        "runs": runs,
        "many": many,
        "made": made,
        "refusals": refusals,
    }
    save(out / "about.json", {"commit": commit})
    prepare(tree)
    for name in chosen or parts:
        part = parts[name]
        start = cpu_seconds()
        save(out / f"{name}.json", part(tree))
        print(f"{name}: {cpu_seconds() - start:.0f} s of CPU time", flush=True)
    print(
        f"records of {commit} in {out}: {time.monotonic() - began:.0f} s, {cpu_seconds():.0f} s of "
        "CPU time"
    )


def save(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def options_of(tree: Tree) -> dict[str, list[str]]:
    """Return the options of each group, by the files of conf/."""
    options: dict[str, list[str]] = {}
    for path in sorted((tree.path / "conf").glob("**/*.yaml")):
        name = path.relative_to(tree.path / "conf").with_suffix("").as_posix()
        group, _, option = name.rpartition("/")
        if group and not option.startswith("_") and name != "hydra/pgtk":
            options.setdefault(group, []).append(option)
    return options


def configurations(tree: Tree) -> dict:
    """`--cfg job` of every option and experiment, as dotted keys with their values."""
    commands = {"default": ["--cfg", "job"]}
    for group, names in options_of(tree).items():
        for name in names:
            if not group.startswith("hydra"):
                commands[f"{group}={name}"] = [f"{group}={name}", "--cfg", "job"]
    results = tree.calls(commands)
    texts = {name: result["out"] for name, result in results.items() if result["status"] == 0}
    values = tree.read("yaml", input=texts)
    return {name: values.get(name, {"refused": results[name]["status"]}) for name in commands}


def sweeps_of(tree: Tree) -> list[str]:
    return sorted(
        path.stem for path in (tree.path / "sweeps").glob("*.yaml") if not path.stem.startswith("_")
    )


def checks(tree: Tree) -> dict:
    """`pgtk check` of every experiment and sweep: exit status, refused keys, number of notes; the
    text beside."""
    commands = {"default": ["check"]}
    for name in options_of(tree)["experiment"] + [""]:
        if name:
            commands[f"experiment={name}"] = ["check", f"experiment={name}"]
    for name in options_of(tree)["debug"]:
        commands[f"debug={name}"] = ["check", f"debug={name}"]
    for name in sweeps_of(tree):
        commands[f"sweep {name}"] = ["check", "sweep", name]
    records = {}
    for name, result in tree.calls(commands).items():
        problems = section(result["out"], "Problems")
        notes = section(result["out"], "Notes")
        keys = [re.split(r" needs |: ", line)[0] for line in problems if line != "none"]
        records[name] = {
            "status": result["status"],
            "problems": keys,
            "number of notes": len(notes),
            "~text": result["out"] + result["err"],
        }
    return records


def section(text: str, title: str) -> list[str]:
    lines = []
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = re.fullmatch(rf"{title}( \(\d+\))?", line) is not None
        elif inside:
            lines.append(line.strip())
    return lines


NEED_MORE = ("sft", "distillation", "gsm8k", "sums")
"""Experiments that need a model or a file of the user's."""


def names(tree: Tree) -> dict:
    """Folders of sweeps and directories of their jobs with their digests: of sweep.json, before a
    job has begun."""
    records = {}
    experiments = ",".join(options_of(tree)["experiment"])
    lines = {f"sweep {name}": ["sweep", name] for name in sweeps_of(tree) if name != "real_model"}
    lines["experiments"] = [
        "-m",
        f"experiment={','.join(e for e in experiments.split(',') if e not in NEED_MORE)}",
    ]
    lines["losses"] = [
        "-m",
        "loss=grpo,gspo,cispo,sapo,gmpo,dppo,vespo,kimi",
        "aggregation=sample_mean,token_mean",
    ]
    lines["paths"] = [
        "-m",
        "model=huggingface",
        "model.path=outputs/study/small-1,outputs/study/small-2",
        "task=sums",
        "rollout.max_completion_length=72",
        "model.lora_rank=null,4",
    ]
    lines["swept file"] = ["sweep", "clip_range", "seed=0,1,2", "trainer.max_steps=7"]
    for name, words in lines.items():
        began = set((tree.work / "outputs/sweeps").glob("*"))
        process = subprocess.Popen(
            [tree.pgtk, *words, "tracking=none"] if "tracking" not in " ".join(words) else words,
            cwd=tree.work,
            env=tree.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        folder = None
        while process.poll() is None and folder is None:
            for path in (tree.work / "outputs/sweeps").glob("*/sweep.json"):
                if path.parent not in began:
                    folder = path.parent
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=120)
        if folder is None:
            records[name] = {"refused": process.returncode, "~text": tree.plain(error)}
            continue
        jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
        records[name] = {
            "folder": folder.name,
            "jobs": sorted((job["directory"] for job in jobs), key=_digest_of),
        }
        shutil.rmtree(folder)
    return records


def _digest_of(directory: str) -> str:
    """Return the digits that a job's directory ends with, which stay where its name changes."""
    return directory[-8:]


def public(tree: Tree) -> dict:
    """Public names with signatures, keys with type and default, names of metrics, commands with
    their options."""
    known = tree.read("public")
    keys = {}
    meanings = {}
    for line in (tree.path / "docs/keys.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            keys[cells[0]] = [cells[1], cells[2]]
            meanings[cells[0]] = cells[3]
    metrics = sorted(
        set(re.findall(r"^\| (.*?) \|", (tree.path / "docs/metrics.md").read_text(), re.M))
    )
    metrics = sorted(
        {name for cell in metrics for name in re.findall(r"`([a-z][A-Za-z0-9_/@]*)`", cell)}
    )
    help_page = tree.calls({"help": ["--help"]})["help"]["out"]
    commands = re.findall(r"^  pgtk ([a-z]+) ", help_page, re.M)
    pages = tree.calls({name: [name, "--help"] for name in commands})
    options = {
        name: sorted(set(re.findall(r"--[a-z][a-z-]*", page["out"])))
        for name, page in pages.items()
    }
    return known | {
        "keys": keys,
        "metrics": metrics,
        "commands": options,
        "~meanings": meanings,
        "~help": help_page,
        "~pages": {name: page["out"] for name, page in pages.items()},
        "groups": options_of(tree),
        "sweeps": sweeps_of(tree),
    }


def refusals(tree: Tree) -> dict:
    """The golden list of refusals, and whether the tree keeps it."""
    lines = (tree.path / "tests/config/golden_refusals.txt").read_text().splitlines()
    rows = dict(
        line.split(" -> ", 1) for line in lines if " -> " in line and not line.startswith("#")
    )
    done = subprocess.run(
        [
            tree.python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/config/test_golden_refusals.py",
        ],
        cwd=tree.path,
        env=tree.environment | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "rows": rows,
        "kept": done.returncode == 0,
        "~text": done.stdout[-1500:] if done.returncode else "",
    }


# Comparing


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--texts"]
    match words:
        case ["record", tree, out, *chosen]:
            folder = Path(tempfile.mkdtemp(prefix="records-"))
            try:
                record(Tree(Path(tree), folder), Path(out), chosen)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return 0
        case ["make", tree]:
            folder = Path(tempfile.mkdtemp(prefix="records-"))
            try:
                make(Tree(Path(tree), folder))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return 0
        case ["compare", base, out]:
            return compare(Path(base), Path(out), "--texts" in sys.argv)
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())

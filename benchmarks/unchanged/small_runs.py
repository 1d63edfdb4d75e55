"""Small runs of all kinds, recorded to the last bit; and runs of an older commit that go on under a
newer one."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time

from working_copy import HERE, Tree, digest_of

MADE = HERE / "made_by_base"
SHORT = [
    *(
        "tracking=none",
        "trainer.device=cpu",
        "trainer.max_steps=4",
        "trainer.checkpoint_every=2",
        "metrics=with_entropy",
    ),
    *("rollout.prompts_per_batch=4", "rollout.group_size=4", "accumulation.docs_per_step=8"),
    *(
        "accumulation.max_tokens=64",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=0.01",
        "task.num_digits=3",
    ),
    *("model.hidden_size=32", "model.num_heads=2", "rollout.max_completion_length=4"),
]

OWN_CODE = '''"""Code of a user, named by dotted paths."""

import torch

from pgtoolkit.losses.families import FAMILIES


def reducer(totals, *, mask, document_index, tokens_per_document, **_):
    lengths = torch.cat([tokens_per_document, tokens_per_document.new_ones(1)]).to(torch.float32)
    return 1.0 / (1.0 + lengths[document_index]) / totals.num_documents


def advantages(rewards, **_):
    return [[reward - max(group) for reward in group] for group in rewards]


Family = FAMILIES["grpo"]
'''

EXPERIMENTS = {
    # name: (defaults list, keys); each is run for three steps as one job of a sweep through
    #   --config-dir
    **{
        f"loss_{name}": ({"loss": name}, {})
        for name in ("grpo", "gspo", "cispo", "sapo", "gmpo", "dppo", "vespo", "kimi", "reinforce")
    },
    **{
        f"aggregation_{name}": ({"loss": "grpo", "aggregation": name}, {})
        for name in ("prompt_mean", "token_mean", "constant")
    },
    **{
        f"correction_{name}": ({"loss": "grpo", "correction": name}, {})
        for name in (
            "token_truncate",
            "token_mask",
            "sequence_truncate",
            "sequence_mask",
            "off_policy_mask",
        )
    },
    **{
        f"kl_{name}": ({"loss": "grpo", "kl": name}, {"kl.coefficient": 0.1})
        for name in ("k1", "k2", "k3", "k3_ratio", "full_forward", "full_reverse")
    },
    **{
        f"advantage_{name}": ({"advantage": name}, {})
        for name in (
            "grpo",
            "rloo",
            "max_rl",
            "batch_std",
            "opo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        )
    },
    "fused": ({"loss": "grpo", "kernel": "fused_linear"}, {}),
    "entropy": ({"loss": "grpo"}, {"entropy.coefficient": 0.01}),
    "lag": ({"loss": "grpo"}, {"rollout.lag": 2}),
    "lag_proximal": (
        {"loss": "grpo", "correction": "token_truncate"},
        {"rollout.lag": 2, "rollout.old_log_probs": "proximal"},
    ),
    "dynamic_sampling": (
        {"loss": "grpo"},
        {"rollout.max_sampling_rounds": 3, "rollout.overlong_buffer": 2},
    ),
    "masked": ({"loss": "grpo"}, {"rollout.truncated": "mask"}),
    "conversation_guess": (
        {"task": "guess"},
        {"rollout.max_completion_length": 26, "model.max_positions": 64},
    ),
}


def prepare(tree: Tree) -> None:
    """Write what the recorded runs read: code of a user, experiments, a model's folder, starts of
    the study."""
    (tree.work / "own_code.py").write_text(OWN_CODE)
    folder = tree.work / "own_conf" / "experiment"
    folder.mkdir(parents=True)
    for name, (groups, keys) in EXPERIMENTS.items():
        lines = ["# @package _global_", "defaults:"]
        lines += [f"  - override /{group}: {option}" for group, option in groups.items()]
        nested: dict = {}
        for key, value in keys.items():
            group, leaf = key.split(".")
            nested.setdefault(group, {})[leaf] = value
        for group, values in nested.items():
            lines += [f"{group}:"] + [f"  {leaf}: {value}" for leaf, value in values.items()]
        (folder / f"gate_{name}.yaml").write_text("\n".join(lines) + "\n")
    # starts of the study's sweeps; `pgtk check` needs folders that transformers can load
    sums = ["task=sums", "rollout.max_completion_length=72", "model.max_positions=128"]
    tree.run(
        *sums,
        "tracking=none",
        "trainer.device=cpu",
        "trainer.max_steps=1",
        "rollout.prompts_per_batch=2",
        "rollout.group_size=2",
        "accumulation.docs_per_step=4",
        "model.hidden_size=16",
        "model.num_heads=2",
        "hydra.run.dir=start",
    )
    tree.run("export", "start", "outputs/study/small-1")
    for number in range(2, 11):
        shutil.copytree(
            tree.work / "outputs/study/small-1", tree.work / f"outputs/study/small-{number}"
        )
    (tree.work / "prompts.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+1=", "answer": "3"}\n'
    )


def runs(tree: Tree) -> dict:
    """Metrics and weights of runs on fixed seeds."""
    work = tree.work
    records = {}

    def run(name: str, *overrides: str, **options) -> None:
        dropped = tuple(options.get("without", ()))
        kept = [word for word in SHORT if not word.startswith(dropped)] if dropped else SHORT
        chosen = {word.partition("=")[0]: word for word in [*kept, *overrides]}
        result = tree.run(*chosen.values(), f"hydra.run.dir=runs/{name}")
        records[name] = (
            tree.run_record(work / "runs" / name)
            if result["status"] == 0
            else {"refused": result["status"], "~text": result["err"]}
        )

    evaluated = (
        "evaluation.every=2",
        "evaluation.prompts_per_set=8",
        "evaluation.completions_per_prompt=2",
    )
    run("gspo", *evaluated)
    run("grpo", "loss=grpo", "rollout.save_path=recorded", "seed=3")
    run("two_processes", "parallelism=ddp", "loss=grpo")
    run("two_processes_fsdp", "parallelism=fsdp", "trainer.max_steps=2")
    run("reducer", "loss=grpo", "aggregation.reducer=own_code.reducer")
    run("own_loss", "loss=custom", "loss.path=own_code.Family", "loss.options.epsilon_high=0.1")
    run("fixed", "accumulation=fixed", "loss=grpo", without=("accumulation.",))
    run("own_advantage", "advantage=custom", "advantage.path=own_code.advantages")
    run(
        "recorded",
        "loss=grpo",
        "rollout=recorded",
        "rollout.path=recorded",
        without=("rollout.", "task."),
    )
    tree.run("solutions", "solutions.jsonl", "task=reverse", "task.num_digits=3", "--count", "40")
    run(
        "supervised",
        "experiment=sft",
        "rollout.path=solutions.jsonl",
        without=("rollout.", "task."),
    )
    tree.run("export", "runs/gspo", "exported")
    records["exported"] = {
        path.name: digest_of(path) for path in (work / "exported").glob("*.safetensors")
    }
    model = ("model=huggingface", "model.path=exported")
    run(
        "lora",
        *model,
        "model.lora_rank=4",
        "optimizer.learning_rate=0.01",
        without=("model.h", "model.n"),
    )
    run("conversation", "task=guess", "rollout.max_completion_length=26", without=("task.",))
    # resumed in the middle: of six steps four were made and saved
    run("to_resume", "loss=grpo", "rollout.lag=1")
    result = tree.run("resume", "runs/to_resume", "trainer.max_steps=7")
    records["resumed"] = (
        tree.run_record(work / "runs/to_resume")
        if result["status"] == 0
        else {"refused": result["status"]}
    )
    # the answer of evaluate: its numbers
    result = tree.run(
        "evaluate",
        "runs/gspo",
        "evaluation.prompts_per_set=8",
        "evaluation.completions_per_prompt=2",
    )
    records["evaluate"] = {"status": result["status"], "~text": result["out"]}
    return records


def many(tree: Tree) -> dict:
    """Many small configurations as the jobs of one sweep, through --config-dir."""
    work = tree.work
    records = {}
    experiments = ",".join(f"gate_{name}" for name in EXPERIMENTS)
    small = [
        word
        for word in SHORT
        if not word.startswith(("trainer.max", "metrics", "rollout.max", "task."))
    ]
    result = tree.run(
        "-m",
        "--config-dir",
        "own_conf",
        f"experiment={experiments}",
        *small,
        "trainer.max_steps=3",
        "hydra.sweep.dir=many",
    )
    records["sweep"] = {"status": result["status"]}
    for folder in sorted((work / "many").glob("*/")):
        if (folder / "status.json").exists():
            records[folder.name] = tree.run_record(folder)
    return records


def made(tree: Tree) -> dict:
    """Let a run and a sweep that the older commit has made go on, and compare them."""
    records: dict = {}
    work = tree.work / "made"
    shutil.copytree(MADE, work)
    result = tree.run("resume", "runs/killed", folder=work)
    records["killed run resumed"] = {
        "status": result["status"],
        **tree.run_record(work / "runs/killed"),
    }
    result = tree.run("continue", "runs/stopped", *made_run(), folder=work)
    records["stopped run continued"] = {
        "status": result["status"],
        **tree.run_record(work / "runs/stopped"),
    }
    result = tree.run("resume", "runs/done", "trainer.max_steps=10", folder=work)
    records["finished run goes on"] = {
        "status": result["status"],
        **tree.run_record(work / "runs/done"),
    }
    before = (work / MADE_SWEEP_FOLDER).glob("*/metrics.jsonl")
    done = {
        path: path.read_text()
        for path in before
        if json.loads((path.parent / "status.json").read_text())["state"] == "done"
    }
    result = tree.run(*MADE_SWEEP, folder=work)
    jobs = sorted(path.parent for path in (work / MADE_SWEEP_FOLDER).glob("*/status.json"))
    records["sweep again"] = {
        "status": result["status"],
        "finished jobs were left alone": bool(done)
        and all(path.read_text() == text for path, text in done.items()),
    }
    for job in jobs:
        records[f"sweep again/{job.name}"] = tree.run_record(job)
    result = tree.run("compare", MADE_SWEEP_FOLDER, "--csv", "table.csv", folder=work)
    table = (work / "table.csv").read_text() if (work / "table.csv").exists() else ""
    records["compare"] = {
        "status": result["status"],
        "rows": table.count("\n"),
        "~text": result["out"],
        "~csv": clockless(table),
    }
    result = tree.run("compare", "runs", folder=work)
    records["compare runs"] = {"status": result["status"], "~text": result["out"]}
    for command in (
        ["samples", "runs/done"],
        ["evaluate", "runs/done", "evaluation.prompts_per_set=4"],
        ["tokens", "runs/done", "--html", "page.html"],
        ["export", "runs/done", "model"],
    ):
        result = tree.run(*command, folder=work)
        records[" ".join(command[:2])] = {"status": result["status"], "~text": result["out"]}
    return records


def clockless(table: str) -> str:
    """A CSV file without its columns of seconds."""
    rows = list(csv.DictReader(table.splitlines()))
    return json.dumps(
        [
            {k: v for k, v in row.items() if not re.search("second|time|started", k or "")}
            for row in rows
        ]
    )


MADE_SWEEP_FOLDER = next(
    (str(path.relative_to(MADE)) for path in MADE.glob("outputs/sweeps/*")), ""
)
MADE_SWEEP = [
    "sweep",
    "clip_range",
    "trainer.max_steps=200",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    "accumulation.docs_per_step=8",
    "trainer.checkpoint_every=20",
    "tracking=none",
    "trainer.device=cpu",
    "loss.epsilon_low=1e-4,3e-3",
    "seed=0,1",
    "evaluation.every=0",
]


def made_run() -> list[str]:
    return [
        *(word for word in SHORT if "max_steps" not in word),
        "trainer.max_steps=100",
        "loss=grpo",
        "rollout.lag=1",
    ]


def make(tree: Tree) -> None:
    """made_by_base/: a finished run, one that a signal stopped, a killed one; a sweep of which one
    job is killed."""
    if MADE.exists():
        raise SystemExit(f"{MADE} exists")
    work = tree.work / "made"
    work.mkdir()
    tree.run(*SHORT, "loss=grpo", "rollout.lag=1", "hydra.run.dir=runs/done", folder=work)
    for name, number in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
        process = subprocess.Popen(
            [tree.pgtk, *made_run(), f"hydra.run.dir=runs/{name}"],
            cwd=work,
            env=tree.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        rows = work / "runs" / name / "metrics.jsonl"
        while not rows.exists() or rows.read_text().count("\n") < 9:
            time.sleep(0.005)
        process.send_signal(number)
        process.wait()
        print(name, rows.read_text().count("\n"), "steps")
    process = subprocess.Popen(
        [tree.pgtk, *MADE_SWEEP],
        cwd=work,
        env=tree.environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second = None
    while second is None:
        folders = sorted(
            (work / "outputs/sweeps").glob("*/*/metrics.jsonl"),
            key=lambda path: path.stat().st_ctime,
        )
        started = [
            path
            for path in folders
            if json.loads((path.parent / "status.json").read_text())["state"] == "running"
        ]
        if len(folders) == 2 and started and started[0].read_text().count("\n") > 90:
            second = started[0]
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(1)
    shutil.copytree(work, MADE)

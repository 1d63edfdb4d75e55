"""`make drift`: whether the newest TRL and verl still are what our tables and our reading say.

It installs both into outputs/drift, beside the packages of this environment, and compares

* the default of each of their keys with pgtoolkit/config/trl.yaml and verl.yaml;
* what their own functions make of a random step, by their defaults and by options that
  `pgtk parity` knows, with our reading of them;
* what TRL adds to the deviation, which it computes where it samples, with the text of its source.

Each difference is a line that names its row or option, and the exit status is 1. The four numbers
by which one GRPO differs from another are written to docs/frameworks.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgtoolkit.comparison.parity_ours import OurSide
from pgtoolkit.comparison.parity_run import run
from pgtoolkit.comparison.parity_switches import TheirSide, explain
from pgtoolkit.comparison.parity_theirs import Convention
from pgtoolkit.config.trainer_keys import flat, tables
from pgtoolkit.system.report import text
from pgtoolkit.system.yaml_text import plain_yaml

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENTS = REPOSITORY / "outputs" / "drift"
PAGE = REPOSITORY / "docs" / "frameworks.md"

TOLERANCE = 1e-6

CASES: dict[str, list[dict[str, object]]] = {
    "TRL": [
        {},
        {"beta": 0.1},
        {"loss_type": "grpo", "scale_rewards": "none"},
        {"loss_type": "dr_grpo"},
        {"loss_type": "bnpo"},
        {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss_type": "sapo"},
        {"delta": 1.5},
        {"use_vllm": True},
    ],
    "verl": [
        {},
        {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1},
        {"actor__loss_agg_mode": "seq-mean-token-mean"},
        {
            "actor__loss_agg_mode": "seq-mean-token-sum-norm",
            "actor__loss_scale_factor": 8,
        },
        {"algorithm__norm_adv_by_std_in_grpo": False},
        {"algorithm__adv_estimator": "rloo"},
        {"actor__policy_loss__loss_mode": "gspo", "actor__loss_agg_mode": "seq-mean-token-mean"},
        {"actor__policy_loss__loss_mode": "cispo"},
        {"algorithm__rollout_correction__rollout_is": "token"},
    ],
}
"""Trainer -> flags beside its defaults, with __ for a dot."""

OF_FILES = {
    "TRL": (
        "accelerator_config.",
        "datasets",
        "get_soft_overlong_punishment.",
        "launch.",
        "lr_scheduler_kwargs.",
        "model_init_kwargs.",
        "peft_config",
        "streaming",
        "train_dataset.",
        "vllm_sampling_params",
    ),
    "verl": (
        "actor_rollout_ref.actor.optim.override_optimizer_config.",
        "config_name",
        "config_path",
        "critic.optim.override_optimizer_config.",
        "model_engine",
        "reward.reward_kwargs.overlong_buffer_cfg.",
        "reward_model.overlong_buffer.",
        "reward_model.reward_kwargs.",
    ),
}
"""Beginnings of keys of our tables that files of users have, and their own defaults do not: of
scripts, of programs and of Hydra."""

_ASKED = """
import dataclasses, importlib.util, json, pathlib, sys
from importlib import metadata

def of_trl():
    import inspect, trl
    from trl.trainer import grpo_trainer

    fields = [
        field
        for kind in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments)
        for field in dataclasses.fields(kind)
    ]
    defaults = {field.name: getattr(field.default, "value", field.default) for field in fields}
    for field in fields:
        if callable(field.default_factory):
            defaults[field.name] = field.default_factory()
    return {"defaults": defaults, "source": inspect.getsource(grpo_trainer)}

def of_verl():
    package = pathlib.Path(importlib.util.find_spec("verl").origin).parent
    file = package / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    return {"yaml": file.read_text()}

found = {"TRL": of_trl, "verl": of_verl}[sys.argv[1]]()
print(json.dumps(found | {"version": metadata.version(sys.argv[1].lower())}, default=str))
"""
"""Asks their environment for version, defaults and source."""


def differing(trainer: str, defaults: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Return name -> (default in our table, default there) of each that differs."""
    rows = tables()[trainer].rows
    return {
        name: (rows[name].default if name in rows else "no row", default)
        for name, default in defaults.items()
        if name not in rows or text(rows[name].default) != text(default)
    }


def unknown(trainer: str, defaults: dict[str, object]) -> list[str]:
    """Return the names of our table that have a default here and are no key there."""
    table = tables()[trainer]
    excused = (*OF_FILES[trainer], *table.content.get("earlier", []))
    excused += tuple(table.content.get("rloo", {}).get("signs", []))  # RLOO alone has them
    return [
        name
        for name, row in table.rows.items()
        if row.default is not None and name not in defaults and not name.startswith(excused)
    ]


def defaults_of(trainer: str, found: dict) -> dict[str, object]:
    """Return the defaults of a trainer, by full dotted name. found: see `asked`."""
    return found["defaults"] if trainer == "TRL" else defaults_of_verl(found["yaml"])


def defaults_of_verl(yaml: str) -> dict[str, object]:
    """Return the defaults in verl's generated file, by full dotted name."""
    values = dict(flat(plain_yaml(yaml.encode())))
    return {name: value for name, value in values.items() if not name.endswith("_target_")}


def environment(package: str) -> Path:
    """Make or bring up to date an environment with the newest release; return its Python.

    Each has its own, beside the packages of this one, as they ask for other versions of others.
    """
    folder = ENVIRONMENTS / package
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "beside.pth").write_text(ours + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--upgrade"]
    subprocess.run([*pip, package], check=True)
    return python


def asked(python: Path, trainer: str) -> dict:
    """Return what the environment answers to _ASKED."""
    words = [python, "-c", _ASKED, trainer]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{trainer} cannot be read by {python}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def moved(python: Path, trainer: str, found: dict) -> Iterator[str]:
    """Yield a line for each row or reading that the installed trainer differs from."""
    defaults = defaults_of(trainer, found)
    file = f"pgtoolkit/config/{trainer.lower()}.yaml"
    for name, (ours, there) in differing(trainer, defaults).items():
        yield f"{file}: {name} has the default {text(ours)}, and is {text(there)} there"
    yield from (f"{file}: {name} is no key there" for name in unknown(trainer, defaults))
    with tempfile.TemporaryDirectory() as folder:
        for flags in CASES[trainer]:
            yield from (
                f"our reading of {trainer} with {flags or 'its defaults'}: {sentence}"
                for sentence in _otherwise(python, trainer, flags, Path(folder))
            )
    if trainer == "TRL":
        added = {*re.findall(r"std_rewards \+ ([\d.e-]+)\)", found["source"])}
        epsilon = side_of_defaults(trainer, Path(folder)).convention.deviation_epsilon
        if {float(number) for number in added} != {epsilon}:
            yield f"our reading of TRL: {epsilon} is added to the deviation, and {added} there"
        if "nanstd(rewards.view(-1, num_generations), dim=1)" not in found["source"]:
            yield "our reading of TRL: the deviation of a group is another one there"


def side_of_defaults(trainer: str, folder: Path, **flags: object) -> TheirSide:
    """Return the side of a trainer's defaults with these flags."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from builders.parity_steps import theirs  # pyright: ignore[reportMissingImports]

    folder.mkdir(exist_ok=True)
    return theirs(folder, trainer, **flags)


def _otherwise(python: Path, trainer: str, flags: dict[str, object], folder: Path) -> Iterator[str]:
    """Yield what their functions do otherwise than we have read, on a random step."""
    side = side_of_defaults(trainer, folder, **flags)
    from builders.parity_steps import recorded  # pyright: ignore[reportMissingImports]

    step = recorded()
    ran = run(step, side, python)
    for explanation in explain(step, (ran, OurSide(ran.as_ours, "ours")), TOLERANCE).readings:
        yield explanation.sentence


def row_of(convention: Convention) -> list[str]:
    """Return the four numbers of a convention in the words of the README: what the advantage is
    divided by, the aggregation, the clip, and the KL."""
    c = convention
    assert (c.bessel, c.mean_of) == (True, "step"), "the README says s (n - 1), and means of a step"
    exponent = re.sub("e-0*", "e-", f"{c.deviation_epsilon:.0e}")
    divided = "nothing" if c.deviation == "none" else f"s + {exponent}"
    mean = {"token": "mean of the tokens", "document": "each document's mean"}[c.mean]
    clip = f"{text(c.low)}, {text(c.high)}"
    if c.dual_clip is not None:
        clip += f"; {text(c.dual_clip)} where A < 0"
    kl = f"{c.kl_coefficient:g} {c.kl}" if c.kl_coefficient else "none"
    return [divided, mean, clip, kl]


def page(checked: dict[str, tuple[str, int, list[str]]]) -> str:
    """Return docs/frameworks.md. checked: trainer -> (version, keys compared, four numbers)."""
    lines = [
        "# TRL and verl as they are",
        "",
        "After this page you know which of their releases our tables and `pgtk parity`",
        "([parity.md](parity.md)) were last held against. `make drift` installs the newest,",
        "compares, and writes this page where nothing has moved; else it names each row that has.",
        "",
        "| | keys whose defaults are those of our table | settings whose step is what we read |",
        "|---|---|---|",
    ]
    for trainer, (version, keys, _) in checked.items():
        lines.append(f"| {trainer} {version} | {keys} | {len(CASES[trainer])} |")
    lines += [
        "",
        "By default, in the words of the [README](../README.md#which-grpo-am-i-running):",
        "",
        "| | divided by | aggregation | clip | KL |",
        "|---|---|---|---|---|",
    ]
    for trainer, (version, _, numbers) in checked.items():
        lines.append(f"| {trainer} {version} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    lines = []
    checked = {}
    for trainer in ("TRL", "verl"):
        python = environment(trainer.lower())
        found = asked(python, trainer)
        known = tables()[trainer].content["version"]
        print(f"{trainer} {found['version']}; the tables are of {known}", flush=True)
        for line in moved(python, trainer, found):
            print(f"  {line}", flush=True)
            lines.append(line)
        numbers = row_of(side_of_defaults(trainer, ENVIRONMENTS).convention)
        checked[trainer] = (found["version"], len(defaults_of(trainer, found)), numbers)
    if lines:
        print(f"{len(lines)} have moved; {PAGE.name} stays as it was")
    else:
        PAGE.write_text(page(checked), encoding="utf-8")
        print(f"nothing has moved; {PAGE.name} says so")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())

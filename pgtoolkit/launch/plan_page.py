"""The page that `pgtk check` prints: what would be trained, the notes, and the problems."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from pgtoolkit.config import memory
from pgtoolkit.config.compose import compose
from pgtoolkit.config.names import name_in
from pgtoolkit.config.plan import compilation, describe
from pgtoolkit.config.validate import resolve_and_validate
from pgtoolkit.errors import first_line
from pgtoolkit.launch.check import Checked, distinctive, notes, problems
from pgtoolkit.launch.sweep_report import summary
from pgtoolkit.runs.provenance import gpu_memory
from pgtoolkit.system.report import key_of


def render_plan(checked: Checked) -> str:
    """The plan of the (first) run, then notes and problems of all."""
    first = checked.runs[0]
    sections = _sweep_sections(checked) if checked.is_sweep else []
    if first.config is not None:
        sections += describe(first.values, resolve_and_validate(compose([]).config)[0])
        if first.values.model.name == "huggingface" and not first.report.problems:
            gpu = gpu_memory()
            sections.append(("Memory", [*memory.describe(first.values, gpu)]))
            compiles, reason = compilation(first.values, gpu is not None and first.values.trainer.device != "cpu")
            sections.append(("Compiled", [f"{'yes' if compiles else 'no'}, {reason}"]))
        sections.append(("Run name", [name_in(first.config.hydra, first.values.tracking.run_name)]))
        if first.config.rollout.name == "policy" and not first.report.problems:
            sections.append(("First prompt", _first_prompt(first.config)))
    sections.append(("Notes", notes(checked)))
    found = problems(checked)
    sections.append((f"Problems ({len(found)})" if found else "Problems", found or ["none"]))
    return "\n\n".join(title + "\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections if lines)


def _first_prompt(config: DictConfig) -> list[str]:
    from pgtoolkit.tasks.prompts import preview

    try:
        return preview(OmegaConf.to_object(config.model), OmegaConf.to_object(config.task), config.seed)
    except Exception as error:  # a damaged tokenizer raises whatever its reader stumbles over
        return [f"cannot be shown: {first_line(error)}"]


def _sweep_sections(checked: Checked) -> list[tuple[str, list[str]]]:
    runs, sweep, varying = checked.runs, checked.sweep, checked.varying
    title = f"Sweep of {len(runs)} runs; the plan is that of the first"
    if checked.searches:
        trials = checked.master.hydra.sweeper.get("n_trials")
        title = f"Search of {trials} trials; the plan is that of the first of {len(runs)} corners"
    states = [run.job.status if run.job else "with problems" for run in runs]
    width, last = max(map(len, states)), len(str(len(runs) - 1))
    lines = [
        f"{number:>{last}}  {state:<{width}}  {distinctive(run, varying)}"
        for number, (run, state) in enumerate(zip(runs, states, strict=True))
    ]
    whole = [f"folder: {sweep.folder}"] if sweep else []
    whole += [f"varies: {key} = {', '.join(values)}" for key, values in varying.items()]
    fixed = [override for override in runs[0].overrides if key_of(override) not in varying]
    whole += ["in all: " + " ".join(fixed)] if fixed else []
    whole += [summary(sweep)] if sweep and sweep.jobs and not checked.searches else []
    return [(title, lines), ("The sweep", whole)]

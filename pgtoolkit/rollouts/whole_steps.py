"""Says what a step has to hold for a loss that depends on other documents. No torch is imported
here, so that `pgtk check` asks it, too."""

from __future__ import annotations

from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.system.report import refusal


def misfits_of_groups(setting: str, docs_per_step: int, group_size: int, reason: str) -> list[str]:
    """Return the refusal of steps that do not hold whole groups; none if they do.

    setting: what needs them.
    """
    if docs_per_step % group_size == 0:
        return []
    multiple = max(1, round(docs_per_step / group_size)) * group_size
    needs = f"accumulation.docs_per_step to be a multiple of the group size {group_size}"
    return [
        refusal(setting, needs, docs_per_step, reason, f"accumulation.docs_per_step={multiple}")
    ]


def misfits_of_function(
    setting: str, family: FunctionFamily, docs_per_step: int, group_size: int, correction: str
) -> list[str]:
    """Return the refusals of settings under which a loss of the whole step cannot be right.

    correction: the name of the option.
    """
    if family.level != "step":
        return []
    problems = []
    if docs_per_step == 0:
        problems.append(
            refusal(
                setting,
                needs="accumulation.docs_per_step > 0",
                got=0,
                reason="It depends on all documents of a step, and a fixed number of micro-batches "
                "holds others from step to step.",
                use="accumulation=dynamic accumulation.docs_per_step=64 "
                "accumulation.micro_batches_per_step=null",
            )
        )
    if "groups" in family.asked:
        reason = "It depends on all completions of a prompt, which one step has to hold."
        problems += misfits_of_groups(setting, docs_per_step, group_size, reason)
        if correction != "none":
            problems.append(
                refusal(
                    setting=f"correction={correction}",
                    needs="a loss that does not ask for groups",
                    got=setting,
                    reason="The factor of one document would scale the others. A function may read "
                    "sampling_log_probs itself.",
                    use="correction=none",
                )
            )
    return problems

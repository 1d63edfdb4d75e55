"""The rules on penalties: the KL against a reference, and which reference there is."""

from __future__ import annotations

from typing import Any

from pgtoolkit.config.plan import vocabulary_size
from pgtoolkit.config.rules.run import existing
from pgtoolkit.system.model_folder import model_settings
from pgtoolkit.system.report import Report, is_whole, text


def penalties(c: Any, report: Report) -> None:
    if c.kl.kind == "none":
        _ignored(c, report)
        return
    coefficient, reference = c.kl.coefficient, c.kl.reference
    if coefficient is None:
        reason = "The penalty is multiplied by it."
        report.refuse(f"kl={c.kl.kind}", "kl.coefficient, a number", None, reason, "kl.coefficient=0.04")
    if reference is None:
        reason = "A penalty pulls to something."
        use = "kl.reference=initial for the run's first weights, or kl=none"
        report.refuse(f"kl={c.kl.kind}", "kl.reference", None, reason, use)
    if reference == "recorded" and c.rollout.name != "recorded":
        reason = "The reference's log-probs of completions that are still to be sampled are in no file."
        report.refuse("kl.reference=recorded", "rollout=recorded", "rollout=policy", reason, "kl.reference=initial")
    if reference is not None and (reference == "" or reference.startswith((".", "/", "~"))):
        existing(report, "kl.reference", reference)
    sizes = vocabulary_size(c.model, c.task), model_settings(reference).get("vocab_size")
    if all(is_whole(size) for size in sizes) and sizes[0] != sizes[1]:
        reason = "Its log-probs would be those of other tokens."
        use = "a model of the same family, or kl.reference=initial"
        report.refuse(f"kl.reference={reference}", f"a vocabulary of {sizes[0]} entries", sizes[1], reason, use)
    if needs_model(c) and (stages := c.parallelism.pipeline_parallel) > 1:
        reason = "The stages hand on the training policy's hidden states, and no others."
        use = "kl.reference=recorded, or parallelism.pipeline_parallel=1"
        report.refuse(f"kl={c.kl.kind}", "parallelism.pipeline_parallel=1", stages, reason, use)
    if c.kl.kind == "k1" and _alone(c):
        report.note(
            "kl=k1 with one optimizer step per batch of rollouts: the gradient of the penalty has mean 0 on the "
            "policy's own samples, so that it adds noise and pulls nowhere."
        )


def needs_model(c: Any) -> bool:
    """Whether a second model computes the reference's log-probs."""
    return c.kl.kind != "none" and c.kl.reference != "recorded"


def _ignored(c: Any, report: Report) -> None:
    for key in ("coefficient", "reference"):
        if (value := getattr(c.kl, key)) is not None:
            reason = "It would be ignored: there is no penalty against a reference."
            setting, use = f"kl.{key}={text(value)}", f"kl=k3 kl.{key}={text(value)}, or kl.{key}=null"
            report.refuse(setting, "kl=k1, k2, k3 or k3_ratio", "kl=none", reason, use)


def _alone(c: Any) -> bool:
    """Whether each step is made on completions that the weights it changes have just written."""
    docs = c.accumulation.docs_per_step
    return c.rollout.name == "policy" and docs == c.rollout.prompts_per_batch * c.rollout.group_size

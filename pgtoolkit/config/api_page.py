"""docs/api.md: the public functions and classes of Python, with their signatures and docstrings.

The files are read, not imported, so that no large library is loaded.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

_HEAD = """\
# Python: every function

After this page you know the arguments of each public function and class, their shapes, ranges and
errors, from the docstrings. [losses.md](losses.md#in-your-own-code) and [python.md](python.md) show
how they are used, and [keys.md](keys.md#correction) says what the fields of a correction are. This
page is written by `python -m pgtoolkit.config.pages`.
"""

_CORRECTIONS = (
    "TokenTruncate",
    "TokenMask",
    "SequenceTruncate",
    "SequenceMask",
    "OffPolicyMask",
)
_CALLS = ("compose", "check", "train", "sweep", "load", "compare")
_RESULTS = ("Run", "Runs", "Comparison")
_PUBLIC = {
    "The losses": {
        "api.py": {
            "policy_loss": "pgtoolkit.",
            "linear_policy_loss": "pgtoolkit.",
            "log_prob_loss": "pgtoolkit.",
            "step_coefficients": "pgtoolkit.",
            "StepCoefficients": "",
        },
        "losses/padded.py": {"from_padded": "pgtoolkit."},
        "losses/top_entropy.py": {"top_entropy": "pgtoolkit."},
        "kernels/losses.py": {"PolicyLoss": "pgtoolkit."},
        "batch.py": {"StepTotals": "pgtoolkit."},
        "losses/kl.py": {"KL": "pgtoolkit.kl."},
        "losses/adaptive_kl.py": {"AdaptiveKL": "pgtoolkit.losses.adaptive_kl."},
        "losses/corrections.py": dict.fromkeys(_CORRECTIONS, "pgtoolkit.corrections."),
        "testing.py": {"assert_conforms": "pgtoolkit.testing."},
    },
    "Steps of documents": {
        "document.py": dict.fromkeys(("SampledDocument", "Document"), "pgtoolkit.document."),
        "rollouts/steps.py": {"make_step": "pgtoolkit.rollouts.steps."},
        "training/accumulation.py": {"DynamicAccumulation": "pgtoolkit.training.accumulation."},
        "training/module.py": {"PolicyGradientModule": "pgtoolkit.training.module."},
    },
    "Parts of a training": {
        "losses/objective.py": {"Loss": "pgtoolkit.losses.objective."},
        "losses/aggregation.py": {"aggregation_of": "pgtoolkit.losses.aggregation."},
        "losses/function.py": {"FunctionLoss": "pgtoolkit.losses.function."},
        "rollouts/estimator.py": {"Estimator": "pgtoolkit.rollouts.estimator."},
        "rollouts/sampled.py": {"SampledRollouts": "pgtoolkit.rollouts.sampled."},
        "rollouts/recorded.py": {"RecordedRollouts": "pgtoolkit.rollouts.recorded."},
        "rollouts/step_loader.py": {"StepLoader": "pgtoolkit.rollouts.step_loader."},
        "sampling/samplers.py": {"TransformersSampler": "pgtoolkit.sampling.samplers."},
        "training/critic.py": {"with_value_head": "pgtoolkit.training.critic."},
        "training/fit.py": {"fit": "pgtoolkit.training.fit."},
    },
    "Experiments": {
        "experiment.py": dict.fromkeys(
            (*_CALLS, "Configuration", "Checked"), "pgtoolkit.experiment."
        ),
        "comparison/results.py": dict.fromkeys(_RESULTS, "pgtoolkit.experiment."),
    },
}
"""Part of the page -> file -> public name -> where it is imported from."""


def api_page() -> str:
    """Return the page."""
    lines = [_HEAD.rstrip()]
    for part, files in _PUBLIC.items():
        lines += ["", f"## {part}"]
        for file, names in files.items():
            tree = ast.parse((_PACKAGE / file).read_text(encoding="utf-8"))
            defined = {node.name: node for node in tree.body if isinstance(node, _Definition)}
            for name, place in names.items():
                lines += _entry(f"{place}{name}", defined[name])
    return "\n".join(lines) + "\n"


_Definition = ast.FunctionDef | ast.ClassDef


def _entry(title: str, node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Return the lines on a function, or on a class with its public methods."""
    lines = ["", f"### {title}", "", "```python"]
    if isinstance(node, ast.FunctionDef):
        lines += [*_signature(title, node), "```", "", *_docstring(node)]
        return lines
    fields = [
        f"    {_field(item)}"
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(item.annotation)
        and not ast.unparse(item.target).startswith("_")
    ]
    lines += [f"class {title}:" if fields else f"class {title}", *fields]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            del item.args.args[0]  # self
            lines += ["", *_signature(title, item)]
    lines += ["```", ""]
    lines += _docstring(node)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            is_property = any("property" in ast.unparse(mark) for mark in item.decorator_list)
            call = item.name if is_property else f"{item.name}()"
            first = (ast.get_docstring(item) or "").partition("\n\n")[0].replace("\n", " ")
            if first:
                lines += ["", f"`{call}`: {first}"]
    return lines


def _field(item: ast.AnnAssign) -> str:
    """Return a field with its default; that of a declared parameter is its first argument."""
    call = item.value
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "parameter" and call.args:
        item = ast.AnnAssign(item.target, item.annotation, call.args[0], item.simple)
    return ast.unparse(item)


def _signature(title: str, node: ast.FunctionDef) -> list[str]:
    """Return the signature, with a line for each argument where there are many."""
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    line = f"{title}({ast.unparse(node.args)}){result}"
    if len(line) <= 100:
        return [line]
    arguments = ast.unparse(node.args)
    # A comma within brackets belongs to a type.
    depth = 0
    cut = [""]
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            cut.append("")
        else:
            cut[-1] += character
    return [f"{title}(", *(f"    {argument.strip()}," for argument in cut), f"){result}"]


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    return ["```text", *text.split("\n"), "```"] if text else []

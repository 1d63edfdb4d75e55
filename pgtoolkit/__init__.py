"""Policy-gradient losses for language models, compared by declarative configuration.

The names below load torch when first used, so that the command line starts fast without it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the same names for type checkers
    from pgtoolkit import corrections, families, kl, testing
    from pgtoolkit.api import linear_policy_loss, log_prob_loss, policy_loss, step_coefficients
    from pgtoolkit.batch import StepTotals
    from pgtoolkit.kernels.losses import PolicyLoss
    from pgtoolkit.losses.padded import from_padded
    from pgtoolkit.losses.top_entropy import top_entropy

_NAMES = {
    "policy_loss": "pgtoolkit.api",
    "linear_policy_loss": "pgtoolkit.api",
    "log_prob_loss": "pgtoolkit.api",
    "step_coefficients": "pgtoolkit.api",
    "from_padded": "pgtoolkit.losses.padded",
    "top_entropy": "pgtoolkit.losses.top_entropy",
    "PolicyLoss": "pgtoolkit.kernels.losses",
    "StepTotals": "pgtoolkit.batch",
}
_MODULES = ("families", "corrections", "kl", "testing")

__all__ = [
    "PolicyLoss",
    "StepTotals",
    "corrections",
    "families",
    "from_padded",
    "kl",
    "linear_policy_loss",
    "log_prob_loss",
    "policy_loss",
    "step_coefficients",
    "testing",
    "top_entropy",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in __all__:
        from pgtoolkit.command import other_project

        problem = other_project()
        if problem:
            raise ImportError(problem)
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"pgtoolkit.{name}")
    message = f"module 'pgtoolkit' has no attribute {name!r}"
    if not name.startswith("_"):
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1)
        message += f". Did you mean {near[0]!r}?" if near else f". It has {', '.join(__all__)}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "importlib"})

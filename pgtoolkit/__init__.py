"""Policy-gradient losses for language models, compared by declarative configuration.

The names below load torch when first used, so that the command line starts fast without it.
"""

import importlib

_EXPORTS = {
    "policy_loss": "pgtoolkit.api",
    "linear_policy_loss": "pgtoolkit.api",
    "log_prob_loss": "pgtoolkit.api",
    "from_padded": "pgtoolkit.losses.padded",
    "PolicyLoss": "pgtoolkit.kernels.losses",
    "StepTotals": "pgtoolkit.batch",
    "families": "pgtoolkit.families",
    "corrections": "pgtoolkit.corrections",
    "kl": "pgtoolkit.kl",
}

__all__ = list(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pgtoolkit' has no attribute {name!r}")
    module = importlib.import_module(_EXPORTS[name])
    return module if name in ("families", "corrections", "kl") else getattr(module, name)

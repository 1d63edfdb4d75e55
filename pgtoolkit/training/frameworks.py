"""Lightning and transformers, without the libraries that they import for other purposes."""

import sys

from pgtoolkit.system.imports import imports_skipping

# Lightning asks whether a logged value is a metric of torchmetrics. Nothing is logged through it.
_STAND_INS: dict[str, tuple[str, ...]] = {"torchmetrics": ("Metric", "MetricCollection")}
# transformers needs scipy to match boxes in images. One that is imported already knows that it has
# scipy.
if "transformers" not in sys.modules:
    _STAND_INS["scipy"] = ()

with imports_skipping(**_STAND_INS):
    import lightning
    import lightning.pytorch.core.optimizer
    import transformers.modeling_utils
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

__all__ = ["LightningEnvironment", "lightning", "transformers"]

"""Lightning and the parts of transformers that every model needs, without what they bring along for
other purposes."""

import sys

from pgtoolkit.system.imports import without

# Lightning asks whether something logged is a metric object of torchmetrics; here nothing is logged
# through it.
_STAND_INS: dict[str, tuple[str, ...]] = {"torchmetrics": ("Metric", "MetricCollection")}
# transformers matches boxes in images by scipy; where it is imported already, it has seen that
# scipy is there.
if "transformers" not in sys.modules:
    _STAND_INS["scipy"] = ()

with without(**_STAND_INS):
    import lightning
    import lightning.pytorch.core.optimizer
    import transformers.modeling_utils
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

__all__ = ["LightningEnvironment", "lightning", "transformers"]

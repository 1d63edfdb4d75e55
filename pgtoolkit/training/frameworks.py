"""Lightning and the parts of transformers that every model needs, without what they bring along for other purposes."""

from pgtoolkit.system.imports import without

# Lightning asks whether something logged is a metric object of torchmetrics; here nothing is logged through it.
# transformers matches boxes in images by scipy.
with without(torchmetrics=("Metric", "MetricCollection"), scipy=()):
    import lightning
    import lightning.pytorch.plugins.environments
    import transformers.modeling_utils

__all__ = ["lightning", "transformers"]

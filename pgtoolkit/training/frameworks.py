"""Lightning and transformers, for the command without the libraries that they import for other
purposes."""

import sys

from pgtoolkit.system.imports import imports_skipping

_STAND_INS: dict[str, tuple[str, ...]] = {}
# A program of the user's, which does not load the command, gets both libraries as they are.
if "pgtoolkit.launch" in sys.modules:
    # Lightning asks whether a logged value is a metric of torchmetrics. The command logs nothing
    # through it, unless there are callbacks of the user's own: then `import_metrics` comes first.
    _STAND_INS["torchmetrics"] = ("Metric", "MetricCollection")
    # transformers needs scipy to match boxes in images. One that is imported already knows that it
    # has scipy.
    if "transformers" not in sys.modules:
        _STAND_INS["scipy"] = ()

with imports_skipping(**_STAND_INS):
    import lightning
    import lightning.pytorch.core.optimizer
    import transformers.modeling_utils
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.utilities.types import LRSchedulerConfig

__all__ = [
    "DummyLogger",
    "LRSchedulerConfig",
    "LightningEnvironment",
    "Logger",
    "Profiler",
    "callbacks",
    "lightning",
    "transformers",
]

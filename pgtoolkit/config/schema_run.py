"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.model.settings import AutoOrBool, NumberType
from pgtoolkit.model.settings import HuggingFaceModelSettings as HuggingFaceModelConfig
from pgtoolkit.model.settings import ModelSettings as ModelConfig
from pgtoolkit.model.settings import TinyModelSettings as TinyModelConfig
from pgtoolkit.tracking.settings import TrackingSettings as TrackingConfig
from pgtoolkit.training.settings import Device, Schedule
from pgtoolkit.training.settings import OptimizerSettings as OptimizerConfig
from pgtoolkit.training.settings import TrainerSettings as TrainerConfig

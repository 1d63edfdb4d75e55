"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.model.settings import ParallelismSettings as ParallelismConfig
from pgtoolkit.rollouts.settings import AccumulationSettings as AccumulationConfig
from pgtoolkit.rollouts.settings import LastStep
from pgtoolkit.training.settings import KernelImplementation, MetricsLevel
from pgtoolkit.training.settings import KernelSettings as KernelConfig
from pgtoolkit.training.settings import MetricsSettings as MetricsConfig

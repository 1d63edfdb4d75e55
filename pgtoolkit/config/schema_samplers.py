"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.rollouts.settings import EvaluationSettings as EvaluationConfig
from pgtoolkit.sampling.settings import SamplerSettings as SamplerConfig
from pgtoolkit.sampling.settings import TransformersSamplerSettings as TransformersSamplerConfig
from pgtoolkit.sampling.settings import VllmSamplerSettings as VllmSamplerConfig

"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.rollouts.settings import AdvantageEstimator
from pgtoolkit.rollouts.settings import AdvantageSettings as AdvantageConfig
from pgtoolkit.training.loss_settings import AggregationMode, KLKind, KLPlace
from pgtoolkit.training.loss_settings import AggregationSettings as AggregationConfig
from pgtoolkit.training.loss_settings import CorrectionSettings as CorrectionConfig
from pgtoolkit.training.loss_settings import CustomLossSettings as CustomLossConfig
from pgtoolkit.training.loss_settings import EntropySettings as EntropyConfig
from pgtoolkit.training.loss_settings import KLSettings as KLConfig
from pgtoolkit.training.loss_settings import LossSettings as LossConfig
from pgtoolkit.training.settings import CriticSettings as CriticConfig

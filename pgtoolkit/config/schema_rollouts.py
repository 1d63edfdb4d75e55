"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.rollouts.settings import (
    AHEAD,
    POSITION,
    Mixed,
    OldLogProbs,
    TrainedTurns,
    Truncated,
    Uninformative,
)
from pgtoolkit.rollouts.settings import PolicyRolloutSettings as PolicyRolloutConfig
from pgtoolkit.rollouts.settings import RecordedRolloutSettings as RecordedRolloutConfig
from pgtoolkit.rollouts.settings import RolloutSettings as RolloutConfig

"""The settings of tracking: where metrics are sent."""

from __future__ import annotations

from dataclasses import dataclass

from pgtoolkit.system.declared import (
    Needs,
    Option,
    Settings,
    key,
)

_NEEDS_MLFLOW: Needs = {"only_if": "tracking.name=mlflow"}
_NEEDS_PROJECT: Needs = {
    "only_if": "tracking.name=mlflow or tracking.name=wandb or tracking.also!=[]",
}


@dataclass(frozen=True, kw_only=True)
class TrackingSettings(Settings):
    name: str = key(option=True)
    also: list[str] = key(
        default=[],
        help="Further trackers, of wandb and tensorboard: tracking.also=[tensorboard].",
        added=True,
        only_if="tracking.name!=none",
        use="tracking=tensorboard",
    )
    uri: str | None = key(
        default=None,
        help="Address of the MLflow store: sqlite:///FILE, http://HOST:PORT or a database; null: "
        "that of MLFLOW_TRACKING_URI, else SQLite in outputs/mlflow.db.",
        **_NEEDS_MLFLOW,
    )
    experiment: str | None = key(
        default=None,
        help="The MLflow experiment, or project of Weights & Biases, that collects the runs; null: "
        "that of MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT, else pgtoolkit.",
        **_NEEDS_PROJECT,
    )
    run_name: str | None = key(
        default=None,
        help="Name of the run (at most 80 letters, digits, '.', '_', '-'); null: made of loss, "
        "aggregation and everything else that was typed.",
    )
    system_metrics: bool = key(
        default=False,
        help="Whether CPU, memory, disk, network and GPUs are measured every ten seconds (GPUs "
        "need the package nvidia-ml-py).",
        **_NEEDS_PROJECT,
    )


OPTIONS = {
    "tracking": {
        "mlflow": Option(
            TrackingSettings,
            help="Metrics, parameters, configuration and plots also go to MLflow.",
        ),
        "wandb": Option(
            TrackingSettings,
            help="Metrics and parameters also go to Weights & Biases; WANDB_MODE=offline keeps "
            "them in RUN/wandb. "
            'Needs pip install "pgtk[wandb]".',
            base="mlflow",
        ),
        "tensorboard": Option(
            TrackingSettings,
            help="Metrics and parameters are also written to RUN/tensorboard, for `tensorboard "
            "--logdir`. "
            'Needs pip install "pgtk[tensorboard]".',
            base="mlflow",
        ),
        "none": Option(
            TrackingSettings,
            help="Metrics go to the run directory alone: metrics.jsonl and curves.png.",
            base="mlflow",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""

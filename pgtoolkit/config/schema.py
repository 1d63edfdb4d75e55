"""The whole configuration: every group with its default option, and the seed.

Its keys are declared by the settings of the parts, each with its type, default, meaning, range and
whatever else holds for it. `python -m pgtoolkit.config.pages` writes conf/ and docs/keys.md from
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pgtoolkit.config.across import ASKED, CHANGES
from pgtoolkit.model import settings as of_model
from pgtoolkit.model.settings import (
    HuggingFaceModelSettings,
    ModelSettings,
    ParallelismSettings,
    TinyModelSettings,
)
from pgtoolkit.rollouts import settings as of_rollouts
from pgtoolkit.rollouts.settings import (
    POSITION,
    AccumulationSettings,
    AdvantageSettings,
    EvaluationSettings,
    PolicyRolloutSettings,
    RecordedRolloutSettings,
    RolloutSettings,
)
from pgtoolkit.sampling import settings as of_sampling
from pgtoolkit.sampling.settings import (
    SamplerSettings,
    TransformersSamplerSettings,
    VllmSamplerSettings,
)
from pgtoolkit.system.declared import Alters, Option, Settings, group, key
from pgtoolkit.tasks import settings as of_tasks
from pgtoolkit.tasks.settings import (
    ConversationTaskSettings,
    GuessTaskSettings,
    PromptsTaskSettings,
    ReasoningGymTaskSettings,
    ReverseTaskSettings,
    SumsTaskSettings,
    TaskSettings,
)
from pgtoolkit.tracking import settings as of_tracking
from pgtoolkit.tracking.settings import TrackingSettings
from pgtoolkit.training import loss_settings as of_loss
from pgtoolkit.training import settings as of_training
from pgtoolkit.training.loss_settings import (
    AggregationSettings,
    CorrectionSettings,
    EntropySettings,
    KLSettings,
    LossSettings,
)
from pgtoolkit.training.settings import (
    CallbacksSettings,
    CriticSettings,
    KernelSettings,
    MetricsSettings,
    OptimizerSettings,
    TrainerSettings,
)

if TYPE_CHECKING:
    Model = TinyModelSettings | HuggingFaceModelSettings
    Rollout = PolicyRolloutSettings | RecordedRolloutSettings
    Sampler = TransformersSamplerSettings | VllmSamplerSettings
    Task = (
        ReverseTaskSettings
        | GuessTaskSettings
        | SumsTaskSettings
        | ReasoningGymTaskSettings
        | PromptsTaskSettings
        | ConversationTaskSettings
    )
else:
    # OmegaConf, which checks types while a configuration is composed, takes no unions of classes.
    Model = ModelSettings
    Rollout = RolloutSettings
    Sampler = SamplerSettings
    Task = TaskSettings


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole experiment. The declaration of a group holds for those of its keys that do not
    declare it themselves.

    Where the options of a group have different keys, its value is an object of the class of the
    option that was chosen, which inherits from the one named here.
    """

    seed: int = key(
        default=0,
        help="Seed of the prompts, the weights and the sampling (integer from 0). The same seed on "
        "the same machine repeats the run bit for bit, on a GPU with trainer.deterministic.",
        least=0,
        most=2**32 - 1,
        fixed="prompts and the order of the data come from this seed",
        evaluate="model",
        alters=Alters.prompts,
    )
    loss: LossSettings = group(default="gspo", help="The loss family.", alters=Alters.formula)
    aggregation: AggregationSettings = group(
        default="sample_mean",
        help="How token losses become one number.",
        alters=Alters.formula,
    )
    correction: CorrectionSettings = group(
        default="none",
        help="A factor that corrects for the gap between sampler and trainer.",
        alters=Alters.formula,
    )
    kl: KLSettings = group(
        default="none",
        help="A penalty on the distance from a frozen reference.",
        alters=Alters.formula,
    )
    entropy: EntropySettings = group(
        default="bonus",
        help="A bonus on the entropy, once entropy.coefficient is above 0.",
        alters=Alters.formula,
    )
    metrics: MetricsSettings = group(
        default="basic", help="What is measured at every step.", alters=Alters.nothing
    )
    advantage: AdvantageSettings = group(
        default="dr_grpo", help="How rewards become advantages.", alters=Alters.formula
    )
    critic: CriticSettings = group(
        default="default",
        help="The value model, where advantage=gae.",
        learns="advantage.estimator=gae",
        only_if="advantage.estimator=gae",
        added=True,
        alters=Alters.formula,
    )
    kernel: KernelSettings = group(
        default="auto", help="What computes the log-probs.", alters=Alters.nothing
    )
    parallelism: ParallelismSettings = group(
        default="single",
        help="How the work is spread over processes.",
        alters=Alters.nothing,
    )
    accumulation: AccumulationSettings = group(
        default="dynamic", help="How documents form an optimizer step.", evaluate="kept"
    )
    model: Model = group(
        default="tiny", help="The policy.", evaluate="model", alters=Alters.nothing
    )
    task: Task = group(
        default="reverse",
        help="Prompts and their verifier.",
        fixed=POSITION,
        evaluate="run",
        only_if=f"{ASKED} or model.name=tiny",
    )
    rollout: Rollout = group(default="policy", help="Where completions come from.", evaluate="kept")
    sampler: Sampler = group(
        default="transformers",
        help="Who writes the completions of rollout=policy.",
        learns="rollout.name=policy",
        evaluate="run",
        only_if=ASKED,
    )
    optimizer: OptimizerSettings = group(
        default="adamw", help="AdamW, Muon or your own, and its schedule.", alters=Alters.nothing
    )
    evaluation: EvaluationSettings = group(
        default="default",
        help="Measuring on held-out prompts, once evaluation.every is above 0.",
        learns=False,
        evaluate="kept",
    )
    trainer: TrainerSettings = group(
        default="default", help="Length of the run, device, checkpoints.", evaluate="kept"
    )
    callbacks: CallbacksSettings = group(
        default="none",
        help="Callbacks, loggers and profilers of Lightning, of your own.",
        alters=Alters.nothing,
    )
    tracking: TrackingSettings = group(
        default="mlflow",
        help="Where metrics are sent besides the run directory.",
        learns=False,
        alters=Alters.nothing,
    )


_OPTIONS = (
    of_tasks.OPTIONS
    | of_model.OPTIONS
    | of_sampling.OPTIONS
    | of_rollouts.OPTIONS
    | of_loss.OPTIONS
    | of_training.OPTIONS
    | of_tracking.OPTIONS
)
OPTIONS: dict[str, dict[str, Option]] = {
    field.name: {
        name: replace(option, changes={**option.changes, **CHANGES.get(f"{field.name}/{name}", {})})
        for name, option in _OPTIONS[field.name].items()
    }
    for field in fields(Config)
    if field.name in _OPTIONS
}
"""Group -> option -> its keys, its meaning, and the values that it changes; in the order of
`Config`."""


@functools.cache
def default_options() -> dict[str, str]:
    """Return the default option of each group, in the order of `Config`."""
    return {
        field.name: field.metadata["group"].default
        for field in fields(Config)
        if field.name in OPTIONS
    }


def _schemas() -> dict[str, type[Settings]]:
    schemas = {}
    for name, options in OPTIONS.items():
        if len({option.schema for option in options.values()}) == 1:
            schemas[name] = next(iter(options.values())).schema
        else:
            schemas |= {f"{name}/{option}": of.schema for option, of in options.items()}
    return schemas


SCHEMAS = _schemas()
"""The class of each group's keys, GROUP/OPTION where they differ between its options."""

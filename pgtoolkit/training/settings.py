"""The settings of training: metrics, kernels, optimizer, critic, and how long and where it runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from pgtoolkit.system.declared import (
    Alters,
    AutoOrBool,
    Bounded,
    Declared,
    Dictionary,
    Needed,
    Option,
    Refusal,
    Settings,
    key,
)


class MetricsLevel(StrEnum):
    none = "none"
    basic = "basic"
    with_entropy = "with_entropy"


class KernelImplementation(StrEnum):
    auto = "auto"
    torch = "torch"
    triton = "triton"
    fused_linear = "fused_linear"


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(Settings):
    level: MetricsLevel = key(option=True, machine=True)


@dataclass(frozen=True, kw_only=True)
class KernelSettings(Settings):
    implementation: KernelImplementation = key(option=True, machine=True)
    logits_memory_mb: int | None = key(
        default=None,
        help="Memory for a piece of the logits where the LM head is fused with the loss, in MiB "
        "(>= 1); null: a sixty-fourth of the GPU's memory, at least 512, and 512 on a CPU.",
        least=1,
        most=2**20,
        machine=True,
    )

    @property
    def needs_gpu(self) -> bool:
        """True if Triton is to compile its kernels."""
        return self.implementation == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


@dataclass(frozen=True, kw_only=True)
class CriticSettings(Settings):
    path: str | None = key(
        default=None,
        help="The model with whose body the critic starts: a folder or a name on the Hugging Face "
        "hub, with the policy's vocabulary; null: the weights that the policy starts from. The "
        "critic's head starts at 0.",
        reads="reference",
        fixed="the checkpoint holds the critic's weights",
    )
    learning_rate: float = key(
        help="Learning rate of the critic after the warm-up (> 0); the rest of its optimizer is as "
        "in the group optimizer.",
        least=1e-12,
        most=1e5,
    )
    clip: float | None = key(
        default=0.5,
        help="Once a value has moved this far from where it was when training on the batch began, "
        "its loss gives no further gradient (> 0); null: there is no limit.",
        least=1e-9,
        most=1e12,
    )
    steps_before_policy: int = key(
        default=0,
        help="Steps at the start that train the critic alone (>= 0, fewer than trainer.max_steps).",
        least=0,
        most=10**9,
    )


_CUT: Declared = {"learns": False, "alters": Alters.nothing}
"""Runs that differ only in rounding are the same experiment."""


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerName(StrEnum):
    adamw = "adamw"
    muon = "muon"
    custom = "custom"


_OF_ADAMW: Refusal = {
    "only_if": "optimizer.name=adamw",
    "use": "optimizer=adamw",
    "why": "Others have values of their own.",
}


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


OPTIMIZER_PATH = Needed(
    "optimizer=custom",
    needs="optimizer.path!=null",
    because="The class at that path is the optimizer.",
    use="optimizer=torch.optim.RMSprop",
)


LEAST_RATE = Bounded("min_learning_rate", "learning_rate", because="A schedule falls to it.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    needed = (OPTIMIZER_PATH,)
    bounded = (LEAST_RATE,)

    name: OptimizerName = key(
        default=OptimizerName.adamw,
        option=True,
        learns="optimizer.name=muon or optimizer.name=custom",
        fixed="the checkpoint holds the optimizer's moments",
        added=True,
    )
    learning_rate: float = key(
        help="Learning rate after the warm-up (> 0).",
        least=1e-12,
        most=1e5,
    )
    beta1: float = key(
        default=0.9,
        help="Decay of the mean of gradients (0 <= beta1 < 1).",
        least=0,
        most=0.999999,
        **_OF_ADAMW,
    )
    beta2: float = key(
        default=0.95,
        help="Decay of the mean of squared gradients (0 <= beta2 < 1).",
        least=0,
        most=0.999999,
        **_OF_ADAMW,
    )
    epsilon: float = key(
        default=1e-8,
        help="Added to the root of the mean squared gradient (> 0).",
        least=1e-30,
        most=1e4,
        **_OF_ADAMW,
    )
    weight_decay: float = key(
        default=0.01,
        help="Decoupled weight decay (>= 0) of tensors of two dimensions or more, so of no norm "
        "and no bias; an optimizer of your own gets it if it has one.",
        least=0,
        most=10,
    )
    max_grad_norm: float | None = key(
        default=1.0,
        help="Norm to which larger gradients are scaled down (> 0); null: they are not.",
        least=1e-6,
        most=1e9,
    )
    warmup_steps: int = key(
        default=10,
        help="Steps over which the learning rate rises linearly from 0 (>= 0).",
        least=0,
        most=10**9,
    )
    schedule: Schedule = key(
        default=Schedule.constant,
        help="The learning rate after the warm-up: constant, or linear or cosine down to 0 (or "
        "optimizer.min_learning_rate) at trainer.max_steps.",
    )
    min_learning_rate: float = key(
        default=0.0,
        help="Learning rate to which a schedule falls: that of the update after "
        "trainer.max_steps; 0: to 0.",
        least=0,
        most=1e5,
        learns="optimizer.min_learning_rate>0",
        added=True,
        only_if="optimizer.schedule!=constant",
        use="optimizer.schedule=cosine",
    )
    path: str | None = key(
        default=None,
        help="Dotted path `package.module.Class` of an optimizer in PyTorch's form, in the current "
        "directory or installed; null: none. optimizer=package.module.Class sets it.",
        code="function",
        stands_for="custom",
        learns="optimizer.name=custom",
        fixed="the checkpoint holds the optimizer's state",
        added=True,
        only_if="optimizer.name=custom",
        use="optimizer=package.module.Class",
    )
    options: Dictionary = key(
        default={},
        help="Values of its parameters by their names: optimizer.NAME=VALUE sets one.",
        free=True,
        gathers=True,
        learns="optimizer.name=custom",
        fixed="the checkpoint holds the optimizer's state",
        added=True,
        only_if="optimizer.name=custom",
        use="optimizer=package.module.Class",
    )


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Settings):
    max_steps: int = key(
        default=300,
        help="Optimizer steps of the run (>= 1); it has fewer if the data ends earlier.",
        least=1,
        most=10**9,
        alters=Alters.nothing,
    )
    device: Device = key(
        default=Device.auto,
        help="Where to compute: auto (a GPU if there is one), cpu or cuda.",
        evaluate="run",
        machine=True,
        alters=Alters.nothing,
    )
    num_threads: int | None = key(
        default=1,
        help="CPU threads of torch (>= 1); null: as many as torch chooses. One is the fastest for "
        "the tiny model, and repeatable.",
        least=1,
        most=1024,
        evaluate="run",
        machine=True,
        alters=Alters.nothing,
    )
    deterministic: AutoOrBool = key(
        default="auto",
        help="Whether a GPU adds up in the same order each time, and so repeats a run bit for bit; "
        "auto: as far as it can. The backward pass of attention takes 7 % longer for it, 16 % with "
        "documents of 4096 tokens, and 26 % with a single one of 65536.",
        **_CUT,
    )
    checkpoint_every: int = key(
        default=100,
        help="Steps between checkpoints (>= 1); one is also written at the end and when the run is "
        "interrupted.",
        least=1,
        most=10**9,
        learns=False,
        alters=Alters.nothing,
    )
    keep_checkpoints: int = key(
        default=2,
        help="Checkpoints kept in the run directory (>= 1), the newest ones.",
        least=1,
        most=10**6,
        learns=False,
        alters=Alters.nothing,
    )
    max_bad_steps: int = key(
        default=3,
        help="Consecutive steps with a non-finite loss or gradient after which the run fails (>= "
        "1). Such steps change no weights.",
        least=1,
        most=10**6,
        last_counts=True,
        alters=Alters.nothing,
    )
    accept_changed_data: bool = key(
        default=False,
        help="Whether a resumed run continues although prompts, recorded rollouts or a model "
        "folder have changed. It is to be typed at each resume.",
        learns=False,
        alters=Alters.nothing,
    )
    stop_at: float | None = key(
        default=None,
        help="The run ends once the number of evaluation.best reaches this value (>= 0); null: it "
        "goes on to max_steps.",
        least=0,
        most=1e9,
        last_counts=True,
        alters=Alters.end,
    )


@dataclass(frozen=True, kw_only=True)
class CallbacksSettings(Settings):
    own: Dictionary = key(
        default={},
        help="Name -> `path`, the dotted path of a class of a callback, logger or profiler of "
        "Lightning, and the arguments that it is called with: callbacks.NAME.path=PATH "
        "callbacks.NAME.ARGUMENT=VALUE.",
        free=True,
        gathers=True,
        code="function",
        learns="callbacks.own!={}",
        added=True,
    )


OPTIONS = {
    "metrics": {
        "none": Option(
            MetricsSettings,
            help="Only the loss, the gradient norm, the log-probs, and metrics of the data.",
            base="basic",
        ),
        "basic": Option(
            MetricsSettings,
            help="Also ratios, clipping, KL and advantages, without an extra pass.",
        ),
        "with_entropy": Option(
            MetricsSettings,
            help="As basic, with the entropy of the policy at every trained position, which is "
            "computed in the same pass over the vocabulary.",
            base="basic",
        ),
    },
    "kernel": {
        "auto": Option(
            KernelSettings,
            help="The fastest implementation for the device.",
        ),
        "torch": Option(
            KernelSettings,
            help="Plain PyTorch on materialised logits; it runs everywhere, and is the easiest to "
            "read.",
            base="auto",
        ),
        "triton": Option(
            KernelSettings,
            help="Triton kernels on materialised logits; they need a GPU, or TRITON_INTERPRET=1 "
            "for tests.",
            base="auto",
        ),
        "fused_linear": Option(
            KernelSettings,
            help="The LM head fused with the loss: the logits never exist in full, only one piece "
            "at a time.",
            base="auto",
        ),
    },
    "critic": {
        "default": Option(
            CriticSettings,
            help="The value model of advantage=gae.",
        ),
    },
    "optimizer": {
        "adamw": Option(
            OptimizerSettings,
            help="AdamW; no weight decay on norms and biases.",
        ),
        "muon": Option(
            OptimizerSettings,
            help="Muon, whose updates of matrices are orthogonal, in the size of AdamW's, for "
            "those but embeddings and heads; AdamW for all else. No weight decay on norms and "
            "biases.",
            base="adamw",
        ),
        "custom": Option(
            OptimizerSettings,
            help="An optimizer of your own in PyTorch's form, which "
            "optimizer=my_module.MyOptimizer chooses. No weight decay on norms and biases.",
            base="adamw",
        ),
    },
    "trainer": {
        "default": Option(
            TrainerSettings,
            help="Length of the run, device and checkpoints.",
        ),
    },
    "callbacks": {
        "none": Option(
            CallbacksSettings,
            help="No callbacks, loggers or profilers of your own.",
        ),
    },
}
"""Group -> option -> its keys, its meaning, and the values that it changes."""

"""A step of a run repeated in memory, by the code that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pgtoolkit.assembly.build import accelerator, build, loader_of
from pgtoolkit.batch import MicroBatch, Step, StepTotals
from pgtoolkit.config.schema import Config, Rollout
from pgtoolkit.document import TOP_VECTORS, Document, have_old_log_probs
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.model.settings import ParallelismSettings
from pgtoolkit.rollouts.advantages import Shape
from pgtoolkit.rollouts.parsed_rows import parse_row
from pgtoolkit.rollouts.passes import Passes
from pgtoolkit.rollouts.recording import batch_file
from pgtoolkit.rollouts.rows import FIELDS, RecordedRow, Rules
from pgtoolkit.rollouts.settings import AdvantageSettings, PolicyRolloutSettings
from pgtoolkit.rollouts.source import Source
from pgtoolkit.sampling.settings import TransformersSamplerSettings
from pgtoolkit.system.conditions import with_values
from pgtoolkit.tasks.row_files import open_files
from pgtoolkit.training.callbacks import OwnParts
from pgtoolkit.training.checkpoint import reading_checkpoint
from pgtoolkit.training.fit import RunCallback, run_steps
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.loss_settings import KLSettings
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.run_log import quieten
from pgtoolkit.training.state import restore


@dataclass(frozen=True)
class MeasuredMicroBatch:
    """A micro-batch of the step, on the CPU, without what the run's own loss alone has asked for.

    log_probs: (T,), as training computed them. entropy: (T,), of the policy.
    fp32_log_probs: (T,), with float32 logits; None where training has these already.
    at_temperatures: (T,) log-probs by the temperature that they were asked for at.
    """

    micro_batch: MicroBatch
    log_probs: Tensor
    entropy: Tensor
    fp32_log_probs: Tensor | None = None
    at_temperatures: dict[float, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MadeStep:
    """A repeated step, before its update. metrics: as a row of metrics.jsonl has them.

    has_groups: whether the data says which documents share a prompt. documents: where they come
        from, in words. shape: what happened to rewards before the loss got them.
    """

    step: Step
    pieces: list[MeasuredMicroBatch]
    metrics: dict[str, float]
    has_groups: bool
    documents: str
    module: PolicyGradientModule
    shape: Shape = field(default_factory=Shape)

    @property
    def has_old_log_probs(self) -> bool:
        """True if all documents have old log-probs; without them there are no ratios."""
        return have_old_log_probs(self.step.documents)


def make_again(
    config: Config, checkpoint: dict | None, number: int, temperatures: Sequence[float] = ()
) -> MadeStep:
    """Repeat step `number` of the run that `config` describes, from a checkpoint before it, or from
    the start.

    temperatures: at which log-probs of the step are wanted, too.

    All steps after the checkpoint are made as training makes them, in this process; nothing is
    written. Documents are those that the run has recorded (rollout.save_path), if their files are
    there; else those that the checkpoint holds, and those that are sampled, or read, as the run
    did. Raises DataError if the data ends before the step, or a recorded batch is missing.
    """
    quieten()
    config_of_run = config
    config = _in_this_process(config)
    module, loader = build(config, evaluates=False)
    has_groups = loader.source.has_groups
    watch = _Watch(number, checkpoint, config_of_run.sampler.name, temperatures)
    recorded = _recorded_documents(config_of_run.rollout, config_of_run.kl, config_of_run.advantage)
    try:
        if recorded is not None:
            assert isinstance(config.rollout, PolicyRolloutSettings)
            loader.source.close()
            passes = Passes.of(config.rollout, config.seed)
            size = module.policy.vocabulary_size
            source = RecordedBatches(recorded, config.rollout, size, passes)
            loader = loader_of(source, module.loss, config.accumulation, config.trainer.max_steps)
        if checkpoint is not None:
            with reading_checkpoint(checkpoint["path"]):
                loader.load_state_dict(checkpoint["data"])
        try:
            device = accelerator(config.trainer.device, config.kernel)
            run_steps(
                module,
                loader,
                OwnParts(),
                recorder=watch,
                on_cpu=device == "cpu",
            )
        except SystemExit as stop:  # Lightning turns Ctrl-C into it
            raise KeyboardInterrupt from stop
    finally:
        loader.source.close()
    if watch.step is None:
        raise DataError(
            f"--step={number} needs data for {number} steps (got {watch.last}). Use "
            f"--step={watch.last}."
        )
    if not watch.pieces:
        raise DataError(
            f"--step={number} needs a step with trained tokens (got none). Use another --step."
        )
    documents = _origin_of_documents(config_of_run.rollout, recorded, watch.sampled)
    return MadeStep(
        watch.step, watch.pieces, watch.metrics, has_groups, documents, module, module.shape
    )


def _origin_of_documents(rollout: Rollout, recorded: Path | None, sampled: bool) -> str:
    """Return where the documents of a repeated step come from, in words."""
    if not isinstance(rollout, PolicyRolloutSettings):
        return f"read from {rollout.path}"
    if recorded is not None:
        return f"recorded by the run in {recorded}"
    if sampled:
        return "sampled by the seeds of their prompts"
    return "held by the checkpoint"


def _recorded_documents(
    rollout: Rollout, kl: KLSettings, advantage: AdvantageSettings
) -> Path | None:
    """Return the folder of the documents that the run has recorded, None if they cannot be used."""
    folder = getattr(rollout, "save_path", None)
    if folder is None or not Path(folder).is_dir():
        return None
    # Recorded documents lack the prompts that a reference model may read in the place of the
    # policy's, and the critic's values of their tokens.
    is_complete = kl.reference_prompt is None and advantage.estimator != "gae"
    return Path(folder) if is_complete else None


def _in_this_process(config: Config) -> Config:
    """Return the same experiment in one process that writes nothing and starts no server."""
    sizes = {
        "data_parallel": 1,
        "tensor_parallel": 1,
        "sequence_data_parallel": 1,
        "pipeline_parallel": 1,
    }
    parallelism: ParallelismSettings = replace(
        config.parallelism, **sizes, shard=False, sequence_parallel=False
    )
    config = replace(config, parallelism=parallelism)
    if isinstance(config.rollout, PolicyRolloutSettings):
        config = with_values(config, {"rollout.save_path": None})
        static_cache = getattr(config.sampler, "static_cache", None)
        max_sequences = None
        if config.sampler.name == "transformers":
            max_sequences = config.sampler.max_sequences
        sampler = TransformersSamplerSettings(
            max_sequences=max_sequences,
            dtype=config.sampler.dtype,
            static_cache=static_cache,
            keep_top=config.sampler.keep_top,
        )
        config = replace(config, sampler=sampler)
    return config


class RecordedBatches(Source):
    """A run's recorded batches, as the source of its documents by their position in the run."""

    def __init__(
        self, folder: Path, rollout: PolicyRolloutSettings, vocabulary_size: int, passes: Passes
    ):
        self._folder = folder
        self.passes = passes
        self.batch_size = rollout.prompts_per_batch * rollout.group_size
        self._rules = Rules(vocabulary_size, ("old_log_probs", "advantage"))
        self._batch: tuple[int, list[Document]] = (-1, [])

    def document(self, position: int) -> Document:
        number, place = divmod(position, self.batch_size)
        if number != self._batch[0]:
            self._batch = (number, self._read(number))
        return self._batch[1][place]

    def _read(self, number: int) -> list[Document]:
        path = batch_file(self._folder, number)
        if not path.is_file():
            raise DataError(
                f"rollout.save_path={self._folder} needs the file of batch {number} (got none). "
                "The documents of the step are in it. Restore it, or use another --step."
            )
        parsed = [parse_row(raw, self._rules) for _, _, raw in open_files([path], FIELDS)[0].rows()]
        rows = [row for row in parsed if isinstance(row, RecordedRow)]
        if len(rows) != self.batch_size or len(rows) < len(parsed):
            raise DataError(
                f"{path} needs the {self.batch_size} documents of a batch (got others). Restore it."
            )
        return [row.document(None, row.group_id, row.id, row.trajectory) for row in rows]


class _Watch(RunCallback):
    """Callback that begins training at a checkpoint, ends it after step `number`, and keeps that
    step's log-probs.

    sampler: the name of the run's own, since the sampler may have been replaced for the repetition.
    temperatures: see `make_again`.
    last: the last step that was begun. sampled: whether any step needed new completions.
    """

    def __init__(
        self,
        number: int,
        checkpoint: dict | None,
        sampler: str,
        temperatures: Sequence[float],
    ):
        self._number = number
        self._checkpoint = checkpoint
        self._sampler = sampler
        self._temperatures = temperatures
        self.last = 0
        self.sampled = False
        self.step: Step | None = None
        self.pieces: list[MeasuredMicroBatch] = []
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer: lightning.Trainer, module: PolicyGradientModule) -> None:
        if self._checkpoint is not None:
            restore(module, self._checkpoint)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        module: PolicyGradientModule,
        batch: Step,
        batch_idx: int,
    ) -> None:
        self.last = batch.state_after["num_steps"]
        self.sampled |= batch.seconds.get("sampling", 0) > 0
        if self.sampled and self._sampler != "transformers":
            raise ConfigError(
                f"--step={self._number} needs recorded rollouts (got none). Servers wrote the "
                "run's completions, which would be others now. Use a step whose documents a "
                "checkpoint holds, or rollout.save_path=FOLDER in a new run."
            )
        if self.last == self._number:
            self.step = batch
            module.micro_batch_loss = partial(self._keep, module, module.micro_batch_loss)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: PolicyGradientModule,
        outputs: dict,
        batch: Step,
        batch_idx: int,
    ) -> None:
        if self.step is not None:
            self.metrics = outputs["metrics"]
            trainer.should_stop = True

    def _keep(
        self,
        module: PolicyGradientModule,
        loss_of: Callable[[MicroBatch, StepTotals], PolicyLoss],
        micro_batch: MicroBatch,
        totals: StepTotals,
    ) -> PolicyLoss:
        """Return the loss as training computes it, and keep the micro-batch with its entropies
        before the update."""
        loss = loss_of(micro_batch, totals)
        # Another loss that is shown has other coefficients and may keep other tokens, and may ask
        # for no rewards.
        of_own_loss = ("coefficients", "factors", "rewards", "group_rewards", *TOP_VECTORS)
        plain = replace(micro_batch, **dict.fromkeys(of_own_loss))
        completed = module.with_reference(plain)
        entropy = module.entropy(micro_batch)
        others = {}
        for temperature in self._temperatures:
            is_own = temperature == module.loss.temperature
            log_probs = loss.log_probs if is_own else module.log_probs(plain, temperature)
            others[temperature] = log_probs.cpu()
        if completed.old_log_probs is None:
            completed = replace(completed, old_log_probs=loss.log_probs)
        exact = None
        policy = module.policy
        if policy.compute_dtype != torch.float32 and not policy.fp32_lm_head:
            module.policy = replace(policy, fp32_lm_head=True)
            exact = module.log_probs(micro_batch).cpu()
            module.policy = policy
        # The copies of log-probs and entropies wait for the device, and for the copies before them.
        self.pieces.append(
            MeasuredMicroBatch(
                completed.to(torch.device("cpu")),
                loss.log_probs.cpu(),
                entropy.cpu(),
                exact,
                others,
            )
        )
        return loss

"""A step of a run made again in memory, and what losses make of its tokens, each number by the code that trains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pgtoolkit.batch import Document, MicroBatch, Step, have_old_log_probs
from pgtoolkit.config.schema import Config, ParallelismConfig
from pgtoolkit.config.schema_completions import PolicyRolloutConfig, TransformersSamplerConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.metrics import clips
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.piece import make_objective
from pgtoolkit.rollouts.recording import batch_file
from pgtoolkit.rollouts.rows import FIELDS, Row, Rules, parse_row
from pgtoolkit.rollouts.steps import Source
from pgtoolkit.tasks.row_files import open_files
from pgtoolkit.training.build import build, fit, loader_of
from pgtoolkit.training.frameworks import lightning
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.state import restore
from pgtoolkit.training.train import quieten

CLIPS = (
    *("inside", "below, unchanged", "below, capped", "below, cut"),
    *("above, unchanged", "above, capped", "above, cut", "clamped"),
)
"""What a bound does to a token, by number.

Below or above the family's bounds the coefficient is unchanged where the advantage has the other sign, capped where a
gradient is left (a weight that stays at the bound), or cut to 0. Clamped: the log-ratio lies beyond plus or minus 20.
"""


@dataclass(frozen=True)
class Piece:
    """A micro-batch of the step on the CPU, with (T,) log-probs as training found them, and entropies."""

    micro_batch: MicroBatch
    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class MadeStep:
    """A step as it was made, before its update. metrics: as a row of metrics.jsonl has them.

    has_groups: whether the data says which documents share a prompt. documents: where they come from, in words.
    """

    step: Step
    pieces: list[Piece]
    metrics: dict[str, float]
    has_groups: bool
    documents: str
    module: PolicyGradientModule

    @property
    def has_old_log_probs(self) -> bool:
        """Whether all documents have them; else no ratio means anything."""
        return have_old_log_probs(self.step.documents)


def make_again(config: Config, checkpoint: dict | None, number: int) -> MadeStep:
    """Step `number` of the run that `config` describes, from a checkpoint before it, or from the start.

    All steps after the checkpoint are made as training makes them, in this process; nothing is written. Documents are
    those that the run has recorded (rollout.save_path), if their files are there; else those that the checkpoint
    holds, and those that are sampled, or read, as the run did.
    Raises DataError if the data ends before, or a recorded batch is missing.
    """
    quieten()
    of_run, config = config, _in_this_process(config)
    module, loader = build(config)
    has_groups, watch = loader.source.has_groups, _Watch(number, checkpoint, of_run)
    folder = getattr(of_run.rollout, "save_path", None)
    # Recorded documents do not say what the reference has read in the place of their prompts.
    is_recorded = folder is not None and Path(folder).is_dir() and config.kl.reference_prompt is None
    try:
        if is_recorded:
            loader.source.close()
            source = RecordedBatches(Path(folder), config.rollout, module.policy.vocabulary_size)
            loader = loader_of(source, config)
        if checkpoint is not None:
            loader.load_state_dict(checkpoint["data"])
        try:
            fit(module, loader, config, watch)
        except SystemExit as stop:  # what Lightning makes of it
            raise KeyboardInterrupt from stop
    finally:
        loader.source.close()
    if watch.step is None:
        last = watch.last
        raise DataError(
            f"--step={number} needs so many steps of data (got {last}). Nothing is left. Use --step={last}."
        )
    if not watch.pieces:
        raise DataError(f"--step={number} needs a step with trained tokens (got none). Use another --step.")
    if not isinstance(of_run.rollout, PolicyRolloutConfig):
        documents = f"read from {of_run.rollout.path}"
    elif is_recorded:
        documents = f"recorded by the run in {folder}"
    else:
        documents = "sampled by the seeds of their prompts" if watch.sampled else "held by the checkpoint"
    return MadeStep(watch.step, watch.pieces, watch.metrics, has_groups, documents, module)


def _in_this_process(config: Config) -> Config:
    """The same experiment in one process that writes nothing and starts no server."""
    sizes = {"data_parallel": 1, "tensor_parallel": 1, "sequence_data_parallel": 1, "pipeline_parallel": 1}
    alone: ParallelismConfig = replace(config.parallelism, **sizes, shard=False, sequence_parallel=False)
    config = replace(config, parallelism=alone, evaluation=replace(config.evaluation, every=0))
    if isinstance(config.rollout, PolicyRolloutConfig):
        config.rollout = replace(config.rollout, save_path=None)
        if not isinstance(config.sampler, TransformersSamplerConfig):
            config.sampler = TransformersSamplerConfig("transformers", None, None)
    return config


class RecordedBatches(Source):
    """The batches that a run has recorded, as a source of the documents that stood at these positions of it."""

    def __init__(self, folder: Path, rollout: PolicyRolloutConfig, vocabulary_size: int):
        self._folder = folder
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
                f"rollout.save_path={self._folder} needs the file of batch {number} (got none). The documents of the "
                "step are in it. Restore it, or use another --step."
            )
        rows = [parse_row(raw, self._rules) for _, _, raw in open_files([path], FIELDS)[0].rows()]
        if len(rows) != self.batch_size or not all(isinstance(row, Row) for row in rows):
            raise DataError(f"{path} needs the {self.batch_size} documents of a batch (got others). Restore it.")
        return [row.document(None, row.group_id, row.id, row.trajectory) for row in rows]


class _Watch(lightning.Callback):
    """Has training begin at a checkpoint and end after a step, whose log-probs it keeps."""

    def __init__(self, number: int, checkpoint: dict | None, config: Config):
        self._number, self._checkpoint, self._config = number, checkpoint, config
        self.last, self.sampled = 0, False
        self.step: Step | None = None
        self.pieces: list[Piece] = []
        self.metrics: dict[str, float] = {}

    def on_train_start(self, trainer, module) -> None:
        if self._checkpoint is not None:
            restore(module, self._checkpoint)

    def on_train_batch_start(self, trainer, module, batch: Step, batch_idx: int) -> None:
        self.last = batch.state_after["num_steps"]
        self.sampled |= batch.seconds.get("sampling", 0) > 0
        if self.sampled and self._config.sampler.name != "transformers":
            raise ConfigError(
                f"--step={self._number} needs recorded rollouts (got none). Servers wrote the run's completions, which "
                "would be others now. Use a step whose documents a checkpoint holds, or rollout.save_path=FOLDER in a "
                "new run."
            )
        if self.last == self._number:
            self.step = batch
            module.micro_batch_loss = partial(self._kept, module, module.micro_batch_loss)

    def on_train_batch_end(self, trainer, module, outputs: dict, batch: Step, batch_idx: int) -> None:
        if self.step is not None:
            self.metrics = outputs["metrics"]
            trainer.should_stop = True

    def _kept(self, module, loss_of, micro_batch: MicroBatch, totals) -> PolicyLoss:
        """What training computes; beside it the entropies, before the update."""
        out = loss_of(micro_batch, totals)
        known, entropy = module.with_reference(micro_batch), module.entropy(micro_batch)
        if known.old_log_probs is None:
            known = replace(known, old_log_probs=out.log_probs)
        # The copies of log-probs and entropies wait for the device, and for the copies before them.
        self.pieces.append(Piece(known.to("cpu"), out.log_probs.cpu(), entropy.cpu()))
        return out


@dataclass(frozen=True)
class LossOnStep:
    """What one loss makes of a step. label: the overrides that choose it. lines: its equation.

    total: the step's loss, as training adds it up. vectors: by name, one number per trained token of the step in the
    order of its documents, float32 but for clip:
        ratio: the token's, or its document's where the family's scope is the document.
        clip: uint8, a place of CLIPS.
        weight: w_t, without the factor of a correction. factor: that factor; missing where there is no correction.
        coefficient: c_t, the derivative of the step's loss by the token's log-prob; without an entropy bonus.
        share: what the token adds to the step's loss, penalty and bonus included.
    """

    loss: Loss
    total: float
    vectors: dict[str, np.ndarray]
    label: str = ""
    lines: list[str] = field(default_factory=list)

    def count(self, *clips: str) -> int:
        """How many tokens a bound does one of these to."""
        return int(np.isin(self.vectors["clip"], [CLIPS.index(clip) for clip in clips]).sum())


def loss_on_step(made: MadeStep, loss: Loss) -> LossOnStep:
    """The loss on the step's documents. Raises ConfigError for what they lack, DataError for what is not finite."""
    _check_documents(made, loss)
    parts = [_numbers(loss, piece, made) for piece in made.pieces]
    names = parts[0].keys()
    vectors = {name: np.concatenate([part[name] for part in parts]) for name in names}
    return LossOnStep(loss, float(vectors["share"].astype(np.float64).sum()), vectors)


def common_vectors(made: MadeStep) -> dict[str, np.ndarray]:
    """By name, float32, one number per trained token: what is the same whatever the loss.

    advantage; new_log_prob, under the weights before the step's update; old_log_prob; entropy of the policy; and where
    they are known sampling_log_prob, with difference, the old less the sampling one, and ref_log_prob.
    """
    parts = [_common(piece, made.has_old_log_probs) for piece in made.pieces]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _common(piece: Piece, with_old: bool) -> dict[str, np.ndarray]:
    tokens, trained = piece.micro_batch, piece.micro_batch.labels >= 0
    vectors = {"advantage": tokens.advantages, "new_log_prob": piece.log_probs}
    if with_old:
        vectors["old_log_prob"] = tokens.old_log_probs
    if tokens.sampling_log_probs is not None:
        vectors["sampling_log_prob"] = tokens.sampling_log_probs
        vectors["difference"] = tokens.old_log_probs - tokens.sampling_log_probs
    if tokens.ref_log_probs is not None:
        vectors["ref_log_prob"] = tokens.ref_log_probs
    vectors["entropy"] = piece.entropy
    return {name: _of_trained(values, trained) for name, values in vectors.items()}


def _numbers(loss: Loss, piece: Piece, made: MadeStep) -> dict[str, np.ndarray]:
    log_probs = piece.log_probs
    objective = make_objective(piece.micro_batch, made.step.totals, loss, log_probs.dtype, Ranks())
    objective.check_finite(log_probs)
    losses, coefficients = objective.losses_and_coefficients(log_probs)
    terms, penalties = objective.token_terms(log_probs), objective.penalties
    vectors = {
        "clip": _clips(loss, piece, made),
        "weight": penalties.weights,
        "coefficient": coefficients,
        "share": losses + penalties.by_entropy * piece.entropy if penalties.bonus else losses,
    }
    if made.has_old_log_probs:
        vectors["ratio"] = terms.ratio
    if (factors := objective.factors or terms.factors) is not None:
        vectors["factor"] = factors.values
    return {name: _of_trained(values, objective.mask) for name, values in vectors.items()}


def _clips(loss: Loss, piece: Piece, made: MadeStep) -> Tensor:
    """(T,) uint8: places of CLIPS. Of the family alone: a correction may leave a gradient of 0, too."""
    log_probs, alone = piece.log_probs, replace(loss, correction=None)
    objective = make_objective(piece.micro_batch, made.step.totals, alone, log_probs.dtype, Ranks())
    if not (made.has_old_log_probs and loss.family.reads_old_log_probs):
        return torch.zeros_like(log_probs, dtype=torch.uint8)
    terms = objective.token_terms(log_probs)
    low, high, cut_low, cut_high = clips(objective, log_probs)
    effect = torch.where(terms.slope == 0, 3, 2)
    below = torch.where(cut_low, effect, low.long())
    above = torch.where(cut_high, effect, high.long())
    places = torch.where(above > 0, above + 3, below)
    return torch.where(terms.clamped, len(CLIPS) - 1, places).to(torch.uint8)


def _of_trained(values: Tensor, trained: Tensor) -> np.ndarray:
    values = values[trained]
    return (values if values.dtype == torch.uint8 else values.float()).numpy()


def _check_documents(made: MadeStep, loss: Loss) -> None:
    """ConfigError where the loss reads what the step's documents do not have, or is not of single tokens."""
    if loss.full_kl:
        raise ConfigError(
            f"kl={loss.kl.kind} needs the whole vocabulary at each token (got log-probs of the tokens that were "
            "written). Its part of the loss is no number of one token. Use kl=k3_ratio, or kl=none."
        )
    tokens = made.pieces[0].micro_batch
    lacks = {
        "old_log_probs": loss.reads_old_log_probs and not made.has_old_log_probs,
        "sampling_log_probs": loss.needs_sampling_log_probs and tokens.sampling_log_probs is None,
        "ref_log_probs": loss.kl is not None and tokens.ref_log_probs is None,
        "group_id": loss.aggregation.needs_groups and not made.has_groups,
    }
    if missing := [name for name, lacking in lacks.items() if lacking]:
        raise ConfigError(
            f"loss={loss.family.name} with this aggregation, correction and kl needs {', '.join(missing)} of every "
            "document (got some without). Use loss=reinforce aggregation=token_mean correction=none kl=none."
        )

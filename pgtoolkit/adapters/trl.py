"""TRL's GRPOTrainer with any loss of pgtoolkit in the place of its own; sampling, rewards and
advantages stay TRL's.

An optimizer step of TRL is several micro-batches on each process, whose gradients are added up and
averaged over processes. Their totals are counted before the first backward pass, and each
micro-batch is divided by them.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pgtoolkit.adapters.trl_heads import (
    Inputs,
    add_fused_head,
    by_fused_head,
    by_log_probs,
    obstacles,
    trained_tokens,
)
from pgtoolkit.adapters.trl_whole_step import FirstPass, first_pass
from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.aggregation import AggregationName, aggregation_of
from pgtoolkit.losses.corrections import CORRECTIONS, Correction, CorrectionName, correction_of
from pgtoolkit.losses.documents import counted_by_sign
from pgtoolkit.losses.families import Family, Grpo, Gspo, LossName, family_of
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.trial import check_function

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.utils import nanmax, nanmin

    GRPOTrainer: Any = object  # its annotations are incomplete
elif importlib.util.find_spec("trl") is not None:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import nanmax, nanmin
else:
    GRPOConfig = GRPOTrainer = object

INSTEAD = {
    **dict.fromkeys(
        ("loss_type", "importance_sampling_level"), "loss= and aggregation= of the trainer"
    ),
    "off_policy_mask_threshold": "correction=pgtoolkit.corrections.OffPolicyMask(threshold=...)",
    "top_entropy_quantile": "its default: this trainer has no mask by entropy",
    "use_adaptive_entropy": "entropy_coef alone: pgtoolkit has no control of it",
}
"""Field of GRPOConfig that decides TRL's loss, and so must keep its default -> what to use
instead."""

PARAMETERS = {
    "epsilon": ("epsilon_low", "epsilon_high"),
    "epsilon_high": ("epsilon_low", "epsilon_high"),
    "delta": ("dual_clip",),
    "sapo_temperature_pos": ("temperature_positive",),
    "sapo_temperature_neg": ("temperature_negative",),
    "vespo_k_pos": ("power_positive",),
    "vespo_lambda_pos": ("decay_positive",),
    "vespo_k_neg": ("power_negative",),
    "vespo_lambda_neg": ("decay_negative",),
}
"""The same for fields that are parameters of a family here."""


class PolicyGradientTrainer(GRPOTrainer):
    """A GRPOTrainer with a loss of pgtoolkit; all else is as GRPOConfig says.

    loss: a family by name or as an object, or a function of your own. aggregation, divisor,
        correction: as in `pgtoolkit.policy_loss`. Without a correction it is the one that
        GRPOConfig describes (vllm_importance_sampling_...), if vLLM samples.
    kl: the kind of the penalty of GRPOConfig.beta; None for k3_ratio, or k3 without
        use_bias_correction_kl.
    fused_head: whether pgtoolkit's LM head takes the place of TRL's; None: if the model allows it.
        The attribute of this name then says whether it does.

    Raises ValueError where an argument and GRPOConfig contradict each other, say the same thing
    twice, or ask for what cannot be done; with all problems together.
    """

    def __init__(
        self,
        *arguments: object,
        loss: LossName | Family | Callable,
        aggregation: AggregationName,
        divisor: float | None = None,
        correction: CorrectionName | Correction | None = None,
        kl: str | None = None,
        fused_head: bool | None = None,
        **of_trl: object,
    ):
        if GRPOTrainer is object:
            raise ImportError('PolicyGradientTrainer needs TRL: pip install "pgtk[trl]"')
        self.family = family_of(loss)
        self.weighting = aggregation_of(aggregation, divisor)
        self.correction = correction_of(correction)
        self._kl = kl
        arguments_by_name = (
            inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **of_trl).arguments
        )
        problems = self._problems(arguments_by_name.get("args") or GRPOConfig())
        if problems:
            raise ValueError("\n".join(problems))
        # Totals of the optimizer step, the metrics of its micro-batches so far, and for a loss of
        # the whole step its first pass, with the coefficients of the micro-batches that are left.
        self.totals: StepTotals | None = None
        self._sums: MetricSums | None = None
        self._first_pass: FirstPass | None = None
        self._coefficients: list[Tensor] = []
        self._rewards: Tensor | None = None
        super().__init__(*arguments, **of_trl)
        reasons = obstacles(self)
        if fused_head and reasons:
            raise ValueError(
                f"fused_head=True is impossible here: {'; '.join(reasons)}. Use fused_head=None."
            )
        self.fused_head = not reasons if fused_head is None else fused_head
        if self.fused_head:
            add_fused_head(self.model)

    def _problems(self, args: GRPOConfig) -> list[str]:
        """Return what is wrong with a GRPOConfig and this trainer's arguments, a sentence each."""
        defaults = {field.name: field.default for field in fields(args)}
        changed = {name for name, default in defaults.items() if getattr(args, name) != default}
        problems = [
            f"GRPOConfig.{name}={getattr(args, name)!r} has no effect on this loss. Use {instead}."
            for name, instead in (INSTEAD | self._parameters_instead(defaults)).items()
            if name in changed
        ]
        problems += [*self._problems_of_function(args), *self._problems_of_steps(args)]
        if self._kl is not None and args.beta == 0:
            problems.append(
                f"kl={self._kl} has no effect with GRPOConfig.beta=0.0. Use beta=0.04, or no kl."
            )
        if self._kl not in (None, "k3") and not args.use_bias_correction_kl:
            problems.append(
                f"kl={self._kl} contradicts GRPOConfig.use_bias_correction_kl=False, which means "
                "k3. Use one of them."
            )
        return problems + self._problems_of_correction(args, changed)

    def _parameters_instead(self, defaults: Mapping[str, object]) -> dict[str, str]:
        """Return what to use in the place of GRPOConfig's parameters of a loss: those of the family
        that trains, or, where it has none of them, their defaults."""
        kind = type(self.family)
        is_ours = kind.__module__.startswith("pgtoolkit.")
        path = f"{'pgtoolkit.families.' if is_ours else ''}{kind.__name__}"
        instead = {}
        for field, parameters in PARAMETERS.items():
            instead[field] = f"{defaults[field]!r}: {self.family.name} has no {parameters[0]}"
            if all(hasattr(self.family, name) for name in parameters):
                keywords = ", ".join(f"{name}=..." for name in parameters)
                instead[field] = f"loss={path}({keywords})"
        return instead

    @property
    def asked(self) -> frozenset[str]:
        """Return the vectors that a loss function asks for; nothing for another loss."""
        return self.family.asked if isinstance(self.family, FunctionFamily) else frozenset()

    @property
    def _needs_whole_groups(self) -> bool:
        return self.weighting.needs_groups or "groups" in self.asked

    def _problems_of_function(self, args: GRPOConfig) -> list[str]:
        """Return what is wrong with a loss that is a function."""
        if not isinstance(self.family, FunctionFamily):
            return []
        try:
            check_function(self.family)
        except ValueError as error:
            return [f"{error}."]
        trl_corrects = args.use_vllm and args.vllm_importance_sampling_correction
        if "groups" not in self.asked or not (trl_corrects or self.correction):
            return []
        correction = "GRPOConfig.vllm_importance_sampling_correction=True"
        use = "vllm_importance_sampling_correction=False"
        if self.correction is not None:
            correction = f"correction={self.correction.name}"
            use = "correction=None"
        return [
            f"{correction} needs a loss that does not ask for groups (got {self.family.name}). The "
            "factor of one document would scale the others. A function may read "
            f"sampling_log_probs itself. Use {use}."
        ]

    def _problems_of_steps(self, args: GRPOConfig) -> list[str]:
        """Return what is wrong with the number of micro-batches that TRL samples at once."""
        sampled = args.steps_per_generation
        assert sampled is not None  # GRPOConfig fills it in
        accumulated = args.gradient_accumulation_steps
        if self._needs_whole_groups:
            fits = sampled == accumulated
            group = "aggregation" if self.weighting.needs_groups else "loss"
            needs = f"the number of gradient_accumulation_steps ({accumulated}) with this {group}"
            reason = (
                "TRL shuffles what it has sampled, so that a part of it has only parts of the "
                "groups"
            )
        else:
            fits = sampled % accumulated == 0
            needs = f"a multiple of gradient_accumulation_steps ({accumulated})"
            reason = "all of a step's completions have to be there"
        if fits:
            return []
        return [
            f"GRPOConfig.steps_per_generation={sampled} needs {needs}: a step's totals are counted "
            f"before its first backward pass, and {reason}. Use "
            f"steps_per_generation={accumulated}."
        ]

    def _problems_of_correction(self, args: GRPOConfig, changed: set[str]) -> list[str]:
        """Return what is wrong with GRPOConfig's fields of a correction.

        changed: the fields that differ from their defaults.
        """
        if self.correction is None:
            return []
        correction = f"correction={self.correction.name}"
        of_trl = "GRPOConfig.vllm_importance_sampling_correction=True"
        trl_corrects = args.use_vllm and args.vllm_importance_sampling_correction
        if self.correction.of_policy:
            problem = (
                f"{correction} and {of_trl} would be two corrections at once. Use one of them."
            )
            return [problem] if trl_corrects else []
        problems = []
        for end in ("mode", "clip_max", "clip_min"):
            key = f"vllm_importance_sampling_{end}"
            if key in changed:
                problems.append(
                    f"GRPOConfig.{key}={getattr(args, key)!r} has no effect beside {correction}. "
                    "Use one of them."
                )
        if self.correction.normalize != "none":
            problems.append(
                f"{correction} with normalize='step' needs the mean of all factors of a step, "
                "which is not known before its first micro-batch here. Use normalize='none'."
            )
        if not trl_corrects:
            problems.append(
                f"{correction} needs a sampler's log-probs. Use GRPOConfig.use_vllm=True and "
                f"{of_trl}."
            )
        return problems

    @property
    def penalty(self) -> KL | None:
        """The penalty with GRPOConfig.beta as its coefficient, None where that is 0."""
        kind = self._kl or ("k3_ratio" if self.args.use_bias_correction_kl else "k3")
        return KL(kind, self.beta) if self.beta else None

    def correction_of_config(self) -> Correction | None:
        """Return the correction that GRPOConfig describes; None without log-probs of vLLM, which it
        would compare with the trainer's."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if high is None:
            high = 1e9  # no ratio exceeds it, since ratios are clamped at e^20
        kind = CORRECTIONS[self.vllm_importance_sampling_mode]  # the names are the same as TRL's
        bounds = {"low": low, "high": high}
        return kind(**bounds)

    def _calculate_rewards(self, *arguments: object, **keywords: object) -> Tensor:
        """Return TRL's rewards of all processes, (completions, reward functions), and keep their
        weighted sums, NaN where no function has scored a completion."""
        by_function = super()._calculate_rewards(*arguments, **keywords)
        weights = self.reward_weights.to(by_function.device)
        unscored = by_function.isnan().all(dim=1)
        self._rewards = (by_function * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        return by_function

    def _generate_and_score_completions(self, inputs: list[dict]) -> Inputs:
        """Sample as TRL does; number the group of each completion, and keep its reward, if the loss
        needs them."""
        batch = super()._generate_and_score_completions(inputs)
        of_rewards = self.asked & {"rewards", "group_rewards"}
        if not (self._needs_whole_groups or of_rewards):
            return batch
        # A group is consecutive completions, counted over all processes: so TRL orders them for
        # its rewards, before it shuffles.
        rows = len(batch["completion_ids"])
        first = self.accelerator.process_index * rows
        numbers = torch.arange(first, first + rows, device=batch["completion_ids"].device)
        group_index = numbers // self._completions_per_prompt()
        if self._needs_whole_groups:
            batch["group_index"] = group_index
        if of_rewards:
            assert self._rewards is not None
            rewards = self._rewards.double()
            # As TRL's baseline: also those that are cut off and masked.
            is_scored = ~rewards.isnan()
            rewards = rewards.where(is_scored, 0.0)
            batch["is_excluded"] = self._rewards.isnan()[first : first + rows]
            batch["rewards"] = rewards[first : first + rows]
            of_groups = self._completions_per_prompt()
            counts = is_scored.view(-1, of_groups).sum(1).clamp(min=1)
            means = rewards.view(-1, of_groups).sum(1) / counts
            batch["group_rewards"] = means[group_index]
        return batch

    def _completions_per_prompt(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _pieces(self, inputs: Inputs) -> list[Inputs]:
        """Return the micro-batches of the optimizer step; in an evaluation, of this batch."""
        if not self.model.training:
            return [inputs]
        first = self._step % self.args.steps_per_generation
        return self._buffered_inputs[first : first + self.current_gradient_accumulation_steps]

    def _count_totals(self, pieces: list[Inputs]) -> StepTotals:
        """Return the totals of micro-batches over all processes."""
        token_counts = torch.cat([trained_tokens(piece).sum(1) for piece in pieces])
        num_tokens = token_counts.sum()
        sums = torch.stack(
            [torch.full_like(num_tokens, len(token_counts)), num_tokens, (token_counts == 0).sum()]
        )
        if not self._needs_whole_groups:
            return StepTotals(*self.accelerator.reduce(sums, reduction="sum"))
        group_index = torch.cat([piece["group_index"] for piece in pieces])
        num_groups = (
            len(token_counts) * self.accelerator.num_processes // self._completions_per_prompt()
        )
        tokens_of_groups = token_counts.new_zeros(num_groups).index_add_(
            0, group_index, token_counts
        )
        counts = [sums, tokens_of_groups]
        if self.weighting.by_sign:
            signs = torch.cat([_signs(piece) for piece in pieces])
            by_sign = counted_by_sign(group_index, signs, token_counts, num_groups)
            counts += [numbers.flatten() for numbers in by_sign]
        sums = self.accelerator.reduce(torch.cat(counts), reduction="sum")
        (num_documents, num_tokens, num_empty), *of_groups = sums.split(
            [len(numbers) for numbers in [sums[:3], *counts[1:]]]
        )
        tokens_of_groups, *by_sign = of_groups
        return StepTotals(
            num_documents,
            num_tokens,
            num_empty,
            num_groups,
            tokens_of_groups,
            None,
            *(numbers.view(num_groups, 3) for numbers in by_sign),
        )

    def tokens_and_loss(
        self, inputs: Inputs, mask: Tensor, log_probs: Tensor
    ) -> tuple[Tokens, Loss]:
        """Return a micro-batch's tokens, flattened to one axis, and the definition of their loss.

        mask, log_probs: (B, length), the latter without gradient; they are the old ones where TRL
            has none.
        """
        old = inputs.get("old_per_token_logps")
        if old is None:
            old = log_probs
        sampling = inputs.get("sampling_per_token_logps")
        if sampling is not None:
            # As in TRL, a token that vLLM could not score has a ratio of 1.
            sampling = torch.where(sampling.isnan(), old, sampling).reshape(-1)
        documents = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        reference = inputs["ref_per_token_logps"].reshape(-1) if self.beta else None
        tokens = Tokens(
            labels=inputs["completion_ids"].masked_fill(~mask, -100).reshape(-1),
            advantages=_advantages(inputs, mask).reshape(-1),
            document_index=documents.reshape(-1),
            num_documents=len(mask),
            group_index=inputs.get("group_index"),
            old_log_probs=old.reshape(-1),
            sampling_log_probs=sampling,
            ref_log_probs=reference,
            rewards=inputs.get("rewards"),
            group_rewards=inputs.get("group_rewards"),
            excluded=inputs.get("is_excluded"),
            coefficients=self._coefficients[0].to(mask.device) if self._coefficients else None,
        )
        loss = Loss(
            self.family,
            self.weighting,
            self.temperature,
            metrics="basic",
            correction=self.correction or self.correction_of_config(),
            kl=self.penalty,
        )
        return tokens, loss

    def _begin_step(self, inputs: Inputs) -> None:
        """Count the totals of the optimizer step that begins with this micro-batch, and make the
        first pass over it, if the loss depends on all of it."""
        pieces = self._pieces(inputs)
        self.totals = self._count_totals(pieces)
        self._sums = None
        self._first_pass = None
        self._coefficients = []
        if isinstance(self.family, FunctionFamily) and self.family.level == "step":
            self._first_pass = first_pass(self, pieces)
            self._coefficients = [*self._first_pass.coefficients]

    def _compute_loss(self, model: torch.nn.Module, inputs: Inputs) -> Tensor:
        """Return this micro-batch's share of the step's loss times the number of processes, which
        DDP divides by."""
        training = self.model.training
        accelerator = self.accelerator
        begins = self.totals is None or not training
        if begins:
            self._begin_step(inputs)
        compute = by_fused_head if self.fused_head else by_log_probs
        loss, out, old, entropies, aux_loss = compute(self, model, inputs)
        self._coefficients = self._coefficients[1:]
        loss = loss * accelerator.num_processes
        if begins and self._first_pass is not None:
            # The second pass has the value of the penalties alone.
            loss = loss + self._first_pass.loss.to(loss)
        metrics = self._metrics["train" if training else "eval"]
        if aux_loss is not None:
            micro_batches = self.current_gradient_accumulation_steps if training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / micro_batches
            metrics["aux_loss"].append(accelerator.gather_for_metrics(aux_loss).mean().item())
        mask = trained_tokens(inputs)
        log_probs = out.log_probs.view_as(old)
        log_ratio = log_probs - old
        terms = {"entropy": entropies}
        if self.penalty is not None:
            log_ratio_to_reference = log_probs - inputs["ref_per_token_logps"]
            terms["kl"] = self.penalty.terms(log_ratio_to_reference, log_ratio)[0]
        clips = self._clips(mask, log_ratio, _advantages(inputs, mask))
        self._record_as_trl(metrics, mask, terms, clips)
        self._record(metrics, out, last=not training or accelerator.sync_gradients)
        return loss

    def _record(self, metrics: dict[str, list[float]], out: PolicyLoss, last: bool) -> None:
        """Add a micro-batch's metrics to those of the step.

        last: whether it is the step's last one; then the sums are completed and shown.
        """
        self._sums = out.metric_sums if self._sums is None else self._sums.merge(out.metric_sums)
        if last:
            group = dist.group.WORLD if self.accelerator.num_processes > 1 else None
            assert self.totals is not None
            _, sums = self._sums.all_reduce(out.loss, group)
            values = sums.finalize(self.totals)
            if self._first_pass is not None:
                values |= self._first_pass.metrics
            for name, value in values.items():
                if math.isfinite(value):
                    metrics[f"pgtk/{name}"].append(float(value))
            self.totals = None

    def _record_as_trl(
        self,
        metrics: dict[str, list[float]],
        mask: Tensor,
        terms: dict[str, Tensor],
        clips: dict[str, Tensor],
    ) -> None:
        """Record a micro-batch's metrics under TRL's names and by its definitions, over all
        processes.

        terms: (B, length), averaged over tokens. clips: the same, or (B, 1), averaged over
            documents.
        """
        values = {name: numbers.double() for name, numbers in (terms | clips).items()}
        sums = []
        for numbers in values.values():
            is_by_token = numbers.shape == mask.shape
            counted = mask if is_by_token else torch.ones_like(numbers, dtype=torch.bool)
            sums.append(torch.stack([torch.where(counted, numbers, 0.0).sum(), counted.sum()]))
        totals = self.accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
        for name, (total, count) in zip(values, totals, strict=True):
            metrics[name].append(total / max(count, 1.0))
        if clips:
            for side, end, extremum in (("low", "min", nanmin), ("high", "max", nanmax)):
                acting = torch.where(mask, values[f"clip_ratio/{side}_mean"], 0.0)
                shares = acting.sum(1) / mask.sum(1)  # of each document's tokens
                extreme = extremum(self.accelerator.gather(shares)).item()
                metrics[f"clip_ratio/{side}_{end}"].append(extreme)

    def _clips(self, mask: Tensor, log_ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Return where the clip acts, which TRL shows for GRPO and GSPO; {} for other families.

        mask, log_ratio, advantages: (B, length). The results are bool, of the same shape, or (B, 1)
            where the family's ratio is the document's.
        """
        if not isinstance(self.family, Grpo | Gspo):
            return {}
        if self.family.by_document:
            lengths = mask.sum(1, keepdim=True).clamp(min=1)
            log_ratio = torch.where(mask, log_ratio, 0.0).sum(1, keepdim=True) / lengths
            advantages = advantages[:, :1]
        ratio = log_ratio.exp()
        lower, upper = self.family.bounds
        low = (ratio < lower) & (advantages < 0)
        high = (ratio > upper) & (advantages > 0)
        return {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low | high,
        }


def _signs(inputs: Inputs) -> Tensor:
    """Return (B,) int64 signs of the advantages, 0 where no token is trained."""
    mask = trained_tokens(inputs)
    # Those of a document whose tokens differ have no sign; the loss then refuses it.
    first = torch.where(mask, _advantages(inputs, mask), 0.0).sum(1)
    return first.sign().long()


def _advantages(inputs: Inputs, mask: Tensor) -> Tensor:
    """Return (B, length) advantages.

    TRL has one per document; subclasses of its trainer may have one per token.
    """
    advantages = inputs["advantages"]
    if advantages.dim() != 2:
        advantages = advantages[:, None]
    return advantages.expand_as(mask)

"""TRL's GRPOTrainer with any loss of pgtoolkit in the place of its own; sampling, rewards and advantages stay TRL's.

An optimizer step of TRL is several micro-batches on each process, whose gradients are added up and averaged over
processes. Their totals are counted before the first backward pass, and each micro-batch is divided by them.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pgtoolkit.adapters.trl_heads import add_fused_head, by_fused_head, by_log_probs, obstacles, trained_tokens
from pgtoolkit.batch import StepTotals
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import CORRECTIONS, Correction, correction_of
from pgtoolkit.losses.families import Family, Grpo, Gspo, family_of
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.metrics import MetricSums

if TYPE_CHECKING:  # TRL's annotations lack much of what its trainer has
    GRPOConfig: Any
    GRPOTrainer: Any = object
    nanmax: Any
    nanmin: Any
elif importlib.util.find_spec("trl") is not None:
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import nanmax, nanmin
else:
    GRPOConfig = GRPOTrainer = object

INSTEAD = {
    **dict.fromkeys(("loss_type", "importance_sampling_level"), "loss= and aggregation= of the trainer"),
    **dict.fromkeys(("epsilon", "epsilon_high"), "loss=pgtoolkit.families.Grpo(epsilon_low=..., epsilon_high=...)"),
    "delta": "loss=pgtoolkit.families.Grpo(dual_clip=...)",
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), "loss=pgtoolkit.families.Sapo(...)"),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "loss=pgtoolkit.families.Vespo(...)"
    ),
    "off_policy_mask_threshold": "correction=pgtoolkit.corrections.OffPolicyMask(threshold=...)",
    "top_entropy_quantile": "its default: pgtoolkit has no mask by entropy",
    "use_adaptive_entropy": "entropy_coef alone: pgtoolkit has no control of it",
}
"""Fields of GRPOConfig that say what a loss is: they have to keep their defaults. What to use instead."""


class PolicyGradientTrainer(GRPOTrainer):
    """A GRPOTrainer whose loss is the one that is named here; all else is as GRPOConfig says.

    loss: a family by name or as an object, aggregation, divisor, correction: as in `pgtoolkit.policy_loss`. Without a
        correction it is the one that GRPOConfig describes (vllm_importance_sampling_...), if vLLM samples.
    kl: the kind of the penalty of GRPOConfig.beta; None for k3_ratio, or k3 without use_bias_correction_kl.
    fused_head: whether pgtoolkit's LM head takes the place of TRL's; None for where the model allows it. The attribute
        of this name then says whether it does.

    Raises ValueError for what the two configurations say twice, contradict or cannot do, all problems together.
    """

    def __init__(
        self,
        *arguments: Any,
        loss: str | Family,
        aggregation: str,
        divisor: float | None = None,
        correction: str | Correction | None = None,
        kl: str | None = None,
        fused_head: bool | None = None,
        **of_trl: Any,
    ):
        if GRPOTrainer is object:
            raise ImportError('PolicyGradientTrainer needs TRL: pip install "pgtk[trl]"')
        self.family, self.correction, self._kl = family_of(loss), correction_of(correction), kl
        self.weighting = aggregation_of(aggregation, divisor)
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *arguments, **of_trl).arguments
        problems = self._problems(given.get("args") or GRPOConfig())
        if problems:
            raise ValueError("\n".join(problems))
        # Of the optimizer step: its totals, and the metrics of its micro-batches so far.
        self._totals: StepTotals | None = None
        self._sums: MetricSums | None = None
        super().__init__(*arguments, **of_trl)
        found = obstacles(self)
        if fused_head and found:
            raise ValueError(f"fused_head=True is impossible here: {'; '.join(found)}. Use fused_head=None.")
        self.fused_head = not found if fused_head is None else fused_head
        if self.fused_head:
            add_fused_head(self.model)

    def _problems(self, args: Any) -> list[str]:
        default = {one.name: one.default for one in fields(args)}
        changed = {name for name in default if getattr(args, name) != default[name]}
        problems = [
            f"GRPOConfig.{name}={getattr(args, name)!r} has no effect on this loss. Use {instead}."
            for name, instead in INSTEAD.items()
            if name in changed
        ]
        gathered, accumulated = args.steps_per_generation, args.gradient_accumulation_steps
        if gathered % accumulated or (self.weighting.needs_groups and gathered != accumulated):
            needed, why = "a multiple of gradient_accumulation_steps", "all of a step's completions have to be there"
            if self.weighting.needs_groups:
                needed, why = "that number", "TRL shuffles what it has sampled, and a part of it has parts of prompts"
            problems.append(
                f"GRPOConfig.steps_per_generation={gathered} needs {needed} ({accumulated}) with this aggregation: a "
                f"step's totals are counted before its first backward pass, and {why}. Use steps_per_generation="
                f"{accumulated}."
            )
        if self._kl is not None and args.beta == 0:
            problems.append(f"kl={self._kl} has no effect with GRPOConfig.beta=0.0. Use beta=0.04, or no kl.")
        if self._kl not in (None, "k3") and not args.use_bias_correction_kl:
            problems.append(
                f"kl={self._kl} contradicts GRPOConfig.use_bias_correction_kl=False, which means k3. Use one of them."
            )
        return problems + self._problems_of_correction(args, changed)

    def _problems_of_correction(self, args: Any, changed: set[str]) -> list[str]:
        if self.correction is None:
            return []
        name, kept = f"correction={self.correction.name}", "GRPOConfig.vllm_importance_sampling_correction"
        by_trl = args.use_vllm and args.vllm_importance_sampling_correction
        if self.correction.of_policy:
            return [f"{name} and {kept}=True would be two corrections at once. Use one of them."] if by_trl else []
        problems = [
            f"GRPOConfig.{key}={getattr(args, key)!r} has no effect beside {name}. Use one of them."
            for key in ("vllm_importance_sampling_" + end for end in ("mode", "clip_max", "clip_min"))
            if key in changed
        ]
        if not by_trl:
            problems.append(f"{name} needs a sampler's log-probs. Use GRPOConfig.use_vllm=True and {kept}=True.")
        return problems

    @property
    def penalty(self) -> KL | None:
        """What GRPOConfig.beta weighs."""
        kind = self._kl or ("k3_ratio" if self.args.use_bias_correction_kl else "k3")
        return KL(kind, self.beta) if self.beta else None

    def correction_of_config(self) -> Correction | None:
        """The correction that GRPOConfig describes, if there are log-probs of vLLM to correct for."""
        if not (self.use_vllm and self.vllm_importance_sampling_correction):
            return None
        high, low = self.vllm_importance_sampling_clip_max, self.vllm_importance_sampling_clip_min
        high = 1e9 if high is None else high  # no bound: ratios stop at e^20
        kind = CORRECTIONS[self.vllm_importance_sampling_mode]  # whose names are TRL's
        return kind(**{"low": low, "high": high})

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.weighting.needs_groups:
            # As TRL groups rewards: consecutive completions over all processes, before it shuffles them.
            rows, training = len(batch["completion_ids"]), self.model.training
            first = self.accelerator.process_index * rows
            numbers = torch.arange(first, first + rows, device=batch["completion_ids"].device)
            batch["group_index"] = numbers // (self.num_generations if training else self.num_generations_eval)
        return batch

    def _counted(self, inputs: dict) -> StepTotals:
        """Of all micro-batches of this optimizer step on all processes; in an evaluation of this batch on all."""
        pieces = [inputs]
        if self.model.training:
            first = self._step % self.args.steps_per_generation
            pieces = self._buffered_inputs[first : first + self.current_gradient_accumulation_steps]
        counts = torch.cat([trained_tokens(piece).sum(1) for piece in pieces])
        numbers = torch.stack([torch.full_like(counts.sum(), len(counts)), counts.sum(), (counts == 0).sum()])
        num_groups = 0
        if self.weighting.needs_groups:
            index = torch.cat([piece["group_index"] for piece in pieces])
            per_prompt = self.num_generations if self.model.training else self.num_generations_eval
            num_groups = len(counts) * self.accelerator.num_processes // per_prompt
            numbers = torch.cat([numbers, counts.new_zeros(num_groups).index_add_(0, index, counts)])
        num_documents, num_tokens, num_empty, *_ = numbers = self.accelerator.reduce(numbers, reduction="sum")
        return StepTotals(num_documents, num_tokens, num_empty, *((num_groups, numbers[3:]) if num_groups else ()))

    def loss_arguments(self, inputs: dict, mask: Tensor, log_probs: Tensor) -> tuple[tuple[Tensor, ...], dict]:
        """Of a micro-batch: (old log-probs, advantages, documents), (T,) each, and keywords of a loss of pgtoolkit.

        mask, log_probs: (B, length), without gradient: the old ones where TRL has none.
        """
        old, sampling = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        old = log_probs if old is None else old
        if sampling is not None:  # as TRL has it: a token that vLLM could not score has a ratio of 1
            sampling = torch.where(sampling.isnan(), old, sampling).reshape(-1)
        documents = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        options = {
            "loss": self.family,
            "aggregation": self.weighting.name,
            "divisor": getattr(self.weighting, "divisor", None),
            "group_index": inputs.get("group_index"),
            "num_documents": len(mask),
            "totals": self._totals,
            "correction": self.correction or self.correction_of_config(),
            "sampling_log_probs": sampling,
            "kl": self.penalty,
            "ref_log_probs": inputs["ref_per_token_logps"].reshape(-1) if self.beta else None,
            "metrics": "basic",
        }
        return tuple(x.reshape(-1) for x in (old, _advantages(inputs, mask), documents)), options

    def _compute_loss(self, model, inputs):
        """This micro-batch's share of the step's loss, times the processes, over which gradients are averaged."""
        training, accelerator = self.model.training, self.accelerator
        if self._totals is None or not training:
            self._totals, self._sums = self._counted(inputs), None
        compute = by_fused_head if self.fused_head else by_log_probs
        loss, out, old, entropies, aux_loss = compute(self, model, inputs)
        loss = loss * accelerator.num_processes
        metrics = self._metrics["train" if training else "eval"]
        if aux_loss is not None:
            number = self.current_gradient_accumulation_steps if training else 1
            loss = loss + self.router_aux_loss_coef * aux_loss / number
            metrics["aux_loss"].append(accelerator.gather_for_metrics(aux_loss).mean().item())
        mask, log_probs = trained_tokens(inputs), out.log_probs.view_as(old)
        terms, log_ratio = {"entropy": entropies}, log_probs - old
        if self.penalty is not None:
            terms["kl"] = self.penalty.terms(log_probs - inputs["ref_per_token_logps"], log_ratio)[0]
        self._record_as_trl(metrics, mask, terms, self._clips(mask, log_ratio, _advantages(inputs, mask)))
        self._record(metrics, out, last=not training or accelerator.sync_gradients)
        return loss

    def _record(self, metrics: dict[str, list[float]], out: PolicyLoss, last: bool) -> None:
        """Add a micro-batch's metrics to the step's, which the last one completes and shows."""
        self._sums = out.metric_sums if self._sums is None else self._sums.merge(out.metric_sums)
        if last:
            group = dist.group.WORLD if self.accelerator.num_processes > 1 else None
            assert self._totals is not None
            _, sums = self._sums.all_reduce(out.loss, group)
            for name, value in sums.finalize(self._totals).items():
                if math.isfinite(value):
                    metrics[f"pgtk/{name}"].append(float(value))
            self._totals = None

    def _record_as_trl(self, metrics, mask: Tensor, terms: dict[str, Tensor], clips: dict[str, Tensor]) -> None:
        """A micro-batch's metrics by TRL's names and definitions, over all processes.

        terms: (B, length) by token. clips: the same, or (B, 1) by document, which is what the means are then over.
        """
        values, sums = {name: x.double() for name, x in (terms | clips).items()}, []
        for x in values.values():
            counted = mask if x.shape == mask.shape else torch.ones_like(x, dtype=torch.bool)
            sums.append(torch.stack([torch.where(counted, x, 0.0).sum(), counted.sum()]))
        totals = self.accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
        for name, (total, number) in zip(values, totals, strict=True):
            metrics[name].append(total / max(number, 1.0))
        for name, extremum in (("low", nanmin), ("high", nanmax)) if clips else ():
            of_documents = torch.where(mask, values[f"clip_ratio/{name}_mean"], 0.0).sum(1) / mask.sum(1)
            shown = extremum(self.accelerator.gather(of_documents)).item()
            metrics[f"clip_ratio/{name}_{'min' if name == 'low' else 'max'}"].append(shown)

    def _clips(self, mask: Tensor, log_ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Where the clip acts, bool, by token or by document; of the two families whose clip TRL shows."""
        if not isinstance(self.family, Grpo | Gspo):
            return {}
        if self.family.by_document:
            log_ratio = torch.where(mask, log_ratio, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
            advantages = advantages[:, :1]
        ratio, (low, high) = log_ratio.exp(), self.family.bounds
        low, high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high}


def _advantages(inputs: dict, mask: Tensor) -> Tensor:
    """(B, length): of each token; TRL has one a document, its subclasses may have one a token."""
    given = inputs["advantages"]
    return (given if given.dim() == 2 else given[:, None]).expand_as(mask)

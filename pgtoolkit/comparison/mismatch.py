"""`pgtk doctor RUN --sampler`: how far trainer and sampler are apart on a step, on which tokens,
and what each treatment would act on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pgtoolkit.comparison.text_report import folded
from pgtoolkit.comparison.tokens import Inspected, inspect
from pgtoolkit.config.counts import documents_per_step
from pgtoolkit.config.saved import saved_config
from pgtoolkit.config.schema import Config
from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.corrections import (
    Correction,
    Factor,
    Factors,
    MaskMean,
    SequenceMask,
    TokenMask,
    TokenTruncate,
)
from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.families import Icepop
from pgtoolkit.rollouts.settings import PolicyRolloutSettings
from pgtoolkit.runs.find import is_run, not_a_run
from pgtoolkit.runs.series import read_metrics
from pgtoolkit.system.columns import aligned
from pgtoolkit.system.report import plural, shell_path
from pgtoolkit.tracking.progress import WIDTH

SIZES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Bounds between which tokens are counted by the size of their difference."""

LARGE = 0.01
"""Larger differences are counted for each kind of token."""

RARE = 0.01
"""The sampler's probability below which a token is called rare."""


@dataclass(frozen=True)
class Mismatch:
    """The differences of a step.

    inspected: the step, made again.
    difference: (N,) of each trained token, the trainer's log-prob less the sampler's.
    by_size, by_kind: names of parts of the tokens -> (N,) bool.
    treatments: what a user types -> what it would act on, in words.
    """

    inspected: Inspected
    difference: np.ndarray
    by_size: dict[str, np.ndarray]
    by_kind: dict[str, np.ndarray]
    treatments: dict[str, str]


def mismatch(run_dir: Path, number: int | None = None) -> Mismatch:
    """Return the differences at the first step on a batch of completions, which the weights that
    sampled have trained on.

    number: of a step; None for the newest such step. Raises ConfigError where the sampler's
    log-probs are not known, and what `inspect` raises.
    """
    if not is_run(run_dir):
        raise not_a_run(f"pgtk doctor {run_dir} --sampler", run_dir, "a run directory")
    if number is None:
        number = _first_of_newest_batch(run_dir)
    inspected = inspect(str(run_dir), [], number)
    common = inspected.common
    sampled = common.get("sampling_log_prob", common.get("old_log_prob"))
    if sampled is None:
        raise ConfigError(
            f"pgtk doctor {shell_path(run_dir)} --sampler needs log-probs of the sampler (got "
            "none). The run's documents have none, so nothing can be compared. Use rollouts with "
            "the column sampling_log_probs."
        )
    difference = (common["new_log_prob"].astype(float) - sampled).astype(float)
    documents = inspected.made.step.documents
    return Mismatch(
        inspected,
        difference,
        dict(_by_size(difference)),
        dict(_by_kind(inspected, documents, sampled)),
        dict(_treatments(inspected, documents, difference)),
    )


def _first_of_newest_batch(run_dir: Path) -> int:
    """Return the number of the newest step that a run began a batch of rollouts with."""
    config: Config = saved_config(run_dir)
    rollout = config.rollout
    per_step = documents_per_step(config)
    steps = read_metrics(run_dir / "metrics.jsonl", {"step"})["step"]
    if not len(steps):
        raise ConfigError(
            f"pgtk doctor {shell_path(run_dir)} --sampler needs a step that the run has made (got "
            "none). Use pgtk resume."
        )
    last = int(steps[-1])
    if not isinstance(rollout, PolicyRolloutSettings) or per_step == 0:
        return last
    of_batch = rollout.passes * -(-rollout.prompts_per_batch * rollout.group_size // per_step)
    return last - (last - 1) % of_batch


def _by_size(difference: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, tokens) by the size of their difference."""
    sizes = abs(difference)
    below = 0.0
    for bound in SIZES:
        name = f"below {bound:g}" if below == 0 else f"{below:g} to {bound:g}"
        yield name, (sizes >= below) & (sizes < bound)
        below = bound
    yield f"{below:g} and more", ~(sizes < below)


def _by_kind(
    inspected: Inspected, documents: list[Document], sampled: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, tokens) by place, by kind of token, and by the document's length.

    The kinds divide the tokens: a token of two kinds counts for the first.
    """
    lengths = np.array([document.num_trained for document in documents])
    of_document = np.repeat(lengths, lengths)
    place = np.concatenate([np.arange(length) for length in lengths])
    yield "first of a completion", place == 0
    quarter = 4 * place // np.maximum(of_document, 1)
    for number in range(4):
        yield f"quarter {number + 1} of the completion", quarter == number
    tokenizer = inspected.made.module.policy.tokenizer
    tokens = torch.cat([document.tokens[document.loss_mask] for document in documents]).tolist()
    texts = {token: str(tokenizer.decode([token])).strip() for token in {*tokens}}
    is_end = np.array([token == tokenizer.eos_token_id for token in tokens])
    is_digit = np.array([texts[token].isdigit() for token in tokens]) & ~is_end
    is_rare = (sampled < np.log(RARE)) & ~is_end & ~is_digit
    yield "the end", is_end
    yield "digits", is_digit
    yield f"rare (sampler's probability below {RARE:g})", is_rare
    yield "others", ~(is_end | is_digit | is_rare)
    thirds = np.quantile(lengths, [1 / 3, 2 / 3])
    # Many have the greatest length where completions are cut off: they are a part by themselves.
    third = np.searchsorted(thirds, of_document, side="right")
    for number in range(3):
        of_part = of_document[third == number]
        if of_part.size:
            shortest = of_part.min()
            longest = of_part.max()
            is_single = shortest == longest
            lengths_of_part = f"{shortest}" if is_single else f"{shortest} to {longest}"
            yield f"documents of {lengths_of_part} trained tokens", third == number


def _treatments(
    inspected: Inspected, documents: list[Document], difference: np.ndarray
) -> Iterator[tuple[str, str]]:
    """Yield (what a user types, on how many tokens or documents it would act)."""
    index = torch.tensor(np.repeat(np.arange(len(documents)), [d.num_trained for d in documents]))
    sums = DocumentSums.of_tokens(index, torch.ones_like(index, dtype=torch.bool), len(documents))
    apart = torch.tensor(difference)

    def beyond(correction: Correction) -> torch.Tensor:
        return Factors.of(correction, apart, torch.zeros_like(apart), sums).outside

    truncate = TokenTruncate()
    mask = TokenMask()
    icepop = Icepop()
    worst = SequenceMask(mean=MaskMean.worst, low=1e-4, high=100.0, factor=Factor.one)
    ratio = apart.exp()
    outside = (ratio < icepop.low) | (ratio > icepop.high)
    of_tokens = {
        f"correction=token_truncate (above {truncate.high:g})": beyond(truncate),
        f"correction=token_mask (outside {mask.low:g} to {mask.high:g})": beyond(mask),
        f"loss=icepop (outside {icepop.low:g} to {icepop.high:g})": outside,
    }
    of_documents = {
        f"correction=sequence_mask (product above {SequenceMask().high:g})": beyond(SequenceMask()),
        "correction=sequence_mask correction.mean=worst correction.low=1e-4 correction.high=100 "
        "correction.factor=one": beyond(worst),
    }
    for name, acts in of_tokens.items():
        count = int(acts.sum())
        yield name, f"{plural(count, 'token')} ({count / max(len(acts), 1):.2%})"
    for name, acts in of_documents.items():
        count = len(index[acts].unique())
        yield name, f"{plural(count, 'document')} ({count / len(documents):.2%})"
    centred = "every token, by the sampler's likeliest tokens"
    if any(document.sampling_kept_ids is not None for document in documents):
        centred = "nothing: it needs sampling that keeps every token"
    yield "loss=reinforce, cispo or icepop with loss.score_centering=true", centred
    yield "model.fp32_lm_head=true", _float32_head(inspected, difference)


def _float32_head(inspected: Inspected, difference: np.ndarray) -> str:
    """Return what float32 logits of the same weights would change, by a second forward pass."""
    trained = [
        piece.fp32_log_probs[piece.micro_batch.labels >= 0]
        for piece in inspected.made.pieces
        if piece.fp32_log_probs is not None
    ]
    if not trained:
        return "nothing: the trainer's head gives float32 logits"
    changed = torch.cat(trained).double().numpy() - inspected.common["new_log_prob"]
    return (
        f"the trainer: mean difference {abs(difference).mean():.2g} -> "
        f"{abs(difference + changed).mean():.2g}"
    )


def render(report: Mismatch) -> str:
    """Return the page for the terminal."""
    inspected = report.inspected
    apart = report.difference
    k3 = np.expm1(-apart) + apart  # of the trainer against the sampler that drew the tokens
    totals = inspected.made.step.totals
    staleness = inspected.made.metrics.get("staleness", 0)
    lines = folded(
        f"Trainer against sampler: step {inspected.number} of {inspected.name}, "
        f"{plural(int(totals.num_documents), 'document')}, {plural(len(apart), 'trained token')}. "
        f"The trainer's weights are {staleness:g} updates newer than those that sampled."
    )
    for fact in inspected.facts:
        lines += folded(fact, "", "  ")
    lines += folded(
        f"Difference of a token's log-prob, without its sign: mean {abs(apart).mean():.2g}, "
        f"largest {abs(apart).max():.2g}. KL by k3: {k3.mean():.2g}. Mean with its sign: "
        f"{apart.mean():+.2g}, which is below 0 where the sampler is surer of its tokens."
    )
    lines += ["", *_table("difference", report.by_size, apart)]
    lines += ["", *_table("tokens", report.by_kind, apart)]
    lines += ["", "What would act on this step:"]
    for name, acts in report.treatments.items():
        lines += folded(f"{name}: {acts}", "  ", "    ")
    return "\n".join(lines)


def _table(title: str, parts: dict[str, np.ndarray], apart: np.ndarray) -> list[str]:
    """Return rows on parts of the tokens; a part without any is left out."""
    rows = [[title, "count", "share", "mean", f"above {LARGE:g}", "largest"]]
    for name, is_in in parts.items():
        sizes = abs(apart[is_in])
        if sizes.size:
            rows.append(
                [
                    name,
                    f"{sizes.size:,}",
                    f"{sizes.size / len(apart):.1%}",
                    f"{sizes.mean():.2g}",
                    f"{(sizes > LARGE).mean():.1%}",
                    f"{sizes.max():.2g}",
                ]
            )
    return [f"  {row}" for row in aligned(rows, WIDTH - 2, [4])]


def as_json(report: Mismatch) -> str:
    """Return the same for programs, numbers in full."""

    def numbers(parts: dict[str, np.ndarray]) -> dict[str, object]:
        return {
            name: {"count": int(is_in.sum()), "mean": float(abs(report.difference[is_in]).mean())}
            for name, is_in in parts.items()
            if is_in.any()
        }

    return json.dumps(
        {
            "run": report.inspected.name,
            "step": report.inspected.number,
            "mean": float(abs(report.difference).mean()),
            "largest": float(abs(report.difference).max()),
            "by_size": numbers(report.by_size),
            "by_kind": numbers(report.by_kind),
            "treatments": report.treatments,
        },
        indent=1,
        ensure_ascii=False,
    )

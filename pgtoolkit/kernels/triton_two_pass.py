"""The Triton kernels that read the logits twice: forward, then backward with known coefficients.

x_v is a logit, s = log2(e) / temperature, m the maximum of a row, n = sum_v 2^(s (x_v - m)) its
normalizer:

    log_prob = (s (x_label - m) - log2 n) ln 2
    gradient = (c / temperature) (onehot(label) - p),  p = 2^(s (x - m) - log2 n)
             - (e / temperature) p (log p + H),  e the derivative of the loss by the entropy H
             + (k / temperature) (p (log p - log f - K), or p - f), k that by the full KL, K, of p
             and a reference's f; for full_jsd (1 - beta) p (log p - log M - K), with M = (1 - beta)
             p + beta f and K the KL of p to M
             + score centering's part, which losses/centering.py has

`triton_passes` launches them.
"""

# ruff: noqa: RUF005 (Triton's language has no starred tuples)

from __future__ import annotations

import math

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(math.log(2.0))
# The maximum of a lane without logits. It is below every finite logit, and finite, so that
# (-inf) - (-inf) does not occur.
LOWEST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["vocabulary_start"])
def forward_kernel(
    logits,
    labels,
    log_probs,
    maxima,
    log_sums,
    entropies,
    row_stride,
    num_columns,
    vocabulary_start,
    scale,
    ENTROPY: tl.constexpr,
    SHARD: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Compute log-prob, maximum, log-sum and entropy, with a program for each row.

    With SHARD they are the sums of this shard instead: the label's logit, the maximum, n, and
    sum_v e_v 2^e_v with e_v = s (x_v - m).
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label < 0:
        return
    label -= vocabulary_start
    inside = (label >= 0) & (label < num_columns)
    logits += row * row_stride
    label_logit = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)

    # Each lane has a running maximum and sums; they are combined once, after the loop.
    maximum = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK * UNROLL):
        # Several blocks are loaded before the first is used, so that enough bytes are in flight to
        # hide the latency of memory.
        blocks = ()
        highest = maximum
        for i in tl.static_range(UNROLL):
            columns = start + i * BLOCK + tl.arange(0, BLOCK)
            blocks = blocks + (
                tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")),
            )
        for i in tl.static_range(UNROLL):
            highest = tl.maximum(highest, blocks[i].to(tl.float32))
        shrink = (maximum - highest) * scale
        factor = tl.exp2(shrink)
        if ENTROPY:
            dot = factor * (dot + shrink * total)
        total *= factor
        for i in tl.static_range(UNROLL):
            exponent = (blocks[i].to(tl.float32) - highest) * scale
            if ENTROPY:
                # 2^-1000 is 0, as is 0 times -1000: a logit of -inf adds nothing.
                exponent = tl.maximum(exponent, -1000.0)
                dot += tl.exp2(exponent) * exponent
            total += tl.exp2(exponent)
        maximum = highest

    m = tl.max(maximum, 0)
    shrink = (maximum - m) * scale
    factor = tl.exp2(shrink)
    n = tl.sum(total * factor, 0)
    tl.store(maxima + row, m)
    if SHARD:
        tl.store(log_probs + row, label_logit)
        tl.store(log_sums + row, n)
    else:
        log_sum = tl.log2(n)
        # A label outside the vocabulary has no log-prob; NaN makes the caller name the document.
        log_prob = ((label_logit - m) * scale - log_sum) * LN_2
        tl.store(log_probs + row, tl.where(inside, log_prob, float("nan")))
        tl.store(log_sums + row, log_sum * LN_2)
    if ENTROPY:
        dot = tl.sum(factor * (dot + shrink * total), 0)
        if SHARD:
            tl.store(entropies + row, dot)
        else:
            tl.store(entropies + row, (tl.log2(n) - dot / n) * LN_2)


@triton.jit
def _log2_mixture(log_p, log_f, beta):
    """Return log2((1 - beta) p + beta f) of log2 p and log2 f; NaN or -inf where both are 0."""
    highest = tl.maximum(tl.maximum(log_p, log_f), LOWEST)
    of_policy = (1 - beta) * tl.exp2(log_p - highest)
    return highest + tl.log2(of_policy + beta * tl.exp2(log_f - highest))


@triton.jit
def divergence_kernel(
    logits,
    ref_logits,
    labels,
    maxima,
    log_sums,
    ref_maxima,
    ref_log_sums,
    divergences,
    of_policy,
    row_stride,
    ref_stride,
    num_columns,
    scale,
    beta,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the full KL of each row, with a program for each.

    It is sum_v p (log p - log f) for KIND "full_reverse", sum_v f (log f - log p) for
    "full_forward". For "full_jsd" it is sum_v f (log f - log M), and of_policy gets sum_v p
    (log p - log M), M = (1 - beta) p + beta f.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(labels + row) < 0:
        return
    logits += row * row_stride
    ref_logits += row * ref_stride
    m, log_sum = tl.load(maxima + row), tl.load(log_sums + row) * (1 / LN_2)
    ref_m, ref_log_sum = tl.load(ref_maxima + row), tl.load(ref_log_sums + row) * (1 / LN_2)
    total = tl.zeros([BLOCK], tl.float32)
    more = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")).to(
            tl.float32
        )
        y = tl.load(ref_logits + columns, mask=columns < num_columns, other=-float("inf")).to(
            tl.float32
        )
        first, second = (x - m) * scale - log_sum, (y - ref_m) * scale - ref_log_sum
        if KIND == "full_jsd":
            mixture = _log2_mixture(first, second, beta)
            more += tl.where(first > -float("inf"), tl.exp2(first) * (first - mixture), 0.0)
            first, second = second, mixture
        if KIND == "full_forward":
            first, second = second, first
        # A token of probability 0 adds nothing, also where its logit is -inf.
        total += tl.where(first > -float("inf"), tl.exp2(first) * (first - second), 0.0)
    tl.store(divergences + row, tl.sum(total, 0) * LN_2)
    if KIND == "full_jsd":
        tl.store(of_policy + row, tl.sum(more, 0) * LN_2)


@triton.jit
def _terms(
    x,
    y,
    m,
    log_sum,
    ref_m,
    ref_log_sum,
    scale,
    bonus,
    entropy,
    distill,
    divergence,
    beta,
    BONUS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return (p, the terms of entropy and full KL in the gradient) of logits x, and y of the
    reference."""
    exponent = (x - m) * scale - log_sum
    probabilities = tl.exp2(exponent)
    more = tl.zeros_like(probabilities)
    if BONUS:
        # 2^-1000 is 0, as is 0 times -1000: a logit of -inf adds nothing.
        more -= bonus * probabilities * (tl.maximum(exponent, -1000.0) * LN_2 + entropy)
    if KIND is not None:
        ref_exponent = (y - ref_m) * scale - ref_log_sum
        if KIND == "full_forward":
            more += distill * (probabilities - tl.exp2(ref_exponent))
        else:
            if KIND == "full_jsd":
                ref_exponent = _log2_mixture(exponent, ref_exponent, beta)
            term = probabilities * ((exponent - ref_exponent) * LN_2 - divergence)
            if KIND == "full_jsd":
                term *= 1 - beta
            more += distill * tl.where(exponent > -float("inf"), term, 0.0)
    return probabilities, more


@triton.jit(do_not_specialize=["num_rows", "vocabulary_start"])
def backward_kernel(
    logits,
    gradient,
    labels,
    maxima,
    log_sums,
    coefficients,
    by_entropy,
    entropies,
    by_divergence,
    divergences,
    ref_logits,
    ref_maxima,
    ref_log_sums,
    top_ids,
    on_top,
    elsewhere,
    num_rows,
    row_stride,
    gradient_stride,
    ref_stride,
    num_top,
    num_columns,
    vocabulary_start,
    scale,
    inverse_temperature,
    beta,
    BONUS: tl.constexpr,
    KIND: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient, with a program for each block of a row.

    BONUS: include the derivative of the loss by each row's entropy.
    KIND: include the derivative by each row's full KL of this kind; None for no full KL.
    TOP: include score centering, of top_ids and on_top, (T, num_top), and elsewhere, (T,): the
        power of two from num_top on; 0 for none.
    """
    blocks_per_row = tl.cdiv(num_columns, BLOCK)
    # The last rows come first: forward has read them last, and they are still in the cache.
    row = num_rows - 1 - (tl.program_id(0) // blocks_per_row).to(tl.int64)
    start = (tl.program_id(0) % blocks_per_row) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gradient += row * gradient_stride
    label = tl.load(labels + row)
    factor = 0.0
    if label >= 0:
        factor = tl.load(coefficients + row) * inverse_temperature
    nothing = factor == 0
    bonus, entropy = 0.0, 0.0
    if BONUS:
        if label >= 0:
            bonus = tl.load(by_entropy + row) * inverse_temperature
        nothing = nothing & (bonus == 0)
    distill, divergence, ref_m, ref_log_sum = 0.0, 0.0, 0.0, 0.0
    if KIND is not None:
        if label >= 0:
            distill = tl.load(by_divergence + row) * inverse_temperature
        nothing = nothing & (distill == 0)
    if TOP:
        # The coefficient may be 0 where score centering has a gradient.
        nothing = label < 0
    if nothing:
        # An untrained row is not read: it may hold NaN or infinity.
        tl.store(gradient + columns, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=inside)
    else:
        label -= vocabulary_start
        logits += row * row_stride
        m, log_sum = tl.load(maxima + row), tl.load(log_sums + row) * (1 / LN_2)
        x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        y = x
        if BONUS:
            entropy = tl.load(entropies + row)
        if KIND is not None:
            ref_logits += row * ref_stride
            y = tl.load(ref_logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
            divergence = tl.load(divergences + row)
            ref_m, ref_log_sum = tl.load(ref_maxima + row), tl.load(ref_log_sums + row) * (1 / LN_2)
        probabilities, more = _terms(
            x,
            y,
            m,
            log_sum,
            ref_m,
            ref_log_sum,
            scale,
            bonus,
            entropy,
            distill,
            divergence,
            beta,
            BONUS,
            KIND,
        )
        if TOP:
            places = row * num_top + tl.arange(0, TOP)
            used = tl.arange(0, TOP) < num_top
            ids = tl.load(top_ids + places, mask=used, other=-1)
            used = used & (ids >= 0)
            ids -= vocabulary_start
            used = used & (ids >= start) & (ids < start + BLOCK) & (ids < num_columns)
            x_top = tl.load(logits + ids, mask=used, other=-float("inf")).to(tl.float32)
            y_top = x_top
            if KIND is not None:
                y_top = tl.load(ref_logits + ids, mask=used, other=-float("inf")).to(tl.float32)
            p_top, at_top = _terms(
                x_top,
                y_top,
                m,
                log_sum,
                ref_m,
                ref_log_sum,
                scale,
                bonus,
                entropy,
                distill,
                divergence,
                beta,
                BONUS,
                KIND,
            )
            at_top += tl.load(on_top + places, mask=used, other=0.0) * inverse_temperature
            at_top += tl.where(ids == label, factor * (1 - p_top), -factor * p_top)
            more -= tl.load(elsewhere + row) * inverse_temperature * probabilities
            # The result may overwrite the logits: all must have been read before it is stored.
            tl.debug_barrier()
        tl.store(
            gradient + columns,
            (more - factor * probabilities).to(gradient.dtype.element_ty),
            mask=inside,
        )
        # The label's entry is corrected afterwards, which is cheaper than a comparison per column.
        if (label >= start) & (label < start + BLOCK) & (label < num_columns):
            mended = factor * (1 - tl.sum(tl.where(columns == label, probabilities, 0.0), 0))
            mended += tl.sum(tl.where(columns == label, more, 0.0), 0)
            tl.debug_barrier()  # the block's stores must land before that of the label
            tl.store(gradient + label, mended.to(gradient.dtype.element_ty))
        if TOP:
            tl.debug_barrier()  # as above
            tl.store(gradient + ids, at_top.to(gradient.dtype.element_ty), mask=used)

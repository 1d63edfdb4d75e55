"""The Triton kernels of the vocabulary-sized passes, for float32, bfloat16 and float16 logits.

x_tv is a logit, s = log2(e) / temperature, m the maximum of a row, n = sum_v 2^(s (x_v - m)) its normalizer:

    log_prob = (s (x_label - m) - log2 n) ln 2
    gradient = (c / temperature) (onehot(label) - 2^(s (x - m) - log2 n))

`forward_kernel` reads the logits once; `backward_kernel` reads them again and writes the gradient; `one_pass_kernel`
does both with one read, keeping each row on the chip between the two. All are deterministic. `triton_impl` launches
them.
"""

# ruff: noqa: RUF005 (Triton's language has no starred tuples)

from __future__ import annotations

import math

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(math.log(2.0))
# Below every finite logit, and finite: the maximum of a lane that saw nothing, so that no (-inf) - (-inf) arises.
LOWEST: tl.constexpr = tl.constexpr(-1e30)
# A slot that nobody has written yet. Neither a (maximum, sum) pair nor a canonical NaN has all bits set.
EMPTY: tl.constexpr = tl.constexpr(-1)
# Polls of a slot before giving up with NaN; about a second. Never reached unless a program of the grid is missing.
MAX_POLLS: tl.constexpr = tl.constexpr(1 << 20)


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
    """One program a row. With SHARD, what the shard knows instead: the label's logit, n, and sum_v e_v 2^e_v."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label < 0:
        return
    label -= vocabulary_start
    inside = (label >= 0) & (label < num_columns)
    logits += row * row_stride
    label_logit = tl.load(logits + label, mask=inside, other=0.0).to(tl.float32)

    # A running maximum and sums for each lane; lanes meet once, after the loop.
    maximum = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK * UNROLL):
        # Several blocks are loaded before the first is used: enough bytes in flight to fill the memory's latency.
        blocks = ()
        highest = maximum
        for i in tl.static_range(UNROLL):
            columns = start + i * BLOCK + tl.arange(0, BLOCK)
            blocks = blocks + (tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")),)
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


@triton.jit(do_not_specialize=["num_rows", "vocabulary_start"])
def backward_kernel(
    logits,
    gradient,
    labels,
    maxima,
    log_sums,
    coefficients,
    num_rows,
    row_stride,
    gradient_stride,
    num_columns,
    vocabulary_start,
    scale,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    """One program a block of a row."""
    blocks_per_row = tl.cdiv(num_columns, BLOCK)
    # The last rows first: they were read last by the forward, and are still in the cache.
    row = num_rows - 1 - (tl.program_id(0) // blocks_per_row).to(tl.int64)
    start = (tl.program_id(0) % blocks_per_row) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gradient += row * gradient_stride
    label = tl.load(labels + row)
    factor = 0.0
    if label >= 0:
        factor = tl.load(coefficients + row) * inverse_temperature
    if factor == 0:
        # By selection: an untrained row may hold NaN or infinity, and is not even read.
        tl.store(gradient + columns, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=inside)
    else:
        m, log_sum = tl.load(maxima + row), tl.load(log_sums + row) * (1 / LN_2)
        x = tl.load(logits + row * row_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
        probabilities = tl.exp2((x - m) * scale - log_sum)
        tl.store(gradient + columns, (-factor * probabilities).to(gradient.dtype.element_ty), mask=inside)
        # The label's entry is mended afterwards: cheaper than a comparison for each column.
        label -= vocabulary_start
        if (label >= start) & (label < start + BLOCK) & (label < num_columns):
            own = tl.sum(tl.where(columns == label, probabilities, 0.0), 0)
            tl.debug_barrier()  # the block's stores land before the mended one
            tl.store(gradient + label, (factor * (1 - own)).to(gradient.dtype.element_ty))


@triton.jit
def _clipped(log_ratio, advantage, epsilon_low, epsilon_high):
    """(loss, slope) of the clipped surrogate: slope is its derivative by the log-ratio, 0 where clip or clamp act."""
    limited = tl.minimum(tl.maximum(log_ratio, -20.0), 20.0)
    ratio = tl.exp2(limited * (1 / LN_2))
    clipped = tl.minimum(tl.maximum(ratio, 1 - epsilon_low), 1 + epsilon_high)
    loss = -tl.minimum(ratio * advantage, clipped * advantage)
    # Minimum and maximum drop a NaN; the loss must not.
    loss = tl.where(log_ratio == log_ratio, loss, log_ratio)
    # The bounds themselves pass, as autograd of min and clamp has it. NaN does not pass.
    passes = tl.where(advantage > 0, ratio <= 1 + epsilon_high, ratio >= 1 - epsilon_low)
    slope = tl.where(passes & (tl.abs(log_ratio) <= 20.0), -ratio * advantage, 0.0)
    return loss, slope


@triton.jit
def _unpack(words, HALF: tl.constexpr):
    """The two columns of each 32-bit word, in float32; a float32 word is its own only column."""
    if HALF == "bf16":
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pack(low, high, HALF: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        # One instruction for two columns; two conversions and a merge would run on the unit that exp2 needs.
        if HALF == "bf16":
            assembly: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        else:
            assembly: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(assembly, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    if HALF == "bf16":
        low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
    else:
        low, high = low.to(tl.float16), high.to(tl.float16)
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["num_rows", "zero"])
def one_pass_kernel(
    logits,
    words,
    out,
    out_elements,
    labels,
    old_log_probs,
    advantages,
    weights,
    losses,
    log_probs,
    entropies,
    slots,
    num_rows,
    row_stride,
    out_stride,
    num_columns,
    scale,
    inverse_temperature,
    epsilon_low,
    epsilon_high,
    zero,
    GRPO: tl.constexpr,
    ENTROPY: tl.constexpr,
    HALF: tl.constexpr,
    PTX: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCKS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """SHARE programs a row, each with BLOCKS blocks of 4 32-bit words a thread in registers; a persistent grid.

    words and out are `logits` and the result as words (HALF), or as they are (float32 logits). GRPO writes the
    gradient of its loss, else the score onehot - softmax. The result may overwrite the logits.
    """
    member = tl.program_id(0) % SHARE
    group = tl.program_id(0) // SHARE
    num_groups = tl.num_programs(0) // SHARE
    per_word: tl.constexpr = 1 if HALF == "" else 2
    num_words = num_columns // per_word
    # 2-D, so that maximum and sum take one register a thread between the phases, and not one for each word.
    WORDS: tl.constexpr = 4 * THREADS
    first = member * (BLOCKS * WORDS)
    lane = tl.arange(0, THREADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    nothing: tl.constexpr = -8323200 if HALF == "bf16" else -67044352  # two times -inf

    label = tl.load(labels + group, mask=group < num_rows, other=-1).to(tl.int32)
    row = group
    for turn in range(0, tl.cdiv(num_rows, num_groups)):
        # Rotated, so that a pattern in the rows (every other one trained) does not fall on the same programs each turn.
        next_row = (turn + 1) * num_groups + (group + turn + 1) % num_groups
        factor = 0.0
        if label >= 0:
            inside = label < num_columns
            source = words + row.to(tl.int64) * row_stride
            label_logit = tl.load(
                logits + row.to(tl.int64) * (row_stride * per_word) + label, mask=inside, other=0.0
            ).to(tl.float32)
            kept = ()
            for i in tl.static_range(BLOCKS):
                columns = first + i * WORDS + lane
                if HALF == "":
                    kept = kept + (tl.load(source + columns, mask=columns < num_words, other=-float("inf")),)
                else:
                    kept = kept + (tl.load(source + columns, mask=columns < num_words, other=nothing),)

            # Starting from the label's logit changes no maximum, and makes sure that it has arrived before anything
            # is published, after which its place may be overwritten.
            highest = tl.full([THREADS, 4], LOWEST, tl.float32)
            highest = tl.maximum(highest, label_logit)
            for i in tl.static_range(BLOCKS):
                if HALF == "":
                    highest = tl.maximum(highest, kept[i])
                else:
                    low, high = _unpack(kept[i], HALF)
                    highest = tl.maximum(highest, tl.maximum(low, high))
            maximum = tl.max(highest, 1)
            total = tl.zeros([THREADS], tl.float32)
            dot = tl.zeros([THREADS], tl.float32)
            shift = (maximum * scale)[:, None]
            for i in tl.static_range(BLOCKS):
                if HALF == "":
                    exponent = (kept[i] - maximum[:, None]) * scale
                    if ENTROPY:
                        exponent = tl.maximum(exponent, -1000.0)
                        dot += tl.sum(tl.exp2(exponent) * exponent, 1)
                    total += tl.sum(tl.exp2(exponent), 1)
                else:
                    # `zero` is 0, but the compiler does not know: without it, it would keep the float32 values of the
                    # first conversion alive until here, twice the registers of the row itself.
                    low, high = _unpack(kept[i] + zero, HALF)
                    low, high = low * scale - shift, high * scale - shift
                    if ENTROPY:
                        low, high = tl.maximum(low, -1000.0), tl.maximum(high, -1000.0)
                        dot += tl.sum(tl.exp2(low) * low + tl.exp2(high) * high, 1)
                    total += tl.sum(tl.exp2(low) + tl.exp2(high), 1)
            m = tl.max(maximum, 0)
            shrink = (maximum - m) * scale
            shrunk = tl.exp2(shrink)
            n = tl.sum(total * shrunk, 0)
            if ENTROPY:
                d = tl.sum(shrunk * (dot + shrink * total), 0)

            if SHARE > 1:
                # Value and arrival in one 64-bit word: whoever reads it has both, without a fence.
                slot = slots + row.to(tl.int64) * ((2 if ENTROPY else 1) * SHARE)
                pair = (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
                    n.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
                )
                tl.atomic_xchg(slot + member, pair, sem="relaxed")
                if ENTROPY:
                    tl.atomic_xchg(
                        slot + SHARE + member, d.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF, sem="relaxed"
                    )
            # Asked for here, these arrive while the program waits for the others.
            next_label = tl.load(labels + next_row, mask=next_row < num_rows, other=-1).to(tl.int32)
            if GRPO:
                old, advantage = tl.load(old_log_probs + row), tl.load(advantages + row)
                weight = tl.load(weights + row)
            if SHARE > 1:
                # A power of two at least SHARE; the surplus reads member 0 again, and counts nothing below.
                others = tl.arange(0, triton.next_power_of_2(SHARE))
                counted = others < SHARE
                places = slot + tl.where(counted, others, 0)
                pairs = tl.load(places, volatile=True)
                dots = tl.load(places + SHARE, volatile=True) if ENTROPY else pairs
                polls = 0
                while (tl.max(((pairs == EMPTY) | (dots == EMPTY)).to(tl.int32), 0) != 0) & (polls < MAX_POLLS):
                    pairs = tl.load(places, volatile=True)
                    dots = tl.load(places + SHARE, volatile=True) if ENTROPY else pairs
                    polls += 1
                ms = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                ns = tl.where(counted, pairs.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
                m = tl.max(ms, 0)
                apart = (ms - m) * scale
                n = tl.sum(ns * tl.exp2(apart), 0)
                if ENTROPY:
                    received = tl.where(counted, dots.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
                    d = tl.sum(tl.exp2(apart) * (received + apart * ns), 0)
                if polls >= MAX_POLLS:
                    n = float("nan")

            log_sum = tl.log2(n)
            log_prob = ((label_logit - m) * scale - log_sum) * LN_2
            log_prob = tl.where(inside, log_prob, float("nan"))
            if member == 0:
                tl.store(log_probs + row, log_prob)
                if ENTROPY:
                    tl.store(entropies + row, (log_sum - d / n) * LN_2)
            factor = 1.0
            if GRPO:
                loss, slope = _clipped(log_prob - old, advantage, epsilon_low, epsilon_high)
                factor = weight * slope * inverse_temperature
                if member == 0:
                    tl.store(losses + row, weight * loss)
            if factor != 0:
                # -factor 2^(s (x - m) - log2 n), with |factor| in the exponent and the sign set on packed words.
                offset = m * scale + log_sum - tl.log2(tl.abs(factor))
                sign = tl.where(factor > 0, -2147450880, 0)  # 0x80008000
                own = factor * (1 - tl.exp2(log_prob * (1 / LN_2)))
                # `zero` again: the address is computed anew, and takes no registers while the row is kept.
                place = (row + zero).to(tl.int64)
                target = out + place * out_stride
                for i in tl.static_range(BLOCKS):
                    columns = first + i * WORDS + lane
                    if HALF == "":
                        values = -factor * tl.exp2((kept[i] - m) * scale - log_sum)
                        values = values.to(out.dtype.element_ty)
                    else:
                        # Written unlike the two conversions before, for the same reason.
                        low, high = _unpack(kept[i] ^ zero, HALF)
                        values = _pack(tl.exp2(low * scale - offset), tl.exp2(high * scale - offset), HALF, PTX) ^ sign
                    tl.store(target + columns, values, mask=columns < num_words)
                tl.debug_barrier()  # the row's stores land before the mended one
                if (label >= first * per_word) & (label < (first + BLOCKS * WORDS) * per_word) & inside:
                    mended = out_elements + place * (out_stride * per_word) + label
                    tl.store(mended, own.to(out_elements.dtype.element_ty))
        else:
            next_label = tl.load(labels + next_row, mask=next_row < num_rows, other=-1).to(tl.int32)
        if (factor == 0) & (row < num_rows):
            # Untrained rows are not read, by selection: they may hold NaN or infinity.
            target = out + row.to(tl.int64) * out_stride
            for i in tl.static_range(BLOCKS):
                columns = first + i * WORDS + lane
                tl.store(target + columns, tl.zeros([THREADS, 4], out.dtype.element_ty), mask=columns < num_words)
        label, row = next_label, next_row


@triton.jit
def scale_kernel(values, factor, num_values, BLOCK: tl.constexpr):
    """values *= factor, a number on the device; where it is 1, nothing is read or written. Any grid."""
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        for block in range(tl.program_id(0), tl.cdiv(num_values, BLOCK), tl.num_programs(0)):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = index < num_values
            scaled = tl.load(values + index, mask=inside).to(tl.float32) * by
            tl.store(values + index, scaled.to(values.dtype.element_ty), mask=inside)


@triton.jit
def coefficients_kernel(
    log_probs,
    old_log_probs,
    advantages,
    weights,
    mask,
    document_index,
    losses,
    coefficients,
    num_tokens,
    epsilon_low,
    epsilon_high,
    BY_DOCUMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weighted loss of each token and its derivative by the token's log-prob, for `grpo` and (BY_DOCUMENT) `gspo`.

    One program a document, which looks for its tokens among all: no sort, no atomics, and the documents may lie in
    any order. Fifty small kernels would do the same, and take longer than they read.
    """
    if BY_DOCUMENT:
        document = tl.program_id(0)
        count = tl.zeros([BLOCK], tl.float32)
        log_ratio = tl.zeros([BLOCK], tl.float32)
        advantage = tl.zeros([BLOCK], tl.float32)
        weight = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_tokens, BLOCK):
            t = start + tl.arange(0, BLOCK)
            own = tl.load(document_index + t, mask=t < num_tokens, other=-1) == document
            count += tl.where(own, 1.0, 0.0)
            log_ratio += tl.load(log_probs + t, mask=own, other=0.0) - tl.load(old_log_probs + t, mask=own, other=0.0)
            advantage += tl.load(advantages + t, mask=own, other=0.0)
            weight += tl.load(weights + t, mask=own, other=0.0)
        n = tl.maximum(tl.sum(count, 0), 1.0)
        loss, slope = _clipped(tl.sum(log_ratio, 0) / n, tl.sum(advantage, 0) / n, epsilon_low, epsilon_high)
        c = slope * tl.sum(weight, 0) / n
        for start in range(0, num_tokens, BLOCK):
            t = start + tl.arange(0, BLOCK)
            own = tl.load(document_index + t, mask=t < num_tokens, other=-1) == document
            tl.store(losses + t, tl.load(weights + t, mask=own, other=0.0) * loss, mask=own)
            tl.store(coefficients + t, tl.full([BLOCK], c, tl.float32), mask=own)
    else:
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = t < num_tokens
        trained = tl.load(mask + t, mask=inside, other=0) != 0
        log_ratio = tl.load(log_probs + t, mask=trained, other=0.0) - tl.load(
            old_log_probs + t, mask=trained, other=0.0
        )
        advantage = tl.load(advantages + t, mask=trained, other=0.0)
        loss, slope = _clipped(log_ratio, advantage, epsilon_low, epsilon_high)
        weight = tl.load(weights + t, mask=trained, other=0.0)
        tl.store(losses + t, weight * loss, mask=inside)
        tl.store(coefficients + t, weight * slope, mask=inside)


@triton.jit
def scale_rows_kernel(source, factors, target, rows, num_columns, BLOCK: tl.constexpr):
    """target[rows[i]] = factors[i] * source[i], one program a row."""
    i = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + i)
    to = tl.load(rows + i)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(source + i * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
        tl.store(
            target + to * num_columns + columns,
            (factor * values).to(target.dtype.element_ty),
            mask=columns < num_columns,
        )

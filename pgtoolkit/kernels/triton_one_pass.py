"""The Triton kernel that reads the logits once: a row stays on the chip from forward to backward.

`triton_two_pass` has the equations, `triton_passes` launches it.
"""

# ruff: noqa: RUF005 (Triton's language has no starred tuples)

from __future__ import annotations

import triton
import triton.language as tl

from pgtoolkit.kernels.triton_families import drawn_back
from pgtoolkit.kernels.triton_two_pass import LN_2, LOWEST

# A slot that has not been written. Neither a (maximum, sum) pair nor a canonical NaN has all bits
# set.
EMPTY: tl.constexpr = tl.constexpr(-1)
# After this number of polls, about a second, a program gives up with NaN. That happens only if
# another program of the grid is missing.
MAX_POLLS: tl.constexpr = tl.constexpr(1 << 20)


@triton.jit
def _unpack(words, HALF: tl.constexpr):
    """Return the two columns of each 32-bit word, in float32."""
    if HALF == "bf16":
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(
            tl.float32, bitcast=True
        )
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _pack(low, high, HALF: tl.constexpr, PTX: tl.constexpr):
    """Return 32-bit words of two columns each."""
    if PTX:
        # A single instruction for two columns: two conversions and a merge would run on the unit
        # that exp2 needs.
        if HALF == "bf16":
            assembly: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        else:
            assembly: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(
            assembly, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    if HALF == "bf16":
        low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
    else:
        low, high = low.to(tl.float16), high.to(tl.float16)
    low = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _larger(a, b, HALF: tl.constexpr, PTX: tl.constexpr):
    """Return the larger of two packed words, column by column."""
    if PTX:
        # A single instruction for two columns, without unpacking.
        if HALF == "bf16":
            assembly: tl.constexpr = "max.bf16x2 $0, $1, $2;"
        else:
            assembly: tl.constexpr = "max.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(
            assembly, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    low, high = _unpack(a, HALF)
    other_low, other_high = _unpack(b, HALF)
    return _pack(tl.maximum(low, other_low), tl.maximum(high, other_high), HALF, PTX)


@triton.jit
def _prefetch(place):
    """Bring the cache line of this place from memory to the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows", "zero", "sixteen", "upper"])
def one_pass_kernel(
    logits,
    words,
    out,
    out_elements,
    labels,
    old_log_probs,
    advantages,
    weights,
    ref_log_probs,
    pulls,
    by_entropy,
    log_probs,
    entropies,
    slots,
    num_rows,
    row_stride,
    out_stride,
    num_columns,
    scale,
    inverse_temperature,
    number0,
    number1,
    number2,
    number3,
    zero,
    sixteen,
    upper,
    SLOPE: tl.constexpr,
    KL: tl.constexpr,
    BONUS: tl.constexpr,
    ENTROPY: tl.constexpr,
    HALF: tl.constexpr,
    PTX: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCKS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Compute log-probs, entropies and the gradient, with SHARE programs for each row.

    The grid is persistent; each program keeps BLOCKS blocks of 4 32-bit words a thread in
    registers.

    words, out: `logits` and the result as words of two columns (HALF), or unchanged for float32
        logits. The result may overwrite the logits.
    SLOPE: a function of `triton_families`, which takes number0 to number3; the result is then the
        gradient of that loss. Without it the result is the score, onehot - softmax.
    KL: the kind of a penalty against ref_log_probs, weighted by pulls, (T,); None for no penalty.
    BONUS: the loss has an entropy bonus; by_entropy has its derivative by each row's entropy.
    zero, sixteen, upper: 0, 16 and 0xFFFF0000, but the compiler does not know. If it did, it would
        keep the first unpacking of the words for the second one, which would take twice the
        registers of the row.
    """
    member = tl.program_id(0) % SHARE
    group = tl.program_id(0) // SHARE
    num_groups = tl.num_programs(0) // SHARE
    per_word: tl.constexpr = 1 if HALF == "" else 2
    num_words = num_columns // per_word
    # The lanes are 2-D, so that maximum and sum take a register a thread between the phases, and
    # not a register for each word.
    WORDS: tl.constexpr = 4 * THREADS
    first = member * (BLOCKS * WORDS)
    lane = tl.arange(0, THREADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    # -inf; a 32-bit word of half precision holds it twice.
    nothing: tl.constexpr = (
        -float("inf") if HALF == "" else -8323200 if HALF == "bf16" else -67044352
    )

    label = tl.load(labels + group, mask=group < num_rows, other=-1).to(tl.int32)
    row = group
    for turn in range(0, tl.cdiv(num_rows, num_groups)):
        # The groups rotate, so that a pattern in the rows, such as every second one trained, does
        # not give the same programs all the work.
        next_row = (turn + 1) * num_groups + (group + turn + 1) % num_groups
        factor, bonus = 0.0, 0.0
        if label >= 0:
            inside = label < num_columns
            source = words + row.to(tl.int64) * row_stride
            label_logit = tl.load(
                logits + row.to(tl.int64) * (row_stride * per_word) + label, mask=inside, other=0.0
            ).to(tl.float32)
            kept = ()
            for i in tl.static_range(BLOCKS):
                columns = first + i * WORDS + lane
                kept = kept + (tl.load(source + columns, mask=columns < num_words, other=nothing),)

            highest = kept[0]
            for i in tl.static_range(1, BLOCKS):
                highest = (
                    tl.maximum(highest, kept[i])
                    if HALF == ""
                    else _larger(highest, kept[i], HALF, PTX)
                )
            if HALF != "":
                low, high = _unpack(highest, HALF)
                highest = tl.maximum(low, high)
            maximum = tl.maximum(tl.max(highest, 1), LOWEST)
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
                    low, high = _unpack(kept[i], HALF)
                    low, high = low * scale - shift, high * scale - shift
                    if ENTROPY:
                        low, high = tl.maximum(low, -1000.0), tl.maximum(high, -1000.0)
                        dot += tl.sum(tl.exp2(low) * low + tl.exp2(high) * high, 1)
                    total += tl.sum(tl.exp2(low) + tl.exp2(high), 1)
            # The label's logit does not change the maximum of the row. It must have arrived before
            # anything is published, since its place may be overwritten afterwards.
            m = tl.maximum(tl.max(maximum, 0), label_logit)
            shrink = (maximum - m) * scale
            shrunk = tl.exp2(shrink)
            n = tl.sum(total * shrunk, 0)
            if ENTROPY:
                d = tl.sum(shrunk * (dot + shrink * total), 0)

            if SHARE > 1:
                # A 64-bit word holds maximum and sum, so that a reader gets both without a fence.
                slot = slots + row.to(tl.int64) * ((2 if ENTROPY else 1) * SHARE)
                pair = (m.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
                    n.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
                )
                tl.atomic_xchg(slot + member, pair, sem="relaxed")
                if ENTROPY:
                    tl.atomic_xchg(
                        slot + SHARE + member,
                        d.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF,
                        sem="relaxed",
                    )
            # Asked for here, these arrive while the program waits for the others.
            next_label = tl.load(labels + next_row, mask=next_row < num_rows, other=-1).to(tl.int32)
            if SLOPE is not None:
                old, advantage = tl.load(old_log_probs + row), tl.load(advantages + row)
                if PTX:
                    # Those of the next turn: by then the rows would have driven them out of the
                    #   cache, and a wait for the memory holds up all programs of a row.
                    after = tl.minimum(next_row, num_rows - 1)
                    _prefetch(old_log_probs + after)
                    _prefetch(advantages + after)
                    _prefetch(weights + after)
                    if KL is not None:
                        _prefetch(ref_log_probs + after)
                        _prefetch(pulls + after)
                    if BONUS:
                        _prefetch(by_entropy + after)
                weight = tl.load(weights + row)
                if KL is not None:
                    reference, pull = tl.load(ref_log_probs + row), tl.load(pulls + row)
                if BONUS:
                    bonus = tl.load(by_entropy + row) * inverse_temperature
            if SHARE > 1:
                # A power of 2 that is at least SHARE. The surplus reads member 0 again, and is not
                # counted below.
                others = tl.arange(0, triton.next_power_of_2(SHARE))
                counted = others < SHARE
                places = slot + tl.where(counted, others, 0)
                pairs = tl.load(places, volatile=True)
                dots = tl.load(places + SHARE, volatile=True) if ENTROPY else pairs
                polls = 0
                while (tl.max(((pairs == EMPTY) | (dots == EMPTY)).to(tl.int32), 0) != 0) & (
                    polls < MAX_POLLS
                ):
                    pairs = tl.load(places, volatile=True)
                    dots = tl.load(places + SHARE, volatile=True) if ENTROPY else pairs
                    polls += 1
                ms = (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                ns = tl.where(counted, pairs.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
                m = tl.max(ms, 0)
                apart = (ms - m) * scale
                n = tl.sum(ns * tl.exp2(apart), 0)
                if ENTROPY:
                    received = tl.where(
                        counted, dots.to(tl.int32).to(tl.float32, bitcast=True), 0.0
                    )
                    d = tl.sum(tl.exp2(apart) * (received + apart * ns), 0)
                if polls >= MAX_POLLS:
                    n = float("nan")

            log_sum = tl.log2(n)
            log_prob = tl.where(inside, ((label_logit - m) * scale - log_sum) * LN_2, float("nan"))
            if member == 0:
                tl.store(log_probs + row, log_prob)
                if ENTROPY:
                    tl.store(entropies + row, (log_sum - d / n) * LN_2)
            factor = 1.0
            if SLOPE is not None:
                factor = weight * SLOPE(
                    log_prob - old, advantage, log_prob, number0, number1, number2, number3
                )
                if KL is not None:
                    factor += pull * drawn_back(log_prob - reference, log_prob - old, KL)
                factor *= inverse_temperature
            if (factor != 0) | (bonus != 0):
                # -factor 2^(s (x - m) - log2 n), with |factor| in the exponent and the sign set on
                # packed words.
                offset = m * scale + log_sum - tl.log2(tl.abs(factor))
                sign = tl.where(factor > 0, -2147450880, 0)  # 0x80008000
                label_gradient = factor * (1 - tl.exp2(log_prob * (1 / LN_2)))
                if BONUS:
                    # p (base + by_exponent log2 p): both terms at once.
                    offset = m * scale + log_sum
                    by_exponent = -bonus * LN_2
                    base = by_exponent * (log_sum - d / n) - factor
                    log_p = log_prob * (1 / LN_2)
                    label_gradient = factor + (base + by_exponent * log_p) * tl.exp2(log_p)
                # With `zero` the address is computed anew, and takes no registers while the row is
                # kept.
                place = (row + zero).to(tl.int64)
                target = out + place * out_stride
                for i in tl.static_range(BLOCKS):
                    columns = first + i * WORDS + lane
                    if HALF == "":
                        exponent = (kept[i] - m) * scale - log_sum
                        by_p = (
                            base + by_exponent * tl.maximum(exponent, -1000.0) if BONUS else -factor
                        )
                        values = (by_p * tl.exp2(exponent)).to(out.dtype.element_ty)
                    else:
                        if HALF == "bf16":
                            low = (kept[i] << sixteen).to(tl.float32, bitcast=True)
                            high = (kept[i] & upper).to(tl.float32, bitcast=True)
                        else:
                            low, high = _unpack(kept[i] ^ zero, HALF)
                        low, high = low * scale - offset, high * scale - offset
                        if BONUS:
                            low = tl.exp2(low) * (base + by_exponent * tl.maximum(low, -1000.0))
                            high = tl.exp2(high) * (base + by_exponent * tl.maximum(high, -1000.0))
                            values = _pack(low, high, HALF, PTX)
                        else:
                            values = _pack(tl.exp2(low), tl.exp2(high), HALF, PTX) ^ sign
                    tl.store(target + columns, values, mask=columns < num_words)
                tl.debug_barrier()  # the row's stores must land before that of the label
                if (
                    (label >= first * per_word)
                    & (label < (first + BLOCKS * WORDS) * per_word)
                    & inside
                ):
                    mended = out_elements + place * (out_stride * per_word) + label
                    tl.store(mended, label_gradient.to(out_elements.dtype.element_ty))
        else:
            next_label = tl.load(labels + next_row, mask=next_row < num_rows, other=-1).to(tl.int32)
        if (factor == 0) & (bonus == 0) & (row < num_rows):
            # Untrained rows are not read: they may hold NaN or infinity.
            target = out + row.to(tl.int64) * out_stride
            for i in tl.static_range(BLOCKS):
                columns = first + i * WORDS + lane
                tl.store(
                    target + columns,
                    tl.zeros([THREADS, 4], out.dtype.element_ty),
                    mask=columns < num_words,
                )
        label, row = next_label, next_row

"""Triton kernels over the T-vectors of the loss: what `losses.objective` computes in fifty small operations.

Each of those takes as long to launch as all the work takes here. One program a document, which looks for its tokens
among all: no sort, no float atomics, and the documents may lie in any order. One more program takes the tokens that
belong to no document. Loops are unrolled where registers allow: their time is that of one load after the other.
`triton_objective` launches them; `losses.objective` is the readable specification.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pgtoolkit.kernels.triton_families import drawn_back


@triton.jit(do_not_specialize=["num_tokens", "num_documents", "over_documents", "over_tokens", "num_groups"])
def weights_kernel(
    labels,
    document_index,
    group_index,
    tokens_per_group,
    mask,
    index,
    weights,
    counts,
    num_tokens,
    num_documents,
    over_documents,
    over_tokens,
    num_groups,
    divisor,
    MODE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mask, document and weight of each token, and the counts that `triton_objective.make_weights` names."""
    document = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    trained = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_tokens, BLOCK, loop_unroll_factor=4):
        t = start + tl.arange(0, BLOCK)
        label = tl.load(labels + t, mask=t < num_tokens, other=-1)
        place = tl.load(document_index + t, mask=t < num_tokens, other=-1)
        trained += tl.where(label >= 0, 1, 0)
        count += tl.where((label >= 0) & (place == document), 1, 0)
    n = tl.sum(count, 0).to(tl.int64)
    total = tl.sum(trained, 0).to(tl.int64)

    # A weight is one over D times N_d or the divisor, over G N_g, or over N: `losses.aggregation`.
    over = tl.cast(over_documents, tl.int64)
    if MODE == "token_mean":
        over = total if WHOLE else tl.cast(over_tokens, tl.int64)
    elif MODE == "sample_mean":
        over *= n
    elif MODE == "prompt_mean":
        group = tl.load(group_index + document, mask=document < num_documents, other=0)
        over = tl.load(tokens_per_group + group, mask=document < num_documents, other=1) * num_groups
    weight = (1.0 / tl.maximum(over, 1).to(tl.float64)).to(tl.float32)
    # Only of totals that know nothing of a token that is trained here: no number is right.
    weight = tl.where(over > 0, weight, float("inf"))
    if MODE == "constant":
        weight = weight / divisor

    if document < num_documents:
        tl.store(counts + document, n)
        tl.atomic_add(counts + num_documents + 2, tl.where(n == 0, 1, 0).to(tl.int64))  # of integers: exact
    else:
        weight = float("nan")  # no document, no result
        tl.store(counts + num_documents + 1, total)
    rest = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_tokens, BLOCK, loop_unroll_factor=4):
        t = start + tl.arange(0, BLOCK)
        label = tl.load(labels + t, mask=t < num_tokens, other=-1)
        place = tl.load(document_index + t, mask=t < num_tokens, other=-1)
        if document < num_documents:
            own = (label >= 0) & (place == document)
        else:
            own = (t < num_tokens) & ((label < 0) | (place < 0) | (place >= num_documents))
        rest += tl.where(own, 1, 0)
        tl.store(mask + t, label >= 0, mask=own)
        tl.store(index + t, tl.full([BLOCK], document, tl.int64), mask=own)
        tl.store(weights + t, tl.where(label >= 0, weight, 0.0), mask=own)
    if document == num_documents:
        tl.store(counts + document, tl.sum(rest, 0).to(tl.int64))


@triton.jit(do_not_specialize=["num_tokens", "num_documents"])
def surrogate_kernel(
    log_probs,
    entropies,
    old_log_probs,
    advantages,
    weights,
    ref_log_probs,
    pulls,
    document_index,
    coefficients,
    parts,
    num_tokens,
    num_documents,
    number0,
    number1,
    number2,
    number3,
    SURROGATE: tl.constexpr,
    TOKEN: tl.constexpr,
    BEYOND: tl.constexpr,
    SCOPE: tl.constexpr,
    OWN_WEIGHT: tl.constexpr,
    KL: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Coefficient of each token, and (LEVEL >= 0) what each document adds to the loss, to the metrics' sums and maxima.

    number0 to number3: the family's numbers. SURROGATE, TOKEN, BEYOND: its functions in `triton_families`; TOKEN may be
    None. SCOPE: its `scope`. OWN_WEIGHT: whether a slope is weighted by the token's weight, and not by the mean of the
    document's. KL: the kind of a penalty against ref_log_probs, which pulls weighs by token, or None.
    parts: a row a program, in the order of `losses.metrics`.
    """
    BY_DOCUMENT: tl.constexpr = SCOPE != "token"
    document = tl.program_id(0)
    real = tl.full([BLOCK], document, tl.int32) < num_documents  # a vector also for Triton 3.9's interpreter
    n = tl.zeros([BLOCK], tl.float32)
    log_ratio_sum = tl.zeros([BLOCK], tl.float32)
    advantage_sum = tl.zeros([BLOCK], tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    sum_if_positive = tl.zeros([BLOCK], tl.float32)
    sum_if_negative = tl.zeros([BLOCK], tl.float32)
    one = tl.full([BLOCK], 1.0, tl.float32)
    for start in tl.range(0, num_tokens, BLOCK, loop_unroll_factor=4):
        t = start + tl.arange(0, BLOCK)
        own = (tl.load(document_index + t, mask=t < num_tokens, other=-1) == document) & real
        n += tl.where(own, 1.0, 0.0)
        if BY_DOCUMENT:
            new = tl.load(log_probs + t, mask=own, other=0.0)
            difference = new - tl.load(old_log_probs + t, mask=own, other=0.0)
            log_ratio_sum += difference
            if TOKEN is not None:
                # The sign of the document's advantage is not known yet: the sum under each.
                sum_if_positive += TOKEN(difference, one, number0, number1, number2, number3)
                sum_if_negative += TOKEN(difference, -one, number0, number1, number2, number3)
            advantage_sum += tl.load(advantages + t, mask=own, other=0.0)
            weight_sum += tl.load(weights + t, mask=own, other=0.0)
    length = tl.maximum(tl.sum(n, 0), 1.0)
    scope_log_ratio = tl.sum(log_ratio_sum, 0)
    mean_advantage = tl.sum(advantage_sum, 0) / length
    if TOKEN is not None:
        scope_log_ratio = tl.where(mean_advantage > 0, tl.sum(sum_if_positive, 0), scope_log_ratio)
        scope_log_ratio = tl.where(mean_advantage < 0, tl.sum(sum_if_negative, 0), scope_log_ratio)
    if SCOPE == "document":
        scope_log_ratio = scope_log_ratio / length
    mean_weight = tl.sum(weight_sum, 0) / length

    loss_sum = tl.zeros([BLOCK], tl.float64)
    new_sum = tl.zeros([BLOCK], tl.float64)
    old_sum = tl.zeros([BLOCK], tl.float64)
    ratio_sum = tl.zeros([BLOCK], tl.float64)
    square_sum = tl.zeros([BLOCK], tl.float64)
    given_sum = tl.zeros([BLOCK], tl.float64)
    divergence_sum = tl.zeros([BLOCK], tl.float64)
    entropy_sum = tl.zeros([BLOCK], tl.float64)
    outside = tl.zeros([BLOCK], tl.float32)
    outside_low = tl.zeros([BLOCK], tl.float32)
    outside_high = tl.zeros([BLOCK], tl.float32)
    clamped = tl.zeros([BLOCK], tl.float32)
    largest_advantage = tl.full([BLOCK], -float("inf"), tl.float32)
    largest_ratio = tl.full([BLOCK], -float("inf"), tl.float32)
    least_advantage = tl.full([BLOCK], float("inf"), tl.float32)
    least_ratio = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, num_tokens, BLOCK, loop_unroll_factor=4 if LEVEL <= 0 else 1):
        t = start + tl.arange(0, BLOCK)
        taken = tl.load(document_index + t, mask=t < num_tokens, other=-1) == document
        weight = tl.load(weights + t, mask=taken, other=0.0)
        own = taken & real  # of no document: untrained, which may hold NaN, or misplaced, whose weight is NaN
        new = tl.load(log_probs + t, mask=own, other=0.0)
        old = tl.load(old_log_probs + t, mask=own, other=0.0)
        given = tl.load(advantages + t, mask=own, other=0.0)
        token_log_ratio, factor = new - old, weight
        if BY_DOCUMENT:
            log_ratio = tl.where(own, scope_log_ratio, 0.0)
            advantage = tl.where(own, mean_advantage, 0.0)
            if not OWN_WEIGHT:
                factor = tl.where(own, mean_weight, weight)
        else:
            log_ratio, advantage = token_log_ratio, given
        loss, slope, ratio, limited = SURROGATE(log_ratio, advantage, new, number0, number1, number2, number3)
        if TOKEN is not None:
            limit = TOKEN(token_log_ratio, advantage, number0, number1, number2, number3)
            slope = tl.where(limit == token_log_ratio, slope, 0.0)
        loss, slope = weight * loss, factor * slope
        if KL is not None:
            reference = tl.load(ref_log_probs + t, mask=own, other=0.0)
            pull = tl.load(pulls + t, mask=taken, other=0.0)
            value, back = drawn_back(new - reference, token_log_ratio, KL)
            loss, slope = loss + pull * value, slope + pull * back
        tl.store(coefficients + t, slope, mask=taken)
        loss_sum += loss.to(tl.float64)
        new_sum += new.to(tl.float64)
        if LEVEL >= 1:
            r = tl.where(own, ratio, 0.0).to(tl.float64)
            old_sum += old.to(tl.float64)
            ratio_sum += r
            square_sum += r * r
            given_sum += given.to(tl.float64)
            # ratio - 1 - log-ratio; where both are small, by its series.
            x = limited.to(tl.float64)
            series = x * x * (0.5 + x * (1 / 6 + x / 24))
            divergence_sum += tl.where(own, tl.where(tl.abs(x) < 1e-3, series, tl.exp(x) - 1 - x), 0.0)
            low, high, low_cuts, high_cuts = BEYOND(
                ratio, token_log_ratio, advantage, new, number0, number1, number2, number3
            )
            outside += tl.where(own & (low | high), 1.0, 0.0)
            outside_low += tl.where(own & low_cuts, 1.0, 0.0)
            outside_high += tl.where(own & high_cuts, 1.0, 0.0)
            clamped += tl.where(tl.abs(log_ratio) > 20.0, 1.0, 0.0)
            largest_advantage = tl.maximum(largest_advantage, tl.where(own, given, -float("inf")))
            largest_ratio = tl.maximum(largest_ratio, tl.where(own, ratio, -float("inf")))
            least_advantage = tl.minimum(least_advantage, tl.where(own, given, float("inf")))
            least_ratio = tl.minimum(least_ratio, tl.where(own, ratio, float("inf")))
        if LEVEL == 2:
            entropy_sum += tl.load(entropies + t, mask=own, other=0.0).to(tl.float64)

    if LEVEL >= 0:
        width: tl.constexpr = 2 if LEVEL == 0 else 13 + LEVEL - 1
        parts += document * (width if LEVEL == 0 else width + 4)
        u = 1.0 / length.to(tl.float64)  # each document's tokens weigh one together
        tl.store(parts, tl.sum(loss_sum, 0))
        tl.store(parts + 1, u * tl.sum(new_sum, 0))
    if LEVEL >= 1:
        tl.store(parts + 2, u * tl.sum(old_sum, 0))
        tl.store(parts + 3, u * tl.sum(ratio_sum, 0))
        tl.store(parts + 4, u * tl.sum(given_sum, 0))
        tl.store(parts + 5, u * tl.sum(divergence_sum, 0))
        tl.store(parts + 6, u * tl.sum(outside, 0))
        tl.store(parts + 7, u * tl.sum(outside_low, 0))
        tl.store(parts + 8, u * tl.sum(outside_high, 0))
        tl.store(parts + 9, u * tl.sum(clamped, 0))
        if LEVEL == 2:
            tl.store(parts + 10, u * tl.sum(entropy_sum, 0))
        v = u
        if not BY_DOCUMENT:
            v = u * 0 + 1.0
        tl.store(parts + width - 3, v * tl.sum(ratio_sum, 0))
        tl.store(parts + width - 2, v * tl.sum(square_sum, 0))
        tl.store(parts + width - 1, v * tl.sum(n, 0))
        tl.store(parts + width, tl.max(largest_advantage, 0).to(tl.float64))
        tl.store(parts + width + 1, tl.max(largest_ratio, 0).to(tl.float64))
        tl.store(parts + width + 2, -tl.min(least_advantage, 0).to(tl.float64))
        tl.store(parts + width + 3, -tl.min(least_ratio, 0).to(tl.float64))


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

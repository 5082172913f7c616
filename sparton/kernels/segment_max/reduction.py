"""Pooling over the tokens of a tile of logits that ends sequences anywhere; device functions.

V vocabulary. A tile is ``[BLOCK_V, tokens]``. What is known of the sequence in progress is kept in
SLOTS columns: slot p sees the tokens ``lo + p, lo + p + SLOTS, ...`` of every segment that starts
at ``lo``. In the layout of Hopper's and Ampere's matrix instructions these lie in one thread, so
that threads need to talk only when a sequence ends.

A slot is a pair (fp32, int32). For max pooling: the running maximum and its token. For sum pooling,
whose result is the sum of ``log(1 + x)``, x >= 0: the product of the ``1 + x`` as a number in
``[1, 2)`` and a power of 2, so that a token costs one multiplication instead of one logarithm.
"""

import triton
import triton.language as tl

from sparton.kernels.tiles import halves

SLOTS = tl.constexpr(8)
NO_STOP = tl.constexpr(2**31 - 1)


@triton.jit
def locate(num_groups, num_blocks, band):
    """Group of sequences and block of vocabulary rows of this program. ``band`` blocks run side by
    side through one group after the other, to share its hidden states in the L2 cache."""
    pid = tl.program_id(0)
    first = pid // (band * num_groups) * band
    width = tl.minimum(num_blocks - first, band)
    within = pid - first * num_groups
    return within // width, first + within % width


@triton.jit
def _first_from(cu_ptr, N, token, lanes):
    """The first of N sequences that starts at ``token`` or later, else N; a search in steps that
    look at as many starts as there are ``lanes``."""
    first = 0
    left = N
    while left > 0:
        stride = tl.cdiv(left, lanes.shape[0])
        inside = lanes * stride < left
        starts = tl.load(cu_ptr + first + lanes * stride, inside, NO_STOP)
        before = tl.sum((inside & (starts < token)).to(tl.int32))
        # The answer lies behind the last start seen that is too early, and at most at the next.
        left = tl.where(before > 0, tl.minimum(stride, left - (before - 1) * stride) - 1, 0)
        first += tl.where(before > 0, (before - 1) * stride + 1, 0)
    return first


@triton.jit
def sequences_of_group(cu_ptr, N, group, group_tokens, num_groups, lanes):
    """First sequence of a group, and the first of the next: a group holds those that start within
    ``group_tokens`` tokens, the last one also the empty ones at the very end."""
    first = _first_from(cu_ptr, N, group * group_tokens, lanes)
    last = N
    if group < num_groups - 1:
        last = _first_from(cu_ptr, N, (group + 1) * group_tokens, lanes)
    return first, last


@triton.jit
def first_slots(x):
    """The first SLOTS columns of a tile, laid out as the pieces that a tile is cut into."""
    if x.shape[1] > SLOTS:
        left, _ = halves(x)
        x = first_slots(left)
    return x


@triton.jit
def clean_slots(BLOCK_V: tl.constexpr, SUM: tl.constexpr):
    """The slots before any token, and their numbers ``[1, SLOTS]``."""
    value = tl.full((BLOCK_V, SLOTS), 1.0 if SUM else float("-inf"), tl.float32)
    whole = tl.full((BLOCK_V, SLOTS), 0 if SUM else -1, tl.int32)
    return value, whole, tl.arange(0, SLOTS)[None, :]


@triton.jit
def summands(logits, bias, ACTIVATION: tl.constexpr):
    """What sum pooling multiplies by, less 1, of a tile of logits without bias ``[BLOCK_V, 1]``."""
    x = positive_part(logits + bias)
    if ACTIVATION == "log1p_relu":
        x = tl.where(x == 0.0, x, tl.log(1.0 + x))
    return x


@triton.jit
def _fold_max(
    best, token, slots, logits, lo, start, stop, ARGMAX: tl.constexpr, MASKED: tl.constexpr
):
    """Fold the logits of tokens ``lo, lo + 1, ...`` into the running maximum, left to right.

    ``token`` is that of slot 0 in the winning group of SLOTS tokens. Strictly greater replaces, so
    that within a slot the first of equal logits stays. NaN is dropped. MASKED leaves out tokens
    outside ``start : stop``.
    """
    if logits.shape[1] > SLOTS:
        left, right = halves(logits)
        middle = lo + logits.shape[1] // 2
        best, token = _fold_max(best, token, slots, left, lo, start, stop, ARGMAX, MASKED)
        best, token = _fold_max(best, token, slots, right, middle, start, stop, ARGMAX, MASKED)
    else:
        if MASKED:
            inside = (lo + slots >= start) & (lo + slots < stop)
            logits = tl.where(inside, logits, float("-inf"))
        if ARGMAX:
            better = logits > best
            best = tl.where(better, logits, best)
            token = tl.where(better, lo, token)
        else:
            best = tl.maximum(best, logits)
    return best, token


@triton.jit
def _multiply(product, slots, x, lo, start, stop, MASKED: tl.constexpr):
    """Multiply ``1 + x`` of tokens ``lo, lo + 1, ...`` into the slots, left to right."""
    if x.shape[1] > SLOTS:
        left, right = halves(x)
        product = _multiply(product, slots, left, lo, start, stop, MASKED)
        product = _multiply(product, slots, right, lo + x.shape[1] // 2, start, stop, MASKED)
    else:
        if MASKED:
            x = tl.where((lo + slots >= start) & (lo + slots < stop), x, 0.0)
        product += product * x
    return product


@triton.jit
def _fold_sum(product, exponent, slots, x, lo, start, stop, MASKED: tl.constexpr):
    """Fold the ``1 + x`` of tokens ``lo, lo + 1, ...`` into the slots' products.

    A slot takes at most 4 factors here, so that nothing overflows as long as x < 2^31. After a
    product that does, or that is NaN, the result is not finite.
    """
    tl.static_assert(x.shape[1] <= 4 * SLOTS)
    product = _multiply(product, slots, x, lo, start, stop, MASKED)
    bits = product.to(tl.int32, bitcast=True)
    exponent += (bits >> 23) - 127
    product *= (0x7F000000 - (bits & 0x7F800000)).to(tl.float32, bitcast=True)
    return product, exponent


@triton.jit
def _fold(
    value, whole, slots, x, lo, start, stop,
    SUM: tl.constexpr, ARGMAX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if SUM:
        value, whole = _fold_sum(value, whole, slots, x, lo, start, stop, MASKED)
    else:
        value, whole = _fold_max(value, whole, slots, x, lo, start, stop, ARGMAX, MASKED)
    return value, whole


@triton.jit
def log1p(x):
    """Accurate for small x >= 0 too: the rounding error of 1 + x is divided out."""
    one_more = 1.0 + x
    lost = (one_more == 1.0) | (x == float("inf"))
    return tl.where(lost, x, tl.log(one_more) * (x / tl.where(lost, 1.0, one_more - 1.0)))


@triton.jit
def greater(x, y):
    """The maximum, NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def positive_part(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _neighbours(x, SUMMED: tl.constexpr):
    return tl.reshape(x, (x.shape[0] // SUMMED, SUMMED))


@triton.jit
def sums_of_rows(offs_v, SUMMED: tl.constexpr):
    """The sums that vocabulary rows ``offs_v`` go into, SUMMED neighbours into one."""
    offs_s = offs_v
    if SUMMED > 1:
        offs_s = tl.min(_neighbours(offs_v, SUMMED), 1) // SUMMED
    return offs_s


@triton.jit
def _write_max(
    best, token, slots, n, occupied, bias, scale, out,
    ACTIVATION: tl.constexpr, ARGMAX: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Join the slots (the first of equal logits wins) and store sequence ``n``, or the sums of
    SUMMED neighbouring rows."""
    reps_ptr, argmax_ptr, offs_v, V, offs_s, N = out
    row = n.to(tl.int64) * V + offs_v
    tokens = token + slots
    value = tl.max(best, 1)
    logit = value if scale is None else value * scale
    logit += bias
    if ACTIVATION != "none":
        logit = positive_part(logit)
    # Comparisons drop NaN: if nothing was greater than -inf, every logit was NaN.
    lost = value == float("-inf")
    reps = tl.where(lost, tl.where(occupied, float("nan"), 0.0), logit)
    if ACTIVATION != "none":
        reps = log1p(reps)
    if ACTIVATION == "log1p_relu":
        reps = log1p(reps)
    if SUMMED > 1:
        sums = tl.sum(_neighbours(reps, SUMMED), 1)
        tl.store(reps_ptr + offs_s.to(tl.int64) * N + n, sums, offs_s * SUMMED < V)
    else:
        tl.store(reps_ptr + row, reps, offs_v < V)
    if ARGMAX:
        tokens = tl.where((best == value[:, None]) & (token >= 0), tokens, NO_STOP)
        first = tl.min(tokens, 1)
        tl.store(argmax_ptr + row, tl.where(first == NO_STOP, -1, first), offs_v < V)


@triton.jit
def _write_sum(product, exponent, n, out):
    """Join the slots and store sequence ``n``: the logarithm of what they hold."""
    LOG_2: tl.constexpr = 0.6931471805599453
    reps_ptr, _, offs_v, V, _, _ = out
    reps = tl.sum(exponent, 1) * LOG_2 + tl.sum(log1p(product - 1.0), 1)
    tl.store(reps_ptr + n.to(tl.int64) * V + offs_v, reps, offs_v < V)


@triton.jit
def reduce_tile(
    x, lo, state, clean, bias, scale, cu_ptr, out, SEGMENT: tl.constexpr, SUM: tl.constexpr,
    ACTIVATION: tl.constexpr, ARGMAX: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Fold a tile, columns = tokens ``lo, lo + 1, ...``; write the sequences that end.

    ``x`` are logits without bias or, where SUM pools the sum and not the maximum, summands.
    ``state`` is (the slots' pair, sequence in progress, its start, its stop, end of the group's
    sequences). ``scale`` ``[BLOCK_V]``, or None, multiplies the maxima. ``out`` is (reps, winners,
    the tile's vocabulary rows, V, their :func:`sums_of_rows`, N). SUM pools the sum, else the
    maximum; ACTIVATION and SUMMED as in forward.py.
    """
    value, whole, n, start, stop, last = state
    hi = lo + x.shape[1]
    # What lies within one sequence is folded without looking for its end; sums, by segments.
    AT_ONCE: tl.constexpr = not SUM or x.shape[1] <= SEGMENT
    if AT_ONCE and start <= lo and hi < stop:
        value, whole = _fold(value, whole, clean[2], x, lo, start, stop, SUM, ARGMAX, False)
    elif x.shape[1] > SEGMENT:
        left, right = halves(x)
        state = reduce_tile(
            left, lo, state, clean, bias, scale, cu_ptr, out,
            SEGMENT, SUM, ACTIVATION, ARGMAX, SUMMED,
        )  # fmt: skip
        middle = lo + x.shape[1] // 2
        value, whole, n, start, stop, last = reduce_tile(
            right, middle, state, clean, bias, scale, cu_ptr, out,
            SEGMENT, SUM, ACTIVATION, ARGMAX, SUMMED,
        )  # fmt: skip
    else:
        while stop <= hi:
            value, whole = _fold(value, whole, clean[2], x, lo, start, stop, SUM, ARGMAX, True)
            if SUM:
                _write_sum(value, whole, n, out)
            else:
                _write_max(
                    value, whole, clean[2], n, start < stop, bias, scale, out,
                    ACTIVATION, ARGMAX, SUMMED,
                )  # fmt: skip
            value, whole = clean[0], clean[1]
            n += 1
            start = stop
            stop = tl.load(cu_ptr + n + 1, mask=n < last, other=NO_STOP)
        value, whole = _fold(value, whole, clean[2], x, lo, start, stop, SUM, ARGMAX, True)
    return value, whole, n, start, stop, last

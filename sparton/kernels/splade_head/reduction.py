"""Maximum over the tokens of a tile of logits that ends sequences anywhere; device functions.

V vocabulary. A tile is ``[BLOCK_V, tokens]``. The running maximum of the sequence in progress is
kept in SLOTS columns: slot p sees the tokens ``lo + p, lo + p + SLOTS, ...`` of every segment that
starts at ``lo``. In the layout of Hopper's and Ampere's matrix instructions these lie in one
thread, so that threads need to talk only when a sequence ends.
"""

import triton
import triton.language as tl

SLOTS = tl.constexpr(8)
NO_STOP = tl.constexpr(2**31 - 1)


@triton.jit
def _halves(x):
    """Columns of ``x`` ``[M, W]`` as two blocks ``[M, W / 2]``, left and right."""
    pairs = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(pairs, (0, 2, 1)))


@triton.jit
def _fold(best, token, logits, lo, start, stop, MASKED: tl.constexpr):
    """Fold the logits of tokens ``lo, lo + 1, ...`` into the running maximum, left to right.

    ``token`` is that of slot 0 in the winning group of SLOTS tokens. Strictly greater replaces, so
    that within a slot the first of equal logits stays. MASKED leaves out tokens outside
    ``start : stop``.
    """
    if logits.shape[1] > SLOTS:
        left, right = _halves(logits)
        best, token = _fold(best, token, left, lo, start, stop, MASKED)
        middle = lo + logits.shape[1] // 2
        best, token = _fold(best, token, right, middle, start, stop, MASKED)
    else:
        better = logits > best
        if MASKED:
            offs_t = lo + tl.arange(0, SLOTS)
            better = better & ((offs_t >= start) & (offs_t < stop))[None, :]
        best = tl.where(better, logits, best)
        token = tl.where(better, lo, token)
    return best, token


@triton.jit
def _log1p(x):
    """Accurate for small x >= 0 too: the rounding error of 1 + x is divided out."""
    one_more = 1.0 + x
    lost = one_more == 1.0
    return tl.where(lost, x, tl.log(one_more) * (x / tl.where(lost, 1.0, one_more - 1.0)))


@triton.jit
def _write_row(
    best, token, occupied, bias, reps_ptrs, argmax_ptrs, mask,
    TWICE: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Join the slots (the first of equal logits wins) and store one sequence."""
    tokens = token + tl.arange(0, SLOTS)[None, :]
    value = tl.max(best, 1)
    logit = tl.maximum(value + bias, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # Comparisons drop NaN: if nothing was greater than -inf, every logit was NaN.
    logit = tl.where((value == float("-inf")) & occupied, float("nan"), logit)
    reps = _log1p(logit)
    if TWICE:
        reps = _log1p(reps)
    tl.store(reps_ptrs, reps, mask)
    if ARGMAX:
        tokens = tl.where((best == value[:, None]) & (token >= 0), tokens, NO_STOP)
        first = tl.min(tokens, 1)
        tl.store(argmax_ptrs, tl.where(first == NO_STOP, -1, first), mask)


@triton.jit
def reduce_tile(
    logits, lo, state, bias, cu_ptr, reps_ptr, argmax_ptr, offs_v, V,
    SEGMENT: tl.constexpr, TWICE: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Fold a tile of logits, columns = tokens ``lo, lo + 1, ...``; write the sequences that end.

    ``state`` is (running maximum, its token, sequence in progress, its start, its stop, end of the
    group's sequences). TWICE applies log1p twice.
    """
    if logits.shape[1] > SEGMENT:
        left, right = _halves(logits)
        state = reduce_tile(
            left, lo, state, bias, cu_ptr, reps_ptr, argmax_ptr, offs_v, V,
            SEGMENT, TWICE, ARGMAX,
        )  # fmt: skip
        middle = lo + logits.shape[1] // 2
        state = reduce_tile(
            right, middle, state, bias, cu_ptr, reps_ptr, argmax_ptr, offs_v, V,
            SEGMENT, TWICE, ARGMAX,
        )  # fmt: skip
    else:
        best, token, n, start, stop, last = state
        hi = lo + logits.shape[1]
        while stop <= hi:
            best, token = _fold(best, token, logits, lo, start, stop, True)
            row = n.to(tl.int64) * V + offs_v
            _write_row(
                best, token, start < stop, bias, reps_ptr + row, argmax_ptr + row, offs_v < V,
                TWICE, ARGMAX,
            )  # fmt: skip
            best = tl.full(best.shape, float("-inf"), tl.float32)
            token = tl.full(token.shape, -1, tl.int32)
            n += 1
            start = stop
            stop = tl.load(cu_ptr + n + 1, mask=n < last, other=NO_STOP)
        if start <= lo:
            best, token = _fold(best, token, logits, lo, start, stop, False)
        else:
            best, token = _fold(best, token, logits, lo, start, stop, True)
        state = (best, token, n, start, stop, last)
    return state

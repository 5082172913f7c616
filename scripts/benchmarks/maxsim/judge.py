"""What scores and gradients are judged by: fp32 truth."""

from benchmarks.gate import Errors, Results, relative_errors

# Of the norm of the truth; those of a query's or a document's gradient that near-ties leave alone.
SCORES, UNTIED = 5e-3, 1e-2
# Of the largest score.
WORST = 2e-2
# Of the gradient's norm: similarities in fp32 tie rarely, those rounded to 16 bits often. Zeros
# instead of a gradient have an error of 1.
EXACT, ROUNDED = 0.1, 0.4


def errors(actual: Results, truth: Results) -> Errors:
    """Norms of the differences relative to the truth's, and the largest difference of a score."""
    found = relative_errors(actual, truth)
    worst = (actual["scores"] - truth["scores"]).abs().max()
    found["scores_max"] = float(worst / truth["scores"].abs().max().clamp_min(1e-30))
    return found


def allowance(found: Errors, *, ties: float = EXACT, scores: float = SCORES) -> Errors:
    """The largest errors that pass: ``ties`` for elements of gradients, ``scores`` for scores."""
    fixed = {"scores": scores, "scores_max": max(WORST, 4 * scores)}
    elements = ("queries", "documents", "projection")
    return {n: fixed.get(n, ties if n in elements else UNTIED) for n in found}

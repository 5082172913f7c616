"""What is said of an approximate index: how much it finds of what exact search finds."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from sparton.evaluation import evaluate_encoder, results_table, task_figures
from sparton.evaluation.recall import ExactRecall, recall_of_exact
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.representations import Representations
from sparton.retrieval.indexes.exact import exact_index
from sparton.retrieval.indexes.protocols import Found, Index
from tests.evaluation.problems import LexicalEncoder, make_task, packed_words


class Forgetful:
    """An exact index that loses every other result."""

    exact = False

    def __init__(self, index) -> None:
        self._index, self.kinds, self.nbytes = index, index.kinds, index.nbytes

    def search(self, queries, k, *, exclude=None, progress=None):
        found = self._index.search(queries, 2 * k, exclude=exclude)
        return Found(found.scores[:, ::2], found.rows[:, ::2])


def forgetful_index(documents, device, *, rerank_depth):
    return Forgetful(exact_index(documents, device, rerank_depth=rerank_depth))


def dense(number: int, seed: int) -> Representations:
    weights = torch.rand(number, 12, generator=torch.Generator().manual_seed(seed)) + 0.1
    return Representations(SparseVectors.from_dense(weights))


def test_shares_of_what_exact_search_finds():
    documents, queries = dense(300, 0), dense(250, 1)
    exclude = np.arange(250)[:, None]
    exact = exact_index(documents)

    def recall(index: Index, k: int, left_out=exclude) -> ExactRecall:
        found = index.search(queries, k, exclude=exclude)
        return recall_of_exact(
            found, queries, documents, "cpu", k=k, rerank_depth=10, exclude=left_out
        )

    assert recall(exact, 120) == (1, 1, 100)
    assert recall(Forgetful(exact), 120) == (0.5, 0.5, 100)
    assert recall(exact, 50) == (1, None, 100)
    assert recall(exact, 9) == (None, None, 100)
    # One that is left out here and not there is missed by those queries that it is best for.
    assert 0.5 < recall(exact, 120, None).at_10 < 1


def test_queries_that_find_nothing_do_not_count():
    documents = dense(30, 0)
    queries = Representations(
        SparseVectors.from_dense(torch.eye(12)[:2] * torch.tensor([[0], [1]]))
    )

    def recall(found: Found, k: int) -> ExactRecall:
        return recall_of_exact(found, queries, documents, "cpu", k=k, rerank_depth=10, exclude=None)

    found = exact_index(documents).search(queries, 20)
    assert recall(found, 20) == (1, None, 2)
    assert recall(Found(found.scores, np.full_like(found.rows, -1)), 20) == (0, None, 2)
    # Of a collection that is smaller than what is looked for, all of it is.
    assert recall(exact_index(documents).search(queries, 1000), 1000) == (1, 1, 2)


def test_results_of_an_approximate_index_say_so():
    options = {"progress": False, "k": 10, "metrics": ["mrr@10"], "timed_queries": 0}
    arguments = LexicalEncoder(), packed_words(), make_task()
    exact = evaluate_encoder(*arguments, **options)
    assert exact.exact_recall is None and "exact_recall" not in task_figures(exact)
    found = evaluate_encoder(*arguments, index=forgetful_index, **options)
    assert found.exact_recall is not None and found.exact_recall.queries == 3
    # Two queries find three documents, of which the second is lost, and one finds one.
    assert found.exact_recall.at_10 == pytest.approx((2 / 3 + 1 + 2 / 3) / 3)
    figures = task_figures(found)["exact_recall"]
    assert figures == {"at_10": found.exact_recall.at_10, "at_100": None, "queries": 3}
    for result, shown in ((exact, False), (found, True)):
        console = Console(file=io.StringIO(), width=200)
        console.print(results_table([result]))
        said = console.file.getvalue()
        assert ("of exact@10" in said) == shown and "of exact@100" not in said

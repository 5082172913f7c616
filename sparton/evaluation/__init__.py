"""Encode, index, search, measure, write."""

from sparton.evaluation.explanation import TermMatch, TokenMatch, explain, explain_match
from sparton.evaluation.models import (
    check_model,
    choose_device,
    load_retriever,
    packed_tokenizer,
    training_tokenizer,
)
from sparton.evaluation.results import (
    TaskResult,
    check_task_names,
    flat_metrics,
    mean_metrics,
    results_table,
    task_figures,
    write_results,
    write_task_run,
)
from sparton.evaluation.settings import (
    bm25_finds,
    check_bounds_apply,
    check_index,
    check_pooling,
    plan_search,
)
from sparton.evaluation.tasks import evaluate_bm25, evaluate_encoder
from sparton.evaluation.testing import run_tests

__all__ = [
    "TaskResult",
    "TermMatch",
    "TokenMatch",
    "bm25_finds",
    "check_bounds_apply",
    "check_index",
    "check_model",
    "check_pooling",
    "check_task_names",
    "choose_device",
    "evaluate_bm25",
    "evaluate_encoder",
    "explain",
    "explain_match",
    "flat_metrics",
    "load_retriever",
    "mean_metrics",
    "packed_tokenizer",
    "plan_search",
    "results_table",
    "run_tests",
    "task_figures",
    "training_tokenizer",
    "write_results",
    "write_task_run",
]

"""Assertions that fail on a GPU. Each ends the work of its process there: a process for each."""

import subprocess
import sys

import pytest

from tests.forking import ROOT, environment

pytestmark = pytest.mark.gpu
BEGIN = """
import torch
from sparton.kernels.maxsim import maxsim_varlen
from sparton.kernels.varlen_attention import varlen_attention, varlen_self_attention

def bounds(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")

def rows(count):
    return torch.randn(count, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()

queries, documents, long = rows(12), rows(20), rows(300)
cu_queries, cu_documents = bounds(0, 3, 10, 12), bounds(0, 9, 11, 20)
cu_long = bounds(0, 30, 200, 300)

def varlen(queries, cu_queries, most, **options):
    options.setdefault("document_max_seqlen", 9)
    return maxsim_varlen(
        queries, documents, cu_queries, cu_documents, query_max_seqlen=most, **options
    )

made = {
    (q, n): torch.tensor([[0, 1], [q, n]], device="cuda")
    for q, n in ((2, 2), (3, 2), (2, -1), (1, 0))
}

def listed(query, document, most=7):
    return varlen(queries, cu_queries, most, pairing=made[query, document])

def attention(most_queries, most_keys):
    query, key = queries.view(12, 1, 64), documents.view(20, 1, 64)
    return varlen_attention(query, key, key, cu_queries, cu_documents, most_queries, most_keys)

def long_attention(most):
    # Heads enough for the kernel that Hopper has.
    states = long.view(300, 1, 64).repeat(1, 800, 1)
    return varlen_attention(states, states, states, cu_long, cu_long, most, 170)

def self_attention(most):
    states = queries.view(12, 1, 1, 64).repeat(1, 3, 1, 1)
    return varlen_self_attention(states, cu_queries, most)

compiled = torch.compile(varlen, backend="aot_eager", fullgraph=True)
"""
# What is right, what is wrong, and what the assertion says of it.
CASES = {
    "few queries": (
        "varlen(queries, cu_queries, 7)",
        "varlen(queries, cu_queries, 6)",
        "a query is longer than query_max_seqlen",
    ),
    "documents": (
        "varlen(queries, cu_queries, 7)",
        "varlen(queries, cu_queries, None, document_max_seqlen=8)",
        "a document is longer than document_max_seqlen",
    ),
    "own documents": (
        "varlen(queries, cu_queries, 7, pairing=1)",
        "varlen(queries, cu_queries, 6, pairing=1)",
        "a query is longer than query_max_seqlen",
    ),
    "product": (
        "varlen(long, cu_long, 170)",
        "varlen(long, cu_long, 169)",
        "a query is longer than query_max_seqlen",
    ),
    "product, equal queries stated": (
        "varlen(long, bounds(0, 100, 200, 300), 100)",
        "varlen(long, cu_long, 100)",
        "a query is longer than query_max_seqlen",
    ),
    "product, documents": (
        "varlen(long, cu_long, 170)",
        "varlen(long, cu_long, 170, document_max_seqlen=8)",
        "a document is longer than document_max_seqlen",
    ),
    "compiled": (
        "compiled(long, cu_long, 170)",
        "compiled(long, cu_long, 169)",
        "a query is longer than query_max_seqlen",
    ),
    "pairs, queries": (
        "listed(2, 2)",
        "listed(3, 2)",
        "pairs name a query that there is not",
    ),
    "pairs, documents": (
        "listed(2, 2)",
        "listed(2, -1)",
        "pairs name a document that there is not",
    ),
    "pairs, lengths": (
        "listed(1, 0, 7)",
        "listed(1, 0, 6)",
        "a query is longer than query_max_seqlen",
    ),
    "attention, queries": (
        "attention(7, 9)",
        "attention(6, 9)",
        "a sequence has more queries than max_query",
    ),
    "attention, keys": (
        "attention(7, 9)",
        "attention(7, 8)",
        "a sequence has more keys than max_key",
    ),
    "attention over several tiles": (
        "long_attention(170)",
        "long_attention(169)",
        "a sequence has more queries than max_query",
    ),
    "attention to oneself": (
        "self_attention(7)",
        "self_attention(6)",
        "a sequence has more queries than max_query",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_device_asserts_and_nothing_waits(case):
    right, wrong, message = CASES[case]
    end = f"""
{right}.float().sum().backward()
torch.cuda.synchronize()
print("right", flush=True)
torch.cuda.set_sync_debug_mode("error")
try:
    {wrong}
finally:
    torch.cuda.set_sync_debug_mode("default")
print("launched", flush=True)
torch.cuda.synchronize()
print("unnoticed", flush=True)
"""
    compiled = {k: v for k, v in environment().items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        (sys.executable, "-c", BEGIN + end), cwd=ROOT, env=compiled,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    # A compiled call may meet the failed assertion before it returns.
    assert run.stdout.split()[:1] == ["right"], run.stderr[-2000:]
    assert "unnoticed" not in run.stdout
    assert run.returncode != 0
    assert message in run.stderr, run.stderr[-2000:]
    assert "device-side assert" in run.stderr

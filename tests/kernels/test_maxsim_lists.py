"""Marks of what lists hold, on the GPU or in the interpreter."""

import pytest
import torch

from sparton.kernels.boundaries import cu_seqlens_of
from sparton.kernels.maxsim import lists
from sparton.kernels.maxsim.lists import mark_listed


@pytest.mark.parametrize("limits", [{}, {"PROGRAMS": 2, "BLOCK": 4}])
def test_documents_of_the_chosen_lists_are_marked(limits, device, monkeypatch):
    """Lists longer than a block, more than programs, chosen twice, and empty; a query without
    tokens; and nothing else is written to."""
    for name, value in limits.items():
        monkeypatch.setattr(lists, name, value)
    members = [[0, 3], [], list(range(1, 24, 2)), [22], [4, 5, 6, 7]]
    chosen = torch.tensor([[0, 2], [0, 1], [3, 4], [1, 3], [4, 2]])
    query_cu = torch.tensor([0, 3, 3, 4, 5], dtype=torch.int32)
    documents = torch.tensor([n for each in members for n in each], dtype=torch.int32)
    bounds = cu_seqlens_of(torch.tensor([len(each) for each in members]))
    buffer = torch.zeros(6, 25, dtype=torch.uint8, device=device)
    found = buffer[1:5]
    mark_listed(found, *(x.to(device) for x in (chosen, query_cu, documents, bounds)))
    expected = torch.zeros(6, 25, dtype=torch.uint8)
    for q, of_query in enumerate([[0, 2, 0, 1, 3, 4], [], [1, 3], [4, 2]]):
        for place in of_query:
            expected[q + 1, members[place]] = 1
    assert torch.equal(buffer.cpu(), expected) and expected[3].sum() == 1

"""The search for a micro-batch: the largest that fits, on every rank, and nothing else changes."""

import pytest
import torch

from sparton.losses.distillation import MarginMSE
from sparton.losses.objective import Objective
from sparton.losses.ranking import InfoNCE
from sparton.representations import Representations
from sparton.training import micro_batch
from sparton.training.distributed import World
from sparton.training.micro_batch import MicroBatchSearch, fewest_parts
from sparton.training.precision import Precision
from sparton.training.step import ExactStep
from sparton.types import DocumentCounts, TokenBatch, TokenRows, TrainBatch
from tests.training.bag_encoder import BagEncoder, random_batch
from tests.training.ranks import CPU, on_ranks

ALONE = World(0, 1, CPU)
SHARE, NEGATIVES, QUERY, DOCUMENT = 12, 2, 10, 20
PER_QUERY = QUERY + (1 + NEGATIVES) * DOCUMENT  # tokens of the longest query and its documents


class Device(BagEncoder):
    """Encodes no more than ``limit`` tokens at once; counts what it encodes, in a buffer."""

    def __init__(self, limit: float, kinds: tuple[str, ...] = ("sparse",)):
        super().__init__(dropout=0.3, kinds=kinds)
        self.limit, self.seen = limit, []
        self.register_buffer("texts", torch.zeros((), dtype=torch.int64))

    def encode_both(self, queries: TokenBatch, documents: TokenBatch, memory=None):
        tokens = queries.num_tokens + documents.num_tokens
        self.seen.append((queries.num_sequences, tokens, torch.is_grad_enabled()))
        if tokens > self.limit:
            raise torch.OutOfMemoryError(f"{tokens} tokens")
        self.texts += queries.num_sequences + documents.num_sequences
        return super().encode_both(queries, documents, memory)


def searching(
    limit: float = 1e9, world: World = ALONE, kinds: tuple[str, ...] = ("sparse",)
) -> MicroBatchSearch:
    encoder = Device(limit, kinds)
    step = ExactStep(encoder, Objective(InfoNCE()), world, Precision("fp32", CPU))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.1)
    return MicroBatchSearch(step, optimizer, QUERY, DOCUMENT)


def batch(share: int = SHARE):
    return random_batch(share, NEGATIVES, seed=3)


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_the_fewest_parts_are_found_in_few_tries(most):
    for enough in range(1, most + 1):
        tried = []
        assert fewest_parts(lambda parts: tried.append(parts) or parts >= enough, most) == enough  # noqa: B023
        assert len(tried) == len(set(tried)) <= 2 * most.bit_length()
        assert enough > 1 or tried == [1], "what fits at once is tried once"


def test_after_some_time_the_first_that_fits_is_taken(monkeypatch):
    monkeypatch.setattr(micro_batch, "_PATIENCE", 0.0)
    assert fewest_parts(lambda parts: parts >= 9, 64) == 16


@pytest.mark.parametrize("kinds", [("sparse",), ("sparse", "tokens")])
@pytest.mark.parametrize("fitting", [12, 11, 6, 5, 3, 1])
def test_the_largest_of_equal_parts_is_found(fitting, kinds):
    search = searching(fitting * PER_QUERY, kinds=kinds)
    found = search.search(batch())
    equal = [-(-SHARE // parts) for parts in range(1, SHARE + 1)]
    assert found == max(size for size in equal if size <= fitting)
    seen = search.step.encoder.seen
    assert all(tokens == size * PER_QUERY for size, tokens, _ in seen), "texts of full length"
    assert (found, found * PER_QUERY, True) in seen, "with the graph of the second pass"
    assert ((found, found * PER_QUERY, False) in seen) == (found < SHARE)


def test_texts_longer_than_the_lengths_stay_as_long():
    search = searching()
    search.query_length = search.document_length = 1
    search.search(batch())
    longest = [tokens.max_seqlen for tokens in batch()[:2]]
    expected = SHARE * (longest[0] + (1 + NEGATIVES) * longest[1])
    assert search.step.encoder.seen == [(SHARE, expected, True)]


def test_sequences_are_repeated_to_full_length():
    rows = TokenRows(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1, 3], dtype=torch.int32), 2)
    tokens = TokenBatch.from_lists([[5, 6], [], [7, 8, 9]])._replace(keys=rows)
    long = micro_batch._stretched(tokens, 4, 4)
    ids = long.input_ids.view(4, 4).tolist()
    assert [ids[0], ids[2], ids[3]] == [[5, 6, 5, 6], [7, 8, 9, 7], ids[0]]
    assert long.position_ids.tolist() == [0, 1, 2, 3] * 4
    assert long.cu_seqlens.tolist() == long.keys.cu_seqlens.tolist() == [0, 4, 8, 12, 16]
    assert (long.max_seqlen, long.keys.max_seqlen, long.pooled) == (4, 4, None)


def test_every_query_has_as_many_documents_as_one_may_have():
    """Whatever the batch that is at hand: others have negatives where this one has none."""
    whole = batch()
    each = torch.tensor([1 + NEGATIVES, *[1] * (SHARE - 1)])
    few = whole.documents.select(0, int(each.sum()))
    search = searching()
    search.search(whole._replace(documents=few, counts=DocumentCounts(each, 1 + NEGATIVES)))
    assert search.step.encoder.seen == [(SHARE, SHARE * PER_QUERY, True)]


def test_rows_of_texts_are_searched_as_texts_of_one_token():
    """Queries with different numbers of negatives among them."""
    tokens = TokenBatch.from_lists([[row % 7] for row in range(SHARE * PER_QUERY)])
    each = torch.tensor([1 + NEGATIVES, *[1] * (SHARE - 1)])
    counts = DocumentCounts(each, 1 + NEGATIVES)
    rows = TrainBatch(tokens.select(0, SHARE), tokens.select(0, int(each.sum())), counts=counts)
    search = searching()
    search.step.encoder.text_rows = object()
    longest = search._longest(rows)
    assert longest.counts is None and longest.documents.num_tokens == SHARE * (1 + NEGATIVES)
    for parts in (1, 2):
        search.step.rehearse(longest.select(0, SHARE // parts), parts)


@pytest.mark.parametrize("limit", [1e9, 3 * PER_QUERY])
def test_a_search_leaves_everything_as_it_was(limit):
    search = searching(limit)
    step, optimizer = search.step, search.optimizer
    step(batch(), 7)
    optimizer.step()
    optimizer.zero_grad()

    def state():
        tensors = [*step.encoder.state_dict().values(), torch.get_rng_state()]
        tensors += [v for s in optimizer.state.values() for v in s.values()]
        return [tensor.clone() for tensor in tensors]

    before = state()
    search.search(batch())
    assert all(map(torch.equal, state(), before))
    assert all(parameter.grad is None for parameter in step.encoder.parameters())
    step.rehearse(batch(), 1)
    changed = [not torch.equal(a, b) for a, b in zip(state(), before)]
    assert sum(changed) == 2, "negative control: the counter and the random state"


def test_one_part_is_rehearsed_as_the_step_itself():
    search = searching()
    encoder = search.step.encoder

    def gradients():
        found = [parameter.grad for parameter in encoder.parameters()]
        search.optimizer.zero_grad()
        return found

    search.step(batch(), 0)
    expected = gradients()
    search.step.rehearse(batch(), 1)
    assert all(map(torch.equal, gradients(), expected))


@pytest.mark.parametrize(("ranks", "parts"), [(1, 4), (3, 1), (2, 3)])
def test_the_objective_is_rehearsed_on_the_global_batch(ranks, parts):
    """With teacher scores, token vectors and losses of the encoder's own."""
    encoder = Device(1e9, ("sparse", "tokens"))
    seen = []
    objective = Objective(MarginMSE(), own_losses={"square": 0.1})

    def spy(queries: Representations, documents: Representations, *rest, **options):
        seen.append((queries.num_texts, documents.num_texts, len(rest[1])))
        return objective(queries, documents, *rest, **options)

    spy.weights_at = objective.weights_at
    step = ExactStep(encoder, spy, World(0, ranks, CPU), Precision("fp32", CPU))
    teacher = torch.randn(SHARE, 1 + NEGATIVES)
    step.rehearse(batch()._replace(teacher_scores=teacher), parts)
    texts = SHARE * ranks * parts
    assert seen == [(texts, texts * (1 + NEGATIVES), texts)]
    assert len(encoder.seen) == (1 if parts == 1 else 3)


def test_where_not_one_query_fits_the_device_says_so():
    search = searching(PER_QUERY - 1)
    with pytest.raises(torch.OutOfMemoryError, match=f"{PER_QUERY} tokens"):
        search.search(batch())


def test_other_errors_are_no_lack_of_memory():
    search = searching()
    search.step.encoder.decoder = None
    with pytest.raises(TypeError):
        search.search(batch())


def test_memory_for_the_states_of_the_optimizer_is_taken_until_they_are_there():
    search = searching()
    size = sum(4 * parameter.numel() for parameter in search.step.encoder.parameters())
    assert search._bytes_besides() == 2 * size
    search.step(batch(), 0)
    search.optimizer.step()
    assert search._bytes_besides() == 0


def test_a_cpu_takes_all_at_once_and_searches_nothing():
    search = searching(0)
    search(batch())
    assert search.step.micro_batch == search.choice["micro_batch"] == SHARE
    assert not search.step.encoder.seen


def test_what_was_found_is_kept_for_the_same_share_and_devices():
    depends_on = {"share": SHARE, "ranks": 1, "device": "cpu"}
    for other in ({}, {"share": 24}, {"ranks": 2}, {"device": "another"}):
        search = searching()
        search.choice = {"micro_batch": 5, "depends_on": depends_on | other}
        search(batch())
        assert search.step.micro_batch == (SHARE if other else 5)


def test_all_ranks_search_where_one_does_not_know(monkeypatch):
    """Another kind of GPU than that of rank 0, whose choice a checkpoint has."""
    depends_on = {"share": SHARE, "ranks": 2, "device": "cpu"}
    for others, found in ((False, 5), (True, SHARE)):
        search = searching(world=World(0, 2, CPU))
        search.choice = {"micro_batch": 5, "depends_on": depends_on}
        monkeypatch.setattr(World, "largest", lambda _, own: max(own, others))  # noqa: B023
        search(batch())
        assert search.step.micro_batch == found


def found_by(world: World) -> int:
    """Rank 0 holds twice as much as rank 1."""
    return searching((6 if world.rank == 0 else 3) * PER_QUERY, world).search(batch())


@pytest.mark.slow
def test_all_ranks_take_what_fits_on_each(tmp_path):
    assert on_ranks(2, tmp_path, found_by) == [3, 3]


@pytest.mark.parametrize("size", [12, 6, 5])
def test_the_last_micro_batch_is_encoded_once(size):
    step = searching().step
    step.micro_batch = size
    step(batch(), 0)
    sizes = [min(size, SHARE - start) for start in range(0, SHARE, size)]
    *others, last = sizes
    encoded = [(queries, graph) for queries, _, graph in step.encoder.seen]
    once, again = [(each, False) for each in others], [(each, True) for each in others]
    assert encoded == [*once, (last, True), *again]

"""The stream of examples: exact shares, every example once an epoch, the same wherever entered."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from sparton.arguments import ArgumentError
from sparton.cli.errors import explain
from sparton.datasets.mixture import Mixture, Share, build_mixture, text_mixture
from sparton.datasets.permutation import ORDER, derive_key, permute
from sparton.datasets.proportions import HOMOGENEOUS_BLOCK, WEIGHTED_BLOCK
from sparton.types import Example, TextForm
from tests.datasets.numbered import Numbers


def queries(mixture: Mixture, positions: range, seed: int = 0) -> list[str]:
    return [example.query for example in mixture.examples(positions, seed=seed)]


def test_without_weights_an_epoch_holds_every_example_once() -> None:
    mixture = Mixture({"a": Numbers("a", 7), "b": Numbers("b", 30), "c": Numbers("c", 1)})
    everything = {f"a {n}" for n in range(7)} | {f"b {n}" for n in range(30)} | {"c 0"}
    assert len(mixture) == 38
    epochs = [queries(mixture, range(38 * epoch, 38 * (epoch + 1))) for epoch in range(3)]
    for epoch in epochs:
        assert set(epoch) == everything
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert queries(mixture, range(38), seed=1) != epochs[0]


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    mixture = Mixture({name: Numbers(name, 40) for name in "ab"})
    chosen, indices, _ = mixture.locate(range(80), 0)
    # Which position has the first turn of a source, which the second: what permutes positions.
    slots = permute(np.arange(80), 80, derive_key(0, ORDER, np.zeros(80, np.int64)))
    by_turn = np.argsort(slots)
    assert (np.diff(chosen[by_turn]) >= 0).all()
    first, second = indices[by_turn].reshape(2, 40)
    assert sorted(first) == sorted(second) == list(range(40))
    assert (first != second).any()


def test_with_weights_shares_are_exact_and_small_sources_are_repeated() -> None:
    sources = {"a": Numbers("a", 10), "b": Numbers("b", 100_000), "c": Numbers("c", 50)}
    mixture = Mixture(sources, {"b": 1, "a": 2, "c": 5})
    for block in range(3):
        positions = range(block * WEIGHTED_BLOCK, (block + 1) * WEIGHTED_BLOCK)
        counts = Counter(query.split()[0] for query in queries(mixture, positions))
        assert counts == {"a": WEIGHTED_BLOCK // 4, "b": WEIGHTED_BLOCK // 8, "c": 40_960}
    positions = np.arange(2 * WEIGHTED_BLOCK)
    chosen, indices, _ = mixture.locate(positions, 0)
    times = np.bincount(indices[chosen == 0])
    assert times.sum() == 2 * WEIGHTED_BLOCK // 4 and times.max() - times.min() <= 1
    assert np.bincount(indices[chosen == 1]).max() == 1


@pytest.mark.parametrize(
    ("sizes", "weights", "homogeneous"),
    [
        ({"a": 2000, "b": 333}, {"a": 2.0, "b": 1.0}, False),
        ({"a": 2000, "b": 333}, {"a": 2.0, "b": 1.0}, True),
        (dict.fromkeys("ab", HOMOGENEOUS_BLOCK // 2), None, True),  # as many batches as examples
    ],
)
def test_with_weights_each_source_is_walked_epoch_after_epoch(
    sizes: dict[str, int], weights: dict[str, float] | None, homogeneous: bool
) -> None:
    sources = {name: Numbers(name, size) for name, size in sizes.items()}
    mixture = Mixture(sources, weights, homogeneous=homogeneous)
    chosen, indices, _ = mixture.locate(np.arange(2 * WEIGHTED_BLOCK), 7, batch=16)
    for number, size in enumerate(sizes.values()):
        walked = indices[chosen == number]
        epochs = walked[: len(walked) // size * size].reshape(-1, size)
        assert len(epochs) > 40 and (np.sort(epochs) == np.arange(size)).all()
        assert (epochs[0] != epochs[1]).any()


def test_shares_that_do_not_divide_are_rounded_to_the_nearest_position() -> None:
    sources = {name: Numbers(name, 5) for name in "abc"}
    mixture = Mixture(sources, dict.fromkeys("abc", 1.0))
    assert mixture.counts.sum() == WEIGHTED_BLOCK
    assert set(mixture.counts) == {WEIGHTED_BLOCK // 3, WEIGHTED_BLOCK // 3 + 1}


def test_shares_hold_within_short_stretches_as_chance_allows() -> None:
    mixture = Mixture({"a": Numbers("a", 900_000), "b": Numbers("b", 100_000)})
    chosen, _, _ = mixture.locate(np.arange(10_000), 5)
    assert abs((chosen == 1).sum() - 1000) < 5 * 30
    assert (np.sort(chosen) != chosen).any()


def test_any_position_can_be_entered_directly() -> None:
    mixture = Mixture({"a": Numbers("a", 100), "b": Numbers("b", 9)}, {"a": 1.0, "b": 0.5})
    stream = mixture.examples(range(70_000), seed=3)
    for start in (0, 1, 12_345, WEIGHTED_BLOCK - 2, 69_999):
        assert (
            mixture.examples(range(start, start + 5), seed=3)[: 70_000 - start]
            == (stream[start : start + 5])
        )
    far = 10**12
    assert mixture.examples([far + 1], seed=3) == mixture.examples([far, far + 1], seed=3)[1:]


def test_draws_differ_between_positions_and_seeds() -> None:
    mixture = Mixture({"a": Numbers("a", 3)})
    examples = [e for seed in (0, 1) for e in mixture.examples(range(500), seed=seed)]
    draws = [int(example.positive) for example in examples]
    assert len(set(draws)) == 1000 and min(draws) >= 0 and max(draws) < 2**63


def test_substitutes_come_from_the_source_of_the_position() -> None:
    mixture = Mixture({"a": Numbers("a", 50), "b": Numbers("b", 50)})
    for position, own in enumerate(queries(mixture, range(20))):
        found = [mixture.substitute(position, attempt, seed=0).query for attempt in range(1, 20)]
        assert {query.split()[0] for query in found} == {own.split()[0]}
        assert len(set(found)) > 10


def test_describe() -> None:
    mixture = Mixture({"a": Numbers("a", 30), "b": Numbers("b", 10)})
    assert mixture.describe() == [Share("a", 30, 0.75), Share("b", 10, 0.25)]
    weighted = Mixture(mixture.sources, {"a": 1, "b": 3})
    assert weighted.describe() == [Share("a", 30, 0.25), Share("b", 10, 0.75)]


def test_impossible_mixtures() -> None:
    sources = {"a": Numbers("a", 5), "b": Numbers("b", 5)}
    with pytest.raises(ValueError, match="at least one source"):
        Mixture({})
    with pytest.raises(ValueError, match="source 'a' of the mixture has no examples"):
        Mixture({"a": Numbers("a", 0)})
    with pytest.raises(
        ValueError, match=r"given for \['a', 'c'\] but the sources are \['a', 'b'\]"
    ):
        Mixture(sources, {"a": 1, "c": 1})
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"weight of source 'b' is .* must be positive"):
            Mixture(sources, {"a": 1, "b": weight})
    with pytest.raises(ValueError, match="source 'b' is below 1 in 65536"):
        Mixture(sources, {"a": 1, "b": 1e-6})


def test_text_mixture(write_jsonl: Callable[..., str], tmp_path: object) -> None:
    write_jsonl([["q", "p"]] * 3, "in/one.jsonl")
    write_jsonl([["q", "p"]] * 5, "in/two.jsonl")
    files = {"first": "one.jsonl", "second": ["two.jsonl"]}
    mixture = text_mixture(files, root=f"{tmp_path}/in", limit=4)
    assert mixture.describe() == [Share("first", 3, 3 / 7), Share("second", 4, 4 / 7)]
    with pytest.raises(FileNotFoundError, match=r"three\.jsonl"):
        text_mixture({**files, "third": "three.jsonl"}, root=f"{tmp_path}/in")


def test_a_source_of_a_text_mixture_may_have_settings_of_its_own(
    write_jsonl: Callable[..., str], tmp_path: object
) -> None:
    write_jsonl([["q", "p", "n"]] * 3, "in/one.jsonl")
    write_jsonl([["q", "p", "n"]] * 5, "in/two.jsonl")
    files = {"first": "one.jsonl", "second": {"files": "two.jsonl", "limit": 2}}
    files["second"] |= {"negatives": "none"}
    mixture = text_mixture(files, root=f"{tmp_path}/in", limit=4, weights={"first": 1, "second": 1})
    assert [share.examples for share in mixture.describe()] == [3, 2]
    given = [source.example(0, 0, 1).negatives for source in mixture.sources.values()]
    assert given == [("n",), ()]
    for entry, message in (
        ({"files": "two.jsonl", "limits": 2}, "source 'second': there is no setting limits, but f"),
        ({"limit": 2}, "source 'second': its settings name no files"),
        ({"files": "two.jsonl", "limit": 0}, r"^files\.second\.limit=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            text_mixture({"second": entry}, root=f"{tmp_path}/in")
    with pytest.raises(ArgumentError) as refused:
        text_mixture({"second": {"files": "two.jsonl"}}, root=f"{tmp_path}/in", limit=0)
    assert explain(refused.value) == "data.limit=0 must be at least 1"


def numbers_of(mixture: Mixture, batch: int, steps: int, seed: int = 0) -> np.ndarray:
    """The source of every position, ``[steps, batch]``."""
    return mixture.numbers(np.arange(batch * steps), seed, batch).reshape(steps, batch)


def test_batches_of_a_homogeneous_mixture_have_one_source_each() -> None:
    sources = {"a": Numbers("a", 1000), "b": Numbers("b", 90), "c": Numbers("c", 30)}
    batch, steps = 8, 3000
    mixed = numbers_of(Mixture(sources, alpha=0.5), batch, steps)
    assert (mixed != mixed[:, :1]).any(), "which batches of another mixture have not"
    mixture = Mixture(sources, homogeneous=True)
    own = numbers_of(mixture, batch, steps)
    assert (own == own[:, :1]).all()
    shares = np.sqrt([1000, 90, 30]) / np.sqrt([1000, 90, 30]).sum()
    times = np.bincount(own[:, 0])
    assert (abs(times - steps * shares) < 5 * (steps * shares * (1 - shares)) ** 0.5).all()
    assert [share.weight for share in mixture.describe()] == pytest.approx(shares, abs=1e-3)
    assert (numbers_of(mixture, batch, 50, seed=1) != own[:50]).any()


def test_homogeneous_batches_walk_each_source_in_epochs() -> None:
    sources = {"a": Numbers("a", 40), "b": Numbers("b", 100), "c": Numbers("c", 20_000)}
    mixture = Mixture(sources, {"a": 1, "b": 2, "c": 5}, homogeneous=True)
    batch, blocks = 8, 3
    positions = np.arange(batch * blocks * HOMOGENEOUS_BLOCK)
    chosen, indices, _ = mixture.locate(positions, 0, batch)
    for number, share in enumerate((1 / 8, 2 / 8, 5 / 8)):
        times = np.bincount(indices[chosen == number])
        assert times.sum() == len(positions) * share
        assert times.max() - times[times > 0].min() <= 1
    assert times.max() == 1, "none again before all of an epoch came"


def test_any_batch_of_a_homogeneous_mixture_can_be_entered_directly() -> None:
    mixture = Mixture({"a": Numbers("a", 40), "b": Numbers("b", 9)}, homogeneous=True)
    stream = mixture.examples(range(400), seed=3, batch=8)
    assert mixture.examples(range(203, 230), seed=3, batch=8) == stream[203:230]
    owner = mixture.substitute(205, 1, seed=3, batch=8).query.split()[0]
    assert owner == stream[205].query.split()[0]


def test_alpha_goes_from_equal_shares_to_sizes() -> None:
    sources = {"a": Numbers("a", 900), "b": Numbers("b", 100)}
    for alpha, share in ((0.0, 0.5), (0.5, 0.75), (1.0, 0.9)):
        assert Mixture(sources, alpha=alpha).describe()[0].weight == pytest.approx(share, abs=2e-5)
        homogeneous = Mixture(sources, alpha=alpha, homogeneous=True)
        assert homogeneous.describe()[0].weight == pytest.approx(share, abs=1e-3)
    with pytest.raises(ValueError, match=r"alpha=1\.5 must be from 0, equal shares, to 1, sizes"):
        Mixture(sources, alpha=1.5)
    with pytest.raises(ValueError, match=r"weights are given, and sizes .* others: set alpha=None"):
        Mixture(sources, {"a": 1, "b": 1}, alpha=0.5)


def test_wrong_settings_are_refused_before_files_are_read(tmp_path: object) -> None:
    for settings, message in (
        ({"weights": {"b": 1}}, "weights are given for"),
        ({"alpha": 2}, "alpha=2 must be"),
        ({"forms": {"b": {}}}, "forms are given for 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            text_mixture({"a": "missing.jsonl"}, root=str(tmp_path), **settings)
        with pytest.raises(ValueError, match=message):
            build_mixture({"a": lambda on_error: pytest.fail("was prepared")}, **settings)


def test_forms_of_sources() -> None:
    sources = {"a": Numbers("a", 5), "b": Numbers("b", 5)}
    forms = {"a": {"query_prompt": "x: "}, "b": TextForm(document_length=9)}
    mixture = Mixture(sources, forms=forms)
    assert mixture.forms == {"a": TextForm(query_prompt="x: "), "b": TextForm(document_length=9)}
    with pytest.raises(ValueError, match="forms are given for 'c' but the sources are a, b"):
        Mixture(sources, forms={"c": {}})
    with pytest.raises(ValueError, match="source 'a': there is no prompt, but query_length, docu"):
        Mixture(sources, forms={"a": {"prompt": "x: "}})


def test_sources_that_are_ready_belong_to_a_mixture() -> None:
    numbers = Numbers("a", 7)
    with pytest.raises(
        ValueError, match=r"sources\.a is Numbers, .*mixture\.Mixture mixes sources"
    ):
        build_mixture({"a": numbers})
    assert len(build_mixture({"a": lambda on_error: numbers})) == len(Mixture({"a": numbers})) == 7


class Own(Numbers):
    """Of a user, that gives whatever it was made with."""

    def __init__(self, given: object) -> None:
        super().__init__("own", 3)
        self.given = given

    def example(self, index: int, draw: int, num_negatives: int) -> Example:
        return self.given  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (("q", "p"), "'mine' gives tuple and not sparton.types.Example: let"),
        (None, "'mine' gives NoneType and not sparton.types.Example: let"),
        (Example("q", 7), "'mine' gives 7 in the place of a text"),  # type: ignore[arg-type]
        (Example("q", "p", (b"n",)), "'mine' gives b'n' in the"),  # type: ignore[arg-type]
    ],
)
def test_a_source_of_a_user_that_gives_no_example_of_texts_is_refused(
    given: object, found: str
) -> None:
    Mixture({"mine": Own(Example("q", "p"))})
    with pytest.raises(ValueError, match=found):
        Mixture({"mine": Own(given)})

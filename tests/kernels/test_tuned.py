"""Winners of searches in the user's cache: what they belong to, and files that cannot be read."""

import json
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sparton.kernels import tuned
from sparton.kernels.segment_max.portable import PortableConfig
from sparton.kernels.tuned import (
    cache_file,
    read_winners,
    regime_of,
    write_winner,
)

pytestmark = pytest.mark.usefixtures("own_cache")
GOOD = PortableConfig(False, 16, 32, 16, num_warps=4, num_stages=2, segment=16, group_tokens=64)


def regime_at(device):
    return regime_of("splade_head", device, torch.float32, 24, 37, 9)


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    """A copy of the kernels' sources, in place of those that are digested."""
    copy = tmp_path / "copied"
    shutil.copytree(Path(tuned.__file__).parent, copy)
    monkeypatch.setattr(tuned, "__file__", str(copy / "tuned.py"))
    tuned._source_digest.cache_clear()
    yield copy
    tuned._source_digest.cache_clear()


@pytest.mark.parametrize("source", ["segment_max/hopper.py", "maxsim/streaming.py"])
def test_a_changed_kernel_forgets_its_winners(source, device, copied_sources):
    write_winner(regime_at(device), GOOD, 3.0)
    regime = regime_at(device)
    tuned._source_digest.cache_clear()
    assert regime_at(device) == regime
    assert regime in read_winners()
    with (copied_sources / source).open("a") as file:
        file.write("# another\n")
    tuned._source_digest.cache_clear()
    assert regime_at(device) not in read_winners()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"winners": 3}',
        '{"winners": [3]}',
        '{"winners": [{"kind": "PortableConfig", "regime": {"gpu": "x"}, "settings": {}}]}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_named_ignored_and_replaced(content, device, caplog):
    path = cache_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        assert read_winners() == {}
    assert str(path) in caplog.text
    assert "search again" in caplog.text
    write_winner(regime_at(device), GOOD, 3.0)
    caplog.clear()
    kept = json.loads(path.read_text())["winners"]
    assert kept[-1]["milliseconds"] == 3.0
    assert kept[-1]["settings"] == GOOD._asdict()


def test_a_damaged_record_takes_no_other_with_it(device, caplog):
    write_winner(regime_at(device), GOOD, 3.0)
    path = cache_file()
    records = json.loads(path.read_text())["winners"]
    path.write_text(json.dumps({"winners": [{"kind": "x"}, *records, 3]}))
    with caplog.at_level(logging.WARNING):
        assert list(read_winners()) == [regime_at(device)]
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        ({"block_v": 16}, "missing 5 required positional arguments"),
        (GOOD._asdict() | {"block_v": "x"}, "block_v is 'x'"),
        (GOOD._asdict() | {"block_t": None}, "block_t is None"),
    ],
)
def test_settings_of_another_class_are_named_and_count_as_none(settings, reason, device, caplog):
    write_winner(regime_at(device), GOOD, 3.0)
    assert tuned.tuned((PortableConfig,), regime_at(device)) == GOOD
    path = cache_file()
    (record,) = json.loads(path.read_text())["winners"]
    path.write_text(json.dumps({"winners": [record | {"settings": settings}]}))
    tuned.use_tuned_configs()
    for _ in range(2):
        assert tuned.tuned((PortableConfig,), regime_at(device)) is None
    (message,) = caplog.messages
    assert str(path) in message and reason in message and "no PortableConfig" in message


def test_searches_at_the_same_time_lose_nothing(device):
    regimes = [regime_at(device)._replace(width=width) for width in range(1, 33)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda regime: write_winner(regime, GOOD, 3.0), regimes))
    assert read_winners().keys() == set(regimes)


def test_a_file_system_without_locks_keeps_winners_too(device, monkeypatch):
    def unlocked(*_args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", unlocked)
    write_winner(regime_at(device), GOOD, 3.0)
    assert regime_at(device) in read_winners()


def test_no_file_is_no_reason_to_warn(caplog):
    assert read_winners() == {}
    assert not caplog.records


def test_a_write_that_fails_leaves_the_file_and_no_other(device, monkeypatch):
    write_winner(regime_at(device), GOOD, 3.0)
    before = cache_file().read_text()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        write_winner(regime_at(device), GOOD._replace(block_v=32), 2.0)
    assert [path.read_text() for path in cache_file().parent.iterdir()] == [before]


def test_a_regime_is_a_range_of_vocabularies_and_lengths(device):
    def buckets(vocabulary, mean_length):
        return regime_of("splade_head", device, torch.float32, 24, vocabulary, mean_length)[6:]

    assert buckets(30522, 159.3) == buckets(32768, 100) == (32768, 128)
    assert buckets(32769, 0.5) == (65536, 1)
    assert buckets(1, 40.0) == (1, 32)

import dataclasses

import pytest
import torch

from sparton.kernels import tuned


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN, or integers that index nothing."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.dtype == torch.bool:
                return tensor.fill_(True)
            floating = tensor.is_floating_point()
            return tensor.fill_(float("nan") if floating else torch.iinfo(tensor.dtype).min // 2)

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Winners of searches are those of the test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SPARTON_TUNED", raising=False)
    tuned.tuned_configs.cache_clear()
    yield
    tuned.tuned_configs.cache_clear()


@pytest.fixture
def device_assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter heeds assertions, as compiled kernels with ``debug`` do; it does not by
    itself. Where there is a GPU, a failed assertion would end all tests: a process of its own."""
    if torch.cuda.is_available():
        pytest.skip("for the interpreter")
    from triton.runtime.interpreter import interpreter_builder

    heeding = dataclasses.replace(interpreter_builder.options, debug=True, sanitize_overflow=False)
    monkeypatch.setattr(interpreter_builder, "options", heeding)

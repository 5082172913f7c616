"""What runs on a GPU takes what runs on a CPU takes, in every operator."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

from sparton import kernels
from sparton.kernels.dispatch import late
from sparton.kernels.operator import Operator


def operators() -> list[Operator]:
    """Those of the modules that import no Triton, where operators are."""
    found: dict[str, Operator] = {}
    for module in walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.endswith(("function", "operators", "stacked")):
            values = vars(import_module(module.name)).values()
            found |= {each.name: each for each in values if isinstance(each, Operator)}
    return [*found.values()]


def test_there_are_operators():
    names = {each.name.removeprefix("sparton::") for each in operators()}
    assert {"splade_head", "splade_head_token_topk", "maxsim", "maxsim_from_hidden"} < names
    assert len(names) >= 12


@pytest.mark.parametrize("operator", operators(), ids=lambda each: each.name)
def test_both_devices_take_the_same(operator):
    parts = [operator._function]
    if operator.registered_backward is not None:
        parts.append(operator._backward)
    for part in parts:
        if part._cuda is not None:
            expected = inspect.signature(part.run).parameters
            found = inspect.signature(part._cuda()).parameters
            assert list(found)[: len(expected)] == list(expected)
            beyond = list(found.values())[len(expected) :]
            assert all(each.default is not each.empty for each in beyond)


def test_what_is_imported_late_is_there():
    files = (file for folder in kernels.__path__ for file in Path(folder).rglob("*.py"))
    paths = re.findall(r'late\("([\w.]+)"\)', "".join(file.read_text("utf-8") for file in files))
    assert len(paths) >= 15
    for path in paths:
        assert late(path)().__name__ == path.rpartition(".")[2]
    with pytest.raises(AttributeError, match="maxsim_forward_gpu"):
        late("sparton.kernels.maxsim.paths.maxsim_forward_gpu")()

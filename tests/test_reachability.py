"""Every kernel has a customer: the public API, a configuration, or a command."""

import re
from pathlib import Path

import pytest

from tests.reachability import Package

ROOT = Path(__file__).parent.parent
# What kernels are tested against is for tests alone.
ORACLES = re.compile(r"sparton\.kernels\.(\w+\.reference\b|.*\.quantize_operands_cpu$)")
COMMENT, DOTTED = re.compile(r"#.*"), re.compile(r"\bsparton(?:\.\w+)+")

ROOMS = ("sparton.cli", "sparton.integrations")


def roots(package: Package) -> set[str]:
    """Where users come in: ``sparton`` and ``sparton.ops``, drop-ins for other libraries, commands,
    and what configurations name."""
    found = set()
    for name, module in package.modules.items():
        if name in ("sparton", "sparton.ops") or name.startswith(ROOMS):
            found.update(f"{name}.{own}" for own in (*module.definitions, *module.imports))
    for file in (ROOT / "configs").rglob("*.yaml"):
        found.update(DOTTED.findall(COMMENT.sub("", file.read_text(encoding="utf-8"))))
    return found


def unreached(package: Package, found: set[str]) -> list[str]:
    """Of kernels: modules that define anything, and all that they define."""
    definitions = [path for path in package.definitions() if path.startswith("sparton.kernels.")]
    modules = dict.fromkeys(path.rpartition(".")[0] for path in definitions)
    return [path for path in (*modules, *definitions) if not (path in found or ORACLES.match(path))]


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(ROOT / "sparton")


def test_every_module_and_public_definition_of_the_kernels_is_reached(package):
    assert unreached(package, package.reached(roots(package))) == []


def test_what_only_the_public_api_reaches_is_missed_without_it(package):
    api = ("sparton.ops.", "sparton.integrations.")
    others = {path for path in roots(package) if not path.startswith(api)}
    missed = unreached(package, package.reached(others))
    for name in ("fp8", "hidden", "projection"):
        assert f"sparton.kernels.maxsim.{name}" in missed
    assert "sparton.kernels.maxsim.cross" not in missed


FILES = {
    "__init__.py": "from shop.front import sell\n",
    "front.py": """
        from shop import back, whole
        def sell():
            from shop.late import pack
            return back.fetch(pack), lend().some
        def lend(): return whole
        def closed(): return back.forgotten()
    """,
    "back.py": """
        from shop.registry import register
        def fetch(x): return _find(x)
        def _find(x): return LIMIT
        def forgotten(): return Lost()
        LIMIT = 3
        class Lost: ...
        @register
        def _(x): return noted()
        def noted(): ...
    """,
    "whole.py": "def some(): ...\ndef rest(): ...\n",
    "late.py": "def pack(): return 'shop.named.thing'\n",
    "named.py": "class thing: ...\ndef other(): ...\n",
    "registry.py": "def register(f): return f\n",
    "orphan.py": "from shop.front import sell\ndef alone(): return sell()\n",
}


def test_the_walk_follows_names_late_imports_modules_registrations_and_strings(tmp_path):
    shop = tmp_path / "shop"
    shop.mkdir()
    for name, text in FILES.items():
        lines = text.splitlines()
        indent = 8 if text.startswith("\n") else 0
        (shop / name).write_text("\n".join(line[indent:] for line in lines))
    package = Package(shop)
    found = package.reached(["shop.sell"])
    missed = set(package.public("shop")) - found
    assert missed == {
        "shop.back.Lost",
        "shop.back.forgotten",
        "shop.front.closed",
        "shop.named.other",
        "shop.orphan.alone",
        "shop.whole.rest",
    }
    assert "shop.orphan" not in found

"""That kernels compile for GPUs that there need not be here, and fit into their memories.

Slow: a minute or two for each capability. What is compiled once is kept in Triton's cache.
"""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# KiB of shared memory that a block may have, by compute capability: A100; A10 and RTX 30; L4, L40S
# and RTX 40; H100 and H200; B200; RTX 50.
SHARED_MEMORY = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
TENSOR_MEMORY = 512  # columns, where there is any
FP8 = (
    "sparton.kernels.segment_max.quantize.", "sparton.kernels.splade_head.fp8.",
    "sparton.kernels.encoder_layer.fp8_tiles.", "sparton.kernels.encoder_layer.fp8_limits.",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def launched(folder: Path) -> set[str]:
    """The kernels that modules of a package launch, as ``module.name``: functions under ``jit``
    that code of the host mentions where they are defined or imported to, and not other kernels
    alone."""
    compiled, mentioned = set(), set()
    for file in folder.rglob("*.py"):
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and is_jit(node)]
        places = {node.name: f"{module}.{node.name}" for node in own}
        compiled.update(places.values())
        on_device = {id(node) for function in own for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                places |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and id(node) not in on_device and node.id in places:
                mentioned.add(places[node.id])
    return compiled & mentioned


def is_jit(function: ast.FunctionDef) -> bool:
    names = (ast.unparse(each).partition("(")[0] for each in function.decorator_list)
    return any(name in ("triton.jit", "gluon.jit") for name in names)


def runs_on(kernel: str, capability: str) -> bool:
    major, minor = map(int, capability.split("."))
    if re.search(r"\.hopper(_\w+)?\.", kernel):
        return major == 9
    return (major, minor) >= (8, 9) or not kernel.startswith(FP8)


MODULES = {
    "first.py": """
        @triton.jit
        def device(x): return helper(x)
        @triton.jit(debug=True)
        def kernel(x): return device(x)
        @triton.jit
        def lent(x): ...
        def run(x): Launch(kernel)(x)
        def jit(x): ...
    """,
    "second.py": """
        from rooms.first import device
        @gluon.jit
        def kernel(x): return device(x)
        @gluon.jit
        def forgotten(x): ...
        def run(x):
            from rooms.first import lent
            kernel[(1,)](lent)
    """,
}


def test_kernels_are_found_in_the_source(tmp_path):
    (tmp_path / "rooms").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "rooms" / name).write_text(textwrap.dedent(text))
    names = {"first.kernel", "first.lent", "second.kernel"}
    assert launched(tmp_path / "rooms") == {f"rooms.{name}" for name in names}


def test_every_kernel_is_launched():
    found = launched(ROOT / "sparton")
    names = [
        name
        for file in (ROOT / "sparton/kernels").rglob("*.py")
        for name in re.findall(r"^def (\w*kernel)\(", file.read_text("utf-8"), re.MULTILINE)
    ]
    assert sorted(name.rpartition(".")[2] for name in found) == sorted(names)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_and_fit(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    room = SHARED_MEMORY[capability]
    words = (sys.executable, "-m", "tests.kernels.builds", capability, str(room))
    run = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    built = dict(json.loads(line) for line in run.stdout.splitlines())
    largest = {case: max(shared for _, shared, _ in kernels) for case, kernels in built.items()}
    assert largest.pop("too large") > room * 1024, "negative control"
    assert {case: size for case, size in largest.items() if size > room * 1024} == {}
    assert max(columns for kernels in built.values() for *_, columns in kernels) <= TENSOR_MEMORY
    names = {name for kernels in built.values() for name, *_ in kernels}
    kernels = launched(ROOT / "sparton")
    assert names == {kernel for kernel in kernels if runs_on(kernel, capability)}

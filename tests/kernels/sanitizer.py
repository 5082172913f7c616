"""Every family of kernels in small shapes under NVIDIA's compute-sanitizer.

    python -m tests.kernels.sanitizer --output results/nvidia-h200/sanitizer.jsonl    # minutes
    python -m tests.kernels.sanitizer --run attention                 # one family, without the tool

A line of JSON for each family and tool. Two kernels with planted faults, which the tools must find,
show that they look. The exit code is 1 where a tool finds another fault, or not the planted ones.

Two things the tools do not understand:

- racecheck: warps that wait for work, in a kernel with specialised warps, read what to do, and with
  which values, behind a barrier that the others reach elsewhere. Triton adds these reads, and gives
  them the line of the name of the kernel, or of the function that specialises its warps. Such races
  are counted apart, as ``handshakes``.
- initcheck: bulk copies to global memory, with which libraries store products. Under it, products
  are written into zeros (:func:`products_into_zeros`).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparton import ops
from sparton.kernels import (
    encoder_layer,
    hybrid_head,
    segment_max,
    sparse_products,
    sparse_search,
    varlen_attention,
)
from sparton.kernels.sparse_vectors import SparseVectors
from sparton.training.manifest import describe_environment

TOOLS = {
    "memcheck": ("--padding=1024",),  # a neighbour's memory is no place to miss
    "racecheck": (),
    "initcheck": (),
}
PLANTED = {"planted write": ("memcheck",), "planted read": ("initcheck",)}
AT_ONCE, PATIENCE, FAULTY = 8, 200, 97  # processes, seconds, exit code
SAID = 40  # last lines of what a process said that are recorded if it is not as it should be
SPECIALISED = (
    Path(segment_max.__file__).with_name("hopper.py"),
    Path(encoder_layer.__file__).with_name("hopper_products.py"),
    Path(varlen_attention.__file__).with_name("hopper_attention.py"),
    Path(varlen_attention.__file__).with_name("hopper_backward.py"),
    Path(varlen_attention.__file__).with_name("hopper_rings.py"),
)
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x\w+ in (\S+):(\d+)")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
D, V, E = 128, 300, 64
LENGTHS = (9, 0, 31, 33)  # of texts, one of them empty


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def bounds(*lengths: int) -> Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(DEVICE, torch.int32)


def mask(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.8).to(DEVICE)


def learn(result: Tensor) -> None:
    result.float().sum().backward()


def head(dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    operands = rows(sum(LENGTHS), D, dtype=dtype), rows(V, D, dtype=dtype)
    learn(ops.splade_head(*operands, rows(V, dtype=torch.float32), bounds(*LENGTHS), **options))


def portable_head() -> None:
    from sparton.kernels.segment_max.forward import PORTABLE, segment_max_forward

    operands = rows(sum(LENGTHS), D), rows(V, D)
    for argmax in (True, False):
        segment_max_forward(*operands, None, bounds(*LENGTHS), config=PORTABLE[0], argmax=argmax)


def top_entries() -> None:
    operands = rows(sum(LENGTHS), D), rows(V, D), rows(V, dtype=torch.float32), bounds(*LENGTHS)
    ops.splade_head_topk(*operands, k=7)


def padded_head() -> None:
    hidden, weight, bias = rows(3, 20, D), rows(V, D), rows(V, dtype=torch.float32)
    learn(hybrid_head.hybrid_head(hidden, weight, bias, mask(3, 20)))


def padded_maxsim(most: int, backward: str) -> None:
    queries, documents = rows(3, most, E), rows(4, 40, E)
    masks = mask(3, most), mask(4, 40)
    learn(ops.maxsim(queries, documents, *masks, normalize=True, backward=backward))
    own = rows(3, 2, 40, E)
    learn(ops.maxsim(queries, own, masks[0], mask(3, 2, 40), backward=backward))


def packed_maxsim() -> None:
    queries, documents, cu_queries = rows(12, E), rows(sum(LENGTHS), E), bounds(3, 7, 2, 0)
    pairs = torch.tensor([[0, 3], [1, 0], [1, 1]], device=DEVICE)
    for pairing in ("cross", 1, pairs):
        bounded = cu_queries, bounds(*LENGTHS)
        learn(ops.maxsim_varlen(queries, documents, *bounded, pairing=pairing))
    learn(ops.maxsim_pairs(rows(3, 5, E), rows(4, 9, E), pairs=pairs))


def best_documents() -> None:
    sides = rows(12, E).detach(), rows(sum(LENGTHS), E).detach()
    ops.maxsim_topk(*sides, bounds(3, 7, 2), bounds(*LENGTHS), 2, tokens_at_once=40)


def fp8_maxsim() -> None:
    queries, documents = rows(3, 20, D).detach(), rows(4, 40, D).detach()
    ops.maxsim_fp8(queries, documents, mask(3, 20), mask(4, 40))
    ops.maxsim_fp8(queries, ops.quantize_fp8(documents))


def maxsim_of_hidden() -> None:
    queries, hidden, projection = rows(3, 20, E), rows(4, 40, D), rows(E, D)
    learn(ops.maxsim_from_hidden(queries, hidden, projection, mask(3, 20), mask(4, 40)))


def compressed_maxsim() -> None:
    from sparton.kernels.maxsim.codec import ResidualCodec

    steps = torch.linspace(-0.1, 0.1, 4, device=DEVICE)
    centroids = torch.nn.functional.normalize(rows(17, D, dtype=torch.float32).detach(), dim=1)
    codec = ResidualCodec(centroids, steps[:-1], steps)
    documents = ops.compress(codec, rows(sum(LENGTHS), D, dtype=torch.float32).detach())
    queries, sides = rows(12, D), (bounds(3, 7, 2), bounds(*LENGTHS))
    for tokens in (documents, ops.with_inverse_norms(codec, documents)):
        learn(ops.maxsim_residual_varlen(queries, tokens, codec, *sides))
        pairs = torch.tensor([[0, 3], [1, 0], [1, 1]], device=DEVICE)
        ops.maxsim_residual_varlen(queries.detach(), tokens, codec, *sides, pairing=pairs)
    ops.maxsim_centroids(queries.detach(), documents.codes, centroids, *sides)


def attention() -> None:
    states, longest = rows(sum(LENGTHS), 3, 2, 64), max(LENGTHS)
    for window in (None, 2):
        learn(ops.varlen_self_attention(states, bounds(*LENGTHS), longest, window=window))
    query, key, value = (rows(sum(LENGTHS), 2, 64) for _ in range(3))
    sides = (bounds(*LENGTHS),) * 2
    learn(ops.varlen_attention(query, key, value, *sides, longest, longest))
    # Long enough for the kernels that Hopper has, and with as many heads as they ask for.
    states, longest = rows(300, 3, 600 if DEVICE.type == "cuda" else 2, 64), 170
    learn(ops.varlen_self_attention(states, bounds(170, 0, 1, 129), longest))


def layer() -> None:
    x, residual, bias, gain, shift = rows(21, D), rows(21, D), *(rows(D) for _ in range(3))
    learn(encoder_layer.post_norm(x, bias, residual, gain, shift, eps=1e-6, p=0.1))
    learn(encoder_layer.bias_gelu(x, bias))
    tokens = torch.arange(21, device=DEVICE) % 7, torch.arange(21, device=DEVICE)
    given = (x[:7], tokens[0], bias, residual, tokens[1], gain, shift)
    encoder_layer.embedding_norm(*given, eps=1e-6, dtype=torch.float16)
    for centred in (True, False):
        learn(torch.cat(encoder_layer.pre_norm(x, residual, gain, eps=1e-6, centred=centred)))
    learn(encoder_layer.pre_norm(x, None, gain, eps=1e-6)[1])
    learn(encoder_layer.gated_gelu(x))
    learn(encoder_layer.gated_silu(x, residual))
    angles = torch.linspace(0, 1, 21 * 24, device=DEVICE).view(21, 24)
    angles = angles.cos(), angles.sin()
    learn(encoder_layer.rotary(rows(21, 6, 24), *angles, copied=2))
    learn(encoder_layer.normed_rotary(rows(21, 19, 24), rows(24), *angles, eps=1e-6))


def linear_layers() -> None:
    """On Hopper alone, whose kernel ends these products."""
    from sparton.kernels.encoder_layer.hopper_products import hopper_linear

    if DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE) == (9, 0):
        given = rows(300, D).detach(), rows(V + 4, D).detach(), rows(V + 4).detach()
        for options in ({}, {"gelu": True}, {"gelu": True, "save": True}):
            hopper_linear(*given, **options)


def layer_in_fp8() -> None:
    x, residual = rows(21, D), rows(21, D)
    weights, (bias, gain, shift) = [rows(D, D)], (rows(D) for _ in range(3))
    given = encoder_layer.Layer(weights, bias, encoder_layer.Fp8Weights()(weights))
    options = encoder_layer.NormOptions(1e-6, 0.1, torch.float32, torch.bfloat16, True)
    x = encoder_layer.fp8_linear(encoder_layer.fp8_operand(x), given)
    operand = encoder_layer.fp8_linear_gelu(encoder_layer.fp8_operand(x), given)
    learn(encoder_layer.fp8_linear_post_norm(operand, given, residual, gain, shift, options)[0])


def products() -> None:
    dense = [rows(count, V, dtype=torch.float32).detach().relu() for count in (5, 7)]
    sides = [SparseVectors.from_dense(side) for side in dense]
    for side in sides:
        side.values.requires_grad_()
    learn(sparse_products.dot_products(*sides))
    learn(sparse_products.dense_dot_products(*(side.dense() for side in sides)))
    learn(sparse_products.row_sums(sides[0]))
    learn(sparse_products.column_sums(sides[1], torch.ones(7, device=DEVICE)))


def postings() -> None:
    dense = [rows(count, V, dtype=torch.float32).detach().relu() for count in (200, 3)]
    documents, queries = (SparseVectors.from_dense(side).to("cpu") for side in dense)
    inverted = sparse_search.invert([documents], on_gpu=DEVICE.type == "cuda").to(DEVICE)
    sparse_search.search_postings(inverted, queries, 9, torch.tensor([-1, 4, -1]))


@triton.jit
def _copy_kernel(source, target, read, write):
    lane = tl.arange(0, 32)
    tl.store(target + write + lane, tl.load(source + read + lane))


def planted(read: int, write: int) -> None:
    """Reads what nobody has written, or writes behind the end."""
    source, target = torch.empty(64, device=DEVICE), torch.zeros(32, device=DEVICE)
    source[:32] = 1
    _copy_kernel[(1,)](source, target, read, write)


FAMILIES: dict[str, Callable[[], None]] = {
    "splade head": head,
    "splade head, fp32": lambda: head(torch.float32),
    "splade head, fp8": lambda: head(fp8=True),
    "splade head, sums": lambda: head(pooling="sum"),
    "splade head, top entries": top_entries,
    "splade head, largest of tokens": lambda: head(token_topk=3),
    "segment maximum, portable": portable_head,
    "hybrid head": padded_head,
    "maxsim": lambda: padded_maxsim(20, "lowmem"),
    "maxsim, unified": lambda: padded_maxsim(20, "unified"),
    "maxsim, product": lambda: padded_maxsim(170, "auto"),
    "maxsim, packed": packed_maxsim,
    "maxsim, best documents": best_documents,
    "maxsim, fp8": fp8_maxsim,
    "maxsim, from hidden": maxsim_of_hidden,
    "maxsim, compressed": compressed_maxsim,
    "attention": attention,
    "encoder layer": layer,
    "encoder layer, fp8": layer_in_fp8,
    "linear layers": linear_layers,
    "sparse products": products,
    "sparse search": postings,
    "planted write": lambda: planted(0, 40),
    "planted read": lambda: planted(32, 0),
}


@contextmanager
def products_into_zeros() -> Iterator[None]:
    """Has PyTorch write its matrix products into zeros, wherever they are called from."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for product in ("mm", "addmm"):
            into, key = getattr(torch.ops.aten, product), DEVICE.type.upper()
            library.impl(product, partial(_into_zeros, into.out), key)
            library.impl(f"{product}.dtype", partial(_into_zeros, into.dtype_out), key)
        yield


def _into_zeros(into: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    left, right = [x for x in args if isinstance(x, Tensor)][-2:]
    dtype = next((x for x in args if isinstance(x, torch.dtype)), left.dtype)
    return into(*args, **kwargs, out=left.new_zeros(left.shape[0], right.shape[1], dtype=dtype))


def run_family(family: str, tool: str | None) -> None:
    torch.manual_seed(0)
    with products_into_zeros() if tool == "initcheck" else nullcontext():
        FAMILIES[family]()


def handshakes(said: str) -> int:
    """How many of the races that were reported are between Triton's own reads of what to do, and
    writes."""
    files = {file.name: file.read_text(encoding="utf-8").splitlines() for file in SPECIALISED}

    def is_own(kernel: str, name: str, line: str) -> bool:
        own = (f"def {kernel}(", "def specialise(")
        return name in files and files[name][int(line) - 1].startswith(own)

    races = [ACCESS.findall(race) for race in said.split("Race reported")[1:]]
    reads = [[place for access, *place in race if access == "Read"] for race in races]
    return sum(bool(race) and all(is_own(*place) for place in race) for race in reads)


def examine(family: str, tool: str) -> dict[str, Any]:
    """Run a family in a process of its own under a tool; what came of it."""
    command = ["compute-sanitizer", f"--tool={tool}", f"--error-exitcode={FAULTY}", *TOOLS[tool]]
    command += [sys.executable, "-m", __spec__.name, "--run", family, "--under", tool]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PATIENCE, check=False
        )
        code, said = ended.returncode, ended.stdout + ended.stderr
    except subprocess.TimeoutExpired:
        code, said = None, "took too long"
    found = re.search(r"SUMMARY: (\d+) ", said)
    return {
        "tool": tool,
        "family": family,
        "errors": int(found[1]) if found else None,
        "handshakes": handshakes(said),
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": code,
        "said": said.strip().splitlines()[-SAID:],
    }


def is_right(record: dict[str, Any]) -> bool:
    """Whether a family has no fault, or a planted one was found."""
    if record["family"] in PLANTED:
        return bool(record["errors"])
    expected = FAULTY if record["handshakes"] else 0
    return record["exit_code"] == expected and record["errors"] == record["handshakes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=FAMILIES)
    parser.add_argument("--output", type=Path, default=Path("sanitizer.jsonl"))
    parser.add_argument("--only", default="", help="families in whose names this is found")
    parser.add_argument("--under", choices=TOOLS, help="the tool that looks")
    asked = parser.parse_args()
    if asked.run:
        return run_family(asked.run, asked.under)
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: it is part of the CUDA toolkit")
    jobs = [
        (family, tool)
        for family in FAMILIES
        for tool in PLANTED.get(family, TOOLS)
        if asked.only in family or family in PLANTED
    ]
    shared = {"environment": describe_environment(), "date": datetime.now(UTC).isoformat()}
    wrong = 0
    with ThreadPoolExecutor(AT_ONCE) as pool, asked.output.open("w") as file:
        for record in pool.map(lambda job: examine(*job), jobs):
            if is_right(record):
                record["said"] = record["said"][-1:]
            else:
                wrong += 1
                print(json.dumps(record), flush=True)  # noqa: T201
            print(json.dumps(record | shared), file=file, flush=True)
    print(f"{len(jobs) - wrong} of {len(jobs)} as they should be")  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Triton's interpreter, which is most of what the tests of kernels take without a GPU, made quick.

At every call of a device function, of ``tl.sum`` or ``tl.max`` as well, it looks through all members
of ``triton.language`` for what it puts its own functions in the place of: 0.6 ms, of a call of 0.7
(Triton 3.7). What there is to replace does not change, and is looked up once.
"""

from functools import cache
from inspect import getmembers
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def _builtins(namespace: Any) -> list[tuple[str, Any]]:
    return getmembers(namespace, is_builtin)


def _replace_builtins(namespace: Any, builder: Any, scope: Any) -> None:
    for name, builtin in _builtins(namespace):
        if getattr(namespace, name) is builtin:  # not where a function calls another
            interpreter._patch_attr(namespace, name, builtin, builder, scope)


def quicken() -> None:
    """Have the interpreter look up once what it replaces."""
    interpreter._patch_builtin = _replace_builtins

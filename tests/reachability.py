"""Which definitions of a package its users can reach, found by reading the source.

A node is a name that a module defines at its top: a function, a class, a value. An edge leads from
a definition to every name of the package that its source mentions: imported ones (wherever the
import stands), attributes of imported modules, and dotted paths in strings, as configs have them.
Where a module itself is handed on, every attribute that the file reads of anything counts. What a
module does beside defining (registrations, above all) belongs to all of its definitions.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Import = tuple[str, str | None]  # a module and a name in it, or the module itself
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Module(NamedTuple):
    """A file of the package.

    Attributes:
        definitions: what it defines at its top, by name.
        imports: what it imports at its top, by the name here.
        rest: statements at its top that define nothing.
        attributes: every attribute that its source reads of anything.
    """

    definitions: dict[str, ast.AST]
    imports: dict[str, Import]
    rest: list[ast.AST]
    attributes: set[str]


class Package:
    """The modules below a folder, and who mentions whom."""

    def __init__(self, folder: Path) -> None:
        self.modules = {
            _module_name(file, folder): _read(file) for file in sorted(folder.rglob("*.py"))
        }

    def reached(self, roots: Iterable[str]) -> set[str]:
        """All that dotted paths lead to: definitions as ``module.name``, and modules."""
        found: set[str] = set()
        waiting = list(roots)
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found.add(path)
            waiting.extend(self._mentioned_by(path))
        return found & (self.modules.keys() | set(self.definitions()))

    def definitions(self) -> Iterator[str]:
        for name, module in self.modules.items():
            yield from (f"{name}.{definition}" for definition in module.definitions)

    def public(self, below: str) -> Iterator[str]:
        """Functions and classes without an underscore in modules below a dotted path."""
        for name, module in self.modules.items():
            if name == below or name.startswith(f"{below}."):
                for own, node in module.definitions.items():
                    if isinstance(node, Definition) and not own.startswith("_"):
                        yield f"{name}.{own}"

    def _mentioned_by(self, path: str) -> Iterator[str]:
        parent, _, name = path.rpartition(".")
        owner = self.modules.get(parent)
        if owner is not None and name in owner.definitions:
            yield parent
            yield from self._mentions(owner.definitions[name], owner)
        elif owner is not None and name in owner.imports:
            yield from self._imported(owner.imports[name], owner)
        elif (module := self.modules.get(path)) is not None:
            for statement in module.rest:
                yield from self._mentions(statement, module)

    def _mentions(self, node: ast.AST, module: Module) -> Iterator[str]:
        """Dotted paths, whether or not they lead anywhere."""
        here = next(name for name, value in self.modules.items() if value is module)
        parts = list(ast.walk(node))
        imports = dict(module.imports)
        for part in parts:
            if isinstance(part, ast.Import | ast.ImportFrom):
                own = _imports(part)
                imports.update(own)
                for target in own.values():
                    if self._module_of(target) is None:
                        yield from self._imported(target, module)
        read = set()
        for part in parts:
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                source = self._module_of(imports.get(part.value.id))
                if source is not None:
                    read.add(part.value)
                    yield f"{source}.{part.attr}"
        for part in parts:
            if isinstance(part, ast.Name) and part not in read:
                target = imports.get(part.id)
                yield from self._imported(target, module) if target else [f"{here}.{part.id}"]
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value

    def _module_of(self, target: Import | None) -> str | None:
        """The module that an import binds, if it binds one."""
        if target is None:
            return None
        source, name = target
        path = source if name is None else f"{source}.{name}"
        return path if path in self.modules and not self._defines(source, name) else None

    def _imported(self, target: Import, module: Module) -> Iterator[str]:
        """A name; of a module that is handed on, all that the importing file could read of it."""
        source, name = target
        yield source if name is None else f"{source}.{name}"
        if (whole := self._module_of(target)) is not None:
            yield from (f"{whole}.{attribute}" for attribute in module.attributes)

    def _defines(self, source: str, name: str | None) -> bool:
        owner = self.modules.get(source)
        return owner is not None and (name in owner.definitions or name in owner.imports)


def _module_name(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(file: Path) -> Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    module = Module({}, {}, [], set())
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports.update(_imports(statement))
        elif isinstance(statement, Definition) and statement.name != "_":
            module.definitions[statement.name] = statement
        elif names := list(_assigned(statement)):
            module.definitions.update(dict.fromkeys(names, statement))
        else:
            module.rest.append(statement)
    nodes = ast.walk(tree)
    module.attributes.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    return module


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and not node.id.startswith("__"):
                yield node.id


def _imports(statement: ast.Import | ast.ImportFrom) -> dict[str, Import]:
    """What the statement binds, by its name here."""
    if isinstance(statement, ast.Import):
        return {(alias.asname or alias.name): (alias.name, None) for alias in statement.names}
    assert not statement.level, "relative imports are not followed"
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for alias in statement.names
    }

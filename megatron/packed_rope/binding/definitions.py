"""Find a definition in an upstream source file without importing it, and fingerprint its text."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """A function or method as it stands in a source file."""

    name: str
    line: int
    parameters: tuple[str, ...]
    sha256: str
    """Of the definition's text, decorators included, with line ends normalised."""


def find_definitions(source: bytes, names: set[str]) -> dict[str, Definition]:
    """The last definition of each qualified name (the one that Python keeps).

    Raises:
        SyntaxError: the file is no Python this interpreter can read (its encoding included).
    """
    encoding = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
    lines = source.decode(encoding).splitlines()
    found: dict[str, Definition] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                if prefix + node.name in names:
                    found[prefix + node.name] = _definition(prefix + node.name, node, lines)
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for block in ("body", "orelse", "finalbody"):
                    visit(getattr(node, block, []), prefix)

    visit(ast.parse(source).body, "")
    return found


def _definition(name: str, node: ast.FunctionDef, lines: list[str]) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = "\n".join(line.rstrip("\r") for line in lines[first - 1 : node.end_lineno])
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return Definition(
        name=name,
        line=first,
        parameters=tuple(argument.arg for argument in named),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )

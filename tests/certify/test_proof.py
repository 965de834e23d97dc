"""certify/PROOF.md speaks of code and tests that exist, and of every constant."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from certify import arithmetic

ROOT = Path(__file__).parents[2]
PROOF = (ROOT / "certify" / "PROOF.md").read_text(encoding="utf-8")
HEADING = re.compile(r"^### ((?:Lemma|Theorem) (\d+))\. ", re.MULTILINE)


def _sections() -> dict[str, str]:
    """Text of each lemma and theorem, by name."""
    starts = [(match.group(1), match.start()) for match in HEADING.finditer(PROOF)]
    ends = [start for _, start in starts[1:]] + [len(PROOF)]
    return {
        name: PROOF[start:end].split("\n## ")[0]
        for (name, start), end in zip(starts, ends, strict=True)
    }


SECTIONS = _sections()


def _named(text: str, label: str) -> list[str]:
    """What stands in backticks in the paragraphs' parts that begin with the label."""
    found: list[str] = []
    for part in re.findall(rf"{label}:(.*?)(?=\n\n|\n?Test:|\Z)", text, re.DOTALL):
        found += re.findall(r"`([^`]+)`", part)
    return found


CODE = sorted(set(_named(PROOF, "In code")))
TESTS = sorted(set(_named(PROOF, "Test")))


def test_lemmas_are_numbered() -> None:
    """Catches a lemma that is dropped, or two of one number."""
    for kind in ("Lemma", "Theorem"):
        numbers = [int(n) for name, n in HEADING.findall(PROOF) if name.startswith(kind)]
        assert len(numbers) == len(set(numbers))
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
    mentioned = {int(number) for number in re.findall(r"Lemmas? (\d+)", PROOF)}
    assert all(f"Lemma {number}" in SECTIONS for number in mentioned)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_lemma_names_code_and_tests(name: str) -> None:
    """Catches a lemma that nothing would notice if it were false."""
    assert _named(SECTIONS[name], "In code"), "no code is named"
    assert _named(SECTIONS[name], "Test"), "no test is named"
    one_line = re.sub(r"\s+", " ", SECTIONS[name])
    assert "∎" in one_line, "no proof ends"


@functools.cache
def _test_module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _cases_of(function: Any) -> set[str]:
    """Names of the cases of a test with one parameter list, as pytest makes them."""
    (mark,) = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    values, ids = list(mark.args[1]), mark.kwargs.get("ids")
    if callable(ids):
        return {str(ids(value)) for value in values}
    return set(ids) if ids else {str(value) for value in values}


@pytest.mark.parametrize("node", TESTS)
def test_named_tests_exist(node: str) -> None:
    """Catches a test that was renamed, or never written."""
    path, _, name = node.partition("::")
    function, _, case = name.removesuffix("]").partition("[")
    names = {
        item.name for item in ast.walk(_test_module(path)) if isinstance(item, ast.FunctionDef)
    }
    assert function in names and function.startswith("test_")
    if case:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert case in _cases_of(getattr(module, function))


@pytest.mark.parametrize("name", CODE)
def test_named_code_exists(name: str) -> None:
    """Catches a function that was renamed or moved."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{name} is no module")


def _constants() -> list[str]:
    tree = ast.parse(Path(arithmetic.__file__).read_text(encoding="utf-8"))
    targets = [
        target
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("name", _constants())
def test_every_constant_is_derived(name: str) -> None:
    """Catches a constant that no lemma gives a reason for."""
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", PROOF), f"{name} is not in the proof"


@pytest.mark.parametrize("field", arithmetic.KernelArithmetic.__dataclass_fields__)
def test_every_count_is_derived(field: str) -> None:
    """Catches a count of an arithmetic that no lemma gives a reason for."""
    alias = {"name": "KernelArithmetic"}
    assert f"`{alias.get(field, field)}" in PROOF

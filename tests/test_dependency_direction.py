"""torch_clis -> jax_kernels -> certify, and heavy imports only where they belong.

Fault caught: an import that makes a light package drag in a framework, or a cycle between the
packages; both by reading the code and by importing it in a fresh interpreter.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Third-party modules that each package may import anywhere, also inside a function.
ALLOWED = {
    "certify": {"numpy", "safetensors", "typer", "rich", "matplotlib"},
    "jax_kernels": {"numpy", "jax", "jaxlib", "certify"},
    "torch_clis": {
        *("numpy", "torch", "torch_xla", "jax", "jaxlib", "diffusers", "transformers"),
        *("rich", "safetensors", "typer", "certify", "jax_kernels"),
    },
}
# Modules that may be imported only inside a function of the module that binds to them.
LAZY = {
    "certify": {"matplotlib"},
    "jax_kernels": set[str](),
    "torch_clis": {"torch_xla", "diffusers", "transformers"},
}
# Absent from the interpreter after a plain import of the package.
ABSENT = {
    "certify": ["jax", "jaxlib", "torch", "torch_xla", "scipy", "matplotlib", "jax_kernels"],
    "jax_kernels": ["torch", "torch_xla", "diffusers", "transformers", "matplotlib", "torch_clis"],
    "torch_clis": ["torch_xla", "diffusers", "transformers"],
}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_names(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """Top-level names of absolute imports; optionally only of those that run on import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif at_import_time and _is_deferred(node):
            continue
        else:
            yield from imported_names(node, at_import_time=at_import_time)


def _is_deferred(node: ast.AST) -> bool:
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    return function or for_types


def foreign(names: Iterator[str], package: str) -> set[str]:
    return set(names) - set(sys.stdlib_module_names) - {package}


@pytest.mark.parametrize("package", ALLOWED)
def test_source_imports_only_what_is_allowed(package: str) -> None:
    files = source_files(package)
    assert files, f"no sources of {package} found"
    for path in files:
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), at_import_time=False)
        unexpected = foreign(names, package) - ALLOWED[package]
        assert not unexpected, f"{path.relative_to(ROOT)} imports {unexpected}"


@pytest.mark.parametrize("package", LAZY)
def test_optional_modules_are_imported_inside_functions(package: str) -> None:
    for path in source_files(package):
        names = imported_names(ast.parse(path.read_text(encoding="utf-8")), at_import_time=True)
        eager = foreign(names, package) & LAZY[package]
        assert not eager, f"{path.relative_to(ROOT)} imports {eager} when it is imported itself"


@pytest.mark.parametrize("package", ABSENT)
def test_plain_import_loads_nothing_heavier(package: str) -> None:
    program = (
        "import importlib, json, sys; "
        f"importlib.import_module({package!r}); "
        f"print(json.dumps([name for name in {ABSENT[package]!r} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_certify_command_loads_no_framework() -> None:
    """Fault: `certify --help` takes seconds, or fails, where only numpy is installed."""
    program = (
        "import sys; sys.argv = ['certify', '--help']\n"
        "import certify.cli\n"
        "try:\n    certify.cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('jax', 'torch', 'torch_xla', 'matplotlib')\n"
        "print('loaded', [name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_import_scanner_sees_nested_and_deferred_imports() -> None:
    """Fault: a scanner that misses imports would make the tests above pass for anything."""
    tree = ast.parse(
        "import a.b\nfrom c import d\nfrom . import own\n"
        "if x:\n    import e\ndef f():\n    import g\nclass K:\n    import h\n"
        "if TYPE_CHECKING:\n    import t\n"
    )
    assert set(imported_names(tree, at_import_time=False)) == {"a", "c", "e", "g", "h", "t"}
    assert set(imported_names(tree, at_import_time=True)) == {"a", "c", "e", "h"}

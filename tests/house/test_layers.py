"""Imports go one way, only the packages that may do so import torch, and one module reads the clock."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate

ROOT = Path(tidegate.__file__).parent
ORDER = [
    "base", "kv", "slo", "policy", "core", "sim", "kernels", "models", "device", "runner", "transfer", "node",
    "cluster", "server", "bench", "plan", "cli",
]  # fmt: skip
WITHOUT_TORCH = ["base", "kv", "slo", "policy", "core", "sim", "cluster", "server", "bench", "plan", "cli"]


def sources(package):
    path = ROOT / package
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def packages():
    return [p for p in ORDER if (ROOT / p).is_dir() or (ROOT / f"{p}.py").exists()]


def test_every_package_is_in_the_order():
    found = {p.stem for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} | {
        p.stem for p in ROOT.glob("*.py") if p.stem not in ("__init__", "__main__")
    }
    assert found <= set(ORDER)


@pytest.mark.parametrize("package", packages())
def test_a_package_imports_only_packages_above_it(package):
    allowed = set(ORDER[: ORDER.index(package) + 1])
    for path in sources(package):
        for name in imports(path):
            if name.startswith("tidegate."):
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", [p for p in packages() if p in WITHOUT_TORCH])
def test_packages_that_decide_do_not_load_torch(package):
    modules = [str(p.relative_to(ROOT.parent).with_suffix("")).replace("/", ".") for p in sources(package)]
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_only_one_module_reads_a_clock():
    readers = ("time.time", "time.monotonic", "time.perf_counter", "datetime.now", "loop.time")
    for package in packages():
        for path in sources(package):
            if path != ROOT / "base" / "clock.py":
                text = path.read_text()
                assert not any(f"{reader}(" in text for reader in readers), path.relative_to(ROOT)


def test_nobody_asks_which_mode_or_role_it_is():
    for package in packages():
        for path in sources(package):
            if path != ROOT / "policy" / "modes.py":
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                        sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                        literal = any(isinstance(side, ast.Constant) for side in (node.left, *node.comparators))
                        named = any(s.split(".")[-1] in ("mode", "role") or s.endswith("mode.name") for s in sides)
                        assert not (literal and named), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_nothing_is_pickled():
    for package in packages():
        for path in sources(package):
            assert "pickle" not in set(imports(path)), path.relative_to(ROOT)

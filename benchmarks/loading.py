"""Finds what other packages ship, importing no more of them than the function that is measured."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Unavailable(Exception):
    """A provider cannot run here, or not on this shape; the message says why."""


def version(distribution: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_file(package: str, relative: str) -> Path:
    """A file of an installed package, which is found but not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / relative
        if path.is_file():
            return path
    raise Unavailable(f"{package} is not installed" if spec is None else f"{package} has no {relative}")


def load_file(package: str, relative: str) -> ModuleType:
    """One file of an installed package as a module; the package's own imports do not run."""
    name = f"_benchmarked_{package}_{Path(relative).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, package_file(package, relative))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def load_function(package: str, relative: str, name: str, namespace: dict[str, Any]) -> Any:
    """One function of a file whose imports are too many: compiled alone, in that namespace."""
    path = package_file(package, relative)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise Unavailable(f"{package} has no {name} in {relative}")
    exec(compile(ast.Module(found, []), str(path), "exec"), namespace)
    return namespace[name]


def import_cutlass() -> None:
    """Make `cutlass` importable where its wheels lie in a folder whose .pth file is not read."""
    if importlib.util.find_spec("cutlass") is not None:
        return
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        packages = Path(folder) / "dsl_packages"
        if packages.is_dir():
            sys.path.append(str(packages))
            return
    raise Unavailable("nvidia-cutlass-dsl is not installed")

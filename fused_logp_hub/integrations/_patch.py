"""Swapping functions of an installed package for others, and back."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import ModuleType
from typing import Any

from fused_logp_hub._errors import IntegrationError

Function = Callable[..., Any]


class Patch(ContextDecorator):
    """Replaces functions of an installed package, wherever it has bound them, until it is taken out again.

    Use it as a context manager, as a decorator, or through `enable` and `disable`. Uses nest: the originals
    return with the last one. Modules of the package that are imported meanwhile bind the replacements, and get
    the originals back too. What holds a function elsewhere (another package's module, a closure, an instance)
    keeps what it has.

    Args:
        package: name of the package and of its distribution.
        versions: the versions whose functions the replacements were compared with, as a version specifier.
        module: the module that defines the functions.
        replacements: by the name of the function each replaces.
    """

    def __init__(self, package: str, versions: str, module: str, replacements: dict[str, Function]) -> None:
        self.package = package
        self.versions = versions
        self.module = module
        self.replacements = replacements
        self._originals: dict[str, Function] = {}
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether the replacements are in place."""
        return self._depth > 0

    def enable(self) -> None:
        """Swap the functions in; each call needs its own `disable`.

        Raises:
            IntegrationError: the package is not installed, cannot be imported, has a version outside
                ``versions``, or its function has another signature. Nothing was replaced.
        """
        with self._lock:
            if not self._depth:
                self._originals = self._find_originals()
                for name, original in self._originals.items():
                    self._rebind(original, self.replacements[name])
            self._depth += 1

    def disable(self) -> None:
        """Take back one `enable`; the last one brings back the originals.

        Raises:
            IntegrationError: it was not enabled.
        """
        with self._lock:
            if not self._depth:
                raise IntegrationError(f"{self.package}: expected an enabled patch, got none. Call enable() first.")
            self._depth -= 1
            if not self._depth:
                for name, original in self._originals.items():
                    self._rebind(self.replacements[name], original)

    def __enter__(self) -> Patch:
        self.enable()
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()

    def _find_originals(self) -> dict[str, Function]:
        self._check_version()
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise IntegrationError(
                f"{self.module}: expected a module that can be imported, got {type(error).__name__}: {error}. "
                f"Complete the installation of {self.package}."
            ) from error
        originals: dict[str, Function] = {}
        for name, replacement in self.replacements.items():
            function = getattr(module, name, None)
            expected, got = _parameters(replacement), _parameters(function)
            if function is None or got != expected:
                raise IntegrationError(
                    f"{self.module}.{name}: expected a function with parameters {expected}, got {got}. "
                    f"Use {self.package} {self.versions} unmodified."
                )
            originals[name] = function
        return originals

    def _check_version(self) -> None:
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            raise IntegrationError(
                f"{self.package}: expected version {self.versions}, got no installation. Install it first."
            ) from None
        from packaging.specifiers import SpecifierSet  # here: it comes with the packages that are patched

        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise IntegrationError(
                f"{self.package}: expected version {self.versions}, got {version}. "
                "Install one of those, or call the functions of fused_logp_hub.integrations yourself."
            )

    def _rebind(self, old: Function, new: Function) -> None:
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and (name == self.package or name.startswith(f"{self.package}.")):
                # vars, because getattr makes lazy modules import what they list
                for attribute, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, attribute, new)


def _parameters(function: Function | None) -> str:
    """What a call depends on: names, kinds and defaults. Annotations differ in spelling."""
    if function is None:
        return "none"
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))

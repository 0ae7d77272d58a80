"""Mocks in place of modules that a package imports but that need a GPU, or much else, to install."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest


@contextmanager
def imported(package, modules, absent):
    """These modules of the installed package, imported with mocks where ``absent`` is; forgotten afterwards.

    A submodule of an absent package is mocked alone, so that the package's other submodules stay absent.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in absent:
            if importlib.util.find_spec(name.split(".")[0]) is None:
                mock = MagicMock(name=name)
                mock.__spec__ = ModuleSpec(name, None)
                patch.setitem(sys.modules, name, mock)
        yield [importlib.import_module(name) for name in modules]
        for name in [n for n in sys.modules if n.split(".")[0] == package]:
            del sys.modules[name]

"""The errors of the package.

    FusedLogpError
    ├── ArgumentError (ValueError)          an argument's value, shape or dtype is not supported
    ├── ArgumentTypeError (TypeError)       an argument is not of the type it must be
    ├── InvalidTokenIdError (IndexError)    on_invalid="raise" met an id outside [0, V)
    ├── SecondDerivativeError (RuntimeError)  a gradient was differentiated again
    ├── IntegrationError (RuntimeError)     a package to patch is absent, or not one that is known
    └── KernelUnavailableError (RuntimeError)
        ├── NoMatchingKernelError           nothing shipped fits this device and these tensors
        ├── CubinError                      a cubin or the manifest is missing, damaged or foreign
        └── DriverError                     the CUDA driver is missing, too old, or reported an error

Messages read ``argument: expected X, got Y. What to do.``
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CubinError",
    "DriverError",
    "FusedLogpError",
    "IntegrationError",
    "InvalidTokenIdError",
    "KernelUnavailableError",
    "NoMatchingKernelError",
    "SecondDerivativeError",
]


class FusedLogpError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(FusedLogpError, ValueError):
    """An argument's value, shape, dtype or device is not supported."""


class ArgumentTypeError(FusedLogpError, TypeError):
    """An argument is not of the type it must be."""


class InvalidTokenIdError(FusedLogpError, IndexError):
    """A token id lies outside [0, V) and ``on_invalid="raise"`` was asked for."""


class SecondDerivativeError(FusedLogpError, RuntimeError):
    """The gradient of fused_logp was differentiated; only first derivatives exist."""


class IntegrationError(FusedLogpError, RuntimeError):
    """A package to patch is absent, broken, or of a version or with functions that are not known."""


class KernelUnavailableError(FusedLogpError, RuntimeError):
    """No fused kernel can run; its subclasses say why."""


class NoMatchingKernelError(KernelUnavailableError):
    """Nothing that is shipped fits the device and the tensors; the message has the whole trace."""


class CubinError(KernelUnavailableError):
    """A cubin or the manifest is missing, damaged, or of another version of the package."""


class DriverError(KernelUnavailableError):
    """The CUDA driver is missing, too old for the cubins, or reported an error."""

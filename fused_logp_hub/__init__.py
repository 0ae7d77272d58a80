"""Fused log-probabilities for reinforcement-learning post-training, as CUDA kernels compiled ahead of time."""

from fused_logp_hub._api import (
    LogpResult,
    fused_logp,
    fused_logp_backward,
    fused_logp_backward_out,
    fused_logp_out,
)
from fused_logp_hub._errors import (
    ArgumentError,
    ArgumentTypeError,
    CubinError,
    DriverError,
    FusedLogpError,
    IntegrationError,
    InvalidTokenIdError,
    KernelUnavailableError,
    NoMatchingKernelError,
    SecondDerivativeError,
)
from fused_logp_hub._inspect import available_kernels, explain_selection, preload, preload_if_initialized
from fused_logp_hub._version import __version__

preload_if_initialized()
del preload_if_initialized

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CubinError",
    "DriverError",
    "FusedLogpError",
    "IntegrationError",
    "InvalidTokenIdError",
    "KernelUnavailableError",
    "LogpResult",
    "NoMatchingKernelError",
    "SecondDerivativeError",
    "__version__",
    "available_kernels",
    "explain_selection",
    "fused_logp",
    "fused_logp_backward",
    "fused_logp_backward_out",
    "fused_logp_out",
    "preload",
]

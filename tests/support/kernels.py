"""The kernels a test can force, on which device, and the symbols that then must have run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fused_logp_hub import _launch, _recall

SUFFIX = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


def _is_aligned(logits: Tensor) -> bool:
    starts = logits.new_tensor(0, dtype=torch.int64) + logits.data_ptr()
    for length, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        starts = starts[..., None] + torch.arange(length, device=starts.device) * (stride * logits.element_size())
    return bool((starts % 16 == 0).all())


@dataclass(frozen=True)
class Variant:
    """``kernel`` is the argument; ``forward`` lists the symbols' middle parts that may run for it."""

    device: str
    kernel: str
    forward: tuple[str, ...] = ()
    only: str | None = None
    """The one forward that the selector then knows, whatever rows it is meant for, by its symbol's middle part."""
    backward: tuple[str, ...] = ("logp_backward", "logp_backward_eager")
    """The backwards that may run, by their symbols without the dtype; with ``only`` the one that is known."""
    aligned: bool = False
    """It needs every row on a 16-byte boundary."""
    hopper: bool = False
    """It needs compute capability 9.0."""

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.gpu] if self.device == "cuda" else []

    def fits(self, logits: Tensor, copied: bool) -> bool:
        """Whether it is to be had for these logits, or if so their copy, or refused."""
        if self.hopper and torch.cuda.get_device_capability(logits.device) != (9, 0):
            return False
        if self.only is not None and not is_compiled(self.only, logits.dtype):
            return False
        return not self.aligned or _is_aligned(logits.contiguous() if copied else logits)

    def __str__(self) -> str:
        return f"{self.device}-{self.kernel}" + (f"-{self.only}" if self.only else "")


RINGS = ("ring1", "ring4_shifted", "ring8_shifted")
ALIGNED_RINGS = ("ring4", "cluster2x1_lazy", "cluster2x2_lazy")
CLUSTERS = ("cluster8x2_ring", "cluster8x2", "cluster4x2", "cluster2x2", "cluster2x1_ring")
SHIFTED_CLUSTERS = ("cluster8x2_shifted", "cluster4x2_shifted", "cluster2x2_shifted")
EAGER = ("wide", "wide_shifted", *CLUSTERS, *SHIFTED_CLUSTERS)  # for few rows, as is the eager backward
ONCE = ("online", "staged", *RINGS, *ALIGNED_RINGS, *EAGER)  # what "online" may run, and "auto"
ALIGNED = ("online", "staged", "wide", *ALIGNED_RINGS, *CLUSTERS, "tma")  # which need rows aligned to 16 bytes
FOR_FLOAT64 = ("ring4", "ring4_shifted", "tma", "two_pass", "logp_backward")  # the others come in smaller dtypes only
AUTO = Variant("cuda", "auto", ONCE)
ONLINE = Variant("cuda", "online", ONCE)
TMA = Variant("cuda", "tma", ("tma",), aligned=True, hopper=True)


def is_compiled(part: str, dtype: torch.dtype) -> bool:
    """Whether there is such a forward, or backward by its symbol's start, for the dtype."""
    return dtype != torch.float64 or part in FOR_FLOAT64


def _forced(part: str) -> Variant:
    backward = "logp_backward_eager" if part in EAGER else "logp_backward"
    return Variant("cuda", "online", (part,), only=part, backward=(backward,), aligned=part in ALIGNED)


# Of clusters the largest and the smallest: tests/test_invariance.py has all.
VARIANTS = [
    Variant("cpu", "auto"),
    Variant("cuda", "reference"),
    AUTO,
    *map(_forced, ("online", "staged", *RINGS, *ALIGNED_RINGS, "wide", "cluster8x2", "cluster2x1_ring")),
    *map(_forced, ("wide_shifted", "cluster8x2_shifted", "cluster2x2_shifted")),
    Variant("cuda", "two_pass", ("two_pass",)),
    TMA,
]


def forget_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, nothing that was selected or prepared before is used again."""
    monkeypatch.setattr(_launch, "_plans", {})
    monkeypatch.setattr(_launch, "launches", {})
    monkeypatch.setattr(_recall, "passed", {})


def assert_ran(symbols: list[str], variant: Variant, dtype: torch.dtype, *, forwards: int, backwards: int = 0) -> None:
    """Exactly the forced kernel ran, so often; on the CPU and for the reference none at all."""
    if variant.device == "cpu" or variant.kernel == "reference":
        forwards = backwards = 0
    logp = [s for s in symbols if s.startswith("logp_")]
    allowed = {f"logp_forward_{part}_{SUFFIX[dtype]}" for part in variant.forward}
    assert [s in allowed for s in logp if s.startswith("logp_forward")] == [True] * forwards, symbols
    allowed = {f"{symbol}_{SUFFIX[dtype]}" for symbol in variant.backward}
    assert [s in allowed for s in logp if s.startswith("logp_backward")] == [True] * backwards, symbols

"""What the kernels are told, without a GPU: CPU tensors go the way of CUDA ones up to the driver's call."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from fused_logp_hub import _launch, _ops, _params, _recall
from support.manifests import SYNTHETIC

CONSTANTS = struct.Struct("=" + "".join(codes for _, codes in _params.LOGP_CONSTANTS))


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict]]:
    """Every launch as (grid, fields by name, and whether by the code for usual calls), most recent last."""
    launches = []

    def launch(self, grid, stream, layout, values):
        *addresses, constants = layout.unpack(layout.pack(*values))
        fields = dict(zip(_params.LOGP_ADDRESSES, addresses, strict=True))
        numbers = list(CONSTANTS.unpack(constants))
        for name, codes in _params.LOGP_CONSTANTS:
            taken, numbers = numbers[: len(codes)], numbers[len(codes) :]
            fields[name] = taken[0] if len(taken) == 1 else tuple(taken)
        launches.append((grid, {**fields, "usual": self.usual is self}))

    kernels = {k.op: k for k in SYNTHETIC.kernels if k.name in ("online", "backward") and k.meant_for is None}
    fake = type("Function", (), {"launch": launch})

    def plan(op, requested, logits, num_rows):
        function, usual = fake(), fake()
        function.kernel = usual.kernel = kernels[op]
        function.device = usual.device = SimpleNamespace(ordinal=0, multiprocessors=132)
        function.usual = usual.usual = usual
        return function

    monkeypatch.setattr(_launch, "plan", plan)
    monkeypatch.setattr(_launch, "launches", {})
    monkeypatch.setattr(_recall, "passed", {})
    monkeypatch.setattr(_launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(_ops, "uses_reference", lambda logits, kernel: False)
    return launches

"""From tensors to a kernel launch: facts, plan, grid, parameters. CUDA tensors only.

All of it but the addresses is done once for each distinct set of shapes, strides, dtypes and options, so a call
costs a look into a cache, one struct pack and one launch. The checks before it are looked up the same way, or both at
once (`_recall`). Tensors are read through their strides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fused_logp_hub import _driver, _manifest, _params, _selection
from fused_logp_hub._errors import ArgumentError, KernelUnavailableError
from fused_logp_hub._problem import Problem, Spec, collapse, remember

_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_DTYPE_CODES = {dtype: _params.DTYPE_CODES[name] for dtype, name in _DTYPE_NAMES.items()}
_MAX_GRID = 2**31 - 1
_plans: dict[tuple[object, ...], _driver.Function] = {}
launches: dict[tuple[object, ...], Launch] = {}

# The raw handle of PyTorch's current stream on a device; 60 times cheaper than the Stream object.
current_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def row_alignment(tensor: Tensor) -> int:
    """Largest power of two, at most 16, that divides the address of every row (last dimension) in bytes."""
    bits = tensor.data_ptr() | 16
    size = tensor.element_size()
    if tensor.dim() == 2:  # the usual case
        if tensor.size(0) > 1:
            bits |= tensor.stride(0) * size
    else:
        for length, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if length > 1:
                bits |= stride * size
    return bits & -bits


def facts_of(logits: Tensor, num_rows: int, copied: bool = False) -> _selection.Facts:
    """What selection depends on, for these logits or for a contiguous copy of them."""
    device = _driver.device(logits.get_device())
    if copied:  # a new allocation, rows back to back
        bits = (_row_bytes(logits) if num_rows > 1 else 0) | 16
        alignment = bits & -bits
    else:
        alignment = row_alignment(logits)
    return _selection.Facts(
        device.capability, device.driver_cuda, _DTYPE_NAMES[logits.dtype], alignment, num_rows, _row_bytes(logits)
    )


def plan(op: str, requested: str, logits: Tensor, num_rows: int) -> _driver.Function:
    """The kernel for these logits, ready to launch."""
    rows, row_bytes = _thresholds(op)
    key = (
        op, requested, logits.get_device(), logits.dtype, row_alignment(logits),
        bisect_left(rows, num_rows), bisect_left(row_bytes, _row_bytes(logits)),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _plans[key] = _plan(op, requested, facts_of(logits, num_rows), logits.get_device())
    return found


@cache
def _thresholds(op: str) -> tuple[list[int], list[int]]:
    return _manifest.shipped().thresholds(op)


def _row_bytes(logits: Tensor) -> int:
    return logits.shape[-1] * logits.element_size()


def _plan(op: str, requested: str, facts: _selection.Facts, device_index: int) -> _driver.Function:
    manifest = _manifest.shipped()
    chosen = _selection.select_or_raise(manifest, op, requested, facts)
    device = _driver.device(device_index)
    if torch.cuda.is_current_stream_capturing() and not device.has(chosen.kernel, chosen.cubin):
        raise KernelUnavailableError(
            f"CUDA graph: expected a loaded kernel, got the first use of {chosen.kernel.symbol} during a capture. "
            "Call fused_logp_hub.preload() before it."
        )
    return device.function(manifest, chosen.kernel, chosen.cubin)


class Launch(NamedTuple):
    """A launch but for its addresses."""

    function: _driver.Function
    grid: int
    constants: bytes
    spec: Spec

    def run(self, addresses: tuple[int, ...]) -> None:
        """Launch on the device's current stream; addresses as in `_params.LOGP_ADDRESSES`, 0 for what is absent."""
        function, grid, constants, _ = self
        stream = current_stream(function.device.ordinal)
        function.launch(grid, stream, _params.LOGP, (*addresses, constants))


def forward(
    problem: Problem,
    requested: str,
    logp: Tensor,
    row_max: int,
    log_sum: int,
    entropy: int,
    raw: bool,
) -> None:
    """Launch the forward; the statistics are addresses, 0 where not wanted. raw: row_max of the logits, not / T."""
    if not problem.spec.readable:
        problem = problem.readable()  # whose shapes and strides follow from those that the spec is of
    logits, ids, mask, rows, _ = problem
    launch = forward_launch(problem, requested, logp.dtype, raw, bool(entropy))
    launch.run((
        ids.data_ptr(), 0 if mask is None else mask.data_ptr(), logits.data_ptr(),
        0 if rows is None else rows.data_ptr(), row_max, log_sum, entropy, logp.data_ptr(), 0, 0, 0,
    ))  # fmt: skip


def forward_launch(problem: Problem, requested: str, logp_dtype: torch.dtype, raw: bool, wants_entropy: bool) -> Launch:
    """The launch of a problem that can be read as it lies."""
    logits, _, mask, rows, spec = problem
    logp_only = mask is None and not wants_entropy
    key = (spec, requested, logits.data_ptr() & 15, rows is not None and rows.stride(), logp_dtype, raw, logp_only)
    launch = launches.get(key)
    if launch is None:
        function = plan("logp_forward", requested, logits, spec.num_rows)
        launch = _prepare(function, problem, raw, logp_dtype, logp_only)
        remember(launches, key, launch)
    return launch


def backward(
    problem: Problem,
    row_max: int,
    log_sum: int,
    entropy: int,
    raw: bool,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
    grad_logits: Tensor,
) -> None:
    """Launch the backward into grad_logits [..., V]; grad_logp has the ids' shape, grad_entropy is [...]."""
    logits, ids, mask, rows, spec = problem
    address = logits.data_ptr()
    key = (
        spec, logits.dtype, ids.dtype, logits.get_device(),  # a saved-tensor hook may have changed what spec is of
        address & 15, logits.shape, logits.stride(), ids.stride(), rows is not None and rows.stride(),
        grad_logits.stride(), grad_logp.dtype, grad_logp.stride(),
        grad_entropy is not None and (grad_entropy.dtype, grad_entropy.stride()), raw, mask is None,
    )  # fmt: skip
    launch = launches.get(key)
    if launch is None:
        function = plan("logp_backward", _selection.AUTO, logits, spec.num_rows)
        logp_only = mask is None and grad_entropy is None
        launch = _prepare(function, problem, raw, grad_logp.dtype, logp_only, grad_logp, grad_entropy, grad_logits)
        remember(launches, key, launch)
    launch.run((
        ids.data_ptr(), 0 if mask is None else mask.data_ptr(), address, 0 if rows is None else rows.data_ptr(),
        row_max, log_sum, entropy, 0,
        grad_logp.data_ptr(), 0 if grad_entropy is None else grad_entropy.data_ptr(), grad_logits.data_ptr(),
    ))  # fmt: skip


def mark_rows(row_indices: Tensor, row_mask: Tensor) -> None:
    """Set row_mask[i] for every i in row_indices that is inside it; the rest stays as it is."""
    device_index = row_mask.device.index
    function = _plans.get(("row_mask", device_index))
    if function is None:
        device = _driver.device(device_index)
        facts = _selection.Facts(device.capability, device.driver_cuda, "any", 16, 0, 0)
        function = _plans[("row_mask", device_index)] = _plan("row_mask", _selection.AUTO, facts, device_index)
    count = row_indices.numel()
    values = (
        row_indices.data_ptr(), row_indices.stride(0), count,
        row_mask.data_ptr(), row_mask.numel(), row_indices.element_size(), 0,
    )  # fmt: skip
    grid, _ = function.kernel.grid(count, 0, function.device.multiprocessors)
    function.launch(grid, current_stream(device_index), _params.ROW_MASK, values)


def _prepare(
    function: _driver.Function,
    problem: Problem,
    raw: bool,
    logp_dtype: torch.dtype,
    logp_only: bool,
    grad_logp: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    grad_logits: Tensor | None = None,
) -> Launch:
    """logp_dtype: of logp or its gradient; logp_only: there is no row mask, and entropy has no part in it."""
    logits, ids, _, rows, spec = problem
    row_bytes = spec.vocab_size * logits.element_size()  # without a shard's padding, as the kernel has it
    grid, tiles_per_block = function.kernel.grid(spec.num_rows, row_bytes, function.device.multiprocessors)
    if grid > _MAX_GRID:
        raise ArgumentError(
            f"logits: expected at most {_MAX_GRID} blocks of work, got {grid}. Split the rows into several calls."
        )
    strided = {
        "logits_rows": logits, "token_ids_rows": ids, "temperature_rows": rows,
        "grad_logp_rows": grad_logp, "grad_entropy_rows": grad_entropy, "grad_logits_rows": grad_logits,
    }  # fmt: skip
    present = {name: tensor for name, tensor in strided.items() if tensor is not None}
    depth = logits.dim() - 1
    folded = collapse(logits.shape[:-1], [t.stride()[:depth] for t in present.values()])
    assert folded is not None  # at most two leading dimensions
    start, global_vocab_size = spec.shard or (0, spec.vocab_size)
    ignored_id = spec.ignore_index or 0
    if start:  # as the ids are, modulo 2^64
        ignored_id = (ignored_id - start + 2**63) % 2**64 - 2**63
    several = spec.num_ids > 1
    constants = _params.logp_constants(
        **dict(zip(present, folded[1], strict=True)),
        token_ids_last=ids.stride(-1) if several else 0,
        grad_logp_last=grad_logp.stride(-1) if several and grad_logp is not None else 0,
        num_rows=spec.num_rows,
        inner_rows=folded[0],
        vocab_size=spec.vocab_size,
        vocab_start=start,
        global_vocab_size=global_vocab_size,
        num_ids=spec.num_ids,
        ignore_index=ignored_id,
        inv_temperature=1.0 / spec.temperature,
        use_ignore_index=spec.ignore_index is not None,
        invalid_is_nan=spec.invalid_is_nan,
        token_id_bytes=ids.element_size(),
        is_shard=spec.shard is not None,
        row_max_is_raw=raw,
        logp_dtype=_DTYPE_CODES[logp_dtype],
        grad_logp_dtype=_DTYPE_CODES[logp_dtype],
        grad_entropy_dtype=0 if grad_entropy is None else _DTYPE_CODES[grad_entropy.dtype],
        tiles_per_block=tiles_per_block,
        blocks_per_row=_params.divisor(max(grid // spec.num_rows, 1)),
    )
    is_usual = (  # what kernels_src/usual.cuh takes for known
        logp_only
        and logp_dtype == torch.float32
        and ids.dtype == torch.int64
        and rows is None
        and spec.shard is None
        and not several
        and folded[0] >= spec.num_rows
    )
    return Launch(function.usual if is_usual else function, grid, constants, spec)

"""From tensors to a kernel launch: facts, plan, grid, parameters. CUDA tensors only.

Selection is done once for each distinct set of facts and cached, so a call costs address arithmetic, one
struct pack and one launch. Tensors are read through their strides; see Problem for what is guaranteed.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

import torch
from torch import Tensor

from fused_logp_hub import _driver, _manifest, _params, _selection
from fused_logp_hub._errors import ArgumentError, KernelUnavailableError
from fused_logp_hub._problem import Problem, collapse

_DTYPE_NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_DTYPE_CODES = {dtype: _params.DTYPE_CODES[name] for dtype, name in _DTYPE_NAMES.items()}
_MAX_GRID = 2**31 - 1
_plans: dict[tuple[object, ...], _driver.Function] = {}

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device_index: int) -> int:
    """The raw handle of PyTorch's current stream on a device; 60 times cheaper than the Stream object."""
    if _raw_stream is not None:
        return int(_raw_stream(device_index))
    return int(torch.cuda.current_stream(device_index).cuda_stream)


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
    function = plan("logp_forward", requested, problem.logits, problem.num_rows)
    values, _ = _common(problem, logp.data_ptr(), _DTYPE_CODES[logp.dtype], row_max, log_sum, entropy, raw)
    grid, _ = _grid(function, problem)
    function.launch(grid, current_stream(function.device.ordinal), _params.LOGP_FORWARD, values)


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
    function = plan("logp_backward", _selection.AUTO, problem.logits, problem.num_rows)
    others = (grad_logits, grad_logp) if grad_entropy is None else (grad_logits, grad_logp, grad_entropy)
    values, strides = _common(problem, 0, 0, row_max, log_sum, entropy, raw, others)
    grid, tiles_per_block = _grid(function, problem)
    to, of_logp = strides[0], strides[1]
    of_entropy = strides[2] if grad_entropy is not None else (0, 0)
    values += (
        grad_logits.data_ptr(), *to,
        grad_logp.data_ptr(), *of_logp, grad_logp.stride(-1) if problem.num_ids > 1 else 0,
        0 if grad_entropy is None else grad_entropy.data_ptr(), *of_entropy,
        _DTYPE_CODES[grad_logp.dtype],
        0 if grad_entropy is None else _DTYPE_CODES[grad_entropy.dtype],
        tiles_per_block, 0,
    )  # fmt: skip
    function.launch(grid, current_stream(function.device.ordinal), _params.LOGP_BACKWARD, values)


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


def _common(
    problem: Problem,
    logp: int,
    logp_dtype: int,
    row_max: int,
    log_sum: int,
    entropy: int,
    raw: bool,
    others: tuple[Tensor, ...] = (),
) -> tuple[tuple[object, ...], list[tuple[int, int]]]:
    """The parameters that forward and backward share, and the row strides of the other tensors."""
    logits, ids, rows = problem.logits, problem.token_ids, problem.temperature_rows
    strided = (logits, ids, *others) if rows is None else (logits, ids, *others, rows)
    if logits.dim() == 2:  # the usual case
        inner_rows, strides = problem.num_rows, [(0, t.stride(0)) for t in strided]
    else:
        depth = logits.dim() - 1
        folded = collapse(logits.shape[:-1], [t.stride()[:depth] for t in strided])
        assert folded is not None  # at most two leading dimensions
        inner_rows, strides = folded
    mask, ignore, shard = problem.row_mask, problem.ignore_index, problem.shard
    start, global_vocab_size = (0, problem.vocab_size) if shard is None else shard
    ignored_id = 0 if ignore is None else ignore
    if start:  # as the ids are, modulo 2^64
        ignored_id = (ignored_id - start + 2**63) % 2**64 - 2**63
    values = (
        logits.data_ptr(), *strides[0],
        ids.data_ptr(), *strides[1], ids.stride(-1) if problem.num_ids > 1 else 0,
        *((0, 0, 0) if rows is None else (rows.data_ptr(), *strides[-1])),
        logp, row_max, log_sum, entropy,
        0 if mask is None else mask.data_ptr(),
        problem.num_rows, inner_rows, problem.vocab_size, start, global_vocab_size, problem.num_ids,
        ignored_id,
        1.0 / problem.temperature,
        ignore is not None, problem.invalid_is_nan, ids.element_size(), logp_dtype, raw, shard is not None,
    )  # fmt: skip
    return values, strides[2:]


def _grid(function: _driver.Function, problem: Problem) -> tuple[int, int]:
    row_bytes = problem.vocab_size * problem.logits.element_size()  # without a shard's padding, as the kernel has it
    grid, tiles = function.kernel.grid(problem.num_rows, row_bytes, function.device.multiprocessors)
    if grid > _MAX_GRID:
        raise ArgumentError(
            f"logits: expected at most {_MAX_GRID} blocks of work, got {grid}. Split the rows into several calls."
        )
    return grid, tiles

"""The public functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fused_logp_hub import _call, _checks, _library, _ops, _outputs, _recall, _selection
from fused_logp_hub._call import LogpResult as LogpResult
from fused_logp_hub._errors import ArgumentError


def fused_logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    out_dtype: torch.dtype | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> Tensor | LogpResult:
    """Log-probability of each row's token ids, differentiable, in one pass over the logits.

    ``logp[i, k] = logits[i, ids[i, k]] / T - logsumexp(logits[i, :] / T)``, and backward
    ``g / T * (one_hot - softmax(logits / T))``.

    Args:
        logits: [..., V], bfloat16, float16, float32 or float64. Any leading dimensions; up to two leading
            strides are read in place (``logits[:, :-1]``, a transposed [T, B, V], ``expand``). A vocabulary
            stride other than 1 is copied first.
        token_ids: [...] or, for several ids a row, [..., K] with K <= 1024; int32 or int64, on the logits'
            device, any strides, read as they are.
        row_indices: [M] int32 or int64, flat row numbers to keep; rows not listed are not read and give 0.
            Duplicates count once, entries outside [0, N) are skipped.
        row_mask: [...] bool, False for rows to leave out; together with row_indices both must admit a row.
        temperature: T > 0, a number, or a float32 tensor [...] with one per row (or a scalar tensor). Its
            own gradient is not computed.
        ignore_index: id that marks a position without a target: exactly 0, row not read. None: no such id.
        on_invalid: what any other id outside [0, V) gives: "zero", "nan", or "raise" (synchronises).
        out_dtype: dtype of logp; float32 by default, float64 for float64 logits. A bfloat16
            log-probability destroys the ratio exp(new - old).
        kernel: "auto", "two_pass", "online", "tma" or "reference". The environment variable
            FUSED_LOGP_HUB_KERNEL, read at import, replaces "auto".
        return_lse: also return row_max and log_sum, both of logits / T.
        return_entropy: also return the entropy of softmax(logits / T) in nats, differentiable.
        inplace_backward: let the gradient overwrite the logits' memory, which saves one tensor of their size.
            The logits must come from an operation (not be a leaf or its view), with rows that do not overlap,
            and without hooks on saved tensors (checkpoint, save_on_cpu). Whoever else saved them for a backward
            of its own then gets PyTorch's "modified by an inplace operation" error; reading them after the
            backward, outside autograd, gives the gradient.

    Returns:
        logp with the shape of token_ids, or a LogpResult if a ``return_*`` flag is set.

    Raises:
        ArgumentError: a shape, dtype, device or value is unsupported; nothing was launched.
        InvalidTokenIdError: ``on_invalid="raise"`` met an invalid id; the message names the first row.
        NoMatchingKernelError: nothing shipped fits this GPU and these tensors; the message has the trace.
        KernelUnavailableError: a kernel's first use falls into the capture of a CUDA graph; `preload` comes before.
        SecondDerivativeError: the gradient was differentiated again.

    Numerics:
        float32 arithmetic (float64 for float64 logits). |error| of logp at most 1e-5 + 1e-6 |logp| against
        float64 on the same inputs. A row's bits depend on its values, its id, V, dtype, temperature, kernel
        and GPU architecture only. A row with NaN or +inf, or all -inf, gives NaN. Rows whose upstream
        gradient is 0 get an exactly zero gradient. "Not read" means that nothing a row holds changes anything;
        where rows are few (up to 384 forward, 64 backward), up to 16 KiB for each 128 threads that share a
        row are fetched before it is known whether the row counts.

    Memory:
        Forward O(N); backward one tensor like the logits (none with inplace_backward) and O(N).

    Source:
        Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    """
    kernel = _selection.resolve(kernel)
    key = None
    if row_indices is None and row_mask is None and not (return_lse or return_entropy):
        key = _recall.key_of(logits, temperature, ignore_index, on_invalid, kernel, out_dtype)
        logp = None if key is None else _recall.forward(key, logits, token_ids, out_dtype)
        if logp is not None:
            return logp
    if row_indices is not None:
        row_mask = _call.merge_mask(row_indices, row_mask, logits)
    if _call.is_plain(logits) or not isinstance(logits, Tensor):
        problem = _checks.make_problem(logits, token_ids, row_mask, temperature, ignore_index, on_invalid)
        results = _call.compute(problem, kernel, out_dtype, return_lse, return_entropy, inplace_backward)
        if key is not None:
            _recall.keep(key, problem, kernel, results[0].dtype, True)
    else:
        if inplace_backward:
            raise ArgumentError(
                "inplace_backward: expected False under torch.compile, tensor subclasses and dispatch modes, got True. "
                "Call fused_logp outside of them."
            )
        _checks.dense("logits", logits)
        out_dtype = _checks.out_dtype(out_dtype, logits)
        rows = temperature if isinstance(temperature, Tensor) else None
        results = _library.logp_forward(
            logits, token_ids, row_mask, 1.0 if isinstance(temperature, Tensor) else float(temperature), rows,
            ignore_index, on_invalid, out_dtype, return_entropy, kernel,
        )  # fmt: skip
    return _call.result(results, temperature, return_lse, return_entropy)


def fused_logp_out(
    logits: Tensor,
    token_ids: Tensor,
    *,
    out: Tensor,
    row_max: Tensor | None = None,
    log_sum: Tensor | None = None,
    entropy: Tensor | None = None,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    kernel: str = "auto",
) -> Tensor:
    """As `fused_logp`, into memory of the caller's: forward-only, and allocates nothing.

    Args:
        logits, token_ids, row_mask, temperature, ignore_index, on_invalid, kernel: as in `fused_logp`.
        out: shape of token_ids, any of the floating dtypes, contiguous; every element is written.
        row_max, log_sum, entropy: [...] float32 (float64 for float64 logits), contiguous; written if given.
        row_indices: as in `fused_logp`; costs a mask of N bytes, so pass row_mask to allocate nothing.

    Returns:
        ``out``.

    Raises:
        ArgumentError: as in `fused_logp`; also if an output has another shape, dtype, device or layout, or
            if the logits require grad while gradients are enabled. Nothing was written.
    """
    kernel = _selection.resolve(kernel)
    outputs = (out, row_max, log_sum, entropy)
    key = None
    if row_indices is None and row_mask is None:
        absent = row_max is None, log_sum is None, entropy is None
        key = _recall.key_of(logits, temperature, ignore_index, on_invalid, kernel, None, *absent)
        if key is not None and _recall.forward_out(key, logits, token_ids, *outputs):
            return out
    problem = _call.make_problem(logits, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid)
    _checks.no_autograd("logits", logits)
    spec = problem.spec
    _outputs.output("out", out, spec.ids_shape, logits, _checks.FLOAT_DTYPES)
    for name, tensor in (("row_max", row_max), ("log_sum", log_sum), ("entropy", entropy)):
        if tensor is not None:
            _outputs.output(name, tensor, spec.leading, logits, (spec.dtype,))
    increment_version([output for output in outputs if output is not None])
    _ops.forward(problem, kernel, out, row_max, log_sum, entropy, False)
    if key is not None:
        _recall.keep(key, problem, kernel, out.dtype, False, entropy is not None, outputs)
    return out


def fused_logp_backward(
    grad_logp: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    *,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    kernel: str = "auto",
) -> Tensor:
    """The gradient at the logits, from the statistics that the forward saved.

    ``grad_logits[j] = (sum_k g[k] (1[ids[k] = j] - p_j) - h p_j (log p_j + H)) / T`` with
    ``p_j = exp((logits[j] / T - row_max) - log_sum)``, g = grad_logp, h = grad_entropy, H = entropy.

    Args:
        grad_logp: shape of token_ids, any floating dtype and strides (0 included).
        logits, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid: as in the forward.
        row_max, log_sum: [...] float32 (float64 for float64 logits), from the forward. With T != 1, row_max
            was rounded after the division, which costs a relative 6e-8 * |row_max| of the gradient; autograd
            through `fused_logp` keeps the undivided maximum and does not lose it.
        entropy, grad_entropy: [...], both or neither; entropy as the statistics, grad_entropy any float.
        kernel: "auto" or "reference".

    Returns:
        grad_logits, shape and dtype of the logits, rounded once. Rows that are left out, ignored, or whose
        gradients are all 0 are exactly 0 and not read.

    Raises:
        ArgumentError: a shape, dtype, device or value is unsupported; nothing was launched.
    """
    return fused_logp_backward_out(
        grad_logp, logits, token_ids, row_max, log_sum, grad_logits=None, entropy=entropy,
        grad_entropy=grad_entropy, row_indices=row_indices, row_mask=row_mask, temperature=temperature,
        ignore_index=ignore_index, on_invalid=on_invalid, kernel=kernel,
    )  # fmt: skip


def fused_logp_backward_out(
    grad_logp: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    row_max: Tensor,
    log_sum: Tensor,
    *,
    grad_logits: Tensor | None,
    entropy: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    row_indices: Tensor | None = None,
    row_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int | None = -100,
    on_invalid: str = "zero",
    kernel: str = "auto",
) -> Tensor:
    """As `fused_logp_backward`, into ``grad_logits``: shape and dtype of the logits, any row strides.

    ``grad_logits`` may be the logits themselves, which the gradient then overwrites; any other overlap is
    an ArgumentError. None allocates. Returns ``grad_logits``.
    """
    kernel = _selection.backward_kernel(_selection.resolve(kernel))
    problem = _call.make_problem(logits, token_ids, row_indices, row_mask, temperature, ignore_index, on_invalid)
    return _call.backward(problem, kernel, row_max, log_sum, entropy, False, grad_logp, grad_entropy, grad_logits)

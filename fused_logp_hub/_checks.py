"""Validation of what users pass, before anything is allocated, launched or written."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fused_logp_hub._errors import ArgumentError, ArgumentTypeError, InvalidTokenIdError
from fused_logp_hub._problem import Problem, Shard, Spec, accumulation_dtype, copy_reason, remember

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int64, torch.int32)
ON_INVALID = ("zero", "nan", "raise")
MAX_IDS = 1024  # kMaxIds in backward.cuh
MAX_VOCAB = MAX_ROWS = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # T and 1 / T stay normal float32 numbers


_specs: dict[object, Spec] = {}


def make_problem(
    logits: Tensor,
    token_ids: Tensor,
    row_mask: Tensor | None,
    temperature: float | Tensor,
    ignore_index: int | None,
    on_invalid: str,
    shard: Shard | None = None,
) -> Problem:
    """The checked problem; row_mask is [...] bool. What passed once is known by its shapes, dtypes and devices.

    The key holds plain numbers only: other types are equal to them, but do not compute as they do.
    """
    dense("logits", logits)
    dense("token_ids", token_ids)
    not_negated("logits", logits)
    _not_transformed(logits)
    number, rows = split_temperature(temperature, logits)
    if ignore_index is not None and (type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63):
        ignore_index = _index("ignore_index", ignore_index)
    if on_invalid not in ON_INVALID:
        raise ArgumentError(f"on_invalid: expected one of {', '.join(ON_INVALID)}, got {on_invalid!r}. Pick one.")
    if row_mask is not None:
        row_mask = _flat_mask(row_mask, logits)
    key = (
        logits.dtype, logits.shape, logits.stride(), logits.device,
        token_ids.dtype, token_ids.shape, token_ids.stride(), token_ids.device,
        number, ignore_index, on_invalid, shard,
    )  # fmt: skip
    traced = torch.compiler.is_dynamo_compiling()  # a dict of sizes would have each of them compiled anew
    spec = None if traced else _specs.get(key)
    if spec is None:
        spec = _spec(logits, token_ids, number, ignore_index, on_invalid == "nan", shard)
        if not traced:
            remember(_specs, key, spec)
    problem = Problem(logits, token_ids, row_mask, rows, spec)
    if on_invalid == "raise":
        _raise_on_invalid(problem)
    return problem


def _spec(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    ignore_index: int | None,
    invalid_is_nan: bool,
    shard: Shard | None,
) -> Spec:
    shape, ids_shape = logits.shape, token_ids.shape
    if logits.dtype not in FLOAT_DTYPES:
        raise ArgumentError(f"logits: expected dtype {_names(FLOAT_DTYPES)}, got {logits.dtype}. Cast the logits.")
    if token_ids.dtype not in INDEX_DTYPES:
        raise ArgumentError(f"token_ids: expected dtype int32 or int64, got {token_ids.dtype}. Cast the ids.")
    if not shape or (shape[-1] == 0 and shard is None):
        raise ArgumentError(f"logits: expected shape [..., V] with V >= 1, got {list(shape)}. Pass some columns.")
    leading, vocab_size = shape[:-1], shape[-1]
    if vocab_size > MAX_VOCAB:
        raise ArgumentError(f"logits: expected V <= {MAX_VOCAB}, got {vocab_size}. Split the vocabulary.")
    num_ids = 1
    if ids_shape != leading:
        if len(ids_shape) != len(shape) or ids_shape[:-1] != leading or not 1 <= ids_shape[-1] <= MAX_IDS:
            raise ArgumentError(
                f"token_ids: expected shape {list(leading)} or {[*leading, 'K']} with 1 <= K <= {MAX_IDS} "
                f"for logits {list(shape)}, got {list(ids_shape)}. Align the leading dimensions."
            )
        num_ids = ids_shape[-1]
    same_device("token_ids", token_ids, logits)
    num_rows = math.prod(leading)
    if num_rows > MAX_ROWS:
        raise ArgumentError(f"logits: expected at most {MAX_ROWS} rows, got {num_rows}. Split the rows.")
    if shard is not None:
        vocab_size = min(vocab_size, max(shard.vocab_size - shard.start, 0))
    return Spec(
        accumulation_dtype(logits.dtype),
        tuple(leading),
        tuple(ids_shape),
        num_rows,
        vocab_size,
        num_ids,
        temperature,
        ignore_index,
        invalid_is_nan,
        shard,
        len(shape) <= 3 and copy_reason(logits) is None,
    )


def split_temperature(temperature: float | Tensor, logits: Tensor) -> tuple[float, Tensor | None]:
    """The temperature that holds for all rows, or 1 and that of each row [...]."""
    if isinstance(temperature, Tensor):
        return 1.0, _temperature_rows(temperature, logits)
    if type(temperature) is not float:  # of NumPy's float16, 1 / T would be one too
        temperature = _number("temperature", temperature)
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:  # NaN fails too
        raise ArgumentError(
            f"temperature: expected a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, got {temperature}. "
            "Use greedy decoding's own code for a temperature of 0."
        )
    return temperature, None


def tensor(name: str, value: object) -> None:
    """ArgumentTypeError unless the argument is a tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}. Pass a tensor.")


def dense(name: str, value: Any) -> None:
    """ArgumentTypeError unless the argument is a tensor, ArgumentError unless it is neither sparse nor nested."""
    if not isinstance(value, Tensor):
        tensor(name, value)
    if value.is_nested:
        raise ArgumentError(f"{name}: expected a dense tensor, got a nested one. Pass its values(), or pad it.")
    if value.layout is not torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {value.layout}. Call to_dense().")


def not_negated(name: str, value: Tensor) -> None:
    """ArgumentError for a negation that PyTorch left to the reader: the kernels read and write memory alone."""
    if value.is_neg():
        raise ArgumentError(f"{name}: expected values as they lie in memory, got a negated view. Call resolve_neg().")


def _not_transformed(logits: Tensor) -> None:
    """ArgumentError inside torch.func's transforms and for dual tensors: the kernels would drop what they track."""
    if torch._C._are_functorch_transforms_active() or (
        forward_ad._current_level >= 0 and forward_ad.unpack_dual(logits).tangent is not None
    ):
        raise ArgumentError(
            "logits: expected a plain tensor, got one inside a transform of torch.func or with a forward-mode tangent. "
            "Batch over leading dimensions and call backward(), or use torch.log_softmax."
        )


def same_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    """ArgumentError unless the tensor lies on the logits' device."""
    if tensor.device != logits.device:
        raise ArgumentError(
            f"{name}: expected device {logits.device}, where the logits are, got {tensor.device}. Move it there."
        )


def shaped_tensor(
    name: str, value: Tensor, shape: Sequence[int], logits: Tensor, dtypes: Sequence[torch.dtype]
) -> None:
    """ArgumentError unless the tensor has that shape, made of the logits' leading one, and lies on their device."""
    dense(name, value)
    if value.shape != shape:
        raise ArgumentError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}. Match the logits.")
    if value.dtype not in dtypes:
        raise ArgumentError(f"{name}: expected dtype {_names(dtypes)}, got {value.dtype}. Cast it.")
    same_device(name, value, logits)


def no_autograd(name: str, tensor: Tensor) -> None:
    """ArgumentError if autograd would have to follow a forward-only function."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}: expected no gradient to be required, got requires_grad=True; this function is "
            "forward-only. Call it under torch.no_grad(), or use fused_logp."
        )


def row_indices(indices: Tensor, logits: Tensor) -> None:
    """ArgumentError unless the indices are [M] int32 or int64 on the logits' device."""
    dense("row_indices", indices)
    if indices.dim() != 1 or indices.dtype not in INDEX_DTYPES:
        raise ArgumentError(
            f"row_indices: expected shape [M], int32 or int64, got {list(indices.shape)}, {indices.dtype}. "
            "Pass the flat numbers of the rows to keep."
        )
    same_device("row_indices", indices, logits)


def out_dtype(dtype: torch.dtype | None, logits: Tensor) -> torch.dtype:
    """The dtype of logp: by default that of the arithmetic."""
    if dtype is None:
        return accumulation_dtype(logits.dtype)
    if dtype not in FLOAT_DTYPES:
        raise ArgumentError(f"out_dtype: expected a floating dtype, got {dtype}. Use torch.float32.")
    return dtype


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise ArgumentTypeError(f"{name}: expected a number, got {type(value).__name__}. Pass a float.")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _index(name: str, value: Any) -> int:
    """What make_problem's quick test did not let through: NumPy's integers are fine, the rest is not."""
    try:
        number = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise ArgumentTypeError(f"{name}: expected an int or None, got {kind}. Pass an int.") from None
    if not -(2**63) <= number < 2**63:
        raise ArgumentError(f"{name}: expected a 64-bit integer, got {number}. Use one that ids can hold.")
    return number


def _flat_mask(mask: Tensor, logits: Tensor) -> Tensor:
    shaped_tensor("row_mask", mask, logits.shape[:-1], logits, (torch.bool,))
    return mask.reshape(-1).contiguous()


def _temperature_rows(temperature: Tensor, logits: Tensor) -> Tensor:
    dense("temperature", temperature)
    if temperature.requires_grad:
        raise ArgumentError("temperature: expected a constant, got requires_grad=True. Detach it.")
    if temperature.dim() == 0:
        temperature = temperature.expand(logits.shape[:-1])
    shaped_tensor("temperature", temperature, logits.shape[:-1], logits, (torch.float32,))
    return temperature.resolve_neg()  # the kernels read memory alone


def _raise_on_invalid(problem: Problem) -> None:
    if problem.logits.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "on_invalid: expected 'zero' or 'nan' while a CUDA graph is captured, got 'raise', which synchronises. "
            "Check the ids before the capture."
        )
    ids = problem.token_ids
    vocab_size = problem.spec.vocab_size if problem.spec.shard is None else problem.spec.shard.vocab_size
    bad = (ids < 0) | (ids >= vocab_size)
    if problem.spec.ignore_index is not None:
        bad &= ids != problem.spec.ignore_index
    bad = bad.reshape(problem.spec.num_rows, problem.spec.num_ids)
    rows = bad.any(-1)
    if problem.row_mask is not None:
        rows &= problem.row_mask
    if not bool(rows.any()):
        return
    first = int(rows.nonzero()[0, 0])
    k = int(bad[first].nonzero()[0, 0])
    value = int(ids.reshape(problem.spec.num_rows, problem.spec.num_ids)[first, k])
    raise InvalidTokenIdError(
        f"token_ids: expected ids in [0, {vocab_size}) or ignore_index, got {value} in row {first}. "
        "Correct the ids, or pass on_invalid='zero' or 'nan'."
    )


def statistic(name: str, tensor: Tensor, problem: Problem) -> Tensor:
    """A saved statistic [...], contiguous."""
    shaped_tensor(name, tensor, problem.spec.leading, problem.logits, (problem.spec.dtype,))
    return tensor.resolve_neg().contiguous()

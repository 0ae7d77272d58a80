"""The kernels' parameter structs, as bytes: kernels_src/params.cuh field by field.

LogpParams is packed in two steps: what stays the same from call to call once, into bytes; each call
then puts its addresses before them.
"""

from __future__ import annotations

import struct

LOGP_ADDRESSES = (
    "token_ids",
    "row_mask",
    "logits",
    "temperature",
    "row_max",
    "log_sum",
    "entropy",
    "logp",
    "grad_logp",
    "grad_entropy",
    "grad_logits",
)
LOGP_CONSTANTS = (
    ("num_rows", "I"),
    ("inner_rows", "I"),
    ("vocab_size", "I"),
    ("num_ids", "I"),
    ("use_ignore_index", "B"),
    ("token_id_bytes", "B"),
    ("invalid_is_nan", "B"),
    ("row_max_is_raw", "B"),
    ("is_shard", "B"),
    ("logp_dtype", "B"),
    ("grad_logp_dtype", "B"),
    ("grad_entropy_dtype", "B"),
    ("token_ids_rows", "qq"),
    ("logits_rows", "qq"),
    ("token_ids_last", "q"),
    ("ignore_index", "q"),
    ("vocab_start", "q"),
    ("inv_temperature", "d"),
    ("tiles_per_block", "I"),
    ("blocks_per_row", "III"),
    ("grad_logits_rows", "qq"),
    ("grad_logp_rows", "qq"),
    ("grad_logp_last", "q"),
    ("global_vocab_size", "q"),
    ("temperature_rows", "qq"),
    ("grad_entropy_rows", "qq"),
)
ROW_MASK_FIELDS = (
    ("row_indices", "Q"),
    ("stride", "q"),
    ("count", "q"),
    ("row_mask", "Q"),
    ("num_rows", "q"),
    ("index_bytes", "i"),
    ("unused", "i"),
)


def _layout(fields: tuple[tuple[str, str], ...]) -> struct.Struct:
    return struct.Struct("=" + "".join(codes for _, codes in fields))


_LOGP_CONSTANTS = _layout(LOGP_CONSTANTS)
ROW_MASK = _layout(ROW_MASK_FIELDS)
# LogpParams from the eleven addresses and logp_constants' bytes.
LOGP = struct.Struct(f"={len(LOGP_ADDRESSES)}Q{_LOGP_CONSTANTS.size}s")
MAX_PARAMS_BYTES = LOGP.size

# DType in params.cuh
DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}


def logp_constants(**values: float | tuple[int, ...]) -> bytes:
    """The constants by name, a tuple for a nested struct; those not given are 0."""
    scalars: list[float] = []
    for name, codes in LOGP_CONSTANTS:
        value = values.pop(name, (0,) * len(codes))
        scalars += value if isinstance(value, tuple) else (value,)
    assert not values, f"no such fields: {', '.join(values)}"
    return _LOGP_CONSTANTS.pack(*scalars)


def divisor(value: int) -> tuple[int, int, int]:
    """A Divisor of params.cuh: value, multiplier, shift.

    Source: Granlund and Montgomery, "Division by invariant integers using multiplication", 1994, figure 4.1.
    """
    shift = (value - 1).bit_length()
    return value, ((1 << 32) * ((1 << shift) - value) // value + 1) % (1 << 32), shift

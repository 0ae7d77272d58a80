"""The kernels' parameter structs, as bytes: kernels_src/params.cuh field by field.

LogpParams is packed in two steps: what stays the same from call to call once, into bytes; each call
then puts its addresses before them.
"""

from __future__ import annotations

import struct

LOGP_ADDRESSES = (
    "logits",
    "token_ids",
    "temperature",
    "row_mask",
    "logp",
    "row_max",
    "log_sum",
    "entropy",
    "grad_logp",
    "grad_entropy",
    "grad_logits",
)
LOGP_CONSTANTS = (
    ("logits_rows", "qq"),
    ("token_ids_rows", "qq"),
    ("temperature_rows", "qq"),
    ("grad_logp_rows", "qq"),
    ("grad_entropy_rows", "qq"),
    ("grad_logits_rows", "qq"),
    ("token_ids_last", "q"),
    ("grad_logp_last", "q"),
    ("num_rows", "q"),
    ("inner_rows", "q"),
    ("vocab_size", "q"),
    ("vocab_start", "q"),
    ("global_vocab_size", "q"),
    ("num_ids", "q"),
    ("ignore_index", "q"),
    ("inv_temperature", "d"),
    ("use_ignore_index", "i"),
    ("invalid_is_nan", "i"),
    ("token_id_bytes", "i"),
    ("row_max_is_raw", "i"),
    ("is_shard", "i"),
    ("logp_dtype", "i"),
    ("grad_logp_dtype", "i"),
    ("grad_entropy_dtype", "i"),
    ("tiles_per_block", "i"),
    ("unused", "i"),
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


def logp_constants(**values: float | tuple[int, int]) -> bytes:
    """The constants by name, a pair for row strides; those not given are 0."""
    scalars: list[float] = []
    for name, codes in LOGP_CONSTANTS:
        value = values.pop(name, (0, 0) if len(codes) == 2 else 0)
        scalars += value if isinstance(value, tuple) else (value,)
    assert not values, f"no such fields: {', '.join(values)}"
    return _LOGP_CONSTANTS.pack(*scalars)

"""The kernels' parameter structs, as bytes: kernels_src/params.cuh field by field.

The forward reads a prefix of LogpParams, so its layout stops there.
"""

from __future__ import annotations

import struct

LOGP_FORWARD_FIELDS = (
    ("logits", "Qqq"),
    ("token_ids", "Qqq"),
    ("token_ids_last", "q"),
    ("temperature", "Qqq"),
    ("logp", "Q"),
    ("row_max", "Q"),
    ("log_sum", "Q"),
    ("entropy", "Q"),
    ("row_mask", "Q"),
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
    ("logp_dtype", "i"),
    ("row_max_is_raw", "i"),
    ("is_shard", "i"),
)
LOGP_BACKWARD_FIELDS = (
    ("grad_logits", "Qqq"),
    ("grad_logp", "Qqq"),
    ("grad_logp_last", "q"),
    ("grad_entropy", "Qqq"),
    ("grad_logp_dtype", "i"),
    ("grad_entropy_dtype", "i"),
    ("tiles_per_block", "i"),
    ("unused_too", "i"),
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


def _layout(*fields: tuple[str, str]) -> struct.Struct:
    return struct.Struct("=" + "".join(codes for _, codes in fields))


LOGP_FORWARD = _layout(*LOGP_FORWARD_FIELDS)
LOGP_BACKWARD = _layout(*LOGP_FORWARD_FIELDS, *LOGP_BACKWARD_FIELDS)
ROW_MASK = _layout(*ROW_MASK_FIELDS)
MAX_PARAMS_BYTES = LOGP_BACKWARD.size

# DType in params.cuh
DTYPE_CODES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}

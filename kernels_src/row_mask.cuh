// row_indices -> row_mask: one thread an entry. Duplicates write the same byte; entries outside
// [0, num_rows) are skipped. The mask starts as zeros.
#pragma once
#include "params.cuh"

__device__ __forceinline__ void scatter_row_mask(const RowMaskParams& p) {
  const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const i64 row = p.index_bytes == 8 ? static_cast<const i64*>(p.row_indices)[i * p.stride]
                                     : static_cast<i64>(static_cast<const int*>(p.row_indices)[i * p.stride]);
  if (row >= 0 && row < p.num_rows) p.row_mask[row] = 1;
}

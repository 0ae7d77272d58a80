// What a row is before any logit is read: where it lies, whether it counts, which ids it asks for.
#pragma once
#include "numeric.cuh"

__device__ __forceinline__ u32 divide(u32 n, const Divisor& d) { return (n + __umulhi(n, d.multiplier)) >> d.shift; }

struct RowIndex {
  u32 outer, inner;  // num_rows < 2^31

  __device__ __forceinline__ RowIndex(u32 row, u32 inner_rows) : outer(0), inner(row) {
    if (row < inner_rows) return;  // one leading dimension, the usual case: no division
    outer = row / inner_rows;
    inner = row - outer * inner_rows;
  }

  __device__ __forceinline__ i64 offset(const RowStrides& s) const {
    const i64 within = inner * s.inner;
    return outer == 0 ? within : within + outer * s.outer;
  }
};

// An id as it comes from memory. What depends on its type is done when it is used: done before, it would wait for the
// id, and what is asked for next would come a latency later.
struct LoadedId {
  u32 low, high;  // high: of 8 bytes only

  __device__ __forceinline__ LoadedId(const LogpParams& p, const RowIndex& at, u32 k) : high(0) {
    const i64 i = at.offset(p.token_ids_rows) + k * p.token_ids_last;
    const u32* words = reinterpret_cast<const u32*>(static_cast<const char*>(p.token_ids) + i * p.token_id_bytes);
    low = words[0];
    if (p.token_id_bytes == 8) high = words[1];
  }

  // Less vocab_start, so that a valid id is a column. Unsigned, since ids may be anything and wrap.
  __device__ __forceinline__ i64 local(const LogpParams& p) const {
    const u32 sign = static_cast<u32>(static_cast<i32>(low) >> 31);
    const u64 id = static_cast<u64>(p.token_id_bytes == 8 ? high : sign) << 32 | low;
    return static_cast<i64>(id - static_cast<u64>(p.vocab_start));
  }
};

__device__ __forceinline__ i64 token_id(const LogpParams& p, const RowIndex& at, u32 k) {
  return LoadedId(p, at, k).local(p);
}

__device__ __forceinline__ bool is_ignored(const LogpParams& p, i64 id) {
  return p.use_ignore_index && id == p.ignore_index;
}

__device__ __forceinline__ bool is_valid(const LogpParams& p, i64 id) {
  return id >= 0 && id < p.vocab_size && !is_ignored(p, id);
}

// Whether the id is a column of these logits or, if they are a shard, of another shard's.
__device__ __forceinline__ bool is_in_vocabulary(const LogpParams& p, i64 id) {
  const u64 global = static_cast<u64>(id) + static_cast<u64>(p.vocab_start);
  return global < static_cast<u64>(p.global_vocab_size) && !is_ignored(p, id);
}

// Whether any logit of the row is needed: it is not masked out and not all of its ids are ignored.
__device__ __forceinline__ bool is_active(const LogpParams& p, u32 row, const RowIndex& at, const LoadedId& first) {
  if (p.row_mask != nullptr && p.row_mask[row] == 0) return false;
  if (!is_ignored(p, first.local(p))) return true;
#pragma unroll 1
  for (u32 k = 1; k < p.num_ids; ++k)
    if (!is_ignored(p, token_id(p, at, k))) return true;
  return false;
}

template <class T>
__device__ __forceinline__ const typename T::Bits* row_start(const LogpParams& p, const RowIndex& at) {
  return static_cast<const typename T::Bits*>(p.logits) + at.offset(p.logits_rows);
}

template <class Acc>
__device__ __forceinline__ Acc inverse_temperature(const LogpParams& p, const RowIndex& at) {
  if (p.temperature == nullptr) return static_cast<Acc>(p.inv_temperature);
  return Acc(1) / static_cast<Acc>(static_cast<const float*>(p.temperature)[at.offset(p.temperature_rows)]);
}

// What a forward gives for an id: looked at before the row is scanned, worked out when the row's state is known.
#pragma once
#include "row.cuh"
#include "softmax_state.cuh"

// What stands for an id that asks for nothing.
template <class Acc>
__device__ __forceinline__ Acc no_target(const LogpParams& p) {
  return p.is_shard ? Math<Acc>::infinity() : Acc(0);
}

// What an id of an active row asks for: a column's logit, or a result that does not depend on what the row holds.
template <class T>
struct Target {
  using Acc = typename T::Acc;
  enum Kind : u32 { kColumn, kOtherShard, kNaN, kNothing };

  typename T::Bits bits;  // as they come from memory, and without a branch: nothing waits for them until they are used
  Kind kind;

  static __device__ __forceinline__ Target of(const LogpParams& p, const RowIndex& at, i64 id) {
    const bool is_column = is_valid(p, id);
    return {row_start<T>(p, at)[is_column ? id : 0],
            is_column                                ? kColumn
            : is_in_vocabulary(p, id)                ? kOtherShard
            : p.invalid_is_nan && !is_ignored(p, id) ? kNaN
                                                     : kNothing};
  }

  // The lane's own, or the last one's. The warp that will write the row asks for it before the row is scanned, so that
  // its latency is hidden; ids beyond the 32nd are looked at at the end.
  static __device__ __forceinline__ Target of_lane(const LogpParams& p, const RowIndex& at, const LoadedId& first) {
    if (p.num_ids == 1) return of(p, at, first.local(p));
    return of(p, at, token_id(p, at, min(threadIdx.x % kWarp, p.num_ids - 1)));
  }

  __device__ __forceinline__ Target of_other_lane(u32 lane) const {
    return {static_cast<typename T::Bits>(__shfl_sync(~0u, bits, lane)),
            static_cast<Kind>(__shfl_sync(~0u, static_cast<u32>(kind), lane))};
  }

  // For a shard the logit stands in for logp: -inf for another shard's, as for a column that is not there, and +inf for
  // no target. A logit of +inf is NaN there, as the row's logp will be.
  __device__ __forceinline__ Acc logp(const LogpParams& p, Acc row_max, Acc log_sum, Acc inv_t) const {
    const Acc x = T::to_acc(bits);
    switch (kind) {
      case kColumn:
        if (!p.is_shard) return (x - row_max) * inv_t - log_sum;
        return x == Math<Acc>::infinity() ? Math<Acc>::nan() : x;
      case kOtherShard: return -Math<Acc>::infinity();
      case kNaN: return Math<Acc>::nan();
      default: return no_target<Acc>(p);
    }
  }
};

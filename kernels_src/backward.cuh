// Backward: with z = logits / T, p_j = exp((z_j - row_max) - log_sum), G = sum_k grad_logp[k] and h the
// gradient of the row's entropy H,
//   grad_logits[j] = (sum over k with ids[k] == j of grad_logp[k]  -  p_j * (G + h * (log p_j + H))) / T
// Reads V elements a row and writes V: elementwise, so any division into blocks gives the same bits.
//
// One block takes a few neighbouring tiles of one row, so that what is looked up once a row is paid for by
// many bytes. Vectors are laid out along the 16-byte grid of grad_logits, so stores are always wide; the
// logits are shifted into place where they lie differently. Rows run from the last to the first: what the
// forward read last is what may still be in L2.
//
// grad_logits may be the logits themselves: a vector is read by the thread that overwrites it, and the
// logits at the ids of a row with several are read before the block's first store.
#pragma once
#include "reader.cuh"
#include "row.cuh"

constexpr int kBackwardThreads = 128;
constexpr int kBackwardVectors = 4;  // per thread and tile
constexpr u32 kBackwardTileVectors = kBackwardThreads * kBackwardVectors;
constexpr int kMaxIds = 1024;        // ids a row may have; checked by the caller
template <class T>
constexpr u32 kBackwardColumns = kBackwardThreads * kBackwardVectors * T::kVec;
// Resident blocks a multiprocessor that the register budget is set for. float64 needs more registers, and on all
// architectures but 9.0 the compiler does for float32.
#if __CUDA_ARCH__ == 900
constexpr int kBackwardBlocksF32 = 7;
#else
constexpr int kBackwardBlocksF32 = 6;
#endif
template <class T>
constexpr int kBackwardBlocks =
    sizeof(typename T::Bits) == 8 ? 4 : sizeof(typename T::Bits) == 4 ? kBackwardBlocksF32 : 7;

template <class T>
struct RowGradient {
  using Acc = typename T::Acc;
  Acc inv_t;
  i64 first_id;
  // log_b p_j = (x_j * prescale - top) * scale - log_sum, in the base of SoftmaxState. With the logits' own
  // maximum prescale is 1. With the maximum of logits / T, rounded, x_j / T is rounded alike.
  Acc prescale, top, scale, log_sum;
  Acc weight;          // -G / T
  Acc entropy_weight;  // -h / T, for log_b p
  Acc base_weight;     // -(G + h * H) / T

  // The softmax's share of the gradient at a logit.
  template <bool kEntropy>
  __device__ __forceinline__ Acc at(Acc x) const {
    const Acc t = Math<Acc>::fma(x * prescale - top, scale, -log_sum);
    const Acc p = Math<Acc>::exp_base(t);
    if constexpr (!kEntropy) return p * weight;
    // p is 0 wherever the bound acts, so that 0 * log 0 is 0
    const Acc bounded = Math<Acc>::max(t, Acc(sizeof(Acc) == 8 ? -1e3 : -2e2));
    return p * Math<Acc>::fma(entropy_weight, bounded, base_weight);
  }

  __device__ __forceinline__ bool reads_logits() const { return weight != Acc(0) || entropy_weight != Acc(0); }
};

template <class Acc>
__device__ __forceinline__ Acc grad_logp(const LogpParams& p, const RowIndex& at, u32 k) {
  return load_as<Acc>(p.grad_logp, at.offset(p.grad_logp_rows) + k * p.grad_logp_last, p.grad_logp_dtype);
}

// The upstream weights of a row, all zero for one that is left out. Every thread computes the same.
template <class T>
__device__ __forceinline__ RowGradient<T> row_gradient(const LogpParams& p, u32 row, const RowIndex& at) {
  using Acc = typename T::Acc;
  RowGradient<T> g = {};
  g.first_id = -1;
  if (p.row_mask != nullptr && p.row_mask[row] == 0) return g;
  // Asked for before they are known to be needed: one latency instead of two.
  const Acc row_max = static_cast<const Acc*>(p.row_max)[row];
  const Acc log_sum = static_cast<const Acc*>(p.log_sum)[row];
  Acc sum = 0, entropy_sum = 0;
  bool active = false;
#pragma unroll 1
  for (u32 k = 0; k < p.num_ids; ++k) {
    const i64 id = token_id(p, at, k);
    const Acc upstream = grad_logp<Acc>(p, at, k);
    if (k == 0) g.first_id = id;
    if (is_ignored(p, id)) continue;
    active = true;
    if (is_in_vocabulary(p, id)) sum += upstream;
    else if (p.invalid_is_nan) sum = Math<Acc>::nan();
  }
  if (active && p.grad_entropy != nullptr)
    entropy_sum = load_as<Acc>(p.grad_entropy, at.offset(p.grad_entropy_rows), p.grad_entropy_dtype);
  g.inv_t = inverse_temperature<Acc>(p, at);
  g.weight = g.base_weight = -g.inv_t * sum;
  if (entropy_sum != Acc(0)) {
    g.entropy_weight = -g.inv_t * entropy_sum * Math<Acc>::log_unit();
    g.base_weight += -g.inv_t * entropy_sum * static_cast<const Acc*>(p.entropy)[row];
  }
  g.top = row_max;
  g.prescale = p.row_max_is_raw ? Acc(1) : g.inv_t;
  g.scale = Math<Acc>::scale(p.row_max_is_raw ? g.inv_t : Acc(1));
  g.log_sum = log_sum * Math<Acc>::scale(Acc(1));
  return g;
}

constexpr u32 kNoTarget = 1u << 31;  // no column less head, be it negative: columns are below 2^31

// The gradients at the ids of a row with several, by index of the id: computed before the block's first store, written
// over the softmax's share after its last. The first of equal ids carries the sum of all of them.
template <class T>
struct TargetGradients {
  using Acc = typename T::Acc;
  static constexpr u32 kNone = ~0u;
  u32 column[kMaxIds];  // kNone: another block's column, or no column
  Acc value[kMaxIds];

  // Whether any id is this block's; mine(c) says whether a column is.
  template <bool kEntropy, class Mine>
  __device__ __forceinline__ bool prepare(const LogpParams& p, const RowIndex& at, Mine mine,
                                          const typename T::Bits* logits, const RowGradient<T>& g) {
    bool any = false;
#pragma unroll 1
    for (u32 k = threadIdx.x; k < p.num_ids; k += kBackwardThreads) {
      const i64 id = token_id(p, at, k);
      column[k] = kNone;
      if (!is_valid(p, id) || !mine(static_cast<u32>(id))) continue;
      Acc sum = 0;
      bool first = true;
#pragma unroll 1
      for (u32 other = 0; other < p.num_ids; ++other) {
        if (token_id(p, at, other) != id) continue;
        first = first && other >= k;
        sum += grad_logp<Acc>(p, at, other);
      }
      if (!first) continue;
      column[k] = static_cast<u32>(id);
      value[k] = sum * g.inv_t;
      if (g.reads_logits()) value[k] += g.template at<kEntropy>(T::to_acc(logits[id]));
      any = true;
    }
    return __syncthreads_or(any);
  }

  __device__ __forceinline__ void write(const LogpParams& p, typename T::Bits* out) const {
    for (u32 k = threadIdx.x; k < p.num_ids; k += kBackwardThreads)
      if (column[k] != kNone) out[column[k]] = T::from_acc(value[k]);
  }
};

// A row's columns as this kernel divides them: a few before the output's first 16-byte boundary, the
// vectors, a few behind the last.
struct RowDivision {
  u32 head, vectors, body_end, vocab_size;

  template <class T>
  static __device__ __forceinline__ RowDivision of(const typename T::Bits* out, i64 vocab) {
    RowDivision d;
    d.vocab_size = static_cast<u32>(vocab);
    const u32 to_boundary = (16u - (static_cast<u32>(reinterpret_cast<u64>(out)) & 15u)) % 16u;
    d.head = min(to_boundary / static_cast<u32>(sizeof(typename T::Bits)), d.vocab_size);
    d.vectors = (d.vocab_size - d.head) / T::kVec;
    d.body_end = d.head + d.vectors * T::kVec;
    return d;
  }

  __device__ __forceinline__ u32 ragged() const { return head + (vocab_size - body_end); }
  __device__ __forceinline__ u32 ragged_column(u32 i) const { return i < head ? i : body_end + (i - head); }
};

// This thread's vectors of the tile that begins with vector first.
template <class T, bool kAligned>
__device__ __forceinline__ void load_vectors(const RowReader<T>& reader, const RowDivision& d, u32 first,
                                             Vec16 (&v)[kBackwardVectors]) {
  const u32 c = d.head + (first + threadIdx.x) * T::kVec, step = kBackwardThreads * T::kVec;
  if (!kAligned && first > 0 && first + kBackwardTileVectors < d.vectors) {
    reader.template load<false>(v, c, step);
  } else {
#pragma unroll
    for (int j = 0; j < kBackwardVectors; ++j) {
      if (first + threadIdx.x + j * kBackwardThreads >= d.vectors) continue;
      v[j] = kAligned ? reader.template load<true>(c + j * step) : reader.template load_guarded<false>(c + j * step);
    }
  }
}

template <class T, bool kEntropy>
__device__ __forceinline__ void write_vectors(Vec16 (&v)[kBackwardVectors], typename T::Bits* out,
                                              const RowDivision& d, u32 first, const RowGradient<T>& g,
                                              u32 target) {
  using Acc = typename T::Acc;
#pragma unroll
  for (int j = 0; j < kBackwardVectors; ++j) {
    const u32 at = first + threadIdx.x + j * kBackwardThreads;
    if (at >= d.vectors) continue;
    Acc x[T::kVec];
    T::unpack(v[j], x);
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) x[i] = g.template at<kEntropy>(x[i]);
    if (at == target / T::kVec) {
#pragma unroll
      for (int i = 0; i < T::kVec; ++i) x[i] -= i == target % T::kVec ? g.weight : Acc(0);
    }
    *reinterpret_cast<Vec16*>(out + d.head + at * T::kVec) = T::pack(x);
  }
}

// Tiles [first, last) in vectors. Where registers allow, the first tile is on its way while before_stores runs, and
// each next one while its predecessor is written.
template <class T, bool kEntropy, bool kAligned, class BeforeStores>
__device__ __forceinline__ void write_tiles(const RowReader<T>& reader, typename T::Bits* out, const RowDivision& d,
                                            u32 first, u32 last, const RowGradient<T>& g, u32 target,
                                            BeforeStores before_stores) {
  if constexpr (kAligned && sizeof(typename T::Bits) < 8) {
    Vec16 next[kBackwardVectors];
    load_vectors<T, kAligned>(reader, d, first, next);
    before_stores();
#pragma unroll 1
    for (u32 at = first; at < last; at += kBackwardTileVectors) {
      Vec16 v[kBackwardVectors];
#pragma unroll
      for (int j = 0; j < kBackwardVectors; ++j) v[j] = next[j];
      if (at + kBackwardTileVectors < last) load_vectors<T, kAligned>(reader, d, at + kBackwardTileVectors, next);
      write_vectors<T, kEntropy>(v, out, d, at, g, target);
    }
  } else {
    before_stores();
#pragma unroll 1
    for (u32 at = first; at < last; at += kBackwardTileVectors) {
      Vec16 v[kBackwardVectors];
      load_vectors<T, kAligned>(reader, d, at, v);
      write_vectors<T, kEntropy>(v, out, d, at, g, target);
    }
  }
}

template <class T, bool kEntropy>
__device__ __forceinline__ void backward_tiles(const LogpParams& p, const RowIndex& at, u32 first_tile,
                                               const RowGradient<T>& g, TargetGradients<T>& targets) {
  using Bits = typename T::Bits;
  const Bits* logits = row_start<T>(p, at);
  Bits* out = static_cast<Bits*>(p.grad_logits) + at.offset(p.grad_logits_rows);
  const RowDivision d = RowDivision::of<T>(out, p.vocab_size);
  const u32 first = first_tile * kBackwardTileVectors;
  const u32 last = min(first + p.tiles_per_block * kBackwardTileVectors, d.vectors);
  const bool ragged = first_tile == 0;  // a row's first block has its ragged ends as well

  const auto mine = [=](u32 c) {
    const bool body = c >= d.head && c < d.body_end;
    const u32 vector = (c - d.head) / T::kVec;
    return body ? vector >= first && vector < last : ragged;
  };
  // One id is known to every thread, and is the business of the one that has its column; several are looked at by
  // a thread each, who then tell each other.
  const u32 target = p.num_ids == 1 && is_valid(p, g.first_id) ? static_cast<u32>(g.first_id) - d.head : kNoTarget;
  bool any_target = false;
  const auto prepare_targets = [&] {
    if (p.num_ids > 1) any_target = targets.template prepare<kEntropy>(p, at, mine, logits, g);
  };

  const RowReader<T> reader(logits, p.vocab_size, d.head);
  if (!g.reads_logits()) {
    prepare_targets();
    for (u32 i = first + threadIdx.x; i < last; i += kBackwardThreads)
      *reinterpret_cast<Vec16*>(out + d.head + i * T::kVec) = Vec16{};
  } else if (reader.shift == 0) {
    write_tiles<T, kEntropy, true>(reader, out, d, first, last, g, target, prepare_targets);
  } else {
    write_tiles<T, kEntropy, false>(reader, out, d, first, last, g, target, prepare_targets);
  }
  if (ragged && threadIdx.x < d.ragged()) {
    const u32 c = d.ragged_column(threadIdx.x);
    typename T::Acc x = 0;
    if (g.reads_logits()) x = g.template at<kEntropy>(T::to_acc(logits[c]));
    if (c - d.head == target) x -= g.weight;
    out[c] = T::from_acc(x);
  }
  if (!any_target) return;
  __syncthreads();
  targets.write(p, out);
}

template <class T>
__device__ __forceinline__ void backward_block(const LogpParams& p) {
  __shared__ TargetGradients<T> targets;
  const u32 columns = kBackwardColumns<T> * static_cast<u32>(p.tiles_per_block);
  const u32 blocks_per_row = (static_cast<u32>(p.vocab_size) + columns - 1) / columns;
  const u32 index = blockIdx.x / blocks_per_row;
  const u32 first_tile = (blockIdx.x - index * blocks_per_row) * p.tiles_per_block;
  const u32 row = static_cast<u32>(p.num_rows) - 1 - index;
  const RowIndex at(row, p.inner_rows);
  const RowGradient<T> g = row_gradient<T>(p, row, at);
  if (g.entropy_weight != typename T::Acc(0)) backward_tiles<T, true>(p, at, first_tile, g, targets);
  else backward_tiles<T, false>(p, at, first_tile, g, targets);
}

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
#include "row_gradient.cuh"

constexpr int kMaxIds = 1024;  // ids a row may have; checked by the caller

// How a kernel goes about it: threads a block, vectors a thread and tile, and whether a block asks for its first tile
// before it knows that the row has a gradient. That saves one latency of two, and reads in vain where there is none:
// for few rows, where latency is all there is.
template <int kThreads_, int kVectors_, bool kEager_>
struct BackwardShape {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr bool kEager = kEager_;
  static constexpr u32 kTileVectors = kThreads * kVectors;
};

constexpr u32 kNoTarget = 1u << 31;  // no column less head, be it negative: columns are below 2^31

// A row's columns as this kernel divides them: a few before the output's first 16-byte boundary, the
// vectors, a few behind the last.
struct RowDivision {
  u32 head, vectors, body_end, vocab_size;

  template <class T>
  static __device__ __forceinline__ RowDivision of(const typename T::Bits* out, u32 vocab) {
    RowDivision d;
    d.vocab_size = vocab;
    const u32 to_boundary = (16u - (static_cast<u32>(reinterpret_cast<u64>(out)) & 15u)) % 16u;
    d.head = min(to_boundary / static_cast<u32>(sizeof(typename T::Bits)), d.vocab_size);
    d.vectors = (d.vocab_size - d.head) / T::kVec;
    d.body_end = d.head + d.vectors * T::kVec;
    return d;
  }

  __device__ __forceinline__ u32 ragged() const { return head + (vocab_size - body_end); }
  __device__ __forceinline__ u32 ragged_column(u32 i) const { return i < head ? i : body_end + (i - head); }
};

// What a block writes: the vectors [first, last) of a row, and if it is the row's first block its ragged ends.
template <class T>
struct BlockPart {
  RowReader<T> reader;
  typename T::Bits* out;
  RowDivision d;
  u32 first, last;

  __device__ __forceinline__ BlockPart(const LogpParams& p, const RowIndex& at, u32 begin, u32 size)
      : reader(row_start<T>(p, at), p.vocab_size),
        out(static_cast<typename T::Bits*>(p.grad_logits) + at.offset(p.grad_logits_rows)),
        d(RowDivision::of<T>(out, p.vocab_size)),
        first(begin),
        last(min(begin + size, d.vectors)) {
    reader.start_at(d.head);
  }

  __device__ __forceinline__ bool ragged() const { return first == 0; }

  __device__ __forceinline__ bool has(u32 c) const {
    const u32 vector = (c - d.head) / T::kVec;
    return c >= d.head && c < d.body_end ? vector >= first && vector < last : ragged();
  }
};

// The gradients at the ids of a row with several, by index of the id: computed before the block's first store, written
// over the softmax's share after its last. The first of equal ids carries the sum of all of them.
template <class T>
struct TargetGradients {
  using Acc = typename T::Acc;
  static constexpr u32 kNone = ~0u;
  u32 column[kMaxIds];  // kNone: another block's column, or no column
  Acc value[kMaxIds];

  // Whether any id is this block's.
  template <bool kEntropy>
  __device__ __forceinline__ bool prepare(const LogpParams& p, const RowIndex& at, const BlockPart<T>& part,
                                          const RowGradient<T>& g) {
    bool any = false;
#pragma unroll 1
    for (u32 k = threadIdx.x; k < p.num_ids; k += blockDim.x) {
      const i64 id = token_id(p, at, k);
      column[k] = kNone;
      if (!is_valid(p, id) || !part.has(static_cast<u32>(id))) continue;
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
      if (g.reads_logits()) value[k] += g.template at<kEntropy>(T::to_acc(part.reader.row[id]));
      any = true;
    }
    return __syncthreads_or(any);
  }

  __device__ __forceinline__ void write(const LogpParams& p, typename T::Bits* out) const {
    for (u32 k = threadIdx.x; k < p.num_ids; k += blockDim.x)
      if (column[k] != kNone) out[column[k]] = T::from_acc(value[k]);
  }
};

// This thread's vectors of the tile that begins with vector first.
template <class T, class Shape, bool kAligned>
__device__ __forceinline__ void load_vectors(const BlockPart<T>& part, u32 first, Vec16 (&v)[Shape::kVectors]) {
  const u32 c = part.d.head + (first + threadIdx.x) * T::kVec, step = Shape::kThreads * T::kVec;
  if (!kAligned && first > 0 && first + Shape::kTileVectors < part.d.vectors) {
    part.reader.template load<false>(v, c, step);
  } else {
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      if (first + threadIdx.x + j * Shape::kThreads >= part.d.vectors) continue;
      v[j] = kAligned ? part.reader.template load<true>(c + j * step)
                      : part.reader.template load_guarded<false>(c + j * step);
    }
  }
}

template <class T, class Shape, bool kEntropy>
__device__ __forceinline__ void write_vectors(Vec16 (&v)[Shape::kVectors], const BlockPart<T>& part, u32 first,
                                              const RowGradient<T>& g, u32 target) {
  using Acc = typename T::Acc;
#pragma unroll
  for (int j = 0; j < Shape::kVectors; ++j) {
    const u32 at = first + threadIdx.x + j * Shape::kThreads;
    if (at >= part.d.vectors) continue;
    Acc x[T::kVec];
    T::unpack(v[j], x);
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) x[i] = g.template at<kEntropy>(x[i]);
    if (at == target / T::kVec) {
#pragma unroll
      for (int i = 0; i < T::kVec; ++i) x[i] -= i == target % T::kVec ? g.weight : Acc(0);
    }
    *reinterpret_cast<Vec16*>(part.out + part.d.head + at * T::kVec) = T::pack(x);
  }
}

// All tiles of a part; next may hold the first one already. Where registers allow, the first tile is on its way while
// before_stores runs, and each next one while its predecessor is written.
template <class T, class Shape, bool kEntropy, bool kAligned, class BeforeStores>
__device__ __forceinline__ void write_tiles(const BlockPart<T>& part, Vec16 (&next)[Shape::kVectors],
                                            const RowGradient<T>& g, u32 target, BeforeStores before_stores) {
  if constexpr (kAligned && sizeof(typename T::Bits) < 8) {
    if (!Shape::kEager) load_vectors<T, Shape, kAligned>(part, part.first, next);
    before_stores();
#pragma unroll 1
    for (u32 at = part.first; at < part.last; at += Shape::kTileVectors) {
      Vec16 v[Shape::kVectors];
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) v[j] = next[j];
      if (at + Shape::kTileVectors < part.last)
        load_vectors<T, Shape, kAligned>(part, at + Shape::kTileVectors, next);
      write_vectors<T, Shape, kEntropy>(v, part, at, g, target);
    }
  } else {
    before_stores();
#pragma unroll 1
    for (u32 at = part.first; at < part.last; at += Shape::kTileVectors) {
      Vec16 v[Shape::kVectors];
      load_vectors<T, Shape, kAligned>(part, at, v);
      write_vectors<T, Shape, kEntropy>(v, part, at, g, target);
    }
  }
}

template <class T, class Shape, bool kEntropy>
__device__ __forceinline__ void write_part(const LogpParams& p, const RowIndex& at, const BlockPart<T>& part,
                                           Vec16 (&ahead)[Shape::kVectors], const RowGradient<T>& g,
                                           TargetGradients<T>& targets) {
  // One id is known to every thread, and is the business of the one that has its column; several are looked at by
  // a thread each, who then tell each other.
  const RowDivision& d = part.d;
  const u32 target = p.num_ids == 1 && is_valid(p, g.first_id) ? static_cast<u32>(g.first_id) - d.head : kNoTarget;
  bool any_target = false;
  const auto prepare_targets = [&] {
    if (p.num_ids > 1) any_target = targets.template prepare<kEntropy>(p, at, part, g);
  };

  if (!g.reads_logits()) {
    prepare_targets();
    for (u32 i = part.first + threadIdx.x; i < part.last; i += Shape::kThreads)
      *reinterpret_cast<Vec16*>(part.out + d.head + i * T::kVec) = Vec16{};
  } else if (part.reader.shift == 0) {
    write_tiles<T, Shape, kEntropy, true>(part, ahead, g, target, prepare_targets);
  } else {
    write_tiles<T, Shape, kEntropy, false>(part, ahead, g, target, prepare_targets);
  }
  if (part.ragged() && threadIdx.x < d.ragged()) {
    const u32 c = d.ragged_column(threadIdx.x);
    typename T::Acc x = 0;
    if (g.reads_logits()) x = g.template at<kEntropy>(T::to_acc(part.reader.row[c]));
    if (c - d.head == target) x -= g.weight;
    part.out[c] = T::from_acc(x);
  }
  if (!any_target) return;
  __syncthreads();
  targets.write(p, part.out);
}

template <class T, class Shape>
__device__ __forceinline__ void backward_block(const LogpParams& p) {
  __shared__ TargetGradients<T> targets;
  const u32 index = divide(blockIdx.x, p.blocks_per_row);
  const u32 size = p.tiles_per_block * Shape::kTileVectors;
  const u32 begin = (blockIdx.x - index * p.blocks_per_row.value) * size;
  const u32 row = p.num_rows - 1 - index;
  const RowIndex at(row, p.inner_rows);
  Vec16 ahead[Shape::kVectors];
  const auto write = [&](const BlockPart<T>& part, const RowGradient<T>& g) {
    if (g.entropy_weight != typename T::Acc(0)) write_part<T, Shape, true>(p, at, part, ahead, g, targets);
    else write_part<T, Shape, false>(p, at, part, ahead, g, targets);
  };
  if constexpr (Shape::kEager) {
    const BlockPart<T> part(p, at, begin, size);
    if (part.reader.shift == 0) load_vectors<T, Shape, true>(part, begin, ahead);
    write(part, row_gradient<T>(p, row, at));
  } else {  // in this order, or the registers do not suffice
    const RowGradient<T> g = row_gradient<T>(p, row, at);
    write(BlockPart<T>(p, at, begin, size), g);
  }
}

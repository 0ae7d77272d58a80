// Reading 16 bytes' worth of one row's logits, starting at a given column, from global memory.
//
// Which columns a thread gets depends on the column index alone, so that a row's bits do not depend on
// its address. A row of odd length starts anywhere: its columns [c, c + kVec) then straddle two aligned
// 16-byte granules, and the reader loads both (the neighbouring thread's granule comes from L1) and
// shifts. No byte outside the row is read.
#pragma once
#include "numeric.cuh"

template <class T>
struct RowReader {
  const typename T::Bits* row;
  u32 vocab_size;
  u32 shift;  // bytes by which (row + c) lies behind a 16-byte boundary, for every c this reader is asked for

  __device__ __forceinline__ RowReader(const void* row_start, u32 vocab_size)
      : row(static_cast<const typename T::Bits*>(row_start)), vocab_size(vocab_size) {
    start_at(0);
  }

  // From then on it is asked for columns first_column + n * kVec.
  __device__ __forceinline__ void start_at(u32 first_column) {
    shift = static_cast<u32>(reinterpret_cast<u64>(row + first_column)) & 15u;
  }

  template <bool kAligned>
  __device__ __forceinline__ Vec16 load(u32 c) const {
    if constexpr (kAligned) {
      return *reinterpret_cast<const Vec16*>(row + c);
    } else {
      Vec16 v[1];
      load<false>(v, c, 0);
      return v[0];
    }
  }

  // The same for vectors c, c + step, ...
  template <bool kAligned, int kCount>
  __device__ __forceinline__ void load(Vec16 (&v)[kCount], u32 c, u32 step) const {
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) v[j] = load<true>(c + j * step);
    } else {
      Vec16 pairs[kCount][2];  // all on their way before the first is used
#pragma unroll
      for (int j = 0; j < kCount; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[j][i] = reinterpret_cast<const Vec16*>(granule(c + j * step))[i];
      realign(v, [&](int j, Vec16 (&pair)[2]) {
        pair[0] = pairs[j][0];
        pair[1] = pairs[j][1];
      });
    }
  }

  // As load, for a vector that may lie at an end of the row: columns behind the last one read as -inf.
  template <bool kAligned>
  __device__ __forceinline__ Vec16 load_guarded(u32 c) const {
    return is_inside<kAligned>(c) ? load<kAligned>(c) : load_elements(c);
  }

  // The same for vectors c, c + step, ..., kVec * 2 <= step.
  template <bool kAligned, int kCount>
  __device__ __forceinline__ void load_guarded(Vec16 (&v)[kCount], u32 c, u32 step) const {
    const Vec16 at_end = load_end<kAligned, kCount>(c, step);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (is_inside<kAligned>(c + j * step)) v[j] = load<kAligned>(c + j * step);
    put_ends<kAligned>(at_end, v, c, step);
  }

  // The one of the vectors that lies at the end of the row, if there is one. Besides column 0, a thread has at most one
  // that load does not do for, so the long code for one stands here twice and not kCount times.
  template <bool kAligned, int kCount>
  __device__ __forceinline__ Vec16 load_end(u32 c, u32 step) const {
    u32 end = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      if (is_end<kAligned>(c + j * step)) end = c + j * step;
    return end != 0 ? load_elements(end) : nothing();
  }

  // Puts it, what lies at the start of the row, and -inf for what lies behind the row in the place of the vectors that
  // load does not do for.
  template <bool kAligned, int kCount>
  __device__ __forceinline__ void put_ends(const Vec16& at_end, Vec16 (&v)[kCount], u32 c, u32 step) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const u32 at = c + j * step;
      if (!is_inside<kAligned>(at)) v[j] = at >= vocab_size ? nothing() : at_end;
    }
    if (c == 0 && !is_inside<kAligned>(0)) v[0] = load_elements(0);
  }

  // The elements one by one: any address, columns behind the last one read as -inf.
  __device__ __forceinline__ Vec16 load_elements(u32 c) const {
    typename T::Bits bits[T::kVec];
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) bits[i] = c + i < vocab_size ? row[c + i] : T::kNegInf;
    return gather(bits);
  }

  static __device__ __forceinline__ Vec16 nothing() {
    typename T::Bits bits[T::kVec];
#pragma unroll
    for (int i = 0; i < T::kVec; ++i) bits[i] = T::kNegInf;
    return gather(bits);
  }

  // The aligned 16 bytes that the vector at c begins in.
  __device__ __forceinline__ const char* granule(u32 c) const {
    return reinterpret_cast<const char*>(row + c) - shift;
  }

  // How many of them, from column 0's on, end inside the row.
  __device__ __forceinline__ u32 granules() const {
    return (vocab_size + shift / static_cast<u32>(sizeof(typename T::Bits))) / T::kVec;
  }

  // Whether load does for every vector of a tile. A shifted reader also touches a vector's neighbours, so the row's
  // first tile does not have it.
  template <bool kAligned>
  __device__ __forceinline__ bool has_tile(u32 c, u32 columns) const {
    return kAligned ? c + columns <= vocab_size : c > 0 && c + columns + T::kVec <= vocab_size;
  }

  // Bytes [shift, shift + 16) of the two granules that load(j, pair) gives for each vector. The shift is the same for
  // the whole row, so one branch picks the words and only the bytes inside a word are shifted at run time.
  template <int kCount, class Load>
  __device__ __forceinline__ void realign(Vec16 (&v)[kCount], Load load) const {
    switch (shift / 4) {
      case 0: return take<0>(v, load);
      case 1: return take<1>(v, load);
      case 2: return take<2>(v, load);
      default: return take<3>(v, load);
    }
  }

 private:
  // Whether load touches nothing outside the row.
  template <bool kAligned>
  __device__ __forceinline__ bool is_inside(u32 c) const {
    return kAligned ? c + T::kVec <= vocab_size : c >= T::kVec && c + 2 * T::kVec <= vocab_size;
  }

  template <bool kAligned>
  __device__ __forceinline__ bool is_end(u32 c) const {
    return c != 0 && c < vocab_size && !is_inside<kAligned>(c);
  }

  template <int kWord, int kCount, class Load>
  __device__ __forceinline__ void take(Vec16 (&v)[kCount], Load load) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Vec16 pair[2];
      load(j, pair);
      const auto word = [&](int i) { return pair[i / 4].w[i % 4]; };
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[j].w[i] = sizeof(typename T::Bits) < 4
                        ? __funnelshift_r(word(i + kWord), word(i + kWord + 1), (shift & 3u) * 8u)
                        : word(i + kWord);
    }
  }

  static __device__ __forceinline__ Vec16 gather(const typename T::Bits* bits) {
    constexpr int kPerWord = sizeof(typename T::Bits) < 4 ? 2 : 1;
    Vec16 v;
    if constexpr (sizeof(typename T::Bits) == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v.w[2 * i] = static_cast<u32>(bits[i]);
        v.w[2 * i + 1] = static_cast<u32>(bits[i] >> 32);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v.w[i] = bits[i * kPerWord];
        if constexpr (kPerWord == 2) v.w[i] |= static_cast<u32>(bits[2 * i + 1]) << 16;
      }
    }
    return v;
  }
};

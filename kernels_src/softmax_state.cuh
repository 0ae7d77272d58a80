// The running state of a softmax over part of a row (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018, arXiv:1805.02867), with one more sum for the entropy.
//
// With k = scale(1 / T) and exponents in base b (2 for float32, e for float64), over the columns so far:
//   m = max_j x_j             the raw maximum
//   s = sum_j b^((x_j - m) k)
//   u = sum_j b^((x_j - m) k) (x_j - m) k
//   logsumexp = m / T + log_sum,  log_sum = log_b s * ln b,  entropy = (log_b s - u / s) ln b
// x_j - m comes first, so that a large shift of all logits cancels and the largest term is exactly 1.
// NaN never wins the maximum but always reaches s, and +inf gives inf - inf: both make log_sum NaN.
#pragma once
#include "numeric.cuh"

constexpr int kWarp = 32;

template <class Acc>
struct SoftmaxState {
  Acc m, s, u;

  static __device__ __forceinline__ SoftmaxState empty() {
    return {-Math<Acc>::infinity(), Acc(0), Acc(0)};
  }

  // The point that differences are taken from, for a maximum. While only -inf has been seen it is 0, so
  // that b^(-inf - 0) = 0 counts nothing instead of b^(-inf + inf) = NaN.
  static __device__ __forceinline__ Acc reference(Acc m) { return m == -Math<Acc>::infinity() ? Acc(0) : m; }

  // Bounds an exponent so that 0 times it is 0 and not NaN where the logit is -inf.
  static __device__ __forceinline__ Acc bounded(Acc t) { return Math<Acc>::max(t, Acc(-1e30)); }

  // Takes s and u to another reference; m itself is the caller's. From m = -inf the factor is 0.
  template <bool kEntropy>
  __device__ __forceinline__ void rescale(Acc ref, Acc scale) {
    const Acc t = (m - ref) * scale;
    const Acc factor = Math<Acc>::exp_base(t);
    if constexpr (kEntropy) u = factor * Math<Acc>::fma(s, bounded(t), u);
    s = s * factor;
  }

  // Adds vectors of logits of element type T. Those from the count-th on hold nothing but -inf, which adds
  // nothing: leaving them out saves time and changes no bit.
  template <class T, bool kEntropy, int kCount>
  __device__ __forceinline__ void add(const Vec16 (&v)[kCount], Acc scale, int count = kCount) {
    const Acc top = Math<Acc>::max(m, T::top(v));
    const Acc ref = reference(top);
    rescale<kEntropy>(ref, scale);
    add_from<T, kEntropy>(v, ref, scale, count);
    m = top;
  }

  // Adds vectors to sums that are relative to ref already. Four partial sums keep the adds independent.
  template <class T, bool kEntropy, int kCount>
  __device__ __forceinline__ void add_from(const Vec16 (&v)[kCount], Acc ref, Acc scale, int count = kCount) {
    constexpr int kWays = 4;
    Acc es[kWays] = {}, eu[kWays] = {};
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j >= count) break;
      Acc x[T::kVec];
      T::unpack(v[j], x);
#pragma unroll
      for (int i = 0; i < T::kVec; ++i) {
        const int w = (j * T::kVec + i) % kWays;
        const Acc t = (x[i] - ref) * scale;
        const Acc e = Math<Acc>::exp_base(t);
        es[w] += e;
        if constexpr (kEntropy) eu[w] = Math<Acc>::fma(e, bounded(t), eu[w]);
      }
    }
    s += (es[0] + es[1]) + (es[2] + es[3]);
    if constexpr (kEntropy) u += (eu[0] + eu[1]) + (eu[2] + eu[3]);
  }

  template <bool kEntropy>
  __device__ __forceinline__ void merge(SoftmaxState other, Acc scale) {
    const Acc top = Math<Acc>::max(m, other.m);
    const Acc ref = reference(top);
    rescale<kEntropy>(ref, scale);
    other.template rescale<kEntropy>(ref, scale);
    s += other.s;
    if constexpr (kEntropy) u += other.u;
    m = top;
  }

  // The state of all lanes, on every lane: the maximum first, so that each lane rescales once. With fewer than 32 the
  // state of kLanes of them, which all others repeat; the bits are those of 32 lanes of which the others hold nothing.
  template <bool kEntropy, int kLanes = kWarp>
  __device__ __forceinline__ void reduce_warp(Acc scale) {
    const Acc top = warp_max(m);
    rescale<kEntropy>(reference(top), scale);
    m = top;
    s = warp_sum<kLanes>(s);
    if constexpr (kEntropy) u = warp_sum<kLanes>(u);
  }

  __device__ __forceinline__ Acc log_sum() const { return Math<Acc>::log_base(s) * Math<Acc>::log_unit(); }
  __device__ __forceinline__ Acc entropy() const {
    return (Math<Acc>::log_base(s) - u / s) * Math<Acc>::log_unit();
  }

  static __device__ __forceinline__ Acc warp_max(Acc x) {
    if constexpr (sizeof(Acc) == 4) {
      return reduce_max(x);
    } else {
#pragma unroll
      for (int d = kWarp / 2; d > 0; d /= 2) x = Math<Acc>::max(x, __shfl_xor_sync(~0u, x, d));
      return x;
    }
  }

  template <int kLanes = kWarp>
  static __device__ __forceinline__ Acc warp_sum(Acc x) {
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
  }
};

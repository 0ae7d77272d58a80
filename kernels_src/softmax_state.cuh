// The running state of a softmax over part of a row (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018, arXiv:1805.02867), with one more sum for the entropy.
//
// With k = scale(1 / T), exponents in base b (2 for float32, e for float64), over the columns seen so far:
//   m = max_j x_j             the raw maximum
//   c = round(m * k)          the point that exponents are taken from; a function of m, so not stored
//   s = sum_j b^(x_j k - c)
//   u = sum_j b^(x_j k - c) (x_j k - c)
// x_j k - c is one fused multiply-add: exact but for its last rounding, however large m is. That c is
// not quite m * k scales all terms alike and is made good once a row:
//   logsumexp = m / T + log_sum,  log_sum = (log_b s - (m k - c)) ln b,  entropy = (log_b s - u / s) ln b
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

  // c for a maximum. While only -inf has been seen it is 0, so that b^(-inf - 0) = 0 counts nothing
  // instead of b^(-inf + inf) = NaN.
  static __device__ __forceinline__ Acc center(Acc m, Acc scale) {
    return m == -Math<Acc>::infinity() ? Acc(0) : m * scale;
  }

  // Bounds an exponent so that 0 times it is 0 and not NaN where the logit is -inf.
  static __device__ __forceinline__ Acc bounded(Acc t) { return Math<Acc>::max(t, Acc(-1e30)); }

  // Takes s and u to another center; m itself is the caller's. From m = -inf the factor is 0.
  template <bool kEntropy>
  __device__ __forceinline__ void recenter(Acc c, Acc scale) {
    const Acc t = m * scale - c;
    const Acc factor = Math<Acc>::exp_base(t);
    if constexpr (kEntropy) u = factor * Math<Acc>::fma(s, bounded(t), u);
    s = s * factor;
  }

  // Adds vectors of logits of element type T.
  template <class T, bool kEntropy, int kCount>
  __device__ __forceinline__ void add(const Vec16 (&v)[kCount], Acc scale) {
    const Acc top = Math<Acc>::max(m, T::top(v));
    const Acc c = center(top, scale);
    recenter<kEntropy>(c, scale);
    add_centered<T, kEntropy>(v, c, scale);
    m = top;
  }

  // Adds vectors to sums that are relative to c already. Four partial sums keep the adds independent.
  template <class T, bool kEntropy, int kCount>
  __device__ __forceinline__ void add_centered(const Vec16 (&v)[kCount], Acc c, Acc scale) {
    constexpr int kWays = 4;
    Acc es[kWays] = {}, eu[kWays] = {};
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      Acc x[T::kVec];
      T::unpack(v[j], x);
#pragma unroll
      for (int i = 0; i < T::kVec; ++i) {
        const int w = (j * T::kVec + i) % kWays;
        const Acc t = Math<Acc>::fma(x[i], scale, -c);
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
    const Acc c = center(top, scale);
    recenter<kEntropy>(c, scale);
    other.template recenter<kEntropy>(c, scale);
    s += other.s;
    if constexpr (kEntropy) u += other.u;
    m = top;
  }

  // The state of all 32 lanes, on every lane: the maximum first, so that each lane is recentered once.
  template <bool kEntropy>
  __device__ __forceinline__ void reduce_warp(Acc scale) {
    const Acc top = warp_max(m);
    recenter<kEntropy>(center(top, scale), scale);
    m = top;
    s = warp_sum(s);
    if constexpr (kEntropy) u = warp_sum(u);
  }

  // Natural log of sum_j exp((x_j - m) / T). The largest term alone is 1, so it is never below 0.
  __device__ __forceinline__ Acc log_sum(Acc scale) const {
    const Acc missing = Math<Acc>::fma(m, scale, -center(m, scale));
    const Acc value = (Math<Acc>::log_base(s) - missing) * Math<Acc>::log_unit();
    return value < Acc(0) ? Acc(0) : value;  // NaN stays
  }

  __device__ __forceinline__ Acc entropy() const {
    return (Math<Acc>::log_base(s) - u / s) * Math<Acc>::log_unit();
  }

  static __device__ __forceinline__ Acc warp_max(Acc x) {
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) x = Math<Acc>::max(x, __shfl_xor_sync(~0u, x, d));
    return x;
  }

  static __device__ __forceinline__ Acc warp_sum(Acc x) {
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
  }
};

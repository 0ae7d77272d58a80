// Element types: how 16 bytes of logits become numbers and back, and the arithmetic they are used in
// (float32; float64 for float64 logits).
#pragma once
#include "ptx.cuh"

struct alignas(16) Vec16 {
  u32 w[4];
};

template <class Acc>
struct Math;

template <>
struct Math<float> {
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
  static __device__ __forceinline__ float nan() { return __int_as_float(0x7fc00000); }
  // Exponents are kept in base 2, the hardware's own: exp(d / T) = exp_base(d * scale(1 / T)), and a
  // logarithm of that base times log_unit() is a natural one.
  static __device__ __forceinline__ float scale(float inv_t) { return inv_t * 1.4426950408889634f; }
  static __device__ __forceinline__ float exp_base(float x) { return ex2_approx(x); }
  static __device__ __forceinline__ float log_base(float x) { return log2f(x); }
  static __device__ __forceinline__ float log_unit() { return 0.6931471805599453f; }
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float fma(float a, float b, float c) { return fmaf(a, b, c); }
};

template <>
struct Math<double> {
  static __device__ __forceinline__ double infinity() {
    return __longlong_as_double(0x7ff0000000000000ll);
  }
  static __device__ __forceinline__ double nan() {
    return __longlong_as_double(0x7ff8000000000000ll);
  }
  static __device__ __forceinline__ double scale(double inv_t) { return inv_t; }
  static __device__ __forceinline__ double exp_base(double x) { return ::exp(x); }
  static __device__ __forceinline__ double log_base(double x) { return ::log(x); }
  static __device__ __forceinline__ double log_unit() { return 1.0; }
  static __device__ __forceinline__ double max(double a, double b) { return fmax(a, b); }
  static __device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
};

struct BF16 {
  using Acc = float;
  using Bits = unsigned short;
  static constexpr int kVec = 8;
  static constexpr Bits kNegInf = 0xff80;
  static __device__ __forceinline__ float to_acc(Bits b) {
    return __uint_as_float(static_cast<u32>(b) << 16);
  }
  static __device__ __forceinline__ Bits from_acc(float x) { return pack_bf16x2(x, 0.f) & 0xffff; }
  static __device__ __forceinline__ void unpack(const Vec16& v, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(v.w[i] << 16);
      x[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
    }
  }
  // The largest element; half the instructions of unpacking first.
  template <int kCount>
  static __device__ __forceinline__ float top(const Vec16 (&v)[kCount]) {
    u32 top = v[0].w[0];
#pragma unroll
    for (int i = 1; i < 4 * kCount; ++i) top = max_bf16x2(top, v[i / 4].w[i % 4]);
    return fmaxf(__uint_as_float(top << 16), __uint_as_float(top & 0xffff0000u));
  }
  static __device__ __forceinline__ Vec16 pack(const float* x) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = pack_bf16x2(x[2 * i], x[2 * i + 1]);
    return v;
  }
};

struct F16 {
  using Acc = float;
  using Bits = unsigned short;
  static constexpr int kVec = 8;
  static constexpr Bits kNegInf = 0xfc00;
  static __device__ __forceinline__ float to_acc(Bits b) { return half_bits_to_float(b); }
  static __device__ __forceinline__ Bits from_acc(float x) { return pack_f16x2(x, 0.f) & 0xffff; }
  static __device__ __forceinline__ void unpack(const Vec16& v, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = half_bits_to_float(v.w[i]);
      x[2 * i + 1] = half_bits_to_float(v.w[i] >> 16);
    }
  }
  // The largest element; half the instructions of unpacking first.
  template <int kCount>
  static __device__ __forceinline__ float top(const Vec16 (&v)[kCount]) {
    u32 top = v[0].w[0];
#pragma unroll
    for (int i = 1; i < 4 * kCount; ++i) top = max_f16x2(top, v[i / 4].w[i % 4]);
    return fmaxf(half_bits_to_float(top), half_bits_to_float(top >> 16));
  }
  static __device__ __forceinline__ Vec16 pack(const float* x) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = pack_f16x2(x[2 * i], x[2 * i + 1]);
    return v;
  }
};

struct F32 {
  using Acc = float;
  using Bits = u32;
  static constexpr int kVec = 4;
  static constexpr Bits kNegInf = 0xff800000u;
  static __device__ __forceinline__ float to_acc(Bits b) { return __uint_as_float(b); }
  static __device__ __forceinline__ Bits from_acc(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ void unpack(const Vec16& v, float* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(v.w[i]);
  }
  template <int kCount>
  static __device__ __forceinline__ float top(const Vec16 (&v)[kCount]) {
    float x[kVec], top = -Math<float>::infinity();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      unpack(v[j], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) top = Math<float>::max(top, x[i]);
    }
    return top;
  }
  static __device__ __forceinline__ Vec16 pack(const float* x) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = __float_as_uint(x[i]);
    return v;
  }
};

struct F64 {
  using Acc = double;
  using Bits = u64;
  static constexpr int kVec = 2;
  static constexpr Bits kNegInf = 0xfff0000000000000ull;
  static __device__ __forceinline__ double to_acc(Bits b) {
    return __longlong_as_double(static_cast<i64>(b));
  }
  static __device__ __forceinline__ Bits from_acc(double x) {
    return static_cast<Bits>(__double_as_longlong(x));
  }
  static __device__ __forceinline__ void unpack(const Vec16& v, double* x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = __hiloint2double(v.w[2 * i + 1], v.w[2 * i]);
  }
  template <int kCount>
  static __device__ __forceinline__ double top(const Vec16 (&v)[kCount]) {
    double x[kVec], top = -Math<double>::infinity();
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      unpack(v[j], x);
#pragma unroll
      for (int i = 0; i < kVec; ++i) top = Math<double>::max(top, x[i]);
    }
    return top;
  }
  static __device__ __forceinline__ Vec16 pack(const double* x) {
    Vec16 v;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v.w[2 * i] = __double2loint(x[i]);
      v.w[2 * i + 1] = __double2hiint(x[i]);
    }
    return v;
  }
};

// Single values of tensors whose dtype is known at run time only.
template <class Acc>
__device__ __forceinline__ Acc load_as(const void* data, i64 index, i32 dtype) {
  switch (dtype) {
    case kBFloat16: return BF16::to_acc(static_cast<const BF16::Bits*>(data)[index]);
    case kFloat16: return F16::to_acc(static_cast<const F16::Bits*>(data)[index]);
    case kFloat32: return static_cast<const float*>(data)[index];
    default: return static_cast<Acc>(static_cast<const double*>(data)[index]);
  }
}

template <class Acc>
__device__ __forceinline__ void store_as(void* data, i64 index, i32 dtype, Acc value) {
  switch (dtype) {
    case kBFloat16: static_cast<BF16::Bits*>(data)[index] = BF16::from_acc(static_cast<float>(value)); break;
    case kFloat16: static_cast<F16::Bits*>(data)[index] = F16::from_acc(static_cast<float>(value)); break;
    case kFloat32: static_cast<float*>(data)[index] = static_cast<float>(value); break;
    default: static_cast<double*>(data)[index] = value; break;
  }
}

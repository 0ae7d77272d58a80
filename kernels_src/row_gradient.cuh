// What the gradient at a row's logits is made of, besides the logits: weights and statistics, looked up once a block.
#pragma once
#include "row.cuh"

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
  // All asked for before it is known what is needed, and before anything waits: one latency instead of several.
  const LoadedId first(p, at, 0);
  const Acc row_max = static_cast<const Acc*>(p.row_max)[not_uniform(row)];
  const Acc log_sum = static_cast<const Acc*>(p.log_sum)[not_uniform(row)];
  const Acc first_upstream = grad_logp<Acc>(p, at, 0);
  g.inv_t = inverse_temperature<Acc>(p, at);
  Acc sum = 0, entropy_sum = 0;
  bool active = false;
  const auto add = [&](i64 id, Acc upstream) {
    if (is_ignored(p, id)) return;
    active = true;
    if (is_in_vocabulary(p, id)) sum += upstream;
    else if (p.invalid_is_nan) sum = Math<Acc>::nan();
  };
  g.first_id = first.local(p);
  add(g.first_id, first_upstream);
#pragma unroll 1
  for (u32 k = 1; k < p.num_ids; ++k) add(token_id(p, at, k), grad_logp<Acc>(p, at, k));
  if (active && p.grad_entropy != nullptr)
    entropy_sum = load_as<Acc>(p.grad_entropy, at.offset(p.grad_entropy_rows), p.grad_entropy_dtype);
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

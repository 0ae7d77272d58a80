// Usual calls: one id of 64 bits a row, float32 log-probabilities or their gradient, no row mask, one temperature, no
// entropy, no shard, leading dimensions that fold into one. `_launch._prepare` tells which calls are.
//
// A kernel for few rows is compiled a second time for these alone: with few rows every latency shows, and what is known
// beforehand is then neither looked up nor branched on.
#pragma once
#include "params.cuh"

__device__ __forceinline__ LogpParams usual(const LogpParams& p) {
  LogpParams known = p;
  known.num_ids = 1;
  known.inner_rows = ~0u;  // no row is beyond it
  known.row_mask = nullptr;
  known.temperature = nullptr;
  known.entropy = nullptr;
  known.grad_entropy = nullptr;
  known.is_shard = 0;
  known.token_id_bytes = 8;
  known.logp_dtype = kFloat32;
  known.grad_logp_dtype = kFloat32;
  return known;
}

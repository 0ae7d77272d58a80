// The plain-data structs that kernels take by value. fused_logp_hub/_params.py packs the same bytes;
// tests/test_params.py compares the two field by field.
#pragma once

using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u8 = unsigned char;

// Row r lies at (r / inner_rows) * outer + (r % inner_rows) * inner, in elements: enough for [B, T] leading
// dimensions in any order, sliced or expanded.
struct RowStrides {
  i64 outer;
  i64 inner;
};

struct LogpParams {
  // First the addresses: the rest stays the same from call to call.
  const void* logits;  // the vocabulary's stride is 1
  const void* token_ids;
  const void* temperature;  // float32, one per row; nullptr: inv_temperature holds for all
  const u8* row_mask;       // [num_rows], 0: leave the row out; nullptr: all rows
  void* logp;               // [num_rows, num_ids], contiguous; the only output that a forward needs
  void* row_max;            // [num_rows], float32 (float64 for float64 logits); written by the forward
  void* log_sum;            //   where not nullptr, read by the backward
  void* entropy;
  // These three are the backward's.
  const void* grad_logp;
  const void* grad_entropy;  // nullptr: no gradient comes through the entropy
  void* grad_logits;         // may be the logits themselves

  RowStrides logits_rows;
  RowStrides token_ids_rows;
  RowStrides temperature_rows;
  RowStrides grad_logp_rows;
  RowStrides grad_entropy_rows;
  RowStrides grad_logits_rows;
  i64 token_ids_last;  // stride between the ids of one row
  i64 grad_logp_last;
  i64 num_rows;
  i64 inner_rows;
  i64 vocab_size;         // of these logits; below 2^31, so columns fit in 32 bits; offsets of rows do not
  i64 vocab_start;        // the first column's id; these two are 0 and vocab_size unless the logits are a shard
  i64 global_vocab_size;  // of all shards: an id in [0, global_vocab_size) is some shard's column
  i64 num_ids;            // at most kMaxIds
  i64 ignore_index;       // less vocab_start
  double inv_temperature;
  i32 use_ignore_index;
  i32 invalid_is_nan;  // what an id outside [0, global_vocab_size) gives: NaN, or 0
  i32 token_id_bytes;  // 4 or 8
  i32 row_max_is_raw;  // row_max is of the logits, not of logits / T: what loses no precision
  i32 is_shard;        // the forward leaves what a merge of shards needs; see write_row
  i32 logp_dtype;      // a DType, as the next two
  i32 grad_logp_dtype;
  i32 grad_entropy_dtype;
  i32 tiles_per_block;  // consecutive tiles of one row that a block of the backward takes
  i32 unused;
};

struct RowMaskParams {
  const void* row_indices;
  i64 stride;
  i64 count;
  u8* row_mask;
  i64 num_rows;
  i32 index_bytes;  // 4 or 8
  i32 unused;
};

// Codes for the tensors whose dtype is a field and not an instantiation.
enum DType : i32 { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

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

// n / value for n below 2^31, without a division: (n + high word of n * multiplier) >> shift.
struct Divisor {
  u32 value;
  u32 multiplier;
  u32 shift;
};

// A kernel's first look at each 64 bytes of its parameters waits for them to come from memory, so what is read before
// the first logit stands together, in the order of use, and nothing is wider than it must be.
struct LogpParams {
  // First the addresses: the rest stays the same from call to call.
  const void* token_ids;
  const u8* row_mask;       // [num_rows], 0: leave the row out; nullptr: all rows
  const void* logits;       // the vocabulary's stride is 1
  const void* temperature;  // float32, one per row; nullptr: inv_temperature holds for all
  void* row_max;            // [num_rows], float32 (float64 for float64 logits); written by the forward
  void* log_sum;            //   where not nullptr, read by the backward
  void* entropy;
  void* logp;  // [num_rows, num_ids], contiguous; the only output that a forward needs
  // These three are the backward's.
  const void* grad_logp;
  const void* grad_entropy;  // nullptr: no gradient comes through the entropy
  void* grad_logits;         // may be the logits themselves

  u32 num_rows;  // below 2^31, as the next two
  u32 inner_rows;
  u32 vocab_size;  // of these logits, so columns fit in 32 bits; offsets of rows do not
  u32 num_ids;     // at most kMaxIds
  u8 use_ignore_index;
  u8 token_id_bytes;  // 4 or 8
  u8 invalid_is_nan;  // what an id outside [0, global_vocab_size) gives: NaN, or 0
  u8 row_max_is_raw;  // row_max is of the logits, not of logits / T: what loses no precision
  u8 is_shard;        // the forward leaves what a merge of shards needs; see Target::logp
  u8 logp_dtype;      // a DType, as the next two
  u8 grad_logp_dtype;
  u8 grad_entropy_dtype;
  RowStrides token_ids_rows;
  RowStrides logits_rows;
  i64 token_ids_last;  // stride between the ids of one row
  i64 ignore_index;    // less vocab_start
  i64 vocab_start;     // the first column's id; 0 unless the logits are a shard
  double inv_temperature;
  u32 tiles_per_block;  // consecutive tiles of one row that a block of the backward takes
  Divisor blocks_per_row;
  RowStrides grad_logits_rows;
  RowStrides grad_logp_rows;
  i64 grad_logp_last;
  i64 global_vocab_size;  // of all shards: an id in [0, global_vocab_size) is some shard's column
  RowStrides temperature_rows;
  RowStrides grad_entropy_rows;
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

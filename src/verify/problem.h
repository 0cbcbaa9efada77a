// Random problems over paged caches whose every unused byte is poisoned, and the runner that puts any implementation
// through them. Used by the tests of the operations and by `gannet verify`.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "gannet/gannet.h"

namespace gannet {
inline namespace v0 {
namespace verify {

/// A small generator whose values depend on the seed alone, on every machine (splitmix64).
class Rng {
 public:
  explicit Rng(uint64_t seed) noexcept : state_(seed) {}
  /// A generator for the item with these coordinates, so that contents do not depend on placement.
  static Rng of(uint64_t seed, uint64_t a, uint64_t b) noexcept;
  uint64_t next() noexcept;
  int64_t below(int64_t n) noexcept { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double uniform() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() noexcept;

 private:
  uint64_t state_;
};

/// What unused bytes hold.
enum class Poison : uint8_t {
  kNan,   ///< 0xFF bytes: NaN in fp32, bf16 and e4m3
  kInf,   ///< fp32 or bf16 infinities
  kHuge,  ///< 1e30
  kZero,
};

/// Memory of `size` bytes, 64-byte aligned, between guard zones of NaN.
class Buffer {
 public:
  explicit Buffer(size_t size, Poison poison = Poison::kNan, DType poisoned_as = DType::kF32);
  std::byte* data() noexcept { return memory_.get() + kGuard; }
  const std::byte* data() const noexcept { return memory_.get() + kGuard; }
  size_t size() const noexcept { return size_; }
  bool guards_intact() const noexcept;

 private:
  static constexpr size_t kGuard = 256;
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };
  size_t size_;
  std::unique_ptr<std::byte[], Free> memory_;
};

/// A tensor and its memory. Strides carry `padding` elements after each row of the last dimension; padding is NaN.
struct Tensor {
  std::shared_ptr<Buffer> buffer;
  TensorView view;
};
Tensor make_tensor(DType dtype, std::initializer_list<int64_t> shape, int64_t padding = 0);
/// Standard normal values times `deviation`.
void fill_normal(const Tensor& t, Rng rng, double deviation = 1.0);
Tensor make_ints(const std::vector<int32_t>& values);
void set(const TensorView& v, float x, int64_t i0, int64_t i1 = 0, int64_t i2 = 0);
float get(const TensorView& v, int64_t i0, int64_t i1 = 0, int64_t i2 = 0);

/// The requests of a call, the pages they own, and how tables spell them.
struct PagedSpec {
  std::vector<int32_t> seq_lens;
  int32_t q_len = 1;
  std::vector<int32_t> ragged = {};  ///< rows of each request; empty: q_len of each
  RowBound bound = RowBound::kCausalFull;
  PageTableForm form = PageTableForm::kPadded;
  bool row_indices = false;
  int32_t page_size = 64;
  uint64_t page_seed = 1;     ///< order of the pages
  int32_t spare_columns = 2;  ///< cells of the table beyond what rows see: garbage
};

struct Paged {
  PagedSpec spec;
  int64_t num_pages = 0;
  int64_t num_rows = 0;
  std::vector<std::vector<int32_t>> pages_of;  ///< of each request, those that its rows see
  std::vector<int64_t> keys_of;                ///< positions that a request's rows see between them
  std::vector<int64_t> request_of_row;
  std::vector<int64_t> keys_of_row;
  Tensor pages, row_indices, indptr, indices, seq_lens, cu_q_lens;

  explicit Paged(PagedSpec s);
  PageTableView table() const;
  QueryRows rows() const;
  int64_t slot(int64_t request, int64_t position) const;
  int64_t max_keys() const;
  /// Row `row` as a call of its own: one request, one query row.
  Paged alone(int64_t row) const;
};

struct LatentPool {
  std::shared_ptr<Buffer> buffer;
  LatentCacheView view;
};
/// A pool with the keys of every request of `paged`, the same (request, position) always the same row; every other byte
/// poisoned: other slots, other pages (page 0 too), the gaps between pages and between rows.
LatentPool make_latent_pool(const Paged& paged, LatentFormat format, uint64_t seed, Poison poison = Poison::kNan,
                            int64_t page_gap_bytes = 0, RowGeometry geometry = {}, float scale = 0.03125f,
                            int64_t row_gap_bytes = 0);

struct IndexPool {
  std::shared_ptr<Buffer> buffer;
  IndexCacheView view;
};
/// `integers`: keys of whole numbers in [-3, 3], so that all sums are exact and ties abound.
IndexPool make_index_pool(const Paged& paged, IndexKFormat format, ScaleFormat scale_format, int32_t head_dim,
                          uint64_t seed, Poison poison = Poison::kNan, int64_t page_gap_bytes = 0,
                          bool integers = false);

// ---- running ------------------------------------------------------------------------------------------------------

/// What a run wrote: each output tensor packed, in the order of for_each_view, then the cache where it was written.
struct Outputs {
  std::vector<std::string> names;
  std::vector<std::vector<std::byte>> bytes;
  std::vector<DType> dtypes;
  std::string fault;  ///< guard bytes, gaps between rows or inputs that changed; empty: none
  std::string impl;   ///< in a comparison of implementations: whose they are

  const std::vector<std::byte>& of(const std::string& name) const;
  std::vector<float> floats(const std::string& name) const;
  std::vector<int32_t> ints(const std::string& name) const;
  friend bool operator==(const Outputs& a, const Outputs& b) { return a.bytes == b.bytes; }
};

struct RunOptions {
  std::string impl = {};
  int num_workers = 1;
  bool fp32_outputs = false;     ///< out tensors become fp32: the oracle's results without a last rounding
  Executor* executor = nullptr;  ///< CPU only; else a pool of num_workers
  Poison poison = Poison::kNan;  ///< what the outputs and the workspace hold before
  bool poison_workspace = true;  ///< on a GPU: with 0xFF; else it is left as it was allocated
};

/// Runs `params` into fresh, poisoned outputs (copies of what in/out arguments hold) with a poisoned workspace. The
/// caller's outputs and caches are not touched. Throws what the plan throws.
template <class Params>
Outputs run(const Params& params, const RunOptions& options);

extern template Outputs run(const LatentWrite&, const RunOptions&);
extern template Outputs run(const LatentGather&, const RunOptions&);
extern template Outputs run(const IndexKWrite&, const RunOptions&);
extern template Outputs run(const IndexKGather&, const RunOptions&);
extern template Outputs run(const Rope&, const RunOptions&);
extern template Outputs run(const RaggedPrefill&, const RunOptions&);
extern template Outputs run(const MergeState&, const RunOptions&);
extern template Outputs run(const MlaDecode&, const RunOptions&);
extern template Outputs run(const IndexLogits&, const RunOptions&);
extern template Outputs run(const TopK&, const RunOptions&);
extern template Outputs run(const IndexSelect&, const RunOptions&);
extern template Outputs run(const SparseAttention&, const RunOptions&);

}  // namespace verify
}  // namespace v0
}  // namespace gannet

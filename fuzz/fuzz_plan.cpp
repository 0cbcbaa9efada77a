// Host arithmetic of a step, of the pools and of the page allocator: any numbers are refused or give results that a
// second, plainer computation agrees with.
#include <algorithm>
#include <limits>
#include <set>
#include <vector>

#include "fuzz.h"
#include "gannet/error.h"
#include "gannet/kv_pool.h"
#include "gannet/step.h"

namespace {

using namespace gannet;
using fuzz::Input;

constexpr int64_t kMin32 = std::numeric_limits<int32_t>::min();
constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax64 = std::numeric_limits<int64_t>::max();

int32_t small_or_extreme(Input& in, int64_t high) { return static_cast<int32_t>(in.around(0, high, kMin32, kMax32)); }

template <class F>
bool accepts(F&& f) {
  try {
    f();
    return true;
  } catch (const Error& e) {
    GANNET_FUZZ_REQUIRE(e.code() == ErrorCode::kInvalidArgument);
    return false;
  }
}

// ---- prefix chunks ----------------------------------------------------------------------------------------------

void check_chunks(const std::vector<int32_t>& prefix_lens, int64_t unit, const PrefixChunkPlan& plan) {
  const size_t n = prefix_lens.size();
  GANNET_FUZZ_REQUIRE(n == 0 || (plan.chunk_len >= unit && plan.chunk_len % unit == 0));
  // Every position of every prefix is in exactly one chunk: the parts of a request follow each other.
  std::vector<int64_t> covered(n, 0);
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const PrefixChunk& c = plan.chunks[i];
    const auto cu = plan.cu_kv_lens(i);
    GANNET_FUZZ_REQUIRE(cu.size() == n + 1 && cu[0] == 0 && cu[n] == c.num_tokens);
    GANNET_FUZZ_REQUIRE(c.num_tokens >= 1 && c.num_tokens <= plan.max_tokens);
    int64_t longest = 0;
    for (size_t r = 0; r < n; ++r) {
      const int64_t len = int64_t{cu[r + 1]} - cu[r];
      const bool member = static_cast<int64_t>(r) >= c.first_request &&
                          static_cast<int64_t>(r) < int64_t{c.first_request} + c.num_requests;
      GANNET_FUZZ_REQUIRE(len >= 0 && len <= plan.chunk_len && (member || len == 0));
      if (len > 0) GANNET_FUZZ_REQUIRE(covered[r] == c.begin);
      covered[r] += len;
      longest = std::max(longest, len);
    }
    GANNET_FUZZ_REQUIRE(longest == c.max_len);
  }
  for (size_t r = 0; r < n; ++r) GANNET_FUZZ_REQUIRE(covered[r] == prefix_lens[r]);
}

void fuzz_prefix_chunks(Input& in) {
  std::vector<int32_t> prefix_lens(static_cast<size_t>(in.between(0, 6)));
  for (int32_t& len : prefix_lens) len = small_or_extreme(in, 5000);
  const int64_t capacity = in.around(1, 4096, kMin64, kMax64);
  const int64_t unit = in.around(1, 128, kMin64, kMax64);
  // A plan may hold 2^24 entries; walking through millions of them for one input finds nothing new.
  int64_t longest = 0;
  for (const int32_t len : prefix_lens) longest = std::max<int64_t>(longest, len);
  if (longest > 100'000 && unit < 10'000 && capacity < 100'000) return;
  PrefixChunkPlan plan;
  if (accepts([&] { plan_prefix_chunks(prefix_lens, capacity, unit, plan); })) check_chunks(prefix_lens, unit, plan);
}

// ---- steps ------------------------------------------------------------------------------------------------------

void check_step(const BatchStep& step, const StepLimits& limits, const StepPlan& plan,
                const std::vector<std::vector<int32_t>>& table) {
  const int64_t requests = step.num_requests();
  const int64_t extends = step.num_extends();
  GANNET_FUZZ_REQUIRE(plan.num_requests() == requests && plan.num_extends() == extends);
  GANNET_FUZZ_REQUIRE(plan.mode() == step_mode(extends, requests));
  int64_t row = 0;
  int64_t longest = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const auto i = static_cast<size_t>(r);
    const bool extend = r < extends;
    const int64_t given = step.seq_lens[i];
    const int64_t count = extend ? step.extend_lens[i] : step.q_len;
    GANNET_FUZZ_REQUIRE(plan.rows_of_request(r).begin == row && plan.rows_of_request(r).size() == count);
    for (int64_t j = 0; j < count; ++j, ++row) {
      const auto t = static_cast<size_t>(row);
      const RowBound bound = extend ? RowBound::kCausalFull : step.decode_bound;
      const int64_t sees = row_bound(bound, given, count, j);
      GANNET_FUZZ_REQUIRE(plan.row_lens()[t] == sees);
      GANNET_FUZZ_REQUIRE(plan.request_of_row(row) == r);
      longest = std::max(longest, sees);
      const int64_t total = bound == RowBound::kCausalFromFirst && given > 0 ? given + count - 1 : given;
      const int64_t position = total - count + j;
      GANNET_FUZZ_REQUIRE(plan.positions()[t] == std::max<int64_t>(position, 0));
      int64_t slot = -1;
      if (position >= 0) {
        const int64_t page = table[i][static_cast<size_t>(position / limits.page_size)];
        slot = page * limits.page_size + position % limits.page_size;
        GANNET_FUZZ_REQUIRE(page >= 0 && (limits.num_pages == 0 || page < limits.num_pages));
      }
      GANNET_FUZZ_REQUIRE(plan.write_slots()[t] == slot);
    }
  }
  GANNET_FUZZ_REQUIRE(row == plan.num_rows() && longest == plan.max_row_len());
  check_chunks({step.prefix_lens.begin(), step.prefix_lens.end()}, limits.page_size, plan.prefix_chunks());
  for (const PrefixChunk& c : plan.prefix_chunks().chunks) {
    std::vector<int32_t> slots(static_cast<size_t>(c.num_tokens), -1);
    plan.fill_chunk_slots(c, slots);
    for (const int32_t s : slots) GANNET_FUZZ_REQUIRE(s >= 0);
  }
}

void fuzz_step(Input& in, StepPlan& plan) {
  constexpr int64_t kMaxRows = 4096;  // of one request: more rows only take more time
  const auto requests = in.between(0, 5);
  const auto extends = in.between(0, 15) == 0 ? in.between(0, 7) : in.between(0, requests);
  StepLimits limits;
  limits.page_size = static_cast<int32_t>(in.around(1, 128, kMin32, kMax32));
  limits.num_pages = in.around(0, 300, kMin64, kMax64);
  limits.max_context_len = in.around(0, kMax32, kMin64, kMax64);
  limits.prefix_chunk_capacity = in.around(1, 2048, kMin64, kMax64);

  BatchStep step;
  step.q_len = static_cast<int32_t>(in.around(1, 8, kMin32, 64));
  step.decode_bound = static_cast<RowBound>(in.between(0, 2));
  std::vector<int32_t> seq_lens, prefix_lens, extend_lens;
  for (int64_t r = 0; r < requests; ++r) seq_lens.push_back(small_or_extreme(in, 600));
  for (int64_t r = 0; r < extends; ++r) {
    // Consistent, mostly: a prefix and the rest of the sequence.
    const int64_t len = r < requests ? seq_lens[static_cast<size_t>(r)] : 0;
    const int64_t extend = in.around(0, std::clamp<int64_t>(len, 0, kMaxRows), kMin32, kMaxRows);
    extend_lens.push_back(static_cast<int32_t>(extend));
    prefix_lens.push_back(in.between(0, 15) == 0 ? small_or_extreme(in, 600)
                                                 : static_cast<int32_t>(std::clamp(len - extend, kMin32, kMax32)));
  }
  if (in.between(0, 31) == 0) prefix_lens.push_back(0);
  step.seq_lens = seq_lens;
  step.prefix_lens = prefix_lens;
  step.extend_lens = extend_lens;

  const auto columns = in.between(0, 12);
  std::vector<int32_t> cells;
  for (int64_t i = 0; i < requests * columns; ++i)
    cells.push_back(in.between(0, 31) == 0 ? small_or_extreme(in, 300) : static_cast<int32_t>(in.between(0, 255)));
  std::vector<int32_t> indptr, row_indices;
  std::vector<std::vector<int32_t>> table(static_cast<size_t>(requests));
  const auto row_of = [&](int64_t r) {
    return std::vector<int32_t>(cells.begin() + r * columns, cells.begin() + (r + 1) * columns);
  };
  const auto form = in.between(0, 2);
  const TensorView pages = view(cells.data(), {requests, columns});
  if (form == 0) {
    step.pages = PageTableView::padded(pages);
    for (int64_t r = 0; r < requests; ++r) table[static_cast<size_t>(r)] = row_of(r);
  } else if (form == 1) {
    for (int64_t r = 0; r < requests; ++r)
      row_indices.push_back(in.between(0, 31) == 0 ? small_or_extreme(in, 8)
                                                   : static_cast<int32_t>(in.between(0, requests - 1)));
    step.pages = PageTableView::padded(pages, view(row_indices.data(), {requests}));
    for (int64_t r = 0; r < requests; ++r) {
      const int32_t source = row_indices[static_cast<size_t>(r)];
      if (source >= 0 && source < requests) table[static_cast<size_t>(r)] = row_of(source);
    }
  } else {
    indptr.push_back(0);
    for (int64_t r = 0; r < requests; ++r)
      indptr.push_back(in.between(0, 31) == 0 ? small_or_extreme(in, 64) : static_cast<int32_t>((r + 1) * columns));
    step.pages = PageTableView::csr(view(indptr.data(), {requests + 1}),
                                    view(cells.data(), {static_cast<int64_t>(cells.size())}));
    for (size_t r = 0; r < table.size(); ++r) {
      const int64_t begin = indptr[r];
      const int64_t end = indptr[r + 1];
      if (begin >= 0 && begin <= end && end <= static_cast<int64_t>(cells.size()))
        table[r].assign(cells.begin() + begin, cells.begin() + end);
    }
  }
  if (accepts([&] { plan.assign(step, limits); })) check_step(step, limits, plan, table);
  else GANNET_FUZZ_REQUIRE(plan.mode() == StepMode::kIdle && plan.num_requests() == 0 && plan.num_rows() == 0);
}

// ---- captured plans and drafts ----------------------------------------------------------------------------------

/// Requests of a decode step over a padded table, mostly well formed.
struct Decode {
  std::vector<int32_t> lens, cells;
  int64_t columns = 0;
  BatchStep step;
};

Decode decode_step(Input& in, int64_t requests, int32_t q_len, RowBound bound, int64_t pages, int32_t page_size) {
  Decode d;
  d.columns = in.between(0, 12);
  const int64_t reach = d.columns * std::clamp<int32_t>(page_size, 1, 1024);
  for (int64_t r = 0; r < requests; ++r) {
    d.lens.push_back(in.between(0, 15) == 0 ? small_or_extreme(in, 600) : static_cast<int32_t>(in.between(0, reach)));
    for (int64_t c = 0; c < d.columns; ++c)
      d.cells.push_back(in.between(0, 63) == 0
                            ? small_or_extreme(in, 300)
                            : static_cast<int32_t>(in.between(0, std::clamp<int64_t>(pages - 1, 0, 255))));
  }
  d.step.seq_lens = d.lens;
  d.step.q_len = q_len;
  d.step.decode_bound = bound;
  d.step.pages = PageTableView::padded(view(d.cells.data(), {requests, d.columns}));
  return d;
}

std::vector<int32_t> copy(std::span<const int32_t> s) { return {s.begin(), s.end()}; }

/// The first rows of a captured plan are those of the eager one, and the rest is padding.
void check_captured(const StepPlan& eager, const StepPlan& captured) {
  const CaptureShape& shape = captured.capture_shape();
  GANNET_FUZZ_REQUIRE(captured.mode() == StepMode::kDecode && captured.num_requests() == shape.num_requests);
  GANNET_FUZZ_REQUIRE(captured.num_rows() == int64_t{shape.num_requests} * shape.q_len);
  const auto rows = static_cast<size_t>(eager.num_rows());
  for (size_t i = 0; i < static_cast<size_t>(captured.num_rows()); ++i) {
    GANNET_FUZZ_REQUIRE(captured.row_lens()[i] == (i < rows ? eager.row_lens()[i] : 0));
    GANNET_FUZZ_REQUIRE(captured.positions()[i] == (i < rows ? eager.positions()[i] : 0));
    GANNET_FUZZ_REQUIRE(captured.write_slots()[i] == (i < rows ? eager.write_slots()[i] : -1));
  }
  for (size_t r = 0; r < static_cast<size_t>(captured.num_requests()); ++r)
    GANNET_FUZZ_REQUIRE(captured.seq_lens()[r] ==
                        (r < static_cast<size_t>(eager.num_requests()) ? eager.seq_lens()[r] : 0));
  GANNET_FUZZ_REQUIRE(captured.max_row_len() == eager.max_row_len());
}

/// Against the arithmetic of spec 1.5.
void check_narrow(Input& in, const StepPlan& plan, std::vector<int32_t>& lens) {
  const int64_t decodes = plan.requests(StepRows::kDecode).size();
  std::vector<int32_t> accepted;
  for (int64_t i = 0; i < decodes; ++i) accepted.push_back(small_or_extreme(in, 9));
  const bool sized = in.between(0, 15) != 0;
  if (!sized) accepted.push_back(1);
  const auto n = static_cast<size_t>(plan.num_requests());
  std::vector<int32_t> rows(n);
  lens.assign(n, 0);
  GANNET_FUZZ_REQUIRE(accepts([&] { narrow_rows(plan, accepted, rows); }) == sized);
  GANNET_FUZZ_REQUIRE(accepts([&] { narrow_seq_lens(plan, accepted, lens); }) == sized);
  for (size_t r = 0; sized && r < n; ++r) {
    const Range range = plan.rows_of_request(static_cast<int64_t>(r));
    int64_t stand = range.size();
    if (static_cast<int64_t>(r) >= plan.num_extends())
      stand = std::clamp<int64_t>(accepted[r - static_cast<size_t>(plan.num_extends())], 1, plan.q_len());
    const int64_t len = plan.seq_lens()[r];
    GANNET_FUZZ_REQUIRE(rows[r] == (range.size() == 0 ? -1 : range.begin + stand - 1));
    GANNET_FUZZ_REQUIRE(lens[r] == (len == 0 ? 0 : std::max<int64_t>(len - (range.size() - stand), 1)));
  }
}

/// A draft goes on from `from`: what it gives is what an engine would prepare, or nothing has changed.
void check_advance(Input& in, const StepPlan& from, StepPlan& draft, std::vector<int32_t> lens,
                   const StepLimits& limits, const Decode* table) {
  const int64_t steps = in.between(0, 3);
  for (int32_t& len : lens) {
    if (len > 0) len = static_cast<int32_t>(std::min<int64_t>(len + steps, kMax32));
    if (in.between(0, 31) == 0) len = small_or_extreme(in, 600);
  }
  if (in.between(0, 31) == 0) lens.push_back(1);
  const PageTableView pages = table != nullptr ? table->step.pages : PageTableView{};
  const std::vector<int32_t> slots = copy(draft.write_slots()), positions = copy(draft.positions());
  const StepMode mode = draft.mode();
  if (!accepts([&] { draft.advance(from, lens, pages, limits); })) {
    GANNET_FUZZ_REQUIRE(draft.mode() == mode && copy(draft.write_slots()) == slots &&
                        copy(draft.positions()) == positions);
    return;
  }
  GANNET_FUZZ_REQUIRE(draft.mode() == StepMode::kDecode && draft.q_len() == 1 && draft.num_extends() == 0);
  GANNET_FUZZ_REQUIRE(draft.num_requests() == static_cast<int64_t>(lens.size()) &&
                      draft.num_rows() == draft.num_requests());
  for (size_t r = 0; r < lens.size(); ++r) {
    GANNET_FUZZ_REQUIRE(draft.seq_lens()[r] == lens[r] && draft.row_lens()[r] == lens[r]);
    GANNET_FUZZ_REQUIRE(draft.positions()[r] == std::max(lens[r] - 1, 0));
    if (lens[r] == 0) GANNET_FUZZ_REQUIRE(draft.write_slots()[r] == -1);
    else {
      const int64_t slot = draft.write_slots()[r], page = slot / limits.page_size;
      GANNET_FUZZ_REQUIRE(slot >= 0 && slot % limits.page_size == (lens[r] - 1) % limits.page_size);
      GANNET_FUZZ_REQUIRE(limits.num_pages == 0 || page < limits.num_pages);
      if (table != nullptr)
        GANNET_FUZZ_REQUIRE(page == table->cells[r * static_cast<size_t>(table->columns) +
                                                 static_cast<size_t>((lens[r] - 1) / limits.page_size)]);
    }
  }
  const std::vector<int32_t> once = copy(draft.write_slots());
  if (&from == &draft) return;
  draft.advance(from, lens, pages, limits);  // again: nothing changes
  GANNET_FUZZ_REQUIRE(copy(draft.write_slots()) == once);
}

void fuzz_captured(Input& in) {
  StepLimits limits;
  limits.page_size = static_cast<int32_t>(in.around(1, 70, 1, 1024));
  limits.num_pages = in.around(1, 256, 0, kMax64);
  limits.max_context_len = in.around(1, 2000, 0, kMax32);
  CaptureShape shape;
  shape.num_requests = static_cast<int32_t>(in.around(1, 5, kMin32, 9));
  shape.q_len = static_cast<int32_t>(in.around(1, 8, kMin32, 9));
  shape.decode_bound = static_cast<RowBound>(in.between(0, 2));
  // A captured plan takes the memory of its longest batch at once.
  shape.max_seq_len = std::min<int64_t>(in.around(0, 800, kMin64, kMax64), 1 << 20);
  if (shape.max_seq_len == 0 && limits.max_context_len > 1 << 20) limits.max_context_len = 1 << 20;
  StepPlan captured, drafts, eager, later;
  if (!accepts([&] { captured.capture(shape, limits); })) return;
  GANNET_FUZZ_REQUIRE(captured.captured());
  check_captured(StepPlan{}, captured);
  CaptureShape one = shape;
  one.q_len = 1;
  one.decode_bound = RowBound::kCausalFull;
  drafts.capture(one, limits);
  const void* const places[] = {captured.seq_lens().data(), captured.write_slots().data(), captured.row_lens().data(),
                                captured.pages(StepRows::kDecode).pages.data, drafts.write_slots().data()};
  for (int i = 0; i < 6 && !in.empty(); ++i) {
    const int64_t requests = in.between(0, shape.num_requests + (in.between(0, 15) == 0 ? 1 : 0));
    RowBound bound = shape.decode_bound;
    if (bound == RowBound::kCausalFromFirst || in.between(0, 3) == 0) bound = static_cast<RowBound>(in.between(0, 2));
    const Decode d = decode_step(in, requests, shape.q_len, bound, limits.num_pages, limits.page_size);
    if (!accepts([&] { captured.assign(d.step, limits); })) continue;
    // What a captured plan takes an eager one takes too.
    eager.assign(d.step, limits);
    check_captured(eager, captured);
    std::vector<int32_t> lens;
    check_narrow(in, captured, lens);
    const Decode table =
        decode_step(in, shape.num_requests, 1, RowBound::kCausalFull, limits.num_pages, limits.page_size);
    check_advance(in, captured, drafts, lens, limits, in.between(0, 1) == 0 ? nullptr : &table);
    if (requests > 0) {
      check_narrow(in, eager, lens);
      check_advance(in, eager, later, lens, limits, nullptr);
    }
    if (shape.q_len == 1) check_advance(in, captured, captured, copy(captured.seq_lens()), limits, nullptr);
    const void* const now[] = {captured.seq_lens().data(), captured.write_slots().data(), captured.row_lens().data(),
                               captured.pages(StepRows::kDecode).pages.data, drafts.write_slots().data()};
    GANNET_FUZZ_REQUIRE(std::equal(std::begin(places), std::end(places), std::begin(now)));
  }
}

// ---- pools ------------------------------------------------------------------------------------------------------

void check_sizes(const PoolSizes& s, int64_t layers, int64_t num_pages, int64_t page_size) {
  // In 128 bits nothing overflows.
  __extension__ using Wide = __int128;
  GANNET_FUZZ_REQUIRE(s.token_bytes > 0 && Wide{s.token_bytes} * page_size == s.page_bytes);
  GANNET_FUZZ_REQUIRE(s.page_stride_bytes >= s.page_bytes && s.page_stride_bytes % 16 == 0);
  GANNET_FUZZ_REQUIRE(s.layer_stride_bytes >= Wide{s.page_stride_bytes} * num_pages);
  GANNET_FUZZ_REQUIRE(Wide{s.layer_stride_bytes} * layers == s.total_bytes);
  GANNET_FUZZ_REQUIRE(num_pages * page_size <= kMax32);
}

void fuzz_pools(Input& in) {
  LatentPoolOptions latent;
  latent.num_layers = small_or_extreme(in, 80);
  latent.format = static_cast<LatentFormat>(in.between(0, 5));
  latent.geometry.latent_dim = small_or_extreme(in, 1024);
  latent.geometry.rope_dim = small_or_extreme(in, 128);
  latent.num_pages = in.around(1, 1 << 20, kMin64, kMax64);
  latent.page_size = small_or_extreme(in, 1024);
  latent.page_stride_bytes = in.between(0, 3) == 0 ? in.around(0, 1 << 22, kMin64, kMax64) : 0;
  latent.scale = in.between(0, 1) == 0 ? 0.0f : static_cast<float>(in.between(-2, 100)) / 16.0f;
  PoolSizes sizes;
  if (accepts([&] { sizes = latent_pool_sizes(latent); }))
    check_sizes(sizes, latent.num_layers, latent.num_pages, latent.page_size);

  IndexKPoolOptions index;
  for (int64_t i = 0, n = in.between(0, 4); i < n; ++i) index.layers.push_back(small_or_extreme(in, 80));
  index.format = static_cast<IndexKFormat>(in.between(0, 3));
  index.head_dim = small_or_extreme(in, 256);
  index.num_pages = in.around(1, 1 << 20, kMin64, kMax64);
  index.page_size = small_or_extreme(in, 1024);
  index.page_stride_bytes = in.between(0, 3) == 0 ? in.around(0, 1 << 22, kMin64, kMax64) : 0;
  if (accepts([&] { sizes = index_k_pool_sizes(index); }))
    check_sizes(sizes, static_cast<int64_t>(index.layers.size()), index.num_pages, index.page_size);

  const int64_t tokens = in.around(0, 1 << 20, kMin64, kMax64);
  const int32_t page_size = small_or_extreme(in, 128);
  int64_t pages = 0;
  if (accepts([&] { pages = pages_for(tokens, page_size); })) {
    __extension__ using Wide = __int128;
    GANNET_FUZZ_REQUIRE(Wide{pages} * page_size >= tokens && Wide{pages - 1} * page_size < tokens);
  }
}

// ---- pages ------------------------------------------------------------------------------------------------------

void fuzz_allocator(Input& in) {
  const int64_t num_pages = in.between(1, 40);
  PageAllocator allocator(num_pages);
  std::vector<PageList> lists;
  while (!in.empty()) {
    const auto which = [&] { return static_cast<size_t>(in.between(0, static_cast<int64_t>(lists.size()) - 1)); };
    switch (in.byte() % 6) {
      case 0: {
        const int64_t count = in.around(0, 12, kMin32, kMax32);
        const int64_t free = allocator.num_free();
        try {
          lists.push_back(allocator.acquire(count));
          GANNET_FUZZ_REQUIRE(count <= free && lists.back().size() == count);
        } catch (const Error&) {
          GANNET_FUZZ_REQUIRE((count < 0 || count > free) && allocator.num_free() == free);
        }
        break;
      }
      case 1:
        if (!lists.empty()) lists.erase(lists.begin() + static_cast<long>(which()));
        break;
      case 2:
        if (!lists.empty()) {
          const size_t i = which();
          const int64_t begin = in.around(0, lists[i].size(), kMin32, kMax32);
          const int64_t count = in.around(0, lists[i].size(), kMin32, kMax32);
          const int64_t size = lists[i].size();
          const bool inside = begin >= 0 && count >= 0 && begin + count <= size;
          GANNET_FUZZ_REQUIRE(accepts([&] { lists.push_back(lists[i].share(begin, count)); }) == inside);
        }
        break;
      case 3:
        if (!lists.empty()) {
          const size_t i = which();
          const int64_t count = in.around(0, lists[i].size(), kMin32, kMax32);
          const int64_t size = lists[i].size();
          GANNET_FUZZ_REQUIRE(accepts([&] { lists[i].truncate(count); }) == (count >= 0));
          GANNET_FUZZ_REQUIRE(lists[i].size() == (count >= 0 ? std::min(size, count) : size));
        }
        break;
      case 4:
        if (lists.size() >= 2) {
          const size_t i = which();
          PageList tail = std::move(lists[i]);
          lists.erase(lists.begin() + static_cast<long>(i));
          lists[which()].append(std::move(tail));
        }
        break;
      default:
        if (!lists.empty()) lists[which()].clear();
        break;
    }
    // Every page is free or referenced; nobody has page 0.
    std::set<PageId> used;
    for (const PageList& list : lists)
      for (const PageId id : list.ids()) {
        GANNET_FUZZ_REQUIRE(id > 0 && id < num_pages);
        used.insert(id);
      }
    GANNET_FUZZ_REQUIRE(allocator.num_used() == static_cast<int64_t>(used.size()));
    GANNET_FUZZ_REQUIRE(allocator.num_free() + allocator.num_used() == num_pages - 1);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  switch (in.byte() % 5) {
    case 0: fuzz_prefix_chunks(in); break;
    case 1: {
      StepPlan plan;  // one plan for all steps of the input: memory of a step must not reach the next
      for (int i = 0; i < 4 && !in.empty(); ++i) fuzz_step(in, plan);
      break;
    }
    case 2: fuzz_pools(in); break;
    case 3: fuzz_captured(in); break;
    default: fuzz_allocator(in); break;
  }
  return 0;
}

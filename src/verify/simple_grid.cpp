// The cache operations, rope and merge_state.
#include <fmt/core.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "verify/recorder.h"
#include "verify/tolerances.h"

namespace gannet {
inline namespace v0 {
namespace verify {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Rows for the writers: normal ones, then those at the edges of the formats.
Tensor make_rows(DType dtype, int64_t n, int64_t width, int64_t padding, uint64_t seed) {
  Tensor t = make_tensor(dtype, {n, width}, padding);
  fill_normal(t, Rng(seed), 3.0);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < width; ++d) {
      if (i == 1) set(t.view, 0.0f, i, d);                       // amax 0: the floor
      if (i == 2) set(t.view, get(t.view, i, d) * 1e-6f, i, d);  // below the floors
      if (i == 3) set(t.view, get(t.view, i, d) * 1e4f, i, d);   // saturates per tensor
      if (i == 4)
        set(t.view, static_cast<float>(std::ldexp(d % 2 == 0 ? 1.0 : -1.0, static_cast<int>(d % 20) - 10)), i, d);
      if (i == 5) set(t.view, d == 0 ? 448.0f : static_cast<float>(d), i, d);  // scale exactly 1
    }
  }
  return t;
}

/// Slots in a pool of `num_slots`, a third of them negative, all others different.
std::vector<int32_t> make_slots(int64_t n, int64_t num_slots, uint64_t seed) {
  std::vector<int32_t> all(static_cast<size_t>(num_slots));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
  Rng rng(seed);
  for (size_t i = all.size(); i > 1; --i)
    std::swap(all[i - 1], all[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  all.resize(static_cast<size_t>(n));
  for (size_t i = 7; i < all.size(); i += 3) all[i] = i % 2 == 0 ? -1 : -0x7FFFFFFF;
  return all;
}

/// The same slots as int64.
Tensor widen(const std::vector<int32_t>& slots) {
  Tensor t = make_tensor(DType::kI64, {static_cast<int64_t>(slots.size())});
  for (size_t i = 0; i < slots.size(); ++i) t.view.ptr<int64_t>()[i] = slots[i];
  return t;
}

template <class Cache>
std::shared_ptr<Buffer> make_cache(Cache& view, int64_t token_bytes, int32_t page_size, int64_t num_pages,
                                   int64_t gap) {
  view.page_size = page_size;
  view.num_pages = num_pages;
  view.page_stride_bytes = (token_bytes * page_size + gap + 15) / 16 * 16;
  auto buffer = std::make_shared<Buffer>(static_cast<size_t>(view.page_stride_bytes * num_pages));
  view.data = buffer->data();
  return buffer;
}

constexpr LatentFormat kLatentFormats[] = {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3,
                                           LatentFormat::kPacked656, LatentFormat::kE4m3PerToken};

}  // namespace

void verify_caches(Recorder& r) {
  // Sizes that are no power of two and those that are have code of their own.
  const std::vector<int32_t> page_sizes =
      r.small() ? std::vector<int32_t>{3, 64} : std::vector<int32_t>{1, 3, 32, 64, 1024};
  for (const LatentFormat format : kLatentFormats) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      if (!r.wants_format(fmt::format("rows {}, cache {}", to_string(dtype), to_string(format)))) continue;
      for (const int32_t page_size : page_sizes) {
        constexpr int64_t kFewRows = 40;
        struct Kind {
          bool wide;  // int64 slots, strided rows, gaps between pages and their rows
          RowGeometry geometry = {};
          int64_t num_rows = kFewRows;
        };
        // Widths other than 512 + 64: rows that begin at no multiple of 16 bytes, in one access or many.
        std::vector<Kind> kinds = {{false}, {true}};
        if (page_size == 3 || page_size == 64) kinds.insert(kinds.end(), {{false, {128, 16}}, {true, {640, 48}}});
        // As many that a device's warps take two rows, and four.
        if (page_size == 64 && dtype == DType::kBf16) kinds.insert(kinds.end(), {{false, {}, 1027}, {true, {}, 8195}});
        for (const auto& [wide, geometry, n] : kinds) {
          const int64_t num_pages = page_size == 1024 ? 2 : (n + 160) / page_size + 2;
          LatentCacheView view;
          view.format = format;
          view.geometry = geometry;
          view.scale = format == LatentFormat::kE4m3 ? page_size == 3 ? 0x1p-6f : 0.0371f : 0.0f;
          if (wide && format != LatentFormat::kE4m3PerToken)
            view.row_stride_bytes = (latent_row_bytes(format, view.geometry) + 48 + 15) / 16 * 16;
          const auto memory = make_cache(view, view.row_stride(), page_size, num_pages, wide ? 4096 : 0);
          const std::vector<int32_t> list = make_slots(n, view.num_slots(), 3);
          const Tensor slots = wide ? widen(list) : make_ints(list);
          const std::string detail = fmt::format("page size {}, {} rows of {} + {} values", page_size, n,
                                                 geometry.latent_dim, geometry.rope_dim);
          const std::string name = fmt::format("rows {}, cache {}", to_string(dtype), to_string(format));

          Tensor latent = make_rows(dtype, n, geometry.latent_dim, wide ? 64 : 0, 1);
          Tensor rope = make_rows(dtype, n, geometry.rope_dim, wide ? 64 : 0, 2);
          LatentWrite w;
          w.latent = latent.view;
          w.rope = rope.view;
          w.slots = slots.view;
          w.cache = view;
          if (r.wants("latent_write")) {
            check_case(r, {"latent_write", name, "page sizes 1 to 1024", detail}, w, same_bits);
            if (page_size == 64 && n == kFewRows) check_workers(r, {"latent_write", name, "", detail}, w);
          }
          if (!r.wants("latent_gather")) continue;
          run_once(Context{}, w, {.impl = "ref"});  // into the pool: negative slots stay NaN
          // Read what was written, in another order and more than once; negative slots give zeros.
          std::vector<int32_t> wanted;
          for (size_t i = 0; i < list.size(); ++i) wanted.push_back(list[(i * 7) % list.size()]);
          const Tensor again = wide ? widen(wanted) : make_ints(wanted);
          const Tensor latent_out = make_tensor(dtype, {n, geometry.latent_dim}, wide ? 64 : 0);
          const Tensor rope_out = make_tensor(dtype, {n, geometry.rope_dim}, wide ? 64 : 0);
          LatentGather g;
          g.slots = again.view;
          g.cache = view;
          g.latent = latent_out.view;
          g.rope = rope_out.view;
          // Narrow outputs are compared with the oracle's own: products of two fp32 numbers are rounded once.
          for_each_impl(r, {"latent_gather", name, "page sizes 1 to 1024", detail}, g, [&](const std::string& impl) {
            const Outputs want = run(g, {.impl = "ref"});
            const Outputs got = run(g, r.run_options(impl));
            Worst worst;
            same_bits(want, got, worst);
            if (!got.fault.empty()) worst = {1.0, 0.0, got.fault, true};
            r.add({"latent_gather", name, "page sizes 1 to 1024", detail}, impl, worst);
          });
          if (page_size == 64 && n == kFewRows) check_workers(r, {"latent_gather", name, "", detail}, g);
        }
      }
    }
  }

  struct IndexCase {
    IndexKFormat format;
    ScaleFormat scale;
  };
  for (const IndexCase& f :
       {IndexCase{IndexKFormat::kF32, ScaleFormat::kFp32}, IndexCase{IndexKFormat::kBf16, ScaleFormat::kFp32},
        IndexCase{IndexKFormat::kE4m3, ScaleFormat::kFp32}, IndexCase{IndexKFormat::kE4m3, ScaleFormat::kPowerOfTwo}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const int32_t page_size : page_sizes) {
        for (const int32_t head_dim : {32, 64, 128, 208}) {
          const bool wide = head_dim == 64;
          const int64_t num_pages = page_size == 1024 ? 2 : 200 / page_size + 2;
          const int64_t n = 40;
          IndexCacheView view;
          view.format = f.format;
          view.scale_format = f.scale;
          view.head_dim = head_dim;
          const auto memory =
              make_cache(view, index_k_token_bytes(f.format, head_dim), page_size, num_pages, wide ? 512 : 0);
          const std::vector<int32_t> list = make_slots(n, view.num_slots(), 3);
          const Tensor slots = wide ? widen(list) : make_ints(list);
          const std::string detail = fmt::format("page size {}, head_dim {}", page_size, head_dim);
          const std::string name = fmt::format("rows {}, index keys {}{}", to_string(dtype), to_string(f.format),
                                               f.scale == ScaleFormat::kPowerOfTwo ? " (scales 2^n)" : "");
          if (!r.wants_format(name)) continue;
          Tensor keys = make_rows(dtype, n, head_dim, wide ? 32 : 0, 4);
          IndexKWrite w;
          w.k = keys.view;
          w.slots = slots.view;
          w.cache = view;
          if (r.wants("index_k_write")) {
            check_case(r, {"index_k_write", name, "page sizes 1 to 1024", detail}, w, same_bits);
            if (page_size == 64) check_workers(r, {"index_k_write", name, "", detail}, w);
          }
          if (!r.wants("index_k_gather")) continue;
          run_once(Context{}, w, {.impl = "ref"});
          const Tensor out = make_tensor(dtype, {n, head_dim}, wide ? 32 : 0);
          IndexKGather g;
          g.slots = slots.view;
          g.cache = view;
          g.k = out.view;
          const Case c{"index_k_gather", name, "page sizes 1 to 1024", detail};
          for_each_impl(r, c, g, [&](const std::string& impl) {
            const Outputs want = run(g, {.impl = "ref"});
            const Outputs got = run(g, r.run_options(impl));
            Worst worst;
            same_bits(want, got, worst);
            if (!got.fault.empty()) worst = {1.0, 0.0, got.fault, true};
            r.add(c, impl, worst);
          });
          if (page_size == 64) check_workers(r, c, g);
        }
      }
    }
  }
}

void verify_rope(Recorder& r) {
  constexpr int64_t kPositions = 5000;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
      struct Shape {
        int64_t rows, heads, width, rotated;
        int32_t offset;
      };
      for (const Shape& s :
           {Shape{9, 3, 192, 64, 128}, Shape{9, 8, 128, 64, 0}, Shape{5, 1, 64, 64, 0}, Shape{3, 2, 48, 32, 16},
            Shape{4, 2, 64, 16, 24}, Shape{2, 1, 16, 2, 5}, Shape{0, 2, 64, 64, 0}}) {
        for (const int64_t padding : {0, 16}) {
          const Tensor x = make_tensor(dtype, {s.rows, s.heads, s.width}, padding);
          fill_normal(x, Rng(21));
          std::vector<int32_t> at;
          for (int64_t t = 0; t < s.rows; ++t)
            at.push_back(static_cast<int32_t>(t == 0 ? 0 : t == 1 ? kPositions - 1 : t * 611));
          const Tensor positions = make_ints(at);
          const Tensor table = make_tensor(DType::kF32, {kPositions, s.rotated}, padding > 0 ? 1 : 0);
          for (const int32_t position : at) {
            for (int64_t i = 0; i < s.rotated / 2; ++i) {
              const double angle =
                  position * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(s.rotated));
              set(table.view, static_cast<float>(std::cos(angle)), position, i);
              set(table.view, static_cast<float>(std::sin(angle)), position, s.rotated / 2 + i);
            }
          }
          Rope p;
          p.x = x.view;
          p.positions = positions.view;
          p.cos_sin = table.view;
          p.offset = s.offset;
          p.pairing = pairing;
          const Case c{"rope", fmt::format("x {}", to_string(dtype)),
                       pairing == RopePairing::kInterleaved ? "interleaved" : "half split",
                       fmt::format("[{}, {}, {}] rotated {} at {}", s.rows, s.heads, s.width, s.rotated, s.offset)};
          check_case(r, c, p, [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
            const std::vector<float> want = oracle.floats("x");
            const std::vector<float> have = got.floats("x");
            for (size_t e = 0; e < want.size(); ++e) {
              const int64_t d = static_cast<int64_t>(e) % s.width - s.offset;
              if (d < 0 || d >= s.rotated) {
                worst.see(want[e] == have[e] ? 0.0 : 1.0, 0.0, fmt::format("value {} is not rotated", e));
                continue;
              }
              const int64_t half = s.rotated / 2;
              const int64_t partner = pairing == RopePairing::kInterleaved ? d ^ 1 : d < half ? d + half : d - half;
              const size_t other = e - static_cast<size_t>(d) + static_cast<size_t>(partner);
              // The magnitude of a pair is that of its rotation.
              worst.see(std::fabs(static_cast<double>(have[e]) - want[e]),
                        rope_tolerance(dtype == DType::kBf16, want[e], want[other]), fmt::format("value {}", e));
            }
          });
          if (padding == 0 && s.rows > 0) check_workers(r, c, p);
        }
      }
    }
  }
}

void verify_merge_state(Recorder& r) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      struct Shape {
        int64_t rows, heads, dim;
      };
      for (const Shape& s : {Shape{12, 3, 128}, Shape{5, 16, 512}, Shape{7, 1, 40}, Shape{0, 4, 128}}) {
        for (const bool counted : {false, true}) {
          const int64_t padding = counted ? 16 : 0;
          const Tensor out_a = make_tensor(dtype, {s.rows, s.heads, s.dim}, padding);
          const Tensor out_b = make_tensor(dtype, {s.rows, s.heads, s.dim}, padding);
          const Tensor lse_a = make_tensor(DType::kF32, {s.rows, s.heads}, counted ? 1 : 0);
          const Tensor lse_b = make_tensor(DType::kF32, {s.rows, s.heads}, counted ? 1 : 0);
          fill_normal(out_a, Rng(1));
          fill_normal(out_b, Rng(2));
          fill_normal(lse_a, Rng(3), 8.0);
          fill_normal(lse_b, Rng(4), 8.0);
          std::vector<int32_t> count_a, count_b;
          // Rows: 0 both, 1 a empty, 2 b empty, 3 both empty, 4 equal LSE, 5 far apart; what is empty holds NaN.
          for (int64_t t = 0; t < s.rows; ++t) {
            const bool empty_a = t % 6 == 1 || t % 6 == 3;
            const bool empty_b = t % 6 == 2 || t % 6 == 3;
            count_a.push_back(empty_a ? static_cast<int32_t>(-(t % 2)) : 3);
            count_b.push_back(empty_b ? 0 : 9);
            for (int64_t h = 0; h < s.heads; ++h) {
              if (t % 6 == 4) set(lse_b.view, get(lse_a.view, t, h), t, h);
              if (t % 6 == 5) set(lse_b.view, get(lse_a.view, t, h) + (h % 2 == 0 ? 300.0f : -300.0f), t, h);
              for (int64_t d = 0; d < s.dim; ++d) {
                if (empty_a) set(out_a.view, NAN, t, h, d);
                if (empty_b) set(out_b.view, d % 2 == 0 ? NAN : kInfinity, t, h, d);
              }
              // With counts a wrong LSE of an empty side changes nothing (known fault BL-02).
              if (empty_a) set(lse_a.view, counted ? (h % 2 == 0 ? 5.0f : NAN) : -kInfinity, t, h);
              if (empty_b) set(lse_b.view, counted ? (h % 2 == 0 ? 9.0f : kInfinity) : -kInfinity, t, h);
            }
          }
          const Tensor counts_a = make_ints(count_a);
          const Tensor counts_b = make_ints(count_b);
          MergeState p;
          p.out_a = out_a.view;
          p.lse_a = lse_a.view;
          p.out_b = out_b.view;
          p.lse_b = lse_b.view;
          p.base = base;
          if (counted) {
            p.count_a = counts_a.view;
            p.count_b = counts_b.view;
          }
          const Case c{
              "merge_state",
              fmt::format("out {}, LSE {}", to_string(dtype), base == LseBase::kNatural ? "natural" : "base 2"),
              counted ? "counts decide" : "-inf decides", fmt::format("[{}, {}, {}]", s.rows, s.heads, s.dim)};
          check_case(r, c, p, [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
            const std::vector<float> want = oracle.floats("out_a");
            const std::vector<float> have = got.floats("out_a");
            const std::vector<float> want_lse = oracle.floats("lse_a");
            const std::vector<float> have_lse = got.floats("lse_a");
            const auto dim = static_cast<size_t>(s.dim);
            for (size_t e = 0; e < want.size(); ++e) {
              const auto line = e / dim;
              const auto t = static_cast<int64_t>(line) / s.heads;
              const auto h = static_cast<int64_t>(line) % s.heads;
              const auto d = static_cast<int64_t>(e % dim);
              const std::string place = fmt::format("row {} head {}", t, h);
              if (t % 6 >= 1 && t % 6 <= 3) {  // an empty side: bit for bit
                worst.see(std::memcmp(&want[e], &have[e], 4) == 0 ? 0.0 : 1.0, 0.0, place);
                if (d == 0)
                  worst.see(std::memcmp(&want_lse[line], &have_lse[line], 4) == 0 ? 0.0 : 1.0, 0.0, place + " lse");
              } else {
                worst.see(std::fabs(static_cast<double>(have[e]) - want[e]),
                          merge_tolerance(dtype == DType::kBf16, get(out_a.view, t, h, d), get(out_b.view, t, h, d)),
                          place);
                if (d == 0)
                  worst.see(std::fabs(static_cast<double>(have_lse[line]) - want_lse[line]),
                            merge_lse_tolerance(want_lse[line]), place + " lse");
              }
            }
          });
          if (s.rows > 0) check_workers(r, c, p);
        }
      }
    }
  }
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet

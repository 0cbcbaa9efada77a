// Every argument check of every operation: one broken argument at a time, the error names it and what is accepted.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cuda/common/refuse.h"
#include "op_cases.h"
#include "verify/problem.h"

namespace {

using namespace gannet;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Tensor;

// Plans read no data; runs that are meant to fail stop before a kernel. One block of memory serves every argument.
alignas(64) std::byte g_memory[1 << 20];

template <class T>
TensorView at(std::initializer_list<int64_t> shape) {
  return view(reinterpret_cast<T*>(g_memory), shape);
}

template <class Params>
struct Broken {
  const char* text;  ///< part of the error
  std::function<void(Params&)> change;
  ErrorCode code = ErrorCode::kInvalidArgument;
};

template <class Params>
void expect_refused(const Params& good, const std::vector<Broken<Params>>& list) {
  const Context context;
  EXPECT_NO_THROW(OpPlan<Params>(context, good, {.impl = "ref"}));
  for (const Broken<Params>& broken : list) {
    Params p = good;
    broken.change(p);
    try {
      const OpPlan<Params> plan(context, p, {.impl = "ref"});
      ADD_FAILURE() << Params::kName << " took what should say: " << broken.text;
    } catch (const Error& e) {
      const std::string text = e.what();
      EXPECT_EQ(e.code(), broken.code) << text;
      EXPECT_EQ(text.rfind(std::string("[") + Params::kName + "] ", 0), 0u) << text;
      EXPECT_NE(text.find(broken.text), std::string::npos) << "wanted: " << broken.text << "\ngot: " << text;
    }
  }
}

/// Contents that a run on the CPU refuses, by every implementation alike.
template <class Params>
void expect_run_refused(const Params& p, const char* wanted) {
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (!info.runs_here || info.device != DeviceKind::kCpu) continue;  // elsewhere nobody reads contents beforehand
    try {
      run_once(Context{}, p, {.impl = info.name});
      ADD_FAILURE() << Params::kName << " " << info.name << " ran what should say: " << wanted;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find(wanted), std::string::npos) << "wanted: " << wanted << "\ngot: " << e.what();
    }
  }
}

LatentCacheView latent_cache(LatentFormat format = LatentFormat::kBf16) {
  LatentCacheView c;
  c.data = g_memory;
  c.format = format;
  c.geometry = {128, 32};
  c.num_pages = 4;
  c.page_size = 4;
  c.page_stride_bytes = 4 * latent_row_bytes(format, c.geometry);
  return c;
}

IndexCacheView index_cache() {
  IndexCacheView c;
  c.data = g_memory;
  c.head_dim = 32;
  c.num_pages = 4;
  c.page_size = 4;
  c.page_stride_bytes = 4 * 36;
  return c;
}

/// What each operation with a cache refuses about it.
template <class Params>
void expect_bad_caches_refused(const Params& good) {
  constexpr int32_t kMostPages = std::numeric_limits<int32_t>::max();
  std::vector<Broken<Params>> list = {
      {"cache.num_pages is -1", [](Params& p) { p.cache.num_pages = -1; }},
      {"cache.page_size is 0; accepted: 1 or more", [](Params& p) { p.cache.page_size = 0; }},
      {"cache.page_size is -64", [](Params& p) { p.cache.page_size = -64; }},
      {"cache.page_stride_bytes is 16; accepted:", [](Params& p) { p.cache.page_stride_bytes = 16; }},
      {"cache.page_stride_bytes is -4096", [](Params& p) { p.cache.page_stride_bytes = -4096; }},
      {"a multiple of 16", [](Params& p) { p.cache.page_stride_bytes += 8; }},
      {"accepted:", [](Params& p) { p.cache.page_size = kMostPages; }},
      {"more than any address", [](Params& p) { p.cache.num_pages = int64_t{1} << 60; }},
      {"cache is on cuda:0",
       [](Params& p) {
         p.cache.device = {DeviceKind::kCuda, 0};
       }},
      {"cache.format is 99", [](Params& p) { p.cache.format = static_cast<decltype(p.cache.format)>(99); }},
  };
  if constexpr (requires { good.cache.geometry; }) {
    for (const float scale : {0.0f, -1.0f, NAN, INFINITY}) {
      list.push_back({"cache.scale is", [scale](Params& p) {
                        p.cache.format = LatentFormat::kE4m3;
                        p.cache.scale = scale;
                      }});
    }
    const int64_t row = latent_row_bytes(good.cache.format, good.cache.geometry);
    const auto stride = [&](const char* text, int64_t bytes) {
      list.push_back({text, [bytes](Params& p) { p.cache.row_stride_bytes = bytes; }});
    };
    stride("cache.row_stride_bytes is 16; accepted: 0, or a multiple of 16 from ", 16);
    stride("cache.row_stride_bytes is -16; accepted: 0, or", -16);
    stride("accepted: 0, or a multiple of 16 from", row + 8);
    stride("accepted: 4 rows at a distance of", row + 16);
    list.push_back({"cache.row_stride_bytes is 4096; accepted: 0 (format e4m3_per_token", [](Params& p) {
                      p.cache.format = LatentFormat::kE4m3PerToken;
                      p.cache.row_stride_bytes = 4096;
                    }});
    list.push_back({"cache.geometry is 2147483632 + 32; accepted: a sum below 2^31", [](Params& p) {
                      p.cache.geometry.latent_dim = 2147483632;
                      if constexpr (requires { p.latent; }) p.latent.shape[1] = 2147483632;
                      if constexpr (requires { p.out; }) p.q.shape[2] = 2147483664;
                    }});
    list.push_back({"accepted: a positive multiple of 128 (format packed656)", [](Params& p) {
                      p.cache.format = LatentFormat::kPacked656;
                      p.cache.geometry.latent_dim = 64;
                      if constexpr (requires { p.latent; }) p.latent.shape[1] = 64;
                      if constexpr (requires { p.out; }) p.q.shape[2] = 96;
                    }});
  } else {
    list.push_back({"cache.scale_format is 7", [](Params& p) { p.cache.scale_format = static_cast<ScaleFormat>(7); }});
  }
  expect_refused(good, list);
}

/// What each operation over paged rows refuses about tables and rows. `good` has two requests of two rows.
template <class Params>
void expect_bad_rows_refused(const Params& good) {
  expect_refused<Params>(
      good,
      {
          {"rows.q_len is 0; accepted: 1 or more", [](Params& p) { p.rows.q_len = 0; }},
          {"q has 4 rows; accepted: num_requests * q_len = 2 * 3", [](Params& p) { p.rows.q_len = 3; }},
          {"rows.bound is 9", [](Params& p) { p.rows.bound = static_cast<RowBound>(9); }},
          {"seq_lens is absent", [](Params& p) { p.rows.seq_lens = {}; }},
          {"seq_lens is int64", [](Params& p) { p.rows.seq_lens = at<int64_t>({2}); }},
          {"seq_lens is int32[2] strides [2]", [](Params& p) { p.rows.seq_lens.stride[0] = 2; }},
          {"cu_q_lens is int32[2]", [](Params& p) { p.rows.cu_q_lens = at<int32_t>({2}); }},
          {"pages is absent", [](Params& p) { p.pages.pages = {}; }},
          {"pages is int64",
           [](Params& p) {
             p.pages.pages = at<int64_t>({2, 4});
           }},
          {"pages is int32[1, 4]",
           [](Params& p) {
             p.pages.pages = at<int32_t>({1, 4});
           }},
          {"row_indices is int32[3]", [](Params& p) { p.pages.row_indices = at<int32_t>({3}); }},
          {"last stride 1", [](Params& p) { p.pages.pages.stride[1] = 2; }},
          {"indptr or indices is given", [](Params& p) { p.pages.indices = at<int32_t>({4}); }},
          {"pages or row_indices is given", [](Params& p) { p.pages.form = PageTableForm::kCsr; }},
          {"indptr is int32[2]", [](Params& p) { p.pages = PageTableView::csr(at<int32_t>({2}), at<int32_t>({4})); }},
          {"indices is absent", [](Params& p) { p.pages = PageTableView::csr(at<int32_t>({3}), {}); }},
          {"pages.form is 5", [](Params& p) { p.pages.form = static_cast<PageTableForm>(5); }},
      });
}

template <class Params>
Params with_rows(Params p) {
  p.pages = PageTableView::padded(at<int32_t>({2, 4}));
  p.rows.seq_lens = at<int32_t>({2});
  p.rows.q_len = 2;
  return p;
}

MlaDecode decode() {
  MlaDecode p;
  p.q = at<Bf16>({4, 3, 160});
  p.cache = latent_cache();
  p.out = at<Bf16>({4, 3, 128});
  p.lse = at<float>({4, 3});
  p.softmax_scale = 0.1f;
  return with_rows(p);
}

SparseAttention sparse() {
  SparseAttention p;
  p.q = at<Bf16>({4, 3, 160});
  p.cache = latent_cache();
  p.topk_slots = at<int32_t>({4, 7});
  p.topk_lens = at<int32_t>({4});
  p.out = at<Bf16>({4, 3, 128});
  p.lse = at<float>({4, 3});
  p.softmax_scale = 0.1f;
  return p;
}

IndexLogits logits() {
  IndexLogits p;
  p.q = at<Bf16>({4, 3, 32});
  p.weights = at<float>({4, 3});
  p.cache = index_cache();
  p.logits = at<float>({4, 16});
  return with_rows(p);
}

IndexSelect select() {
  IndexSelect p;
  p.q = at<Bf16>({4, 3, 32});
  p.weights = at<float>({4, 3});
  p.cache = index_cache();
  p.max_seq_len = 16;
  p.topk_slots = at<int32_t>({4, 5});
  p.topk_lens = at<int32_t>({4});
  p.topk_positions = at<int32_t>({4, 5});
  return with_rows(p);
}

RaggedPrefill prefill() {
  RaggedPrefill p;
  p.q = at<Bf16>({4, 3, 48});
  p.k = at<Bf16>({6, 3, 32});
  p.k_rope = at<Bf16>({6, 16});
  p.v = at<Bf16>({6, 3, 32});
  p.cu_q_lens = at<int32_t>({3});
  p.cu_kv_lens = at<int32_t>({3});
  p.out = at<Bf16>({4, 3, 32});
  p.lse = at<float>({4, 3});
  p.softmax_scale = 0.1f;
  return p;
}

/// fp16 has an error of its own kind, so that nobody reads it as a mistake in a shape.
template <class Params>
Broken<Params> half(const char* text, TensorView Params::*member) {
  return {text, [member](Params& p) { (p.*member).dtype = DType::kF16; }, ErrorCode::kUnsupported};
}

/// What the two absorbed operations refuse about sinks, largest scores and the scales of queries.
template <class P>
void expect_bad_options_refused(const P& good) {
  std::vector<Broken<P>> list = {
      {"attn_sink is fp32[4] strides [1] on cpu; accepted: fp32 [num_heads = 3]",
       [](P& p) { p.attn_sink = view(reinterpret_cast<float*>(g_memory), {4}); }},
      {"attn_sink is bf16[3]", [](P& p) { p.attn_sink = view(reinterpret_cast<Bf16*>(g_memory), {3}); }},
      {"attn_sink is fp32[3] strides [2]",
       [](P& p) {
         p.attn_sink = view(reinterpret_cast<float*>(g_memory), {3});
         p.attn_sink.stride[0] = 2;
       }},
      {"max_logits is fp32[3, 4]",
       [](P& p) {
         p.max_logits = view(reinterpret_cast<float*>(g_memory), {3, 4});
       }},
      {"max_logits is bf16[4, 3]",
       [](P& p) {
         p.max_logits = view(reinterpret_cast<Bf16*>(g_memory), {4, 3});
       }},
      {"positive strides, since it is written",
       [](P& p) {
         p.max_logits = view(reinterpret_cast<float*>(g_memory), {4, 3});
         p.max_logits.stride[0] = 0;
       }},
      {"q_scale is 2; accepted: 1 (q is bf16)", [](P& p) { p.q_scale = 2.0f; }},
      {"q_scale is nan; accepted: 1 (q is bf16)", [](P& p) { p.q_scale = NAN; }},
  };
  for (const LatentFormat format : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kPacked656}) {
    list.push_back({format == LatentFormat::kF32 ? "q is e4m3 and the cache is fp32; accepted: fp32 or bf16 (e4m3"
                    : format == LatentFormat::kPacked656 ? "q is e4m3 and the cache is packed656; accepted: fp32"
                                                         : "with a cache of e4m3 or e4m3_per_token)",
                    [format](P& p) {
                      p.q.dtype = DType::kE4m3;
                      p.cache = latent_cache(format);
                      p.cache.page_stride_bytes = 4096;
                    }});
  }
  for (const float scale : {0.0f, -1.0f, NAN, INFINITY}) {
    list.push_back({"accepted: a finite positive number", [scale](P& p) {
                      p.q.dtype = DType::kE4m3;
                      p.cache = latent_cache(LatentFormat::kE4m3PerToken);
                      p.cache.page_stride_bytes = 4096;
                      p.q_scale = scale;
                    }});
  }
  expect_refused(good, list);
  // And takes: an e4m3 query with its scale, a sink and a largest score.
  for (const LatentFormat format : {LatentFormat::kE4m3, LatentFormat::kE4m3PerToken}) {
    P p = good;
    p.q.dtype = DType::kE4m3;
    p.cache = latent_cache(format);
    p.cache.page_stride_bytes = 4096;
    p.cache.scale = 1.0f;
    p.q_scale = 0.25f;
    p.attn_sink = view(reinterpret_cast<float*>(g_memory), {3});
    p.max_logits = view(reinterpret_cast<float*>(g_memory), {4, 3});
    EXPECT_NO_THROW(OpPlan<P>(Context{}, p, {.impl = "ref"}));
  }
}

TEST(Checks, MlaDecode) {
  using P = MlaDecode;
  expect_bad_caches_refused(decode());
  expect_bad_rows_refused(decode());
  expect_bad_options_refused(decode());
  std::vector<Broken<P>> list = {
      half<P>("q is fp16; accepted: fp32, bf16 or e4m3", &P::q),
      half<P>("out is fp16", &P::out),
      {"q is int32", [](P& p) { p.q.dtype = DType::kI32; }},
      {"q is absent", [](P& p) { p.q = {}; }},
      {"latent_dim + rope_dim = 160", [](P& p) { p.q.shape[2] = 144; }},
      {"num_heads >= 1", [](P& p) { p.q.shape[1] = 0; }},
      {"q is bf16[4, 480]",
       [](P& p) {
         p.q = at<Bf16>({4, 480});
       }},
      {"q is bf16[-4", [](P& p) { p.q.shape[0] = -4; }},
      {"latent_dim is 100; accepted: a positive multiple of 16",
       [](P& p) {
         p.cache.geometry.latent_dim = 100;
         p.q.shape[2] = 132;
       }},
      {"rope_dim is 0",
       [](P& p) {
         p.cache.geometry.rope_dim = 0;
         p.q.shape[2] = 128;
       }},
      {"out is bf16[4, 3, 160]",
       [](P& p) {
         p.out = at<Bf16>({4, 3, 160});
       }},
      {"out is bf16[5, 3, 128]", [](P& p) { p.out.shape[0] = 5; }},
      {"positive strides, since it is written", [](P& p) { p.out.stride[0] = 0; }},
      {"multiples of 16 bytes", [](P& p) { p.q.stride[0] += 4; }},
      {"strides of 0 or more", [](P& p) { p.q.stride[0] = -480; }},
      {"byte offsets below 2^62", [](P& p) { p.q.stride[0] = int64_t{1} << 61; }},
      {"last stride 1", [](P& p) { p.q.stride[2] = 2; }},
      {"lse is bf16", [](P& p) { p.lse.dtype = DType::kBf16; }},
      {"lse is fp32[4, 4]",
       [](P& p) {
         p.lse = at<float>({4, 4});
       }},
      {"out is on cuda:1; the first argument is on cpu",
       [](P& p) {
         p.out.device = {DeviceKind::kCuda, 1};
       }},
  };
  for (const float scale : {0.0f, -0.5f, NAN, INFINITY})
    list.push_back({"softmax_scale is", [scale](P& p) { p.softmax_scale = scale; }});
  expect_refused<P>(decode(), list);
}

TEST(Checks, SparseAttention) {
  using P = SparseAttention;
  expect_bad_caches_refused(sparse());
  expect_bad_options_refused(sparse());
  expect_refused<P>(sparse(), {
                                  half<P>("q is fp16", &P::q),
                                  {"q is bf16[4, 3, 128]",
                                   [](P& p) {
                                     p.q = at<Bf16>({4, 3, 128});
                                   }},
                                  {"topk_slots is int64",
                                   [](P& p) {
                                     p.topk_slots = at<int64_t>({4, 7});
                                   }},
                                  {"topk_slots is int32[3, 7]", [](P& p) { p.topk_slots.shape[0] = 3; }},
                                  {"topk_slots is int32[28]", [](P& p) { p.topk_slots = at<int32_t>({28}); }},
                                  {"last stride 1", [](P& p) { p.topk_slots.stride[1] = 2; }},
                                  {"topk_lens is int32[4, 1]",
                                   [](P& p) {
                                     p.topk_lens = at<int32_t>({4, 1});
                                   }},
                                  {"out is fp32[4, 3, 64]",
                                   [](P& p) {
                                     p.out = at<float>({4, 3, 64});
                                   }},
                                  {"lse is fp32[3, 4]",
                                   [](P& p) {
                                     p.lse = at<float>({3, 4});
                                   }},
                                  {"softmax_scale is 0", [](P& p) { p.softmax_scale = 0.0f; }},
                              });
}

TEST(Checks, IndexLogits) {
  using P = IndexLogits;
  expect_bad_caches_refused(logits());
  expect_bad_rows_refused(logits());
  expect_refused<P>(logits(), {
                                  half<P>("q is fp16", &P::q),
                                  {"head_dim = 32", [](P& p) { p.q.shape[2] = 16; }},
                                  {"cache.head_dim is 24; accepted: a positive multiple of 16",
                                   [](P& p) {
                                     p.cache.head_dim = 24;
                                     p.q = at<Bf16>({4, 3, 24});
                                   }},
                                  {"index_heads >= 1", [](P& p) { p.q.shape[1] = 0; }},
                                  {"weights is bf16", [](P& p) { p.weights.dtype = DType::kBf16; }},
                                  {"weights is fp32[4, 2]",
                                   [](P& p) {
                                     p.weights = at<float>({4, 2});
                                   }},
                                  {"logits is int32", [](P& p) { p.logits.dtype = DType::kI32; }},
                                  {"logits is fp32[3, 16]", [](P& p) { p.logits.shape[0] = 3; }},
                              });
}

TEST(Checks, IndexSelect) {
  using P = IndexSelect;
  expect_bad_caches_refused(select());
  expect_bad_rows_refused(select());
  expect_refused<P>(select(), {
                                  half<P>("q is fp16", &P::q),
                                  {"weights is fp32[4, 2]",
                                   [](P& p) {
                                     p.weights = at<float>({4, 2});
                                   }},
                                  {"max_seq_len is -1", [](P& p) { p.max_seq_len = -1; }},
                                  {"max_seq_len is 2147483648", [](P& p) { p.max_seq_len = int64_t{1} << 31; }},
                                  {"slots in lists are int32", [](P& p) { p.cache.num_pages = int64_t{1} << 30; }},
                                  {"k >= 1",
                                   [](P& p) {
                                     p.topk_slots = at<int32_t>({4, 0});
                                   }},
                                  {"topk_slots is int64",
                                   [](P& p) {
                                     p.topk_slots = at<int64_t>({4, 5});
                                   }},
                                  {"topk_lens is absent", [](P& p) { p.topk_lens = {}; }},
                                  {"topk_positions is int32[4, 6]",
                                   [](P& p) {
                                     p.topk_positions = at<int32_t>({4, 6});
                                   }},
                              });
}

TEST(Checks, TopK) {
  using P = TopK;
  P good;
  good.logits = at<float>({3, 20});
  good.lens = at<int32_t>({3});
  good.positions = at<int32_t>({3, 8});
  good.counts = at<int32_t>({3});
  expect_refused<P>(good, {
                              half<P>("logits is fp16; accepted: fp32 or bf16", &P::logits),
                              {"logits is int32", [](P& p) { p.logits.dtype = DType::kI32; }},
                              {"fewer than 2^31 columns", [](P& p) { p.logits.shape[1] = int64_t{1} << 31; }},
                              {"lens is int32[2]", [](P& p) { p.lens = at<int32_t>({2}); }},
                              {"k >= 1",
                               [](P& p) {
                                 p.positions = at<int32_t>({3, 0});
                               }},
                              {"positions is int64",
                               [](P& p) {
                                 p.positions = at<int64_t>({3, 8});
                               }},
                              {"counts is absent", [](P& p) { p.counts = {}; }},
                          });
  const Tensor scores = make_tensor(DType::kF32, {2, 20});
  const Tensor lens = make_ints({20, 21});
  P p = good;
  p.logits = scores.view;
  p.lens = lens.view;
  p.positions.shape[0] = p.counts.shape[0] = 2;
  expect_run_refused(p, "lens[1] is 21; accepted: at most 20");
}

TEST(Checks, RaggedPrefill) {
  using P = RaggedPrefill;
  expect_refused<P>(prefill(), {
                                   half<P>("q is fp16", &P::q),
                                   {"k is fp32",
                                    [](P& p) {
                                      p.k = at<float>({6, 3, 32});
                                    }},
                                   {"k is bf16[6, 2, 32]",
                                    [](P& p) {
                                      p.k = at<Bf16>({6, 2, 32});
                                    }},
                                   {"N + P, a positive multiple of 16",
                                    [](P& p) {
                                      p.q = at<Bf16>({4, 3, 40});
                                    }},
                                   {"k is bf16[6, 3, 48]",
                                    [](P& p) {
                                      p.k = at<Bf16>({6, 3, 48});
                                    }},
                                   {"48 values a head as in q", [](P& p) { p.k_rope = {}; }},
                                   {"k_rope is bf16[6, 32]",
                                    [](P& p) {
                                      p.k_rope = at<Bf16>({6, 32});
                                    }},
                                   {"k_rope is bf16[5, 16]", [](P& p) { p.k_rope.shape[0] = 5; }},
                                   {"v is bf16[5, 3, 32]", [](P& p) { p.v.shape[0] = 5; }},
                                   {"V, a positive multiple of 16",
                                    [](P& p) {
                                      p.v = at<Bf16>({6, 3, 24});
                                    }},
                                   {"cu_q_lens is int32[0]", [](P& p) { p.cu_q_lens = at<int32_t>({0}); }},
                                   {"cu_kv_lens is int32[4]", [](P& p) { p.cu_kv_lens = at<int32_t>({4}); }},
                                   {"out is bf16[4, 3, 16]",
                                    [](P& p) {
                                      p.out = at<Bf16>({4, 3, 16});
                                    }},
                                   {"lse is fp32[4, 1]",
                                    [](P& p) {
                                      p.lse = at<float>({4, 1});
                                    }},
                                   {"softmax_scale is -1", [](P& p) { p.softmax_scale = -1.0f; }},
                               });
  struct Bad {
    std::vector<int32_t> q, kv;
    const char* text;
  };
  for (const Bad& bad : {Bad{{1, 2, 4}, {0, 3, 6}, "cu_q_lens[0] is 1; accepted: 0"},
                         Bad{{0, 5, 4}, {0, 3, 6}, "cu_q_lens[2] is 4, less than the 5 before it"},
                         Bad{{0, 2, 3}, {0, 3, 6}, "cu_q_lens ends at 3; accepted: 4 rows"},
                         Bad{{0, 2, 4}, {0, 7, 7}, "cu_kv_lens ends at 7; accepted: at most 6 rows"},
                         Bad{{0, 2, 4}, {0, -1, 6}, "cu_kv_lens[1] is -1"}}) {
    const Tensor q = make_ints(bad.q);
    const Tensor kv = make_ints(bad.kv);
    P p = prefill();
    p.cu_q_lens = q.view;
    p.cu_kv_lens = kv.view;
    expect_run_refused(p, bad.text);
  }
}

TEST(Checks, MergeState) {
  using P = MergeState;
  P good;
  good.out_a = good.out_b = at<Bf16>({4, 3, 32});
  good.lse_a = good.lse_b = at<float>({4, 3});
  good.count_a = good.count_b = at<int32_t>({4});
  expect_refused<P>(good, {
                              half<P>("out_a is fp16", &P::out_a),
                              {"out_b is fp32",
                               [](P& p) {
                                 p.out_b = at<float>({4, 3, 32});
                               }},
                              {"out_b is bf16[4, 3, 16]",
                               [](P& p) {
                                 p.out_b = at<Bf16>({4, 3, 16});
                               }},
                              {"lse_a is absent", [](P& p) { p.lse_a = {}; }},
                              {"lse_b is fp32[3, 4]",
                               [](P& p) {
                                 p.lse_b = at<float>({3, 4});
                               }},
                              {"count_a is int32[3]", [](P& p) { p.count_a = at<int32_t>({3}); }},
                              {"count_b is int64", [](P& p) { p.count_b = at<int64_t>({4}); }},
                              {"base is 2", [](P& p) { p.base = static_cast<LseBase>(2); }},
                          });
}

TEST(Checks, Rope) {
  using P = Rope;
  P good;
  good.x = at<Bf16>({4, 3, 64});
  good.positions = at<int32_t>({4});
  good.cos_sin = at<float>({10, 32});
  good.offset = 32;
  expect_refused<P>(good, {
                              half<P>("x is fp16", &P::x),
                              {"x is bf16[4, 192]",
                               [](P& p) {
                                 p.x = at<Bf16>({4, 192});
                               }},
                              {"positions is int32[3]", [](P& p) { p.positions = at<int32_t>({3}); }},
                              {"cos_sin is fp32[10, 31]",
                               [](P& p) {
                                 p.cos_sin = at<float>({10, 31});
                               }},
                              {"offset is 33; accepted: 0 to width - P = 64 - 32", [](P& p) { p.offset = 33; }},
                              {"offset is -1", [](P& p) { p.offset = -1; }},
                              {"pairing is 4", [](P& p) { p.pairing = static_cast<RopePairing>(4); }},
                          });
  for (const int32_t position : {-1, 10}) {
    const Tensor at_positions = make_ints({0, 9, position, 1});
    P p = good;
    p.positions = at_positions.view;
    expect_run_refused(p, "positions[2] is");
  }
}

TEST(Checks, LatentWriteAndGather) {
  {
    using P = LatentWrite;
    P good;
    good.latent = at<Bf16>({4, 128});
    good.rope = at<Bf16>({4, 32});
    good.slots = at<int64_t>({4});
    good.cache = latent_cache();
    expect_bad_caches_refused(good);
    expect_refused<P>(good, {
                                half<P>("latent is fp16", &P::latent),
                                {"latent is bf16[4, 64]",
                                 [](P& p) {
                                   p.latent = at<Bf16>({4, 64});
                                 }},
                                {"rope is fp32",
                                 [](P& p) {
                                   p.rope = at<float>({4, 32});
                                 }},
                                {"rope is bf16[3, 32]", [](P& p) { p.rope.shape[0] = 3; }},
                                {"slots is fp32", [](P& p) { p.slots = at<float>({4}); }},
                                {"slots is int64[5]", [](P& p) { p.slots = at<int64_t>({5}); }},
                            });
    const Tensor slots = make_ints({0, -1, 15, 16});
    P p = good;
    p.slots = slots.view;
    expect_run_refused(p, "slots[3] is 16; accepted: less than 16");
  }
  using P = LatentGather;
  P good;
  good.slots = at<int32_t>({4});
  good.cache = latent_cache();
  good.latent = at<float>({4, 128});
  good.rope = at<float>({4, 32});
  expect_bad_caches_refused(good);
  expect_refused<P>(good, {
                              half<P>("latent is fp16", &P::latent),
                              {"rope is bf16",
                               [](P& p) {
                                 p.rope = at<Bf16>({4, 32});
                               }},
                              {"slots is absent", [](P& p) { p.slots = {}; }},
                          });
  const Tensor slots = make_ints({0, -1, 0x7FFFFFFF, 3});
  P p = good;
  p.slots = slots.view;
  expect_run_refused(p, "slots[2] is 2147483647");
}

TEST(Checks, IndexKWriteAndGather) {
  {
    using P = IndexKWrite;
    P good;
    good.k = at<Bf16>({4, 32});
    good.slots = at<int32_t>({4});
    good.cache = index_cache();
    expect_bad_caches_refused(good);
    expect_refused<P>(good, {
                                half<P>("k is fp16", &P::k),
                                {"k is bf16[4, 48]",
                                 [](P& p) {
                                   p.k = at<Bf16>({4, 48});
                                 }},
                                {"slots is int32[3]", [](P& p) { p.slots = at<int32_t>({3}); }},
                            });
    const Tensor slots = make_ints({0, 99, 1, 2});
    P p = good;
    p.slots = slots.view;
    expect_run_refused(p, "slots[1] is 99");
  }
  using P = IndexKGather;
  P good;
  good.slots = at<int32_t>({4});
  good.cache = index_cache();
  good.k = at<float>({4, 32});
  expect_bad_caches_refused(good);
  expect_refused<P>(good, {
                              half<P>("k is fp16", &P::k),
                              {"k is fp32[3, 32]", [](P& p) { p.k.shape[0] = 3; }},
                              {"slots is bf16", [](P& p) { p.slots = at<Bf16>({4}); }},
                          });
}

// ---- contents and pointers, at run --------------------------------------------------------------------------------

/// Two requests of two rows, lengths 5 and 9 in pages of 4.
template <class Params>
void expect_bad_contents_refused(Params p) {
  const auto table = [&](std::vector<int32_t> cells) {
    Tensor t = make_tensor(DType::kI32, {2, 4});
    for (size_t i = 0; i < 8; ++i) t.view.ptr<int32_t>()[i] = cells[i];
    return t;
  };
  const Tensor lens = make_ints({5, 9});
  const Tensor good = table({1, 2, 99, 99, 3, 0, 1, -7});
  p.rows.seq_lens = lens.view;
  p.pages.pages = good.view;
  {
    const Tensor bad = table({1, 4, 0, 0, 3, 0, 1, 0});
    Params q = p;
    q.pages.pages = bad.view;
    expect_run_refused(q, "page 1 of request 0 is 4; accepted: 0 to 3");
  }
  {
    const Tensor bad = table({1, 2, 0, 0, 3, 0, -1, 0});
    Params q = p;
    q.pages.pages = bad.view;
    expect_run_refused(q, "page 2 of request 1 is -1");
  }
  for (const int32_t row : {-1, 2}) {
    const Tensor rows = make_ints({0, row});
    Params q = p;
    q.pages.row_indices = rows.view;
    expect_run_refused(q, "row_indices[1] is");
  }
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{0, 3, 2}, {0, 2, 9}, {-1, 2, 4}}) {
    const Tensor indptr = make_ints(list);
    const Tensor indices = make_ints({1, 2, 3, 0, 1});
    Params q = p;
    q.pages = PageTableView::csr(indptr.view, indices.view);
    expect_run_refused(q, "indptr[");
  }
  for (const std::vector<int32_t>& list : {std::vector<int32_t>{0, 5, 4}, {0, 1, 3}, {1, 2, 4}}) {
    const Tensor cu = make_ints(list);
    Params q = p;
    q.rows.cu_q_lens = cu.view;
    expect_run_refused(q, "cu_q_lens");
  }
}

TEST(Checks, ContentsOfTablesAndLengths) {
  expect_bad_contents_refused(decode());
  expect_bad_contents_refused(logits());
  expect_bad_contents_refused(select());
  const Tensor lens = make_ints({5, 16});
  const Tensor table = make_tensor(DType::kI32, {2, 4});
  for (int i = 0; i < 8; ++i) table.view.ptr<int32_t>()[i] = i % 4;
  IndexLogits l = logits();
  l.rows.seq_lens = lens.view;
  l.pages.pages = table.view;
  l.logits = at<float>({4, 15});
  expect_run_refused(l, "request 1 sees 16 keys; accepted: at most 15 (columns of logits)");
  IndexSelect s = select();
  s.rows.seq_lens = lens.view;
  s.pages.pages = table.view;
  s.max_seq_len = 15;
  expect_run_refused(s, "request 1 sees 16 keys; accepted: at most 15 (max_seq_len)");
}

TEST(Checks, RunTakesWhatWasPlanned) {
  const Context context;
  const MlaDecode p = decode();
  const OpPlan<MlaDecode> plan(context, p, {.impl = "ref"});
  const auto refused = [&](const char* text, const std::function<void(MlaDecode&)>& change) {
    MlaDecode other = p;
    change(other);
    try {
      plan.run(other, {});
      ADD_FAILURE() << "ran what should say: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  refused("q is bf16[2, 3, 160] strides [480, 160, 1] on cpu; planned was bf16[4",
          [](MlaDecode& o) { o.q.shape[0] = 2; });
  refused("out is fp32", [](MlaDecode& o) { o.out.dtype = DType::kF32; });
  refused("lse is absent; planned was fp32[4, 3]", [](MlaDecode& o) { o.lse = {}; });
  refused("options differ", [](MlaDecode& o) { o.softmax_scale = 0.2f; });
  refused("options differ", [](MlaDecode& o) { o.q_scale = 0.5f; });
  refused("options differ", [](MlaDecode& o) { o.cache.row_stride_bytes = 320; });
  refused("attn_sink is fp32[3] strides [1] on cpu; planned was absent",
          [](MlaDecode& o) { o.attn_sink = at<float>({3}); });
  refused("max_logits is fp32[4, 3] strides [3, 1] on cpu; planned was absent", [](MlaDecode& o) {
    o.max_logits = at<float>({4, 3});
  });
  refused("options differ", [](MlaDecode& o) { o.cache.num_pages = 5; });
  refused("q.data is null", [](MlaDecode& o) { o.q.data = nullptr; });
  refused("cache.data is null", [](MlaDecode& o) { o.cache.data = nullptr; });
  refused("accepted: a multiple of 16 bytes", [](MlaDecode& o) { o.q.data = g_memory + 8; });
  refused("accepted: a multiple of 16 bytes", [](MlaDecode& o) { o.cache.data = g_memory + 4; });
  refused("accepted: a multiple of 4 bytes", [](MlaDecode& o) { o.lse.data = g_memory + 2; });
}

TEST(Checks, ImplementationsAreForcedByName) {
  try {
    const OpPlan<MlaDecode> plan(Context{}, decode(), {.impl = "fastest"});
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("impl is \"fastest\"; accepted: "), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("ref"), std::string::npos) << e.what();
  }
  // The oracle is nobody's choice unless forced.
  const Context context;
  EXPECT_STRNE(OpPlan<MlaDecode>(context, decode()).impl(), "ref");
  EXPECT_STREQ(OpPlan<MlaDecode>(context, decode(), {.impl = "ref"}).impl(), "ref");
}

TEST(Checks, SetsSayWhatTheyLeaveToOthers) {
  // The CPU kernels: pages of planes in lists.
  SparseAttention planes = sparse();
  planes.cache = latent_cache(LatentFormat::kE4m3PerToken);
  planes.cache.page_stride_bytes = 4096;
  for (const char* impl : {"portable", "avx512_bf16"}) {
    try {
      const OpPlan<SparseAttention> plan(Context{}, planes, {.impl = impl});
      ADD_FAILURE() << impl;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
      const std::string text = e.what();
      EXPECT_TRUE(text.find("cache.format is e4m3_per_token; accepted: fp32, bf16, e4m3 or packed656") !=
                      std::string::npos ||
                  text.find("this machine lacks its instructions") != std::string::npos ||
                  text.find("not part of this build") != std::string::npos)
          << text;
    }
  }
  // The tuned CUDA kernels, in words that a build without CUDA has too.
  EXPECT_EQ(cuda::refuses_options(decode()), "");
  MlaDecode p = decode();
  p.attn_sink = at<float>({3});
  EXPECT_EQ(cuda::refuses_options(p), "attn_sink is given; accepted: none");
  p = decode();
  p.max_logits = at<float>({4, 3});
  EXPECT_EQ(cuda::refuses_options(p), "max_logits is given; accepted: none");
  p = decode();
  p.cache.row_stride_bytes = 336;
  EXPECT_EQ(cuda::refuses_options(p), "cache.row_stride_bytes is 336; accepted: 0");
}

TEST(Checks, AWorkspaceThatIsTooSmallIsRefused) {
  for (const ImplInfo& info : list_implementations<MlaDecode>()) {
    if (!info.runs_here) continue;
    const Context context;
    const Tensor lens = make_ints({0, 0});
    MlaDecode p = decode();
    p.rows.seq_lens = lens.view;
    p = verify::placed_on(info.device, p);
    if (!gannet_tests::takes(info.name, p)) continue;
    const OpPlan<MlaDecode> plan(context, p, {.impl = info.name});
    std::vector<std::byte> workspace(plan.workspace_bytes());
    if (info.device == DeviceKind::kCpu) {
      EXPECT_NO_THROW(plan.run(p, workspace)) << info.name;
    }
    if (workspace.empty()) continue;
    EXPECT_THROW(plan.run(p, std::span(workspace).first(workspace.size() - 1)), Error) << info.name;
  }
}

}  // namespace

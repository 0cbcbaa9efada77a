// Backends over narrow latent rows: what bind takes, and that a step over them is a step over the numbers they stand
// for (spec 0.1.6: a scale counts in scores and in values alike, and gathers give it back).
#include <gtest/gtest.h>

#include <iostream>

#include "case_counts.h"
#include "unit/attention_world.h"

namespace gannet_test {
namespace {

struct NarrowCase {
  std::string impl;
  AttentionArch arch;
  LatentFormat format;
  DType dtype;
};

std::vector<NarrowCase> narrow_cases() {
  std::vector<NarrowCase> cases;
  for (const std::string& impl : running_implementations())
    for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa})
      for (const LatentFormat f : {LatentFormat::kE4m3, LatentFormat::kPacked656, LatentFormat::kE4m3PerToken})
        for (const DType t : {DType::kF32, DType::kBf16}) cases.push_back({impl, arch, f, t});
  return cases;
}
std::string narrow_name(const testing::TestParamInfo<NarrowCase>& info) {
  const NarrowCase& c = info.param;
  return c.impl + "_" + (c.arch == AttentionArch::kMla ? "mla" : "dsa") + "_" + to_string(c.format) + "_" +
         to_string(c.dtype);
}
void PrintTo(const NarrowCase& c, std::ostream* os) { *os << c.impl << " " << to_string(c.format); }

class EveryNarrowFormat : public testing::TestWithParam<NarrowCase> {};
INSTANTIATE_TEST_SUITE_P(Attention, EveryNarrowFormat, testing::ValuesIn(narrow_cases()), narrow_name);

/// fp32 caches with the numbers that the narrow ones stand for, read by the gather.
void copy_numbers(const World& narrow, World& wide) {
  const int64_t n = narrow.latent->num_slots();
  std::vector<int32_t> slots(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) slots[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  const Tensor c(DType::kF32, {n, World::kR}), r(DType::kF32, {n, World::kP});
  for (int32_t l = 0; l < World::kLayers; ++l) {
    LatentGather op{
        .slots = gannet::view(slots.data(), {n}), .cache = narrow.latent->layer(l), .latent = c.view, .rope = r.view};
    op.cache.device = op.latent.device = op.rope.device = {};  // by the CPU
    run_once(Context{}, op);
    const LatentCacheView to = wide.latent->layer(l);
    for (int64_t i = 0; i < n; ++i) {
      auto* row = reinterpret_cast<float*>(to.row(i, latent_row_bytes(to.format, to.geometry)));
      std::memcpy(row, c.view.ptr<float>(i), World::kR * sizeof(float));
      std::memcpy(row + World::kR, r.view.ptr<float>(i), World::kP * sizeof(float));
    }
  }
}

void expect_close(const World& w, const Tensor& a, const Tensor& b, double tolerance, const char* what) {
  ASSERT_EQ(a.view.shape[0], b.view.shape[0]);
  double worst = 0;
  for (int64_t i = 0; i < a.view.shape[0]; ++i)
    for (int32_t h = 0; h < w.options.num_heads; ++h)
      for (int64_t d = 0; d < (a.view.rank == 3 ? a.view.shape[2] : 1); ++d) {
        const double x = a.get(i, h, d), y = b.get(i, h, d);
        worst = std::isnan(x - y) && x != y ? std::numeric_limits<double>::infinity()
                : x == y                    ? worst
                                            : std::max(worst, std::fabs(x - y));
      }
  EXPECT_LE(worst, tolerance) << what;
}

TEST_P(EveryNarrowFormat, AStepOverNarrowRowsIsOneOverTheirNumbers) {
  const NarrowCase& c = GetParam();
  WorldOptions o{.impl = c.impl, .arch = c.arch, .dtype = c.dtype, .latent_format = c.format, .topk = 300};
  // Far from 1, so that a scale that is left out, or counted twice, cannot pass: 1/256 in values and, against logits of
  // +-5, in scores. 1 / scale stays within e4m3.
  o.latent_scale = c.format == LatentFormat::kE4m3 ? 1.0f / 256.0f : 0.0f;
  o.chunk_capacity = 128;
  const std::vector<Request> extends{{.prefix = 70, .rows = 3, .id = 1}, {.prefix = 0, .rows = 2, .id = 2}},
      decodes{{.prefix = 128, .rows = 2, .id = 3}};
  if (c.arch == AttentionArch::kDsa && c.format == LatentFormat::kE4m3PerToken) {
    const std::string text = error_of([&] { World w(o, extends, decodes, 2); }, ErrorCode::kUnsupported);
    EXPECT_TRUE(
        has(text, "[dsa bind] the latent format of layer 0 is e4m3_per_token; accepted: fp32, bf16, e4m3, packed656"));
    return;
  }
  World narrow(o, extends, decodes, 2);
  std::cout << "implementation " << c.impl << " binds " << to_string(c.format) << "\n";
  WorldOptions plain = o;
  plain.latent_format = LatentFormat::kF32;
  plain.latent_scale = 0.0f;
  World wide(plain, extends, decodes, 2);
  const std::vector<World*> worlds{&narrow, &wide};
  for (World* w : worlds) w->backend->prepare(w->step());
  for (int32_t l = 0; l < World::kLayers; ++l) narrow.backend->write(l, StepRows::kAll, narrow.kv(l).rows());
  wide.backend->write(0, StepRows::kAll, wide.kv(0).rows());  // index keys
  copy_numbers(narrow, wide);

  // fp32 activations over fp32 numbers, computed in another order or with codes turned into bf16, which is exact,
  // before they meet probabilities in bf16: the tolerances of test data of this size (attention_world.h).
  const double out_tolerance = 1e-2, lse_tolerance = 2e-3;
  std::vector<Tensor> dense, dense_lse, sparse, prefill;
  for (World* w : worlds) {
    const Tensor q = w->q_absorbed();
    dense.push_back(w->out());
    dense_lse.push_back(w->lse());
    w->backend->attend({.layer = 1,
                        .q = q.view,
                        .write = AlreadyWritten{},
                        .selection = AttendAll{},
                        .out = dense.back().view,
                        .lse = dense_lse.back().view});
    const Tensor qe = w->q_expanded(StepRows::kPrefill), k = w->k_nope(), v = w->v(),
                 rope = w->rope_rows(StepRows::kPrefill);
    prefill.emplace_back(c.dtype, std::initializer_list<int64_t>{w->num_prefill, o.num_heads, World::kV});
    w->backend->dense_prefill({.layer = 1,
                               .q = qe.view,
                               .k_nope = k.view,
                               .k_rope = rope.view,
                               .v = v.view,
                               .write = AlreadyWritten{},
                               .expand = w->expand(),
                               .out = prefill.back().view,
                               .lse = {}});
    if (c.arch == AttentionArch::kMla) continue;
    SelectionBuffer buffer(o.topk, false, memory_of(test_device()));
    buffer.reserve(w->num_rows());
    const TopKSelection s = buffer.view(w->num_rows());
    const Tensor iq = w->index_q(), weights = w->index_weights();
    sparse.push_back(w->out());
    w->backend->select({.layer = 0, .q = iq.view, .weights = weights.view, .write = AlreadyWritten{}, .out = s});
    w->backend->attend(
        {.layer = 0, .q = q.view, .write = AlreadyWritten{}, .selection = s, .out = sparse.back().view, .lse = {}});
  }
  expect_close(narrow, dense[0], dense[1], out_tolerance, "dense");
  expect_close(narrow, dense_lse[0], dense_lse[1], lse_tolerance, "lse");
  expect_close(narrow, prefill[0], prefill[1], out_tolerance, "dense prefill");
  if (!sparse.empty()) expect_close(narrow, sparse[0], sparse[1], out_tolerance, "sparse");
}

}  // namespace
}  // namespace gannet_test

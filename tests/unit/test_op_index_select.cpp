#include <cmath>

#include "op_cases.h"

namespace {

using namespace gannet;
using gannet::verify::make_tensor;
using gannet::verify::Paged;
using gannet::verify::Rng;
using gannet::verify::Tensor;

TEST(IndexSelect, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_select"); }

TEST(IndexSelect, ANanKeyIsChosenLast) {
  // Known fault BL-29: the finite keys are chosen as if it were absent.
  for (const auto& [dtype, format] : {std::pair{DType::kBf16, IndexKFormat::kBf16},
                                      {DType::kF32, IndexKFormat::kF32},
                                      {DType::kBf16, IndexKFormat::kE4m3}}) {
    const Paged paged({.seq_lens = {150, 33}, .q_len = 1});
    const verify::IndexPool pool = make_index_pool(paged, format, ScaleFormat::kFp32, 128, 3);
    std::byte* key = pool.view.values(paged.slot(0, 17));
    if (format == IndexKFormat::kF32) reinterpret_cast<float*>(key)[5] = NAN;
    else if (format == IndexKFormat::kBf16) reinterpret_cast<Bf16*>(key)[5] = Bf16::from_float(NAN);
    else reinterpret_cast<uint8_t*>(key)[5] = 0x7F;
    const Tensor q = make_tensor(dtype, {2, 4, 128});
    const Tensor weights = make_tensor(DType::kF32, {2, 4});
    verify::fill_normal(q, Rng(1));
    verify::fill_normal(weights, Rng(2));
    const Tensor logits = make_tensor(DType::kF32, {2, 150});
    IndexLogits l;
    l.q = q.view;
    l.weights = weights.view;
    l.cache = pool.view;
    l.pages = paged.table();
    l.rows = paged.rows();
    l.logits = logits.view;
    for (const std::string& impl : gannet_tests::taking(l)) {
      const std::vector<float> scores = verify::run(l, {.impl = impl}).floats("logits");
      for (size_t t = 0; t < 150; ++t) EXPECT_EQ(std::isnan(scores[t]), t == 17) << impl << " key " << t;
    }
    for (const int64_t k : {149, 148, 20}) {
      const Tensor slots = make_tensor(DType::kI32, {2, k});
      const Tensor lens = make_tensor(DType::kI32, {2});
      const Tensor positions = make_tensor(DType::kI32, {2, k});
      IndexSelect s;
      s.q = q.view;
      s.weights = weights.view;
      s.cache = pool.view;
      s.pages = paged.table();
      s.rows = paged.rows();
      s.max_seq_len = 150;
      s.topk_slots = slots.view;
      s.topk_lens = lens.view;
      s.topk_positions = positions.view;
      for (const std::string& impl : gannet_tests::taking(s)) {
        const std::vector<int32_t> chosen = verify::run(s, {.impl = impl}).ints("topk_positions");
        for (int64_t c = 0; c < k; ++c) {
          EXPECT_GE(chosen[static_cast<size_t>(c)], 0) << impl;
          EXPECT_NE(chosen[static_cast<size_t>(c)], 17) << impl << " k " << k;
        }
        // The second row has 33 keys: with k above that all are taken, NaN or not.
        if (k > 33) {
          EXPECT_EQ(chosen[static_cast<size_t>(k + 32)], 32) << impl;
        }
      }
    }
  }
}

}  // namespace

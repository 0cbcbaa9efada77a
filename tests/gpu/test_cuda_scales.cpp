// Scales of 656-byte rows far from 1, subnormal ones among them: every implementation on the device against the oracle.
// Skipped, with the reason, where there is no device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "gannet/cuda.h"
#include "unit/fault_problems.h"
#include "verify/problem.h"
#include "verify/tolerances.h"

namespace gannet_test {
namespace {

using namespace gannet;
using verify::Outputs;
using verify::Paged;

constexpr int64_t kHeads = 16, kLatent = 512;

/// A change of scale by 2^exponent of every key, or of each block of 128 values by another where `blocks` says so, and
/// of the queries' latent part by the inverse, so that scores stay what they are. Products of powers of two are exact.
struct Change {
  const char* name;
  int exponent;
  bool blocks;
  bool queries;  // scaled back: 2^-exponent must be a bf16 number
};

/// ||got - want|| / ||want|| of each block of 128 values at worst: a block of small scales counts as much as others.
double worst_block(const std::vector<float>& got, const std::vector<float>& want) {
  constexpr size_t kBlock = 128;
  double worst = 0;
  for (size_t i = 0; i < want.size(); i += kBlock) {
    double error = 0, norm = 0;
    for (size_t k = i; k < i + kBlock; ++k) {
      error += std::pow(double{got[k]} - double{want[k]}, 2);
      norm += std::pow(double{want[k]}, 2);
    }
    const double ratio = std::sqrt(error / norm);
    if (!(ratio <= worst)) worst = ratio;
  }
  return worst;
}

TEST(CudaScales, OfPackedRows) {
  std::string why;
  if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  for (const Change& change : {Change{"1", 0, false, true},
                               {"2^100", 100, false, true},
                               {"2^-100", -100, false, true},
                               {"2^-50 to 2^50, by blocks", 50, true, true},
                               {"2^-130", -130, false, false}}) {
    const gannet_tests::DecodeProblem d({.seq_lens = {700, 64, 131}}, {DType::kBf16, LatentFormat::kPacked656}, kHeads);
    const Paged& paged = d.paged;
    const verify::LatentPool& pool = d.pool;
    const TensorView& q = d.q.view;
    const MlaDecode& p = d.params;
    auto exponent_of = [&](int block) {
      return change.blocks ? change.exponent * (2 * block - 3) / 3 : change.exponent;
    };
    for (size_t i = 0; i < paged.keys_of.size(); ++i) {
      for (int64_t t = 0; t < paged.keys_of[i]; ++t) {
        std::byte* scales = pool.view.row(paged.slot(static_cast<int64_t>(i), t), pool.view.row_stride()) + kLatent;
        for (int b = 0; b < 4; ++b) {
          float scale;
          std::memcpy(&scale, scales + 4 * b, sizeof scale);
          scale = std::ldexp(scale, exponent_of(b));
          std::memcpy(scales + 4 * b, &scale, sizeof scale);
        }
      }
    }
    for (int64_t t = 0; change.queries && t < paged.num_rows; ++t)
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t i = 0; i < kLatent; ++i)
          verify::set(q, std::ldexp(verify::get(q, t, h, i), -exponent_of(static_cast<int>(i) / 128)), t, h, i);
    const Outputs oracle = verify::run(p, {.impl = "ref"});
    const verify::AttentionPrecision precision = precision_of(d.format, 64);
    int ran = 0;
    for (const ImplInfo& info : list_implementations<MlaDecode>()) {
      if (info.device != DeviceKind::kCuda || !info.runs_here) continue;
      // Values rounded to bf16, as that set has them, are multiples of 2^-133.
      if (!change.queries && info.name == "cuda_mma") continue;
      try {
        const Outputs got = verify::run(p, {.impl = info.name});
        ++ran;
        const double error = worst_block(got.floats("out"), oracle.floats("out"));
        std::printf("scales times %s: %s, relative error %.2e\n", change.name, info.name.c_str(), error);
        EXPECT_LE(error, attention_tolerance(precision)) << info.name << " " << change.name;
        const std::vector<float> a = got.floats("lse"), b = oracle.floats("lse");
        for (size_t i = 0; i < b.size(); ++i)
          EXPECT_NEAR(a[i], b[i], lse_tolerance(precision, b[i])) << info.name << " " << change.name;
      } catch (const Error& e) {
        if (e.code() != ErrorCode::kUnsupported) throw;
        std::printf("scales times %s: %s refuses: %s\n", change.name, info.name.c_str(), e.what());
      }
    }
    EXPECT_GT(ran, 0) << change.name;
  }
}

// A score of 1e8, from where fp32 holds even numbers of eight only: a base chosen a fixed distance below it may be
// rounded to the score itself or to twice the distance. One key: its weight is 1, and the output is that row, block by
// block.
TEST(CudaScales, OfOneRowOfAHugeScore) {
  std::string why;
  if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  gannet_tests::DecodeProblem d({.seq_lens = {1}}, {DType::kBf16, LatentFormat::kPacked656}, kHeads);
  d.params.softmax_scale = 1;
  for (int64_t h = 0; h < kHeads; ++h)
    for (int64_t i = 0; i < d.q.view.shape[2]; ++i) verify::set(d.q.view, i == 0 ? 1.0 : 0.0, 0, h, i);
  std::byte* row = d.pool.view.row(d.paged.slot(0, 0), d.pool.view.row_stride());
  constexpr unsigned char kOne = 0x38;  // of e4m3
  std::memcpy(row, &kOne, 1);
  constexpr float kScales[] = {1e8f, 1, 65536, 1};
  std::memcpy(row + kLatent, kScales, sizeof kScales);
  const Outputs oracle = verify::run(d.params, {.impl = "ref"});
  int ran = 0;
  for (const ImplInfo& info : list_implementations<MlaDecode>()) {
    if (info.device != DeviceKind::kCuda || !info.runs_here) continue;
    try {
      const Outputs got = verify::run(d.params, {.impl = info.name});
      ++ran;
      const double error = worst_block(got.floats("out"), oracle.floats("out"));
      std::printf("a score of 1e8: %s, relative error %.2e\n", info.name.c_str(), error);
      EXPECT_LE(error, attention_tolerance(precision_of(d.format, 1))) << info.name;
      const std::vector<float> a = got.floats("lse"), b = oracle.floats("lse");
      // Sets that round keys to bf16 have the score itself rounded.
      for (size_t i = 0; i < b.size(); ++i) EXPECT_NEAR(a[i], b[i], verify::kUnitBf16 * std::fabs(b[i])) << info.name;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
      std::printf("a score of 1e8: %s refuses: %s\n", info.name.c_str(), e.what());
    }
  }
  EXPECT_GT(ran, 0);
}

}  // namespace
}  // namespace gannet_test

// Products over stored weights against plain double loops, and the bits of the invariant mode.
#include "model/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "gannet/error.h"

namespace gannet {
namespace {

const char* const kImpls[] = {"avx512", "portable"};

bool runs_here(const std::string& impl) {
  SerialExecutor serial;
  try {
    Projector(serial, {.impl = impl});
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    return false;
  }
}

/// A weight of any dtype with its values in fp32 beside it.
struct Weight {
  std::vector<std::byte> bytes;
  std::vector<float> scales;
  std::vector<float> values;
  WeightView view;
};

Weight make_weight(DType dtype, int64_t rows, int64_t cols, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  Weight w;
  w.view = {.dtype = dtype, .rows = rows, .cols = cols};
  w.bytes.resize(static_cast<size_t>(rows * cols) * size_of(dtype));
  w.values.resize(static_cast<size_t>(rows * cols));
  const int64_t scale_cols = w.view.scale_cols();
  if (dtype == DType::kE4m3) {
    w.scales.resize(static_cast<size_t>((rows + 127) / 128 * scale_cols));
    for (float& s : w.scales) s = std::exp2(normal(rng)) * 1e-2f;
    w.view.scales = w.scales.data();
  }
  for (int64_t i = 0; i < rows * cols; ++i) {
    const auto at = static_cast<size_t>(i);
    const float x = normal(rng);
    if (dtype == DType::kF32) {
      w.values[at] = x;
      std::memcpy(w.bytes.data() + at * 4, &x, 4);
    } else if (dtype == DType::kBf16) {
      const Bf16 b = Bf16::from_float(x);
      w.values[at] = b.to_float();
      std::memcpy(w.bytes.data() + at * 2, &b, 2);
    } else {
      const E4m3 b = E4m3::from_float(x * 100.0f);
      w.values[at] = b.to_float() * w.scales[static_cast<size_t>(i / cols / 128 * scale_cols + i % cols / 128)];
      std::memcpy(w.bytes.data() + at, &b, 1);
    }
  }
  w.view.data = w.bytes.data();
  return w;
}

std::vector<float> random_rows(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(rng);
  return x;
}

/// Largest error over outputs, relative to sum |x| |w|: an fp32 chain of K additions errs by at most K * 2^-24 of that.
double worst_error(const Product& p, const std::vector<float>& values) {
  double worst = 0.0;
  const int64_t cols = p.w.cols;
  for (int64_t m = 0; m < p.rows; ++m) {
    for (int64_t n = 0; n < p.n(); ++n) {
      double sum = 0.0, magnitude = 0.0;
      for (int64_t k = 0; k < p.k(); ++k) {
        const double w = values[static_cast<size_t>(p.form == ProductForm::kTransposed ? n * cols + k : k * cols + n)];
        const double term = double{p.x[m * p.x_stride + k]} * w;
        sum += term;
        magnitude += std::abs(term);
      }
      worst = std::max(worst, std::abs(p.y[m * p.y_stride + n] - sum) / std::max(magnitude, 1e-30));
    }
  }
  return worst;
}

TEST(Projector, MatchesDoubleLoops) {
  ThreadPool pool({.num_threads = 2});
  for (const char* impl : kImpls) {
    if (!runs_here(impl)) {
      std::printf("[ not here ] %s\n", impl);
      continue;
    }
    std::printf("[ ran      ] %s, library %s\n", impl, Projector::gemm_library().c_str());
    for (const bool invariant : {false, true}) {
      Projector projector(pool, {.invariant = invariant, .impl = impl});
      for (const DType dtype : {DType::kF32, DType::kBf16, DType::kE4m3})
        for (const auto form : {ProductForm::kTransposed, ProductForm::kPlain})
          for (const auto& [rows, cols] :
               {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {130, 96}, {37, 200}, {200, 256}, {576, 160}, {20, 2500}})
            for (const int64_t m : {1, 2, 3, 5, 16, 25, 130}) {
              const Weight w = make_weight(dtype, rows, cols, static_cast<uint32_t>(rows * 7 + cols));
              Product p{.rows = m, .w = w.view, .form = form};
              p.x_stride = p.k() + 3;  // neither side packed
              p.y_stride = p.n() + 5;
              const std::vector<float> x = random_rows(m * p.x_stride, 11);
              std::vector<float> y(static_cast<size_t>(m * p.y_stride), -77.0f);
              p.x = x.data();
              p.y = y.data();
              projector.run({&p, 1});
              EXPECT_LE(worst_error(p, w.values), static_cast<double>(p.k() + 2) * 0x1p-24)
                  << impl << " invariant " << invariant << " dtype " << to_string(dtype) << " form " << int(form)
                  << " [" << rows << ", " << cols << "] m " << m;
              for (int64_t r = 0; r < m; ++r)
                for (int64_t i = p.n(); i < p.y_stride; ++i)
                  ASSERT_EQ(y[static_cast<size_t>(r * p.y_stride + i)], -77.0f) << "written beyond a row";
            }
    }
  }
}

TEST(Projector, RowSlicesKeepTheirScaleBlocks) {
  SerialExecutor serial;
  Projector projector(serial);
  const Weight w = make_weight(DType::kE4m3, 300, 130, 3);
  const std::vector<float> x = random_rows(130, 4);
  std::vector<float> whole(300), part(60);
  projector.linear(x.data(), 1, w.view, whole.data());
  projector.linear(x.data(), 1, w.view.row_slice(100, 60), part.data());
  for (size_t i = 0; i < part.size(); ++i) EXPECT_EQ(part[i], whole[100 + i]) << i;
}

TEST(Projector, InvariantRowsHaveTheSameBitsWhateverTheCount) {
  for (const char* impl : kImpls) {
    if (!runs_here(impl)) continue;
    std::printf("[ ran      ] %s\n", impl);
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kE4m3})
      for (const auto form : {ProductForm::kTransposed, ProductForm::kPlain})
        for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{192, 256}, {131, 50}}) {
          const Weight w = make_weight(dtype, rows, cols, 5);
          Product p{.w = w.view, .form = form};
          p.x_stride = p.k();
          p.y_stride = p.n();
          constexpr int64_t kMaxRows = 130;
          const std::vector<float> x = random_rows(kMaxRows * p.k(), 6);
          std::vector<float> alone(static_cast<size_t>(kMaxRows * p.n()));
          SerialExecutor serial;
          Projector one(serial, {.invariant = true, .impl = impl});
          for (int64_t r = 0; r < kMaxRows; ++r) {
            p.x = x.data() + r * p.k();
            p.y = alone.data() + r * p.n();
            p.rows = 1;
            one.run({&p, 1});
          }
          for (const int threads : {1, 2, 3}) {
            ThreadPool pool({.num_threads = threads});
            Projector many(pool, {.invariant = true, .impl = impl});
            for (int64_t m = 1; m <= kMaxRows; m += m < 40 ? 1 : 9)
              for (const int64_t first : {int64_t{0}, int64_t{1}, kMaxRows - m}) {
                if (first + m > kMaxRows) continue;
                std::vector<float> y(static_cast<size_t>(m * p.n()));
                p.x = x.data() + first * p.k();
                p.y = y.data();
                p.rows = m;
                many.run({&p, 1});
                ASSERT_EQ(0, std::memcmp(y.data(), alone.data() + first * p.n(), y.size() * sizeof(float)))
                    << impl << " " << to_string(dtype) << " form " << int(form) << " rows " << m << " from " << first
                    << " threads " << threads;
              }
          }
        }
  }
}

TEST(Projector, E4m3WeightsKeepTheirFp32Product) {
  // 1.875 * 1.0000001 in fp32 is not a bf16 value: a rounded product would show.
  const E4m3 value = E4m3::from_float(1.875f);
  const float scale = 1.0000001f;
  const WeightView w{.data = &value, .dtype = DType::kE4m3, .rows = 1, .cols = 1, .scales = &scale};
  const float x = 1.0f;
  float y = 0.0f;
  SerialExecutor serial;
  Projector(serial).linear(&x, 1, w, &y);
  EXPECT_EQ(y, 1.875f * scale);
  EXPECT_NE(y, Bf16::from_float(y).to_float());
}

TEST(Projector, E4m3CodesAreReadRight) {
  for (const char* impl : kImpls) {
    if (!runs_here(impl)) continue;
    SerialExecutor serial;
    Projector projector(serial, {.impl = impl});
    std::vector<E4m3> codes(256);
    for (int i = 0; i < 256; ++i) codes[static_cast<size_t>(i)].bits = static_cast<uint8_t>(i);
    const float scales[2] = {1.0f, 1.0f};
    const WeightView w{.data = codes.data(), .dtype = DType::kE4m3, .rows = 1, .cols = 256, .scales = scales};
    const float x = 1.0f;
    std::vector<float> y(256);
    const Product p{
        .x = &x, .x_stride = 1, .rows = 1, .w = w, .form = ProductForm::kPlain, .y = y.data(), .y_stride = 256};
    projector.run({&p, 1});
    for (size_t i = 0; i < 256; ++i) {
      if ((i & 0x7f) == 0x7f) EXPECT_TRUE(std::isnan(y[i])) << i;
      else EXPECT_EQ(y[i], codes[i].to_float()) << i;
    }
  }
}

TEST(Projector, RefusesWhatItCannotRead) {
  SerialExecutor serial;
  EXPECT_THROW(Projector(serial, {.impl = "sse9"}), Error);
  Projector projector(serial);
  float x = 0.0f, y = 0.0f;
  EXPECT_THROW(projector.linear(&x, 1, {.data = &x, .dtype = DType::kF16, .rows = 1, .cols = 1}, &y), Error);
  EXPECT_THROW(projector.linear(&x, 1, {.data = &x, .dtype = DType::kE4m3, .rows = 1, .cols = 1}, &y), Error);
  projector.linear(&x, 0, {.data = &x, .dtype = DType::kF32, .rows = 1, .cols = 1}, &y);  // nothing to do
}

}  // namespace
}  // namespace gannet

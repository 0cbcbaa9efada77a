// Every kernel of the library on small problems, for compute-sanitizer: under racecheck a kernel takes a hundred to a
// thousand times as long. The cases are the small ones of src/verify, against the oracle, for each set of the device by
// name; workspaces are not cleared, so that initcheck sees reads of what no kernel wrote. scripts/test-gpu runs this
// program under the four tools, in several processes at once (GTEST_TOTAL_SHARDS and GTEST_SHARD_INDEX: what takes
// longest comes first, so that shards get one each), which by hand is
//     compute-sanitizer --tool racecheck --error-exitcode 1 build/cuda/tests/test_cuda_sanitizer
//     --gtest_filter='*sm90*'
// A run of all its tests fails where a kernel of the binary that this device can run was never launched.
// Skipped, with the reason, where there is no device.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cuda/runtime.h"
#include "gannet/cuda.h"
#include "gannet/hadamard.h"
#include "verify/problem.h"
#include "verify/verify.h"

namespace gannet_test {
namespace {

using namespace gannet;

constexpr Device kDevice{DeviceKind::kCuda, 0};

// ---- which kernels there are, and which were launched
// ----------------------------------------------------------------

/// Kernels of this binary by the host function that stands for each, and those that were launched.
struct Kernels {
  std::map<const void*, std::string> all;
  std::set<const void*> launched;

  static Kernels& get() {  // registration comes before static objects are made
    static Kernels kernels;
    return kernels;
  }
};

std::string demangled(const char* name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

/// Why this device cannot launch the kernel; empty: it can.
std::string impossible(const std::string& kernel) {
  // cuda/mma/absorbed.cu: configurations with room for one tile, and the merge of the only ragged one of 16 lanes.
  constexpr const char* kOneTile[] = {"mma::Config<64, 1>", "mma::Config<16, 1>",
                                      "mma::combine_kernel<16, gannet::v0::cuda::mma::Ragged>"};
  constexpr int kBytesOfTwoTiles = 226 * 1024;
  int shared = 0;
  cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  for (const char* name : kOneTile)
    if (shared >= kBytesOfTwoTiles && kernel.find(name) != std::string::npos)
      return "for devices with less shared memory";
  for (const ImplInfo& info : list_implementations<MlaDecode>()) {
    const std::string space = info.name == "cuda_sm90" ? "cuda::sm90::" : info.name == "cuda_mma" ? "cuda::mma::" : "";
    if (!space.empty() && !info.runs_here && kernel.find(space) != std::string::npos)
      return info.name + " does not run here";
  }
  return {};
}

/// Ends a whole run with what was not launched.
class EveryKernel : public testing::Environment {
 public:
  void TearDown() override {
    const Kernels& kernels = Kernels::get();
    const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
    std::printf("kernels: %zu of %zu launched\n", kernels.launched.size(), kernels.all.size());
    if (cuda_device_count() == 0) return;
    if (tests.test_to_run_count() != tests.total_test_count()) return;  // of some tests, or a shard of them
    if (kernels.all.empty()) ADD_FAILURE() << "no kernel was seen: is the library shared, so that nothing is wrapped?";
    for (const auto& [host, name] : kernels.all) {
      if (kernels.launched.count(host) != 0) continue;
      const std::string why = impossible(name);
      if (why.empty()) ADD_FAILURE() << "never launched: " << name;
      else std::printf("not launched, %s: %s\n", why.c_str(), name.c_str());
    }
  }
};
const testing::Environment* const every_kernel = testing::AddGlobalTestEnvironment(new EveryKernel);

// ---- operations
// --------------------------------------------------------------------------------------------------------

/// Small cases of an operation with one set, of formats with this in their name.
struct Part {
  const char *op, *impl, *format, *name;
};
void PrintTo(const Part& p, std::ostream* out) { *out << p.op << ", " << p.impl << ", " << p.format; }

// The longest first.
constexpr Part kParts[] = {
    {"mla_decode", "cuda_mma", "q bf16, cache bf16", "bf16"},
    {"mla_decode", "cuda_sm90", "q bf16, cache bf16", "bf16"},
    {"mla_decode", "cuda_mma", "q bf16, cache e4m3,", "e4m3"},
    {"mla_decode", "cuda_mma", "q e4m3, cache e4m3,", "e4m3_queries"},
    {"mla_decode", "cuda_mma", "q bf16, cache packed656", "packed656"},
    {"mla_decode", "cuda_sm90", "q e4m3, cache e4m3,", "e4m3_queries"},
    {"mla_decode", "cuda_sm90", "q bf16, cache packed656", "packed656"},
    {"topk", "cuda_generic", "scores fp32", "fp32"},
    {"topk", "cuda_generic", "scores bf16", "bf16"},
    {"mla_decode", "cuda_generic", "q bf16", "bf16_queries"},
    {"mla_decode", "cuda_generic", "q fp32", "fp32_queries"},
    {"mla_decode", "cuda_generic", "q e4m3", "e4m3_queries"},
    {"sparse_attention", "cuda_mma", "q bf16, cache bf16", "bf16"},
    {"sparse_attention", "cuda_mma", "q bf16, cache e4m3,", "e4m3"},
    {"sparse_attention", "cuda_mma", "q bf16, cache packed656", "packed656"},
    {"sparse_attention", "cuda_mma", "q e4m3, cache e4m3,", "e4m3_queries"},
    {"sparse_attention", "cuda_sm90", "q bf16, cache bf16", "bf16"},
    {"sparse_attention", "cuda_generic", "q bf16", "bf16_queries"},
    {"sparse_attention", "cuda_generic", "q fp32", "fp32_queries"},
    {"sparse_attention", "cuda_generic", "q e4m3", "e4m3_queries"},
    {"ragged_prefill", "cuda_generic", "qkv bf16", "bf16"},
    {"ragged_prefill", "cuda_generic", "qkv fp32", "fp32"},
    {"ragged_prefill", "cuda_mma", "qkv bf16", "bf16"},
    {"ragged_prefill", "cuda_sm90", "qkv bf16", "bf16"},
    {"index_logits", "cuda_generic", "q ", "all"},
    {"index_logits", "cuda_mma", "q bf16", "bf16_queries"},
    {"index_logits", "cuda_mma", "q e4m3", "e4m3_queries"},
    {"index_logits", "cuda_sm90", "q e4m3, index keys e4m3", "e4m3"},
    {"index_select", "cuda_generic", "q ", "all"},
    {"index_select", "cuda_mma", "q ", "all"},
    {"index_select", "cuda_sm90", "q e4m3, index keys e4m3", "e4m3"},
    {"latent_write", "cuda_generic", "rows fp32", "fp32_rows"},
    {"latent_write", "cuda_generic", "rows bf16", "bf16_rows"},
    {"latent_gather", "cuda_generic", "rows fp32", "fp32_rows"},
    {"latent_gather", "cuda_generic", "rows bf16", "bf16_rows"},
    {"index_k_write", "cuda_generic", "rows", "all"},
    {"index_k_gather", "cuda_generic", "rows", "all"},
    {"rope", "cuda_generic", "x ", "all"},
    {"merge_state", "cuda_generic", "out ", "all"},
};

class SmallCases : public testing::TestWithParam<Part> {};

TEST_P(SmallCases, AgreeWithTheOracle) {
  const Part& part = GetParam();
  std::string why;
  if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  for (const ImplInfo& info : list_all_implementations())
    if (info.op == part.op && info.name == part.impl && !info.runs_here)
      GTEST_SKIP() << info.name << " does not run here";
  int64_t ran = 0;
  verify::verify_operations({.op = part.op,
                             .impl = part.impl,
                             .format = part.format,
                             .small = true,
                             .on_line = [&](const verify::Line& line) {
                               std::puts(verify::to_string(line).c_str());
                               EXPECT_TRUE(line.pass) << verify::to_string(line);
                               if (!line.refused) ran += line.num_cases;
                             }});
  EXPECT_GT(ran, 0) << "no case ran";
}

INSTANTIATE_TEST_SUITE_P(, SmallCases, testing::ValuesIn(kParts), [](const testing::TestParamInfo<Part>& info) {
  return std::string(info.param.op) + "_" + info.param.impl + "_" + info.param.name;
});

// ---- kernels that are no operation's
// -----------------------------------------------------------------------------------

class SmallKernels : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  }
};

/// Memory of the device that holds these numbers, or nothing yet.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : count_(count), memory_(count * sizeof(T), cuda_memory()) {}
  explicit OnDevice(const std::vector<T>& host) : OnDevice(host.size()) {
    cuda_copy(data(), host.data(), host.size() * sizeof(T), kDevice);
    cuda_wait(kDevice);
  }
  T* data() { return static_cast<T*>(static_cast<void*>(memory_.data())); }
  std::vector<T> read() {
    std::vector<T> host(count_);
    cuda_copy(host.data(), data(), count_ * sizeof(T), kDevice);
    cuda_wait(kDevice);
    return host;
  }

 private:
  size_t count_;
  gannet::Buffer memory_;
};

TEST_F(SmallKernels, RowsOfAStepFromLengthsOnTheDevice) {
  const verify::Paged paged({.seq_lens = {130, 0, 1, 64, 65}, .q_len = 3, .page_size = 16});
  const TensorView& table = paged.pages.view;
  const std::vector<int32_t>& lens = paged.spec.seq_lens;
  const auto requests = static_cast<int64_t>(lens.size());
  std::vector<int32_t> pages;
  for (int64_t r = 0; r < requests; ++r)
    for (int64_t c = 0; c < table.shape[1]; ++c) pages.push_back(*table.ptr<int32_t>(r, c));
  OnDevice<int32_t> seq_lens(lens), ids(pages), out_lens(lens.size());
  const auto rows = static_cast<size_t>(paged.num_rows);
  OnDevice<int32_t> positions(rows), slots(rows), row_lens(rows);
  cuda::plan_decode_rows("test", 0,
                         {.seq_lens = seq_lens.data(),
                          .pages = ids.data(),
                          .columns = table.shape[1],
                          .num_requests = requests,
                          .max_len = table.shape[1] * paged.spec.page_size,
                          .num_pages = paged.num_pages,
                          .q_len = paged.spec.q_len,
                          .page_size = paged.spec.page_size,
                          .out_seq_lens = out_lens.data(),
                          .positions = positions.data(),
                          .write_slots = slots.data(),
                          .row_lens = row_lens.data()},
                         {});
  std::vector<int32_t> want_positions, want_slots, want_lens;
  for (int64_t r = 0; r < requests; ++r) {
    for (int32_t j = 0; j < paged.spec.q_len; ++j) {
      const int32_t position = lens[static_cast<size_t>(r)] - paged.spec.q_len + j;
      want_positions.push_back(std::max(position, 0));
      want_slots.push_back(position < 0 ? -1 : static_cast<int32_t>(paged.slot(r, position)));
    }
  }
  want_lens.assign(paged.keys_of_row.begin(), paged.keys_of_row.end());
  EXPECT_EQ(out_lens.read(), lens);
  EXPECT_EQ(positions.read(), want_positions);
  EXPECT_EQ(slots.read(), want_slots);
  EXPECT_EQ(row_lens.read(), want_lens);
}

TEST_F(SmallKernels, RowsOfATable) {
  constexpr int64_t kRows = 5, kWidth = 300, kStride = 310;
  const std::vector<int32_t> wanted{3, -1, 0, 4, 4};
  std::vector<int32_t> from(kRows * kStride), want;
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<int32_t>(i * i % 1009);
  for (const int32_t row : wanted)
    for (int64_t i = 0; i < kWidth; ++i) want.push_back(row < 0 ? -7 : from[static_cast<size_t>(row * kStride + i)]);
  OnDevice<int32_t> source(from), target(want.size());
  cuda::gather_int32_rows("test", 0, wanted, source.data(), kStride, target.data(), kWidth, kWidth, -7, {});
  EXPECT_EQ(target.read(), want);
}

// A row's bits are the same on every device.
TEST_F(SmallKernels, RotatedRows) {
  constexpr int64_t kRows = 5;
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t n : {8, 32, 64, 128, 256, 512, 1024}) {
      const verify::Tensor x = verify::make_tensor(dtype, {kRows, n}), y = verify::make_tensor(dtype, {kRows, n});
      verify::fill_normal(x, verify::Rng(static_cast<uint64_t>(n)));
      hadamard({}, x.view, y.view);
      const std::vector<std::byte> host(x.buffer->data(), x.buffer->data() + x.buffer->size());
      OnDevice<std::byte> from(host), to(host.size());
      const TensorView there = view(from.data(), dtype, {kRows, n}, kDevice),
                       back = view(to.data(), dtype, {kRows, n}, kDevice);
      hadamard({}, there, back);
      EXPECT_EQ(to.read(), std::vector<std::byte>(y.buffer->data(), y.buffer->data() + host.size()))
          << to_string(dtype) << " " << n;
    }
  }
}

TEST_F(SmallKernels, ACounterOnTheStream) {
  StreamCounter counter;
  for (int i = 0; i < 3; ++i) counter.signal({});
  cuda_wait(kDevice);
  EXPECT_EQ(counter.value(), 3u);
}

}  // namespace

/// For the wrappers below, which the linker calls by name.
void note_kernel(const void* host, const char* name) { Kernels::get().all[host] = demangled(name); }
void note_launch(const void* host) { Kernels::get().launched.insert(host); }

}  // namespace gannet_test

// The linker puts these two in front of CUDA's (--wrap, tests/CMakeLists.txt): what nvcc's code calls for each kernel
// before main, and the one way in which src/cuda launches.
extern "C" {

void __real___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int threads,
                                   uint3* thread, uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size);
void __wrap___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name, int threads,
                                   uint3* thread, uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size) {
  gannet_test::note_kernel(host, name);
  __real___cudaRegisterFunction(handle, host, device, name, threads, thread, block, block_dim, grid_dim, warp_size);
}

cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  gannet_test::note_launch(kernel);
  return __real_cudaLaunchKernelExC(config, kernel, arguments);
}

}  // extern "C"

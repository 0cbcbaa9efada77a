// An engine that has pages, a page table and threads of its own, and takes only the attention from Gannet: two decode
// steps of two requests through the backend `mla`.
//
// The pages of this engine hold all layers of a token side by side (page-major), so that a page moves as one piece:
// a layer's view is the same memory at another offset, with a page stride that spans all layers.
#include <gannet/gannet.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace {

/// The engine's threads behind Gannet's interface. A real engine hands the tasks to the pool that it has.
class EngineThreads final : public gannet::Executor {
 public:
  explicit EngineThreads(int num_workers) : num_workers_(num_workers) {}
  int num_workers() const noexcept override { return num_workers_; }
  void parallel_for(int64_t num_tasks, gannet::TaskRef f) override {
    std::atomic<int64_t> next = 0;
    std::exception_ptr error;
    std::mutex error_mutex;
    const auto work = [&](int worker) {
      try {
        for (int64_t t = next++; t < num_tasks; t = next++) f(t, worker);
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
      }
    };
    std::vector<std::thread> others;
    for (int w = 1; w < num_workers_ && w < num_tasks; ++w) others.emplace_back(work, w);
    work(0);
    for (std::thread& t : others) t.join();
    if (error) std::rethrow_exception(error);
  }

 private:
  int num_workers_;
};

constexpr int32_t kLayers = 2;
constexpr int32_t kHeads = 16;
constexpr int32_t kPageSize = 64;
constexpr int64_t kPages = 6;
constexpr int64_t kLayerBytes = kPageSize * 576 * 2;    // bf16 rows of 512 + 64
constexpr int64_t kPageStride = kLayers * kLayerBytes;  // all layers of a page lie together

}  // namespace

int main() {
  EngineThreads threads(2);
  const gannet::Context context{.executor = &threads};

  // The engine's memory, and a view of it for each layer.
  gannet::Buffer memory(static_cast<size_t>(kPages * kPageStride));
  std::vector<gannet::LayerCaches> layers;
  for (int32_t l = 0; l < kLayers; ++l)
    layers.push_back({.latent = {.data = memory.data() + l * kLayerBytes,
                                 .format = gannet::LatentFormat::kBf16,
                                 .num_pages = kPages,
                                 .page_size = kPageSize,
                                 .page_stride_bytes = kPageStride}});

  gannet::AttentionConfig config;
  config.arch = gannet::AttentionArch::kMla;
  config.num_heads = kHeads;
  config.qk_nope_head_dim = 128;
  config.v_head_dim = 128;
  config.softmax_scale = 1.0f / std::sqrt(192.0f);
  config.page_size = kPageSize;
  config.max_context_len = 256;
  const auto backend = gannet::make_attention_backend(context, config);
  backend->bind(layers);

  // Two requests, of 64 and 1 tokens so far, in CSR form: pages 4, 2 and page 5.
  const std::vector<int32_t> indptr = {0, 2, 3};
  const std::vector<int32_t> indices = {4, 2, 5};
  const gannet::PageTableView pages =
      gannet::PageTableView::csr(gannet::view(indptr.data(), {3}), gannet::view(indices.data(), {3}));

  std::vector<float> q(2 * kHeads * 576, 0.01f);
  std::vector<float> latent(2 * 512);
  std::vector<float> rope(2 * 64, 0.0f);
  std::vector<float> out(2 * kHeads * 512);
  std::vector<int32_t> seq_lens = {1, 1};
  for (int step = 0; step < 65; ++step) {
    // Request 0 goes from page 4 into page 2 at its 65th token; request 1 stays with one token, written once.
    seq_lens = {step + 1, step == 0 ? 1 : 0};
    backend->prepare({.seq_lens = seq_lens, .prefix_lens = {}, .extend_lens = {}, .pages = pages});
    for (size_t i = 0; i < latent.size(); ++i) latent[i] = i < 512 ? static_cast<float>(step) : 7.0f;
    for (int32_t l = 0; l < kLayers; ++l)
      backend->attend({.layer = l,
                       .rows = gannet::StepRows::kDecode,
                       .q = gannet::view(q.data(), {2, kHeads, 576}),
                       .write = gannet::KvRows{.latent = gannet::view(latent.data(), {2, 512}),
                                               .rope = gannet::view(rope.data(), {2, 64})},
                       .selection = gannet::AttendAll{},
                       .out = gannet::view(out.data(), {2, kHeads, 512})});
    if (step == 0) std::printf("step 0: %g and %g\n", double{out[0]}, double{out[kHeads * 512]});
  }
  // Keys 0 to 64, whose scores grow by 0.01 * 512 / sqrt(192) = 0.3695 a key: the mean is that of a geometric series.
  double sum = 0.0;
  double weighted = 0.0;
  for (int key = 0; key <= 64; ++key) {
    const double weight = std::exp(0.01 * 512 / std::sqrt(192.0) * (key - 64));
    sum += weight;
    weighted += weight * key;
  }
  const double expected = weighted / sum;
  std::printf("step 64: %.2f, expected %.2f; a padded request gives %g\n", double{out[0]}, expected,
              double{out[kHeads * 512]});
  // bf16 holds the integers to 64 exactly; 0.01 is not a bf16, and weights may be rounded to bf16: 2^-8 of 64.
  return std::fabs(out[0] - expected) < 0.25 && out[kHeads * 512] == 0.0f ? 0 : 1;
}

// An engine that has pages, a page table and threads of its own, and takes only the attention from Gannet: 65 decode
// steps of two requests through the backend `mla`, each compared with a loop in double precision. The exit code is 0 if
// they agree.
//
// The pages of this engine hold all layers of a token side by side (page-major), so that a page moves as one piece:
// a layer's view is the same memory at another offset, with a page stride that spans all layers.
#include <gannet/gannet.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace {

// ---- the engine's threads -----------------------------------------------------------------------------------------

/// A pool that sleeps between jobs, behind Gannet's interface. Its caller is worker 0.
class EngineThreads final : public gannet::Executor {
 public:
  explicit EngineThreads(int num_workers) {
    for (int w = 1; w < num_workers; ++w) threads_.emplace_back([this, w] { serve(w); });
  }
  ~EngineThreads() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  EngineThreads(const EngineThreads&) = delete;
  EngineThreads& operator=(const EngineThreads&) = delete;

  int num_workers() const noexcept override { return static_cast<int>(threads_.size()) + 1; }

  void parallel_for(int64_t num_tasks, gannet::TaskRef f) override {
    std::unique_lock lock(mutex_);
    job_.emplace(Job{f, 0, num_tasks, 0, nullptr});
    changed_.notify_all();
    take_tasks(0, lock);
    changed_.wait(lock, [&] { return job_->num_running == 0; });
    const std::exception_ptr error = job_->error;
    job_.reset();
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Job {
    gannet::TaskRef f;
    int64_t next, num_tasks, num_running;
    std::exception_ptr error;  // of the first task that failed
  };

  void take_tasks(int worker, std::unique_lock<std::mutex>& lock) {
    while (job_ && job_->next < job_->num_tasks) {
      const gannet::TaskRef f = job_->f;
      const int64_t task = job_->next++;
      ++job_->num_running;  // keeps the job while the lock is open
      lock.unlock();
      std::exception_ptr error;
      try {
        f(task, worker);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !job_->error) job_->error = error;
      if (error) job_->next = job_->num_tasks;  // what is left is not begun
      if (--job_->num_running == 0) changed_.notify_all();
    }
  }
  void serve(int worker) {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      take_tasks(worker, lock);
      changed_.wait(lock, [&] { return stop_ || (job_ && job_->next < job_->num_tasks); });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::optional<Job> job_;
  std::vector<std::thread> threads_;
};

// ---- the engine's pages -------------------------------------------------------------------------------------------

constexpr int32_t kLayers = 2;
constexpr int32_t kHeads = 16;
constexpr int32_t kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr int32_t kPageSize = 64;
constexpr int64_t kPages = 6;
constexpr int64_t kLayerBytes = int64_t{kPageSize} * kWidth * 2;  // bf16
constexpr int64_t kPageStride = kLayers * kLayerBytes;            // all layers of a page lie together
constexpr int kRequests = 2;

/// Numbers in [-1, 1).
float draw() {
  static uint32_t state = 12345;
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f;
}
void fill(std::vector<gannet::Bf16>& v) {
  for (gannet::Bf16& x : v) x = gannet::Bf16::from_float(draw());
}

/// A request's pages in the order of its tokens.
using Pages = std::vector<int32_t>;

const gannet::Bf16* row_of(const gannet::Buffer& memory, int32_t layer, const Pages& pages, int position) {
  return reinterpret_cast<const gannet::Bf16*>(
             memory.data() + pages[static_cast<size_t>(position / kPageSize)] * kPageStride + layer * kLayerBytes) +
         position % kPageSize * kWidth;
}

/// Largest difference of one head's output from attention over the first `num_keys` tokens; 0 keys give 0.
double error_of(const gannet::Buffer& memory, int32_t layer, const Pages& pages, int num_keys, const gannet::Bf16* q,
                float scale, const float* out) {
  std::vector<double> right(kLatent, 0.0);
  double sum = 0.0;
  for (int s = 0; s < num_keys; ++s) {
    const gannet::Bf16* row = row_of(memory, layer, pages, s);
    double dot = 0.0;
    for (int i = 0; i < kWidth; ++i) dot += double{q[i].to_float()} * double{row[i].to_float()};
    const double weight = std::exp(double{scale} * dot);
    sum += weight;
    for (int i = 0; i < kLatent; ++i) right[static_cast<size_t>(i)] += weight * double{row[i].to_float()};
  }
  double worst = 0.0;
  for (int i = 0; i < kLatent; ++i) {
    const double difference = std::fabs((num_keys > 0 ? right[static_cast<size_t>(i)] / sum : 0.0) - double{out[i]});
    worst = difference <= worst ? worst : difference;  // NaN is the largest
  }
  return worst;
}

}  // namespace

int main() {
  EngineThreads threads(3);
  const gannet::Context context{.executor = &threads};

  // The engine's memory, and a view of it for each layer. Pages hold what they held before: NaN here.
  gannet::Buffer memory(static_cast<size_t>(kPages * kPageStride));
  std::fill_n(memory.data(), memory.size(), std::byte{0xff});
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
  config.softmax_scale = 1.0f / std::sqrt(192.0f);
  config.page_size = kPageSize;
  config.max_context_len = 256;
  const auto backend = gannet::make_attention_backend(context, config);
  backend->bind(layers);

  // The engine's page table in CSR form: request 0 goes from page 4 into page 2 at its 65th token; request 1 has
  // page 5.
  const std::vector<Pages> pages_of = {{4, 2}, {5}};
  const std::vector<int32_t> indptr = {0, 2, 3}, indices = {4, 2, 5};
  const gannet::PageTableView pages =
      gannet::PageTableView::csr(gannet::view(indptr.data(), {3}), gannet::view(indices.data(), {3}));

  std::vector<gannet::Bf16> q(kRequests * kHeads * kWidth), latent(kRequests * kLatent), rope(kRequests * kRope);
  std::vector<float> out(kRequests * kHeads * kLatent);
  double worst = 0.0;
  bool padding_is_zero = true;
  for (int step = 0; step < 65; ++step) {
    // Request 1 has left after its third token: its place in the batch is padding, of length 0.
    const std::vector<int32_t> seq_lens = {step + 1, step < 3 ? step + 1 : 0};
    backend->prepare({.seq_lens = seq_lens, .prefix_lens = {}, .extend_lens = {}, .pages = pages});
    for (int32_t l = 0; l < kLayers; ++l) {
      fill(q);
      fill(latent);
      fill(rope);
      backend->attend({.layer = l,
                       .rows = gannet::StepRows::kDecode,
                       .q = gannet::view(q.data(), {kRequests, kHeads, kWidth}),
                       .write = gannet::KvRows{.latent = gannet::view(latent.data(), {kRequests, kLatent}),
                                               .rope = gannet::view(rope.data(), {kRequests, kRope})},
                       .selection = gannet::AttendAll{},
                       .out = gannet::view(out.data(), {kRequests, kHeads, kLatent})});
      for (int r = 0; r < kRequests; ++r) {
        const int num_keys = seq_lens[static_cast<size_t>(r)];
        const int head = (step + r) % kHeads;  // one of them each time: the loop above is slow
        const size_t row = static_cast<size_t>(r * kHeads + head);
        const double e = error_of(memory, l, pages_of[static_cast<size_t>(r)], num_keys, &q[row * kWidth],
                                  config.softmax_scale, &out[row * kLatent]);
        worst = e <= worst ? worst : e;
        padding_is_zero = padding_is_zero && (num_keys > 0 || e == 0.0);
      }
    }
  }
  std::printf("65 steps of %d layers: largest error %.1e; padding gives %s\n", kLayers, worst,
              padding_is_zero ? "0" : "SOMETHING ELSE");
  // Weights may be rounded to bf16 before they meet the values, which are below 1: 2^-9 of each, and so of their mean.
  return worst <= 0x1p-9 && padding_is_zero ? 0 : 1;
}

#include "bench/roofs.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <vector>

#include "bench/roof_loops.h"
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {
const RoofLoops* where_it_runs(const RoofLoops& loops, const ImplementationSet& set) noexcept {
  return loops.isa != nullptr && set.compiled && set.runs_here() ? &loops : nullptr;
}
}  // namespace

const RoofLoops* avx512_bf16_loops() noexcept { return where_it_runs(kAvx512Bf16Loops, cpu::avx512_bf16_set()); }

int64_t last_level_cache_bytes() {
  constexpr int64_t kUnknown = int64_t{64} << 20;
  int64_t bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  bytes = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE));
#endif
  return bytes > 0 ? bytes : kUnknown;
}

double now(ClockKind kind) {
  if (kind == ClockKind::kThreadCpu) {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

// Long enough to hide starting the clock and the threads, short enough to fit between two interruptions.
constexpr double kSliceSeconds = 0.002;
constexpr int64_t kFirstIterations = 1 << 16;
// 8 MiB a thread: a quarter of a millisecond at 32 GB/s.
constexpr int64_t kReadPieceWords = (int64_t{8} << 20) / static_cast<int64_t>(sizeof(uint32_t));
constexpr int kReadsPerTurn = 8;
static_assert(kReadPieceWords % kReadWords == 0);

const RoofLoops& widest_loops() {
  if (const RoofLoops* loops = where_it_runs(kAmxBf16Loops, cpu::amx_bf16_set())) return *loops;
  if (const RoofLoops* loops = avx512_bf16_loops()) return *loops;
  if (const RoofLoops* loops = where_it_runs(kAvx2Loops, cpu::avx2_set())) return *loops;
  return portable_loops();
}

// The rate of `workers` concurrent calls of loop(iterations), whose iterations are raised until a call takes a slice.
double rate(Executor& executor, ClockKind clock, int workers, double (*loop)(int64_t), int64_t& iterations) {
  std::vector<double> flops(static_cast<size_t>(workers));
  for (;;) {
    const double start = now(clock);
    executor.parallel_for(workers, [&](int64_t task, int) { flops[static_cast<size_t>(task)] = loop(iterations); });
    const double seconds = now(clock) - start;
    if (seconds < kSliceSeconds) {
      iterations *= 2;
      continue;
    }
    double total = 0.0;
    for (const double f : flops) total += f;
    return total / seconds;
  }
}

}  // namespace

struct RoofMeter::Buffer {
  std::vector<uint32_t> words;
  int64_t at = 0;  // where the next read starts
  std::atomic<uint32_t> sink{0};
};

RoofMeter::RoofMeter(Executor& executor, ClockKind clock) : executor_(executor), clock_(clock), buffer_(new Buffer) {
  // Four times the last level: what it keeps from the previous pass is at most a quarter.
  const int64_t words = 4 * last_level_cache_bytes() / static_cast<int64_t>(sizeof(uint32_t));
  buffer_->words.resize(static_cast<size_t>(words / kReadWords * kReadWords));
  uint32_t x = 1;
  for (uint32_t& w : buffer_->words) w = x = x * 1664525u + 1013904223u;
  roofs_.isa = widest_loops().isa;
  roofs_.threads = executor.num_workers();
}

RoofMeter::~RoofMeter() { delete buffer_; }

void RoofMeter::measure(double seconds) {
  const RoofLoops& loops = widest_loops();
  const int workers = executor_.num_workers();
  SerialExecutor serial;
  int64_t fp32_iterations = kFirstIterations;
  int64_t bf16_iterations = kFirstIterations;
  const auto keep = [](double& best, double value) { best = std::max(best, value); };
  // Piece by piece around the buffer, for the same reason as slices: a piece is cold when its turn comes again.
  const auto read = [&](Executor& executor, int tasks) {
    const int64_t words = static_cast<int64_t>(buffer_->words.size());
    const int64_t piece = std::min(kReadPieceWords, words / tasks / kReadWords * kReadWords);
    if (buffer_->at + piece * tasks > words) buffer_->at = 0;
    const uint32_t* const first = buffer_->words.data() + buffer_->at;
    buffer_->at += piece * tasks;
    const double start = now(clock_);
    executor.parallel_for(tasks, [&](int64_t task, int) { buffer_->sink ^= loops.read(first + task * piece, piece); });
    return static_cast<double>(piece * tasks) * sizeof(uint32_t) / (now(clock_) - start);
  };
  const double start = now(clock_);
  do {
    keep(roofs_.fp32_one, rate(serial, clock_, 1, loops.fp32_fma, fp32_iterations));
    keep(roofs_.fp32_all, rate(executor_, clock_, workers, loops.fp32_fma, fp32_iterations));
    if (loops.bf16_dot != nullptr) {
      keep(roofs_.bf16_one, rate(serial, clock_, 1, loops.bf16_dot, bf16_iterations));
      keep(roofs_.bf16_all, rate(executor_, clock_, workers, loops.bf16_dot, bf16_iterations));
    }
    for (int i = 0; i < kReadsPerTurn; ++i) {
      keep(roofs_.dram_one, read(serial, 1));
      keep(roofs_.dram_all, read(executor_, workers));
    }
  } while (now(clock_) - start < seconds);
  // All threads do at least what one of them does; on a busy machine they may never have run at the same time.
  keep(roofs_.fp32_all, roofs_.fp32_one);
  keep(roofs_.bf16_all, roofs_.bf16_one);
  keep(roofs_.dram_all, roofs_.dram_one);
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet

// What this machine can do at most, measured in the run that it is compared with: on a shared host both move together.
#pragma once

#include <string>

#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {
namespace bench {

/// Which seconds are counted.
enum class ClockKind : unsigned char {
  kWall,
  kThreadCpu,  ///< what the calling thread got of a processor: one thread on a machine that others use, too
};
/// Seconds from an arbitrary start.
double now(ClockKind kind);

/// Flops a second (multiply and add count as two) and bytes a second; the best of several short measurements.
struct Roofs {
  std::string isa;        ///< instruction set of the loops: the widest that runs here
  int threads = 1;        ///< of the *_all figures
  double fp32_one = 0.0;  ///< fp32 multiply-adds in registers, one thread
  double fp32_all = 0.0;
  double bf16_one = 0.0;  ///< bf16 dot products in registers; 0 where the processor has none
  double bf16_all = 0.0;
  double dram_one = 0.0;  ///< reading memory that no cache holds
  double dram_all = 0.0;

  /// The compute roof of bf16 operands with the threads of the run: where there are no bf16 dot products, fp32's.
  double bf16() const { return bf16_all > 0.0 ? bf16_all : fp32_all; }
};

class RoofMeter {
 public:
  /// `executor` runs the measurements of all threads; it must outlive this. With kThreadCpu it has one worker.
  RoofMeter(Executor& executor, ClockKind clock);
  ~RoofMeter();
  /// Measures for about `seconds` and keeps the best of all calls.
  void measure(double seconds);
  const Roofs& roofs() const { return roofs_; }

 private:
  struct Buffer;
  Executor& executor_;
  ClockKind clock_;
  Roofs roofs_;
  Buffer* buffer_;
};

/// Bytes of the last-level cache as the system tells, else 64 MiB.
int64_t last_level_cache_bytes();

}  // namespace bench
}  // namespace v0
}  // namespace gannet

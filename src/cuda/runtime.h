// What the host side asks of CUDA, without its headers: src/cuda/common/runtime.cpp, or src/cuda/no_cuda.cpp, where
// everything throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gannet/device.h"
#include "gannet/page_table.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Throws unless there is such a device.
void require_device(const char* function, int index);

/// In the order of the stream; between the host and that device in any direction.
void copy(const char* function, int index, void* to, const void* from, size_t bytes, Stream stream);
/// `rows` rows of row_bytes; pitches count bytes.
void copy_rows(const char* function, int index, void* to, size_t to_pitch, const void* from, size_t from_pitch,
               size_t row_bytes, size_t rows, Stream stream);
void clear(const char* function, int index, void* to, size_t bytes, Stream stream);
void wait(const char* function, int index, Stream stream);
/// Throws Error(kInvalidArgument) while the stream is being captured into a graph: what follows is not for a graph.
void refuse_capture(const char* function, int index, Stream stream);

/// Row i of `to` (to_stride apart) becomes row rows[i] of `from`, -1: all `fill`. int32; `rows` lies on the host and is
/// done with when this returns.
void gather_int32_rows(const char* function, int index, std::span<const int32_t> rows, const int32_t* from,
                       int64_t from_stride, int32_t* to, int64_t to_stride, int64_t width, int32_t fill, Stream stream);

/// The rows of a decode step from lengths and pages on the device (StepPlan has the rules). All pointers are the
/// device's. A length is cut to max_len, which the table reaches; a page outside the pool gives no slot.
struct DecodeRows {
  const int32_t* seq_lens = nullptr;  ///< [num_requests], 0 and less: padding
  const int32_t* pages = nullptr;     ///< [num_requests, columns]
  int64_t columns = 0, num_requests = 0, max_len = 0, num_pages = 0;
  int32_t q_len = 1, page_size = 64;
  int64_t added = 0;  ///< to each length but 0
  RowBound bound = RowBound::kCausalFull;
  int32_t* out_seq_lens = nullptr;                                            ///< [num_requests]
  int32_t *positions = nullptr, *write_slots = nullptr, *row_lens = nullptr;  ///< [num_requests * q_len]
};
/// Enqueues one kernel; may be captured.
void plan_decode_rows(const char* function, int index, const DecodeRows& rows, Stream stream);

/// hadamard() of gannet/hadamard.h, which has checked the views: `rows` rows of n values times `scale`.
void hadamard(const char* function, const TensorView& from, const TensorView& to, int64_t rows, int n, float scale,
              Stream stream);

/// Pinned host memory through which arrays go to a device while the host fills the next ones. kDepth uploads can be
/// under way; only a host that is further ahead waits.
class Staging {
 public:
  explicit Staging(int index);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Memory to fill, valid until done(); grows by allocation only.
  std::byte* begin(const char* function, size_t bytes);
  /// All copies out of the memory have been enqueued.
  void done(const char* function, Stream stream);

 private:
  static constexpr int kDepth = 4;
  struct Slot;
  int index_;
  int next_ = 0;
  std::unique_ptr<Slot[]> slots_;
};

}  // namespace cuda
}  // namespace v0
}  // namespace gannet

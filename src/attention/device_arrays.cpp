#include "attention/device_arrays.h"

#include <algorithm>
#include <cstring>

#include "gannet/op_plan.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

constexpr size_t kAlignment = 256;  // more than kBaseAlignment, which pages ask for

size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void DeviceArrays::upload(const char* function, cuda::Staging* staging, std::span<const Piece> pieces, Stream stream) {
  if (device_.kind == DeviceKind::kCpu) return;
  cuda::refuse_capture(function, device_.index, stream);
  places_.clear();
  size_t total = 0, staged = 0;
  for (const Piece& p : pieces) {
    const auto* begin = static_cast<const std::byte*>(p.data);
    places_.push_back({begin, begin + p.row_bytes * p.rows, static_cast<int64_t>(total)});
    total += rounded(p.row_bytes * p.rows);
    staged += rounded(p.used_row_bytes * p.rows);
  }
  copies_.reserve(total, *memory_);
  if (staged == 0) return;
  // Whole arrays lie behind each other here as there, so that a run of them is one copy: each costs the host and the
  // stream a few microseconds, and a decode step of a small model has 200.
  std::byte* next = staging->begin(function, staged);
  struct Run {
    const std::byte* from = nullptr;
    size_t offset = 0, bytes = 0;
  } run;
  const auto copy_run = [&] {
    cuda::copy(function, device_.index, copies_.data() + run.offset, run.from, run.bytes, stream);
    run = {};
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    if (p.used_row_bytes == 0 || p.rows == 0) continue;
    const auto offset = static_cast<size_t>(places_[i].offset);
    const size_t bytes = rounded(p.used_row_bytes * p.rows);
    for (size_t r = 0; r < p.rows; ++r)
      std::memcpy(next + r * p.used_row_bytes, static_cast<const std::byte*>(p.data) + r * p.row_bytes,
                  p.used_row_bytes);
    const bool whole = p.used_row_bytes == p.row_bytes;
    if (run.bytes > 0 && !(whole && offset == run.offset + run.bytes)) copy_run();
    if (!whole) {
      cuda::copy_rows(function, device_.index, copies_.data() + offset, p.row_bytes, next, p.used_row_bytes,
                      p.used_row_bytes, p.rows, stream);
    } else {
      if (run.bytes == 0) run = {.from = next, .offset = offset, .bytes = 0};
      run.bytes += bytes;
    }
    next += bytes;
  }
  if (run.bytes > 0) copy_run();
  staging->done(function, stream);
}

TensorView DeviceArrays::on_device(const TensorView& host) const {
  if (device_.kind == DeviceKind::kCpu) return host;
  TensorView v = host;
  v.device = device_;
  const auto* p = static_cast<const std::byte*>(host.data);
  for (const Place& place : places_) {
    if (p < place.begin || p >= place.end) continue;
    v.data = copies_.data() + place.offset + (p - place.begin);
    return v;
  }
  v.data = nullptr;  // an empty view; any other without data is refused by the operation
  return v;
}

PlanPieces::PlanPieces(const StepPlan& plan) {
  const auto add = [&](std::span<const int32_t> array) { all[count++] = DeviceArrays::piece(array); };
  if (const PageTableView t = plan.pages(StepRows::kAll); t.pages.num_elements() > 0) {
    // What lies beyond the longest request is never read: a table is as wide as its batch may ever need.
    int64_t longest = 0;
    for (const int32_t n : plan.seq_lens()) longest = std::max<int64_t>(longest, n);
    const int64_t used = std::min((longest + plan.page_size() - 1) / plan.page_size(), t.pages.shape[1]);
    const auto bytes = [](int64_t cells) { return static_cast<size_t>(cells) * sizeof(int32_t); };
    all[count++] = {t.pages.data, bytes(t.pages.shape[1]), static_cast<size_t>(t.pages.shape[0]), bytes(used)};
  }
  const TensorView decode_rows = plan.cu_q_lens(StepRows::kDecode);
  add(plan.seq_lens());
  add(plan.cu_rows());
  add({decode_rows.ptr<const int32_t>(), static_cast<size_t>(decode_rows.num_elements())});
  add(plan.positions());
  add(plan.write_slots());
  add(plan.row_lens());
  add(plan.prefix_chunks().cu_lens);
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet

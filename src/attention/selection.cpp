// The memory of selections, and rows taken from them.
#include <algorithm>
#include <cstring>

#include "core/checked.h"
#include "cuda/runtime.h"
#include "gannet/attention.h"

namespace gannet {
inline namespace v0 {

namespace {
// Rows begin on a cache line: any row of the buffer can be the first of a view, and workers do not share lines.
constexpr int64_t kRowUnit = 16;  // int32 in 64 bytes
}  // namespace

SelectionBuffer::SelectionBuffer(int32_t topk, bool with_positions, MemoryResource& resource)
    : resource_(&resource), topk_(topk), with_positions_(with_positions) {
  if (topk < 1) fail_argument("SelectionBuffer", "topk is {}; accepted: 1 and more", topk);
}

void SelectionBuffer::reserve(int64_t rows) {
  constexpr const char* kName = "SelectionBuffer::reserve";
  if (rows < 0) fail_argument(kName, "rows is {}; accepted: 0 and more", rows);
  if (rows <= capacity_) return;
  const int64_t width = (int64_t{topk_} + kRowUnit - 1) / kRowUnit * kRowUnit;
  const int64_t values = (with_positions_ ? 2 : 1) * width + 1;  // a row's, and its length
  const int64_t bytes = checked_mul(kName, "the size", checked_mul(kName, "the size", rows, values), sizeof(int32_t));
  memory_.reserve(static_cast<size_t>(bytes), *resource_);
  capacity_ = rows;
}

TopKSelection SelectionBuffer::view(int64_t rows, int64_t begin) const {
  if (rows < 0 || begin < 0 || begin > capacity_ || rows > capacity_ - begin)
    fail_argument("SelectionBuffer::view", "rows {} from {} are wanted; the buffer has room for {} (reserve)", rows,
                  begin, capacity_);
  const int64_t width = (int64_t{topk_} + kRowUnit - 1) / kRowUnit * kRowUnit;
  auto* base = reinterpret_cast<int32_t*>(memory_.data());
  const auto plane = [&](int64_t i) {
    TensorView v = gannet::view(base + (i * capacity_ + begin) * width, {rows, topk_}, resource_->device());
    v.stride[0] = width;
    return v;
  };
  TopKSelection s;
  s.slots = plane(0);
  const int64_t planes = with_positions_ ? 2 : 1;
  if (with_positions_) s.positions = plane(1);
  s.lens = gannet::view(base + planes * capacity_ * width + begin, {rows}, resource_->device());
  return s;
}

namespace {

constexpr const char* kGather = "gather_selection";

void check_list(const char* name, const TensorView& v, int rank, int64_t width, Device device) {
  if (v.dtype != DType::kI32 || v.rank != rank || !(v.device == device) ||
      (rank == 2 && width >= 0 && v.shape[1] != width) || (rank == 2 && v.shape[1] > 1 && v.stride[1] != 1))
    fail_argument(kGather, "{} is {}; accepted: int32 of rank {} on {}{}, last stride 1", name, describe(v), rank,
                  to_string(device), width >= 0 ? fmt::format(", {} wide", width) : "");
  if (v.num_elements() > 0 && v.data == nullptr) fail_argument(kGather, "{}.data is null", name);
}

}  // namespace

void gather_selection(const TopKSelection& from, std::span<const int32_t> rows, const TopKSelection& to,
                      Stream stream) {
  const Device device = from.slots.device;
  check_list("from.slots", from.slots, 2, -1, device);
  const int64_t width = from.slots.shape[1], num_from = from.slots.shape[0];
  const auto num_rows = static_cast<int64_t>(rows.size());
  check_list("to.slots", to.slots, 2, width, device);
  check_list("from.lens", from.lens, 1, -1, device);
  check_list("to.lens", to.lens, 1, -1, device);
  const bool positions = to.positions.given();
  if (positions) {
    check_list("from.positions", from.positions, 2, width, device);
    check_list("to.positions", to.positions, 2, width, device);
  }
  const auto check_rows = [](const char* name, const TensorView& v, int64_t expected) {
    if (v.shape[0] != expected) fail_argument(kGather, "{} is {}; accepted: {} rows", name, describe(v), expected);
  };
  check_rows("from.lens", from.lens, num_from);
  check_rows("to.slots", to.slots, num_rows);
  check_rows("to.lens", to.lens, num_rows);
  if (positions) {
    check_rows("from.positions", from.positions, num_from);
    check_rows("to.positions", to.positions, num_rows);
  }
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i] < -1 || rows[i] >= num_from)
      fail_argument(kGather, "rows[{}] is {}; accepted: -1 to {}", i, rows[i], num_from - 1);

  if (device.kind == DeviceKind::kCuda) {
    const auto on_device = [&](const TensorView& source, const TensorView& target, int64_t w, int32_t fill) {
      cuda::gather_int32_rows(kGather, device.index, rows, source.ptr<const int32_t>(), source.stride[0],
                              target.ptr<int32_t>(), target.stride[0], w, fill, stream);
    };
    on_device(from.slots, to.slots, width, -1);
    if (positions) on_device(from.positions, to.positions, width, -1);
    return on_device(from.lens, to.lens, 1, 0);
  }
  const auto copy = [&](const TensorView& source, const TensorView& target, int64_t i, int32_t row) {
    int32_t* out = target.ptr<int32_t>(i);
    if (row < 0) std::fill(out, out + width, -1);
    else std::memcpy(out, source.ptr<const int32_t>(row), static_cast<size_t>(width) * sizeof(int32_t));
  };
  for (int64_t i = 0; i < num_rows; ++i) {
    const int32_t row = rows[static_cast<size_t>(i)];
    copy(from.slots, to.slots, i, row);
    if (positions) copy(from.positions, to.positions, i, row);
    *to.lens.ptr<int32_t>(i) = row < 0 ? 0 : *from.lens.ptr<const int32_t>(row);
  }
}

}  // namespace v0
}  // namespace gannet

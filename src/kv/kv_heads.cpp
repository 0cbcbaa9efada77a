#include "gannet/kv_heads.h"

#include "core/format.h"

namespace gannet {
inline namespace v0 {

LatentCacheView kv_head_of(const LatentCacheView& pool, int32_t num_kv_heads, int32_t kv_head) {
  constexpr const char* kName = "kv_head_of";
  if (pool.format == LatentFormat::kE4m3PerToken)
    fail_argument(kName, "pool.format is {}; accepted: a format whose rows are whole (fp32, bf16, e4m3, packed656)",
                  to_string(pool.format));
  if (num_kv_heads < 1) fail_argument(kName, "num_kv_heads is {}; accepted: 1 or more", num_kv_heads);
  if (kv_head < 0 || kv_head >= num_kv_heads)
    fail_argument(kName, "kv_head is {}; accepted: 0 to {}", kv_head, num_kv_heads - 1);
  const int64_t row_bytes = latent_row_bytes(pool.format, pool.geometry);
  const int64_t token_bytes = row_bytes * num_kv_heads;
  if (pool.row_stride_bytes != 0 && pool.row_stride_bytes < token_bytes)
    fail_argument(kName, "pool.row_stride_bytes is {}; accepted: 0, or {} rows of {} bytes or more",
                  pool.row_stride_bytes, num_kv_heads, row_bytes);
  LatentCacheView head = pool;
  if (head.row_stride_bytes == 0) head.row_stride_bytes = token_bytes;
  if (head.data != nullptr) head.data = static_cast<std::byte*>(head.data) + kv_head * row_bytes;
  return head;
}

TensorView head_group_of(const TensorView& t, int32_t num_groups, int32_t group) {
  constexpr const char* kName = "head_group_of";
  if (!t.given()) return t;
  const size_t axis = t.rank == 1 ? 0 : 1;
  if (num_groups < 1 || t.shape[axis] % num_groups != 0)
    fail_argument(kName, "num_groups is {}; accepted: a divisor of the {} heads of {}", num_groups, t.shape[axis],
                  describe(t));
  if (group < 0 || group >= num_groups) fail_argument(kName, "group is {}; accepted: 0 to {}", group, num_groups - 1);
  TensorView part = t;
  part.shape[axis] = t.shape[axis] / num_groups;
  if (part.data != nullptr)
    part.data = static_cast<std::byte*>(part.data) +
                group * part.shape[axis] * t.stride[axis] * static_cast<int64_t>(size_of(t.dtype));
  return part;
}

}  // namespace v0
}  // namespace gannet

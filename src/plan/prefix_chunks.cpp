#include <algorithm>
#include <limits>

#include "core/checked.h"
#include "gannet/step.h"

namespace gannet {
inline namespace v0 {

void plan_prefix_chunks(std::span<const int32_t> prefix_lens, int64_t capacity, int64_t unit, PrefixChunkPlan& plan) {
  constexpr const char* kName = "plan_prefix_chunks";
  if (capacity < 1) fail_argument(kName, "capacity is {} tokens; accepted: 1 and more", capacity);
  if (unit < 1) fail_argument(kName, "unit is {} tokens; accepted: 1 and more", unit);
  int64_t longest = 0;
  for (size_t r = 0; r < prefix_lens.size(); ++r) {
    if (prefix_lens[r] < 0) fail_argument(kName, "prefix_lens[{}] is {}; accepted: 0 and more", r, prefix_lens[r]);
    longest = std::max<int64_t>(longest, prefix_lens[r]);
  }

  plan.chunks.clear();
  plan.cu_lens.clear();
  plan.chunk_len = plan.num_loops = plan.requests_per_chunk = plan.max_tokens = 0;
  const auto num_extends = static_cast<int64_t>(prefix_lens.size());
  plan.num_extends = num_extends;
  if (num_extends == 0) return;

  plan.chunk_len = std::max(unit, capacity / num_extends / unit * unit);
  plan.requests_per_chunk = unit > capacity / num_extends ? std::max<int64_t>(1, capacity / unit) : num_extends;
  plan.num_loops = longest / plan.chunk_len + (longest % plan.chunk_len != 0 ? 1 : 0);
  const int64_t groups = (num_extends + plan.requests_per_chunk - 1) / plan.requests_per_chunk;
  const int64_t entries =
      checked_mul(kName, "the number of chunks times requests",
                  checked_mul(kName, "the number of chunks times requests", plan.num_loops, groups), num_extends);
  if (entries > kMaxPrefixChunkEntries)
    fail_argument(kName,
                  "the prefixes make {} chunks of {} requests; accepted: at most {} together (raise the capacity, {})",
                  plan.num_loops * groups, num_extends, kMaxPrefixChunkEntries, capacity);

  for (int64_t loop = 0; loop < plan.num_loops; ++loop) {
    const int64_t begin = loop * plan.chunk_len;  // at most `longest`
    for (int64_t first = 0; first < num_extends; first += plan.requests_per_chunk) {
      const int64_t last = std::min(num_extends, first + plan.requests_per_chunk);
      PrefixChunk c{.first_request = static_cast<int32_t>(first),
                    .num_requests = static_cast<int32_t>(last - first),
                    .begin = begin};
      const size_t row = plan.cu_lens.size();
      plan.cu_lens.push_back(0);
      for (int64_t r = 0; r < num_extends; ++r) {
        if (r >= first && r < last) {
          const int64_t len = std::clamp<int64_t>(prefix_lens[static_cast<size_t>(r)] - begin, 0, plan.chunk_len);
          c.num_tokens += len;
          c.max_len = std::max(c.max_len, static_cast<int32_t>(len));
          if (c.num_tokens > std::numeric_limits<int32_t>::max())
            fail_argument(kName, "a chunk has more than 2^31 - 1 tokens; lower the capacity, {}", capacity);
        }
        plan.cu_lens.push_back(static_cast<int32_t>(c.num_tokens));
      }
      if (c.num_tokens == 0) {
        plan.cu_lens.resize(row);
        continue;
      }
      plan.max_tokens = std::max(plan.max_tokens, c.num_tokens);
      plan.chunks.push_back(c);
    }
  }
}

}  // namespace v0
}  // namespace gannet

#include <algorithm>

#include "core/format.h"
#include "gannet/step.h"

namespace gannet {
inline namespace v0 {
namespace {

/// Calls f(request, rows that stand) for each request: all of an extend's, 1 to q_len of a decode's.
template <class F>
void for_each_request(const char* function, const StepPlan& step, std::span<const int32_t> accepted, size_t size,
                      F&& f) {
  const Range decodes = step.requests(StepRows::kDecode);
  if (static_cast<int64_t>(accepted.size()) != decodes.size())
    fail_argument(function, "accepted has {} entries; the step has {} decode requests", accepted.size(),
                  decodes.size());
  if (static_cast<int64_t>(size) != step.num_requests())
    fail_argument(function, "the output has {} entries; the step has {} requests", size, step.num_requests());
  for (int64_t r = 0; r < step.num_requests(); ++r) {
    if (r < decodes.begin) f(r, step.rows_of_request(r).size());
    else f(r, std::clamp(accepted[static_cast<size_t>(r - decodes.begin)], 1, step.q_len()));
  }
}

}  // namespace

void narrow_rows(const StepPlan& step, std::span<const int32_t> accepted, std::span<int32_t> rows) {
  for_each_request("narrow_rows", step, accepted, rows.size(), [&](int64_t r, int64_t stand) {
    rows[static_cast<size_t>(r)] = stand == 0 ? -1 : static_cast<int32_t>(step.rows_of_request(r).begin + stand - 1);
  });
}

void narrow_seq_lens(const StepPlan& step, std::span<const int32_t> accepted, std::span<int32_t> seq_lens) {
  if (!step.lens_known())
    fail_argument("narrow_seq_lens", "the lengths of the step lie on a device; accepted: a step of known lengths");
  for_each_request("narrow_seq_lens", step, accepted, seq_lens.size(), [&](int64_t r, int64_t stand) {
    const int64_t len = step.seq_lens()[static_cast<size_t>(r)];
    const int64_t kept = len - (step.rows_of_request(r).size() - stand);
    seq_lens[static_cast<size_t>(r)] = static_cast<int32_t>(len == 0 ? 0 : std::max<int64_t>(kept, 1));
  });
}

}  // namespace v0
}  // namespace gannet

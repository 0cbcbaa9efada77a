#include "model/prefill_form.h"

#include <algorithm>
#include <string_view>

#include "core/format.h"
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace {

/// What one thread was measured to do, by implementation and by the query's type. Products are of fp32 whatever that
/// is; their loops and library are the machine's, and an implementation stands for the machines that have it.
struct Rates {
  std::string_view impl;
  bool bf16;  // queries, over rows that are not fp32
  // GFLOP/s of products by kv_b, in either form, of up to kFewRows rows and of more.
  double expand_few, expand, absorb_few, absorb;
  // GFLOP/s of RaggedPrefill and MlaDecode, whole vectors of lanes counted.
  double prefill, decode;
  // ns a key and head that a task of RaggedPrefill copies, and a key that a group of lanes of MlaDecode walks over.
  double prefill_key, decode_key;
};

// Intel Xeon with AMX (2 virtual CPUs, others at work beside), one thread, CPU time, oneDNN 2.6.3: least squares of the
// logarithms over both forms' times at 16 heads (amx_bf16, and avx2 with fp32, at 128 too), prefixes of 0, 1,024 and
// 4,096 tokens (portable: 0 and 1,024) and 1 to 1,024 new rows (portable: to 256), as measured by
//   gannet bench --op prefill_form --threads 1 --cpu-time --impl IMPL --dtype DTYPE
// with the library as a machine whose best set that is would have it: DNNL_MAX_CPU_ISA=AVX2 for avx2, SSE41 for
// portable. docs/performance.md has the times of both forms and what this table makes of them.
//
// Where avx512_bf16 is the best set there are no tiles, and bf16 pairs multiply at twice the rate of fp32, not at two
// thirds of it as on that Xeon (98 and 103 GFLOP/s). Its row for bf16 is of an AMD EPYC (Zen 4): attention from
// benchmarks/results/cpu/amd_epyc_zen4_one_thread.jsonl, products from model/linear.cpp, with the absorbed form's share
// of the library's rate taken over from the Xeon.
constexpr Rates kRates[] = {
    {"amx_bf16", true, 73, 153, 65, 104, 480, 835, 1, 118},
    {"amx_bf16", false, 56, 153, 65, 105, 146, 175, 92, 111},
    {"avx512_bf16", true, 45, 105, 45, 73, 170, 205, 1, 49},
    {"avx512_bf16", false, 66, 152, 62, 108, 147, 183, 57, 129},
    {"avx2", true, 84, 100, 84, 83, 81, 89, 64, 77},
    {"avx2", false, 67, 100, 59, 69, 82, 91, 92, 87},
    {"portable", true, 20, 36, 8, 29, 24, 34, 1, 287},
    {"portable", false, 19, 36, 8, 27, 31, 36, 1, 179},
};

// Where products pass from the loops to the library (model/linear.cpp) at widths of up to 512.
constexpr int64_t kFewRows = 16;
// What the kernels cut rows into (src/cpu/kernels): RaggedPrefill up to 256 rows of a head a task, its lanes; MlaDecode
// up to 128 (row, head) pairs of a request a group. Lanes are in vectors of 16, of 8 in avx2 and of 4 in portable, for
// which 16 is near enough: what they fill least is one row of few heads.
constexpr int64_t kTaskRows = 256;
constexpr int64_t kGroupLanes = 128;
constexpr int64_t kVectorLanes = 16;
// Rounding fp32 to bf16 and back is a loop of its own (Compute::to_bf16): ns a value. 1,024 cached rows of 16
// heads, 4.2 million values, took 37 ms to expand for bf16 queries and 30 for fp32 ones.
constexpr double kRound = 1.6;
// Merging the result of a chunk, ns a value: 6.3 ms for 1,024 rows of 128 heads of 128 values in bf16
// (docs/performance.md), bound by bytes.
constexpr double kMerge = 0.8, kMergeBf16 = 0.4;
constexpr double kNano = 1e-9;

constexpr double round_up(int64_t n, int64_t m) {
  const int64_t rounded = (n + m - 1) / m * m;
  return static_cast<double>(rounded);
}

const Rates& rates_of(const std::string& impl, bool bf16) {
  const auto find = [&](std::string_view name) {
    return std::find_if(std::begin(kRates), std::end(kRates),
                        [&](const Rates& r) { return r.impl == name && r.bf16 == bf16; });
  };
  const Rates* r = find(impl);
  return r != std::end(kRates) ? *r : *find("portable");
}

}  // namespace

const char* to_string(PrefillForm f) noexcept {
  switch (f) {
    case PrefillForm::kAuto: return "auto";
    case PrefillForm::kExpanded: return "expanded";
    case PrefillForm::kAbsorbed: return "absorbed";
  }
  return "?";
}

FormCosts prefill_form_costs(const FormSetup& setup, const FormStep& step) {
  const bool narrow = setup.query == QueryPrecision::kBf16;
  const Rates& prefill = rates_of(setup.impl, narrow);
  // Rows of fp32 are multiplied as fp32 whatever the query (docs/kernels/mla_decode_cpu.md).
  const Rates& decode = rates_of(setup.impl, narrow && setup.format != LatentFormat::kF32);
  const MlaWidths& w = setup.widths;
  const auto heads = static_cast<double>(w.heads), latent = static_cast<double>(w.latent),
             rope = static_cast<double>(w.rope), nope = static_cast<double>(w.nope), v = static_cast<double>(w.v);

  const size_t requests = step.prefix_lens.size();
  double prefix_rows = 0.0, prefill_pairs = 0.0, copied_keys = 0.0, decode_lanes = 0.0, walked_keys = 0.0;
  int64_t rows = 0;
  for (size_t i = 0; i < requests; ++i) {
    const int64_t t = step.cu_rows[i + 1] - step.cu_rows[i], p = step.prefix_lens[i];
    if (t == 0) continue;
    rows += t;
    const auto td = static_cast<double>(t), pd = static_cast<double>(p);
    const double triangle = 0.5 * td * (td + 1.0);
    prefix_rows += pd;
    prefill_pairs += round_up(t, kVectorLanes) * pd + std::max(triangle, td * kVectorLanes);
    const int64_t tasks = (t + kTaskRows - 1) / kTaskRows, whole = t / kTaskRows;
    copied_keys += static_cast<double>(tasks) * pd + 0.5 * kTaskRows * static_cast<double>(whole) * (whole + 1.0) +
                   (tasks > whole ? td : 0.0);
    const int64_t lanes = t * w.heads, groups = (lanes + kGroupLanes - 1) / kGroupLanes;
    decode_lanes += (td * pd + triangle) / td * round_up(lanes, kVectorLanes);
    walked_keys += static_cast<double>(groups) * (pd + (groups > 1 ? 0.5 * td : td));
  }
  FormCosts costs;
  if (rows == 0) return costs;

  const auto n = static_cast<double>(rows);
  const double row_flops = 2.0 * latent * heads * (nope + v);  // of kv_b over one row, in either form
  const bool few = rows <= kFewRows;
  const double expand = setup.gemm_library ? prefill.expand : prefill.expand_few;
  const double absorb = setup.gemm_library ? decode.absorb : decode.absorb_few;
  costs.expanded = row_flops * n / (few ? prefill.expand_few : expand) + row_flops * prefix_rows / expand +
                   2.0 * prefill_pairs * heads * (nope + rope + v) / prefill.prefill +
                   copied_keys * heads * prefill.prefill_key;
  costs.absorbed = row_flops * n / (few ? decode.absorb_few : absorb) +
                   2.0 * decode_lanes * (2.0 * latent + rope) / decode.decode + walked_keys * decode.decode_key;
  costs.expanded += static_cast<double>(step.prefix_chunks) * n * heads * v * (narrow ? kMergeBf16 : kMerge);
  if (narrow) {
    costs.expanded += kRound * heads * (n * (nope + rope + nope + v + v) + prefix_rows * (nope + v));
    costs.absorbed += kRound * heads * n * (latent + rope);
  }
  costs.expanded *= kNano;
  costs.absorbed *= kNano;
  return costs;
}

PrefillForm choose_prefill_form(PrefillForm asked, const FormSetup& setup, const FormStep& step) {
  if (asked != PrefillForm::kAuto) return asked;
  const FormCosts costs = prefill_form_costs(setup, step);
  return costs.absorbed < costs.expanded ? PrefillForm::kAbsorbed : PrefillForm::kExpanded;
}

OnlyForm only_prefill_form(bool sparse, bool invariant, const Device& device) noexcept {
  if (sparse) return {PrefillForm::kAbsorbed, "sparse attention has no other form"};
  if (invariant)
    return {PrefillForm::kAbsorbed, "the two forms differ in rounding, and the invariant mode has one for every row"};
  if (device.kind != DeviceKind::kCpu) return {PrefillForm::kExpanded, "on a GPU prefill is always expanded"};
  return {};
}

std::string prefill_form_refusal(PrefillForm asked, const OnlyForm& only) {
  if (asked == PrefillForm::kAuto || only.form == PrefillForm::kAuto || asked == only.form) return {};
  return fmt::format("auto, {} ({})", to_string(only.form), only.why);
}

std::string attention_impl(const std::string& forced) {
  if (!forced.empty()) return forced;
  for (const ImplementationSet* set : implementation_sets())
    if (set->device == DeviceKind::kCpu && set->compiled && !set->only_when_forced && set->runs_here())
      return set->name;
  return {};
}

}  // namespace v0
}  // namespace gannet

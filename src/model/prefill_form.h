// Which of the two forms of dense attention (model/mla_forms.h) the prefill rows of a step take: the one whose products
// and kernels are estimated to take less time.
//
// With T new rows behind a prefix of P tokens, H heads and the widths R, P', N, V of docs/semantics.md, flops are
//
//   expanded   2 (P + T) R H (N + V)   kv_b over new and cached rows     + 2 pairs H (N + P' + V)
//   absorbed   2 T R H (N + V)         queries in, values out            + 2 pairs H (2 R + P')
//
// where pairs = T P + T (T + 1) / 2. At V3's widths a pair costs 640 flops a head or 2,176, and a cached row 262,144 a
// head or nothing: at equal rates a long prefix is worth expanding from 171 new rows on. Rates are not equal, and few
// rows leave lanes of the prefill kernel empty, so each flop is taken at the rate that was measured for it here
// (kRates in prefill_form.cpp, by implementation). Estimates are those of one thread; threads divide both forms alike.
//
// A step takes one form for all of its prefill rows, since one call of the backend holds them all: costs are summed
// over the requests. Decode rows are absorbed always.
//
// Errors: none. Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gannet/device.h"
#include "gannet/kv_cache.h"
#include "gannet/step.h"
#include "model/mla_forms.h"

namespace gannet {
inline namespace v0 {

enum class PrefillForm : uint8_t {
  kAuto,      ///< the cheaper one, by estimate
  kExpanded,  ///< keys and values of every head from the latents
  kAbsorbed,  ///< as decode
};
const char* to_string(PrefillForm f) noexcept;  ///< "auto", "expanded", "absorbed"

/// What does not change from step to step.
struct FormSetup {
  MlaWidths widths;
  QueryPrecision query = QueryPrecision::kF32;
  LatentFormat format = LatentFormat::kBf16;
  std::string impl = {};     ///< the set that attention runs on; one without figures counts as portable
  bool gemm_library = true;  ///< products of many rows go through one
};

/// The extend requests of a step.
struct FormStep {
  std::span<const int32_t> prefix_lens;  ///< [requests] tokens in the cache
  std::span<const int32_t> cu_rows;      ///< [requests + 1 at least] cumulative new rows, from 0
  size_t prefix_chunks = 0;              ///< passes over parts of the prefixes (gannet/step.h), each of which is merged
};
/// Of a plan, and valid as long as that is.
inline FormStep form_step(const StepPlan& plan) noexcept {
  return {plan.prefix_lens(), plan.cu_rows(), plan.prefix_chunks().chunks.size()};
}

/// Seconds of one layer on one thread, without what both forms need.
struct FormCosts {
  double expanded = 0.0;
  double absorbed = 0.0;
};
FormCosts prefill_form_costs(const FormSetup& setup, const FormStep& step);

/// `asked`, or for kAuto the cheaper form; of equal ones the expanded one. Never kAuto.
PrefillForm choose_prefill_form(PrefillForm asked, const FormSetup& setup, const FormStep& step);

/// The one form that prefill can take, and why in words; kAuto where it can take either.
///   sparse     there is no other than the absorbed one
///   invariant  absorbed: the two differ in rounding, and a choice by cost depends on how a prompt is cut into steps
///   on a GPU   expanded: its rates are not in the table
struct OnlyForm {
  PrefillForm form = PrefillForm::kAuto;
  const char* why = "";
};
OnlyForm only_prefill_form(bool sparse, bool invariant, const Device& device) noexcept;
/// Empty where `asked` can be had; else what is accepted: "auto, absorbed (in the invariant mode: ...)".
std::string prefill_form_refusal(PrefillForm asked, const OnlyForm& only);

/// The set that attention on the CPU runs on: `forced`, or the first that runs here.
std::string attention_impl(const std::string& forced);

}  // namespace v0
}  // namespace gannet

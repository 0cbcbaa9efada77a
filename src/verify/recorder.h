// Collects the results of cases into the lines of a report.
#pragma once

#include <map>

#include "verify/device_mirror.h"
#include "verify/problem.h"
#include "verify/verify.h"

namespace gannet {
inline namespace v0 {
namespace verify {

/// A case: what it is called in the report.
struct Case {
  std::string op;
  std::string format;
  std::string case_class;
  std::string detail;  ///< named in the note when it fails
};

/// The largest error of a case in units of its tolerance.
struct Worst {
  double error = 0.0;
  double tolerance = 0.0;
  std::string where = {};
  bool bad = false;

  void see(double e, double t, const std::string& place = {});
};

class Recorder {
 public:
  explicit Recorder(const Options& options) : options_(options) {}
  bool wants(const std::string& op) const { return options_.op.empty() || options_.op == op; }
  bool wants_impl(const std::string& impl) const { return options_.impl.empty() || options_.impl == impl; }
  bool wants_format(const std::string& format) const { return format.find(options_.format) != std::string::npos; }
  bool small() const { return options_.small; }
  RunOptions run_options(const std::string& impl) const { return {.impl = impl, .poison_workspace = !small()}; }
  void add(const Case& c, const std::string& impl, const Worst& worst);
  void refuse(const Case& c, const std::string& impl, const std::string& reason);
  std::vector<Line> finish();

 private:
  /// Cases of a name, by implementation.
  struct Runs {
    Case c;
    std::map<std::string, int64_t> of;
  };
  Line& line_of(const Case& c, const std::string& impl);
  void report_coverage() const;
  const Options& options_;
  std::vector<Line> lines_;
  std::map<std::string, Runs> runs_;
};

/// Compares what `got` holds with what the oracle has: fills `worst`.
using Compare = std::function<void(const Outputs& oracle, const Outputs& got, Worst& worst)>;

/// Everything must be the same bit for bit.
inline void same_bits(const Outputs& a, const Outputs& b, Worst& worst) {
  worst.see(a == b ? 0.0 : 1.0, 0.0, "bits differ");
}

/// Calls f(name) for each implementation but the oracle that runs here and takes `params`; one that refuses them is
/// noted in the report with its reason.
template <class Params, class F>
void for_each_impl(Recorder& r, const Case& c, const Params& params, F&& f) {
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (info.name == "ref" || !info.runs_here || !r.wants_impl(info.name)) continue;
    try {
      const OpPlan<Params> plan(Context{}, placed_on(info.device, params), {.impl = info.name});
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
      r.refuse(c, info.name, e.what());
      continue;
    }
    f(info.name);
  }
}

/// The same, leaving out those that do not promise a row's bits to be independent of the batch; that is noted.
template <class Params, class F>
void for_each_invariant_impl(Recorder& r, const Case& c, const Params& params, F&& f) {
  for_each_impl(r, c, params, [&](const std::string& impl) {
    for (const ImplInfo& info : list_implementations<Params>()) {
      if (info.name != impl) continue;
      if (info.batch_invariant) f(impl);
      else r.refuse(c, impl, c.case_class + ": its bits depend on the batch");
    }
  });
}

/// One case: the oracle once, then every implementation.
template <class Params>
void check_case(Recorder& r, const Case& c, const Params& params, const Compare& compare) {
  Outputs oracle;  // when somebody takes the case
  for_each_impl(r, c, params, [&](const std::string& impl) {
    if (oracle.names.empty()) oracle = run(params, {.impl = "ref", .num_workers = 1, .fp32_outputs = true});
    Outputs got = run(params, r.run_options(impl));
    got.impl = impl;
    Worst worst;
    compare(oracle, got, worst);
    if (!got.fault.empty()) worst = {1.0, 0.0, got.fault, true};
    r.add(c, impl, worst);
  });
}

/// Bit for bit the same result for all of `variants` of one problem, and for 1, 2, 3 and 7 workers on the first.
/// `pick` takes from the outputs what must agree. `across_batches`: the variants are other tables or batches.
template <class Params>
void check_same(Recorder& r, const Case& c, const std::vector<Params>& variants,
                const std::function<std::vector<std::byte>(const Outputs&)>& pick, bool across_batches = false) {
  const auto compare = [&](const std::string& impl) {
    const std::vector<std::byte> first = pick(run(variants[0], r.run_options(impl)));
    for (size_t i = 1; i < variants.size(); ++i) {
      Worst worst;
      worst.see(pick(run(variants[i], r.run_options(impl))) == first ? 0.0 : 1.0, 0.0, "variant " + std::to_string(i));
      r.add(c, impl, worst);
    }
  };
  if (across_batches) for_each_invariant_impl(r, c, variants[0], compare);
  else for_each_impl(r, c, variants[0], compare);
}

/// The same bits for other numbers of workers, which say nothing to a GPU: not among the small cases.
template <class Params>
void check_workers(Recorder& r, Case c, const Params& params) {
  if (r.small()) return;
  c.case_class = "workers 1, 2, 3, 7";
  for_each_impl(r, c, params, [&](const std::string& impl) {
    const Outputs first = run(params, {.impl = impl});
    for (const int workers : {2, 3, 7}) {
      const Outputs again = run(params, {.impl = impl, .num_workers = workers});
      Worst worst;
      worst.see(first == again ? 0.0 : 1.0, 0.0, std::to_string(workers) + " workers");
      if (!again.fault.empty()) worst = {1.0, 0.0, again.fault, true};
      r.add(c, impl, worst);
    }
  });
}

void verify_caches(Recorder& r);  // the four cache operations
void verify_rope(Recorder& r);
void verify_ragged_prefill(Recorder& r);
void verify_merge_state(Recorder& r);
void verify_mla_decode(Recorder& r);
void verify_index_logits(Recorder& r);
void verify_topk(Recorder& r);
void verify_index_select(Recorder& r);
void verify_sparse_attention(Recorder& r);

// The small cases; the caches, rope and merge_state have them in the functions above.
void verify_small_prefills(Recorder& r);
void verify_small_decodes(Recorder& r);
void verify_small_logits(Recorder& r);
void verify_small_topk(Recorder& r);
void verify_small_selections(Recorder& r);
void verify_small_lists(Recorder& r);

}  // namespace verify
}  // namespace v0
}  // namespace gannet

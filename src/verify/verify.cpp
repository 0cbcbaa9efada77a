#include "verify/verify.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "verify/recorder.h"

namespace gannet {
inline namespace v0 {
namespace verify {

void Worst::see(double e, double t, const std::string& place) {
  const bool fails = !(e <= t);  // a NaN error fails
  const double ratio = t > 0.0 ? e / t : e;
  const double so_far = tolerance > 0.0 ? error / tolerance : error;
  if (fails ? (!bad || !(ratio <= so_far)) : (!bad && ratio >= so_far)) {
    error = e;
    tolerance = t;
    where = place;
  }
  bad = bad || fails;
}

Line& Recorder::line_of(const Case& c, const std::string& impl) {
  for (Line& l : lines_) {
    if (l.op == c.op && l.impl == impl && l.format == c.format && l.case_class == c.case_class) return l;
  }
  lines_.push_back({.op = c.op, .impl = impl, .format = c.format, .case_class = c.case_class});
  return lines_.back();
}

void Recorder::add(const Case& c, const std::string& impl, const Worst& worst) {
  Runs& runs = runs_[fmt::format("{}, {}, {}, {}", c.op, c.format, c.case_class, c.detail)];
  runs.c = c;
  ++runs.of[impl];
  Line& l = line_of(c, impl);
  const double ratio = worst.tolerance > 0.0 ? worst.error / worst.tolerance : worst.error;
  const double so_far = l.tolerance > 0.0 ? l.error / l.tolerance : l.error;
  if (l.num_cases == 0 || (worst.bad && l.pass) || (worst.bad == !l.pass && !(ratio <= so_far))) {
    l.error = worst.error;
    l.tolerance = worst.tolerance;
    if (worst.bad) l.note = fmt::format("{}: {}", c.detail, worst.where);
  }
  l.pass = l.pass && !worst.bad;
  ++l.num_cases;
}

void Recorder::refuse(const Case& c, const std::string& impl, const std::string& reason) {
  Line& l = line_of({.op = c.op, .format = c.format, .case_class = "refused", .detail = {}}, impl);
  l.refused = true;
  l.note = reason;
}

void Recorder::report_coverage() const {
  std::map<std::string, DeviceKind> device_of;
  std::map<std::string, Coverage> by_op;
  for (const ImplInfo& i : list_all_implementations()) {
    device_of[i.name] = i.device;
    if (!wants(i.op)) continue;
    Coverage& c = by_op[i.op];
    c.op = i.op;
    c.cuda_here = c.cuda_here || (i.device == DeviceKind::kCuda && i.runs_here);
  }
  std::map<std::tuple<std::string, std::string, std::string>, int64_t> missing;  // by operation, format and class
  for (const auto& [name, runs] : runs_) {
    int64_t cpu = 0, cuda = 0;
    for (const auto& [impl, n] : runs.of) {
      int64_t& most = device_of[impl] == DeviceKind::kCuda ? cuda : cpu;
      most = std::max(most, n);
    }
    Coverage& c = by_op[runs.c.op];
    c.cpu_cases += cpu;
    c.cuda_cases += cuda;
    if (cuda < cpu) missing[{runs.c.op, runs.c.format, runs.c.case_class}] += cpu - cuda;
  }
  for (const auto& [key, n] : missing) {
    const auto& [op, format, case_class] = key;
    Coverage& c = by_op[op];
    if (!c.cuda_here) continue;
    std::string reasons;
    for (const Line& l : lines_)
      if (l.refused && l.op == op && l.format == format && device_of[l.impl] == DeviceKind::kCuda)
        reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", l.impl, l.note);
    c.left_out.push_back(fmt::format("{}, {}, {}: {} cases: {}", op, format, case_class, n,
                                     reasons.empty() ? "only implementations of the CPU have such a case" : reasons));
  }
  for (const auto& [op, c] : by_op)
    if (c.cpu_cases + c.cuda_cases > 0) options_.on_coverage(c);
}

std::vector<Line> Recorder::finish() {
  if (options_.on_line) {
    for (const Line& l : lines_) options_.on_line(l);
  }
  if (options_.on_coverage) report_coverage();
  return std::move(lines_);
}

std::string to_string(const Line& l) {
  std::string text = fmt::format("{:<17} {:<12} {:<44} {:<22}", l.op, l.impl, l.format, l.case_class);
  if (l.refused) return text + "  " + l.note;
  text += fmt::format(" {:>4} cases  ", l.num_cases);
  text += l.tolerance > 0.0 ? fmt::format("{:.1e} of {:.1e}", l.error, l.tolerance)
                            : std::string(l.pass ? "bit for bit       " : "not bit for bit   ");
  text += l.pass ? "  ok" : "  FAIL " + l.note;
  return text;
}

std::vector<Line> verify_operations(const Options& options) {
  struct Part {
    std::initializer_list<const char*> ops;
    void (*run)(Recorder&);
    void (*run_small)(Recorder&);
  };
  static const Part kParts[] = {
      {{"latent_write", "latent_gather", "index_k_write", "index_k_gather"}, &verify_caches, &verify_caches},
      {{"rope"}, &verify_rope, &verify_rope},
      {{"ragged_prefill"}, &verify_ragged_prefill, &verify_small_prefills},
      {{"merge_state"}, &verify_merge_state, &verify_merge_state},
      {{"mla_decode"}, &verify_mla_decode, &verify_small_decodes},
      {{"index_logits"}, &verify_index_logits, &verify_small_logits},
      {{"topk"}, &verify_topk, &verify_small_topk},
      {{"index_select"}, &verify_index_select, &verify_small_selections},
      {{"sparse_attention"}, &verify_sparse_attention, &verify_small_lists},
  };
  std::vector<Line> all;
  for (const Part& part : kParts) {
    bool wanted = false;
    Recorder recorder(options);
    for (const char* op : part.ops) wanted = wanted || recorder.wants(op);
    if (!wanted) continue;
    (options.small ? part.run_small : part.run)(recorder);
    for (Line& l : recorder.finish()) all.push_back(std::move(l));
  }
  return all;
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet

#include "bench/prefill_forms.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>

#include "bench/storage.h"
#include "core/implementation.h"
#include "gannet/gannet.h"
#include "model/decoder.h"

namespace gannet {
inline namespace v0 {
namespace bench {
namespace {

constexpr double kMilli = 1e3;
// DeepSeek-V3's widths.
constexpr int64_t kLatent = 512, kRope = 64, kNope = 128, kV = 128;
constexpr float kWeightScale = 0.05f;  // about 512^-0.5: keys and values of the size of latents

/// One point: weights, caches and a step, ready to run either form.
class Prefill {
 public:
  Prefill(const Context& context, const Grid& grid, const std::string& impl, int heads, int prefix, int rows)
      : storage_(11),
        widths_{.heads = heads, .latent = kLatent, .rope = kRope, .nope = kNope, .v = kV},
        query_(grid.dtype == DType::kBf16 ? QueryPrecision::kBf16 : QueryPrecision::kF32),
        compute_(make_compute(context, {.projector = {.impl = projector_impl(impl)}})) {
    const DecoderOptions defaults;
    const AttentionConfig config{.arch = AttentionArch::kMla,
                                 .num_heads = heads,
                                 .geometry = {kLatent, kRope},
                                 .qk_nope_head_dim = kNope,
                                 .v_head_dim = kV,
                                 .softmax_scale = 1.0f / std::sqrt(static_cast<float>(kNope + kRope)),
                                 .page_size = grid.page_size,
                                 .max_context_len = int64_t{prefix} + rows,
                                 .prefix_chunk_capacity = defaults.prefix_chunk_capacity,
                                 .plan = {.impl = impl}};
    backend_ = make_attention_backend(context, config);
    const int64_t batch = grid.batch, total = int64_t{prefix} + rows;
    const int64_t pages_each = pages_for(total, grid.page_size), num_pages = batch * pages_each + 1;
    // A layer of a decoder meets its weights and its cache once a step: so many layers take turns.
    const int64_t kv_b_values = heads * (kNope + kV) * kLatent;
    const int64_t layer_bytes = kv_b_values * static_cast<int64_t>(sizeof(Bf16)) +
                                batch * total * latent_row_bytes(grid.latent_format, config.geometry);
    const auto layers = static_cast<int32_t>(num_copies(grid, layer_bytes));
    pool_.emplace(LatentPoolOptions{.num_layers = layers,
                                    .format = grid.latent_format,
                                    .geometry = config.geometry,
                                    .num_pages = num_pages,
                                    .page_size = grid.page_size,
                                    .scale = grid.latent_format == LatentFormat::kE4m3 ? 1.0f : 0.0f});
    backend_->bind(layer_caches(*pool_, nullptr));
    const TensorView table = storage_.ints(storage_.permutation(1, static_cast<int32_t>(num_pages - 1)));
    const auto each = [&](int64_t n) {
      return std::vector<int32_t>(static_cast<size_t>(batch), static_cast<int32_t>(n));
    };
    const std::vector<int32_t> seq_lens = each(total), none = each(0), prefix_lens = each(prefix),
                               extend_lens = each(rows);
    TensorView pages = table;
    pages.rank = 2;
    pages.shape = {batch, pages_each};
    pages.stride = {pages_each, 1};
    const auto prepare = [&](const std::vector<int32_t>& before, const std::vector<int32_t>& extend) {
      backend_->prepare(
          {.seq_lens = seq_lens, .prefix_lens = before, .extend_lens = extend, .pages = PageTableView::padded(pages)});
    };
    prepare(none, seq_lens);
    const TensorView latent = storage_.normal(DType::kF32, {batch * total, kLatent});
    const TensorView rope = storage_.normal(DType::kF32, {batch * total, kRope});
    for (int32_t layer = 0; layer < layers; ++layer) {
      backend_->write(layer, StepRows::kAll, {.latent = latent, .rope = rope, .index_k = {}});
      weights_.push_back({.data = storage_.normal(DType::kBf16, {kv_b_values}, kWeightScale).data,
                          .dtype = DType::kBf16,
                          .rows = heads * (kNope + kV),
                          .cols = kLatent});
    }
    prepare(prefix_lens, extend_lens);
    const int64_t n = batch * rows;
    x_ = {.layer = 0,
          .kv_b = {},
          .q = storage_.normal(DType::kF32, {n, heads, kNope + kRope}).ptr<float>(),
          .latent = storage_.normal(DType::kF32, {n, kLatent}).ptr<float>(),
          .rope = storage_.normal(DType::kF32, {n, kRope}).ptr<float>(),
          .rope_stride = kRope,
          .heads = storage_.zeros(DType::kF32, {n, heads, kV}).ptr<float>()};
    forms_.emplace(*backend_, *compute_, query_, widths_, seconds_);
    setup_ = {.widths = widths_,
              .query = query_,
              .format = grid.latent_format,
              .impl = attention_impl(impl),
              .gemm_library = Projector::gemm_library() != "none"};
  }

  void run(PrefillForm form, int64_t iteration) {
    x_.layer = static_cast<int32_t>(iteration % static_cast<int64_t>(weights_.size()));
    x_.kv_b = weights_[static_cast<size_t>(x_.layer)];
    if (form == PrefillForm::kExpanded) forms_->expanded(x_);
    else forms_->absorbed(x_, StepRows::kPrefill, AlreadyWritten{}, AttendAll{});
  }
  FormStep step() const { return form_step(backend_->step()); }
  const FormSetup& setup() const { return setup_; }

 private:
  Storage storage_;
  MlaWidths widths_;
  QueryPrecision query_;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<AttentionBackend> backend_;
  std::optional<LatentPool> pool_;
  std::vector<WeightView> weights_;
  MlaRows x_;
  double seconds_ = 0.0;
  std::optional<MlaForms> forms_;
  FormSetup setup_;
};

class FormCall final : public Call {
 public:
  FormCall(Prefill& prefill, PrefillForm form) : prefill_(prefill), form_(form) {}
  const char* impl() const override { return to_string(form_); }
  void run(int64_t iteration) override { prefill_.run(form_, iteration); }

 private:
  Prefill& prefill_;
  PrefillForm form_;
};

}  // namespace

void run_prefill_forms(const Context& context, const Options& options, const Roofs& roofs, std::ostream& out,
                       std::ostream* json) {
  const Grid& grid = options.grid;
  std::vector<std::string> impls{options.impl};
  if (options.impl == "all") {
    impls.clear();
    for (const ImplementationSet* set : implementation_sets())
      if (set->device == DeviceKind::kCpu && set->compiled && !set->only_when_forced && set->runs_here())
        impls.emplace_back(set->name);
  }
  out << fmt::format("\nforms of dense prefill: queries {}, kv {}, {} request(s), {} thread(s)\n",
                     to_string(grid.dtype), to_string(grid.latent_format), grid.batch, roofs.threads);
  out << fmt::format("{:<12} {:>5} {:>7} {:>5} {:>12} {:>12} {:>12} {:>12}  {:<9} {:>11}\n", "impl", "heads", "prefix",
                     "rows", "expanded ms", "estimated", "absorbed ms", "estimated", "auto", "over better");
  int64_t points = 0, near = 0;
  double worst = 1.0;
  constexpr double kNear = 1.1;
  for (const std::string& impl : impls) {
    for (const int heads : or_default(grid.heads, {128, 16})) {
      for (const int prefix : or_default(grid.keys, {0, 1024, 4096, 16384})) {
        for (const int rows : or_default(grid.rows, {1, 4, 16, 64, 256, 1024, 4096})) {
          Prefill prefill(context, grid, impl, heads, prefix, rows);
          const FormCosts costs = prefill_form_costs(prefill.setup(), prefill.step());
          const PrefillForm chosen = choose_prefill_form(PrefillForm::kAuto, prefill.setup(), prefill.step());
          struct {
            FormCall call;
            int64_t calls = 0;
            std::vector<double> minima = {};
          } forms[] = {{{prefill, PrefillForm::kExpanded}}, {{prefill, PrefillForm::kAbsorbed}}};
          // The first call is not timed: it touches scratch, and makes plans.
          for (int round = -1; round < options.rounds; ++round)
            for (auto& f : forms) {
              const double least = round_minimum(f.call, f.calls, options.clock, round < 0 ? 0.0 : options.min_time);
              if (round >= 0) f.minima.push_back(least);
            }
          const Timing expanded = timing_of(forms[0].minima, forms[0].calls),
                       absorbed = timing_of(forms[1].minima, forms[1].calls);
          const double taken = chosen == PrefillForm::kExpanded ? expanded.min_seconds : absorbed.min_seconds;
          const double over = taken / std::min(expanded.min_seconds, absorbed.min_seconds);
          ++points;
          near += int64_t{over <= kNear};
          worst = std::max(worst, over);
          out << fmt::format("{:<12} {:>5} {:>7} {:>5} {:>12.3f} {:>12.3f} {:>12.3f} {:>12.3f}  {:<9} {:>11.2f}\n",
                             prefill.setup().impl, heads, prefix, rows, expanded.min_seconds * kMilli,
                             costs.expanded * kMilli, absorbed.min_seconds * kMilli, costs.absorbed * kMilli,
                             to_string(chosen), over)
              << std::flush;
          if (json == nullptr) continue;
          nlohmann::ordered_json j;
          j["op"] = kPrefillForm;
          j["shape"] = {{"heads", heads},
                        {"prefix", prefix},
                        {"rows", rows},
                        {"batch", grid.batch},
                        {"dtype", to_string(grid.dtype)},
                        {"kv", to_string(grid.latent_format)},
                        {"page_size", grid.page_size}};
          j["impl"] = prefill.setup().impl;
          const auto put = [&](const std::string& name, const Timing& t, double estimate) {
            j[name + "_ms_min"] = t.min_seconds * kMilli;
            j[name + "_ms_median"] = t.median_seconds * kMilli;
            j[name + "_ms_estimated"] = estimate * kMilli;
          };
          put("expanded", expanded, costs.expanded);
          put("absorbed", absorbed, costs.absorbed);
          j["auto"] = to_string(chosen);
          j["auto_over_better"] = over;
          j["clock"] = options.clock == ClockKind::kWall ? "wall" : "thread CPU time";
          *json << to_json_line(j, roofs) << '\n' << std::flush;
        }
      }
    }
  }
  out << fmt::format("auto is within 10 % of the better form in {} of {} points, at worst {:.2f} times it\n", near,
                     points, worst)
      << std::flush;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet

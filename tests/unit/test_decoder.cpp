// The decoder against plain double loops on small checkpoints made here: what the golden files cannot see. They do not
// tell the eps of the latent norms from rms_norm_eps (the values are close), nor a common shift of all positions (RoPE
// is relative); nor do they hold a model without a q latent, with tied embeddings, or without shared experts, an MTP
// layer of a dense model, or what the later steps of a draft feed.
#include "model/decoder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "gannet/error.h"

namespace gannet {
namespace {

namespace fs = std::filesystem;
using Tensors = std::map<std::string, std::pair<std::vector<int64_t>, std::vector<float>>>;

struct Shape {
  int64_t dim = 48, heads = 2, q_lora = 32, latent = 512, nope = 128, rope = 64, v = 128;
  int64_t inner = 40, experts = 4, expert_inner = 24, shared = 1, vocab = 30, layers = 2;
  bool tied = false, mtp = false;
  double eps = 1e-2;  // far from the latent norms' 1e-6
};

nlohmann::json config_of(const Shape& s) {
  nlohmann::json c = {{"architectures", {"DeepseekV3ForCausalLM"}},
                      {"model_type", "deepseek_v3"},
                      {"vocab_size", s.vocab},
                      {"hidden_size", s.dim},
                      {"intermediate_size", s.inner},
                      {"moe_intermediate_size", s.expert_inner},
                      {"num_hidden_layers", s.layers},
                      {"num_attention_heads", s.heads},
                      {"n_shared_experts", s.shared},
                      {"n_routed_experts", s.experts},
                      {"num_experts_per_tok", 2},
                      {"n_group", 1},
                      {"topk_group", 1},
                      {"norm_topk_prob", true},
                      {"routed_scaling_factor", 1.5},
                      {"scoring_func", "sigmoid"},
                      {"topk_method", "noaux_tc"},
                      {"first_k_dense_replace", 1},
                      {"kv_lora_rank", s.latent},
                      {"q_lora_rank", nullptr},
                      {"qk_nope_head_dim", s.nope},
                      {"qk_rope_head_dim", s.rope},
                      {"v_head_dim", s.v},
                      {"max_position_embeddings", 256},
                      {"rms_norm_eps", s.eps},
                      {"rope_theta", 10000.0},
                      {"tie_word_embeddings", s.tied},
                      {"hidden_act", "silu"},
                      {"eos_token_id", 1}};
  if (s.q_lora > 0) c["q_lora_rank"] = s.q_lora;
  if (s.mtp) c["num_nextn_predict_layers"] = 1;
  return c;
}

Tensors tensors_of(const Shape& s, uint32_t seed) {
  std::mt19937 rng(seed);
  Tensors t;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, float scale, float mean = 0.0f) {
    std::normal_distribution<float> normal(mean, scale);
    int64_t n = 1;
    for (const int64_t d : shape) n *= d;
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = normal(rng);
    t[name] = {shape, values};
  };
  add("model.embed_tokens.weight", {s.vocab, s.dim}, 0.3f);
  if (!s.tied) add("lm_head.weight", {s.vocab, s.dim}, 0.3f);
  add("model.norm.weight", {s.dim}, 0.1f, 1.0f);
  for (int64_t l = 0; l < s.layers + int64_t{s.mtp}; ++l) {
    const std::string p = "model.layers." + std::to_string(l) + ".", a = p + "self_attn.", m = p + "mlp.";
    if (l == s.layers) {
      for (const char* name : {"enorm", "hnorm", "shared_head.norm"}) add(p + name + ".weight", {s.dim}, 0.1f, 1.0f);
      add(p + "eh_proj.weight", {s.dim, 2 * s.dim}, 0.15f);
    }
    add(p + "input_layernorm.weight", {s.dim}, 0.1f, 1.0f);
    add(p + "post_attention_layernorm.weight", {s.dim}, 0.1f, 1.0f);
    // Small latents: mean squares around 1e-3, against which an eps of 1e-2 weighs and one of 1e-6 does not.
    if (s.q_lora > 0) {
      add(a + "q_a_proj.weight", {s.q_lora, s.dim}, 0.005f);
      add(a + "q_a_layernorm.weight", {s.q_lora}, 0.1f, 1.0f);
      add(a + "q_b_proj.weight", {s.heads * (s.nope + s.rope), s.q_lora}, 0.2f);
    } else {
      add(a + "q_proj.weight", {s.heads * (s.nope + s.rope), s.dim}, 0.2f);
    }
    add(a + "kv_a_proj_with_mqa.weight", {s.latent + s.rope, s.dim}, 0.005f);
    add(a + "kv_a_layernorm.weight", {s.latent}, 0.1f, 1.0f);
    add(a + "kv_b_proj.weight", {s.heads * (s.nope + s.v), s.latent}, 0.1f);
    add(a + "o_proj.weight", {s.dim, s.heads * s.v}, 0.05f);
    const auto mlp = [&](const std::string& prefix, int64_t width) {
      add(prefix + "gate_proj.weight", {width, s.dim}, 0.2f);
      add(prefix + "up_proj.weight", {width, s.dim}, 0.2f);
      add(prefix + "down_proj.weight", {s.dim, width}, 0.2f);
    };
    if (l == 0) {
      mlp(m, s.inner);
      continue;
    }
    add(m + "gate.weight", {s.experts, s.dim}, 0.5f);
    add(m + "gate.e_score_correction_bias", {s.experts}, 0.1f);
    for (int64_t e = 0; e < s.experts; ++e) mlp(m + "experts." + std::to_string(e) + ".", s.expert_inner);
    if (s.shared > 0) mlp(m + "shared_experts.", s.expert_inner * s.shared);
  }
  return t;
}

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("gannet_decoder." + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string string() const { return path_.string(); }
  void write(const nlohmann::json& config, const Tensors& tensors) const {
    std::ofstream(path_ / "config.json") << config.dump();
    nlohmann::json header;
    int64_t at = 0;
    for (const auto& [name, t] : tensors) {
      const auto bytes = static_cast<int64_t>(t.second.size() * sizeof(float));
      header[name] = {{"dtype", "F32"}, {"shape", t.first}, {"data_offsets", {at, at + bytes}}};
      at += bytes;
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t n = text.size();
    std::ofstream out(path_ / "model.safetensors", std::ios::binary);
    out.write(reinterpret_cast<const char*>(&n), sizeof n);
    out << text;
    for (const auto& [name, t] : tensors)
      out.write(reinterpret_cast<const char*>(t.second.data()),
                static_cast<std::streamsize>(t.second.size() * sizeof(float)));
  }

 private:
  fs::path path_;
};

using Row = std::vector<double>;

/// The whole model in double, token by token, in the expanded form, as the published code of these models has it.
class Reference {
 public:
  Reference(const Shape& s, const Tensors& t) : s_(s), t_(t) {}

  std::vector<Row> logits(const std::vector<int32_t>& ids) {
    std::vector<Row> x;
    for (const int32_t id : ids) x.push_back(row("model.embed_tokens.weight", id));
    latent_.assign(static_cast<size_t>(s_.layers) + 1, {});
    for (int64_t l = 0; l < s_.layers; ++l) layer(l, x);
    hidden_.clear();
    for (const Row& r : x) hidden_.push_back(norm(r, "model.norm.weight", s_.eps));
    return head(hidden_);
  }

  /// The MTP layer over the rows of logits(), row i followed by next[i]; entries of `next` beyond them are later steps
  /// of a draft, each of which goes on from the hidden state of the one before.
  std::vector<Row> mtp_logits(const std::vector<int32_t>& next) {
    const std::string p = "model.layers." + std::to_string(s_.layers) + ".";
    std::vector<Row> hidden = hidden_, out;
    for (size_t rows = hidden_.size(); rows <= next.size(); ++rows) {
      std::vector<Row> x;
      for (size_t i = 0; i < rows; ++i) {
        Row in = norm(row("model.embed_tokens.weight", next[i]), p + "enorm.weight", s_.eps);
        const Row h = norm(hidden[i], p + "hnorm.weight", s_.eps);
        in.insert(in.end(), h.begin(), h.end());
        x.push_back(times(p + "eh_proj.weight", in));
      }
      latent_.back().clear();
      layer(s_.layers, x);
      out.clear();
      for (const Row& r : x) out.push_back(norm(r, p + "shared_head.norm.weight", s_.eps));
      hidden.push_back(out.back());
    }
    return head(out);
  }

  /// What the cache keeps of token `position`: normalised latent, rotated k_pe.
  const Row& cached(int64_t layer, size_t position) const { return latent_[static_cast<size_t>(layer)][position]; }

 private:
  void layer(int64_t l, std::vector<Row>& x) {
    const std::string p = "model.layers." + std::to_string(l) + ".";
    attention(p + "self_attn.", p + "input_layernorm.weight", l, x);
    for (Row& r : x) {
      const Row normed = norm(r, p + "post_attention_layernorm.weight", s_.eps);
      add(r, l == 0 ? mlp(p + "mlp.", normed) : moe(p + "mlp.", normed));
    }
  }
  std::vector<Row> head(const std::vector<Row>& normed) const {
    std::vector<Row> out;
    for (const Row& r : normed) out.push_back(times(s_.tied ? "model.embed_tokens.weight" : "lm_head.weight", r));
    return out;
  }
  const std::vector<float>& values(const std::string& name) const { return t_.at(name).second; }
  Row row(const std::string& name, int64_t i) const {
    const auto& v = values(name);
    const auto n = t_.at(name).first[1];
    return Row(v.begin() + i * n, v.begin() + (i + 1) * n);
  }
  Row times(const std::string& name, const Row& x) const {
    const auto& shape = t_.at(name).first;
    const auto& w = values(name);
    Row y(static_cast<size_t>(shape[0]), 0.0);
    for (size_t o = 0; o < y.size(); ++o)
      for (size_t i = 0; i < x.size(); ++i) y[o] += double{w[o * x.size() + i]} * x[i];
    return y;
  }
  Row norm(const Row& x, const std::string& name, double eps) const {
    double squares = 0.0;
    for (const double v : x) squares += v * v;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + eps);
    Row y(x);
    for (size_t i = 0; i < y.size(); ++i) y[i] *= scale * double{values(name)[i]};
    return y;
  }
  static void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  void rotate(double* x, size_t position) const {
    for (int64_t i = 0; i < s_.rope / 2; ++i) {
      const double angle = static_cast<double>(position) *
                           std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(s_.rope));
      const double a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * std::cos(angle) - b * std::sin(angle);
      x[2 * i + 1] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  void attention(const std::string& p, const std::string& norm_name, int64_t layer, std::vector<Row>& x) {
    const size_t nope = static_cast<size_t>(s_.nope), rope = static_cast<size_t>(s_.rope),
                 v_dim = static_cast<size_t>(s_.v);
    const size_t latent = static_cast<size_t>(s_.latent);
    std::vector<Row> expanded;  // kv_b of each token's latent
    auto& cache = latent_[static_cast<size_t>(layer)];
    for (size_t t = 0; t < x.size(); ++t) {
      const Row xn = norm(x[t], norm_name, s_.eps);
      Row q = s_.q_lora > 0 ? times(p + "q_b_proj.weight",
                                    norm(times(p + "q_a_proj.weight", xn), p + "q_a_layernorm.weight", 1e-6))
                            : times(p + "q_proj.weight", xn);
      const Row kv = times(p + "kv_a_proj_with_mqa.weight", xn);
      Row c = norm(Row(kv.begin(), kv.begin() + s_.latent), p + "kv_a_layernorm.weight", 1e-6);
      expanded.push_back(times(p + "kv_b_proj.weight", c));
      c.insert(c.end(), kv.begin() + s_.latent, kv.end());
      rotate(c.data() + latent, t);
      cache.push_back(c);
      Row heads;
      for (size_t h = 0; h < static_cast<size_t>(s_.heads); ++h) {
        double* qh = q.data() + h * (nope + rope);
        rotate(qh + nope, t);
        Row p_t;
        double sum = 0.0, top = -INFINITY;
        for (size_t k = 0; k <= t; ++k) {
          double score = 0.0;
          for (size_t i = 0; i < nope; ++i) score += qh[i] * expanded[k][h * (nope + v_dim) + i];
          for (size_t i = 0; i < rope; ++i) score += qh[nope + i] * cache[k][latent + i];
          p_t.push_back(score / std::sqrt(static_cast<double>(nope + rope)));
          top = std::max(top, p_t.back());
        }
        for (double& w : p_t) sum += w = std::exp(w - top);
        for (size_t i = 0; i < v_dim; ++i) {
          double o = 0.0;
          for (size_t k = 0; k <= t; ++k) o += p_t[k] / sum * expanded[k][h * (nope + v_dim) + nope + i];
          heads.push_back(o);
        }
      }
      add(x[t], times(p + "o_proj.weight", heads));
    }
  }
  Row mlp(const std::string& p, const Row& x) const {
    Row g = times(p + "gate_proj.weight", x);
    const Row u = times(p + "up_proj.weight", x);
    for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1.0 + std::exp(-g[i])) * u[i];
    return times(p + "down_proj.weight", g);
  }
  Row moe(const std::string& p, const Row& x) const {
    Row s = times(p + "gate.weight", x);
    std::vector<size_t> order(s.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (double& v : s) v = 1.0 / (1.0 + std::exp(-v));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return s[a] + double{values(p + "gate.e_score_correction_bias")[a]} >
             s[b] + double{values(p + "gate.e_score_correction_bias")[b]};
    });
    Row y(x.size(), 0.0);
    if (s_.shared > 0) y = mlp(p + "shared_experts.", x);
    for (size_t j = 0; j < 2; ++j) {
      const Row e = mlp(p + "experts." + std::to_string(order[j]) + ".", x);
      for (size_t i = 0; i < y.size(); ++i) y[i] += 1.5 * s[order[j]] / (s[order[0]] + s[order[1]]) * e[i];
    }
    return y;
  }

  Shape s_;
  const Tensors& t_;
  std::vector<std::vector<Row>> latent_;
  std::vector<Row> hidden_;
};

const std::vector<int32_t> kIds = {3, 7, 1, 29, 0, 7, 7, 12, 18, 4, 22, 9, 5};

void compare(const Shape& s, uint32_t seed, bool invariant, PrefillForm form = PrefillForm::kAuto) {
  const Folder folder;
  const Tensors tensors = tensors_of(s, seed);
  folder.write(config_of(s), tensors);
  Reference reference(s, tensors);
  const std::vector<Row> expected = reference.logits(kIds);

  ThreadPool pool({.num_threads = 2});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(folder.string());
  Decoder decoder(context, checkpoint,
                  {.latent_format = LatentFormat::kF32,
                   .num_pages = 3,
                   .prefill_form = form,
                   .invariant = invariant,
                   .draft = s.mtp});
  // What follows each token, and behind the last one what a draft guesses, right or wrong.
  std::vector<int32_t> next(kIds.begin() + 1, kIds.end());
  next.insert(next.end(), {11, 2, 6});
  std::vector<float> mtp_logits(static_cast<size_t>(s.vocab) * next.size());
  EXPECT_TRUE(decoder.unknown_tensors().empty());
  // A prefill of 8 tokens, one of 3 behind them, then two steps of decode, on page 2 of the pool.
  const std::vector<int32_t> page = {2};
  std::vector<float> logits(static_cast<size_t>(s.vocab) * kIds.size());
  size_t done = 0;
  for (const int32_t n : {8, 3, 1, 1}) {
    const std::vector<int32_t> seq_lens = {static_cast<int32_t>(done) + n}, prefix = {static_cast<int32_t>(done)},
                               extend = {n};
    std::vector<int64_t> rows(static_cast<size_t>(n));
    std::iota(rows.begin(), rows.end(), 0);
    BatchStep step;
    step.seq_lens = seq_lens;
    step.pages = PageTableView::padded(view(page.data(), {1, 1}));
    if (n > 1) {
      step.prefix_lens = prefix;
      step.extend_lens = extend;
    }
    decoder.forward(step, std::span(kIds).subspan(done, static_cast<size_t>(n)),
                    {.logit_rows = rows, .logits = logits.data() + done * static_cast<size_t>(s.vocab)});
    if (s.mtp)
      decoder.draft(std::span(next).subspan(done, static_cast<size_t>(n)),
                    {.logit_rows = rows, .logits = mtp_logits.data() + done * static_cast<size_t>(s.vocab)});
    done += static_cast<size_t>(n);
  }
  const DecoderStats& stats = decoder.stats();
  EXPECT_EQ(stats.expanded_steps + stats.absorbed_steps, 2);
  if (form != PrefillForm::kAuto || invariant) {
    EXPECT_EQ(stats.expanded_steps, form == PrefillForm::kExpanded ? 2 : 0);
  }
  const std::vector<int64_t> first_row = {0};
  for (int32_t k = 1; s.mtp && done < next.size(); ++k, ++done)
    decoder.draft_next({.steps = k}, {{0}}, std::span(next).subspan(done, 1),
                       {.logit_rows = first_row, .logits = mtp_logits.data() + done * static_cast<size_t>(s.vocab)});
  // fp32 through two layers of sums of some hundred terms; with the norms' eps taken for one another errors exceed 0.1.
  constexpr double kTolerance = 2e-4;
  for (size_t t = 0; t < kIds.size(); ++t)
    for (size_t i = 0; i < static_cast<size_t>(s.vocab); ++i)
      ASSERT_NEAR(logits[t * static_cast<size_t>(s.vocab) + i], expected[t][i], kTolerance)
          << "token " << t << " logit " << i;
  if (s.mtp) {
    const std::vector<Row> mtp_expected = reference.mtp_logits(next);
    for (size_t t = 0; t < next.size(); ++t)
      for (size_t i = 0; i < static_cast<size_t>(s.vocab); ++i)
        ASSERT_NEAR(mtp_logits[t * static_cast<size_t>(s.vocab) + i], mtp_expected[t][i], kTolerance)
            << "MTP row " << t << " logit " << i;
  }
  // The cache: positions count from 0, so that the first row's k_pe is not rotated.
  const int64_t row_bytes = latent_row_bytes(LatentFormat::kF32, {512, 64});
  for (int32_t layer = 0; layer < s.layers; ++layer) {
    const LatentCacheView cache = decoder.latent_cache(layer);
    for (size_t t = 0; t < kIds.size(); ++t) {
      const auto* row = reinterpret_cast<const float*>(cache.row(2 * 64 + static_cast<int64_t>(t), row_bytes));
      for (size_t i = 0; i < 576; ++i)
        ASSERT_NEAR(row[i], reference.cached(layer, t)[i], kTolerance) << layer << " " << t << " " << i;
    }
  }
}

TEST(Decoder, IsItsDefinitionWithTheLatentNormsOwnEps) {
  for (const bool invariant : {false, true}) compare({}, 1, invariant);
}

TEST(Decoder, IsItsDefinitionInEitherFormOfPrefill) {
  Shape s;
  s.mtp = true;
  for (const PrefillForm form : {PrefillForm::kExpanded, PrefillForm::kAbsorbed}) compare(s, 8, false, form);
  compare(s, 8, true, PrefillForm::kAbsorbed);
}

TEST(Decoder, RefusesTheExpandedFormInTheInvariantMode) {
  const Folder folder;
  const Shape s;
  folder.write(config_of(s), tensors_of(s, 9));
  const Context context{};
  Checkpoint checkpoint = Checkpoint::open(folder.string());
  try {
    Decoder(context, checkpoint, {.num_pages = 2, .prefill_form = PrefillForm::kExpanded, .invariant = true});
    FAIL() << "bits that depend on the chunk";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("[Decoder] prefill_form is expanded; accepted: auto, absorbed"),
              std::string::npos)
        << e.what();
  }
}

TEST(Decoder, TakesAModelWithoutAQueryLatent) {
  Shape s;
  s.q_lora = 0;
  compare(s, 2, false);
}

TEST(Decoder, TakesTiedEmbeddingsAndNoSharedExperts) {
  Shape s;
  s.tied = true;
  s.shared = 0;
  compare(s, 3, false);
}

TEST(Decoder, DraftsByTheMtpLayer) {
  Shape s;
  s.mtp = true;
  for (const bool invariant : {false, true}) compare(s, 6, invariant);
}

// Published models announce MTP layers that their files lack.
TEST(Decoder, LoadsWithoutTheMtpLayerThatIsAnnounced) {
  const Folder folder;
  Shape s;
  s.mtp = true;
  const Context context{};
  const auto expect_refused = [&](const Tensors& tensors, const std::string& word) {
    folder.write(config_of(s), tensors);
    Checkpoint checkpoint = Checkpoint::open(folder.string());
    const Decoder decoder(context, checkpoint, {.num_pages = 2});
    EXPECT_TRUE(decoder.unknown_tensors().empty());
    EXPECT_NE(decoder.draft_refusal().find(word), std::string::npos) << decoder.draft_refusal();
    try {
      Decoder(context, checkpoint, {.num_pages = 2, .draft = true});
      FAIL() << word << ": a draft without its layer";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
  };
  Tensors t = tensors_of(s, 7);
  const Tensors whole = t;
  t.erase("model.layers.2.eh_proj.weight");
  expect_refused(t, "model.layers.2.eh_proj.weight");  // in part
  std::erase_if(t, [](const auto& entry) { return entry.first.starts_with("model.layers.2."); });
  expect_refused(t, "model.layers.2.*");
  s.mtp = false;  // there, and not announced
  expect_refused(whole, "num_nextn_predict_layers");
}

TEST(Decoder, ReportsTensorsThatItDoesNotKnow) {
  const Folder folder;
  const Shape s;
  Tensors t = tensors_of(s, 4);
  t["model.layers.0.self_attn.extra.weight"] = {{2}, {1.0f, 2.0f}};
  t["model.layers.2.enorm.weight"] = {{2}, {1.0f, 2.0f}};  // layer 2 of 2: an MTP layer, present and unused
  folder.write(config_of(s), t);
  const Context context{};
  Checkpoint checkpoint = Checkpoint::open(folder.string());
  const Decoder decoder(context, checkpoint, {.num_pages = 2});
  EXPECT_EQ(decoder.unknown_tensors(), (std::vector<std::string>{"model.layers.0.self_attn.extra.weight"}));
}

TEST(Decoder, RefusesMissingTensorsAndBadIds) {
  const Folder folder;
  const Shape s;
  Tensors t = tensors_of(s, 5);
  const Context context{};
  {
    folder.write(config_of(s), t);
    Checkpoint checkpoint = Checkpoint::open(folder.string());
    Decoder decoder(context, checkpoint, {.num_pages = 2});
    const std::vector<int32_t> one = {1}, page = {1};
    BatchStep step;
    step.seq_lens = one;
    step.pages = PageTableView::padded(view(page.data(), {1, 1}));
    for (const int32_t id : {-1, 30}) EXPECT_THROW(decoder.forward(step, std::vector<int32_t>{id}, {}), Error);
    EXPECT_THROW(decoder.forward(step, std::vector<int32_t>{1, 2}, {}), Error);
    const std::vector<int64_t> rows = {1};
    EXPECT_THROW(decoder.forward(step, std::vector<int32_t>{1}, {.logit_rows = rows}), Error);
  }
  t.erase("model.layers.1.mlp.experts.3.up_proj.weight");
  folder.write(config_of(s), t);
  Checkpoint checkpoint = Checkpoint::open(folder.string());
  try {
    Decoder(context, checkpoint, {.num_pages = 2});
    FAIL() << "a missing tensor was not noticed";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kCorruptFile);
    EXPECT_NE(std::string(e.what()).find("model.layers.1.mlp.experts.3.up_proj.weight"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace gannet

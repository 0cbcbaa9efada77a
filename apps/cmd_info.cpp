// gannet info: this machine, the implementations that run on it, and a checkpoint's geometry and KV cost.
#include "cmd_info.h"

#include <fmt/core.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli.h"
#include "core/workspaces.h"
#include "gannet/cuda.h"
#include "model/tokenizer.h"

namespace gannet::cli {
namespace {

struct InfoOptions {
  std::string model;
  bool json = false;
  MachineOptions machine;
};

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.compare(0, 10, "model name") == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

using Json = nlohmann::ordered_json;

Json machine_json(const MachineOptions& machine_options) {
  const Machine machine(machine_options);
  Json out;
  out["version"] = version();
  out["cpu"] = cpu_model();
  out["threads"] = machine.pool.num_workers();
  SerialExecutor serial;
  out["projections"] = Projector(serial).impl();
  out["gemm_library"] = Projector::gemm_library();
  for (const ImplInfo& i : list_all_implementations())
    out["implementations"][i.op].push_back({{"name", i.name}, {"runs_here", i.runs_here}});
  std::string why;
  const int num_cuda = cuda_device_count(&why);
  out["cuda"] = num_cuda > 0
                    ? fmt::format("{} device{}, the first: {}", num_cuda, num_cuda > 1 ? "s" : "", cuda_device_name())
                    : "no device: " + why;
  for (const WorkspaceSize& w : decode_workspaces(machine.context))
    out["workspaces"][w.op][w.format].push_back({{"name", w.impl}, {"bytes", w.bytes}});
  const AttentionRegistry registry = AttentionRegistry::builtin();
  for (const AttentionBackendEntry& e : registry.entries()) {
    Json archs = Json::array();
    for (const AttentionArch a : e.archs) archs.push_back(to_string(a));
    out["backends"][e.name] = archs;
  }
  return out;
}

Json model_json(const std::string& directory) {
  Checkpoint checkpoint = Checkpoint::open(directory);
  const ModelConfig& c = checkpoint.config();
  Json out;
  out["directory"] = directory;
  out["family"] = to_string(c.family);
  out["model_type"] = c.model_type;
  int64_t parameters = 0, mtp_tensors = 0;
  std::map<std::string, int64_t> bytes_by_dtype;
  const std::string mtp_prefix = fmt::format("model.layers.{}.", c.num_hidden_layers());
  for (const std::string& name : checkpoint.names()) {
    const TensorRef& t = *checkpoint.find(name);
    if (!name.ends_with("_scale_inv")) parameters += t.num_elements();
    bytes_by_dtype[t.dtype_name] += t.num_bytes;
    mtp_tensors += int64_t{name.compare(0, mtp_prefix.size(), mtp_prefix) == 0};
  }
  out["parameters"] = parameters;
  out["mapped_bytes"] = checkpoint.mapped_bytes();
  for (const auto& [dtype, bytes] : bytes_by_dtype) out["bytes_by_dtype"][dtype] = bytes;
  out["vocab_size"] = c.vocab_size;
  out["hidden_size"] = c.hidden_size;
  out["num_hidden_layers"] = c.num_hidden_layers();
  out["num_attention_heads"] = c.num_attention_heads;
  out["q_lora_rank"] = c.q_lora_rank;
  out["kv_lora_rank"] = c.kv_lora_rank;
  out["qk_nope_head_dim"] = c.qk_nope_head_dim;
  out["qk_rope_head_dim"] = c.qk_rope_head_dim;
  out["v_head_dim"] = c.v_head_dim;
  out["max_position_embeddings"] = c.max_position_embeddings;
  out["softmax_scale"] = c.softmax_scale();
  out["rope_theta"] = c.rope.theta;
  out["rope"] = c.rope.yarn ? fmt::format("yarn, factor {}, original context {}", c.rope.yarn->factor,
                                          c.rope.yarn->original_max_position_embeddings)
                            : std::string("default");
  int64_t moe_layers = 0, indexers = 0;
  for (const LayerConfig& l : c.layers) {
    moe_layers += int64_t{l.moe};
    indexers += int64_t{l.indexer};
  }
  out["moe_layers"] = moe_layers;
  if (moe_layers > 0) {
    out["n_routed_experts"] = c.n_routed_experts;
    out["num_experts_per_tok"] = c.num_experts_per_tok;
    out["n_group"] = c.n_group;
    out["topk_group"] = c.topk_group;
    out["n_shared_experts"] = c.n_shared_experts;
  }
  if (c.is_dsa()) {
    out["indexer_layers"] = indexers;
    out["index_topk"] = c.index_topk;
    out["index_n_heads"] = c.index_n_heads;
    out["index_head_dim"] = c.index_head_dim;
    out["index_rope"] = c.index_rope_pairing == RopePairing::kInterleaved ? "interleaved" : "half-split";
  }
  out["mtp_layers"] = c.num_nextn_predict_layers;
  out["mtp_tensors"] = mtp_tensors;
  Json cost;
  for (const LatentFormat latent : latent_formats(c)) {
    if (!c.is_dsa()) {
      cost[to_string(latent)] = kv_cost(c, latent, IndexKFormat::kF32).total();
      continue;
    }
    constexpr std::pair<const char*, IndexKFormat> kIndex[] = {
        {"fp32", IndexKFormat::kF32}, {"bf16", IndexKFormat::kBf16}, {"fp8 or fp8_pow2", IndexKFormat::kE4m3}};
    for (const auto& [name, index] : kIndex)
      cost[fmt::format("latent {}, index keys {}", to_string(latent), name)] = kv_cost(c, latent, index).total();
  }
  out["kv_bytes_per_token"] = cost;
  return out;
}

std::string value_text(const Json& v) { return v.is_string() ? v.get<std::string>() : v.dump(); }

void print_machine(const Json& machine) {
  Table t;
  t.row("gannet", value_text(machine["version"]));
  t.row("CPU", value_text(machine["cpu"]));
  t.row("CUDA", value_text(machine["cuda"]));
  t.row("threads", value_text(machine["threads"]));
  t.row("projections",
        fmt::format("{}; GEMM library {}", value_text(machine["projections"]), value_text(machine["gemm_library"])));
  for (const auto& [name, archs] : machine["backends"].items()) {
    std::string text;
    for (const Json& a : archs) text += (text.empty() ? "" : ", ") + value_text(a);
    t.row("backend " + name, text);
  }
  std::printf("%s\nimplementations, best first (in brackets: not on this machine; ref: the oracle, only when forced)\n",
              t.text().c_str());
  Table ops;
  for (const auto& [op, list] : machine["implementations"].items()) {
    std::string text;
    for (const Json& i : list) {
      const std::string name = value_text(i["name"]);
      text += (text.empty() ? "" : ", ") + (i["runs_here"].get<bool>() ? name : "(" + name + ")");
    }
    ops.row("  " + op, text);
  }
  std::printf("%s", ops.text().c_str());
  Table workspaces;
  for (const auto& [op, formats] : machine["workspaces"].items()) {
    for (const auto& [format, list] : formats.items()) {
      std::string text;
      for (const Json& i : list)
        text += fmt::format("{}{} {:.1f}", text.empty() ? "" : ", ", value_text(i["name"]),
                            static_cast<double>(i["bytes"].get<size_t>()) / (1 << 20));
      workspaces.row("  " + op + " " + format, text);
    }
  }
  std::printf(
      "\nMiB of scratch of a decode step: 256 requests of 2 rows, 128 heads, lists of 2,048, any context up to "
      "1,048,576 "
      "(index_select keeps scores of as many rows as 32 MiB hold; index_logits writes to the caller's tensor)\n%s",
      workspaces.text().c_str());
}

void run_info(const InfoOptions& o) {
  check_impl(o.machine.impl);
  Json out;
  out["machine"] = machine_json(o.machine);
  if (!o.model.empty()) out["model"] = model_json(o.model);
  if (o.json) {
    std::printf("%s\n", out.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
    return;
  }
  print_machine(out["machine"]);
  if (o.model.empty()) return;
  Table t;
  for (const auto& [name, value] : out["model"].items()) {
    if (!value.is_object()) {
      t.row(name, value_text(value));
      continue;
    }
    for (const auto& [inner, v] : value.items()) t.row(fmt::format("{} ({})", name, inner), value_text(v));
  }
  std::printf("\n%s", t.text().c_str());
}

}  // namespace
}  // namespace gannet::cli

void add_info_command(CLI::App& app) {
  using namespace gannet::cli;
  auto options = std::make_shared<InfoOptions>();
  CLI::App& c = *app.add_subcommand("info", "Show this machine, its implementations, and a checkpoint");
  c.add_option("--model", options->model, "Directory of a checkpoint")->envname("GANNET_MODEL");
  c.add_flag("--json", options->json, "Print JSON");
  add_machine_options(c, options->machine);
  c.callback([options] { run_info(*options); });
}

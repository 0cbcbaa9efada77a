#include "json_mutator.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace gannet::fuzz {
namespace {

using Json = nlohmann::json;

// Keys that a seed may lack.
constexpr const char* kKeys[] = {"rope_parameters",
                                 "rope_scaling",
                                 "rope_type",
                                 "type",
                                 "factor",
                                 "attention_factor",
                                 "mscale",
                                 "mscale_all_dim",
                                 "original_max_position_embeddings",
                                 "beta_fast",
                                 "beta_slow",
                                 "index_topk_freq",
                                 "index_skip_topk_offset",
                                 "index_topk_pattern",
                                 "indexer_types",
                                 "indexer_rope_interleave",
                                 "mlp_layer_types",
                                 "layer_types",
                                 "moe_layer_freq",
                                 "quantization_config",
                                 "eos_token_id",
                                 "temperature",
                                 "top_p",
                                 "ignore_merges",
                                 "Regex",
                                 "String",
                                 "added_tokens",
                                 "normalized",
                                 "special",
                                 "post_processor",
                                 "TemplateProcessing",
                                 "Sequence",
                                 "SpecialToken",
                                 "single",
                                 "__metadata__",
                                 "dtype",
                                 "shape",
                                 "data_offsets"};

void collect(Json& value, std::vector<Json*>* nodes) {
  nodes->push_back(&value);
  if (value.is_structured())
    for (Json& child : value) collect(child, nodes);
}

Json interesting(std::minstd_rand& random) {
  switch (random() % 16) {
    case 0: return nullptr;
    case 1: return true;
    case 2: return 0;
    case 3: return -1;
    case 4: return 1;
    case 5: return std::numeric_limits<int32_t>::max();
    case 6: return std::numeric_limits<int64_t>::max();
    case 7: return std::numeric_limits<int64_t>::min();
    case 8: return std::numeric_limits<uint64_t>::max();
    case 9: return 1e308;
    case 10: return 0.5;
    case 11: return "";
    case 12: return Json::array();
    case 13: return Json::object();
    case 14: return int64_t{1} << (random() % 63);
    default: return static_cast<int64_t>(random() % 4096);
  }
}

std::string mutate_string(const std::string& text) {
  constexpr size_t kRoom = 16;
  std::string bytes = text;
  bytes.resize(text.size() + kRoom);
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), text.size(), bytes.size()));
  return bytes;
}

void mutate_node(Json& node, const std::vector<Json*>& nodes, std::minstd_rand& random) {
  const size_t size = node.is_structured() ? node.size() : 0;
  switch (random() % 8) {
    case 0: node = interesting(random); return;
    case 1: {
      const Json other = *nodes[random() % nodes.size()];  // a copy first: it may hold the node, or be held by it
      node = other;
      return;
    }
    case 2:
      if (size > 0) {
        auto child = node.begin();
        std::advance(child, static_cast<long>(random() % size));
        node.erase(child);
        return;
      }
      break;
    case 3:
      if (node.is_array() && size > 0) {
        const Json copy = node[random() % size];
        node.insert(node.begin() + static_cast<long>(random() % (size + 1)), copy);
        return;
      }
      break;
    case 4:
      if (node.is_object()) {
        const Json value = random() % 2 != 0 ? *nodes[random() % nodes.size()] : interesting(random);
        node[kKeys[random() % std::size(kKeys)]] = value;
        return;
      }
      break;
    case 5:
      if (node.is_object() && size > 0) {
        auto child = node.begin();
        std::advance(child, static_cast<long>(random() % size));
        const std::string key = mutate_string(child.key());
        const Json value = child.value();
        node[key] = value;
        return;
      }
      break;
    default: break;
  }
  if (node.is_string()) node = mutate_string(node.get<std::string>());
  else if (node.is_number_unsigned()) node = node.get<uint64_t>() + random() % 5 - 2;  // wraps at the ends
  else if (node.is_number_float()) node = node.get<double>() * (random() % 2 != 0 ? -1.0 : 0.01);
  else if (node.is_boolean()) node = !node.get<bool>();
  else node = interesting(random);
}

}  // namespace

std::string mutate_json(std::string_view text, size_t max_size, unsigned seed) {
  Json root = Json::parse(text.begin(), text.end(), nullptr, false);
  if (root.is_discarded()) return {};
  std::minstd_rand random(seed);
  for (unsigned i = 0, n = 1 + random() % 3; i < n; ++i) {
    std::vector<Json*> nodes;
    collect(root, &nodes);
    mutate_node(*nodes[random() % nodes.size()], nodes, random);
  }
  std::string result = root.dump(-1, ' ', random() % 2 != 0, Json::error_handler_t::replace);
  if (result.size() > max_size) result.clear();
  return result;
}

}  // namespace gannet::fuzz

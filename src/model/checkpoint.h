// A checkpoint directory as published: config.json, generation_config.json (optional) and the weights, either
// model.safetensors or the shards that model.safetensors.index.json lists.
//
//   auto checkpoint = gannet::Checkpoint::open("models/tiny-dsv32");
//   const auto& c = checkpoint.config();
//   const TensorRef& norm = checkpoint.require("model.norm.weight", {DType::kF32, DType::kBf16}, {c.hidden_size});
//   ...
//   for (const std::string& name : checkpoint.unused()) ...   // unknown tensors: to be reported, never ignored
//
// Errors: Error(kCorruptFile) names file, tensor and value; a directory or file that is missing too.
// Thread safety: find() and require() note what was used and are called by one thread at a time; the tensors they
// return may be read by all.
#pragma once

#include <memory>

#include "model/config.h"
#include "model/safetensors.h"

namespace gannet {
inline namespace v0 {

class Checkpoint {
 public:
  static Checkpoint open(const std::string& directory);
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& directory() const noexcept;
  const ModelConfig& config() const noexcept;
  /// nullptr where no shard has it. What was found counts as used. References live as long as the checkpoint.
  const TensorRef* find(std::string_view name);
  /// Throws Error(kCorruptFile) unless the tensor is there with one of `dtypes` and this shape.
  const TensorRef& require(std::string_view name, std::initializer_list<DType> dtypes,
                           std::initializer_list<int64_t> shape);
  /// All names, sorted.
  std::vector<std::string> names() const;
  /// Names that neither find() nor require() returned so far, sorted.
  std::vector<std::string> unused() const;
  /// Bytes of all mapped weight files.
  int64_t mapped_bytes() const noexcept;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace gannet

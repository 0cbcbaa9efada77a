// Problems of realistic shapes with random contents, ready to be timed.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "gannet/context.h"
#include "gannet/dtype.h"
#include "gannet/kv_cache.h"

namespace gannet {
inline namespace v0 {
namespace bench {

/// What to vary. An empty list takes the operation's own default.
struct Grid {
  std::vector<int> heads = {};
  std::vector<int> keys = {};  ///< tokens in the cache, or of the prompt for ragged_prefill
  std::vector<int> rows = {};  ///< query rows a request
  int batch = 1;               ///< requests, each with its own keys
  int topk = 2048;
  int page_size = 64;
  DType dtype = DType::kBf16;  ///< queries, keys and outputs outside the cache: fp32 or bf16
  LatentFormat latent_format = LatentFormat::kBf16;
  IndexKFormat index_format = IndexKFormat::kE4m3;
  bool warm = false;   ///< run on one and the same cache instead of rotating through more than the last level
  bool peers = false;  ///< with other libraries, where a problem has any
};

/// A list of the grid, or the operation's own.
inline std::vector<int> or_default(const std::vector<int>& given, const std::vector<int>& defaults) {
  return given.empty() ? defaults : given;
}

/// One call that can be repeated; `iteration` picks the memory that it works on.
class Call {
 public:
  virtual ~Call();
  virtual const char* impl() const = 0;
  virtual void run(int64_t iteration) = 0;
  /// What the first iteration computes, in fp32 whatever the outputs' dtype; empty where it is not compared. May
  /// allocate and plan.
  virtual std::vector<float> result() { return {}; }
};

/// Another library's way to the same result, if it was found when this was configured (peers.h). Its name tells its
/// version and what it reads.
struct Peer {
  std::string name;
  std::function<std::unique_ptr<Call>(const Context&)> bind;
};

struct Problem {
  std::string op;
  std::string label;  ///< "H=128 n=4096 bf16"
  std::shared_ptr<nlohmann::json> shape;
  double flops = 0.0;              ///< of one call: what the result needs, whatever an implementation does
  double bytes = 0.0;              ///< of one call: inputs read once, outputs written once
  bool fp32 = false;               ///< operands are fp32: the compute roof is the fp32 one
  std::vector<std::string> impls;  ///< names of the implementations that run here, in order of preference, "ref" last
  /// Plans for an implementation ("": the first that takes it). Throws gannet::Error where it does not.
  std::function<std::unique_ptr<Call>(const Context&, const std::string& impl)> bind;
  std::vector<Peer> peers;
};

/// Names of the operations that can be measured.
const std::vector<std::string>& problem_ops();

/// Calls make() for one point of the grid at a time, so that only one problem's memory exists at once.
using Maker = std::function<Problem()>;
std::vector<Maker> make_problems(const std::string& op, const Grid& grid);

}  // namespace bench
}  // namespace v0
}  // namespace gannet

// A gate per layer, for rows that somebody else brings in: from a host tier, from another machine.
//
//   gannet::LayerGate gate(num_layers);
//   backend->set_layer_hooks({.wait = [&](int32_t layer) { gate.wait(layer); }});
//   gate.close_all();                                   // before the copies begin, and before the step
//   loader thread:  import the pages of layer l; gate.open(l);
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

/// Thread safety: every member may be called from any thread.
class GANNET_API LayerGate {
 public:
  /// All open.
  explicit LayerGate(int32_t num_layers);
  ~LayerGate();
  LayerGate(const LayerGate&) = delete;
  LayerGate& operator=(const LayerGate&) = delete;

  void close(int32_t layer);
  void close_all();
  /// What was written before this is seen by whoever returns from wait() after it.
  void open(int32_t layer);
  /// The rows will not come: every wait() for the layer throws, until close() or open().
  void fail(int32_t layer, std::string why);
  /// Returns once the layer is open; throws Error(kDevice), with the reason, where it has failed.
  void wait(int32_t layer);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace gannet

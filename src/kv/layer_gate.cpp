#include "gannet/layer_gate.h"

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "core/format.h"

namespace gannet {
inline namespace v0 {

// One mutex for all: a wait is one uncontended lock (some 20 ns) a call of a layer.
struct LayerGate::State {
  enum class Door : uint8_t { kOpen, kClosed, kFailed };

  explicit State(int32_t num_layers)
      : doors(static_cast<size_t>(num_layers), Door::kOpen), reasons(static_cast<size_t>(num_layers)) {}

  size_t checked(const char* function, int32_t layer) const {
    if (layer < 0 || static_cast<size_t>(layer) >= doors.size())
      fail_argument(function, "layer is {}; accepted: 0 to {}", layer, static_cast<int64_t>(doors.size()) - 1);
    return static_cast<size_t>(layer);
  }

  void set(const char* function, int32_t layer, Door door, std::string why) {
    const size_t l = checked(function, layer);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      doors[l] = door;
      reasons[l] = std::move(why);
    }
    changed.notify_all();
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Door> doors;
  std::vector<std::string> reasons;
};

LayerGate::LayerGate(int32_t num_layers) {
  if (num_layers < 0) fail_argument("LayerGate", "num_layers is {}; accepted: 0 and more", num_layers);
  state_ = std::make_unique<State>(num_layers);
}

LayerGate::~LayerGate() = default;

void LayerGate::close(int32_t layer) { state_->set("LayerGate::close", layer, State::Door::kClosed, {}); }

void LayerGate::close_all() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->doors.assign(state_->doors.size(), State::Door::kClosed);
}

void LayerGate::open(int32_t layer) { state_->set("LayerGate::open", layer, State::Door::kOpen, {}); }

void LayerGate::fail(int32_t layer, std::string why) {
  state_->set("LayerGate::fail", layer, State::Door::kFailed, std::move(why));
}

void LayerGate::wait(int32_t layer) {
  constexpr const char* kName = "LayerGate::wait";
  State& s = *state_;
  const size_t l = s.checked(kName, layer);
  std::unique_lock<std::mutex> lock(s.mutex);
  s.changed.wait(lock, [&] { return s.doors[l] != State::Door::kClosed; });
  if (s.doors[l] == State::Door::kFailed)
    gannet::fail(ErrorCode::kDevice, kName, "the rows of layer {} did not come: {}", layer, s.reasons[l]);
}

}  // namespace v0
}  // namespace gannet

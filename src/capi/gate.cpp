// The gate of layers.
#include "gannet/layer_gate.h"

#include "capi/capi.h"

using namespace gannet;
using namespace gannet::capi;

struct gannet_gate {
  LayerGate gate;
};

gannet_status gannet_gate_create(int32_t num_layers, gannet_gate** out) {
  constexpr const char* kName = "gannet_gate_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    *out = new gannet_gate{LayerGate(num_layers)};
  });
}

void gannet_gate_free(gannet_gate** gate) { free_handle(gate); }

gannet_status gannet_gate_close(gannet_gate* gate, int32_t layer) {
  constexpr const char* kName = "gannet_gate_close";
  return guard(kName, [&] {
    if (layer == -1) given(kName, "gate", gate)->gate.close_all();
    else given(kName, "gate", gate)->gate.close(layer);
  });
}

gannet_status gannet_gate_open(gannet_gate* gate, int32_t layer) {
  constexpr const char* kName = "gannet_gate_open";
  return guard(kName, [&] { given(kName, "gate", gate)->gate.open(layer); });
}

gannet_status gannet_gate_fail(gannet_gate* gate, int32_t layer, const char* why) {
  constexpr const char* kName = "gannet_gate_fail";
  return guard(kName, [&] { given(kName, "gate", gate)->gate.fail(layer, given(kName, "why", why)); });
}

gannet_status gannet_gate_wait(gannet_gate* gate, int32_t layer) {
  constexpr const char* kName = "gannet_gate_wait";
  return guard(kName, [&] { given(kName, "gate", gate)->gate.wait(layer); });
}

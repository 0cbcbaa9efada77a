// Gates of layers.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "gannet/error.h"
#include "gannet/layer_gate.h"

namespace {

using namespace gannet;

template <class F>
std::string error_of(F&& f, ErrorCode code) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return {};
}

TEST(LayerGate, HoldsUntilTheLayerIsOpen) {
  LayerGate gate(3);
  gate.wait(2);  // open at first
  gate.close_all();
  gate.open(0);
  gate.wait(0);
  int rows = 0;  // not atomic: the gate orders it
  std::atomic<bool> passed = false;
  std::thread reader([&] {
    gate.wait(1);
    passed = true;
    EXPECT_EQ(rows, 7);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(passed);
  gate.open(2);  // another one
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(passed);
  rows = 7;
  gate.open(1);
  reader.join();
  EXPECT_TRUE(passed);
  gate.close(1);
  gate.open(1);
  gate.wait(1);
}

TEST(LayerGate, TellsWhoWaitsThatTheRowsWillNotCome) {
  LayerGate gate(2);
  gate.close(1);
  std::string text;
  std::thread reader([&] { text = error_of([&] { gate.wait(1); }, ErrorCode::kDevice); });
  gate.fail(1, "the other node is gone");
  reader.join();
  EXPECT_EQ(text, "[LayerGate::wait] the rows of layer 1 did not come: the other node is gone");
  EXPECT_NE(error_of([&] { gate.wait(1); }, ErrorCode::kDevice), "");
  gate.wait(0);
  gate.open(1);
  gate.wait(1);
}

TEST(LayerGate, RefusesOtherLayers) {
  LayerGate gate(2);
  const auto text = [](auto&& f) { return error_of(f, ErrorCode::kInvalidArgument); };
  EXPECT_EQ(text([&] { gate.wait(2); }), "[LayerGate::wait] layer is 2; accepted: 0 to 1");
  EXPECT_EQ(text([&] { gate.open(-1); }), "[LayerGate::open] layer is -1; accepted: 0 to 1");
  EXPECT_EQ(text([&] { gate.close(2); }), "[LayerGate::close] layer is 2; accepted: 0 to 1");
  EXPECT_EQ(text([&] { gate.fail(2, ""); }), "[LayerGate::fail] layer is 2; accepted: 0 to 1");
  EXPECT_EQ(text([] { LayerGate none(-1); }), "[LayerGate] num_layers is -1; accepted: 0 and more");
}

}  // namespace

// The backends on random sequences of steps, against the fp64 oracle (tests/harness/backend_cases.h).
#include <iostream>

#include "core/implementation.h"
#include "harness/backend_cases.h"
#include "unit/counting_new.h"
#include "unit/property.h"

namespace gannet_test {
namespace {

void print(const BackendReport& r) {
  std::cout << r.steps << " steps: " << r.decodes << " decode, " << r.extends << " extend, " << r.mixed << " mixed, "
            << r.idle << " idle, " << r.refreshes << " refreshed; " << r.advances << " advanced; " << r.rows
            << " rows\n";
}

TEST(PropertyBackends, Steps) {
  BackendReport all;
  expect_property("backends", 4000, [&](Source& in) { all.add(check_backend(in, {})); });
  print(all);
}

/// Bytes for a whole sequence.
std::vector<uint8_t> bytes_of(uint64_t seed, size_t n) {
  gannet::verify::Rng rng(seed);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng.next() >> 56);
  return bytes;
}

// Captured batches that grow, shrink and are padded, with eager steps and drafts between: refresh and run allocate
// nothing, and every result is the eager one bit for bit.
TEST(PropertyBackends, PersistentPlansOverAThousandSteps) {
  for (const gannet::ImplementationSet* set : gannet::implementation_sets()) {
    if (!set->compiled || set->device != gannet::DeviceKind::kCpu || !set->runs_here()) continue;
    BackendReport all;
    // Four configurations of 250 steps each; the oracle is slow, and allocates in its loops by design.
    const bool oracle = set->only_when_forced;
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const std::vector<uint8_t> bytes = bytes_of(seed, 1 << 16);
      Source in(bytes);
      try {
        all.add(check_backend(in, {.exact_steps = (oracle ? 25 : 250) / (kFewer > 1 ? 5 : 1),
                                   .persistent = true,
                                   .impl = set->name,
                                   .num_news = &num_news}));
      } catch (const Failure& e) {
        FAIL() << "seed " << seed << ": " << e.what();
      }
      EXPECT_FALSE(in.empty()) << "zeros drawn";
    }
    std::cout << set->name << ": ";
    print(all);
    EXPECT_GT(all.refreshes, all.steps / 2);
  }
}

}  // namespace
}  // namespace gannet_test

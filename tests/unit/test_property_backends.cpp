// The backends on random sequences of steps, against the fp64 oracle (tests/harness/backend_cases.h).
#include <iostream>

#include "harness/backend_cases.h"
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

}  // namespace
}  // namespace gannet_test

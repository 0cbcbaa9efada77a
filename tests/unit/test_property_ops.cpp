// Single operations on random problems, every CPU implementation against the fp64 oracle (tests/harness).
#include <iostream>
#include <map>

#include "core/op_list.h"
#include "harness/op_problems.h"
#include "unit/property.h"

namespace gannet_test {
namespace {

using namespace gannet;

template <class Params>
void expect_operation(int cases) {
  int64_t ran = 0;
  expect_property(Params::kName, cases, [&](Source& in) { ran += check_operation<Params>(in); });
  std::string names;
  for (const ImplInfo& info : list_implementations<Params>())
    if (info.runs_here) names += " " + info.name;
  std::cout << Params::kName << ": " << ran << " runs of" << names << "\n";
}

// 12,000 cases; the backends have 4,000 sequences of steps more (test_property_backends.cpp).
#define GANNET_PROPERTY(Params, member) \
  TEST(PropertyOps, Params) { expect_operation<gannet::Params>(1000); }
GANNET_FOR_EACH_OP(GANNET_PROPERTY)
#undef GANNET_PROPERTY

}  // namespace
}  // namespace gannet_test

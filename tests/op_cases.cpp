#include "op_cases.h"

#include <cstdio>
#include <set>

namespace gannet_tests {

void expect_grid(const std::string& op) {
  std::set<std::string> ran;
  gannet::verify::Options options;
  options.op = op;
  options.on_line = [&](const gannet::verify::Line& line) {
    std::puts(gannet::verify::to_string(line).c_str());
    EXPECT_TRUE(line.pass) << gannet::verify::to_string(line);
    if (!line.refused) ran.insert(line.impl);
  };
  const auto lines = gannet::verify::verify_operations(options);
  EXPECT_FALSE(lines.empty());
  for (const gannet::ImplInfo& info : gannet::list_all_implementations()) {
    if (info.op != op || info.name == "ref") continue;
    if (info.runs_here) EXPECT_EQ(ran.count(info.name), 1u) << info.name << " runs here and took no case of " << op;
    else std::printf("%s %s does not run here\n", op.c_str(), info.name.c_str());
  }
}

}  // namespace gannet_tests

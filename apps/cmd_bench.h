// `gannet bench`.
#pragma once

#include <CLI/CLI.hpp>

/// Adds the subcommand. Its callback runs it; a gannet::Error or an std::exception leaves through CLI's parse().
void add_bench_command(CLI::App& app);

// `gannet info`.
#pragma once

#include <CLI/CLI.hpp>

/// Adds the subcommand. Its callback runs it; a gannet::Error or a gannet::cli::Exit leaves through CLI's parse().
void add_info_command(CLI::App& app);

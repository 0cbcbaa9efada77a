// `gannet verify`.
#pragma once

#include <CLI/CLI.hpp>

/// Adds the subcommand. Its callback runs it; a gannet::Error or a gannet::cli::Exit leaves through CLI's parse().
void add_verify_command(CLI::App& app);

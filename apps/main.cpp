// The gannet command.
#include <cstdio>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "cli.h"
#include "cmd_bench.h"
#include "cmd_generate.h"
#include "cmd_info.h"
#include "cmd_verify.h"

namespace {

/// What was printed must have arrived: a full disk or a closed stdout is no success.
int finish_output(int code) {
  std::cout.flush();
  if (std::cout.good() && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "gannet: standard output could not be written\n");
  return gannet::cli::kExitFailed;
}

/// Errors are one line, whatever a text from a file or a library holds.
void print_error(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  while (!text.empty() && text.back() == ' ') text.pop_back();
  std::fprintf(stderr, "gannet: %s\n", text.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  using namespace gannet;
  CLI::App app("Attention of DeepSeek-style models: run, inspect, verify and measure.", "gannet");
  app.set_version_flag("--version", std::string("gannet ") + version());
  add_bench_command(app);
  add_generate_command(app);
  add_info_command(app);
  add_verify_command(app);
  try {
    app.parse(argc, argv);
    // Not CLI11's own check, which hides an unknown name behind "a subcommand is required".
    if (app.get_subcommands().empty()) throw CLI::RequiredError("A subcommand");
    return finish_output(0);
  } catch (const cli::Exit& e) {
    return e.code == 0 ? finish_output(0) : e.code;
  } catch (const CLI::Success& e) {  // --help, --version
    return finish_output(app.exit(e));
  } catch (const CLI::ParseError& e) {
    print_error(std::string(e.what()) + "; see gannet --help");
    return cli::kExitBadInput;
  } catch (const Error& e) {
    print_error(e.what());
    return e.code() == ErrorCode::kOutOfMemory || e.code() == ErrorCode::kDevice ? cli::kExitFailed
                                                                                 : cli::kExitBadInput;
  } catch (const std::bad_alloc&) {
    print_error("out of memory");
    return cli::kExitFailed;
  } catch (const std::exception& e) {
    print_error(e.what());
    return cli::kExitFailed;
  }
}

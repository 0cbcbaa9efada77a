// Runs every file of the given directories through a fuzz target, in any build; or, given --random N M, N inputs of
// up to M random bytes from a fixed seed.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

int run_random(long count, size_t most_bytes) {
  std::mt19937 random(1);
  std::vector<uint8_t> bytes;
  for (long i = 0; i < count; ++i) {
    bytes.resize(random() % (most_bytes + 1));
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld random inputs of up to %zu bytes, seed 1\n", count, most_bytes);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--random")
    return run_random(std::atol(argv[2]), static_cast<size_t>(std::atol(argv[3])));
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i)
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::printf("%s: %zu bytes\n", path.filename().c_str(), bytes.size());
    std::fflush(stdout);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  if (files.empty()) {
    std::fprintf(stderr, "no inputs: the corpus is missing\n");
    return 1;
  }
  return 0;
}

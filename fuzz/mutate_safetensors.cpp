// Mutations for safetensors files: the header stays JSON and its length true, mostly.
#include <algorithm>
#include <cstring>

#include "json_mutator.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  constexpr size_t kLengthBytes = 8;
  constexpr unsigned kBytesOneIn = 8;
  uint64_t header = 0;
  if (size >= kLengthBytes) std::memcpy(&header, data, kLengthBytes);
  if (seed % kBytesOneIn == 0 || size < kLengthBytes || header > size - kLengthBytes || max_size < kLengthBytes)
    return LLVMFuzzerMutate(data, size, max_size);
  const std::string_view text(reinterpret_cast<const char*>(data) + kLengthBytes, header);
  const std::string rest(reinterpret_cast<const char*>(data) + kLengthBytes + header, size - kLengthBytes - header);
  const std::string mutated = gannet::fuzz::mutate_json(text, max_size - kLengthBytes, seed);
  if (mutated.empty()) return LLVMFuzzerMutate(data, size, max_size);
  const uint64_t length = mutated.size();
  std::memcpy(data, &length, kLengthBytes);
  std::memcpy(data + kLengthBytes, mutated.data(), mutated.size());
  const size_t kept = std::min(rest.size(), max_size - kLengthBytes - mutated.size());
  std::memcpy(data + kLengthBytes + mutated.size(), rest.data(), kept);
  return kLengthBytes + mutated.size() + kept;
}

// Mutations for inputs that are one JSON text.
#include <algorithm>
#include <cstring>

#include "json_mutator.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  constexpr unsigned kBytesOneIn = 8;
  if (seed % kBytesOneIn != 0) {
    const std::string text = gannet::fuzz::mutate_json({reinterpret_cast<const char*>(data), size}, max_size, seed);
    if (!text.empty()) {
      std::memcpy(data, text.data(), text.size());
      return text.size();
    }
  }
  return LLVMFuzzerMutate(data, size, max_size);
}

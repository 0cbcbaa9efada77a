// Any bytes are a safetensors file or an Error; of a file every byte of every tensor can be read, once.
#include <vector>

#include "fuzz.h"
#include "gannet/error.h"
#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  try {
    const auto file = gannet::SafetensorsFile::parse({bytes, size}, "input.safetensors");
    int64_t total = 0;
    volatile uint8_t sink = 0;
    for (const gannet::TensorRef& t : file.tensors()) {
      GANNET_FUZZ_REQUIRE(file.find(t.name) == &t);
      GANNET_FUZZ_REQUIRE(t.num_bytes >= 0 && static_cast<size_t>(t.num_bytes) <= size);
      total += t.num_bytes;
      for (int64_t i = 0; i < t.num_bytes; ++i) sink = static_cast<uint8_t>(t.data[i]);
      if (!t.readable) continue;
      GANNET_FUZZ_REQUIRE(t.num_elements() * static_cast<int64_t>(gannet::size_of(t.dtype)) == t.num_bytes);
      GANNET_FUZZ_REQUIRE(reinterpret_cast<uintptr_t>(t.data) % gannet::size_of(t.dtype) == 0 || t.num_bytes == 0);
      using gannet::DType;
      if (t.dtype == DType::kF32 || t.dtype == DType::kBf16 || t.dtype == DType::kE4m3) {
        std::vector<float> values(static_cast<size_t>(t.num_elements()));
        t.to_float(values.data());
      }
    }
    (void)sink;
    GANNET_FUZZ_REQUIRE(static_cast<size_t>(total) <= size);
  } catch (const gannet::Error& e) {
    GANNET_FUZZ_REQUIRE(e.code() == gannet::ErrorCode::kCorruptFile);
    GANNET_FUZZ_REQUIRE(std::string_view(e.what()).find('\n') == std::string_view::npos);
  }
  return 0;
}

// Any text is a tokenizer or an Error; a tokenizer gives back the text that it encodes, whole and as a stream.
#include <string>

#include "fuzz.h"
#include "gannet/error.h"
#include "model/tokenizer.h"
#include "model/unicode.h"

namespace {

void round_trip(const gannet::Tokenizer& tokenizer, std::string_view text, bool exact) {
  std::vector<int32_t> ids;
  try {
    ids = tokenizer.encode(text, {.add_bos = false});
  } catch (const gannet::Error& e) {
    // Text that is not UTF-8, a byte without a token, or a pattern that takes too many steps.
    GANNET_FUZZ_REQUIRE(e.code() == gannet::ErrorCode::kInvalidArgument || e.code() == gannet::ErrorCode::kUnsupported);
    return;
  }
  const std::string whole = tokenizer.decode(ids, {.skip_special = false});
  if (exact) GANNET_FUZZ_REQUIRE(whole == text);
  GANNET_FUZZ_REQUIRE(gannet::find_invalid_utf8(whole) == std::string::npos);
  gannet::Tokenizer::Stream stream(tokenizer, {.skip_special = false});
  std::string streamed;
  for (const int32_t id : ids) {
    GANNET_FUZZ_REQUIRE(id >= 0 && id < tokenizer.vocab_size());
    streamed += stream.push(id);
  }
  GANNET_FUZZ_REQUIRE(streamed + stream.finish() == whole);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto tokenizer = gannet::Tokenizer::parse(text, {}, "input");
    // An added token may have the id of another spelling of itself, and decodes as written.
    const bool exact = text.find("\"added_tokens\"") == std::string_view::npos;
    round_trip(tokenizer, "the  abba 123\n\n \xE4\xBD\xA0\xE5\xA5\xBD<s>aaaaaaa", exact);
    round_trip(tokenizer, text, exact);
  } catch (const gannet::Error& e) {
    GANNET_FUZZ_REQUIRE(e.code() == gannet::ErrorCode::kCorruptFile || e.code() == gannet::ErrorCode::kUnsupported);
    GANNET_FUZZ_REQUIRE(std::string_view(e.what()).find('\n') == std::string_view::npos);
  }
  try {  // the same text as tokenizer_config.json
    gannet::Tokenizer::parse(
        R"({"model":{"vocab":{"a":0},"merges":[]},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,)"
        R"("use_regex":false}})",
        text, "input");
  } catch (const gannet::Error&) {
  }
  return 0;
}

// UTF-8, as much of it as the tokenizer needs. Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace gannet {
inline namespace v0 {

/// What stands at a position of a byte string.
struct Utf8Step {
  size_t length;        ///< bytes: of the character, or of the bad sequence that one U+FFFD replaces; at least 1
  char32_t code_point;  ///< meaningful if valid
  bool valid;
  bool incomplete;  ///< not valid, but the text ends here and more bytes could complete a character
};

/// Reads one character at `position` < bytes.size(). A bad sequence is as long as the longest prefix of a character
/// that stands there, or one byte (Unicode 3.9, "maximal subpart"), which is how Rust, Python and browsers replace.
Utf8Step utf8_step(std::string_view bytes, size_t position) noexcept;

/// Offset of the first byte that begins no character; npos where all is UTF-8.
size_t find_invalid_utf8(std::string_view text) noexcept;

void append_utf8(std::string* text, char32_t code_point);

}  // namespace v0
}  // namespace gannet

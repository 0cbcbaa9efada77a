#include "model/unicode.h"

#include <cstdint>

namespace gannet {
inline namespace v0 {

Utf8Step utf8_step(std::string_view bytes, size_t position) noexcept {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(position);
  if (lead < 0x80) return {1, lead, true, false};
  size_t length = 0;
  // The second byte has a narrower range after some leads: no overlong forms, no surrogates, nothing above U+10FFFF.
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, 0, false, false};
  }
  char32_t code_point = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if (position + i >= bytes.size()) return {i, 0, false, true};
    const uint8_t b = byte(position + i);
    if (b < low || b > high) return {i, 0, false, false};
    code_point = (code_point << 6) | (b & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {length, code_point, true, false};
}

size_t find_invalid_utf8(std::string_view text) noexcept {
  size_t i = 0;
  while (i < text.size()) {
    const Utf8Step step = utf8_step(text, i);
    if (!step.valid) return i;
    i += step.length;
  }
  return std::string_view::npos;
}

void append_utf8(std::string* text, char32_t c) {
  const auto push = [&](char32_t b) { text->push_back(static_cast<char>(static_cast<uint8_t>(b))); };
  if (c < 0x80) {
    push(c);
  } else if (c < 0x800) {
    push(0xC0 | (c >> 6));
    push(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    push(0xE0 | (c >> 12));
    push(0x80 | ((c >> 6) & 0x3F));
    push(0x80 | (c & 0x3F));
  } else {
    push(0xF0 | (c >> 18));
    push(0x80 | ((c >> 12) & 0x3F));
    push(0x80 | ((c >> 6) & 0x3F));
    push(0x80 | (c & 0x3F));
  }
}

}  // namespace v0
}  // namespace gannet

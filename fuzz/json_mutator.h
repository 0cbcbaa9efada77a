// Mutations that keep a JSON text JSON: byte mutations alone hardly ever get past the parser.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gannet::fuzz {

/// A mutation of `text` of at most max_size bytes; empty where it is no JSON or nothing fits.
std::string mutate_json(std::string_view text, size_t max_size, unsigned seed);

}  // namespace gannet::fuzz

// Text building for error messages and names.
#pragma once

#include <fmt/core.h>

#include "gannet/error.h"

namespace gannet {
inline namespace v0 {

/// Throws Error(code) with the text "[function] ...".
template <class... Args>
[[noreturn]] void fail(ErrorCode code, const char* function, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(code, fmt::format("[{}] {}", function, fmt::format(text, std::forward<Args>(args)...)));
}

template <class... Args>
[[noreturn]] void fail_argument(const char* function, fmt::format_string<Args...> text, Args&&... args) {
  fail(ErrorCode::kInvalidArgument, function, text, std::forward<Args>(args)...);
}

}  // namespace v0
}  // namespace gannet

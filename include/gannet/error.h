// Errors. The library throws one exception type and never prints and never aborts.
//
// A text names the function in brackets, the value given, what is accepted and, where it helps, what to do:
//   [mla config] page_size is 48; accepted: 32 or 64
//
// Thread safety: an Error is an ordinary value.
#pragma once

#include <stdexcept>
#include <string>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

enum class ErrorCode : int {
  kInvalidArgument = 1,  ///< a value, shape, dtype, stride or order of calls that the function does not accept
  kUnsupported = 2,      ///< valid, but no implementation here takes it
  kOutOfMemory = 3,      ///< memory or cache pages
  kDevice = 4,           ///< a device or the operating system reported a failure
  kCorruptFile = 5,      ///< a file is missing, truncated or contradicts itself
};

/// "invalid argument", "unsupported", ...
GANNET_API const char* to_string(ErrorCode code) noexcept;

class GANNET_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace v0
}  // namespace gannet

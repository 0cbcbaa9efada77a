// Statuses and their texts.
#include <new>

#include "capi/capi.h"

namespace gannet {
inline namespace v0 {
namespace capi {
namespace {

thread_local std::string t_last_error;  // NOLINT: the text belongs to the thread that made the call

void keep_text(const char* function, const char* text) noexcept {
  try {
    t_last_error = function != nullptr ? fmt::format("[{}] {}", function, text) : text;
  } catch (...) {
    t_last_error.clear();  // no memory for words; the status has to do
  }
}

gannet_status status_of(ErrorCode code) noexcept { return static_cast<gannet_status>(code); }

}  // namespace

gannet_status keep_error(const char* function) noexcept {
  try {
    throw;
  } catch (const Error& e) {
    keep_text(nullptr, e.what());  // names its function already
    return status_of(e.code());
  } catch (const std::bad_alloc&) {
    keep_text(function, "there is no memory");
    return GANNET_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    keep_text(function, e.what());
  } catch (...) {
    keep_text(function, "an exception of an unknown type");
  }
  return GANNET_INTERNAL;
}

void call_back(const char* function, const std::string& what, const std::function<gannet_status()>& callback) {
  t_last_error.clear();
  const gannet_status status = callback();
  if (status == GANNET_OK) return;
  const bool named = status >= GANNET_INVALID_ARGUMENT && status <= GANNET_CORRUPT_FILE;
  const std::string heard = t_last_error.empty() ? std::string() : ": " + t_last_error;
  fail(named ? static_cast<ErrorCode>(status) : ErrorCode::kDevice, function, "{} returned {} ({}){}", what, status,
       gannet_status_name(status), heard);
}

}  // namespace capi
}  // namespace v0
}  // namespace gannet

using namespace gannet;
using namespace gannet::capi;

const char* gannet_status_name(gannet_status status) {
  if (status == GANNET_OK) return "ok";
  if (status == GANNET_INTERNAL) return "internal error";
  return to_string(static_cast<ErrorCode>(status));
}

const char* gannet_last_error(void) { return t_last_error.c_str(); }

gannet_status gannet_check_abi_of(int32_t abi) {
  return guard("gannet_check_abi", [&] {
    if (abi != GANNET_C_ABI)
      fail(ErrorCode::kUnsupported, "gannet_check_abi", "the program was compiled for ABI {}; accepted: {} (gannet {})",
           abi, GANNET_C_ABI, gannet_version());
  });
}

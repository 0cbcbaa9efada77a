// What an operation needs beside its arguments. There is no process-global state: two contexts never meet.
#pragma once

#include <functional>
#include <string_view>

#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {

enum class LogLevel : int { kTrace, kDebug, kInfo, kWarning };

/// Receives log lines; silent when empty. Called on the thread that called the library.
using LogSink = std::function<void(LogLevel, std::string_view)>;

/// Must outlive everything made from it. Shared by several threads only if the executor allows it.
struct Context {
  Executor* executor = nullptr;  ///< nullptr: CPU work runs on the calling thread
  LogSink log = {};
};

}  // namespace v0
}  // namespace gannet

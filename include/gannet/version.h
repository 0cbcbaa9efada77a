// The version of Gannet. This file is the only place that states it: CMake reads the three numbers from here.
#pragma once

#include "gannet/export.h"

#define GANNET_VERSION_MAJOR 0
#define GANNET_VERSION_MINOR 1
#define GANNET_VERSION_PATCH 0

#ifdef __cplusplus
namespace gannet {
inline namespace v0 {

/// The version of the library that is linked, "major.minor.patch". Safe from any thread.
GANNET_API const char* version() noexcept;

}  // namespace v0
}  // namespace gannet

extern "C" {
#endif

/// The same for callers in C.
GANNET_API const char* gannet_version(void);

#ifdef __cplusplus
}
#endif

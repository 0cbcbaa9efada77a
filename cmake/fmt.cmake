# fmt, header-only. A cross build has no package of it, but the headers are the same for every machine: they are linked
# into the build directory, since -I/usr/include would bring this machine's C library with them.
if(NOT CMAKE_CROSSCOMPILING)
  find_package(fmt REQUIRED)
  return()
endif()
find_package(fmt QUIET)
if(NOT TARGET fmt::fmt-header-only)
  find_path(GANNET_HOST_FMT fmt/core.h PATHS /usr/include NO_CMAKE_FIND_ROOT_PATH REQUIRED)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/host_headers)
  file(CREATE_LINK ${GANNET_HOST_FMT}/fmt ${PROJECT_BINARY_DIR}/host_headers/fmt SYMBOLIC)
  add_library(fmt::fmt-header-only INTERFACE IMPORTED GLOBAL)
  set_target_properties(fmt::fmt-header-only PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${PROJECT_BINARY_DIR}/host_headers
    INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
endif()

# cmake --install: headers, both libraries, the CMake package and the pkg-config file (component "library"). The command
# is installed by apps/ (component "command").
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(gannet_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gannet)
set(gannet_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(TARGETS gannet_headers gannet_static gannet_shared
  EXPORT gannet-targets
  COMPONENT library
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gannet
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library FILES_MATCHING PATTERN "*.h")
install(EXPORT gannet-targets NAMESPACE gannet:: DESTINATION ${gannet_package_dir} COMPONENT library)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/gannet-config.cmake.in
  ${PROJECT_BINARY_DIR}/gannet-config.cmake INSTALL_DESTINATION ${gannet_package_dir})
# The C++ interface may change with the minor number until 1.0.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gannet-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gannet-config.cmake ${PROJECT_BINARY_DIR}/gannet-config-version.cmake
  DESTINATION ${gannet_package_dir} COMPONENT library)

# The paths in the .pc file are relative to itself, so that a staged or moved tree works.
file(RELATIVE_PATH GANNET_PC_TO_PREFIX /prefix/${gannet_pc_dir} /prefix)
string(REGEX REPLACE "/$" "" GANNET_PC_TO_PREFIX "${GANNET_PC_TO_PREFIX}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/gannet.pc.in ${PROJECT_BINARY_DIR}/gannet.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gannet.pc DESTINATION ${gannet_pc_dir} COMPONENT library)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)

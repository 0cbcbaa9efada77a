# Tests of what is installed and exported; included from tests/CMakeLists.txt. They are about the build that is shipped,
# so sanitizer builds, where half of this means something else, leave them out.
if(NOT GANNET_INSTALL OR GANNET_SANITIZE)
  return()
endif()

if(NOT CMAKE_CROSSCOMPILING)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    find_program(GANNET_TEST_CC NAMES clang REQUIRED)
  else()
    find_program(GANNET_TEST_CC NAMES gcc cc REQUIRED)
  endif()
  foreach(kind static shared default_static default_shared pkgconfig)
    add_test(NAME install.${kind} COMMAND ${CMAKE_COMMAND}
      -DBUILD_DIR=${PROJECT_BINARY_DIR} -DSOURCE_DIR=${PROJECT_SOURCE_DIR}
      -DWORK_DIR=${CMAKE_CURRENT_BINARY_DIR}/install_${kind} -DKIND=${kind} -DVERSION=${PROJECT_VERSION}
      -DCXX=${CMAKE_CXX_COMPILER} -DCC=${GANNET_TEST_CC}
      -P ${CMAKE_CURRENT_LIST_DIR}/run.cmake)
    set_tests_properties(install.${kind} PROPERTIES TIMEOUT 300)
  endforeach()
endif()

add_test(NAME symbols.exports COMMAND ${CMAKE_COMMAND} -DMODE=exports -DNM=${CMAKE_NM}
  -DLIBRARY=$<TARGET_FILE:gannet_shared> -DINCLUDE_DIR=${PROJECT_SOURCE_DIR}/include
  -P ${CMAKE_CURRENT_LIST_DIR}/symbols.cmake)

# Without optimisation every inline function is a weak symbol.
if(GANNET_X86 AND CMAKE_BUILD_TYPE STREQUAL "Release")
  file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/objects.txt
    CONTENT "$<JOIN:$<TARGET_OBJECTS:gannet_objects>,\n>\n")
  add_test(NAME symbols.weak COMMAND ${CMAKE_COMMAND} -DMODE=weak -DNM=${CMAKE_NM}
    -DOBJECTS=${CMAKE_CURRENT_BINARY_DIR}/objects.txt -P ${CMAKE_CURRENT_LIST_DIR}/symbols.cmake)
endif()

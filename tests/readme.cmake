# The C++ example of README.md becomes a program that is compiled and run, so that it cannot drift.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/README.md)
file(READ ${PROJECT_SOURCE_DIR}/README.md readme)
string(FIND "${readme}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "README.md has no block of C++")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 example)
string(FIND "${example}" "\n```" end)
string(SUBSTRING "${example}" 0 ${end} example)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/readme_example.cpp.in "${example}\n")
configure_file(${CMAKE_CURRENT_BINARY_DIR}/readme_example.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/readme_example.cpp COPYONLY)

add_executable(readme_example ${CMAKE_CURRENT_BINARY_DIR}/readme_example.cpp)
target_link_libraries(readme_example PRIVATE gannet::gannet gannet_warnings)  # what a user links, nothing internal
add_test(NAME readme_example COMMAND readme_example)
set_tests_properties(readme_example PROPERTIES PASS_REGULAR_EXPRESSION "^[a-z0-9_]+: 0\\.5\n$" TIMEOUT 60)

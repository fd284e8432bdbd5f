# Layers of the library. Each folder under neap/ declares itself with one add_layer() call, and that call is the one
# source of truth for what the folder may include: tools/check_layers.py reads it and compares every #include.
#
#   add_layer(NAME                        folder under neap/, target neap_NAME, alias neap::NAME
#     DEPS base trace …                   the layers it may include
#     SOURCES a.cpp …                     files that need torch
#     TORCH_FREE_SOURCES b.cpp …          files on std alone; they form neap_NAME_core, which needs no torch and runs under TSan
#     EXTERNAL yaml-cpp …                 other libraries
#     TESTS a_test.cpp …                  → executable neap_NAME_tests, one ctest entry
#     TORCH_FREE_TESTS b_test.cpp …       → executable neap_NAME_core_tests, one ctest entry
#     TEST_LINK neap::testing …           what only the tests link
#     CORE_ONLY)                          neap_NAME itself is declared elsewhere (a shared library, say)

function(neap_target_defaults target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:include>)
  target_compile_options(${target} PRIVATE ${NEAP_WARNINGS})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF)
endfunction()

# Tests ask little of a processor and much of the compiler: a third of their build time was optimisation.
function(neap_test_defaults target)
  neap_target_defaults(${target})
  target_compile_options(${target} PRIVATE ${NEAP_TEST_FLAGS})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)  # so that programs and libraries agree
endfunction()

# Most of what a file costs is the headers of torch, GoogleTest and the JSON library (docs/decisions/0002-compile-time.md).
function(neap_compile_together target)
  if(NEAP_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # It takes a source for a header then, and warns of what would be wrong in one.
      target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
    endif()
  endif()
endfunction()

function(neap_add_test target)
  cmake_parse_arguments(T "TORCH_FREE" "" "SOURCES;LINK" ${ARGN})
  if(NOT NEAP_BUILD_TESTS)
    return()
  endif()
  add_executable(${target} ${T_SOURCES})
  neap_test_defaults(${target})
  target_link_libraries(${target} PRIVATE ${T_LINK} GTest::gmock GTest::gtest GTest::gtest_main Threads::Threads)
  neap_compile_together(${target})
  if(T_TORCH_FREE)
    neap_precompile(${target} core_test)
  else()
    neap_precompile(${target} test)
  endif()
  add_test(NAME ${target} COMMAND ${target})
  # One thread per operator: ctest already keeps every core busy, and sums do not depend on the number of cores.
  set_tests_properties(${target} PROPERTIES TIMEOUT 300 ENVIRONMENT "OMP_NUM_THREADS=1;${NEAP_TEST_ENVIRONMENT}")
  if(T_TORCH_FREE)
    set_tests_properties(${target} PROPERTIES LABELS torch-free)
  endif()
endfunction()

function(add_layer name)
  cmake_parse_arguments(L "CORE_ONLY" "" "DEPS;SOURCES;TORCH_FREE_SOURCES;EXTERNAL;TESTS;TORCH_FREE_TESTS;TEST_LINK" ${ARGN})
  if(L_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "add_layer(${name}): unknown arguments: ${L_UNPARSED_ARGUMENTS}")
  endif()
  set(core_deps "")
  set(full_deps "")
  foreach(dep ${L_DEPS})
    if(TARGET neap_${dep}_core)
      list(APPEND core_deps neap_${dep}_core)
    endif()
    list(APPEND full_deps neap_${dep})
  endforeach()

  if(L_TORCH_FREE_SOURCES)
    add_library(neap_${name}_core STATIC ${L_TORCH_FREE_SOURCES})
    add_library(neap::${name}_core ALIAS neap_${name}_core)
    set_target_properties(neap_${name}_core PROPERTIES EXPORT_NAME ${name}_core)
    neap_target_defaults(neap_${name}_core)
    neap_compile_together(neap_${name}_core)
    target_link_libraries(neap_${name}_core PUBLIC ${core_deps} Threads::Threads)
    set_property(GLOBAL APPEND PROPERTY NEAP_INSTALL_TARGETS neap_${name}_core)
  endif()
  if(L_TORCH_FREE_TESTS)
    neap_add_test(neap_${name}_core_tests TORCH_FREE SOURCES ${L_TORCH_FREE_TESTS} LINK neap_${name}_core)
  endif()

  if(NEAP_TORCH_FREE_ONLY OR L_CORE_ONLY)
    return()
  endif()
  if(L_SOURCES)
    add_library(neap_${name} STATIC ${L_SOURCES})
    neap_target_defaults(neap_${name})
    neap_compile_together(neap_${name})
    neap_precompile(neap_${name} library)
    target_link_libraries(neap_${name} PUBLIC ${full_deps} torch::torch ${L_EXTERNAL})
    if(TARGET neap_${name}_core)
      target_link_libraries(neap_${name} PUBLIC neap_${name}_core)
    endif()
  else()
    add_library(neap_${name} INTERFACE)
    target_link_libraries(neap_${name} INTERFACE ${full_deps})
    if(TARGET neap_${name}_core)
      target_link_libraries(neap_${name} INTERFACE neap_${name}_core)
    endif()
  endif()
  add_library(neap::${name} ALIAS neap_${name})
  set_target_properties(neap_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY NEAP_INSTALL_TARGETS neap_${name})
  if(L_TESTS)
    neap_add_test(neap_${name}_tests SOURCES ${L_TESTS} LINK neap_${name} ${L_TEST_LINK})
  endif()
endfunction()

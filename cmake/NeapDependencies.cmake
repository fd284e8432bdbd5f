# Every outside library, each with the Debian package that brings it, so that a missing one is named and not guessed.

find_package(Threads REQUIRED)
find_program(NEAP_CCACHE ccache)
if(NEAP_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Relative paths: every checkout and every build directory of one machine shares its objects. What it says it is
  # careless about is what it asks for where there are precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    /usr/bin/env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=true
    CCACHE_SLOPPINESS=pch_defines,time_macros "${NEAP_CCACHE}")
endif()

# neap_require(<find_package name> <Debian package>)
macro(neap_require name package)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "Neaptide needs ${name}, which is not installed. On Debian: apt-get install ${package} (or run `make setup`)")
  endif()
endmacro()

neap_require(nlohmann_json nlohmann-json3-dev)
if(NEAP_BUILD_TESTS)
  neap_require(GTest "libgtest-dev libgmock-dev")
endif()
if(NOT NEAP_TORCH_FREE_ONLY)
  find_package(TorchLite 2.11 REQUIRED)
  message(STATUS "torch ${TorchLite_VERSION} in ${NEAP_TORCH_DIR}")
  # Installed programs find torch where they were built with it.
  set(CMAKE_INSTALL_RPATH "${NEAP_TORCH_DIR}/lib")
  if(SKBUILD)
    list(PREPEND CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib")  # the package beside ours
  endif()
  neap_require(fmt libfmt-dev)
  neap_require(spdlog libspdlog-dev)
  neap_require(yaml-cpp libyaml-cpp-dev)
  neap_require(CLI11 libcli11-dev)
  if(NEAP_BUILD_BENCHMARKS)
    neap_require(benchmark libbenchmark-dev)
  endif()
endif()

# Finds an installed PyTorch without its own CMake package.
#
# TorchConfig.cmake of a CUDA build demands a CUDA toolkit and nvcc even though Neaptide uses c10's device-generic
# interfaces alone. This module takes headers and libraries from the Python package directory and nothing else, so a
# CPU build and a CUDA build of torch configure alike, in well under a second.
#
# Input:  NEAP_PYTHON (python with torch) or NEAP_TORCH_DIR (the package directory, the one that holds lib/ and include/)
# Output: target torch::torch (libtorch_cpu, c10 and, in a CUDA build, the CUDA libraries), TorchLite_VERSION, NEAP_TORCH_DIR

set(NEAP_TORCH_DIR "" CACHE PATH "directory of the installed torch package (holds lib/ and include/)")
if(NOT NEAP_TORCH_DIR)
  set(_python "${NEAP_PYTHON}")
  if(NOT _python)
    find_program(_python NAMES python3 python)
  endif()
  # Not `import torch`: that takes seconds and is not needed to find a directory.
  execute_process(
    COMMAND "${_python}" -c "import importlib.util as u; print(next(iter(u.find_spec('torch').submodule_search_locations)))"
    OUTPUT_VARIABLE _dir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed ERROR_QUIET)
  if(_failed)
    set(_dir "")
  endif()
  set(NEAP_TORCH_DIR "${_dir}" CACHE PATH "directory of the installed torch package (holds lib/ and include/)" FORCE)
endif()

set(TorchLite_VERSION "")
if(EXISTS "${NEAP_TORCH_DIR}/version.py")
  file(STRINGS "${NEAP_TORCH_DIR}/version.py" _line REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TorchLite_VERSION "${_line}")
endif()
find_library(TorchLite_CPU_LIBRARY torch_cpu PATHS "${NEAP_TORCH_DIR}/lib" NO_DEFAULT_PATH)
find_library(TorchLite_C10_LIBRARY c10 PATHS "${NEAP_TORCH_DIR}/lib" NO_DEFAULT_PATH)
find_library(TorchLite_CUDA_LIBRARY torch_cuda PATHS "${NEAP_TORCH_DIR}/lib" NO_DEFAULT_PATH)
mark_as_advanced(TorchLite_CPU_LIBRARY TorchLite_C10_LIBRARY TorchLite_CUDA_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchLite
  REQUIRED_VARS TorchLite_CPU_LIBRARY TorchLite_C10_LIBRARY VERSION_VAR TorchLite_VERSION
  REASON_FAILURE_MESSAGE "no torch package at '${NEAP_TORCH_DIR}'. Run `make setup`, or pass -DNEAP_PYTHON=/path/to/python with torch 2.11 or newer")

if(TorchLite_FOUND AND NOT TARGET torch::torch)
  add_library(torch::torch INTERFACE IMPORTED)
  target_include_directories(torch::torch SYSTEM INTERFACE
    "${NEAP_TORCH_DIR}/include" "${NEAP_TORCH_DIR}/include/torch/csrc/api/include")
  # The macros that torch's own CMake target carries; headers of torch/csrc/distributed need them.
  target_compile_definitions(torch::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC USE_TENSORPIPE)
  set(_libraries "${TorchLite_CPU_LIBRARY}" "${TorchLite_C10_LIBRARY}")
  if(TorchLite_CUDA_LIBRARY)
    list(PREPEND _libraries "${TorchLite_CUDA_LIBRARY}")
  endif()
  # no-as-needed: torch_cuda registers its kernels from static initialisers and is referenced by no symbol.
  target_link_libraries(torch::torch INTERFACE
    "-Wl,--push-state,--no-as-needed" ${_libraries} "-Wl,--pop-state" "-Wl,-rpath,${NEAP_TORCH_DIR}/lib")
endif()

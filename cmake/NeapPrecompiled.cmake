# Headers that most sources need, compiled once for each way of compiling: torch's alone cost a group of sources half of
# its time (docs/decisions/0002-compile-time.md). A source still includes what it uses: -DNEAP_PRECOMPILED=OFF shows it.
#
#   neap_precompile(target library|test|core_test)
#
# A target whose flags are others (hidden symbols, say) does without.

set(NEAP_PRECOMPILED_STD <algorithm> <atomic> <functional> <memory> <mutex> <optional> <string> <unordered_map> <vector>)
set(NEAP_PRECOMPILED_TORCH <ATen/TensorOperators.h> <ATen/core/Tensor.h> <ATen/ops/empty.h> <torch/csrc/autograd/function.h>
  <torch/csrc/autograd/variable.h> <torch/nn/module.h>)
set(NEAP_PRECOMPILED_GTEST <gmock/gmock.h> <gtest/gtest.h>)

# neap_add_precompiled(kind LINK targets… HEADERS headers…): what the targets of this kind share, and what brings it.
function(neap_add_precompiled kind)
  cmake_parse_arguments(P "" "" "LINK;HEADERS" ${ARGN})
  set(source "${CMAKE_CURRENT_BINARY_DIR}/precompiled_${kind}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "// Nothing: the header beside it is what is wanted.\n")
  add_library(neap_precompiled_${kind} OBJECT "${source}")
  target_link_libraries(neap_precompiled_${kind} PRIVATE ${P_LINK})
  target_precompile_headers(neap_precompiled_${kind} PRIVATE ${P_HEADERS})
endfunction()

function(neap_precompile target kind)
  if(TARGET neap_precompiled_${kind})
    target_precompile_headers(${target} REUSE_FROM neap_precompiled_${kind})
    set_target_properties(${target} PROPERTIES PCH_WARN_INVALID ON)
  endif()
endfunction()

if(NEAP_PRECOMPILED)
  if(NEAP_BUILD_TESTS)
    neap_add_precompiled(core_test LINK GTest::gmock GTest::gtest HEADERS ${NEAP_PRECOMPILED_GTEST} ${NEAP_PRECOMPILED_STD})
    neap_test_defaults(neap_precompiled_core_test)
  endif()
  if(NOT NEAP_TORCH_FREE_ONLY)
    neap_add_precompiled(library LINK torch::torch HEADERS ${NEAP_PRECOMPILED_TORCH} ${NEAP_PRECOMPILED_STD})
    neap_target_defaults(neap_precompiled_library)
    if(NEAP_BUILD_TESTS)
      neap_add_precompiled(test LINK torch::torch GTest::gmock GTest::gtest
        HEADERS ${NEAP_PRECOMPILED_GTEST} ${NEAP_PRECOMPILED_TORCH} ${NEAP_PRECOMPILED_STD})
      neap_test_defaults(neap_precompiled_test)
    endif()
  endif()
endif()

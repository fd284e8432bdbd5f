# `cmake --install`: headers as they lie in the tree, static libraries, the simulator, the command, and a package that
# find_package(neap) finds.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(_targets GLOBAL PROPERTY NEAP_INSTALL_TARGETS)
if(TARGET neap)
  list(APPEND _targets neap)
endif()
install(TARGETS ${_targets} EXPORT neapTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})

# Of the simulator only what programs include: its two halves meet inside libneap_sim.so.
install(DIRECTORY neap/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/neap FILES_MATCHING
  PATTERN "*.h"
  PATTERN "internal" EXCLUDE
  PATTERN "test_support.h" EXCLUDE
  PATTERN "neap/sim/engine" EXCLUDE
  PATTERN "neap/sim/torch" EXCLUDE)

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/neap)
install(EXPORT neapTargets NAMESPACE neap:: DESTINATION ${_package_dir})
configure_package_config_file(cmake/neapConfig.cmake.in ${PROJECT_BINARY_DIR}/neapConfig.cmake
  INSTALL_DESTINATION ${_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/neapConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/neapConfig.cmake ${PROJECT_BINARY_DIR}/neapConfigVersion.cmake
  cmake/FindTorchLite.cmake DESTINATION ${_package_dir})

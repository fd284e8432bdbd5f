# Sanitizers over our own code: flags at compile time, options of the run as an environment for every test.
#
# libtorch comes prebuilt and without instrumentation. AddressSanitizer copes when told what it cannot see; ThreadSanitizer
# does not (libtorch's locks are invisible to it), so it runs over the torch-free parts alone (NEAP_TORCH_FREE_ONLY).

set(NEAP_TEST_ENVIRONMENT "")
if(NEAP_SANITIZE)
  # vptr needs the type information of libtorch's classes, which its libraries do not all export.
  set(_flags -fsanitize=${NEAP_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer)
  if(NEAP_SANITIZE MATCHES thread)
    set(_flags -fsanitize=thread -fno-omit-frame-pointer)
  endif()
  add_compile_options(${_flags})
  add_link_options(${_flags})
  # What sanitizers insert makes gcc see uninitialised optionals where there are none.
  list(APPEND NEAP_WARNINGS -Wno-maybe-uninitialized)

  set(_folder "${PROJECT_SOURCE_DIR}/tools/sanitizers")
  set(_asan
    detect_stack_use_after_return=1
    alloc_dealloc_mismatch=0         # memory that crosses the uninstrumented boundary may be freed on the other side
    detect_container_overflow=0      # std containers filled by libtorch carry no annotations
    detect_odr_violation=0           # c10 headers define the same inline data in libtorch and in our executables
    allocator_may_return_null=1      # as any allocator does when asked for too much; tests ask for a petabyte on purpose
    detect_leaks=1)
  list(JOIN _asan ":" _asan)
  set(NEAP_TEST_ENVIRONMENT
    "ASAN_OPTIONS=${_asan}"
    "LSAN_OPTIONS=suppressions=${_folder}/lsan.supp:print_suppressions=0"
    "UBSAN_OPTIONS=print_stacktrace=1:suppressions=${_folder}/ubsan.supp"
    "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=${_folder}/tsan.supp")
endif()

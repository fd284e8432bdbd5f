#include "testing/ranks.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "neap/base/error.h"
#include "neap/comm/failure.h"
#include "neap/comm/internal/local_fabric.h"

namespace neap::testing {
namespace {

// One line of the error, of the same class where it is one of ours.
template <class... Known>
[[noreturn]] void rethrow_named(int rank, const std::exception& error) {
  const std::string text = "rank " + std::to_string(rank) + ": " + error.what();
  const auto as = [&]<class E>(E*) {
    if (dynamic_cast<const E*>(&error) != nullptr) throw E(text);
  };
  (as(static_cast<Known*>(nullptr)), ...);
  throw Error(text);
}

bool is_consequence(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const comm::RankFailure&) {
    return true;
  } catch (...) {
    return false;
  }
}

void run_rank(comm::World& world, const std::function<void(comm::World&)>& body, std::exception_ptr& failure) {
  try {
    world.all();  // as connect() does
    body(world);
    world.close();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    world.abandon(error.what());
  }
}

}  // namespace

void run_ranks(int ranks, const std::function<void(comm::World&)>& body, const RanksOptions& options) {
  const auto hub = std::make_shared<comm::internal::LocalHub>(ranks, options.world.timeout);
  std::vector<std::exception_ptr> failures(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      comm::World world(std::make_unique<comm::internal::LocalFabric>(hub, rank), options.world);
      run_rank(world, body, failures[static_cast<size_t>(rank)]);
    });
  }
  for (auto& thread : threads) thread.join();

  // The one that began it, rather than a rank that it took along.
  auto cause = std::find_if(failures.begin(), failures.end(), [](const auto& f) { return f && !is_consequence(f); });
  if (cause == failures.end())
    cause = std::find_if(failures.begin(), failures.end(), [](const auto& f) { return f != nullptr; });
  if (cause == failures.end()) return;
  try {
    std::rethrow_exception(*cause);
  } catch (const std::exception& error) {
    rethrow_named<comm::Mismatch, comm::RankFailure, UserError, OutOfMemory, InternalError>(
        static_cast<int>(cause - failures.begin()), error);
  }
}

}  // namespace neap::testing

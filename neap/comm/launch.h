// torch-free
// Who this process is among the ranks of a run, as its launcher says in environment variables.
//
// torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and TORCHELASTIC_*:
//            https://docs.pytorch.org/docs/stable/elastic/run.html
// mpirun     OMPI_COMM_WORLD_{RANK,SIZE,LOCAL_RANK,LOCAL_SIZE}, with MASTER_ADDR and MASTER_PORT when the ranks are on
//            several hosts: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
// neither    one rank
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace neap::comm {

struct Launch {
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // on this host
  std::string address = "127.0.0.1";    // of rank 0, or of the launcher's own store
  uint16_t port = 29500;
  bool agent_store = false;  // the launcher serves the store itself, and it outlives a restart of the ranks
  std::string run_id = "none";
  int restart = 0;  // how often the launcher has started the ranks anew

  // Null when the variable is not set, as std::getenv.
  using Lookup = std::function<const char*(const char* variable)>;

  // UserError on a value that makes no sense or on a variable that is missing beside others; it names the variable.
  static Launch from_environment();
  static Launch from(const Lookup& lookup);

  bool operator==(const Launch&) const = default;
};

}  // namespace neap::comm

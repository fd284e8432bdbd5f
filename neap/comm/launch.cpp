// torch-free
#include "neap/comm/launch.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "neap/base/error.h"

namespace neap::comm {
namespace {

class Variables {
 public:
  explicit Variables(const Launch::Lookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] bool has(const char* name) const { return lookup_(name) != nullptr; }

  [[nodiscard]] std::string text(const char* name, std::string otherwise) const {
    const char* value = lookup_(name);
    return value != nullptr && *value != '\0' ? value : std::move(otherwise);
  }

  // `beside`: the variable whose presence makes this one necessary.
  [[nodiscard]] int number(const char* name, const char* beside, int min, int max) const {
    NEAP_CHECK(has(name), "[launch] expected ", name, " to be set, since ", beside,
               " is; found none; let torchrun or mpirun start the ranks, or set both");
    return parse(name, min, max);
  }
  [[nodiscard]] int number_or(const char* name, int otherwise, int min, int max) const {
    return has(name) ? parse(name, min, max) : otherwise;
  }

  [[nodiscard]] bool flag(const char* name) const {
    const std::string value = text(name, "False");
    const bool on = value == "True" || value == "true" || value == "1";
    NEAP_CHECK(on || value == "False" || value == "false" || value == "0", "[launch] expected ", name,
               " to be True or False; found '", value, "'");
    return on;
  }

 private:
  [[nodiscard]] int parse(const char* name, int min, int max) const {
    const std::string_view value = lookup_(name);
    int number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    NEAP_CHECK(error == std::errc() && end == value.data() + value.size() && number >= min && number <= max,
               "[launch] expected ", name, " to be a whole number from ", min, " to ", max, "; found '", value, "'");
    return number;
  }

  const Launch::Lookup& lookup_;
};

constexpr int kMaxRanks = 1 << 24;

// The same questions under either launcher's names.
void read_ranks(Launch& launch, const Variables& from, const char* rank, const char* world, const char* local_rank,
                const char* local_world) {
  launch.world = from.number(world, from.has(rank) ? rank : local_rank, 1, kMaxRanks);
  launch.rank = from.number(rank, world, 0, launch.world - 1);
  // Without them, one host is the simplest world that could be meant.
  launch.local_world = from.number_or(local_world, launch.world, 1, launch.world);
  const int place = launch.local_world == launch.world ? launch.rank : 0;
  launch.local_rank = from.number_or(local_rank, place, 0, launch.local_world - 1);
}

void read_address(Launch& launch, const Variables& from) {
  NEAP_CHECK(from.has("MASTER_ADDR") || launch.local_world == launch.world,
             "[launch] expected MASTER_ADDR to name the host of rank 0, since the ", launch.world,
             " ranks are on several hosts; found none; set MASTER_ADDR and MASTER_PORT on all of them");
  launch.address = from.text("MASTER_ADDR", launch.address);
  launch.port = static_cast<uint16_t>(from.number_or("MASTER_PORT", launch.port, 1, 65'535));
}

}  // namespace

Launch Launch::from(const Lookup& lookup) {
  const Variables variables(lookup);
  Launch launch;
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    read_ranks(launch, variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    read_address(launch, variables);
    launch.agent_store = variables.flag("TORCHELASTIC_USE_AGENT_STORE");
    launch.run_id = variables.text("TORCHELASTIC_RUN_ID", launch.run_id);
    launch.restart = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, 0, 1 << 30);
  } else if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    read_ranks(launch, variables, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE");
    read_address(launch, variables);
  }
  return launch;
}

Launch Launch::from_environment() {
  return from([](const char* variable) -> const char* { return std::getenv(variable); });
}

}  // namespace neap::comm

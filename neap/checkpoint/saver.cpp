#include "neap/checkpoint/saver.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "neap/base/error.h"
#include "neap/base/log.h"
#include "neap/checkpoint/directory.h"
#include "neap/checkpoint/internal/host_copies.h"
#include "neap/checkpoint/internal/manifest.h"
#include "neap/comm/agreement.h"
#include "neap/comm/world.h"
#include "neap/files/atomic_directory.h"
#include "neap/files/checksum.h"
#include "neap/files/tensor_bytes.h"

namespace neap::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

int64_t width(const Piece& piece) { return static_cast<int64_t>(piece.data.element_size()); }

// Those that this rank writes: wide types first, so that each of them lies aligned.
std::vector<Piece> chosen(const std::vector<Piece>& pieces, const std::vector<std::size_t>& places) {
  std::vector<Piece> mine;
  mine.reserve(places.size());
  for (const std::size_t place : places) mine.push_back(pieces[place]);
  std::ranges::stable_sort(mine, std::ranges::greater{}, width);
  return mine;
}

}  // namespace

// One save from its begin to its end.
struct Saver::Job {
  int rank = 0;
  Index index;
  std::vector<Piece> mine;
  std::vector<memory::HostBuffer> copies;  // of `mine`; none when the run waits
  fs::path file;
  files::FileSystem* system = nullptr;
  std::optional<files::AtomicDirectory> directory;  // on rank 0
  std::thread thread;

  // The thread's until it has set `state`.
  enum class Writing : int { kDone, kRunning, kFailed };
  std::atomic<Writing> state{Writing::kRunning};
  std::string error;
  std::vector<uint64_t> checksums;

  ~Job() {
    if (thread.joinable()) thread.join();
  }

  void write() noexcept {
    try {
      write_file();
      state = Writing::kDone;
    } catch (const std::exception& caught) {
      error = caught.what();
      state = Writing::kFailed;
    }
  }
  void write_file();
  [[nodiscard]] std::string report() const;
  void add_report(int of_rank, const Json& report);
};

void Saver::Job::write_file() {
  std::vector<files::SafeTensorInfo> infos;
  Json held = Json::object();
  for (const Piece& piece : mine) {
    infos.push_back({piece.name, files::to_safe(piece.data.scalar_type()), {piece.end - piece.begin}, 0});
    held[piece.name] = {{"shape", piece.full_size}, {"begin", piece.begin}, {"end", piece.end}};
  }
  files::SafetensorsWriter writer(file, infos,
                                  {{"format", kFormat},
                                   {"rank", std::to_string(rank)},
                                   {"world", std::to_string(index.world)},
                                   {"pieces", held.dump()}},
                                  *system);
  const auto write = [&](std::span<const std::byte> bytes) {
    files::Checksum checksum;
    checksum.update(bytes);
    writer.append(bytes);
    checksums.push_back(checksum.value());
  };
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (copies.empty() || copies[i].is_null()) {
      write(files::bytes_of(mine[i].data.to(at::kCPU)));
    } else {
      write(copies[i].read());
      copies[i].release();  // the next save may take it while this one writes on
    }
  }
  writer.finish();
}

// What rank 0 has to know.
std::string Saver::Job::report() const {
  Json sums = Json::object();
  for (std::size_t i = 0; error.empty() && i < mine.size(); ++i) {
    sums[mine[i].name] = files::checksum_text(checksums[i]);
  }
  const auto bytes = error.empty() ? static_cast<int64_t>(fs::file_size(file)) : 0;
  return Json{{"error", error}, {"bytes", bytes}, {"checksums", sums}}.dump(-1, ' ', false,
                                                                            Json::error_handler_t::replace);
}

void Saver::Job::add_report(int of_rank, const Json& report) {
  index.files[static_cast<std::size_t>(of_rank)].bytes = report["bytes"].get<int64_t>();
  for (const auto& [name, sum] : report["checksums"].items()) {
    for (IndexPiece& piece : index.tensors.at(name).pieces) {
      if (piece.file == of_rank) piece.checksum = sum.get<std::string>();
    }
  }
}

Saver::Saver(fs::path dir, SaverOptions options, comm::World* world)
    : dir_(std::move(dir)),
      options_(options),
      world_(world),
      host_(std::make_unique<internal::HostCopies>(options.host_limit)) {
  NEAP_CHECK(options_.keep_last >= 0, "[checkpoint] expected to keep 0 (all) or more checkpoints; found ",
             options_.keep_last);
}

Saver::~Saver() = default;

void Saver::save(int64_t step, const std::vector<Piece>& pieces, State state) {
  finish();
  try {
    begin(step, pieces, std::move(state));
  } catch (...) {
    job_.reset();
    throw;
  }
  if (!options_.asynchronous) finish();
}

void Saver::begin(int64_t step, const std::vector<Piece>& pieces, State state) {
  std::string manifest;
  comm::together(world_, "checkpoint pieces", [&] { manifest = internal::manifest_of(pieces); });
  internal::Division division = internal::divide(comm::exchange_texts(world_, manifest, "checkpoint pieces"));

  job_ = std::make_unique<Job>();
  Job& job = *job_;
  job.rank = comm::rank_of(world_);
  job.index = std::move(division.index);
  job.index.state = std::move(state);
  job.mine = chosen(pieces, division.mine[static_cast<std::size_t>(job.rank)]);
  job.system = options_.system;
  const fs::path directory = dir_ / step_name(step);
  job.file = files::AtomicDirectory::temporary_name(directory) / file_of_rank(job.rank);
  comm::together(world_, "checkpoint directory", [&] {
    if (job.rank != 0) return;
    options_.system->make_directory(dir_);
    remove_partial(dir_, *options_.system);
    job.directory.emplace(directory, *options_.system);
  });
  auto copies = options_.asynchronous ? host_->take(job.mine) : std::nullopt;
  if (copies) {
    job.copies = std::move(*copies);
    job.thread = std::thread([&job] { job.write(); });
  } else {
    if (options_.asynchronous && !std::exchange(warned_, true)) {
      const memory::PoolCounters now = host_->counters();
      log_warning(
          "[checkpoint] the run waits while a checkpoint is written: there is no host memory for a copy of it, ",
          now.locked, " are taken",
          options_.host_limit ? neap::internal::concat(" of ", *options_.host_limit) : std::string());
    }
    job.write();
  }
}

memory::PoolCounters Saver::host_counters() const { return host_->counters(); }

void Saver::poll() {
  if (!job_) return;
  auto state = static_cast<int>(job_->state.load());
  if (comm::size_of(world_) > 1) {
    const at::Tensor worst = at::full({1}, state, at::TensorOptions(at::kInt));
    world_->all().all_reduce(worst, {.op = comm::ReduceOp::kMax}, "checkpoint progress").wait();
    state = worst.item<int>();
  }
  if (state != static_cast<int>(Job::Writing::kRunning)) complete();
}

void Saver::finish() {
  if (job_) complete();
}

void Saver::complete() {
  const std::unique_ptr<Job> job = std::move(job_);
  if (job->thread.joinable()) job->thread.join();
  const std::vector<std::string> reports = comm::exchange_texts(world_, job->report(), "checkpoint files");
  std::vector<std::string> errors;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const Json report = Json::parse(reports[rank]);
    errors.push_back(report["error"].get<std::string>());
    if (errors.back().empty()) job->add_report(static_cast<int>(rank), report);
  }
  for (std::string& error : errors) {
    if (!error.empty())
      error.insert(0, "[checkpoint] a checkpoint could not be saved; those before it are untouched: ");
  }
  comm::raise_first(errors, job->rank);
  comm::together(world_, "checkpoint index", [&] {
    if (job->rank != 0) return;
    files::write_text(job->directory->temporary() / kIndexName, to_json(job->index), *options_.system);
    job->directory->commit();
    try {
      remove_old(dir_, options_.keep_last, *options_.system);
    } catch (const UserError& error) {
      log_warning("an old checkpoint stays: ", error.what());
    }
  });
}

}  // namespace neap::checkpoint

// Reads checkpoints, for any number of ranks and any way of cutting tensors: start here to read.
//
//   checkpoint::Reader reader("runs/a/checkpoints/step-00000100");
//   checkpoint::load(reader, pieces, world.get());      // fills pieces[i].data
//
// Files are mapped, and of them only the pieces are read that overlap with what is asked for; each is compared with its
// checksum before anything of it is used. Whatever is wrong is a UserError that names the file. One thread at a time.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "neap/base/bytes.h"
#include "neap/checkpoint/index.h"
#include "neap/checkpoint/piece.h"

namespace neap::comm {
class World;
}

namespace neap::checkpoint {

class Reader {
 public:
  // Reads the index. UserError for a directory that is no complete checkpoint.
  explicit Reader(std::filesystem::path dir);
  ~Reader();
  Reader(Reader&&) noexcept;
  Reader& operator=(Reader&&) noexcept;

  const std::filesystem::path& dir() const noexcept { return dir_; }
  const Index& index() const noexcept { return index_; }
  const State& state() const noexcept { return index_.state; }
  // UserError when there is none.
  const std::string& state(const std::string& key) const;

  // Tensors of the checkpoint that nobody need ask for.
  using MayStay = std::function<bool(const std::string& name)>;
  // Compares names, shapes and dtypes; one UserError lists all that does not fit. A tensor that is not asked for is a
  // fault unless `may_stay` says otherwise. Reads nothing.
  void check(const std::vector<Piece>& pieces, const MayStay& may_stay = nullptr) const;
  // Fills the pieces' data. REQUIRES: check() had no complaint.
  void read(const std::vector<Piece>& pieces);
  // A whole tensor, on the CPU.
  at::Tensor tensor(const std::string& name);
  // Reads everything.
  void verify();

  // Of pieces that were compared with their checksums.
  [[nodiscard]] Bytes bytes_read() const noexcept { return bytes_read_; }
  [[nodiscard]] int files_opened() const noexcept;

 private:
  struct File;

  File& open(int file);
  // The bytes of one piece of one file, checked.
  std::span<const std::byte> bytes(const std::string& name, const IndexPiece& piece);

  std::filesystem::path dir_;
  Index index_;
  std::vector<std::unique_ptr<File>> files_;
  Bytes bytes_read_;
};

// check() and read() on every rank; an error of one is a UserError on all. Collective; null: one rank alone.
void load(Reader& reader, const std::vector<Piece>& pieces, comm::World* world = nullptr,
          const Reader::MayStay& may_stay = nullptr);

}  // namespace neap::checkpoint

#include "neap/checkpoint/internal/manifest.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "neap/base/error.h"
#include "neap/files/tensor_bytes.h"

namespace neap::checkpoint::internal {
namespace {

using Json = nlohmann::json;

// One rank's piece, and where it stands in that rank's list.
struct Holder {
  int rank = 0;
  std::size_t place = 0;
};

void check(const Piece& piece) {
  const at::Tensor& data = piece.data;
  NEAP_CHECK(data.defined() && data.dim() == 1 && data.is_contiguous() && data.numel() == piece.end - piece.begin,
             "[checkpoint] expected the piece of '", piece.name, "' to be contiguous with the elements ", piece.begin,
             " to ", piece.end, "; found ", data.defined() ? data.sizes() : at::IntArrayRef(), " of strides ",
             data.defined() ? data.strides() : at::IntArrayRef());
}

}  // namespace

std::string manifest_of(const std::vector<Piece>& pieces) {
  Json list = Json::array();
  std::set<std::string_view> names;
  for (const Piece& piece : pieces) {
    check(piece);
    NEAP_CHECK(names.insert(piece.name).second, "[checkpoint] expected one piece of '", piece.name, "'; found two");
    const files::SafeType type = files::to_safe(piece.data.scalar_type());
    list.push_back(Json::array({piece.name, static_cast<int>(type), piece.full_size, piece.begin, piece.end}));
  }
  return list.dump();
}

Division divide(const std::vector<std::string>& manifests) {
  Division division;
  Index& index = division.index;
  index.world = static_cast<int>(manifests.size());
  std::map<std::tuple<std::string, int64_t, int64_t>, std::vector<Holder>> held;
  for (int rank = 0; rank < index.world; ++rank) {
    index.files.push_back({file_of_rank(rank), 0});
    const Json list = Json::parse(manifests[static_cast<std::size_t>(rank)]);
    for (std::size_t place = 0; place < list.size(); ++place) {
      const Json& entry = list[place];
      const IndexTensor tensor{
          static_cast<files::SafeType>(entry[1].get<int>()), entry[2].get<std::vector<int64_t>>(), {}};
      const auto name = entry[0].get<std::string>();
      const auto& known = index.tensors.try_emplace(name, tensor).first->second;
      NEAP_CHECK(known.type == tensor.type && known.full_size == tensor.full_size, "[checkpoint] rank ", rank, " has '",
                 name, "' in another shape or dtype than the ranks before it");
      const auto begin = entry[3].get<int64_t>(), end = entry[4].get<int64_t>();
      if (begin < end) held[{name, begin, end}].push_back({rank, place});
    }
  }

  division.mine.resize(manifests.size());
  std::vector<int64_t> load(manifests.size(), 0);
  for (const auto& [key, holders] : held) {
    const auto& [name, begin, end] = key;
    const Holder& chosen = *std::ranges::min_element(
        holders, {}, [&](const Holder& holder) { return load[static_cast<std::size_t>(holder.rank)]; });
    const auto rank = static_cast<std::size_t>(chosen.rank);
    IndexTensor& tensor = index.tensors.at(name);
    load[rank] += (end - begin) * files::size_of(tensor.type);
    tensor.pieces.push_back({chosen.rank, begin, end, ""});  // the map's order: by where they begin
    division.mine[rank].push_back(chosen.place);
  }
  check_cover(index, "[checkpoint] what the ranks save");
  return division;
}

}  // namespace neap::checkpoint::internal

#include "model/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>

#include "model/json_file.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kFunction = "checkpoint";
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
// DeepSeek-V3's index names 92,000 tensors in 9 MB.
constexpr int64_t kMaxIndexBytes = 100'000'000;

struct Entry {
  const TensorRef* tensor;
  bool used;
};

/// tensor name -> shard name, from the index file.
std::map<std::string, std::string> read_index(const std::string& path) {
  const Json json = parse_json(kFunction, read_file(kFunction, path, kMaxIndexBytes), path);
  const JsonObject root(kFunction, path, "", json);
  const JsonObject map = root.object("weight_map");
  std::map<std::string, std::string> shards;
  for (const auto& [name, value] : map.json().items()) {
    const std::string shard = map.string(name);
    // A shard lies beside its index: a path would let a downloaded index reach for other files.
    if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos ||
        shard.find('\0') != std::string::npos)
      map.refuse(name, "the name of a file in the same directory");
    shards[name] = shard;
  }
  if (shards.empty()) root.refuse("weight_map", "at least one tensor");
  return shards;
}

}  // namespace

struct Checkpoint::State {
  std::string directory;
  ModelConfig config;
  std::vector<SafetensorsFile> files;
  std::map<std::string, Entry, std::less<>> tensors;
};

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint Checkpoint::open(const std::string& directory) {
  struct stat s;
  if (::stat(directory.c_str(), &s) != 0 || !S_ISDIR(s.st_mode))
    fail(ErrorCode::kCorruptFile, kFunction, "{}: is not a directory; accepted: a directory with config.json and {}",
         directory, kSingleFile);
  auto state = std::make_unique<State>();
  state->directory = directory;
  state->config = load_config(directory);

  // As the reference library: the single file, if it is there, else the shards.
  const std::string single = join_path(directory, kSingleFile);
  const std::string index = join_path(directory, kIndexFile);
  std::map<std::string, std::string> shard_of;
  if (file_exists(single)) {
    state->files.push_back(SafetensorsFile::open(single));
  } else if (file_exists(index)) {
    shard_of = read_index(index);
    std::set<std::string> shards;
    for (const auto& [name, shard] : shard_of) shards.insert(shard);
    for (const std::string& shard : shards) {
      const std::string path = join_path(directory, shard);
      if (!file_exists(path))
        fail(ErrorCode::kCorruptFile, kFunction, "{}: weight_map names the shard {}, which is missing", index,
             show_text(shard));
      state->files.push_back(SafetensorsFile::open(path));
    }
  } else {
    fail(ErrorCode::kCorruptFile, kFunction, "{}: has neither {} nor {}", directory, kSingleFile, kIndexFile);
  }

  for (const SafetensorsFile& file : state->files) {
    for (const TensorRef& t : file.tensors()) {
      const auto [it, fresh] = state->tensors.try_emplace(t.name, Entry{&t, false});
      if (!fresh)
        fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} stands in {} too", t.file, show_text(t.name),
             it->second.tensor->file);
    }
  }
  for (const auto& [name, shard] : shard_of) {
    const auto it = state->tensors.find(name);
    const std::string path = join_path(directory, shard);
    if (it == state->tensors.end() || it->second.tensor->file != path)
      fail(ErrorCode::kCorruptFile, kFunction, "{}: weight_map places tensor {} in {}, which lacks it", index,
           show_text(name), show_text(shard));
  }
  return Checkpoint(std::move(state));
}

const std::string& Checkpoint::directory() const noexcept { return state_->directory; }
const ModelConfig& Checkpoint::config() const noexcept { return state_->config; }

const TensorRef* Checkpoint::find(std::string_view name) {
  const auto it = state_->tensors.find(name);
  if (it == state_->tensors.end()) return nullptr;
  it->second.used = true;
  return it->second.tensor;
}

const TensorRef& Checkpoint::require(std::string_view name, std::initializer_list<DType> dtypes,
                                     std::initializer_list<int64_t> shape) {
  const TensorRef* t = find(name);
  if (t == nullptr)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} is missing", state_->directory, show_text(name));
  check_tensor(kFunction, *t, dtypes, {shape.begin(), shape.size()});
  return *t;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : state_->tensors) names.push_back(name);
  return names;
}

std::vector<std::string> Checkpoint::unused() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : state_->tensors)
    if (!entry.used) names.push_back(name);
  return names;
}

int64_t Checkpoint::mapped_bytes() const noexcept {
  int64_t bytes = 0;
  for (const SafetensorsFile& file : state_->files) bytes += file.num_bytes();
  return bytes;
}

}  // namespace v0
}  // namespace gannet

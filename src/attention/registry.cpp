#include <algorithm>

#include "attention/backends.h"
#include "core/checked.h"
#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace {

bool contains(const std::vector<AttentionArch>& archs, AttentionArch a) {
  return std::find(archs.begin(), archs.end(), a) != archs.end();
}

std::string names_of(const std::vector<AttentionBackendEntry>& entries) {
  std::string text;
  for (const AttentionBackendEntry& e : entries) {
    std::string archs;
    for (const AttentionArch a : e.archs) archs += fmt::format("{}{}", archs.empty() ? "" : ", ", to_string(a));
    text += fmt::format("{}{} (for {})", text.empty() ? "" : ", ", e.name, archs);
  }
  return text.empty() ? "none is registered" : text;
}

}  // namespace

const char* to_string(AttentionArch a) noexcept {
  switch (a) {
    case AttentionArch::kMla: return "MLA";
    case AttentionArch::kDsa: return "DSA";
  }
  return "unknown";
}

const char* to_string(LayerRecord r) noexcept {
  switch (r) {
    case LayerRecord::kWritten: return "written";
    case LayerRecord::kAbandoned: return "abandoned";
  }
  return "unknown";
}

AttentionBackend::~AttentionBackend() = default;

AttentionRegistry AttentionRegistry::builtin() {
  AttentionRegistry r;
  r.add({.name = "mla",
         .archs = {AttentionArch::kMla},
         .default_for = {AttentionArch::kMla},
         .make = attention::make_mla});
  r.add({.name = "dsa",
         .archs = {AttentionArch::kDsa},
         .default_for = {AttentionArch::kDsa},
         .make = attention::make_dsa});
  return r;
}

void AttentionRegistry::add(AttentionBackendEntry entry) {
  constexpr const char* kName = "AttentionRegistry::add";
  if (entry.name.empty()) fail_argument(kName, "name is empty");
  if (entry.archs.empty()) fail_argument(kName, "backend {} serves no architecture", entry.name);
  if (!entry.make) fail_argument(kName, "backend {} has no factory", entry.name);
  for (const AttentionArch a : entry.default_for)
    if (!contains(entry.archs, a))
      fail_argument(kName, "backend {} is the default for {}, which it does not serve", entry.name, to_string(a));
  for (const AttentionBackendEntry& e : entries_) {
    if (e.name == entry.name) fail_argument(kName, "backend {} is registered already", e.name);
    for (const AttentionArch a : entry.default_for)
      if (contains(e.default_for, a))
        fail_argument(kName, "backend {} cannot be the default for {}: {} is", entry.name, to_string(a), e.name);
  }
  entries_.push_back(std::move(entry));
}

std::unique_ptr<AttentionBackend> AttentionRegistry::make(const Context& context, const AttentionConfig& config,
                                                          std::string_view name, MemoryResource& resource) const {
  constexpr const char* kName = "make_attention_backend";
  for (const AttentionBackendEntry& e : entries_) {
    if (name.empty() ? !contains(e.default_for, config.arch) : e.name != name) continue;
    if (!contains(e.archs, config.arch))
      fail_argument(kName, "backend {} does not serve the architecture {}; accepted: {}", e.name,
                    to_string(config.arch), names_of(entries_));
    return e.make(context, config, resource);
  }
  if (name.empty())
    fail_argument(kName, "there is no default backend for the architecture {}; name one of: {}", to_string(config.arch),
                  names_of(entries_));
  fail_argument(kName, "backend is \"{}\"; accepted: {}", name, names_of(entries_));
}

std::unique_ptr<AttentionBackend> make_attention_backend(const Context& context, const AttentionConfig& config,
                                                         std::string_view name, MemoryResource& resource) {
  return AttentionRegistry::builtin().make(context, config, name, resource);
}

// ---- SelectionBuffer ----

namespace {
// Rows begin on a cache line: any row of the buffer can be the first of a view, and workers do not share lines.
constexpr int64_t kRowUnit = 16;  // int32 in 64 bytes
}  // namespace

SelectionBuffer::SelectionBuffer(int32_t topk, bool with_positions, MemoryResource& resource)
    : resource_(&resource), topk_(topk), with_positions_(with_positions) {
  if (topk < 1) fail_argument("SelectionBuffer", "topk is {}; accepted: 1 and more", topk);
}

void SelectionBuffer::reserve(int64_t rows) {
  constexpr const char* kName = "SelectionBuffer::reserve";
  if (rows < 0) fail_argument(kName, "rows is {}; accepted: 0 and more", rows);
  if (rows <= capacity_) return;
  const int64_t width = (int64_t{topk_} + kRowUnit - 1) / kRowUnit * kRowUnit;
  const int64_t values = (with_positions_ ? 2 : 1) * width + 1;  // a row's, and its length
  const int64_t bytes = checked_mul(kName, "the size", checked_mul(kName, "the size", rows, values), sizeof(int32_t));
  memory_.reserve(static_cast<size_t>(bytes), *resource_);
  capacity_ = rows;
}

TopKSelection SelectionBuffer::view(int64_t rows, int64_t begin) const {
  if (rows < 0 || begin < 0 || begin > capacity_ || rows > capacity_ - begin)
    fail_argument("SelectionBuffer::view", "rows {} from {} are wanted; the buffer has room for {} (reserve)", rows,
                  begin, capacity_);
  const int64_t width = (int64_t{topk_} + kRowUnit - 1) / kRowUnit * kRowUnit;
  auto* base = reinterpret_cast<int32_t*>(memory_.data());
  const auto plane = [&](int64_t i) {
    TensorView v = gannet::view(base + (i * capacity_ + begin) * width, {rows, topk_});
    v.stride[0] = width;
    return v;
  };
  TopKSelection s;
  s.slots = plane(0);
  const int64_t planes = with_positions_ ? 2 : 1;
  if (with_positions_) s.positions = plane(1);
  s.lens = gannet::view(base + planes * capacity_ * width + begin, {rows});
  return s;
}

}  // namespace v0
}  // namespace gannet

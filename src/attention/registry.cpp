#include <algorithm>

#include "attention/backends.h"
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

void AttentionBackend::capture(const CaptureShape&, const SharedPageTable&) {
  fail(ErrorCode::kUnsupported, name(), "the backend takes no shared page table; accepted: capture without one");
}

void AttentionBackend::refresh(const SharedStep&) {
  fail(ErrorCode::kUnsupported, name(), "the backend takes no shared page table; accepted: refresh without one");
}

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

}  // namespace v0
}  // namespace gannet

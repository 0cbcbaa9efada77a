// "mla": dense multi-head latent attention.
#include "attention/backends.h"
#include "attention/common_backend.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

AttentionCapabilities capabilities() {
  return {.dense_prefill = true,
          .attend_all = true,
          .attend_sparse = false,
          .page_sizes = {32, 64},
          .latent_formats = {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656,
                             LatentFormat::kE4m3PerToken}};
}

class MlaBackend final : public CommonBackend {
 public:
  MlaBackend(const Context& context, const AttentionConfig& config, MemoryResource& memory)
      : CommonBackend("mla", attention::capabilities(), context, config, memory) {}

  void select(const SelectCall&) override {
    core_.refuse_unsupported("select", "the backend has no indexer; accepted: a backend with sparse attention (dsa)");
  }

  void attend(const AttendCall& call) override {
    constexpr const char* kCall = "attend";
    if (std::holds_alternative<TopKSelection>(call.selection))
      core_.refuse_unsupported(
          kCall, "selection is a TopKSelection; accepted: AttendAll (the backend has no sparse attention)");
    if (!std::holds_alternative<AttendAll>(call.selection))
      core_.refuse(kCall, "selection is not given; accepted: AttendAll");
    if (core_.begin_attend(call)) dense_.attend_all(call);
  }

 private:
  void check_dense(const char*) const override {}  // it always is
};

}  // namespace

std::unique_ptr<AttentionBackend> make_mla(const Context& context, const AttentionConfig& config,
                                           MemoryResource& memory) {
  return std::make_unique<MlaBackend>(context, config, memory);
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet

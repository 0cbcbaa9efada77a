// Two oneDNN matrix products a block of 256 keys, with an online softmax of ours between them: the bf16-accurate way of
// a program that has a matrix library and no attention kernel. Blocks are dealt to the workers in ranges, each with a
// state of its own, merged at the end; oneDNN itself runs on one thread in each.
#include <omp.h>

#include <algorithm>
#include <limits>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "bench/peers.h"
#include "bench/roof_loops.h"
#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

constexpr int64_t kBlockKeys = 256;  // S, P and K of a block stay in 1 MiB of L2; larger and smaller were slower
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // finite, so that a difference of two is a number

using Dims = dnnl::memory::dims;
using Type = dnnl::memory::data_type;

/// A product and where its operands are: their addresses change from call to call.
class Product {
 public:
  // c[m, n] (+)= a[m, k] . b[k, n]
  Product(const dnnl::engine& engine, const Dims& size_mnk, Dims a_strides, Dims b_strides, Dims c_strides, bool adds)
      : a_({{size_mnk[0], size_mnk[2]}, Type::bf16, std::move(a_strides)}, engine, nullptr),
        b_({{size_mnk[2], size_mnk[1]}, Type::bf16, std::move(b_strides)}, engine, nullptr),
        c_({{size_mnk[0], size_mnk[1]}, Type::f32, std::move(c_strides)}, engine, nullptr) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (adds) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc description({a_.get_desc(), b_.get_desc(), c_.get_desc()}, attributes, engine);
    scratch_ = dnnl::memory(description.scratchpad_desc(), engine);
    product_ = dnnl::matmul(description);
    arguments_ = {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}, {DNNL_ARG_SCRATCHPAD, scratch_}};
  }
  void operator()(dnnl::stream& stream, const void* a, const void* b, float* c) {
    a_.set_data_handle(const_cast<void*>(a));
    b_.set_data_handle(const_cast<void*>(b));
    c_.set_data_handle(c);
    product_.execute(stream, arguments_);
  }

 private:
  dnnl::memory a_, b_, c_, scratch_;
  dnnl::matmul product_;
  std::unordered_map<int, dnnl::memory> arguments_;
};

struct Sizes {
  int64_t heads, keys, width, latent_dim;
  float scale;
};

/// The products of a block of some number of keys.
struct Block {
  Product scores, values;
  Block(const dnnl::engine& engine, const Sizes& z, int64_t keys, int64_t padded)
      : scores(engine, {z.heads, keys, z.width}, {z.width, 1}, {1, z.width}, {padded, 1}, false),
        values(engine, {z.heads, z.latent_dim, keys}, {padded, 1}, {z.width, 1}, {z.latent_dim, 1}, true) {}
};

struct Worker {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::unique_ptr<Block> whole, last;
  std::vector<float> scores, m, z, o;
  std::vector<uint16_t> weights;
};

class OneDnnCall final : public Call {
 public:
  OneDnnCall(const Context& context, const std::vector<MlaDecode>& copies, std::shared_ptr<void> storage)
      : executor_(*context.executor), q_(copies.front().q), storage_(std::move(storage)) {
    omp_set_num_threads(1);  // a primitive's threads are counted when it is made
    const MlaDecode& p = copies.front();
    z_ = {p.q.shape[1], p.rows.seq_lens.ptr<const int32_t>()[0], p.q.shape[2], p.out.shape[2], p.softmax_scale};
    for (const MlaDecode& copy : copies) keys_.push_back(contiguous_keys(copy));
    out_.resize(static_cast<size_t>(z_.heads * z_.latent_dim));
    blocks_ = (z_.keys + kBlockKeys - 1) / kBlockKeys;
    workers_.resize(static_cast<size_t>(executor_.num_workers()));
    const int64_t rest = z_.keys % kBlockKeys;
    for (Worker& w : workers_) {
      w.whole = std::make_unique<Block>(w.engine, z_, kBlockKeys, kBlockKeys);
      if (rest != 0) w.last = std::make_unique<Block>(w.engine, z_, rest, kBlockKeys);
      w.scores.resize(static_cast<size_t>(z_.heads * kBlockKeys));
      w.weights.resize(w.scores.size());
      w.m.resize(static_cast<size_t>(z_.heads));
      w.z.resize(w.m.size());
      w.o.resize(static_cast<size_t>(z_.heads * z_.latent_dim));
    }
    const dnnl_version_t* v = dnnl_version();
    name_ = fmt::format("oneDNN {}.{}", v->major, v->minor);
  }

  const char* impl() const override { return name_.c_str(); }

  void run(int64_t iteration) override {
    const std::vector<uint16_t>& keys = keys_[static_cast<size_t>(iteration) % keys_.size()];
    const auto num_workers = static_cast<int64_t>(workers_.size());
    executor_.parallel_for(num_workers, [&](int64_t part, int) {
      omp_set_num_threads(1);  // of this thread's regions
      attend(workers_[static_cast<size_t>(part)], keys.data(), blocks_ * part / num_workers,
             blocks_ * (part + 1) / num_workers);
    });
    executor_.parallel_for(num_workers, [&](int64_t part, int) {
      const auto columns = static_cast<int>(z_.latent_dim);
      for (int64_t h = z_.heads * part / num_workers; h < z_.heads * (part + 1) / num_workers; ++h) {
        Worker& home = workers_.front();
        const auto at = static_cast<size_t>(h);
        float* const o = home.o.data() + h * z_.latent_dim;
        for (size_t i = 1; i < workers_.size(); ++i) {
          const Worker& w = workers_[i];
          peer_merge_avx512_bf16(&home.m[at], &home.z[at], o, w.m[at], w.z[at], w.o.data() + h * z_.latent_dim,
                                 columns);
        }
        peer_write_avx512_bf16(o, home.z[at], out_.data() + h * z_.latent_dim, columns);
      }
    });
  }

  std::vector<float> result() override {
    run(0);
    const Worker& home = workers_.front();
    std::vector<float> out(home.o);
    for (size_t i = 0; i < out.size(); ++i) out[i] /= home.z[i / static_cast<size_t>(z_.latent_dim)];
    return out;
  }

 private:
  void attend(Worker& w, const uint16_t* keys, int64_t first, int64_t end) {
    std::fill(w.m.begin(), w.m.end(), kLowest);
    std::fill(w.z.begin(), w.z.end(), 0.0f);
    std::fill(w.o.begin(), w.o.end(), 0.0f);
    for (int64_t b = first; b < end; ++b) {
      const uint16_t* rows = keys + b * kBlockKeys * z_.width;
      const int64_t count = std::min(kBlockKeys, z_.keys - b * kBlockKeys);
      Block& block = count == kBlockKeys ? *w.whole : *w.last;
      block.scores(w.stream, q_.data, rows, w.scores.data());
      if (count < kBlockKeys) {
        for (int64_t h = 0; h < z_.heads; ++h)
          std::fill_n(w.scores.data() + h * kBlockKeys + count, kBlockKeys - count,
                      -std::numeric_limits<float>::infinity());
      }
      peer_softmax_avx512_bf16(w.scores.data(), static_cast<int>(z_.heads), kBlockKeys, z_.scale * kLog2E, w.m.data(),
                               w.z.data(), w.weights.data(), w.o.data(), static_cast<int>(z_.latent_dim));
      block.values(w.stream, w.weights.data(), rows, w.o.data());
    }
    w.stream.wait();
  }

  Executor& executor_;
  TensorView q_;
  std::shared_ptr<void> storage_;
  Sizes z_{};
  int64_t blocks_ = 0;
  std::vector<std::vector<uint16_t>> keys_;
  std::vector<Worker> workers_;
  std::vector<uint16_t> out_;
  std::string name_;
};

}  // namespace

void add_onednn_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage,
                      std::vector<Peer>& peers) {
  if (avx512_bf16_loops() == nullptr) return;  // its bf16 products would be emulated
  peers.push_back({"oneDNN", [copies, storage](const Context& context) {
                     return std::make_unique<OneDnnCall>(context, copies, storage);
                   }});
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet

// Pools, pages, and pages that travel.
#include <cstring>
#include <tuple>

#include "capi/capi.h"
#include "gannet/kv_pool.h"
#include "gannet/kv_transfer.h"

using namespace gannet;
using namespace gannet::capi;

// A pool goes before the memory that it came from.
struct gannet_latent_pool {
  Memory memory;
  LatentPool pool;
};
struct gannet_index_k_pool {
  Memory memory;
  IndexKPool pool;
};
struct gannet_page_allocator {
  PageAllocator allocator;
};
struct gannet_page_list {
  PageList list;
};

namespace {

LatentPoolOptions options_of(const char* function, const gannet_latent_pool_options* options) {
  const gannet_latent_pool_options c = read(function, "options", options);
  return {.num_layers = c.num_layers,
          .format = enum_of(function, "format", c.format, LatentFormat::kE4m3PerToken),
          .geometry = {c.latent_dim, c.rope_dim},
          .num_pages = c.num_pages,
          .page_size = c.page_size,
          .page_stride_bytes = c.page_stride_bytes,
          .scale = c.scale};
}

IndexKPoolOptions options_of(const char* function, const gannet_index_k_pool_options* options) {
  const gannet_index_k_pool_options c = read(function, "options", options);
  const std::span<const int32_t> layers = span_of(function, "layers", c.layers, c.num_layers);
  return {.layers = {layers.begin(), layers.end()},
          .format = enum_of(function, "format", c.format, IndexKFormat::kE4m3),
          .scale_format = enum_of(function, "scale_format", c.scale_format, ScaleFormat::kPowerOfTwo),
          .head_dim = c.head_dim,
          .num_pages = c.num_pages,
          .page_size = c.page_size,
          .page_stride_bytes = c.page_stride_bytes,
          .hadamard = flag_of(function, "hadamard", c.hadamard)};
}

template <class Pool, class COptions, class Handle>
gannet_status create_pool(const char* function, const COptions* options, const gannet_memory* memory, Handle** out) {
  return guard(function, [&] {
    *given(function, "out", out) = nullptr;
    const auto o = options_of(function, options);
    Memory m(function, memory, options->device);
    Pool pool(o, m.resource());
    *out = new Handle{std::move(m), std::move(pool)};
  });
}

gannet_pool_sizes to_c(const PoolSizes& s) {
  return {sizeof(gannet_pool_sizes), s.token_bytes,        s.page_bytes,
          s.page_stride_bytes,       s.layer_stride_bytes, s.total_bytes};
}

template <class Move>
std::vector<Move> moves_of(const char* function, const gannet_move* moves, int64_t num_moves) {
  std::vector<Move> all;
  for (const gannet_move& m : span_of(function, "moves", moves, num_moves)) all.push_back({m.from, m.to});
  return all;
}

}  // namespace

// ---- memory -------------------------------------------------------------------------------------------------------

gannet_status gannet_latent_pool_sizes_of(const gannet_latent_pool_options* options, gannet_pool_sizes* out) {
  constexpr const char* kName = "gannet_latent_pool_sizes_of";
  return guard(kName, [&] { write_struct(kName, "out", to_c(latent_pool_sizes(options_of(kName, options))), out); });
}

gannet_status gannet_index_k_pool_sizes_of(const gannet_index_k_pool_options* options, gannet_pool_sizes* out) {
  constexpr const char* kName = "gannet_index_k_pool_sizes_of";
  return guard(kName, [&] { write_struct(kName, "out", to_c(index_k_pool_sizes(options_of(kName, options))), out); });
}

gannet_status gannet_latent_pool_create(const gannet_latent_pool_options* options, const gannet_memory* memory,
                                        gannet_latent_pool** out) {
  return create_pool<LatentPool>("gannet_latent_pool_create", options, memory, out);
}

void gannet_latent_pool_free(gannet_latent_pool** pool) { free_handle(pool); }

gannet_status gannet_index_k_pool_create(const gannet_index_k_pool_options* options, const gannet_memory* memory,
                                         gannet_index_k_pool** out) {
  return create_pool<IndexKPool>("gannet_index_k_pool_create", options, memory, out);
}

void gannet_index_k_pool_free(gannet_index_k_pool** pool) { free_handle(pool); }

gannet_status gannet_latent_pool_layer(const gannet_latent_pool* pool, int32_t layer, gannet_latent_cache* out) {
  constexpr const char* kName = "gannet_latent_pool_layer";
  return guard(kName, [&] { write_struct(kName, "out", to_c(given(kName, "pool", pool)->pool.layer(layer)), out); });
}

gannet_status gannet_index_k_pool_layer(const gannet_index_k_pool* pool, int32_t layer, gannet_index_cache* out) {
  constexpr const char* kName = "gannet_index_k_pool_layer";
  return guard(kName, [&] { write_struct(kName, "out", to_c(given(kName, "pool", pool)->pool.layer(layer)), out); });
}

// ---- pages --------------------------------------------------------------------------------------------------------

gannet_status gannet_page_allocator_create(int64_t num_pages, gannet_page_allocator** out) {
  constexpr const char* kName = "gannet_page_allocator_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    *out = new gannet_page_allocator{PageAllocator(num_pages)};
  });
}

void gannet_page_allocator_free(gannet_page_allocator** allocator) { free_handle(allocator); }

int64_t gannet_page_allocator_num_free(const gannet_page_allocator* allocator) {
  return allocator == nullptr ? -1 : allocator->allocator.num_free();
}

gannet_status gannet_page_list_acquire(gannet_page_allocator* allocator, int64_t count, gannet_page_list** out) {
  constexpr const char* kName = "gannet_page_list_acquire";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    *out = new gannet_page_list{given(kName, "allocator", allocator)->allocator.acquire(count)};
  });
}

gannet_status gannet_page_list_share(const gannet_page_list* list, int64_t begin, int64_t count,
                                     gannet_page_list** out) {
  constexpr const char* kName = "gannet_page_list_share";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    *out = new gannet_page_list{given(kName, "list", list)->list.share(begin, count)};
  });
}

gannet_status gannet_page_list_append(gannet_page_list* list, gannet_page_list** tail) {
  constexpr const char* kName = "gannet_page_list_append";
  return guard(kName, [&] {
    given(kName, "tail", *given(kName, "tail", tail));
    given(kName, "list", list)->list.append(std::move((*tail)->list));
    free_handle(tail);
  });
}

gannet_status gannet_page_list_truncate(gannet_page_list* list, int64_t count) {
  constexpr const char* kName = "gannet_page_list_truncate";
  return guard(kName, [&] { given(kName, "list", list)->list.truncate(count); });
}

void gannet_page_list_free(gannet_page_list** list) { free_handle(list); }

const int32_t* gannet_page_list_ids(const gannet_page_list* list, int64_t* count) {
  if (count != nullptr) *count = list == nullptr ? 0 : list->list.size();
  return list == nullptr ? nullptr : list->list.ids().data();
}

// ---- movement -----------------------------------------------------------------------------------------------------

gannet_status gannet_copy_pages(const gannet_layer* layers, int32_t num_layers, const gannet_move* moves,
                                int64_t num_moves, void* stream) {
  constexpr const char* kName = "gannet_copy_pages";
  return guard(kName, [&] {
    copy_pages(layers_of(kName, layers, num_layers), moves_of<PageMove>(kName, moves, num_moves), {stream});
  });
}

gannet_status gannet_copy_slots(const gannet_layer* layers, int32_t num_layers, const gannet_move* moves,
                                int64_t num_moves, void* stream) {
  constexpr const char* kName = "gannet_copy_slots";
  return guard(kName, [&] {
    copy_slots(layers_of(kName, layers, num_layers), moves_of<SlotMove>(kName, moves, num_moves), {stream});
  });
}

gannet_status gannet_page_layout_of(const gannet_layer* layer, gannet_page_layout* out) {
  constexpr const char* kName = "gannet_page_layout_of";
  return guard(kName, [&] {
    const PageLayout l = page_layout(layers_of(kName, given(kName, "layer", layer), 1)[0]);
    gannet_page_layout c{};
    c.page_size = l.page_size;
    c.latent_format = static_cast<gannet_latent_format>(l.latent_format);
    c.latent_dim = l.geometry.latent_dim;
    c.rope_dim = l.geometry.rope_dim;
    c.latent_scale = l.latent_scale;
    c.has_index = l.has_index ? 1 : 0;
    c.latent_page_bytes = l.latent_page_bytes;
    c.index_format = static_cast<gannet_index_k_format>(l.index_format);
    c.index_scale_format = static_cast<gannet_scale_format>(l.index_scale_format);
    c.index_head_dim = l.index_head_dim;
    c.index_hadamard = l.index_hadamard ? 1 : 0;
    c.index_page_bytes = l.index_page_bytes;
    write_struct(kName, "out", c, out);
  });
}

int32_t gannet_page_layouts_equal(const gannet_page_layout* a, const gannet_page_layout* b) {
  if (a == nullptr || b == nullptr) return 0;
  const auto fields = [](const gannet_page_layout& l) {
    return std::tuple(l.page_size, l.latent_format, l.latent_dim, l.rope_dim, l.latent_scale, l.has_index,
                      l.latent_page_bytes, l.index_format, l.index_scale_format, l.index_head_dim, l.index_hadamard,
                      l.index_page_bytes);
  };
  return fields(*a) == fields(*b) ? 1 : 0;
}

gannet_status gannet_exported_bytes(const gannet_layer* layers, int32_t num_layers, int64_t num_pages, int64_t* out) {
  constexpr const char* kName = "gannet_exported_bytes";
  return guard(kName, [&] {
    *given(kName, "out", out) = 0;
    *out = exported_bytes(layers_of(kName, layers, num_layers), num_pages);
  });
}

gannet_status gannet_export_pages(const gannet_layer* layers, int32_t num_layers, const int32_t* pages,
                                  int64_t num_pages, void* buffer, size_t buffer_bytes, void* stream) {
  constexpr const char* kName = "gannet_export_pages";
  return guard(kName, [&] {
    if (buffer_bytes > 0) given(kName, "buffer", buffer);
    export_pages(layers_of(kName, layers, num_layers), span_of(kName, "pages", pages, num_pages),
                 {static_cast<std::byte*>(buffer), buffer_bytes}, {stream});
  });
}

gannet_status gannet_import_pages(const gannet_layer* layers, int32_t num_layers, const int32_t* pages,
                                  int64_t num_pages, const void* buffer, size_t buffer_bytes, void* stream) {
  constexpr const char* kName = "gannet_import_pages";
  return guard(kName, [&] {
    if (buffer_bytes > 0) given(kName, "buffer", buffer);
    import_pages(layers_of(kName, layers, num_layers), span_of(kName, "pages", pages, num_pages),
                 {static_cast<const std::byte*>(buffer), buffer_bytes}, {stream});
  });
}

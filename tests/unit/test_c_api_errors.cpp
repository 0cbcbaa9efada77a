// What the C API refuses: every status, and every kind of misuse that it can see.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "unit/c_views.h"

namespace gannet_test {
namespace {

/// Expects a status and a part of its text; for calls in tables.
struct Refused {
  const char* text;
  std::function<gannet_status()> call;
  gannet_status status = GANNET_INVALID_ARGUMENT;
};

void expect_refused(const std::vector<Refused>& list) {
  for (const Refused& r : list) {
    const gannet_status status = r.call();
    EXPECT_EQ(status, r.status) << gannet_status_name(status) << ": " << gannet_last_error() << "\nwanted: " << r.text;
    EXPECT_NE(std::string(gannet_last_error()).find(r.text), std::string::npos)
        << "wanted: " << r.text << "\ngot: " << gannet_last_error();
  }
}

template <class T>
T sized() {
  T x{};
  x.struct_size = sizeof x;
  return x;
}

/// A problem of one request and one row for `mla`, with all that it takes; every error starts from here.
struct Fixture {
  Fixture() {
    must(gannet_context_create(nullptr, &context));
    auto options = sized<gannet_latent_pool_options>();
    options.num_layers = 1;
    options.format = GANNET_LATENT_F32;
    options.latent_dim = 512;
    options.rope_dim = 64;
    options.num_pages = 3;
    options.page_size = 64;
    must(gannet_latent_pool_create(&options, nullptr, &pool));
    cache = sized<gannet_latent_cache>();
    must(gannet_latent_pool_layer(pool, 0, &cache));
    layer.latent = &cache;
    config = sized<gannet_backend_config>();
    config.num_heads = 2;
    config.latent_dim = 512;
    config.rope_dim = 64;
    config.qk_nope_head_dim = config.v_head_dim = 128;
    config.softmax_scale = 0.1f;
    config.page_size = 64;
    config.max_context_len = 1024;
    must(gannet_backend_create(context, &config, nullptr, nullptr, &backend));
    must(gannet_backend_bind(backend, &layer, 1));
    pages = gannet_pages_padded(gannet_tensor_2d(table, GANNET_I32, 1, 2));
    step = sized<gannet_step>();
    step.seq_lens = lens;
    step.num_requests = 1;
    step.q_len = 1;
    step.pages = &pages;
    kv = sized<gannet_kv_rows>();
    kv.latent = gannet_tensor_2d(row.data(), GANNET_F32, 1, 512);
    kv.rope = gannet_tensor_2d(row.data(), GANNET_F32, 1, 64);
    attend = sized<gannet_attend_call>();
    attend.q = gannet_tensor_3d(q.data(), GANNET_F32, 1, 2, 576);
    attend.write = GANNET_WRITE_ROWS;
    attend.kv = &kv;
    attend.attend = GANNET_ATTEND_ALL;
    attend.out = gannet_tensor_3d(out.data(), GANNET_F32, 1, 2, 512);
    topk.op = {sizeof topk, GANNET_OP_TOPK};
    topk.logits = gannet_tensor_2d(q.data(), GANNET_F32, 2, 8);
    topk.lens = gannet_tensor_1d(lens, GANNET_I32, 2);
    topk.positions = gannet_tensor_2d(positions, GANNET_I32, 2, 4);
    topk.counts = gannet_tensor_1d(counts, GANNET_I32, 2);
  }
  ~Fixture() {
    gannet_backend_free(&backend);
    gannet_latent_pool_free(&pool);
    gannet_context_free(&context);
  }
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  gannet_context* context = nullptr;
  gannet_latent_pool* pool = nullptr;
  gannet_latent_cache cache{};
  gannet_layer layer{};
  gannet_backend_config config{};
  gannet_backend* backend = nullptr;
  const int32_t table[2] = {2, 1}, lens[2] = {3, 1};
  gannet_page_table pages{};
  gannet_step step{};
  std::vector<float> row = std::vector<float>(512), q = std::vector<float>(2 * 576), out = std::vector<float>(2 * 512);
  gannet_kv_rows kv{};
  gannet_attend_call attend{};
  gannet_topk topk{};
  int32_t positions[8], counts[2];
};

TEST(CApi, VersionsAndNames) {
  EXPECT_EQ(gannet_check_abi(), GANNET_OK);
  EXPECT_EQ(gannet_check_abi_of(GANNET_C_ABI + 1), GANNET_UNSUPPORTED);
  EXPECT_STREQ(gannet_last_error(),
               (std::string("[gannet_check_abi] the program was compiled for ABI 2; accepted: 1 (gannet ") +
                gannet_version() + ")")
                   .c_str());
  const char* names[] = {"ok",           "invalid argument", "unsupported",   "out of memory",
                         "device error", "corrupt file",     "internal error"};
  for (gannet_status s = GANNET_OK; s <= GANNET_INTERNAL; ++s) EXPECT_STREQ(gannet_status_name(s), names[s]);
  EXPECT_STREQ(gannet_status_name(99), "unknown");
  EXPECT_STREQ(gannet_status_name(-1), "unknown");
}

TEST(CApi, TextsAreOfTheThread) {
  EXPECT_NE(gannet_gate_wait(nullptr, 0), GANNET_OK);
  const std::string mine = gannet_last_error();
  EXPECT_EQ(mine, "[gannet_gate_wait] gate is null; accepted: a pointer");
  std::thread([] {
    EXPECT_STREQ(gannet_last_error(), "");
    EXPECT_NE(gannet_gate_open(nullptr, 0), GANNET_OK);
    EXPECT_STREQ(gannet_last_error(), "[gannet_gate_open] gate is null; accepted: a pointer");
  }).join();
  EXPECT_EQ(gannet_last_error(), mine);
  EXPECT_EQ(gannet_check_abi(), GANNET_OK);
  EXPECT_EQ(gannet_last_error(), mine) << "a call that succeeds leaves it";
}

TEST(CApi, EveryStatusHasACause) {
  Fixture f;
  gannet_topk half = f.topk;
  half.logits.dtype = GANNET_F16;
  gannet_page_allocator* allocator = nullptr;
  must(gannet_page_allocator_create(4, &allocator));
  gannet_page_list* list = nullptr;
  gannet_gate* gate = nullptr;
  must(gannet_gate_create(1, &gate));
  must(gannet_gate_fail(gate, 0, "the link is down"));
  must(gannet_backend_prepare(f.backend, &f.step));
  auto hooks = sized<gannet_layer_hooks>();
  expect_refused({
      {"[topk] logits is fp16; accepted: fp32 or bf16 (convert the tensor)",
       [&] { return gannet_run_once(f.context, &half.op, nullptr); }, GANNET_UNSUPPORTED},
      {"[PageAllocator::acquire] 9 pages are wanted; 3 of 3 are free",
       [&] { return gannet_page_list_acquire(allocator, 9, &list); }, GANNET_OUT_OF_MEMORY},
      {"the rows of layer 0 did not come: the link is down", [&] { return gannet_gate_wait(gate, 0); }, GANNET_DEVICE},
      {"[layer hook] wait for layer 0 returned 5 (corrupt file)",
       [&] {
         hooks.wait = [](void*, int32_t) -> gannet_status { return GANNET_CORRUPT_FILE; };
         must(gannet_backend_set_layer_hooks(f.backend, &hooks));
         must(gannet_backend_prepare(f.backend, &f.step));
         return gannet_backend_attend(f.backend, &f.attend);
       },
       GANNET_CORRUPT_FILE},
      // Whatever else a callback of C++ throws ends here, and goes no further.
      {"[gannet_backend_attend] not one of ours",
       [&] {
         hooks.wait = [](void*, int32_t) -> gannet_status { throw std::runtime_error("not one of ours"); };
         must(gannet_backend_set_layer_hooks(f.backend, &hooks));
         must(gannet_backend_prepare(f.backend, &f.step));
         return gannet_backend_attend(f.backend, &f.attend);
       },
       GANNET_INTERNAL},
      {"[gannet_backend_attend] an exception of an unknown type",
       [&] {
         hooks.wait = [](void*, int32_t) -> gannet_status { throw 7; };
         must(gannet_backend_set_layer_hooks(f.backend, &hooks));
         must(gannet_backend_prepare(f.backend, &f.step));
         return gannet_backend_attend(f.backend, &f.attend);
       },
       GANNET_INTERNAL},
      {"[gannet_backend_attend] there is no memory",
       [&] {
         hooks.wait = [](void*, int32_t) -> gannet_status { throw std::bad_alloc(); };
         must(gannet_backend_set_layer_hooks(f.backend, &hooks));
         must(gannet_backend_prepare(f.backend, &f.step));
         return gannet_backend_attend(f.backend, &f.attend);
       },
       GANNET_OUT_OF_MEMORY},
  });
  EXPECT_EQ(list, nullptr);
  gannet_gate_free(&gate);
  gannet_page_allocator_free(&allocator);
}

// ---- null ---------------------------------------------------------------------------------------------------------

TEST(CApi, NullIsRefusedByName) {
  Fixture f;
  gannet_plan* plan = nullptr;
  gannet_backend* backend = nullptr;
  gannet_latent_pool* latent = nullptr;
  gannet_index_k_pool* index = nullptr;
  gannet_page_list* list = nullptr;
  gannet_latent_cache cache{};
  gannet_index_cache index_cache{};
  auto sizes = sized<gannet_pool_sizes>();
  auto info = sized<gannet_step_info>();
  auto chunk = sized<gannet_prefix_chunk>();
  auto tensors = sized<gannet_step_tensors>();
  auto capabilities = sized<gannet_capabilities>();
  const auto lo = [] {
    auto o = sized<gannet_latent_pool_options>();
    o.num_layers = 1;
    o.latent_dim = 512;
    o.rope_dim = 64;
    o.num_pages = 1;
    o.page_size = 64;
    return o;
  }();
  const auto io = sized<gannet_index_k_pool_options>();
  const auto capture = sized<gannet_capture_shape>();
  const auto shared = sized<gannet_shared_step>();
  const auto to = [] {
    auto o = sized<gannet_shared_page_table_options>();
    o.num_requests = o.page_size = 1;
    o.max_seq_len = 4;
    return o;
  }();
  gannet_shared_page_table *table = nullptr, *not_made = nullptr;
  must(gannet_shared_page_table_create(&to, nullptr, &table));
  const auto draft = sized<gannet_draft>();
  const auto select = sized<gannet_select_call>();
  const auto prefill = sized<gannet_dense_prefill_call>();
  const auto pass = sized<gannet_prefix_pass_call>();
  const auto selection = sized<gannet_selection>();
  const gannet_tensor tensor{};
  const int32_t page = 1;
  int64_t bytes = 0;
  must(gannet_plan_create(f.context, &f.topk.op, nullptr, &plan));
  gannet_plan* none = nullptr;
  const gannet_layer no_latent = {nullptr, nullptr};
  gannet_step no_lens = f.step, no_pages = f.step;
  no_lens.seq_lens = nullptr;
  no_pages.pages = nullptr;
  gannet_attend_call no_kv = f.attend, no_selection = f.attend;
  no_kv.kv = nullptr;
  no_selection.attend = GANNET_ATTEND_SELECTION;
  gannet_mla_decode no_cache{};
  no_cache.op = {sizeof no_cache, GANNET_OP_MLA_DECODE};
  gannet_mla_decode no_table = no_cache;
  no_table.cache = &f.cache;
  must(gannet_backend_prepare(f.backend, &f.step));
  expect_refused({
      {"[gannet_context_create] out is null", [&] { return gannet_context_create(nullptr, nullptr); }},
      {"[gannet_plan_create] context is null", [&] { return gannet_plan_create(nullptr, &f.topk.op, nullptr, &none); }},
      {"[gannet_plan_create] args is null", [&] { return gannet_plan_create(f.context, nullptr, nullptr, &none); }},
      {"[gannet_plan_create] out is null", [&] { return gannet_plan_create(f.context, &f.topk.op, nullptr, nullptr); }},
      {"[gannet_plan_run] plan is null", [&] { return gannet_plan_run(nullptr, &f.topk.op, nullptr, 0, nullptr); }},
      {"[gannet_plan_run] args is null", [&] { return gannet_plan_run(plan, nullptr, nullptr, 0, nullptr); }},
      {"[gannet_plan_run] workspace is null", [&] { return gannet_plan_run(plan, &f.topk.op, nullptr, 64, nullptr); }},
      {"[gannet_run_once] context is null", [&] { return gannet_run_once(nullptr, &f.topk.op, nullptr); }},
      {"[gannet_run_once] args is null", [&] { return gannet_run_once(f.context, nullptr, nullptr); }},
      {"[mla_decode] cache is null", [&] { return gannet_run_once(f.context, &no_cache.op, nullptr); }},
      {"[mla_decode] pages is null", [&] { return gannet_run_once(f.context, &no_table.op, nullptr); }},
      {"visit is null", [&] { return gannet_list_implementations(nullptr, nullptr); }},
      {"options is null", [&] { return gannet_latent_pool_sizes_of(nullptr, &sizes); }},
      {"out is null", [&] { return gannet_latent_pool_sizes_of(&lo, nullptr); }},
      {"options is null", [&] { return gannet_index_k_pool_sizes_of(nullptr, &sizes); }},
      {"options is null", [&] { return gannet_latent_pool_create(nullptr, nullptr, &latent); }},
      {"out is null", [&] { return gannet_latent_pool_create(&lo, nullptr, nullptr); }},
      {"options is null", [&] { return gannet_index_k_pool_create(nullptr, nullptr, &index); }},
      {"out is null", [&] { return gannet_index_k_pool_create(&io, nullptr, nullptr); }},
      {"pool is null", [&] { return gannet_latent_pool_layer(nullptr, 0, &cache); }},
      {"out is null", [&] { return gannet_latent_pool_layer(f.pool, 0, nullptr); }},
      {"pool is null", [&] { return gannet_index_k_pool_layer(nullptr, 0, &index_cache); }},
      {"out is null", [&] { return gannet_page_allocator_create(4, nullptr); }},
      {"allocator is null", [&] { return gannet_page_list_acquire(nullptr, 1, &list); }},
      {"list is null", [&] { return gannet_page_list_share(nullptr, 0, 0, &list); }},
      {"tail is null", [&] { return gannet_page_list_append(nullptr, &list); }},
      {"tail is null", [&] { return gannet_page_list_append(nullptr, nullptr); }},
      {"list is null", [&] { return gannet_page_list_truncate(nullptr, 0); }},
      {"layers is null", [&] { return gannet_copy_pages(nullptr, 1, nullptr, 0, nullptr); }},
      {"moves is null", [&] { return gannet_copy_pages(&f.layer, 1, nullptr, 1, nullptr); }},
      {"moves is null", [&] { return gannet_copy_slots(&f.layer, 1, nullptr, 1, nullptr); }},
      {"layers.latent is null", [&] { return gannet_copy_pages(&no_latent, 1, nullptr, 0, nullptr); }},
      {"out is null", [&] { return gannet_exported_bytes(&f.layer, 1, 1, nullptr); }},
      {"pages is null", [&] { return gannet_export_pages(&f.layer, 1, nullptr, 1, &bytes, 8, nullptr); }},
      {"buffer is null", [&] { return gannet_export_pages(&f.layer, 1, &page, 1, nullptr, 8, nullptr); }},
      {"buffer is null", [&] { return gannet_import_pages(&f.layer, 1, &page, 1, nullptr, 8, nullptr); }},
      {"context is null", [&] { return gannet_backend_create(nullptr, &f.config, nullptr, nullptr, &backend); }},
      {"config is null", [&] { return gannet_backend_create(f.context, nullptr, nullptr, nullptr, &backend); }},
      {"out is null", [&] { return gannet_backend_create(f.context, &f.config, nullptr, nullptr, nullptr); }},
      {"backend is null", [&] { return gannet_backend_capabilities(nullptr, &capabilities); }},
      {"out is null", [&] { return gannet_backend_capabilities(f.backend, nullptr); }},
      {"visit is null", [&] { return gannet_backend_implementations(f.backend, nullptr, nullptr); }},
      {"backend is null", [&] { return gannet_backend_bind(nullptr, &f.layer, 1); }},
      {"layers is null", [&] { return gannet_backend_bind(f.backend, nullptr, 1); }},
      {"backend is null", [&] { return gannet_backend_set_layer_hooks(nullptr, nullptr); }},
      {"backend is null", [&] { return gannet_backend_prepare(nullptr, &f.step); }},
      {"step is null", [&] { return gannet_backend_prepare(f.backend, nullptr); }},
      {"seq_lens is null", [&] { return gannet_backend_prepare(f.backend, &no_lens); }},
      {"pages is null", [&] { return gannet_backend_prepare(f.backend, &no_pages); }},
      {"backend is null", [&] { return gannet_backend_capture(nullptr, &capture); }},
      {"shape is null", [&] { return gannet_backend_capture(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_refresh(nullptr, &f.step, 1); }},
      {"step is null", [&] { return gannet_backend_refresh(f.backend, nullptr, 1); }},
      {"options is null", [&] { return gannet_shared_page_table_create(nullptr, nullptr, &not_made); }},
      {"out is null", [&] { return gannet_shared_page_table_create(&to, nullptr, nullptr); }},
      {"table is null",
       [&] { return gannet_shared_page_table_refresh(nullptr, 1, nullptr, 0, nullptr, nullptr, nullptr); }},
      {"seq_lens is null",
       [&] { return gannet_shared_page_table_refresh(table, 1, nullptr, 1, &f.pages, nullptr, nullptr); }},
      {"pages is null",
       [&] { return gannet_shared_page_table_refresh(table, 1, f.lens, 1, nullptr, nullptr, nullptr); }},
      {"table is null", [&] { return gannet_shared_page_table_mark(nullptr, 1); }},
      {"table is null", [&] { return gannet_shared_page_table_tensors(nullptr, nullptr, nullptr); }},
      {"backend is null", [&] { return gannet_backend_capture_shared(nullptr, &capture, table); }},
      {"shape is null", [&] { return gannet_backend_capture_shared(f.backend, nullptr, table); }},
      {"table is null", [&] { return gannet_backend_capture_shared(f.backend, &capture, nullptr); }},
      {"backend is null", [&] { return gannet_backend_refresh_shared(nullptr, &shared); }},
      {"step is null", [&] { return gannet_backend_refresh_shared(f.backend, nullptr); }},
      {"table is null", [&] { return gannet_backend_refresh_shared(f.backend, &shared); }},
      {"backend is null", [&] { return gannet_backend_advance(nullptr, &draft); }},
      {"draft is null", [&] { return gannet_backend_advance(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_narrow(nullptr, nullptr, 0, nullptr, nullptr, 0); }},
      {"accepted is null", [&] { return gannet_backend_narrow(f.backend, nullptr, 1, nullptr, nullptr, 1); }},
      {"backend is null", [&] { return gannet_backend_step(nullptr, &info); }},
      {"out is null", [&] { return gannet_backend_step(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_set_stream(nullptr, nullptr); }},
      {"backend is null", [&] { return gannet_backend_step_tensors(nullptr, &tensors); }},
      {"out is null", [&] { return gannet_backend_step_tensors(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_prefix_chunk(nullptr, 0, &chunk); }},
      {"backend is null", [&] { return gannet_backend_write(nullptr, 0, GANNET_ROWS_ALL, &f.kv); }},
      {"kv is null", [&] { return gannet_backend_write(f.backend, 0, GANNET_ROWS_ALL, nullptr); }},
      {"backend is null", [&] { return gannet_backend_attend(nullptr, &f.attend); }},
      {"call is null", [&] { return gannet_backend_attend(f.backend, nullptr); }},
      {"kv is null", [&] { return gannet_backend_attend(f.backend, &no_kv); }},
      {"selection is null", [&] { return gannet_backend_attend(f.backend, &no_selection); }},
      {"out is null", [&] { return gannet_backend_select(f.backend, &select); }},
      {"call is null", [&] { return gannet_backend_select(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_dense_prefill(nullptr, &prefill); }},
      {"call is null", [&] { return gannet_backend_dense_prefill(f.backend, nullptr); }},
      {"call is null", [&] { return gannet_backend_prefill_new_tokens(f.backend, nullptr); }},
      {"latent is null", [&] { return gannet_backend_gather_prefix(f.backend, 0, 0, nullptr, &tensor); }},
      {"rope is null", [&] { return gannet_backend_gather_prefix(f.backend, 0, 0, &tensor, nullptr); }},
      {"call is null", [&] { return gannet_backend_prefill_prefix(f.backend, nullptr); }},
      {"backend is null", [&] { return gannet_backend_prefill_prefix(nullptr, &pass); }},
      {"pool is null", [&] { return gannet_kv_head_of(nullptr, 1, 0, &cache); }},
      {"out is null", [&] { return gannet_kv_head_of(&f.cache, 1, 0, nullptr); }},
      {"t is null", [&] { return gannet_head_group_of(nullptr, 1, 0, nullptr); }},
      {"out is null", [&] { return gannet_head_group_of(&tensor, 1, 0, nullptr); }},
      {"from is null", [&] { return gannet_gather_selection(nullptr, nullptr, 0, &selection, nullptr); }},
      {"to is null", [&] { return gannet_gather_selection(&selection, nullptr, 0, nullptr, nullptr); }},
      {"out is null", [&] { return gannet_gate_create(1, nullptr); }},
      {"gate is null", [&] { return gannet_gate_close(nullptr, 0); }},
      {"gate is null", [&] { return gannet_gate_close(nullptr, -1); }},
      {"gate is null", [&] { return gannet_gate_open(nullptr, 0); }},
      {"gate is null", [&] { return gannet_gate_fail(nullptr, 0, "why"); }},
      {"gate is null", [&] { return gannet_gate_wait(nullptr, 0); }},
  });
  gannet_gate* gate = nullptr;
  must(gannet_gate_create(1, &gate));
  expect_refused({{"why is null", [&] { return gannet_gate_fail(gate, 0, nullptr); }}});
  gannet_gate_free(&gate);
  gannet_shared_page_table_free(&table);
  EXPECT_EQ(gannet_shared_page_table_generation(nullptr), 0u);
  EXPECT_EQ(gannet_plan_impl(nullptr), nullptr);
  EXPECT_EQ(gannet_plan_workspace_bytes(nullptr), 0u);
  EXPECT_EQ(gannet_backend_name(nullptr), nullptr);
  EXPECT_EQ(gannet_page_allocator_num_free(nullptr), -1);
  int64_t count = 7;
  EXPECT_EQ(gannet_page_list_ids(nullptr, &count), nullptr);
  EXPECT_EQ(count, 0);
  gannet_plan_free(&plan);
}

TEST(CApi, FreeingTwiceDoesNothing) {
  const auto twice = [](auto* handle, auto free) {
    free(&handle);
    EXPECT_EQ(handle, nullptr);
    free(&handle);
    free(nullptr);
  };
  gannet_context* context = nullptr;
  must(gannet_context_create(nullptr, &context));
  Fixture f;
  gannet_plan* plan = nullptr;
  must(gannet_plan_create(context, &f.topk.op, nullptr, &plan));
  gannet_backend* backend = nullptr;
  must(gannet_backend_create(context, &f.config, "mla", nullptr, &backend));
  must(gannet_backend_bind(backend, &f.layer, 1));
  // A context that goes first is kept by what was made from it.
  twice(context, gannet_context_free);
  std::vector<std::byte> workspace(gannet_plan_workspace_bytes(plan));
  EXPECT_EQ(gannet_plan_run(plan, &f.topk.op, workspace.data(), workspace.size(), nullptr), GANNET_OK);
  EXPECT_EQ(gannet_backend_prepare(backend, &f.step), GANNET_OK);
  EXPECT_EQ(gannet_backend_attend(backend, &f.attend), GANNET_OK) << gannet_last_error();
  twice(plan, gannet_plan_free);
  twice(backend, gannet_backend_free);
  gannet_gate* gate = nullptr;
  must(gannet_gate_create(1, &gate));
  twice(gate, gannet_gate_free);
  gannet_page_allocator* pages = nullptr;
  must(gannet_page_allocator_create(2, &pages));
  gannet_page_list* list = nullptr;
  must(gannet_page_list_acquire(pages, 1, &list));
  twice(list, gannet_page_list_free);
  twice(pages, gannet_page_allocator_free);
  auto options = sized<gannet_shared_page_table_options>();
  options.num_requests = options.page_size = 1;
  options.max_seq_len = 4;
  gannet_shared_page_table* table = nullptr;
  must(gannet_shared_page_table_create(&options, nullptr, &table));
  twice(table, gannet_shared_page_table_free);
}

// ---- structs and enums --------------------------------------------------------------------------------------------

/// Calls `call` with the struct's size missing, too small, beyond any, and larger with and without something behind.
template <class T>
void expect_sized(const char* name, const T& good, const std::function<gannet_status(const T&)>& call) {
  SCOPED_TRACE(name);
  struct {
    T known;
    unsigned char more[16];
  } big;
  const std::string said = std::string(name) + ".struct_size is ";
  for (const size_t size : {size_t{0}, sizeof(T) - 1, size_t{1} << 20}) {
    T bad = good;
    std::memcpy(static_cast<void*>(&bad), &size, sizeof size);  // the size comes first in every struct
    EXPECT_EQ(call(bad), GANNET_INVALID_ARGUMENT);
    EXPECT_NE(std::string(gannet_last_error()).find(said + std::to_string(size) + "; accepted: "), std::string::npos)
        << gannet_last_error();
  }
  std::memset(static_cast<void*>(&big), 0, sizeof big);
  std::memcpy(static_cast<void*>(&big.known), &good, sizeof(T));
  const size_t size = sizeof big;
  std::memcpy(static_cast<void*>(&big.known), &size, sizeof size);
  EXPECT_EQ(call(big.known), GANNET_OK) << gannet_last_error();
  big.more[15] = 1;
  EXPECT_EQ(call(big.known), GANNET_UNSUPPORTED);
  EXPECT_NE(std::string(gannet_last_error()).find("is set; accepted: 0 beyond the"), std::string::npos)
      << gannet_last_error();
}

TEST(CApi, StructsCarryTheirSize) {
  Fixture f;
  must(gannet_backend_prepare(f.backend, &f.step));
  expect_sized<gannet_topk>("args", f.topk,
                            [&](const gannet_topk& x) { return gannet_run_once(f.context, &x.op, nullptr); });
  expect_sized<gannet_plan_options>("options", sized<gannet_plan_options>(), [&](const gannet_plan_options& x) {
    return gannet_run_once(f.context, &f.topk.op, &x);
  });
  expect_sized<gannet_context_options>("options", sized<gannet_context_options>(), [](const gannet_context_options& x) {
    gannet_context* c = nullptr;
    const gannet_status status = gannet_context_create(&x, &c);
    gannet_context_free(&c);
    return status;
  });
  gannet_executor executor = {sizeof executor, nullptr, 1,
                              [](void*, int64_t, gannet_task, void*) -> gannet_status { return GANNET_OK; }};
  expect_sized<gannet_executor>("executor", executor, [](const gannet_executor& x) {
    auto o = sized<gannet_context_options>();
    o.executor = &x;
    gannet_context* c = nullptr;
    const gannet_status status = gannet_context_create(&o, &c);
    gannet_context_free(&c);
    return status;
  });
  expect_sized<gannet_latent_cache>("layers.latent", f.cache, [&](const gannet_latent_cache& x) {
    const gannet_layer layer = {&x, nullptr};
    return gannet_copy_pages(&layer, 1, nullptr, 0, nullptr);
  });
  gannet_index_cache index = {sizeof index, f.out.data(), GANNET_INDEX_K_F32, 0, 16, 64, 3, 4096, {GANNET_CPU, 0}, 0};
  expect_sized<gannet_index_cache>("layers.index", index, [&](const gannet_index_cache& x) {
    const gannet_layer layer = {&f.cache, &x};
    return gannet_copy_pages(&layer, 1, nullptr, 0, nullptr);
  });
  expect_sized<gannet_page_table>("pages", f.pages, [&](const gannet_page_table& x) {
    gannet_step s = f.step;
    s.pages = &x;
    return gannet_backend_prepare(f.backend, &s);
  });
  expect_sized<gannet_step>("step", f.step,
                            [&](const gannet_step& x) { return gannet_backend_prepare(f.backend, &x); });
  expect_sized<gannet_kv_rows>(
      "kv", f.kv, [&](const gannet_kv_rows& x) { return gannet_backend_write(f.backend, 0, GANNET_ROWS_ALL, &x); });
  expect_sized<gannet_attend_call>("call", f.attend,
                                   [&](const gannet_attend_call& x) { return gannet_backend_attend(f.backend, &x); });
  expect_sized<gannet_backend_config>("config", f.config, [&](const gannet_backend_config& x) {
    gannet_backend* b = nullptr;
    const gannet_status status = gannet_backend_create(f.context, &x, nullptr, nullptr, &b);
    gannet_backend_free(&b);
    return status;
  });
  expect_sized<gannet_layer_hooks>("hooks", sized<gannet_layer_hooks>(), [&](const gannet_layer_hooks& x) {
    return gannet_backend_set_layer_hooks(f.backend, &x);
  });
  auto capture = sized<gannet_capture_shape>();
  capture.num_requests = capture.q_len = 1;
  expect_sized<gannet_capture_shape>(
      "shape", capture, [&](const gannet_capture_shape& x) { return gannet_backend_capture(f.backend, &x); });
  auto table_options = sized<gannet_shared_page_table_options>();
  table_options.num_requests = 1;
  table_options.page_size = 64;
  table_options.max_seq_len = 64;
  gannet_shared_page_table* table = nullptr;
  expect_sized<gannet_shared_page_table_options>("options", table_options,
                                                 [&](const gannet_shared_page_table_options& x) {
                                                   gannet_shared_page_table_free(&table);
                                                   return gannet_shared_page_table_create(&x, nullptr, &table);
                                                 });
  must(gannet_shared_page_table_create(&table_options, nullptr, &table));
  must(gannet_backend_bind(f.backend, &f.layer, 1));
  must(gannet_backend_capture_shared(f.backend, &capture, table));
  auto shared = sized<gannet_shared_step>();
  shared.table = table;
  shared.q_len = 1;
  expect_sized<gannet_shared_step>(
      "step", shared, [&](const gannet_shared_step& x) { return gannet_backend_refresh_shared(f.backend, &x); });
  gannet_shared_page_table_free(&table);
  must(gannet_backend_bind(f.backend, &f.layer, 1));
  expect_sized<gannet_draft>("draft", sized<gannet_draft>(), [&](const gannet_draft& x) {
    must(gannet_backend_prepare(f.backend, &f.step));
    return gannet_backend_advance(f.backend, &x);
  });
  const int32_t rows[1] = {-1};
  auto selection = sized<gannet_selection>();
  selection.slots = gannet_tensor_2d(f.positions, GANNET_I32, 1, 4);
  selection.lens = gannet_tensor_1d(f.counts, GANNET_I32, 1);
  expect_sized<gannet_selection>("from", selection, [&](const gannet_selection& x) {
    return gannet_gather_selection(&x, rows, 1, &selection, nullptr);
  });
  gannet_memory memory = {
      sizeof memory,
      nullptr,
      {GANNET_CPU, 0},
      [](void*, size_t bytes, size_t alignment) { return gannet::host_memory().allocate(bytes, alignment); },
      [](void*, void* p, size_t bytes, size_t alignment) { gannet::host_memory().deallocate(p, bytes, alignment); }};
  auto pool_options = sized<gannet_latent_pool_options>();
  pool_options.num_layers = 1;
  pool_options.latent_dim = 512;
  pool_options.rope_dim = 64;
  pool_options.num_pages = 1;
  pool_options.page_size = 64;
  const auto make_pool = [](const gannet_latent_pool_options& o, const gannet_memory* m) {
    gannet_latent_pool* p = nullptr;
    const gannet_status status = gannet_latent_pool_create(&o, m, &p);
    gannet_latent_pool_free(&p);
    return status;
  };
  expect_sized<gannet_memory>("memory", memory, [&](const gannet_memory& x) { return make_pool(pool_options, &x); });
  expect_sized<gannet_latent_pool_options>("options", pool_options,
                                           [&](const gannet_latent_pool_options& x) { return make_pool(x, nullptr); });
  auto index_options = sized<gannet_index_k_pool_options>();
  index_options.head_dim = 128;
  index_options.num_pages = 1;
  index_options.page_size = 64;
  expect_sized<gannet_index_k_pool_options>("options", index_options, [](const gannet_index_k_pool_options& x) {
    gannet_index_k_pool* p = nullptr;
    const gannet_status status = gannet_index_k_pool_create(&x, nullptr, &p);
    gannet_index_k_pool_free(&p);
    return status;
  });
}

/// Calls `call`, which fills a struct: with its size missing or too small nothing is written, with more room than is
/// known nothing behind that.
template <class T>
void expect_filled(const char* name, const std::function<gannet_status(T*)>& call) {
  SCOPED_TRACE(name);
  constexpr unsigned char kUntouched = 0xa5;
  struct Room {
    T known;
    unsigned char more[16];
  } room;
  auto* bytes = reinterpret_cast<unsigned char*>(&room);
  for (const size_t size : {size_t{0}, sizeof(T) - 1, size_t{1} << 20}) {
    std::memset(bytes, kUntouched, sizeof room);
    room.known.struct_size = size;
    EXPECT_EQ(call(&room.known), GANNET_INVALID_ARGUMENT);
    EXPECT_NE(std::string(gannet_last_error()).find("out.struct_size is " + std::to_string(size) + "; accepted: "),
              std::string::npos)
        << gannet_last_error();
    EXPECT_TRUE(std::all_of(bytes + sizeof size, bytes + sizeof room, [](unsigned char b) { return b == kUntouched; }));
  }
  std::memset(bytes, kUntouched, sizeof room);
  room.known.struct_size = sizeof(T);
  EXPECT_EQ(call(&room.known), GANNET_OK) << gannet_last_error();
  EXPECT_EQ(room.known.struct_size, sizeof(T));
  EXPECT_TRUE(std::all_of(room.more, room.more + sizeof room.more, [](unsigned char b) { return b == kUntouched; }));
  std::memset(room.more, 0, sizeof room.more);
  room.known.struct_size = sizeof room;
  EXPECT_EQ(call(&room.known), GANNET_OK) << gannet_last_error();
  EXPECT_EQ(room.known.struct_size, sizeof room) << "the caller's";
  EXPECT_TRUE(std::all_of(room.more, room.more + sizeof room.more, [](unsigned char b) { return b == 0; }));
}

TEST(CApi, StructsThatAreFilledKeepToTheirSize) {
  Fixture f;
  auto latent = sized<gannet_latent_pool_options>();
  latent.num_layers = latent.page_size = 1;
  latent.latent_dim = 512;
  latent.rope_dim = 64;
  latent.num_pages = 1;
  const int32_t layer = 0;
  auto index = sized<gannet_index_k_pool_options>();
  index.layers = &layer;
  index.num_layers = index.page_size = 1;
  index.head_dim = 128;
  index.num_pages = 1;
  gannet_index_k_pool* index_pool = nullptr;
  must(gannet_index_k_pool_create(&index, nullptr, &index_pool));
  expect_filled<gannet_pool_sizes>("gannet_latent_pool_sizes_of",
                                   [&](gannet_pool_sizes* out) { return gannet_latent_pool_sizes_of(&latent, out); });
  expect_filled<gannet_pool_sizes>("gannet_index_k_pool_sizes_of",
                                   [&](gannet_pool_sizes* out) { return gannet_index_k_pool_sizes_of(&index, out); });
  expect_filled<gannet_latent_cache>(
      "gannet_latent_pool_layer", [&](gannet_latent_cache* out) { return gannet_latent_pool_layer(f.pool, 0, out); });
  expect_filled<gannet_index_cache>("gannet_index_k_pool_layer", [&](gannet_index_cache* out) {
    return gannet_index_k_pool_layer(index_pool, 0, out);
  });
  expect_filled<gannet_latent_cache>("gannet_kv_head_of",
                                     [&](gannet_latent_cache* out) { return gannet_kv_head_of(&f.cache, 1, 0, out); });
  expect_filled<gannet_page_layout>("gannet_page_layout_of",
                                    [&](gannet_page_layout* out) { return gannet_page_layout_of(&f.layer, out); });
  expect_filled<gannet_capabilities>("gannet_backend_capabilities", [&](gannet_capabilities* out) {
    return gannet_backend_capabilities(f.backend, out);
  });
  const int32_t prefix[1] = {2}, extend[1] = {1};
  gannet_step step = f.step;
  step.prefix_lens = prefix;
  step.extend_lens = extend;
  step.num_extends = 1;
  must(gannet_backend_prepare(f.backend, &step));
  expect_filled<gannet_step_info>("gannet_backend_step",
                                  [&](gannet_step_info* out) { return gannet_backend_step(f.backend, out); });
  expect_filled<gannet_step_tensors>("gannet_backend_step_tensors", [&](gannet_step_tensors* out) {
    return gannet_backend_step_tensors(f.backend, out);
  });
  expect_filled<gannet_prefix_chunk>("gannet_backend_prefix_chunk", [&](gannet_prefix_chunk* out) {
    return gannet_backend_prefix_chunk(f.backend, 0, out);
  });
  gannet_index_k_pool_free(&index_pool);
}

TEST(CApi, EnumsFlagsAndTensorsAreChecked) {
  Fixture f;
  must(gannet_backend_prepare(f.backend, &f.step));
  const auto attend = [&](auto&& change) {
    return [&f, change] {
      gannet_attend_call c = f.attend;
      change(c);
      return gannet_backend_attend(f.backend, &c);
    };
  };
  const auto prepare = [&](auto&& change) {
    return [&f, change] {
      gannet_step s = f.step;
      change(s);
      return gannet_backend_prepare(f.backend, &s);
    };
  };
  const auto topk = [&](auto&& change) {
    return [&f, change] {
      gannet_topk t = f.topk;
      change(t);
      return gannet_run_once(f.context, &t.op, nullptr);
    };
  };
  const auto context = [](auto&& change) {
    return [change] {
      auto o = sized<gannet_context_options>();
      change(o);
      gannet_context* c = nullptr;
      return gannet_context_create(&o, &c);
    };
  };
  static const auto nothing = [](void*, int64_t, gannet_task, void*) -> gannet_status { return GANNET_OK; };
  static const gannet_executor no_workers = {sizeof no_workers, nullptr, 0, nothing};
  static const gannet_executor no_function = {sizeof no_function, nullptr, 1, nullptr};
  static const gannet_executor fine = {sizeof fine, nullptr, 1, nothing};
  using C = gannet_attend_call;
  using S = gannet_step;
  using T = gannet_topk;
  using O = gannet_context_options;
  const gannet_selection selection = sized<gannet_selection>();
  const gannet_plan_options three = {sizeof three, nullptr, 3}, unknown = {sizeof unknown, "fastest", 0};
  gannet_ragged_prefill causal{};
  causal.op = {sizeof causal, GANNET_OP_RAGGED_PREFILL};
  causal.causal = 2;
  gannet_rope rope{};
  rope.op = {sizeof rope, GANNET_OP_ROPE};
  rope.pairing = 5;
  gannet_merge_state merge{};
  merge.op = {sizeof merge, GANNET_OP_MERGE_STATE};
  merge.base = -1;
  gannet_latent_cache odd = f.cache;
  odd.format = 5;
  const gannet_layer odd_layer = {&odd, nullptr};
  gannet_tensor group{};
  gannet_backend* backend = nullptr;
  gannet_backend_config arch = f.config, heads = f.config;
  arch.arch = 2;
  heads.num_heads = 0;
  expect_refused({
      {"[gannet_backend_attend] q.rank is 5; accepted: 0 (absent) to 4", attend([](C& c) { c.q.rank = 5; })},
      {"q.rank is -1", attend([](C& c) { c.q.rank = -1; })},
      {"out.dtype is 7; accepted: 0 to 6", attend([](C& c) { c.out.dtype = 7; })},
      {"lse.device.kind is 2; accepted: 0 (cpu) or 1 (cuda)", attend([](C& c) {
         c.lse = c.out;
         c.lse.device.kind = 2;
       })},
      {"q.device.index is -1", attend([](C& c) { c.q.device.index = -1; })},
      {"rows is 3; accepted: 0 (all), 1 (prefill) or 2 (decode)", attend([](C& c) { c.rows = 3; })},
      {"write is 3; accepted: 1 (already written) or 2 (write rows)", attend([](C& c) {
         c.write = 3;
         c.kv = nullptr;
       })},
      {"write is 1 and kv is given", attend([](C& c) { c.write = GANNET_ALREADY_WRITTEN; })},
      {"[mla attend] write is not given", attend([](C& c) {
         c.write = GANNET_WRITE_NOT_GIVEN;
         c.kv = nullptr;
       })},
      {"attend is 3; accepted: 1 (all) or 2 (selection)", attend([](C& c) { c.attend = 3; })},
      {"attend is 1 and selection is given", attend([&](C& c) { c.selection = &selection; })},
      {"[mla attend] selection is not given", attend([](C& c) { c.attend = GANNET_SELECTION_NOT_GIVEN; })},
      {"[mla attend] layer is 1; accepted: 0 to 0", attend([](C& c) { c.layer = 1; })},
      {"seq_lens has -1 entries; accepted: 0 and more", prepare([](S& s) { s.num_requests = -1; })},
      {"prefix_lens is null", prepare([](S& s) { s.num_extends = 1; })},
      {"decode_bound is 3; accepted: 0 to 2", prepare([](S& s) { s.decode_bound = 3; })},
      {"args.kind is 0; accepted: 1 to 12", topk([](T& t) { t.op.kind = 0; })},
      {"args.kind is 13", topk([](T& t) { t.op.kind = 13; })},
      {"options.batch_invariant is 3; accepted: 0 or 1",
       [&] { return gannet_run_once(f.context, &f.topk.op, &three); }},
      {"impl is \"fastest\"; accepted: ", [&] { return gannet_run_once(f.context, &f.topk.op, &unknown); }},
      {"[ragged_prefill] causal is 2; accepted: 0 or 1",
       [&] { return gannet_run_once(f.context, &causal.op, nullptr); }},
      {"[rope] pairing is 5; accepted: 0 to 1", [&] { return gannet_run_once(f.context, &rope.op, nullptr); }},
      {"[merge_state] base is -1; accepted: 0 to 1", [&] { return gannet_run_once(f.context, &merge.op, nullptr); }},
      {"cache.format is 5; accepted: 0 to 4", [&] { return gannet_backend_bind(f.backend, &odd_layer, 1); }},
      {"config.arch is 2; accepted: 0 to 1",
       [&] { return gannet_backend_create(f.context, &arch, nullptr, nullptr, &backend); }},
      {"[mla config] num_heads is 0",
       [&] { return gannet_backend_create(f.context, &heads, nullptr, nullptr, &backend); }},
      {"backend is \"mlb\"; accepted: mla (for MLA), dsa (for DSA)",
       [&] { return gannet_backend_create(f.context, &f.config, "mlb", nullptr, &backend); }},
      {"no_overlap is 2; accepted: 0 or 1", context([](O& o) { o.no_overlap = 2; })},
      {"num_threads is -2; accepted: -1", context([](O& o) { o.num_threads = -2; })},
      {"num_threads is 2 and executor is given", context([](O& o) {
         o.num_threads = 2;
         o.executor = &fine;
       })},
      {"executor.num_workers is 0; accepted: 1 and more", context([](O& o) { o.executor = &no_workers; })},
      {"executor.parallel_for is null", context([](O& o) { o.executor = &no_function; })},
      {"kv_head is 2; accepted: 0 to 1", [&] { return gannet_kv_head_of(&f.cache, 2, 2, &odd); }},
      {"num_groups is 3; accepted: a divisor of the 2 heads",
       [&] { return gannet_head_group_of(&f.attend.q, 3, 0, &group); }},
      {"chunk is 0; accepted: below 0",
       [&] {
         must(gannet_backend_prepare(f.backend, &f.step));
         auto chunk = sized<gannet_prefix_chunk>();
         return gannet_backend_prefix_chunk(f.backend, 0, &chunk);
       }},
      {"num_requests is -1",
       [&] {
         const int32_t accepted[1] = {1};
         return gannet_backend_narrow(f.backend, accepted, 1, nullptr, nullptr, -1);
       }},
  });
  EXPECT_EQ(backend, nullptr) << "a failure leaves no handle";
}

TEST(CApi, CallsOutOfOrderAreRefused) {
  Fixture f;
  gannet_backend* fresh = nullptr;
  must(gannet_backend_create(f.context, &f.config, nullptr, nullptr, &fresh));
  auto info = sized<gannet_step_info>();
  auto draft = sized<gannet_draft>();
  gannet_step idle = sized<gannet_step>();
  gannet_plan* plan = nullptr;
  must(gannet_plan_create(f.context, &f.topk.op, nullptr, &plan));
  gannet_topk other = f.topk;
  other.logits = gannet_tensor_2d(f.q.data(), GANNET_F32, 2, 9);
  gannet_merge_state stranger{};
  stranger.op = {sizeof stranger, GANNET_OP_MERGE_STATE};
  expect_refused({
      {"[mla prepare] no caches are bound; call bind first", [&] { return gannet_backend_prepare(fresh, &f.step); }},
      {"[mla attend] no step is prepared; call prepare first",
       [&] { return gannet_backend_attend(f.backend, &f.attend); }},
      {"[mla step] no step is prepared", [&] { return gannet_backend_step(f.backend, &info); }},
      {"[mla advance] no step is prepared", [&] { return gannet_backend_advance(f.backend, &draft); }},
      {"[mla refresh] a batch of 1 requests of 1 rows was never captured; captured: none",
       [&] { return gannet_backend_refresh(f.backend, &f.step, 1); }},
      {"[mla attend] the step is idle",
       [&] {
         must(gannet_backend_prepare(f.backend, &idle));
         return gannet_backend_attend(f.backend, &f.attend);
       }},
      {"[topk] logits is fp32[2, 9]", [&] { return gannet_plan_run(plan, &other.op, nullptr, 0, nullptr); }},
      {"[gannet_plan_run] args.kind is 7 (merge_state); planned was topk",
       [&] { return gannet_plan_run(plan, &stranger.op, nullptr, 0, nullptr); }},
  });
  gannet_plan_free(&plan);
  gannet_backend_free(&fresh);
}

// ---- the caller's threads and memory ------------------------------------------------------------------------------

/// An executor that does `f` instead of its duty.
struct BadExecutor {
  explicit BadExecutor(std::function<gannet_status(int64_t, gannet_task, void*)> f) : run(std::move(f)) {
    const gannet_executor executor = {sizeof executor, this, 2,
                                      [](void* user, int64_t n, gannet_task task, void* data) {
                                        return static_cast<BadExecutor*>(user)->run(n, task, data);
                                      }};
    auto options = sized<gannet_context_options>();
    options.executor = &executor;
    must(gannet_context_create(&options, &context));
  }
  ~BadExecutor() { gannet_context_free(&context); }
  BadExecutor(const BadExecutor&) = delete;
  BadExecutor& operator=(const BadExecutor&) = delete;
  std::function<gannet_status(int64_t, gannet_task, void*)> run;
  gannet_context* context = nullptr;
};

TEST(CApi, ExecutorsThatDoNotDoTheirDutyAreCaught) {
  Fixture f;
  const auto run = [&](const char* text, std::function<gannet_status(int64_t, gannet_task, void*)> duty,
                       gannet_status status = GANNET_DEVICE) {
    BadExecutor bad(std::move(duty));
    expect_refused({{text, [&] { return gannet_run_once(bad.context, &f.topk.op, nullptr); }, status}});
  };
  run("[executor] parallel_for returned after 0 of ", [](int64_t, gannet_task, void*) { return GANNET_OK; });
  run("[executor] parallel_for returned 4 (device error)", [](int64_t, gannet_task, void*) { return GANNET_DEVICE; });
  run("[executor] parallel_for returned 77 (unknown)", [](int64_t, gannet_task, void*) { return 77; });
  run(
      "[executor] parallel_for returned 3 (out of memory)",
      [](int64_t, gannet_task, void*) { return GANNET_OUT_OF_MEMORY; }, GANNET_OUT_OF_MEMORY);
  run("[executor] parallel_for ran a task 0 as a worker 2; accepted: below ",
      [](int64_t, gannet_task task, void* data) {
        task(data, 0, 2);
        return GANNET_OK;
      });
  run("[executor] parallel_for ran a task ", [](int64_t n, gannet_task task, void* data) {
    task(data, n, 0);
    return GANNET_OK;
  });
  run(
      "[gannet_run_once] thrown through",
      [](int64_t, gannet_task, void*) -> gannet_status { throw std::runtime_error("thrown through"); },
      GANNET_INTERNAL);
}

TEST(CApi, MemoryThatCannotBeHadIsReported) {
  auto options = sized<gannet_latent_pool_options>();
  options.num_layers = 1;
  options.latent_dim = 512;
  options.rope_dim = 64;
  options.num_pages = 2;
  options.page_size = 64;
  alignas(4096) static std::byte block[8192];
  gannet_memory none = {sizeof none,
                        nullptr,
                        {GANNET_CPU, 0},
                        [](void*, size_t, size_t) -> void* { return nullptr; },
                        [](void*, void*, size_t, size_t) {}};
  gannet_memory odd = none, no_function = none, bad_device = none;
  odd.allocate = [](void*, size_t, size_t) -> void* { return block + 8; };
  no_function.deallocate = nullptr;
  bad_device.device = {2, 0};
  gannet_latent_pool* pool = nullptr;
  const auto with = [&](const gannet_memory& m) {
    return [&options, &pool, &m] { return gannet_latent_pool_create(&options, &m, &pool); };
  };
  expect_refused({
      {"[memory] allocate had no 294912 bytes", with(none), GANNET_OUT_OF_MEMORY},
      {"accepted: a multiple of", with(odd)},
      {"memory.deallocate is null", with(no_function)},
      {"memory.device.kind is 2; accepted: 0 (cpu) or 1 (cuda)", with(bad_device)},
  });
  if (gannet::cuda_device_count() == 0) {
    options.device = {GANNET_CUDA, 0};
    expect_refused({{"", [&] { return gannet_latent_pool_create(&options, nullptr, &pool); }, GANNET_UNSUPPORTED}});
  }
  EXPECT_EQ(pool, nullptr);
}

// ---- callbacks ----------------------------------------------------------------------------------------------------

TEST(CApi, GatesHoldReadersAndCarryTheReason) {
  Fixture f;
  gannet_gate* gate = nullptr;
  must(gannet_gate_create(1, &gate));
  auto hooks = sized<gannet_layer_hooks>();
  hooks.user = gate;
  hooks.wait = [](void* user, int32_t layer) { return gannet_gate_wait(static_cast<gannet_gate*>(user), layer); };
  must(gannet_backend_set_layer_hooks(f.backend, &hooks));
  must(gannet_gate_close(gate, -1));
  must(gannet_backend_prepare(f.backend, &f.step));
  std::thread loader([&] { must(gannet_gate_open(gate, 0)); });
  EXPECT_EQ(gannet_backend_attend(f.backend, &f.attend), GANNET_OK);
  loader.join();
  must(gannet_gate_close(gate, 0));
  must(gannet_gate_fail(gate, 0, "the host tier is gone"));
  expect_refused({{"[layer hook] wait for layer 0 returned 4 (device error): [LayerGate::wait] the rows of layer 0 did "
                   "not come: the host tier is gone",
                   [&] { return gannet_backend_attend(f.backend, &f.attend); }, GANNET_DEVICE},
                  {"layer is 1; accepted: 0 to 0", [&] { return gannet_gate_open(gate, 1); }}});
  gannet_backend_free(&f.backend);
  gannet_gate_free(&gate);
}

TEST(CApi, RecordsAndExpansionsThatFailPassTheirStatusOn) {
  Fixture f;
  const int32_t prefix[1] = {2}, extend[1] = {1};
  gannet_step step = f.step;
  step.prefix_lens = prefix;
  step.extend_lens = extend;
  step.num_extends = 1;
  auto hooks = sized<gannet_layer_hooks>();
  std::string log;
  hooks.user = &log;
  hooks.record = [](void* user, int32_t layer, gannet_layer_record record) -> gannet_status {
    *static_cast<std::string*>(user) += std::to_string(layer) + (record == GANNET_RECORD_WRITTEN ? "w" : "a");
    return GANNET_OUT_OF_MEMORY;
  };
  must(gannet_backend_set_layer_hooks(f.backend, &hooks));
  must(gannet_backend_prepare(f.backend, &step));
  must(gannet_backend_prepare(f.backend, &step));
  EXPECT_EQ(log, "0a") << "what it returned is dropped";
  expect_refused({{"[layer hook] record of layer 0 returned 3 (out of memory)",
                   [&] { return gannet_backend_write(f.backend, 0, GANNET_ROWS_ALL, &f.kv); }, GANNET_OUT_OF_MEMORY}});
  EXPECT_EQ(log, "0a0w");
  must(gannet_backend_set_layer_hooks(f.backend, nullptr));
  must(gannet_backend_prepare(f.backend, &step));
  std::vector<float> q(2 * 192), k(2 * 128);
  auto prefill = sized<gannet_dense_prefill_call>();
  prefill.q = gannet_tensor_3d(q.data(), GANNET_F32, 1, 2, 192);
  prefill.k_nope = gannet_tensor_3d(k.data(), GANNET_F32, 1, 2, 128);
  prefill.k_rope = f.kv.rope;
  prefill.v = gannet_tensor_3d(k.data(), GANNET_F32, 1, 2, 128);
  prefill.write = GANNET_ALREADY_WRITTEN;
  prefill.out = gannet_tensor_3d(f.out.data(), GANNET_F32, 1, 2, 128);
  expect_refused(
      {{"[mla dense_prefill] expand is not given", [&] { return gannet_backend_dense_prefill(f.backend, &prefill); }}});
  prefill.expand = [](void*, const gannet_tensor*, const gannet_tensor*, const gannet_tensor*) -> gannet_status {
    return GANNET_UNSUPPORTED;
  };
  expect_refused({{"[gannet_backend_dense_prefill] expand returned 2 (unsupported)",
                   [&] { return gannet_backend_dense_prefill(f.backend, &prefill); }, GANNET_UNSUPPORTED}});
}

// What a shared table refuses is what C++ refuses, and the table and its own generation stay.
TEST(CApi, SharedPageTablesNameWhatIsWrong) {
  Fixture f;
  auto options = sized<gannet_shared_page_table_options>();
  options.num_requests = 1;
  options.page_size = 64;
  options.max_seq_len = 128;
  options.num_pages = 3;
  gannet_shared_page_table *table = nullptr, *other = nullptr, *none = nullptr;
  must(gannet_shared_page_table_create(&options, nullptr, &table));
  must(gannet_shared_page_table_create(&options, nullptr, &other));
  int32_t copied = 7;
  must(gannet_shared_page_table_refresh(table, 5, f.lens, 1, &f.pages, nullptr, &copied));
  EXPECT_EQ(copied, 1);
  must(gannet_shared_page_table_refresh(table, 5, nullptr, -1, nullptr, nullptr, &copied));
  EXPECT_EQ(copied, 0) << "it is done: nothing is looked at";
  auto shape = sized<gannet_capture_shape>();
  shape.num_requests = shape.q_len = 1;
  auto step = sized<gannet_shared_step>();
  step.table = table;
  step.generation = 5;
  step.q_len = 1;
  const auto refresh = [&](auto&& change) {
    return [&f, &step, change] {
      gannet_shared_step s = step;
      change(s);
      return gannet_backend_refresh_shared(f.backend, &s);
    };
  };
  using S = gannet_shared_step;
  const auto create = [&](auto&& change) {
    return [&options, &none, change] {
      auto o = options;
      change(o);
      return gannet_shared_page_table_create(&o, nullptr, &none);
    };
  };
  using O = gannet_shared_page_table_options;
  const int32_t long_lens[1] = {129};
  expect_refused({
      {"[SharedPageTable] num_requests is 0; accepted: 1 and more", create([](O& o) { o.num_requests = 0; })},
      {"page_size is 0", create([](O& o) { o.page_size = 0; })},
      {"max_seq_len is 0", create([](O& o) { o.max_seq_len = 0; })},
      {"lookahead is -1", create([](O& o) { o.lookahead = -1; })},
      {"num_pages is -1", create([](O& o) { o.num_pages = -1; })},
      {"device.kind is 3", create([](O& o) { o.device.kind = 3; })},
      {"generation is 4; accepted: that of the table, 5, or more",
       [&] { return gannet_shared_page_table_refresh(table, 4, f.lens, 1, &f.pages, nullptr, nullptr); }},
      {"seq_lens has 2 entries; accepted: at most num_requests, 1",
       [&] { return gannet_shared_page_table_refresh(table, 6, f.lens, 2, &f.pages, nullptr, nullptr); }},
      {"seq_lens[0] is 129; accepted: 0 to max_seq_len, 128",
       [&] { return gannet_shared_page_table_refresh(table, 6, long_lens, 1, &f.pages, nullptr, nullptr); }},
      {"generation is 5; accepted: more than that of the table, 5",
       [&] { return gannet_shared_page_table_mark(table, 5); }},
      {"a batch of 1 requests of 1 rows was never captured; captured: none", refresh([](S&) {})},
  });
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(gannet_shared_page_table_generation(table), 5u);
  must(gannet_backend_capture_shared(f.backend, &shape, table));
  expect_refused({
      {"captured with another page table", refresh([&](S& s) { s.table = other; })},
      {"captured with another page table", [&] { return gannet_backend_capture_shared(f.backend, &shape, other); }},
      {"captured with another page table", [&] { return gannet_backend_capture(f.backend, &shape); }},
      {"generation is 6; accepted: that of the page table, 5", refresh([](S& s) { s.generation = 6; })},
      {"decode_bound is 3; accepted: 0 to 2", refresh([](S& s) { s.decode_bound = 3; })},
      {"decode_bound is uniform_block", refresh([](S& s) { s.decode_bound = GANNET_UNIFORM_BLOCK; })},
      {"seq_lens.dtype is 9", refresh([](S& s) { s.seq_lens.rank = 1, s.seq_lens.dtype = 9; })},
      {"steps is -1; accepted: 0 and more", refresh([](S& s) { s.steps = -1; })},
  });
  must(refresh([](S&) {})());
  gannet_shared_page_table_free(&table);
  gannet_shared_page_table_free(&other);
  gannet_backend_free(&f.backend);  // after the tables that it captured with
}

// Whether kernels overlap is the context's to say; no bit tells, so this looks at what goes down to the launches.
TEST(CApi, ContextsSayWhetherKernelsOverlap) {
  for (const int32_t no_overlap : {0, 1}) {
    auto options = sized<gannet_context_options>();
    options.no_overlap = no_overlap;
    gannet_context* context = nullptr;
    must(gannet_context_create(&options, &context));
    int place = 0;
    const gannet::Stream stream = context->state->stream(&place);
    EXPECT_EQ(stream.handle, &place);
    EXPECT_EQ(stream.overlap, no_overlap == 0);
    gannet_context_free(&context);
  }
}

TEST(CApi, ContextsMayBringTheirOwnThreads) {
  Fixture f;
  auto options = sized<gannet_context_options>();
  options.num_threads = 2;
  gannet_context* context = nullptr;
  must(gannet_context_create(&options, &context));
  EXPECT_EQ(gannet_run_once(context, &f.topk.op, nullptr), GANNET_OK);
  gannet_context_free(&context);
  options.num_threads = -1;
  must(gannet_context_create(&options, &context));
  EXPECT_EQ(gannet_run_once(context, &f.topk.op, nullptr), GANNET_OK);
  gannet_context_free(&context);
}

}  // namespace
}  // namespace gannet_test

// Page tables that batches share.
#include "gannet/shared_page_table.h"

#include "capi/capi.h"

using namespace gannet;
using namespace gannet::capi;

gannet_status gannet_shared_page_table_create(const gannet_shared_page_table_options* options,
                                              const gannet_memory* memory, gannet_shared_page_table** out) {
  constexpr const char* kName = "gannet_shared_page_table_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    const gannet_shared_page_table_options c = read(kName, "options", options);
    const SharedPageTableOptions o{.num_requests = c.num_requests,
                                   .max_seq_len = c.max_seq_len,
                                   .page_size = c.page_size,
                                   .num_pages = c.num_pages,
                                   .lookahead = c.lookahead};
    *out = new gannet_shared_page_table{std::make_shared<SharedTable>(Memory(kName, memory, c.device), o)};
  });
}

void gannet_shared_page_table_free(gannet_shared_page_table** table) { free_handle(table); }

gannet_status gannet_shared_page_table_refresh(gannet_shared_page_table* table, uint64_t generation,
                                               const int32_t* seq_lens, int64_t num_seq_lens,
                                               const gannet_page_table* pages, void* stream, int32_t* copied) {
  constexpr const char* kName = "gannet_shared_page_table_refresh";
  return guard(kName, [&] {
    SharedPageTable& t = given(kName, "table", table)->state->table;
    if (copied != nullptr) *copied = 0;
    // Of its own generation the table looks at nothing, so nor does this.
    if (generation == t.generation() && generation > 0) return;
    const std::span<const int32_t> lens = span_of(kName, "seq_lens", seq_lens, num_seq_lens);
    const PageTableView p = num_seq_lens > 0 ? pages_of(kName, pages) : PageTableView{};
    const bool done = t.refresh(generation, lens, p, {stream});
    if (copied != nullptr) *copied = done ? 1 : 0;
  });
}

gannet_status gannet_shared_page_table_mark(gannet_shared_page_table* table, uint64_t generation) {
  constexpr const char* kName = "gannet_shared_page_table_mark";
  return guard(kName, [&] { given(kName, "table", table)->state->table.mark(generation); });
}

uint64_t gannet_shared_page_table_generation(const gannet_shared_page_table* table) {
  return table == nullptr ? 0 : table->state->table.generation();
}

gannet_status gannet_shared_page_table_tensors(const gannet_shared_page_table* table, gannet_tensor* seq_lens,
                                               gannet_tensor* pages) {
  constexpr const char* kName = "gannet_shared_page_table_tensors";
  return guard(kName, [&] {
    const SharedPageTable& t = given(kName, "table", table)->state->table;
    if (seq_lens != nullptr) *seq_lens = to_c(t.seq_lens());
    if (pages != nullptr) *pages = to_c(t.pages().pages);
  });
}

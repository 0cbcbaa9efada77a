// Owners of the paged cache: page allocator, page tables, pools, and pages that move.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/format.h"
#include "gannet/cuda.h"
#include "tensors.h"

namespace gannet_python {
using namespace gannet;

namespace {

MemoryResource& memory_of(Device d) { return d.kind == DeviceKind::kCpu ? host_memory() : cuda_memory(d.index); }

std::vector<LayerCaches> layers_of(const LatentPool& latent, const IndexKPool* index) {
  return layer_caches(latent, index);
}

std::vector<PageMove> moves_of(const std::vector<std::pair<int32_t, int32_t>>& pairs) {
  std::vector<PageMove> moves;
  for (const auto& [from, to] : pairs) moves.push_back({from, to});
  return moves;
}

}  // namespace

void bind_pools(nb::module_& m) {
  m.attr("RESERVED_PAGE") = kReservedPage;
  m.def("pages_for", &pages_for, nb::arg("tokens"), nb::arg("page_size") = 64, "ceil(tokens / page_size).");

  nb::class_<PageList>(m, "PageList",
                       "The pages of a request in the order of their tokens, one counted reference each: what "
                       "PageAllocator.acquire gives.\n"
                       "A page is free again when its last reference is gone.")
      .def(nb::init<>())
      .def("__len__", &PageList::size)
      .def_prop_ro("ids", [](const PageList& l) { return std::vector<int32_t>(l.ids().begin(), l.ids().end()); })
      .def("share", &PageList::share, nb::arg("begin"), nb::arg("count"),
           "Further references: a common prefix of two requests.")
      .def(
          "append", [](PageList& l, PageList& tail) { l.append(std::move(tail)); }, nb::arg("tail"),
          "Takes over all of `tail`.")
      .def("truncate", &PageList::truncate, nb::arg("count"), "Gives back all but the first `count`.")
      .def("clear", &PageList::clear);

  nb::class_<PageAllocator>(m, "PageAllocator",
                            "Hands out page numbers 1 .. num_pages - 1; page 0 is reserved and never handed out.")
      .def(nb::init<int64_t>(), nb::arg("num_pages"))
      .def("acquire", &PageAllocator::acquire, nb::arg("count"), "`count` pages, or none: OutOfMemoryError.")
      .def("try_acquire", &PageAllocator::try_acquire, nb::arg("count"), "The same; None where too few are free.")
      .def_prop_ro("num_pages", &PageAllocator::num_pages)
      .def_prop_ro("num_free", &PageAllocator::num_free)
      .def_prop_ro("num_used", &PageAllocator::num_used);

  nb::class_<PageTable>(m, "PageTable", "A page table in host memory: int32 [rows, max_pages], unused cells 0.")
      .def(nb::init<int32_t, int32_t>(), nb::arg("rows"), nb::arg("max_pages"))
      .def_prop_ro("rows", &PageTable::rows)
      .def_prop_ro("max_pages", &PageTable::max_pages)
      .def("num_pages", &PageTable::num_pages, nb::arg("row"))
      .def(
          "set_row",
          [](PageTable& t, int32_t row, nb::handle pages) {
            if (nb::isinstance<PageList>(pages)) return t.set_row(row, nb::cast<PageList&>(pages).ids());
            Reader reader("PageTable.set_row");
            t.set_row(row, reader.ints(pages, "pages"));
          },
          nb::arg("row"), nb::arg("pages"), "Replaces a row; the rest of it becomes 0.")
      .def(
          "append",
          [](PageTable& t, int32_t row, nb::handle pages) {
            if (nb::isinstance<PageList>(pages)) return t.append(row, nb::cast<PageList&>(pages).ids());
            Reader reader("PageTable.append");
            t.append(row, reader.ints(pages, "pages"));
          },
          nb::arg("row"), nb::arg("pages"))
      .def("clear_row", &PageTable::clear_row, nb::arg("row"))
      .def_prop_ro(
          "cells", [](nb::handle self) { return to_python(nb::cast<PageTable&>(self).view().pages, self); },
          "The table itself, int32 [rows, max_pages]: copy it to a device for operations there.");

  nb::class_<SharedPageTable>(
      m, "SharedPageTable",
      "The page table and the lengths of a batch of decode requests, where the kernels read them, shared by captured "
      "batches:\nthose of a target and of its draft, of one backend or of several.\n\n"
      "    table = gannet.SharedPageTable(64, 8192, num_pages=n, lookahead=3, device=\"cuda\")\n"
      "    target.capture(64, q_len=4, table=table)\n"
      "    draft.capture(64, table=table)\n"
      "    # each step, in either order:\n"
      "    table.refresh(step, seq_lens, pages)      # the first call of a step copies, the other finds it done\n"
      "    target.refresh_shared(table, step, q_len=4)\n"
      "    draft.refresh_shared(table, step, seq_lens=accepted_lens, steps=1)\n\n"
      "num_requests: those included that pad a smaller batch. max_seq_len: tokens of a request at most, drafts "
      "included.\n"
      "num_pages: of the pool, against which pages are checked; 0: they are not. lookahead: tokens beyond its length "
      "for\n"
      "which a request has pages. device: \"cpu\", \"cuda\", \"cuda:N\".")
      .def(
          "__init__",
          [](SharedPageTable* self, int32_t num_requests, int64_t max_seq_len, int32_t page_size, int64_t num_pages,
             int32_t lookahead, nb::handle device) {
            new (self) SharedPageTable({.num_requests = num_requests,
                                        .max_seq_len = max_seq_len,
                                        .page_size = page_size,
                                        .num_pages = num_pages,
                                        .lookahead = lookahead},
                                       memory_of(device_of("SharedPageTable", device)));
          },
          nb::arg("num_requests"), nb::arg("max_seq_len"), nb::kw_only(), nb::arg("page_size") = 64,
          nb::arg("num_pages") = 0, nb::arg("lookahead") = 0, nb::arg("device") = "cpu")
      .def(
          "refresh",
          [](SharedPageTable& t, uint64_t generation, nb::handle seq_lens, nb::handle pages, nb::handle stream) {
            Reader reader("SharedPageTable.refresh");
            const std::vector<int32_t> lens = reader.ints(seq_lens, "seq_lens");
            const PageTableView view = pages.is_none() ? PageTableView{} : pages_of(reader, pages);
            return t.refresh(generation, lens, view, stream_of(stream));
          },
          nb::arg("generation"), nb::arg("seq_lens"), nb::arg("pages").none(), nb::arg("stream") = nb::none(),
          "Makes the table that of `generation`, a number that grows from step to step: lengths of up to num_requests\n"
          "requests, the others padding, and their pages, both on the host. False where it is of that generation "
          "already.")
      .def(
          "mark", &SharedPageTable::mark, nb::arg("generation"),
          "Makes it that of a greater generation with what is, or will be when the stream comes there, in its tensors.")
      .def_prop_ro("generation", &SharedPageTable::generation)
      .def_prop_ro("num_requests", [](const SharedPageTable& t) { return t.options().num_requests; })
      .def_prop_ro("max_seq_len", [](const SharedPageTable& t) { return t.options().max_seq_len; })
      .def_prop_ro("page_size", [](const SharedPageTable& t) { return t.options().page_size; })
      .def_prop_ro("lookahead", [](const SharedPageTable& t) { return t.options().lookahead; })
      .def_prop_ro(
          "seq_lens", [](nb::handle self) { return to_python(nb::cast<SharedPageTable&>(self).seq_lens(), self); },
          "int32 [num_requests] on the device, 0: padding. Kernels of your own may write it.")
      .def_prop_ro(
          "pages", [](nb::handle self) { return to_python(nb::cast<SharedPageTable&>(self).pages().pages, self); },
          "int32 [num_requests, columns] on the device.");

  nb::class_<LatentPool>(
      m, "LatentPool",
      "Memory for the latent rows of all layers; page 0 of every layer is cleared.\n\n"
      "format, latent_dim, rope_dim, scale: as of LatentCache. device: \"cpu\", \"cuda\", \"cuda:N\".")
      .def(
          "__init__",
          [](LatentPool* self, int32_t num_layers, int64_t num_pages, const std::string& format, int32_t page_size,
             int32_t latent_dim, int32_t rope_dim, float scale, nb::handle device) {
            constexpr const char* kName = "LatentPool";
            new (self) LatentPool({.num_layers = num_layers,
                                   .format = named(kName, "format", format, kLatentFormats),
                                   .geometry = {latent_dim, rope_dim},
                                   .num_pages = num_pages,
                                   .page_size = page_size,
                                   .scale = scale},
                                  memory_of(device_of(kName, device)));
          },
          nb::arg("num_layers"), nb::arg("num_pages"), nb::kw_only(), nb::arg("format") = "bf16",
          nb::arg("page_size") = 64, nb::arg("latent_dim") = 512, nb::arg("rope_dim") = 64, nb::arg("scale") = 0.0f,
          nb::arg("device") = "cpu")
      .def(
          "layer",
          [](nb::handle self, int32_t layer) {
            return LatentCache{nb::cast<LatentPool&>(self).layer(layer), nb::borrow(self)};
          },
          nb::arg("layer"), "The LatentCache of a layer.")
      .def_prop_ro("num_layers", [](const LatentPool& p) { return p.options().num_layers; })
      .def_prop_ro("num_pages", [](const LatentPool& p) { return p.options().num_pages; })
      .def_prop_ro("page_size", [](const LatentPool& p) { return p.options().page_size; })
      .def_prop_ro("num_slots", &LatentPool::num_slots)
      .def_prop_ro("token_bytes", [](const LatentPool& p) { return p.sizes().token_bytes; })
      .def_prop_ro("total_bytes", [](const LatentPool& p) { return p.sizes().total_bytes; });

  nb::class_<IndexKPool>(
      m, "IndexKPool",
      "Memory for the index keys of the layers that have an indexer (`layers`, ascending); page 0 is cleared.\n\n"
      "format, scale_format, head_dim, hadamard: as of IndexCache. device: \"cpu\", \"cuda\", \"cuda:N\".")
      .def(
          "__init__",
          [](IndexKPool* self, std::vector<int32_t> layers, int64_t num_pages, const std::string& format,
             const std::string& scale_format, int32_t page_size, int32_t head_dim, bool hadamard, nb::handle device) {
            constexpr const char* kName = "IndexKPool";
            new (self) IndexKPool({.layers = std::move(layers),
                                   .format = named(kName, "format", format, kIndexKFormats),
                                   .scale_format = named(kName, "scale_format", scale_format, kScaleFormats),
                                   .head_dim = head_dim,
                                   .num_pages = num_pages,
                                   .page_size = page_size,
                                   .hadamard = hadamard},
                                  memory_of(device_of(kName, device)));
          },
          nb::arg("layers"), nb::arg("num_pages"), nb::kw_only(), nb::arg("format") = "e4m3",
          nb::arg("scale_format") = "fp32", nb::arg("page_size") = 64, nb::arg("head_dim") = 128,
          nb::arg("hadamard") = false, nb::arg("device") = "cpu")
      .def(
          "layer",
          [](nb::handle self, int32_t layer) {
            return IndexCache{nb::cast<IndexKPool&>(self).layer(layer), nb::borrow(self)};
          },
          nb::arg("layer"), "The IndexCache of a layer that has one.")
      .def("has_layer", &IndexKPool::has_layer, nb::arg("layer"))
      .def_prop_ro("num_pages", [](const IndexKPool& p) { return p.options().num_pages; })
      .def_prop_ro("page_size", [](const IndexKPool& p) { return p.options().page_size; })
      .def_prop_ro("token_bytes", [](const IndexKPool& p) { return p.sizes().token_bytes; })
      .def_prop_ro("total_bytes", [](const IndexKPool& p) { return p.sizes().total_bytes; });

  m.def(
      "copy_pages",
      [](const LatentPool& latent, const IndexKPool* index, const std::vector<std::pair<int32_t, int32_t>>& moves,
         nb::handle stream) { copy_pages(layers_of(latent, index), moves_of(moves), stream_of(stream)); },
      nb::arg("latent"), nb::arg("index").none(), nb::arg("moves"), nb::arg("stream") = nb::none(),
      "Copies pages (from, to) in every layer of both pools, one after the other.");
  m.def(
      "exported_bytes",
      [](const LatentPool& latent, const IndexKPool* index, int64_t num_pages) {
        return exported_bytes(layers_of(latent, index), num_pages);
      },
      nb::arg("latent"), nb::arg("index").none(), nb::arg("num_pages"), "Bytes of export_pages for so many pages.");
  m.def(
      "export_pages",
      [](const LatentPool& latent, const IndexKPool* index, nb::handle pages, nb::handle buffer, nb::handle stream) {
        Reader reader("export_pages");
        const std::vector<int32_t> ids =
            nb::isinstance<PageList>(pages)
                ? std::vector<int32_t>(nb::cast<PageList&>(pages).ids().begin(), nb::cast<PageList&>(pages).ids().end())
                : reader.ints(pages, "pages");
        const TensorView b = reader.tensor(buffer, "buffer", Access::kWrite);
        export_pages(layers_of(latent, index), ids,
                     {static_cast<std::byte*>(b.data), static_cast<size_t>(b.num_elements()) * size_of(b.dtype)},
                     stream_of(stream));
      },
      nb::arg("latent"), nb::arg("index").none(), nb::arg("pages"), nb::arg("buffer"), nb::arg("stream") = nb::none(),
      "Copies pages of all layers into a host buffer (uint8, exactly exported_bytes), in the order docs/kv_layouts.md "
      "gives.");
  m.def(
      "import_pages",
      [](const LatentPool& latent, const IndexKPool* index, nb::handle pages, nb::handle buffer, nb::handle stream) {
        Reader reader("import_pages");
        const std::vector<int32_t> ids =
            nb::isinstance<PageList>(pages)
                ? std::vector<int32_t>(nb::cast<PageList&>(pages).ids().begin(), nb::cast<PageList&>(pages).ids().end())
                : reader.ints(pages, "pages");
        const TensorView b = reader.tensor(buffer, "buffer");
        import_pages(layers_of(latent, index), ids,
                     {static_cast<const std::byte*>(b.data), static_cast<size_t>(b.num_elements()) * size_of(b.dtype)},
                     stream_of(stream));
      },
      nb::arg("latent"), nb::arg("index").none(), nb::arg("pages"), nb::arg("buffer"), nb::arg("stream") = nb::none(),
      "Copies a buffer of export_pages into pages of all layers.");
}

}  // namespace gannet_python

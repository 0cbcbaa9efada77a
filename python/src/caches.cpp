// LatentCache, IndexCache and Pages: views of the caller's memory with the format that its bytes have.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "core/format.h"
#include "tensors.h"

namespace gannet_python {
using namespace gannet;

namespace {

int64_t bytes_of(const TensorView& v, int dim) {
  return v.stride[static_cast<size_t>(dim)] * static_cast<int64_t>(size_of(v.dtype));
}

/// Pages of a cache tensor: [pages, page_size, row], [pages, page_size, 1, row] or [pages, bytes of a page].
struct Pages {
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t page_stride_bytes = 0;
  int64_t row_elements = 0;  // 0: [pages, bytes of a page]
  int64_t row_stride_bytes = 0;
  int64_t page_elements = 0;  // of [pages, bytes of a page]
};

Pages pages_of_tensor(const char* function, const TensorView& v, std::optional<int64_t> page_size) {
  Pages p;
  if (v.rank == 4 && v.shape[2] != 1)
    fail_argument(function, "tensor is {}; accepted: one row a token (of several heads take tensor[:, :, head])",
                  describe(v));
  const int last = v.rank - 1;
  if (v.rank < 2 || (v.shape[static_cast<size_t>(last)] > 1 && v.stride[static_cast<size_t>(last)] != 1))
    fail_argument(
        function,
        "tensor is {}; accepted: [pages, page_size, row], [pages, page_size, 1, row] or [pages, bytes of a page], "
        "the last dimension contiguous",
        describe(v));
  p.num_pages = v.shape[0];
  p.page_stride_bytes = bytes_of(v, 0);
  if (v.rank == 2) {
    if (!page_size)
      fail_argument(function,
                    "page_size is not given; accepted: tokens of a page, with a tensor [pages, bytes of a page]");
    p.page_size = *page_size;
    p.page_elements = v.shape[1];
  } else {
    p.page_size = v.shape[1];
    if (page_size && *page_size != p.page_size)
      fail_argument(function, "page_size is {}; accepted: {}, that of the tensor", *page_size, p.page_size);
    p.row_elements = v.shape[static_cast<size_t>(last)];
    p.row_stride_bytes = p.page_size > 1 ? bytes_of(v, 1) : p.row_elements * static_cast<int64_t>(size_of(v.dtype));
  }
  // Strides of dimensions with one entry are anything: one page lies wherever.
  if (p.num_pages <= 1)
    p.page_stride_bytes = std::max(p.page_stride_bytes, p.page_size * std::max(p.row_stride_bytes, int64_t{1}));
  return p;
}

DType bytes_dtype(LatentFormat f) {
  return f == LatentFormat::kF32 ? DType::kF32 : f == LatentFormat::kBf16 ? DType::kBf16 : DType::kE4m3;
}
DType bytes_dtype(IndexKFormat f) {
  return f == IndexKFormat::kF32 ? DType::kF32 : f == IndexKFormat::kBf16 ? DType::kBf16 : DType::kE4m3;
}

LatentCache latent_cache(nb::object tensor, std::optional<std::string> format, int32_t latent_dim, int32_t rope_dim,
                         std::optional<int64_t> page_size, float scale) {
  constexpr const char* kName = "LatentCache";
  Reader reader(kName);
  const TensorView v = reader.tensor(tensor, "tensor");
  const Pages p = pages_of_tensor(kName, v, page_size);
  LatentCacheView c;
  c.data = v.data;
  c.device = v.device;
  c.geometry = {latent_dim, rope_dim};
  c.num_pages = p.num_pages;
  c.page_size = static_cast<int32_t>(p.page_size);
  c.page_stride_bytes = p.page_stride_bytes;
  c.scale = scale;
  const bool bytes = v.dtype == DType::kU8 || v.dtype == DType::kE4m3;
  if (format) c.format = named(kName, "format", *format, kLatentFormats);
  else if (v.dtype == DType::kF32) c.format = LatentFormat::kF32;
  else if (v.dtype == DType::kBf16) c.format = LatentFormat::kBf16;
  else if (bytes && p.row_elements == latent_row_bytes(LatentFormat::kPacked656, c.geometry))
    c.format = LatentFormat::kPacked656;
  else if (v.dtype == DType::kE4m3 && p.row_elements == c.geometry.width()) c.format = LatentFormat::kE4m3;
  else
    fail_argument(kName,
                  "format is not given and tensor is {}; accepted without: fp32 or bf16 [pages, page_size, {}], e4m3 "
                  "the same, one-byte [pages, page_size, {}]",
                  describe(v), c.geometry.width(), latent_row_bytes(LatentFormat::kPacked656, c.geometry));
  if (!bytes && v.dtype != bytes_dtype(c.format))
    fail_argument(kName, "tensor is {}; accepted for format \"{}\": that dtype, or bytes", describe(v),
                  name_of(c.format, kLatentFormats));
  const int64_t row = latent_row_bytes(c.format, c.geometry);
  if (p.row_elements != 0) {
    if (p.row_elements * static_cast<int64_t>(size_of(v.dtype)) != row)
      fail_argument(kName, "tensor is {}; accepted for format \"{}\" of {} + {}: {} bytes a row", describe(v),
                    name_of(c.format, kLatentFormats), latent_dim, rope_dim, row);
    if (p.row_stride_bytes != row) c.row_stride_bytes = p.row_stride_bytes;
  } else if (p.page_elements * static_cast<int64_t>(size_of(v.dtype)) < p.page_size * row) {
    fail_argument(kName, "tensor is {}; accepted for format \"{}\": {} bytes a page", describe(v),
                  name_of(c.format, kLatentFormats), p.page_size * row);
  }
  return {c, std::move(tensor)};
}

IndexCache index_cache(nb::object tensor, std::optional<std::string> format, int32_t head_dim,
                       std::optional<int64_t> page_size, const std::string& scale_format, bool hadamard) {
  constexpr const char* kName = "IndexCache";
  Reader reader(kName);
  const TensorView v = reader.tensor(tensor, "tensor");
  const Pages p = pages_of_tensor(kName, v, page_size);
  IndexCacheView c;
  c.data = v.data;
  c.device = v.device;
  c.head_dim = head_dim;
  c.num_pages = p.num_pages;
  c.page_size = static_cast<int32_t>(p.page_size);
  c.page_stride_bytes = p.page_stride_bytes;
  c.scale_format = named(kName, "scale_format", scale_format, kScaleFormats);
  c.hadamard = hadamard;
  const bool bytes = v.dtype == DType::kU8 || v.dtype == DType::kE4m3;
  if (format) c.format = named(kName, "format", *format, kIndexKFormats);
  else if (v.dtype == DType::kF32) c.format = IndexKFormat::kF32;
  else if (v.dtype == DType::kBf16) c.format = IndexKFormat::kBf16;
  else c.format = IndexKFormat::kE4m3;
  if (!bytes && v.dtype != bytes_dtype(c.format))
    fail_argument(kName, "tensor is {}; accepted for format \"{}\": that dtype, or bytes", describe(v),
                  name_of(c.format, kIndexKFormats));
  const int64_t token = index_k_token_bytes(c.format, head_dim);
  if (p.row_elements != 0) {
    if (p.row_elements * static_cast<int64_t>(size_of(v.dtype)) != token || p.row_stride_bytes != token)
      fail_argument(kName,
                    "tensor is {}; accepted for format \"{}\" of {} values: {} bytes a token, without gaps in a page",
                    describe(v), name_of(c.format, kIndexKFormats), head_dim, token);
  } else if (p.page_elements * static_cast<int64_t>(size_of(v.dtype)) < p.page_size * token) {
    fail_argument(kName, "tensor is {}; accepted for format \"{}\": {} bytes a page", describe(v),
                  name_of(c.format, kIndexKFormats), p.page_size * token);
  }
  return {c, std::move(tensor)};
}

template <class View>
nb::object page_bytes(const View& c, int64_t bytes, nb::handle owner) {
  TensorView v;
  v.data = c.data;
  v.dtype = DType::kU8;
  v.rank = 2;
  v.shape = {c.num_pages, bytes};
  v.stride = {c.page_stride_bytes, 1};
  v.device = c.device;
  return to_python(v, owner);
}

PageTableRef csr_pages(nb::object indptr, nb::object indices) {
  Reader reader("Pages");
  PageTableRef r{PageTableView::csr(reader.tensor(indptr, "indptr"), reader.tensor(indices, "indices")), {}};
  r.owners = {std::move(indptr), std::move(indices)};
  return r;
}

PageTableRef padded_pages(nb::object table, nb::object row_indices) {
  Reader reader("Pages");
  PageTableRef r;
  nb::object owner = table;
  if (nb::isinstance<PageTable>(table)) {
    r.view = nb::cast<PageTable&>(table).view(reader.optional(row_indices, "row_indices"));
  } else {
    r.view = PageTableView::padded(reader.tensor(table, "table"), reader.optional(row_indices, "row_indices"));
  }
  r.owners = {std::move(owner), std::move(row_indices)};
  return r;
}

}  // namespace

PageTableView pages_of(Reader& reader, nb::handle object) {
  if (nb::isinstance<PageTableRef>(object)) return nb::cast<PageTableRef&>(object).view;
  if (nb::isinstance<PageTable>(object)) return nb::cast<PageTable&>(object).view();
  if (nb::isinstance<nb::tuple>(object) && nb::len(object) == 2) {
    const nb::tuple pair = nb::cast<nb::tuple>(object);
    return PageTableView::csr(reader.tensor(pair[0], "pages.indptr"), reader.tensor(pair[1], "pages.indices"));
  }
  return PageTableView::padded(reader.tensor(object, "pages"));
}

void bind_caches(nb::module_& m) {
  nb::class_<LatentCache>(
      m, "LatentCache",
      "The latent rows of one layer, where a tensor of the caller's holds them (never copied).\n\n"
      "tensor: [pages, page_size, row], [pages, page_size, 1, row], or, with page_size, [pages, bytes of a page]. "
      "Pages may\n"
      "  lie apart (stride of dimension 0), and rows too where the format has its rows in one piece.\n"
      "format: \"fp32\" and \"bf16\" [latent | rope]; \"e4m3\" the same with one `scale` for all (stored = x / "
      "scale);\n"
      "  \"packed656\": 512 e4m3, 4 float32 scales, 64 bf16, as FlashMLA and vLLM have it; \"e4m3_per_token\": planes "
      "of\n"
      "  e4m3 latents, one float32 scale a token, bf16 rope. None: by dtype and width; \"e4m3_per_token\" must be "
      "named.\n"
      "latent_dim, rope_dim: widths of the two parts, 512 and 64 for DeepSeek-V3, V3.2 and GLM-5.\n"
      "scale: \"e4m3\" only, finite and positive.\n\n"
      "Raises InvalidArgumentError for tensors that are no such pages. docs/kv_layouts.md has every byte.")
      .def(
          "__init__",
          [](LatentCache* self, nb::object tensor, std::optional<std::string> format, int32_t latent_dim,
             int32_t rope_dim, std::optional<int64_t> page_size, float scale) {
            new (self)
                LatentCache(latent_cache(std::move(tensor), std::move(format), latent_dim, rope_dim, page_size, scale));
          },
          nb::arg("tensor"), nb::kw_only(), nb::arg("format") = nb::none(), nb::arg("latent_dim") = 512,
          nb::arg("rope_dim") = 64, nb::arg("page_size") = nb::none(), nb::arg("scale") = 0.0f)
      .def_prop_ro("format", [](const LatentCache& c) { return name_of(c.view.format, kLatentFormats); })
      .def_prop_ro("latent_dim", [](const LatentCache& c) { return c.view.geometry.latent_dim; })
      .def_prop_ro("rope_dim", [](const LatentCache& c) { return c.view.geometry.rope_dim; })
      .def_prop_ro("num_pages", [](const LatentCache& c) { return c.view.num_pages; })
      .def_prop_ro("page_size", [](const LatentCache& c) { return c.view.page_size; })
      .def_prop_ro("page_stride_bytes", [](const LatentCache& c) { return c.view.page_stride_bytes; })
      .def_prop_ro("row_stride_bytes", [](const LatentCache& c) { return c.view.row_stride_bytes; })
      .def_prop_ro("scale", [](const LatentCache& c) { return c.view.scale; })
      .def_prop_ro("num_slots", [](const LatentCache& c) { return c.view.num_slots(); })
      .def_prop_ro("device", [](const LatentCache& c) { return to_string(c.view.device); })
      .def_prop_ro(
          "pages",
          [](nb::handle self) {
            const auto& c = nb::cast<LatentCache&>(self);
            return page_bytes(c.view, c.view.page_size * latent_row_bytes(c.view.format, c.view.geometry), self);
          },
          "uint8 [num_pages, bytes of a page] over the same memory (NumPy on the CPU, else an object with "
          "__dlpack__).");

  nb::class_<IndexCache>(
      m, "IndexCache",
      "The index keys of one layer, where a tensor of the caller's holds them (never copied).\n\n"
      "tensor: [pages, page_size, row], [pages, page_size, 1, row], or, with page_size, [pages, bytes of a page].\n"
      "format: \"fp32\", \"bf16\" [head_dim] a token; \"e4m3\": a page holds page_size * head_dim e4m3 values, then "
      "page_size\n"
      "  float32 scales, as DeepGEMM and vLLM have it (nominally head_dim + 4 bytes a token). None: by dtype.\n"
      "scale_format: how scales are written, \"fp32\" (amax / 448) or \"power_of_two\"; readers take any.\n"
      "hadamard: keys are kept rotated (gannet.hadamard).\n\n"
      "Raises InvalidArgumentError for tensors that are no such pages.")
      .def(
          "__init__",
          [](IndexCache* self, nb::object tensor, std::optional<std::string> format, int32_t head_dim,
             std::optional<int64_t> page_size, const std::string& scale_format, bool hadamard) {
            new (self) IndexCache(
                index_cache(std::move(tensor), std::move(format), head_dim, page_size, scale_format, hadamard));
          },
          nb::arg("tensor"), nb::kw_only(), nb::arg("format") = nb::none(), nb::arg("head_dim") = 128,
          nb::arg("page_size") = nb::none(), nb::arg("scale_format") = "fp32", nb::arg("hadamard") = false)
      .def_prop_ro("format", [](const IndexCache& c) { return name_of(c.view.format, kIndexKFormats); })
      .def_prop_ro("scale_format", [](const IndexCache& c) { return name_of(c.view.scale_format, kScaleFormats); })
      .def_prop_ro("head_dim", [](const IndexCache& c) { return c.view.head_dim; })
      .def_prop_ro("num_pages", [](const IndexCache& c) { return c.view.num_pages; })
      .def_prop_ro("page_size", [](const IndexCache& c) { return c.view.page_size; })
      .def_prop_ro("page_stride_bytes", [](const IndexCache& c) { return c.view.page_stride_bytes; })
      .def_prop_ro("hadamard", [](const IndexCache& c) { return c.view.hadamard; })
      .def_prop_ro("num_slots", [](const IndexCache& c) { return c.view.num_slots(); })
      .def_prop_ro("device", [](const IndexCache& c) { return to_string(c.view.device); })
      .def_prop_ro(
          "pages",
          [](nb::handle self) {
            const auto& c = nb::cast<IndexCache&>(self);
            return page_bytes(c.view, c.view.page_size * index_k_token_bytes(c.view.format, c.view.head_dim), self);
          },
          "uint8 [num_pages, bytes of a page] over the same memory (NumPy on the CPU, else an object with "
          "__dlpack__).");

  nb::class_<PageTableRef>(m, "Pages",
                           "A page table for calls: Pages(table, row_indices) with table an int32 tensor [rows, "
                           "max_pages] or a PageTable, and\n"
                           "optionally the row of each request, int32 [num_requests]; or Pages.csr(indptr, indices): "
                           "pages of request i are\n"
                           "indices[indptr[i]:indptr[i + 1]]. Operations also take the tensor, the PageTable, or the "
                           "pair (indptr, indices).")
      .def(
          "__init__",
          [](PageTableRef* self, nb::object table, nb::object row_indices) {
            new (self) PageTableRef(padded_pages(std::move(table), std::move(row_indices)));
          },
          nb::arg("table"), nb::arg("row_indices") = nb::none())
      .def_static("csr", &csr_pages, nb::arg("indptr"), nb::arg("indices"));
}

}  // namespace gannet_python

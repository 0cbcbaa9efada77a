#include "model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "model/json_file.h"

namespace gannet {
inline namespace v0 {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian and is read in place");

constexpr const char* kFunction = "safetensors";
constexpr size_t kLengthBytes = 8;
// The reference implementation's bound; a header of 1,000,000 tensors at 100 bytes each.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRank = 8;

struct StoredType {
  const char* name;
  int64_t size;
  bool readable;
  DType dtype;
};
// Every whole-byte type of the format. Those without a DType here are measured, listed and never read.
constexpr StoredType kTypes[] = {
    {"F32", 4, true, DType::kF32},      {"BF16", 2, true, DType::kBf16},   {"F16", 2, true, DType::kF16},
    {"F8_E4M3", 1, true, DType::kE4m3}, {"U8", 1, true, DType::kU8},       {"I32", 4, true, DType::kI32},
    {"I64", 8, true, DType::kI64},      {"BOOL", 1, false, DType::kU8},    {"I8", 1, false, DType::kU8},
    {"F8_E5M2", 1, false, DType::kU8},  {"F8_E8M0", 1, false, DType::kU8}, {"I16", 2, false, DType::kU8},
    {"U16", 2, false, DType::kU8},      {"U32", 4, false, DType::kU8},     {"F64", 8, false, DType::kU8},
    {"U64", 8, false, DType::kU8},
};

const char* stored_name(DType t) {
  for (const StoredType& type : kTypes)
    if (type.readable && type.dtype == t) return type.name;
  return "?";
}

const StoredType* find_type(const std::string& name) {
  for (const StoredType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", shape[i]);
  return text + "]";
}

struct Region {
  uint64_t begin;
  uint64_t end;
  TensorRef tensor;
};

/// One entry of the header; data pointers are set once the whole header is known to be sound.
Region read_entry(const std::string& file, const std::string& name, const Json& value, uint64_t data_bytes) {
  const JsonObject entry(kFunction, file, fmt::format("tensor {}", show_text(name)), value);
  Region region{};
  TensorRef& t = region.tensor;
  t.name = name;
  t.file = file;
  t.dtype_name = entry.string("dtype");
  const StoredType* type = find_type(t.dtype_name);
  if (type == nullptr) {
    std::string names;
    for (const StoredType& known : kTypes) names += fmt::format("{}{}", names.empty() ? "" : ", ", known.name);
    entry.refuse("dtype", names);
  }
  t.readable = type->readable;
  t.dtype = type->dtype;

  const std::vector<Json>& shape = entry.array("shape");
  if (shape.size() > kMaxRank) entry.refuse("shape", fmt::format("at most {} sizes", kMaxRank));
  int64_t bytes = type->size;
  bool empty = false;
  bool overflow = false;
  for (const Json& size : shape) {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (!size.is_number_unsigned() || size.get<uint64_t>() > kMax)
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {} has the size {}; accepted: whole numbers from 0", file,
           entry.field("shape"), show(size));
    const auto n = static_cast<int64_t>(size.get<uint64_t>());
    t.shape.push_back(n);
    empty = empty || n == 0;
    // The product is only wrong to overflow if no size is 0.
    if (n != 0 && !overflow) overflow = __builtin_mul_overflow(bytes, n, &bytes);
  }
  if (empty) bytes = 0;
  if (overflow && !empty)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: {} is {}; its size in bytes exceeds 2^63 - 1", file,
         entry.field("shape"), shape_text(t.shape));
  t.num_bytes = bytes;

  const std::vector<Json>& offsets = entry.array("data_offsets");
  if (offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
    entry.refuse("data_offsets", "[begin, end], two whole numbers from 0");
  region.begin = offsets[0].get<uint64_t>();
  region.end = offsets[1].get<uint64_t>();
  if (region.begin > region.end || region.end > data_bytes)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: {} is [{}, {}]; accepted: begin <= end <= {}, the bytes of data",
         file, entry.field("data_offsets"), region.begin, region.end, data_bytes);
  if (region.end - region.begin != static_cast<uint64_t>(bytes))
    fail(ErrorCode::kCorruptFile, kFunction, "{}: {} is [{}, {}], {} bytes; {} takes {}", file,
         entry.field("data_offsets"), region.begin, region.end, region.end - region.begin, describe(t), bytes);
  return region;
}

/// Throws unless the regions, sorted by offset, cover [0, data_bytes) exactly.
void check_cover(const std::string& file, const std::vector<Region>& regions, uint64_t data_bytes) {
  uint64_t position = 0;
  const Region* before = nullptr;
  for (const Region& r : regions) {
    if (r.begin < position)
      fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} begins at {} and overlaps tensor {}, which ends at {}",
           file, show_text(r.tensor.name), r.begin, show_text(before->tensor.name), before->end);
    if (r.begin > position)
      fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} begins at {}; bytes {} to {} belong to no tensor", file,
           show_text(r.tensor.name), r.begin, position, r.begin);
    position = r.end;
    before = &r;
  }
  if (position != data_bytes)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: the tensors end at {}; the file has {} bytes of data", file, position,
         data_bytes);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int fd = open_regular(path);
  if (fd < 0) {
    const ErrorCode code = open_error_code(errno);
    fail(code, kFunction, "{}: cannot be opened: {}", path, std::strerror(errno));
  }
  struct stat s;
  if (::fstat(fd, &s) != 0) {
    const int error = errno;
    ::close(fd);
    fail(ErrorCode::kDevice, kFunction, "{}: {}", path, std::strerror(error));
  }
  if (!S_ISREG(s.st_mode)) {
    ::close(fd);
    fail(ErrorCode::kCorruptFile, kFunction, "{}: is not a regular file", path);
  }
  size_ = static_cast<size_t>(s.st_size);
  if (size_ == 0) {  // mmap refuses a length of 0
    ::close(fd);
    return;
  }
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);  // the mapping keeps the file
  if (data == MAP_FAILED)
    fail(ErrorCode::kDevice, kFunction, "{}: cannot be mapped ({} bytes): {}", path, size_, std::strerror(error));
  data_ = static_cast<std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::will_need() const noexcept {
  if (data_ != nullptr) ::madvise(data_, size_, MADV_WILLNEED);  // advice: a failure changes nothing
}

int64_t TensorRef::num_elements() const noexcept {
  for (const int64_t d : shape)
    if (d == 0) return 0;
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;  // fits: num_bytes did
  return n;
}

std::string describe(const TensorRef& t) { return t.dtype_name + shape_text(t.shape); }

void check_tensor(const char* function, const TensorRef& t, std::initializer_list<DType> dtypes,
                  std::span<const int64_t> shape) {
  const bool dtype_fits = t.readable && std::find(dtypes.begin(), dtypes.end(), t.dtype) != dtypes.end();
  if (dtype_fits && std::equal(t.shape.begin(), t.shape.end(), shape.begin(), shape.end())) return;
  std::string names;
  for (const DType d : dtypes) names += fmt::format("{}{}", names.empty() ? "" : " or ", stored_name(d));
  fail(ErrorCode::kCorruptFile, function, "{}: tensor {} is {}; accepted: {} {}", t.file, show_text(t.name),
       describe(t), names, shape_text(shape));
}

void check_values_dtype(const TensorRef& t, DType accepted) {
  if (!t.readable || t.dtype != accepted)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} is {}; accepted: {}", t.file, show_text(t.name),
         describe(t), stored_name(accepted));
}

void TensorRef::to_float(float* out) const {
  const int64_t n = num_elements();
  if (readable && dtype == DType::kF32) {
    if (n > 0) std::memcpy(out, data, static_cast<size_t>(num_bytes));
  } else if (readable && dtype == DType::kBf16) {
    const auto* x = reinterpret_cast<const Bf16*>(data);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i].to_float();
  } else if (readable && dtype == DType::kE4m3) {
    float table[256];
    for (int code = 0; code < 256; ++code) table[code] = E4m3{static_cast<uint8_t>(code)}.to_float();
    const auto* x = reinterpret_cast<const uint8_t*>(data);
    for (int64_t i = 0; i < n; ++i) out[i] = table[x[i]];
  } else {
    fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} is {}; accepted: F32, BF16 or F8_E4M3", file,
         show_text(name), describe(*this));
  }
}

struct SafetensorsFile::State {
  std::unique_ptr<MappedFile> mapping;  // absent for parse()
  std::string path;
  int64_t num_bytes = 0;
  std::map<std::string, std::string> metadata;
  std::vector<TensorRef> tensors;
  // Copies of tensors whose place in the file is no multiple of their element size: rare, since writers sort by size.
  std::vector<std::unique_ptr<std::byte[]>> realigned;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<State> state) : state_(std::move(state)) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  auto mapping = std::make_unique<MappedFile>(path);
  SafetensorsFile file = parse(mapping->bytes(), path);
  file.state_->mapping = std::move(mapping);
  return file;
}

SafetensorsFile SafetensorsFile::parse(std::span<const std::byte> bytes, const std::string& name) {
  auto state = std::make_unique<State>();
  state->path = name;
  state->num_bytes = static_cast<int64_t>(bytes.size());
  if (bytes.size() < kLengthBytes)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: has {} bytes; a header length takes {}", name, bytes.size(),
         kLengthBytes);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  const uint64_t rest = bytes.size() - kLengthBytes;
  if (header_bytes > rest)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: header length is {}; the file has {} bytes after it", name,
         header_bytes, rest);
  if (header_bytes > kMaxHeaderBytes)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: header length is {}; accepted: at most {}", name, header_bytes,
         kMaxHeaderBytes);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, header_bytes);
  if (!text.starts_with('{')) fail(ErrorCode::kCorruptFile, kFunction, "{}: the header does not begin with '{{'", name);
  const Json header = parse_json(kFunction, text, name);
  const JsonObject object(kFunction, name, "", header);

  const uint64_t data_bytes = rest - header_bytes;
  const std::byte* data = bytes.data() + kLengthBytes + header_bytes;
  std::vector<Region> regions;
  for (const auto& [key, value] : header.items()) {
    if (key == "__metadata__") {
      const JsonObject metadata(kFunction, name, key, value);
      for (const auto& [k, v] : value.items()) state->metadata[k] = metadata.string(k);
      continue;
    }
    regions.push_back(read_entry(name, key, value, data_bytes));
  }
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
    return std::tie(a.begin, a.end, a.tensor.name) < std::tie(b.begin, b.end, b.tensor.name);
  });
  check_cover(name, regions, data_bytes);

  state->tensors.reserve(regions.size());
  for (Region& r : regions) {
    TensorRef& t = r.tensor;
    t.data = data + r.begin;
    const int64_t size = find_type(t.dtype_name)->size;
    if (t.num_bytes > 0 && reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(size) != 0) {
      auto copy = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(t.num_bytes));
      std::memcpy(copy.get(), t.data, static_cast<size_t>(t.num_bytes));
      t.data = copy.get();
      state->realigned.push_back(std::move(copy));
    }
    state->tensors.push_back(std::move(t));
  }
  std::sort(state->tensors.begin(), state->tensors.end(),
            [](const TensorRef& a, const TensorRef& b) { return a.name < b.name; });
  return SafetensorsFile(std::move(state));
}

const std::string& SafetensorsFile::path() const noexcept { return state_->path; }
const std::vector<TensorRef>& SafetensorsFile::tensors() const noexcept { return state_->tensors; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept { return state_->metadata; }
int64_t SafetensorsFile::num_bytes() const noexcept { return state_->num_bytes; }

void SafetensorsFile::will_need() const noexcept {
  if (state_->mapping != nullptr) state_->mapping->will_need();
}

const TensorRef* SafetensorsFile::find(std::string_view name) const noexcept {
  const auto& tensors = state_->tensors;
  const auto it = std::lower_bound(tensors.begin(), tensors.end(), name,
                                   [](const TensorRef& t, std::string_view n) { return t.name < n; });
  return it != tensors.end() && it->name == name ? &*it : nullptr;
}

const TensorRef& SafetensorsFile::require(std::string_view name, std::initializer_list<DType> dtypes,
                                          std::initializer_list<int64_t> shape) const {
  const TensorRef* t = find(name);
  if (t == nullptr) fail(ErrorCode::kCorruptFile, kFunction, "{}: tensor {} is missing", path(), show_text(name));
  check_tensor(kFunction, *t, dtypes, {shape.begin(), shape.size()});
  return *t;
}

}  // namespace v0
}  // namespace gannet

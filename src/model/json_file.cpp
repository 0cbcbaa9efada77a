#include "model/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <unordered_set>

namespace gannet {
inline namespace v0 {
namespace {

// No real file nests deeper than 6. The bound keeps every later walk over a value shallow.
constexpr int kMaxDepth = 64;
constexpr size_t kMaxShown = 80;
constexpr size_t kMaxParserText = 200;

/// Whether a key can stand in an error as it is: a file may choose its keys too, lines and quotes included.
bool plain(std::string_view key) {
  const auto graphic = [](char c) { return c > ' ' && c < '\x7f' && c != '"' && c != '\\'; };
  return !key.empty() && key.size() <= kMaxShown && std::all_of(key.begin(), key.end(), graphic);
}

struct FileDescriptor {
  int fd;
  ~FileDescriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

int open_regular(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe without a writer would block
}

ErrorCode open_error_code(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case EACCES:
    case EPERM:
    case ELOOP:
    case ENAMETOOLONG: return ErrorCode::kCorruptFile;
    default: return ErrorCode::kDevice;
  }
}

bool file_exists(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0;
}

std::string join_path(const std::string& directory, std::string_view name) {
  std::string path = directory;
  if (!path.empty() && path.back() != '/') path += '/';
  return path.append(name);
}

std::string read_file(const char* function, const std::string& path, int64_t max_bytes) {
  const FileDescriptor file{open_regular(path)};
  if (file.fd < 0) {
    const ErrorCode code = open_error_code(errno);
    fail(code, function, "{}: cannot be opened: {}", path, std::strerror(errno));
  }
  struct stat s;
  if (::fstat(file.fd, &s) != 0) fail(ErrorCode::kDevice, function, "{}: {}", path, std::strerror(errno));
  if (!S_ISREG(s.st_mode)) fail(ErrorCode::kCorruptFile, function, "{}: is not a regular file", path);
  if (s.st_size > max_bytes)
    fail(ErrorCode::kCorruptFile, function, "{}: has {} bytes; accepted: at most {}", path, s.st_size, max_bytes);
  std::string text(static_cast<size_t>(s.st_size), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::read(file.fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(ErrorCode::kDevice, function, "{}: cannot be read: {}", path, std::strerror(errno));
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

Json parse_json(const char* function, std::string_view text, const std::string& file) {
  // One set of keys per open object; an array holds its place in the count of depth alone.
  std::vector<std::unordered_set<std::string>> keys;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) fail(ErrorCode::kCorruptFile, function, "{}: nested deeper than {} levels", file, kMaxDepth);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get_ref<const std::string&>()).second)
      fail(ErrorCode::kCorruptFile, function, "{}: key {} stands twice in one object", file, show(value));
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& e) {
    std::string why = e.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."; the class name tells a reader nothing.
    if (const size_t end = why.find("] "); why.starts_with('[') && end != std::string::npos) why.erase(0, end + 2);
    if (why.size() > kMaxParserText) why = why.substr(0, kMaxParserText) + "...";
    for (char& c : why)
      if (static_cast<unsigned char>(c) < 0x20) c = ' ';
    fail(ErrorCode::kCorruptFile, function, "{}: is not valid JSON: {}", file, why);
  }
}

std::string show_text(std::string_view text) { return show(Json(std::string(text))); }

std::string show(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kMaxShown) {
    size_t end = kMaxShown;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // not inside a character
    text = text.substr(0, end) + "...";
  }
  return text;
}

JsonObject::JsonObject(const char* function, const std::string& file, std::string path, const Json& value)
    : function_(function), file_(&file), path_(std::move(path)), value_(&value) {
  if (!value.is_object())
    fail(ErrorCode::kCorruptFile, function, "{}: {} is {}; accepted: an object", file,
         path_.empty() ? "the content" : path_, show(value));
}

std::string JsonObject::field(std::string_view key) const {
  const std::string name = plain(key) ? std::string(key) : show_text(key);
  return path_.empty() ? name : fmt::format("{}.{}", path_, name);
}

const Json* JsonObject::find(std::string_view key) const {
  const auto it = value_->find(key);
  return it == value_->end() || it->is_null() ? nullptr : &*it;
}

bool JsonObject::given(std::string_view key) const { return find(key) != nullptr; }

const Json& JsonObject::at(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) {
    const bool null = value_->find(key) != value_->end();
    fail(ErrorCode::kCorruptFile, function_, "{}: {} is {}; it is required", *file_, field(key),
         null ? "null" : "missing");
  }
  return *value;
}

std::string JsonObject::shown(std::string_view key) const {
  const auto it = value_->find(key);
  return it == value_->end() ? "missing" : show(*it);
}

void JsonObject::refuse(std::string_view key, std::string_view accepted) const {
  fail(ErrorCode::kCorruptFile, function_, "{}: {} is {}; accepted: {}", *file_, field(key), shown(key), accepted);
}

void JsonObject::unsupported(std::string_view key, std::string_view accepted) const {
  fail(ErrorCode::kUnsupported, function_, "{}: {} is {}; accepted: {}", *file_, field(key), shown(key), accepted);
}

int64_t JsonObject::integer(std::string_view key, int64_t min, int64_t max) const {
  const Json& value = at(key);
  int64_t n = 0;
  bool valid = false;
  if (value.is_number_unsigned()) {
    const auto u = value.get<uint64_t>();
    valid = u <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    n = valid ? static_cast<int64_t>(u) : 0;
  } else if (value.is_number_integer()) {
    valid = true;
    n = value.get<int64_t>();
  } else if (value.is_number_float()) {
    const auto d = value.get<double>();
    valid = std::trunc(d) == d && std::fabs(d) <= 0x1p53;  // NaN and infinity fail both
    n = valid ? static_cast<int64_t>(d) : 0;
  }
  if (!valid || n < min || n > max) refuse(key, fmt::format("a whole number from {} to {}", min, max));
  return n;
}

int64_t JsonObject::integer_or(std::string_view key, int64_t otherwise, int64_t min, int64_t max) const {
  return given(key) ? integer(key, min, max) : otherwise;
}

double JsonObject::number(std::string_view key, double min, double max) const {
  const Json& value = at(key);
  const double d = value.is_number() ? value.get<double>() : std::nan("");
  if (!(d >= min && d <= max)) refuse(key, fmt::format("a number from {} to {}", min, max));
  return d;
}

double JsonObject::number_or(std::string_view key, double otherwise, double min, double max) const {
  return given(key) ? number(key, min, max) : otherwise;
}

bool JsonObject::boolean_or(std::string_view key, bool otherwise) const {
  const Json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(key, "true or false");
  return value->get<bool>();
}

std::string JsonObject::string(std::string_view key) const {
  const Json& value = at(key);
  if (!value.is_string()) refuse(key, "a string");
  return value.get<std::string>();
}

std::string JsonObject::string_or(std::string_view key, std::string_view otherwise) const {
  return given(key) ? string(key) : std::string(otherwise);
}

const std::vector<Json>& JsonObject::array(std::string_view key) const {
  const Json& value = at(key);
  if (!value.is_array()) refuse(key, "an array");
  return value.get_ref<const Json::array_t&>();
}

JsonObject JsonObject::object(std::string_view key) const { return {function_, *file_, field(key), at(key)}; }

}  // namespace v0
}  // namespace gannet

// Reading JSON files that may be hostile: bounded size and depth, no duplicate keys, and errors that name the file, the
// field, the value and what is accepted. Shared by the readers of config.json, tokenizer.json and safetensors headers.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/format.h"
#include "gannet/error.h"

namespace gannet {
inline namespace v0 {

using Json = nlohmann::json;

bool file_exists(const std::string& path);
/// A descriptor for reading, -1 with errno; never waits, whatever kind of file it is.
int open_regular(const std::string& path);
/// What an errno of opening means: kCorruptFile where the path is at fault, else kDevice.
ErrorCode open_error_code(int error);
/// "dir" + "/" + "name".
std::string join_path(const std::string& directory, std::string_view name);
/// The bytes of a regular file of at most max_bytes. Throws Error(kCorruptFile), or Error(kDevice) where reading fails.
std::string read_file(const char* function, const std::string& path, int64_t max_bytes);

/// Parses `text`, which is UTF-8. Throws Error(kCorruptFile) for anything malformed, nested deeper than 64, or with a
/// key twice in one object.
Json parse_json(const char* function, std::string_view text, const std::string& file);

/// A value for an error text: scalars as written (cut at 80 characters), "an object", "an array of 3".
std::string show(const Json& value);
/// A string from a file as it may stand in a one-line error text: control characters escaped, cut at 80 characters.
std::string show_text(std::string_view text);

/// A JSON object with a memory of where it came from. "Given" means present and not null.
class JsonObject {
 public:
  /// Throws unless `value` is an object. `path` is its place in the file: "" or "rope_scaling".
  JsonObject(const char* function, const std::string& file, std::string path, const Json& value);

  const char* function() const noexcept { return function_; }
  const std::string& file() const noexcept { return *file_; }
  const Json& json() const noexcept { return *value_; }
  /// "rope_scaling.factor"; a key that is more than a word is quoted and escaped: "__metadata__.\"two\\nlines\"".
  std::string field(std::string_view key) const;

  bool given(std::string_view key) const;
  /// nullptr where not given.
  const Json* find(std::string_view key) const;
  /// The value; throws where not given.
  const Json& at(std::string_view key) const;

  /// A whole number in [min, max]; 3.0 counts as 3.
  int64_t integer(std::string_view key, int64_t min, int64_t max) const;
  int64_t integer_or(std::string_view key, int64_t otherwise, int64_t min, int64_t max) const;
  /// A finite number in [min, max].
  double number(std::string_view key, double min, double max) const;
  double number_or(std::string_view key, double otherwise, double min, double max) const;
  bool boolean_or(std::string_view key, bool otherwise) const;
  std::string string(std::string_view key) const;
  std::string string_or(std::string_view key, std::string_view otherwise) const;
  const std::vector<Json>& array(std::string_view key) const;
  JsonObject object(std::string_view key) const;

  /// Throws Error(kCorruptFile): "<file>: <field> is <value>; accepted: <accepted>".
  [[noreturn]] void refuse(std::string_view key, std::string_view accepted) const;
  /// The same as Error(kUnsupported): the value is valid, but not implemented here.
  [[noreturn]] void unsupported(std::string_view key, std::string_view accepted) const;

 private:
  std::string shown(std::string_view key) const;

  const char* function_;
  const std::string* file_;
  std::string path_;
  const Json* value_;
};

}  // namespace v0
}  // namespace gannet

// Byte-level BPE from tokenizer.json, as the Hugging Face library runs it for DeepSeek, Kimi and GLM files:
//   added tokens split first (longest first), the Split patterns of the file through PCRE2, bytes to characters,
//   merges.
//
//   auto tokenizer = gannet::Tokenizer::load("models/tiny-dsv32");
//   std::vector<int32_t> ids = tokenizer.encode("Once upon a time");
//   gannet::Tokenizer::Stream stream(tokenizer);
//   for (int32_t id : ids) print(stream.push(id));
//   print(stream.finish());
//
// What is not implemented (other models, normalizers, pre-tokenizers, dropout, ...) is refused when the file is loaded,
// by name. Time is near-linear in the text, whatever the text.
//
// Errors: Error(kCorruptFile, kUnsupported) from loading; Error(kInvalidArgument) for text that is not UTF-8, with the
// offset of the first bad byte, and for negative ids.
// Thread safety: immutable once loaded; any number of threads may encode and decode. A Stream belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gannet {
inline namespace v0 {

struct EncodeOptions {
  /// Put the BOS token in front where the tokenizer's files ask for one. It is not put twice: a text that itself
  /// begins with the BOS token keeps that one (the Hugging Face library adds a second).
  bool add_bos = true;
  /// Read "<|end|>" and the like in the text as letters, not as the special tokens they spell: for text from outside.
  bool special_as_text = false;
};

struct DecodeOptions {
  bool skip_special = true;
};

class Tokenizer {
 public:
  /// From a directory with tokenizer.json and (optional) tokenizer_config.json, or from the path of a tokenizer.json,
  /// whose neighbour tokenizer_config.json is read if it is there.
  static Tokenizer load(const std::string& directory_or_file);
  /// From texts; an empty config text is an absent file. `name` stands for the directory in errors.
  static Tokenizer parse(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                         const std::string& name);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  /// Bytes of the tokens, joined, with U+FFFD for what is not UTF-8 and for ids that name no token (a model's
  /// vocabulary may be padded beyond its tokenizer's).
  std::string decode(std::span<const int32_t> ids, const DecodeOptions& options = {}) const;

  /// One more than the largest id.
  int64_t vocab_size() const noexcept;
  /// The BOS that encode() adds; nullopt where it adds none.
  std::optional<int32_t> bos_id() const noexcept;
  /// Id of a token by its text (special tokens) or by its byte-level spelling (others).
  std::optional<int32_t> find(std::string_view token) const;
  bool is_special(int32_t id) const noexcept;

  /// decode() token by token. A character whose bytes are still incomplete is held back until it is whole.
  class Stream {
   public:
    /// The tokenizer outlives the stream.
    explicit Stream(const Tokenizer& tokenizer, const DecodeOptions& options = {})
        : tokenizer_(&tokenizer), options_(options) {}
    /// Text that became certain with this token; may be empty.
    std::string push(int32_t id);
    /// What was held back, as U+FFFD.
    std::string finish();

   private:
    const Tokenizer* tokenizer_;
    DecodeOptions options_;
    std::string held_;
  };

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace gannet
